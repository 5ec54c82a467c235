"""Channels of a subtask, derived from the graph: both ends must agree."""

from __future__ import annotations

from collections import Counter

from holdfast.barriers.frames import ChannelId
from holdfast.barriers.jobgraph import JobConfig, JobEdge, JobGraph, JobVertex, OperatorDescription, Partitioning
from holdfast.barriers.wiring import InputPlan, derive_inputs, derive_outputs, derive_peers


def vertex(name: str, parallelism: int) -> JobVertex:
    return JobVertex(name, name, parallelism, 128, (OperatorDescription(name, name, name, "map"),))


GRAPH = JobGraph(
    "job",
    (vertex("s", 2), vertex("t", 2), vertex("u", 3), vertex("k", 1)),
    (
        JobEdge(1, "s", "s", "t", 0, Partitioning.FORWARD),
        JobEdge(2, "t", "t", "u", 0, Partitioning.HASH, key=("k",), key_type="int64"),
        JobEdge(3, "s", "s", "u", 1, Partitioning.BROADCAST),
        JobEdge(4, "u", "u", "k", 0, Partitioning.REBALANCE),
    ),
    JobConfig(),
)


def test_forward_has_one_channel_and_the_others_one_per_pair() -> None:
    assert derive_inputs(GRAPH, "s", 0) == ()
    assert derive_inputs(GRAPH, "t", 1) == (InputPlan(ChannelId(1, 1, 1), 0),)
    assert derive_inputs(GRAPH, "u", 2) == (
        InputPlan(ChannelId(2, 0, 2), 0),
        InputPlan(ChannelId(2, 1, 2), 0),
        InputPlan(ChannelId(3, 0, 2), 1),
        InputPlan(ChannelId(3, 1, 2), 1),
    )
    assert [(plan.edge.edge_id, plan.consumers) for plan in derive_outputs(GRAPH, "s", 1)] == [(1, (1,)), (3, (0, 1, 2))]
    assert derive_outputs(GRAPH, "k", 0) == ()


def test_every_channel_has_two_ends() -> None:
    ends: Counter[ChannelId] = Counter()
    for v in GRAPH.vertices:
        for subtask in range(v.parallelism):
            ends.update(plan.channel for plan in derive_inputs(GRAPH, v.vertex_id, subtask))
            for edge, consumers in derive_outputs(GRAPH, v.vertex_id, subtask):
                ends.update(ChannelId(edge.edge_id, subtask, consumer) for consumer in consumers)
    assert set(ends.values()) == {2}


def test_peers_are_mutual() -> None:
    peers = {slot: derive_peers(GRAPH, slot) for slot in range(3)}
    assert peers == {0: {1, 2}, 1: {0, 2}, 2: {0, 1}}
