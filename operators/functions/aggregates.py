"""Aggregates of windows and running aggregates, as users write them: `flights=hf.count(), worst=hf.max("delay")`.

Running aggregates per key, over columns: one row of accumulators per key, for the life of the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.operators.base import Operator
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import Selector
from holdfast.statebackends.columnar.accumulators import Accumulator, check_descriptor
from holdfast.statebackends.errors import GraphError, InvalidConfigError
from holdfast.statebackends.state import ColumnAggregate, ColumnarState, ColumnarStateDescriptor, StateDescriptor


@dataclass(frozen=True, slots=True)
class Aggregate:
    """A columnar aggregate that has no name yet. Nulls are ignored, as in SQL."""

    function: str
    column: str | None = None


def count(column: str | None = None) -> Aggregate:
    """Number of rows, or of the values of a column that are not null."""
    return Aggregate("count", column)


def sum(column: str) -> Aggregate:
    """Sum: int64 of integers, decimal128(38, s) of decimal128(p, s), float64 of floats. An overflow is an error."""
    return Aggregate("sum", column)


def min(column: str) -> Aggregate:
    """Smallest value, of the column's type."""
    return Aggregate("min", column)


def max(column: str) -> Aggregate:
    """Largest value, of the column's type."""
    return Aggregate("max", column)


def mean(column: str) -> Aggregate:
    """Arithmetic mean: float64; of decimal128(p, s) a decimal with four more digits, or up to 38, rounded half away from zero."""
    return Aggregate("mean", column)


def columnar_descriptor(
    name: str, aggregates: Mapping[str, Aggregate], input_type: RowType, reserved: Sequence[str], operator: str
) -> ColumnarStateDescriptor:
    """The state of these aggregates over rows of `input_type`; `reserved` are the other columns of the result.

    Raises GraphError and UnknownColumnError, naming the operator."""
    if not aggregates:
        raise GraphError(f"operator {operator!r}: name at least one aggregate, such as rows=hf.count()", operator=operator)
    columns = []
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
        source = None if aggregate.column is None else input_type.column(aggregate.column, operator).type
        columns.append(ColumnAggregate(aggregate.function, aggregate.column, output, source))
    descriptor = ColumnarStateDescriptor(name, tuple(columns))
    try:
        check_descriptor(descriptor)
    except InvalidConfigError as error:
        raise GraphError(f"operator {operator!r}: {error}", operator=operator) from error
    return descriptor


def result_fields(descriptor: ColumnarStateDescriptor) -> list[pa.Field]:
    """Columns of the aggregates' results; all but counts may be null, when no value was seen."""
    return [
        pa.field(aggregate.output, Accumulator(aggregate, 0).result_type, nullable=aggregate.function != "count")
        for aggregate in descriptor.aggregates
    ]


def state_columns(descriptor: ColumnarStateDescriptor, columns: pa.RecordBatch) -> list[pa.Array | None]:
    """The column that feeds each aggregate."""
    return [None if aggregate.column is None else columns.column(aggregate.column) for aggregate in descriptor.aggregates]


_NAMESPACE = 0


class RunningAggregateOperator(Operator):
    """Folds each batch in. With `emits_changes` the new rows of the keys in a batch follow it, each key once."""

    def __init__(
        self, descriptor: ColumnarStateDescriptor, selector: Selector, input_type: RowType, *, emits_changes: bool
    ) -> None:
        self.descriptor = descriptor
        self.selector = selector
        self.input_type = input_type
        self.emits_changes = emits_changes
        keys = zip(selector.names, selector.key_type.arrow_types, strict=True)
        fields = [*(pa.field(name, data_type, nullable=False) for name, data_type in keys), *result_fields(descriptor)]
        self.output_type = RowType(pa.schema(fields))

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return (self.descriptor,)

    def open(self) -> None:
        self._state: ColumnarState = self.context.keyed_state.columnar_state(self.descriptor, self.selector.names)

    def process_batch(self, batch: Batch, input_index: int) -> None:
        if not batch.num_rows:
            return
        keys = self.selector.keys(
            batch, max_parallelism=self.context.max_parallelism, operator=self.context.uid, subtask=self.context.subtask
        )
        self._state.update(keys, _NAMESPACE, state_columns(self.descriptor, batch.columns()))
        if self.emits_changes:
            rows = self._state.rows_of(keys, _NAMESPACE)
            columns = pa.RecordBatch.from_arrays(rows.columns, schema=self.output_type.schema)
            stamps = None if batch.timestamps is None else np.full(rows.num_rows, batch.timestamps.max(), np.int64)
            self.output.collect(Batch(columns=columns, timestamps=stamps))
