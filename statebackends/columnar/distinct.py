"""The accumulator of count_distinct: a set of values for each row, exact, in two indexes for all rows.

One numbers the values, the other the pairs of row and value: a batch costs two look-ups of vectors, a pair 16 to 40 bytes, a value
what it takes once. In a snapshot the set of a row is a list, in order of arrival. It knows nothing of keys or namespaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.statebackends.columnar import decimals
from holdfast.statebackends.columnar.column_values import from_arrow, is_temporal, is_text
from holdfast.statebackends.columnar.key_index import EncodedKeyIndex, Int64KeyIndex, KeyIndex
from holdfast.statebackends.columnar.parts import (
    AccumulatorColumns,
    Column,
    Frozen,
    Mask,
    Part,
    Slots,
    Values,
    arrow_values,
    extended,
)
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.state import ColumnAggregate

_CODE_BITS = np.int64(32)
_CODES = np.int64(2**32 - 1)


def parts_of_distinct(aggregate: ColumnAggregate) -> tuple[Part, ...]:
    """One list of values. Raises InvalidConfigError for a type whose values can't be told apart."""
    source = aggregate.input_type
    if source is None or not (_is_number(source) or is_temporal(source) or is_text(source) or decimals.is_decimal(source)):
        raise InvalidConfigError(
            f"count_distinct can't tell apart the values of column {aggregate.column!r}, of type {source}: numbers, booleans, "
            "text, binary values, decimal128, dates and times can be counted",
            column=aggregate.column,
        )
    return (Part(aggregate.output, np.dtype(np.int64), 0, nullable=False, declared_type=pa.list_(source)),)


class DistinctAccumulator(AccumulatorColumns):
    """One aggregate's sets, and in its one column how many values each has."""

    __slots__ = ("_pairs", "_source", "_values")

    def __init__(self, aggregate: ColumnAggregate, capacity: int, where: dict[str, Any]) -> None:
        super().__init__(aggregate, parts_of_distinct(aggregate), capacity, where)
        assert aggregate.input_type is not None
        self._source: pa.DataType = aggregate.input_type
        self._values = _value_index(self._source)
        self._pairs = Int64KeyIndex(pa.int64())

    @property
    def result_type(self) -> pa.DataType:
        return pa.int64()

    def result(self, rows: slice | Slots) -> pa.Array:
        return pa.array(self.columns[0][rows].copy())

    def update(self, slots: Slots, values: Values, rows_before: int, times: Slots | None = None) -> None:
        array = arrow_values(values, self._source)
        if array.null_count:
            slots, array = slots[np.asarray(array.is_valid())], array.drop_null()
        if len(slots):
            self._add(slots, self._values.slots(_Values([_canonical(array)])))

    def merge(self, slots: Slots, other: DistinctAccumulator, rows: Slots, rows_before: int) -> None:
        into, values = other.values_at(slots, rows)
        if len(into):
            self._add(into, self._values.slots(_Values(values)))

    def values_at(self, slots: Slots, rows: Slots) -> tuple[Slots, list[pa.Array]]:
        """The values of some rows, in the form of the index, each with the slot that its row is to have."""
        target = np.full(len(self.columns[0]), -1, np.int64)
        target[rows] = slots
        pairs = self.pairs()
        into = target[pairs >> _CODE_BITS]
        found = np.flatnonzero(into >= 0)
        return into[found], self._values.key_arrays_of(pairs[found] & _CODES)

    def load(self, slots: Slots, arrays: Sequence[pa.Array], rows_before: int) -> None:
        """Raises ValueError for a null in a list."""
        lists = arrays[0]
        values = lists.flatten()
        if values.null_count:
            raise ValueError(f"column {self.parts[0].name!r} holds a null in a list")
        self.update(np.repeat(slots, lists.value_lengths().to_numpy(zero_copy_only=False)), values, rows_before)

    def pairs(self) -> Slots:
        """row * 2**32 + number of the value, for each value of each row, in order of arrival."""
        return self._pairs.numbers()

    def freeze(self) -> Frozen:
        pairs, values, source = self.pairs(), self._values.frozen_keys(), self._source

        def lists(columns: Sequence[Column], seen: Mask | None) -> list[pa.Array]:
            rows = pairs >> _CODE_BITS
            order = np.argsort(rows, kind="stable")
            codes = (pairs & _CODES)[order]
            lengths = np.bincount(rows, minlength=len(columns[0]))
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]).astype(np.int32)
            items = _stored(values()[0], source).take(pa.array(codes))
            return [pa.ListArray.from_arrays(pa.array(offsets), items, type=pa.list_(source))]

        return lists

    def snapshot_arrays(self, columns: Sequence[Column], seen: Mask | None) -> list[pa.Array]:
        return self.freeze()(columns, seen)

    def size(self) -> int:
        values = self._values.key_arrays(0, self._values.count)[0]
        return self.columns[0].nbytes + 24 * self._pairs.count + int(values.nbytes) + 16 * self._values.count

    def _add(self, slots: Slots, codes: Slots) -> None:
        known = self._pairs.count
        self._pairs.slots(_Values([pa.array((slots << _CODE_BITS) | codes)]))
        if self._pairs.count > known:
            np.add.at(self.columns[0], self.pairs()[known:] >> _CODE_BITS, 1)


class DistinctWindow:
    """Sets of a window that moves over panes: of each pair of row and value the last pane that it is in."""

    __slots__ = ("_counts", "_last", "_pairs", "_panes", "_values")

    def __init__(self, aggregate: ColumnAggregate, capacity: int) -> None:
        assert aggregate.input_type is not None
        self._values = _value_index(aggregate.input_type)
        self._pairs = Int64KeyIndex(pa.int64())
        self._counts = np.zeros(capacity, np.int64)
        self._last = np.zeros(capacity, np.int64)
        self._panes: dict[int, tuple[Slots, Slots]] = {}

    def resize(self, capacity: int) -> None:
        """Rows."""
        self._counts = extended(self._counts, capacity, 0)

    def add(self, number: int, slots: Slots, pane: DistinctAccumulator, rows: Slots) -> None:
        """Rows of a pane, which may lie anywhere among those that are there."""
        into, values = pane.values_at(slots, rows)
        codes = self._values.slots(_Values(values))
        pairs = self._pairs.slots(_Values([pa.array((into << _CODE_BITS) | codes)]))
        if self._pairs.count > len(self._last):
            self._last = extended(self._last, max(self._pairs.count, 2 * len(self._last)), 0)
        self._panes[number] = into, pairs
        is_new = self._last[pairs] == 0
        np.add.at(self._counts, into[is_new], 1)
        place = _place(number)
        self._last[pairs] = np.where(is_new, place, np.maximum(self._last[pairs], place))

    def take_back(self, number: int) -> None:
        """The first pane leaves."""
        into, pairs = self._panes.pop(number)
        gone = self._last[pairs] == _place(number)
        np.subtract.at(self._counts, into[gone], 1)
        self._last[pairs[gone]] = 0

    def results(self, slots: Slots) -> pa.Array:
        return pa.array(self._counts[slots])


def _place(number: int) -> int:
    """A pane's number, never 0, which means none."""
    return number + 1 if number >= 0 else number


class _Values:
    """Arrays in the form in which an index takes keys."""

    __slots__ = ("_arrays",)

    def __init__(self, arrays: list[pa.Array]) -> None:
        self._arrays = arrays

    @property
    def arrays(self) -> list[pa.Array]:
        return self._arrays

    def __len__(self) -> int:
        return len(self.arrays[0])

    def encoded(self) -> list[Any]:
        values: list[Any] = self.arrays[0].to_pylist()
        return values


def _is_number(source: pa.DataType) -> bool:
    return bool(pa.types.is_integer(source) or pa.types.is_floating(source) or pa.types.is_boolean(source))


def _value_index(source: pa.DataType) -> KeyIndex:
    if is_text(source) or decimals.is_decimal(source):
        return EncodedKeyIndex([source], _Values)
    return Int64KeyIndex(pa.int64())


def _canonical(array: pa.Array) -> pa.Array:
    """Values without nulls as the index takes them: equal where they count as one. -0.0 is 0.0, and there is one NaN."""
    if is_text(array.type) or decimals.is_decimal(array.type):
        return array
    values = from_arrow(array)
    if values.dtype.kind == "f":
        numbers = values.astype(np.float64) + 0.0
        numbers[np.isnan(numbers)] = np.nan
        return pa.array(numbers.view(np.int64))
    return pa.array(values.view(np.int64) if values.dtype == np.uint64 else values.astype(np.int64))


def _stored(values: pa.Array, source: pa.DataType) -> pa.Array:
    """Values of the index in the column's type."""
    if values.type == source:
        return values
    numbers = values.to_numpy()
    if pa.types.is_floating(source):
        return pa.array(numbers.view(np.float64)).cast(source)
    if is_temporal(source):
        return pa.array(numbers.astype(f"int{source.bit_width}")).view(source)
    return pa.array(numbers.view(np.uint64) if source == pa.uint64() else numbers.astype(source.to_pandas_dtype()), source)
