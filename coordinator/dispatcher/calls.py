"""SHELL: passes calls from outside to the job that they are for, or answers them with the error of a job that is not led here.

The REST service, an embedding driver and the simulator call through it. It decides nothing about a job."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeAlias, TypeVar

from holdfast.barriers.messages import RegisterWorker, StandBy
from holdfast.barriers.processes import AskProcess, is_running
from holdfast.coordinator.dispatcher.dispatcher import JobRegistry
from holdfast.coordinator.dispatcher.job_runner import JobMasterRunner
from holdfast.coordinator.dispatcher.published import Look, PublishedJob, wait_for_look
from holdfast.coordinator.dispatcher.recovery_queue import RecoveryQueue
from holdfast.coordinator.ha.recorded_job import RecordedJob
from holdfast.coordinator.jobmaster.events import Event, RegistrationReceived, StandbyReceived
from holdfast.coordinator.jobmaster.jobmaster import JobMaster
from holdfast.statebackends.errors import (
    FencedError,
    HoldfastError,
    NotFoundError,
    NotLeaderError,
    RecoveringError,
    StorageUnavailableError,
)

T = TypeVar("T")

VIEW_WAIT_MS = 500
"""How long a reader waits for newer views, of one job or of all, before it takes those that there are."""


FIRST_VIEW_WAIT_MS = 5_000
"""How long a reader of all jobs waits for the first views of those that have none."""


SeenJob: TypeAlias = tuple[JobMasterRunner, tuple[Look | None, Future[PublishedJob] | None]]
"""A job with what `JobMasterRunner.look` found."""


class JobCalls:
    """Calls of one coordinator. Thread-safe."""

    def __init__(
        self,
        registry: JobRegistry,
        recovery: RecoveryQueue,
        call_timeout_ms: int,
        *,
        look_for: Callable[[str], None] = lambda job_id: None,
        is_running: AskProcess = is_running,
    ) -> None:
        """`look_for`: called with each requested job that this process does not lead; it must not block. `is_running`: of a process
        on this host."""
        self._is_running = is_running
        self._registry = registry
        self._recovery = recovery
        self._look_for = look_for
        self._call_timeout_ms = call_timeout_ms

    def recorded_only(self, job_id: str) -> RecordedJob | None:
        """Records of a job that this process does not lead, if it has read them; else None."""
        recorded = self._registry.recorded(job_id) if self._registry.find(job_id) is None else None
        if recorded is not None:
            self._look_for(job_id)
        return recorded

    def led(self, job_id: str) -> JobMasterRunner:
        """The runner of a job. Raises FencedError for a job that ended before this process started, so that its workers leave;
        NotLeaderError if another coordinator leads it, RecoveringError if it is not recovered yet."""
        recorded = self.recorded_only(job_id)
        if recorded is not None and recorded.result is not None:
            state = recorded.result.state
            raise FencedError(f"job {job_id} is {state}", job=job_id, state=state)
        try:
            service = self._registry.led(job_id)
        except (NotFoundError, NotLeaderError) as error:
            if isinstance(error, NotFoundError):
                self._recovery.check(job_id)
            self._look_for(job_id)
            raise
        if service.ended.is_set():  # also in a terminal state: it may have been submitted again, elsewhere
            self._look_for(job_id)
        return service

    def register(self, message: RegisterWorker) -> Future[Any]:
        """Register a worker. Raises NotLeaderError if its submission is newer than any known here: another coordinator started it.
        Without that check a coordinator that was stopped meanwhile would shut the worker down as stale.

        The worker of a job that is not recovered yet waits for its turn: hundreds that ask again and again would delay it."""
        recovered = self._recovery.when_done(message.job_id) if self._registry.find(message.job_id) is None else None
        if recovered is not None:
            return _then(recovered, lambda: self.register(message))
        known = self._registry.newest_submission(message.job_id)
        if 0 < known < message.submission:
            self._look_for(message.job_id)
            if self._registry.elsewhere(message.job_id) is not None:
                self._registry.led(message.job_id)  # raises, and names the leader
            text = f"submission {message.submission} of job {message.job_id} is newer than {known}: another coordinator leads it"
            raise NotLeaderError(text, job=message.job_id)
        is_near = bool(message.fingerprint) and self._is_running(message.pid, message.fingerprint)
        return self.call(message.job_id, lambda ticket: RegistrationReceived(ticket, message, is_near))

    def stand_by(self, message: StandBy) -> Future[Any]:
        """A worker waits for a slot: answered with a StandbyOrder, within a few seconds."""
        return self.call(message.job_id, lambda ticket: StandbyReceived(ticket, message))

    def call(self, job_id: str, make: Callable[[int], Event]) -> Future[Any]:
        return self.led(job_id).call(make)

    def call_in_session(self, job_id: str, make: Callable[[int], Event]) -> Future[Any]:
        return self.led_in_session(job_id).call(make)

    def led_in_session(self, job_id: str) -> JobMasterRunner:
        """As `led`, for messages of a worker's session. Raises FencedError for a job that is not recovered yet: its sessions were
        an older leader's, and the worker registers again, with all unanswered acknowledgements."""
        try:
            return self.led(job_id)
        except RecoveringError as error:
            raise FencedError(f"job {job_id} has a new leader, and its sessions are over: register again", job=job_id) from error

    def read(self, job_id: str, read: Callable[[JobMaster], T]) -> T:
        """Read a job in a turn of its own."""
        return self.wait_for(self.led(job_id).query(read))

    def look(self, job_id: str) -> Look:
        """The newest view of a job; takes no turn."""
        return wait_for_look(self.led(job_id).look(), VIEW_WAIT_MS / 1000, self.wait_for)

    def looks_now(self, services: Sequence[JobMasterRunner]) -> tuple[list[SeenJob], list[JobMasterRunner]]:
        """Each job that can be shown with its newest view, without waiting for one; and those that can't."""
        found, unseen = list[SeenJob](), list[JobMasterRunner]()
        for service in services:
            try:
                found.append((service, service.look()))
            except HoldfastError:
                unseen.append(service)
        return found, unseen

    def looks_of_all(self, services: Sequence[JobMasterRunner]) -> tuple[list[Look], list[JobMasterRunner]]:
        """The newest view of each job that has one, and the jobs that have none: they must not hide the others. All are waited for
        together."""
        found, unseen = self.looks_now(services)
        began_s = time.monotonic()

        def left_s(wait_ms: int) -> float:
            return max(0.0, began_s + wait_ms / 1000 - time.monotonic())

        looks = []
        for service, look in found:
            try:
                looks.append(wait_for_look(look, left_s(VIEW_WAIT_MS), lambda future: future.result(left_s(FIRST_VIEW_WAIT_MS))))
            except (HoldfastError, FutureTimeoutError):
                unseen.append(service)
        return looks, unseen

    def wait_for(self, future: Future[T]) -> T:
        try:
            return future.result(self._call_timeout_ms / 1000)
        except FutureTimeoutError as error:
            raise StorageUnavailableError(f"the job did not answer within {self._call_timeout_ms} ms") from error


def _then(first: Future[None], following: Callable[[], Future[T]]) -> Future[T]:
    """Future of `following`, which is called once the first is done; not if the returned Future was cancelled."""
    future: Future[T] = Future()

    def settle(ended: Future[T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        error = ended.exception()
        if error is None:
            future.set_result(ended.result())
        else:
            future.set_exception(error)

    def go_on(ended: Future[None]) -> None:
        if future.cancelled():
            return
        try:
            ended.result()
            following().add_done_callback(settle)
        except Exception as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    first.add_done_callback(go_on)
    return future
