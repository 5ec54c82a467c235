"""Part of the checkpoint coordinator: from acknowledgements to COMPLETED or ABORTED, and what follows from each.

Whoever decides an id stores it first. Nobody is notified, nothing is deleted and no count changes before that; a write
that lost or can't be told obeys what stands in storage."""

from __future__ import annotations

from collections import OrderedDict
from typing import assert_never

from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.messages import (
    AcknowledgeCheckpoint,
    AckStatus,
    Answerable,
    CheckpointKind,
    DeclineCheckpoint,
    FailureReason,
    SubtaskKey,
    clip,
)
from holdfast.coordinator.checkpoints import events as on
from holdfast.coordinator.checkpoints.acknowledgements import AcknowledgementJudge
from holdfast.coordinator.checkpoints.completed import RetainedCheckpoints
from holdfast.coordinator.checkpoints.events import CompletedCheckpoint, DropCheckpoint
from holdfast.coordinator.checkpoints.failures import FailureCounter
from holdfast.coordinator.checkpoints.pending import PendingCheckpoint, PendingStatus, list_files
from holdfast.coordinator.checkpoints.stats import CheckpointStats
from holdfast.coordinator.checkpoints.tasks import TaskBoard
from holdfast.coordinator.checkpoints.triggering import Turn
from holdfast.coordinator.ha.recorded_job import Completed, Decision, Unreadable
from holdfast.coordinator.ha.records import AbortRecord, SavepointRecord
from holdfast.coordinator.ha.shared_state import UnresolvedError
from holdfast.coordinator.notes import CheckpointFailed
from holdfast.coordinator.totals import Tally
from holdfast.statebackends.errors import InvariantError
from holdfast.statebackends.layout import shared_name

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

    def __init__(self, job_id: str, graph: JobGraph, board: TaskBoard, turn: Turn, retained: RetainedCheckpoints) -> None:
        self._job_id = job_id
        config = graph.config
        self._config = config
        self._graph = graph
        self._board = board
        self._turn = turn
        self.retained = retained
        self._judge = AcknowledgementJudge(graph, retained.shared)
        self.failures = FailureCounter(config.tolerable_failed_checkpoints)
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
                self._discard_late(ack, self._folders.get(ack.checkpoint_id, f"{self._job_id}/chk-{ack.checkpoint_id}"))
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
