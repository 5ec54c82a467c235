"""What COMPLETED must mean, who is told of it, and what the next attempt is given: one rule broken a test."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from holdfast.barriers.messages import (
    CheckpointKind,
    Deploy,
    Deployment,
    FinishTasks,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    Registered,
)
from holdfast.chaos.checkers.observations import Answered
from holdfast.statebackends.handles import InlineHandle, KeyGroupRange, OperatorListHandle, OperatorSubtaskState
from tests.simulation.checker_world import JOB, POSITIONS, SAVEPOINTS, STATE, Story, graph


@pytest.fixture
def story() -> Story:
    story = Story()
    story.begin()
    story.complete(1)
    return story


# ------------------------------------------------------------------------------------------------------------ completion


def test_an_acknowledgement_is_missing() -> None:
    story = Story(parallelism=2)
    story.begin()
    story.claim(1)
    states = story.acknowledge(1)
    for checker in story.checkers:
        if hasattr(checker, "_acks") and (1, 1) in checker._acks:
            checker._acks[1, 1].popitem()
    story.decide(1, story.snapshot(1, states))
    assert story.broken == ["I11"]


def test_acknowledgements_of_another_attempt_do_not_count(story: Story) -> None:
    story.attempt = 2
    story.claim(2)
    story.claims[2] = msgspec.structs.replace(story.claims[2], attempt=1)
    states = story.acknowledge(2)
    story.decide(2, story.snapshot(2, states, attempt=2))
    assert story.broken == ["I11"]


def test_other_state_is_stored_than_was_acknowledged(story: Story) -> None:
    story.claim(2)
    states = story.acknowledge(2)
    part = OperatorListHandle(POSITIONS, InlineHandle(msgspec.msgpack.encode([b"other"])), 1)
    story.decide(2, story.snapshot(2, {**states, "source": [OperatorSubtaskState(operator=(part,))]}))
    assert story.broken == ["I11"]


def test_a_file_is_missing_damaged_or_cut_short(story: Story) -> None:
    for content in (None, b"state of 2 1", b"state"):
        story.violations.clear()
        number = len(story.claims) + 1
        story.claim(number)
        states = story.acknowledge(number)
        path = f"/state/{JOB}/chk-{number}/count-0-1"
        if content is None:
            del story.files[path]
        else:
            story.files[path] = content
        story.decide(number, story.snapshot(number, states))
        assert story.broken == ["I11"]


def test_an_external_file_is_missing(story: Story) -> None:
    story.claim(2)
    states = story.acknowledge(2)
    story.decide(2, story.snapshot(2, states, external=("/out/_holdfast/ledger/staged/a|/out/_holdfast/ledger/data/a",)))
    assert story.broken == ["I11"]


def test_a_file_of_a_completed_checkpoint_is_deleted(story: Story) -> None:
    story.delete(f"{JOB}/chk-1/count-0-1")
    assert story.broken == ["I11"]


def test_files_of_a_dropped_checkpoint_may_go(story: Story) -> None:
    story.complete(2)
    story.drop(1)
    assert story.violations == []


def test_a_file_of_a_savepoint_is_deleted(story: Story) -> None:
    story.complete(2, CheckpointKind.SAVEPOINT)
    story.delete("savepoint-2/count-0-1", SAVEPOINTS)
    assert story.broken == ["I25"]


def test_an_external_file_moves_to_its_other_place_and_is_deleted_there(story: Story) -> None:
    staged, data = "_holdfast/ledger/staged/a", "_holdfast/ledger/data/a"
    story.write(staged, b"rows", "/out")
    story.claim(2, CheckpointKind.SAVEPOINT)
    story.decide(2, story.snapshot(2, story.acknowledge(2), external=(f"/out/{staged}|/out/{data}",)))
    story.write(data, b"rows", "/out")
    story.delete(staged, "/out")
    assert story.violations == []
    story.delete(data, "/out")
    assert story.broken == ["I25"]


def test_a_snapshot_that_cant_be_read_is_none(story: Story) -> None:
    story.claim(2)
    story.put(f"{JOB}/chk-2/_metadata", b'{"format":"holdfast-snapshot","version":1}')
    assert story.broken == ["I11"]


def test_torn_files_are_found_after_a_power_loss(story: Story) -> None:
    story.files[f"/state/{JOB}/chk-1/count-0-1"] = b"state"
    story.lose_power()
    assert story.broken == ["I11"]


# --------------------------------------------------------------------------------------------------------------- notices


def test_a_notice_comes_before_the_record(story: Story) -> None:
    story.claim(2)
    story.notify(2)
    assert story.broken[0] == "I14"


def test_a_notice_follows_an_orphan(story: Story) -> None:
    story.claim(2)
    metadata = story.snapshot(2, story.acknowledge(2))
    story.abort(2)
    story.complete(3)
    story.drop(2)
    story.decide(2, metadata)
    assert story.violations == []
    story.notify(2)
    assert story.broken[0] == "I14"


def test_a_worker_is_told_of_a_checkpoint_that_is_not_complete(story: Story) -> None:
    answer = Registered(1, "s", 1, None, 7, (), 100, 1000)
    story.tell(Answered(story.now_ms, "coordinator-1", "worker-0.1", "register", answer))
    assert story.broken == ["I14"]


def test_a_completed_checkpoint_is_told_to_be_aborted(story: Story) -> None:
    story.command(NotifyCheckpointAborted(1, 1))
    assert story.broken == ["I14"]


def test_an_abort_names_a_newest_checkpoint_that_is_none(story: Story) -> None:
    story.claim(2)
    story.abort(2)
    story.command(NotifyCheckpointAborted(1, 2, newest_completed=2))
    assert story.broken == ["I14"]


def test_a_job_is_ended_by_a_checkpoint_that_ends_nothing(story: Story) -> None:
    story.command(FinishTasks(1, 1))
    assert story.broken == ["I14"]


def test_a_power_loss_takes_what_was_told(story: Story) -> None:
    story.lose_power(f"{JOB}/chk-1/_metadata")
    assert story.broken == ["I14"]


def test_notices_may_be_repeated_and_late(story: Story) -> None:
    story.complete(2)
    story.drop(1)
    story.notify(1)
    story.deliver(NotifyCheckpointComplete(1, 2, 0))
    assert story.violations == []


# ---------------------------------------------------------------------------------------------------------- distribution


Change = Callable[[Deployment], Deployment]


def deploy_changed(story: Story, change: Change) -> None:
    """Fail over to checkpoint 1, with a deployment of slot 0 that somebody changed."""
    story.record_attempt(1)
    for slot in range(story.parallelism):
        deployment = story.deployment(slot, 1)
        story.command(Deploy(change(deployment) if slot == 0 else deployment), slot)


def without(uid: str) -> Change:
    """Lose the state of an operator."""

    def change(deployment: Deployment) -> Deployment:
        subtasks = tuple(
            msgspec.structs.replace(each, restore={name: state for name, state in each.restore.items() if name != uid})
            for each in deployment.subtasks
        )
        return msgspec.structs.replace(deployment, subtasks=subtasks)

    return change


def test_a_subtask_is_not_given_its_keyed_state(story: Story) -> None:
    deploy_changed(story, without("count"))
    assert story.broken == ["I26"]


def test_a_subtask_is_not_given_its_list(story: Story) -> None:
    deploy_changed(story, without("source"))
    assert story.broken == ["I27"]


def test_a_subtask_is_not_deployed(story: Story) -> None:
    deploy_changed(story, lambda deployment: msgspec.structs.replace(deployment, subtasks=deployment.subtasks[:1]))
    assert story.broken == ["I26"]


def test_slots_begin_at_different_checkpoints() -> None:
    story = Story(parallelism=2)
    story.begin()
    story.complete(1)
    deploy_changed(story, lambda deployment: msgspec.structs.replace(deployment, restored_checkpoint_id=0))
    assert set(story.broken) == {"I8"}


@pytest.mark.parametrize(("dealt", "broken"), [((0, 1), []), ((0, 0), ["I27"]), ((0,), ["I27"])])
def test_lists_are_dealt_out_anew_when_the_parallelism_changes(dealt: tuple[int, ...], broken: list[str]) -> None:
    story = Story(parallelism=2)
    story.begin()
    story.complete(1)
    rescale(story, dealt)
    assert story.broken == broken


def rescale(story: Story, dealt: tuple[int, ...]) -> None:
    """From two subtasks to one, which is given these list entries and all keyed parts."""
    old = {operator.uid: operator for operator in story.metadata[1].operators}
    entries = [b"1 %d" % index for index in dealt]
    part = OperatorListHandle(POSITIONS, InlineHandle(msgspec.msgpack.encode(entries)), len(entries))
    keyed = tuple(handle for subtask in old["count"].subtasks for handle in subtask.keyed)
    story.parallelism, story.graph = 1, graph(1)
    story.record_attempt(1)
    deployment = story.deployment(0, 1)
    restore = {"source": OperatorSubtaskState(operator=(part,)), "count": OperatorSubtaskState(keyed=keyed)}
    subtasks = tuple(
        msgspec.structs.replace(each, restore={uid: state for uid, state in restore.items() if uid in each.restore})
        for each in deployment.subtasks
    )
    story.command(Deploy(msgspec.structs.replace(deployment, subtasks=subtasks)))


def test_key_groups_of_a_snapshot_overlap() -> None:
    story = Story(parallelism=2)
    story.begin()
    story.claim(1)
    states = story.acknowledge(1)
    (handle,) = states["count"][1].keyed
    wider = msgspec.structs.replace(handle, key_groups=KeyGroupRange(1, 4))
    states["count"][1] = OperatorSubtaskState(keyed=(wider,))
    story.decide(1, story.snapshot(1, states))
    assert "I26" in story.broken


def test_a_claim_alone_behind_its_deletion_is_no_checkpoint_until_its_decision_is_there_again(story: Story) -> None:
    claim, decision = (story.files[f"{STATE}/{JOB}/chk-1/{name}"] for name in ("_claim", "_metadata"))
    story.lead()
    story.complete(2)
    story.drop(1)
    story.put(f"{JOB}/chk-1/_claim", claim)  # by a leader that had slept
    story.end()
    assert story.violations == []
    story.put(f"{JOB}/chk-1/_metadata", decision)
    assert "I11" in story.broken


def test_a_claim_that_comes_back_beside_its_decision_needs_the_files_of_its_checkpoint(story: Story) -> None:
    claim = story.files[f"{STATE}/{JOB}/chk-1/_claim"]
    gone = next(path for path in story.files if "/chk-1/" in path and not path.endswith(("_claim", "_metadata")))
    story.lead()
    story.complete(2)
    story.delete(f"{JOB}/chk-1/_claim")
    story.delete(gone.removeprefix(f"{STATE}/"))
    assert story.violations == []
    story.put(f"{JOB}/chk-1/_claim", claim)  # by a leader that had slept
    assert "I11" in story.broken


def test_a_claim_alone_that_was_aborted_is_no_checkpoint_behind_a_power_loss(story: Story) -> None:
    claim = story.files[f"{STATE}/{JOB}/chk-1/_claim"]
    story.complete(2)
    story.drop(1)
    story.lead()
    story.put(f"{JOB}/chk-1/_claim", claim)
    story.abort(1)
    story.lose_power()
    story.end()
    assert story.violations == []
