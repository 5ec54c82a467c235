"""A leader that was asleep: its successor has decided its ids, gone on, and deleted them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from holdfast.barriers.messages import CheckpointKind, FailureReason, NotifyCheckpointComplete, TaskState, TriggerCheckpoint
from holdfast.coordinator.checkpoints import actions, events
from holdfast.coordinator.dispatcher.submit import Starter, resume_submission
from holdfast.coordinator.ha.leadership import become_leader, check_leadership
from holdfast.coordinator.ha.recorded_job import CheckpointFact
from holdfast.coordinator.ha.records import LeaderRecord
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.statebackends.errors import FencedError, StorageUnavailableError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.port import one_by_one, run_flow
from tests.coordinator.rig import Rig
from tests.coordinator.world import JOB, DictStorage


def succeed(rig: Rig, *, checkpoints: int = 2) -> Rig:
    """Another leader takes the job, its workers are new processes, and it completes checkpoints of its own."""
    successor = copy.copy(rig)
    setup = run_flow(resume_submission(JOB, Starter("second", "", "directory", 0)), rig.storage)
    successor.open(setup)
    successor.tickets = 1_000  # its trigger ids are its own
    for slot in (0, 1):
        successor.register(slot, task_attempt=1)
    for slot in (0, 1):
        successor.report(slot, 2, TaskState.RUNNING)
    for _ in range(checkpoints):
        successor.checkpoint(2)
    return successor


def leader_of(nonce: str) -> LeaderRecord:
    return LeaderRecord(1, nonce, "", 0)


@pytest.mark.parametrize("others", [1, 3, 40])
def test_who_slept_while_it_took_the_lead_takes_an_epoch_above_all_others(others: int) -> None:
    """Since every one of them stands: without the one that it wants it would lead, and see nobody above it (ADR 26)."""
    paths, storage = JobPaths(JOB), DictStorage()
    run_flow(become_leader(paths, leader_of("first")), storage)
    sleepers = [one_by_one(become_leader(paths, leader_of(name))) for name in ("asleep", "asleep too")]
    listed = [storage.execute(next(asleep)) for asleep in sleepers]
    for number in range(others):
        run_flow(become_leader(paths, leader_of(f"other-{number}")), storage)
    pruned = copy.deepcopy(storage)
    assert woken(sleepers[0], listed[0], storage) == others + 2
    with pytest.raises(FencedError):
        run_flow(check_leadership(paths, 1), storage)
    for number in range(2, others + 1):
        del pruned.files[paths.leader(number)]
    if others > 1:
        assert run_flow(check_leadership(paths, 1), pruned) is None, "a leader of long ago would delete what the job needs"
        assert woken(sleepers[1], listed[1], pruned) == 2, "there would be two that lead"


def woken(flow: Any, result: Any, storage: DictStorage) -> Any:
    """What a flow returns that goes on from the result of an operation."""
    try:
        while True:
            result = storage.execute(flow.send(result))
    except StopIteration as stop:
        return stop.value


def completed_ids(rig: Rig) -> list[int]:
    return [entry.checkpoint_id for entry in run_flow(read_job(JobPaths(JOB)), rig.storage).with_fact(CheckpointFact.COMPLETED)]


def zombie_rig() -> Rig:
    return Rig().run()


def test_claim_of_an_id_that_a_successor_deleted_is_no_claim() -> None:
    rig = zombie_rig()
    rig.checkpoint()
    fence = rig.master.coordinator.next_checkpoint_id
    succeed(rig)
    assert f"{JOB}/chk-{fence}/_claim" not in rig.storage.files, "the fence went with retention"
    sent = {slot: len(rig.sent[slot]) for slot in rig.sent}
    rig.feed_request()
    assert rig.state == "SUSPENDED"
    assert {slot: len(rig.sent[slot]) for slot in rig.sent} == sent
    assert not [command for command in rig.commands(0, TriggerCheckpoint) if command.checkpoint_id == fence]


def test_completion_of_an_id_that_a_successor_deleted_is_announced_to_nobody() -> None:
    rig = zombie_rig()
    rig.checkpoint()
    number = rig.master.coordinator.next_checkpoint_id
    rig.feed_request()
    rig.acknowledge(0, 1, number)
    succeed(rig)
    assert f"{JOB}/chk-{number}/_metadata" not in rig.storage.files
    before = completed_ids(rig)
    rig.acknowledge(1, 1, number)
    assert rig.state == "SUSPENDED"
    assert not [command for command in rig.commands(0, NotifyCheckpointComplete) if command.checkpoint_id == number]
    assert completed_ids(rig) == before


def test_abort_of_an_id_that_a_successor_deleted_changes_nothing() -> None:
    rig = zombie_rig()
    rig.checkpoint()
    rig.feed_request()
    succeed(rig)
    files = set(rig.storage.files)
    rig.pass_time(rig.graph.config.checkpoint_timeout_ms)
    assert rig.state == "SUSPENDED"
    assert files <= set(rig.storage.files)


def test_storage_that_hides_the_leaders_leaves_a_completion_open() -> None:
    rig = zombie_rig()
    rig.held = {actions.WriteMetadata}
    number = rig.checkpoint()
    flow: Any = one_by_one(rig.effects.flow(rig.waiting.pop()))
    operation = next(flow)
    while f"{JOB}/leader" not in operation.path:
        operation = flow.send(rig.storage.execute(operation))
    with pytest.raises(StopIteration) as stop:
        flow.throw(StorageUnavailableError("away", path="leader"))
    assert stop.value.value == events.MetadataAmbiguous(number, stop.value.value.message)
    rig.held = set()
    rig.feed(stop.value.value)
    assert rig.state == "RUNNING"
    assert completed_ids(rig) == [number], "COMPLETED stands, and is obeyed once the leader is known again"
    assert rig.commands(0, NotifyCheckpointComplete)


@pytest.mark.parametrize("reason", [FailureReason.EXPIRED, FailureReason.DECLINED, FailureReason.SUSPENDED])
def test_stop_that_was_aborted_just_before_its_leader_died_fails_the_job_over(reason: FailureReason) -> None:
    """Its sources have stopped and say that they are drained: the job must not end as if they had read everything (F27)."""
    rig = zombie_rig()
    rig.checkpoint()
    rig.held = {actions.WriteAborted}
    stop = CheckpointKind.STOP_SAVEPOINT
    rig.call(lambda ticket: job_events.SnapshotRequested(ticket, stop, "stop", target="/savepoints"))
    assert rig.commands(0, TriggerCheckpoint)[-1].kind is CheckpointKind.STOP_SAVEPOINT
    number = rig.commands(0, TriggerCheckpoint)[-1].checkpoint_id
    run_flow(rig.effects.flow(actions.WriteAborted(number, reason, "")), rig.storage)
    setup = run_flow(resume_submission(JOB, Starter("second", "", "directory", 0)), rig.storage)
    assert setup.fail_over
    rig.open(setup)
    for slot in (0, 1):
        rig.register(slot, attempt=1, subtasks=rig.statuses(slot, 1, TaskState.RUNNING, drained=True))
    assert not rig.commands(0, TriggerCheckpoint)
    assert rig.master.lifecycle.attempt == 2
