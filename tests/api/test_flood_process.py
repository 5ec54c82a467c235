"""A job that checkpoints every second keeps its workers and its checkpoints while another process floods its coordinator."""

from __future__ import annotations

import pytest

from benchmarks.flood import measure

pytestmark = [pytest.mark.slow, pytest.mark.endurance]


def test_no_lease_runs_out_in_a_flood() -> None:
    (row,) = measure(phases=(("both", 5_000, 2),), seconds=6.0)
    assert row["leases_lost"] == 0
    assert row["checkpoints_failed"] == 0
    assert int(row["checkpoints"].split("/")[0]) > 0
    assert row["healthz_failed"].startswith("0/")
