"""Assigning event times and watermarks: from a column, a function of the row or the clock, by a watermark strategy.

Watermarks from upstream are swallowed, except the maximum, which the runtime passes on (N19), and so is upstream idleness. The
watermark of a subtask starts at the minimum again after a restore (N20), but where it follows the clock in silence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK, Batch, Watermark
from holdfast.barriers.rows import columns_to_rows
from holdfast.barriers.watermark_alignment import ALIGNMENT_PROPERTY
from holdfast.operators.base import OperatorContext, Output
from holdfast.operators.functions.event_time.datetimes import datetime_ms, is_naive
from holdfast.operators.functions.event_time.silence import QUIET, Quiet, Silence, find_quiet
from holdfast.operators.functions.event_time.splits import SplitWatermarks
from holdfast.operators.functions.event_time.watermarks import (
    CLOCK_STEP_MS,
    IngestionTimeGenerator,
    TimestampAssigner,
    WatermarkStrategy,
)
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.skipping import SkippingOperator, is_skipping
from holdfast.operators.task.user_failures import NO_RECORD, check_returns, raise_located, shown
from holdfast.statebackends.errors import GraphError, InvalidConfigError, InvalidRowError, InvalidTimestampError
from holdfast.statebackends.state import StateDescriptor

TIME_MS_MAX = 2**63 // 1000 - 2**40
"""Event times lie within this of the epoch, so that the ends of windows fit timestamp[us] (2**40 ms are 34 years)."""
_WITHOUT_RECORDS = frozenset({"bounded_out_of_orderness", "monotonous_timestamps"})
"""Kinds of strategies that look at event times alone."""
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


def timestamps_operator(
    strategy: WatermarkStrategy, input_type: RowType, call: str, *, is_timed: bool, on_error: str = "fail"
) -> TimestampsOperator:
    """The operator of a strategy. `call`: the method that a user gave it to; `is_timed`: records have event times already.

    Raises GraphError for what is no strategy, for records without event times, and for a column that is no event time."""
    if not isinstance(strategy, WatermarkStrategy):
        raise GraphError(f"{call} takes a WatermarkStrategy, not {strategy!r}", operator=call)
    skips = is_skipping(on_error, call)
    source = strategy.assigner
    if callable(source):
        check_returns(source, call)
        input_type.check_rows(call)
    elif source is not None:
        check_time_column(input_type.column(source, call), call)
    elif strategy.kind != "ingestion_time" and not is_timed:
        raise GraphError(f"{call}: the records have no event times: give the strategy with_timestamp_assigner", operator=call)
    return TimestampsOperator(source, strategy, input_type, skips=skips)


def alignment_properties(strategy: WatermarkStrategy) -> dict[str, Any]:
    """Of the operator's description, for the coordinator."""
    return {} if strategy.alignment is None else {ALIGNMENT_PROPERTY: msgspec.to_builtins(strategy.alignment)}


class TimestampsOperator(SkippingOperator):
    """Gives each record its event time and emits watermarks as its strategy says; implements `RecordOutput` for the generator."""

    forwards_watermarks = False
    forwards_statuses = False

    def __init__(
        self,
        source: TimestampAssigner | None,
        strategy: WatermarkStrategy | int,
        input_type: RowType,
        *,
        skips: bool = False,
    ) -> None:
        """`source`: the column, or a function from row to ms (int) or aware datetime; None: records have event times, or the
        strategy takes them from the clock. `strategy`: or the bound of out-of-orderness, ms. `skips`: rows without a time are left
        out."""
        self.source = source
        self.strategy = WatermarkStrategy.for_bounded_out_of_orderness(strategy) if isinstance(strategy, int) else strategy
        self.input_type = input_type
        self.output_type = input_type
        self.skips = skips
        self._emitted_ms = MIN_WATERMARK
        self._is_idle = False
        self._period_ms = 0
        self._next_emit_ms: int | None = None
        self._last_now_ms = MIN_WATERMARK
        self._silence: Silence | None = None
        self._resumed_ms = MIN_WATERMARK
        """The watermark in front of the snapshot, until it is emitted again."""
        self._has_ended = False

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return () if self.strategy.advance_after_ms is None else (QUIET,)

    def columns_read(self, wanted: frozenset[str] | None) -> frozenset[str] | None:
        reads_records = not isinstance(self.source, str) or self.strategy.kind not in _WITHOUT_RECORDS
        if wanted is None or reads_records or self.input_type.record is not None:
            return None
        return wanted | {str(self.source)}

    def setup(self, context: OperatorContext, output: Output) -> None:
        super().setup(context, output)
        strategy = self.strategy
        self._generator = strategy.make_generator()
        self._splits = SplitWatermarks(strategy.idle_after_ms)
        if isinstance(self._generator, IngestionTimeGenerator):
            self._generator.now_ms = self._arrival_ms
        self._emits_behind_batches = not context.auto_watermark_interval_ms
        if context.auto_watermark_interval_ms or self._generator.follows_clock:
            self._period_ms = context.auto_watermark_interval_ms or CLOCK_STEP_MS
        if strategy.idle_after_ms is not None or strategy.advance_after_ms is not None:
            self._silence = Silence(
                idle_after_ms=strategy.idle_after_ms,
                advance_after_ms=strategy.advance_after_ms,
                step_ms=context.auto_watermark_interval_ms or CLOCK_STEP_MS,
            )

    def initialize_state(self) -> None:
        context = self.context
        if self._silence is not None and self.strategy.advance_after_ms is not None:
            quiet = find_quiet(context.operator_state.list_state(QUIET.name).entries, context.subtask, context.parallelism)
            if quiet is not None and quiet.base_ms > MIN_WATERMARK:
                self._silence.resume(quiet)
                self._emitted_ms = self._resumed_ms = quiet.reached_ms

    def snapshot_state(self, checkpoint_id: int) -> None:
        context = self.context
        if self._silence is None or self.strategy.advance_after_ms is None:
            return
        quiet = None if self._has_ended else self._silence.quiet(context.reading_ms())
        if quiet is None:
            context.operator_state.list_state(QUIET.name).update([])
            return
        entry = Quiet(context.subtask, context.parallelism, *quiet, self._emitted_ms)
        context.operator_state.list_state(QUIET.name).update([msgspec.msgpack.encode(entry)])

    def finish(self) -> Iterator[None]:
        self._has_ended = True
        return iter(())

    def open(self) -> None:
        if self._period_ms:
            self._next_emit_ms = self.context.now_ms() + self._period_ms

    def process_batch(self, batch: Batch, input_index: int) -> None:
        timed = self._with_times(batch)
        if not timed.num_rows:
            return
        self._resume()
        if self._silence is not None:
            self._silence.record(self.context.reading_ms())
        self._generator.on_records(timed, self)
        if self._emits_behind_batches:
            self._generator.on_periodic_emit(self)
        if self._next_emit_ms is not None:  # the wall clock may have been set back
            self._next_emit_ms = min(self._next_emit_ms, self.context.now_ms() + self._period_ms)

    def _resume(self) -> None:
        """Event time goes on behind a restore from where it was: what was late stays late."""
        if self._resumed_ms > MIN_WATERMARK:
            resumed_ms, self._resumed_ms = self._resumed_ms, MIN_WATERMARK
            self.output.emit_watermark_now(resumed_ms)

    # -------------------------------------------------------------------------------------------- what generators say

    def emit_records(self, batch: Batch) -> None:
        if self._is_idle:
            self._is_idle = False
            self.output.emit_status(idle=False)
        if batch.timestamps is not None and batch.num_rows:
            self.context.counters.emit_lag_ms = self.context.now_ms() - int(batch.timestamps[-1])
        self.output.collect(batch)

    def emit_watermark(self, timestamp_ms: int) -> None:
        timestamp_ms = self._splits.advance(timestamp_ms, self.context.running_ms())
        if self._rises(timestamp_ms):
            self.output.emit_watermark(self._emitted_ms)
            self._stay_idle()

    def emit_watermark_now(self, timestamp_ms: int) -> None:
        timestamp_ms = self._splits.advance(timestamp_ms, self.context.running_ms())
        if self._rises(timestamp_ms):
            self.output.emit_watermark_now(self._emitted_ms)

    def mark_idle(self) -> None:
        self._is_idle = True
        self.output.emit_status(idle=True)

    def _rises(self, timestamp_ms: int) -> bool:
        """Note what the records say. The maximum says that the stream has ended, which no record can know."""
        timestamp_ms = min(timestamp_ms, MAX_WATERMARK - 1)
        if self._silence is not None:
            self._silence.said(timestamp_ms)
        if timestamp_ms <= self._emitted_ms:
            return False
        self._emitted_ms = timestamp_ms
        return True

    def _stay_idle(self) -> None:
        """A watermark made the subtask active; only a record, or a generator that had marked it, lets it stay so."""
        self._is_idle = self._silence is not None and self._silence.is_idle
        if self._is_idle:
            self.output.emit_status(idle=True)

    def rows_of(self, batch: Batch) -> Any:
        return batch.rows(self.input_type.record)

    def call(self, function: Callable[..., Any], record: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            told = NO_RECORD if record is None or isinstance(record, pa.RecordBatch) else record
            raise_located(error, operator=self.context.uid, subtask=self.context.subtask, function=function, record=told)

    def watermark_of(self, function: Callable[[Any], Any], record: Any) -> int | None:
        said = self.call(function, record, record)
        if said is None or type(said) is int:
            return said
        if isinstance(said, np.integer):
            return int(said)
        context = self.context
        raise InvalidTimestampError(
            f"operator {context.uid!r}, subtask {context.subtask}: {shown(said)} is no watermark (ms as an int, or None)",
            operator=context.uid,
            subtask=context.subtask,
            record="" if isinstance(record, pa.RecordBatch) else shown(record),
        )

    def violated(self, batch: Batch, row: int, before_ms: int) -> InvalidTimestampError:
        assert batch.timestamps is not None
        return self._refused(
            f"the event time {int(batch.timestamps[row])} ms is below {before_ms} ms of a record before it, "
            "and event times are declared monotonous",
            self._record(batch, row),
        )

    # ------------------------------------------------------------------------------------------------- clock and silence

    @property
    def uses_processing_time(self) -> bool:
        return self._period_ms > 0

    def next_processing_time_ms(self) -> int | None:
        return self._next_emit_ms

    def process_processing_time(self, now_ms: int) -> Iterator[None]:
        self._next_emit_ms = now_ms + self._period_ms
        if not (self._generator.follows_clock and self._is_idle):
            generators = self._splits.each_generator() if self._splits else (self._generator,)
            for generator in generators:
                generator.on_periodic_emit(self)
        return iter(())

    # -------------------------------------------------------------------------------------------------------- splits

    @property
    def keeps_splits(self) -> bool:
        """Whether event time follows from records, those of one split behind each other."""
        return self.strategy.kind not in ("ingestion_time", "no_watermarks")

    def add_split(self, split_id: str) -> None:
        if not self._splits.add(split_id, self.strategy.make_generator, self.context.running_ms()):
            return
        if self._silence is not None:
            self._silence.wake(self.context.reading_ms())
        if self._is_idle:
            self._is_idle = False
            self.output.emit_status(idle=False)

    def enter_split(self, split_id: str) -> None:
        self._generator = self._splits.enter(split_id, self.context.running_ms())

    def leave_split(self, split_id: str) -> None:
        """The others may be ahead of it."""
        least_ms = self._splits.leave(split_id, self.context.running_ms())
        if least_ms is not None and self._rises(least_ms):
            self.output.emit_watermark(self._emitted_ms)
            self._stay_idle()

    def has_no_splits(self) -> None:
        self._splits.keep()
        self.mark_idle()

    def pause_or_resume_splits(self, to_pause: Sequence[str], to_resume: Sequence[str]) -> None:
        self._splits.pause_or_resume(to_pause, to_resume, self.context.running_ms())

    def split_watermarks_ms(self) -> Mapping[str, int]:
        return self._splits.watermarks_ms()

    def idle_splits(self) -> Collection[str]:
        return self._splits.idle(self.context.running_ms())

    @property
    def watches_silence(self) -> bool:
        return self._silence is not None

    def next_silence_ms(self) -> int | None:
        if self._resumed_ms > MIN_WATERMARK:
            return 0
        return None if self._silence is None else self._silence.next_ms

    def process_silence(self, reading_ms: int) -> None:
        assert self._silence is not None
        self._resume()
        for signal in self._silence.due(reading_ms):
            if not isinstance(signal, Watermark):
                if self._splits and self._rises(self._splits.last_ms()):
                    self.output.emit_watermark(self._emitted_ms)
                self._is_idle = True
                self.output.emit_status(idle=True)
            elif signal.timestamp_ms > self._emitted_ms:
                self._emitted_ms = signal.timestamp_ms
                self.output.emit_watermark(signal.timestamp_ms)

    # ------------------------------------------------------------------------------------------------------ event times

    def _with_times(self, batch: Batch) -> Batch:
        """The rows that have an event time, with it."""
        if isinstance(self.source, str):
            return self._from_column(batch, self.source)
        if self.source is not None:
            return self._from_function(batch, self.source)
        if isinstance(self._generator, IngestionTimeGenerator):
            return batch.with_timestamps(np.full(batch.num_rows, self._arrival_ms(), np.int64))
        if batch.timestamps is not None:
            return batch
        raise InvalidConfigError(
            f"operator {self.context.uid!r}: its records have no event times: give the strategy a timestamp assigner",
            operator=self.context.uid,
        )

    def _arrival_ms(self) -> int:
        """The wall clock, which never falls here."""
        self._last_now_ms = max(self.context.now_ms(), self._last_now_ms)
        return self._last_now_ms

    def _from_column(self, batch: Batch, name: str) -> Batch:
        """The rows that have an event time, with it."""
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

    def _from_function(self, batch: Batch, function: Callable[[Any], Any]) -> Batch:
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

    def _in_range(self, batch: Batch, timestamps: npt.NDArray[Any]) -> Batch:
        """The rows whose event times are ones, with them. `timestamps`: ints of any size."""
        if not batch.num_rows:
            return batch.with_timestamps(timestamps.astype(np.int64))
        if timestamps.dtype == np.int64:
            timed = batch.with_timestamps(timestamps)
            earliest, latest = timed.time_range()
            if earliest >= -TIME_MS_MAX and latest <= TIME_MS_MAX:
                return timed
        beyond = np.asarray((timestamps > TIME_MS_MAX) | (timestamps < -TIME_MS_MAX), np.bool_)
        for row in np.flatnonzero(beyond).tolist():
            self._refuse(partial(self._beyond, timestamps[row], batch, row))
        return batch.filter(~beyond).with_timestamps(timestamps[~beyond].astype(np.int64))

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
        except InvalidRowError:  # a time that no datetime holds: its number then
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
