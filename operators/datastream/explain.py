"""A job's plan as text, for people."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.barriers.jobgraph import JobEdge, JobVertex, OperatorDescription, Partitioning
from holdfast.operators.base import JobPlan


def explain_plan(plan: JobPlan, *, unused: Sequence[str] = ()) -> str:
    """Vertices in order, with their chained operators, states and edges. `unused`: operators that lead to no sink."""
    graph = plan.graph
    numbers = {vertex.vertex_id: number for number, vertex in enumerate(graph.vertices, 1)}
    lines = [f"job {graph.name}: {len(graph.vertices)} vertices, {graph.slots_required} slots, {graph.config.state_backend} state"]
    for vertex in graph.vertices:
        lines.append(f"[{numbers[vertex.vertex_id]}] parallelism {vertex.parallelism}, max {vertex.max_parallelism}")
        depths = _depths(vertex)
        lines += [f"    {'  ' * depths[operator.uid]}{_operator(operator)}" for operator in vertex.operators]
        lines += [f"    -> [{numbers[edge.target]}] {_edge(edge)}" for edge in graph.outputs(vertex.vertex_id)]
    if unused:
        lines.append(f"not part of the job, since they lead to no sink: {', '.join(unused)}")
    return "\n".join(lines)


def _depths(vertex: JobVertex) -> dict[str, int]:
    depths = {vertex.operators[0].uid: 0}
    for source, target in vertex.chain_edges:
        depths[target] = depths[source] + 1
    return depths


def _operator(operator: OperatorDescription) -> str:
    parts = [f"{operator.name} (uid {operator.uid}{', generated' if operator.uid_generated else ''})"]
    if operator.key_type is not None:
        parts.append(f"key {operator.key_type}")
    if operator.states:
        parts.append("state " + ", ".join(f"{state.name}: {state.kind}" for state in operator.states))
    return "; ".join(parts)


def _edge(edge: JobEdge) -> str:
    if edge.partitioning is Partitioning.SHUFFLE:
        return f"{edge.partitioning}, seed {edge.seed}"
    if edge.partitioning not in (Partitioning.HASH, Partitioning.CUSTOM):
        return str(edge.partitioning)
    key = "function" if edge.key is None else ", ".join(edge.key)
    return f"{edge.partitioning} by {key}" + ("" if edge.key_type is None else f" ({edge.key_type})")
