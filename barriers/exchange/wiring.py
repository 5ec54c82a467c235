"""Derives the channels of a subtask from the job graph alone, so that both ends of each agree without a message."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from holdfast.barriers.exchange.frames import ChannelId
from holdfast.barriers.jobgraph import JobEdge, JobGraph, Partitioning
from holdfast.statebackends.snapshot.in_flight import EdgeName


class InputPlan(NamedTuple):
    """One input channel of a subtask. Its index in the gate is its position in the plan."""

    channel: ChannelId
    input_index: int
    """The logical input of the chain's head that it belongs to."""


class OutputPlan(NamedTuple):
    """One output edge of a subtask."""

    edge: JobEdge
    consumers: tuple[int, ...]
    """Target subtasks, in the partitioner's channel order."""


def producers_of(graph: JobGraph, edge: JobEdge, consumer: int) -> range:
    """Producer subtasks of the edge that a consumer subtask has a channel from.

    RESCALE connects neighbours: with fewer producers each one feeds a contiguous group of consumers, with fewer consumers each
    one reads a contiguous group of producers; sizes of groups differ by one at most. Source: Flink,
    VertexInputInfoComputationUtils.computeVertexInputInfosForPointwise."""
    producers, consumers = graph.vertex(edge.source).parallelism, graph.vertex(edge.target).parallelism
    match edge.partitioning:
        case Partitioning.FORWARD:
            return range(consumer, consumer + 1)
        case Partitioning.RESCALE if producers >= consumers:
            return range(consumer * producers // consumers, (consumer + 1) * producers // consumers)
        case Partitioning.RESCALE:
            producer = consumer * producers // consumers
            return range(producer, producer + 1)
        case _:
            return range(producers)


def consumers_of(graph: JobGraph, edge: JobEdge, producer: int) -> range:
    """Consumer subtasks of the edge that a producer subtask has a channel to; the other end of `producers_of`."""
    producers, consumers = graph.vertex(edge.source).parallelism, graph.vertex(edge.target).parallelism
    match edge.partitioning:
        case Partitioning.FORWARD:
            return range(producer, producer + 1)
        case Partitioning.RESCALE if producers >= consumers:
            consumer = ((producer + 1) * consumers - 1) // producers
            return range(consumer, consumer + 1)
        case Partitioning.RESCALE:
            return range(-(-producer * consumers // producers), -(-(producer + 1) * consumers // producers))
        case _:
            return range(consumers)


def derive_inputs(graph: JobGraph, vertex_id: str, subtask: int) -> tuple[InputPlan, ...]:
    """Input channels of a subtask: by edge in the graph's order, then by producer. Empty for a source."""
    plan = []
    for edge in graph.inputs(vertex_id):
        producers = producers_of(graph, edge, subtask)
        plan += [InputPlan(ChannelId(edge.edge_id, producer, subtask), edge.input_index) for producer in producers]
    return tuple(plan)


def derive_outputs(graph: JobGraph, vertex_id: str, subtask: int) -> tuple[OutputPlan, ...]:
    """Output edges of a subtask, in the graph's order. Empty for the end of a pipeline."""
    return tuple(OutputPlan(edge, tuple(consumers_of(graph, edge, subtask))) for edge in graph.outputs(vertex_id))


def name_edges(graph: JobGraph) -> dict[int, EdgeName]:
    """Edge id -> name, of all edges; no two have one name."""
    heads = {vertex.vertex_id: vertex.operators[0].uid for vertex in graph.vertices}
    counts: Counter[tuple[str, str | None, str, int]] = Counter()
    names: dict[int, EdgeName] = {}
    for edge in graph.edges:
        ends = (edge.source_operator, edge.tag, heads[edge.target], edge.input_index)
        names[edge.edge_id] = EdgeName(*ends, ordinal=counts[ends])
        counts[ends] += 1
    return names


def derive_peers(graph: JobGraph, slot: int) -> frozenset[int]:
    """Slots that a slot exchanges frames with, itself excluded. Subtask i of every vertex runs in slot i."""
    peers: set[int] = set()
    for vertex in graph.vertices:
        if slot >= vertex.parallelism:
            continue
        peers.update(plan.channel.producer for plan in derive_inputs(graph, vertex.vertex_id, slot))
        peers.update(consumer for output in derive_outputs(graph, vertex.vertex_id, slot) for consumer in output.consumers)
    return frozenset(peers - {slot})


def derive_channels(graph: JobGraph, slot: int) -> frozenset[ChannelId]:
    """All channels that begin or end in a slot."""
    channels: set[ChannelId] = set()
    for vertex in graph.vertices:
        if slot >= vertex.parallelism:
            continue
        channels.update(plan.channel for plan in derive_inputs(graph, vertex.vertex_id, slot))
        for output in derive_outputs(graph, vertex.vertex_id, slot):
            channels.update(ChannelId(output.edge.edge_id, slot, consumer) for consumer in output.consumers)
    return frozenset(channels)
