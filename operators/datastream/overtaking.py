"""Which edges of a job a checkpoint's barrier may overtake, and why not the others. Pure.

What a barrier overtakes is stored with its checkpoint, and must be dealt out again at any parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import msgspec
import pyarrow as pa

from holdfast.barriers.exchange.guarantee import COMMITTER_KIND
from holdfast.barriers.exchange.split_entries import ENUMERATOR_KIND
from holdfast.barriers.jobgraph import JobEdge, JobGraph, Partitioning
from holdfast.operators.base import JobPlan
from holdfast.statebackends.snapshot.in_flight import OVERTAKABLE
from holdfast.statebackends.snapshot.pieces import TIMESTAMPS

DEALT_OUT_AGAIN = frozenset(map(Partitioning, OVERTAKABLE))
"""Partitionings that say, or leave open, where a stored record goes after a rescale."""


def find_bans(graph: JobGraph, schemas: Mapping[int, Any]) -> dict[int, str]:
    """Edge id -> why a barrier stays behind the records of the edge; edges that it may overtake are left out.

    `schemas`: columns of each edge, None: not declared. A vertex has one moment for the barriers of all its inputs, so that one
    edge that can't be overtaken bans all edges into the same vertex; others of the job are not concerned."""
    own = {edge.edge_id: reason for edge in graph.edges if (reason := _ban(edge, graph, schemas.get(edge.edge_id))) is not None}
    bans: dict[int, str] = {}
    for edge in graph.edges:
        other = next((each for each in graph.inputs(edge.target) if each.edge_id in own), None)
        if edge.edge_id in own:
            bans[edge.edge_id] = own[edge.edge_id]
        elif other is not None:
            head = graph.vertex(edge.target).operators[0].uid
            bans[edge.edge_id] = f"{head} also reads {other.source_operator} ({own[other.edge_id]})"
    return bans


def with_overtakable_edges(plan: JobPlan) -> JobPlan:
    """The same job; its edges say whether they can be overtaken, and those of which records can be stored name their columns."""
    bans = find_bans(plan.graph, plan.schemas)
    edges = tuple(
        msgspec.structs.replace(edge, overtakable=edge.edge_id not in bans, columns=_columns(edge, plan))
        for edge in plan.graph.edges
    )
    return replace(plan, graph=msgspec.structs.replace(plan.graph, edges=edges))


def _columns(edge: JobEdge, plan: JobPlan) -> tuple[str, ...] | msgspec.UnsetType:
    schema = plan.schemas.get(edge.edge_id)
    if schema is None or _ban(edge, plan.graph, schema) is not None:
        return msgspec.UNSET
    fields = (schema.field(name) for name in plan.columns.get(edge.edge_id) or schema.names)
    return tuple(f"{each.name}: {each.type}{'' if each.nullable else ' not null'}" for each in fields)


def _ban(edge: JobEdge, graph: JobGraph, schema: object) -> str | None:
    """Why the edge can't be overtaken whatever else its target reads."""
    source = next(each for each in graph.vertex(edge.source).operators if each.uid == edge.source_operator)
    if source.kind == ENUMERATOR_KIND:
        return "a split is in one place at the barrier"
    if graph.vertex(edge.target).operators[0].kind == COMMITTER_KIND:
        return "all committables of a checkpoint are at the committer when it completes"
    if edge.partitioning is Partitioning.BROADCAST:
        return "broadcast: copies of a state are equal at the barrier"
    if edge.partitioning not in DEALT_OUT_AGAIN:
        return f"{edge.partitioning}: nothing says where its records belong after a rescale"
    if schema is None:
        return "its rows have no declared columns"
    # Stored rows have their event times in a column of that name.
    return f"a column is named {TIMESTAMPS}" if TIMESTAMPS in cast(pa.Schema, schema).names else None
