"""Asynchronous I/O: one call of the user's function for each row, many under way at once, each row's result exactly once.

The operator decides which requests are sent, answered, retried and emitted, in which order; what runs them is behind
`OperatorContext.submit_call`. Requests in flight are state: a barrier stores the rows that have no result emitted yet, with the
watermarks between them, and waits for no answer; a restore sends them first, in order. Source: Flink, AsyncWaitOperator; what
differs is in ADR 62."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.barriers.elements import MAX_WATERMARK, Batch
from holdfast.barriers.rows import columns_to_rows
from holdfast.operators.base import OVERDUE_MS, OperatorContext, Output, UserCall
from holdfast.operators.functions.rows import MISSING, RowFunctionOperator
from holdfast.operators.functions.schema import RowType
from holdfast.operators.task.user_failures import shown
from holdfast.statebackends.errors import (
    AsyncTimeoutError,
    CorruptStateError,
    GraphError,
    HoldfastError,
    IncompatibleStateError,
    InvalidConfigError,
)
from holdfast.statebackends.state import OperatorListStateDescriptor, StateDescriptor

ENTRY_ROWS_MAX = 128
"""Rows of one entry of the state, the unit that a rescale deals out."""
CAPACITY_MAX = 100_000
STALE_TIMERS_MAX = 1_000
"""Timers that no request waits for, of those that wait twice as many more, above which they are dropped."""

REQUESTS = OperatorListStateDescriptor("requests")


@dataclass(frozen=True)
class RetryStrategy:
    """When `async_map` calls its function again for a row, and after which pause.

    Raises InvalidConfigError for a setting out of bounds. Source: Flink, AsyncRetryStrategies."""

    attempts_max: int = 3
    """Calls for a row, the first one included: 1 or more."""
    delay_ms: int = 100
    """Pause behind the first failure, ms."""
    multiplier: float = 1.0
    """Of the pause with each further failure: 1.0 or more."""
    delay_ms_max: int = 60_000
    """Longest pause, ms."""
    on: tuple[type[BaseException], ...] = (Exception,)
    """Classes of errors that are tried again; a timeout is an AsyncTimeoutError."""
    if_result: Callable[[Any], bool] | None = None
    """Whether a result is to be asked for again; if it is still so in the last attempt, it is taken. None: no result is."""

    def __post_init__(self) -> None:
        for name, least in (("attempts_max", 1), ("delay_ms", 0), ("delay_ms_max", 0), ("multiplier", 1)):
            value = getattr(self, name)
            kinds = (int, float) if name == "multiplier" else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not value >= least:
                raise InvalidConfigError(f"{name} of a RetryStrategy must be at least {least}, not {value!r}", setting=name)

    def wants_again(self, attempt: int, result: Any, error: BaseException | None) -> bool:
        """Whether attempt 1, 2 ... is followed by another one."""
        if attempt >= self.attempts_max:
            return False
        if error is not None:
            return isinstance(error, self.on)
        return self.if_result is not None and bool(self.if_result(result))

    def pause_ms(self, attempt: int) -> int:
        """Pause behind attempt 1, 2 ..."""
        import tenacity

        wait = tenacity.wait_exponential(self.delay_ms / 1000, self.delay_ms_max / 1000, self.multiplier)
        state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
        state.attempt_number = attempt
        return int(wait(state) * 1000)


def _load() -> None:
    """Load what calls need, before the first record: a tenth of a worker's imports, for jobs of this kind alone."""
    import asyncio  # noqa: F401

    import tenacity  # noqa: F401


class Request:
    """One call: rows of one batch, for which results are awaited."""

    __slots__ = ("attempt", "batch", "call", "count", "error", "is_done", "results", "segment", "start", "timer")

    def __init__(self, batch: Batch, start: int, count: int, segment: _Segment) -> None:
        self.batch = batch
        self.start = start
        self.count = count
        self.segment = segment
        self.attempt = 0
        """0: not sent yet."""
        self.timer = 0
        """Number of the timer that counts; older ones are stale."""
        self.call: UserCall | None = None
        """Under way; None before, behind, and between two attempts."""
        self.results: Any = []
        """What the call gave; of one without `batch_rows` a list of that."""
        self.error: BaseException | None = None
        """What the last attempt raised, if it did."""
        self.is_done = False


class _Segment:
    """Requests between two watermarks."""

    __slots__ = ("answered", "requests", "watermark_ms")

    def __init__(self) -> None:
        self.requests: dict[Request, None] = {}
        """Those whose results are not emitted, in the order of their rows."""
        self.answered: deque[Request] = deque()
        """Those of them that have a result, in the order of their answers."""
        self.watermark_ms: int | None = None
        """The one behind them; None for the last segment."""


class _Entry(msgspec.Struct, array_like=True):
    """Some rows, as they are stored. They are behind `watermark_ms`, if that still waits in front of them."""

    version: int
    parallelism: int
    subtask: int
    watermark_ms: int | None
    timestamps: list[int] | None
    rows: bytes
    """Arrow IPC stream; empty: the watermark alone, behind all rows."""


_ENTRY = msgspec.msgpack.Decoder(_Entry)


class AsyncMapOperator(RowFunctionOperator):
    """Runs `async_map`. It is the head of its chain, so that its subtask can hold up the input when it is full."""

    forwards_watermarks = False
    forwards_statuses = True

    def __init__(
        self,
        function: Callable[[Any], Any],
        input_type: RowType,
        output_type: RowType,
        *,
        skips: bool = False,
        ordered: bool = True,
        capacity: int = 100,
        timeout_ms: int = 60_000,
        retry: RetryStrategy | None = None,
        batch_rows: int | None = None,
    ) -> None:
        super().__init__(function, input_type, output_type, skips=skips)
        self.ordered = ordered
        self.capacity = capacity
        self.timeout_ms = timeout_ms
        self.retry = retry or RetryStrategy(attempts_max=1)
        self.batch_rows = batch_rows
        self.is_coroutine = is_coroutine_function(function)

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return (REQUESTS,)

    def setup(self, context: OperatorContext, output: Output) -> None:
        super().setup(context, output)
        _load()
        self._segments: deque[_Segment] = deque([_Segment()])
        self._unsent: deque[Request] = deque()
        self._sent = 0
        """Requests whose results are not emitted, of those that were sent: at most `capacity`."""
        self._timed: dict[int, Request] = {}
        """Those that wait for an answer, or in a pause, by the number of their timer."""
        self._timers: list[tuple[int, int]] = []
        """(monotonic ms, number): when an attempt is over, or, in a pause, when the next one begins. A heap; a number that is not
        in `_timed` is stale."""
        self._timer_count = 0
        self._is_due = False
        """Something was answered since the last slice."""
        self._is_open = False

    # --------------------------------------------------------------------------------------------------------- runtime

    def open(self) -> None:
        super().open()
        self._is_open = True
        self._restore()
        self._send()

    def process_batch(self, batch: Batch, input_index: int) -> None:
        self._add(batch)
        self._send()

    def process_watermark(self, watermark_ms: int) -> Iterator[None]:
        if watermark_ms < MAX_WATERMARK:
            self._end_segment(watermark_ms)
        return iter(())

    def takes_input(self) -> bool:
        return not self._unsent

    def has_requests(self) -> bool:
        return len(self._segments) > 1 or bool(self._segments[0].requests)

    def next_processing_time_ms(self) -> int | None:
        if self._is_due:
            return OVERDUE_MS
        while self._timers and self._timers[0][1] not in self._timed:
            heappop(self._timers)
        if not self._timers:
            return None
        return self.context.now_ms() + max(0, self._timers[0][0] - self.context.monotonic_ms())

    def process_processing_time(self, now_ms: int) -> Iterator[None]:
        """One segment at most: its watermark leaves before what is behind it."""
        self._is_due = False
        self._fire_timers()
        self._emit_answered(self._segments[0])
        if not self._segments[0].requests and len(self._segments) > 1:
            watermark_ms = self._segments.popleft().watermark_ms
            if watermark_ms is not None:
                self.output.emit_watermark(watermark_ms)
        self._is_due = self._is_due or self._can_emit()
        self._send()
        return iter(())

    def close(self) -> None:
        for segment in self._segments if self._is_open else ():
            for request in segment.requests:
                if request.call is not None:
                    request.call.abandon()
        self._is_open = False
        super().close()

    # -------------------------------------------------------------------------------------------------------- requests

    def _add(self, batch: Batch) -> None:
        batch.columns()  # a row that does not fit is found here, and not by a barrier
        rows, segment = self.batch_rows or 1, self._segments[-1]
        for start in range(0, batch.num_rows, rows):
            request = Request(batch, start, min(rows, batch.num_rows - start), segment)
            segment.requests[request] = None
            self._unsent.append(request)

    def _end_segment(self, watermark_ms: int) -> None:
        last = self._segments[-1]
        if not last.requests and len(self._segments) > 1:
            self._segments[-2].watermark_ms = watermark_ms
        else:
            last.watermark_ms = watermark_ms
            self._segments.append(_Segment())
            self._is_due = self._is_due or self._can_emit()

    def _send(self) -> None:
        while self._unsent and self._sent < self.capacity:
            self._sent += 1
            self._call(self._unsent.popleft())

    def _call(self, request: Request) -> None:
        request.attempt += 1
        attempt = request.attempt
        request.call = UserCall(self.function, self._argument(request), is_coroutine=self.is_coroutine)
        self._set_timer(request, self.timeout_ms)
        self.context.submit_call(request.call, lambda result, error: self._answered(request, attempt, result, error))

    def _argument(self, request: Request) -> Any:
        """What the function is called with. A further attempt has rows of its own: what the one before has changed in its rows, or
        still changes behind its timeout, is none of theirs."""
        rows = self._rows_of(request)
        if request.attempt > 1:
            columns = request.batch.columns().slice(request.start, request.count)
            rows = columns_to_rows(columns, self.input_type.record)
        return rows[0] if self.batch_rows is None else rows

    def _rows_of(self, request: Request) -> list[Any]:
        rows = request.batch.rows(self.input_type.record)
        return list(rows[request.start : request.start + request.count])

    def _answered(self, request: Request, attempt: int, result: Any, error: BaseException | None) -> None:
        """An answer that comes after its timeout, or of an older attempt, is dropped."""
        if request.is_done or request.attempt != attempt or request.call is None:
            return
        request.call = None
        self._is_due = True  # what follows may raise, which belongs into a slice of work
        try:
            again = self.retry.wants_again(attempt, result, error)
        except Exception as raised:
            again, error = False, raised
        if again:
            self._set_timer(request, self.retry.pause_ms(attempt))
            return
        self._timed.pop(request.timer, None)
        request.is_done = True
        request.error = error
        request.results = [result] if self.batch_rows is None else result
        if not self.ordered:
            request.segment.answered.append(request)

    # ----------------------------------------------------------------------------------------------------------- timers

    def _set_timer(self, request: Request, delay_ms: int) -> None:
        self._timed.pop(request.timer, None)
        self._timer_count += 1
        request.timer = self._timer_count
        self._timed[request.timer] = request
        heappush(self._timers, (self.context.monotonic_ms() + delay_ms, request.timer))
        if len(self._timers) > STALE_TIMERS_MAX + 2 * len(self._timed):  # stale ones leave from the top alone
            self._timers = [timer for timer in self._timers if timer[1] in self._timed]
            heapify(self._timers)

    def _fire_timers(self) -> None:
        now_ms = self.context.monotonic_ms()
        while self._timers and self._timers[0][0] <= now_ms:
            request = self._timed.get(heappop(self._timers)[1])
            if request is None:
                continue
            if request.call is None:  # its pause is over
                self._call(request)
                continue
            request.call.abandon()
            self._answered(request, request.attempt, None, self._timed_out(request))

    def _timed_out(self, request: Request) -> AsyncTimeoutError:
        context, record = self.context, shown(self._rows_of(request)[0])
        return AsyncTimeoutError(
            f"operator {context.uid!r}, subtask {context.subtask}: no answer in {self.timeout_ms} ms, in attempt {request.attempt} "
            f"of {self.retry.attempts_max}; record {record}",
            operator=context.uid,
            subtask=context.subtask,
            timeout_ms=self.timeout_ms,
            record=record,
        )

    # ------------------------------------------------------------------------------------------------------------ output

    def _can_emit(self) -> bool:
        first = self._segments[0]
        if not first.requests:
            return len(self._segments) > 1
        return next(iter(first.requests)).is_done if self.ordered else bool(first.answered)

    def _emit_answered(self, segment: _Segment) -> None:
        ready: list[Request] = []
        if self.ordered:
            for request in segment.requests:
                if not request.is_done:
                    break
                ready.append(request)
        else:
            ready.extend(segment.answered)
            segment.answered.clear()
        for request in ready:
            del segment.requests[request]
            self._sent -= 1
        self._emit_results(ready)

    def _emit_results(self, ready: list[Request]) -> None:
        """Those of answered requests, in this order."""
        rows: list[Any] = []
        stamps: list[npt.NDArray[np.int64]] = []
        for request in ready:
            results = self._results_of(request)
            if results:
                rows += results
                if request.batch.timestamps is not None:
                    stamps.append(request.batch.timestamps[request.start : request.start + request.count])
        if rows:
            self._emit(rows, np.concatenate(stamps) if stamps else None)

    def _results_of(self, request: Request) -> list[Any]:
        """A result for each row, MISSING for one that is left out; none at all if all are. Raises what the call raised, naming
        operator and row."""
        results = request.results
        if request.error is not None:
            self._failed_call(request.error, request)
            return []
        if not isinstance(results, list | tuple) or len(results) != request.count:
            what = f"{len(results)} results" if isinstance(results, list | tuple) else shown(results)
            reason = f"returned {what} for {request.count} rows; it must return a list, one for each"
            self._failed_call(ValueError(reason), request)
            return []
        found = list(results)
        for position, row in enumerate(found if self.output_type.schema is not None else ()):
            if row is None:
                self._refuse(partial(self._none_of, request, position))
                found[position] = MISSING
        return found

    def _none_of(self, request: Request, position: int) -> HoldfastError:
        return self._returned_none(self._rows_of(request)[position], "a row")

    def _failed_call(self, error: BaseException, request: Request) -> None:
        if isinstance(error, AsyncTimeoutError):
            for _ in range(request.count):
                self._refuse(lambda: error)
            return
        if not isinstance(error, Exception):
            raise error
        for row in self._rows_of(request):
            self._failed(error, self.function, row)

    # ------------------------------------------------------------------------------------------------------------- state

    def snapshot_state(self, checkpoint_id: int) -> None:
        """O(rows in flight): at most `capacity` requests and what is left of one batch."""
        entries: list[bytes] = []
        watermark_ms: int | None = None
        for segment in self._segments:
            for batch, rows in self._runs(segment):
                for start in range(0, len(rows), ENTRY_ROWS_MAX):
                    entries.append(self._entry(watermark_ms, batch.take(rows[start : start + ENTRY_ROWS_MAX])))
            if segment.watermark_ms is not None:
                watermark_ms = segment.watermark_ms
        if watermark_ms is not None:
            entries.append(self._entry(watermark_ms, None))
        self.context.operator_state.list_state(REQUESTS.name).update(entries)

    @staticmethod
    def _runs(segment: _Segment) -> list[tuple[Batch, Any]]:
        """Rows without an emitted result: batch -> their positions, in order."""
        runs: list[tuple[Batch, list[int]]] = []
        for request in segment.requests:
            if not runs or runs[-1][0] is not request.batch:
                runs.append((request.batch, []))
            runs[-1][1].extend(range(request.start, request.start + request.count))
        return [(batch, np.array(rows, np.int64)) for batch, rows in runs]

    def _entry(self, watermark_ms: int | None, batch: Batch | None) -> bytes:
        context, rows, stamps = self.context, b"", None
        if batch is not None:
            columns = batch.columns()
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, columns.schema) as writer:
                writer.write_batch(columns)
            rows = sink.getvalue().to_pybytes()
            stamps = None if batch.timestamps is None else batch.timestamps.tolist()
        return msgspec.msgpack.encode(_Entry(1, context.parallelism, context.subtask, watermark_ms, stamps, rows))

    def _restore(self) -> None:
        """Watermarks hold for what the same subtask reads again; behind a rescale rows meet others, and they are left out."""
        entries = [_decoded(entry, self.context.uid) for entry in self.context.operator_state.list_state(REQUESTS.name).entries]
        here = (self.context.parallelism, self.context.subtask)
        unmoved = all((entry.parallelism, entry.subtask) == here for entry in entries)
        before: int | None = None
        for entry in entries:
            if unmoved and entry.watermark_ms is not None and entry.watermark_ms != before:
                before = entry.watermark_ms
                self._end_segment(before)
            if entry.rows:
                self._add(self._restored_batch(entry))

    def _restored_batch(self, entry: _Entry) -> Batch:
        try:
            table = pa.ipc.open_stream(entry.rows).read_all()
        except (pa.ArrowException, OSError) as error:
            raise _corrupt(self.context.uid, str(error)) from error
        declared = self.input_type.schema
        if declared is None or not table.schema.equals(declared):
            raise IncompatibleStateError(
                f"operator {self.context.uid!r}: requests in flight were stored as rows of {table.schema.names}, the stream has "
                f"{'undeclared rows' if declared is None else declared.names}, or other types: drain the job before they change",
                operator=self.context.uid,
                state=REQUESTS.name,
                stored=str(table.schema),
                declared=str(declared),
            )
        stamps = None if entry.timestamps is None else np.array(entry.timestamps, np.int64)
        return Batch(columns=table.combine_chunks().to_batches()[0], timestamps=stamps)


def _decoded(entry: bytes, operator: str) -> _Entry:
    try:
        return _ENTRY.decode(entry)
    except msgspec.MsgspecError as error:
        raise _corrupt(operator, str(error)) from error


def _corrupt(operator: str, reason: str) -> CorruptStateError:
    message = f"operator {operator!r}: requests in flight can't be read: {reason}"
    return CorruptStateError(message, operator=operator, reason=reason)


def check_async_settings(
    capacity: Any, timeout_ms: Any, batch_rows: Any, retry: Any, operator: str = "async_map"
) -> None:
    """Raises GraphError for one out of bounds."""
    bounds = (("capacity", capacity, CAPACITY_MAX), ("timeout_ms", timeout_ms, None), ("batch_rows", batch_rows, None))
    for name, value, most in bounds:
        if value is None and name == "batch_rows":
            continue
        if type(value) is not int or value < 1 or (most is not None and value > most):
            bound = "at least 1" if most is None else f"1..{most}"
            raise GraphError(f"operator {operator!r}: {name} must be {bound}, not {value!r}", operator=operator, setting=name)
    if retry is not None and not isinstance(retry, RetryStrategy):
        raise GraphError(f"operator {operator!r}: retry is a hf.RetryStrategy, not {retry!r}", operator=operator)


def is_coroutine_function(function: Any) -> bool:
    """Whether a call of it gives a coroutine: an `async def`, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004

