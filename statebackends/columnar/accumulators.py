"""The accumulators of columnar state: count, sum, min, max and mean over dense slots, as numpy columns.

It decides how a batch is folded in and what the results are: nulls are ignored as in SQL, count(*) counts rows, sums
of integers are exact int64 or an error, those of decimals exact with 38 digits or an error, min and max keep their type, and NaN
is the largest number. It knows nothing of keys, namespaces, freezing or files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.statebackends.columnar import decimals
from holdfast.statebackends.errors import InvalidConfigError, StateOverflowError
from holdfast.statebackends.state import ColumnAggregate, ColumnarStateDescriptor

Slots = npt.NDArray[np.int64]
Column = npt.NDArray[Any]
Values: TypeAlias = npt.NDArray[Any] | Any | None
"""Numpy, masked numpy or Arrow array; None for count(*)."""

_INT64 = np.iinfo(np.int64)
_AGGREGATE = re.compile(r"(?P<function>count|sum|min|max|mean)(?:\((?P<type>[a-z0-9_]+)\))?(?=,|$)")
"""In the text of a columnar state, behind the name of a result and a `=`."""


@dataclass(frozen=True, slots=True)
class Part:
    """One numpy column of an accumulator. A row's initial value is the identity of the fold."""

    name: str
    """Column name in a snapshot."""
    dtype: np.dtype[Any]
    initial: Any
    nullable: bool
    """Whether a row may have seen no value at all; it is a null in snapshots and results."""
    decimal: pa.DataType | None = None
    """Of a column of decimals."""

    @property
    def arrow_type(self) -> pa.DataType:
        return pa.from_numpy_dtype(self.dtype) if self.decimal is None else self.decimal


def parts_of(aggregate: ColumnAggregate) -> tuple[Part, ...]:
    """Columns of one aggregate. Raises InvalidConfigError for an unknown function or an input type that doesn't fit."""
    output, source = aggregate.output, aggregate.input_type
    if aggregate.function == "count":
        return (Part(output, np.dtype(np.int64), 0, nullable=False),)
    if decimals.is_decimal(source):
        return _parts_of_decimals(aggregate, source)
    if source is None or not (pa.types.is_integer(source) or pa.types.is_floating(source)):
        raise InvalidConfigError(
            f"{aggregate.function}({aggregate.column}) needs a column of an integer, floating or decimal128 type, not {source}",
            column=aggregate.column,
        )
    dtype = np.dtype(source.to_pandas_dtype())
    total = np.dtype(np.float64 if dtype.kind == "f" else np.int64)
    match aggregate.function:
        case "sum":
            return (Part(output, total, 0, nullable=True),)
        case "mean":
            return (
                Part(f"{output}.sum", total, 0, nullable=False),
                Part(f"{output}.count", np.dtype(np.int64), 0, nullable=False),
            )
        case "max":
            lowest = -np.inf if dtype.kind == "f" else np.iinfo(dtype).min
            return (Part(output, dtype, lowest, nullable=True),)
        case "min":
            highest = np.nan if dtype.kind == "f" else np.iinfo(dtype).max
            return (Part(output, dtype, highest, nullable=True),)
    raise InvalidConfigError(f"unknown aggregate function {aggregate.function!r}", function=aggregate.function)


def _parts_of_decimals(aggregate: ColumnAggregate, source: pa.DataType) -> tuple[Part, ...]:
    output, dtype, total = aggregate.output, decimals.DECIMAL, decimals.sum_type(source)
    match aggregate.function:
        case "sum":
            return (Part(output, dtype, decimals.ZERO, nullable=True, decimal=total),)
        case "mean":
            return (
                Part(f"{output}.sum", dtype, decimals.ZERO, nullable=False, decimal=total),
                Part(f"{output}.count", np.dtype(np.int64), 0, nullable=False),
            )
        case "max":
            return (Part(output, dtype, decimals.LOWEST, nullable=True, decimal=source),)
        case "min":
            return (Part(output, dtype, decimals.HIGHEST, nullable=True, decimal=source),)
    raise InvalidConfigError(f"unknown aggregate function {aggregate.function!r}", function=aggregate.function)


def check_descriptor(descriptor: ColumnarStateDescriptor, key_names: Sequence[str] = ()) -> None:
    """Raises InvalidConfigError when an aggregate is invalid or two columns of results or snapshots share a name."""
    names = ["key_group", "namespace", *key_names]
    for aggregate in descriptor.aggregates:
        names += [part.name for part in parts_of(aggregate)]
        if aggregate.function == "mean":
            names.append(aggregate.output)
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InvalidConfigError(
            f"columnar state {descriptor.name!r} has more than one column named {', '.join(repeated)} "
            f"(its tables have {', '.join(('key_group', 'namespace', *key_names))} of their own)",
            state=descriptor.name,
            columns=repeated,
        )


def value_type_text(descriptor: ColumnarStateDescriptor) -> str:
    """Canonical text of the accumulators' types, compared at restore: `columnar<n=count,total=sum(int64)>`."""
    fields = (
        f"{aggregate.output}={aggregate.function}" + ("" if aggregate.input_type is None else f"({aggregate.input_type})")
        for aggregate in descriptor.aggregates
    )
    return f"columnar<{','.join(fields)}>"


def part_columns_of_text(text: str, names: Sequence[str]) -> list[pa.Field] | None:
    """The columns of a `value_type_text`, in its order; None if it says of columns that are not among `names`, or nothing known.

    Names are not escaped in it, so that they are needed to read it."""
    outputs = sorted({*names, *(name.removesuffix(".sum") for name in names)}, key=len, reverse=True)
    rest, fields = text.removeprefix("columnar<").removesuffix(">"), list[pa.Field]()
    while rest:
        named = ((each, _AGGREGATE.match(rest, len(each) + 1)) for each in outputs if rest.startswith(f"{each}="))
        output, found = next(((each, match) for each, match in named if match is not None), ("", None))
        if found is None:
            return None
        rest = rest[found.end() :].removeprefix(",")
        try:
            source = None if found["type"] is None else pa.type_for_alias(found["type"])
            parts = parts_of(ColumnAggregate(found["function"], None if source is None else output, output, source))
        except (ValueError, InvalidConfigError):
            return None
        fields += [pa.field(part.name, part.arrow_type, part.nullable) for part in parts]
    return fields if all(field.name in names for field in fields) else None


class Accumulator:
    """One aggregate's columns over slots [0, capacity). `seen` marks rows that got a value; None while all rows did."""

    __slots__ = ("_bound", "_where", "aggregate", "columns", "parts", "seen")

    def __init__(self, aggregate: ColumnAggregate, capacity: int, **where: str) -> None:
        """`where` names operator and state, for errors."""
        self.aggregate = aggregate
        self.parts = parts_of(aggregate)
        self.columns: list[Column] = [np.full(capacity, part.initial, part.dtype) for part in self.parts]
        self.seen: npt.NDArray[np.bool_] | None = None
        self._bound = 0  # no sum's magnitude is above this
        self._where: dict[str, Any] = {**where}

    def resize(self, capacity: int) -> None:
        """New, larger columns; the old arrays stay as they are for whoever holds them."""
        self.columns = [_extended(column, capacity, part.initial) for column, part in zip(self.columns, self.parts, strict=True)]
        if self.seen is not None:
            self.seen = _extended(self.seen, capacity, False)

    def update(self, slots: Slots, values: Values, rows_before: int) -> None:
        """Fold one value per slot in (repeats allowed). Slots from rows_before on are new in this batch."""
        if values is None:
            np.add.at(self.columns[0], slots, 1)
            return
        slots_present, present = _without_nulls(slots, values)
        if self.parts[0].nullable and (self.seen is not None or len(present) < len(slots)):
            self._mark_seen(slots_present, rows_before)
        if not len(present):
            return
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinities are values, not accidents
            self._fold(slots_present, present)

    def load(self, slots: Slots, arrays: Sequence[pa.Array], rows_before: int) -> None:
        """Set rows from snapshot columns, one array per part."""
        for column, part, array in zip(self.columns, self.parts, arrays, strict=True):
            column[slots] = _loaded(part, array)
        if arrays[0].null_count or self.seen is not None:
            self._mark_seen(slots[np.asarray(arrays[0].is_valid())], rows_before)
        if self.columns[0].dtype == np.int64:
            self._bound = _magnitude(self.columns[0])

    def snapshot_arrays(self, columns: Sequence[Column], seen: npt.NDArray[np.bool_] | None) -> list[pa.Array]:
        """Arrow arrays of (private copies of) this accumulator's columns, one per part."""
        mask = None if seen is None else ~seen
        return [_as_arrow(part, column, mask) for column, part in zip(columns, self.parts, strict=True)]

    def result(self, rows: slice | Slots) -> pa.Array:
        """The aggregate's values of some slots; a copy."""
        first = self.columns[0][rows]
        if self.aggregate.function == "mean":
            counts = self.columns[1][rows]
            if self.parts[0].decimal is not None:
                return decimals.means(first, counts, self.aggregate.input_type)
            with np.errstate(invalid="ignore", divide="ignore"):
                return pa.array(first / counts, pa.float64(), mask=counts == 0)
        mask = None if self.seen is None else ~self.seen[rows]
        return _as_arrow(self.parts[0], first.copy(), mask)

    @property
    def result_type(self) -> pa.DataType:
        if self.aggregate.function != "mean":
            return self.parts[0].arrow_type
        return pa.float64() if self.parts[0].decimal is None else decimals.mean_type(self.aggregate.input_type)

    def _fold(self, slots: Slots, values: Column) -> None:
        match self.aggregate.function:
            case "count":
                np.add.at(self.columns[0], slots, 1)
            case "sum":
                self._add(slots, values)
            case "mean":
                self._add(slots, values)
                np.add.at(self.columns[1], slots, 1)
            case "max" if self.parts[0].decimal is not None:
                decimals.keep_greatest_at(self.columns[0], slots, values)
            case "min" if self.parts[0].decimal is not None:
                decimals.keep_least_at(self.columns[0], slots, values)
            case "max":
                np.maximum.at(self.columns[0], slots, _as_type(values, self.parts[0].dtype))
            case "min":
                np.fmin.at(self.columns[0], slots, _as_type(values, self.parts[0].dtype))

    def _mark_seen(self, slots: Slots, rows_before: int) -> None:
        if self.seen is None:
            self.seen = np.zeros(len(self.columns[0]), np.bool_)
            self.seen[:rows_before] = True
        self.seen[slots] = True

    def _add(self, slots: Slots, values: Column) -> None:
        totals = self.columns[0]
        if self.parts[0].decimal is not None:
            if not decimals.add_at(totals, slots, values):
                raise self._overflow(f"{decimals.PRECISION_MAX} digits")
            return
        if totals.dtype == np.int64:
            self._bound += _magnitude(values) * len(values)
            if self._bound > _INT64.max:
                self._check_overflow(slots, values)
        np.add.at(totals, slots, _as_type(values, totals.dtype))

    def _check_overflow(self, slots: Slots, values: Column) -> None:
        """The cheap bound was reached: take it from the sums themselves; if still too large, add in exact integers."""
        totals = self.columns[0]
        self._bound = _magnitude(totals) + _magnitude(values) * len(values)
        if self._bound <= _INT64.max:
            return
        touched, index = np.unique(slots, return_inverse=True)
        sums = totals[touched].astype(object)
        np.add.at(sums, index, values.astype(object))
        if sums.max() > _INT64.max or sums.min() < _INT64.min:
            raise self._overflow("int64")

    def _overflow(self, limit: str) -> StateOverflowError:
        name = f"{self.aggregate.function}({self.aggregate.column})"
        return StateOverflowError(f"{name} is beyond {limit}", column=self.aggregate.column, **self._where)


def _magnitude(values: Column) -> int:
    """Largest absolute value, as an exact int; 0 for no values."""
    return max(int(values.max()), -int(values.min())) if len(values) else 0


def _loaded(part: Part, array: pa.Array) -> Column:
    """A part's numpy column of its snapshot column."""
    if part.decimal is None:
        numbers: Column = array.fill_null(pa.scalar(part.initial, part.arrow_type)).to_numpy(zero_copy_only=False)
        return numbers
    column = decimals.from_arrow(array)
    if array.null_count:
        column[np.asarray(array.is_null())] = part.initial
    return column


def _as_arrow(part: Part, column: Column, null: npt.NDArray[np.bool_] | None) -> pa.Array:
    """The Arrow array of a part's column."""
    if part.decimal is None:
        return pa.array(column, part.arrow_type, mask=null)
    return decimals.to_arrow(column, part.decimal, null)


def _as_type(values: Column, dtype: np.dtype[Any]) -> Column:
    return np.ascontiguousarray(values, dtype)  # the same array when it already fits: ufunc.at is fast only then


def _without_nulls(slots: Slots, values: npt.NDArray[Any] | pa.Array) -> tuple[Slots, Column]:
    if isinstance(values, np.ma.MaskedArray):
        if values.mask is np.ma.nomask or not values.mask.any():
            return slots, values.data
        present = ~values.mask
        return slots[present], values.data[present]
    if isinstance(values, np.ndarray):
        return slots, values
    if values.null_count:
        slots = slots[values.is_valid().to_numpy(zero_copy_only=False)]
        values = values.drop_null()
    if decimals.is_decimal(values.type):
        return slots, decimals.from_arrow(values)
    return slots, values.to_numpy(zero_copy_only=False)


def _extended(column: Column, capacity: int, initial: Any) -> Column:
    bigger = np.empty(capacity, column.dtype)
    bigger[: len(column)] = column
    bigger[len(column) :] = initial
    return bigger
