"""A driver's handle over a client that says what a test wants, with workers that are threads' callbacks."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JNetworkError

from holdfast.barriers.jobgraph import JobConfig, JobGraph, JobVertex, OperatorDescription
from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.coordinator.dispatcher import job_log as joblog
from holdfast.coordinator.dispatcher.job_log import JobLog
from holdfast.coordinator.notes import AttemptFailed, CheckpointFailed, Note, StateChanged
from holdfast.operators.spark import handle as spark_handle
from holdfast.operators.spark import slots as spark_slots
from holdfast.operators.spark.handle import COORDINATOR_LOGGER, SparkJobHandle
from holdfast.operators.spark.slots import Ended, SlotRunner
from holdfast.operators.spark.supervisor import CancelWorker, Launch, SeenWorker, SlotSupervisor, WorkerEnd, WorkerEnded
from holdfast.statebackends.errors import (
    CheckpointFailedError,
    FencedError,
    HoldfastError,
    JobFailedError,
    StorageUnavailableError,
)

SOURCE = JobVertex("a", "a", 1, 128, (OperatorDescription("a", "a", "a", "source"),))
GRAPH = JobGraph("job", (SOURCE,), (), JobConfig())
SUBMISSION = 2
NUMBERS = {"records_in": 0, "records_out": 0, "late_dropped": 0, "late_ms_max": 0, "counters": {}}


class Client:
    """One answer per poll; the last one is repeated."""

    url, token = "http://nowhere", None

    def __init__(self, *polls: tuple[str, int, dict[str, Any]]) -> None:
        self.polls = list(polls)
        self.left = threading.Event()
        self.traces = ["Traceback (most recent call last):\n  ours"]
        self.told: list[tuple[str, int]] = []
        """Of drivers that left."""

    def workers(self, job_id: str) -> dict[str, Any]:
        self.now = self.polls.pop(0) if len(self.polls) > 1 else self.polls[0]
        state, _, more = self.now
        if state == "AWAY":
            raise StorageUnavailableError("restarting")
        known = {"workers": [{"slot": 0, "registered": True}], "submission": SUBMISSION, "state": state}
        counted = [{**NUMBERS, "uid": "a", "kind": "source", "records_out": self.now[1]}]
        return {**known, "attempt": 1, "restarts": 0, "operators": counted, **more}

    def leave(self, job_id: str, submission: int) -> None:
        self.told.append((job_id, submission))
        if self.now[0] == "AWAY":
            raise StorageUnavailableError("restarting")

    def job(self, job_id: str) -> dict[str, Any]:
        state, _, _ = self.now
        return {"name": "job", "state": state, "duration": 2_000}

    def checkpoints(self, job_id: str) -> dict[str, Any]:
        return {}

    def exceptions(self, job_id: str) -> dict[str, Any]:
        return {"exceptionHistory": {"entries": [{"stacktrace": trace} for trace in self.traces]}}


class Workers:
    """Backend whose workers leave when the job has ended, or raise at once."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.ended: list[Ended] = []

    def start(self, slot: int, spawn: int, ended: Ended) -> None:
        if self.error:
            ended(WorkerEnd.RAISED, self.error)
        else:
            self.ended.append(ended)

    def cancel(self, slot: int, spawn: int) -> None:
        self.ended[-1](WorkerEnd.DIED, "cancelled")


def started(client: Client, workers: Workers, *, progress: bool = False) -> SparkJobHandle:
    handle = SparkJobHandle(
        "job",
        client,  # type: ignore[arg-type]
        GRAPH,
        1,
        submission=SUBMISSION,
        progress=progress,
        release=lambda: None,
    )
    handle.start(SlotRunner(SlotSupervisor(1), workers, handle.give_up))
    return handle


def test_final_numbers_and_restarts_outlast_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    failed = {"restarts": 1, "attempt": 2, "failure": None, "last_failure": "PeerLostError: slot 0\nmore"}
    client = Client(("RUNNING", 0, {}), ("AWAY", 0, {}), ("RUNNING", 4, failed), ("FINISHED", 9, failed))
    workers = Workers()
    handle = started(client, workers, progress=True)
    assert handle._terminal.wait(10)
    workers.ended[0](WorkerEnd.LEFT, "done")
    assert handle.wait(10) == "FINISHED"
    progress = handle.progress()
    assert (progress.records_in, progress.restarts, progress.records_in_per_second) == (9, 1, 0.0)
    shown = capsys.readouterr().err
    assert "job restart 1: PeerLostError: slot 0\n" in shown
    assert "more" not in shown
    totals = "job FINISHED after 2.0 s: 9 rows in, 0 checkpoints, 1 restart, 0 rows dropped as late"
    assert shown.splitlines()[-1] == totals
    handle.close()


@pytest.mark.parametrize("progress", [True, False])
def test_dropped_rows_are_told_at_the_end_whether_progress_is_shown_or_not(
    progress: bool, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    window = {**NUMBERS, "uid": "hourly", "kind": "window", "records_in": 3_000, "late_dropped": 2_980, "late_ms_max": 90_000}
    workers = Workers()
    handle = started(Client(("RUNNING", 0, {}), ("FINISHED", 0, {"operators": [window]})), workers, progress=progress)
    assert handle._terminal.wait(10)
    workers.ended[0](WorkerEnd.LEFT, "done")
    assert handle.wait(10) == "FINISHED"
    assert handle.progress().late_dropped == 2_980
    (warning,) = [each.getMessage() for each in caplog.records if "too late" in each.getMessage()]
    assert warning.startswith("job: operator 'hourly' dropped 2,980 of 3,000 rows because they came too late, the latest 1 min 30")
    assert ("2,980 rows dropped as late" in capsys.readouterr().err) is progress
    handle.close()


def test_skipped_rows_are_told_at_the_end_with_the_first_reason(caplog: pytest.LogCaptureFixture) -> None:
    parse = {**NUMBERS, "uid": "parse", "kind": "map", "records_in": 3_000, "rows_skipped": 20, "first_skipped": "no number"}
    workers = Workers()
    handle = started(Client(("RUNNING", 0, {}), ("FINISHED", 0, {"operators": [parse]})), workers)
    assert handle._terminal.wait(10)
    workers.ended[0](WorkerEnd.LEFT, "done")
    assert handle.wait(10) == "FINISHED"
    assert handle.progress().rows_skipped == 20
    (warning,) = [each.getMessage() for each in caplog.records if "left out" in each.getMessage()]
    assert warning == "job: operator 'parse' left out 20 rows of 3,000 (on_error='skip'), the first since: no number"
    handle.close()


ERROR = "UserFunctionError: operator 'parse', subtask 0: parse (mine.py:7) raised KeyError: 'price'; record {}"
FRAMES = '  File "/home/ann/mine.py", line 7, in parse\n    return row["price"]'


def test_a_failure_of_the_users_code_shows_the_users_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Under the restart, with what ends it, once; and under the error at the end, of which one line of ours is to be seen."""
    again = [{"restarts": number, "attempt": number + 1, "failure": ERROR} for number in (1, 2)]
    client = Client(("RUNNING", 0, {}), ("RUNNING", 4, again[0]), ("RUNNING", 4, again[1]), ("FAILED", 4, again[1]))
    client.traces += [f"{ERROR}\n{FRAMES}"]
    workers = Workers()
    handle = started(client, workers, progress=True)
    assert handle._terminal.wait(10)
    workers.ended[0](WorkerEnd.LEFT, "done")
    with pytest.raises(JobFailedError) as caught:
        handle.wait(10)
    assert str(caught.value) == f"job job failed: {ERROR}\n{FRAMES}"
    assert caught.value.cause == ERROR
    assert [entry.name for entry in caught.traceback][1:] == ["wait"]
    shown = capsys.readouterr().err
    first, _, second = shown.partition("job restart 2: ")
    assert all(line in first and line in second for line in FRAMES.splitlines())
    assert "The job comes to this row again after 1 s, then twice as long each time, up to 60 s." in first
    assert 'on_error="skip"' in first
    assert 'restart="none"' in first
    assert "on_error" not in second
    handle.close()


def test_the_text_of_a_row_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever a worker lets pass."""
    error = "UserFunctionError: operator 'a': no \x1b[2J\x9b2J\x07\r number"
    failed = {"restarts": 1, "attempt": 2, "failure": error}
    client = Client(("RUNNING", 0, {}), ("RUNNING", 4, failed), ("FAILED", 4, failed))
    client.traces += [f'{error}\n  File "/home/x/job.py", line 4, in \x1b[2Jprice\n\treturn']
    workers = Workers()
    handle = started(client, workers, progress=True)
    assert handle._terminal.wait(10)
    workers.ended[0](WorkerEnd.LEFT, "done")
    with pytest.raises(JobFailedError) as caught:
        handle.wait(10)
    for told in (str(caught.value), repr(handle), capsys.readouterr().err):
        assert told.replace("\n", "").replace("\t", "").isprintable()
        assert "no \\x1b[2J\\x9b2J\\x07\\r number" in told
    handle.close()


@pytest.mark.parametrize("progress", [True, False])
def test_where_nobody_has_set_logging_up_a_restart_is_told_once(
    progress: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An embedded coordinator logs in the driver's process, and Python writes to stderr what no handler takes."""
    logger = logging.getLogger(COORDINATOR_LOGGER)
    assert joblog.logger is logger
    monkeypatch.setattr(logger, "propagate", False)  # the root has pytest's handlers

    def told(job_id: str, note: Note) -> bool:
        capsys.readouterr()
        JobLog(job_id, "job").write([note])
        return f"job {job_id} (job): " in capsys.readouterr().err

    failed, expired = AttemptFailed(1, ERROR, 1, 0), CheckpointFailed(4, CheckpointKind.CHECKPOINT, FailureReason.EXPIRED)
    client, workers = Client(("RUNNING", 0, {}), ("FINISHED", 0, {})), Workers()
    handle = started(client, workers, progress=progress)
    assert told("job", failed) is not progress
    of_the_end = (AttemptFailed(1, ERROR, 1, None), StateChanged("FAILED", "RUNNING", ERROR))
    with_it = CheckpointFailed(4, CheckpointKind.CHECKPOINT, FailureReason.JOB_FAILOVER)
    for note in (*of_the_end, with_it):
        assert not told("job", note)
        assert told("another", note)
    assert told("another", failed)
    assert told("job", expired)
    handler = logging.StreamHandler(io.StringIO())
    logger.addHandler(handler)
    JobLog("job", "job").write([failed])
    logger.removeHandler(handler)
    assert "attempt 1 failed" in handler.stream.getvalue()
    assert handle._terminal.wait(10)
    workers.ended[0](WorkerEnd.LEFT, "done")
    handle.close()
    assert told("job", failed)
    assert not logger.filters


@pytest.mark.parametrize("directory", ["sp", "./sp", Path("sp")])
def test_a_savepoint_goes_below_the_drivers_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[str | None] = []

    class Asked(Client):
        def savepoint(self, job_id: str, target: str | None, *, format_type: str) -> str:
            asked.append(target)
            return "there"

    handle = started(Asked(("RUNNING", 0, {})), Workers())
    assert handle.savepoint(directory) == handle.savepoint() == "there"
    assert asked == [str(tmp_path / "sp"), None]
    handle.close()


def test_worker_that_is_never_taken_tells_its_driver_why() -> None:
    handle = started(Client(("CREATED", 0, {"workers": []})), Workers("AuthenticationError: missing or wrong bearer token"))
    with pytest.raises(JobFailedError, match="worker 0 can't start: AuthenticationError: missing or wrong bearer token"):
        handle.wait_for_workers(30)
    handle.close()


def test_a_driver_whose_progress_nobody_reads_still_learns_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Gone())
    workers = Workers()
    handle = started(Client(("RUNNING", 1, {}), ("FINISHED", 2, {})), workers, progress=True)
    assert handle._terminal.wait(10)
    workers.ended[0](WorkerEnd.LEFT, "done")
    assert handle.wait(10) == "FINISHED"


def test_an_answer_that_makes_no_sense_is_not_the_end_of_watching() -> None:
    workers = Workers()
    handle = started(Client(("RUNNING", 1, {"workers": [{}]}), ("FINISHED", 2, {})), workers)
    assert handle._terminal.wait(10)
    workers.ended[0](WorkerEnd.LEFT, "done")
    assert handle.wait(10) == "FINISHED"


def test_a_submission_that_took_the_job_over_is_not_taken_for_ours() -> None:
    """Its end used to be reported as the end of ours."""
    workers = Workers()
    handle = started(Client(("RUNNING", 1, {}), ("FINISHED", 9, {"submission": SUBMISSION + 1})), workers)
    assert handle._terminal.wait(10)
    workers.ended[0](WorkerEnd.SUPERSEDED, "superseded: submission 3 runs")
    with pytest.raises(FencedError, match="submission 3 took job job over from submission 2") as caught:
        handle.wait(10)
    assert (caught.value.held, caught.value.newer) == (2, 3)
    assert (handle.state(), handle.progress().records_in) == ("SUSPENDED", 1)


def test_a_coordinator_that_knows_only_an_older_submission_is_not_believed() -> None:
    """It slept through ours, or remembers how the one before ended: ours has not ended for that."""
    workers = Workers()
    client = Client(("FINISHED", 9, {"submission": SUBMISSION - 1}), ("RUNNING", 1, {}), ("FINISHED", 2, {}))
    handle = started(client, workers)
    assert handle._terminal.wait(10)
    workers.ended[0](WorkerEnd.LEFT, "done")
    assert handle.wait(10) == "FINISHED"
    assert handle.progress().records_in == 2


def test_only_the_question_for_the_workers_counts_as_unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0]
    monkeypatch.setattr(spark_handle, "_now_ms", lambda: clock[0])

    class Slow(Client):
        def workers(self, job_id: str) -> dict[str, Any]:
            clock[0] += 7
            return super().workers(job_id)

        def job(self, job_id: str) -> dict[str, Any]:
            clock[0] += 60_000
            return super().job(job_id)

    seen: list[int] = []
    client = Slow(("RUNNING", 1, {}), ("AWAY", 0, {}), ("RUNNING", 2, {"submission": SUBMISSION - 1}), ("RUNNING", 2, {}))
    handle = SparkJobHandle("job", client, GRAPH, 1, submission=SUBMISSION, progress=False, release=lambda: None)  # type: ignore[arg-type]
    handle._runner = SlotRunner(SlotSupervisor(1), Workers(), handle.give_up)
    monkeypatch.setattr(handle._runner, "post", lambda event: seen.append(event.unanswered_ms))
    handle._poll()
    with pytest.raises(StorageUnavailableError):
        handle._poll()
    handle._poll()
    handle._poll()
    assert seen == [7, 21]


def raise_interrupt(*_: object) -> bool:
    raise KeyboardInterrupt


def test_a_wait_wakes_now_and_then_since_a_signal_may_have_come_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python sees a signal when its main thread runs: one that came between its last look and the wait was lost until the end."""
    handle = started(Client(("RUNNING", 1, {})), Workers())
    waited: list[float] = []

    def wait(timeout_s: float) -> bool:
        waited.append(timeout_s)
        return len(waited) == 3 and raise_interrupt()

    with monkeypatch.context() as pressed:
        pressed.setattr(handle._terminal, "wait", wait)
        with pytest.raises(KeyboardInterrupt):
            handle.wait()
    assert waited == [spark_handle.SIGNAL_SEEN_S] * 3
    with pytest.raises(TimeoutError):
        handle.wait(0.01)
    handle.close()


@pytest.mark.parametrize("progress", [True, False])
def test_an_interrupted_wait_says_that_the_job_goes_on_and_how_to_end_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], progress: bool
) -> None:
    workers = Workers()
    handle = started(Client(("RUNNING", 1, {})), workers, progress=progress)
    with monkeypatch.context() as pressed:
        pressed.setattr(handle._terminal, "wait", raise_interrupt)
        with pytest.raises(KeyboardInterrupt) as caught:
            handle.wait()
    assert len(caught.traceback) <= 3, "the user's line stands out"
    line = "job goes on until this program ends: job.wait() waits again, job.stop(folder) or job.cancel() ends it\n"
    assert capsys.readouterr().err.count(line) == 1
    assert handle.is_running
    handle.close()


class Ending(Client):
    """Whose stop takes until `answer` is set; `error` is what it raises then."""

    def __init__(self, *polls: tuple[str, int, dict[str, Any]], error: Exception | None = None) -> None:
        super().__init__(*polls)
        self.asked, self.answer = threading.Event(), threading.Event()
        self.error = error

    def stop(self, job_id: str, target: str | None, *, drain: bool, format_type: str) -> str:
        self.asked.set()
        assert self.answer.wait(10)
        if self.error is not None:
            raise self.error
        self.polls = [("FINISHED", 2, {})]
        return "there"

    def cancel(self, job_id: str) -> None:
        self.stop(job_id, None, drain=False, format_type="")


def interrupted(handle: SparkJobHandle, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as pressed:
        pressed.setattr(spark_handle, "wait", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            getattr(handle, end)()


@pytest.mark.parametrize("end", ["stop", "cancel"])
def test_a_job_whose_stop_was_interrupted_is_waited_for_and_not_attached_to(
    end: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cell that was executed again got a handle of a job that ended under it."""
    client, workers = Ending(("RUNNING", 1, {})), Workers()
    handle = started(client, workers, progress=True)
    assert not handle.await_ending()
    interrupted(handle, end, monkeypatch)
    assert client.asked.wait(10)
    over: list[bool] = []
    again = threading.Thread(target=lambda: over.append(handle.await_ending()), daemon=True)
    again.start()
    client.answer.set()
    assert handle._terminal.wait(10)
    workers.ended[0](WorkerEnd.LEFT, "done")
    again.join(10)
    assert over == [True]
    assert handle.slots_held == 0
    assert "job runs already in this program, and is ending: execute() waits for its end\n" in capsys.readouterr().err
    handle.close()


def test_a_job_whose_stop_was_refused_is_attached_to(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Ending(("RUNNING", 1, {}), error=CheckpointFailedError("declined", job_id="job", reason="DECLINED"))
    handle = started(client, Workers())
    interrupted(handle, "stop", monkeypatch)
    over: list[bool] = []
    again = threading.Thread(target=lambda: over.append(handle.await_ending()), daemon=True)
    again.start()
    client.answer.set()
    again.join(10)
    assert over == [False]
    with pytest.raises(CheckpointFailedError, match="declined"):
        handle.stop()
    assert not handle.await_ending()
    handle.close()


@pytest.mark.parametrize("error", [StorageUnavailableError("lost"), HoldfastError("status 500"), TimeoutError("it goes on")])
def test_a_job_whose_stop_was_lost_sight_of_is_waited_for_until_the_stops_own_timeout(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on in the coordinator: who attached got a handle of a job that ended under it."""
    client = Ending(("RUNNING", 1, {}), error=error)
    client.answer.set()
    handle = started(client, Workers())
    with pytest.raises(type(error)):
        handle.stop()
    assert handle._is_ending
    seconds = GRAPH.config.checkpoint_timeout_ms / 1_000
    monkeypatch.setattr(spark_handle, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + seconds))
    assert not handle.await_ending()
    monkeypatch.undo()
    handle.close()


def test_who_waits_for_the_end_of_a_job_waits_no_more_when_its_handle_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    client, workers, waits = Ending(("RUNNING", 1, {})), Workers(), threading.Event()
    handle = started(client, workers)
    interrupted(handle, "stop", monkeypatch)
    over: list[bool] = []
    monkeypatch.setattr(handle, "say", lambda line: waits.set())
    again = threading.Thread(target=lambda: over.append(handle.await_ending()), daemon=True)
    again.start()
    assert waits.wait(10)
    handle.close()
    again.join(10)
    assert over == [True]
    client.answer.set()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_a_stop_that_was_never_asked_for_ends_no_job(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Ending(("RUNNING", 1, {}))
    handle = started(client, Workers())

    def refuse(thread: threading.Thread) -> None:
        raise error

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(type(error)):
            handle.stop()
    assert not handle._is_ending
    assert not client.asked.is_set()
    handle.close()


def test_a_stop_that_was_interrupted_once_its_thread_asks_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Ending(("RUNNING", 1, {}))
    handle = started(client, Workers())
    start = threading.Thread.start

    def interrupt(thread: threading.Thread) -> None:
        start(thread)
        assert client.asked.wait(10)
        raise KeyboardInterrupt

    with monkeypatch.context() as pressed:
        pressed.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            handle.stop()
    assert handle._is_ending
    client.answer.set()
    handle.close()


@pytest.mark.parametrize(
    ("state", "more", "over"),
    [
        ("FINISHED", {}, True),
        ("RUNNING", {"submission": SUBMISSION + 1}, True),
        ("FINISHED", {"submission": SUBMISSION - 1}, False),
        ("RUNNING", {}, False),
    ],
)
def test_an_end_that_the_handle_has_not_seen_yet_is_asked_for(
    state: str, more: dict[str, Any], over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = threading.Event()

    class Asked(Client):
        """Its handle looks once, and then not before it was asked."""

        def workers(self, job_id: str) -> dict[str, Any]:
            if threading.current_thread().name == "holdfast-job" and first.is_set():
                assert asked.wait(10)
            answer = super().workers(job_id)
            (first if not first.is_set() else asked).set()
            return answer

    asked, workers = threading.Event(), Workers()
    handle = started(Asked(("RUNNING", 1, {}), (state, 1, more)), workers)
    assert first.wait(10)
    assert handle.is_running
    if over:
        threading.Thread(target=lambda: handle._terminal.wait(10) and workers.ended[0](WorkerEnd.LEFT, "done"), daemon=True).start()
    assert handle.await_ending() is over
    assert handle.is_running is not over
    handle.close()


def test_inside_of_with_an_interrupt_leaves_the_job_and_both_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = started(Client(("RUNNING", 1, {})), Workers(), progress=True)
    monkeypatch.setattr(handle._terminal, "wait", raise_interrupt)
    with pytest.raises(KeyboardInterrupt), handle:
        handle.wait()
    said = capsys.readouterr().err
    assert said.count("job goes on until its `with` block ends") == 1
    assert said.count("job is left, and its workers go: execute() goes on from where it started, or its first checkpoint\n") == 1
    assert (handle.is_running, handle.slots_held) == (False, 0)


def test_under_spark_submit_an_interrupt_may_end_spark_and_is_not_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    handle = started(Client(("RUNNING", 1, {})), Workers())
    with monkeypatch.context() as pressed:
        pressed.setattr(handle._terminal, "wait", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            handle.wait()
    assert "job ends if Ctrl-C ended spark-submit, too: submitted again" in capsys.readouterr().err
    handle.close()


def test_a_close_that_was_interrupted_is_done_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, released = Workers(), []
    handle = started(Client(("RUNNING", 1, {})), workers)
    handle._release = lambda: released.append(1)
    assert handle._runner is not None
    with monkeypatch.context() as pressed:
        pressed.setattr(handle._runner.ended, "wait", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            handle.close()
    assert released == [1], "the coordinator of a job that is left goes before its workers"
    assert not handle._runner.ended.is_set()
    assert not handle.is_running
    handle.close()
    handle.close()
    assert handle._runner.ended.is_set()
    assert released == [1]


def test_a_worker_that_can_not_be_killed_from_here_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """All slots of a job wait for one thread."""

    def refuse(pid: int, fingerprint: str) -> bool:
        raise OverflowError("Python int too large to convert to C int")

    monkeypatch.setattr(spark_slots, "kill_process", refuse)
    supervisor, workers = SlotSupervisor(1), Workers()
    runner = SlotRunner(supervisor, workers, lambda slot, error: None)
    for action in supervisor.handle(Launch(), now_ms=0):
        runner._perform(action)
    runner._perform(CancelWorker(0, 1, SeenWorker(0, 1, True, pid=2**62, fingerprint="f" * 32)))
    assert isinstance(runner._next(), WorkerEnded)


class Refusing(Workers):
    """Slot 1 gets no worker while there are refusals."""

    def __init__(self, *refusals: Exception) -> None:
        super().__init__()
        self.refusals = list(refusals)
        self.started: list[tuple[int, int]] = []
        self.cancelled: list[int] = []

    def start(self, slot: int, spawn: int, ended: Ended) -> None:
        if slot == 1 and self.refusals:
            raise self.refusals.pop(0)
        self.started.append((slot, spawn))
        super().start(slot, spawn, ended)

    def cancel(self, slot: int, spawn: int) -> None:
        self.cancelled.append(slot)
        if (slot, spawn) in self.started:
            super().cancel(slot, spawn)


def test_a_worker_that_can_not_be_started_now_is_started_later_and_no_other_is_cancelled() -> None:
    """As at the driver's limit of threads."""
    workers = Refusing(*(RuntimeError("can't start new thread") for _ in range(3)))
    runner = SlotRunner(SlotSupervisor(2), workers, lambda slot, error: None)
    runner.start()
    await_(lambda: len(workers.started) == 2)
    assert (workers.started, workers.cancelled) == ([(0, 1), (1, 4)], [])
    assert (runner.last_errors, runner.ended.is_set()) == ({1: "RuntimeError: can't start new thread"}, False)
    for ended in workers.ended:
        ended(WorkerEnd.LEFT, "done")
    assert runner.ended.wait(10)


def test_where_spark_has_stopped_all_workers_are_cancelled() -> None:
    workers = Refusing(*(spark_slots.SparkStoppedError("the SparkContext has ended") for _ in range(5)))
    runner = SlotRunner(SlotSupervisor(2), workers, lambda slot, error: None)
    runner.start()
    assert runner.ended.wait(10)
    assert len(workers.refusals) == 4, "nothing is tried again"
    assert (workers.started, workers.cancelled, runner.abandoned) == ([(0, 1)], [0, 1], ())


def await_(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def context_of(*, stopped: bool = False, exit_code: int | None = None, jsc: bool = True, error: Exception | None = None) -> Any:
    def is_stopped() -> bool:
        if error is not None:
            raise error
        return stopped

    scala = SimpleNamespace(isStopped=is_stopped)
    gateway = SimpleNamespace(proc=SimpleNamespace(poll=lambda: exit_code))
    return SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: scala) if jsc else None, _gateway=gateway)


def test_a_context_has_stopped_where_it_says_so_or_its_process_is_gone() -> None:
    lost = Py4JNetworkError("Answer from Java side is empty")
    assert not spark_slots.has_stopped(context_of())
    assert not spark_slots.has_stopped(context_of(error=lost)), "as behind Ctrl-C, for a moment"
    for gone in (context_of(jsc=False), context_of(stopped=True), context_of(exit_code=137, error=lost)):
        assert spark_slots.has_stopped(gone)


@pytest.mark.parametrize(("stops", "expected"), [(True, spark_slots.SparkStoppedError), (False, RuntimeError)])
def test_a_thread_that_does_not_start_is_told_from_a_context_that_has_stopped(
    monkeypatch: pytest.MonkeyPatch, stops: bool, expected: type[Exception]
) -> None:
    context = context_of()

    class Thread:
        def __init__(self, **_: Any) -> None: ...

        def start(self) -> None:
            if stops:
                context._jsc = None
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr("pyspark.InheritableThread", Thread)
    template = spark_slots.WorkerTemplate("job", 1, "http://nowhere", None, "", b"", 1_000)
    ended: list[WorkerEnd] = []
    with pytest.raises(expected) as raised:
        spark_slots.RddBackend(context, template, "job").start(0, 1, lambda end, _: ended.append(end))
    assert (type(raised.value), ended) == (expected, [])


def test_a_job_says_what_it_is_and_where_it_stands() -> None:
    failed = {"failure": "UserFunctionError: no\nmore"}
    workers = Workers()
    handle = started(Client(("RUNNING", 3, {"restarts": 2}), ("FAILED", 3, {"restarts": 2, **failed})), workers)
    assert handle._terminal.wait(10)
    workers.ended[0](WorkerEnd.LEFT, "done")
    with pytest.raises(JobFailedError):
        handle.wait(30)
    expected = "<Job 'job' (job) FAILED: 3 rows in, 0 out; no checkpoint yet; restarts: 2; UserFunctionError: no>"
    assert repr(handle) == expected
    handle.close()


@pytest.mark.parametrize("state", ["RUNNING", "AWAY"])
def test_a_coordinator_is_told_of_a_driver_that_leaves_before_its_workers_go(state: str) -> None:
    client, workers = Client(("RUNNING", 0, {}), (state, 0, {})), Workers()
    handle = started(client, workers)
    order: list[str] = []

    def cancel(slot: int, spawn: int) -> None:
        order.append("cancelled")
        workers.ended[-1](WorkerEnd.DIED, "cancelled")

    handle._release = lambda: order.append(f"released, told {client.told}")
    workers.cancel = cancel  # type: ignore[method-assign]
    for _ in range(2):
        handle.close()
    assert order == [f"released, told {[('job', SUBMISSION)]}", "cancelled"]


def test_a_job_that_is_over_is_not_left() -> None:
    client, workers = Client(("FINISHED", 9, {})), Workers()
    handle = started(client, workers)
    assert handle._terminal.wait(10)
    workers.ended[0](WorkerEnd.LEFT, "done")
    handle.close()
    assert client.told == []
