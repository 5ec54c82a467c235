"""A job's graphs, for people and as JSON: what the program wrote, what became of it, and what runs where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from holdfast.barriers.exchange.guarantee import AT_LEAST_ONCE, describe_guarantee, is_loose
from holdfast.barriers.exchange.wiring import consumers_of, producers_of
from holdfast.barriers.jobgraph import JobConfig, JobEdge, JobGraph, JobVertex, OperatorDescription, Partitioning
from holdfast.barriers.sinks.log import COMMITTER_SUFFIX
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.graph import LinkReasons, StreamEdge, StreamGraph, StreamNode
from holdfast.operators.datastream.overtaking import DEALT_OUT_AGAIN, find_bans

CHAINED = "forward, equal parallelism, one stream"
"""Why a chained link is."""


class StreamInput(msgspec.Struct, frozen=True):
    """One stream that a call of the program reads."""

    id: int
    """Of the node that it comes from."""
    input: int
    partitioning: str | None
    """None: left to Holdfast."""
    key: str | None
    side_output: str | None


class StreamGraphNode(msgspec.Struct, frozen=True):
    """One call of the program."""

    id: int
    name: str
    uid: str | None
    kind: str
    parallelism: int | None
    """None: the environment's."""
    used: bool
    """Whether it leads to a sink; else it does not run."""
    inputs: list[StreamInput]
    note: str | None = None
    """Of a sink: what readers of its output have to know."""


class JobLink(msgspec.Struct, frozen=True):
    """Records go from one operator to another."""

    source: str
    """Uid."""
    target: str
    input: int
    side_output: str | None
    partitioning: str
    chained: bool
    reason: str
    """Why it is chained, or why it is not."""
    combined: str | None = None
    """Whether records are combined before they travel, or why they aren't; None: nothing in them could be."""
    columns: tuple[str, ...] | None = None
    """Those that are sent; None: all."""
    in_line: str | None = None
    """Why a checkpoint's barrier stays behind the records of the link; None: it may overtake them, or the link is chained."""


class ExplainedVertex(msgspec.Struct, frozen=True):
    id: str
    name: str
    parallelism: int
    max_parallelism: int
    operators: list[OperatorDescription]
    may_repeat: bool = False
    """A restore may bring it records again that its state has already: at least once, with several channels."""


class Channels(msgspec.Struct, frozen=True):
    """Channels of one subtask and one edge: with the subtasks `first` to `last` of the vertex at the other end."""

    edge: int
    vertex: str
    first: int
    last: int


class ExecutionSubtask(msgspec.Struct, frozen=True):
    vertex: str
    subtask: int
    slot: int
    inputs: list[Channels]
    outputs: list[Channels]


class ExecutionPlan(msgspec.Struct, frozen=True):
    slots: int
    channels: int
    subtasks: list[ExecutionSubtask]


class ExplainedJobGraph(msgspec.Struct, frozen=True):
    vertices: list[ExplainedVertex]
    links: list[JobLink]


class Explained(msgspec.Struct, frozen=True):
    """The three graphs of a job."""

    name: str
    state_backend: str
    stream_graph: list[StreamGraphNode]
    job_graph: ExplainedJobGraph
    execution_plan: ExecutionPlan
    checkpointing_mode: str
    guarantee: str
    """What a failure does to the records, in one line."""
    unaligned_checkpoints: bool = False
    """Whether barriers overtake, on links whose `in_line` is None. Of links it says what holds with this setting, also where it is
    off: it can be changed while the job runs."""
    aligned_checkpoint_timeout_ms: int = 0


def explain_graph(stream_graph: StreamGraph, plan: JobPlan, links: Sequence[LinkReasons]) -> Explained:
    """`links`: all of the job, in the order in which its plan was made of them."""
    graph = plan.graph
    edges = iter(graph.edges)
    edge_of = [None if each.refusal is None else next(edges) for each in links]
    bans = find_bans(graph, plan.schemas)
    unused = {node.index for node in stream_graph.unused()}
    subtasks = [_subtask(graph, vertex, subtask) for vertex in graph.vertices for subtask in range(vertex.parallelism)]
    channels = sum(each.last - each.first + 1 for subtask in subtasks for each in subtask.inputs)
    vertices = [_vertex(graph, each) for each in graph.vertices]
    return Explained(
        name=graph.name,
        state_backend=graph.config.state_backend,
        stream_graph=[_stream_node(node, used=node.index not in unused) for node in stream_graph.nodes],
        job_graph=ExplainedJobGraph(
            vertices, [_link(each, edge, plan.columns, bans) for each, edge in zip(links, edge_of, strict=True)]
        ),
        execution_plan=ExecutionPlan(graph.slots_required, channels, subtasks),
        checkpointing_mode=graph.config.checkpointing_mode,
        guarantee=describe_guarantee(graph),
        unaligned_checkpoints=graph.config.unaligned_checkpoints,
        aligned_checkpoint_timeout_ms=graph.config.aligned_checkpoint_timeout_ms,
    )


def _vertex(graph: JobGraph, vertex: JobVertex) -> ExplainedVertex:
    may_repeat = any(is_loose(graph, vertex, subtask) for subtask in range(vertex.parallelism))
    operators = list(vertex.operators)
    return ExplainedVertex(vertex.vertex_id, vertex.name, vertex.parallelism, vertex.max_parallelism, operators, may_repeat)


def _stream_node(node: StreamNode, *, used: bool) -> StreamGraphNode:
    inputs = [_stream_input(edge) for edge in node.inputs]
    note = getattr(node.sink, "note", None) or None
    return StreamGraphNode(node.index, node.name, node.uid, node.kind, node.parallelism, used, inputs, note)


def _stream_input(edge: StreamEdge) -> StreamInput:
    key = edge.selector or edge.custom
    text = None if key is None else repr(key)
    partitioning = None if edge.partitioning is None else str(edge.partitioning)
    return StreamInput(edge.source, edge.input_index, partitioning, text, edge.side_output)


def _link(
    found: LinkReasons, exchange: JobEdge | None, columns: Mapping[int, tuple[str, ...]], bans: Mapping[int, str]
) -> JobLink:
    """`exchange`: the edge that the link became; None: it is chained."""
    link, edge = found.link, found.link.edge
    return JobLink(
        link.source,
        link.target,
        edge.input_index,
        edge.side_output,
        str(link.partitioning),
        exchange is None,
        CHAINED if found.refusal is None else found.refusal,
        found.combined,
        None if exchange is None else columns.get(exchange.edge_id),
        None if exchange is None else bans.get(exchange.edge_id),
    )


def _subtask(graph: JobGraph, vertex: JobVertex, subtask: int) -> ExecutionSubtask:
    inputs = [_channels(edge, edge.source, producers_of(graph, edge, subtask)) for edge in graph.inputs(vertex.vertex_id)]
    outputs = [_channels(edge, edge.target, consumers_of(graph, edge, subtask)) for edge in graph.outputs(vertex.vertex_id)]
    return ExecutionSubtask(vertex.vertex_id, subtask, subtask, inputs, outputs)


def _channels(edge: JobEdge, vertex: str, subtasks: range) -> Channels:
    return Channels(edge.edge_id, vertex, subtasks.start, subtasks.stop - 1)


def explained_json(explained: Explained) -> str:
    return msgspec.json.format(msgspec.json.encode(explained), indent=2).decode()


def explained_text(explained: Explained, graph: JobGraph) -> str:
    """For people: vertices with their chained operators, states and edges, then the calls, then what runs where. `graph`: the job
    graph that was explained."""
    execution = explained.execution_plan
    lines = [f"job {graph.name}: {len(graph.vertices)} vertices, {execution.slots} slots, {explained.state_backend} state"]
    if explained.checkpointing_mode == AT_LEAST_ONCE:
        lines.append(explained.guarantee)
    if explained.unaligned_checkpoints:
        lines.append(_overtaking(explained.aligned_checkpoint_timeout_ms))
    exchanges = (each for each in explained.job_graph.links if not each.chained)
    lines += _job_graph(graph, {edge.edge_id: link for edge, link in zip(graph.edges, exchanges, strict=True)})
    unused = [node.uid or node.name for node in explained.stream_graph if not node.used]
    if unused:
        lines.append(f"not part of the job, since they lead to no sink: {', '.join(unused)}")
    lines += ["", "stream graph: the calls of the program"]
    lines += [_call(node) for node in explained.stream_graph]
    lines += ["", f"execution plan: {len(execution.subtasks)} subtasks, {execution.channels} channels; subtask i runs in slot i"]
    for vertex in graph.vertices:
        inputs = sum(
            each.last - each.first + 1
            for subtask in execution.subtasks
            if subtask.vertex == vertex.vertex_id
            for each in subtask.inputs
        )
        lines.append(f"    {vertex.name}: slots 0 to {vertex.parallelism - 1}, reads {inputs} channels")
    return "\n".join(lines)


def _job_graph(graph: JobGraph, links: Mapping[int, JobLink]) -> list[str]:
    """`links`: by the id of the edge that each became."""
    numbers = {vertex.vertex_id: number for number, vertex in enumerate(graph.vertices, 1)}
    lines = []
    for vertex in graph.vertices:
        lines.append(f"[{numbers[vertex.vertex_id]}] parallelism {vertex.parallelism}, max {vertex.max_parallelism}")
        depths = _depths(vertex)
        lines += [f"    {'  ' * depths[operator.uid]}{_operator(operator)}" for operator in vertex.operators]
        for edge in graph.outputs(vertex.vertex_id):
            link = links[edge.edge_id]
            combined = f"; {link.combined}" if link.combined else ""
            columns = f"; sends {', '.join(link.columns)}" if link.columns else ""
            more = combined + columns + _in_line(link, graph.config)
            lines.append(f"    -> [{numbers[edge.target]}] {_edge(edge)}; not chained: {link.reason}{more}")
    return lines


def _overtaking(timeout_ms: int) -> str:
    when = f", in a checkpoint that is {timeout_ms} ms old" if timeout_ms else ""
    return f"unaligned checkpoints: barriers overtake what is queued{when}"


def _in_line(link: JobLink, config: JobConfig) -> str:
    """Where the partitioning alone would let a barrier overtake records: of a sink, and of other partitionings, it is no news; nor
    for a job whose barriers never may."""
    is_news = link.in_line is not None and link.partitioning in DEALT_OUT_AGAIN and not link.target.endswith(COMMITTER_SUFFIX)
    if not is_news or config.checkpointing_mode == AT_LEAST_ONCE or config.max_concurrent_checkpoints > 1:
        return ""
    stay = "barriers stay in line" if config.unaligned_checkpoints else "barriers would stay in line with unaligned_checkpoints"
    return f"; {stay}: {link.in_line}"


def _call(node: StreamGraphNode) -> str:
    inputs = ", ".join(_read(each) for each in node.inputs)
    size = "" if node.parallelism is None else f", parallelism {node.parallelism}"
    named = node.name if node.name == node.kind else f"{node.kind} {node.name}"
    uid = f" (uid {node.uid})" if node.uid else ""
    note = f"; {node.note}" if node.note else ""
    return f"    #{node.id} {named}{uid}{size}" + (f" <- {inputs}" if inputs else "") + note


def _read(each: StreamInput) -> str:
    side = f" side output {each.side_output}" if each.side_output else ""
    by = f" by {each.key}" if each.key else ""
    return f"#{each.id}{side}" + (f" {each.partitioning}{by}" if each.partitioning else "")


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
