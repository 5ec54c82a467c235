"""SHELL: workers in Spark tasks: the function that runs inside a task, and the driver's thread and one-partition job for each
worker.

Each worker has a Spark job of its own, so that its death affects it alone: the successor of one slot is started, the others go on.
Spark's Python workers import this module from the zip."""

from __future__ import annotations

import logging
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, assert_never

from holdfast.barriers.launches import launch_token
from holdfast.operators.spark.interrupts import collect, mark_worker
from holdfast.operators.spark.supervisor import (
    Action,
    AllEnded,
    CancelWorker,
    DeadlineReached,
    Event,
    GiveUp,
    Launch,
    SeenWorker,
    SlotSupervisor,
    SpawnWorker,
    StopRequested,
    WorkerEnd,
    WorkerEnded,
    derive_end,
)
from holdfast.operators.worker.main import WorkerSpec, run_worker
from holdfast.operators.worker.working_folders import kill_process, root_of_user
from holdfast.statebackends.errors import HoldfastError

if TYPE_CHECKING:
    from pyspark import SparkContext


ROOT_NAME = "holdfast-workers"


@dataclass(frozen=True)
class WorkerTemplate:
    """A WorkerSpec without the fields that only the task knows."""

    job_id: str
    submission: int
    coordinator_url: str
    token: str | None
    state_directory: str
    plan: bytes
    cancellation_timeout_ms: int
    advertised_host: str | None = None
    directory_nonce: str = ""
    spawn: int = 0
    launch_token: str = ""
    authorities: str | None = None
    slots: int = 0
    """Of the job; workers in seats beyond them stand by. 0: none does."""

    def stands_by(self, seat: int, *, is_repeated: bool = False) -> bool:
        """Whether the worker of a seat asks for a slot: its own may have another worker by now. `is_repeated`: Spark runs the task
        again by itself, as often as `spark.task.maxFailures` says, and the driver has not started a worker."""
        return self.slots > 0 and (seat >= self.slots or self.spawn > 1 or is_repeated)

    def launched(self, launch_key: str, slot: int, spawn: int) -> WorkerTemplate:
        """Template of one worker, with the proof that it was started by who has the key."""
        token = launch_token(launch_key, job_id=self.job_id, submission=self.submission, slot=slot, spawn=spawn)
        return replace(self, spawn=spawn, launch_token=token)


@dataclass(frozen=True)
class WorkerReport:
    """Returned by a task whose worker left by itself."""

    reason: str
    respawn: bool
    superseded: bool = False
    """A newer submission runs the job."""


def worker_task(template: WorkerTemplate, slot: int) -> Callable[[Iterator[int]], Iterator[WorkerReport]]:
    """The function of a one-partition Spark job. The slot travels in the closure: the partition's number is always 0."""

    def run(_: Iterator[int]) -> Iterator[WorkerReport]:
        yield run_in_task(template, slot)

    return run


def run_in_task(template: WorkerTemplate, slot: int) -> WorkerReport:
    """The worker of a slot, in this Spark task, until it leaves."""
    from pyspark import TaskContext

    context = TaskContext.get()
    spec = WorkerSpec(
        job_id=template.job_id,
        slot=slot,
        submission=template.submission,
        task_attempt=0 if context is None else int(context.taskAttemptId()),
        coordinator_url=template.coordinator_url,
        token=template.token,
        state_directory=template.state_directory,
        plan=template.plan,
        local_directory=local_directory(),
        cancellation_timeout_ms=template.cancellation_timeout_ms,
        advertised_host=template.advertised_host,
        directory_nonce=template.directory_nonce,
        spawn=template.spawn,
        launch_token=template.launch_token,
        authorities=template.authorities,
        stands_by=template.stands_by(slot, is_repeated=context is not None and context.attemptNumber() > 0),
        has_slot=not 0 < template.slots <= slot,
    )
    left = run_worker(spec)
    return WorkerReport(left.reason, left.respawn, left.superseded)


def local_directory() -> str:
    """I/O. Local disk of this executor: Spark's own, deleted by Spark when the executor ends, else the system's. Raises OSError."""
    folders = [folder for folder in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if folder]
    return os.path.join(folders[0], ROOT_NAME) if folders else root_of_user(tempfile.gettempdir(), ROOT_NAME)


log = logging.getLogger("holdfast.spark")

Ended = Callable[[WorkerEnd, str], None]


class SparkStoppedError(HoldfastError):
    """The SparkContext, or the session of Spark Connect, has ended: no worker can be started any more."""


class WorkerBackend(Protocol):
    """Place where workers run: Spark's classic API, or anything else that starts one process per slot."""

    def start(self, slot: int, spawn: int, ended: Ended) -> None:
        """Start a worker; `ended` is called once, from any thread. Raises SparkStoppedError; any other error may pass, and the
        worker was not started."""

    def cancel(self, slot: int, spawn: int) -> None: ...


class RddBackend:
    """Runs each worker as a task of an RDD job of its own, submitted from its own thread with its own job group."""

    def __init__(
        self,
        context: SparkContext,
        template: WorkerTemplate,
        job_name: str,
        task: Callable[[WorkerTemplate, int], Callable[[Iterator[int]], Iterator[WorkerReport]]] = worker_task,
        *,
        launch_key: str = "",
    ) -> None:
        """`launch_key`: key of the submission; it never leaves the driver, workers get their own proofs."""
        self._launch_key = launch_key
        self._context = context
        self._task = task
        self._template = template
        self._job_name = job_name

    def start(self, slot: int, spawn: int, ended: Ended) -> None:
        from pyspark import InheritableThread

        self._check_alive()
        template = self._launched(slot, spawn)

        def run() -> None:
            try:
                self._context.setJobGroup(self._group(slot, spawn), f"{self._job_name}: worker {slot}", interruptOnCancel=True)
                mark_worker(self._context)
                reports = collect(self._context.parallelize([slot], 1).mapPartitions(self._task(template, slot)))
            except BaseException as error:
                ended(*why(error))
            else:
                ended(*outcome_of(reports[0]))

        try:
            InheritableThread(target=run, name=f"holdfast-worker-{slot}-{spawn}", daemon=True).start()
        except Exception:
            self._check_alive()  # such a thread asks Spark as it starts
            raise

    def _check_alive(self) -> None:
        if has_stopped(self._context):
            raise SparkStoppedError("the SparkContext has ended")

    def _launched(self, slot: int, spawn: int) -> WorkerTemplate:
        """Template of one worker, with the proof that it was started here."""
        return self._template.launched(self._launch_key, slot, spawn)

    def cancel(self, slot: int, spawn: int) -> None:
        self._context.cancelJobGroup(self._group(slot, spawn))

    def _group(self, slot: int, spawn: int) -> str:
        return f"holdfast-{self._template.job_id}-{self._template.submission}-{slot}-{spawn}"


def has_stopped(context: SparkContext) -> bool:
    """Whether no job can be started on a context any more. A call that fails says nothing of that: connections to Spark are lost
    for a moment, as by Ctrl-C (interrupts.py)."""
    from py4j.protocol import Py4JError

    known = context._jsc
    if known is None:
        return True
    process = getattr(context._gateway, "proc", None)  # Spark's, where this program started it
    if process is not None and process.poll() is not None:
        return True
    try:
        return bool(known.sc().isStopped())
    except Py4JError:
        return False


def outcome_of(report: WorkerReport) -> tuple[WorkerEnd, str]:
    """End of a worker that left by itself, and why."""
    return derive_end(respawn=report.respawn, superseded=report.superseded), report.reason


def why(error: BaseException) -> tuple[WorkerEnd, str]:
    """Distinguish a task that raised in Python from one whose process or executor was lost: only Spark's text says which."""
    text = str(error)
    if "Traceback (most recent call last)" in text:
        lines = [line for line in text.splitlines() if line and not line.startswith((" ", "\t"))]
        last = next((line for line in reversed(lines) if "Error" in line and ": " in line and "org.apache" not in line), lines[-1])
        return WorkerEnd.RAISED, last
    cause = next((line.strip() for line in text.splitlines() if "Caused by" in line or "exited unexpectedly" in line), "")
    return WorkerEnd.DIED, cause or (text.splitlines()[0] if text else type(error).__name__)


class SlotRunner:
    """Owner thread of one SlotSupervisor."""

    def __init__(self, supervisor: SlotSupervisor, backend: WorkerBackend, gave_up: Callable[[int, str], None]) -> None:
        self._supervisor = supervisor
        self._backend = backend
        self._gave_up = gave_up
        self._inbox: queue.Queue[Event] = queue.Queue()
        self.ended = threading.Event()
        """Set once no worker runs or will run."""
        self.abandoned: tuple[int, ...] = ()
        self._thread = threading.Thread(target=self._run, name="holdfast-slots", daemon=True)

    def start(self) -> None:
        self.post(Launch())
        self._thread.start()

    def post(self, event: Event) -> None:
        """Post an event to the supervisor; from any thread."""
        self._inbox.put(event)

    @property
    def respawns(self) -> int:
        return self._supervisor.respawns

    @property
    def last_errors(self) -> dict[int, str]:
        return self._supervisor.last_errors

    def _run(self) -> None:
        while not self.ended.is_set():
            event = self._next()
            for action in self._supervisor.handle(event, now_ms=_now_ms()):
                self._perform(action)

    def _next(self) -> Event:
        deadline = self._supervisor.next_deadline_ms()
        try:
            return self._inbox.get(timeout=None if deadline is None else max(0.0, (deadline - _now_ms()) / 1000))
        except queue.Empty:
            return DeadlineReached()

    def _perform(self, action: Action) -> None:
        match action:
            case SpawnWorker(slot, spawn):
                self._spawn(slot, spawn)
            case CancelWorker(slot, spawn, process):
                self._cancel(slot, spawn, process)
            case GiveUp(slot, error):
                self._gave_up(slot, error)
            case AllEnded(abandoned):
                self.abandoned = abandoned
                self.ended.set()
            case _:
                assert_never(action)

    def _cancel(self, slot: int, spawn: int, process: SeenWorker | None) -> None:
        """Cancel the task first, or Spark would run it again when its process dies. Spark kills the process too, up to 5 s
        later."""
        try:
            self._backend.cancel(slot, spawn)
        except Exception:
            log.debug("worker %d can't be cancelled: Spark is gone", slot, exc_info=True)
        try:
            if process is not None and kill_process(process.pid, process.fingerprint):
                log.info("worker %d (pid %d) was killed: %s", slot, process.pid, self._supervisor.last_errors.get(slot, ""))
        except Exception:
            log.warning("worker %d can't be killed from here", slot, exc_info=True)  # all slots wait for this thread

    def _spawn(self, slot: int, spawn: int) -> None:
        if spawn > 1:
            log.info("worker %d is started again: %s", slot, self._supervisor.last_errors.get(slot, "it was asked to"))
        try:
            self._backend.start(slot, spawn, lambda end, error: self.post(WorkerEnded(slot, spawn, end, error)))
        except SparkStoppedError as error:
            log.warning("worker %d can't be started, Spark has stopped: %s", slot, error)
            self.post(StopRequested())  # first: a worker that died is started again at once
            self.post(WorkerEnded(slot, spawn, WorkerEnd.DIED, str(error)))
        except Exception as error:
            # Such as at the process's limit of threads: the others run on, and this one is tried again like one that died.
            log.warning("worker %d can't be started now: %s: %s", slot, type(error).__name__, error)
            self.post(WorkerEnded(slot, spawn, WorkerEnd.DIED, f"{type(error).__name__}: {error}"))


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
