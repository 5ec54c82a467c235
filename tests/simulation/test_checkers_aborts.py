"""What is given up and what has ended: one rule broken a test, and the invariant that says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.barriers.jobgraph import JobEdge, JobGraph, Partitioning
from holdfast.barriers.messages import CheckpointKind, DeclineCheckpoint, FailureReason, NotifyCheckpointAborted, TaskState
from holdfast.chaos.checkers.observations import DataEnded, Reported, SnapshotBegan
from holdfast.coordinator.ha.records import AbortRecord, RestorePoint, encode_record
from tests.simulation.checker_world import JOB, SAVEPOINTS, Story

COUNT, SOURCE = "count" * 6, "source" * 6


@pytest.fixture
def story() -> Story:
    story = Story()
    story.begin()
    story.complete(1)
    story.claim(2)
    story.trigger(2)
    return story


# ------------------------------------------------------------------------------------------------------------- declines


def decline(story: Story, attempt: int, reason: FailureReason) -> None:
    story.fail_call("worker-0.1")  # which is why
    story.tell(Reported(story.now_ms, "worker-0.1", 0, DeclineCheckpoint(attempt, 2, COUNT, 0, reason)))


def abort_as(story: Story, reason: FailureReason) -> None:
    story.put(f"{JOB}/chk-2/_metadata", encode_record(AbortRecord(2, reason, story.epoch, "n")))


def test_a_checkpoint_is_aborted_by_a_subtask_that_declined_it(story: Story) -> None:
    decline(story, 1, FailureReason.ASYNC_EXCEPTION)
    abort_as(story, FailureReason.ASYNC_EXCEPTION)
    assert story.broken == []


def test_a_checkpoint_is_aborted_as_declined_and_nobody_did(story: Story) -> None:
    abort_as(story, FailureReason.DECLINED)
    assert story.broken == ["I15"]


def test_a_checkpoint_is_aborted_by_another_attempt(story: Story) -> None:
    decline(story, 1, FailureReason.DECLINED)
    story.claims[2] = msgspec.structs.replace(story.claims[2], attempt=2)
    story.lead()
    story.attempt = 2
    story.claim(3)
    story.put(f"{JOB}/chk-3/_metadata", encode_record(AbortRecord(3, FailureReason.DECLINED, story.epoch, "n")))
    assert story.broken == ["I15"]


# ---------------------------------------------------------------------------------------------------- notices of aborts


def told_abort(story: Story) -> None:
    story.abort(2)
    story.deliver(NotifyCheckpointAborted(1, 2, 1))


def takes(story: Story, *unread: int) -> None:
    story.tell(SnapshotBegan(story.now_ms, "worker-0.1", 1, COUNT, 0, 2, unread))


def test_a_subtask_takes_a_checkpoint_that_it_heard_is_aborted(story: Story) -> None:
    told_abort(story)
    takes(story)
    assert story.broken == ["I13"]


def test_a_subtask_may_take_a_checkpoint_before_it_hears_of_the_abort(story: Story) -> None:
    takes(story)
    told_abort(story)
    takes(story, 2)
    assert story.broken == []


def waits_for(*ids: int, mails: tuple[Any, ...] = (), state: TaskState = TaskState.RUNNING) -> Any:
    """A worker whose subtask has seen some of the barriers of these ids."""
    key = SimpleNamespace(vertex=COUNT, subtask=0)
    mailbox, intake = SimpleNamespace(_mails=mails), SimpleNamespace(watermark_ms=0)
    subtask = SimpleNamespace(attempt=1, key=key, state=state, mailbox=mailbox, _input=intake)
    each = SimpleNamespace(subtask=subtask, gate=SimpleNamespace(pending=ids))
    worker = SimpleNamespace(_commands=())
    return SimpleNamespace(process=SimpleNamespace(name="worker-0.1"), worker=worker, subtasks=lambda: [each])


def looked(story: Story, worker: Any) -> list[str]:
    """What the checker of aborts reports when it looks."""
    story.live_workers = [worker]
    for checker in story.checkers:
        if type(checker).__name__ == "AbortsChecker":
            checker.look()
    return story.broken


def test_a_subtask_waits_for_barriers_of_a_checkpoint_that_it_heard_is_aborted(story: Story) -> None:
    told_abort(story)
    assert looked(story, waits_for(3)) == []
    assert looked(story, waits_for(2, mails=(NotifyCheckpointAborted(1, 2, 1),))) == []
    assert looked(story, waits_for(2)) == ["I13"]


@pytest.mark.parametrize("state", [TaskState.FAILED, TaskState.CANCELING, TaskState.CANCELED, TaskState.FINISHED])
def test_a_subtask_that_has_stopped_waits_for_nothing(story: Story, state: TaskState) -> None:
    """It failed in front of the notice, which says nothing to it any more."""
    told_abort(story)
    assert looked(story, waits_for(2, state=state)) == []


# ------------------------------------------------------------------------------------------------------------- subsumed


def leader(story: Story, *pending: int, is_undecided: bool = True) -> Any:
    entries = [SimpleNamespace(checkpoint_id=number, is_undecided=is_undecided) for number in pending]
    master = SimpleNamespace(coordinator=SimpleNamespace(pending=entries))
    return SimpleNamespace(services=[SimpleNamespace(epoch=story.epoch, _master=master)])


def test_a_checkpoint_completes_after_a_newer_one(story: Story) -> None:
    acknowledged = story.acknowledge(2)
    story.complete(3)
    story.decide(2, story.snapshot(2, acknowledged))
    assert story.broken == ["I13"]


def test_a_leader_that_does_not_know_of_the_newer_one_may_complete_an_older(story: Story) -> None:
    """Storage gave it no clear answer when it stored the newer one."""
    older = story.acknowledge(2)
    story.claim(3)
    story.trigger(3)
    story.decide(3, story.snapshot(3, story.acknowledge(3)))
    story.decide(2, story.snapshot(2, older))
    assert story.broken == []


def test_a_savepoint_may_complete_after_a_newer_checkpoint(story: Story) -> None:
    story.abort(2)
    story.claim(3, CheckpointKind.SAVEPOINT)
    story.trigger(3)
    acknowledged = story.acknowledge(3)
    story.complete(4)
    story.decide(3, story.snapshot(3, acknowledged))
    assert story.broken == []


def test_a_leader_goes_on_with_a_checkpoint_below_a_complete_one(story: Story) -> None:
    story.live_coordinators = [leader(story, 2)]
    story.complete(3)
    assert story.broken == ["I13"]


def test_what_is_being_written_is_decided_by_storage(story: Story) -> None:
    story.live_coordinators = [leader(story, 2, is_undecided=False)]
    story.complete(3)
    assert story.broken == []


def test_a_leader_may_go_on_with_what_is_newer(story: Story) -> None:
    story.abort(2)
    story.claim(4)
    story.live_coordinators = [leader(story, 4)]
    story.complete(3)
    assert story.broken == []


# -------------------------------------------------------------------------------------------------------- ends of data


def joined(parallelism: int, partitioning: Partitioning) -> Story:
    """The count reads the source."""
    story = Story(parallelism=parallelism)
    edge = JobEdge(0, SOURCE, "source", COUNT, 0, partitioning)
    story.graph = JobGraph("job", story.graph.vertices, (edge,), story.graph.config)
    story.begin()
    return story


def ends(story: Story, vertex: str, subtask: int) -> None:
    story.tell(DataEnded(story.now_ms, f"worker-{subtask}.1", 1, vertex, subtask))


def test_data_ends_before_that_of_a_producer() -> None:
    story = joined(2, Partitioning.HASH)
    ends(story, SOURCE, 0)
    ends(story, COUNT, 0)
    assert story.broken == ["I10"]


def test_data_ends_after_that_of_all_producers() -> None:
    story = joined(2, Partitioning.HASH)
    ends(story, SOURCE, 0)
    ends(story, SOURCE, 1)
    ends(story, COUNT, 1)
    assert story.broken == []


def test_a_forward_exchange_has_one_producer() -> None:
    story = joined(2, Partitioning.FORWARD)
    ends(story, SOURCE, 1)
    ends(story, COUNT, 1)
    assert story.broken == []


# ---------------------------------------------------------------------------------------------------------- named bases


def started_from(folder: str, named: str) -> list[str]:
    story = Story()
    story.begin()
    story.complete(1, CheckpointKind.STOP_SAVEPOINT)
    story.lead()
    story.submit(2, RestorePoint(1, folder, 0, CheckpointKind.STOP_SAVEPOINT), first=2, restore=named)
    story.record_attempt(1, folder=folder)
    return story.broken


def test_an_attempt_begins_at_another_snapshot_of_the_named_id() -> None:
    saved = f"{SAVEPOINTS}/savepoint-1"
    assert started_from(saved, f"{saved}-copy-1") == ["I16"]
    assert started_from(saved, f"{saved}/_metadata") == []
    assert started_from(saved, "latest") == []


# ------------------------------------------------------------------------------------------------------- what is left


def test_the_register_of_an_aborted_id_is_left_behind(story: Story) -> None:
    story.abort(2)
    story.complete(3, CheckpointKind.FINAL)
    story.finish(3)
    story.end()
    assert story.broken[:1] == ["I24"]


def test_the_register_of_an_aborted_id_goes_with_the_job(story: Story) -> None:
    story.abort(2)
    story.complete(3, CheckpointKind.FINAL)
    story.drop(2)
    story.finish(3)
    story.end()
    assert "I24" not in story.broken
