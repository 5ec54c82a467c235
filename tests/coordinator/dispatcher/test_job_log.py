"""What a job's log says: one line for each state, restart, failed checkpoint, request and takeover."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from holdfast.barriers.messages import CheckpointKind, FailureReason, TaskState
from holdfast.coordinator.dispatcher import job_log as joblog
from holdfast.coordinator.dispatcher.job_log import JobLog, printable
from holdfast.coordinator.ha.records import derive_job_id
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.failover import Failure
from holdfast.coordinator.notes import (
    AttemptDeployed,
    AttemptFailed,
    AttemptInitialized,
    CheckpointFailed,
    RequestEnded,
    StateChanged,
)
from tests.coordinator.doubles import submission, word_count
from tests.coordinator.rig import Rig
from tests.coordinator.stepping import Process
from tests.coordinator.world import DictStorage

JOB = derive_job_id("word count")


class Noting(Rig):
    """Remembers what the master tells for the log."""

    def feed(self, event: job_events.Event) -> None:
        self.__dict__.setdefault("notes", [])
        original = self.master.handle

        def handle(inner: job_events.Event, **times: int) -> list[Any]:
            actions = original(inner, **times)
            self.notes: list[Any]
            self.notes += self.master.notes
            return actions

        self.master.handle = handle  # type: ignore[method-assign,assignment]
        try:
            super().feed(event)
        finally:
            self.master.handle = original  # type: ignore[method-assign]

    def take(self) -> list[Any]:
        notes, self.notes = self.notes, []
        return notes


def running() -> Noting:
    rig = Noting()
    for slot in range(2):
        rig.register(slot)
    for slot in range(2):
        rig.report(slot, 1, TaskState.RUNNING)
    return rig


def test_states_and_deployments_are_told_once() -> None:
    rig = running()
    assert rig.take() == [AttemptDeployed(1, 0), StateChanged("RUNNING", "CREATED"), AttemptInitialized(1)]
    rig.pass_time(10)
    assert rig.take() == []


def test_a_restart_is_told_with_its_cause_and_what_it_restores() -> None:
    rig = running()
    rig.checkpoint()
    rig.take()
    rig.report(0, 1, TaskState.FAILED, error="UserFunctionError: boom")
    failed, state = rig.take()[:2]
    assert isinstance(failed, AttemptFailed)
    assert (failed.attempt, failed.error, failed.restarts, failed.slot) == (1, "UserFunctionError: boom", 1, 0)
    assert state == StateChanged("RESTARTING", "RUNNING")
    for slot in range(2):
        rig.register(slot, attempt=1)
    rig.pass_time(5_000)
    deployed = [note for note in rig.take() if isinstance(note, AttemptDeployed)]
    assert [(note.attempt, note.checkpoint_id) for note in deployed] == [(2, 1)]


def test_a_failure_of_the_users_code_is_told_with_the_users_lines() -> None:
    note = AttemptFailed(1, "UserFunctionError: boom", 1, 1_000, "count", 0, 0, '  File "mine.py", line 7, in parse\n    row["x"]')
    _, _, text = joblog._worded(note)
    assert text == (
        "attempt 1 failed in subtask 0 of count; restart 1 in 1000 ms: UserFunctionError: boom "
        '| File "mine.py", line 7, in parse | row["x"]'
    )
    frames = [Failure("E: x", trace).user_frames for trace in ("E: x\n  File 1\n    x", "Traceback ...\nE: x", "")]
    assert frames == ["  File 1\n    x", "", ""]


def test_a_suspended_job_tells_nothing_twice() -> None:
    rig = running()
    rig.take()
    rig.feed(job_events.LeadershipEnded("epoch 9 leads"))
    assert rig.take() == [StateChanged("SUSPENDED", "RUNNING", "epoch 9 leads")]
    rig.feed(job_events.LeadershipEnded("epoch 9 leads"))
    assert rig.take() == []


def test_takeover_and_end_are_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="holdfast.coordinator.jobs")
    storage = DictStorage()
    first = Process(storage).begin()
    first.submit(submission(word_count()))
    first.settle()
    second = Process(storage, seed=1).begin()
    second.settle()
    first.service(JOB).post(job_events.LeadershipEnded("epoch 2 leads"))
    first.settle()
    second.call(JOB, job_events.CancelRequested)
    second.settle()
    told = [record.__dict__["fields"] for record in caplog.records]
    assert {entry["job_id"] for entry in told} == {JOB}
    assert {entry["job_name"] for entry in told} == {"word count"}
    taken = [(entry["event"], entry["epoch"]) for entry in told if entry["event"] == "leadership_taken"]
    assert taken == [("leadership_taken", 1), ("leadership_taken", 2)]
    assert "led from here with epoch 1, submission 1: a new submission begins; newest checkpoint 0" in caplog.text
    assert "led from here with epoch 2, submission 1: taken over from epoch 1; newest checkpoint 0" in caplog.text
    states = [entry["state"] for entry in told if entry["event"] == "state_changed"]
    assert states == ["RECONCILING", "SUSPENDED", "CANCELLING"]
    assert "(word count): RECONCILING: taken over by epoch 2\n" in caplog.text, "it was never CREATED there"


def test_a_second_submission_takes_over_from_nobody(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="holdfast.coordinator.jobs")
    process = Process(DictStorage()).begin()
    process.submit(submission(word_count()))
    process.settle()
    process.submit(submission(word_count()))
    process.settle()
    assert "led from here with epoch 2, submission 2: a new submission begins; newest checkpoint 0" in caplog.text
    assert "taken over" not in caplog.text


@pytest.mark.parametrize(
    ("note", "level", "text"),
    [
        (StateChanged("FAILED", "FAILING", "no restart is left"), "ERROR", "FAILED, was FAILING: no restart is left"),
        (AttemptFailed(3, "E: x", 2, None), "WARNING", "attempt 3 failed; no restart is left: E: x"),
        (AttemptFailed(3, "E: x", 2, 50, "v", 1, 1), "WARNING", "attempt 3 failed in subtask 1 of v; restart 2 in 50 ms: E: x"),
        (AttemptInitialized(4), "INFO", "all tasks of attempt 4 run"),
        (AttemptDeployed(4, 9, "chk-9"), "INFO", "attempt 4 starts from checkpoint 9 (chk-9)"),
        (CheckpointFailed(5, CheckpointKind.CHECKPOINT, FailureReason.SUBSUMED), "INFO", "checkpoint 5 failed, subsumed"),
        (CheckpointFailed(5, CheckpointKind.STOP_SAVEPOINT, FailureReason.EXPIRED, "late"), "WARNING", "5 failed, expired: late"),
        (RequestEnded(CheckpointKind.SAVEPOINT, "t", 5, "/s"), "INFO", "savepoint asked for as t is complete: id 5 at /s"),
        (
            RequestEnded(CheckpointKind.STOP_SAVEPOINT, "t", None, "", FailureReason.LEADER_CHANGED, "", 3),
            "WARNING",
            "stop-savepoint asked for as t failed after 3 tries, leader_changed",
        ),
        (RequestEnded(CheckpointKind.SAVEPOINT, "t", 5, "", FailureReason.DECLINED), "WARNING", "asked for as t failed, declined"),
    ],
)
def test_how_it_is_worded(note: Any, level: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="holdfast.coordinator.jobs")
    JobLog(JOB, "flights").write([note])
    (record,) = caplog.records
    assert (record.levelname, text in record.getMessage()) == (level, True)


@pytest.mark.parametrize("text", ["boom\n2026-01-01 INFO root: forged\x1b[31m\u2028", "x" * 100_000])
def test_a_users_text_can_not_begin_a_line_of_somebody_elses_handler(text: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="holdfast.coordinator.jobs")
    JobLog(JOB, "flights").write([AttemptFailed(3, text, 2, None), StateChanged("FAILED", "FAILING", text)])
    assert len(caplog.records) == 2
    for record in caplog.records:
        assert record.getMessage().isprintable()
        assert record.getMessage() == printable(record.getMessage())
        assert all(printable(value) == value for value in record.__dict__["fields"].values() if isinstance(value, str))
