"""What a process saw, and acted on, stays when the power fails: also what its writer died over before it was durable."""

from __future__ import annotations

import random

import pytest

from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.barriers.sinks.log import PendingCheckpoint, SinkPaths, StagedFile
from holdfast.chaos.sim.disk import SimDisk
from holdfast.coordinator.dispatcher.submit import Starter, clear_ended
from holdfast.coordinator.ha.records import AbortRecord, ClaimRecord, ResultRecord, SubmissionRecord
from holdfast.coordinator.ha.recovery import Takeover, recover_job
from holdfast.coordinator.ha.store import (
    abort_checkpoint,
    claim_checkpoint,
    decide_checkpoint,
    put_once,
    write_result,
    write_submission,
)
from holdfast.operators.sinks.files.log import Claimant, OpenLog, commit_flow, open_log_flow
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import Flow, WriteFile, run_flow
from tests.coordinator.doubles import submission, word_count
from tests.coordinator.test_store import snapshot

PATHS = JobPaths("job")
LOSSES = range(12)


RECORD = SubmissionRecord(1, 1, submission(word_count()), None, 1, "n")


class _Death(BaseException):
    """The process is gone."""


class Machine:
    """A disk, and processes on it."""

    def __init__(self) -> None:
        self.disk = SimDisk()
        self.nonces = 0

    def _nonce(self) -> str:
        self.nonces += 1
        return f"t{self.nonces}"

    def storage(self) -> LocalStorage:
        """As a new process sees it: it knows of no folder that it is durable."""
        return LocalStorage("/state", file_system=self.disk, new_nonce=self._nonce)

    def run(self, flow: Flow[object]) -> object:
        return run_flow(flow, self.storage())

    def die_before_durable(self, flow: Flow[object], seen: str) -> None:
        """Perform a flow, and die once `seen` can be seen and before its name is durable."""

        def hook(name: str, path: str, size: int) -> int:
            if name == "fsync_folder" and self.disk.view("/state").size(seen) is not None:
                raise _Death
            return size

        self.disk.before_call = hook
        with pytest.raises(_Death):
            self.run(flow)
        self.disk.before_call = None
        assert self.disk.view("/state").size(seen) is not None

    def stays(self, path: str, seed: int) -> bool:
        self.disk.power_loss(random.Random(seed))
        return self.disk.view("/state").size(path) is not None


def begun() -> Machine:
    machine = Machine()
    machine.run(put_once(PATHS.leader(1), b'{"epoch":1,"nonce":"a","url":"","created_ms":0}'))
    machine.run(write_submission(PATHS, RECORD))
    machine.run(claim_checkpoint(PATHS, ClaimRecord(1, 1, 1, 1, CheckpointKind.CHECKPOINT, PATHS.checkpoint(1), "a")))
    return machine


def settle(machine: Machine) -> None:
    machine.run(put_once(PATHS.leader(2), b'{"epoch":2,"nonce":"b","url":"","created_ms":0}'))
    machine.run(recover_job(PATHS, Takeover(2, "b", 0)))


def test_the_premise_what_nobody_made_durable_can_vanish() -> None:
    outcomes = set()
    for seed in LOSSES:
        machine = begun()
        machine.die_before_durable(decide_checkpoint(PATHS, 1, snapshot(1)), PATHS.decision(1))
        outcomes.add(machine.stays(PATHS.decision(1), seed))
    assert outcomes == {True, False}


@pytest.mark.parametrize("seed", LOSSES)
def test_a_decision_that_a_new_leader_goes_on_from_stays(seed: int) -> None:
    machine = begun()
    machine.die_before_durable(decide_checkpoint(PATHS, 1, snapshot(1)), PATHS.decision(1))
    settle(machine)
    assert machine.stays(PATHS.decision(1), seed)
    assert machine.stays(PATHS.claim(1), seed)


@pytest.mark.parametrize("seed", LOSSES)
def test_a_submission_that_a_new_leader_leads_stays(seed: int) -> None:
    machine = Machine()
    machine.run(put_once(PATHS.leader(1), b'{"epoch":1,"nonce":"a","url":"","created_ms":0}'))
    machine.die_before_durable(write_submission(PATHS, RECORD), PATHS.submission(1))
    settle(machine)
    assert machine.stays(PATHS.submission(1), seed)


@pytest.mark.parametrize("seed", LOSSES)
def test_a_result_stays_once_checkpoints_are_deleted_on_its_word(seed: int) -> None:
    machine = begun()
    machine.run(abort_checkpoint(PATHS, AbortRecord(1, FailureReason.EXPIRED, 1, "a")))
    machine.die_before_durable(write_result(PATHS, ResultRecord(1, "FINISHED", 1, "a", 1, 0)), PATHS.result(1))
    machine.run(clear_ended("job", Starter("b", "", "directory", 0)))
    gone = machine.disk.view("/state").size(PATHS.claim(1)) is None
    assert gone
    assert machine.stays(PATHS.result(1), seed)


# ------------------------------------------------------------------------------------------------------------- sinks

SINK = SinkPaths("sink")
CLAIMANT = Claimant("job", 1, "nonce", 0, False, "", 0)


def opened(machine: Machine) -> OpenLog:
    log = machine.run(open_log_flow(SINK, None, (), CLAIMANT))
    assert isinstance(log, OpenLog)
    return log


@pytest.mark.parametrize("seed", LOSSES)
def test_a_commit_that_a_restored_committer_goes_on_from_stays(seed: int) -> None:
    """It forgets the files then: were the entry to vanish, nobody would commit them again."""
    machine = Machine()
    log = opened(machine)
    pending = PendingCheckpoint(1, (StagedFile("part-a", 1),))
    machine.run(_staged("part-a"))
    machine.die_before_durable(commit_flow(SINK, log, pending, CLAIMANT), SINK.log(1))
    again = machine.run(open_log_flow(SINK, log.position, (pending,), CLAIMANT))
    assert isinstance(again, OpenLog)
    assert again.committed == {"part-a"}
    assert machine.stays(SINK.log(1), seed)


def _staged(name: str) -> Flow[object]:
    return (yield WriteFile(SINK.staged(name), [b"rows"]))
