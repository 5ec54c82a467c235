"""Functions of one record batch: Arrow in, Arrow out. The function must not depend on where a batch begins or ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.barriers.rows import nulls_hint
from holdfast.operators.functions.rich import UserFunctionOperator
from holdfast.operators.functions.schema import RowType
from holdfast.operators.task.user_failures import Described, function_name, raise_told
from holdfast.statebackends.errors import SchemaMismatchError


class MapBatchesOperator(UserFunctionOperator):
    """Applies a function to columns. With event times assigned it must keep the number and the order of rows."""

    def __init__(self, function: Callable[[pa.RecordBatch], pa.RecordBatch], input_type: RowType, output_type: RowType) -> None:
        self.function = function
        self.input_type = input_type
        self.output_type = output_type

    def process_batch(self, batch: Batch, input_index: int) -> None:
        columns = batch.columns()
        if not columns.num_rows:
            return
        try:
            result = self.function(columns)
        except Exception as error:
            summary = Described(f"a batch of {columns.num_rows} rows: {columns.schema.names}")
            raise_told(error, operator=self.context.uid, subtask=self.context.subtask, function=self.function, record=summary)
        result = self._checked(result)
        if batch.timestamps is not None and result.num_rows != columns.num_rows:
            raise self._misfit(
                f"returned {result.num_rows} rows for {columns.num_rows}; it must keep the rows in place once event times "
                "are assigned, so assign them after it"
            )
        if result.num_rows:
            self.output.collect(Batch(columns=result, timestamps=batch.timestamps, row_factory=self.output_type.record))

    def _checked(self, result: Any) -> pa.RecordBatch:
        """The result with exactly the declared schema. Raises SchemaMismatchError."""
        declared: Any = self.output_type.schema
        if not isinstance(result, pa.RecordBatch):
            got = "None" if result is None else type(result).__name__
            raise self._misfit(f"returned {got}, not a pyarrow.RecordBatch")
        if result.schema.names != declared.names:
            raise self._misfit(f"returned columns {result.schema.names}, declared are {declared.names}")
        for field, column in zip(declared, result.columns, strict=True):
            if column.type != field.type:
                raise self._misfit(f"returned {column.type}, declared is {field.type}", field.name)
            if column.null_count and not field.nullable:
                raise self._misfit(f"returned a null, declared without nulls; {nulls_hint(field.type)}", field.name)
        return pa.RecordBatch.from_arrays(result.columns, schema=declared)

    def _misfit(self, reason: str, column: str | None = None) -> SchemaMismatchError:
        where = f", column {column!r}" if column else ""
        return SchemaMismatchError(
            f"operator {self.context.uid!r}{where}: {function_name(self.function)} {reason}",
            operator=self.context.uid,
            column=column,
            record=None,
        )
