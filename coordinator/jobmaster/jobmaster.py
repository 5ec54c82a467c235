"""CORE: the job master of one submission, from its workers' registrations to its end. Events in, actions out.

It handles the worker protocol and translates actions of the checkpoint coordinator into commands; `lifecycle.py` decides the state
of the job. The shell (`dispatcher/job_runner.py`) or the simulator performs its actions; it knows no storage, stream or clock. It
keeps the trigger ids of user requests with their outcomes: a repeated id is the same request."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias, assert_never

import msgspec
from msgspec.structs import replace

from holdfast.barriers.messages import (
    AckAnswers,
    AckStatus,
    Answerable,
    CancelTasks,
    CheckpointKind,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    Registered,
    ShutdownWorker,
    SubtaskMetrics,
    SubtaskStatus,
    TriggerCheckpoint,
    clip,
)
from holdfast.coordinator.checkpoints import actions, events
from holdfast.coordinator.checkpoints.actions import CompleteRequest
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest
from holdfast.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from holdfast.coordinator.checkpoints.completed import CompletedCheckpointStore
from holdfast.coordinator.ha.retention import Retention
from holdfast.coordinator.jobmaster import actions as job_actions
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.actions import Action
from holdfast.coordinator.jobmaster.events import Event
from holdfast.coordinator.jobmaster.failover import Failure
from holdfast.coordinator.jobmaster.job import JobSetup, JobState
from holdfast.coordinator.jobmaster.lifecycle import Lifecycle
from holdfast.coordinator.jobmaster.questions import Questions
from holdfast.coordinator.jobmaster.releases import Releases
from holdfast.coordinator.jobmaster.running_settings import RunningSettings
from holdfast.coordinator.jobmaster.series import SubtaskSeries
from holdfast.coordinator.jobmaster.slots import JobTurn, Slot, SlotPool, Verdict
from holdfast.coordinator.jobmaster.standbys import Standbys
from holdfast.coordinator.jobmaster.stopping import StopIntent, StopRetries
from holdfast.coordinator.jobmaster.watermarks import WatermarkGroups
from holdfast.coordinator.notes import DrillEnded, LabelChanged, Note, RequestEnded
from holdfast.coordinator.views import TriggerView
from holdfast.statebackends.errors import FencedError, HoldfastError, InvalidConfigError, NotLeaderError, ProtocolError
from holdfast.statebackends.layout import savepoint_folder
from holdfast.statebackends.storage import is_absolute_folder

LATER = object()
"""Return value of a handler that answers its call itself."""

Handler: TypeAlias = Callable[[], Any]
"""Handles one call from outside; its value, or its HoldfastError, is the answer."""

TRIGGERS_MAX = 1_000
"""Triggers remembered in one job; those in progress are never forgotten."""


class TriggerRegister:
    """Triggers of users' requests and their outcomes. Beyond TRIGGERS_MAX the oldest finished one is forgotten."""

    def __init__(self, known: Iterable[TriggerView] = ()) -> None:
        self._triggers: OrderedDict[str, TriggerView] = OrderedDict((view.trigger_id, view) for view in known)
        self._cancel_after: set[str] = set()
        self._savepoints: frozenset[str] | None = None
        """Kept for the next view; None: not looked for since a trigger changed."""

    def get(self, trigger_id: str) -> TriggerView | None:
        return self._triggers.get(trigger_id)

    def begin(self, trigger_id: str, kind: CheckpointKind, *, cancel: bool = False) -> bool:
        """Note a request; False if the id is known, so that the request is a repetition."""
        if trigger_id in self._triggers:
            return False
        self._triggers[trigger_id] = TriggerView(trigger_id, kind, in_progress=True)
        if cancel:
            self._cancel_after.add(trigger_id)
        self._forget()
        return True

    def reopen(self, trigger_id: str) -> None:
        """The request is tried again: it has no outcome yet."""
        view = self._triggers.get(trigger_id)
        if view is not None:
            self._triggers[trigger_id] = TriggerView(trigger_id, view.kind, in_progress=True)
            self._savepoints = None

    def end(self, outcome: CompleteRequest) -> bool:
        """Note an outcome; True if the job is to be cancelled now."""
        view = self._triggers.get(outcome.request.trigger_id)
        if view is None:
            return False
        failed = outcome.failure is not None
        self._savepoints = None
        self._triggers[view.trigger_id] = replace(
            view,
            in_progress=False,
            checkpoint_id=outcome.checkpoint_id,
            location=outcome.completed.folder if outcome.completed is not None else None,
            failure=(outcome.message or outcome.failure.value) if outcome.failure is not None else None,
            failure_reason=outcome.failure.value if outcome.failure is not None else None,
            tries=outcome.tries,
        )
        wanted = view.trigger_id in self._cancel_after
        self._cancel_after.discard(view.trigger_id)
        return wanted and not failed

    def savepoints(self) -> frozenset[str]:
        """Folders of the completed savepoints."""
        if self._savepoints is None:
            views = self._triggers.values()
            self._savepoints = frozenset(each.location for each in views if each.kind.is_savepoint and each.location is not None)
        return self._savepoints

    def _forget(self) -> None:
        for trigger_id in list(self._triggers):
            if len(self._triggers) <= TRIGGERS_MAX:
                return
            if not self._triggers[trigger_id].in_progress:
                del self._triggers[trigger_id]
                self._savepoints = None


class JobMaster:
    """Events in, actions out. `now_ms` is monotonic; `wall_ms`, ms since the epoch, is for users; both come with each event."""

    def __init__(self, setup: JobSetup, *, rng: random.Random, draw_secret: Callable[[], str]) -> None:
        """`draw_secret`: draws the secret by which the workers of one attempt know each other; unguessable, unlike `rng`."""
        self.setup = setup
        self._rng = rng
        self._turn = JobTurn()
        self.coordinator = CheckpointCoordinator(
            setup.job_id,
            setup.graph,
            rng=rng,
            completed=_completed_checkpoints(setup),
            next_checkpoint_id=setup.next_checkpoint_id,
            config=setup.config_in_force,
            newest_erasure=setup.erasing,
        )
        self.coordinator.stats.recall(each for each in setup.completed if each.checkpoint_id >= setup.first_checkpoint_id)
        self.settings = RunningSettings(setup.graph.config, setup.config_in_force, setup.last_config)
        self.slot_pool = SlotPool(setup, rng, self._turn)
        self.standbys = Standbys(setup, self.slot_pool, self._turn)
        self.lifecycle = Lifecycle(setup, self.coordinator, self.slot_pool, self._turn, draw_secret, rng)
        self.triggers = TriggerRegister(setup.triggers)
        self.stops = StopRetries()
        self.watermarks = WatermarkGroups(setup.graph)
        self.questions = Questions(setup.job_id, setup.epoch, self.slot_pool, rng, self._turn)
        self.series = SubtaskSeries(setup.graph)
        self.releases = Releases.of(setup.base, setup.graph.config.retained_checkpoints, setup.subsumed)
        self._deadline: tuple[int | None] | None = None
        """Result of `next_deadline_ms` since the last event; None: not computed yet."""
        self._source_slots = max(vertex.parallelism for vertex in setup.graph.vertices if vertex.is_source)

    @property
    def state(self) -> JobState:
        return self.lifecycle.state

    @property
    def notes(self) -> Sequence[Note]:
        """Notes of the newest event, for the log."""
        return self._turn.notes

    def next_deadline_ms(self) -> int | None:
        """When DeadlineReached is due; None if no deadline is set, or once the job is SUSPENDED."""
        if self.state is JobState.SUSPENDED:
            return None
        if self._deadline is not None:  # called around every turn, and only an event can change the result
            return self._deadline[0]
        times = [self.coordinator.next_deadline_ms(), self.lifecycle.next_deadline_ms(), self.releases.next_deadline_ms()]
        if not self.state.is_terminal:
            times += (self.slot_pool.next_deadline_ms(), self.stops.next_deadline_ms(), self.watermarks.next_deadline_ms())
            times += (self.settings.next_deadline_ms(), self.questions.next_deadline_ms(), self.standbys.next_deadline_ms())
        self._deadline = (min([time for time in times if time is not None], default=None),)
        return self._deadline[0]

    def handle(self, event: Event, *, now_ms: int, wall_ms: int) -> list[Action]:
        """Handle one event; returns the actions to perform, in order."""
        out: list[Action] = []
        self._deadline = None
        self._turn.now_ms, self._turn.wall_ms, self._turn.out = now_ms, wall_ms, out
        self._turn.notes = []
        if self.state is JobState.SUSPENDED:
            self._refuse_suspended(event)
            return out
        self._dispatch(event)
        self._settle()
        self._retry_stops()
        self._write_settings()
        self._align_watermarks()
        self._release()
        self._settle_questions()
        self._settle_standbys()
        return out

    def _settle_questions(self) -> None:
        """Refuse questions that nobody will answer any more."""
        if self.state is JobState.SUSPENDED:
            message = f"this coordinator leads job {self.setup.job_id} no more: {self.lifecycle.failure}"
            self.questions.settle(self.lifecycle.attempt, NotLeaderError(message, job=self.setup.job_id))
        elif self.state.is_terminal:
            self.questions.settle(self.lifecycle.attempt, FencedError(f"the job is {self.state.value}", job=self.setup.job_id))
        else:
            self.questions.settle(self.lifecycle.attempt, None)

    def _settle_standbys(self) -> None:
        """Give slots to workers that stand by, or let them leave."""
        if self.lifecycle.is_superseded:
            self.standbys.end(ShutdownWorker(self.lifecycle.failure or "", superseded=True))
        elif self.state is JobState.SUSPENDED:
            message = f"this coordinator leads job {self.setup.job_id} no more: {self.lifecycle.failure}"
            self.standbys.refuse(NotLeaderError(message, job=self.setup.job_id))
        elif self.state.is_terminal:
            self.standbys.end(ShutdownWorker(f"the job is {self.state.value}", job_over=True))
        else:
            self.standbys.settle(replaces=self.lifecycle.takes_standbys, reconciles=self.state is JobState.RECONCILING)

    def _stand_by(self, event: job_events.StandbyReceived) -> object:
        if self.state.is_terminal:
            raise FencedError(f"job {self.setup.job_id} is {self.state.value}", job=self.setup.job_id, state=self.state.value)
        self.standbys.wait(event.ticket, event.message)
        for slot in self.standbys.ended(event.message):
            self._process_ended(job_events.ProcessEnded(slot.index, slot.session))
        return LATER

    def _process_ended(self, event: job_events.ProcessEnded) -> None:
        slot = self.slot_pool.process_ended(event.slot, event.session)
        if slot is not None:
            self.lifecycle.lose(slot, f"WorkerLost: the process of the worker in slot {slot.index} has ended")

    def _align_watermarks(self) -> None:
        """Tell sources how far they may go."""
        if self.state is JobState.SUSPENDED or self.state.is_terminal:
            return
        for slot, command in self.watermarks.advance(self.lifecycle.attempt, self._turn.now_ms):
            self.slot_pool.send(self.slot_pool.slots[slot], command)

    def _release(self) -> None:
        """Release claimed snapshots that no restore needs any more."""
        if self.state is JobState.SUSPENDED or self.releases.is_done:
            return
        first, newest = self.setup.first_checkpoint_id, self.coordinator.newest
        self._turn.out += self.releases.advance(
            sum(entry.checkpoint_id >= first and entry.shared is not None for entry in self.coordinator.retained),
            stopped=newest is not None and newest.checkpoint_id >= first and newest.is_savepoint,
            dropped=self.lifecycle.keeps_nothing,
            now_ms=self._turn.now_ms,
        )

    def _dispatch(self, event: Event) -> None:
        if isinstance(event, job_events.Call):
            self._call(event.ticket, partial(self._answer, event))
        elif isinstance(event, job_events.LifecycleEvent):
            self._lifecycle_event(event)
        elif isinstance(event, job_events.CheckpointOutcome):
            self._pass_on(event)
        else:
            self._note(event)

    def _answer(self, event: job_events.Call) -> Any:
        """The answer to a call, or LATER. Raises what it is refused with."""
        match event:
            case job_events.AckBatchReceived():
                return self._acks(event)
            case job_events.RegistrationReceived():
                return self._register(event)
            case job_events.StandbyReceived():
                return self._stand_by(event)
            case job_events.StatesReceived():
                return self._states(event)
            case job_events.HeartbeatReceived():
                return self._heartbeat(event)
            case job_events.QuestionAsked():
                return self._ask_worker(event)
            case job_events.AnswerReceived():
                return self._worker_answered(event)
            case job_events.StreamOpened():
                return self._open_stream(event)
            case job_events.SnapshotRequested():
                return self._request(event)
            case job_events.SettingsRequested():
                return self._change_settings(event)
            case job_events.CancelRequested():
                return self._cancel()
            case job_events.DriverLeft():
                return self._leave(event)
            case _:
                assert_never(event)

    def _note(self, event: job_events.Noted) -> None:
        match event:
            case job_events.ProcessEnded():
                self._process_ended(event)
            case job_events.StreamClosed():
                self.slot_pool.close_stream(event.slot, event.session, event.stream)
            case job_events.ConfigWritten() | job_events.ConfigTaken() | job_events.ConfigFailed():
                self._settings_outcome(event)
            case job_events.LabelNoted():
                self._turn.notes.append(LabelChanged(event.checkpoint_id, event.label, event.removed))
                self._pass_on(events.LabelsChanged(event.checkpoint_id, event.labelled))
            case job_events.DrillNoted():
                self._turn.notes.append(DrillEnded(event.drill.facts()))
            case job_events.SuspendRequested():
                self.lifecycle.suspend(event.ticket, event.reason)
            case job_events.ReleaseEnded():
                if event.failure:
                    self.releases.failed(event.release, self._turn.now_ms)
            case events.DeadlineReached():
                self._pass_on(event)
                for slot in self.slot_pool.expire():
                    self.lifecycle.lose(slot, f"WorkerLost: nothing was heard from the worker in slot {slot.index}")
            case _:
                assert_never(event)

    def _lifecycle_event(self, event: job_events.LifecycleEvent) -> None:
        match event:
            case job_events.JobStarted():
                self.lifecycle.start()
                for intent in self.setup.stops:
                    self.stops.resume(intent, now_ms=self._turn.now_ms, wall_ms=self._turn.wall_ms)
                    self.triggers.reopen(intent.trigger_id)
            case job_events.LeadershipEnded():
                self.lifecycle.stop_leading(event.reason)
            case job_events.AttemptPrepared():
                self.lifecycle.next.prepared(event)
            case job_events.AttemptTaken():
                self.lifecycle.taken(event)
            case job_events.AttemptDelayed():
                if not self.lifecycle.next.delayed(event):
                    self.lifecycle.impossible(HoldfastError(event.message))
            case job_events.AttemptImpossible():
                self.lifecycle.impossible(event.error)
            case job_events.HookRestored():
                self.lifecycle.next.hook_restored(event)
            case job_events.HookNotRestored():
                self.lifecycle.hook_not_restored(event)
            case job_events.ResultWritten():
                self.lifecycle.result_written(event)
            case job_events.ResultFailed():
                self.lifecycle.result_failed()
            case _:
                assert_never(event)

    def _settle(self) -> None:
        """Let lifecycle and checkpoint coordinator react to each other until neither has anything left to do."""
        while True:
            self.lifecycle.advance()
            taken = self.lifecycle.take_events()
            if not taken:
                return
            for event in taken:
                self._pass_on(event)

    # --------------------------------------------------------------------------------------------- calls from outside

    def _call(self, ticket: int, handler: Handler) -> None:
        """Answer a call exactly once. An error of the handler is the answer; the job master goes on."""
        try:
            value = handler()
        except HoldfastError as error:
            self._turn.out.append(job_actions.Refuse(ticket, error))
        else:
            if value is not LATER:
                self._turn.out.append(job_actions.Answer(ticket, value))

    def _refuse_suspended(self, event: Event) -> None:
        ticket = getattr(event, "ticket", None)
        if isinstance(ticket, int):
            message = f"this coordinator leads job {self.setup.job_id} no more: {self.lifecycle.failure}"
            self._turn.out.append(job_actions.Refuse(ticket, NotLeaderError(message, job=self.setup.job_id)))

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.setup.epoch:
            message = f"epoch {self.setup.epoch} leads job {self.setup.job_id}, the message is for {epoch}"
            raise FencedError(message, held=epoch, newer=self.setup.epoch)

    def _acks(self, event: job_events.AckBatchReceived) -> AckAnswers:
        batch = event.batch
        self._check_epoch(batch.epoch)
        self.slot_pool.current(batch.slot, batch.session)
        answers = self._feed(batch.items, batch.slot)
        attempt = self.lifecycle.attempt
        if batch.items and all(item.attempt < attempt for item in batch.items):
            raise FencedError(f"attempt {attempt} runs: acknowledgements of older ones are discarded", attempt=attempt)
        return AckAnswers(self.setup.epoch, answers)

    def _feed(self, items: Sequence[Answerable], slot: int) -> tuple[AckStatus, ...]:
        """Pass acknowledgements to the checkpoint coordinator; one answer each."""
        answers: tuple[AckStatus, ...] = ()
        out = self.coordinator.handle(events.AcksReceived(tuple(items), slot), now_ms=self._turn.now_ms, wall_ms=self._turn.wall_ms)
        self._turn.notes += self.coordinator.take_notes()
        for action in out:
            if isinstance(action, actions.AnswerAcks):
                answers = action.answers
            else:
                self._perform(action)
        return answers if answers else (AckStatus.UNKNOWN,) * len(items)

    def _states(self, event: job_events.StatesReceived) -> None:
        self._check_epoch(event.batch.epoch)
        slot = self.slot_pool.current(event.batch.slot, event.batch.session)
        _check_own(slot.index, event.batch.subtasks)
        self.lifecycle.report(slot, event.batch.subtasks)

    def _heartbeat(self, event: job_events.HeartbeatReceived) -> int:
        slot = self.slot_pool.current(event.message.slot, event.message.session)
        _check_own(slot.index, event.message.metrics)
        slot.count_refused(event.message.frames_refused)
        execution = self.lifecycle.execution
        if execution is not None and event.message.attempt == execution.attempt:
            execution.measure(event.message.metrics)
            if execution.attempt == self.lifecycle.attempt:
                self.lifecycle.heard_of(event.message.metrics)
            self.watermarks.report(execution.attempt, event.message.metrics, self._turn.now_ms)
            self.series.sample(execution.attempt, event.message.metrics, self._turn.now_ms, self._turn.wall_ms)
        return self.setup.epoch

    def _ask_worker(self, event: job_events.QuestionAsked) -> object:
        if self.state.is_terminal:
            raise FencedError(f"job {self.setup.job_id} is {self.state.value}: it has no workers", job=self.setup.job_id)
        attempt = self.lifecycle.attempt
        self.questions.ask(event.ticket, event.slot, event.kind, event.samples, event.interval_ms, attempt)
        return LATER

    def _worker_answered(self, event: job_events.AnswerReceived) -> None:
        self._check_epoch(event.answer.epoch)
        self.questions.answered(self.slot_pool.current(event.answer.slot, event.answer.session), event.answer)

    def _open_stream(self, event: job_events.StreamOpened) -> object:
        """Answer before any command is delivered: the caller needs its stream first."""
        commands = self.slot_pool.open_stream(event.slot, event.session, event.after, event.ticket)
        self._turn.out.append(job_actions.Answer(event.ticket, commands))
        return LATER

    def _cancel(self) -> None:
        if not self.state.is_terminal:
            self.lifecycle.end(JobState.CANCELED, "")

    def _leave(self, event: job_events.DriverLeft) -> None:
        """Raises FencedError for the driver of another submission: the job is not its own any more."""
        if event.submission != self.setup.submission:
            message = f"submission {self.setup.submission} of job {self.setup.job_id} runs, not {event.submission}"
            raise FencedError(message, job=self.setup.job_id, held=event.submission, newer=self.setup.submission)
        self.lifecycle.leave()

    def _request(self, event: job_events.SnapshotRequested) -> str:
        """Request a checkpoint, savepoint or stop; idempotent by trigger id.

        Raises InvalidConfigError for the trigger id of a request of another kind, whose outcome would be taken for this one's, and
        for a mode that the job can't have."""
        known = self.triggers.get(event.trigger_id)
        if known is not None and known.kind is not event.kind:
            raise InvalidConfigError(
                f"trigger id {event.trigger_id} is that of a {known.kind.value.replace('_', '-')}: choose another one",
                setting="triggerId",
                trigger=event.trigger_id,
            )
        mode = event.mode.checked(self.settings.config) if known is None else event.mode
        if not self.triggers.begin(event.trigger_id, event.kind, cancel=event.cancel):
            return event.trigger_id
        if event.kind is CheckpointKind.STOP_SAVEPOINT and event.target is not None:
            now_ms, wall_ms = self._turn.now_ms, self._turn.wall_ms
            intent = StopIntent(event.trigger_id, event.target, event.drain, event.native, wall_ms)
            self.stops.begin(intent, now_ms=now_ms, wall_ms=wall_ms)
            self.stops.note_try(event.trigger_id)
        folder = self._savepoint_folder(event.target) if event.target is not None else None
        request = CheckpointRequest(
            event.kind,
            event.trigger_id,
            folder=folder,
            drain=event.drain,
            native=event.native,
            unaligned=mode.unaligned,
            aligned_timeout_ms=mode.aligned_timeout_ms,
            erasure=event.erasure,
        )
        self._pass_on(events.CheckpointRequested(request))
        return event.trigger_id

    def _savepoint_folder(self, target: str) -> str:
        """A new folder for a savepoint; its nonce makes the name unique."""
        nonce = f"{self._rng.getrandbits(48):012x}"
        return savepoint_folder(target, self.setup.job_id, nonce)

    def _retry_stops(self) -> None:
        """Request again, once every task runs, the stops that a failover cut off; answer those whose retries are over."""
        for outcome in self.stops.take_hopeless(now_ms=self._turn.now_ms, is_ending=self.lifecycle.is_ending):
            self._end_request(outcome)
        due = self.stops.take_due(is_up=self.lifecycle.is_up)
        for intent in due:
            folder = self._savepoint_folder(intent.target)
            request = CheckpointRequest(
                CheckpointKind.STOP_SAVEPOINT, intent.trigger_id, folder=folder, drain=intent.drain, native=intent.native
            )
            self._pass_on(events.CheckpointRequested(request))
        if due:
            self._settle()

    # ------------------------------------------------------------------------------------------------------- settings

    def _change_settings(self, event: job_events.SettingsRequested) -> object:
        """Queue a change. Raises FencedError for a job that ends."""
        if self.lifecycle.is_ending:
            raise self._ended_error()
        self.settings.request(event.ticket, event.settings)
        return LATER

    def _ended_error(self) -> HoldfastError:
        job_id, state = self.setup.job_id, self.state.value
        if self.state is JobState.SUSPENDED:
            return NotLeaderError(f"this coordinator leads job {job_id} no more: {self.lifecycle.failure}", job=job_id)
        return FencedError(f"job {job_id} is {state} or ends: its settings can't be changed any more", job=job_id, state=state)

    def _settings_outcome(self, event: job_events.ConfigWritten | job_events.ConfigTaken | job_events.ConfigFailed) -> None:
        before = self.settings.config
        out = self.settings.ended(event, self._turn.now_ms)
        if self.settings.config != before:  # it holds in front of the answer
            self._pass_on(events.SettingsChanged(self.settings.config))
            self._settle()
        self._turn.out += out

    def _write_settings(self) -> None:
        """Write changes that wait; refuse them once the job is over."""
        if self.state is JobState.SUSPENDED or self.state.is_terminal:
            self._turn.out += self.settings.close(self._ended_error())
        else:
            self._turn.out += self.settings.advance(self._turn.now_ms)

    # --------------------------------------------------------------------------------------------------- registration

    def _register(self, event: job_events.RegistrationReceived) -> Registered:
        """Take a worker's full state; the answer is the full desired state."""
        message = event.message
        if self.state.is_terminal:
            raise FencedError(f"job {self.setup.job_id} is {self.state.value}", job=self.setup.job_id, state=self.state.value)
        verdict = self.slot_pool.check_registration(message)
        self.standbys.check_order(message)
        _check_own(message.slot, message.subtasks)
        if message.attempt > self.lifecycle.attempt:
            text = f"attempt {message.attempt} is newer than any known here: another coordinator leads job {message.job_id}"
            raise NotLeaderError(text, job=message.job_id)
        slot = self.slot_pool.slots[message.slot]
        if verdict is Verdict.SUCCESSOR:
            self.lifecycle.lose(slot, f"WorkerSuperseded: a new process holds slot {slot.index}")
        slot = self.slot_pool.take(message, is_near=event.is_near)
        self.watermarks.forget(slot.index)
        self._check_attempt(slot, message.attempt, verdict)
        self.lifecycle.report(slot, message.subtasks)
        answers = self._feed(message.unanswered, slot.index) if message.unanswered else ()
        self._settle()
        return self._desired_state(slot, message.attempt, answers)

    def _check_attempt(self, slot: Slot, attempt: int, verdict: Verdict) -> None:
        """Fail over if the process does not run the job's attempt, and its deployment is not merely on its way."""
        if not self.lifecycle.is_deployed or attempt == self.lifecycle.attempt:
            return
        if verdict is Verdict.RECONNECT and slot.index in self.lifecycle.next.deployments:
            return  # its deployment got lost: the answer repeats it
        self.lifecycle.lose(slot, f"WorkerRestarted: the process in slot {slot.index} does not run the job's attempt")

    def _desired_state(self, slot: Slot, running: int, answers: tuple[AckStatus, ...]) -> Registered:
        lifecycle, config = self.lifecycle, self.setup.graph.config
        deployed = lifecycle.is_deployed
        runs_it = deployed and running == lifecycle.attempt
        restored = lifecycle.restore_point
        if runs_it:
            for trigger in self.coordinator.triggers_to_repeat():
                self._trigger(slot, _trigger_command(trigger))
            newest = self.coordinator.newest
            # A barrier of another worker may have come, or may yet come, of an id that this worker was never told of.
            for checkpoint_id in self.coordinator.aborted_ids:
                newest_id = newest.checkpoint_id if newest is not None else 0
                self.slot_pool.send(slot, NotifyCheckpointAborted(running, checkpoint_id, newest_id))
        elif self.state in (JobState.CANCELLING, JobState.FAILING):
            self.slot_pool.send(slot, CancelTasks(lifecycle.attempt))
        return Registered(
            epoch=self.setup.epoch,
            session=slot.session,
            attempt=lifecycle.attempt,
            deployment=lifecycle.next.deployments.get(slot.index) if deployed and not runs_it else None,
            newest_completed=restored.checkpoint_id if restored is not None else 0,
            live_checkpoints=self.coordinator.live_ids,
            heartbeat_interval_ms=self.watermarks.heartbeat_interval_ms(config.heartbeat_interval_ms),
            heartbeat_timeout_ms=config.heartbeat_timeout_ms,
            answers=answers,
            finish=lifecycle.finishing if runs_it and lifecycle.finish_sent else 0,
        )

    # ----------------------------------------------------------------------- actions of the checkpoint coordinator

    def _pass_on(self, event: events.Event) -> None:
        out = self.coordinator.handle(event, now_ms=self._turn.now_ms, wall_ms=self._turn.wall_ms)
        self._turn.notes += self.coordinator.take_notes()
        for action in out:
            self._perform(action)

    def _perform(self, action: actions.Action) -> None:
        match action:
            case actions.SendTriggers():
                command = _trigger_command(action)
                for slot in self.slot_pool.slots:
                    self._trigger(slot, command)
            case actions.NotifyComplete():
                self.lifecycle.completed(action)
                self.slot_pool.broadcast(NotifyCheckpointComplete(action.attempt, action.checkpoint_id, action.timestamp_ms))
            case actions.NotifyAborted():
                self.slot_pool.broadcast(NotifyCheckpointAborted(action.attempt, action.checkpoint_id, action.newest_completed))
            case actions.FailJob():
                error = f"CheckpointFailed: checkpoint {action.checkpoint_id}: {action.reason.value}: {action.message}"
                self.lifecycle.fail_over(Failure(error))
            case actions.CompleteRequest():
                self._request_ended(action)
            case actions.LoseLeadership():
                self.lifecycle.stop_leading(action.message)
            case actions.AnswerAcks():
                pass  # acknowledgements come through _feed, which returns the answers
            case actions.WriteClaim() | actions.TriggerHook() | actions.WriteMetadata() | actions.WriteAborted():
                self._turn.out.append(action)
            case actions.DiscardState() | actions.DropCheckpoint():
                self._turn.out.append(action)
            case _:
                assert_never(action)

    def _request_ended(self, action: actions.CompleteRequest) -> None:
        self.lifecycle.request_ended(action)
        may_recover = not self.lifecycle.is_ending and self.state is not JobState.CREATED
        outcome = self.stops.ended(action, now_ms=self._turn.now_ms, may_recover=may_recover)
        if outcome is not None:  # else it is tried again
            self._end_request(outcome)

    def _end_request(self, outcome: actions.CompleteRequest) -> None:
        """Record the outcome of a user's request: in the log, and for queries of its trigger."""
        request, completed = outcome.request, outcome.completed
        if request.trigger_id:  # else it is the final checkpoint, which the job itself requests
            location = completed.folder if completed is not None and completed.is_savepoint else ""
            note = RequestEnded(
                request.kind,
                request.trigger_id,
                outcome.checkpoint_id,
                location,
                outcome.failure,
                outcome.message,
                outcome.tries,
            )
            self._turn.notes.append(note)
        if self.triggers.end(outcome):
            self.lifecycle.end(JobState.CANCELED, "")

    def _trigger(self, slot: Slot, command: TriggerCheckpoint) -> None:
        """Send a trigger to a process with a source; all others get barriers."""
        if slot.index < self._source_slots:
            self.slot_pool.send(slot, command)


def _trigger_command(trigger: actions.SendTriggers) -> TriggerCheckpoint:
    return TriggerCheckpoint(
        attempt=trigger.attempt,
        checkpoint_id=trigger.checkpoint_id,
        timestamp_ms=trigger.timestamp_ms,
        kind=trigger.request.kind,
        folder=trigger.folder,
        drain=trigger.request.drain,
        base=trigger.base,
        native=trigger.request.native,
        unaligned=trigger.unaligned,
        aligned_timeout_ms=trigger.aligned_timeout_ms,
        erasure=msgspec.UNSET if trigger.request.erasure is None else trigger.request.erasure,
    )


def _check_own(slot: int, reports: Iterable[SubtaskStatus | SubtaskMetrics]) -> None:
    """Raise ProtocolError unless a worker reports on its own slot's subtasks alone. Called before the report is used."""
    for report in reports:
        if report.subtask != slot:
            whose = f"subtask {report.subtask} of {clip(report.vertex)}"
            message = f"the worker in slot {slot} reports on {whose}, which runs in another slot"
            raise ProtocolError(message, slot=slot, subtask=report.subtask)


def _completed_checkpoints(setup: JobSetup) -> CompletedCheckpointStore:
    return CompletedCheckpointStore(
        Retention.of(setup.graph.config),
        setup.completed,
        setup.aborted,
        restored_id=setup.base.checkpoint_id if setup.base is not None else 0,
        increment_base=_increment_base(setup),
        first_checkpoint_id=setup.first_checkpoint_id,
        erased_below=setup.erased,
    )


def _increment_base(setup: JobSetup) -> int:
    """Id of the checkpoint that the submission starts from, if increments may build on it; else 0.

    It must be in the job's own directory: a snapshot of another job or of a user may be deleted at any time (NO_CLAIM)."""
    base = setup.base
    return 0 if base is None or base.is_savepoint or is_absolute_folder(base.folder) else base.checkpoint_id
