"""Accumulators that keep one value of a row's many: first, last, arg_max, arg_min, and min and max of text.

What is kept is the least by some order: the column of comparison, then event time, then arrival. Nulls are passed over: a record
without value, or without what it is compared by, is not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.statebackends.columnar.column_values import dtype_of, from_arrow, ranks, to_arrow
from holdfast.statebackends.columnar.parts import (
    AccumulatorColumns,
    Mask,
    Part,
    Slots,
    Values,
    arrow_values,
    part_of,
)
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.state import ColumnAggregate

PICKS = frozenset({"first", "last", "arg_max", "arg_min"})
_LATEST = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class _Order:
    """How records are compared."""

    by: str | None
    """What is compared: the column `by` or the value itself; None: nothing but time."""
    greatest: bool
    """Of what is compared, the greatest comes first."""
    by_time: bool
    latest: bool
    """Of equals the latest, else the earliest."""


_ORDERS = {
    "first": _Order(None, greatest=False, by_time=True, latest=False),
    "last": _Order(None, greatest=False, by_time=True, latest=True),
    "arg_max": _Order("by", greatest=True, by_time=True, latest=False),
    "arg_min": _Order("by", greatest=False, by_time=True, latest=False),
    "max": _Order("value", greatest=True, by_time=False, latest=False),
    "min": _Order("value", greatest=False, by_time=False, latest=False),
}


def parts_of_pick(aggregate: ColumnAggregate) -> tuple[Part, ...]:
    """The value, what it was compared by, and its event time. Raises InvalidConfigError for a type that can't be kept."""
    order, name = _ORDERS[aggregate.function], aggregate.output
    parts = [_part(name, aggregate, aggregate.column, aggregate.input_type)]
    if order.by == "by":
        parts.append(_part(f"{name}.by", aggregate, aggregate.by, aggregate.by_type))
    if order.by_time:
        parts.append(Part(f"{name}.time", np.dtype(np.int64), 0, nullable=True))
    return tuple(parts)


def _part(name: str, aggregate: ColumnAggregate, column: str | None, data_type: pa.DataType | None) -> Part:
    dtype = None if data_type is None else dtype_of(data_type)
    if dtype is None:
        raise InvalidConfigError(
            f"{aggregate.function} can't keep column {column!r} of type {data_type}: numbers, booleans, text, binary values, "
            "decimal128, dates and times can be kept",
            column=column,
        )
    return part_of(name, data_type, None if dtype.kind == "O" else np.zeros((), dtype)[()])


class PickAccumulator(AccumulatorColumns):
    """One aggregate's columns: the values kept, and what a better one is compared with."""

    __slots__ = ("_order",)

    def __init__(self, aggregate: ColumnAggregate, capacity: int, where: dict[str, Any]) -> None:
        super().__init__(aggregate, parts_of_pick(aggregate), capacity, where)
        self._order = _ORDERS[aggregate.function]
        self.seen = np.zeros(capacity, np.bool_)

    @property
    def result_type(self) -> pa.DataType:
        return self.parts[0].arrow_type

    def result(self, rows: slice | Slots) -> pa.Array:
        held = self.columns[0][rows].copy()  # of a slice it is a view, and Arrow shares it: what left would change with the state
        return to_arrow(held, self.parts[0].arrow_type, ~self._seen[rows])

    def update(self, slots: Slots, values: Values, rows_before: int, times: Slots | None = None) -> None:
        columns = values if isinstance(values, tuple) else (values,)
        arrays = [arrow_values(column, part.arrow_type) for column, part in zip(columns, self.parts, strict=False)]
        if any(array.null_count for array in arrays):
            present = _present(arrays)
            slots, times = slots[present], None if times is None else times[present]
            arrays = [array.filter(pa.array(present)) for array in arrays]
        if not len(slots):
            return
        stamps = np.zeros(len(slots), np.int64) if times is None else times
        rows = _first_rows(slots, self._keys(arrays, stamps), len(self._seen), latest=self._order.latest)
        taken = pa.array(rows)
        self._offer(slots[rows], [array.take(taken) for array in arrays], stamps[rows])

    def merge(self, slots: Slots, other: PickAccumulator, rows: Slots, rows_before: int) -> None:
        seen = other._seen[rows]
        if not seen.all():
            slots, rows = slots[seen], rows[seen]
        if len(slots):
            held = zip(other.columns, other.parts, strict=True)
            arrays = [to_arrow(column[rows], part.arrow_type) for column, part in held]
            stamps = other.columns[-1][rows] if self._order.by_time else np.zeros(len(rows), np.int64)
            self._offer(slots, arrays[:-1] if self._order.by_time else arrays, stamps)

    @property
    def _seen(self) -> Mask:
        assert self.seen is not None
        return self.seen

    def _keys(self, arrays: Sequence[pa.Array], stamps: Slots) -> list[Slots]:
        """What records are ordered by: the least comes first."""
        keys = []
        if self._order.by is not None:
            compared = ranks(arrays[-1])
            keys.append(~compared if self._order.greatest else compared)
        if self._order.by_time:
            keys.append(~stamps if self._order.latest else stamps)
        return keys

    def _offer(self, slots: Slots, arrays: Sequence[pa.Array], stamps: Slots) -> None:
        """One record for each of some distinct slots, newer than what is kept there."""
        better = ~self._seen[slots]
        held = np.flatnonzero(~better)
        if len(held):
            better[held] = self._beats(slots[held], [array.take(pa.array(held)) for array in arrays], stamps[held])
        won = np.flatnonzero(better)
        taken, at = pa.array(won), slots[won]
        for column, array in zip(self.columns, arrays, strict=False):
            column[at] = from_arrow(array.take(taken))
        if self._order.by_time:
            self.columns[-1][at] = stamps[won]
        self._seen[at] = True

    def _beats(self, slots: Slots, arrays: Sequence[pa.Array], stamps: Slots) -> Mask:
        """Whether each record comes before the one that is kept."""
        count = len(slots)
        position = len(arrays) - 1
        kept = to_arrow(self.columns[position][slots], self.parts[position].arrow_type)
        both = [*arrays[:-1], pa.concat_arrays([arrays[-1], kept])]
        kept_stamps = self.columns[-1][slots] if self._order.by_time else stamps
        before, equal = np.zeros(count, np.bool_), np.ones(count, np.bool_)
        for key in self._keys(both, np.concatenate([stamps, kept_stamps])):
            before |= equal & (key[:count] < key[count:])
            equal &= key[:count] == key[count:]
        return before | equal if self._order.latest else before


def _present(arrays: Sequence[pa.Array]) -> Mask:
    """Rows without any null."""
    present: Mask = np.ones(len(arrays[0]), np.bool_)
    for array in arrays:
        present &= np.asarray(pc.is_valid(array))
    return present


def _first_rows(slots: Slots, keys: Sequence[Slots], capacity: int, *, latest: bool) -> Slots:
    """One row of each slot: that with the least keys, of equals the earliest row, or the latest."""
    rows = np.arange(len(slots))
    cells = np.empty(capacity, np.int64)  # only those of the slots at hand are ever looked at
    for key in keys:
        at, key = slots[rows], key[rows]
        cells[at] = _LATEST
        np.minimum.at(cells, at, key)
        rows = rows[key == cells[at]]
    order = rows if latest else rows[::-1]
    cells[slots[order]] = order  # of several rows of a slot the last assignment stays
    found: Slots = rows[cells[slots[rows]] == rows]
    return found
