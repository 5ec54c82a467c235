"""SHELL: the coordinator of a state directory, with threads. Implements `interface.Coordinator`.

It passes each call on to the job that it is for; starting and taking over jobs (`dispatcher/dispatcher.py`) runs on the caller's
thread, one at a time per job. The same class serves REST and a driver that embeds it."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from msgspec.structs import replace

from holdfast.barriers.erasure import Erasure
from holdfast.barriers.jobgraph import Submission, SubmissionAccepted
from holdfast.barriers.messages import (
    AckAnswers,
    AckBatch,
    CheckpointKind,
    Heartbeat,
    Registered,
    RegisterWorker,
    StandBy,
    StandbyOrder,
    StatusBatch,
    WorkerAnswer,
    clip,
)
from holdfast.barriers.tunable import AS_CONFIGURED, CheckpointMode, SettingValue
from holdfast.coordinator.config import ServiceConfig
from holdfast.coordinator.dispatcher.calls import JobCalls
from holdfast.coordinator.dispatcher.command_stream import Subscription
from holdfast.coordinator.dispatcher.dispatcher import Dispatcher, HostFlow, RecoveryBackoff, run_host_flow
from holdfast.coordinator.dispatcher.job_drills import JobDrills
from holdfast.coordinator.dispatcher.job_labels import JobLabels
from holdfast.coordinator.dispatcher.job_log import about
from holdfast.coordinator.dispatcher.published import MomentNow
from holdfast.coordinator.dispatcher.reading.costs import Costs
from holdfast.coordinator.dispatcher.reading.diagnosis import Diagnosis
from holdfast.coordinator.dispatcher.reading.explainer import EndedCheckpointExplainer
from holdfast.coordinator.dispatcher.reading.queries import Queries
from holdfast.coordinator.dispatcher.reading.questions import Question, WorkerQuestions
from holdfast.coordinator.dispatcher.reading.recollection import Recollection
from holdfast.coordinator.dispatcher.reading.source_positions import SourcePositions
from holdfast.coordinator.dispatcher.submit import identify_job
from holdfast.coordinator.dispatcher.threads import PoolRunner, SharedThreads, SystemClock
from holdfast.coordinator.drills.records import DrillView, Verification
from holdfast.coordinator.explain.records import Explanation, HealthView
from holdfast.coordinator.ha.records import is_job_id
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.coordinator.history.feed import HistoryFeed
from holdfast.coordinator.history.records import HistoryPage
from holdfast.coordinator.history.store import HistoryQuery, read_history
from holdfast.coordinator.hooks.calls import HookHost
from holdfast.coordinator.hooks.registry import HookRegistry
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.notes import THE_COORDINATOR_STOPS
from holdfast.coordinator.ownership.claims import check_target
from holdfast.coordinator.ownership.cost import Cost
from holdfast.coordinator.ownership.labels import LabelList, LabelView
from holdfast.coordinator.restore.plan import derive_triggers
from holdfast.coordinator.restore.preflight import PreflightReport
from holdfast.coordinator.views import (
    AnswerView,
    CheckpointConfigView,
    CheckpointStatsView,
    CheckpointView,
    ClusterView,
    JobNumbersView,
    JobOverviewView,
    JobView,
    Moment,
    SavepointPlaces,
    SeriesView,
    TriggerView,
    WholeJobView,
)
from holdfast.statebackends.errors import InvalidConfigError, NotFoundError, StorageUnavailableError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.directory import check_no_file
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import InTurn, Storage, run_flow, transfers_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEADERSHIP_ROUNDS = 5
"""Every so many of those rounds each job's leadership is checked: one small request to storage a job."""
READER_JOIN_S = 5.0
"""Longest that a stopping coordinator waits for the threads that read for people: drills on record, positions of sources."""
RECOVERY_RETRY_S = 1.0
"""Time between two rounds of recovery of the jobs whose storage failed."""


class CoordinatorService:
    """Opens the state directory and lists its jobs; `lead`, to be called once requests are answered, recovers them.

    Raises InvalidConfigError, or StorageUnavailableError if the directory can't be written or the system has too few threads. A
    second coordinator on the same directory is safe but useless: each fences the other's jobs. `api` refuses it."""

    def __init__(self, config: ServiceConfig, storage: Storage | None = None, hooks: HookHost | None = None) -> None:
        """`hooks`: master hooks that jobs may name; None: those of the entry points."""
        config.check()
        self._storage = RoutedStorage(storage if storage is not None else open_storage(config.state_directory))
        shares_threads = transfers_of(self._storage).transfers_max < config.recovery_threads
        self._recovery_storage: Storage = InTurn(self._storage) if shares_threads else self._storage
        """With many jobs read in parallel, further threads for the reads of each job cost more than they save."""
        self._rng = random.Random(config.seed)
        self._runner = PoolRunner(
            self._storage,
            decision_threads=config.storage_threads,
            cleanup_threads=config.cleanup_threads,
            record_threads=config.history_threads,
        )
        self._clock = clock = SystemClock()
        self._job_threads = SharedThreads(clock)
        self._host = Dispatcher(
            config,
            self._storage.root,
            rng=self._rng,
            clock=clock,
            runner=self._runner,
            make_job_thread=self._job_threads.new_thread,
            hooks=hooks if hooks is not None else HookRegistry(discover=True),
        )
        self._closing = threading.Lock()
        self._closed = False
        self._stopped = threading.Event()
        self._registry, self._recovery = self._host.registry, self._host.recovery
        self._calls = JobCalls(self._registry, self._recovery, config.call_timeout_ms, look_for=self._host.look_for)
        self._queries = Queries(self._calls, self._registry, self._recovery, self._storage.root, clock)
        self._questions = WorkerQuestions(self._calls, clock)
        draw = lambda: f"{self._rng.getrandbits(128):032x}"  # noqa: E731
        self._labels = JobLabels(self._calls, self._storage, clock, draw, self._clear_recorded)
        self._drills = JobDrills(
            self._calls,
            self._registry,
            self._storage,
            clock,
            draw,
            seconds_max=config.drill_timeout_ms / 1000,
            labels=self._labels,
        )
        self._costs = Costs(self._storage, clock)
        recollection = Recollection(self._storage, clock)
        self._explainer = self._host.explainer = EndedCheckpointExplainer(self._questions, recollection, self._storage.root)
        self._positions = SourcePositions(self._storage)
        self._diagnosis = Diagnosis(
            self._calls, self._storage.root, clock, self._questions, self._drills, recollection, self._positions
        )
        self._perform(self._host.open())
        self._threads = [
            threading.Thread(target=self._lead_on, name=f"recovery-{number}", daemon=True)
            for number in range(config.recovery_threads)
        ]
        self._threads.append(threading.Thread(target=self._retry_recoveries, name="recovery-again", daemon=True))
        self._readers = [
            threading.Thread(target=self._drills.watch, name="drills", daemon=True),
            threading.Thread(target=self._positions.watch, name="source-positions", daemon=True),
            threading.Thread(target=self._explainer.watch, name="explainer", daemon=True),
        ]
        self._started: list[threading.Thread] = []
        self._begin_threads()

    def _begin_threads(self) -> None:
        """Start what jobs' turns and flows run on, so that no job waits for a thread that the system does not have."""
        try:
            self._job_threads.begin()
            self._runner.begin()
        except RuntimeError as error:
            self._job_threads.close()
            self._runner.close()
            raise StorageUnavailableError(f"the coordinator can't begin: {error}") from error

    def lead(self) -> None:
        """As `interface.Coordinator`."""
        with self._closing:
            if self._closed or self._started:
                return
            self._started = self._threads
            for thread in self._threads:
                thread.start()
            for thread in self._readers:
                thread.start()

    def _lead_on(self) -> None:
        """Body of one of the threads that share the jobs to recover."""
        while not self._stopped.is_set() and (job_id := self._recovery.next()) is not None:
            try:
                with self._registry.lock_of(job_id):
                    if not self._closed:
                        run_host_flow(self._host.lead_on(job_id), self._recovery_storage, self._calls.wait_for)
            except Exception as error:  # the other jobs are still to be led on, and this one again
                self._choke_on(job_id, error)
            self._recovery.done(job_id)

    def _choke_on(self, job_id: str, error: Exception) -> None:
        """Recover one job. After an unexpected error it is tried again later; until then calls get RecoveringError, not
        NotFound."""
        told = "job %s: its recovery failed in a way that no record describes"
        logger.critical(told, job_id, exc_info=error, extra=about(job_id))
        if not self._registry.is_known(job_id):  # how it ended, or who leads it, counts for more
            text = f"its recovery failed, and is tried again ({type(error).__name__}: {clip(str(error))})"
            self._registry.put_broken(job_id, StorageUnavailableError(text))
        self._host.unrecovered.add(job_id)

    def _retry_recoveries(self) -> None:
        """Retry jobs whose recovery failed on storage: their workers are waiting."""
        backoff = RecoveryBackoff()
        rounds = 0
        while not self._stopped.wait(RECOVERY_RETRY_S):
            rounds += 1
            try:
                if rounds % LEADERSHIP_ROUNDS == 0:
                    self._perform(self._host.check_leaderships())
                self._perform(self._host.find_leaders())
            except Exception:  # there are jobs to be recovered all the same
                logger.critical("looking for leaders failed in a way that no record describes", exc_info=True)
            for job_id in backoff.due(sorted(self._host.unrecovered)):
                try:
                    with self._registry.lock_of(job_id):
                        if not self._closed:
                            self._perform(self._host.retry_recovery(job_id))
                except Exception as error:  # the other jobs are still to be recovered, and this one again
                    self._choke_on(job_id, error)

    @property
    def ready(self) -> bool:
        return not self._closed and self._recovery.is_over

    @property
    def is_leading(self) -> bool:
        return not self._recovery.is_over or any(not service.ended.is_set() for service in self._registry.services())

    @property
    def is_referring(self) -> bool:
        return self._registry.is_any_elsewhere

    @property
    def directory(self) -> str:
        return self._storage.root

    @property
    def feed(self) -> HistoryFeed:
        return self._host.feed

    @property
    def directory_nonce(self) -> str:
        return self._host.directory_nonce

    # -------------------------------------------------------------------------------------------------------- driver

    def submit(self, submission: Submission) -> SubmissionAccepted:
        job_id = identify_job(submission)
        if self._closed:
            raise StorageUnavailableError("the coordinator is stopping")
        with self._registry.lock_of(job_id):
            return self._perform(self._host.submit(submission))

    def preflight(self, submission: Submission) -> PreflightReport:
        return self._perform(self._host.preflight(submission))

    def _perform(self, flow: HostFlow[T]) -> T:
        return run_host_flow(flow, self._storage, self._calls.wait_for)

    def leader_unreachable(self, job_id: str, epoch: int) -> None:
        self._host.leader_unreachable(job_id, epoch)

    # ------------------------------------------------------------------------------------------------ worker protocol

    def register_async(self, message: RegisterWorker) -> Future[Registered]:
        return self._calls.register(message)

    def stand_by_async(self, message: StandBy) -> Future[StandbyOrder]:
        return self._calls.stand_by(message)

    def commands(self, job_id: str, slot: int, session: str, after: int) -> Subscription:
        subscription, opened = self._calls.led_in_session(job_id).subscribe(slot, session, after)
        self._calls.wait_for(opened)
        return subscription

    def acks_async(self, job_id: str, batch: AckBatch) -> Future[AckAnswers]:
        return self._calls.call_in_session(job_id, lambda ticket: job_events.AckBatchReceived(ticket, batch))

    def states_async(self, job_id: str, batch: StatusBatch) -> Future[None]:
        return self._calls.call_in_session(job_id, lambda ticket: job_events.StatesReceived(ticket, batch))

    def heartbeat_async(self, job_id: str, message: Heartbeat) -> Future[int]:
        return self._calls.call_in_session(job_id, lambda ticket: job_events.HeartbeatReceived(ticket, message))

    def answer_async(self, job_id: str, answer: WorkerAnswer) -> Future[None]:
        return self._calls.call_in_session(job_id, lambda ticket: job_events.AnswerReceived(ticket, answer))

    # ----------------------------------------------------------------------------------------------- requests of users

    def request_checkpoint(self, job_id: str, trigger_id: str | None = None, *, mode: CheckpointMode = AS_CONFIGURED) -> str:
        return self._request(job_id, CheckpointKind.CHECKPOINT, trigger_id, mode=mode)

    def erase_key(self, job_id: str, erasure: Erasure) -> str:
        return self._request(job_id, CheckpointKind.CHECKPOINT, None, erasure=erasure)

    def request_savepoint(
        self,
        job_id: str,
        target: str | None = None,
        *,
        format_type: str = "CANONICAL",
        cancel: bool = False,
        trigger_id: str | None = None,
    ) -> str:
        native = _is_native(format_type)
        location = self._target(job_id, target)
        return self._request(job_id, CheckpointKind.SAVEPOINT, trigger_id, target=location, cancel=cancel, native=native)

    def stop(
        self,
        job_id: str,
        target: str | None = None,
        *,
        drain: bool = False,
        format_type: str = "CANONICAL",
        trigger_id: str | None = None,
    ) -> str:
        native = _is_native(format_type)
        location = self._target(job_id, target)
        return self._request(job_id, CheckpointKind.STOP_SAVEPOINT, trigger_id, target=location, drain=drain, native=native)

    def change_settings(self, job_id: str, settings: Mapping[str, SettingValue]) -> CheckpointConfigView:
        self._calls.wait_for(self._calls.call(job_id, lambda ticket: job_events.SettingsRequested(ticket, settings)))
        return self._queries.checkpoint_config(job_id)

    def add_label(self, job_id: str, checkpoint_id: int, label: str) -> LabelView:
        return self._labels.add(job_id, checkpoint_id, label)

    def remove_label(self, job_id: str, label: str, checkpoint_id: int | None = None) -> tuple[LabelView, ...]:
        return self._labels.remove(job_id, label, checkpoint_id)

    def _clear_recorded(self, job_id: str) -> None:
        """Delete what a job that ended before this process began keeps no longer."""
        with self._registry.lock_of(job_id):
            if not self._closed and self._registry.find(job_id) is None:
                self._perform(self._host.clear(job_id))

    def cancel(self, job_id: str) -> None:
        if self._registry.recorded(job_id) is None:
            self._calls.wait_for(self._calls.call(job_id, job_events.CancelRequested))

    def leave(self, job_id: str, submission: int) -> None:
        if self._registry.recorded(job_id) is None:
            self._calls.wait_for(self._calls.call(job_id, lambda ticket: job_events.DriverLeft(ticket, submission)))

    def trigger_status(self, job_id: str, trigger_id: str) -> TriggerView:
        recorded = self._calls.recorded_only(job_id)
        if recorded is not None:
            view = next((entry for entry in derive_triggers(recorded) if entry.trigger_id == trigger_id), None)
        else:
            view = self._calls.read(job_id, lambda master: master.triggers.get(trigger_id))
        if view is None:
            raise NotFoundError(f"job {job_id} knows no trigger {trigger_id!r}", job=job_id, trigger=trigger_id)
        return view

    def _target(self, job_id: str, target: str | None) -> str:
        """Directory of savepoints. Raises InvalidConfigError before anything is triggered."""
        location = target or self._calls.read(job_id, lambda master: master.setup.graph.config.savepoint_directory)
        if not location:
            raise InvalidConfigError(
                "a savepoint needs a target directory: name one (--target on the command line), "
                "or give the Environment a savepoint_directory",
                setting="savepoint_directory",
            )
        if "://" not in location and not location.startswith("/"):
            raise InvalidConfigError(f"savepoint directory {location!r} is not absolute", setting="savepoint_directory")
        if any(part in (".", "..") for part in location.split("/")):
            raise InvalidConfigError(f"savepoint directory {location!r} contains '.' or '..'", setting="savepoint_directory")
        root = open_storage(location).root
        real = root if "://" in root else os.path.realpath(root)
        if real.startswith("/"):
            check_no_file(real)
        run_flow(check_target(real), self._storage)
        return location

    def _request(
        self,
        job_id: str,
        kind: CheckpointKind,
        trigger_id: str | None,
        *,
        target: str | None = None,
        drain: bool = False,
        cancel: bool = False,
        native: bool = False,
        mode: CheckpointMode = AS_CONFIGURED,
        erasure: Erasure | None = None,
    ) -> str:
        chosen = trigger_id or f"{self._rng.getrandbits(128):032x}"
        future: Future[str] = self._calls.call(
            job_id,
            lambda ticket: job_events.SnapshotRequested(
                ticket, kind, chosen, target=target, drain=drain, cancel=cancel, native=native, mode=mode, erasure=erasure
            ),
        )
        return self._calls.wait_for(future)

    # -------------------------------------------------------------------------------------------------------- queries

    def moment(self, job_id: str | None = None, *, diagnosed: bool = False) -> Moment:
        found = self._queries.moment(job_id)
        return self._diagnosis.moment(found) if diagnosed else found

    def moment_now(self, job_id: str | None = None, *, diagnosed: bool = False) -> MomentNow:
        found = self._queries.moment_now(job_id)
        if not diagnosed or found.moment is None:
            return found
        return MomentNow(self._diagnosis.moment(found.moment), found.coming)

    def jobs(self) -> tuple[JobOverviewView, ...]:
        return self._queries.jobs()

    def numbers(self) -> tuple[JobNumbersView, ...]:
        return tuple(replace(view, drill=self._drills.mark(view.overview.job_id)) for view in self._queries.numbers())

    def broken_jobs(self) -> Mapping[str, str]:
        return self._registry.broken_jobs()

    def job(self, job_id: str) -> JobView:
        return self._queries.job(job_id)

    def whole_job(self, job_id: str) -> WholeJobView:
        return self._queries.whole_job(job_id)

    def whole_jobs(self, job_ids: Collection[str] | None = None, *, live_only: bool = False) -> tuple[WholeJobView, ...]:
        return self._queries.whole_jobs(job_ids, live_only=live_only)

    def checkpoints(self, job_id: str) -> CheckpointStatsView:
        return self._queries.checkpoints(job_id)

    def checkpoint(self, job_id: str, checkpoint_id: int) -> CheckpointView:
        return self._queries.checkpoint(job_id, checkpoint_id)

    def checkpoint_config(self, job_id: str) -> CheckpointConfigView:
        return self._queries.checkpoint_config(job_id)

    def series(
        self, job_id: str, vertex: str | None, metric: str, subtasks: Sequence[int] = ()
    ) -> tuple[SeriesView, ...]:
        return self._queries.series(job_id, vertex, metric, subtasks)

    def history(self, job_id: str, query: HistoryQuery) -> HistoryPage:
        if not is_job_id(job_id):
            raise NotFoundError(f"job {job_id} not found", job=job_id)
        page = run_flow(read_history(JobPaths(job_id), query, self._clock.wall_ms()), self._storage)
        if not page.next and not self._registry.is_known(job_id):
            self._recovery.check(job_id)
            raise NotFoundError(f"job {job_id} not found", job=job_id)
        return page

    def drill(self, job_id: str, checkpoint_id: int | None = None) -> DrillView:
        return self._drills.begin(job_id, checkpoint_id)

    def drills(self, job_id: str) -> tuple[DrillView, ...]:
        return self._drills.drills(job_id)

    def note_verified(self, job_id: str, location: str, found: Verification) -> None:
        self._drills.note_verified(job_id, location, found)

    def cost(self, job_id: str) -> Cost:
        found = self._costs.of(job_id)
        if not found.files and not self._registry.is_known(job_id):
            self._recovery.check(job_id)
            raise NotFoundError(f"job {job_id} not found", job=job_id)
        return found

    def labels(self, job_id: str) -> LabelList:
        return self._labels.list(job_id)

    def health(self, job_id: str) -> HealthView:
        return self._diagnosis.health(job_id)

    def explain(self, job_id: str, checkpoint_id: int | None = None) -> Explanation:
        return self._diagnosis.explain(job_id, checkpoint_id)

    def ask_async(self, question: Question) -> Future[AnswerView]:
        return self._questions.ask(question)

    def savepoint_places(self) -> SavepointPlaces:
        return self._queries.savepoint_places()

    def published_savepoint_places(self) -> SavepointPlaces:
        return self._queries.published_savepoint_places()

    def cluster(self) -> ClusterView:
        return self._queries.cluster()

    # ----------------------------------------------------------------------------------------------------------- life

    def wait(self, job_id: str, timeout_s: float | None = None) -> str:
        service = self._registry.find(job_id)
        if service is not None:
            service.ended.wait(timeout_s)
        return self.job(job_id).overview.state

    def close(self, reason: str = THE_COORDINATOR_STOPS) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._stopped.set()
        self._drills.close()
        self._positions.close()
        self._explainer.close()
        for thread in self._started:
            thread.join()  # none must begin to lead a job behind what is closed here
        if self._started:
            until_s = time.monotonic() + READER_JOIN_S
            for thread in self._readers:  # they lead nothing: one that storage holds ends when that answers
                thread.join(max(0.0, until_s - time.monotonic()))
        self._recovery.close()
        services = self._registry.services()
        for service in services:  # all at once: the turn of one may last
            service.stop(reason)
        for service in services:
            service.close(reason)
        self._job_threads.close()
        self._runner.close()


def _is_native(format_type: str) -> bool:
    """Raise InvalidConfigError for an unknown format."""
    if format_type.upper() not in ("CANONICAL", "NATIVE"):
        raise InvalidConfigError(f"there is no savepoint format {format_type!r}: use CANONICAL or NATIVE", setting="formatType")
    return format_type.upper() == "NATIVE"
