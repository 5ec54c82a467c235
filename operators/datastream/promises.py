"""Guarantees that Holdfast can't give for a job's graph, reported when it is submitted. Decides from the graph alone."""

from __future__ import annotations

from holdfast.barriers.exchange.guarantee import AT_LEAST_ONCE, describe_guarantee
from holdfast.barriers.jobgraph import JobGraph
from holdfast.statebackends.errors import GraphError

NAMED_MAX = 20
"""Most operators that one line names."""


def operators_without_uid(graph: JobGraph) -> list[str]:
    """Generated uids, in the order of the graph; a sink counts once, although its committer is an operator of its own."""
    operators = (operator for vertex in graph.vertices for operator in vertex.operators)
    return [operator.uid for operator in operators if operator.uid_generated and operator.kind != "sink_committer"]


def promises_not_kept(graph: JobGraph) -> list[str]:
    """One line for each guarantee that does not hold, for the user to read before the job runs."""
    notes = []
    if graph.config.checkpoint_interval_ms is None:
        notes.append(
            "no periodic checkpoints, since checkpoint_interval_ms is None: after a failure the job begins again at its start, or "
            "at its last manual checkpoint, and sinks that commit show nothing before the end"
        )
    if graph.config.checkpointing_mode == AT_LEAST_ONCE:
        notes.append(describe_guarantee(graph))
    found = operators_without_uid(graph)
    if found:
        notes.append(
            f"{_named(found)}: once the program is changed their state may not be found again; give each of them .uid(\"...\") "
            "(require_uids=True refuses a job without)"
        )
    return notes


def check_uids(graph: JobGraph) -> None:
    """Raise GraphError naming the operators without a uid."""
    found = operators_without_uid(graph)
    if found:
        raise GraphError(f"{_named(found)}, and require_uids is set: give each of them .uid(\"...\")", operators=tuple(found))


def _named(uids: list[str]) -> str:
    more = f" and {len(uids) - NAMED_MAX} more" if len(uids) > NAMED_MAX else ""
    return f"{len(uids)} operator{'s' * (len(uids) > 1)} without uid ({', '.join(uids[:NAMED_MAX])}{more})"
