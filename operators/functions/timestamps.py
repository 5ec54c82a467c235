"""Assigning event times and watermarks: from a column or a function of the row, with bounded out-of-orderness.

Watermarks from upstream are swallowed, except the maximum, which the runtime passes on (N19). The watermark of a subtask
starts at the minimum again after a restore (N20)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.barriers.rows import columns_to_rows
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.skipping import SkippingOperator
from holdfast.operators.functions.time import BoundedOutOfOrderness, datetime_ms, is_naive
from holdfast.operators.task.user_failures import shown
from holdfast.statebackends.errors import GraphError, InvalidTimestampError

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
        if isinstance(self.source, str):
            batch, timestamps = self._from_column(batch, self.source)
        else:
            batch, timestamps = self._from_function(batch, self.source)
        if not batch.num_rows:
            return
        self.output.collect(batch.with_timestamps(timestamps))
        watermark_ms = self._watermarks.advance(int(timestamps.max()))
        if watermark_ms is not None:
            self.output.emit_watermark(watermark_ms)

    def _from_column(self, batch: Batch, name: str) -> tuple[Batch, npt.NDArray[np.int64]]:
        """The rows that have an event time, and these."""
        column = batch.columns().column(name)
        if column.null_count:
            has_none = np.asarray(column.is_null())
            for row in np.flatnonzero(has_none).tolist():
                self._refuse(partial(self._null, name, batch, row))
            batch = batch.filter(~has_none)
            column = batch.columns().column(name)
        if column.type == pa.int64():
            return self._in_range(batch, column.to_numpy())
        factor, divisor = _PER_MS[column.type.unit]
        numbers = column.view(pa.int64()).to_numpy()
        if len(numbers) and factor > 1 and max(int(numbers.max()), -int(numbers.min())) > TIME_MS_MAX // factor:
            numbers = numbers.astype(np.object_)  # the product may be too large for int64
        return self._in_range(batch, numbers * factor if divisor == 1 else numbers // divisor)

    def _from_function(self, batch: Batch, function: Callable[[Any], Any]) -> tuple[Batch, npt.NDArray[np.int64]]:
        """As `_from_column`; the function is called once for each row."""
        stamps: list[int] = []
        rows = batch.rows(self.input_type.record)
        kept = np.ones(len(rows), np.bool_)
        for position, row in enumerate(rows):
            try:
                moment = function(row)
            except Exception as error:
                self._failed(error, function, row)
                kept[position] = False
                continue
            stamp = moment if type(moment) is int else _milliseconds(moment)
            if stamp is None:
                self._refuse(partial(self._no_moment, moment, row))
                kept[position] = False
            else:
                stamps.append(stamp)
        if not kept.all():
            batch = batch.filter(kept)
        try:
            timestamps = np.array(stamps, np.int64)
        except OverflowError:
            timestamps = np.array(stamps, np.object_)
        return self._in_range(batch, timestamps)

    def _in_range(self, batch: Batch, timestamps: npt.NDArray[Any]) -> tuple[Batch, npt.NDArray[np.int64]]:
        """The rows whose event times are ones. `timestamps`: ints of any size."""
        if batch.num_rows and (int(timestamps.max()) > TIME_MS_MAX or int(timestamps.min()) < -TIME_MS_MAX):
            beyond = np.asarray((timestamps > TIME_MS_MAX) | (timestamps < -TIME_MS_MAX), np.bool_)
            for row in np.flatnonzero(beyond).tolist():
                self._refuse(partial(self._beyond, timestamps[row], batch, row))
            batch, timestamps = batch.filter(~beyond), timestamps[~beyond]
        return batch, timestamps.astype(np.int64, copy=False)

    def _null(self, name: str, batch: Batch, row: int) -> InvalidTimestampError:
        return self._refused(f"column {name!r} is null", self._record(batch, row))

    def _beyond(self, moment_ms: int, batch: Batch, row: int) -> InvalidTimestampError:
        reason = f"the event time {moment_ms} ms is beyond the year 294,000: is it in another unit?"
        return self._refused(reason, self._record(batch, row))

    def _no_moment(self, moment: Any, row: Any) -> InvalidTimestampError:
        if moment is None:
            return self._refused("the function returned None, which is no event time: does it lack a `return`?", row)
        if isinstance(moment, datetime):
            return self._refused(f"{shown(moment)} is naive: give it a time zone", row)
        return self._refused(f"{shown(moment)} is not an event time (ms as an int, or an aware datetime)", row)

    def _record(self, batch: Batch, row: int) -> Any:
        one = batch.slice(row, 1)
        try:
            return one.rows(self.input_type.record)[0]
        except (pa.ArrowException, AttributeError, OverflowError, ValueError):  # a time that no datetime holds: its number then
            columns = one.columns()
            numbers = [column.view(pa.int64()) if pa.types.is_timestamp(column.type) else column for column in columns.columns]
            return columns_to_rows(pa.RecordBatch.from_arrays(numbers, names=columns.schema.names))[0]

    def _refused(self, reason: str, row: Any) -> InvalidTimestampError:
        context = self.context
        return InvalidTimestampError(
            f"operator {context.uid!r}, subtask {context.subtask}: {reason}; record {shown(row)}",
            operator=context.uid,
            subtask=context.subtask,
            record=shown(row),
        )


def _milliseconds(moment: Any) -> int | None:
    """What a function gave, as an event time; None for what is none."""
    if isinstance(moment, datetime):
        return None if is_naive(moment) else datetime_ms(moment)
    return int(moment) if isinstance(moment, np.integer) else None
