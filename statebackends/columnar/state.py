"""Columnar keyed state: accumulators in numpy columns, one dense row per (namespace, key), updated a batch at a time.

It decides how rows are found, frozen and restored, and which of them an increment holds: beside the accumulators a column
says in which epoch, between two barriers, a row changed last. What an aggregate computes is in accumulators.py, how keys become
slots in key_index.py, and how frozen rows stay as they were stands here. It lives in memory in every backend, and is
snapshotted as one table (key group, key, namespace, one column per accumulator part).

Copy-on-write freezing of numpy columns: the loop thread goes on writing while a pool thread reads the frozen rows.

A freeze notes which namespaces there are, and no more. The rows of a namespace are frozen when the loop thread is about to write
them for the first time behind the barrier, or when the reader comes to them, whichever is first. Before the loop thread changes
frozen rows, it saves the chunks that it is about to touch, unless the reader has already copied them; the reader copies chunk by
chunk. Rows added after the freeze are not in it."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.statebackends.columnar.accumulators import check_descriptor, create_accumulators, parts_of
from holdfast.statebackends.columnar.counted import CountedPanes
from holdfast.statebackends.columnar.distinct import FrozenSets, renew_pairs
from holdfast.statebackends.columnar.key_index import KeyIndex, create_key_index, distinct_codes
from holdfast.statebackends.columnar.ordering import comes_before, first_of_each, sort_numbers
from holdfast.statebackends.columnar.panes import PaneRows, WindowPanes, distinct_slots
from holdfast.statebackends.columnar.parts import AccumulatorColumns, Slots, Values, rows_taken, values_taken
from holdfast.statebackends.columnar.sessions import SessionPanes
from holdfast.statebackends.errors import InvariantError
from holdfast.statebackends.state import ColumnarStateDescriptor, KeyColumn

Column = npt.NDArray[Any]

CHUNK_SHIFT = 12
CHUNK_ROWS = 1 << CHUNK_SHIFT


class FrozenColumns:
    """The first `count` rows of some equally long columns, as they were when this was made. None columns stay None."""

    __slots__ = ("_columns", "_done", "_lock", "_saved", "count")

    def __init__(self, columns: Sequence[Column | None], count: int) -> None:
        self.count = count
        self._columns = list(columns)
        self._done = np.zeros((count + CHUNK_ROWS - 1) >> CHUNK_SHIFT, np.bool_)  # saved here, or copied by the reader
        self._saved: dict[int, list[Column | None]] = {}
        self._lock = threading.Lock()

    @property
    def settled(self) -> bool:
        """Whether writes need not be announced any more."""
        return bool(self._done.all())

    def protect(self, slots: npt.NDArray[np.int64]) -> None:
        """Loop thread: rows `slots` are about to change in the columns that were frozen."""
        if self.settled:
            return
        touched = np.zeros(max(len(self._done), (int(slots.max()) >> CHUNK_SHIFT) + 1), np.bool_)
        touched[slots >> CHUNK_SHIFT] = True
        for chunk in np.flatnonzero(touched[: len(self._done)] & ~self._done).tolist():
            with self._lock:  # the reader may be in the middle of this very chunk
                if not self._done[chunk]:
                    self._saved[chunk] = [None if part is None else part.copy() for part in self._chunk(chunk)]
                    self._done[chunk] = True

    def copy(self) -> list[Column | None]:
        """Pool thread, once: private copies of the frozen rows of every column."""
        copies = [None if column is None else np.empty(self.count, column.dtype) for column in self._columns]
        for chunk in range(len(self._done)):
            with self._lock:
                parts = self._saved.pop(chunk, None) or self._chunk(chunk)
                for copy, part in zip(copies, parts, strict=True):
                    if copy is not None:
                        copy[chunk << CHUNK_SHIFT : (chunk + 1) << CHUNK_SHIFT] = part
                self._done[chunk] = True
        return copies

    def _chunk(self, chunk: int) -> list[Column | None]:
        start, stop = chunk << CHUNK_SHIFT, min((chunk + 1) << CHUNK_SHIFT, self.count)
        return [None if column is None else column[start:stop] for column in self._columns]


_CAPACITY_MIN = 16
_HELD_EPOCHS_MAX = 64
"""Epochs with changes of which a namespace knows what its sets held; a base before them costs all of its rows."""
_REMOVED_MAX = 1 << 16
"""Namespaces removed since the base, before their rows cost less than their names."""
KeyColumnOf = Callable[[list[pa.Array]], KeyColumn]
Columns = tuple[list[pa.Array], pa.Array, list[pa.Array]]
"""Key arrays, namespaces, accumulator parts."""


class NumpyColumnarState:
    """`state.ColumnarState` of one descriptor."""

    def __init__(
        self,
        descriptor: ColumnarStateDescriptor,
        field_types: Sequence[pa.DataType],
        column_of: KeyColumnOf,
        operator: str,
    ) -> None:
        """`field_types`: Arrow types of the key's fields; `column_of` makes a KeyColumn of arrays of these types."""
        check_descriptor(descriptor)
        self.descriptor = descriptor
        self.key_names: tuple[str, ...] = tuple(f"key_{position}" for position in range(len(field_types)))
        self.field_types = list(field_types)
        self._column_of = column_of
        self._operator = operator
        self._tables: dict[int, _Rows] = {}
        self._order: list[int] = []  # the keys of _tables, ascending
        self._epoch: int | None = None  # from 1; None: changes are not noted
        self._marks: dict[int, int] = {}  # barrier -> epoch that it ended
        self._removed: dict[int, int] = {}  # namespace -> epoch in which it, or rows at its front, went last
        self._freezes: list[FrozenState] = []  # those that are not released
        self._made_panes: WeakSet[WindowPanes] = WeakSet()
        self._looked_up: tuple[KeyColumn, int, Slots] | None = None  # of the last update: who asks for its rows asks next

    def update(
        self,
        keys: KeyColumn,
        namespaces: npt.NDArray[np.int64] | int,
        columns: Sequence[Values],
        times: Slots | None = None,
    ) -> None:
        for namespace, rows in _runs(namespaces, len(keys)):
            if rows is None:
                slots = self._rows(namespace).update(keys, columns, times, self._epoch)
                self._looked_up = keys, namespace, slots
            else:
                values = values_taken(columns, rows)
                self._rows(namespace).update(self.taken(keys, rows), values, None if times is None else times[rows], self._epoch)

    def keep_first(
        self, keys: KeyColumn, namespace: int, columns: Sequence[pa.Array], greatest: Sequence[bool], *, latest: bool
    ) -> Slots:
        return self._rows(namespace).keep_first(keys, columns, greatest, self._epoch, latest=latest)

    def find(self, keys: KeyColumn, namespace: int) -> tuple[Slots, list[pa.Array]]:
        rows = self._tables.get(namespace) or self._new_rows()
        slots = rows.index.find(keys)
        found = np.flatnonzero(slots >= rows.dropped)
        return found, [part.result(slots[found]) for part in rows.accumulators]

    def merge(self, keys: KeyColumn, namespaces: npt.NDArray[np.int64] | int, parts: Sequence[pa.Array]) -> None:
        for namespace, rows in _runs(namespaces, len(keys)):
            if rows is None:
                self._rows(namespace).merge_parts(keys, parts, self._epoch)
            else:
                self._rows(namespace).merge_parts(self.taken(keys, rows), [rows_taken(part, rows) for part in parts], self._epoch)

    def namespaces(self, since: int | None = None, until: int | None = None) -> list[int]:
        start = 0 if since is None else bisect_left(self._order, since)
        stop = len(self._order) if until is None else bisect_left(self._order, until)
        return [namespace for namespace in self._order[start:stop] if self._tables[namespace].count]

    def first_namespace(self, since: int | None = None) -> int | None:
        for position in range(0 if since is None else bisect_left(self._order, since), len(self._order)):
            if self._tables[self._order[position]].count:
                return self._order[position]
        return None

    def row_count(self, namespace: int) -> int:
        rows = self._tables.get(namespace)
        return 0 if rows is None else rows.count

    def read(self, namespace: int, offset: int = 0, length: int | None = None) -> pa.RecordBatch:
        rows = self._tables.get(namespace) or self._new_rows()
        start = min(rows.dropped + offset, rows.index.count)
        stop = rows.index.count if length is None else min(start + length, rows.index.count)
        return self._batch(rows.index.key_arrays(start, stop), [part.result(slice(start, stop)) for part in rows.accumulators])

    def rows_of(self, keys: KeyColumn, namespace: int) -> pa.RecordBatch:
        rows, asked = self._rows(namespace), self._looked_up
        if asked is not None and asked[0] is keys and asked[1] == namespace:
            slots = distinct_slots(asked[2])
        else:
            known = rows.index.count
            slots = distinct_slots(rows.index.slots(keys))
            if rows.index.count > known:
                raise InvariantError(f"state {self.descriptor.name!r} was asked for rows of keys that it never got")
        return self._batch(rows.index.key_arrays_of(slots), [part.result(slots) for part in rows.accumulators])

    def panes(
        self,
        pane_ms: int,
        panes: int,
        offset_ms: int,
        keys: KeyColumn | None = None,
    ) -> WindowPanes:
        made = WindowPanes(
            self if keys is None else _PanesOfKeys(self, keys),
            self.descriptor.aggregates,
            self._new_index,
            pane_ms=pane_ms,
            panes=panes,
            offset_ms=offset_ms,
            operator=self._operator,
        )
        self._made_panes.add(made)
        return made

    def pane(self, namespace: int) -> PaneRows:
        """What a namespace holds, as it is: it must not be changed, and changes with the next update."""
        rows = self._tables.get(namespace) or self._new_rows()
        keys = self._column_of(rows.index.key_arrays(rows.dropped, rows.index.count))
        return PaneRows(keys, np.arange(rows.dropped, rows.index.count), rows.accumulators)

    def sessions(self, gap_ms: int) -> SessionPanes:
        return SessionPanes(self, self.descriptor.aggregates, gap_ms, self._operator)

    def count_windows(self, count: int, slide: int) -> CountedPanes:
        return CountedPanes(self, self.descriptor.aggregates, count, slide, self._operator)

    def rows_to_fold(self, namespace: int, keys: KeyColumn) -> tuple[Slots, int]:
        """The row of each key, which is about to change, and how many rows there were before."""
        rows = self._rows(namespace)
        before = rows.index.count
        return rows.to_fold(keys, self._epoch), before

    def reset(self, namespace: int, slots: Slots, first: int) -> None:
        """Some rows are as if their keys had just come; accumulators before number `first` stay as they are."""
        if not len(slots):
            return
        self._rows(namespace).reset(slots, first, self._epoch)
        if self._epoch is not None and self.set_names:
            self._removed[namespace] = self._epoch  # an increment has what sets gained; these lost what the base holds

    def accumulators(self, namespace: int) -> Sequence[AccumulatorColumns]:
        """Of a namespace, as they are: they must not be changed, and change with the next update."""
        return (self._tables.get(namespace) or self._new_rows()).accumulators

    def keys_of(self, namespace: int, slots: Slots) -> KeyColumn:
        """Keys of some rows of a namespace, which holds them."""
        return self._column_of(self._tables[namespace].index.key_arrays_of(slots)) if len(slots) else self._no_keys()

    def slots_of(self, namespace: int, keys: KeyColumn) -> Slots:
        """The row of each key in a namespace; -1 for a key without one."""
        rows = self._tables.get(namespace)
        if rows is None:
            return np.full(len(keys), -1, np.int64)
        slots = rows.index.find(keys)
        return slots if not rows.dropped else np.where(slots >= rows.dropped, slots, -1)

    def taken(self, keys: KeyColumn, rows: Slots | slice) -> KeyColumn:
        """Some of these keys."""
        return self._column_of([rows_taken(array, rows) for array in keys.arrays])

    def numbered(self, keys: KeyColumn) -> tuple[Slots, KeyColumn]:
        """(number of each row's key, each key once, by number)."""
        index = self._new_index()
        return index.slots(keys), self._column_of(index.key_arrays(0, index.count))

    def distinct(self, columns: Sequence[KeyColumn]) -> KeyColumn:
        """Each of these keys once, in order of first arrival."""
        index = self._new_index()
        for keys in columns:
            index.slots(keys)
        return self._column_of(index.key_arrays(0, index.count))

    def _no_keys(self) -> KeyColumn:
        return self._column_of([pa.array([], kind) for kind in self.field_types])

    def merge_into(self, namespace: int, keys: KeyColumn, accumulators: Sequence[AccumulatorColumns], rows: Slots) -> None:
        """Add rows of another namespace to those of a namespace that have their keys, which are distinct."""
        self._rows(namespace).merge(keys, accumulators, rows, self._epoch)

    def keep(self, namespace: int, slots: Slots) -> None:
        """Drop all other rows of a namespace."""
        rows, keys = self._tables[namespace], self.keys_of(namespace, slots)
        self.remove(namespace)
        if len(slots):
            self.merge_into(namespace, keys, rows.accumulators, slots)

    def erase(self, keys: KeyColumn) -> None:
        """Remove the rows of some keys from every namespace; all others stay as they are, in their order. Whoever has asked for
        rows must not go on with their numbers."""
        for namespace in list(self._order):
            rows = self._tables[namespace]
            slots = rows.index.find(keys)
            if (slots >= 0).any():  # those that were dropped, too
                self._erase_rows(namespace, rows, slots)
        for panes in self._made_panes:
            panes.forget()

    def _erase_rows(self, namespace: int, rows: _Rows, slots: Slots) -> None:
        """Made anew as a restore makes them: `rows` may be read by a snapshot."""
        arrays, _, parts = _FrozenTable(namespace, rows).columns()
        is_kept = np.ones(rows.count, np.bool_)
        is_kept[slots[slots >= rows.dropped] - rows.dropped] = False
        self.remove(namespace)
        if is_kept.any():
            kept = pa.array(is_kept)
            keys = self._column_of([each.filter(kept) for each in arrays])
            self._rows(namespace).load(keys, [each.filter(kept) for each in parts])

    def drop_front(self, namespace: int, count: int) -> None:
        if not 0 <= count <= self.row_count(namespace):
            raise InvariantError(f"{count} rows can't be dropped from {self.row_count(namespace)}")
        if count:
            self._rows(namespace).dropped += count
            if self._epoch is not None:
                self._removed[namespace] = self._epoch

    def remove(self, namespace: int) -> None:
        self._looked_up = None
        rows = self._tables.pop(namespace, None)
        if rows is None:
            return
        del self._order[bisect_left(self._order, namespace)]
        if self._epoch is not None:
            self._removed[namespace] = self._epoch
            if len(self._removed) > _REMOVED_MAX:
                self._removed.clear()
                self._marks.clear()  # no base is known any more, so that the next snapshot is full

    def _batch(self, keys: list[pa.Array], results: list[pa.Array]) -> pa.RecordBatch:
        names = [*self.key_names, *(aggregate.output for aggregate in self.descriptor.aggregates)]
        return pa.RecordBatch.from_arrays([*keys, *results], names=names)

    def size(self) -> int:
        """Bytes of accumulators and keys, estimated."""
        return sum(rows.size() for rows in self._tables.values())

    def freeze(self) -> FrozenState:
        """The rows as they are now, for another thread. A reference for each namespace is copied."""
        frozen = FrozenState(self._tables.copy(), self)
        self._freezes.append(frozen)
        return frozen

    def forget(self, frozen: FrozenState) -> None:
        """A freeze is not read any more."""
        self._freezes = [other for other in self._freezes if other is not frozen]

    def track_since(self, base: int) -> None:
        """Note changes from now on, for the first time: the rows are those of the checkpoint `base`."""
        self._epoch, self._marks, self._removed = 1, {base: 0}, {}

    def checkpoint_started(self, barrier: int, base: int) -> ColumnarChanges:
        """Right after `freeze`: what is known of changes before this barrier; the first call begins to note them.

        No base below `base` will ever be asked for. O(namespaces that lost rows + barriers, both since the base)."""
        if self._epoch is None:
            self.track_since(barrier)
            return ColumnarChanges({}, {})
        self._marks = {known: epoch for known, epoch in self._marks.items() if known >= base}
        oldest = min(self._marks.values(), default=self._epoch)
        self._removed = {namespace: epoch for namespace, epoch in self._removed.items() if epoch > oldest}
        changes = ColumnarChanges(dict(self._marks), dict(self._removed))
        self._marks[barrier] = self._epoch
        self._epoch += 1
        return changes

    def load(self, keys: KeyColumn, namespaces: npt.NDArray[np.int64], parts: Sequence[pa.Array]) -> None:
        """Set rows from a snapshot's columns: all accumulator parts, in the order of `part_names`."""
        for namespace, rows in _runs(namespaces, len(keys)):
            if rows is None:
                self._rows(namespace).load(keys, parts)
            else:
                self._rows(namespace).load(self.taken(keys, rows), [rows_taken(part, rows) for part in parts])

    @property
    def set_names(self) -> list[str]:
        """Columns of a snapshot that have sets: of an increment, what these gained."""
        return [each.output for each in self.descriptor.aggregates if each.function == "count_distinct"]

    @property
    def part_fields(self) -> list[pa.Field]:
        """Columns that a snapshot has for the accumulators."""
        return part_fields_of(self.descriptor)

    def _rows(self, namespace: int) -> _Rows:
        """For writing: every freeze has them as they are."""
        rows = self._tables.get(namespace)
        if rows is None:
            rows = self._tables[namespace] = self._new_rows()
            insort(self._order, namespace)
        for frozen in self._freezes:
            frozen.protect(namespace, rows)
        return rows

    def _new_rows(self) -> _Rows:
        return _Rows(self.descriptor, self._new_index(), self._operator)

    def _new_index(self) -> KeyIndex:
        return create_key_index(self.field_types, self._column_of)


class _PanesOfKeys:
    """The rows of some keys."""

    def __init__(self, state: NumpyColumnarState, keys: KeyColumn) -> None:
        self._state = state
        self._keys = state.numbered(keys)[1]

    def namespaces(self, since: int | None = None, until: int | None = None) -> list[int]:
        return self._state.namespaces(since, until)

    def pane(self, namespace: int) -> PaneRows:
        slots = self._state.slots_of(namespace, self._keys)
        there = np.flatnonzero(slots >= 0)
        return PaneRows(self._state.taken(self._keys, there), slots[there], self._state.accumulators(namespace))


def part_fields_of(descriptor: ColumnarStateDescriptor) -> list[pa.Field]:
    """Columns that a snapshot has for the accumulators of a declared state."""
    parts = (part for aggregate in descriptor.aggregates for part in parts_of(aggregate))
    return [pa.field(part.name, part.arrow_type, part.nullable) for part in parts]


class _Rows:
    """The rows of one namespace."""

    __slots__ = (
        "_all_changed", "_capacity", "_freezes", "_has_sets", "accumulators", "changed", "changed_in", "dropped", "held", "index",
    )  # fmt: skip

    def __init__(self, descriptor: ColumnarStateDescriptor, index: KeyIndex, operator: str) -> None:
        self.index = index
        self.dropped = 0
        """Rows at the front that are forgotten."""
        self.changed: Column | None = None
        """Epoch in which each row changed last, 0 for none; None: no row has changed since changes are noted."""
        self.changed_in = 0
        """The highest of these epochs."""
        self._all_changed = (0, 0)  # (epoch, rows) for which every row is noted
        self._capacity = _CAPACITY_MIN
        self.accumulators = create_accumulators(
            descriptor.aggregates, _CAPACITY_MIN, operator=operator, state=descriptor.name
        )
        self._freezes: list[FrozenColumns] = []
        self._has_sets = any(each.function == "count_distinct" for each in descriptor.aggregates)
        self.held: tuple[tuple[int, tuple[int, ...]], ...] = ()
        """(epoch, values that the sets of each aggregate had before its first change), of the last epochs with changes."""

    @property
    def count(self) -> int:
        return self.index.count - self.dropped

    def update(self, keys: KeyColumn, columns: Sequence[Values], times: Slots | None, epoch: int | None) -> Slots:
        """The slot of each key."""
        before = self.index.count
        slots = self.to_fold(keys, epoch)
        for accumulator, values in zip(self.accumulators, columns, strict=True):
            accumulator.update(slots, values, before, times)
        for accumulator in self.accumulators:
            accumulator.end_batch()
        return slots

    def to_fold(self, keys: KeyColumn, epoch: int | None) -> Slots:
        """The slot of each key; these rows are about to change."""
        slots = self._slots_to_change(keys)
        if epoch is not None:
            self._note(slots, epoch)
        return slots

    def reset(self, slots: Slots, first: int, epoch: int | None) -> None:
        self._make_room(slots)
        if epoch is not None:
            self._note(slots, epoch)
        for accumulator in self.accumulators[first:]:
            accumulator.reset(slots, self.index.count)
        renew_pairs(self.accumulators)

    def keep_first(
        self, keys: KeyColumn, columns: Sequence[pa.Array], greatest: Sequence[bool], epoch: int | None, *, latest: bool
    ) -> Slots:
        before = self.index.count
        slots = self.index.slots(keys)
        compared = columns[: len(greatest)]
        numbers = [each for array, first in zip(compared, greatest, strict=True) for each in sort_numbers(array, greatest=first)]
        rows = first_of_each(slots, numbers, latest=latest)
        known = slots[rows] < before
        if known.any():
            again = rows[known]
            held = [accumulator.result(slots[again]) for accumulator in self.accumulators[: len(greatest)]]
            offered = [array.take(pa.array(again)) for array in compared]
            won = ~known
            won[known] = comes_before(len(again), offered, held, greatest, latest=latest)
            rows = rows[won]
        slots = slots[rows]
        self._make_room(slots)
        if epoch is not None:
            self._note(slots, epoch)
        taken = pa.array(rows)
        for accumulator, column in zip(self.accumulators, columns, strict=True):
            accumulator.load(slots, [column.take(taken)], before)
        return rows

    def merge_parts(self, keys: KeyColumn, parts: Sequence[pa.Array], epoch: int | None) -> None:
        """Fold accumulators in that came as columns of their parts."""
        folded: list[AccumulatorColumns] = []
        position = 0
        for own in self.accumulators:
            count = len(own.parts)
            folded.append(own.of_parts(parts[position : position + count]))
            position += count
        self.merge(keys, folded, np.arange(len(keys)), epoch)

    def _note(self, slots: Slots, epoch: int) -> None:
        """A batch of twice as many rows as there are is taken to change them all: a scatter would cost a fifth of its update."""
        count = self.index.count
        if self._all_changed == (epoch, count):
            return
        if self.changed is None:
            self.changed = np.zeros(self._capacity, np.uint32)
        if self._has_sets and epoch > self.changed_in:
            held = tuple(accumulator.held_count for accumulator in self.accumulators)
            self.held = (*self.held[-_HELD_EPOCHS_MAX + 1 :], (epoch, held))
        self.changed_in = epoch
        if len(slots) > 2 * count:
            self.changed[:count] = epoch  # a snapshot in flight may see it: it then holds rows that it need not
            self._all_changed = (epoch, count)
        else:
            self.changed[slots] = epoch

    def merge(self, keys: KeyColumn, accumulators: Sequence[AccumulatorColumns], rows: Slots, epoch: int | None) -> None:
        """Fold rows of other accumulators in, one for each key given; a key may come several times."""
        before = self.index.count
        slots = self.to_fold(keys, epoch)
        own: Any
        for own, other in zip(self.accumulators, accumulators, strict=True):
            own.merge(slots, other, rows, before)

    def load(self, keys: KeyColumn, parts: Sequence[pa.Array]) -> None:
        before = self.index.count
        slots = self._slots_to_change(keys)
        position = 0
        for accumulator in self.accumulators:
            count = len(accumulator.parts)
            accumulator.load(slots, parts[position : position + count], before)
            position += count

    def freeze(self) -> FrozenColumns:
        """The columns as they are until they are written, or for ever if they are watched."""
        columns: list[Column | None] = []
        for accumulator in self.accumulators:
            columns += [*accumulator.columns, accumulator.seen]
        columns.append(self.changed)
        return FrozenColumns(columns, self.index.count)

    def watch(self, frozen: FrozenColumns) -> None:
        self._freezes.append(frozen)

    def release(self, frozen: FrozenColumns) -> None:
        self._freezes = [other for other in self._freezes if other is not frozen]

    def size(self) -> int:
        return sum(accumulator.size() for accumulator in self.accumulators) + self.index.count * 16

    def _slots_to_change(self, keys: KeyColumn) -> Slots:
        slots = self.index.slots(keys)
        self._make_room(slots)
        return slots

    def _make_room(self, slots: Slots) -> None:
        """These rows are about to change."""
        if self.index.count > self._capacity:
            self._capacity = max(self.index.count, 2 * self._capacity)
            for accumulator in self.accumulators:
                accumulator.resize(self._capacity)
            if self.changed is not None:
                changed = np.zeros(self._capacity, np.uint32)
                changed[: len(self.changed)] = self.changed
                self.changed = changed
            self._freezes.clear()  # the frozen arrays were replaced, so nobody changes them any more
        elif self._freezes and len(slots):
            for frozen in self._freezes:
                frozen.protect(slots)
            self._freezes = [frozen for frozen in self._freezes if not frozen.settled]


class _FrozenTable:
    """The rows of one namespace at one barrier."""

    __slots__ = ("_columns", "_copied", "_dropped", "_frozen", "_held", "_keys", "_namespace", "_rows")

    def __init__(self, namespace: int, rows: _Rows) -> None:
        self._namespace = namespace
        self._rows = rows
        self._columns = rows.freeze()
        self._frozen = [(len(accumulator.columns), accumulator.freeze()) for accumulator in rows.accumulators]
        self._keys = rows.index.frozen_keys()
        self._dropped = rows.dropped
        self._held = rows.held
        self._copied: list[Column | None] | None = None

    def watch(self) -> None:
        """From now on the rows may be written, and are saved before."""
        self._rows.watch(self._columns)

    def copy(self) -> list[Column | None]:
        """Private copies of the columns."""
        if self._copied is None:
            self._copied = self._columns.copy()
        return self._copied

    def columns(self, since: int | None = None) -> Columns:
        """All rows, or those that changed after the epoch `since`; of sets what they gained since then."""
        *columns, changed = self.copy()
        keys, parts = list(self._keys()), list(self._parts(columns, since))
        if since is None:
            keys, parts = [[array.slice(self._dropped) for array in arrays] for arrays in (keys, parts)]
        else:
            rows = np.empty(0, np.int64) if changed is None else np.flatnonzero(changed > since)
            taken = pa.array(rows[rows >= self._dropped])
            keys, parts = [[array.take(taken) for array in arrays] for arrays in (keys, parts)]
        return keys, pa.repeat(pa.scalar(self._namespace, pa.int64()), len(keys[0])), parts

    def knows(self, since: int) -> bool:
        """Whether it can tell what the sets gained after the epoch `since`."""
        return len(self._held) < _HELD_EPOCHS_MAX or self._held[0][0] <= since

    def release(self) -> None:
        self._rows.release(self._columns)

    def _parts(self, columns: list[Column | None], since: int | None) -> Iterator[pa.Array]:
        held = None if since is None else next((counts for epoch, counts in self._held if epoch > since), ())
        position = 0
        for number, (count, frozen) in enumerate(self._frozen):
            if held is not None and isinstance(frozen, FrozenSets):
                frozen = frozen.since(held[number] if held else len(frozen.numbers))
            parts = [column for column in columns[position : position + count] if column is not None]
            yield from frozen(parts, columns[position + count])
            position += count + 1


@dataclass(frozen=True, slots=True)
class ColumnarChanges:
    """What is known of a state's changes at one barrier; immutable."""

    marks: dict[int, int]
    """Bases that an increment can build on -> the epoch that each ended."""
    replaced: dict[int, int]
    """Namespaces that lost rows, as a whole or some -> the epoch in which it was last."""


class FrozenState:
    """The rows of a NumpyColumnarState at one barrier.

    A namespace that is not in `_frozen` has not been written since the barrier: its rows are still what they were."""

    def __init__(self, rows: dict[int, _Rows], state: NumpyColumnarState) -> None:
        """`rows` by namespace."""
        self._rows = rows
        self._state = state
        self._frozen: dict[int, _FrozenTable] = {}  # an entry is made by either thread, and its rows are safe when it is there
        self._watched: list[_FrozenTable] = []
        self._lock = threading.Lock()

    def protect(self, namespace: int, rows: _Rows) -> None:
        """Loop thread: rows of a namespace are about to change."""
        if namespace in self._frozen or self._rows.get(namespace) is not rows:
            return  # of other rows the namespace is a later one
        with self._lock:  # the reader may be at these very rows
            if namespace not in self._frozen:
                self._freeze(namespace, rows, is_written=True)

    def columns(self) -> Columns:
        """Pool thread: key arrays, namespaces and accumulator parts of all rows, in no particular order."""
        return self._joined([table.columns() for namespace in self._rows if (table := self._table(namespace))])

    def changed_columns(self, changes: ColumnarChanges, base: int) -> tuple[list[int], Columns] | None:
        """Pool thread: (namespaces to be forgotten of the base, rows that changed since it or are new).

        None: what changed since this base is not known."""
        since = changes.marks.get(base)
        if since is None:
            return None
        replaced = {namespace for namespace, epoch in changes.replaced.items() if epoch > since}
        found: list[Columns] = []
        for namespace in self._rows:
            start = None if namespace in replaced else since
            table = self._table(namespace, start)
            if table is None:
                continue
            if start is not None and not table.knows(start):
                replaced.add(namespace)
                start = None
            found.append(table.columns(start))
        return sorted(replaced), self._joined(found)

    def _table(self, namespace: int, since: int | None = None) -> _FrozenTable | None:
        """Pool thread: rows of a namespace. None: there are none, or none has changed after the epoch `since`."""
        rows = self._rows[namespace]
        with self._lock:
            table = self._frozen.get(namespace)
            if table is None and rows.count and (since is None or rows.changed_in > since):
                table = self._freeze(namespace, rows, is_written=rows.index.count > CHUNK_ROWS)
        return table

    def _freeze(self, namespace: int, rows: _Rows, *, is_written: bool) -> _FrozenTable:
        """Under the lock. `is_written`: the rows may change while they are read; else they are copied here, which must be short."""
        table = _FrozenTable(namespace, rows)
        if is_written:
            table.watch()
            self._watched.append(table)
        else:
            table.copy()
        self._frozen[namespace] = table
        return table

    def _joined(self, tables: Sequence[Columns]) -> Columns:
        if not tables:
            empty = [pa.array([], field.type) for field in self._state.part_fields]
            return [pa.array([], field) for field in self._state.field_types], pa.array([], pa.int64()), empty
        keys, namespaces, parts = zip(*tables, strict=True)
        return _joined(keys), pa.concat_arrays(namespaces), _joined(parts)

    def release(self) -> None:
        """Loop thread: the frozen rows are not needed any more."""
        self._state.forget(self)
        for table in self._watched:
            table.release()


def _joined(pieces: Sequence[list[pa.Array]]) -> list[pa.Array]:
    return [arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays) for arrays in zip(*pieces, strict=True)]


def _runs(namespaces: npt.NDArray[np.int64] | int, count: int) -> Iterator[tuple[int, Slots | slice | None]]:
    """(namespace, its row numbers), in order of first arrival; None for the rows of a batch that has one namespace."""
    if not count:
        return
    if isinstance(namespaces, int):
        yield namespaces, None
        return
    if len(namespaces) != count:
        raise InvariantError(f"{len(namespaces)} namespaces for {count} keys")
    changes = np.flatnonzero(namespaces[1:] != namespaces[:-1]) + 1
    if not len(changes):
        yield int(namespaces[0]), None
        return
    firsts = namespaces[np.concatenate([[0], changes])]
    if (firsts[1:] > firsts[:-1]).all():  # in the order of time: each has its rows side by side
        for start, stop in pairwise([0, *changes.tolist(), count]):
            yield int(namespaces[start]), slice(start, stop)
        return
    codes, distinct_count = distinct_codes(pa.array(namespaces))
    order = np.argsort(codes.astype(np.uint16 if distinct_count < 1 << 16 else np.int64), kind="stable")
    stops = np.cumsum(np.bincount(codes, minlength=distinct_count))
    start = 0
    for stop in stops.tolist():
        rows = order[start:stop]
        yield int(namespaces[rows[0]]), rows
        start = stop
