"""Running aggregates per key, over columns: one row of accumulators per key, for the life of the job."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.barriers.exchange.partition import Combining
from holdfast.operators.base import Operator
from holdfast.operators.functions.aggregates import close_selections, columns_of, result_fields
from holdfast.operators.functions.combining import combining_of, count_records, fold
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import Selector
from holdfast.statebackends.state import ColumnarState, ColumnarStateDescriptor, StateDescriptor

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

    def columns_read(self, wanted: frozenset[str] | None) -> frozenset[str] | None:
        return columns_of(self.descriptor, self.selector.columns)

    def combining(self) -> Combining | str:
        return combining_of(self.descriptor, self.selector)

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return (self.descriptor,)

    def open(self) -> None:
        self._state: ColumnarState = self.context.keyed_state.columnar_state(self.descriptor, self.selector.names)

    def close(self) -> None:
        close_selections(self.descriptor)

    def process_batch(self, batch: Batch, input_index: int) -> None:
        if not batch.num_rows:
            return
        keys = self.selector.keys(
            batch, max_parallelism=self.context.max_parallelism, operator=self.context.uid, subtask=self.context.subtask
        )
        count_records(batch, self.context)
        fold(self._state, keys, _NAMESPACE, batch, self.descriptor, self.context)
        if self.emits_changes:
            rows = self._state.rows_of(keys, _NAMESPACE)
            columns = pa.RecordBatch.from_arrays(rows.columns, schema=self.output_type.schema)
            stamps = None if batch.timestamps is None else np.full(rows.num_rows, batch.timestamps.max(), np.int64)
            self.output.collect(Batch(columns=columns, timestamps=stamps))
