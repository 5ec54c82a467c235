"""What had finished in front of a snapshot, and what begins as finished behind it."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.messages import SubtaskKey
from holdfast.coordinator.restore.finished import decode_finished, encode_finished, find_finished
from holdfast.statebackends.handles import OperatorState, OperatorSubtaskState
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata
from tests.coordinator.doubles import word_count


def snapshot(graph: JobGraph, finished: str, **parallelism: int) -> SnapshotMetadata:
    """parallelism: of vertices by the uid of their heads, where the snapshot has another than the graph."""
    heads = [(vertex, vertex.operators[0]) for vertex in graph.vertices]
    count = {vertex.vertex_id: parallelism.get(head.uid, vertex.parallelism) for vertex, head in heads}
    fields: dict[str, Any] = {"checkpoint_id": 1, "kind": "checkpoint", "attempt": 1, "epoch": 1}
    return SnapshotMetadata(
        job_id="job",
        job_name="job",
        trigger_timestamp_ms=0,
        completion_timestamp_ms=0,
        operators=tuple(
            OperatorState(
                uid=head.uid,
                operator_id=head.operator_id,
                name=head.name,
                parallelism=count[vertex.vertex_id],
                max_parallelism=vertex.max_parallelism,
                subtasks=(OperatorSubtaskState(),) * count[vertex.vertex_id],
            )
            for vertex, head in heads
        ),
        properties={"finished_tasks": finished},
        **fields,
    )


def named(graph: JobGraph, *tasks: tuple[int, int]) -> str:
    """The property, of (vertex, subtask)."""
    return encode_finished(SubtaskKey(graph.vertices[vertex].vertex_id, subtask) for vertex, subtask in tasks)


@pytest.mark.parametrize("text", ["", ",", "v", "v:", ":1", "v:x", "v:-1", "v:1:", "v:123456", "v:1\n", "v: 1"])
def test_what_has_another_form_names_no_task(text: str) -> None:
    assert decode_finished(text) == frozenset()


def test_a_property_is_read_as_it_was_written() -> None:
    tasks = [SubtaskKey("v", 3), SubtaskKey("v", 0), SubtaskKey("w", 12)]
    assert encode_finished(tasks) == "v:0,v:3,w:12"
    assert decode_finished(encode_finished(tasks)) == frozenset(tasks)
    assert decode_finished("x,v:1") == {SubtaskKey("v", 1)}


def test_a_vertex_of_which_all_subtasks_had_finished_begins_so() -> None:
    graph = word_count()
    first, second = (vertex.vertex_id for vertex in graph.vertices)
    everything = named(graph, (0, 0), (0, 1), (1, 0), (1, 1))
    assert find_finished(snapshot(graph, everything), graph) == {first, second}
    assert find_finished(snapshot(graph, named(graph, (0, 0), (0, 1))), graph) == {first}
    assert find_finished(snapshot(graph, named(graph, (0, 0))), graph) == set(), "the other subtask reads on"
    assert find_finished(snapshot(graph, ""), graph) == set()


def test_the_subtasks_are_those_of_the_snapshot() -> None:
    graph = word_count()
    source = graph.vertices[0]
    three = snapshot(graph, named(graph, (0, 0), (0, 1)), **{source.operators[0].uid: 3})
    assert find_finished(three, graph) == set(), "of three, the third had not"
    one = snapshot(graph, named(graph, (0, 0)), **{source.operators[0].uid: 1})
    assert find_finished(one, graph) == {source.vertex_id}


def test_a_vertex_behind_one_that_reads_on_does_so_too() -> None:
    graph = word_count()
    assert find_finished(snapshot(graph, named(graph, (1, 0), (1, 1))), graph) == set()
