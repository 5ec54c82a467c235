"""Functions of rows: map, filter, flat_map on single rows, map_batches on record batches.

Rows are made of columns where they are needed (row_loops.py), of those columns that the function reads (read_sets.py), and keep
their timestamps. A function of a batch is Arrow in, Arrow out, and must
not depend on where a batch begins or ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.barriers.rows import misfit_error, misfits, nulls_hint
from holdfast.operators.functions.context import UserFunctionOperator
from holdfast.operators.functions.read_sets import read_set
from holdfast.operators.functions.row_loops import LoopRows, call_loop
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.skipping import SkippingOperator
from holdfast.operators.task.user_failures import STOPPED, Described, function_name, raise_located, returned_none
from holdfast.statebackends.errors import HoldfastError, SchemaMismatchError

_NONE = type(None)
MISSING: Any = object()
"""Marks a row that is left out."""


class RowFunctionOperator(SkippingOperator, UserFunctionOperator):
    """Base class: applies `function` to each row of a batch. With `skips`, a row on which it raises is left out."""

    def __init__(
        self, function: Callable[[Any], Any], input_type: RowType, output_type: RowType, *, skips: bool = False
    ) -> None:
        self.function = function
        self.input_type = input_type
        self.output_type = output_type
        self.skips = skips

    def _apply(self, rows: LoopRows) -> list[Any]:
        """function(row) of each row, MISSING for a row that is left out. Raises UserFunctionError naming the row."""
        results: list[Any] = []
        records, left = rows.at_hand, rows.left()
        while len(results) < rows.count:
            if records is None:
                self._apply_made(rows, left, results)
                continue
            try:
                # on an exception the list has the results before it, so that its length is the index of the row
                results.extend(map(self.function, left))
                if len(results) < len(records):
                    raise RuntimeError(STOPPED)
            except Exception as error:
                self._failed(error, self.function, records[len(results)])
                results.append(MISSING)
        return results

    def _apply_made(self, rows: LoopRows, left: Iterator[Any], results: list[Any]) -> None:
        """The same of rows that are made one by one, up to the first that is left out."""

        def failed(error: Exception, row: Any) -> None:
            raised = RuntimeError(STOPPED) if isinstance(error, StopIteration) else error
            self._failed_on(raised, self.function, partial(rows.whole, row))
            results.append(MISSING)

        call_loop(rows.names, counts=False)(self.function, results.append, results, None, failed, left)

    def _returned_none(self, record: Any, wanted: str) -> HoldfastError:
        context = self.context
        return returned_none(
            operator=context.uid, subtask=context.subtask, function=self.function, record=record, wanted=wanted
        )

    def _emit(self, rows: list[Any], timestamps: npt.NDArray[np.int64] | None) -> None:
        """Emit the rows except those left out. Rows that don't fit declared columns are found here, where they can still be left
        out, and not where a later operator converts them."""
        if self._skipped is None:
            if rows:
                self.output.collect(self._batch(rows, timestamps))
            return
        batch = self._present(rows, timestamps)
        if batch is not None and batch.schema is not None and not batch.fits():
            found = list(batch.rows())
            for position in misfits(batch.rows(), batch.schema):
                self._refuse(partial(misfit_error, found[position], position, batch.schema, self.context.uid))
                found[position] = MISSING
            batch = self._present(found, batch.timestamps)
        if batch is not None:
            self.output.collect(batch)

    def _present(self, rows: list[Any], timestamps: npt.NDArray[np.int64] | None) -> Batch | None:
        kept = np.fromiter((row is not MISSING for row in rows), np.bool_, len(rows))
        if not kept.any():
            return None
        if not kept.all():
            rows = [row for row in rows if row is not MISSING]
            timestamps = None if timestamps is None else timestamps[kept]
        return self._batch(rows, timestamps)

    def _batch(self, rows: list[Any], timestamps: npt.NDArray[np.int64] | None) -> Batch:
        return Batch(
            rows=rows,
            schema=self.output_type.schema,
            timestamps=timestamps,
            row_factory=self.output_type.record,
            producer=self.context.uid,
        )


class MapOperator(RowFunctionOperator):
    """Emits one row for each row."""

    def process_batch(self, batch: Batch, input_index: int) -> None:
        if batch.num_rows:
            records = LoopRows(batch, self.input_type.record, read_set(self.function))
            rows = self._apply(records)
            if self.output_type.schema is not None and _NONE in set(map(type, rows)):
                self._refuse_none(rows, records)
            self._emit(rows, batch.timestamps)

    def _refuse_none(self, rows: list[Any], records: LoopRows) -> None:
        """Refuse None where columns are declared; otherwise the next function would be blamed for it."""
        for position, row in enumerate(rows):
            if row is None:
                self._refuse(partial(self._none_at, records, position))
                rows[position] = MISSING

    def _none_at(self, records: LoopRows, position: int) -> HoldfastError:
        return self._returned_none(records.record(position), "a row")


class FilterOperator(RowFunctionOperator):
    """Keeps the rows for which the function returns true; columns stay columns."""

    def process_batch(self, batch: Batch, input_index: int) -> None:
        if not batch.num_rows:
            return
        records = LoopRows(batch, self.input_type.record, self._reads(batch))
        verdicts = self._apply(records)
        mask = self._mask(verdicts, records)
        if mask.all():
            self.output.collect(batch)
        elif mask.any():
            self.output.collect(batch.filter(mask))

    def _reads(self, batch: Batch) -> frozenset[str] | None:
        """Rows that are made whole are those of the batch: what it is handed on to needs to make none."""
        reads = read_set(self.function)
        if reads is None or (batch.schema is not None and reads.issuperset(batch.schema.names)):
            batch.rows(self.input_type.record)
            return None
        return reads

    def _mask(self, verdicts: list[Any], records: LoopRows) -> npt.NDArray[np.bool_]:
        """Convert verdicts to a mask. The truth value of a verdict may raise, as that of an array does."""
        if self._skipped is None:
            with contextlib.suppress(Exception):  # the loop below finds the row
                return np.fromiter(map(bool, verdicts), np.bool_, len(verdicts))
        mask = np.zeros(len(verdicts), np.bool_)
        for position, verdict in enumerate(verdicts):
            if verdict is True:
                mask[position] = True
            elif verdict is not False and verdict is not MISSING:
                try:
                    mask[position] = bool(verdict)
                except Exception as error:
                    self._failed_on(error, self.function, partial(records.record, position))
        return mask


class FlatMapOperator(RowFunctionOperator):
    """Emits any number of rows for each row: the function returns or yields an iterable of them."""

    def process_batch(self, batch: Batch, input_index: int) -> None:
        results: list[Any] = []
        ends: list[int] = []
        rows = LoopRows(batch, self.input_type.record, read_set(self.function, is_consumed=True))

        def failed(error: Exception, row: Any) -> None:
            record = partial(rows.whole, row)
            self._failed_on(self._blamed(error, record), self.function, record)
            del results[ends[-1] if ends else 0 :]  # either all rows made of one row are emitted, or none
            ends.append(len(results))

        loop, left = call_loop(rows.names, counts=True), rows.left()
        while len(ends) < rows.count:
            loop(self.function, results.extend, results, ends, failed, left)
        if results:
            stamps = None if batch.timestamps is None else np.repeat(batch.timestamps, np.diff(ends, prepend=0))
            self._emit(results, stamps)

    def _blamed(self, error: Exception, record: Callable[[], Any]) -> Exception:
        """The error itself; one of its own instead of Python's "not iterable" for a function that returned None."""
        if not isinstance(error, TypeError) or str(error) != "'NoneType' object is not iterable" or error.__traceback__ is None:
            return error
        raised_here = error.__traceback__.tb_next is None  # and in no frame of the user's
        return self._returned_none(record(), "the rows that it makes of one") if raised_here else error


class MapBatchesOperator(UserFunctionOperator):
    """Applies a function to columns. Once event times are assigned it must keep the number and the order of rows."""

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
            raise_located(error, operator=self.context.uid, subtask=self.context.subtask, function=self.function, record=summary)
        result = self._checked(result)
        if batch.timestamps is not None and result.num_rows != columns.num_rows:
            raise self._misfit(
                f"returned {result.num_rows} rows for {columns.num_rows}; it must keep the rows in place once event times "
                "are assigned, so assign them after it"
            )
        if result.num_rows:
            self.output.collect(Batch(columns=result, timestamps=batch.timestamps, row_factory=self.output_type.record))

    def _checked(self, result: Any) -> pa.RecordBatch:
        """Return the result with exactly the declared schema. Raises SchemaMismatchError."""
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
