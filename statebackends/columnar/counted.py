"""Windows of so many records of a key, by the position of each record among those of its key.

The records of a key are cut into panes as long as the greatest common divisor of count and slide, so that a window is whole panes.
A key has one row for each of the last panes that a window has: pane a is in namespace a mod panes. The row in namespace 0 also has
how many records of the key came: the first aggregate, which is no user's. A record of the pane that was open before its batch
updates the row; panes that begin and end within a batch never enter the state. As it ends, a pane makes way for the next one, whose
row begins anew: `AccumulatorColumns.reset`. Where windows lie side by side a key whose window is full has nothing to keep, and its
position begins anew, too; such rows are dropped when they are most."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from holdfast.statebackends.columnar.panes import empty_accumulator
from holdfast.statebackends.columnar.parts import AccumulatorColumns, Mask, Slots, Values, values_taken
from holdfast.statebackends.state import ColumnAggregate, FilledWindows, KeyColumn

_EMPTY_MIN = 4096
"""Rows that hold nothing, before it pays to drop them."""
_SPREAD_MAX = 64
"""Rows for each record of a batch, up to which it pays to look at all of them."""
_MERGED_ROWS_MAX = 1 << 20
"""Rows of panes that windows which overlap are merged from at a time."""


def panes_of(count: int, slide: int) -> int:
    """How many panes a window has: so many rows are kept for a key."""
    return count // gcd(count, slide)


class CountStore(Protocol):
    """Where panes are."""

    def row_count(self, namespace: int) -> int: ...
    def rows_to_fold(self, namespace: int, keys: KeyColumn) -> tuple[Slots, int]: ...
    def reset(self, namespace: int, slots: Slots, first: int) -> None: ...
    def accumulators(self, namespace: int) -> Sequence[AccumulatorColumns]: ...
    def slots_of(self, namespace: int, keys: KeyColumn) -> Slots: ...
    def taken(self, keys: KeyColumn, rows: Slots) -> KeyColumn: ...
    def keep(self, namespace: int, slots: Slots) -> None: ...


class _Records(NamedTuple):
    """Some records of a batch, and what of them is known before they are folded in."""

    keys: KeyColumn
    columns: Sequence[Values]
    times: Slots | None
    slots: Slots
    """Row of the key of each record, in namespace 0."""

    def taken(self, rows: Slots) -> tuple[list[Values], Slots | None]:
        """What feeds the aggregates, of some."""
        return values_taken(self.columns, rows), None if self.times is None else self.times[rows]


class _Places(NamedTuple):
    """Where the records of a batch are among those of their keys."""

    positions: Slots
    """Of each record."""
    owners: Slots
    """Row of each key that has any, ascending."""
    starts: Slots
    """Of each of these keys: records before the batch, and behind it."""
    ends: Slots
    numbers: Slots
    """Of each record: the number of its key among the owners."""


def _places(slots: Slots, positions: Slots) -> _Places:
    """`positions`: of each row, records that came before."""
    shift = len(slots).bit_length()
    packed = np.sort((slots << shift) | np.arange(len(slots)))  # faster than to sort their positions
    order, ordered = packed & ((1 << shift) - 1), packed >> shift
    begins = np.flatnonzero(np.diff(ordered, prepend=-1))
    counts = np.diff(begins, append=len(slots))
    owners = ordered[begins]
    starts = positions[owners]
    found, numbers = np.empty(len(slots), np.int64), np.empty(len(slots), np.int64)
    found[order] = np.arange(len(slots)) + np.repeat(starts - begins, counts)
    numbers[order] = np.repeat(np.arange(len(owners)), counts)
    return _Places(found, owners, starts, starts + counts, numbers)


class CountedPanes:
    """`state.CountWindows` of one columnar state."""

    def __init__(
        self, store: CountStore, aggregates: Sequence[ColumnAggregate], count: int, slide: int, operator: str
    ) -> None:
        self._store = store
        self._aggregates = aggregates[1:]
        self._slide = slide
        self._pane = gcd(count, slide)
        self._panes = panes_of(count, slide)
        self._is_side_by_side = count == slide
        self._operator = operator
        self._emptied = 0
        """Rows whose key had nothing more to keep, since it was last looked how many these are."""

    def take(self, keys: KeyColumn, columns: Sequence[Values], times: Slots | None = None) -> list[FilledWindows]:
        most = max(1, _MERGED_ROWS_MAX // (2 * self._panes))
        if len(keys) <= most:
            return self._take(keys, columns, times, 0)
        found = []
        for first in range(0, len(keys), most):
            rows = np.arange(first, min(first + most, len(keys)))
            values = values_taken(columns, rows)
            found += self._take(self._store.taken(keys, rows), values, None if times is None else times[rows], first)
        return found

    def _take(self, keys: KeyColumn, columns: Sequence[Values], times: Slots | None, offset: int) -> list[FilledWindows]:
        slots, before = self._store.rows_to_fold(0, keys)
        records, positions = _Records(keys, columns, times, slots), self._positions()
        panes = positions[slots] // self._pane
        is_ending = self._ending(slots, positions)
        some = np.flatnonzero(is_ending)
        if not len(some):
            self._fold(records, None, panes, before)
            return []
        inner = _Records(self._store.taken(keys, some), *records.taken(some), slots[some])
        places = _places(inner.slots, positions)
        behind = places.positions // self._pane > panes[some]
        is_ending[some] = behind
        self._fold(records, np.flatnonzero(~is_ending), panes, before)
        fired = self._behind_its_pane(inner, places, behind)
        return [FilledWindows(some[fired[0]] + offset, fired[1])] if len(fired[0]) else []

    def _ending(self, slots: Slots, positions: Slots) -> Mask:
        """Which records are of keys that come to the end of a pane; the other keys go on by so many records."""
        if int(slots.max()) >= _SPREAD_MAX * len(slots):
            return np.ones(len(slots), np.bool_)
        counts = np.bincount(slots)
        starts = positions[: len(counts)]
        ends = (starts + counts) // self._pane > starts // self._pane
        starts += np.where(ends, 0, counts)
        found: Mask = ends[slots]
        return found

    def _behind_its_pane(self, records: _Records, places: _Places, behind: Mask) -> tuple[Slots, list[pa.Array]]:
        """Records of keys that come to the end of a pane, of which those of the open pane are folded in: (records that fill
        windows, results of these)."""
        panes, numbers = places.positions // self._pane, places.numbers
        lasts = places.ends // self._pane
        fired = np.flatnonzero((places.positions + 1) % self._slide == 0)
        results = self._results(records, places, panes, fired) if len(fired) else []
        self._begin(records, places, places.starts // self._pane, lasts)
        is_kept = behind & (panes > lasts[numbers] - self._panes)
        self._fold(records, np.flatnonzero(is_kept), panes, self._store.row_count(0))
        self._move(places, places.ends % self._pane if self._is_side_by_side else places.ends)
        return fired, results

    # ------------------------------------------------------------------------------------------------------------ rows

    def _positions(self) -> Slots:
        positions: Slots = self._store.accumulators(0)[0].columns[0]
        return positions

    def _fold(self, records: _Records, rows: Slots | None, panes: Slots, before: int) -> None:
        """Records, or all of them, into the rows of their panes. `before`: rows of namespace 0 that had records."""
        if rows is not None and len(rows) == len(records.slots):
            rows = None
        if self._panes == 1:
            columns, times = (records.columns, records.times) if rows is None else records.taken(rows)
            slots = records.slots if rows is None else records.slots[rows]
            if len(slots):
                _update(self._store.accumulators(0)[1:], slots, columns, before, times)
            return
        namespaces = (panes if rows is None else panes[rows]) % self._panes
        for namespace in np.unique(namespaces).tolist():
            some = np.flatnonzero(namespaces == namespace)
            if rows is not None:
                some = rows[some]
            columns, times = records.taken(some)
            slots, known = self._store.rows_to_fold(namespace, self._store.taken(records.keys, some))
            known = before if namespace == 0 else known
            _update(self._store.accumulators(namespace)[1:], slots, columns, known, times)

    def _begin(self, records: _Records, places: _Places, firsts: Slots, lasts: Slots) -> None:
        """Rows of panes that have begun take the place of those that no window needs any more."""
        if not (lasts > firsts).any():
            return
        if self._panes == 1:
            self._store.reset(0, places.owners[lasts > firsts], 1)
            return
        one_of_each = np.empty(len(places.owners), np.int64)
        one_of_each[places.numbers] = np.arange(len(places.numbers))
        begun = np.minimum(lasts - firsts, self._panes)
        for namespace in range(self._panes):
            goes = np.flatnonzero((lasts - namespace) % self._panes < begun)
            if not len(goes):
                continue
            slots = self._store.slots_of(namespace, self._store.taken(records.keys, one_of_each[goes]))
            if len(slots := slots[slots >= 0]):
                self._store.reset(namespace, slots, 1)

    def _move(self, places: _Places, positions: Slots) -> None:
        """Keys have got that far."""
        self._positions()[places.owners] = positions
        if not self._is_side_by_side:
            return
        self._emptied += int(np.count_nonzero(positions == 0))
        if self._emptied >= max(_EMPTY_MIN, self._store.row_count(0) // 2):
            self._emptied, count = 0, self._store.row_count(0)
            held = np.flatnonzero(self._positions()[:count])
            if 2 * len(held) <= count:
                self._store.keep(0, held)

    # --------------------------------------------------------------------------------------------------------- results

    def _results(self, records: _Records, places: _Places, panes: Slots, fired: Slots) -> list[pa.Array]:
        """Of the windows that these records fill, in their order."""
        return (self._whole if self._panes == 1 else self._overlapping)(records, places, panes, fired)

    def _whole(self, records: _Records, places: _Places, panes: Slots, fired: Slots) -> list[pa.Array]:
        """Of windows of one pane: rows of the state, or of panes that begin and end here."""
        numbers, pane = places.numbers, self._pane
        since = places.starts // pane + 1
        inside = np.maximum(places.ends // pane - since, 0)
        shifts = np.cumsum(inside) - inside - since
        closed = np.flatnonzero((panes >= since[numbers]) & (panes < (since + inside)[numbers]))
        made = self._made(int(inside.sum()))
        if len(closed):
            columns, times = records.taken(closed)
            _update(made, (shifts[numbers] + panes)[closed], columns, 0, times)
        was_open = panes[fired] < since[numbers[fired]]
        kept, new = fired[was_open], fired[~was_open]
        order = np.argsort(np.concatenate([kept, new]))
        return [
            pa.concat_arrays([held.result(records.slots[kept]), here.result((shifts[numbers] + panes)[new])]).take(pa.array(order))
            for held, here in zip(self._store.accumulators(0)[1:], made, strict=True)
        ]

    def _overlapping(self, records: _Records, places: _Places, panes: Slots, fired: Slots) -> list[pa.Array]:
        """Of windows of several panes, added up from the first to the last, so that it makes no difference where batches end."""
        numbers, firsts, lasts = places.numbers, places.starts // self._pane, places.ends // self._pane
        fires = places.ends // self._slide > places.starts // self._slide
        since = firsts - (self._panes - 1)
        there = np.where(fires, lasts - since, 0)
        shifts = np.cumsum(there) - there - since
        made = self._made(int(there.sum()))
        owners = np.flatnonzero(fires)
        one_of_each = np.empty(len(fires), np.int64)
        one_of_each[numbers] = np.arange(len(numbers))
        some = self._store.taken(records.keys, one_of_each[owners])
        for namespace in range(self._panes):
            slots = self._store.slots_of(namespace, some)
            known = np.flatnonzero(slots >= 0)
            held = firsts[owners] - (firsts[owners] - namespace) % self._panes
            _merge(made, (shifts[owners] + held)[known], self._store.accumulators(namespace)[1:], slots[known])
        new = np.flatnonzero(fires[numbers] & (panes > firsts[numbers]) & (panes < lasts[numbers]))
        if len(new):
            columns, times = records.taken(new)
            _update(made, (shifts[numbers] + panes)[new], columns, 0, times)
        totals = self._made(len(fired))
        first = shifts[numbers[fired]] + (places.positions[fired] + 1) // self._pane - self._panes
        for step in range(self._panes):
            _merge(totals, np.arange(len(fired)), made, first + step)
        return [total.result(np.arange(len(fired))) for total in totals]

    def _made(self, count: int) -> list[AccumulatorColumns]:
        return [empty_accumulator(aggregate, count, self._operator) for aggregate in self._aggregates]


def _update(
    accumulators: Sequence[AccumulatorColumns], slots: Slots, columns: Sequence[Values], before: int, times: Slots | None
) -> None:
    for accumulator, values in zip(accumulators, columns, strict=True):
        accumulator.update(slots, values, before, times)
    for accumulator in accumulators:
        accumulator.end_batch()


def _merge(into: Sequence[Any], slots: Slots, accumulators: Sequence[AccumulatorColumns], rows: Slots) -> None:
    for own, other in zip(into, accumulators, strict=True):
        own.merge(slots, other, rows, 0)
