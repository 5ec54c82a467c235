"""Counters of an attempt's tasks: kept as reports come, and the same as a walk over all tasks would find."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast.barriers.messages import OperatorMetrics, SubtaskKey, SubtaskMetrics, SubtaskStatus, TaskState
from holdfast.coordinator.jobmaster.execution import Execution
from holdfast.coordinator.totals import OperatorTotals
from tests.api.fakes import SINK, SOURCE, make_graph

REPORTS = st.tuples(
    st.sampled_from([SOURCE, SINK, "unknown"]),
    st.integers(0, 2),
    st.sampled_from([None, "finish", *TaskState]),
    st.integers(0, 50),
)


@given(st.lists(REPORTS, max_size=40))
def test_counters_are_what_a_walk_over_the_tasks_finds(reports: list[tuple[str, int, Any, int]]) -> None:
    execution = Execution(1, make_graph(parallelism=2))
    for vertex, subtask, state, records in reports:
        uid = "in" if vertex == SOURCE else "out"
        operators = (OperatorMetrics(uid, records_out=records), OperatorMetrics("nobody"))
        metrics = SubtaskMetrics(vertex, subtask, records_out=records, operators=operators)
        if state is None:
            execution.measure([metrics])
        elif state == "finish":
            execution.finish([SubtaskKey(vertex, subtask)], 2_000)
        else:
            execution.apply(SubtaskStatus(1, vertex, subtask, state, metrics=metrics), 1_000)
        assert execution.counts() == Counter(subtask.state for vertex in execution.views({}) for subtask in vertex.subtasks)
        told, totals = execution.metrics(), execution.totals()
        assert not any(each.operators for each in told), "nothing of a worker's is kept that is not counted"
        for uid, vertex_id in (("in", SOURCE), ("out", SINK)):
            count = sum(each.records_out for each in told if each.vertex == vertex_id)
            assert totals.get(uid, OperatorTotals()) == OperatorTotals(records_out=count)


def test_a_lost_slot_counts() -> None:
    execution = Execution(1, make_graph(parallelism=2))
    execution.enter_all(TaskState.RUNNING, 1_000)
    execution.lose(1, 2_000)
    assert execution.counts() == {TaskState.RUNNING: 2, TaskState.CANCELED: 2}


def test_a_finished_task_is_seen_as_such_until_it_fails() -> None:
    execution = Execution(1, make_graph(parallelism=2))
    tasks = [SubtaskKey(SINK, 0), SubtaskKey(SINK, 1), SubtaskKey("unknown", 0)]
    execution.finish(tasks, 500)
    assert execution.counts() == {TaskState.CREATED: 4}, "none of them runs"
    execution.enter_all(TaskState.RUNNING, 1_000)
    execution.finish(tasks, 2_000)
    execution.finish(tasks, 3_000)
    assert execution.counts() == {TaskState.RUNNING: 2, TaskState.FINISHED: 2}
    assert [state for _, state in execution.take_states()] == [TaskState.RUNNING] * 4, "the machine knows that they are there"
    assert execution.take_states() == ()
    sink = next(view for view in execution.views({}) if view.vertex_id == SINK)
    assert (sink.state, sink.end_ms, [each.end_ms for each in sink.subtasks]) == (TaskState.FINISHED, 2_000, [2_000, 2_000])
    execution.lose(0, 4_000)
    execution.apply(SubtaskStatus(1, SINK, 1, TaskState.FAILED), 5_000)
    assert execution.counts() == {TaskState.CANCELED: 1, TaskState.RUNNING: 1, TaskState.FINISHED: 1, TaskState.FAILED: 1}
    sink = next(view for view in execution.views({}) if view.vertex_id == SINK)
    assert [each.end_ms for each in sink.subtasks] == [2_000, 5_000]


def test_reports_of_a_backlog_that_come_late_or_twice_change_nothing() -> None:
    execution = Execution(1, make_graph(parallelism=2))

    def report(subtask: int, backlog: int, state: TaskState = TaskState.RUNNING) -> bool:
        return execution.apply(SubtaskStatus(1, SOURCE, subtask, state, backlog=backlog), 1_000)

    seen = [(report(*each), execution.is_processing_backlog) for each in ((0, 1), (1, 1), (0, 2), (0, 1), (1, 2), (1, 1), (1, 3))]
    assert seen == [(True, True), (True, True), (True, True), (False, True), (True, False), (False, False), (True, True)]
    execution.lose(1, 2_000)
    assert not execution.is_processing_backlog, "a task that has ended holds nobody"
