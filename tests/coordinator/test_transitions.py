"""The tables of steps that a checkpoint, a task and a job may take."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from itertools import pairwise
from typing import Any

import pytest

from holdfast.barriers import messages
from holdfast.barriers.messages import SubtaskKey, SubtaskStatus, TaskState
from holdfast.coordinator.checkpoints import pending
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest
from holdfast.coordinator.checkpoints.pending import PendingCheckpoint, PendingStatus
from holdfast.coordinator.jobmaster.execution import Execution
from holdfast.coordinator.jobmaster.job import TRANSITIONS, JobState
from holdfast.statebackends.errors import InvariantError
from tests.api.fakes import SOURCE, make_graph
from tests.coordinator.rig import Rig

TABLES: dict[type[StrEnum], Any] = {
    PendingStatus: pending.TRANSITIONS,
    JobState: TRANSITIONS,
    TaskState: messages.TRANSITIONS,
}


def reachable(table: Mapping[Any, frozenset[Any]], first: Any) -> set[Any]:
    found, waiting = {first}, [first]
    while waiting:
        new = table[waiting.pop()] - found
        found |= new
        waiting += new
    return found


@pytest.mark.parametrize("enum", TABLES)
def test_every_state_is_in_the_table_and_is_reached_from_the_first(enum: type[StrEnum]) -> None:
    table = TABLES[enum]
    assert table.keys() == set(enum)
    assert reachable(table, next(iter(enum))) == set(enum)


def test_a_job_leaves_every_state_that_is_no_end() -> None:
    assert {state for state, after in TRANSITIONS.items() if not after} == {
        state for state in JobState if state.is_terminal or state is JobState.SUSPENDED
    }


PATHS = {
    PendingStatus.CLAIMING: (),
    PendingStatus.CALLING_HOOKS: (PendingStatus.CALLING_HOOKS,),
    PendingStatus.AWAITING_ACKS: (PendingStatus.AWAITING_ACKS,),
    PendingStatus.READY: (PendingStatus.AWAITING_ACKS, PendingStatus.READY),
    PendingStatus.WRITING_METADATA: (PendingStatus.AWAITING_ACKS, PendingStatus.READY, PendingStatus.WRITING_METADATA),
    PendingStatus.ABORTING: (PendingStatus.ABORTING,),
    PendingStatus.COMPLETED: (PendingStatus.ABORTING, PendingStatus.COMPLETED),
    PendingStatus.ABORTED: (PendingStatus.ABORTING, PendingStatus.ABORTED),
}


@pytest.mark.parametrize("before", PendingStatus)
@pytest.mark.parametrize("after", PendingStatus)
def test_a_checkpoint_takes_no_other_step(before: PendingStatus, after: PendingStatus) -> None:
    entry = PendingCheckpoint(
        7,
        CheckpointRequest(),
        attempt=1,
        folder="job/chk-7",
        tasks=frozenset({SubtaskKey("v", 0)}),
        finished=(),
        started_ms=0,
        deadline_ms=1,
    )
    for status in PATHS[before]:
        entry._enter(status)
    if after in pending.TRANSITIONS[before]:
        entry._enter(after)
        assert entry.status is after
    else:
        with pytest.raises(InvariantError, match="checkpoint 7 is"):
            entry._enter(after)
        assert entry.status is before


@pytest.mark.parametrize("before", JobState)
@pytest.mark.parametrize("after", JobState)
def test_a_job_takes_no_other_step(before: JobState, after: JobState) -> None:
    lifecycle = Rig().master.lifecycle
    lifecycle.state = before
    if after is before or after in TRANSITIONS[before]:
        lifecycle._enter(after)
        assert lifecycle.state is after
    else:
        with pytest.raises(InvariantError, match="can't become"):
            lifecycle._enter(after)
        assert lifecycle.state is before


@pytest.mark.parametrize(("before", "after"), [(a, b) for a, after in messages.TRANSITIONS.items() for b in sorted(after)])
def test_the_job_master_takes_each_step_of_a_task_and_none_back(before: TaskState, after: TaskState) -> None:
    execution = Execution(1, make_graph(parallelism=1))
    steps = [execution.apply(SubtaskStatus(1, SOURCE, 0, state), 1_000) for state in (before, after, before)]
    assert steps == [before is not TaskState.CREATED, True, False]


def test_a_leader_may_meet_a_task_anywhere_on_its_way() -> None:
    way = [TaskState.CREATED, TaskState.SCHEDULED, TaskState.DEPLOYING, TaskState.INITIALIZING]
    way += [TaskState.RUNNING, TaskState.FINISHED]
    assert all(after in messages.TRANSITIONS[before] for before, after in pairwise(way))
    for state in way[1:]:
        assert Execution(1, make_graph(parallelism=1)).apply(SubtaskStatus(1, SOURCE, 0, state), 1_000)
