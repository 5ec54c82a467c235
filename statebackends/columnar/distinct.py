"""The accumulator of count_distinct: a set of values for each row, exact, in two indexes for all rows.

One numbers the values, the other the pairs of row and value: a batch costs two look-ups of vectors, a pair 24 to 48 bytes, a value
what it takes once. Aggregates of one column share both; each knows which of the pairs are its own, for 9 bytes of each. In a
snapshot the set of a row is a list, in order of arrival. It knows nothing of keys or namespaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.statebackends.columnar import decimals
from holdfast.statebackends.columnar.column_values import from_arrow, is_temporal, is_text
from holdfast.statebackends.columnar.key_index import EncodedKeyIndex, Int64KeyIndex, KeyIndex
from holdfast.statebackends.columnar.parts import (
    AccumulatorColumns,
    Chosen,
    Column,
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
_PAIRS_MIN = 64
PAIRS_PER_STEP = 1 << 15
"""Of a pane, after which a step of merging ends."""
_RENEWED_MIN = 1024
"""Pairs that are in no set any more, before it pays to leave them out."""
_NONE = np.empty(0, np.int64)


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


class DistinctPairs:
    """Pairs of row and value of one column, each with a number: those of all aggregates that count its values.

    Aggregates that differ in their `where` share them, so that each record of a batch is looked up once."""

    __slots__ = ("_array", "_batch", "_known", "_pairs", "_present", "_source", "_values")

    def __init__(self, source: pa.DataType) -> None:
        """`source`: type of the column."""
        self._source = source
        self._values = _value_index(source)
        self._pairs = Int64KeyIndex(pa.int64())
        self._batch: tuple[Any, Any] = (None, None)
        """Slots and values of the last batch, by whose identity it is known."""
        self._known: Slots = np.empty(0, np.int64)
        self._array: pa.Array | None = None
        self._present: Mask | None = None

    @property
    def count(self) -> int:
        return self._pairs.count

    def of_batch(self, slots: Slots, values: Any, rows: Mask | None) -> Slots:
        """Numbers of the pairs of some records of a batch, without nulls. None: of all."""
        if self._batch[0] is not slots or self._batch[1] is not values:
            self._batch = slots, values
            self._known = np.full(len(slots), -1, np.int64)
            self._array = array = arrow_values(values, self._source)
            self._present = np.asarray(array.is_valid()) if array.null_count else None
        if self._present is not None:
            rows = self._present if rows is None else rows & self._present
        if rows is None and self._known.min(initial=0) >= 0:
            return self._known
        places = np.arange(len(slots)) if rows is None else np.flatnonzero(rows)
        missing = places[self._known[places] < 0]
        if len(missing) == len(slots):
            self._known = self.of(slots, _canonical(self._array))
        elif len(missing):
            assert self._array is not None
            self._known[missing] = self.of(slots[missing], _canonical(self._array.take(pa.array(missing))))
        return self._known[places]

    def end_batch(self) -> None:
        """Let go of the batch, which may be a part of a much larger one."""
        self._batch, self._array, self._present = (None, None), None, None
        self._known = self._known[:0].copy()

    def of(self, slots: Slots, values: pa.Array) -> Slots:
        """Numbers of pairs; the values have the form of the index."""
        return self._pairs.slots_of((slots << _CODE_BITS) | self._values.slots(_Values([values])))

    def codes(self) -> Slots:
        """By number: row * 2**32 + number of the value. They stay as they are while pairs are added."""
        return self._pairs.numbers()

    def values(self, codes: Slots) -> pa.Array:
        """Values, in the form of the index, of some codes."""
        return self._values.key_arrays_of(codes & _CODES)[0]

    def frozen_values(self) -> Callable[[], pa.Array]:
        """O(1): all values known now, in the column's type, made when called, on any thread."""
        values, source = self._values.frozen_keys(), self._source
        return lambda: _stored(values()[0], source)

    def renewed(self) -> DistinctPairs:
        """Pairs of the same column; there are none yet."""
        return DistinctPairs(self._source)

    def size(self) -> int:
        """Bytes, estimated."""
        values = self._values.key_arrays(0, self._values.count)[0]
        return 24 * self._pairs.count + int(values.nbytes) + 16 * self._values.count


class DistinctAccumulator(AccumulatorColumns):
    """One aggregate's sets, and in its one column how many values each has."""

    __slots__ = ("_added_at", "_count", "_holds", "_live", "_numbers", "_owns_pairs", "_since", "_source", "pairs")

    def __init__(
        self, aggregate: ColumnAggregate, capacity: int, where: dict[str, Any], pairs: DistinctPairs | None = None
    ) -> None:
        """`pairs`: those of another aggregate of the same column and the same rows."""
        super().__init__(aggregate, parts_of_distinct(aggregate), capacity, where)
        assert aggregate.input_type is not None
        self._source: pa.DataType = aggregate.input_type
        self._owns_pairs = pairs is None
        self.pairs = DistinctPairs(self._source) if pairs is None else pairs
        self._holds = np.zeros(_PAIRS_MIN, np.bool_)
        """Whether a pair, by number, is in the sets."""
        self._numbers: Slots = np.empty(_PAIRS_MIN, np.int64)
        """Of the pairs in the sets, in order of arrival; only appended to."""
        self._count = 0
        self._live = 0
        """Of these pairs, those whose row has not begun anew since."""
        self._since: Slots | None = None
        """Of each row: where in `_numbers` it began anew. What stands before is not in its set. None: no row has."""
        self._added_at: Slots = self._numbers[:0]
        """Where in `_numbers` a pair, by number, was added last; kept if rows begin anew."""

    @property
    def result_type(self) -> pa.DataType:
        return pa.int64()

    def result(self, rows: slice | Slots) -> pa.Array:
        return pa.array(self.columns[0][rows].copy())

    def update(self, slots: Slots, values: Values, rows_before: int, times: Slots | None = None) -> None:
        if isinstance(values, Chosen):
            self._add(self.pairs.of_batch(slots, values.values, values.rows))
        else:
            self._add(self.pairs.of_batch(slots, values, None))

    def end_batch(self) -> None:
        if self._owns_pairs:
            self.pairs.end_batch()

    def merge(self, slots: Slots, other: DistinctAccumulator, rows: Slots, rows_before: int) -> None:
        for into, values in other.values_at(slots, rows, max(1, other._count)):
            if len(into):
                self._add(self.pairs.of(into, values))

    def values_at(self, slots: Slots, rows: Slots, pairs: int) -> Iterator[tuple[Slots, pa.Array]]:
        """The values of some rows, in the form of the index, each with the slot that its row is to have: of so many pairs at a
        time, the values that are such."""
        target = np.full(len(self.columns[0]), -1, np.int64)
        target[rows] = slots
        for start in range(0, self._count, pairs):
            codes_of = self.pairs.codes()
            codes = codes_of[_held(self._numbers[: min(start + pairs, self._count)], codes_of, self._since, start)]
            into = target[codes >> _CODE_BITS]
            found = np.flatnonzero(into >= 0)
            yield into[found], self.pairs.values(codes[found])

    def load(self, slots: Slots, arrays: Sequence[pa.Array], rows_before: int) -> None:
        """Raises ValueError for a null in a list."""
        lists = arrays[0]
        values = lists.flatten()
        if values.null_count:
            raise ValueError(f"column {self.parts[0].name!r} holds a null in a list")
        if len(values):
            owners = np.repeat(slots, lists.value_lengths().to_numpy(zero_copy_only=False))
            self._add(self.pairs.of(owners, _canonical(arrow_values(values, self._source))))

    @property
    def held_count(self) -> int:
        return self._count

    def freeze(self) -> FrozenSets:
        began = None if self._since is None else self._since.copy()
        return FrozenSets(self._numbers[: self._count], self.pairs.codes(), self.pairs.frozen_values(), self._source, began)

    def snapshot_arrays(self, columns: Sequence[Column], seen: Mask | None) -> list[pa.Array]:
        return self.freeze()(columns, seen)

    def size(self) -> int:
        own = self.columns[0].nbytes + (9 if self._since is None else 17) * self._count
        return own + self.pairs.size() if self._owns_pairs else own

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        if self._since is not None:
            self._since = extended(self._since, capacity, 0)

    def reset(self, slots: Slots, count: int) -> None:
        if self._since is None:
            self._since = np.zeros(len(self.columns[0]), np.int64)
            self._added_at = np.zeros(len(self._holds), np.int64)
            self._added_at[self._numbers[: self._count]] = np.arange(self._count)
        self._live -= int(self.columns[0][slots].sum())
        self._since[slots] = self._count
        super().reset(slots, count)

    @property
    def live(self) -> int:
        """Pairs in the sets."""
        return self._live

    @property
    def listed(self) -> int:
        """Pairs that are in the sets, or were before a row began anew, with repeats."""
        return self._count

    def renewed(self, pairs: DistinctPairs) -> None:
        """The same sets, of other pairs."""
        codes = self.pairs.codes()[self._numbers_held()]
        numbers = pairs.of(codes >> _CODE_BITS, self.pairs.values(codes)) if len(codes) else _NONE
        self.pairs, self._numbers, self._count = pairs, extended(numbers, max(_PAIRS_MIN, len(numbers)), 0), len(numbers)
        self._holds = np.zeros(max(_PAIRS_MIN, pairs.count), np.bool_)
        self._holds[numbers] = True
        self._added_at = np.zeros(len(self._holds), np.int64)
        self._added_at[numbers] = np.arange(len(numbers))
        if self._since is not None:
            self._since[:] = 0

    def _numbers_held(self) -> Slots:
        return _held(self._numbers[: self._count], self.pairs.codes(), self._since)

    def _add(self, numbers: Slots) -> None:
        """Pairs, by number; repeats are allowed."""
        if self.pairs.count > len(self._holds):
            capacity = max(self.pairs.count, 2 * len(self._holds))
            self._holds = extended(self._holds, capacity, False)
            if self._since is not None:
                self._added_at = extended(self._added_at, capacity, 0)
        holds = self._holds[numbers]
        if self._since is not None:
            holds &= self._added_at[numbers] >= self._since[self.pairs.codes()[numbers] >> _CODE_BITS]
        new = numbers[~holds]
        if not len(new):
            return
        new = _firsts(new)
        self._holds[new] = True
        count = self._count + len(new)
        if count > len(self._numbers):
            self._numbers = extended(self._numbers, max(count, 2 * len(self._numbers)), 0)
        self._numbers[self._count : count] = new
        if self._since is not None:
            self._added_at[new] = np.arange(self._count, count)
        self._count = count
        self._live += len(new)
        np.add.at(self.columns[0], self.pairs.codes()[new] >> _CODE_BITS, 1)


def renew_pairs(accumulators: Sequence[AccumulatorColumns]) -> None:
    """Behind a reset of rows: where most pairs are in no set any more, those that are become all there are."""
    sharing: dict[int, list[DistinctAccumulator]] = {}
    for accumulator in accumulators:
        if isinstance(accumulator, DistinctAccumulator):
            sharing.setdefault(id(accumulator.pairs), []).append(accumulator)
    for some in sharing.values():
        held = sum(accumulator.live for accumulator in some)
        listed = sum(accumulator.listed for accumulator in some)
        if listed > 2 * held + _RENEWED_MIN or some[0].pairs.count > 2 * held + _RENEWED_MIN:
            pairs = some[0].pairs.renewed()
            for accumulator in some:
                accumulator.renewed(pairs)


def _held(numbers: Slots, codes: Slots, since: Slots | None, first: int = 0) -> Slots:
    """Of listed pairs, from the first on, those whose rows have not begun anew behind them."""
    some = numbers[first:]
    return some if since is None else some[np.arange(first, len(numbers)) >= since[codes[some] >> _CODE_BITS]]


@dataclass(frozen=True, slots=True)
class FrozenSets:
    """A `Frozen` of sets, which also tells what they gained."""

    numbers: Slots
    """Of the pairs in the sets, in order of arrival."""
    codes_of: Slots
    values: Callable[[], pa.Array]
    source: pa.DataType
    began: Slots | None = None
    """Of each row: where among the numbers it began anew. None: no row has."""
    first: int = 0
    """Numbers before it are left out."""

    def since(self, count: int) -> FrozenSets:
        """Without the values of which there were `count`."""
        return replace(self, first=count)

    def __call__(self, columns: Sequence[Column], seen: Mask | None) -> list[pa.Array]:
        codes = self.codes_of[_held(self.numbers, self.codes_of, self.began, self.first)]
        rows = codes >> _CODE_BITS
        lengths = np.bincount(rows, minlength=len(columns[0]))
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]).astype(np.int32)
        items = self.values().take(pa.array((codes & _CODES)[_in_order(rows)]))
        return [pa.ListArray.from_arrays(pa.array(offsets), items, type=pa.list_(self.source))]


def _firsts(numbers: Slots) -> Slots:
    """Each number once, in order of first arrival. Numbers are sorted faster than their positions, which go along as lowest
    bits."""
    shift = len(numbers).bit_length()
    packed = np.sort((numbers << shift) | np.arange(len(numbers)))
    ordered = packed >> shift
    is_first = np.ones(len(numbers), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    rows = packed[is_first] & ((1 << shift) - 1)
    rows.sort()
    found: Slots = numbers[rows]
    return found


def _in_order(rows: Slots) -> Slots:
    """Positions by row; those of one row keep their order."""
    shift = len(rows).bit_length()
    found: Slots = np.sort((rows << shift) | np.arange(len(rows))) & ((1 << shift) - 1)
    return found


class DistinctWindow:
    """Sets of a window that moves over panes: of each pair of row and value the last pane that it is in."""

    __slots__ = ("_counts", "_last", "_pairs", "_panes", "_values")

    def __init__(self, aggregate: ColumnAggregate, capacity: int) -> None:
        assert aggregate.input_type is not None
        self._values = _value_index(aggregate.input_type)
        self._pairs = Int64KeyIndex(pa.int64())
        self._counts = np.zeros(capacity, np.int64)
        self._last = np.zeros(capacity, np.int64)
        self._panes: dict[int, list[tuple[Slots, Slots]]] = {}

    def resize(self, capacity: int) -> None:
        """Rows."""
        self._counts = extended(self._counts, capacity, 0)

    def add(self, number: int, slots: Slots, pane: DistinctAccumulator, rows: Slots) -> Iterator[None]:
        """Rows of a pane, which may lie anywhere among those that are there; PAIRS_PER_STEP of its pairs in a step."""
        added = self._panes[number] = []
        place = _place(number)
        for into, values in pane.values_at(slots, rows, PAIRS_PER_STEP):
            if added:
                yield
            pairs = self._pairs.slots_of((into << _CODE_BITS) | self._values.slots(_Values([values])))
            if self._pairs.count > len(self._last):
                self._last = extended(self._last, max(self._pairs.count, 2 * len(self._last)), 0)
            added.append((into, pairs))
            is_new = self._last[pairs] == 0
            np.add.at(self._counts, into[is_new], 1)
            self._last[pairs] = np.where(is_new, place, np.maximum(self._last[pairs], place))

    def take_back(self, number: int) -> None:
        """The first pane leaves."""
        for into, pairs in self._panes.pop(number):
            gone = self._last[pairs] == _place(number)
            np.subtract.at(self._counts, into[gone], 1)
            self._last[pairs[gone]] = 0

    def results(self, slots: Slots | slice) -> pa.Array:
        return pa.array(self._counts[slots].copy())  # of a slice it is a view, and Arrow shares it


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
