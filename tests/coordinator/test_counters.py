"""Records counted by a job that ends between two heartbeats: told with the last states, kept behind the end, on record."""

from __future__ import annotations

import pytest

from holdfast.barriers.messages import Heartbeat, StatusBatch, SubtaskMetrics, TaskState
from holdfast.coordinator.dispatcher.published import capture
from holdfast.coordinator.dispatcher.reading.queries import view_recorded_job
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.port import run_flow
from tests.coordinator.rig import Rig
from tests.coordinator.world import JOB


def counted(rig: Rig, slot: int, state: TaskState, records: int) -> None:
    statuses = tuple(
        type(status)(
            status.attempt,
            status.vertex,
            status.subtask,
            status.state,
            drained=True,
            metrics=SubtaskMetrics(status.vertex, slot, records_in=records),
        )
        for status in rig.statuses(slot, 1, state)
    )
    rig.call(lambda ticket: job_events.StatesReceived(ticket, StatusBatch(rig.setup.epoch, slot, rig.sessions[slot], statuses)))


def beat(rig: Rig, slot: int, records: int) -> None:
    metrics = tuple(SubtaskMetrics(vertex.vertex_id, slot, records_in=records) for vertex in rig.graph.vertices)
    rig.call(lambda ticket: job_events.HeartbeatReceived(ticket, Heartbeat(slot, rig.sessions[slot], 1, metrics)))


def shown(rig: Rig) -> list[list[int]]:
    vertices = capture(rig.master, 0, 0, monotonic_ms=0).job().vertices
    return [[subtask.metrics.records_in for subtask in vertex.subtasks] for vertex in vertices]


@pytest.fixture
def finished() -> Rig:
    rig = Rig().run()
    for slot in (0, 1):
        counted(rig, slot, TaskState.RUNNING, 7)
    assert shown(rig) == [[7, 7], [7, 7]]
    for slot in (0, 1):
        rig.acknowledge(slot, 1, 1)
    for slot in (0, 1):
        counted(rig, slot, TaskState.FINISHED, 8)
    assert rig.state == "FINISHED"
    return rig


def test_final_counters_come_with_the_last_state_and_stay(finished: Rig) -> None:
    assert shown(finished) == [[8, 8], [8, 8]]


def test_heartbeat_taken_before_the_end_does_not_take_final_counters_back() -> None:
    rig = Rig().run()
    counted(rig, 0, TaskState.RUNNING, 7)
    beat(rig, 1, 3)
    rig.report(1, 1, TaskState.RUNNING, drained=True)
    for slot in (0, 1):
        rig.acknowledge(slot, 1, 1)
    counted(rig, 0, TaskState.FINISHED, 8)
    beat(rig, 0, 5)
    beat(rig, 1, 4)
    assert shown(rig) == [[8, 4], [8, 4]]


def test_the_next_coordinator_still_shows_them(finished: Rig) -> None:
    view = view_recorded_job(run_flow(read_job(JobPaths(JOB)), finished.storage), 0)
    assert [[subtask.metrics.records_in for subtask in vertex.subtasks] for vertex in view.vertices] == [[8, 8], [8, 8]]
