"""Event time: windows, and the bounded-out-of-orderness watermark. CORE: no clock.

A watermark W says that no record with event time <= W follows. A record that is exactly `bound` behind the latest one is
in time, so the watermark is the largest event time seen - bound - 1, as in Flink since 1.11."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import gcd

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.state import duration_ms

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


def is_naive(moment: datetime) -> bool:
    """Whether Python takes it for naive: it has no zone, or one that knows no offset."""
    return moment.tzinfo is None or moment.utcoffset() is None  # pandas' NaT has no zone, and raises when asked for its offset


def datetime_ms(moment: datetime) -> int:
    """ms since the epoch of an aware datetime, rounded down. Raises ValueError on a naive one, whose zone nobody knows."""
    if is_naive(moment):
        raise ValueError(f"{moment!r} is naive: give it a time zone")
    return (moment - EPOCH) // _MILLISECOND


@dataclass(slots=True)
class BoundedOutOfOrderness:
    """The watermark of one subtask whose records come at most `bound_ms` out of order. Never goes back."""

    bound_ms: int
    watermark_ms: int = MIN_WATERMARK

    def advance(self, latest_ms: int) -> int | None:
        """The watermark after records up to event time `latest_ms`; None when it does not rise."""
        watermark_ms = max(latest_ms - self.bound_ms - 1, MIN_WATERMARK)
        if watermark_ms <= self.watermark_ms:
            return None
        # the maximum says that the stream has ended, which no record can know
        self.watermark_ms = min(watermark_ms, MAX_WATERMARK - 1)
        return self.watermark_ms


PANES_MAX = 10_000
"""Of a sliding window."""


class Tumbling:
    """Event-time windows of one size, side by side: [k * size + offset, (k + 1) * size + offset), UTC."""

    def __init__(
        self,
        size: timedelta | int | None = None,
        *,
        days: float = 0,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
        milliseconds: float = 0,
        offset: timedelta | int = 0,
    ) -> None:
        """`size`: a timedelta, or ms; or any of the other units. Raises InvalidConfigError when it is not positive."""
        parts = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds, milliseconds=milliseconds)
        self.size_ms = _size_ms(size, parts)
        self.offset_ms = duration_ms(offset, "the offset of a window") % self.size_ms

    def __repr__(self) -> str:
        return f"Tumbling({self.size_ms} ms{f', offset {self.offset_ms} ms' if self.offset_ms else ''})"


class Sliding:
    """Event-time windows of one size that begin every `slide`: [k * slide + offset, k * slide + offset + size), UTC. A record is in
    each that holds its time: in size / slide of them, or, where the slide is longer than the size, in one or none."""

    def __init__(
        self,
        size: timedelta | int | None = None,
        slide: timedelta | int = 0,
        *,
        days: float = 0,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
        milliseconds: float = 0,
        offset: timedelta | int = 0,
    ) -> None:
        """`size`: as of Tumbling; `slide`: a timedelta, or ms.

        Raises InvalidConfigError when one is not positive, and for a size of more than PANES_MAX panes: a pane is as long as the
        greatest common divisor of both."""
        parts = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds, milliseconds=milliseconds)
        self.size_ms = _size_ms(size, parts)
        self.slide_ms = duration_ms(slide, "the slide of a window")
        if self.slide_ms < 1:
            raise InvalidConfigError(f"the slide of a window must be at least 1 ms, not {self.slide_ms}", setting="slide")
        self.offset_ms = duration_ms(offset, "the offset of a window") % self.slide_ms
        if self.size_ms // self.pane_ms > PANES_MAX:
            raise InvalidConfigError(
                f"a window of {self.size_ms} ms that slides by {self.slide_ms} ms has {self.size_ms // self.pane_ms} panes of "
                f"{self.pane_ms} ms; it may have {PANES_MAX}: take a longer slide, or one that divides the size",
                setting="slide",
            )

    @property
    def pane_ms(self) -> int:
        """The longest time in which no window begins or ends."""
        return gcd(self.size_ms, self.slide_ms)

    def __repr__(self) -> str:
        offset = f", offset {self.offset_ms} ms" if self.offset_ms else ""
        return f"Sliding({self.size_ms} ms by {self.slide_ms} ms{offset})"


def _size_ms(size: timedelta | int | None, parts: timedelta) -> int:
    if size is not None and parts:
        raise InvalidConfigError("give the size of a window once: as size, or in units", setting="size")
    size_ms = duration_ms(parts if size is None else size, "the size of a window")
    if size_ms < 1:
        raise InvalidConfigError(f"the size of a window must be at least 1 ms, not {size_ms}", setting="size")
    return size_ms
