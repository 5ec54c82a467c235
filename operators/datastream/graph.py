"""The StreamGraph: what the DSL recorded, one node per operator, and the plan that is built from it. Pure.

Unions and partitionings are no nodes: they are folded into the edges to the next operator. The plan is built backwards from
the sinks, so that what leads to no sink is not in it.

Operators joined by a chained link share a subtask. A link is chained when all of this holds (semantics 1a): equal parallelism; the
downstream operator has exactly one input; it may be chained to something before it (ALWAYS); the upstream one may have something
behind it (ALWAYS or HEAD); the link is forward; chaining is not switched off. Key groups belong to a vertex, so max parallelism
must be equal too."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import msgspec
import pyarrow as pa

from holdfast.barriers.exchange.guarantee import COMMITTER_KIND
from holdfast.barriers.exchange.partition import Combining, SubtaskFunction
from holdfast.barriers.exchange.split_entries import ENUMERATOR_KIND
from holdfast.barriers.jobgraph import JobConfig, JobEdge, JobGraph, JobVertex, OperatorDescription, Partitioning, check_job_name
from holdfast.barriers.sinks.log import COMMITTER_SUFFIX, DISCARDS_PROPERTY, MUTED_PROPERTY, PLACE_PROPERTY
from holdfast.barriers.watermark_alignment import aligned_operators
from holdfast.operators.base import JobPlan, Operator, Source
from holdfast.operators.datastream.overtaking import with_overtakable_edges
from holdfast.operators.datastream.used_columns import with_used_columns
from holdfast.operators.functions.event_time.timestamps import TimestampsOperator, alignment_properties
from holdfast.operators.functions.partitioning import CustomPartitioning
from holdfast.operators.functions.schema import UNDECLARED, RowType
from holdfast.operators.functions.selectors import Selector
from holdfast.operators.sinks.connector import Sink, committer_operator, writer_operator
from holdfast.operators.sinks.simple import MutedSink
from holdfast.operators.sources.split_source import SplitSource
from holdfast.operators.task.source_operator import SOURCE_POSITIONS, SPLIT_SCHEMA
from holdfast.operators.task.timers import timer_metas
from holdfast.statebackends.errors import GraphError, InvalidConfigError
from holdfast.statebackends.handles import StateMeta
from holdfast.statebackends.keygroups import check_parallelism, default_max_parallelism, operator_id
from holdfast.statebackends.serialization.state_serializer import state_metas

UID_CHARACTERS_MAX = 100
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
WATERMARKS_SUFFIX = "-watermarks"
ENUMERATOR_SUFFIX = "-enumerator"
COMMITTABLE_SCHEMA = pa.schema([pa.field("committable", pa.binary())])
"""What travels from the writers of a sink to its committer."""


class Chaining(StrEnum):
    """What an operator allows."""

    ALWAYS = "always"
    HEAD = "head"
    """It begins a chain: nothing before it, anything behind it."""
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class StreamEdge:
    """One input of a node: the node that it comes from and how records are dealt to its subtasks."""

    source: int
    partitioning: Partitioning | None = None
    """None: forward when the parallelisms are equal, else rebalance."""
    selector: Selector | None = None
    """Of a HASH edge."""
    input_index: int = 0
    """Which input of the node: a union merges several edges into one."""
    side_output: str | None = None
    """Tag of the side output of the node that it comes from; None: its main output."""
    seed: int | None = None
    """Of a SHUFFLE edge."""
    custom: CustomPartitioning | None = None
    """Of a CUSTOM edge."""

    def partitioned(
        self,
        partitioning: Partitioning,
        *,
        selector: Selector | None = None,
        seed: int | None = None,
        custom: CustomPartitioning | None = None,
    ) -> StreamEdge:
        """The edge with another partitioning, and with nothing of the one before."""
        return replace(self, partitioning=partitioning, selector=selector, seed=seed, custom=custom)


@dataclass
class StreamNode:
    """One operator as the user wrote it; its settings may change until the graph is built."""

    index: int
    kind: str
    name: str
    inputs: tuple[StreamEdge, ...] = ()
    operator: Operator | None = None
    """None for sources, and for the two operators of a sink, which are made when the graph is built."""
    source: Source | None = None
    watermarks: TimestampsOperator | None = None
    """What gives the records of a source their event times, always in one chain with it; None: nothing, or a node of its own."""
    sink: Sink | None = None
    input_type: RowType = UNDECLARED
    output_type: RowType = UNDECLARED
    uid: str | None = None
    parallelism: int | None = None
    max_parallelism: int | None = None
    chaining: Chaining = Chaining.ALWAYS
    selector: Selector | None = None
    """Of an operator with keyed state: that of its first input. Keys of all inputs have one type."""
    timestamped: bool = False
    """Whether its records have event times."""
    side_outputs: dict[str, RowType] = field(default_factory=dict)
    """Tag -> rows, of each side output that the operator declares."""
    properties: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """How errors call it."""
        return self.uid or self.name

    def is_untimed(self, tag: str | None) -> bool:
        """Whether rows of an output have no event times, though records of the operator have: what a source could not read."""
        return tag is not None and self.source is not None


class StreamGraph:
    """Nodes in the order in which they were written, which is topological."""

    def __init__(self) -> None:
        self.nodes: list[StreamNode] = []

    def add(self, kind: str, name: str, inputs: Iterable[StreamEdge] = (), **settings: Any) -> StreamNode:
        """Raises GraphError for inputs that don't go together."""
        node = StreamNode(len(self.nodes), kind, name, tuple(inputs), **settings)
        _check_inputs(node)
        self.nodes.append(node)
        return node

    def reachable(self) -> list[StreamNode]:
        """Nodes that lead to a sink, sources first, else as written. Raises GraphError when there is no sink."""
        pending = [node.index for node in self.nodes if node.sink is not None]
        if not pending:
            raise GraphError("the job has no sink: end at least one stream with sink_to(...)")
        found: set[int] = set()
        while pending:
            index = pending.pop()
            if index not in found:
                found.add(index)
                pending.extend(edge.source for edge in self.nodes[index].inputs)
        nodes = [node for node in self.nodes if node.index in found]
        return [node for node in nodes if not node.inputs] + [node for node in nodes if node.inputs]

    def unused(self) -> list[StreamNode]:
        """Nodes that lead to no sink: they don't run."""
        used = {node.index for node in self.reachable()}
        return [node for node in self.nodes if node.index not in used]


@dataclass
class PlacedNode:
    """An operator of the job with its identity and size."""

    uid: str
    name: str
    kind: str
    parallelism: int
    max_parallelism: int
    uid_generated: bool
    index: int
    """Of the stream node that it was made from."""
    inputs: tuple[StreamEdge, ...]
    operator: Operator | None = None
    source: Source | None = None
    output_type: RowType = UNDECLARED
    side_outputs: dict[str, RowType] = field(default_factory=dict)
    chaining: Chaining = Chaining.ALWAYS
    selector: Selector | None = None
    sink_id: str | None = None
    committer_of: str | None = None
    """Uid of the writer that a committer belongs to."""
    watermarks_of: str | None = None
    """Uid of the source that an operator gives event times to."""
    enumerator_of: str | None = None
    """Uid of the source that an enumerator hands splits to."""
    properties: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Link:
    """Records go from one operator (uid) to another."""

    source: str
    target: str
    partitioning: Partitioning
    edge: StreamEdge
    """As the user wrote it."""


@dataclass(frozen=True, slots=True)
class LinkReasons:
    """What becomes of a link, and why."""

    link: Link
    refusal: str | None
    """Why it is an exchange; None: it is chained."""
    combined: str | None
    """Whether records are combined before they travel, and if not why; None: nothing in them could be."""


@dataclass
class Chain:
    """Operators of one vertex, in data order; a tree, given by its edges."""

    nodes: list[PlacedNode]
    edges: list[tuple[str, str]] = field(default_factory=list)
    side_outputs: dict[str, str] = field(default_factory=dict)
    """Uid of an operator -> tag of the side output that feeds it."""

    @property
    def head(self) -> PlacedNode:
        return self.nodes[0]


def build_plan(graph: StreamGraph, name: str, config: JobConfig, parallelism: int, *, chaining: bool = True) -> JobPlan:
    """The job that the workers run. Raises GraphError and other InvalidConfigErrors; the graph can be built again."""
    check_job_name(name)
    config.check()
    placed = _place(graph, config, parallelism)
    links = _links(placed)
    chains = chain_nodes(placed, links, chaining=chaining)
    vertex_of = {node.uid: operator_id(chain.head.uid) for chain in chains for node in chain.nodes}
    edges: list[JobEdge] = []
    schemas: dict[int, Any] = {}
    partitionings: dict[int, SubtaskFunction] = {}
    combinings: dict[int, Combining] = {}
    by_uid = {node.uid: node for node in placed}
    chained = {pair for chain in chains for pair in chain.edges}
    for link in links:
        if (link.source, link.target) in chained:
            continue
        edge_id = len(edges)
        source = by_uid[link.source]
        tag = link.edge.side_output
        rows = source.output_type if tag is None else source.side_outputs[tag]
        schemas[edge_id] = rows.schema
        if link.edge.custom is not None:
            partitionings[edge_id] = link.edge.custom
        combining = combining_of_link(link, source, by_uid[link.target], config)
        if combining is not None and not isinstance(combining, str):
            combinings[edge_id] = combining
        edges.append(_job_edge(edge_id, link, vertex_of))
    vertices = tuple(
        JobVertex(
            vertex_id=operator_id(chain.head.uid),
            name=" -> ".join(node.name for node in chain.nodes),
            parallelism=chain.head.parallelism,
            max_parallelism=chain.head.max_parallelism,
            operators=tuple(_describe(node) for node in chain.nodes),
            chain_edges=tuple(chain.edges),
            chain_side_outputs=chain.side_outputs or msgspec.UNSET,
        )
        for chain in chains
    )
    job_graph = JobGraph(name, vertices, tuple(edges), config, explicit_max_parallelism=config.max_parallelism is not None)
    job_graph.check_standbys()
    aligned_operators(job_graph)
    plan = JobPlan(
        graph=job_graph,
        operators={node.uid: node.operator for node in placed if node.operator is not None},
        sources={node.uid: node.source for node in placed if node.source is not None},
        selectors=_selectors(placed, links),
        schemas=schemas,
        partitionings=partitionings,
        combinings=combinings,
    )
    return with_overtakable_edges(with_used_columns(plan))


def links_with_reasons(graph: StreamGraph, config: JobConfig, parallelism: int, *, chaining: bool) -> list[LinkReasons]:
    """All links of the job with the reasons for what becomes of them. Raises GraphError."""
    placed = _place(graph, config, parallelism)
    links = _links(placed)
    by_uid = {node.uid: node for node in placed}
    return [
        LinkReasons(link, refusal, _combined(combining_of_link(link, by_uid[link.source], by_uid[link.target], config)))
        for link, refusal in zip(links, chaining_refusals(placed, links, chaining=chaining), strict=True)
    ]


def _combined(combining: Combining | str | None) -> str | None:
    if combining is None:
        return None
    return f"not combined: {combining}" if isinstance(combining, str) else "combined by key and window where it pays"


def combining_of_link(link: Link, source: PlacedNode, target: PlacedNode, config: JobConfig) -> Combining | str | None:
    """How records of a link are combined before they travel, or why they aren't; None: there is nothing that could be.

    An operator with side outputs may have to pass on what is late as it came."""
    if link.partitioning is not Partitioning.HASH or link.edge.input_index or target.operator is None:
        return None
    combining = target.operator.combining()
    if combining is None or isinstance(combining, str):
        return combining
    if not config.combine_aggregates:
        return "combine_aggregates is off"
    if source.parallelism == target.parallelism == 1:
        return "parallelism 1"
    return "the operator has side outputs" if target.side_outputs else combining


# --------------------------------------------------------------------------------------------------- nodes, with identity


def _place(graph: StreamGraph, config: JobConfig, parallelism: int) -> list[PlacedNode]:
    """Nodes that lead to a sink, with uid and parallelism; a sink becomes its writer and its committer."""
    placed: list[PlacedNode] = []
    for node, uid in _identified(graph):
        own = parallelism if node.parallelism is None else node.parallelism
        explicit = config.max_parallelism if node.max_parallelism is None else node.max_parallelism
        try:
            max_parallelism = default_max_parallelism(own) if explicit is None else explicit
            check_parallelism(max_parallelism, own)
        except InvalidConfigError as error:
            raise GraphError(f"operator {node.label!r}: {error}", operator=node.label, **error.fields) from error
        sized = PlacedNode(
            uid=uid,
            name=node.name,
            kind=node.kind,
            parallelism=own,
            max_parallelism=max_parallelism,
            uid_generated=not node.uid,
            index=node.index,
            inputs=node.inputs,
            operator=node.operator,
            source=node.source,
            output_type=node.output_type,
            side_outputs=node.side_outputs,
            chaining=node.chaining,
            selector=node.selector,
            properties=dict(node.properties),
        )
        if node.max_parallelism is not None:
            sized.properties["explicit_max_parallelism"] = True
        if isinstance(node.source, SplitSource):
            placed.append(_place_enumerator(node.source, sized))
        placed += [sized] if node.sink is None else _place_sink(node, node.sink, sized)
        if node.watermarks is not None:
            placed.append(_place_watermarks(node.watermarks, sized))
    _refuse_duplicates(placed)
    return placed


def _identified(graph: StreamGraph) -> Iterator[tuple[StreamNode, str]]:
    """Nodes that lead to a sink, each with its uid. Raises GraphError for one that can't be."""
    nodes = graph.reachable()
    given = {node.uid for node in nodes if node.uid}
    for position, node in enumerate(nodes):
        yield node, _checked_uid(node) if node.uid else _generated_uid(node, position, given)


def sinks_by_uid(graph: StreamGraph) -> dict[str, StreamNode]:
    """Uid -> sink, in the order in which they were written. Raises GraphError."""
    return {uid: node for node, uid in _identified(graph) if node.sink is not None}


def _place_enumerator(source: SplitSource[Any], reader: PlacedNode) -> PlacedNode:
    """The enumerator in front of a source with splits: one subtask, a vertex of its own."""
    return PlacedNode(
        uid=reader.uid + ENUMERATOR_SUFFIX,
        name=f"{reader.name} enumerator",
        kind=ENUMERATOR_KIND,
        parallelism=1,
        max_parallelism=1,
        uid_generated=reader.uid_generated,
        index=reader.index,
        inputs=(),
        source=source.enumerator(reader.parallelism),
        output_type=RowType(SPLIT_SCHEMA),
        chaining=Chaining.NEVER,
        enumerator_of=reader.uid,
    )


def _place_watermarks(operator: TimestampsOperator, source: PlacedNode) -> PlacedNode:
    """The operator behind a source that has a watermark strategy: with it in all settings, and in front of all that reads it."""
    return replace(
        source,
        uid=source.uid + WATERMARKS_SUFFIX,
        name=f"{source.name} watermarks",
        kind="timestamps",
        operator=operator,
        source=None,
        watermarks_of=source.uid,
        properties={**source.properties, **alignment_properties(operator.strategy)},
    )


def _place_sink(node: StreamNode, sink: Sink, writer: PlacedNode) -> list[PlacedNode]:
    """The writer, and the committer behind it: one subtask, a vertex of its own."""
    if not sink.sink_id:
        sink.sink_id = writer.uid
    writer.operator = writer_operator(sink.create_writer(node.input_type.schema))
    writer.kind = "sink_writer"
    writer.output_type = RowType(COMMITTABLE_SCHEMA)
    writer.sink_id = sink.sink_id
    writer.properties.update(_sink_properties(sink))
    committer = committer_operator(sink.create_committer())
    if committer is None:
        return [writer]
    return [
        writer,
        PlacedNode(
            uid=writer.uid + COMMITTER_SUFFIX,
            name=f"{node.name} committer",
            kind=COMMITTER_KIND,
            parallelism=1,
            max_parallelism=1,
            uid_generated=writer.uid_generated,
            index=node.index,
            inputs=(),
            operator=committer,
            chaining=Chaining.NEVER,
            sink_id=sink.sink_id,
            committer_of=writer.uid,
            properties=_sink_properties(sink),
        ),
    ]


def _sink_properties(sink: Sink) -> dict[str, Any]:
    """What the coordinator has to know of it, of sinks that say so."""
    path: str | None = getattr(sink, "log_path", None)
    properties: dict[str, Any] = {PLACE_PROPERTY: path} if isinstance(path, str) else {}
    if getattr(sink, "discards", False):
        properties[DISCARDS_PROPERTY] = True
    if isinstance(sink, MutedSink):
        properties[MUTED_PROPERTY] = True
    return properties


def _checked_uid(node: StreamNode) -> str:
    uid = node.uid or ""
    if len(uid) > UID_CHARACTERS_MAX or not _UID.fullmatch(uid):
        raise GraphError(
            f"the uid {uid!r} of {node.name!r} must be 1..{UID_CHARACTERS_MAX} letters, digits, dots, dashes or underscores, "
            "since it is part of file names",
            operator=uid,
        )
    return uid


def _generated_uid(node: StreamNode, position: int, given: set[str]) -> str:
    """From kind and position, so that it is the same whenever the same program builds its graph."""
    uid = f"{node.kind.replace('_', '-')}-{position}"
    while uid in given:
        uid += "-auto"
    given.add(uid)
    return uid


def _refuse_duplicates(placed: list[PlacedNode]) -> None:
    uids: dict[str, str] = {}
    sinks: dict[str, str] = {}
    for node in placed:
        if node.uid in uids:
            raise GraphError(
                f"two operators have the uid {node.uid!r}: {uids[node.uid]!r} and {node.name!r}",
                operator=node.uid,
                operators=(uids[node.uid], node.name),
            )
        uids[node.uid] = node.name
        if node.sink_id and node.committer_of is None:
            if node.sink_id in (".", ".."):
                raise GraphError(
                    f"the sink {node.uid!r} can't have the sink id {node.sink_id!r}: it is part of a path", operator=node.uid
                )
            if node.sink_id in sinks:
                raise GraphError(
                    f"the sinks {sinks[node.sink_id]!r} and {node.uid!r} share the sink id {node.sink_id!r}: use one sink object "
                    "for each sink_to",
                    operator=node.uid,
                )
            sinks[node.sink_id] = node.uid


# ------------------------------------------------------------------------------------------------------------------ edges


def _reader_of(subtask: int, parallelism: int) -> int:
    return subtask


def _links(placed: list[PlacedNode]) -> list[Link]:
    """Edges between placed nodes with their partitioning decided. Raises GraphError on forward between unequal sizes."""
    # of a source its watermarks, if it has any
    writers = {node.index: node for node in placed if node.committer_of is None and node.enumerator_of is None}
    by_uid = {node.uid: node for node in placed}
    links = []
    for node in placed:
        if node.enumerator_of is not None:
            edge = StreamEdge(node.index, Partitioning.CUSTOM, custom=SPLIT_PARTITIONING)
            links.append(_link(node, by_uid[node.enumerator_of], edge))
        if node.watermarks_of is not None:
            links.append(_link(by_uid[node.watermarks_of], node, StreamEdge(node.index)))
        for edge in node.inputs:
            links.append(_link(writers[edge.source], node, edge))
        if node.committer_of is not None:
            links.append(_link(writers[node.index], node, StreamEdge(node.index)))
    return links


SPLIT_PARTITIONING = CustomPartitioning(_reader_of, ("subtask",), RowType(SPLIT_SCHEMA))
"""Each split to the reader that the enumerator names."""


def _link(source: PlacedNode, target: PlacedNode, edge: StreamEdge) -> Link:
    equal, partitioning = source.parallelism == target.parallelism, edge.partitioning
    if partitioning is None:
        partitioning = Partitioning.FORWARD if equal else Partitioning.REBALANCE
    elif partitioning is Partitioning.FORWARD and not equal:
        raise GraphError(
            f"operator {target.uid!r}: forward needs equal parallelism, but {source.uid!r} has {source.parallelism} and "
            f"{target.uid!r} has {target.parallelism}",
            operator=target.uid,
        )
    return Link(source.uid, target.uid, partitioning, edge)


def _job_edge(edge_id: int, link: Link, vertex_of: dict[str, str]) -> JobEdge:
    edge = link.edge
    key = edge.selector or edge.custom
    return JobEdge(
        edge_id=edge_id,
        source=vertex_of[link.source],
        source_operator=link.source,
        target=vertex_of[link.target],
        input_index=edge.input_index,
        partitioning=link.partitioning,
        key=None if key is None else key.columns,
        key_type=None if edge.selector is None else edge.selector.key_type_text,
        side_output=edge.side_output or msgspec.UNSET,
        seed=msgspec.UNSET if edge.seed is None else edge.seed,
    )


def _selectors(placed: list[PlacedNode], links: list[Link]) -> dict[tuple[str, int], Any]:
    """(uid, input) -> selector, of operators with keyed state and of the targets of HASH edges."""
    found: dict[tuple[str, int], Any] = {(node.uid, 0): node.selector for node in placed if node.selector is not None}
    found.update({(link.target, link.edge.input_index): link.edge.selector for link in links if link.edge.selector is not None})
    return found


def _check_inputs(node: StreamNode) -> None:
    """Inputs are numbered from 0 on, and keys meet only where they have one type. Raises GraphError."""
    indexes = sorted({edge.input_index for edge in node.inputs})
    if indexes != list(range(len(indexes))):
        raise GraphError(f"operator {node.label!r}: its inputs are numbered {indexes}, not from 0 on", operator=node.label)
    selectors = [(edge.input_index, edge.selector) for edge in node.inputs if edge.selector is not None]
    if len({selector.key_type_text for _, selector in selectors}) > 1:
        found = ", ".join(f"input {index + 1} by {selector!r} ({selector.key_type_text})" for index, selector in selectors)
        raise GraphError(
            f"operator {node.label!r}: the keys of its inputs have different types: {found}; give key_type= to key_by",
            operator=node.label,
        )


def _describe(node: PlacedNode) -> OperatorDescription:
    return OperatorDescription(
        uid=node.uid,
        operator_id=operator_id(node.uid),
        name=node.name,
        kind=node.kind,
        states=_states(node),
        key_type=None if node.selector is None else node.selector.key_type_text,
        uid_generated=node.uid_generated,
        sink_id=node.sink_id,
        properties=node.properties,
    )


def _states(node: PlacedNode) -> tuple[StateMeta, ...]:
    """Stored descriptions of all states of an operator, timers included. Raises GraphError naming it."""
    key_type = None if node.selector is None else node.selector.key_type
    descriptors = (SOURCE_POSITIONS,) if node.operator is None else node.operator.declared_states()
    try:
        metas = state_metas(descriptors, key_type)
    except InvalidConfigError as error:
        raise GraphError(f"operator {node.uid!r}: {error}", operator=node.uid, **error.fields) from error
    if node.operator is None or not node.operator.uses_timers or key_type is None:
        return metas
    timers = timer_metas(key_type.text)
    reserved = {meta.name for meta in metas} & {meta.name for meta in timers}
    if reserved:
        name = min(reserved)
        raise GraphError(
            f"operator {node.uid!r}: {name!r} is the name under which its timers are stored: give the state another one",
            operator=node.uid,
            state=name,
        )
    return metas + timers


# ----------------------------------------------------------------------------------------------------------------- chains


def chain_nodes(nodes: Sequence[PlacedNode], links: Sequence[Link], *, chaining: bool) -> list[Chain]:
    """Chains in the order of their heads; `nodes` come in topological order, and so do the nodes of each chain."""
    refusals = chaining_refusals(nodes, links, chaining=chaining)
    behind = {link.target: link for link, refusal in zip(links, refusals, strict=True) if refusal is None}
    chains: dict[str, Chain] = {}
    for node in nodes:
        link = behind.get(node.uid)
        if link is None:
            chains[node.uid] = Chain([node])
            continue
        chain = chains[node.uid] = chains[link.source]
        chain.nodes.append(node)
        chain.edges.append((link.source, node.uid))
        if link.edge.side_output is not None:
            chain.side_outputs[node.uid] = link.edge.side_output
    return [chains[node.uid] for node in nodes if chains[node.uid].head is node]


def chaining_refusals(nodes: Sequence[PlacedNode], links: Sequence[Link], *, chaining: bool) -> list[str | None]:
    """Why each link is an exchange; None: it is chained."""
    by_uid = {node.uid: node for node in nodes}
    inputs = Counter(link.target for link in links)
    return [
        _refusal(link, by_uid[link.source], by_uid[link.target], inputs[link.target], chaining=chaining) for link in links
    ]


def _refusal(link: Link, source: PlacedNode, target: PlacedNode, inputs: int, *, chaining: bool) -> str | None:
    """Why the link can't be a direct call, None if it can. `inputs`: links into the target."""
    if target.watermarks_of is not None:
        return None
    if source.parallelism != target.parallelism:
        return f"parallelism {source.parallelism} and {target.parallelism}"
    if link.partitioning is not Partitioning.FORWARD:
        return f"partitioned: {link.partitioning}"
    if inputs > 1:
        return f"{target.uid} reads {inputs} streams"
    if source.max_parallelism != target.max_parallelism:
        return f"max parallelism {source.max_parallelism} and {target.max_parallelism}"
    if not chaining:
        return "the job has chaining=False"
    if target.chaining is Chaining.HEAD:
        return f"{target.uid} starts a new chain"
    for node in (source, target):
        if node.chaining is Chaining.NEVER:
            return f"{node.uid} {'is a committer' if node.committer_of else 'has chaining disabled'}"
    return None
