"""What checkpoints, tasks and jobs go through in the simulator, compared with the tables that say what they may."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from holdfast.barriers import messages
from holdfast.barriers.messages import TaskState
from holdfast.chaos.campaign.user_runs import run_seed
from holdfast.chaos.cluster.world import RunRequest
from holdfast.coordinator.checkpoints import pending
from holdfast.coordinator.checkpoints.pending import PendingCheckpoint, PendingStatus
from holdfast.coordinator.jobmaster.job import TRANSITIONS, JobState
from holdfast.coordinator.jobmaster.lifecycle import Lifecycle
from holdfast.operators.task.subtask import Subtask
from tests.examples import FACTOR

SEEDS = range(16)
WORKLOADS = ("counter", "windows", "timers", "aggregate", "fanout", "ends", "random", "late", "hooked")

RARE = {
    (PendingStatus.CALLING_HOOKS, PendingStatus.ABORTING),
    (PendingStatus.AWAITING_ACKS, PendingStatus.ABORTING),
    (PendingStatus.CLAIMING, PendingStatus.ABORTING),
    (PendingStatus.READY, PendingStatus.ABORTING),
    (PendingStatus.WRITING_METADATA, PendingStatus.ABORTING),
    (PendingStatus.ABORTING, PendingStatus.ABORTING),
    (PendingStatus.ABORTING, PendingStatus.ABORTED),
    (PendingStatus.ABORTING, PendingStatus.COMPLETED),
}
"""Steps of a checkpoint that these few seeds need not show; tests/coordinator/checkpoints/test_checkpoint_coordinator.py does."""


def steps(table: Mapping[Any, frozenset[Any]]) -> set[tuple[Any, Any]]:
    return {(before, after) for before, following in table.items() for after in following}


def recorded(monkeypatch: pytest.MonkeyPatch, owner: type[Any]) -> set[tuple[Any, Any]]:
    """Steps that the objects of a class take from now on."""
    seen: set[tuple[Any, Any]] = set()
    field = "status" if owner is PendingCheckpoint else "state"
    original = owner._enter

    def enter(self: Any, state: Any, *arguments: Any) -> None:
        before = getattr(self, field)
        original(self, state, *arguments)
        seen.add((before, state))

    monkeypatch.setattr(owner, "_enter", enter)
    return seen


JOBS = {
    (JobState.CREATED, JobState.RUNNING),
    (JobState.CREATED, JobState.RECONCILING),
    (JobState.RUNNING, JobState.RESTARTING),
    (JobState.RESTARTING, JobState.RUNNING),
    (JobState.RUNNING, JobState.FINISHED),
}
TASKS = {
    (TaskState.DEPLOYING, TaskState.INITIALIZING),
    (TaskState.INITIALIZING, TaskState.RUNNING),
    (TaskState.RUNNING, TaskState.CANCELING),
    (TaskState.CANCELING, TaskState.CANCELED),
    (TaskState.RUNNING, TaskState.FINISHED),
    (TaskState.RUNNING, TaskState.FAILED),
}


def test_the_simulator_visits_what_the_tables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `make test` it ends with the first seed behind which every step has been seen."""
    checkpoints, jobs, entered = (recorded(monkeypatch, owner) for owner in (PendingCheckpoint, Lifecycle, Subtask))
    wanted = steps(pending.TRANSITIONS) - RARE
    tasks: set[tuple[Any, Any]] = set()
    for seed in SEEDS:
        run_seed(RunRequest(seed, WORKLOADS[seed % len(WORKLOADS)]))
        # A task begins on its worker where it was deployed to.
        tasks = {(TaskState.DEPLOYING if before is TaskState.CREATED else before, after) for before, after in entered}
        if FACTOR == 1 and wanted <= checkpoints and jobs >= JOBS and tasks >= TASKS:
            break
    assert wanted <= checkpoints <= steps(pending.TRANSITIONS)
    assert {step for step in jobs if step[0] is not step[1]} <= steps(TRANSITIONS)
    assert jobs >= JOBS
    assert TASKS <= tasks <= steps(messages.TRANSITIONS)
