"""Checkpoints that fail without a cause: each reason, with what explains it and without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.barriers.messages import CheckpointKind, DeclineCheckpoint, FailureReason
from holdfast.chaos.checkers.observations import Reported, Stored
from holdfast.coordinator.ha.records import AbortRecord, encode_record
from holdfast.statebackends.errors import AmbiguousWriteError, ObjectMissingError, StorageUnavailableError
from holdfast.statebackends.storage.port import PutIfAbsent, ReadFile
from tests.simulation.checker_world import JOB, STATE, Story

COUNT = "count" * 6
LEADER, WORKER = "coordinator-1", "worker-0.1"


@pytest.fixture
def story() -> Story:
    story = Story()
    story.begin()
    story.complete(1)
    return story


def begin(story: Story, kind: CheckpointKind = CheckpointKind.CHECKPOINT) -> None:
    story.claim(2, kind)
    story.trigger(2)


def decline(story: Story, reason: FailureReason = FailureReason.ASYNC_EXCEPTION) -> None:
    story.tell(Reported(story.now_ms, WORKER, 0, DeclineCheckpoint(1, 2, COUNT, 0, reason, "KeyError: 7")))


def abort(story: Story, reason: FailureReason) -> None:
    story.put(f"{JOB}/chk-2/_metadata", encode_record(AbortRecord(2, reason, story.epoch, "n", "why")))


def test_an_asynchronous_part_fails_since_a_call_did(story: Story) -> None:
    begin(story)
    story.fail_call(WORKER)
    decline(story)
    abort(story, FailureReason.ASYNC_EXCEPTION)
    assert story.broken == []


def test_an_asynchronous_part_fails_and_no_call_did(story: Story) -> None:
    story.fail_call(WORKER)  # before it began
    begin(story)
    story.fail_call("worker-1.1")
    decline(story)
    abort(story, FailureReason.ASYNC_EXCEPTION)
    assert story.violations == [("I30", "checkpoint 2 failed in worker-0.1, of whose calls none did: KeyError: 7")]


def test_a_file_that_is_missing_is_no_failure_of_the_store(story: Story) -> None:
    begin(story)
    story.fail_call(WORKER, ObjectMissingError("no such file", path="x"))
    decline(story)
    abort(story, FailureReason.ASYNC_EXCEPTION)
    assert story.broken == ["I30"]


@pytest.mark.parametrize("reason", [FailureReason.IO_EXCEPTION, FailureReason.FINALIZE_FAILURE, FailureReason.TRIGGER_FAILURE])
def test_a_leader_gives_up_what_its_calls_failed(story: Story, reason: FailureReason) -> None:
    begin(story)
    story.fail_call(LEADER, AmbiguousWriteError("perhaps", path="x"))
    abort(story, reason)
    assert story.broken == []


@pytest.mark.parametrize("reason", [FailureReason.IO_EXCEPTION, FailureReason.FINALIZE_FAILURE, FailureReason.TRIGGER_FAILURE])
def test_a_leader_gives_up_although_its_calls_went_well(story: Story, reason: FailureReason) -> None:
    begin(story)
    story.fail_call(WORKER)
    abort(story, reason)
    assert story.violations == [("I30", f"checkpoint 2 is aborted as {reason.value} by {LEADER}, of whose calls none failed: why")]


def test_a_call_that_tells_its_caller_of_a_failure_explains_it_too(story: Story) -> None:
    begin(story)
    operation = PutIfAbsent(f"{JOB}/elsewhere", b"")
    story.tell(Stored(story.now_ms, LEADER, STATE, operation, True, added=(operation.path,), fate="lie"))
    abort(story, FailureReason.FINALIZE_FAILURE)
    assert story.broken == []


def test_a_call_that_gets_through_on_the_wire_explains_nothing(story: Story) -> None:
    begin(story)
    operation = PutIfAbsent(f"{JOB}/elsewhere", b"")
    story.tell(Stored(story.now_ms, LEADER, STATE, operation, True, added=(operation.path,), fate="lie", on_wire=True))
    abort(story, FailureReason.FINALIZE_FAILURE)
    assert story.broken == ["I30"]


def test_a_call_that_fails_on_the_wire_explains_it(story: Story) -> None:
    begin(story)
    operation = PutIfAbsent(f"{JOB}/elsewhere", b"")
    error = StorageUnavailableError("no", path=operation.path)
    story.tell(Stored(story.now_ms, LEADER, STATE, operation, error, fate="fail", on_wire=True))
    abort(story, FailureReason.FINALIZE_FAILURE)
    assert story.broken == []


def test_a_read_that_went_well_explains_nothing(story: Story) -> None:
    begin(story)
    story.tell(Stored(story.now_ms, LEADER, STATE, ReadFile("x"), b""))
    abort(story, FailureReason.FINALIZE_FAILURE)
    assert story.broken == ["I30"]


def test_a_checkpoint_is_subsumed_and_a_savepoint_is_not(story: Story) -> None:
    begin(story)
    abort(story, FailureReason.SUBSUMED)
    assert story.broken == []


def test_a_savepoint_is_given_up_for_a_checkpoint(story: Story) -> None:
    begin(story, CheckpointKind.SAVEPOINT)
    abort(story, FailureReason.SUBSUMED)
    assert story.violations == [("I30", "savepoint 2 was given up because of another one: why")]


def test_a_subtask_that_missed_a_savepoint_may_decline_it(story: Story) -> None:
    begin(story, CheckpointKind.SAVEPOINT)
    decline(story, FailureReason.SUBSUMED)
    abort(story, FailureReason.SUBSUMED)
    assert story.broken == []


def leader(began_ms: int, timeout_ms: int) -> Any:
    """A coordinator process with checkpoint 2 pending since `began_ms`."""
    pending = SimpleNamespace(checkpoint_id=2, started_ms=began_ms, is_undecided=False)
    config = SimpleNamespace(checkpoint_timeout_ms=timeout_ms)
    setup = SimpleNamespace(submission=1, graph=SimpleNamespace(config=config))
    master = SimpleNamespace(coordinator=SimpleNamespace(pending=(pending,)), setup=setup)
    return SimpleNamespace(process=SimpleNamespace(name=LEADER), services=[SimpleNamespace(epoch=1, _master=master)])


@pytest.mark.parametrize(("timeout_ms", "broken"), [(5, []), (5_000, ["I30"])])
def test_a_checkpoint_expires_when_its_time_is_over(story: Story, timeout_ms: int, broken: list[str]) -> None:
    began_ms = story.now_ms
    begin(story)
    story.now_ms += 10
    story.live_coordinators = [leader(began_ms, timeout_ms)]
    abort(story, FailureReason.EXPIRED)
    assert story.broken == broken


def test_a_leader_whose_record_of_its_beginning_is_wrong_is_not_believed(story: Story) -> None:
    """It took the id before this one 20 ms ago."""
    began_ms = story.now_ms - 60_000
    begin(story)
    story.now_ms += 10
    story.live_coordinators = [leader(began_ms, 5_000)]
    abort(story, FailureReason.EXPIRED)
    assert story.broken == ["I30"]


def test_a_claim_that_took_long_is_part_of_the_time(story: Story) -> None:
    story.now_ms += 5_000
    began_ms = story.now_ms - 4_990
    begin(story)
    story.now_ms += 10
    story.live_coordinators = [leader(began_ms, 5_000)]
    abort(story, FailureReason.EXPIRED)
    assert story.broken == []


def test_a_savepoint_is_given_up_as_the_job_ends(story: Story) -> None:
    begin(story, CheckpointKind.SAVEPOINT)
    abort(story, FailureReason.END_OF_INPUT)
    assert story.violations == [("I30", "savepoint 2 was given up because the job ended: why")]
