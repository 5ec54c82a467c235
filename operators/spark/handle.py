"""SHELL: handle of a job submitted from this driver. It watches the job, keeps its workers running, shows progress, and releases
everything at the end.

supervisor.py decides about workers, the coordinator about everything else. `submission_status` is pure, and the same in production
and in the simulator."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from enum import StrEnum
from typing import Any, TypeVar

from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.messages import FailureReason, printable
from holdfast.operators.datastream.launcher import CoordinatorClient, Progress
from holdfast.operators.sources.stream_query import StreamQuery
from holdfast.operators.spark.messages import (
    describe_attached,
    describe_ending,
    describe_interrupted,
    describe_left,
    frames_of_failure,
    restart_hint,
    with_frames,
)
from holdfast.operators.spark.progress import (
    CompletedCheckpoints,
    ObservedJob,
    ProgressLine,
    derive_progress,
    describe_late,
    describe_restart,
    describe_restored,
    describe_skipped,
    format_counters,
    format_progress,
    format_totals,
    registered_slots,
    seen_workers,
    worker_nonces,
)
from holdfast.operators.spark.slots import SlotRunner
from holdfast.operators.spark.supervisor import JobEnded, Question, StandbysReleased, StopRequested, WorkersSeen
from holdfast.statebackends.errors import (
    AuthenticationError,
    CheckpointFailedError,
    FencedError,
    HoldfastError,
    InvalidConfigError,
    JobFailedError,
    NotFoundError,
)
from holdfast.statebackends.state_processor.contents import Location, absolute_location

TERMINAL_STATES = frozenset({"FINISHED", "CANCELED", "FAILED"})
ENDING_STATES = frozenset({"CANCELLING", "FAILING"})
"""States followed only by a terminal one."""


class SubmissionStatus(StrEnum):
    """Status of a job for the driver of one submission of it."""

    OURS = "ours"
    """Our submission runs."""
    ENDED = "ended"
    """Our submission is in a terminal state."""
    SUPERSEDED = "superseded"
    """A newer submission took the job over: it is another driver's."""
    STALE = "stale"
    """The coordinator that answered knows only an older submission: it does not lead the job, or no longer. Its answer has no facts
    about ours."""


def submission_status(*, ours: int, seen: int, state: str) -> SubmissionStatus:
    """Compare the driver's submission number `ours` with the one `seen` at the coordinator, which is in `state`."""
    if seen != ours:
        return SubmissionStatus.SUPERSEDED if seen > ours else SubmissionStatus.STALE
    return SubmissionStatus.ENDED if state in TERMINAL_STATES else SubmissionStatus.OURS


T = TypeVar("T")

log = logging.getLogger("holdfast.spark")
COORDINATOR_LOGGER = "holdfast.coordinator.jobs"
"""Logger of a coordinator inside of this process, for events of its jobs."""

POLL_S = 0.25
RATE_POLLS = 12
"""Polls over which rates are taken: some seconds, since workers report their counters every other second."""

SIGNAL_SEEN_S = 0.5
"""Longest time until Ctrl-C takes effect."""

WORKERS_LEAVE_S = 17.0
"""A little more than the supervisor's own limits for a cooperative stop and a cancellation together."""


REFUSALS = (CheckpointFailedError, InvalidConfigError, NotFoundError, FencedError, AuthenticationError)
"""Errors by which the coordinator refuses to end a job. After any other error the job may still end."""


class _ReportedByDriver(logging.Filter):
    """Keeps what the driver itself reports of one job out of Python's last resort, which writes records without a handler to
    stderr: the job's end, raised by `wait`, and with `restarts` each failure, shown in the job's own lines. Handlers get every
    record."""

    def __init__(self, job_id: str, *, restarts: bool) -> None:
        super().__init__()
        self._job_id = job_id
        self._restarts = restarts

    def filter(self, record: logging.LogRecord) -> bool:
        fields = getattr(record, "fields", {})
        reported = fields.get("job_id") == self._job_id and self._is_reported(fields)
        return not reported or logging.getLogger(record.name).hasHandlers()

    def _is_reported(self, fields: Mapping[str, Any]) -> bool:
        match fields.get("event"):
            case "state_changed":
                return True
            case "attempt_failed":
                return self._restarts or fields.get("restart_in_ms") is None
            case "checkpoint_failed":
                return bool(fields.get("reason") == FailureReason.JOB_FAILOVER)
        return False


class _Ending(Future[T]):
    """Outcome of one `stop` or `cancel`."""

    forgotten_at = math.inf
    """Time at which an unknown outcome must have taken effect, on the monotonic clock in seconds."""

    @property
    def may_come(self) -> bool:
        """Whether this call may still end the job: false if it was never sent, or was refused."""
        if self.cancelled() or time.monotonic() >= self.forgotten_at:
            return False
        return not self.done() or not isinstance(self.exception(), REFUSALS)


class SparkJobHandle:
    """Implements JobHandle. A thread polls the coordinator and tolerates its absence."""

    def __init__(
        self,
        job_id: str,
        client: CoordinatorClient,
        graph: JobGraph,
        slots: int,
        *,
        submission: int,
        standbys: int = 0,
        progress: bool,
        release: Callable[[], None],
    ) -> None:
        self.job_id = job_id
        self.client = client
        self._graph = graph
        self._slots = slots
        self._standbys = standbys
        self._submission = submission
        self._release = release
        """Called once, when the handle is closed: ends an embedded coordinator."""
        self._shows_progress = progress
        self._line = ProgressLine(enabled=progress)
        self._unsilence = _silence_last_resort(self, job_id, restarts=progress)
        self._runner: SlotRunner | None = None
        self._inputs: tuple[StreamQuery, ...] = ()
        self._progress = Progress("CREATED", 0, 0, 0.0, 0.0, None, None, 0)
        self._registered: frozenset[int] = frozenset()
        self._nonces: frozenset[str] = frozenset()
        self._failure: str | None = None
        self._newer = 0
        """Submission that took the job over from ours; 0: none."""
        self._hinted = False
        self._polls: deque[ObservedJob] = deque(maxlen=RATE_POLLS)
        self._completed = CompletedCheckpoints()
        self._question = Question()
        self._endings: tuple[_Ending[Any], ...] = ()
        self._terminal = threading.Event()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._is_released = False
        self._is_left = False
        self._is_scoped = False
        """Whether the program is in a `with` block of this handle."""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="holdfast-job", daemon=True)

    def start(self, runner: SlotRunner) -> None:
        self._runner = runner
        runner.start()
        self._thread.start()
        for each in self._inputs:
            each.start()

    @property
    def inputs(self) -> tuple[StreamQuery, ...]:
        """Queries that fill inputs of the job."""
        return self._inputs

    def add_input(self, query: StreamQuery) -> None:
        """A query that fills an input of the job, as long as this driver runs it; before `start`."""
        self._inputs = (*self._inputs, query)

    # ------------------------------------------------------------------------------------------------------- JobHandle

    def state(self) -> str:
        return self._progress.state if self._terminal.is_set() else self.client.job_state(self.job_id)

    def progress(self) -> Progress:
        return self._progress

    @property
    def slots_held(self) -> int:
        """Spark slots that this job's workers occupy."""
        return 0 if self._runner is None or self._runner.ended.is_set() else self._slots + self._standbys

    @property
    def standbys_held(self) -> int:
        """Of these, those of workers that stand by."""
        return self._standbys if self.slots_held else 0

    def release_standbys(self) -> None:
        """Another job of this driver needs their Spark slots, which are free within moments."""
        if self._standbys and self._runner is not None:
            self._runner.post(StandbysReleased())
            self._standbys = 0
            log.info("job %s: its workers that stood by leave their Spark slots to another job", self.job_id)

    @property
    def is_running(self) -> bool:
        """Whether the job is neither over nor left by this driver."""
        return self.slots_held > 0 and not self._terminal.is_set() and not self._is_left

    def attach(self) -> None:
        """Report that the program executed the job once more and got this handle."""
        self.say(describe_attached(self._graph.name, self._progress))

    def await_ending(self) -> bool:
        """Whether the job is over, another driver's, or left, so that it can't be attached to. Asks the coordinator, whose answer
        is newer than the last poll; waits for a job that is ending, as long as `stop` does."""
        seen = self.client.workers(self.job_id)
        state = str(seen["state"])
        status = submission_status(ours=self._submission, seen=int(seen["submission"]), state=state)
        is_over = status in (SubmissionStatus.ENDED, SubmissionStatus.SUPERSEDED)
        will_end = is_over or (status is SubmissionStatus.OURS and state in ENDING_STATES)
        if not (will_end or self._is_ending):
            return False
        if not is_over:
            self.say(describe_ending(self._graph.name))
        while not self._terminal.wait(SIGNAL_SEEN_S):
            if self._is_left:
                break  # closed meanwhile: the handle sees no further end
            if not (will_end or self._is_ending):
                return False  # the call that would have ended it was refused
        self._let_workers_go()
        return True

    @property
    def _is_ending(self) -> bool:
        """Whether `stop` or `cancel` was called, even if interrupted, and not refused."""
        return any(ending.may_come for ending in self._endings)

    @property
    def worker_nonces(self) -> frozenset[str]:
        """Nonces of the processes that were the job's workers at the last poll; workers of other jobs have different ones."""
        return self._nonces

    def say(self, line: str) -> None:
        """Write a line to the progress display."""
        self._line.say(line)

    @property
    def respawns(self) -> int:
        """Number of workers started again."""
        return self._runner.respawns if self._runner is not None else 0

    def __repr__(self) -> str:
        """Job as last polled, at most a quarter of a second ago while it runs; sends no request."""
        seen = self._progress
        checkpoint = "no checkpoint yet" if seen.last_checkpoint_id is None else f"checkpoint {seen.last_checkpoint_id}"
        failure = printable((self._failure or "").strip().partition("\n")[0])
        cause = f"; {failure}" if failure and seen.state == "FAILED" else ""
        return (
            f"<Job {self._graph.name!r} ({self.job_id}) {seen.state}: {seen.records_in:,} rows in, {seen.records_out:,} out; "
            f"{checkpoint}; restarts: {seen.restarts}{cause}>"
        )

    def __enter__(self) -> SparkJobHandle:
        self._is_scoped = True
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """As `close`: a job that still runs is left to the coordinator, without workers."""
        self.close()

    def wait(self, timeout_s: float | None = None) -> str:
        """Block until a terminal state and all workers have left. Raises JobFailedError, TimeoutError, and FencedError when a newer
        submission took the job over: it goes on, and belongs to another driver.

        Ctrl-C ends the wait, not the job, and a line on stderr says so. The coordinator can be asked about the job until
        `close`."""
        try:
            ended = self._await_end(timeout_s)
        except KeyboardInterrupt as interrupt:
            self._say_interrupted()
            # The traceback then shows the user's own line, not ours.
            raise interrupt.with_traceback(None) from None
        if not ended:
            raise TimeoutError(f"job {self.job_id} is {self._progress.state} after {timeout_s} s; it goes on")
        state = self._progress.state
        self._let_workers_go()
        error = self._bad_end()
        if error is not None:
            raise error  # raised here, so that the traceback shows the user's line and one of ours
        return state

    def _await_end(self, timeout_s: float | None = None) -> bool:
        """Whether the job has ended. Waits in slices: a signal just before a wait takes effect only when the thread wakes."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._terminal.wait(max(0.0, min(SIGNAL_SEEN_S, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return self._terminal.is_set()
        return True

    def _say_interrupted(self) -> None:
        """Print what Ctrl-C did, even if progress is not shown: the person who pressed it reads stderr."""
        is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # spark-submit started Spark, and then this program
        text = describe_interrupted(self._graph.name, is_scoped=self._is_scoped, is_submitted=is_submitted)
        (self._line if self._shows_progress else ProgressLine(enabled=True)).say(text)

    def wait_for_workers(self, timeout_s: float) -> None:
        """Block until every slot's worker is registered. Raises TimeoutError naming the workers that are, JobFailedError,
        FencedError."""
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
        error = self._bad_end() if self._terminal.is_set() else None
        if error is not None:
            raise error

    def _bad_end(self) -> HoldfastError | None:
        """Error of a job that did not end well, else None."""
        if self._newer:
            message = f"submission {self._newer} took job {self.job_id} over from submission {self._submission}"
            return FencedError(message, job=self.job_id, held=self._submission, newer=self._newer)
        if self._progress.state != "FAILED":
            return None
        cause = with_frames(self._failure or "see its exceptions", self._frames(self._failure or ""))
        text = printable(cause, keep="\n\t")
        return JobFailedError(f"job {self.job_id} failed: {text}", job_id=self.job_id, cause=self._failure)

    def _frames(self, error: str) -> str:
        """The user's frames of a failure, if the coordinator still answers."""
        try:
            return frames_of_failure(error, self.client.exceptions(self.job_id)) if error else ""
        except HoldfastError as failure:
            log.debug("job %s: %s", self.job_id, failure)
            return ""

    def _started(self, slots: frozenset[int]) -> str:
        indices = ", ".join(str(slot) for slot in sorted(slots)) or "none"
        return f"{len(slots)} of {self._slots} workers started, indices {indices}"

    def _errors(self) -> str:
        errors = self._runner.last_errors if self._runner is not None else {}
        return "".join(f"; worker {slot}: {error}" for slot, error in sorted(errors.items()))

    def savepoint(self, target: Location | None = None, *, format_type: str = "CANONICAL") -> str:
        return self.client.savepoint(self.job_id, _seen_from_here(target), format_type=format_type)

    def stop(self, target: Location | None = None, *, drain: bool = False, format_type: str = "CANONICAL") -> str:
        folder = _seen_from_here(target)
        location = self._end_by(lambda: self.client.stop(self.job_id, folder, drain=drain, format_type=format_type))
        self._await_end()
        self._let_workers_go()
        return location

    def cancel(self) -> None:
        self._end_by(lambda: self.client.cancel(self.job_id))
        self._await_end()
        self._let_workers_go()

    def _end_by(self, ask: Callable[[], T]) -> T:
        """Ask the coordinator to end the job and return its answer. A thread asks: an interrupt ends only the wait for the answer,
        and the next execution of the job must know whether it ends."""
        outcome: _Ending[T] = _Ending()

        def run() -> None:
            if not outcome.set_running_or_notify_cancel():
                return
            try:
                outcome.set_result(ask())
            except BaseException as error:
                outcome.forgotten_at = time.monotonic() + self._graph.config.checkpoint_timeout_ms / 1_000
                outcome.set_exception(error)

        try:
            with self._lock:
                self._endings = (*(each for each in self._endings if each.may_come), outcome)
            threading.Thread(target=run, name="holdfast-end", daemon=True).start()
        except BaseException:
            outcome.cancel()  # without effect once the thread has begun to ask
            raise
        while not wait([outcome], SIGNAL_SEEN_S).done:
            pass
        return outcome.result()

    def close(self) -> None:
        """Release the coordinator and let the workers go. An interrupt ends the wait for the workers, which were asked to leave;
        another call waits again.

        Of a job that is not over the coordinator is told first, and goes first if it is ours alone: it would take the first worker
        that leaves for a failure, and one that may not restart would have failed for good."""
        is_over = self._terminal.is_set()
        with self._lock:
            is_left, self._is_left = self._is_left, True
        if not is_left and self._runner is not None and not is_over:
            self._line.say(describe_left(self._graph.name, self._progress))
        try:
            if not is_over:
                self._end_watch()
                if not is_left:
                    self._tell_of_leaving()
                self._let_coordinator_go()
        finally:
            self._let_workers_go()
        self._let_coordinator_go()

    def _tell_of_leaving(self) -> None:
        """A coordinator that can't be told takes the workers for lost, as it does when a driver dies."""
        try:
            self.client.leave(self.job_id, self._submission)
        except HoldfastError as error:
            log.debug("job %s: %s", self.job_id, error)

    def _let_coordinator_go(self) -> None:
        """Idempotent: a release that was interrupted or failed is called again, and two threads that close the job may both call
        it. The launcher's ends a coordinator once."""
        if not self._is_released:
            self._release()
            self._is_released = True

    def _let_workers_go(self) -> None:
        """End queries, workers, threads and display; the coordinator can still be asked. Idempotent."""
        for each in self._inputs:
            each.stop()
        if self._runner is not None:
            self._runner.post(JobEnded() if self._terminal.is_set() else StopRequested())
            self._runner.ended.wait(WORKERS_LEAVE_S)
            if self._runner.abandoned:
                log.warning("workers %s did not leave; they end with Spark", self._runner.abandoned)
        self._end_watch()
        self._unsilence()
        self._line.close()

    def _end_watch(self) -> None:
        self._closing.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    # ---------------------------------------------------------------------------------------------------------- thread

    def give_up(self, slot: int, error: str) -> None:
        """Fail the waiters, as the workers can't start. The coordinator keeps the job and all of its state for a driver whose
        workers can."""
        self.fail(f"worker {slot} can't start: {error}")

    def fail(self, error: str) -> None:
        """Fail the waiters for what the driver can't do. The coordinator keeps the job and all of its state."""
        self._failure = error
        self._end("FAILED")

    def _watch(self) -> None:
        while not self._closing.is_set() and not self._terminal.is_set():
            try:
                self._poll()
            except HoldfastError as error:
                # The coordinator may be restarting: workers and driver go on without it.
                log.debug("job %s: %s", self.job_id, error)
            except Exception:
                # An error must not end this thread: `wait` waits for it.
                log.warning("job %s can't be watched just now", self.job_id, exc_info=True)
            self._closing.wait(POLL_S)

    def _poll(self) -> None:
        self._question.ask(_now_ms())
        workers = self.client.workers(self.job_id)
        number, state = int(workers["submission"]), str(workers["state"])
        status = submission_status(ours=self._submission, seen=number, state=state)
        if status is SubmissionStatus.STALE:
            log.debug("job %s: the answer knows only submission %d, not our %d", self.job_id, number, self._submission)
            return
        if status is SubmissionStatus.SUPERSEDED:
            self._newer = number
            self._end("SUSPENDED")
            return
        assert self._runner is not None
        # Posted first: a worker may have to be replaced.
        self._runner.post(WorkersSeen(seen_workers(workers), self._question.answered(_now_ms())))
        observed = ObservedJob(_now_ms(), self.client.job(self.job_id), self.client.checkpoints(self.job_id), workers)
        before = self._polls[-1] if self._polls else None
        progress = self._note(observed, before)
        name = str(observed.job.get("name", self.job_id))
        self._say_changes(name, observed, before)
        if status is SubmissionStatus.ENDED:
            try:
                self._say_totals(name, progress)
            finally:
                self._end(state)  # `wait` waits for this
        else:
            self._line.show(format_progress(name, progress, len(self._registered), self._slots), progress.state)

    def _note(self, observed: ObservedJob, before: ObservedJob | None) -> Progress:
        """Update what the handle knows of the job."""
        workers = observed.workers
        if before is not None and before.workers.get("attempt") != workers.get("attempt"):
            self._polls.clear()  # totals go back to the cut that the attempt began with
        counts = observed.checkpoints.get("counts") or {}
        self._completed.note(int(workers.get("epoch") or 0), int(counts.get("completed") or 0))
        progress = derive_progress(observed, self._polls[0] if self._polls else None, checkpoints=self._completed.count)
        self._polls.append(observed)
        self._failure = workers.get("failure") or self._failure
        with self._changed:
            self._registered = registered_slots(workers)
            self._nonces = worker_nonces(workers)
            self._progress = progress
            self._changed.notify_all()
        return progress

    def _say_changes(self, name: str, observed: ObservedJob, before: ObservedJob | None) -> None:
        restart = describe_restart(name, observed, before)
        if restart is not None:
            error = str(observed.workers.get("failure") or observed.workers.get("last_failure") or "")
            self._line.say(self._restart_text(restart, error))
        restored = describe_restored(name, observed, before)
        if restored is not None:
            self._line.say(restored)

    def _say_totals(self, name: str, progress: Progress) -> None:
        """Show the totals at the end; warn about dropped rows even if progress is not shown."""
        self._line.finish(format_totals(name, progress))
        counters = format_counters(name, progress)
        if counters is not None:
            self._line.say(counters)
        for warning in (*describe_late(name, progress), *describe_skipped(name, progress)):
            log.warning("%s", warning)

    def _restart_text(self, restart: str, error: str) -> str:
        """Text of a restart with the user's frames, and, once, with the settings that change restarts."""
        text = with_frames(restart, self._frames(error))
        hint = "" if self._hinted else restart_hint(error, self._graph.config.restart)
        self._hinted = self._hinted or bool(hint)
        return f"{text}\n{hint}" if hint else text

    def _end(self, state: str) -> None:
        with self._changed:
            self._progress = replace(self._progress, state=state, records_in_per_second=0.0, records_out_per_second=0.0)
            self._terminal.set()
            self._changed.notify_all()
        assert self._runner is not None
        self._runner.post(JobEnded())


def _silence_last_resort(handle: SparkJobHandle, job_id: str, *, restarts: bool) -> Callable[[], object]:
    """Install the filter; it is removed by calling the result, or when the handle is collected."""
    logger, reported = logging.getLogger(COORDINATOR_LOGGER), _ReportedByDriver(job_id, restarts=restarts)
    logger.addFilter(reported)
    return weakref.finalize(handle, logger.removeFilter, reported)


def _seen_from_here(target: Location | None) -> str | None:
    """Resolve a relative path against the driver's working directory, as the coordinator's is a different one. Keeps an empty one,
    which the coordinator refuses."""
    return absolute_location(target) if target else None if target is None else ""


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
