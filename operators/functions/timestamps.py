"""Assigning event times and watermarks: from a column or a function of the row, with bounded out-of-orderness.

Watermarks from upstream are swallowed, except the maximum, which the runtime passes on (N19). The watermark of a subtask
starts at the minimum again after a restore (N20)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from barriers.elements import Batch
from operators.functions.errors import raise_told, shown
from operators.functions.skipping import SkippedRows, SkippingOperator
from operators.schema import RowType
from operators.time import BoundedOutOfOrderness, datetime_ms
from statebackends.errors import GraphError, InvalidTimestampError, UserFunctionError

TIME_MS_MAX = 2**63 // 1000 - 2**40
"""Event times lie within this of the epoch, so that the ends of windows fit timestamp[us] (2**40 ms are 34 years)."""
_PER_MS = {"s": (1000, 1), "ms": (1, 1), "us": (1, 1000)}
"""Arrow unit -> (factor, divisor) from a count of units to ms."""


def check_time_column(field: pa.Field, operator: str) -> None:
    """Refuse a column that is not an event time: int64 ms, or timestamp[s|ms|us] with a zone. Raises GraphError."""
    kind = field.type
    if kind == pa.int64():
        return
    problem = f"is {kind}; an event time is int64 (ms since the epoch) or timestamp[us|ms|s] with a time zone"
    if pa.types.is_timestamp(kind):
        if kind.tz is None:
            problem = f"is {kind}, which is naive: say which zone it is in, for example with cast or assume_timezone"
        elif kind.unit in _PER_MS:
            return
    raise GraphError(f"operator {operator!r}: column {field.name!r} {problem}", operator=operator, column=field.name)


class TimestampsOperator(SkippingOperator):
    """Gives each record its event time and emits a watermark behind each batch, when it rises."""

    forwards_watermarks = False

    def __init__(
        self, source: str | Callable[[Any], Any], bound_ms: int, input_type: RowType, *, skips: bool = False
    ) -> None:
        """`source`: the column, or a function from row to ms (int) or aware datetime. `skips`: rows without one are left out."""
        self.source = source
        self.bound_ms = bound_ms
        self.input_type = input_type
        self.output_type = input_type
        self.skips = skips
        self._watermarks = BoundedOutOfOrderness(bound_ms)

    def process_batch(self, batch: Batch, input_index: int) -> None:
        if self._skipped is not None:
            batch = self._valid(batch, self._skipped)
        if not batch.num_rows:
            return
        timestamps = self._timestamps(batch)
        latest = int(timestamps.max())
        if not self._in_range(timestamps):
            raise self._beyond(timestamps, batch)
        self.output.collect(batch.with_timestamps(timestamps))
        watermark_ms = self._watermarks.advance(latest)
        if watermark_ms is not None:
            self.output.emit_watermark(watermark_ms)

    def _timestamps(self, batch: Batch) -> npt.NDArray[np.int64]:
        if isinstance(self.source, str):
            return self._from_column(batch, self.source)
        return self._from_function(batch, self.source)

    def _valid(self, batch: Batch, skipped: SkippedRows) -> Batch:
        """The rows that have an event time; looked at one by one only if one of them has none."""
        try:
            if not batch.num_rows or self._in_range(self._timestamps(batch)):
                return batch
        except (UserFunctionError, InvalidTimestampError):
            pass
        kept = np.ones(batch.num_rows, np.bool_)
        for position in range(batch.num_rows):
            one = batch.slice(position, 1)
            try:
                timestamps = self._timestamps(one)
                if not self._in_range(timestamps):
                    raise self._beyond(timestamps, one)
            except (UserFunctionError, InvalidTimestampError) as error:
                skipped.skip(error)
                kept[position] = False
        return batch.filter(kept)

    @staticmethod
    def _in_range(timestamps: npt.NDArray[np.int64]) -> bool:
        return int(timestamps.max()) <= TIME_MS_MAX and int(timestamps.min()) >= -TIME_MS_MAX

    def _beyond(self, timestamps: npt.NDArray[np.int64], batch: Batch) -> InvalidTimestampError:
        row = int(np.argmax((timestamps > TIME_MS_MAX) | (timestamps < -TIME_MS_MAX)))
        reason = f"the event time {timestamps[row]} ms is beyond the year 294,000: is it in another unit?"
        return self._refused(reason, batch.slice(row, 1).rows(self.input_type.record)[0])

    def _from_column(self, batch: Batch, name: str) -> npt.NDArray[np.int64]:
        column = batch.columns().column(name)
        if column.null_count:
            row = int(np.flatnonzero(np.asarray(column.is_null()))[0])
            raise self._refused(f"column {name!r} is null", batch.slice(row, 1).rows(self.input_type.record)[0])
        numbers: npt.NDArray[np.int64]
        if column.type == pa.int64():
            numbers = column.to_numpy()
            return numbers
        factor, divisor = _PER_MS[column.type.unit]
        numbers = column.view(pa.int64()).to_numpy()
        return numbers * factor if divisor == 1 else numbers // divisor

    def _from_function(self, batch: Batch, function: Callable[[Any], Any]) -> npt.NDArray[np.int64]:
        stamps: list[int] = []
        for row in batch.rows(self.input_type.record):
            try:
                moment = function(row)
            except Exception as error:
                raise_told(error, operator=self.context.uid, subtask=self.context.subtask, function=function, record=row)
            stamps.append(moment if type(moment) is int else self._milliseconds(moment, row))
        try:
            return np.array(stamps, np.int64)
        except OverflowError as error:
            raise self._refused("an event time is beyond int64 ms", None) from error

    def _milliseconds(self, moment: Any, row: Any) -> int:
        if isinstance(moment, datetime):
            try:
                return datetime_ms(moment)
            except ValueError as error:
                raise self._refused(str(error), row) from error
        if isinstance(moment, np.integer):
            return int(moment)
        if moment is None:
            raise self._refused("the function returned None, which is no event time: does it lack a `return`?", row)
        raise self._refused(f"{moment!r} is not an event time (ms as an int, or an aware datetime)", row)

    def _refused(self, reason: str, row: Any) -> InvalidTimestampError:
        context = self.context
        return InvalidTimestampError(
            f"operator {context.uid!r}, subtask {context.subtask}: {reason}; record {shown(row)}",
            operator=context.uid,
            subtask=context.subtask,
            record=shown(row),
        )
