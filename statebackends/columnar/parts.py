"""What all accumulators have in common: numpy columns over dense slots, which rows saw a value, their form in snapshots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.statebackends.columnar.column_values import dtype_of, from_arrow, size_of, to_arrow
from holdfast.statebackends.state import ColumnAggregate

Slots = npt.NDArray[np.int64]
Column = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Values: TypeAlias = npt.NDArray[Any] | Any | None
"""Numpy, masked numpy or Arrow array, or a pair of them for an aggregate of two columns; None for count(*). For count_distinct it
may be `Chosen`."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A column of a batch, and which of its rows an aggregate takes. Aggregates that have the same `values` share their work."""

    values: npt.NDArray[Any] | Any
    rows: Mask


@dataclass(frozen=True, slots=True)
class Part:
    """One numpy column of an accumulator. A row's initial value is the identity of the fold."""

    name: str
    """Column name in a snapshot."""
    dtype: np.dtype[Any]
    initial: Any
    nullable: bool
    """Whether a row may have seen no value at all; it is a null in snapshots and results."""
    declared_type: pa.DataType | None = None
    """Of the column in a snapshot, where the dtype does not tell it."""

    @property
    def arrow_type(self) -> pa.DataType:
        return pa.from_numpy_dtype(self.dtype) if self.declared_type is None else self.declared_type


def part_of(name: str, data_type: pa.DataType, initial: Any) -> Part:
    """A nullable part that holds values of a type."""
    dtype = dtype_of(data_type)
    assert dtype is not None
    return Part(name, dtype, initial, nullable=True, declared_type=data_type)


Frozen: TypeAlias = Callable[[Sequence[Column], Mask | None], list[pa.Array]]
"""Pool thread: the snapshot's columns of (private copies of) an accumulator's columns and `seen`, as they were at the freeze."""


class AccumulatorColumns(ABC):
    """Base of accumulators: one aggregate's columns over slots [0, capacity).

    `seen` marks rows that got a value; None while all rows did, or where that does not matter."""

    __slots__ = ("_where", "aggregate", "columns", "parts", "seen")

    def __init__(self, aggregate: ColumnAggregate, parts: tuple[Part, ...], capacity: int, where: dict[str, Any]) -> None:
        """`where` names operator and state, for errors."""
        self.aggregate = aggregate
        self.parts = parts
        self.columns: list[Column] = [np.full(capacity, part.initial, part.dtype) for part in parts]
        self.seen: Mask | None = None
        self._where = where

    @property
    @abstractmethod
    def result_type(self) -> pa.DataType: ...

    @abstractmethod
    def update(self, slots: Slots, values: Values, rows_before: int, times: Slots | None = None) -> None:
        """Fold one value per slot in (repeats allowed). Slots from rows_before on are new in this batch. `times`: event times, by
        which `first` and `last` go, and what is equal otherwise; None: all are equal, and order of arrival decides."""

    @property
    def held_count(self) -> int:
        """Values in the sets of its rows; 0 where there are none."""
        return 0

    def end_batch(self) -> None:  # noqa: B027 - most have nothing to forget
        """All aggregates have taken their values of the batch."""

    @abstractmethod
    def merge(self, slots: Slots, other: Any, rows: Slots, rows_before: int) -> None:
        """Fold rows of another accumulator of the same aggregate in: rows[i] into slots[i], which are distinct."""

    @abstractmethod
    def result(self, rows: slice | Slots) -> pa.Array:
        """The aggregate's values of some slots; a copy."""

    def merged_result(self, other: Self, slots: Slots | slice) -> pa.Array:
        """The aggregate's values of some slots, each merged with the same slot of `other`; a copy. A slice has both bounds."""
        own = np.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots
        both = self.picked(own)
        both.merge(np.arange(len(own)), other, own, 0)
        return both.result(slice(None))

    def load(self, slots: Slots, arrays: Sequence[pa.Array], rows_before: int) -> None:
        """Set rows from snapshot columns, one array per part."""
        for column, part, array in zip(self.columns, self.parts, arrays, strict=True):
            column[slots] = _loaded(part, array)
        if arrays[0].null_count or self.seen is not None:
            self._mark_seen(slots[np.asarray(arrays[0].is_valid())], rows_before)

    def of_parts(self, arrays: Sequence[pa.Array]) -> Self:
        """Another one of the same aggregate, whose rows are those of snapshot columns, one array per part. It is only read."""
        other = copy(self)
        other.columns = [_loaded(part, array) for part, array in zip(self.parts, arrays, strict=True)]
        other.seen = np.asarray(arrays[0].is_valid()) if arrays[0].null_count else None
        return other

    def resize(self, capacity: int) -> None:
        """New, larger columns; the old arrays stay as they are for whoever holds them."""
        self.columns = [extended(column, capacity, part.initial) for column, part in zip(self.columns, self.parts, strict=True)]
        if self.seen is not None:
            self.seen = extended(self.seen, capacity, False)

    def freeze(self) -> Frozen:
        """O(1)."""
        return self.snapshot_arrays

    def snapshot_arrays(self, columns: Sequence[Column], seen: Mask | None) -> list[pa.Array]:
        """Arrow arrays of (private copies of) this accumulator's columns, one per part."""
        mask = None if seen is None else ~seen
        return [as_arrow(part, column, mask) for column, part in zip(columns, self.parts, strict=True)]

    def size(self) -> int:
        """Bytes, estimated."""
        return sum(size_of(column) for column in self.columns)

    def picked(self, slots: Slots) -> Self:
        """Some rows as an accumulator of their own, which may be changed."""
        made = copy(self)
        made.columns = [column[slots] for column in self.columns]
        made.seen = None if self.seen is None else self.seen[slots]
        return made

    def saved(self, slots: Slots) -> list[Column]:
        """Copies of some rows, for `put_back`."""
        return [column[slots] for column in (*self.columns, *(() if self.seen is None else (self.seen,)))]

    def put_back(self, slots: Slots, saved: Sequence[Column]) -> None:
        """The rows as they were when they were saved."""
        for column, before in zip((*self.columns, *(() if self.seen is None else (self.seen,))), saved, strict=True):
            column[slots] = before

    def reset(self, slots: Slots, count: int) -> None:
        """Some of `count` rows are as they were before they got a value."""
        for column, part in zip(self.columns, self.parts, strict=True):
            column[slots] = part.initial
        if self.parts[0].nullable:
            self._mark_seen(slots[:0], count)
            assert self.seen is not None
            self.seen[slots] = False

    def _mark_seen(self, slots: Slots, rows_before: int) -> None:
        if self.seen is None:
            self.seen = np.zeros(len(self.columns[0]), np.bool_)
            self.seen[:rows_before] = True
        self.seen[slots] = True

    @property
    def name(self) -> str:
        """For errors."""
        return f"{self.aggregate.function}({self.aggregate.column})"


def as_arrow(part: Part, column: Column, null: Mask | None) -> pa.Array:
    """The Arrow array of a part's column."""
    return to_arrow(column, part.arrow_type, null)


def arrow_values(values: npt.NDArray[Any] | pa.Array, data_type: pa.DataType) -> pa.Array:
    """One column of a batch as an Arrow array of its declared type."""
    if isinstance(values, np.ma.MaskedArray):
        return pa.array(values.data, data_type, mask=np.ma.getmaskarray(values))
    if isinstance(values, np.ndarray):
        return pa.array(values, data_type)
    array = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
    return array if array.type == data_type else array.cast(data_type)


def _loaded(part: Part, array: pa.Array) -> Column:
    """A part's numpy column of its snapshot column."""
    if not array.null_count:
        return from_arrow(array)
    column = np.full(len(array), part.initial, part.dtype)
    if array.null_count < len(array):
        column[np.asarray(array.is_valid())] = from_arrow(array.drop_null())
    return column


def extended(column: Column, capacity: int, initial: Any) -> Column:
    """A longer copy."""
    bigger = np.empty(capacity, column.dtype)
    bigger[: len(column)] = column
    bigger[len(column) :] = initial
    return bigger


def rows_taken(array: pa.Array, rows: Slots | slice) -> pa.Array:
    """Some rows; a slice of them has both bounds, and is not copied."""
    return array.slice(rows.start, rows.stop - rows.start) if isinstance(rows, slice) else array.take(pa.array(rows))


def values_taken(columns: Sequence[Values], rows: Slots | slice) -> list[Values]:
    """Some rows of what feeds aggregates. What is one column before is one behind it."""
    known: dict[int, Values] = {}

    def of(column: Values) -> Values:
        if column is None:
            return None
        if isinstance(column, tuple):
            return tuple(map(of, column))
        if isinstance(column, Chosen):
            return Chosen(of(column.values), column.rows[rows])
        found = known.get(id(column))
        if found is None:
            found = known[id(column)] = rows_taken(column, rows) if isinstance(column, pa.Array) else column[rows]
        return found

    return list(map(of, columns))
