"""The core of watermark alignment: what each report makes of the groups, and what slots are told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.barriers.jobgraph import JobConfig, JobGraph, JobVertex, OperatorDescription
from holdfast.barriers.messages import INT_MAX, AlignWatermarks, SubtaskMetrics
from holdfast.barriers.watermark_alignment import ALIGNMENT_PROPERTY, aligned_operators
from holdfast.coordinator.jobmaster.watermarks import WatermarkGroups
from holdfast.statebackends.errors import InvalidConfigError


def vertex(name: str, parallelism: int, *, kind: str = "source", **alignment: Any) -> JobVertex:
    fields = {"group": "g", "max_drift_ms": 100, "update_interval_ms": 50, **alignment}
    head = OperatorDescription(name, name, name, kind)
    times = OperatorDescription(f"{name}-times", name, name, "timestamps", properties={ALIGNMENT_PROPERTY: fields})
    return JobVertex(name, name, parallelism, 8, (head, times))


def graph(*vertices: JobVertex) -> JobGraph:
    return JobGraph("job", vertices, (), JobConfig())


def said(name: str, subtask: int, watermark_ms: int | None) -> SubtaskMetrics:
    return SubtaskMetrics(name, subtask, aligned={f"{name}-times": watermark_ms})


def two() -> WatermarkGroups:
    return WatermarkGroups(graph(vertex("a", 1), vertex("b", 2)))


def told(slot: int, maximum_ms: int, attempt: int = 1) -> tuple[int, AlignWatermarks]:
    return slot, AlignWatermarks(attempt, {"g": maximum_ms})


def test_nothing_is_said_before_all_have_reported() -> None:
    groups = two()
    groups.report(1, [said("a", 0, 10), said("b", 0, 500)], 0)
    assert groups.advance(1, 0) == []
    groups.report(1, [said("b", 1, 40)], 1)
    assert groups.advance(1, 1) == [told(0, 110), told(1, 110)]


def test_who_is_idle_has_ended_or_has_no_watermark_holds_nobody() -> None:
    groups = two()
    groups.report(1, [said("a", 0, None), said("b", 0, 500), said("b", 1, 900)], 0)
    assert groups.advance(1, 0) == [told(0, 600), told(1, 600)]
    groups.report(1, [said("b", 0, None), said("b", 1, None)], 100)
    assert groups.advance(1, 100) == [told(0, INT_MAX), told(1, INT_MAX)]


def test_a_group_is_told_once_in_an_interval_and_only_what_is_new() -> None:
    groups = two()
    groups.report(1, [said("a", 0, 10), said("b", 0, 10), said("b", 1, 10)], 0)
    assert len(groups.advance(1, 0)) == 2
    groups.report(1, [said("a", 0, 20), said("b", 0, 20), said("b", 1, 20)], 10)
    assert groups.advance(1, 10) == []
    assert groups.next_deadline_ms() == 50
    assert groups.advance(1, 50) == [told(0, 120), told(1, 120)]
    assert groups.advance(1, 100) == []
    assert groups.next_deadline_ms() is None


def test_a_new_process_is_told_again() -> None:
    groups = two()
    groups.report(1, [said("a", 0, 10), said("b", 0, 10), said("b", 1, 10)], 0)
    groups.advance(1, 0)
    groups.forget(1)
    groups.report(1, [], 60)
    assert groups.advance(1, 60) == [told(1, 110)]


def test_a_new_attempt_starts_over() -> None:
    groups = two()
    groups.report(1, [said("a", 0, 10), said("b", 0, 10), said("b", 1, 10)], 0)
    assert groups.advance(2, 0) == []
    groups.report(2, [said("a", 0, 5)], 60)
    assert groups.advance(2, 60) == []


def test_what_is_in_no_group_is_ignored() -> None:
    groups = two()
    strange = SubtaskMetrics("a", 0, aligned={"b-times": 3})
    groups.report(1, [said("zzz", 0, 1), said("a", 7, 1), strange, SubtaskMetrics("a", 0)], 0)
    assert groups.advance(1, 0) == []
    assert all(not group.reported for group in groups._groups.values())


def test_a_job_without_groups_says_nothing() -> None:
    groups = WatermarkGroups(graph(JobVertex("a", "a", 1, 8, (OperatorDescription("a", "a", "a", "source"),))))
    groups.report(1, [said("a", 0, 1)], 0)
    assert (groups.advance(1, 0), groups.next_deadline_ms(), groups.heartbeat_interval_ms(2_000)) == ([], None, 2_000)


def test_heartbeats_are_as_frequent_as_the_groups_need() -> None:
    assert two().heartbeat_interval_ms(2_000) == 50
    assert two().heartbeat_interval_ms(20) == 20


def test_commands_survive_the_wire_and_metrics_of_jobs_without_groups_are_as_before() -> None:
    command = AlignWatermarks(3, {"g": INT_MAX})
    assert msgspec.json.decode(msgspec.json.encode(command), type=AlignWatermarks) == command
    assert b"aligned" not in msgspec.json.encode(SubtaskMetrics("a", 0))


@pytest.mark.parametrize(
    "vertices",
    [
        (vertex("a", 1), vertex("b", 1, max_drift_ms=7)),
        (vertex("a", 1), vertex("b", 1, update_interval_ms=70)),
        (vertex("a", 1, kind="map"),),
        (vertex("a", 1, group=""),),
        (vertex("a", 1, group=7),),
        (vertex("a", 1, max_drift_ms=-1),),
        (vertex("a", 1, update_interval_ms=1),),
        (vertex("a", 1, else_="?"),),
    ],
)
def test_a_graph_whose_groups_don_t_hold_together_is_refused(vertices: tuple[JobVertex, ...]) -> None:
    with pytest.raises(InvalidConfigError):
        aligned_operators(graph(*vertices))


MEMBERS = (("a", 0), ("b", 0), ("b", 1))


@given(
    st.lists(
        st.tuples(st.sampled_from((1, 1, 1, 2)), st.sampled_from(MEMBERS), st.none() | st.integers(-50, 1_000), st.integers(0, 60)),
        max_size=40,
    )
)
def test_as_a_plain_model_has_it(steps: list[tuple[int, tuple[str, int], int | None, int]]) -> None:
    """Whatever is reported, late, lost or of an older attempt: what is said is the least of the newest reports and the drift, and
    the one with the least is never held."""
    groups, now_ms, running = two(), 0, 1
    newest: dict[tuple[str, int], int | None] = {}
    for attempt, (name, subtask), watermark_ms, passed_ms in steps:
        now_ms += passed_ms
        if attempt > running:
            running = attempt
            newest.clear()
        if attempt == running:  # the job master hears no other
            newest[name, subtask] = watermark_ms
            groups.report(attempt, [said(name, subtask, watermark_ms)], now_ms)
        for _, command in groups.advance(running, now_ms):
            counted = [each for each in newest.values() if each is not None]
            assert len(newest) == len(MEMBERS)
            assert command == AlignWatermarks(running, {"g": min(counted, default=INT_MAX - 100) + 100})
            assert not counted or min(counted) <= command.maximum_ms["g"]
        deadline_ms = groups.next_deadline_ms()
        assert deadline_ms is None or deadline_ms <= now_ms + 50
