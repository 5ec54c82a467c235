"""The accumulators of columnar state: count, sum, min, max and mean over dense slots, as numpy columns, and which accumulator
computes what.

It decides how a batch is folded in and what the results are: nulls are ignored as in SQL, count(*) counts rows, sums
of integers are exact int64 or an error, those of decimals exact with 38 digits or an error, min and max keep their type, and NaN
is the largest number. It knows nothing of keys, namespaces, freezing or files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.statebackends.columnar import decimals
from holdfast.statebackends.columnar.column_values import from_arrow, is_temporal, is_text
from holdfast.statebackends.columnar.deviation import DeviationAccumulator, parts_of_deviation
from holdfast.statebackends.columnar.distinct import DistinctAccumulator, DistinctPairs, parts_of_distinct
from holdfast.statebackends.columnar.parts import AccumulatorColumns, Column, Part, Slots, Values, as_arrow, part_of
from holdfast.statebackends.columnar.picks import PICKS, PickAccumulator, parts_of_pick
from holdfast.statebackends.errors import InvalidConfigError, StateOverflowError
from holdfast.statebackends.state import ColumnAggregate, ColumnarStateDescriptor

_INT64 = np.iinfo(np.int64)
_FUNCTIONS = "count_distinct|count|sum|min|max|mean|first|last|arg_max|arg_min|stddev"
_AGGREGATE = re.compile(rf"(?P<function>{_FUNCTIONS})(?:\((?P<type>[a-z0-9_]+)(?:;(?P<by>[a-z0-9_]+))?\))?(?=,|$)")
"""In the text of a columnar state, behind the name of a result and a `=`."""
_SUFFIXES = (".sum", ".count", ".first", ".squares", ".by", ".time")
"""Behind the name of a result: parts of its accumulator."""
_NEVER_NULL = frozenset({"count", "count_distinct"})


def parts_of(aggregate: ColumnAggregate) -> tuple[Part, ...]:
    """Columns of one aggregate. Raises InvalidConfigError for an unknown function or an input type that doesn't fit."""
    output, source = aggregate.output, aggregate.input_type
    if aggregate.function == "count":
        return (Part(output, np.dtype(np.int64), 0, nullable=False),)
    if aggregate.function in PICKS or _keeps_text(aggregate):
        return parts_of_pick(aggregate)
    if aggregate.function == "count_distinct":
        return parts_of_distinct(aggregate)
    if aggregate.function == "stddev":
        return parts_of_deviation(aggregate)
    if decimals.is_decimal(source):
        return _parts_of_decimals(aggregate, source)
    if source is not None and aggregate.function in ("min", "max") and (pa.types.is_boolean(source) or is_temporal(source)):
        return (_extreme_of_integers(aggregate, source),)
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


def _keeps_text(aggregate: ColumnAggregate) -> bool:
    return aggregate.function in ("min", "max") and aggregate.input_type is not None and is_text(aggregate.input_type)


def _extreme_of_integers(aggregate: ColumnAggregate, source: pa.DataType) -> Part:
    """Of booleans, and of dates and times, which are integers here."""
    part = part_of(aggregate.output, source, 0)
    least, greatest = (False, True) if part.dtype == np.bool_ else (np.iinfo(part.dtype).min, np.iinfo(part.dtype).max)
    return part_of(aggregate.output, source, least if aggregate.function == "max" else greatest)


def is_exact(aggregate: ColumnAggregate) -> bool:
    """Whether some of its values, folded by themselves, can be merged at any time with the same result; `merge` then takes slots
    that repeat. Sums of floats go by the order of addition; what keeps values as they are, as count_distinct, gains nothing."""
    source = aggregate.input_type
    match aggregate.function:
        case "count":
            return True
        case "sum" | "mean":
            return source is not None and (pa.types.is_integer(source) or decimals.is_decimal(source))
        case "min" | "max":
            return not _keeps_text(aggregate)
    return False


def create_accumulator(aggregate: ColumnAggregate, capacity: int, **where: str) -> AccumulatorColumns:
    """An accumulator with `capacity` rows. `where` names operator and state, for errors."""
    if aggregate.function in PICKS or _keeps_text(aggregate):
        return PickAccumulator(aggregate, capacity, where)
    if aggregate.function == "count_distinct":
        return DistinctAccumulator(aggregate, capacity, where)
    if aggregate.function == "stddev":
        return DeviationAccumulator(aggregate, capacity, where)
    return Accumulator(aggregate, capacity, where)


def create_accumulators(aggregates: Sequence[ColumnAggregate], capacity: int, **where: str) -> list[AccumulatorColumns]:
    """The accumulators of the same rows, as `create_accumulator`; those that count the values of one column share them."""
    pairs: dict[tuple[Any, Any], DistinctPairs] = {}
    made: list[AccumulatorColumns] = []
    for aggregate in aggregates:
        if aggregate.function == "count_distinct":
            column = (aggregate.column, aggregate.input_type)
            distinct = DistinctAccumulator(aggregate, capacity, where, pairs.get(column))
            pairs[column] = distinct.pairs
            made.append(distinct)
        else:
            made.append(create_accumulator(aggregate, capacity, **where))
    return made


def result_field(aggregate: ColumnAggregate) -> pa.Field:
    """The column of an aggregate's results; all but counts may be null, when no value was seen."""
    return pa.field(aggregate.output, create_accumulator(aggregate, 0).result_type, aggregate.function not in _NEVER_NULL)


def _parts_of_decimals(aggregate: ColumnAggregate, source: pa.DataType) -> tuple[Part, ...]:
    output, dtype, total = aggregate.output, decimals.DECIMAL, decimals.sum_type(source)
    match aggregate.function:
        case "sum":
            return (Part(output, dtype, decimals.ZERO, nullable=True, declared_type=total),)
        case "mean":
            return (
                Part(f"{output}.sum", dtype, decimals.ZERO, nullable=False, declared_type=total),
                Part(f"{output}.count", np.dtype(np.int64), 0, nullable=False),
            )
        case "max":
            return (Part(output, dtype, decimals.LOWEST, nullable=True, declared_type=source),)
        case "min":
            return (Part(output, dtype, decimals.HIGHEST, nullable=True, declared_type=source),)
    raise InvalidConfigError(f"unknown aggregate function {aggregate.function!r}", function=aggregate.function)


def check_descriptor(descriptor: ColumnarStateDescriptor, key_names: Sequence[str] = ()) -> None:
    """Raises InvalidConfigError when an aggregate is invalid or two columns of results or snapshots share a name."""
    names = ["key_group", "namespace", *key_names]
    for aggregate in descriptor.aggregates:
        parts = [part.name for part in parts_of(aggregate)]
        names += parts if aggregate.output in parts else [*parts, aggregate.output]
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
    return f"columnar<{','.join(map(_aggregate_text, descriptor.aggregates))}>"


def _aggregate_text(aggregate: ColumnAggregate) -> str:
    by = "" if aggregate.by_type is None else f";{aggregate.by_type}"
    return f"{aggregate.output}={aggregate.function}" + ("" if aggregate.input_type is None else f"({aggregate.input_type}{by})")


def part_columns_of_text(text: str, names: Sequence[str]) -> list[pa.Field] | None:
    """The columns of a `value_type_text`, in its order; None if it says of columns that are not among `names`, or nothing known.

    Names are not escaped in it, so that they are needed to read it."""
    outputs = sorted({*names, *(name.removesuffix(end) for name in names for end in _SUFFIXES)}, key=len, reverse=True)
    rest, fields = text.removeprefix("columnar<").removesuffix(">"), list[pa.Field]()
    while rest:
        named = ((each, _AGGREGATE.match(rest, len(each) + 1)) for each in outputs if rest.startswith(f"{each}="))
        output, found = next(((each, match) for each, match in named if match is not None), ("", None))
        if found is None:
            return None
        rest = rest[found.end() :].removeprefix(",")
        try:
            source, by = (None if found[each] is None else pa.type_for_alias(found[each]) for each in ("type", "by"))
            column = None if source is None else output
            parts = parts_of(ColumnAggregate(found["function"], column, output, source, by=column, by_type=by))
        except (ValueError, InvalidConfigError):
            return None
        fields += [pa.field(part.name, part.arrow_type, part.nullable) for part in parts]
    return fields if all(field.name in names for field in fields) else None


class Accumulator(AccumulatorColumns):
    """One aggregate's columns: count, sum, min, max or mean of numbers, dates and times."""

    __slots__ = ("_bound",)

    def __init__(self, aggregate: ColumnAggregate, capacity: int, where: dict[str, Any]) -> None:
        super().__init__(aggregate, parts_of(aggregate), capacity, where)
        self._bound = 0  # no sum's magnitude is above this

    def update(self, slots: Slots, values: Values, rows_before: int, times: Slots | None = None) -> None:
        if values is None:
            np.add.at(self.columns[0], slots, 1)
            return
        if self.aggregate.function == "count" and isinstance(values, np.ma.MaskedArray):  # to add zeros is cheaper than to select
            np.add.at(self.columns[0], slots, (~np.ma.getmaskarray(values)).astype(np.int64))
            return
        slots_present, present = _without_nulls(slots, values)
        if self.parts[0].nullable and (self.seen is not None or len(present) < len(slots)):
            self._mark_seen(slots_present, rows_before)
        if not len(present):
            return
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinities are values, not accidents
            self._fold(slots_present, present)

    def merge(self, slots: Slots, other: Accumulator, rows: Slots, rows_before: int) -> None:
        is_nullable = self.parts[0].nullable
        if is_nullable and other.seen is not None and not (seen := other.seen[rows]).all():
            if self.seen is None:
                self._mark_seen(slots[:0], rows_before)
            slots, rows = slots[seen], rows[seen]
        if is_nullable and self.seen is not None:
            self.seen[slots] = True
        if not len(slots):
            return
        values = other.columns[0][rows]
        with np.errstate(invalid="ignore", over="ignore"):
            match self.aggregate.function:
                case "count":
                    np.add.at(self.columns[0], slots, values)
                case "mean":
                    self._add(slots, values)
                    np.add.at(self.columns[1], slots, other.columns[1][rows])
                case _:
                    self._fold(slots, values)

    def load(self, slots: Slots, arrays: Sequence[pa.Array], rows_before: int) -> None:
        super().load(slots, arrays, rows_before)
        self._raise_bound(self.columns[0])

    def put_back(self, slots: Slots, saved: Sequence[Column]) -> None:
        super().put_back(slots, saved)
        self._raise_bound(saved[0])

    def result(self, rows: slice | Slots) -> pa.Array:
        first = self.columns[0][rows]
        if self.aggregate.function == "mean":
            counts = self.columns[1][rows]
            if self._is_decimal:
                return decimals.means(first, counts, self.aggregate.input_type)
            with np.errstate(invalid="ignore", divide="ignore"):
                return pa.array(first / counts, pa.float64(), mask=counts == 0)
        mask = None if self.seen is None else ~self.seen[rows]
        return as_arrow(self.parts[0], first.copy(), mask)

    def merged_result(self, other: Self, slots: Slots | slice) -> pa.Array:
        first, second = self.columns[0][slots], other.columns[0][slots]  # a row without values has the identity of the fold
        match self.aggregate.function:
            case "count":
                merged = first + second
            case "sum" if not self._is_decimal and self._bound + other._bound <= _INT64.max:
                with np.errstate(invalid="ignore", over="ignore"):
                    merged = first + second
            case "max" if not self._is_decimal:
                merged = np.maximum(first, second)
            case "min" if not self._is_decimal:
                merged = np.fmin(first, second)
            case _:
                return super().merged_result(other, slots)
        null = None if self.seen is None or other.seen is None else ~(self.seen[slots] | other.seen[slots])
        return as_arrow(self.parts[0], merged, null)

    @property
    def result_type(self) -> pa.DataType:
        if self.aggregate.function != "mean":
            return self.parts[0].arrow_type
        return decimals.mean_type(self.aggregate.input_type) if self._is_decimal else pa.float64()

    @property
    def _is_decimal(self) -> bool:
        return self.parts[0].dtype == decimals.DECIMAL

    def _raise_bound(self, totals: Column) -> None:
        if totals.dtype == np.int64:
            self._bound = max(self._bound, _magnitude(totals))

    def _fold(self, slots: Slots, values: Column) -> None:
        match self.aggregate.function:
            case "count":
                np.add.at(self.columns[0], slots, 1)
            case "sum":
                self._add(slots, values)
            case "mean":
                self._add(slots, values)
                np.add.at(self.columns[1], slots, 1)
            case "max" if self._is_decimal:
                decimals.keep_greatest_at(self.columns[0], slots, values)
            case "min" if self._is_decimal:
                decimals.keep_least_at(self.columns[0], slots, values)
            case "max":
                np.maximum.at(self.columns[0], slots, _as_type(values, self.parts[0].dtype))
            case "min":
                np.fmin.at(self.columns[0], slots, _as_type(values, self.parts[0].dtype))

    def _add(self, slots: Slots, values: Column) -> None:
        totals = self.columns[0]
        if self._is_decimal:
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
        return StateOverflowError(f"{self.name} is beyond {limit}", column=self.aggregate.column, **self._where)


def _magnitude(values: Column) -> int:
    """Largest absolute value, as an exact int; 0 for no values."""
    return max(int(values.max()), -int(values.min())) if len(values) else 0


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
    return slots, from_arrow(values)
