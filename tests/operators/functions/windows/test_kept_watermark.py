"""The event time of an operator as its snapshots keep it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK
from holdfast.operators.functions.windows.kept_watermark import WATERMARKS, KeptWatermark
from holdfast.statebackends.backend import OperatorListState


def test_the_maximum_of_a_drain_is_not_kept_whatever_comes_behind_it() -> None:
    reached = KeptWatermark()
    assert (reached.current, reached.kept) == (MIN_WATERMARK, MIN_WATERMARK)
    for watermark, expected in ((5, (5, 5)), (3, (5, 5)), (MAX_WATERMARK, (MAX_WATERMARK, 5)), (7, (MAX_WATERMARK, 7))):
        reached.advance(watermark)
        assert (reached.current, reached.kept) == expected
    reached.end_drain()
    assert (reached.current, reached.kept) == (7, 7)


@pytest.mark.parametrize(("restores_in_flight", "expected"), [(False, 90), (True, 40)])
def test_the_highest_of_all_is_restored_and_the_lowest_where_records_are_in_flight(restores_in_flight: bool, expected: int) -> None:
    """What waits in front of the subtask that came least far was in time there, and stays so."""
    entries = OperatorListState(WATERMARKS.name)
    entries.update([moment.to_bytes(8, "big", signed=True) for moment in (90, 40)])
    lists = SimpleNamespace(list_state=lambda name: entries)
    context: Any = SimpleNamespace(operator_state=lists, restores_in_flight=restores_in_flight, uid="window", subtask=0)
    reached = KeptWatermark()
    reached.restore(context)
    assert (reached.current, reached.kept) == (expected, expected)
