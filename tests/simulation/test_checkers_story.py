"""Good stories: a whole life of a job, with every misfortune that is allowed, in which no checker says anything."""

from __future__ import annotations

import pytest

from holdfast.barriers.messages import CheckpointKind, TaskState
from holdfast.chaos.checkers import CHECKERS, INVARIANTS, NOT_COVERED, make_checkers
from holdfast.chaos.checkers.observations import Led, PhaseBegan
from holdfast.coordinator.ha.records import RestorePoint
from tests.simulation.checker_world import JOB, Story, ledger


@pytest.fixture
def story() -> Story:
    story = Story(sinks=ledger((1, 1), (2, 1), (1, 2), (1, 3)))
    story.begin()
    return story


def test_a_job_without_failures(story: Story) -> None:
    for checkpoint, rows in ((1, [(1, 1), (2, 1)]), (2, [(1, 2)])):
        name = story.staged_name(checkpoint, checkpoint)
        story.stage(name, *rows)
        story.complete(checkpoint)
        story.commit(checkpoint, name)
        story.drop(checkpoint - 1) if checkpoint > 1 else None
        story.look()
    name = story.staged_name(3)
    story.stage(name, (1, 3))
    story.complete(3, CheckpointKind.FINAL)
    story.commit(3, name)
    story.drop(2)
    story.report(TaskState.FINISHED)
    story.finish(3)
    story.end()
    assert story.violations == []


def test_a_failover_goes_on_from_the_newest_checkpoint(story: Story) -> None:
    early, late = story.staged_name(1), story.staged_name(2)
    story.stage(early, (1, 1), (2, 1))
    story.complete(1)
    story.stage(late, (1, 2))
    story.claim(2)
    story.trigger(2)
    story.acknowledge(2)
    story.abort(2)
    story.notify_aborted(2)
    story.fail_over(1)
    story.commit(1, early)
    again = story.staged_name(2)
    story.stage(again, (1, 2), (1, 3))
    story.delete(f"_holdfast/ledger/staged/{late}", "/out")
    story.complete(3, CheckpointKind.FINAL)
    story.commit(3, again)
    story.drop(1)
    story.drop(2)
    story.finish(3)
    story.end()
    assert story.violations == []


def test_a_new_leader_settles_and_reconciles() -> None:
    story = Story(parallelism=2)
    story.begin()
    story.complete(1)
    story.claim(2)
    story.trigger(2)
    story.lead()
    story.abort(2)
    story.claim(3)
    story.abort(3)
    story.tell(Led(story.now_ms, "coordinator-2", JOB, 2, 1, story.graph))
    story.complete(4)
    story.drop(1)
    story.tell(PhaseBegan(story.now_ms, "liveness"))
    story.end()
    assert story.violations == []


def test_what_a_stale_leader_writes_into_deleted_registers_is_an_orphan(story: Story) -> None:
    story.complete(1)
    story.claim(2)
    states = story.acknowledge(2)
    completed_late = story.snapshot(2, states)
    story.lead()
    story.abort(2)
    story.claim(3)
    story.abort(3)
    story.tell(Led(story.now_ms, "coordinator-2", JOB, 2, 1, story.graph))
    story.complete(4)
    for number in (1, 2, 3):
        story.drop(number)
    story.epoch = 1  # it wakes: its claim and its decision find empty registers
    story.claim(3)
    story.epoch = 2
    story.decide(2, completed_late)
    story.epoch = 2
    story.complete(5)
    story.drop(4)
    story.end()
    assert story.violations == []


def test_a_late_claim_of_an_id_that_was_given_up_is_no_second_claim(story: Story) -> None:
    story.complete(1)
    story.abort(2)  # its claim is on its way, and nobody knows
    story.complete(3)
    story.claim(2)
    story.drop(1)
    story.drop(2)
    story.end()
    assert story.violations == []


def test_a_savepoint_lives_beside_the_checkpoints_and_is_restored() -> None:
    story = Story()
    story.begin()
    story.complete(1)
    story.complete(2, CheckpointKind.SAVEPOINT)
    story.complete(3, CheckpointKind.STOP_SAVEPOINT)
    story.finish(3)
    story.lead()
    base = story.claims[3]
    story.submit(2, RestorePoint(3, base.folder, 0, CheckpointKind.STOP_SAVEPOINT), first=4)
    story.fail_over(3)
    story.jobs_live = True
    story.complete(4, CheckpointKind.FINAL)
    story.finish(4)
    story.end()
    assert story.violations == []


def test_a_power_loss_may_take_what_nobody_was_told_of(story: Story) -> None:
    story.complete(1)
    story.claim(2)
    story.trigger(2)
    story.decide(2, story.snapshot(2, story.acknowledge(2)))
    story.lose_power(f"{JOB}/chk-2/_metadata")
    story.lead()
    story.abort(2)
    story.fail_over(1)
    story.complete(3)
    story.drop(1)
    story.end()
    assert story.violations == []


def test_every_invariant_is_somebodys_or_said_to_be_nobodys(story: Story) -> None:
    covered = {invariant for checker in CHECKERS for invariant in checker.invariants}
    assert covered | NOT_COVERED.keys() | {"I4"} == INVARIANTS.keys()
    assert tuple(type(checker) for checker in make_checkers(story, story.scenario, lambda *_: None)) == CHECKERS


# ------------------------------------------------------------------------------------------------------------- restarts


@pytest.mark.parametrize(("restarts", "broken"), [(0, ["I16"]), (1, []), (2, ["I16"])])
def test_a_failover_counts_once_behind_a_checkpoint_whoever_leads(restarts: int, broken: list[str]) -> None:
    story = Story()
    story.begin()
    story.complete(1)
    story.lead()
    story.record_attempt(1, restarts=restarts)
    assert story.broken == broken


@pytest.mark.parametrize(("restarts", "broken"), [(0, []), (1, []), (2, ["I16"])])
def test_an_attempt_without_a_checkpoint_may_be_the_old_failure_seen_again(restarts: int, broken: list[str]) -> None:
    story = Story()
    story.begin()
    story.record_attempt(0, restarts=restarts)
    assert story.broken == broken


def test_a_submission_begins_without_restarts() -> None:
    story = Story()
    story.begin()
    story.complete(1)
    story.lead()
    story.submit(2, RestorePoint(1, story.folder(1), 0), 2)
    story.record_attempt(1, restarts=1)
    assert story.broken == ["I16"]
