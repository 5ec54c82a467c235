"""A job that checkpoints ten times a second keeps its workers and its checkpoints while another process floods its coordinator.

How long an acknowledgement takes meanwhile is for `make bench` to say (`benchmarks/flood.py`), on a machine without other work."""

from __future__ import annotations

import pytest

from benchmarks.acks import Row
from benchmarks.flood import HEAD_S, INTERVAL_MS, Phase, measure

pytestmark = pytest.mark.slow

LATE_S = 3.0
"""How much later than its deadline the attacker may see that it was cut: it looks every half second, and has no processor of its
own."""


def check(row: Row, seconds: float) -> None:
    assert row["leases_lost"] == 0, row
    assert row["checkpoints_failed"] == 0, row
    assert int(row["checkpoints"].split("/")[0]) > 0, row
    assert row["acks"] > seconds * 1_000 / INTERVAL_MS, row  # of four workers: a quarter of what an undisturbed machine takes
    assert row["healthz_failed"].startswith("0/"), row
    assert row["viewers_failed"] == 0, row
    assert (row["viewers_answered"] > 0) == bool(row["viewers"]), row
    if row["slow"]:
        assert row["slow_closed"] > 0, row
        assert row["slow_open_s_max"] < HEAD_S + LATE_S, row


@pytest.mark.endurance
def test_no_lease_runs_out_in_a_flood() -> None:
    (row,) = measure(phases=(Phase("both", 5_000, 2),), seconds=6.0)
    assert row["leases_lost"] == 0, row
    assert row["checkpoints_failed"] == 0, row
    assert int(row["checkpoints"].split("/")[0]) > 0, row
    assert row["healthz_failed"].startswith("0/"), row


def test_slow_heads_and_viewers_hold_up_no_acknowledgement() -> None:
    (row,) = measure(phases=(Phase("slow and viewers", slow=200, viewers=2),), seconds=5.0, tls=True)
    check(row, 5.0)


@pytest.mark.endurance
@pytest.mark.parametrize("tls", [False, True])
def test_acknowledgements_are_taken_beside_many_slow_heads_and_viewers(tls: bool) -> None:
    peace, flooded = measure(phases=(Phase("peace"), Phase("slow and viewers", slow=500, viewers=20)), seconds=12.0, tls=tls)
    check(flooded, 12.0)
    assert peace["acks"] > 200, peace
    assert flooded["acks"] > 200, flooded
