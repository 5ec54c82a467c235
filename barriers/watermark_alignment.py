"""Watermark alignment: which operators of a job keep their event time together, as the job's graph says it.

An operator's description carries a property; the coordinator reads it, and judges it, since a graph comes from a client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.messages import INT_MAX, TEXT_BYTES_MAX
from holdfast.statebackends.decoding import UNDECODABLE
from holdfast.statebackends.errors import InvalidConfigError

ALIGNMENT_PROPERTY = "watermark_alignment"
UPDATE_INTERVAL_MS_MIN = 10
"""Least time between two reports: each is a message of every worker."""


class WatermarkAlignment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A source of a group whose watermark is more than `max_drift_ms` ahead of the group's minimum waits."""

    group: Annotated[str, msgspec.Meta(min_length=1, max_length=TEXT_BYTES_MAX)]
    max_drift_ms: Annotated[int, msgspec.Meta(ge=0, le=INT_MAX)]
    update_interval_ms: Annotated[int, msgspec.Meta(ge=UPDATE_INTERVAL_MS_MIN, le=INT_MAX)] = 1_000


def alignment_of(operator: str, properties: Mapping[str, Any]) -> WatermarkAlignment | None:
    """The group of an operator; None: it is in none. Raises InvalidConfigError for a property that says something else."""
    found = properties.get(ALIGNMENT_PROPERTY)
    if found is None:
        return None
    try:
        return msgspec.convert(found, WatermarkAlignment)
    except UNDECODABLE as error:
        raise InvalidConfigError(f"operator {operator!r}: its watermark alignment: {error}", operator=operator) from error


def aligned_operators(graph: JobGraph) -> dict[str, tuple[str, WatermarkAlignment]]:
    """Uid -> (vertex, alignment) of each operator in a group. Raises InvalidConfigError for groups that don't agree, and for an
    operator that is in no source's chain: what it would hold up is not its own."""
    found: dict[str, tuple[str, WatermarkAlignment]] = {}
    groups: dict[str, tuple[str, WatermarkAlignment]] = {}
    for vertex in graph.vertices:
        for operator in vertex.operators:
            alignment = alignment_of(operator.uid, operator.properties)
            if alignment is None:
                continue
            if not vertex.is_source:
                raise InvalidConfigError(
                    f"operator {operator.uid!r}: watermark alignment needs the source in the same chain: assign timestamps right "
                    "behind the source, at its parallelism",
                    operator=operator.uid,
                )
            other, agreed = groups.setdefault(alignment.group, (operator.uid, alignment))
            if alignment != agreed:
                raise InvalidConfigError(
                    f"operators {other!r} and {operator.uid!r} are in the watermark group {alignment.group!r} with different "
                    "max_drift or update_interval",
                    operator=operator.uid,
                )
            found[operator.uid] = (vertex.vertex_id, alignment)
    return found
