"""Columnar keyed state: accumulators in numpy columns, one dense row per (namespace, key), updated a batch at a time.

It decides how rows are found, frozen and restored. What an aggregate computes is in accumulators.py, how keys become
slots in keyindex.py, how frozen rows stay as they were in frozen.py. It lives in memory in every backend, and is
snapshotted as one table (key group, key, namespace, one column per accumulator part)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statebackends.accumulators import Accumulator, Slots, Values, check_descriptor, parts_of
from statebackends.errors import InvariantError
from statebackends.frozen import Column, FrozenColumns
from statebackends.keyindex import KeyIndex, create_key_index, distinct_codes
from statebackends.state import ColumnarStateDescriptor, KeyColumn

_CAPACITY_MIN = 1024
KeyColumnOf = Callable[[list[pa.Array]], KeyColumn]


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

    def update(self, keys: KeyColumn, namespaces: npt.NDArray[np.int64] | int, columns: Sequence[Values]) -> None:
        """Fold one batch in. columns[i] feeds aggregates[i] (None for count(*)): numpy, masked or Arrow, length of keys."""
        for namespace, rows in _runs(namespaces, len(keys)):
            if rows is None:
                self._rows(namespace).update(keys, columns)
            else:
                taken = pa.array(rows)
                part = self._column_of([array.take(taken) for array in keys.arrays])
                values = [column.take(taken if isinstance(column, pa.Array) else rows) if column is not None else None
                          for column in columns]  # fmt: skip
                self._rows(namespace).update(part, values)

    def namespaces(self) -> list[int]:
        return sorted(namespace for namespace, rows in self._tables.items() if rows.count)

    def row_count(self, namespace: int) -> int:
        rows = self._tables.get(namespace)
        return 0 if rows is None else rows.count

    def read(self, namespace: int, offset: int = 0, length: int | None = None) -> pa.RecordBatch:
        rows = self._tables.get(namespace) or self._new_rows()
        start = min(rows.dropped + offset, rows.index.count)
        stop = rows.index.count if length is None else min(start + length, rows.index.count)
        return self._batch(rows.index.key_arrays(start, stop), [part.result(slice(start, stop)) for part in rows.accumulators])

    def rows_of(self, keys: KeyColumn, namespace: int) -> pa.RecordBatch:
        rows = self._rows(namespace)
        known = rows.index.count
        slots = np.sort(rows.index.slots(keys))  # np.unique hashes, which is far slower on slots spread over a large table
        slots = slots[np.diff(slots, prepend=-1) != 0]
        if rows.index.count > known:
            raise InvariantError(f"state {self.descriptor.name!r} was asked for rows of keys that it never got")
        return self._batch(rows.index.key_arrays_of(slots), [part.result(slots) for part in rows.accumulators])

    def drop_front(self, namespace: int, count: int) -> None:
        if not 0 <= count <= self.row_count(namespace):
            raise InvariantError(f"{count} rows can't be dropped from {self.row_count(namespace)}")
        if count:
            self._tables[namespace].dropped += count

    def remove(self, namespace: int) -> None:
        self._tables.pop(namespace, None)

    def _batch(self, keys: list[pa.Array], results: list[pa.Array]) -> pa.RecordBatch:
        names = [*self.key_names, *(aggregate.output for aggregate in self.descriptor.aggregates)]
        return pa.RecordBatch.from_arrays([*keys, *results], names=names)

    def size(self) -> int:
        """Bytes of accumulators and keys, estimated."""
        return sum(rows.size() for rows in self._tables.values())

    def freeze(self) -> FrozenState:
        """O(namespaces): the rows as they are now, for another thread."""
        return FrozenState([_FrozenTable(namespace, rows) for namespace, rows in self._tables.items() if rows.count], self)

    def load(self, keys: KeyColumn, namespaces: npt.NDArray[np.int64], parts: Sequence[pa.Array]) -> None:
        """Set rows from a snapshot's columns: all accumulator parts, in the order of `part_names`."""
        for namespace, rows in _runs(namespaces, len(keys)):
            if rows is None:
                self._rows(namespace).load(keys, parts)
            else:
                taken = pa.array(rows)
                part_keys = self._column_of([array.take(taken) for array in keys.arrays])
                self._rows(namespace).load(part_keys, [part.take(taken) for part in parts])

    @property
    def part_fields(self) -> list[pa.Field]:
        """Columns that a snapshot has for the accumulators."""
        return part_fields_of(self.descriptor)

    def _rows(self, namespace: int) -> _Rows:
        rows = self._tables.get(namespace)
        if rows is None:
            rows = self._tables[namespace] = self._new_rows()
        return rows

    def _new_rows(self) -> _Rows:
        return _Rows(self.descriptor, create_key_index(self.field_types, self._column_of), self._operator)


def part_fields_of(descriptor: ColumnarStateDescriptor) -> list[pa.Field]:
    """Columns that a snapshot has for the accumulators of a declared state."""
    parts = (part for aggregate in descriptor.aggregates for part in parts_of(aggregate))
    return [pa.field(part.name, part.arrow_type, part.nullable) for part in parts]


class _Rows:
    """The rows of one namespace."""

    __slots__ = ("_capacity", "_freezes", "accumulators", "dropped", "index")

    def __init__(self, descriptor: ColumnarStateDescriptor, index: KeyIndex, operator: str) -> None:
        self.index = index
        self.dropped = 0
        """Rows at the front that are forgotten."""
        self._capacity = _CAPACITY_MIN
        self.accumulators = [
            Accumulator(aggregate, _CAPACITY_MIN, operator=operator, state=descriptor.name) for aggregate in descriptor.aggregates
        ]
        self._freezes: list[FrozenColumns] = []

    @property
    def count(self) -> int:
        return self.index.count - self.dropped

    def update(self, keys: KeyColumn, columns: Sequence[Values]) -> None:
        before = self.index.count
        slots = self._slots_to_change(keys)
        for accumulator, values in zip(self.accumulators, columns, strict=True):
            accumulator.update(slots, values, before)

    def load(self, keys: KeyColumn, parts: Sequence[pa.Array]) -> None:
        before = self.index.count
        slots = self._slots_to_change(keys)
        position = 0
        for accumulator in self.accumulators:
            count = len(accumulator.parts)
            accumulator.load(slots, parts[position : position + count], before)
            position += count

    def freeze(self) -> FrozenColumns:
        columns: list[Column | None] = []
        for accumulator in self.accumulators:
            columns += [*accumulator.columns, accumulator.seen]
        frozen = FrozenColumns(columns, self.index.count)
        self._freezes.append(frozen)
        return frozen

    def thaw(self, frozen: FrozenColumns) -> None:
        self._freezes = [other for other in self._freezes if other is not frozen]

    def size(self) -> int:
        columns = sum(column.nbytes for accumulator in self.accumulators for column in accumulator.columns)
        return columns + self.index.count * 16

    def _slots_to_change(self, keys: KeyColumn) -> Slots:
        slots = self.index.slots(keys)
        if self.index.count > self._capacity:
            self._capacity = max(self.index.count, 2 * self._capacity)
            for accumulator in self.accumulators:
                accumulator.resize(self._capacity)
            self._freezes.clear()  # the frozen arrays were replaced, so nobody changes them any more
        elif self._freezes and len(slots):
            for frozen in self._freezes:
                frozen.protect(slots)
            self._freezes = [frozen for frozen in self._freezes if not frozen.settled]
        return slots


class _FrozenTable:
    """The rows of one namespace at one barrier."""

    __slots__ = ("_columns", "_dropped", "_keys", "_namespace", "_rows")

    def __init__(self, namespace: int, rows: _Rows) -> None:
        self._namespace = namespace
        self._rows = rows
        self._columns = rows.freeze()
        self._keys = rows.index.frozen_keys()
        self._dropped = rows.dropped

    def columns(self) -> tuple[list[pa.Array], pa.Array, list[pa.Array]]:
        keys = [array.slice(self._dropped) for array in self._keys()]
        namespaces = pa.repeat(pa.scalar(self._namespace, pa.int64()), len(keys[0]))
        return keys, namespaces, [array.slice(self._dropped) for array in self._parts()]

    def release(self) -> None:
        self._rows.thaw(self._columns)

    def _parts(self) -> Iterator[pa.Array]:
        columns = self._columns.copy()
        position = 0
        for accumulator in self._rows.accumulators:
            count = len(accumulator.parts)
            parts = [column for column in columns[position : position + count] if column is not None]
            yield from accumulator.snapshot_arrays(parts, columns[position + count])
            position += count + 1


class FrozenState:
    """The rows of a NumpyColumnarState at one barrier."""

    def __init__(self, tables: list[_FrozenTable], state: NumpyColumnarState) -> None:
        self._tables = tables
        self._state = state

    def columns(self) -> tuple[list[pa.Array], pa.Array, list[pa.Array]]:
        """Pool thread, once: key arrays, namespaces and accumulator parts of all rows, in no particular order."""
        if not self._tables:
            empty = [pa.array([], field.type) for field in self._state.part_fields]
            return [pa.array([], field) for field in self._state.field_types], pa.array([], pa.int64()), empty
        keys, namespaces, parts = zip(*[table.columns() for table in self._tables], strict=True)
        return _joined(keys), pa.concat_arrays(namespaces), _joined(parts)

    def release(self) -> None:
        """Loop thread: the frozen rows are not needed any more."""
        for table in self._tables:
            table.release()


def _joined(pieces: Sequence[list[pa.Array]]) -> list[pa.Array]:
    return [arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays) for arrays in zip(*pieces, strict=True)]


def _runs(namespaces: npt.NDArray[np.int64] | int, count: int) -> Iterator[tuple[int, Slots | None]]:
    """(namespace, its row numbers), in order of first arrival; None for the rows of a batch that has one namespace."""
    if not count:
        return
    if isinstance(namespaces, int):
        yield namespaces, None
        return
    if len(namespaces) != count:
        raise InvariantError(f"{len(namespaces)} namespaces for {count} keys")
    first = namespaces[0]
    if (namespaces == first).all():
        yield int(first), None
        return
    codes, distinct_count = distinct_codes(pa.array(namespaces))
    order = np.argsort(codes.astype(np.uint16 if distinct_count < 1 << 16 else np.int64), kind="stable")
    stops = np.cumsum(np.bincount(codes, minlength=distinct_count))
    start = 0
    for stop in stops.tolist():
        rows = order[start:stop]
        yield int(namespaces[rows[0]]), rows
        start = stop
