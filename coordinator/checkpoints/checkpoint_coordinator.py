"""CORE: the checkpoint coordinator of one job: which checkpoint is triggered, completed, aborted, retained.

Each id is a write-once register: COMPLETED or ABORTED is stored before anybody is told, and whoever loses that write
obeys what stands. It knows nothing of workers, commands, storage paths below a snapshot's folder, or threads."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import assert_never

from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.messages import AcknowledgeCheckpoint, AckStatus, Answerable, CheckpointKind, FailureReason, TaskState
from holdfast.coordinator.checkpoints import events as on
from holdfast.coordinator.checkpoints.completed import RetainedCheckpoints
from holdfast.coordinator.checkpoints.decisions import Decisions
from holdfast.coordinator.checkpoints.events import Action, CheckpointRequest, CompletedCheckpoint, Event
from holdfast.coordinator.checkpoints.failures import FailureCounter
from holdfast.coordinator.checkpoints.pending import PendingCheckpoint, PendingStatus
from holdfast.coordinator.checkpoints.stats import CheckpointStats
from holdfast.coordinator.checkpoints.tasks import TaskBoard
from holdfast.coordinator.checkpoints.triggering import Triggering, Turn
from holdfast.coordinator.ha.recorded_job import keeps_checkpoints
from holdfast.coordinator.notes import Note
from holdfast.statebackends.errors import InvariantError


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
        retained = RetainedCheckpoints(
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
    def failures(self) -> FailureCounter:
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
