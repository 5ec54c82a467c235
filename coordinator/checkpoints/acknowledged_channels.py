"""CORE: checks whether a task can have had in flight what its acknowledgement says. Pure.

Only edges that barriers may overtake have anything, and only in a checkpoint that was triggered so; a task has what was at its own
end of their channels. Parts are checked like those of state (acknowledgements.py)."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.barriers.exchange.wiring import consumers_of, name_edges, producers_of
from holdfast.barriers.jobgraph import JobEdge, JobGraph
from holdfast.barriers.messages import SubtaskKey
from holdfast.statebackends.handles import ChannelState
from holdfast.statebackends.snapshot.in_flight import EdgeName, edge_name, problem_of_pieces

PIECES_MAX = 1_000_000
"""Pieces of one task: some for each of its channels."""


class AcknowledgedChannels:
    """What each task of a job may have in flight."""

    def __init__(self, graph: JobGraph) -> None:
        self._graph = graph
        names = name_edges(graph)
        self._edges: dict[EdgeName, JobEdge] = {names[edge.edge_id]: edge for edge in graph.edges if edge.overtakable}

    def problem(self, task: SubtaskKey, channels: Sequence[ChannelState]) -> str | None:
        """Why the task can't have had these in flight; None if it can."""
        if sum(len(channel.pieces) for channel in channels) > PIECES_MAX:
            return f"more than {PIECES_MAX} pieces of in-flight data"
        known: set[tuple[EdgeName, str]] = set()
        for channel in channels:
            end = edge_name(channel), channel.side
            problem = "twice" if end in known else self._problem(task, channel)
            known.add(end)
            if problem is not None:
                return f"in-flight data of {channel.source[:200]!r} -> {channel.target[:200]!r}: {problem}"
        return None

    def _problem(self, task: SubtaskKey, channel: ChannelState) -> str | None:
        edge = self._edges.get(edge_name(channel))
        is_input = channel.side == "input"
        if edge is None or (edge.target if is_input else edge.source) != task.vertex or channel.partitioning != edge.partitioning:
            return f"no edge of the task that may be overtaken, on its {channel.side} side"
        if channel.subtask != task.subtask:
            return f"of subtask {channel.subtask}"
        peers = (producers_of if is_input else consumers_of)(self._graph, edge, task.subtask)
        peer = next((piece.peer for piece in channel.pieces if piece.peer not in peers), None)
        return problem_of_pieces(channel) if peer is None else f"a channel to subtask {peer}, which is none"
