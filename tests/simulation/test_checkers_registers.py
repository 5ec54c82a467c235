"""Ids, decisions, leaders, attempts: one rule broken a test, and the invariant that says so."""

from __future__ import annotations

import pytest

from holdfast.barriers.messages import CheckpointKind, Deploy, NotifyCheckpointComplete, Registered, TaskState, TriggerCheckpoint
from holdfast.chaos.checkers.observations import Answered, Commanded, Impersonated, Led, Stored
from holdfast.coordinator.ha.records import encode_record
from holdfast.statebackends.errors import AuthenticationError
from holdfast.statebackends.storage.port import PutIfAbsent
from tests.simulation.checker_world import JOB, STATE, Story


@pytest.fixture
def story() -> Story:
    story = Story()
    story.begin()
    story.complete(1)
    return story


# ------------------------------------------------------------------------------------------------------------ registers


def test_an_id_that_was_dropped_is_claimed_again(story: Story) -> None:
    story.complete(2)
    story.drop(1)
    story.lead()
    story.claim(1)
    assert story.broken == ["I12"]


def test_a_checkpoint_is_triggered_before_it_is_claimed(story: Story) -> None:
    story.command(TriggerCheckpoint(1, 2, 0, CheckpointKind.CHECKPOINT, f"{JOB}/chk-2"))
    assert story.broken == ["I12"]


def test_a_stale_claim_is_acted_on(story: Story) -> None:
    story.lead()
    story.claim(2)
    story.abort(2)
    story.complete(3)
    story.drop(2)
    story.epoch = 1
    story.claim(2)
    story.trigger(2)
    assert story.broken == ["I12"]


def test_a_new_leader_goes_back_in_ids(story: Story) -> None:
    story.claim(3)
    story.trigger(3)
    story.abort(3)
    story.lead()
    story.claim(2)
    story.trigger(2)
    assert story.broken == ["I12"]


def test_a_decision_is_deleted_before_the_claim(story: Story) -> None:
    story.delete(f"{JOB}/chk-1/_metadata")
    assert story.broken == ["I13"]


def test_a_put_overwrites(story: Story) -> None:
    path = f"{JOB}/chk-1/_metadata"
    story.tell(Stored(story.now_ms, "coordinator-1", STATE, PutIfAbsent(path, b"else"), True))
    assert story.broken == ["I13"]


def test_an_undecided_id_is_dropped(story: Story) -> None:
    story.claim(2)
    story.delete(f"{JOB}/chk-2/_claim")
    assert story.broken == ["I13"]


def test_a_leader_completes_what_another_one_claimed(story: Story) -> None:
    story.claim(2)
    states = story.acknowledge(2)
    story.lead()
    story.decide(2, story.snapshot(2, states, epoch=2))
    assert story.broken == ["I15"]


def test_a_leader_completes_after_another_one_leads(story: Story) -> None:
    story.claim(2)
    states = story.acknowledge(2)
    story.lead()
    story.tell(Led(story.now_ms, "coordinator-2", JOB, 2, 1, story.graph))
    assert story.broken == ["I13"]  # it should have decided what the first one had claimed
    story.epoch = 1
    story.decide(2, story.snapshot(2, states))
    assert story.broken == ["I13", "I15"]


def test_a_checkpoint_of_an_old_attempt_completes(story: Story) -> None:
    story.claim(2)
    states = story.acknowledge(2)
    story.record_attempt(1)
    story.decide(2, story.snapshot(2, states))
    assert story.broken == ["I15"]


def test_a_late_record_of_a_dead_leader_is_no_newer_attempt(story: Story) -> None:
    story.lead()
    story.claim(2)
    states = story.acknowledge(2)
    story.epoch = 1
    story.record_attempt(1)  # was on its way for long
    story.epoch = 2
    story.decide(2, story.snapshot(2, states))
    assert story.violations == []


def test_the_newest_checkpoint_is_dropped(story: Story) -> None:
    story.drop(1)
    assert story.broken == ["I16"]


def test_a_savepoint_is_dropped(story: Story) -> None:
    story.complete(2, CheckpointKind.SAVEPOINT)
    story.delete(f"{JOB}/chk-2/_claim")
    assert story.broken == ["I25"]


# -------------------------------------------------------------------------------------------------------------- attempts


def test_an_epoch_is_left_out(story: Story) -> None:
    story.lead(3)
    assert story.broken == ["I15"]


def test_an_attempt_is_left_out(story: Story) -> None:
    story.record_attempt(1, attempt=4)
    assert story.broken == ["I15"]


def test_an_attempt_begins_at_an_older_checkpoint(story: Story) -> None:
    story.complete(2)
    story.record_attempt(1)
    assert story.broken == ["I16"]


def test_a_plain_savepoint_is_no_place_to_recover_from(story: Story) -> None:
    story.complete(2, CheckpointKind.SAVEPOINT)
    story.record_attempt(2)
    assert story.broken == ["I16"]


def test_an_attempt_is_deployed_before_it_is_on_record(story: Story) -> None:
    story.attempt = 2
    story.command(Deploy(story.deployment(0, 1)))
    assert story.broken == ["I15"]


def test_another_leader_deploys_an_attempt(story: Story) -> None:
    story.record_attempt(1)
    command = Deploy(story.deployment(0, 1))
    story.lead()
    story.tell(Commanded(story.now_ms, "coordinator-2", 2, 0, command))
    assert story.broken == ["I15"]


def test_an_attempt_is_deployed_from_elsewhere_than_its_record_says(story: Story) -> None:
    story.record_attempt(1)
    story.command(Deploy(story.deployment(0)))
    assert story.broken == ["I8"]


def test_a_slot_is_given_to_two_processes(story: Story) -> None:
    story.deliver(Deploy(story.deployment(0)), actor="worker-0.2")
    assert story.broken == ["I15"]


def test_a_worker_goes_back_to_an_older_attempt(story: Story) -> None:
    story.fail_over(1)
    story.attempt = 1
    story.deliver(Deploy(story.deployment(0)))
    assert story.broken == ["I15"]


def test_a_worker_takes_a_command_of_another_attempt(story: Story) -> None:
    story.fail_over(1)
    story.deliver(NotifyCheckpointComplete(1, 1, 0))
    assert story.broken == ["I15"]


def test_a_worker_speaks_of_an_attempt_that_it_was_not_given(story: Story) -> None:
    story.report(TaskState.RUNNING, attempt=2)
    assert story.broken == ["I15"]


TAKEN = Registered(1, "s", 1, None, 0, (), 1, 1)


@pytest.mark.parametrize(("answer", "broken"), [(TAKEN, ["I15"]), (AuthenticationError("no"), [])])
def test_a_slot_is_given_to_somebody_whom_nobody_launched(story: Story, answer: object, broken: list[str]) -> None:
    story.tell(Impersonated(story.now_ms, "stranger-1", 0))
    story.tell(Answered(story.now_ms, "coordinator-1", "stranger-1", "register", answer))
    story.tell(Answered(story.now_ms, "coordinator-1", "worker-0.1", "register", TAKEN))
    assert story.broken == broken


def test_records_of_another_job_are_nobodys_business(story: Story) -> None:
    story.put(f"{'6' * 32}/chk-1/_claim", encode_record(story.claims[1]))
    story.delete(f"{'6' * 32}/chk-1/_claim")
    assert story.violations == []
