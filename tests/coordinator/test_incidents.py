"""Which failures restart a job, and which end it at once."""

from __future__ import annotations

import pytest

from barriers.messages import ShutdownWorker, TaskState
from coordinator.incidents import is_final
from tests.coordinator.rig import Rig
from tests.coordinator.world import JOB

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
    assert rig.master.lifecycle.incidents.views()[0].error == f"{name}: it is so"


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
