"""Where a checkpoint's time goes, as benchmarks tell it from what REST says."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.pressure import Spent


def subtask(acknowledged_ms: int, *, unaligned: bool = False) -> dict[str, Any]:
    """Acknowledged so long after the trigger."""
    return {
        "ack_timestamp": 1_000 + acknowledged_ms,
        "end_to_end_duration": acknowledged_ms,
        "start_delay": 5,
        "alignment": {"duration": 20},
        "checkpoint": {"sync": 3, "async": 40},
        "unaligned_checkpoint": unaligned,
    }


@pytest.mark.parametrize(
    ("last", "spent"),
    [
        (subtask(70), Spent(5, 20, 3, 40, answer=2, complete=10)),
        (subtask(70, unaligned=True), Spent(5, 0, 3, 40, answer=22, complete=10)),
    ],
    ids=["aligned", "the last barriers came in the asynchronous part"],
)
def test_the_parts_of_the_subtask_that_was_last_make_up_the_whole(last: dict[str, Any], spent: Spent) -> None:
    found = Spent.of({"end_to_end_duration": 80}, [subtask(60), last, subtask(9)])
    assert found == spent
    assert found.start_delay + found.alignment + found.sync + found.asynchronous + found.answer + found.complete == 80


def test_clocks_that_disagree_take_nothing_off() -> None:
    assert Spent.of({"end_to_end_duration": 50}, [subtask(60)]) == Spent(5, 20, 3, 40, answer=0, complete=0)
