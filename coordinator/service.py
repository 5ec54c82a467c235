"""SHELL: the coordinator of a state directory: many jobs, one storage, one pool. Implements `interface.Coordinator`.

It finds the job a call is for and passes it on; starting and taking over jobs runs on the caller's thread, one at a time
per job. The same class serves REST and a driver that embeds it."""

from __future__ import annotations

import logging
import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from barriers.jobgraph import Submission, SubmissionAccepted
from barriers.messages import (
    AckAnswers,
    AckBatch,
    CheckpointKind,
    Heartbeat,
    Registered,
    RegisterWorker,
    StatusBatch,
)
from coordinator import jobevents as job
from coordinator.config import ServiceConfig
from coordinator.effects import Identity, StorageEffects
from coordinator.jobevents import JobSetup
from coordinator.jobmaster import JobMaster
from coordinator.jobservice import JobService, wall_clock_ms
from coordinator.leadership import open_directory
from coordinator.planning import check_graph, derive_triggers
from coordinator.reading import ReadModels
from coordinator.records import JobPaths, derive_job_id
from coordinator.registry import JobRegistry
from coordinator.routing import RoutedStorage
from coordinator.store import list_jobs, read_job
from coordinator.submitting import Starter, preflight, resume_submission, start_submission
from coordinator.subscription import Subscription
from coordinator.views import TriggerView
from statebackends.errors import HoldfastError, InvalidConfigError, NotFoundError, StorageUnavailableError
from statebackends.storage.local import storage_from_url
from statebackends.storage.operations import Flow, Storage, run_flow

logger = logging.getLogger(__name__)

T = TypeVar("T")


class CoordinatorService(ReadModels):
    """Opens the state directory and leads every live job in it on, before the constructor returns.

    Raises InvalidConfigError, or StorageUnavailableError when the directory can't be written. A second coordinator on the same
    directory is safe but pointless: each fences the other's jobs; `api` refuses it."""

    def __init__(self, config: ServiceConfig, storage: Storage | None = None) -> None:
        config.check()
        self._config = config
        self._rng = random.Random(config.seed)
        self._storage = RoutedStorage(storage if storage is not None else storage_from_url(config.state_directory))
        self._nonce = f"{self._rng.getrandbits(128):032x}"
        self._directory_nonce = run_flow(open_directory(self._nonce), self._storage)
        self._decisions = ThreadPoolExecutor(config.storage_threads, thread_name_prefix="storage")
        self._cleanup = ThreadPoolExecutor(config.cleanup_threads, thread_name_prefix="cleanup")
        self._closing = threading.Lock()
        self._closed = False
        self._ready = False
        super().__init__(JobRegistry(config.jobs_max), self._storage.root, config.call_timeout_ms)
        self.recover()

    @property
    def ready(self) -> bool:
        return self._ready and not self._closed

    @property
    def directory(self) -> str:
        return self._storage.root

    @property
    def directory_nonce(self) -> str:
        return self._directory_nonce

    # ------------------------------------------------------------------------------------------------------ recovery

    def recover(self) -> None:
        """Lead on every live job of the directory that this process does not lead; a damaged one is left alone, and named."""
        for job_id in self._flow(list_jobs()):
            with self._registry.lock_of(job_id):
                if self._registry.find(job_id) is None:
                    self._recover_job(job_id)
        self._ready = True

    def _recover_job(self, job_id: str) -> None:
        try:
            recorded = self._flow(read_job(JobPaths(job_id)))
            if not recorded.exists:
                return
            if not recorded.is_live:
                self._registry.put_recorded(recorded)
                return
            self._launch(self._flow(resume_submission(job_id, self._starter())))
        except HoldfastError as error:
            logger.error("job %s can't be led on: %s", job_id, error)
            self._registry.put_broken(job_id, error)

    def _starter(self) -> Starter:
        nonce = f"{self._rng.getrandbits(128):032x}"
        return Starter(nonce, self._config.url, self._directory_nonce, wall_clock_ms())

    def _launch(self, setup: JobSetup) -> JobService:
        """Start the owner thread of a job that this process leads."""
        nonce = f"{self._rng.getrandbits(128):032x}"
        identity = Identity(setup.job_id, setup.epoch, nonce, setup.submission, setup.graph, setup.started_ms)
        service = JobService(
            JobMaster(setup, rng=random.Random(self._rng.getrandbits(64))),
            StorageEffects(identity, wall_clock_ms),
            self._storage,
            decisions=self._decisions,
            cleanup=self._cleanup,
            inbox_events_max=self._config.inbox_events_max,
        )
        service.start()
        self._registry.put(service)
        return service

    def _flow(self, flow: Flow[T]) -> T:
        return run_flow(flow, self._storage)

    # -------------------------------------------------------------------------------------------------------- driver

    def submit(self, submission: Submission) -> SubmissionAccepted:
        check_graph(submission.graph)
        job_id = submission.job_id or derive_job_id(submission.graph.name)
        if len(job_id) != 32 or any(digit not in "0123456789abcdef" for digit in job_id):
            raise InvalidConfigError(f"job id {job_id!r} is not 32 lower-case hex digits", setting="job_id")
        self._check_open()
        with self._registry.lock_of(job_id):
            return self._submit(job_id, submission)

    def _submit(self, job_id: str, submission: Submission) -> SubmissionAccepted:
        current = self._registry.find(job_id)
        recorded = self._flow(read_job(JobPaths(job_id)))
        newest = recorded.newest_submission
        repeated = newest is not None and submission.driver_nonce and newest.submission.driver_nonce == submission.driver_nonce
        if repeated and newest is not None and current is not None and current.submission == newest.number:
            base = newest.base.checkpoint_id if newest.base is not None else 0
            return self._accepted(current, base)
        self._flow(preflight(job_id, submission))
        if current is not None:
            self._replace(current)
        try:
            setup = self._flow(start_submission(job_id, submission, self._starter()))
        except HoldfastError:
            self._registry.remove(job_id)
            self._recover_job(job_id)
            raise
        service = self._launch(setup)
        return self._accepted(service, setup.base.checkpoint_id if setup.base is not None else 0)

    def _replace(self, current: JobService) -> None:
        """Another submission takes over: the older one decides what is pending, sends its workers home, and is gone."""
        reason = "superseded by a newer submission"
        if not current.ended.is_set():  # one that lost its leadership, or crashed, decides nothing any more
            self._wait_for(current.call(lambda ticket: job.SuspendRequested(ticket, reason)))
        current.close(reason)

    def _accepted(self, service: JobService, restored: int) -> SubmissionAccepted:
        return SubmissionAccepted(
            job_id=service.job_id,
            submission=service.submission,
            slots=service.slots,
            epoch=service.epoch,
            restored_checkpoint_id=restored,
            directory=self.directory,
            directory_nonce=self._directory_nonce,
        )

    # ------------------------------------------------------------------------------------------------ worker protocol

    def register_async(self, message: RegisterWorker) -> Future[Registered]:
        return self._call(message.job_id, lambda ticket: job.RegistrationReceived(ticket, message))

    def register(self, message: RegisterWorker) -> Registered:
        return self._wait_for(self.register_async(message))

    def commands(self, job_id: str, slot: int, session: str, after: int) -> Subscription:
        subscription, opened = self._led(job_id).subscribe(slot, session, after)
        self._wait_for(opened)
        return subscription

    def acks_async(self, job_id: str, batch: AckBatch) -> Future[AckAnswers]:
        return self._call(job_id, lambda ticket: job.AckBatchReceived(ticket, batch))

    def acks(self, job_id: str, batch: AckBatch) -> AckAnswers:
        return self._wait_for(self.acks_async(job_id, batch))

    def states_async(self, job_id: str, batch: StatusBatch) -> Future[None]:
        return self._call(job_id, lambda ticket: job.StatesReceived(ticket, batch))

    def states(self, job_id: str, batch: StatusBatch) -> None:
        self._wait_for(self.states_async(job_id, batch))

    def heartbeat_async(self, job_id: str, message: Heartbeat) -> Future[int]:
        return self._call(job_id, lambda ticket: job.HeartbeatReceived(ticket, message))

    def heartbeat(self, job_id: str, message: Heartbeat) -> int:
        return self._wait_for(self.heartbeat_async(job_id, message))

    # ----------------------------------------------------------------------------------------------- requests of users

    def request_checkpoint(self, job_id: str, trigger_id: str | None = None) -> str:
        return self._request(job_id, CheckpointKind.CHECKPOINT, trigger_id)

    def request_savepoint(
        self,
        job_id: str,
        target: str | None = None,
        *,
        format_type: str = "CANONICAL",
        cancel: bool = False,
        trigger_id: str | None = None,
    ) -> str:
        location = self._target(job_id, target, format_type)
        return self._request(job_id, CheckpointKind.SAVEPOINT, trigger_id, target=location, cancel=cancel)

    def stop(
        self,
        job_id: str,
        target: str | None = None,
        *,
        drain: bool = False,
        format_type: str = "CANONICAL",
        trigger_id: str | None = None,
    ) -> str:
        location = self._target(job_id, target, format_type)
        return self._request(job_id, CheckpointKind.STOP_SAVEPOINT, trigger_id, target=location, drain=drain)

    def cancel(self, job_id: str) -> None:
        if self._registry.recorded(job_id) is None:
            self._wait_for(self._call(job_id, job.CancelRequested))

    def trigger_status(self, job_id: str, trigger_id: str) -> TriggerView:
        recorded = self._recorded_only(job_id)
        if recorded is not None:
            view = next((entry for entry in derive_triggers(recorded) if entry.trigger_id == trigger_id), None)
        else:
            view = self._read(job_id, lambda master: master.triggers.get(trigger_id))
        if view is None:
            raise NotFoundError(f"job {job_id} knows no trigger {trigger_id!r}", job=job_id, trigger=trigger_id)
        return view

    def _target(self, job_id: str, target: str | None, format_type: str) -> str:
        """Where savepoints go. Raises InvalidConfigError before anything is triggered."""
        if format_type.upper() != "CANONICAL":
            raise InvalidConfigError(f"savepoint format {format_type!r} is not supported: use CANONICAL", setting="formatType")
        location = target or self._read(job_id, lambda master: master.setup.graph.config.savepoint_directory)
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
        storage_from_url(location)
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
    ) -> str:
        chosen = trigger_id or f"{self._rng.getrandbits(128):032x}"
        future: Future[str] = self._call(
            job_id,
            lambda ticket: job.SnapshotRequested(ticket, kind, chosen, target=target, drain=drain, cancel=cancel),
        )
        return self._wait_for(future)

    # ----------------------------------------------------------------------------------------------------------- life

    def wait(self, job_id: str, timeout_s: float | None = None) -> str:
        service = self._registry.find(job_id)
        if service is not None:
            service.ended.wait(timeout_s)
        return self.job(job_id).overview.state

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
        for service in self._registry.services():
            service.close("the coordinator stops")
        self._decisions.shutdown()
        self._cleanup.shutdown()

    def _check_open(self) -> None:
        if self._closed:
            raise StorageUnavailableError("the coordinator is stopping")
