"""A real Flink 2.3 answers as the golden file says, by key and type, which the ordinary tests hold our answers against."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.real_flink import real_flink, record
from tests.golden.flink_answers import golden

pytestmark = pytest.mark.compat


@pytest.mark.timeout(900)
def test_flink_answers_as_recorded(tmp_path: Path) -> None:
    """`python -m tests.compat.real_flink` writes the file anew."""
    with real_flink(tmp_path) as flink:
        found = record(flink)
    wanted = golden()
    assert set(found) == set(wanted)
    assert {request: each for request, each in found.items() if each != wanted[request]} == {}
