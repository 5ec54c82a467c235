"""CORE: windows of row functions as values: their bounds, and how these are written as a namespace of timers and of state."""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK
from holdfast.operators.functions.windows.assigners import Sliding, Tumbling

WINDOWS_OF_A_RECORD_MAX = 1_000
"""Sliding windows in each of which a record is kept in a row table."""
_BOUNDS = Struct(">qq")
bounds_of = _BOUNDS.pack
"""Start and end -> the namespace of that window."""
namespace_bounds = _BOUNDS.unpack
"""The namespace of a window -> (start, end)."""


class TimeWindow(NamedTuple):
    """[start, end), ms since the epoch."""

    start: int
    end: int

    @property
    def max_timestamp(self) -> int:
        """The last ms that is in the window; of the global window, the end of time: the maximum watermark."""
        return self.end - 1 if self.end < MAX_WATERMARK else MAX_WATERMARK

    @property
    def namespace(self) -> bytes:
        """16 bytes: start and end."""
        return bounds_of(self.start, self.end)


GLOBAL_WINDOW = TimeWindow(MIN_WATERMARK, MAX_WATERMARK)
"""That of `Global`."""


def window_of(namespace: bytes) -> TimeWindow:
    """Inverse of `TimeWindow.namespace`."""
    return TimeWindow(*namespace_bounds(namespace))


def slide_of(assigner: Tumbling | Sliding) -> int:
    """ms from the start of one window to that of the next."""
    return assigner.slide_ms if isinstance(assigner, Sliding) else assigner.size_ms


def cleanup_time(window: TimeWindow, lateness_ms: int) -> int:
    """When the state of an event-time window goes: a watermark of so much."""
    return min(window.end - 1 + lateness_ms, MAX_WATERMARK)
