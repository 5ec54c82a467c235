"""Evictors: which records of a window of row functions its function sees, and which of them are kept for the next firing.

With an evictor a window keeps every record. Source: Flink, Evictor and its subclasses."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from holdfast.operators.functions.windows.bounds import TimeWindow
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.state import duration_ms


class TimestampedValue(NamedTuple):
    """A record of a window, and its event time in ms; None where there are none."""

    timestamp: int | None
    value: Any


class Evictor:
    """Base of evictors: each method returns the elements to keep, in order."""

    def evict_before(self, elements: list[TimestampedValue], window: TimeWindow) -> list[TimestampedValue]:
        """Before the function sees them."""
        return elements

    def evict_after(self, elements: list[TimestampedValue], window: TimeWindow) -> list[TimestampedValue]:
        """Behind it: what is kept for the next firing."""
        return elements


class _BuiltInEvictor(Evictor):
    def __init__(self, *, after: bool) -> None:
        self.after = after

    def evict_before(self, elements: list[TimestampedValue], window: TimeWindow) -> list[TimestampedValue]:
        return elements if self.after or not elements else self.kept(elements)

    def evict_after(self, elements: list[TimestampedValue], window: TimeWindow) -> list[TimestampedValue]:
        return self.kept(elements) if self.after and elements else elements

    def kept(self, elements: list[TimestampedValue]) -> list[TimestampedValue]:
        raise NotImplementedError


class CountEvictor(_BuiltInEvictor):
    """Keeps the last `count` records. `after`: behind the function instead of before it; so of every evictor."""

    def __init__(self, count: int, *, after: bool = False) -> None:
        """Raises InvalidConfigError for a count below 1."""
        super().__init__(after=after)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InvalidConfigError(f"the count of a CountEvictor must be at least 1, not {count!r}", setting="count")
        self.count = count

    def kept(self, elements: list[TimestampedValue]) -> list[TimestampedValue]:
        return elements[-self.count :]


class TimeEvictor(_BuiltInEvictor):
    """Keeps records that are less than `size` older than the latest one; all of them where there are no event times."""

    def __init__(self, size: timedelta | int, *, after: bool = False) -> None:
        """`size`: a timedelta, or ms. Raises InvalidConfigError below 1 ms."""
        super().__init__(after=after)
        self.size_ms = duration_ms(size, "the size of a TimeEvictor")
        if self.size_ms < 1:
            raise InvalidConfigError(f"the size of a TimeEvictor must be at least 1 ms, not {self.size_ms}", setting="size")

    def kept(self, elements: list[TimestampedValue]) -> list[TimestampedValue]:
        stamps = [element.timestamp for element in elements if element.timestamp is not None]
        if not stamps:
            return elements
        cutoff = max(stamps) - self.size_ms
        return [element for element in elements if element.timestamp is None or element.timestamp > cutoff]


class DeltaEvictor(_BuiltInEvictor):
    """Keeps records for which `delta(row, last)` is below `threshold`; `last` is the record that came last."""

    def __init__(self, threshold: float, delta: Callable[[Any, Any], float], *, after: bool = False) -> None:
        super().__init__(after=after)
        self.threshold = threshold
        self.delta = delta

    def kept(self, elements: list[TimestampedValue]) -> list[TimestampedValue]:
        last = elements[-1].value
        return [element for element in elements if self.delta(element.value, last) < self.threshold]
