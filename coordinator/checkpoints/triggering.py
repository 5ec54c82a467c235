"""Part of the checkpoint coordinator: from a request to barriers. Queue, schedule, claim, trigger.

A request that is refused consumes no id; an id is claimed in storage before anybody is told about it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.barriers.jobgraph import JobConfig
from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.coordinator.checkpoints import events as on
from holdfast.coordinator.checkpoints.events import Action, CheckpointRequest
from holdfast.coordinator.checkpoints.pending import PendingCheckpoint
from holdfast.coordinator.checkpoints.requests import Execute, Load, RequestQueue, TooEarly
from holdfast.coordinator.checkpoints.schedule import PeriodicSchedule
from holdfast.coordinator.checkpoints.tasks import TaskBoard
from holdfast.coordinator.notes import Note
from holdfast.statebackends.errors import InvariantError


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
        self._queue = RequestQueue(config.max_concurrent_checkpoints)
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
        folder = request.folder if request.folder is not None else f"{self._job_id}/chk-{number}"
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
