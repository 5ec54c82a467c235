"""CORE: what an at-least-once job keeps exact, derived from its graph alone.

A subtask whose cut is *loose* takes its snapshot when the last barrier has come, and goes on reading behind the others until then:
what it read there is in the snapshot, and is read again behind a restore. Three kinds of edges stay aligned, since what they carry
is not records: a split, a committable or a copy of a state that came twice, or to some subtasks alone, would be wrong for good
(ADR 88)."""

from __future__ import annotations

from holdfast.barriers.exchange.split_entries import ENUMERATOR_KIND
from holdfast.barriers.exchange.wiring import producers_of
from holdfast.barriers.jobgraph import JobEdge, JobGraph, JobVertex, Partitioning

AT_LEAST_ONCE = "at_least_once"
"""`checkpointing_mode` of a job whose subtasks count barriers, and wait for none."""
COMMITTER_KIND = "sink_committer"
WRITER_KIND = "sink_writer"


def stays_aligned(graph: JobGraph, edge: JobEdge) -> bool:
    """Whether a channel of the edge waits for the barriers of the others in every mode: broadcast, enumerator to reader, writer to
    committer."""
    if edge.partitioning is Partitioning.BROADCAST:
        return True
    source, target = graph.vertex(edge.source), graph.vertex(edge.target)
    return source.operators[0].kind == ENUMERATOR_KIND or target.operators[0].kind == COMMITTER_KIND


def is_loose(graph: JobGraph, vertex: JobVertex, subtask: int) -> bool:
    """Whether a subtask may process records behind a barrier before its snapshot: in an at-least-once job, with several channels
    that don't all stay aligned."""
    edges = graph.inputs(vertex.vertex_id)
    if graph.config.checkpointing_mode != AT_LEAST_ONCE or not edges:
        return False
    channels = sum(len(producers_of(graph, edge, subtask)) for edge in edges)
    return channels > 1 and not all(stays_aligned(graph, edge) for edge in edges)


def loose_vertices(graph: JobGraph) -> tuple[str, ...]:
    """Ids of the vertices with a loose subtask, in the graph's order. None: no record can repeat, whatever the mode."""
    if graph.config.checkpointing_mode != AT_LEAST_ONCE:
        return ()
    return tuple(
        vertex.vertex_id
        for vertex in graph.vertices
        if any(is_loose(graph, vertex, subtask) for subtask in range(vertex.parallelism))
    )


def behind_loose(graph: JobGraph) -> frozenset[str]:
    """Ids of the vertices that read what a loose one emits, at any distance, and of the loose ones themselves: a restore may bring
    them records again."""
    found = set(loose_vertices(graph))
    for vertex in graph.vertices if found else ():  # those in front of a vertex come first
        if any(edge.source in found for edge in graph.inputs(vertex.vertex_id)):
            found.add(vertex.vertex_id)
    return frozenset(found)


def describe_guarantee(graph: JobGraph) -> str:
    """One line for people: what a failure does to the records of this job."""
    if graph.config.checkpointing_mode != AT_LEAST_ONCE:
        return "exactly once: a restore loses no record and repeats none"
    loose = loose_vertices(graph)
    if not loose:
        return "at least once: exactly once here, since no subtask has several channels that need not wait for each other"
    names = ", ".join(graph.vertex(each).name for each in loose)
    return f"at least once: a restore loses no record, and may repeat some in {names} and behind"
