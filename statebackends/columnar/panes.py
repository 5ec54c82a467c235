"""Rows of windows that overlap, made of panes: namespaces of columnar state that lie side by side.

Time is cut into blocks of as many panes as a window has, so that a window is the end of one block and the beginning of the next.
The end of a block is merged from its last pane to its first, and what a pane changes is kept: the next window takes the pane back.
So each row of a pane is merged twice and taken back once, however many windows it is in. Blocks lie at fixed places, so that floats
are added up in the same order after a restore. Nothing here is stored: it is made again from the panes at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from holdfast.statebackends.columnar.accumulators import create_accumulator
from holdfast.statebackends.columnar.distinct import DistinctAccumulator, DistinctWindow
from holdfast.statebackends.columnar.key_index import KeyIndex
from holdfast.statebackends.columnar.parts import AccumulatorColumns, Column, Slots, extended
from holdfast.statebackends.state import ColumnAggregate

_CAPACITY_MIN = 1024
ROWS_PER_STEP = 1 << 14
"""Of panes, after which a step of merging ends."""


@dataclass(frozen=True, slots=True)
class PaneRows:
    """What a pane holds: keys, and for the aggregates the accumulators with the rows of these keys."""

    keys: Any
    rows: Slots
    accumulators: Sequence[AccumulatorColumns]


class PaneStore(Protocol):
    """Where panes are."""

    def namespaces(self, since: int | None = None, until: int | None = None) -> list[int]: ...
    def pane(self, namespace: int) -> PaneRows: ...


class _Merged(Protocol):
    """One aggregate over the panes of a window; `slots`: where in the window the rows of the pane belong."""

    def resize(self, capacity: int) -> None: ...
    def add(self, number: int, slots: Slots, pane: AccumulatorColumns, rows: Slots, *, is_end: bool) -> Iterator[None]: ...
    def take_back(self, number: int, slots: Slots) -> None: ...
    def results(self, slots: Slots | slice) -> pa.Array: ...


class WindowPanes:
    """The rows of one window after the other."""

    def __init__(
        self,
        store: PaneStore,
        aggregates: Sequence[ColumnAggregate],
        new_index: Callable[[], KeyIndex],
        *,
        pane_ms: int,
        panes: int,
        offset_ms: int,
        operator: str,
    ) -> None:
        """`panes`: how many a window has. A pane with number n begins at n * pane_ms + offset_ms."""
        self._store = store
        self._aggregates = aggregates
        self._new_index = new_index
        self._pane_ms = pane_ms
        self._panes = panes
        self._offset_ms = offset_ms
        self._operator = operator
        self._first: int | None = None  # number of the first pane of the window that is merged; None: nothing is, as a whole
        self._rows = 0  # merged in this step
        self._merged: list[_Merged] = []
        self._slots: dict[int, Slots] = {}
        self._counts = np.zeros(0, np.int64)  # panes that have a row of each key

    def changed(self, namespace: int) -> None:
        """Panes from this one on got records."""
        if self._first is not None and self._number(namespace) < self._first + self._panes:
            self._first = None

    def forget(self) -> None:
        """Panes lost rows: what is merged is not what they hold."""
        self._first = None
        self._merged, self._slots = [], {}

    def merged(self, start: int) -> Iterator[None]:
        """Merge the panes of the window that begins at `start`, step by step; panes must not change in between."""
        first = self._number(start)
        before, self._first = self._first, None
        if before is not None and before <= first and self._block(first) == self._block(before):
            yield from self._take_back(before, first)
            yield from self._add_until(first, max(first, before + self._panes))
        else:
            yield from self._begin(first)
        self._first = first

    def window(self, start: int, keys: Any = None) -> tuple[list[pa.Array], list[pa.Array]]:
        """Key arrays and results of the window that begins at `start`: each key with a row in any of its panes, or those of `keys`
        alone, which have one."""
        for _ in self.merged(start):
            pass
        slots = np.flatnonzero(self._counts) if keys is None else distinct_slots(self._index.slots(keys))
        if keys is None and len(slots) == self._index.count:  # each key, so that nothing need be selected
            return self._index.key_arrays(0, len(slots)), [merged.results(slice(0, len(slots))) for merged in self._merged]
        return self._index.key_arrays_of(slots), [merged.results(slots) for merged in self._merged]

    def _begin(self, first: int) -> Iterator[None]:
        self._index = self._new_index()
        self._slots = {}
        self._counts = np.zeros(_CAPACITY_MIN, np.int64)
        self._merged = [_merged(aggregate, _CAPACITY_MIN, self._operator) for aggregate in self._aggregates]
        boundary = (self._block(first) + 1) * self._panes
        for namespace in reversed(self._there(first, boundary)):
            yield from self._add(self._number(namespace), namespace, is_end=True)
        yield from self._add_until(first, boundary)

    def _take_back(self, before: int, first: int) -> Iterator[None]:
        for number in range(before, first):
            slots = self._slots.pop(number, None)
            if slots is not None:
                self._counts[slots] -= 1
                for merged in self._merged:
                    merged.take_back(number, slots)
                yield from self._looked_at(len(slots))

    def _add_until(self, first: int, start: int) -> Iterator[None]:
        for namespace in self._there(start, first + self._panes):
            yield from self._add(self._number(namespace), namespace, is_end=False)

    def _looked_at(self, rows: int) -> Iterator[None]:
        """End the step when it has merged enough."""
        self._rows += rows
        if self._rows >= ROWS_PER_STEP:
            self._rows = 0
            yield

    def _there(self, start: int, stop: int) -> list[int]:
        """Panes of these numbers."""
        return self._store.namespaces(*(number * self._pane_ms + self._offset_ms for number in (start, stop)))

    def _add(self, number: int, namespace: int, *, is_end: bool) -> Iterator[None]:
        pane = self._store.pane(namespace)
        slots = self._index.slots(pane.keys)
        if self._index.count > len(self._counts):
            capacity = max(self._index.count, 2 * len(self._counts))
            self._counts = extended(self._counts, capacity, 0)
            for merged in self._merged:
                merged.resize(capacity)
        self._slots[number] = slots
        self._counts[slots] += 1
        for merged, accumulator in zip(self._merged, pane.accumulators, strict=True):
            yield from merged.add(number, slots, accumulator, pane.rows, is_end=is_end)
        yield from self._looked_at(len(slots))

    def _number(self, namespace: int) -> int:
        return (namespace - self._offset_ms) // self._pane_ms

    def _block(self, number: int) -> int:
        return number // self._panes


def distinct_slots(slots: Slots) -> Slots:
    """Ascending. np.unique hashes, which is far slower on slots spread over a large table."""
    highest = int(slots.max(initial=-1))
    if highest < 8 * len(slots):
        is_there = np.zeros(highest + 1, np.bool_)
        is_there[slots] = True
        return np.flatnonzero(is_there)
    ordered = np.sort(slots)
    found: Slots = ordered[np.diff(ordered, prepend=-1) != 0]
    return found


def empty_accumulator(aggregate: ColumnAggregate, capacity: int, operator: str) -> AccumulatorColumns:
    """Rows into which others are merged; none of them has seen a value."""
    made = create_accumulator(aggregate, capacity, operator=operator)
    if made.parts[0].nullable:
        made.seen = np.zeros(capacity, np.bool_)
    return made


class _Ends:
    """An aggregate as the end of a block and the beginning of the next."""

    def __init__(self, aggregate: ColumnAggregate, capacity: int, operator: str) -> None:
        self._aggregate = aggregate
        self._operator = operator
        self._end, self._beginning = self._new(capacity), self._new(capacity)
        self._before: dict[int, list[Column]] = {}

    def _new(self, capacity: int) -> AccumulatorColumns:
        return empty_accumulator(self._aggregate, capacity, self._operator)

    def resize(self, capacity: int) -> None:
        self._end.resize(capacity)
        self._beginning.resize(capacity)

    def add(self, number: int, slots: Slots, pane: AccumulatorColumns, rows: Slots, *, is_end: bool) -> Iterator[None]:
        if is_end:
            self._before[number] = self._end.saved(slots)
        (self._end if is_end else self._beginning).merge(slots, pane, rows, 0)
        return iter(())

    def take_back(self, number: int, slots: Slots) -> None:
        self._end.put_back(slots, self._before.pop(number))

    def results(self, slots: Slots | slice) -> pa.Array:
        return self._end.merged_result(self._beginning, slots)


class _Distinct:
    """count_distinct, which knows of each value the last pane that it is in."""

    def __init__(self, aggregate: ColumnAggregate, capacity: int) -> None:
        self._window = DistinctWindow(aggregate, capacity)

    def resize(self, capacity: int) -> None:
        self._window.resize(capacity)

    def add(self, number: int, slots: Slots, pane: AccumulatorColumns, rows: Slots, *, is_end: bool) -> Iterator[None]:
        assert isinstance(pane, DistinctAccumulator)
        return self._window.add(number, slots, pane, rows)

    def take_back(self, number: int, slots: Slots) -> None:
        self._window.take_back(number)

    def results(self, slots: Slots | slice) -> pa.Array:
        return self._window.results(slots)


def _merged(aggregate: ColumnAggregate, capacity: int, operator: str) -> _Merged:
    if aggregate.function == "count_distinct":
        return _Distinct(aggregate, capacity)
    return _Ends(aggregate, capacity, operator)
