"""Jobs that a driver runs, by what they were executed with, so that a repeated `execute` finds the running job.

A notebook's cell is run again and again. With the same plan its job goes on; with a different plan, or a request to begin
elsewhere, the new plan takes over as a newer submission, from a checkpoint that is taken first."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.launcher import CoordinatorClient, LaunchOptions
from holdfast.operators.datastream.plan_digest import PlanDigest, describe_difference, digest_plan
from holdfast.operators.spark.packaging import modules_by_value, user_modules
from holdfast.operators.spark.progress import worker_nonces
from holdfast.statebackends.errors import HoldfastError, NotFoundError

if TYPE_CHECKING:
    from holdfast.operators.spark.handle import SparkJobHandle

log = logging.getLogger("holdfast.spark")

CHECKPOINT_WAIT_S = 60.0
"""Time that a takeover waits for the checkpoint that it begins with; without one it begins with the newest."""


class _Connection(Protocol):
    @property
    def client(self) -> CoordinatorClient: ...

    @property
    def close(self) -> Callable[[], None]: ...


@dataclass(frozen=True, slots=True)
class Execution:
    """Arguments that a job is executed with."""

    name: str
    job_id: str | None
    """Job id as given; None: derived from the name."""
    digest: PlanDigest
    begins_with: str | None = None
    """Argument that asks to begin elsewhere than at the job's current position; None: there is none."""

    @classmethod
    def of(cls, plan: JobPlan, options: LaunchOptions) -> Execution:
        begins_with = "fresh=True" if options.fresh else None
        if options.restore not in (None, "latest"):
            begins_with = f"restore={options.restore!r}"
        with modules_by_value(user_modules()):
            digest = digest_plan(plan)
        return cls(plan.graph.name, options.job_id, digest, begins_with)


@dataclass(frozen=True, slots=True)
class RunningJob:
    execution: Execution
    handle: SparkJobHandle

    def difference(self, execution: Execution) -> str | None:
        """Why the job can't just go on; None if it can."""
        return execution.begins_with or describe_difference(self.execution.digest, execution.digest)


class RunningJobs:
    """Running jobs of one session; thread-safe. A handle that the program dropped belongs to no running job."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._jobs: list[tuple[Execution, weakref.ref[SparkJobHandle]]] = []
        self._turns: set[str] = set()

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Let one thread at a time execute a job of this name; two would take it from each other."""
        with self._lock:
            while name in self._turns:
                self._lock.wait()
            self._turns.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._turns.remove(name)
                self._lock.notify_all()

    def add(self, execution: Execution, handle: SparkJobHandle) -> None:
        with self._lock:
            running = [(job.execution, weakref.ref(job.handle)) for job in reversed(self._running())]
            self._jobs = [*running, (execution, weakref.ref(handle))]

    def find(self, execution: Execution, connect: Callable[[], _Connection]) -> RunningJob | None:
        """The running job with the same identity, or None; waits for one that is ending. `connect`: to the coordinator of this
        execution."""
        with self._lock:
            named = [job for job in self._running() if _is_same(job, execution)]
        if not named:
            return None
        connection = connect()
        try:
            same = [job for job in named if _is_at(job.handle, connection.client)]
        finally:
            connection.close()
        return next((job for job in same if not job.handle.await_ending()), None)

    def _running(self) -> list[RunningJob]:
        """Newest first: a job that another plan took over learns of it a moment later."""
        held = ((execution, handle()) for execution, handle in reversed(self._jobs))
        return [RunningJob(execution, handle) for execution, handle in held if handle is not None and handle.is_running]


def _is_same(job: RunningJob, execution: Execution) -> bool:
    if execution.job_id is not None:
        return job.handle.job_id == execution.job_id
    return job.execution.job_id is None and job.execution.name == execution.name


def _is_at(handle: SparkJobHandle, client: CoordinatorClient) -> bool:
    """Whether this coordinator runs the job. One coordinator has several addresses (`localhost`, 127.0.0.1, the host's name), so
    the worker processes that it knows are compared."""
    if handle.client.url == client.url:
        return True
    try:
        return not handle.worker_nonces.isdisjoint(worker_nonces(client.workers(handle.job_id)))
    except NotFoundError:
        return False


def checkpoint_before_takeover(job: RunningJob, execution: Execution) -> None:
    """Take a checkpoint, so that the new plan repeats nothing; may fail. Its barriers overtake nothing: the new plan may lack the
    exchange that records in flight belong to."""
    if execution.begins_with is not None:
        return
    try:
        job.handle.client.trigger_checkpoint(job.handle.job_id, unaligned=False, timeout_s=CHECKPOINT_WAIT_S)
    except (HoldfastError, TimeoutError) as error:
        log.warning("%s: its new plan begins with an older checkpoint: %s", execution.name, error)
