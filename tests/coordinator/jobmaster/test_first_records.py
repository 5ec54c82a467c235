"""When an attempt processes its first records: told once, by the first heartbeat that says so."""

from __future__ import annotations

from holdfast.barriers.messages import SubtaskMetrics, TaskState
from holdfast.coordinator.notes import FirstRecords
from tests.coordinator.rig import Rig


def beat(rig: Rig, attempt: int, records: int) -> list[FirstRecords]:
    vertex = rig.graph.vertices[0].vertex_id
    rig.heartbeat(0, attempt, metrics=(SubtaskMetrics(vertex, 0, records_out=records),))
    return [note for note in rig.master.notes if isinstance(note, FirstRecords)]


def test_the_first_records_of_each_attempt_are_noted_once() -> None:
    rig = Rig().run()
    rig.now += 300
    assert beat(rig, 1, 0) == []
    rig.now += 500
    (first,) = beat(rig, 1, 5)
    assert (first.attempt, first.since_failure_ms) == (1, -1)
    assert 800 <= first.since_deployed_ms <= 900
    assert beat(rig, 1, 9) == []
    rig.report(1, 1, TaskState.FAILED, "Boom: bang")
    failed_at = rig.now
    rig.pass_time(500)
    assert beat(rig, 1, 99) == [], "of the attempt that has failed"
    rig.pass_time(1_500)
    for slot in range(rig.graph.slots_required):
        rig.report(slot, 1, TaskState.CANCELED)
    rig.pass_time(1_500)
    assert rig.master.lifecycle.attempt == 2
    (again,) = beat(rig, 2, 1)
    assert (again.attempt, again.since_failure_ms) == (2, rig.now - failed_at)
    assert again.since_deployed_ms < again.since_failure_ms
