"""Aggregates of windows and running aggregates, as users write them: `flights=hf.count(), worst=hf.max("delay")`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.operators.functions import expressions
from holdfast.operators.functions.predicates import Selection, Where, rows_where, selection
from holdfast.operators.functions.schema import RowType
from holdfast.statebackends.columnar.accumulators import check_descriptor, result_field
from holdfast.statebackends.columnar.parts import Chosen, Values
from holdfast.statebackends.errors import GraphError, InvalidConfigError
from holdfast.statebackends.state import ColumnAggregate, ColumnarStateDescriptor


@dataclass(frozen=True, slots=True)
class Aggregate:
    """A columnar aggregate that has no name yet. Nulls are ignored, as in SQL.

    `where`, of each: which rows it takes; the name of a boolean column, a condition in SQL ("price < 10000", with the extra
    holdfast[sql]), of both null counts as false, or a function of a batch's columns (a pa.RecordBatch) that returns a boolean for
    each row. A key of which it takes none has a result all the same: 0 or null."""

    function: str
    column: str | None = None
    by: str | None = None
    where: Where | None = None

    def __setstate__(self, state: Sequence[Any]) -> None:
        """Of pickled state that may be older than a field."""
        for name, value in zip_longest(self.__slots__, state):
            object.__setattr__(self, name, value)


def count(column: str | None = None, *, where: Where | None = None) -> Aggregate:
    """Number of rows, or of the values of a column that are not null."""
    return Aggregate("count", column, where=where)


def count_distinct(column: str, *, where: Where | None = None) -> Aggregate:
    """Number of different values, exact: all of them are kept. -0.0 and 0.0 are one value, and so are all NaN."""
    return Aggregate("count_distinct", column, where=where)


def sum(column: str, *, where: Where | None = None) -> Aggregate:
    """Sum: int64 of integers, decimal128(38, s) of decimal128(p, s), float64 of floats. An overflow is an error."""
    return Aggregate("sum", column, where=where)


def min(column: str, *, where: Where | None = None) -> Aggregate:
    """Smallest value, of the column's type: a number, boolean, text, binary value, date or time. False is below True; text is
    compared by code points."""
    return Aggregate("min", column, where=where)


def max(column: str, *, where: Where | None = None) -> Aggregate:
    """Largest value, of the column's type, as in `min`. NaN is the largest number."""
    return Aggregate("max", column, where=where)


def mean(column: str, *, where: Where | None = None) -> Aggregate:
    """Arithmetic mean: float64; of decimal128(p, s) a decimal with four more digits, or up to 38, rounded half away from zero."""
    return Aggregate("mean", column, where=where)


def stddev(column: str, *, where: Where | None = None) -> Aggregate:
    """Standard deviation of a sample, as `stddev_samp` in SQL: float64; null of fewer than two values."""
    return Aggregate("stddev", column, where=where)


def first(column: str, *, where: Where | None = None) -> Aggregate:
    """The value of the record with the earliest event time, of equals the one that came first; without event times the first that
    came. Records without value are passed over."""
    return Aggregate("first", column, where=where)


def last(column: str, *, where: Where | None = None) -> Aggregate:
    """The value of the record with the latest event time, of equals the one that came last; else as `first`."""
    return Aggregate("last", column, where=where)


def arg_max(column: str, by: str, *, where: Where | None = None) -> Aggregate:
    """The value of the record with the greatest `by`; of equals the earliest, by event time, then by arrival.

    Records without value or without `by` are passed over. NaN is the greatest number."""
    return Aggregate("arg_max", column, by, where)


def arg_min(column: str, by: str, *, where: Where | None = None) -> Aggregate:
    """The value of the record with the least `by`; else as `arg_max`."""
    return Aggregate("arg_min", column, by, where)


def columnar_descriptor(
    name: str, aggregates: Mapping[str, Aggregate], input_type: RowType, reserved: Sequence[str], operator: str
) -> ColumnarStateDescriptor:
    """The state of these aggregates over rows of `input_type`; `reserved` are the other columns of the result.

    Raises GraphError and UnknownColumnError, naming the operator."""
    if not aggregates:
        raise GraphError(f"operator {operator!r}: name at least one aggregate, such as rows=hf.count()", operator=operator)
    columns = []
    texts: dict[str, Selection | None] = {}  # of each condition one, which is then evaluated once for a batch
    for output, aggregate in aggregates.items():
        if not isinstance(aggregate, Aggregate):
            raise GraphError(
                f"operator {operator!r}: {output}={aggregate!r} is not an aggregate such as hf.count()", operator=operator
            )
        if output in reserved:
            raise GraphError(
                f"operator {operator!r}: the result already has a column {output!r}; name the aggregate otherwise",
                operator=operator,
            )
        where = texts.get(aggregate.where) if isinstance(aggregate.where, str) else None
        if where is None:
            where = selection(aggregate.where, input_type, operator)
        if isinstance(aggregate.where, str):
            texts[aggregate.where] = where
        source, by = (_value_type(column, input_type, operator) for column in (aggregate.column, aggregate.by))
        columns.append(ColumnAggregate(aggregate.function, aggregate.column, output, source, aggregate.by, by, where))
    descriptor = ColumnarStateDescriptor(name, tuple(columns))
    try:
        check_descriptor(descriptor)
    except InvalidConfigError as error:
        raise GraphError(f"operator {operator!r}: {error}", operator=operator) from error
    return descriptor


def _value_type(column: str | None, input_type: RowType, operator: str) -> pa.DataType | None:
    if column is None:
        return None
    found = input_type.column(column, operator).type
    return found.value_type if pa.types.is_dictionary(found) else found


def result_fields(descriptor: ColumnarStateDescriptor) -> list[pa.Field]:
    """Columns of the aggregates' results; all but counts may be null, when no value was seen."""
    return [result_field(aggregate) for aggregate in descriptor.aggregates]


def state_columns(
    descriptor: ColumnarStateDescriptor, columns: pa.RecordBatch, *, operator: str, subtask: int | None = None
) -> list[Values]:
    """What feeds each aggregate: its column, null where its `where` is false. Operator and subtask are for errors."""
    masks: dict[int, npt.NDArray[np.bool_]] = {}
    arrays: dict[str, pa.Array] = {}  # one object for each column: aggregates know by it what they have in common
    found: list[Values] = []
    for aggregate in descriptor.aggregates:
        mask = None
        if aggregate.where is not None:
            mask = masks.get(id(aggregate.where))
            if mask is None:
                mask = masks[id(aggregate.where)] = rows_where(aggregate.where, columns, operator=operator, subtask=subtask)
        for name in (aggregate.column, aggregate.by):
            if name is not None and name not in arrays:
                arrays[name] = _plain(columns.column(name))
        found.append(_values(aggregate, arrays, mask))
    return found


def columns_of(descriptor: ColumnarStateDescriptor, key: Sequence[str] | None) -> frozenset[str] | None:
    """Columns that the aggregates read, and the key; None: all, since a function reads what it likes."""
    if key is None:
        return None
    names = set(key)
    for aggregate in descriptor.aggregates:
        names |= {name for name in (aggregate.column, aggregate.by) if name is not None}
        where = aggregate.where
        if isinstance(where, str):
            names.add(where)
        elif isinstance(where, expressions.Predicate):
            names |= set(where.columns)
        elif where is not None:
            return None
    return frozenset(names)


def close_selections(descriptor: ColumnarStateDescriptor) -> None:
    """Let go of what the conditions of the aggregates are evaluated with."""
    for aggregate in descriptor.aggregates:
        if isinstance(aggregate.where, expressions.Predicate):
            aggregate.where.close()


def _values(aggregate: ColumnAggregate, arrays: Mapping[str, pa.Array], mask: npt.NDArray[np.bool_] | None) -> Values:
    if aggregate.column is None:
        return None if mask is None else np.ma.MaskedArray(mask, ~mask)
    values = arrays[aggregate.column]
    if mask is not None:
        if aggregate.function == "count_distinct":
            return Chosen(values, mask)
        values = pc.if_else(pa.array(mask), values, pa.scalar(None, values.type))
    return values if aggregate.by is None else (values, arrays[aggregate.by])


def _plain(array: pa.Array) -> pa.Array:
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
