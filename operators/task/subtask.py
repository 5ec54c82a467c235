"""CORE: the life and the step of one subtask, given its ports. No threads, sockets or clock of its own.

It decides what a mail means in each state, when input may run, and when the subtask has ended. What is taken in, in which
order, is input.py's; what a checkpoint does from the barrier on is snapshots.py's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, assert_never

from msgspec import UNSET

from holdfast.barriers.alignment.gate import BarrierOutput
from holdfast.barriers.alignment.handler import AbortCheckpoint, AlignmentMetrics, InFlightCollected, TriggerSnapshot
from holdfast.barriers.elements import (
    MAX_WATERMARK,
    MIN_WATERMARK,
    CheckpointBarrier,
    EndOfData,
    EndOfPartition,
    LatencyMarker,
)
from holdfast.barriers.messages import (
    INT_MAX,
    TRACEBACK_BYTES_MAX,
    AlignWatermarks,
    Answerable,
    CheckpointKind,
    FailureReason,
    FinishTasks,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    SubtaskKey,
    SubtaskMetrics,
    SubtaskStatus,
    TaskState,
    TriggerCheckpoint,
    clip_front,
)
from holdfast.operators.task.chain import OperatorChain, ResultPort
from holdfast.operators.task.context import (
    CancelSubtask,
    Clock,
    FailSubtask,
    Mail,
    Mailbox,
    PoolOutcome,
    SourceReady,
    SplitsRequested,
    SubtaskPool,
)
from holdfast.operators.task.input import GateInputs, OutputRoom, RowBudget, TaskInput, never_delayed
from holdfast.operators.task.snapshots import SubtaskCheckpointCoordinator
from holdfast.operators.task.source_operator import SourceOperator
from holdfast.operators.task.timing import Spent, SubtaskTime
from holdfast.operators.task.user_failures import error_line, exit_error, stack_trace, task_failure
from holdfast.statebackends.local_recovery.storage import RestoredBytes

TERMINAL = frozenset({TaskState.FINISHED, TaskState.CANCELED, TaskState.FAILED})


class StepResult(NamedTuple):
    """What one step did. `next_wakeup_ms` is monotonic: when a step is due although nothing arrives."""

    progress: bool
    next_wakeup_ms: int | None = None
    backpressured: bool = False
    has_more: bool = False
    """It stopped before it knew that nothing was left to do: another step is due at once."""


Report: TypeAlias = Callable[[SubtaskStatus | Answerable], None]

Attach: TypeAlias = Callable[[], None]
"""Hands restored backends to the contexts; runs on the loop thread."""


@dataclass(slots=True)
class SubtaskPorts:
    """Everything that a subtask touches."""

    chain: OperatorChain
    mailbox: Mailbox
    pool: SubtaskPool
    clock: Clock
    checkpoints: SubtaskCheckpointCoordinator
    report: Report
    inputs: GateInputs | None = None
    """None for a source."""
    restore: Callable[[], Attach] | None = None
    """Opens backends and reads state; runs on the pool. None: the contexts are complete."""
    restored: RestoredBytes = field(default_factory=RestoredBytes)
    """What `restore` has read."""


UNITS_MAX = 256
"""Units of work in one step, whatever the clock says: a simulated clock may stand still."""

THREADS_END_MS_MAX = 5_000
"""How long an attempt that is over waits for the threads of its clients: what they hold outside, the next one may need."""

Notice: TypeAlias = NotifyCheckpointComplete | NotifyCheckpointAborted | FinishTasks


@dataclass(slots=True)
class _Times:
    """Seconds since the attempt began, by what keeps sources and event time waiting. What users are told is timing.py's."""

    last_end_s: float
    held_s: float = 0.0
    """An output was full, or an operator took no more."""
    was_backpressured: bool = False
    silent_s: float = 0.0
    """The subtask could have read, and found nothing."""
    was_silent: bool = False
    running_s: float = 0.0
    """Without backpressure, and without pauses of a source."""
    was_paused: bool = False

    def waited(self, now_s: float) -> None:
        """A step begins: count the time since the last one."""
        passed_s = now_s - self.last_end_s
        if self.was_backpressured:
            self.held_s += passed_s
            return
        if not self.was_paused:
            self.running_s += passed_s
        if self.was_silent:
            self.silent_s += passed_s


def _go_on() -> None:
    """Nothing follows a barrier but further input."""


class Subtask:
    """One parallel instance of one chain."""

    def __init__(
        self,
        key: SubtaskKey,
        attempt: int,
        ports: SubtaskPorts,
        *,
        step_budget_ms: int = 5,
        batch_rows_max: int = 65_536,
        proven_rows: int = 0,
        units_max: int = UNITS_MAX,
        latency_interval_ms: int = 0,
        delayed_s: Callable[[], float] = never_delayed,
        begins_finished: bool = False,
    ) -> None:
        """`latency_interval_ms`: a source sends a latency marker so often; 0: never. `delayed_s`: as of `RowBudget`.
        `begins_finished`: as of SubtaskDeployment."""
        self.key = key
        self.attempt = attempt
        self.state = TaskState.CREATED
        self.chain = ports.chain
        self.mailbox = ports.mailbox
        self._ports = ports
        self._clock = ports.clock
        self._pool = ports.pool
        self._checkpoints = ports.checkpoints
        self._budget_s = step_budget_ms / 1000
        self._units_max = units_max
        self._outputs: tuple[ResultPort, ...] = ports.chain.partitions()
        self._room = OutputRoom(self._outputs)
        self._input = TaskInput(
            ports.chain,
            ports.inputs,
            ports.clock,
            RowBudget(step_budget_ms, batch_rows_max, proven=proven_rows, delayed_s=delayed_s),
            self._room,
            on_barrier=self._barrier,
            on_drained=self._report_status,
            begins_finished=begins_finished,
        )
        self.failure: BaseException | None = None
        """Of what it FAILED: the error itself, which its status tells in words."""
        self._newest_notified = 0
        self._finish_id = 0
        self._said_end = False
        """Its outputs have got the end; it ends once all that can leave them has left."""
        self._early: list[Notice] = []
        self._deferred: list[TriggerCheckpoint] = []
        """Their source is in the middle of something."""
        self._disposed = False
        self._threads_due_ms = 0
        """Monotonic: until then the subtask, which is over, waits for the threads of its clients."""
        self._latency_interval_ms = latency_interval_ms if self.reads_source else 0
        self._next_marker_ms = 0
        """Monotonic."""
        self._backlog_changes = 0
        """See SubtaskStatus.backlog."""
        began_s = ports.clock.seconds()
        self._times = _Times(began_s)
        self._time = SubtaskTime(began_s)
        for node in ports.chain.nodes:
            node.context.reading = self._reading_ms
            node.context.running = self._running_ms
        self.last_step = StepResult(progress=True, has_more=True)
        """What the newest step did; tells a scheduler when the next one is worth it."""

    # -------------------------------------------------------------------------------------------------------- status

    @property
    def is_source(self) -> bool:
        """Whether checkpoints begin here: it has no input channels."""
        return self._ports.inputs is None

    @property
    def reads_source(self) -> bool:
        """Whether its records come from outside the job; of a source with an enumerator its splits, and barriers, from there."""
        return isinstance(self.chain.head.operator, SourceOperator)

    @property
    def is_drained(self) -> bool:
        """The end of data was passed on; only barriers and notices may still come."""
        return self._input.is_drained

    @property
    def is_disposed(self) -> bool:
        """Terminal, with nothing under way on the pool and all state released: its resources may be used again."""
        return self._disposed

    def _enter(self, state: TaskState, error: BaseException | None = None) -> None:
        self.state = state
        self._report_status(error)

    def _report_status(self, error: BaseException | None = None) -> None:
        text = trace = ""
        if error is not None:
            text = error_line(error)
            trace = clip_front(stack_trace(error), TRACEBACK_BYTES_MAX)
        key, now_ms = self.key, self._clock.wall_ms()
        metrics = self.metrics() if self.is_drained or self.state in TERMINAL else None
        self._ports.report(
            SubtaskStatus(
                self.attempt,
                key.vertex,
                key.subtask,
                self.state,
                self.is_drained,
                text,
                trace,
                now_ms,
                metrics,
                self._backlog_changes,
            )
        )

    def _look_for_backlog(self) -> bool:
        """Note whether its source processes a backlog now; whether that has changed."""
        head = self.chain.head.operator
        found = isinstance(head, SourceOperator) and not self._input.has_ended and head.is_processing_backlog
        if found == bool(self._backlog_changes % 2):
            return False
        self._backlog_changes += 1
        return True

    def metrics(self) -> SubtaskMetrics:
        """Counters since the attempt began."""
        nodes = self.chain.nodes
        watermark_ms = _told(self._input.watermark_ms)
        output_ms = _told(self.chain.output_watermark_ms)
        reached_ms = output_ms if self.reads_source else watermark_ms
        return SubtaskMetrics(
            self.key.vertex,
            self.key.subtask,
            records_in=self.chain.head.context.counters.records_in,
            records_out=sum(node.context.counters.records_out for node in nodes if node.partitions or not node.children),
            bytes_in=self._input.bytes_in,
            bytes_out=sum(output.bytes_out for output in self._outputs),
            operators=self.chain.metrics(),
            **self._time_metrics(),
            **self._queue_metrics(),
            watermark_ms=watermark_ms,
            restored_local_bytes=self._ports.restored.local,
            restored_remote_bytes=self._ports.restored.remote,
            aligned=self._input.aligned_watermarks() or UNSET,
            output_watermark_ms=UNSET if output_ms is None else output_ms,
            watermark_lag_ms=UNSET if reached_ms is None else _fit(self._clock.wall_ms() - reached_ms),
            latencies=self._input.latencies.histograms() or UNSET,
            **self._source_metrics(),
            **self._commit_metrics(),
        )

    @property
    def waits(self) -> Spent:
        """How the time until its next step counts; for any thread."""
        return self._time.waits

    def _time_metrics(self) -> dict[str, Any]:
        """In all, and in the last second while it runs."""
        time = self._time
        time.observe(self._clock.seconds())
        found = {
            "busy_ms": time.total_ms(Spent.BUSY),
            "idle_ms": time.total_ms(Spent.IDLE),
            "backpressured_ms": time.total_ms(Spent.BACKPRESSURED),
        }
        if self.state is TaskState.RUNNING:
            second = time.last_second()
            found["busy_ms_per_second"] = second.busy_ms
            found["idle_ms_per_second"] = second.idle_ms
            found["backpressured_ms_per_second"] = second.backpressured_ms
        return found

    def _queue_metrics(self) -> dict[str, Any]:
        """What waits at either side of it, and how much may; none of a side that has no channels."""
        if self.state is not TaskState.RUNNING:
            return {}
        found: dict[str, Any] = {}
        if self._outputs:
            found["queued_out_bytes"] = sum(output.pending_bytes for output in self._outputs)
        inputs = self._ports.inputs
        if inputs is None:
            return found
        found["queued_in_bytes"] = inputs.gate.queued_bytes
        credits = inputs.gate.credits
        if credits:
            found["allocated_in_bytes"] = sum(each.allocated_bytes for each in credits)
            found["overshoot_in_bytes"] = sum(each.overshoot_bytes for each in credits)
            told = [each.time_to_consume_ms for each in credits]
            known = [time_ms for time_ms in told if time_ms is not None]
            if known:
                found["time_to_consume_ms"] = min(INT_MAX, max(known))
        return found

    def _commit_metrics(self) -> dict[str, Any]:
        """How far the commits of its sinks are behind the checkpoints; none of a subtask that commits nothing."""
        told = [] if self.state is not TaskState.RUNNING else [node.operator.commit_backlog() for node in self.chain.nodes]
        found = [each for each in told if each is not None]
        if not found:
            return {}
        rows = [each.rows for each in found if each.rows is not None]
        return {
            "uncommitted_checkpoints": max(each.checkpoints for each in found),
            "pending_committables": sum(each.committables for each in found),
            "commit_lag_ms": max(each.lag_ms for each in found),
            **({"uncommitted_rows": sum(rows)} if rows else {}),
        }

    def _source_metrics(self) -> dict[str, Any]:
        """How a source that still reads keeps up."""
        head = self.chain.head.operator
        if not isinstance(head, SourceOperator) or self.state is not TaskState.RUNNING or self._input.has_ended:
            return {}
        lags = [node.context.counters.emit_lag_ms for node in self.chain.nodes]
        lag_ms = next((lag for lag in reversed(lags) if lag is not None), None)
        return {
            "emit_lag_ms": UNSET if lag_ms is None else _fit(lag_ms),
            "source_idle_ms": head.idle_ms(),
            "idle": self.chain.is_idle,
            **head.split_metrics(),
        }

    # ---------------------------------------------------------------------------------------------------------- life

    def start(self) -> None:
        """CREATED -> INITIALIZING: restore on the pool, or open at once when there is nothing to restore."""
        if self.state is not TaskState.CREATED:
            return
        self._enter(TaskState.INITIALIZING)
        if self._ports.restore is not None:
            self._pool.submit(self._ports.restore, self._restored)
            return
        try:
            self._open()
        except BaseException as error:
            self._fail(task_failure(error))

    def _restored(self, attach: Attach | None, error: BaseException | None) -> None:
        if attach is not None:
            attach()  # also when cancelled meanwhile: what was opened must be disposed of
        if self.state is not TaskState.INITIALIZING:
            return
        if error is not None:
            self._fail(error)
        else:
            self._open()

    def _open(self) -> None:
        self.chain.setup()
        self.chain.open()
        self._look_for_backlog()  # in front of the state that lets checkpoints begin
        self._enter(TaskState.RUNNING)
        early, self._early = self._early, []
        for mail in early:
            self._handle(mail)

    def fail(self, error: BaseException) -> None:
        """What it has emitted can't leave: nothing of it may leave any more. Between steps, on the loop's thread."""
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self.state in TERMINAL or self.state is TaskState.CANCELING:
            return
        if isinstance(error, SystemExit | GeneratorExit):  # also of a thread of a client's
            uids = " -> ".join(node.uid for node in self.chain.nodes)
            error = exit_error(error, operator=uids, subtask=self.key.subtask)
        self.failure = error
        self._enter(TaskState.FAILED, error)
        self._stop_work()

    def _cancel(self) -> None:
        if self.state in TERMINAL or self.state is TaskState.CANCELING:
            return
        self._enter(TaskState.CANCELING)
        self._stop_work()

    def _stop_work(self) -> None:
        self._pool.cancel_flows()
        self._input.clear()
        self.chain.close()
        if self._ports.inputs is not None:
            self._ports.inputs.gate.close()
        self._threads_due_ms = self._clock.monotonic_ms() + THREADS_END_MS_MAX
        self._settle()

    def _settle(self) -> None:
        """Release state once the pool holds nothing of ours (K11), and clients have left, or stay too long."""
        if self._disposed or self._pool.under_way:
            return
        if self._pool.threads_ending and self._clock.monotonic_ms() < self._threads_due_ms:
            return
        self._checkpoints.close()
        self.chain.dispose()
        self._disposed = True
        self.mailbox.close()
        if self.state is TaskState.CANCELING:
            self._enter(TaskState.CANCELED)

    def _say_end(self) -> None:
        """Commits are done: nothing more will come from here.

        An attempt that was restored from a job's last checkpoint only to commit it ends before its data does."""
        self._said_end = True
        if not self._input.is_drained:
            self.chain.broadcast(EndOfData(drain=False))
        self.chain.broadcast(EndOfPartition())

    def _finish(self) -> None:
        errors = self.chain.close()
        if errors:
            self._fail(errors[0])
            return
        self._enter(TaskState.FINISHED)
        self._stop_work()

    # ---------------------------------------------------------------------------------------------------------- step

    def step(self, now_ms: int, due_s: float | None = None) -> StepResult:
        """All mail, then input for one time budget. Never raises for what user code does: that is FAILED.

        `due_s`: since when, by the clock's seconds, the loop knows that there is something to do; None: since now."""
        began = self._clock.seconds()
        self._time.step_begins(began, due_s)
        self._times.waited(began)
        progress = self._serve_mail()
        self._input.end_urgent()
        moved = backpressured = False
        has_more = progress
        if self.state is TaskState.RUNNING:
            try:
                if not self._said_end:
                    moved, has_more, backpressured = self._run_input(now_ms, began + self._budget_s)
                if self._look_for_backlog():
                    self._report_status()
                finished = self._finish_if_due()
                has_more = has_more or finished
                progress = finished or moved or progress
            except BaseException as error:
                self._fail(task_failure(error))
                progress = has_more = True
        is_running = self.state is TaskState.RUNNING
        times = self._times
        times.last_end_s = self._clock.seconds()
        times.was_backpressured = backpressured or (is_running and self._input.is_full)
        times.was_paused = self.reads_source and self._input.is_paused
        times.running_s += times.last_end_s - began
        self._time.step_ends(times.last_end_s, Spent.BACKPRESSURED if times.was_backpressured else Spent(has_more))
        waits = backpressured or self._checkpoints.is_preparing
        wakeup_ms = self._next_wakeup_ms() if is_running and not waits else None
        if not is_running and not self._disposed and self._pool.threads_ending:
            wakeup_ms = self._threads_due_ms
        found_nothing = is_running and not backpressured and not has_more
        times.was_silent = found_nothing and self.chain.watches_silence and self._input.is_listening
        self.last_step = StepResult(progress, wakeup_ms, backpressured, has_more)
        return self.last_step

    def write_behind(self) -> bool:
        """The worker has nothing else to do. Whether it should soon be called again. Never raises, as `step`."""
        try:
            return self.state is TaskState.RUNNING and self.chain.write_behind()
        except BaseException as error:
            self._fail(task_failure(error))
            return True

    def serve_urgent(self, now_ms: int) -> bool:
        """All mail, then the barriers of one checkpoint that overtake, whatever the outputs hold and however much is in hand.
        Whether those of another one wait for the next step. Never raises, as `step`."""
        self._serve_mail()
        self.last_step = self.last_step._replace(has_more=True)
        if self.state is not TaskState.RUNNING or self._said_end:
            return False
        try:
            self.chain.set_processing_time()
            return self._input.serve_urgent(now_ms)
        except BaseException as error:
            self._fail(task_failure(error))
            return False

    @property
    def is_collecting(self) -> bool:
        """A checkpoint waits for what is in flight: `outputs_moved` is to be called when something may have been sent."""
        return self._checkpoints.is_collecting

    def outputs_moved(self) -> None:
        """Something may have left the outputs, or have come in."""
        if self.state is not TaskState.RUNNING:
            return
        inputs = self._ports.inputs
        refused = self._checkpoints.outputs_moved(0 if inputs is None else inputs.gate.in_flight_bytes)
        if refused is not None and inputs is not None:
            inputs.gate.notify_aborted(refused, now_ms=self._clock.monotonic_ms())

    @property
    def is_unblocked(self) -> bool:
        """The last step stopped at a full output, and none is full any more."""
        return self.last_step.backpressured and all(output.is_available for output in self._outputs)

    def _run_input(self, now_ms: int, deadline_s: float) -> tuple[bool, bool, bool]:
        """Units of work until the budget is spent, mail waits, or nothing can move: (moved, has_more, backpressured)."""
        moved = self._latency_interval_ms > 0 and self._mark_latency(now_ms)
        for _ in range(self._units_max):
            if self._checkpoints.is_preparing and not self._checkpoints.go_on():
                return moved, False, False
            if not self._room.look():
                return moved, False, True
            self.chain.set_processing_time()
            if not self._input.advance(now_ms) and not self._input.process_silence(self._reading_ms()):
                return moved, False, False
            moved = True
            if self._deferred:
                self._cut_if_due()
            if self.mailbox or self._clock.seconds() >= deadline_s:
                break
        return moved, True, False

    def _mark_latency(self, now_ms: int) -> bool:
        """A source that can emit sends its next marker. Whether it was due."""
        if now_ms < self._next_marker_ms or self._input.has_ended or not all(output.is_available for output in self._outputs):
            return False
        self._next_marker_ms = now_ms + self._latency_interval_ms
        self.chain.forward_marker(LatencyMarker(self._clock.wall_ms(), self.key.vertex, self.key.subtask))
        return True

    def _next_wakeup_ms(self) -> int | None:
        wakeup_ms = self._input.next_wakeup_ms(self._reading_ms())
        if not self._latency_interval_ms or self._input.has_ended:
            return wakeup_ms
        return self._next_marker_ms if wakeup_ms is None else min(wakeup_ms, self._next_marker_ms)

    def _reading_ms(self) -> int:
        """See `OperatorContext.reading_ms`."""
        return int(self._times.silent_s * 1000 + 1e-6)

    def _running_ms(self) -> int:
        """See `OperatorContext.running_ms`."""
        return int(self._times.running_s * 1000 + 1e-6)

    def _finish_if_due(self) -> bool:
        """The end of a subtask whose commits are done. True: a step is due at once, unless it has ended."""
        if self._finish_id and not self._input.is_drained:
            self._input.clear()  # nothing reads what it would emit, and where the output is full it would never be done
        if not self._finish_id or self._input.has_work or self.chain.has_pending_work() or self._pool.under_way:
            return False
        if not self._said_end:
            self._say_end()
        # Behind the job's last checkpoint; what a consumer that has ended gives no credit for is read by nobody.
        if not any(output.is_leaving for output in self._outputs):
            self._finish()
        return True

    # ---------------------------------------------------------------------------------------------------------- mail

    def _serve_mail(self) -> bool:
        served = False
        while (mail := self.mailbox.take()) is not None:
            served = True
            try:
                self.chain.set_processing_time()
                self._handle(mail)
            except BaseException as error:
                self._fail(task_failure(error))
        if self.state is TaskState.CANCELING or self.state in TERMINAL:
            self._settle()
        return served

    def _handle(self, mail: Mail) -> None:
        match mail:
            case PoolOutcome():
                mail.done(mail.result, mail.error)
                self._input.collect_own_watermarks()
            case TriggerCheckpoint():
                self._trigger(mail)
            case NotifyCheckpointComplete() | NotifyCheckpointAborted() | FinishTasks():
                self._notified(mail)
            case CancelSubtask():
                self._cancel()
            case FailSubtask(error=error):
                self._fail(error)
            case AlignWatermarks(maximum_ms=maximum_ms):
                self._input.align(maximum_ms)
            case SourceReady():
                self._input.source_is_ready()
            case SplitsRequested(subtask=subtask, total=total):
                head = self.chain.head.operator
                if isinstance(head, SourceOperator) and self.state not in TERMINAL:
                    head.split_requested(subtask, total)
                    self._input.source_is_ready()
            case _:
                assert_never(mail)

    def _notified(self, mail: Notice) -> None:
        if self.state in (TaskState.CREATED, TaskState.INITIALIZING):
            self._early.append(mail)
            return
        if self.state is not TaskState.RUNNING:
            return
        match mail:
            case NotifyCheckpointComplete(checkpoint_id=checkpoint_id, timestamp_ms=timestamp_ms):
                self._complete(checkpoint_id, timestamp_ms)
            case NotifyCheckpointAborted(checkpoint_id=checkpoint_id):
                self._checkpoints.abort(checkpoint_id, remember=self.is_source)
                if self._ports.inputs is not None:
                    self._ports.inputs.gate.notify_aborted(checkpoint_id, now_ms=self._clock.monotonic_ms())
                self.chain.notify_aborted(checkpoint_id)
            case FinishTasks(checkpoint_id=checkpoint_id):
                self._complete(checkpoint_id)
                self._finish_id = checkpoint_id
            case _:
                assert_never(mail)

    def _complete(self, checkpoint_id: int, timestamp_ms: int = 0) -> None:
        if checkpoint_id > self._newest_notified:
            self._newest_notified = checkpoint_id
            self._checkpoints.completed(checkpoint_id, timestamp_ms)
            self.chain.notify_complete(checkpoint_id)

    # ------------------------------------------------------------------------------------------------- checkpoints

    def _trigger(self, trigger: TriggerCheckpoint) -> None:
        """Sources only: the cut of this source is here."""
        checkpoint_id = trigger.checkpoint_id
        if self.state is not TaskState.RUNNING:
            if self.state in (TaskState.CREATED, TaskState.INITIALIZING):
                self._checkpoints.refuse(checkpoint_id, FailureReason.TASK_NOT_READY, f"the subtask is {self.state}")
            return
        if not self._may_cut:
            self._deferred.append(trigger)
            return
        if not self._checkpoints.admits(checkpoint_id):
            return
        barrier = CheckpointBarrier(
            checkpoint_id,
            trigger.timestamp_ms,
            trigger.kind.value,
            trigger.drain,
            trigger.folder,
            trigger.base,
            native=trigger.native,
            unaligned=trigger.unaligned,
            aligned_timeout_ms=trigger.aligned_timeout_ms,
            erasure=trigger.erasure,
        )
        stops = trigger.kind is CheckpointKind.STOP_SAVEPOINT
        if stops and trigger.drain:
            self._input.end_source(drain=True)
            self._input.add_work(self._snapshot_in_turn(barrier))
            return
        self._perform(barrier, self._end_source if stops else _go_on)

    def _end_source(self) -> None:
        self._input.end_source(drain=False)

    @property
    def _may_cut(self) -> bool:
        head = self.chain.head.operator
        return not isinstance(head, SourceOperator) or self._input.is_finished or head.may_cut

    def _cut_if_due(self) -> None:
        """Triggers wait for the end of what their source must not be cut in."""
        if self._may_cut:
            deferred, self._deferred = self._deferred, []
            for trigger in deferred:
                self._trigger(trigger)

    def _snapshot_in_turn(self, barrier: CheckpointBarrier) -> Iterator[None]:
        """A snapshot that waits for the work in front of it."""
        self._perform(barrier)
        yield

    def _perform(self, barrier: CheckpointBarrier, then: Callable[[], None] = _go_on) -> None:
        delay_ms = max(0, self._clock.wall_ms() - barrier.timestamp_ms)
        alignment = AlignmentMetrics(start_delay_ms=delay_ms)
        self._checkpoints.perform(barrier, alignment, finished=self._input.is_finished, then=then)

    def _barrier(self, item: BarrierOutput) -> None:
        """The gate decided on an id."""
        if isinstance(item, AbortCheckpoint):
            self._checkpoints.abandon(item.checkpoint_id, item.why.decline_reason, item.why.value)
        elif isinstance(item, InFlightCollected):
            self._checkpoints.collected(item.checkpoint_id, item.channels, item.metrics)
        elif self._checkpoints.admits(item.barrier.checkpoint_id):
            stops = self.reads_source and item.barrier.kind == CheckpointKind.STOP_SAVEPOINT
            if stops and item.barrier.drain:
                self._input.end_source(drain=True)
                self._input.add_work(self._barrier_in_turn(item))
                return
            then = self._end_source if stops else _go_on
            held = self._input.in_hand() if item.overtakes else None
            self._checkpoints.perform(item.barrier, item.metrics, finished=self._input.is_finished, then=then, held=held)

    def _barrier_in_turn(self, item: TriggerSnapshot) -> Iterator[None]:
        """As `_snapshot_in_turn`, of a barrier that came from the source's enumerator."""
        self._checkpoints.perform(item.barrier, item.metrics, finished=self._input.is_finished)
        yield


def _told(watermark_ms: int) -> int | None:
    """None before the first watermark, and at the end of event time."""
    return None if watermark_ms in (MIN_WATERMARK, MAX_WATERMARK) else watermark_ms


def _fit(lag_ms: int) -> int:
    """What a record can hold."""
    return max(-INT_MAX, min(INT_MAX, lag_ms))
