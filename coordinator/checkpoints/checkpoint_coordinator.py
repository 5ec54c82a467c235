"""CORE: the checkpoint coordinator of one job: which checkpoint is triggered, completed, aborted, retained.

Each id is a write-once register: COMPLETED or ABORTED is stored before anybody is told, and whoever loses that write
obeys what stands. It knows nothing of workers, commands, storage paths below a snapshot's folder, or threads.

The tasks of the current attempt as the checkpoint coordinator sees them: who must acknowledge, and may we trigger.

Part of the checkpoint coordinator: from a request to barriers. Queue, schedule, claim, trigger.

A request that is refused consumes no id; an id is claimed in storage before anybody is told about it.

Part of the checkpoint coordinator: from acknowledgements to COMPLETED or ABORTED, and what follows from each.

Whoever decides an id stores it first. Nobody is notified, nothing is deleted and no count changes before that; a write
that lost or can't be told obeys what stands in storage."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import assert_never

from holdfast.barriers.jobgraph import JobConfig, JobGraph
from holdfast.barriers.messages import (
    AcknowledgeCheckpoint,
    AckStatus,
    Answerable,
    CheckpointKind,
    DeclineCheckpoint,
    FailureReason,
    SubtaskKey,
    TaskState,
    clip,
)
from holdfast.coordinator.checkpoints import events as on
from holdfast.coordinator.checkpoints.acknowledgements import AcknowledgementJudge
from holdfast.coordinator.checkpoints.completed import CompletedCheckpointStore
from holdfast.coordinator.checkpoints.events import Action, CheckpointRequest, CompletedCheckpoint, DropCheckpoint, Event
from holdfast.coordinator.checkpoints.failures import CheckpointFailureManager
from holdfast.coordinator.checkpoints.pending import PendingCheckpoint, PendingStatus, list_files
from holdfast.coordinator.checkpoints.requests import CheckpointRequestDecider, Execute, Load, PeriodicSchedule, TooEarly
from holdfast.coordinator.checkpoints.stats import CheckpointStats
from holdfast.coordinator.ha.recorded_job import Completed, Decision, Unreadable, keeps_checkpoints
from holdfast.coordinator.ha.records import AbortRecord, SavepointRecord
from holdfast.coordinator.ha.shared_state import UnresolvedError
from holdfast.coordinator.notes import CheckpointFailed, Note
from holdfast.coordinator.totals import Tally, Totals
from holdfast.statebackends.errors import InvariantError
from holdfast.statebackends.layout import JobPaths, shared_name


class TaskBoard:
    """Until an attempt starts, and after it is fenced, there are no tasks and nothing can be triggered."""

    def __init__(self) -> None:
        self.attempt: int | None = None
        self.base: Totals = {}
        """The submission's totals at the cut that the newest attempt began with."""
        self._states: dict[SubtaskKey, TaskState] = {}
        self._running = 0

    def start(self, attempt: int, tasks: frozenset[SubtaskKey], base: Totals) -> None:
        self.attempt = attempt
        self.base = base
        self._states = dict.fromkeys(tasks, TaskState.DEPLOYING)
        self._running = 0

    def fence(self) -> None:
        """The attempt is over, whatever its tasks may still report."""
        self.attempt = None
        self._states = {}
        self._running = 0

    def change(self, task: SubtaskKey, state: TaskState) -> bool:
        """Note a task's state; False for a task that is not of this attempt."""
        if task not in self._states:
            return False
        self._running += (state is TaskState.RUNNING) - (self._states[task] is TaskState.RUNNING)
        self._states[task] = state
        return True

    def refusal(self) -> FailureReason | None:
        """Why no checkpoint can be triggered now. Finished tasks take no part; every other one must be RUNNING."""
        if not self._states:
            return FailureReason.NOT_ALL_TASKS_RUNNING
        if self._running == len(self._states):
            return None
        states = set(self._states.values())
        if states == {TaskState.FINISHED}:
            return FailureReason.JOB_FINISHING
        return None if states == {TaskState.RUNNING, TaskState.FINISHED} else FailureReason.NOT_ALL_TASKS_RUNNING

    def finished(self) -> tuple[SubtaskKey, ...]:
        return tuple(sorted(task for task, state in self._states.items() if state is TaskState.FINISHED))

    def unfinished(self) -> frozenset[SubtaskKey]:
        """Who must acknowledge a checkpoint triggered now."""
        return frozenset(task for task, state in self._states.items() if state is not TaskState.FINISHED)


@dataclass(slots=True)
class Turn:
    """The event being handled: its time, and the actions so far. Shared by the parts of one coordinator."""

    now_ms: int = 0
    wall_ms: int = 0
    out: list[Action] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    """What happened, for the log."""


class Triggering:
    """At most one request is between its claim and its barriers."""

    def __init__(self, job_id: str, config: JobConfig, board: TaskBoard, turn: Turn, rng: random.Random, next_id: int) -> None:
        self._job_id = job_id
        self._config = config
        self._board = board
        self._turn = turn
        self._queue = CheckpointRequestDecider(config.max_concurrent_checkpoints)
        self.schedule = PeriodicSchedule(config.checkpoint_interval_ms, config.min_pause_ms, rng)
        self.next_id = next_id
        self.preparing: PendingCheckpoint | None = None
        self.ending: int | None = None
        """Id of the checkpoint that ends the job, from its claim on; 0 once it needs no further one."""
        self._closed: FailureReason | None = None

    def request(self, request: CheckpointRequest) -> None:
        """Queue a request, or refuse it (or a lesser one) at once."""
        if self._closed is not None:
            self.refuse(request, self._closed)
            return
        refused = self._queue.add(request)
        if refused is not None:
            self.refuse(refused.request, refused.reason)

    def tick(self) -> None:
        """A periodic request is queued at most once: a tick that finds one waiting adds nothing."""
        if self.schedule.take_tick(self._turn.now_ms) and self.ending is None and not self._queue.has_periodic:
            self.request(CheckpointRequest(periodic=True))

    def pump(self, *, pending: int, deleting: int, pause_until_ms: int, ending_pending: bool) -> None:
        """Begin what may begin now."""
        while True:
            load = Load(self.preparing is not None, pending, deleting, pause_until_ms)
            match self._queue.next(load, self._turn.now_ms):
                case Execute(request):
                    self._prepare(request, ending_pending=ending_pending)
                case TooEarly(request):
                    self.schedule.postpone(pause_until_ms)
                    self.refuse(request, FailureReason.MINIMUM_TIME_BETWEEN)
                case None:
                    return

    def close(self, reason: FailureReason) -> None:
        """Refuse whatever waits, and everything from now on."""
        self._closed = reason
        self.schedule.stop()
        self.refuse_queued(reason, lambda _request: True)

    def refuse_queued(self, reason: FailureReason, condition: Callable[[CheckpointRequest], bool]) -> None:
        for request in self._queue.remove(condition):
            self.refuse(request, reason)

    def refuse(self, request: CheckpointRequest, reason: FailureReason, message: str = "") -> None:
        """Answer a request that took no id. A periodic one has nobody to answer."""
        if not request.periodic:
            self._turn.out.append(on.CompleteRequest(request, None, failure=reason, message=message))

    def cancel_preparation(self, reason: FailureReason, message: str) -> None:
        """The claim is under way: the id is aborted as soon as it is known to be ours."""
        if self.preparing is not None and self.preparing.abort_reason is None:
            self.preparing.abort_reason, self.preparing.abort_message = reason, message

    def take_prepared(self, checkpoint_id: int) -> PendingCheckpoint:
        """The claim of this id ended. Raises InvariantError if it was not asked for."""
        pending = self.preparing
        if pending is None or pending.checkpoint_id != checkpoint_id:
            raise InvariantError(f"claim {checkpoint_id} was not asked for")
        self.preparing = None
        return pending

    def release_ending(self, checkpoint_id: int) -> None:
        """The checkpoint that was to end the job failed: others may be triggered again."""
        if self.ending == checkpoint_id:
            self.ending = None

    def _refusal(self, request: CheckpointRequest, *, ending_pending: bool) -> FailureReason | None:
        """While the checkpoint that ends the job is pending, only plain savepoints may still join it."""
        if self.ending is not None and not (ending_pending and request.kind is CheckpointKind.SAVEPOINT):
            return FailureReason.JOB_FINISHING
        return self._board.refusal()

    def _prepare(self, request: CheckpointRequest, *, ending_pending: bool) -> None:
        refusal = self._refusal(request, ending_pending=ending_pending)
        if refusal is not None:
            self.refuse(request, refusal)
            return
        assert self._board.attempt is not None
        number = self.next_id
        folder = request.folder if request.folder is not None else JobPaths(self._job_id).checkpoint(number)
        self.preparing = PendingCheckpoint(
            number,
            request,
            attempt=self._board.attempt,
            folder=folder,
            tasks=self._board.unfinished(),
            finished=self._board.finished(),
            started_ms=self._turn.now_ms,
            deadline_ms=self._turn.now_ms + self._config.checkpoint_timeout_ms,
        )
        if request.ends_job:
            self.ending = number
        self._turn.out.append(on.WriteClaim(number, request, folder, self._board.attempt))


ABORT_RETRY_MS = 500
"""A write of ABORTED that failed is tried again after this time, until the id is decided."""

ABORTED_FOLDERS_MAX = 100
"""Folders of aborted savepoints remembered for late acknowledgements."""


REASONS_OF_TASKS = frozenset(
    {
        FailureReason.DECLINED,
        FailureReason.TASK_NOT_READY,
        FailureReason.ASYNC_EXCEPTION,
        FailureReason.IO_EXCEPTION,
        FailureReason.SUBSUMED,
        FailureReason.END_OF_INPUT,
    }
)
"""Why a task declines. The others say what the coordinator did: a failover, for one, counts as no failure."""


class Decisions:
    """The pending checkpoints and the completed ones."""

    def __init__(self, job_id: str, graph: JobGraph, board: TaskBoard, turn: Turn, retained: CompletedCheckpointStore) -> None:
        self._job_id = job_id
        config = graph.config
        self._config = config
        self._graph = graph
        self._board = board
        self._turn = turn
        self.retained = retained
        self._judge = AcknowledgementJudge(graph, retained.shared)
        self.failures = CheckpointFailureManager(config.tolerable_failed_checkpoints)
        self.stats = CheckpointStats()
        self.pending: dict[int, PendingCheckpoint] = {}
        self.pause_until_ms = 0
        self._ready: list[int] = []
        self._folders: OrderedDict[int, str] = OrderedDict()

    def sorted_pending(self) -> tuple[PendingCheckpoint, ...]:
        return tuple(self.pending[number] for number in sorted(self.pending))

    def next_deadline_ms(self) -> int | None:
        times = [self.retained.next_retry_ms()]
        for pending in self.pending.values():
            times += (pending.deadline_ms, pending.retry_ms)
        return min([time for time in times if time is not None], default=None)

    def check_invariants(self, next_id: int) -> None:
        """I11-I13, I16: raise InvariantError if this state must not exist. Cost O(pending)."""
        writing = 0
        for number, pending in self.pending.items():
            if number >= next_id:
                raise InvariantError(f"pending checkpoint {number} is not below the next id {next_id}")
            if self.retained.is_completed(number):
                raise InvariantError(f"checkpoint {number} is both pending and completed")
            if pending.status is PendingStatus.WRITING_METADATA:
                writing += 1
                if not pending.is_complete:
                    raise InvariantError(f"checkpoint {number} is being completed without {list(pending.missing())}")
        if writing > 1:
            raise InvariantError("two checkpoints are being completed at the same time")
        self.retained.check()

    # ------------------------------------------------------------------------------------------------ acknowledgements

    def acknowledge(self, ack: AcknowledgeCheckpoint, slot: int, next_id: int) -> AckStatus:
        """Count a task once, if it says what such a task can have stored: else the checkpoint is declined in its name. State that
        no decision will name is discarded, unless it may be another's. That of an id which was never issued here, too: had a
        successor issued it, this leader would be fenced before it deletes anything."""
        pending = self.pending.get(ack.checkpoint_id)
        if ack.subtask != slot:
            return self._refuse_foreign(ack, slot, pending, next_id)
        if pending is None:
            if self.retained.is_completed(ack.checkpoint_id):
                return AckStatus.DUPLICATE
            if self.retained.is_ours(ack.checkpoint_id):
                self._discard_late(ack, self._folders.get(ack.checkpoint_id, JobPaths(self._job_id).checkpoint(ack.checkpoint_id)))
            return _answer_gone(ack.checkpoint_id, next_id)
        task = SubtaskKey(ack.vertex, ack.subtask)
        if pending.expects(task, ack.attempt) and (problem := self._judge.problem(ack, pending)) is not None:
            self._decline(pending, f"{ack.vertex} ({ack.subtask}) acknowledged what it can't have stored: {problem}")
            return AckStatus.DISCARDED
        status = pending.acknowledge(ack)
        if status is AckStatus.UNKNOWN:
            self._discard_late(ack, pending.folder, pending.acks.get(task))
        elif status is AckStatus.SUCCESS:
            self.stats.acknowledged(ack, self._turn.wall_ms)
            if pending.is_complete:
                self._ready.append(pending.checkpoint_id)
                self._write_next()
        return status

    def decline(self, decline: DeclineCheckpoint, slot: int, next_id: int) -> AckStatus:
        """The first decline of a pending checkpoint aborts it; any other changes nothing."""
        pending = self.pending.get(decline.checkpoint_id)
        if decline.subtask != slot:
            return self._refuse_foreign(decline, slot, pending, next_id)
        if pending is None:
            return _answer_gone(decline.checkpoint_id, next_id)
        if SubtaskKey(decline.vertex, decline.subtask) not in pending.tasks or decline.attempt != pending.attempt:
            return AckStatus.UNKNOWN
        if pending.status is not PendingStatus.AWAITING_ACKS:
            return AckStatus.DUPLICATE
        message = f"{decline.vertex} ({decline.subtask}) declined: {clip(decline.message) or decline.reason.value}"
        self.abort(pending, decline.reason if decline.reason in REASONS_OF_TASKS else FailureReason.DECLINED, message)
        return AckStatus.SUCCESS

    def _refuse_foreign(self, item: Answerable, slot: int, pending: PendingCheckpoint | None, next_id: int) -> AckStatus:
        """A worker answers for its own subtasks. One that speaks for another's can't be trusted with this checkpoint: it is
        declined in the sender's name, and nothing is deleted."""
        if pending is None:
            return _answer_gone(item.checkpoint_id, next_id)
        if item.attempt != pending.attempt or pending.status is not PendingStatus.AWAITING_ACKS:
            return AckStatus.UNKNOWN
        whose = f"subtask {item.subtask} of {clip(item.vertex)}"
        self._decline(pending, f"the worker in slot {slot} answered for {whose}, which runs in another slot")
        return AckStatus.UNKNOWN

    def _decline(self, pending: PendingCheckpoint, message: str) -> None:
        self.abort(pending, FailureReason.DECLINED, clip(message))

    def task_finished(self, task: SubtaskKey) -> None:
        """A task that ended without its acknowledgement will never send it."""
        for pending in self.sorted_pending():
            if pending.status is PendingStatus.AWAITING_ACKS and task in pending.tasks and task not in pending.acks:
                message = f"{task.vertex} ({task.subtask}) finished before it acknowledged"
                self.abort(pending, FailureReason.END_OF_INPUT, message)

    def _discard_late(self, ack: AcknowledgeCheckpoint, folder: str, accepted: AcknowledgeCheckpoint | None = None) -> None:
        """Delete the files of one writer that no decision will name: only those that it wrote itself, and that it has not
        acknowledged. Of a forgotten id that was completed once, other checkpoints may still share files: these stay."""
        shared = self.retained.shared
        kept = set(list_files(accepted.states)) if accepted is not None else set()
        own = dict.fromkeys(path for path in self._judge.files_of_writer(ack) if path not in kept)
        names = ((path, shared_name(path)) for path in own)
        files = tuple(path for path, name in names if name is None or not shared.is_needed(name))
        if files:
            self._turn.out.append(on.DiscardState(ack.checkpoint_id, folder, files))

    # -------------------------------------------------------------------------------------------------------- complete

    def _write_next(self) -> None:
        """Metadata is written one at a time, in the order in which the last acknowledgements came: ids complete in that order."""
        if any(pending.status is PendingStatus.WRITING_METADATA for pending in self.pending.values()):
            return
        while self._ready:
            pending = self.pending.get(self._ready.pop(0))
            if pending is None or pending.status is not PendingStatus.READY:
                continue
            shared = self.retained.shared
            try:
                if pending.request.is_savepoint:
                    shared.check_self_contained(pending.states())
                states = shared.resolve(pending.checkpoint_id, pending.base, pending.states())
            except UnresolvedError as error:
                self.abort(pending, FailureReason.FINALIZE_FAILURE, str(error))
                continue
            pending.begin_complete(states, Tally(self._graph, self._board.base))
            self._turn.out.append(
                on.WriteMetadata(
                    pending.checkpoint_id,
                    pending.request.kind,
                    pending.attempt,
                    pending.folder,
                    pending.timestamp_ms,
                    states,
                    pending.finished,
                    pending.request.native,
                    pending.totals,
                )
            )
            return

    def metadata_outcome(
        self, event: on.MetadataWritten | on.MetadataLost | on.MetadataAmbiguous | on.MetadataFailed
    ) -> CompletedCheckpoint | None:
        """The write of COMPLETED ended; returns the checkpoint if it is complete."""
        pending = self.pending.get(event.checkpoint_id)
        if pending is None or pending.status is not PendingStatus.WRITING_METADATA:
            raise InvariantError(f"metadata of checkpoint {event.checkpoint_id} was not being written")
        completed = None
        match event:
            case on.MetadataWritten():
                completed = self._complete(pending)
            case on.MetadataLost(standing=standing):
                completed = self._obey(pending, standing, completing=False)
            case on.MetadataAmbiguous(message=message):
                self._write_aborted(pending, FailureReason.FINALIZE_FAILURE, message)
            case on.MetadataFailed(reason=reason, message=message):
                self._write_aborted(pending, reason, message)
            case _:
                assert_never(event)
        self._write_next()
        return completed

    def _complete(self, pending: PendingCheckpoint) -> CompletedCheckpoint:
        """COMPLETED is stored. A plain savepoint has no effect on anything but its requester."""
        request, number = pending.request, pending.checkpoint_id
        completed = CompletedCheckpoint(
            number, request.kind, pending.folder, pending.timestamp_ms, pending.size, pending.shared, pending.totals
        )
        del self.pending[number]
        self.retained.add(completed)
        self.failures.completed(number)
        self.stats.completed(number, pending.folder, self._turn.wall_ms)
        self.pause_until_ms = self._turn.now_ms + self._config.min_pause_ms
        if request.kind is not CheckpointKind.SAVEPOINT:
            if pending.attempt == self._board.attempt:
                self._turn.out.append(on.NotifyComplete(number, pending.attempt, pending.timestamp_ms))
            self._subsume_below(number)
        if not request.periodic:
            self._turn.out.append(on.CompleteRequest(request, number, completed))
        return completed

    def _subsume_below(self, checkpoint_id: int) -> None:
        """Older checkpoints have no use any more; savepoints belong to their requesters and stay."""
        for pending in self.sorted_pending():
            if pending.checkpoint_id < checkpoint_id and pending.is_undecided and not pending.request.is_savepoint:
                self.abort(pending, FailureReason.SUBSUMED, f"checkpoint {checkpoint_id} completed")

    def drop_surplus(self) -> None:
        """Let go what retention does not keep; bases of what is undecided stay."""
        self.retained.hold(frozenset(pending.base for pending in self.pending.values() if pending.base is not None))
        self.drop(self.retained.take_drops())

    def drop(self, drops: list[DropCheckpoint]) -> None:
        for drop in drops:
            self.stats.dropped(drop.checkpoint_id)
            self._turn.out.append(drop)

    # ----------------------------------------------------------------------------------------------------------- abort

    def abort(self, pending: PendingCheckpoint, reason: FailureReason, message: str) -> None:
        """Raises InvariantError once a decision is being written: an abort can't overtake it."""
        if not pending.is_undecided:
            raise InvariantError(f"checkpoint {pending.checkpoint_id} is {pending.status.value} and can't be aborted")
        self._write_aborted(pending, reason, message)

    def abort_all(self, reason: FailureReason, message: str) -> None:
        """Abort what is undecided; where a write is under way, its outcome decides."""
        for pending in self.sorted_pending():
            if pending.is_undecided:
                self.abort(pending, reason, message)

    def expire(self) -> None:
        """Abort what is overdue, and repeat writes and deletions that failed."""
        now_ms = self._turn.now_ms
        for pending in self.sorted_pending():
            if pending.retry_ms is not None and pending.retry_ms <= now_ms:
                assert pending.abort_reason is not None
                self._write_aborted(pending, pending.abort_reason, pending.abort_message)
            elif pending.deadline_ms is not None and pending.deadline_ms <= now_ms:
                missing = ", ".join(f"{task.vertex} ({task.subtask})" for task in list(pending.missing())[:10])
                self.abort(pending, FailureReason.EXPIRED, f"no acknowledgement in time from {missing}")
        self._turn.out.extend(self.retained.take_retries(now_ms))

    def abort_outcome(self, event: on.AbortWritten | on.AbortLost | on.AbortFailed) -> CompletedCheckpoint | None:
        """The write of ABORTED ended; returns the checkpoint if COMPLETED stood there before it."""
        pending = self.pending.get(event.checkpoint_id)
        if pending is None or pending.status is not PendingStatus.ABORTING:
            raise InvariantError(f"checkpoint {event.checkpoint_id} was not being aborted")
        completed = None
        match event:
            case on.AbortWritten():
                self._aborted(pending)
            case on.AbortLost(standing=standing):
                completed = self._obey(pending, standing, completing=pending.is_complete)
            case on.AbortFailed():
                pending.retry_ms = self._turn.now_ms + ABORT_RETRY_MS
            case _:
                assert_never(event)
        self._write_next()
        return completed

    def _write_aborted(self, pending: PendingCheckpoint, reason: FailureReason, message: str) -> None:
        pending.abort_with(reason, message)
        self._turn.out.append(on.WriteAborted(pending.checkpoint_id, reason, message))

    def _aborted(self, pending: PendingCheckpoint) -> None:
        """ABORTED is stored: tell everybody, delete the state, count the failure."""
        request, number = pending.request, pending.checkpoint_id
        assert pending.abort_reason is not None
        del self.pending[number]
        self.retained.aborted(number)
        self.stats.failed(number, pending.abort_reason, pending.abort_message, self._turn.wall_ms)
        self._turn.notes.append(CheckpointFailed(number, request.kind, pending.abort_reason, pending.abort_message))
        if request.is_savepoint:
            self._folders[number] = pending.folder
            if len(self._folders) > ABORTED_FOLDERS_MAX:
                self._folders.popitem(last=False)
        if pending.triggered:
            if pending.attempt == self._board.attempt:
                newest = self.retained.newest
                self._turn.out.append(on.NotifyAborted(number, pending.attempt, newest.checkpoint_id if newest else 0))
            self._turn.out.append(on.DiscardState(number, pending.folder))
        if not request.periodic:
            failure, message = pending.abort_reason, pending.abort_message
            self._turn.out.append(on.CompleteRequest(request, number, failure=failure, message=message))
        self._count_failure(pending)

    def _count_failure(self, pending: PendingCheckpoint) -> None:
        """A failed stop-with-savepoint always fails the attempt: sources may have stopped already."""
        reason, number = pending.abort_reason, pending.checkpoint_id
        assert reason is not None
        stop = pending.request.kind is CheckpointKind.STOP_SAVEPOINT and pending.triggered
        exceeded = self.failures.failed(number, reason, savepoint=pending.request.is_savepoint)
        if (stop or exceeded) and pending.attempt == self._board.attempt:
            self._turn.out.append(on.FailJob(number, reason, pending.abort_message))

    # ------------------------------------------------------------------------------------------------------------ obey

    def _obey(self, pending: PendingCheckpoint, standing: Decision, *, completing: bool) -> CompletedCheckpoint | None:
        """The id was decided before our write. Our own earlier COMPLETED may stand; anybody else's record fences us."""
        match standing:
            case AbortRecord(epoch=epoch):
                self._turn.out.append(on.LoseLeadership(f"epoch {epoch} aborted checkpoint {pending.checkpoint_id}", epoch))
            case Completed() | SavepointRecord() if completing:
                return self._complete(pending)
            case Completed() | SavepointRecord() | Unreadable():
                message = f"another leader decided checkpoint {pending.checkpoint_id}: {standing}"
                self._turn.out.append(on.LoseLeadership(message, 0))
            case _:
                assert_never(standing)
        return None


def _answer_gone(checkpoint_id: int, next_id: int) -> AckStatus:
    """To a message about an id that is not pending."""
    return AckStatus.UNKNOWN if checkpoint_id >= next_id else AckStatus.DISCARDED


class CheckpointCoordinator:
    """Events in, actions out; `now_ms` is monotonic, `wall_ms` is what users are shown."""

    def __init__(
        self,
        job_id: str,
        graph: JobGraph,
        *,
        rng: random.Random,
        next_checkpoint_id: int = 1,
        completed: Iterable[CompletedCheckpoint] = (),
        aborted: Iterable[int] = (),
        pinned: int = 0,
        buildable: int = 0,
        first_checkpoint_id: int = 1,
    ) -> None:
        """`completed`: every checkpoint and savepoint on record; `aborted`: ids whose claim is still stored; `pinned`: the id that
        the job was restored from, kept beyond the limit until a newer one completes; `buildable`: the same if it is a checkpoint of
        this job, and 0 else: tasks know its files; `first_checkpoint_id`: ids from here on are of this submission."""
        self._config = config = graph.config
        self._turn = Turn()
        self._board = TaskBoard()
        self._triggering = Triggering(job_id, config, self._board, self._turn, rng, next_checkpoint_id)
        retained = CompletedCheckpointStore(
            config.retained_checkpoints,
            completed,
            aborted,
            pinned=pinned,
            buildable=buildable,
            first_checkpoint_id=first_checkpoint_id,
        )
        self._decisions = Decisions(job_id, graph, self._board, self._turn, retained)
        self._fenced = False
        self._timestamp_ms = 0

    # ------------------------------------------------------------------------------------------------- what is known

    @property
    def next_checkpoint_id(self) -> int:
        return self._triggering.next_id

    @property
    def attempt(self) -> int | None:
        """Whose tasks take part; None while there is no attempt, or it is fenced."""
        return self._board.attempt

    @property
    def pending(self) -> tuple[PendingCheckpoint, ...]:
        """Claimed and undecided, by id."""
        return self._decisions.sorted_pending()

    @property
    def live_ids(self) -> tuple[int, ...]:
        """Ids that tasks may still work for: not aborted, not on the way to it."""
        return tuple(entry.checkpoint_id for entry in self.pending if entry.status is not PendingStatus.ABORTING)

    @property
    def retained(self) -> tuple[CompletedCheckpoint, ...]:
        return self._decisions.retained.retained

    @property
    def newest(self) -> CompletedCheckpoint | None:
        """What a recovery starts from."""
        return self._decisions.retained.newest

    @property
    def stats(self) -> CheckpointStats:
        return self._decisions.stats

    @property
    def failures(self) -> CheckpointFailureManager:
        return self._decisions.failures

    @property
    def is_quiet(self) -> bool:
        """Every id that was taken is decided."""
        return not self._decisions.pending and self._triggering.preparing is None

    @property
    def is_fenced(self) -> bool:
        return self._fenced

    @property
    def savepoints_pending(self) -> int:
        """Plain savepoints under way."""
        preparing = self._triggering.preparing
        entries = [*self._decisions.pending.values(), *([preparing] if preparing is not None else [])]
        return sum(entry.request.kind is CheckpointKind.SAVEPOINT for entry in entries)

    def triggers_to_repeat(self) -> tuple[on.SendTriggers, ...]:
        """Triggers in force, for a worker that may have missed them."""
        return tuple(_trigger_of(entry) for entry in self.pending if entry.status is PendingStatus.AWAITING_ACKS)

    def take_notes(self) -> list[Note]:
        """What happened since they were last taken."""
        notes, self._turn.notes = self._turn.notes, []
        return notes

    def next_deadline_ms(self) -> int | None:
        """When DeadlineReached is due."""
        times = (self._triggering.schedule.next_ms, self._decisions.next_deadline_ms())
        return min([time for time in times if time is not None], default=None)

    # ---------------------------------------------------------------------------------------------------- the machine

    def handle(self, event: Event, *, now_ms: int, wall_ms: int) -> list[Action]:
        """Take one event; after a LoseLeadership no event has any effect."""
        out: list[Action] = []
        if self._fenced:
            return out
        self._turn.now_ms, self._turn.wall_ms, self._turn.out = now_ms, wall_ms, out
        self._dispatch(event)
        self._fenced = any(isinstance(action, on.LoseLeadership) for action in out)
        if not self._fenced:
            self._decisions.drop_surplus()
            self._triggering.tick()
            self._triggering.pump(
                pending=len(self._decisions.pending),
                deleting=self._decisions.retained.deleting,
                pause_until_ms=self._decisions.pause_until_ms,
                ending_pending=self._triggering.ending in self._decisions.pending,
            )
            self.check_invariants()
        return out

    def check_invariants(self) -> None:
        """Raise InvariantError if this state must not exist; runs after every event."""
        self._decisions.check_invariants(self._triggering.next_id)

    def _dispatch(self, event: Event) -> None:
        match event:
            case on.AcksReceived():
                answers = tuple(self._answer(item, event.slot) for item in event.items)
                self._turn.out.append(on.AnswerAcks(event.ticket, answers))
            case on.AttemptStarted():
                self._start_attempt(event)
            case on.TaskStatesChanged():
                self._change_states(event)
            case on.SchedulerStarted():
                self._triggering.schedule.start(self._turn.now_ms)
            case on.SchedulerStopped() | on.JobFailing() | on.ShutDown():
                self._stop(event)
            case on.CheckpointRequested():
                self._triggering.request(event.request)
            case on.ClaimWritten() | on.ClaimTaken() | on.ClaimFailed():
                self._claimed(event)
            case on.MetadataWritten() | on.MetadataLost() | on.MetadataAmbiguous() | on.MetadataFailed():
                self._decisions.metadata_outcome(event)
                self._release_ending(event.checkpoint_id)
            case on.AbortWritten() | on.AbortLost() | on.AbortFailed():
                self._decisions.abort_outcome(event)
                self._release_ending(event.checkpoint_id)
            case on.CheckpointDropped():
                self._decisions.retained.dropped(event.checkpoint_id)
            case on.DropFailed():
                self._decisions.retained.drop_failed(event.checkpoint_id, self._turn.now_ms)
            case on.JobTerminated():
                if not keeps_checkpoints(event.state, self._config):
                    self._decisions.drop(self._decisions.retained.take_all())
            case on.DeadlineReached():
                self._decisions.expire()
            case _:
                assert_never(event)

    def _answer(self, item: Answerable, slot: int) -> AckStatus:
        if isinstance(item, AcknowledgeCheckpoint):
            return self._decisions.acknowledge(item, slot, self._triggering.next_id)
        return self._decisions.decline(item, slot, self._triggering.next_id)

    def _start_attempt(self, event: on.AttemptStarted) -> None:
        if not self.is_quiet:
            raise InvariantError(f"attempt {event.attempt} starts while checkpoints of an older one are undecided")
        self._board.start(event.attempt, event.tasks, event.base)
        self._triggering.ending = 0 if event.finishing else None

    def _change_states(self, event: on.TaskStatesChanged) -> None:
        if event.attempt != self._board.attempt:
            return
        for task, state in event.states:
            if self._board.change(task, state) and state is TaskState.FINISHED:
                self._decisions.task_finished(task)

    def _stop(self, event: on.SchedulerStopped | on.JobFailing | on.ShutDown) -> None:
        """Nothing new is triggered; what is undecided is aborted."""
        self._triggering.schedule.stop()
        match event:
            case on.SchedulerStopped():
                reason, message = FailureReason.SUSPENDED, ""
                self._triggering.refuse_queued(FailureReason.SCHEDULER_SHUT_DOWN, lambda request: request.periodic)
            case on.JobFailing():
                reason, message = FailureReason.JOB_FAILOVER, event.message
                self._board.fence()
                self._triggering.refuse_queued(FailureReason.NOT_ALL_TASKS_RUNNING, lambda _request: True)
            case on.ShutDown():
                reason, message = event.reason, ""
                self._triggering.close(event.reason)
            case _:
                assert_never(event)
        self._triggering.cancel_preparation(reason, message)
        self._decisions.abort_all(reason, message)

    # ------------------------------------------------------------------------------------------------ claim to trigger

    def _claimed(self, event: on.ClaimWritten | on.ClaimTaken | on.ClaimFailed) -> None:
        pending = self._triggering.take_prepared(event.checkpoint_id)
        match event:
            case on.ClaimTaken():
                epoch = event.standing.epoch
                self._turn.out.append(on.LoseLeadership(f"epoch {epoch} claimed checkpoint {event.checkpoint_id}", epoch))
            case on.ClaimFailed(ambiguous=False):
                self._triggering.release_ending(event.checkpoint_id)
                reason = pending.abort_reason or FailureReason.TRIGGER_FAILURE
                self._triggering.refuse(pending.request, reason, event.message)
            case on.ClaimFailed():
                self._take(pending)
                self._decisions.abort(pending, FailureReason.TRIGGER_FAILURE, event.message)
            case on.ClaimWritten():
                self._take(pending)
                self._trigger_or_abort(pending)
            case _:
                assert_never(event)

    def _take(self, pending: PendingCheckpoint) -> None:
        """The id is used up."""
        self._triggering.next_id = pending.checkpoint_id + 1
        self._decisions.pending[pending.checkpoint_id] = pending

    def _trigger_or_abort(self, pending: PendingCheckpoint) -> None:
        """Tell the sources, unless the world changed while the claim was written."""
        refusal = self._board.refusal()
        if pending.abort_reason is not None:
            self._decisions.abort(pending, pending.abort_reason, pending.abort_message)
        elif refusal is not None or pending.attempt != self._board.attempt:
            self._decisions.abort(pending, refusal or FailureReason.NOT_ALL_TASKS_RUNNING, "")
        elif pending.deadline_ms is not None and self._turn.now_ms >= pending.deadline_ms:
            self._decisions.abort(pending, FailureReason.EXPIRED, "the trigger took longer than a checkpoint may")
        else:
            self._timestamp_ms = max(self._timestamp_ms, self._turn.wall_ms)
            pending.trigger(self._timestamp_ms, self._base_of(pending.request))
            self.stats.triggered(pending.checkpoint_id, pending.request, pending.tasks, pending.timestamp_ms)
            self._turn.out.append(_trigger_of(pending))

    def _base_of(self, request: CheckpointRequest) -> int | None:
        """What an increment may build on: a savepoint builds on nothing, and no backend does that writes no increments."""
        return self._decisions.retained.base if self._config.is_incremental and not request.is_savepoint else None

    def _release_ending(self, checkpoint_id: int) -> None:
        """The checkpoint that was to end the job was decided: if ABORTED, the job goes on."""
        decided = checkpoint_id not in self._decisions.pending
        if decided and not self._decisions.retained.is_completed(checkpoint_id):
            self._triggering.release_ending(checkpoint_id)


def _trigger_of(pending: PendingCheckpoint) -> on.SendTriggers:
    return on.SendTriggers(
        pending.checkpoint_id, pending.attempt, pending.request, pending.folder, pending.timestamp_ms, pending.base
    )
