"""A job submitted from this driver: watches it, keeps its workers going, shows its progress, and lets go of all at the end."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from barriers.jobgraph import JobGraph
from operators.launcher import CoordinatorClient, Progress
from operators.leaving import describe_attached, describe_interrupted, describe_left
from operators.progress import (
    Look,
    ProgressLine,
    derive_progress,
    describe_restart,
    format_progress,
    registered_slots,
    seen_workers,
)
from operators.spark_slots import SlotRunner
from operators.standing import Standing, judge_look
from operators.supervisor import JobEnded, Question, StopRequested, WorkersSeen
from statebackends.errors import FencedError, HoldfastError, JobFailedError

log = logging.getLogger("holdfast.spark")

POLL_S = 0.25
RATE_LOOKS = 12
"""Looks over which rates are taken: some seconds, since workers report their counters every other second."""

WORKERS_LEAVE_S = 17.0
"""A little more than the supervisor's own limits for a cooperative stop and a cancellation together."""


class SparkJobHandle:
    """Implements JobHandle. A thread polls the coordinator; a coordinator that is away for a while is waited for."""

    def __init__(
        self,
        job_id: str,
        client: CoordinatorClient,
        graph: JobGraph,
        slots: int,
        *,
        submission: int,
        progress: bool,
        release: Callable[[], None],
    ) -> None:
        self.job_id = job_id
        self.client = client
        self._graph = graph
        self._slots = slots
        self._submission = submission
        self._release = release
        """Called once, when the handle lets go: an embedded coordinator ends here."""
        self._shows_progress = progress
        self._line = ProgressLine(enabled=progress)
        self._runner: SlotRunner | None = None
        self._progress = Progress("CREATED", 0, 0, 0.0, 0.0, None, None, 0)
        self._registered: frozenset[int] = frozenset()
        self._failure: str | None = None
        self._newer = 0
        """The submission that took the job over from ours; 0: none."""
        self._looks: deque[Look] = deque(maxlen=RATE_LOOKS)
        self._question = Question()
        self._terminal = threading.Event()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._is_released = False
        self._is_left = False
        self._is_scoped = False
        """Somebody is in a `with` block of it."""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="holdfast-job", daemon=True)

    def start(self, runner: SlotRunner) -> None:
        self._runner = runner
        runner.start()
        self._thread.start()

    # ------------------------------------------------------------------------------------------------------- JobHandle

    def state(self) -> str:
        return self._progress.state if self._terminal.is_set() else self.client.job_state(self.job_id)

    def progress(self) -> Progress:
        return self._progress

    @property
    def slots_held(self) -> int:
        """Spark slots that this job's workers occupy."""
        return 0 if self._runner is None or self._runner.ended.is_set() else self._slots

    @property
    def is_running(self) -> bool:
        """Not over, and not left by this driver."""
        return self.slots_held > 0 and not self._terminal.is_set() and not self._is_left

    def attach(self) -> None:
        """Somebody executed the job once more."""
        self.say(describe_attached(self._graph.name, self._progress))

    def say(self, line: str) -> None:
        """For whoever watches the job."""
        self._line.say(line)

    @property
    def respawns(self) -> int:
        """Workers that were started again."""
        return self._runner.respawns if self._runner is not None else 0

    def __enter__(self) -> SparkJobHandle:
        self._is_scoped = True
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """As `close`: a job that still runs is left to the coordinator, without workers."""
        self.close()

    def wait(self, timeout_s: float | None = None) -> str:
        """Block until a terminal state and all workers have left. Raises JobFailedError, TimeoutError, and FencedError when a newer
        submission took the job over: it goes on, and belongs to another driver.

        Ctrl-C ends the wait, not the job: a line on stderr says so. The coordinator can be asked about the job until `close`."""
        try:
            ended = self._terminal.wait(timeout_s)
        except KeyboardInterrupt as interrupt:
            self._say_interrupted()
            # The user's own line stands above it, not those of ours.
            raise interrupt.with_traceback(None) from None
        if not ended:
            raise TimeoutError(f"job {self.job_id} is {self._progress.state} after {timeout_s} s; it goes on")
        state = self._progress.state
        self._let_workers_go()
        self._raise_unless_ended_well()
        return state

    def _say_interrupted(self) -> None:
        """Whoever pressed Ctrl-C is there to read it, also if the job's progress is not shown."""
        is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # spark-submit started Spark, and then this program
        text = describe_interrupted(self._graph.name, is_scoped=self._is_scoped, is_submitted=is_submitted)
        (self._line if self._shows_progress else ProgressLine(enabled=True)).say(text)

    def wait_for_workers(self, timeout_s: float) -> None:
        """Block until every slot's worker is registered; says who is there. Raises TimeoutError, JobFailedError, FencedError."""
        deadline = time.monotonic() + timeout_s
        said: frozenset[int] = frozenset()
        with self._changed:
            while len(self._registered) < self._slots and not self._terminal.is_set():
                if self._registered != said:
                    said = self._registered
                    self._line.say(self._started(said))
                if not self._changed.wait(max(0.0, min(1.0, deadline - time.monotonic()))) and time.monotonic() >= deadline:
                    started = self._started(self._registered)
                    raise TimeoutError(f"job {self.job_id}: {started} within {timeout_s:.0f} s{self._errors()}")
        if self._terminal.is_set():
            self._raise_unless_ended_well()

    def _raise_unless_ended_well(self) -> None:
        if self._newer:
            message = f"submission {self._newer} took job {self.job_id} over from submission {self._submission}"
            raise FencedError(message, job=self.job_id, held=self._submission, newer=self._newer)
        if self._progress.state == "FAILED":
            cause = self._failure or "see its exceptions"
            raise JobFailedError(f"job {self.job_id} failed: {cause}", job_id=self.job_id, cause=self._failure)

    def _started(self, slots: frozenset[int]) -> str:
        indices = ", ".join(str(slot) for slot in sorted(slots)) or "none"
        return f"{len(slots)} of {self._slots} workers started, indices {indices}"

    def _errors(self) -> str:
        errors = self._runner.last_errors if self._runner is not None else {}
        return "".join(f"; worker {slot}: {error}" for slot, error in sorted(errors.items()))

    def savepoint(self, target: str | None = None, *, format_type: str = "CANONICAL") -> str:
        return self.client.savepoint(self.job_id, target, format_type=format_type)

    def stop(self, target: str | None = None, *, drain: bool = False, format_type: str = "CANONICAL") -> str:
        location = self.client.stop(self.job_id, target, drain=drain, format_type=format_type)
        self._terminal.wait()
        self._let_workers_go()
        return location

    def cancel(self) -> None:
        self.client.cancel(self.job_id)
        self._terminal.wait()
        self._let_workers_go()

    def close(self) -> None:
        """An interrupt ends the wait for the workers, which were told to go; whoever calls again waits again."""
        with self._lock:
            is_left, self._is_left = self._is_left, True
        if not is_left and self._runner is not None and not self._terminal.is_set():
            self._line.say(describe_left(self._graph.name, self._progress))
        self._let_workers_go()
        with self._lock:
            is_released, self._is_released = self._is_released, True
        if not is_released:
            self._release()

    def _let_workers_go(self) -> None:
        """End workers, threads and display; the coordinator can still be asked. Idempotent."""
        if self._runner is not None:
            self._runner.post(JobEnded() if self._terminal.is_set() else StopRequested())
            self._runner.ended.wait(WORKERS_LEAVE_S)
            if self._runner.abandoned:
                log.warning("workers %s did not leave; they end with Spark", self._runner.abandoned)
        self._closing.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        self._line.close()

    # ---------------------------------------------------------------------------------------------------------- thread

    def give_up(self, slot: int, error: str) -> None:
        """The workers can't start: its waiters learn why. The coordinator keeps the job, and all of its state, for a driver
        whose workers do."""
        self._failure = f"worker {slot} can't start: {error}"
        self._end("FAILED")

    def _watch(self) -> None:
        while not self._closing.is_set() and not self._terminal.is_set():
            try:
                self._poll()
            except HoldfastError as error:
                # The coordinator may be restarting: the workers go on without it, and so do we.
                log.debug("job %s: %s", self.job_id, error)
            except Exception:
                # Whoever waits for the job waits for this thread.
                log.warning("job %s can't be watched just now", self.job_id, exc_info=True)
            self._closing.wait(POLL_S)

    def _poll(self) -> None:
        self._question.ask(_now_ms())
        workers = self.client.workers(self.job_id)
        number, state = int(workers["submission"]), str(workers["state"])
        standing = judge_look(ours=self._submission, seen=number, state=state)
        if standing is Standing.STALE:
            log.debug("job %s: who answers knows only submission %d, not our %d", self.job_id, number, self._submission)
            return
        if standing is Standing.SUPERSEDED:
            self._newer = number
            self._end("SUSPENDED")
            return
        assert self._runner is not None
        # First of all: somebody may have to be replaced.
        self._runner.post(WorkersSeen(seen_workers(workers), self._question.answered(_now_ms())))
        look = Look(_now_ms(), self.client.job(self.job_id), self.client.checkpoints(self.job_id), workers)
        before = self._looks[-1] if self._looks else None
        if before is not None and before.workers.get("attempt") != workers.get("attempt"):
            self._looks.clear()  # counters begin again with each attempt
        progress = derive_progress(self._graph, look, self._looks[0] if self._looks else None)
        self._looks.append(look)
        registered = registered_slots(workers)
        self._failure = workers.get("failure") or self._failure
        with self._changed:
            self._registered = registered
            self._progress = progress
            self._changed.notify_all()
        name = str(look.job.get("name", self.job_id))
        restart = describe_restart(name, look, before)
        if restart is not None:
            self._line.say(restart)
        self._line.show(format_progress(name, progress, len(registered), self._slots), progress.state)
        if standing is Standing.ENDED:
            self._end(state)

    def _end(self, state: str) -> None:
        with self._changed:
            self._progress = Progress(
                state,
                self._progress.records_in,
                self._progress.records_out,
                0.0,
                0.0,
                self._progress.last_checkpoint_id,
                self._progress.last_checkpoint_duration_ms,
                self._progress.restarts,
            )
            self._terminal.set()
            self._changed.notify_all()
        assert self._runner is not None
        self._runner.post(JobEnded())


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
