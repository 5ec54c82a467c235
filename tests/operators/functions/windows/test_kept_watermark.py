"""The event time of an operator as its snapshots keep it."""

from __future__ import annotations

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK
from holdfast.operators.functions.windows.kept_watermark import KeptWatermark


def test_the_maximum_of_a_drain_is_not_kept_whatever_comes_behind_it() -> None:
    reached = KeptWatermark()
    assert (reached.current, reached.kept) == (MIN_WATERMARK, MIN_WATERMARK)
    for watermark, expected in ((5, (5, 5)), (3, (5, 5)), (MAX_WATERMARK, (MAX_WATERMARK, 5)), (7, (MAX_WATERMARK, 7))):
        reached.advance(watermark)
        assert (reached.current, reached.kept) == expected
    reached.end_drain()
    assert (reached.current, reached.kept) == (7, 7)
