"""CORE, part of the job master: decides the state of a job, its attempts and failovers, its last checkpoint and its end.

Any failure fences the attempt at once and counts once. The next attempt is prepared while workers are still registering, and is
deployed when every slot is held by a live process and every checkpoint of the old attempt is decided. It knows nothing of sessions
and streams; `slots.py` does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from holdfast.barriers.messages import (
    CancelTasks,
    CheckpointKind,
    Deploy,
    FailureReason,
    FinishTasks,
    NotifyCheckpointComplete,
    ShutdownWorker,
    SubtaskMetrics,
    SubtaskStatus,
    TaskState,
    clip,
    clip_front,
)
from holdfast.coordinator.checkpoints import actions, events
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest
from holdfast.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from holdfast.coordinator.ha.recorded_job import keeps_checkpoints
from holdfast.coordinator.ha.records import RestorePoint
from holdfast.coordinator.jobmaster import actions as job_actions
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.execution import Execution, NextAttempt
from holdfast.coordinator.jobmaster.failover import ExceptionHistory, Failure, is_of_user_code
from holdfast.coordinator.jobmaster.job import TRANSITIONS, JobSetup, JobState
from holdfast.coordinator.jobmaster.restart_backoff import RestartBackoff
from holdfast.coordinator.jobmaster.slots import JobTurn, Slot, SlotPool
from holdfast.coordinator.notes import AttemptDeployed, AttemptFailed, AttemptInitialized, FirstRecords, StateChanged
from holdfast.coordinator.totals import Totals, derive_job_totals, reached
from holdfast.coordinator.views import NO_ANSWER, RestoredView
from holdfast.statebackends.errors import HoldfastError, InvariantError, MasterHookError

FINAL_RETRY_MS = 200
"""Delay before a failed final checkpoint is requested again."""

RESULT_RETRY_MS = 500
"""Delay before a failed write of the terminal record is repeated."""

LEFT = "DriverLeft: the driver has left, and its workers with it"
"""Why a job waits for another submission."""

NOT_BACK = "did not come back to the new coordinator"
"""Part of the failure of slots whose workers have not registered within `reconcile_timeout_ms`."""


class Lifecycle:
    """The life of one submission under one leader. JobMaster owns it, and passes on what the checkpoint coordinator decides."""

    def __init__(
        self,
        setup: JobSetup,
        coordinator: CheckpointCoordinator,
        slot_pool: SlotPool,
        turn: JobTurn,
        draw_secret: Callable[[], str],
        rng: random.Random,
    ) -> None:
        self._setup = setup
        self._config = setup.graph.config
        self._coordinator = coordinator
        self._slot_pool = slot_pool
        self._turn = turn
        self._draw_secret = draw_secret
        self._inbox: list[events.Event] = []
        self.exceptions = ExceptionHistory()
        self.backoff = RestartBackoff(self._config.restart, setup.restarts, rng)
        self.state = JobState.CREATED
        self.timestamps: dict[str, int] = {}
        self.next = NextAttempt(setup.graph, setup.attempt + (0 if setup.reconcile else 1), turn, setup.totals)
        self.execution: Execution | None = None
        self._reached: Totals = {}
        """Highest totals of the attempts before this one."""
        self.finishing = setup.finishing
        """Id of the completed checkpoint that ends the job, or 0."""
        self.finish_sent = False
        self.failure: str | None = None
        self.end_wall_ms = -1
        self._restart_at_ms = 0
        self._restart_wall_ms = -1
        self._fenced_at_ms: int | None = None
        self._awaiting_records_since_ms: int | None = None
        """When the attempt was deployed; None once it has told records, and behind a change of leaders."""
        self._reconcile_until_ms: int | None = None
        self._final_pending = False
        self._final_retry_ms: int | None = None
        self._scheduled = False
        self._ending: tuple[JobState, str] | None = None
        self._result_asked = False
        self._result_retry_ms: int | None = None
        self._result: JobState | None = None
        self._cancel_until_ms: int | None = None
        self._is_left = False
        """The driver took the workers away: the job waits for another submission."""
        self._suspending: list[int] = []
        self._suspend_reason = ""
        self.is_superseded = False
        """A newer submission runs the job, and the workers were told so."""

    # -------------------------------------------------------------------------------------------------------- queries

    @property
    def attempt(self) -> int:
        """The job's attempt: the running one, or the next one once that is fenced."""
        return self.next.number

    @property
    def is_deployed(self) -> bool:
        """The attempt runs, or counts as running while the leader reconciles; the job is not about to end."""
        ending = self._ending is not None or bool(self._suspending)
        return self.state in (JobState.RUNNING, JobState.RECONCILING) and not ending

    @property
    def takes_standbys(self) -> bool:
        """An attempt is to follow, and waits for a process in each slot."""
        is_over = self._is_left or self._ending is not None or bool(self._suspending)
        return self.state in (JobState.CREATED, JobState.RESTARTING) and not is_over

    @property
    def restarts_at_ms(self) -> int:
        """End of the pause before the next attempt, wall clock; -1 unless the job is RESTARTING."""
        return self._restart_wall_ms if self.state is JobState.RESTARTING else -1

    @property
    def is_up(self) -> bool:
        """Every task of the attempt runs, and the job is not about to end."""
        execution = self.execution
        return self.is_deployed and self._scheduled and not self.finishing and execution is not None and execution.all_running

    @property
    def is_ending(self) -> bool:
        """The job takes no requests any more: it ends, or another process leads it."""
        over = self.state.is_terminal or self.state is JobState.SUSPENDED
        return over or self._ending is not None or bool(self._suspending) or self.finishing > 0

    @property
    def restore_point(self) -> RestorePoint | None:
        """Snapshot that a new attempt starts from: the newest completed checkpoint of this submission, else its base."""
        newest = self._coordinator.newest
        if newest is None or newest.checkpoint_id < self._setup.first_checkpoint_id:
            return self._setup.base
        return RestorePoint(newest.checkpoint_id, newest.folder, newest.timestamp_ms, newest.kind)

    def _totals_restored(self) -> Totals:
        """Totals at the restore point; empty if the submission starts from there."""
        newest = self._coordinator.newest
        return {} if newest is None or newest.checkpoint_id < self._setup.first_checkpoint_id else newest.totals

    def totals(self) -> Totals:
        """Counts of the submission's operators, as far as workers have reported. A restart takes them back to the restored cut:
        records that are read again count once.

        Never less than at the newest cut, which a new leader knows before workers report to it."""
        reported = self.next.base if self.execution is None else self.execution.totals()
        return reached(self._totals_restored(), reported)

    def reached(self, totals: Totals | None = None) -> Totals:
        """As `totals`, but never falling: after a restart they stay until the job has counted as much again. `totals`: those of
        now, if they are known."""
        return reached(self._reached, self.totals() if totals is None else totals)

    @property
    def keeps_nothing(self) -> bool:
        """The job is over, and its checkpoints are deleted."""
        return self._result is not None and not keeps_checkpoints(self._result.value, self._config)

    def take_events(self) -> list[events.Event]:
        """Events for the checkpoint coordinator since the last call, in order."""
        taken, self._inbox = self._inbox, []
        return taken

    def next_deadline_ms(self) -> int | None:
        times = [self._result_retry_ms, self._cancel_until_ms, self._final_retry_ms, self._restart_at_ms]
        times += (self.next.retry_ms, self.next.hooks_until_ms)
        if self.state is JobState.RECONCILING:
            times.append(self._reconcile_until_ms)
        return min((time for time in times if time is not None and time > self._turn.now_ms), default=None)

    # ---------------------------------------------------------------------------------------------------------- start

    def start(self) -> None:
        """Wait for workers: for new ones, or for those that run on under an older leader's attempt."""
        self.timestamps["INITIALIZING"] = self._setup.started_ms or self._turn.wall_ms
        self._enter(JobState.CREATED)
        if not self._setup.reconcile:
            return
        if self._setup.backoff is not None:
            now_ms, wall_ms = self._turn.now_ms, self._turn.wall_ms
            self.backoff.resume(self._setup.backoff, progressed=self._setup.progressed, now_ms=now_ms, wall_ms=wall_ms)
        self.execution = Execution(self.attempt, self._setup.graph, self.next.base)
        self._start_coordinator()
        self._reconcile_until_ms = self._turn.now_ms + self._config.reconcile_timeout_ms
        self._enter(JobState.RECONCILING, f"taken over by epoch {self._setup.epoch}")
        if self._setup.fail_over:
            self.fail_over(Failure("LeaderChanged: a stop-with-savepoint was cut off by the end of its coordinator"))

    def _start_coordinator(self) -> None:
        assert self.execution is not None
        self._inbox.append(events.AttemptStarted(self.attempt, self.execution.tasks, self.next.base, finishing=self.finishing > 0))

    # ---------------------------------------------------------------------------------------------------------- tasks

    def report(self, slot: Slot, statuses: Sequence[SubtaskStatus]) -> None:
        """Apply task states from a worker. Stale and repeated ones change nothing."""
        if self.execution is None:
            return
        changed = [status for status in statuses if self.execution.apply(status, self._turn.wall_ms)]
        reported = max((status.attempt for status in statuses), default=0)
        slot.reported_attempt = max(slot.reported_attempt, reported)
        if not changed or self.execution.attempt != self.attempt:
            return
        self.heard_of(status.metrics for status in changed if status.metrics is not None)
        backlog = self.execution.is_processing_backlog
        self._inbox.append(events.TaskStatesChanged(self.attempt, self.execution.take_states(), backlog=backlog))
        if self.is_deployed:
            self._detect_failure(slot, changed)
            # What it reports is a sign of life behind the failover, too: with its last task gone it has nothing to say to that.
            slot.heard = True

    def heard_of(self, metrics: Iterable[SubtaskMetrics]) -> None:
        """Counters of the attempt: note the first that tell of records."""
        since_ms = self._awaiting_records_since_ms
        if since_ms is None or not any(each.records_in or each.records_out for each in metrics):
            return
        self._awaiting_records_since_ms = None
        now_ms, fenced_ms = self._turn.now_ms, self._fenced_at_ms
        since_failure_ms = now_ms - fenced_ms if fenced_ms is not None else -1
        interval_ms = self._setup.graph.config.heartbeat_interval_ms
        self._turn.notes.append(FirstRecords(self.attempt, now_ms - since_ms, since_failure_ms, interval_ms))

    def _detect_failure(self, slot: Slot, changed: Sequence[SubtaskStatus]) -> None:
        for status in changed:
            if status.state is TaskState.FAILED:
                error = clip(status.error) or "task failed"
                self.fail_over(Failure(error, clip_front(status.traceback), status.vertex, status.subtask, slot.index))
                return
            ended = status.state is TaskState.CANCELED or (status.state is TaskState.FINISHED and not self.finishing)
            if ended:
                error = f"UnexpectedEnd: the task became {status.state.value} without a command to end"
                self.fail_over(Failure(error, "", status.vertex, status.subtask, slot.index))
                return

    def lose(self, slot: Slot, error: str) -> None:
        """The process of a slot is gone or superseded: the whole job fails over."""
        if self.execution is not None:
            self.execution.lose(slot.index, self._turn.wall_ms)
        if self.is_deployed:
            unseen = slot.reported_attempt < self.attempt and self.state is JobState.RUNNING
            self.fail_over(Failure(error, slot=slot.index), same_failure=unseen and self.backoff.restarts > 0)

    # ------------------------------------------------------------------------------------------------------- failover

    def fail_over(self, failure: Failure, *, same_failure: bool = False) -> None:
        """Fence the attempt; restart the job, or fail it if no restart helps or is allowed. A fenced attempt can't fail again."""
        if not self.is_deployed:
            return
        if self._is_left:
            if is_of_user_code(failure.error):  # other failures follow from the workers' leaving
                self.exceptions.record(failure, self.attempt, self._turn.wall_ms)
            self._fence_attempt(LEFT)
            self._await_submission()
            return
        fenced = self.attempt
        self.exceptions.record(failure, fenced, self._turn.wall_ms)
        self.failure = failure.error
        self._fence_attempt(failure.error)
        delay_ms = self._restart_delay_ms(failure, same_failure=same_failure)
        where = (failure.vertex, failure.subtask, failure.slot, failure.user_frames)
        self._turn.notes.append(AttemptFailed(fenced, failure.error, self.backoff.restarts, delay_ms, *where))
        if delay_ms is None:
            self.end(JobState.FAILED, failure.error)
            return
        self._restart_at_ms = self._turn.now_ms + delay_ms
        self._restart_wall_ms = self._turn.wall_ms + delay_ms
        self._enter(JobState.RESTARTING)

    def _fence_attempt(self, why: str) -> None:
        fenced = self.attempt
        self._fenced_at_ms, self._awaiting_records_since_ms = self._turn.now_ms, None
        self.next = NextAttempt(self._setup.graph, fenced + 1, self._turn)
        self.finish_sent = self._scheduled = self._final_pending = False
        self._inbox.append(events.JobFailing(why))
        self._slot_pool.broadcast(CancelTasks(fenced))
        self._slot_pool.forget_signs_of_life()

    def leave(self) -> None:
        """The workers are about to go, which is no failure. The attempt goes on until the first is gone, and may come to the job's
        end before; no other follows under this submission."""
        self._is_left = True
        if self.state is JobState.RESTARTING and not self.is_ending:
            self._await_submission()

    def _await_submission(self) -> None:
        """No attempt follows under this one, so there is no time of a restart."""
        self.failure, self._restart_wall_ms = LEFT, -1
        self._enter(JobState.RESTARTING, LEFT)

    def _restart_delay_ms(self, failure: Failure, *, same_failure: bool) -> int | None:
        """None: the failure ends the job."""
        if failure.is_final:
            return None
        return self.backoff.restart_delay_ms(failure, same_failure=same_failure, now_ms=self._turn.now_ms)

    def impossible(self, error: HoldfastError) -> None:
        """Fail the job: its snapshot is damaged or does not fit. Falling back to an older one is the user's decision."""
        self.exceptions.record(Failure(f"{type(error).__name__}: {error}"), self.attempt, self._turn.wall_ms)
        self.end(JobState.FAILED, f"{type(error).__name__}: {error}")

    def hook_not_restored(self, event: job_events.HookNotRestored) -> None:
        """A master hook is not back at the attempt's checkpoint. No task runs without that; another try may succeed."""
        if self.next.awaits(event):
            self._hooks_failed(frozenset({event.name}), event.message, event.error)

    def _hooks_failed(self, names: frozenset[str], message: str, error: HoldfastError | None = None) -> None:
        """`error`: why no try can succeed."""
        if not self.next.hooks_failed(names) and error is None:
            hooks = sorted(names)
            text = f"master hook {', '.join(map(repr, hooks))} could not be restored: {message}"
            error = MasterHookError(text, hooks=hooks)
        if error is not None:
            self.impossible(error)

    def taken(self, event: job_events.AttemptTaken) -> None:
        """An older leader has recorded the number of the next attempt."""
        self.backoff.count_on(event.restarts)
        self.next.taken(event)

    # -------------------------------------------------------------------------------------------------------- advance

    def advance(self) -> None:
        """Take every step that has become possible. Runs after every event."""
        if self.state is JobState.SUSPENDED:
            return
        if self._result is not None:
            self._terminate_when_done()
        elif self._ending is not None:
            self._write_result_when_quiet()
        elif self._suspending:
            self._suspend_when_quiet()
        elif self.state in (JobState.CREATED, JobState.RESTARTING):
            self._deploy_when_ready()
        elif self.state is JobState.RECONCILING:
            self._reconcile()
        if self.state is JobState.RUNNING and self._ending is None and not self._suspending:
            self._run()

    def _deploy_when_ready(self) -> None:
        if self._is_left or not self._coordinator.is_quiet or self._inbox:
            return
        if late := self.next.late_hooks:
            self._hooks_failed(late, NO_ANSWER)
            return
        backoff = self.backoff.record(now_ms=self._turn.now_ms, wall_ms=self._turn.wall_ms)
        self.next.prepare(self.restore_point, self.backoff.restarts, self._totals_restored(), backoff)
        if self.next.is_prepared and self._turn.now_ms >= self._restart_at_ms and self._slot_pool.all_ready():
            self._deploy()

    def _replayed(self) -> int | None:
        """Records that the next attempt reads again."""
        if self.execution is None:
            return None
        graph = self._setup.graph
        return max(0, derive_job_totals(graph, self.totals()).records_in - derive_job_totals(graph, self.next.base).records_in)

    def _deploy(self) -> None:
        self._reached, replayed = self.reached(), self._replayed()
        self.execution = Execution(self.attempt, self._setup.graph, self.next.base)
        self.execution.enter_all(TaskState.SCHEDULED, self._turn.wall_ms)
        self.execution.enter_all(TaskState.DEPLOYING, self._turn.wall_ms)
        self._start_coordinator()
        restored = self.next.restore
        if restored is not None:
            view = RestoredView(restored.checkpoint_id, self._turn.wall_ms, restored.is_savepoint, restored.folder)
            self._coordinator.stats.restored(view)
        point = (restored.checkpoint_id, restored.folder, restored.is_savepoint) if restored is not None else (0, "", False)
        self._turn.notes.append(AttemptDeployed(self.attempt, *point, replayed))
        self._awaiting_records_since_ms = self._turn.now_ms
        deployments = self.next.deploy(self._slot_pool.data_ports(), self._draw_secret())
        for slot in self._slot_pool.slots:
            self._slot_pool.send(slot, Deploy(deployments[slot.index]))
        self._enter(JobState.RUNNING)

    def _reconcile(self) -> None:
        """Go on as RUNNING once every slot is back with the recorded attempt; fail over if one is not back in time."""
        missing = self._slot_pool.missing()
        if not missing:
            self._enter(JobState.RUNNING)
        elif self._reconcile_until_ms is not None and self._turn.now_ms >= self._reconcile_until_ms:
            self.fail_over(Failure(f"WorkerLost: slots {missing} {NOT_BACK}"))

    def _run(self) -> None:
        execution = self.execution
        if execution is None or execution.attempt != self.attempt:
            return
        if self.finishing:
            self._finish(execution)
            return
        if not self._scheduled and execution.all_running:
            self._scheduled = True
            self.failure = None
            self.backoff.recovered()
            self._turn.notes.append(AttemptInitialized(self.attempt))
            self._inbox.append(events.SchedulerStarted())
        waited = self._final_retry_ms is None or self._turn.now_ms >= self._final_retry_ms
        if execution.all_drained and not self._final_pending and waited:
            self._final_pending, self._final_retry_ms = True, None
            self._inbox.append(events.CheckpointRequested(CheckpointRequest(CheckpointKind.FINAL)))

    def _finish(self, execution: Execution) -> None:
        """The last checkpoint is complete: let tasks commit and end once no savepoint is pending, then end the job."""
        if execution.all_finished:
            self.end(JobState.FINISHED, "")
        elif execution.all_up and not self.finish_sent and self._coordinator.savepoints_pending == 0:
            self.finish_sent = True
            self.failure = None
            self._slot_pool.broadcast(NotifyCheckpointComplete(self.attempt, self.finishing, self._turn.wall_ms))
            self._slot_pool.broadcast(FinishTasks(self.attempt, self.finishing))

    def completed(self, notice: actions.NotifyComplete) -> None:
        """A checkpoint of the running attempt is complete: it progressed, and tasks that had ended in front of it have finished."""
        self.backoff.progressed()
        if self.execution is not None and self.execution.attempt == notice.attempt:
            self.execution.finish(notice.finished, self._turn.wall_ms)

    def request_ended(self, outcome: actions.CompleteRequest) -> None:
        """A request ended. A completed checkpoint that ends the job begins its end; a failed final one is requested again."""
        if not outcome.request.ends_job:
            return
        if outcome.completed is not None:
            self.finishing = outcome.completed.checkpoint_id
        elif outcome.request.kind is CheckpointKind.FINAL:
            self._final_pending = False
            self._final_retry_ms = self._turn.now_ms + FINAL_RETRY_MS

    # ------------------------------------------------------------------------------------------------------------ end

    def end(self, state: JobState, cause: str) -> None:
        """Begin the end: decide every checkpoint id, then store the result, then end tasks and apply retention."""
        if self._ending is not None or self._result is not None or self.state is JobState.SUSPENDED:
            return
        self._ending = (state, cause)
        self.failure = cause or None
        self._cancel_until_ms = self._turn.now_ms + self._config.cancellation_timeout_ms
        reason = FailureReason.JOB_FINISHING if state is JobState.FINISHED else FailureReason.COORDINATOR_SHUTDOWN
        self._inbox.append(events.ShutDown(reason))
        if state is not JobState.FINISHED:
            self._slot_pool.broadcast(CancelTasks(self.attempt))
            self._enter(JobState.CANCELLING if state is JobState.CANCELED else JobState.FAILING, cause)

    def _write_result_when_quiet(self) -> None:
        assert self._ending is not None
        waited = self._result_retry_ms is None or self._turn.now_ms >= self._result_retry_ms
        if not self._coordinator.is_quiet or self._inbox or self._result_asked or not waited:
            return
        self._result_asked, self._result_retry_ms = True, None
        state, cause = self._ending
        newest = self._coordinator.newest
        newest_id = newest.checkpoint_id if newest is not None else 0
        metrics = self.execution.metrics() if self.execution is not None else ()
        last_id = self._coordinator.next_checkpoint_id - 1
        self._turn.out.append(job_actions.WriteResult(state, cause, last_id, newest_id, metrics, self.totals()))

    def result_written(self, event: job_events.ResultWritten) -> None:
        """The terminal record is stored; its state holds, also if another leader wrote it."""
        self._result = JobState(event.existing.state)
        self.failure = event.existing.cause or None
        self._inbox.append(events.JobTerminated(self._result.value))

    def result_failed(self) -> None:
        self._result_asked = False
        self._result_retry_ms = self._turn.now_ms + RESULT_RETRY_MS

    def _terminate_when_done(self) -> None:
        """Enter the terminal state once every task has ended, or after `cancellation_timeout_ms`."""
        if self.state.is_terminal or self._result is None:
            return
        done = self.execution is None or self.execution.all_terminal
        overdue = self._cancel_until_ms is not None and self._turn.now_ms >= self._cancel_until_ms
        if done or overdue:
            self._cancel_until_ms = None
            self._enter(self._result, self.failure or "")
            self.end_wall_ms = self._turn.wall_ms
            self._slot_pool.broadcast(ShutdownWorker(f"the job is {self._result.value}", job_over=True))
            self._turn.out.append(job_actions.JobEnded(self._result, self.failure or ""))
            self._answer_suspending()

    def suspend(self, ticket: int, reason: str) -> None:
        """Another submission takes over: stop leading as soon as every checkpoint id is decided."""
        if self.state.is_terminal or self.state is JobState.SUSPENDED:
            self._turn.out.append(job_actions.Answer(ticket, self.state))
            return
        self._suspending.append(ticket)
        self._suspend_reason = reason
        self._inbox.append(events.ShutDown(FailureReason.SUSPENDED))

    def _suspend_when_quiet(self) -> None:
        if not self._coordinator.is_quiet or self._inbox:
            return
        self._slot_pool.broadcast(ShutdownWorker(self._suspend_reason, superseded=True))
        self.is_superseded = True
        self.stop_leading(self._suspend_reason, close=False)

    def stop_leading(self, reason: str, *, close: bool = True) -> None:
        """Stop writing and sending: another process leads the job. `close`: end the workers' streams."""
        if self.state.is_terminal or self.state is JobState.SUSPENDED:
            return
        self._enter(JobState.SUSPENDED, reason)
        self.failure = reason
        if close:
            self._slot_pool.close_all()
        self._turn.out.append(job_actions.JobEnded(JobState.SUSPENDED, reason))
        self._answer_suspending()

    def _answer_suspending(self) -> None:
        tickets, self._suspending = self._suspending, []
        self._turn.out.extend(job_actions.Answer(ticket, self.state) for ticket in tickets)

    def _enter(self, state: JobState, reason: str = "") -> None:
        if state is not self.state:
            if state not in TRANSITIONS[self.state]:
                raise InvariantError(f"job {self._setup.job_id} is {self.state.value} and can't become {state.value}")
            previous = "" if state is JobState.RECONCILING else self.state.value  # that of a leader before is not on record
            self._turn.notes.append(StateChanged(state.value, previous, reason))
        self.state = state
        self.timestamps[state.value] = self._turn.wall_ms
