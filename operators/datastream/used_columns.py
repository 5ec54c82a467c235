"""Which columns are read behind each operator, so that no others are made by a source or sent over an exchange. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from holdfast.barriers.jobgraph import JobEdge, Partitioning
from holdfast.operators.base import JobPlan, Source

Columns: TypeAlias = frozenset[str] | None
"""Names; None: all of them."""


@dataclass(frozen=True, slots=True)
class _Link:
    """Records go from one operator to another, by a call or over an exchange."""

    target: str
    tag: str | None
    edge: JobEdge | None = None


def with_used_columns(plan: JobPlan) -> JobPlan:
    """The same job; sources that can make some of their columns, and exchanges, have what is read of them."""
    links = _links(plan)
    outputs: dict[str, Columns] = {}
    sent: dict[int, tuple[str, ...]] = {}
    for vertex in reversed(plan.graph.vertices):
        for operator in reversed(vertex.operators):
            read: Columns = frozenset()
            for link in links.get(operator.uid, [_Link("", None)]):
                found = _read(plan, link, outputs)
                read = None if read is None or found is None or link.tag is not None else read | found
                names = None if link.edge is None else _some(found, plan.schemas[link.edge.edge_id])
                if link.edge is not None and names is not None:
                    sent[link.edge.edge_id] = names
            outputs[operator.uid] = read
    sources = {uid: _making(source, outputs[uid]) for uid, source in plan.sources.items()}
    return replace(plan, sources=sources, columns=sent)


def _links(plan: JobPlan) -> dict[str, list[_Link]]:
    """Of each operator that others are behind, by uid."""
    found: dict[str, list[_Link]] = {}
    for vertex in plan.graph.vertices:
        for source, target in vertex.chain_edges:
            found.setdefault(source, []).append(_Link(target, (vertex.chain_side_outputs or {}).get(target)))
    for edge in plan.graph.edges:
        head = plan.graph.vertex(edge.target).operators[0].uid
        found.setdefault(edge.source_operator, []).append(_Link(head, edge.tag, edge))
    return found


def _read(plan: JobPlan, link: _Link, outputs: dict[str, Columns]) -> Columns:
    """What is read of the records of a link: by the operator, to make what is read of its output, and by the partitioning."""
    operator, edge = plan.operators.get(link.target), link.edge
    if operator is None or link.tag is not None:
        return None
    read = operator.columns_read(outputs[link.target])
    if read is None or edge is None or edge.key is None:
        return None if edge is not None and edge.partitioning in (Partitioning.HASH, Partitioning.CUSTOM) else read
    return None if edge.partitioning is Partitioning.CUSTOM else read | frozenset(edge.key)


def _some(read: Columns, schema: object) -> tuple[str, ...] | None:
    """The columns that are read, in their order; None: all, or it is not known which there are."""
    names: list[str] | None = getattr(schema, "names", None)
    if not read or names is None:
        return None
    some = tuple(name for name in names if name in read)
    return some if 0 < len(some) < len(names) else None


def _making(source: Source, read: Columns) -> Source:
    with_columns = getattr(source, "with_columns", None)
    names = None if with_columns is None else _some(read, source.schema)
    if with_columns is None or names is None:
        return source
    narrow: Source = with_columns(names)
    return narrow
