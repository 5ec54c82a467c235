"""The cooperative loop of one worker process: commands, frames, steps of subtasks, frames again, one wait.

One thread runs it and owns the transport and all subtasks; other threads only post commands and mails. It decides when a subtask
may step and when an attempt is lost; time, waiting and threads come from outside."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import assert_never

from msgspec import UNSET
from msgspec.structs import replace

from holdfast.barriers.elements import CheckpointBarrier
from holdfast.barriers.exchange.frames import ChannelId, Frame
from holdfast.barriers.exchange.wiring import derive_channels, derive_peers
from holdfast.barriers.messages import (
    AlignWatermarks,
    CancelTasks,
    Deploy,
    Deployment,
    FinishTasks,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    ShutdownWorker,
    SubtaskKey,
    SubtaskMetrics,
    SubtaskStatus,
    TaskState,
    TriggerCheckpoint,
    WorkerCommand,
    clip,
)
from holdfast.barriers.transport.admission import AttemptPeers, Peer
from holdfast.barriers.transport.port import PeerLost, Received, Transport
from holdfast.operators.task.context import CancelSubtask, Clock, FailSubtask, SplitsRequested
from holdfast.operators.task.subtask import TERMINAL, Report, Subtask
from holdfast.operators.task.timing import Spent, TimePerSecond, later_second
from holdfast.operators.task.user_failures import task_failure, unsent_error
from holdfast.operators.worker.deploy import DeployedSubtask, SubtaskBuilder, Wiring
from holdfast.statebackends.errors import HoldfastError, InvalidRowError, InvariantError, PeerLostError, ProtocolError
from holdfast.statebackends.secrets import hide_resolved

IDLE_WAIT_MS_MAX = 1_000
"""Longest wait: after it every subtask steps, even without events."""

LAST_SEQUENCE_INTERVAL_MS = 1_000
METRICS_INTERVAL_MS = 200
STEP_TOLD_MS = 500
"""A step that has lasted so long is told before it ends, with the time that it takes: the loop tells between rounds alone."""
LOOK_INTERVAL_MS = 2
"""Time since the last look at what has arrived, from which on another one is taken between two steps."""

_SENDING_NOTHING = frozenset({TaskState.FAILED, TaskState.CANCELING, TaskState.CANCELED})


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One attempt's subtasks in this worker, downstream first."""

    deployment: Deployment
    subtasks: tuple[DeployedSubtask, ...]
    wiring: Wiring


class Worker:
    """One slot of a job. `post` and `wake` may be called from any thread, everything else from the loop's."""

    def __init__(self, slot: int, transport: Transport, clock: Clock, builder: SubtaskBuilder, report: Report) -> None:
        self._slot = slot
        self._transport = transport
        self._clock = clock
        self._builder = builder
        self._report = report
        self._commands: deque[WorkerCommand] = deque()
        self._attempt: _Attempt | None = None
        self._pending: Deployment | None = None
        """Next deployment; starts once the attempt before has released its state."""
        self._cancelled_up_to = 0
        self._full_round_due_ms = 0
        """Time of the next round in which every subtask steps, due or not: subtasks measure waiting times, and the wall clock may
        have been set."""
        self._urgent: set[DeployedSubtask] = set()
        """Those with a barrier, or a trigger, that may overtake what waits."""
        self._aging: dict[DeployedSubtask, int] = {}
        """Those with a barrier that will, and the monotonic time from which on."""
        self._received_ms = 0
        self._sequences_due_ms = 0
        self._metrics_due_ms = 0
        self._metrics: tuple[int, tuple[SubtaskMetrics, ...]] = (0, ())
        """(attempt, counters), replaced as a whole at intervals; read by the control thread."""
        self._working: DeployedSubtask | None = None
        self._working_since_ms = 0
        """Monotonic, when its step began. Written first and read last: another thread may see that of a later step, never of an
        earlier one."""
        self.leaving: ShutdownWorker | None = None
        self.cancelling_since_ms: int | None = None
        """Since when subtasks should be gone and are not; the control thread ends a process that takes too long."""

    # ------------------------------------------------------------------------------------------------------ any thread

    def post(self, command: WorkerCommand) -> None:
        """Hand a command to the loop."""
        self._commands.append(command)
        # Only after the command was queued: a round of the loop that ends in between would find nothing to cancel, and forget the
        # time.
        self._time_cancellation(command)
        self._transport.wake()

    def _time_cancellation(self, command: WorkerCommand) -> None:
        if isinstance(command, Deploy | CancelTasks | ShutdownWorker) and self.cancelling_since_ms is None:
            self.cancelling_since_ms = self._clock.monotonic_ms()

    def wake(self) -> None:
        self._transport.wake()

    def metrics_of(self, attempt: int) -> tuple[SubtaskMetrics, ...]:
        """Counters of an attempt; empty for any attempt but the one measured last, since the next begins at 0."""
        measured, metrics = self._metrics
        if measured != attempt:
            return ()
        working, running = self._working, self._attempt
        step_ms = self._clock.monotonic_ms() - self._working_since_ms
        if working is None or running is None or running.deployment.attempt != attempt or step_ms < STEP_TOLD_MS:
            return metrics
        return tuple(
            _carried_on(told, each.subtask, step_ms, is_working=each is working)
            for told, each in zip(metrics, running.subtasks, strict=False)
        )

    @property
    def working_for(self) -> SubtaskKey | None:
        """The subtask whose step the loop takes, or took last in a round that still goes on; None between rounds."""
        working = self._working
        return working.subtask.key if working is not None else None

    @property
    def frames_refused(self) -> int:
        """Frames that the data port dropped because their sender had no reason to send them."""
        return self._transport.refused_count

    # ------------------------------------------------------------------------------------------------------------ loop

    @property
    def has_left(self) -> bool:
        """Ordered to leave, and every subtask is gone."""
        return self.leaving is not None and self._is_quiet()

    def run(self) -> ShutdownWorker:
        """Loop until ordered to leave."""
        progress = True
        while not self.has_left:
            progress = self.run_once(0 if progress else self.prepare_wait())
        assert self.leaving is not None
        return self.leaving

    def run_once(self, wait_ms: int = 0) -> bool:
        """One round: wait up to `wait_ms` for an event, then let every subtask step once. True if something moved."""
        progress = self._receive(wait_ms)
        progress = self._take_commands() or progress
        progress = self._begin_pending() or progress
        now_ms = self._clock.monotonic_ms()
        attempt = self._attempt
        if attempt is not None:
            due_s = self._clock.seconds()  # what makes a subtask due has come by now, but for what others do in this round
            if self._urgent or self._aging:
                self._carry_urgent(attempt, now_ms)
            is_full_round = now_ms >= self._full_round_due_ms
            if is_full_round:
                self._full_round_due_ms = now_ms + IDLE_WAIT_MS_MAX
            for each in attempt.subtasks:
                self._working_since_ms = now_ms
                self._working = each
                if _is_due(each, now_ms):
                    progress = each.subtask.step(now_ms, due_s).progress or progress
                elif is_full_round and not each.subtask.is_disposed:
                    progress = each.subtask.step(now_ms).progress or progress
                elif _is_drained(each):
                    continue
                self._send(each, now_ms)
                now_ms = self._look_around(attempt, now_ms)
            self._working = None
            self._housekeep(attempt, now_ms)
        if self.cancelling_since_ms is not None and not self._commands and self._is_settled():
            self.cancelling_since_ms = None
        return progress

    def prepare_wait(self) -> int:
        """After a round in which nothing moved: send partial batches, do work that barriers would otherwise wait for, and return
        how long (ms) the next round may wait."""
        if self._commands:
            return 0
        self._flush_idle()
        if self._write_behind():
            return 0
        wakeup_ms = self.next_wakeup_ms()
        if wakeup_ms is None:
            return IDLE_WAIT_MS_MAX
        return max(0, min(IDLE_WAIT_MS_MAX, wakeup_ms - self._clock.monotonic_ms()))

    def next_wakeup_ms(self) -> int | None:
        """Time of the next round without an event; None when only events cause one. For schedulers that own the clock."""
        if self._commands or self._pending is not None or self._urgent:
            return self._clock.monotonic_ms()
        attempt = self._attempt
        if attempt is None:
            return None
        wakeups: list[int] = list(self._aging.values())
        for each in attempt.subtasks:
            if each.subtask.mailbox or each.subtask.is_unblocked:
                return self._clock.monotonic_ms()
            wakeup_ms = each.subtask.last_step.next_wakeup_ms
            if wakeup_ms is not None:
                wakeups.append(wakeup_ms)
        return min(wakeups, default=None)

    def _is_quiet(self) -> bool:
        """No subtask holds a resource any more."""
        return self._attempt is None or all(each.subtask.is_disposed for each in self._attempt.subtasks)

    def _is_settled(self) -> bool:
        """Whether nothing is left to cancel: the running attempt is the current one."""
        if self._pending is not None:
            return False
        if self.leaving is None and (self._attempt is None or self._attempt.deployment.attempt > self._cancelled_up_to):
            return True
        return self._is_quiet()

    # -------------------------------------------------------------------------------------------------- urgent barriers

    def _carry_urgent(self, attempt: _Attempt, now_ms: int) -> None:
        """One pass carries barriers that overtake through all subtasks: those upstream first, then what arrives by that, until none
        is left. A subtask with barriers of two checkpoints gets the second in the next round."""
        if self._aging:
            self._urgent.update(each for each, due_ms in self._aging.items() if due_ms <= now_ms)
        later: set[DeployedSubtask] = set()
        while due := self._urgent - later:
            for each in reversed(attempt.subtasks):  # upstream first
                if each not in due:
                    continue
                self._urgent.discard(each)
                before, self._working_since_ms = self._working, self._clock.monotonic_ms()
                self._working = each
                if each.subtask.serve_urgent(now_ms):
                    later.add(each)
                self._working = before
                for output in each.outputs:
                    output.overtake_due(now_ms)
                self._send(each, now_ms)
                self._note_age(each)
            self._receive(0)
        self._urgent |= later

    def _note_age(self, each: DeployedSubtask) -> None:
        """When a barrier that waits in a gate or in an output begins to overtake."""
        dues = [due for output in each.outputs if (due := output.next_overtake_ms) is not None]
        if each.gate is not None and each.gate.next_overtake_ms is not None:
            dues.append(each.gate.next_overtake_ms)
        if dues and each.subtask.state is TaskState.RUNNING:
            self._aging[each] = min(dues)
        else:
            self._aging.pop(each, None)

    def _look_around(self, attempt: _Attempt, now_ms: int) -> int:
        """Between two steps: user code holds a barrier that overtakes up for one of them, not for one a subtask. Returns the
        time."""
        later_ms = self._clock.monotonic_ms()
        if later_ms - self._received_ms >= LOOK_INTERVAL_MS:
            self._receive(0)
            self._take_commands()
        if self._urgent or self._aging:
            self._carry_urgent(attempt, later_ms)
        return later_ms

    # -------------------------------------------------------------------------------------------------------- commands

    def _take_commands(self) -> bool:
        taken = False
        while self._commands:
            taken = True
            self._command(self._commands.popleft())
        return taken

    def _command(self, command: WorkerCommand) -> None:
        self._time_cancellation(command)  # again: the round before may have cleared it just when the command was posted
        match command:
            case Deploy(deployment=deployment):
                self._deploy(deployment)
            case CancelTasks(attempt=attempt):
                self._cancel(attempt)
            case ShutdownWorker():
                self.leaving = command
                self._cancel_all()
            case TriggerCheckpoint():
                for each in self._of_attempt(command.attempt):
                    if each.subtask.is_source:
                        each.subtask.mailbox.put(command)
                        if command.unaligned:
                            self._urgent.add(each)
            case AlignWatermarks():
                for each in self._of_attempt(command.attempt):
                    if each.subtask.reads_source:
                        each.subtask.mailbox.put(command)
            case NotifyCheckpointComplete() | NotifyCheckpointAborted() | FinishTasks():
                for each in self._of_attempt(command.attempt):
                    each.subtask.mailbox.put(command)
            case _:
                assert_never(command)

    def _of_attempt(self, attempt: int) -> tuple[DeployedSubtask, ...]:
        if self._attempt is None or self._attempt.deployment.attempt != attempt:
            return ()
        return self._attempt.subtasks

    def _cancel(self, attempt: int) -> None:
        """Cancel this attempt and lower ones, including one that is still to be deployed."""
        self._cancelled_up_to = max(self._cancelled_up_to, attempt)
        if self._pending is not None and self._pending.attempt <= attempt:
            dropped, self._pending = self._pending, None
            self._report_all(dropped, TaskState.CANCELED)
        if self._attempt is not None and self._attempt.deployment.attempt <= attempt:
            self._cancel_all()

    def _cancel_all(self) -> None:
        if self._attempt is not None:
            for each in self._attempt.subtasks:
                each.subtask.mailbox.put(CancelSubtask())

    def _deploy(self, deployment: Deployment) -> None:
        running = 0 if self._attempt is None else self._attempt.deployment.attempt
        if deployment.attempt <= max(running, self._cancelled_up_to) or self.leaving is not None:
            return
        self._cancel_all()
        self._pending = deployment

    def _begin_pending(self) -> bool:
        """Deploy once the attempt before holds nothing any more."""
        deployment = self._pending
        if deployment is None or not self._is_quiet():
            return False
        self._pending = None
        self._attempt = None
        self._urgent.clear()
        self._aging.clear()
        try:
            self._begin(deployment)
        except BaseException as error:
            task_failure(error)
            self._report_all(deployment, TaskState.FAILED, clip(hide_resolved(f"{type(error).__name__}: {error}")))
        return True

    def _begin(self, deployment: Deployment) -> None:
        order = {vertex.vertex_id: index for index, vertex in enumerate(deployment.graph.vertices)}
        wanted = sorted(deployment.subtasks, key=lambda each: (-order[each.vertex], each.subtask))
        # Before user code is loaded, which may take long: peers deployed already wait to be connected.
        try:
            self._transport.start(_peers_of(deployment, self._slot))
            self._builder.begin(deployment)
            deployed = tuple(self._builder.build(deployment, each) for each in wanted)
        except BaseException:
            self._transport.stop()
            raise
        self._attempt = _Attempt(deployment, deployed, Wiring(deployed))
        for each in deployed:
            each.subtask.start()

    def _report_all(self, deployment: Deployment, state: TaskState, error: str = "") -> None:
        now_ms = self._clock.wall_ms()
        for each in deployment.subtasks:
            self._report(SubtaskStatus(deployment.attempt, each.vertex, each.subtask, state, error=error, changed_ms=now_ms))

    # ---------------------------------------------------------------------------------------------------------- frames

    def _receive(self, wait_ms: int) -> bool:
        try:
            received = self._transport.poll(wait_ms)
            self._received_ms = self._clock.monotonic_ms()
            for item in received:
                self._route(item)
        except ProtocolError as error:
            self._lose_attempt(error)
            return True
        return bool(received)

    def _route(self, item: Received) -> None:
        attempt = self._attempt
        if attempt is None:
            return
        if isinstance(item, PeerLost):
            message = f"the worker in slot {item.slot} is gone: {item.reason}"
            self._lose_attempt(PeerLostError(message, slot=item.slot, reason=item.reason))
            return
        if item.attempt != attempt.deployment.attempt:
            return  # of a deployment that could not be built
        if item.to_producer:
            found = attempt.wiring.outputs.get((item.channel.edge, item.channel.producer))
            if found is not None:
                each, output = found
                requested = output.announced(item)
                if requested:
                    each.subtask.mailbox.put(SplitsRequested(item.channel.consumer, requested))
            return
        route = attempt.wiring.inputs.get(item.channel)
        if route is None:
            raise ProtocolError(f"a frame for channel {tuple(item.channel)}, which ends elsewhere", channel=tuple(item.channel))
        each, index = route
        try:
            element = each.inputs[index].accept(item)
        except InvalidRowError as error:
            each.subtask.fail(self._unsent(error, item.channel))  # now: no barrier behind these rows may be answered without them
            return
        if element is not None and each.gate is not None:
            each.gate.offer(index, element, item.size)
            if isinstance(element, CheckpointBarrier) and element.unaligned:
                self._urgent.add(each)

    def _lose_attempt(self, error: Exception) -> None:
        """The exchange of data failed: fail every subtask that still runs, once."""
        if self._attempt is not None:
            for each in self._attempt.subtasks:
                if each.subtask.state not in TERMINAL:
                    each.subtask.mailbox.put(FailSubtask(error))

    def _send(self, each: DeployedSubtask, now_ms: int, *, is_idle: bool = False) -> None:
        """What a subtask has for others. `is_idle`: partial batches go, too. Never raises for what user code emitted: that is
        FAILED."""
        if each.subtask.state in _SENDING_NOTHING or not self._send_output(each, now_ms, is_idle=is_idle):
            return
        if each.subtask.is_collecting:
            each.subtask.outputs_moved()
            self._note_age(each)
        if each.gate is not None and each.subtask.state is TaskState.RUNNING:
            for index, announcement in each.gate.take_announcements():
                self._transport.send(each.inputs[index].announcement(announcement))

    def _send_output(self, each: DeployedSubtask, now_ms: int, *, is_idle: bool) -> bool:
        """Whether all could be sent that may leave. If not, the subtask has failed: a frame of its has gone missing."""
        try:
            frames = _leaving(each, now_ms, is_idle=is_idle)
        except BaseException as error:
            each.subtask.fail(task_failure(error))
            return False
        for frame in frames:
            try:
                self._transport.send(frame)
            except InvariantError:
                raise
            except HoldfastError as error:
                each.subtask.fail(self._unsent(error, frame.channel))
                return False
        return True

    def _unsent(self, error: HoldfastError, channel: ChannelId) -> HoldfastError:
        """The error of a frame that could not be encoded, or whose rows could not be decoded, with the names of both ends."""
        assert self._attempt is not None
        graph = self._attempt.deployment.graph
        edge = next(each for each in graph.edges if each.edge_id == channel.edge)
        return unsent_error(
            error,
            operator=edge.source_operator,
            subtask=channel.producer,
            receiver=graph.vertex(edge.target).operators[0].uid,
            receiver_subtask=channel.consumer,
        )

    def _flush_idle(self) -> None:
        """Send partial batches, since no more records arrive for now."""
        if self._attempt is None:
            return
        now_ms = self._clock.monotonic_ms()
        for each in self._attempt.subtasks:
            self._send(each, now_ms, is_idle=True)

    def _write_behind(self) -> bool:
        """Let one subtask write behind once, so that arriving frames don't wait for the others. Whether there may be more to
        write."""
        return self._attempt is not None and any(each.subtask.write_behind() for each in self._attempt.subtasks)

    def _housekeep(self, attempt: _Attempt, now_ms: int) -> None:
        if now_ms >= self._metrics_due_ms:
            self._metrics_due_ms = now_ms + METRICS_INTERVAL_MS
            self._metrics = (attempt.deployment.attempt, tuple(each.subtask.metrics() for each in attempt.subtasks))
        if now_ms >= self._sequences_due_ms:
            self._sequences_due_ms = now_ms + LAST_SEQUENCE_INTERVAL_MS
            for each in attempt.subtasks:
                if each.subtask.state is TaskState.RUNNING:
                    for output in each.outputs:
                        self._send_frames(output.last_sequences())
                    if each.gate is not None and each.subtask.reads_source:
                        each.gate.repeat_requests()

    def _send_frames(self, frames: list[Frame]) -> None:
        for frame in frames:
            self._transport.send(frame)


def _leaving(each: DeployedSubtask, now_ms: int, *, is_idle: bool) -> list[Frame]:
    """Frames of a subtask that may leave now."""
    frames: list[Frame] = []
    for output in each.outputs:
        if output.is_drained:
            continue
        if is_idle:
            output.flush_all()
        else:
            output.flush(now_ms)
        frames += output.take_frames()
    return frames


def _peers_of(deployment: Deployment, slot: int) -> AttemptPeers:
    peers = {
        peer: Peer(deployment.addresses[peer], deployment.data_keys.get(peer, ""), deployment.data_sockets.get(peer, ""))
        for peer in sorted(derive_peers(deployment.graph, slot))
        if peer in deployment.addresses
    }
    return AttemptPeers(deployment.attempt, peers, derive_channels(deployment.graph, slot), deployment.data_secret)


def _carried_on(told: SubtaskMetrics, subtask: Subtask, step_ms: int, *, is_working: bool) -> SubtaskMetrics:
    """What a subtask told last, and the time since the loop has been in one step. Those that don't take it wait as before."""
    if subtask.state is not TaskState.RUNNING:
        return told
    before = TimePerSecond(
        told.busy_ms_per_second or 0,
        1_000 if told.idle_ms_per_second is UNSET else told.idle_ms_per_second,
        told.backpressured_ms_per_second or 0,
    )
    second = later_second(before, Spent.BUSY if is_working else subtask.waits, step_ms)
    return replace(
        told,
        busy_ms=told.busy_ms + (step_ms if is_working else 0),
        busy_ms_per_second=second.busy_ms,
        idle_ms_per_second=second.idle_ms,
        backpressured_ms_per_second=second.backpressured_ms,
        step_ms=step_ms if is_working else UNSET,
    )


def _is_drained(each: DeployedSubtask) -> bool:
    """Whether no emitted record waits to be sent."""
    for output in each.outputs:  # noqa: SIM110 - asked in every round of every subtask, and a generator takes thrice as long
        if not output.is_drained:
            return False
    return True


def _is_due(each: DeployedSubtask, now_ms: int) -> bool:
    """Whether a step could have an effect; the loop's own wait uses the same conditions. Most rounds concern few of many
    subtasks."""
    subtask = each.subtask
    last = subtask.last_step
    if last.has_more or subtask.mailbox:
        return True
    if subtask.is_disposed:
        return False
    if last.backpressured:
        return subtask.is_unblocked
    if each.gate is not None and each.gate.has_input:
        return True
    return last.next_wakeup_ms is not None and last.next_wakeup_ms <= now_ms
