"""Which failures restart a job, and which end it at once."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from holdfast.barriers.jobgraph import RestartStrategy
from holdfast.barriers.messages import ShutdownWorker, TaskState
from holdfast.coordinator.ha.records import AttemptRecord, decode_record, encode_record
from holdfast.coordinator.jobmaster.failover import Failure, is_final, is_of_user_code
from holdfast.coordinator.jobmaster.restart_backoff import RestartBackoff
from holdfast.statebackends.layout import JobPaths
from tests.coordinator.rig import Rig
from tests.coordinator.world import JOB

PATHS = JobPaths(JOB)

FINAL = [
    "InvalidConfigError",
    "GraphError",
    "UnknownColumnError",
    "StateDirectoryNotSharedError",
    "FencedError",
    "OutputMayRepeatError",
    "CommittableLostError",
    "CorruptStateError",
    "UnsupportedVersionError",
    "IncompatibleStateError",
    "MaxParallelismError",
    "UnclaimedStateError",
    "UndeclaredStateError",
    "InputChangedError",
    "SourceDataLostError",
    "TooManyRowsSkippedError",
]
PASSING = [
    "StorageUnavailableError",
    "AmbiguousWriteError",
    "StorageAccessError",
    "StorageThrottledError",
    "OutOfSpaceError",
    "TooManyFilesError",
    "PermissionDeniedError",
    "InputOutputError",
    "StateBackendError",
    "PeerLostError",
    "ProtocolError",
    "UserFunctionError",
    "ValueError",
]


@pytest.mark.parametrize("name", FINAL)
def test_what_every_further_attempt_would_meet_again_is_final(name: str) -> None:
    assert is_final(f"{name}: sink out: words with: colons")


@pytest.mark.parametrize("name", [*PASSING, "WorkerLost", "CheckpointFailed", "annotations", "errors", "", "FencedErrors"])
def test_what_may_pass_is_not_final(name: str) -> None:
    assert not is_final(f"{name}: FencedError: quoted")


USER_CODE = [
    "UserFunctionError",
    "SchemaMismatchError",
    "InvalidKeyError",
    "InvalidTimestampError",
    "StateValueError",
    "InvalidRecordError",
    "InvalidRowError",
]


@pytest.mark.parametrize("name", USER_CODE)
def test_what_a_function_makes_of_a_row_is_of_user_code(name: str) -> None:
    assert is_of_user_code(f"{name}: operator 'count', subtask 0: it is so")
    assert not is_of_user_code(f"WorkerLost: {name}: quoted")


def delays(strategy: RestartStrategy, *causes: str) -> list[int | None]:
    """What follows each failure; "-" is a completed checkpoint."""
    backoff, found = RestartBackoff(strategy, 0, random.Random(1)), []
    for cause in causes:
        if cause == "-":
            backoff.progressed()
        else:
            found.append(backoff.restart_delay_ms(Failure(cause), same_failure=False, now_ms=0))
    return found


LOST, USER = "WorkerLost: slot 0", "UserFunctionError: no"


def test_a_row_that_always_fails_is_tried_again_ever_more_rarely() -> None:
    waits = [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000]
    assert delays(RestartStrategy(), *[USER] * 8) == waits
    assert delays(RestartStrategy(), *[USER] * 3, "-", USER, USER) == [1_000, 2_000, 4_000, 1_000, 2_000]


def test_the_first_loss_after_a_checkpoint_restarts_at_once_and_those_that_follow_wait() -> None:
    assert delays(RestartStrategy(), LOST, "-", LOST, LOST, LOST, "-", LOST) == [0, 0, 1_000, 2_000, 0]
    assert delays(RestartStrategy(), LOST, USER, LOST) == [0, 1_000, 2_000]
    assert delays(RestartStrategy(), USER, LOST) == [1_000, 2_000], "whatever comes next may be of the same row"
    assert delays(RestartStrategy(immediate_first=False), LOST, LOST) == [1_000, 2_000]


def test_a_fixed_delay_stays_as_it_is_and_none_restarts_nothing() -> None:
    assert delays(RestartStrategy("fixed_delay", delay_ms=300), USER, USER, LOST) == [300, 300, 300]
    assert delays(RestartStrategy("fixed_delay", 2), LOST, LOST, LOST) == [0, 1_000, None]
    assert delays(RestartStrategy("none"), LOST) == [None]


def test_a_failure_that_ends_the_job_is_no_restart() -> None:
    backoff = RestartBackoff(RestartStrategy(attempts_max=1), 0, random.Random(1))
    assert [backoff.restart_delay_ms(Failure(USER), same_failure=False, now_ms=0) for _ in range(2)] == [1_000, None]
    assert backoff.restarts == 1


def test_a_pause_is_bounded_after_any_number_of_failures() -> None:
    strategy = RestartStrategy(delay_ms=1, delay_max_ms=2**40)
    assert [strategy.delay_after(failures) for failures in (0, 1, 39, 40, 1_000_000)] == [1, 2, 2**39, 2**40, 2**40]
    assert RestartStrategy(delay_ms=0).delay_after(5) == 0


@pytest.mark.parametrize("name", FINAL)
def test_final_failure_of_a_task_fails_the_job_at_once_and_keeps_its_checkpoints(name: str) -> None:
    rig = Rig().run()
    number = rig.checkpoint()
    rig.report(0, 1, TaskState.FAILED, f"{name}: it is so")
    rig.report(1, 1, TaskState.CANCELED)
    assert (rig.state, rig.restarts, rig.master.lifecycle.failure) == ("FAILED", 0, f"{name}: it is so")
    assert f"{JOB}/chk-{number}/_metadata" in rig.storage.files
    assert f"{JOB}/results/1.json" in rig.storage.files
    assert rig.commands(0, ShutdownWorker)
    assert rig.master.lifecycle.exceptions.views()[0].error == f"{name}: it is so"


@pytest.mark.parametrize("name", PASSING)
def test_failure_that_may_pass_restarts_the_job(name: str) -> None:
    rig = Rig().run()
    rig.checkpoint()
    rig.report(0, 1, TaskState.FAILED, f"{name}: this time")
    assert (rig.state, rig.restarts) == ("RESTARTING", 1)


def test_final_failure_of_a_stale_attempt_changes_nothing() -> None:
    rig = Rig().run()
    rig.report(0, 1, TaskState.FAILED, "PeerLostError: gone")
    rig.heartbeat(0)
    rig.heartbeat(1)
    assert rig.master.lifecycle.attempt == 2
    rig.report(1, 1, TaskState.FAILED, "FencedError: attempt 2 commits, this is 1")
    assert rig.state == "RUNNING"


@pytest.mark.parametrize(("submission", "restarts"), [(1, 3), (2, 1)], ids=["of the same submission", "of another one"])
def test_restarts_that_an_older_leader_counted_count(submission: int, restarts: int) -> None:
    """It did not know that it was replaced, and put the attempt behind a failure on record that was reported to it alone."""
    rig = Rig().run()
    known = decode_record(AttemptRecord, rig.storage.files[PATHS.attempt(1)], "1")
    late = replace(known, attempt=2, submission=submission, restarts=3, nonce="older")
    rig.storage.files[PATHS.attempt(2)] = encode_record(late)
    rig.report(0, 1, TaskState.FAILED, "ValueError: no")
    rig.heartbeat(0)
    rig.heartbeat(1)
    assert (rig.master.lifecycle.next.number, rig.restarts) == (3, restarts)
    assert decode_record(AttemptRecord, rig.storage.files[PATHS.attempt(3)], "3").restarts == restarts
