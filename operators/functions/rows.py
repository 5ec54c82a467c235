"""Functions of one row: map, filter, flat_map. Rows are made from columns at most once per batch and keep their timestamps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from barriers.elements import Batch
from operators.base import Operator
from operators.functions.errors import user_error
from operators.schema import RowType
from statebackends.errors import HoldfastError


class RowFunctionOperator(Operator):
    """Base: applies `function` to each row of a batch."""

    def __init__(self, function: Callable[[Any], Any], input_type: RowType, output_type: RowType) -> None:
        self.function = function
        self.input_type = input_type
        self.output_type = output_type

    def _apply(self, rows: Iterable[Any]) -> list[Any]:
        """function(row) of each row. Raises UserFunctionError naming the row."""
        results: list[Any] = []
        rows = list(rows) if not isinstance(rows, list) else rows
        try:
            results.extend(map(self.function, rows))  # a list keeps what it got before the exception: its length is the row's
        except HoldfastError:
            raise
        except Exception as error:
            raise self._failed(error, rows[len(results)]) from error
        return results

    def _failed(self, error: BaseException, record: Any) -> HoldfastError:
        context = self.context
        return user_error(
            error, operator=context.uid, subtask=context.subtask, function=self.function, record=record
        )

    def _batch(self, rows: list[Any], timestamps: Any) -> Batch:
        return Batch(
            rows=rows,
            schema=self.output_type.schema,
            timestamps=timestamps,
            row_factory=self.output_type.record,
            producer=self.context.uid,
        )


class MapOperator(RowFunctionOperator):
    """One row in, one row out."""

    def process_batch(self, batch: Batch, input_index: int) -> None:
        if batch.num_rows:
            rows = self._apply(batch.rows(self.input_type.record))
            self.output.collect(self._batch(rows, batch.timestamps))


class FilterOperator(RowFunctionOperator):
    """Keeps the rows for which the function is true; columns stay columns."""

    def process_batch(self, batch: Batch, input_index: int) -> None:
        if not batch.num_rows:
            return
        verdicts = self._apply(batch.rows(self.input_type.record))
        mask = np.fromiter(map(bool, verdicts), np.bool_, len(verdicts))
        if mask.all():
            self.output.collect(batch)
        elif mask.any():
            self.output.collect(batch.filter(mask))


class FlatMapOperator(RowFunctionOperator):
    """One row in, any number out: the function returns or yields an iterable of rows."""

    def process_batch(self, batch: Batch, input_index: int) -> None:
        results: list[Any] = []
        counts: list[int] = []
        function = self.function
        for row in batch.rows(self.input_type.record):
            before = len(results)
            try:
                results.extend(function(row))
            except HoldfastError:
                raise
            except Exception as error:
                raise self._failed(error, row) from error
            counts.append(len(results) - before)
        if results:
            stamps = None if batch.timestamps is None else np.repeat(batch.timestamps, counts)
            self.output.collect(self._batch(results, stamps))
