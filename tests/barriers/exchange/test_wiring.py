"""Channels of a subtask, derived from the graph: both ends must agree."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.barriers.exchange.frames import ChannelId
from holdfast.barriers.exchange.wiring import InputPlan, consumers_of, derive_inputs, derive_outputs, derive_peers, producers_of
from holdfast.barriers.jobgraph import JobConfig, JobEdge, JobGraph, JobVertex, OperatorDescription, Partitioning


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
        JobEdge(5, "t", "t", "u", 1, Partitioning.RESCALE),
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
        InputPlan(ChannelId(5, 1, 2), 1),
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


def pair(producers: int, consumers: int, partitioning: Partitioning) -> JobGraph:
    edge = JobEdge(1, "s", "s", "t", 0, partitioning)
    return JobGraph("job", (vertex("s", producers), vertex("t", consumers)), (edge,), JobConfig())


def groups(producers: int, consumers: int) -> list[list[int]]:
    """Consumers of each producer of a rescale edge."""
    graph = pair(producers, consumers, Partitioning.RESCALE)
    return [list(consumers_of(graph, graph.edges[0], producer)) for producer in range(producers)]


@pytest.mark.parametrize(
    ("producers", "consumers", "expected"),
    [
        (2, 2, [[0], [1]]),
        (2, 4, [[0, 1], [2, 3]]),
        (4, 2, [[0], [0], [1], [1]]),
        (2, 3, [[0, 1], [2]]),
        (3, 2, [[0], [1], [1]]),
        (3, 7, [[0, 1, 2], [3, 4], [5, 6]]),
        (7, 3, [[0], [0], [1], [1], [2], [2], [2]]),
        (1, 3, [[0, 1, 2]]),
        (3, 1, [[0], [0], [0]]),
    ],
)
def test_rescale_connects_neighbours_as_flink_does(producers: int, consumers: int, expected: list[list[int]]) -> None:
    assert groups(producers, consumers) == expected


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from(Partitioning))
def test_both_ends_of_an_edge_agree(producers: int, consumers: int, partitioning: Partitioning) -> None:
    consumers = producers if partitioning is Partitioning.FORWARD else consumers
    graph = pair(producers, consumers, partitioning)
    edge = graph.edges[0]
    forth = {(one, other) for one in range(producers) for other in consumers_of(graph, edge, one)}
    back = {(one, other) for other in range(consumers) for one in producers_of(graph, edge, other)}
    assert forth == back
    if partitioning is Partitioning.RESCALE:
        # each subtask has a channel, none more than it must, and groups are as equal as can be
        assert len(forth) == max(producers, consumers)
        sizes = Counter(one if producers <= consumers else other for one, other in forth)
        assert len(sizes) == min(producers, consumers)
        assert max(sizes.values()) - min(sizes.values()) <= 1
