"""Window assigners: which windows a record is in. CORE: no clock."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from math import gcd
from typing import Any, Literal, TypeAlias, get_args

from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.state import duration_ms

TimeCharacteristic: TypeAlias = Literal["event", "processing"]
"""By what a window's time goes: event times and watermarks, or the wall clock of the worker when a record arrives."""


def _time_of(time: str) -> bool:
    """Whether it is event time. Raises InvalidConfigError for what is no time characteristic."""
    if time not in get_args(TimeCharacteristic):
        raise InvalidConfigError(f"the time of a window is 'event' or 'processing', not {time!r}", setting="time")
    return time == "event"


LENGTH_MS_MAX = 2**40
"""Of a size, a slide or a gap: an event time and as much more fit 64-bit microseconds."""


def _length_ms(value: timedelta | int | None, parts: timedelta, what: str) -> int:
    """ms of a length given once: as a timedelta, as ms, or in units. Raises InvalidConfigError when it is not positive."""
    if value is not None and parts:
        raise InvalidConfigError(f"give the {what} of a window once: as {what}, or in units", setting=what)
    length_ms = duration_ms(parts if value is None else value, f"the {what} of a window")
    if length_ms < 1:
        raise InvalidConfigError(f"the {what} of a window must be at least 1 ms, not {length_ms}", setting=what)
    if length_ms > LENGTH_MS_MAX:
        raise InvalidConfigError(
            f"the {what} of a window must be at most {LENGTH_MS_MAX} ms (34 years), not {length_ms}; hf.Global() never ends",
            setting=what,
        )
    return length_ms


class Tumbling:
    """Windows of one size, side by side: [k * size + offset, (k + 1) * size + offset), UTC."""

    is_event_time = True  # of one pickled before windows could go by processing time

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
        time: TimeCharacteristic = "event",
    ) -> None:
        """`size`: a timedelta, or ms; or any of the other units. Raises InvalidConfigError when it is not positive."""
        parts = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds, milliseconds=milliseconds)
        self.size_ms = _length_ms(size, parts, "size")
        self.offset_ms = duration_ms(offset, "the offset of a window") % self.size_ms
        self.is_event_time = _time_of(time)

    @property
    def pane_ms(self) -> int:
        """The longest time in which no window begins or ends."""
        return self.size_ms

    def __repr__(self) -> str:
        offset = f", offset {self.offset_ms} ms" if self.offset_ms else ""
        return f"Tumbling({self.size_ms} ms{offset}{_clock(self.is_event_time)})"


class Sliding:
    """Windows of one size that begin every `slide`: [k * slide + offset, k * slide + offset + size), UTC. A record is in each that
    holds its time: in size / slide of them, or, where the slide is longer than the size, in one or none."""

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
        time: TimeCharacteristic = "event",
    ) -> None:
        """`size`: as of Tumbling; `slide`: a timedelta, or ms. Raises InvalidConfigError when one is not positive."""
        parts = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds, milliseconds=milliseconds)
        self.size_ms = _length_ms(size, parts, "size")
        self.slide_ms = _length_ms(slide, timedelta(), "slide")
        self.offset_ms = duration_ms(offset, "the offset of a window") % self.slide_ms
        self.is_event_time = _time_of(time)

    @property
    def pane_ms(self) -> int:
        """The longest time in which no window begins or ends."""
        return gcd(self.size_ms, self.slide_ms)

    def __repr__(self) -> str:
        offset = f", offset {self.offset_ms} ms" if self.offset_ms else ""
        return f"Sliding({self.size_ms} ms by {self.slide_ms} ms{offset}{_clock(self.is_event_time)})"


class Session:
    """Windows of one key's records with less than `gap` of silence between them; those that touch are one.

    A record at t opens [t, t + gap); windows that overlap, or touch, are merged."""

    def __init__(
        self,
        gap: timedelta | int | Callable[[Any], int] | None = None,
        *,
        days: float = 0,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
        milliseconds: float = 0,
        time: TimeCharacteristic = "event",
    ) -> None:
        """`gap`: a timedelta, or ms; or any of the units; or a function of the row that returns ms, at least 1.

        Raises InvalidConfigError when the gap is not positive."""
        parts = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds, milliseconds=milliseconds)
        self.gap_of = gap if callable(gap) else None
        if self.gap_of is not None and parts:
            raise InvalidConfigError("give the gap of a session once: as gap, or in units", setting="gap")
        self.gap_ms = 0 if callable(gap) else _length_ms(gap, parts, "gap")
        self.is_event_time = _time_of(time)

    def __repr__(self) -> str:
        gap = f"{self.gap_ms} ms" if self.gap_of is None else getattr(self.gap_of, "__qualname__", repr(self.gap_of))
        return f"Session({gap}{_clock(self.is_event_time)})"


class Global:
    """One window for all records of a key. It never ends: a trigger says when it fires."""

    is_event_time = False

    def __repr__(self) -> str:
        return "Global()"


WindowAssigner: TypeAlias = Tumbling | Sliding | Session | Global
"""Which windows a record is in."""
ASSIGNERS = get_args(WindowAssigner)
"""Its classes, for isinstance."""


def _clock(is_event_time: bool) -> str:
    return "" if is_event_time else ", processing time"
