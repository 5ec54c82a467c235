"""Which operators share a subtask. Pure: placed nodes and links in, chains out.

A link is chained when all of this holds (semantics 1a): equal parallelism; the downstream operator has exactly one input; it
may be chained to something before it (ALWAYS); the upstream one may have something behind it (ALWAYS or HEAD); the link is
forward; chaining is not switched off. Key groups belong to a vertex, so max parallelism must be equal too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from holdfast.barriers.jobgraph import Partitioning
from holdfast.operators.base import Operator, Source
from holdfast.operators.functions.schema import UNDECLARED, RowType
from holdfast.operators.functions.selectors import Selector

if TYPE_CHECKING:
    from holdfast.operators.datastream.graph import StreamEdge


class Chaining(StrEnum):
    """What an operator allows."""

    ALWAYS = "always"
    HEAD = "head"
    """It begins a chain: nothing before it, anything behind it."""
    NEVER = "never"


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
    chaining: Chaining = Chaining.ALWAYS
    selector: Selector | None = None
    sink_id: str | None = None
    committer_of: str | None = None
    """Uid of the writer that a committer belongs to."""
    properties: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Link:
    """Records go from one operator (uid) to another."""

    source: str
    target: str
    partitioning: Partitioning
    selector: Selector | None = None


@dataclass
class Chain:
    """Operators of one vertex, in data order; a tree, given by its edges."""

    nodes: list[PlacedNode]
    edges: list[tuple[str, str]] = field(default_factory=list)

    @property
    def head(self) -> PlacedNode:
        return self.nodes[0]


def chain_nodes(nodes: Sequence[PlacedNode], links: Sequence[Link], *, chaining: bool) -> list[Chain]:
    """Chains in the order of their heads; `nodes` come in topological order, and so do the nodes of each chain."""
    by_uid = {node.uid: node for node in nodes}
    inputs = Counter(link.target for link in links)
    behind = {
        link.target: link.source
        for link in links
        if chaining and inputs[link.target] == 1 and is_chainable(link, by_uid[link.source], by_uid[link.target])
    }
    chains: dict[str, Chain] = {}
    for node in nodes:
        source = behind.get(node.uid)
        if source is None:
            chains[node.uid] = Chain([node])
            continue
        chain = chains[node.uid] = chains[source]
        chain.nodes.append(node)
        chain.edges.append((source, node.uid))
    return [chains[node.uid] for node in nodes if chains[node.uid].head is node]


def is_chainable(link: Link, source: PlacedNode, target: PlacedNode) -> bool:
    """Whether the link may be a direct call, if it is the only input of its target."""
    return (
        link.partitioning is Partitioning.FORWARD
        and source.parallelism == target.parallelism
        and source.max_parallelism == target.max_parallelism
        and target.chaining is Chaining.ALWAYS
        and source.chaining is not Chaining.NEVER
    )
