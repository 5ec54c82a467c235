"""CORE: the checkpoint coordinator of one job decides which checkpoint is triggered, completed, aborted and retained.

Each id is a write-once register. The claim is stored before the trigger of the id is sent. COMPLETED or ABORTED is stored before
its consequences: notification, deletion, the count of failures. After a write that lost, or whose outcome is unknown, the record in
storage decides. A refused request consumes no id.

It knows nothing of workers, commands, paths below a snapshot's folder, or threads. Source: Flink, CheckpointCoordinator."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
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
from holdfast.coordinator.checkpoints import actions, events
from holdfast.coordinator.checkpoints.acknowledgements import AcknowledgementValidator
from holdfast.coordinator.checkpoints.actions import Action, DropCheckpoint
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest, CompletedCheckpoint
from holdfast.coordinator.checkpoints.completed import CompletedCheckpointStore
from holdfast.coordinator.checkpoints.events import Event
from holdfast.coordinator.checkpoints.failures import CheckpointFailureManager
from holdfast.coordinator.checkpoints.pending import PendingCheckpoint, PendingStatus, list_files
from holdfast.coordinator.checkpoints.requests import CheckpointRequestDecider, Execute, Load, PeriodicSchedule, TooEarly
from holdfast.coordinator.checkpoints.stats import CheckpointStats
from holdfast.coordinator.ha.recorded_job import Completed, Decision, Unreadable, keeps_checkpoints
from holdfast.coordinator.ha.records import AbortRecord, SavepointRecord
from holdfast.coordinator.ha.shared_state import ResolvedStates, UnresolvedError
from holdfast.coordinator.notes import CheckpointFailed, Note, Turn
from holdfast.coordinator.totals import Tally, Totals
from holdfast.coordinator.views import HookFailureView, ScheduleView, failed_hook_text, silent_hooks_text
from holdfast.statebackends.errors import InvariantError
from holdfast.statebackends.layout import JobPaths, shared_name

ABORT_RETRY_MS = 500
"""Delay before a failed write of ABORTED is repeated; it is repeated until the id is decided."""

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
        FailureReason.IN_FLIGHT_LIMIT,
    }
)
"""Reasons that a task may give for a decline; any other counts as DECLINED. The rest of FailureReason is the coordinator's own: a
failover, for one, does not count as a failed checkpoint."""


class CheckpointCoordinator:
    """Events in, actions out. `now_ms` is monotonic; `wall_ms`, ms since the epoch, is for users.

    At most one request is between its claim and its trigger (`preparing`). Claimed and undecided ids are pending. The order of the
    actions of one event is part of the contract."""

    def __init__(
        self,
        job_id: str,
        graph: JobGraph,
        *,
        rng: random.Random,
        completed: CompletedCheckpointStore,
        next_checkpoint_id: int = 1,
        config: JobConfig | None = None,
        newest_erasure: int = 0,
    ) -> None:
        """`completed`: what the job's directory holds; this coordinator owns it from now on. `rng`: draws the delay of the first
        periodic checkpoint. `config`: the settings that hold, if they are not those of the graph. `newest_erasure`: newest id
        that an earlier leader claimed to erase a key; 0: none."""
        self._paths = JobPaths(job_id)
        self._graph = graph
        self._config = config = config if config is not None else graph.config
        self._turn: Turn[Action] = Turn()
        self._attempt: int | None = None
        self._restored_totals: Totals = {}
        """The submission's totals at the cut that the newest attempt began with."""
        self._task_states: dict[SubtaskKey, TaskState] = {}
        """Of the current attempt's tasks; empty before it starts and after it is fenced: no checkpoint can be triggered."""
        self._running = 0
        """Tasks that are RUNNING."""
        self._queue = CheckpointRequestDecider(config.max_concurrent_checkpoints)
        self._schedule = PeriodicSchedule(
            config.checkpoint_interval_ms, config.checkpoint_interval_during_backlog_ms, config.min_pause_ms, rng
        )
        self._closed: FailureReason | None = None
        self._preparing: PendingCheckpoint | None = None
        self._next_id = next_checkpoint_id
        self._newest_erasure = newest_erasure
        """Id of the newest triggered checkpoint that erases a key, completed or not."""
        self._ending: int | None = None
        """Id of the checkpoint that ends the job, from its claim on; 0: it is complete, and the job needs no further one."""
        self._timestamp_ms = 0
        self._completed_ms: int | None = None
        """When the newest completed checkpoint was complete."""
        self._pending: dict[int, PendingCheckpoint] = {}
        self._ready: list[int] = []
        """Fully acknowledged ids that wait for an older one's metadata, in order of their last acknowledgement."""
        self._completed = completed
        self._validator = AcknowledgementValidator(graph, self._completed.shared_state)
        self._aborted_folders: OrderedDict[int, str] = OrderedDict()
        self._fenced = False
        self.failures = CheckpointFailureManager(config.tolerable_failed_checkpoints)
        self.stats = CheckpointStats()

    # -------------------------------------------------------------------------------------------------------- queries

    @property
    def next_checkpoint_id(self) -> int:
        return self._next_id

    @property
    def attempt(self) -> int | None:
        """The attempt whose tasks take part; None while there is no attempt, or it is fenced."""
        return self._attempt

    @property
    def pending(self) -> tuple[PendingCheckpoint, ...]:
        """Claimed and undecided, by id."""
        return tuple(self._pending[number] for number in sorted(self._pending))

    @property
    def live_ids(self) -> tuple[int, ...]:
        """Pending ids that tasks may still acknowledge or be notified of; without those that are being aborted."""
        return tuple(entry.checkpoint_id for entry in self.pending if entry.status is not PendingStatus.ABORTING)

    @property
    def aborted_ids(self) -> tuple[int, ...]:
        """Aborted ids that a worker may have missed the notices of, the newest last."""
        return self._completed.aborted_ids

    @property
    def retained(self) -> tuple[CompletedCheckpoint, ...]:
        return self._completed.retained

    @property
    def newest(self) -> CompletedCheckpoint | None:
        """The checkpoint or stop-savepoint that a recovery starts from."""
        return self._completed.newest

    @property
    def newest_left(self) -> CompletedCheckpoint | None:
        """The newest snapshot that is left of a job whose end dropped its checkpoints."""
        return self._completed.newest_left

    @property
    def is_quiet(self) -> bool:
        """Every claimed id is decided, and no claim is being written."""
        return not self._pending and self._preparing is None

    @property
    def is_fenced(self) -> bool:
        return self._fenced

    @property
    def is_processing_backlog(self) -> bool:
        """A source of the attempt processes a backlog."""
        return self._schedule.in_backlog

    @property
    def _is_preparing(self) -> bool:
        """A request is between its claim and its trigger."""
        calling = any(pending.status is PendingStatus.CALLING_HOOKS for pending in self._pending.values())
        return calling or self._preparing is not None

    @property
    def savepoints_pending(self) -> int:
        """Number of plain savepoints that are prepared or pending."""
        entries = [*self._pending.values(), *([self._preparing] if self._preparing is not None else [])]
        return sum(entry.request.kind is CheckpointKind.SAVEPOINT for entry in entries)

    def schedule(self, now_ms: int) -> ScheduleView:
        """When the next periodic checkpoint is due, and what holds it up."""
        next_ms = self._schedule.next_ms
        return ScheduleView(
            interval_ms=self._schedule.interval_ms,
            next_in_ms=next_ms - now_ms if next_ms is not None else None,
            pause_left_ms=max(0, self._pause_until_ms - now_ms),
            is_preparing=self._is_preparing,
            pending=len(self._pending),
            savepoints=self.savepoints_pending,
            deleting=self._completed.deleting,
            is_ending=self._ending is not None,
            tasks_refuse=self._refusal_of_tasks() is not None,
            failures=self.failures.count,
        )

    @property
    def first_to_expire(self) -> tuple[int, int, int] | None:
        """Id, attempt and deadline of the checkpoint that awaits acknowledgements and expires first: not always the oldest, since
        the timeout may be changed between two. O(pending); read behind each event."""
        awaiting = (each for each in self._pending.values() if each.status is PendingStatus.AWAITING_ACKS)
        due = ((each.deadline_ms, each.checkpoint_id, each.attempt) for each in awaiting if each.deadline_ms is not None)
        first = min(due, default=None)
        return (first[1], first[2], first[0]) if first is not None else None

    def triggers_to_repeat(self) -> tuple[actions.SendTriggers, ...]:
        """Triggers of the checkpoints that await acknowledgements, for a worker that may have missed them."""
        return tuple(_trigger_of(entry) for entry in self.pending if entry.status is PendingStatus.AWAITING_ACKS)

    def take_notes(self) -> list[Note]:
        """Notes since the last call."""
        notes, self._turn.notes = self._turn.notes, []
        return notes

    def next_deadline_ms(self) -> int | None:
        """When DeadlineReached is due."""
        times = [self._schedule.next_ms, self._completed.next_retry_ms()]
        for pending in self._pending.values():
            times += (pending.deadline_ms, pending.retry_ms, pending.hooks_until_ms)
        return min([time for time in times if time is not None], default=None)

    # ---------------------------------------------------------------------------------------------------- the machine

    def handle(self, event: Event, *, now_ms: int, wall_ms: int) -> list[Action]:
        """Handle one event. After a LoseLeadership events have no effect."""
        out: list[Action] = []
        if self._fenced:
            return out
        self._turn.now_ms, self._turn.wall_ms, self._turn.out = now_ms, wall_ms, out
        self._dispatch(event)
        self._fenced = any(isinstance(action, actions.LoseLeadership) for action in out)
        if not self._fenced:
            self._drop_surplus()
            self._tick()
            self._begin_requests()
            self.check_invariants()
        return out

    def _dispatch(self, event: Event) -> None:
        match event:
            case events.AcksReceived():
                answers = tuple(self._answer(item, event.slot) for item in event.items)
                self._turn.out.append(actions.AnswerAcks(event.ticket, answers))
            case events.AttemptStarted():
                self._start_attempt(event)
            case events.TaskStatesChanged():
                self._change_states(event)
            case events.SchedulerStarted():
                self._schedule.start(self._turn.now_ms)
            case events.SchedulerStopped() | events.JobFailing() | events.ShutDown():
                self._stop(event)
            case events.CheckpointRequested():
                self._request(event.request)
            case events.ClaimWritten() | events.ClaimTaken() | events.ClaimFailed():
                self._claim_outcome(event)
            case events.HookAnswered() | events.HookFailed():
                self._hook_outcome(event)
            case events.MetadataWritten() | events.MetadataLost() | events.MetadataAmbiguous() | events.MetadataFailed():
                self._metadata_outcome(event)
            case events.AbortWritten() | events.AbortLost() | events.AbortFailed():
                self._abort_outcome(event)
            case events.CheckpointDropped():
                self._completed.dropped(event.checkpoint_id)
            case events.CheckpointKept():
                self.stats.kept(event.checkpoint_id)
                self._completed.kept(event.checkpoint_id)
            case events.LabelsChanged():
                self._completed.note_labels(event.checkpoint_id, labelled=event.labelled)
            case events.DropFailed():
                self._completed.drop_failed(event.checkpoint_id, self._turn.now_ms)
            case events.JobTerminated():
                if not keeps_checkpoints(event.state, self._config):
                    self._drop(self._completed.take_all())
            case events.SettingsChanged():
                self._configure(event.config)
            case events.DeadlineReached():
                self._expire()
            case _:
                assert_never(event)

    def check_invariants(self) -> None:
        """Raise InvariantError if this state must not exist. Runs after every event; O(pending)."""
        writing = 0
        for number, pending in self._pending.items():
            if number >= self._next_id:
                raise InvariantError(f"pending checkpoint {number} is not below the next id {self._next_id}")
            if self._completed.is_completed(number):
                raise InvariantError(f"checkpoint {number} is both pending and completed")
            if pending.status is PendingStatus.WRITING_METADATA:
                writing += 1
                if not pending.is_complete:
                    raise InvariantError(f"checkpoint {number} is being completed without {list(pending.missing())}")
        if writing > 1:
            raise InvariantError("two checkpoints are being completed at the same time")
        self._completed.check()

    # ----------------------------------------------------------------------------------------------- tasks of the attempt

    def _start_attempt(self, event: events.AttemptStarted) -> None:
        if not self.is_quiet:
            raise InvariantError(f"attempt {event.attempt} starts while checkpoints of an older one are undecided")
        self._attempt = event.attempt
        self._restored_totals = event.base
        self._schedule.note_backlog(in_backlog=False)
        self._task_states = dict.fromkeys(sorted(event.tasks), TaskState.DEPLOYING)  # sorted for all checkpoints of the attempt
        self._running = 0
        self._ending = 0 if event.finishing else None

    def _fence_attempt(self) -> None:
        """End the attempt; later reports of its tasks change nothing."""
        self._attempt = None
        self._task_states = {}
        self._running = 0

    def _change_states(self, event: events.TaskStatesChanged) -> None:
        """Note task states. Reports on other attempts, and on unknown tasks, change nothing."""
        if event.attempt != self._attempt:
            return
        self._schedule.note_backlog(in_backlog=event.backlog)
        for task, state in event.states:
            before = self._task_states.get(task)
            if before is None:
                continue
            self._running += (state is TaskState.RUNNING) - (before is TaskState.RUNNING)
            self._task_states[task] = state
            if state is TaskState.FINISHED:
                self._abort_without(task)

    def _refusal_of_tasks(self) -> FailureReason | None:
        """Why no checkpoint can be triggered now; None if one can. Finished tasks take no part, all others must be RUNNING."""
        if not self._task_states:
            return FailureReason.NOT_ALL_TASKS_RUNNING
        if self._running == len(self._task_states):
            return None
        states = set(self._task_states.values())
        if states == {TaskState.FINISHED}:
            return FailureReason.JOB_FINISHING
        return None if states == {TaskState.RUNNING, TaskState.FINISHED} else FailureReason.NOT_ALL_TASKS_RUNNING

    # ------------------------------------------------------------------------------------------------------------- trigger

    def _request(self, request: CheckpointRequest) -> None:
        """Queue a request. A full queue refuses its lowest rank, which may be this request."""
        if self._closed is not None:
            self._refuse(request, self._closed)
            return
        refused = self._queue.add(request)
        if refused is not None:
            self._refuse(refused.request, refused.reason)

    def _tick(self) -> None:
        """Queue a periodic request if a tick is due, unless one is queued already; none waits while there are no ticks."""
        if self._schedule.interval_ms is None:
            self._refuse_queued(FailureReason.SCHEDULER_SHUT_DOWN, lambda request: request.periodic)
        if self._schedule.take_tick(self._turn.now_ms) and self._ending is None and not self._queue.has_periodic:
            self._request(CheckpointRequest(periodic=True))

    def _configure(self, config: JobConfig) -> None:
        self._config = config
        self._schedule.retune(
            config.checkpoint_interval_ms,
            config.checkpoint_interval_during_backlog_ms,
            config.min_pause_ms,
            self._turn.now_ms,
        )
        self.failures.allow(config.tolerable_failed_checkpoints)

    @property
    def _pause_until_ms(self) -> int:
        return 0 if self._completed_ms is None else self._completed_ms + self._config.min_pause_ms

    def _begin_requests(self) -> None:
        """Prepare the queued requests that the decider lets go now."""
        while True:
            load = Load(self._is_preparing, len(self._pending), self._completed.deleting, self._pause_until_ms)
            match self._queue.next(load, self._turn.now_ms):
                case None:
                    return
                case Execute(request):
                    self._prepare(request)
                case TooEarly(request):
                    self._schedule.postpone(self._pause_until_ms)
                    self._refuse(request, FailureReason.MINIMUM_TIME_BETWEEN)
                case other:
                    assert_never(other)

    def _prepare(self, request: CheckpointRequest) -> None:
        """Claim the next id for a request."""
        refusal = self._refusal(request)
        if refusal is not None:
            self._refuse(request, refusal)
            return
        assert self._attempt is not None
        number = self._next_id
        folder = request.folder if request.folder is not None else self._folder(number)
        states = self._task_states
        self._preparing = PendingCheckpoint(
            number,
            request,
            attempt=self._attempt,
            folder=folder,
            tasks=[task for task, state in states.items() if state is not TaskState.FINISHED],
            finished=tuple(sorted([task for task, state in states.items() if state is TaskState.FINISHED])),
            started_ms=self._turn.now_ms,
            deadline_ms=self._turn.now_ms + self._config.checkpoint_timeout_ms,
        )
        if request.ends_job:
            self._ending = number
        self._turn.out.append(actions.WriteClaim(number, request, folder, self._attempt, self._completed.erased_below))

    def _refusal(self, request: CheckpointRequest) -> FailureReason | None:
        """Why a request takes no id now. While the checkpoint that ends the job is pending, only plain savepoints are triggered.
        Behind a drain none is: timers and windows have fired there before their time, which nothing in such a savepoint would say,
        and which did not happen to the job if the drain fails."""
        if self._ending is not None:
            ending = self._pending.get(self._ending)
            if ending is None or ending.request.drain or request.kind is not CheckpointKind.SAVEPOINT:
                return FailureReason.JOB_FINISHING
        return self._refusal_of_tasks()

    def _refuse(self, request: CheckpointRequest, reason: FailureReason, message: str = "") -> None:
        """Answer a request that took no id. Periodic requests get no answer."""
        if not request.periodic:
            self._turn.out.append(actions.CompleteRequest(request, None, failure=reason, message=message))

    def _refuse_queued(self, reason: FailureReason, condition: Callable[[CheckpointRequest], bool]) -> None:
        for request in self._queue.remove(condition):
            self._refuse(request, reason)

    def _claim_outcome(self, event: events.ClaimWritten | events.ClaimTaken | events.ClaimFailed) -> None:
        """The write of a claim ended. Raises InvariantError for a claim that was not being written."""
        pending = self._preparing
        if pending is None or pending.checkpoint_id != event.checkpoint_id:
            raise InvariantError(f"claim {event.checkpoint_id} was not asked for")
        self._preparing = None
        match event:
            case events.ClaimTaken():
                epoch = event.existing.epoch
                self._turn.out.append(actions.LoseLeadership(f"epoch {epoch} claimed checkpoint {event.checkpoint_id}", epoch))
            case events.ClaimFailed(ambiguous=False):
                self._release_ending(event.checkpoint_id)
                reason = pending.abort_reason or FailureReason.TRIGGER_FAILURE
                self._refuse(pending.request, reason, event.message)
            case events.ClaimFailed():
                self._take_id(pending)
                self._abort(pending, FailureReason.TRIGGER_FAILURE, event.message)
            case events.ClaimWritten():
                self._take_id(pending)
                self._call_hooks(pending)
            case _:
                assert_never(event)

    def _take_id(self, pending: PendingCheckpoint) -> None:
        """From now on the id is taken, and has to be decided."""
        self._next_id = pending.checkpoint_id + 1
        self._pending[pending.checkpoint_id] = pending

    def _call_hooks(self, pending: PendingCheckpoint) -> None:
        """Have the job's master hooks take part; without hooks the trigger is sent. The checkpoint's time runs already."""
        names = self._config.master_hooks
        if not names:
            self._trigger_or_abort(pending)
        elif not self._abort_impossible(pending):
            assert pending.deadline_ms is not None
            now_ms = self._turn.now_ms
            timeout_ms = min(self._config.master_hook_timeout_ms, pending.deadline_ms - now_ms)
            self._timestamp_ms = pending.timestamp_ms = max(self._timestamp_ms, self._turn.wall_ms)
            pending.call_hooks(names, now_ms + timeout_ms)
            self.stats.triggered(pending.checkpoint_id, pending.request, pending.ordered_tasks, pending.timestamp_ms)
            self.stats.hooks_called(pending.checkpoint_id, names)
            self._turn.out += [
                actions.TriggerHook(pending.checkpoint_id, name, pending.timestamp_ms, timeout_ms) for name in sorted(names)
            ]

    def _hook_outcome(self, event: events.HookAnswered | events.HookFailed) -> None:
        """A hook answered, or can't. What comes late, twice, or for an id of another time changes nothing."""
        pending = self._pending.get(event.checkpoint_id)
        if pending is None or pending.status is not PendingStatus.CALLING_HOOKS or event.name not in pending.hooks_missing:
            return
        match event:
            case events.HookFailed():
                pending.hook_failure = HookFailureView((event.name,), event.timed_out)
                self._abort(pending, FailureReason.TRIGGER_FAILURE, clip(failed_hook_text(event.name, event.message)))
            case events.HookAnswered():
                pending.hook_answered(event.name, event.state)
                self.stats.hook_answered(event.checkpoint_id, event.name, pending.hooks_missing, self._turn.wall_ms)
                if not pending.hooks_missing:
                    self._trigger_or_abort(pending)
            case _:
                assert_never(event)

    def _abort_impossible(self, pending: PendingCheckpoint) -> bool:
        """Abort a checkpoint that became impossible before its trigger; whether it did."""
        refusal = self._refusal_of_tasks()
        if pending.abort_reason is not None:
            self._abort(pending, pending.abort_reason, pending.abort_message)
        elif refusal is not None or pending.attempt != self._attempt:
            self._abort(pending, refusal or FailureReason.NOT_ALL_TASKS_RUNNING, "")
        elif pending.deadline_ms is not None and self._turn.now_ms >= pending.deadline_ms:
            self._abort(pending, FailureReason.EXPIRED, "the trigger took longer than a checkpoint may")
        else:
            return False
        return True

    def _trigger_or_abort(self, pending: PendingCheckpoint) -> None:
        """Send the trigger; abort if the checkpoint became impossible while the claim was written."""
        if self._abort_impossible(pending):
            return
        if not pending.hooks:
            self._timestamp_ms = pending.timestamp_ms = max(self._timestamp_ms, self._turn.wall_ms)
            self.stats.triggered(pending.checkpoint_id, pending.request, pending.ordered_tasks, pending.timestamp_ms)
        unaligned = self._may_overtake(pending.request)
        timeout_ms = self._aligned_timeout_ms(pending.request) if unaligned else None
        base = self._base_of(pending.request)
        if pending.request.erasure is not None:
            self._newest_erasure = pending.checkpoint_id
        pending.trigger(
            pending.timestamp_ms,
            base,
            may_share=self._validator.may_share(pending.request),
            unaligned=unaligned,
            aligned_timeout_ms=timeout_ms,
        )
        self._turn.out.append(_trigger_of(pending))

    def _may_overtake(self, request: CheckpointRequest) -> bool:
        """Whether a checkpoint's barriers may overtake: not those of savepoints, nor of what ends the job.

        It is alone when it is triggered: it needs max_concurrent_checkpoints=1, and savepoints count, too."""
        wanted = self._config.unaligned_checkpoints if request.unaligned is None else request.unaligned
        return wanted and request.kind is CheckpointKind.CHECKPOINT and request.erasure is None

    def _aligned_timeout_ms(self, request: CheckpointRequest) -> int:
        own_ms = request.aligned_timeout_ms
        return self._config.aligned_checkpoint_timeout_ms if own_ms is None else own_ms

    def _base_of(self, request: CheckpointRequest) -> int | None:
        """Checkpoint that increments may build on; None for savepoints and without incremental checkpoints. None from before the
        newest erasure either: its files may hold the key."""
        if not self._config.is_incremental or request.is_savepoint or request.erasure is not None:
            return None
        base = self._completed.base
        return base if base is None or base >= self._newest_erasure else None

    def _release_ending(self, checkpoint_id: int) -> None:
        """Allow triggers again if the checkpoint that was to end the job did not complete: the job goes on."""
        is_gone = checkpoint_id not in self._pending and not self._completed.is_completed(checkpoint_id)
        if is_gone and self._ending == checkpoint_id:
            self._ending = None

    def _folder(self, checkpoint_id: int) -> str:
        return self._paths.checkpoint(checkpoint_id)

    # ----------------------------------------------------------------------------------------------------- acknowledge

    def _answer(self, item: Answerable, slot: int) -> AckStatus:
        if isinstance(item, AcknowledgeCheckpoint):
            return self._acknowledge(item, slot)
        return self._decline(item, slot)

    def _acknowledge(self, ack: AcknowledgeCheckpoint, slot: int) -> AckStatus:
        """Count each task once. An acknowledgement of what its task can't have stored declines the checkpoint.

        State that no decision will name is discarded, unless another task may have written it. That holds for ids that were never
        issued here, too: if a successor issued one, this leader is fenced before it deletes anything."""
        pending = self._pending.get(ack.checkpoint_id)
        if ack.subtask != slot:
            return self._refuse_foreign(ack, slot, pending)
        if pending is None:
            if self._completed.is_completed(ack.checkpoint_id):
                return AckStatus.DUPLICATE
            if self._completed.is_ours(ack.checkpoint_id):
                self._discard_late(ack, self._aborted_folders.get(ack.checkpoint_id, self._folder(ack.checkpoint_id)))
            return self._answer_gone(ack.checkpoint_id)
        task = SubtaskKey(ack.vertex, ack.subtask)
        if pending.expects(task, ack.attempt) and (problem := self._validator.problem(ack, pending)) is not None:
            self._abort_declined(pending, f"{ack.vertex} ({ack.subtask}) acknowledged what it can't have stored: {problem}")
            return AckStatus.DISCARDED
        status = pending.acknowledge(ack)
        if status is AckStatus.UNKNOWN:
            self._discard_late(ack, pending.folder, pending.acks.get(task))
        elif status is AckStatus.SUCCESS:
            self.stats.acknowledged(ack, self._turn.wall_ms)
            if pending.status is PendingStatus.READY:
                self._ready.append(pending.checkpoint_id)
                self._write_next()
        return status

    def _decline(self, decline: DeclineCheckpoint, slot: int) -> AckStatus:
        """The first decline of a pending checkpoint aborts it; later ones change nothing."""
        pending = self._pending.get(decline.checkpoint_id)
        if decline.subtask != slot:
            return self._refuse_foreign(decline, slot, pending)
        if pending is None:
            return self._answer_gone(decline.checkpoint_id)
        if SubtaskKey(decline.vertex, decline.subtask) not in pending.tasks or decline.attempt != pending.attempt:
            return AckStatus.UNKNOWN
        if pending.status is not PendingStatus.AWAITING_ACKS:
            return AckStatus.DUPLICATE
        message = f"{decline.vertex} ({decline.subtask}) declined: {clip(decline.message) or decline.reason.value}"
        self._abort(pending, decline.reason if decline.reason in REASONS_OF_TASKS else FailureReason.DECLINED, message)
        return AckStatus.SUCCESS

    def _refuse_foreign(self, item: Answerable, slot: int, pending: PendingCheckpoint | None) -> AckStatus:
        """A worker answers for its own slot's subtasks. If it answers for others, the checkpoint is declined and no file deleted:
        they may be another task's."""
        if pending is None:
            return self._answer_gone(item.checkpoint_id)
        if item.attempt != pending.attempt or pending.status is not PendingStatus.AWAITING_ACKS:
            return AckStatus.UNKNOWN
        whose = f"subtask {item.subtask} of {clip(item.vertex)}"
        self._abort_declined(pending, f"the worker in slot {slot} answered for {whose}, which runs in another slot")
        return AckStatus.UNKNOWN

    def _answer_gone(self, checkpoint_id: int) -> AckStatus:
        """Answer to a message on an id that is not pending."""
        return AckStatus.UNKNOWN if checkpoint_id >= self._next_id else AckStatus.DISCARDED

    def _discard_late(self, ack: AcknowledgeCheckpoint, folder: str, accepted: AcknowledgeCheckpoint | None = None) -> None:
        """Delete files of one task that no decision will name: those that it wrote itself and has not acknowledged (`accepted`).

        Shared files that other checkpoints refer to stay: the id may have been completed so long ago that it is forgotten."""
        shared = self._completed.shared_state
        kept = set(list_files(accepted)) if accepted is not None else set()
        own = dict.fromkeys(path for path in self._validator.files_of_writer(ack) if path not in kept)
        names = ((path, shared_name(path)) for path in own)
        files = tuple(path for path, name in names if name is None or not shared.is_needed(name))
        if files:
            self._turn.out.append(actions.DiscardState(ack.checkpoint_id, folder, files))

    # -------------------------------------------------------------------------------------------------------- complete

    def _resolved(self, pending: PendingCheckpoint) -> ResolvedStates:
        """The states without placeholders. Raises UnresolvedError.

        A savepoint has none, nor a file that checkpoints share: its acknowledgements were judged so when they were counted."""
        shared, states = self._completed.shared_state, pending.states()
        return shared.resolve(pending.checkpoint_id, pending.base, states) if pending.may_share else states

    def _write_next(self) -> None:
        """Write the metadata of the next fully acknowledged id. One write at a time: ids complete in the order in which their last
        acknowledgements came."""
        if any(pending.status is PendingStatus.WRITING_METADATA for pending in self._pending.values()):
            return
        while self._ready:
            pending = self._pending.get(self._ready.pop(0))
            if pending is None or pending.status is not PendingStatus.READY:
                continue
            try:
                states = self._resolved(pending)
            except UnresolvedError as error:
                self._abort(pending, FailureReason.FINALIZE_FAILURE, str(error))
                continue
            pending.begin_complete(states, Tally(self._graph, self._restored_totals))
            self._turn.out.append(
                actions.WriteMetadata(
                    pending.checkpoint_id,
                    pending.request.kind,
                    pending.attempt,
                    pending.folder,
                    pending.timestamp_ms,
                    states,
                    pending.finished,
                    pending.request.native,
                    pending.totals,
                    pending.channels(),
                    pending.hook_states(),
                )
            )
            return

    def _metadata_outcome(
        self, event: events.MetadataWritten | events.MetadataLost | events.MetadataAmbiguous | events.MetadataFailed
    ) -> None:
        """The write of COMPLETED ended. Raises InvariantError if it was not under way."""
        pending = self._pending.get(event.checkpoint_id)
        if pending is None or pending.status is not PendingStatus.WRITING_METADATA:
            raise InvariantError(f"metadata of checkpoint {event.checkpoint_id} was not being written")
        match event:
            case events.MetadataWritten():
                self._complete(pending)
            case events.MetadataLost(existing=existing):
                self._obey(pending, existing, completing=False)
            case events.MetadataAmbiguous(message=message):
                self._write_aborted(pending, FailureReason.FINALIZE_FAILURE, message)
            case events.MetadataFailed(reason=reason, message=message):
                self._write_aborted(pending, reason, message)
            case _:
                assert_never(event)
        self._write_next()
        self._release_ending(event.checkpoint_id)

    def _complete(self, pending: PendingCheckpoint) -> None:
        """COMPLETED is stored: notify the tasks, subsume older checkpoints, answer the request. A plain savepoint has its answer as
        only effect."""
        request, number = pending.request, pending.checkpoint_id
        pending.decided(PendingStatus.COMPLETED)
        completed = CompletedCheckpoint(
            number, request.kind, pending.folder, pending.timestamp_ms, pending.size, pending.shared, pending.totals
        )
        del self._pending[number]
        self._completed.add(completed)
        self.failures.completed(number)
        self.stats.completed(number, pending.folder, self._turn.wall_ms)
        self._completed_ms = self._turn.now_ms
        if request.kind is not CheckpointKind.SAVEPOINT:
            if pending.attempt == self._attempt:
                self._turn.out.append(actions.NotifyComplete(number, pending.attempt, pending.timestamp_ms, pending.finished))
            self._subsume_below(number)
        if request.erasure is not None:
            self._completed.erased(number)
            self._abort_savepoints_below(number)
        if not request.periodic:
            self._turn.out.append(actions.CompleteRequest(request, number, completed))

    def _subsume_below(self, checkpoint_id: int) -> None:
        """Abort older pending checkpoints. Savepoints go on: they are their requesters'."""
        for pending in self.pending:
            if pending.checkpoint_id < checkpoint_id and pending.is_undecided and not pending.request.is_savepoint:
                self._abort(pending, FailureReason.SUBSUMED, f"checkpoint {checkpoint_id} completed")

    def _abort_savepoints_below(self, checkpoint_id: int) -> None:
        """Abort savepoints that were cut before a key was erased: they would come out with it, behind the certificate."""
        for pending in self.pending:
            if pending.checkpoint_id < checkpoint_id and pending.is_undecided:
                self._abort(pending, FailureReason.SUBSUMED, f"checkpoint {checkpoint_id} erased a key: take the savepoint again")

    def _drop_surplus(self) -> None:
        """Drop checkpoints beyond the retained number. Bases of pending increments stay."""
        self._completed.retain_bases(frozenset(pending.base for pending in self._pending.values() if pending.base is not None))
        self._drop(self._completed.take_drops(self._turn.wall_ms))

    def _drop(self, drops: list[DropCheckpoint]) -> None:
        for drop in drops:
            self.stats.dropped(drop.checkpoint_id)
            self._turn.out.append(drop)

    # ----------------------------------------------------------------------------------------------------------- abort

    def _stop(self, event: events.SchedulerStopped | events.JobFailing | events.ShutDown) -> None:
        """Trigger nothing more and abort what is undecided."""
        self._schedule.stop()
        match event:
            case events.SchedulerStopped():
                reason, message = FailureReason.SUSPENDED, ""
                self._refuse_queued(FailureReason.SCHEDULER_SHUT_DOWN, lambda request: request.periodic)
            case events.JobFailing():
                reason, message = FailureReason.JOB_FAILOVER, event.message
                self._fence_attempt()
                self._refuse_queued(FailureReason.NOT_ALL_TASKS_RUNNING, lambda _request: True)
            case events.ShutDown():
                reason, message = event.reason, ""
                self._closed = event.reason
                self._refuse_queued(event.reason, lambda _request: True)
            case _:
                assert_never(event)
        self._cancel_preparation(reason, message)
        self._abort_all(reason, message)

    def _cancel_preparation(self, reason: FailureReason, message: str) -> None:
        """Abort the id whose claim is being written, once the claim is known to be ours."""
        if self._preparing is not None and self._preparing.abort_reason is None:
            self._preparing.abort_reason, self._preparing.abort_message = reason, message

    def _abort_all(self, reason: FailureReason, message: str) -> None:
        """Abort pending checkpoints; where a decision is being written, its outcome decides."""
        for pending in self.pending:
            if pending.is_undecided:
                self._abort(pending, reason, message)

    def _abort_without(self, task: SubtaskKey) -> None:
        """Abort the checkpoints that lack the acknowledgement of a finished task: it never comes."""
        for pending in self.pending:
            if pending.status is PendingStatus.AWAITING_ACKS and task in pending.tasks and task not in pending.acks:
                message = f"{task.vertex} ({task.subtask}) finished before it acknowledged"
                self._abort(pending, FailureReason.END_OF_INPUT, message)

    def _abort_declined(self, pending: PendingCheckpoint, message: str) -> None:
        self._abort(pending, FailureReason.DECLINED, clip(message))

    def _expire(self) -> None:
        """Abort overdue checkpoints, and repeat failed writes and deletions."""
        now_ms = self._turn.now_ms
        for pending in self.pending:
            if pending.retry_ms is not None and pending.retry_ms <= now_ms:
                assert pending.abort_reason is not None
                self._write_aborted(pending, pending.abort_reason, pending.abort_message)
            elif pending.deadline_ms is not None and pending.deadline_ms <= now_ms:
                self._abort_overdue(pending, FailureReason.EXPIRED)
            elif pending.hooks_until_ms is not None and pending.hooks_until_ms <= now_ms:
                self._abort_overdue(pending, FailureReason.TRIGGER_FAILURE)
        self._turn.out.extend(self._completed.take_retries(now_ms))

    def _abort_overdue(self, pending: PendingCheckpoint, reason: FailureReason) -> None:
        if pending.status is PendingStatus.CALLING_HOOKS:
            pending.hook_failure = HookFailureView(tuple(sorted(pending.hooks_missing)), timed_out=True)
        self._abort(pending, reason, _missing_of(pending))

    def _abort(self, pending: PendingCheckpoint, reason: FailureReason, message: str) -> None:
        """Abort a checkpoint. Raises InvariantError while a decision is being written: an abort can't overtake it."""
        if not pending.is_undecided:
            raise InvariantError(f"checkpoint {pending.checkpoint_id} is {pending.status.value} and can't be aborted")
        self._write_aborted(pending, reason, message)

    def _write_aborted(self, pending: PendingCheckpoint, reason: FailureReason, message: str) -> None:
        pending.abort_with(reason, message)
        self._turn.out.append(actions.WriteAborted(pending.checkpoint_id, reason, message))

    def _abort_outcome(self, event: events.AbortWritten | events.AbortLost | events.AbortFailed) -> None:
        """The write of ABORTED ended. Raises InvariantError if it was not under way."""
        pending = self._pending.get(event.checkpoint_id)
        if pending is None or pending.status is not PendingStatus.ABORTING:
            raise InvariantError(f"checkpoint {event.checkpoint_id} was not being aborted")
        match event:
            case events.AbortWritten():
                self._aborted(pending)
            case events.AbortLost(existing=existing):
                self._obey(pending, existing, completing=pending.is_complete)
            case events.AbortFailed():
                pending.retry_ms = self._turn.now_ms + ABORT_RETRY_MS
            case _:
                assert_never(event)
        self._write_next()
        self._release_ending(event.checkpoint_id)

    def _aborted(self, pending: PendingCheckpoint) -> None:
        """ABORTED is stored: notify the tasks, delete the state, answer the request, count the failure."""
        request, number = pending.request, pending.checkpoint_id
        assert pending.abort_reason is not None
        pending.decided(PendingStatus.ABORTED)
        del self._pending[number]
        self._completed.aborted(number)
        self.stats.failed(number, pending.abort_reason, pending.abort_message, self._turn.wall_ms, pending.hook_failure)
        self._turn.notes.append(CheckpointFailed(number, request.kind, pending.abort_reason, pending.abort_message))
        if request.is_savepoint:
            self._aborted_folders[number] = pending.folder
            if len(self._aborted_folders) > ABORTED_FOLDERS_MAX:
                self._aborted_folders.popitem(last=False)
        if pending.triggered:
            if pending.attempt == self._attempt:
                newest = self._completed.newest
                self._turn.out.append(actions.NotifyAborted(number, pending.attempt, newest.checkpoint_id if newest else 0))
            self._turn.out.append(actions.DiscardState(number, pending.folder))
        if not request.periodic:
            failure, message = pending.abort_reason, pending.abort_message
            self._turn.out.append(actions.CompleteRequest(request, number, failure=failure, message=message))
        self._count_failure(pending)

    def _count_failure(self, pending: PendingCheckpoint) -> None:
        """Fail the attempt if a stop-with-savepoint failed, since sources may have stopped, or too many checkpoints did."""
        reason, number = pending.abort_reason, pending.checkpoint_id
        assert reason is not None
        if pending.hooks_missing:  # a master hook harms no job: no task had a part in this
            return
        stop = pending.request.kind is CheckpointKind.STOP_SAVEPOINT and pending.triggered
        exceeded = self.failures.failed(number, reason, savepoint=pending.request.is_savepoint)
        if (stop or exceeded) and pending.attempt == self._attempt:
            self._turn.out.append(actions.FailJob(number, reason, pending.abort_message))

    # ------------------------------------------------------------------------------------------------------------ obey

    def _obey(self, pending: PendingCheckpoint, existing: Decision, *, completing: bool) -> None:
        """Follow a decision that was stored before our write. It may be our own earlier COMPLETED; another leader's fences us.

        `completing`: an earlier write of COMPLETED may have been stored."""
        match existing:
            case AbortRecord(epoch=epoch):
                self._turn.out.append(actions.LoseLeadership(f"epoch {epoch} aborted checkpoint {pending.checkpoint_id}", epoch))
            case Completed() | SavepointRecord() if completing:
                self._complete(pending)
            case Completed() | SavepointRecord() | Unreadable():
                message = f"another leader decided checkpoint {pending.checkpoint_id}: {existing}"
                self._turn.out.append(actions.LoseLeadership(message, 0))
            case _:
                assert_never(existing)


def _trigger_of(pending: PendingCheckpoint) -> actions.SendTriggers:
    return actions.SendTriggers(
        pending.checkpoint_id,
        pending.attempt,
        pending.request,
        pending.folder,
        pending.timestamp_ms,
        pending.base,
        pending.unaligned,
        pending.aligned_timeout_ms,
    )


def _missing_of(pending: PendingCheckpoint) -> str:
    """Who has not answered, for the message of an expiry."""
    if pending.status is PendingStatus.CALLING_HOOKS:
        return silent_hooks_text(pending.hooks_missing)
    missing = ", ".join(f"{task.vertex} ({task.subtask})" for task in list(pending.missing())[:10])
    return f"no acknowledgement in time from {missing}"
