"""CORE: in-flight records of a snapshot: whether the job has the edges that they were on, and who restores them. Pure.

The consumer restores both ends of a channel, so that producers' queues begin empty. What each consumer gets is decided edge by
edge, whatever state its operators have. Nothing is opened here: of a piece whose rows belong to several consumers each one gets all
of it, and leaves out the rows of others (`barriers/exchange/restored.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.barriers.exchange.wiring import name_edges
from holdfast.barriers.jobgraph import JobEdge, JobGraph, JobVertex, Partitioning
from holdfast.barriers.messages import InFlightRestore, RestoredChannel, RestoredPiece, SubtaskKey
from holdfast.statebackends.decoding import UNDECODABLE
from holdfast.statebackends.errors import CorruptStateError, HoldfastError, InFlightStateError, InvalidConfigError
from holdfast.statebackends.handles import ChannelPiece, ChannelState, InlineHandle, StateHandle
from holdfast.statebackends.keygroups import MAX_PARALLELISM_LIMIT, assign_key_groups
from holdfast.statebackends.snapshot.in_flight import EdgeName, describe_edge, edge_name, summarise
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata

EDGES_SHOWN_MAX = 8
"""Edges that a message lists; the error's fields have all."""


def give_up_in_flight(metadata: SnapshotMetadata, checkpoint_id: int | None) -> tuple[SnapshotMetadata, tuple[str, ...]]:
    """The snapshot without its in-flight records, and what is lost, if they are to be given up. `checkpoint_id`: of the snapshot
    for which this was allowed; None: of none.

    Raises InvalidConfigError for the id of another snapshot, of which nobody said that it could lose any."""
    if checkpoint_id is None:
        return metadata, ()
    if metadata.checkpoint_id != checkpoint_id:
        raise InvalidConfigError(
            f"without_channel_state={checkpoint_id}, and the snapshot that is restored has the id {metadata.checkpoint_id}",
            setting="without_channel_state",
        )
    lost = tuple(
        f"in flight on {describe_edge(each.name)}, and lost by without_channel_state={checkpoint_id}: {each.rows} rows "
        f"({each.size} bytes)"
        for each in summarise(metadata.in_flight)
    )
    return (metadata.without_in_flight() if lost else metadata), lost


def check_in_flight(
    channels: Sequence[ChannelState], stored: Mapping[str, Any] | None, graph: JobGraph, *, checkpoint_id: int
) -> list[HoldfastError]:
    """What is in the way of restoring them. `stored`: JSON of the graph that the snapshot was taken of; `graph`: of the job.

    InFlightStateError names all edges that the job has not, or not alike; CorruptStateError a channel that can't have been."""
    if not channels:
        return []
    old = _decoded(stored)
    problems: dict[EdgeName, str] = {}
    if old is None:
        problems = {edge_name(state): "the snapshot does not say what the edge was like" for state in channels}
    else:
        try:
            _check_channels(channels, old)
        except CorruptStateError as error:
            return [error]
        before, now = _by_name(old), _by_name(graph)
        for name in dict.fromkeys(map(edge_name, channels)):
            reason = _difference(before[name], now.get(name))
            if reason is not None:
                problems[name] = reason
    return [_mismatch(channels, problems, checkpoint_id)] if problems else []


def assign_in_flight(
    channels: Sequence[ChannelState], stored: Mapping[str, Any] | None, graph: JobGraph
) -> dict[SubtaskKey, InFlightRestore]:
    """What each subtask of the job restores; those that restore nothing are left out.

    Raises InFlightStateError and CorruptStateError as `check_in_flight` finds them."""
    if not channels:
        return {}
    for error in check_in_flight(channels, stored, graph, checkpoint_id=0):
        raise error
    old = _decoded(stored)
    assert old is not None
    before, names = _by_name(old), name_edges(graph)
    by_edge: dict[EdgeName, list[ChannelState]] = {}
    for state in channels:
        by_edge.setdefault(edge_name(state), []).append(state)
    restores: dict[SubtaskKey, _Restore] = {}
    for edge in graph.edges:
        name = names[edge.edge_id]
        states = by_edge.get(name)
        if states is None:
            continue
        logs = _logs(states)
        sizes = _Sizes.of(old, before[name]), _Sizes.of(graph, edge)
        for consumer in range(sizes[1].consumers):
            restore = restores.setdefault(SubtaskKey(edge.target, consumer), _Restore())
            restore.add(edge, _dealt(logs, edge.partitioning, *sizes, consumer), keeps_events=sizes[0] == sizes[1])
    return {key: restore.record() for key, restore in restores.items() if restore.channels}


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of an edge."""

    producers: int
    consumers: int
    max_parallelism: int
    """Of the consumer."""

    @staticmethod
    def of(graph: JobGraph, edge: JobEdge) -> _Sizes:
        target = graph.vertex(edge.target)
        return _Sizes(graph.vertex(edge.source).parallelism, target.parallelism, target.max_parallelism)


_Logs = Mapping[tuple[int, int], Sequence[tuple[StateHandle, ChannelPiece]]]
"""(producer, consumer) -> what is stored of the channel, in its order."""


def _logs(states: Sequence[ChannelState]) -> _Logs:
    """Of each channel what its consumer stored, then what its producer stored: the consumer's end is further on."""
    logs: dict[tuple[int, int], list[tuple[StateHandle, ChannelPiece]]] = {}
    for side in ("input", "output"):
        for state in states:
            if state.side != side:
                continue
            for piece in state.pieces:
                channel = (piece.peer, state.subtask) if side == "input" else (state.subtask, piece.peer)
                logs.setdefault(channel, []).append((state.part, piece))
    return logs


@dataclass(frozen=True, slots=True)
class _Given:
    part: StateHandle
    piece: ChannelPiece
    filtered: bool


def _dealt(logs: _Logs, partitioning: Partitioning, old: _Sizes, new: _Sizes, consumer: int) -> dict[int, list[_Given]]:
    """New producer -> what stands in front of its channel to a new consumer, channel by old channel."""
    given: dict[int, list[_Given]] = {}
    heirs = dict(_inherited(partitioning, old, new, consumer))
    for producer in range(old.producers):
        for former, filtered in heirs.items():
            for part, piece in logs.get((producer, former), ()):
                given.setdefault(producer % new.producers, []).append(_Given(part, piece, filtered))
    return dict(sorted(given.items()))


def _inherited(partitioning: Partitioning, old: _Sizes, new: _Sizes, consumer: int) -> Iterator[tuple[int, bool]]:
    """(old consumer, whether some of its rows may belong to others) of all that a new consumer inherits from."""
    if partitioning is not Partitioning.HASH:
        yield from ((former, False) for former in range(consumer, old.consumers, new.consumers))
        return
    mine = assign_key_groups(new.max_parallelism, new.consumers, consumer)
    for former in range(old.consumers):
        if old.max_parallelism != new.max_parallelism:  # other groups: a key may be anywhere
            yield former, new.consumers > 1
            continue
        theirs = assign_key_groups(old.max_parallelism, old.consumers, former)
        shared = theirs.intersection(mine)
        if len(shared):
            yield former, shared != theirs


@dataclass(slots=True)
class _Restore:
    """Collects what one subtask restores."""

    channels: list[RestoredChannel] = field(default_factory=list)
    parts: dict[StateHandle, int] = field(default_factory=dict)

    def add(self, edge: JobEdge, given: Mapping[int, Sequence[_Given]], *, keeps_events: bool) -> None:
        for producer, pieces in given.items():
            restored = tuple(self._piece(each) for each in pieces)
            self.channels.append(RestoredChannel(edge.edge_id, producer, restored, keeps_events))

    def _piece(self, given: _Given) -> RestoredPiece:
        part, piece, offset = given.part, given.piece, given.piece.offset
        if isinstance(part, InlineHandle):  # of what is for all consumers each one is sent its own alone
            part, offset = InlineHandle(part.data[offset : offset + piece.length]), 0
        index = self.parts.setdefault(part, len(self.parts))
        return RestoredPiece(index, offset, piece.length, piece.rows, given.filtered)

    def record(self) -> InFlightRestore:
        return InFlightRestore(tuple(self.parts), tuple(self.channels))


def _decoded(stored: Mapping[str, Any] | None) -> JobGraph | None:
    """None: there is none, or it is of a version that can't be read, or it can have been of no job."""
    try:
        graph = None if stored is None else msgspec.convert(stored, JobGraph)
    except UNDECODABLE:
        return None
    return graph if graph is not None and _fits_together(graph) else None


def _fits_together(graph: JobGraph) -> bool:
    """Whether each edge has two ends, and each end a number of subtasks that there can be: people write snapshots, too."""
    heads = {vertex.vertex_id for vertex in graph.vertices if vertex.operators}
    ids = {edge.edge_id for edge in graph.edges}
    return (
        len(heads) == len(graph.vertices)
        and len(ids) == len(graph.edges)
        and all(edge.source in heads and edge.target in heads for edge in graph.edges)
        and all(1 <= each.parallelism <= each.max_parallelism <= MAX_PARALLELISM_LIMIT for each in graph.vertices)
    )


def _by_name(graph: JobGraph) -> dict[EdgeName, JobEdge]:
    edges = {edge.edge_id: edge for edge in graph.edges}
    return {name: edges[edge_id] for edge_id, name in name_edges(graph).items()}


def _check_channels(channels: Sequence[ChannelState], old: JobGraph) -> None:
    """Raises CorruptStateError for channels that the snapshot's own graph does not have."""
    edges = _by_name(old)
    for state in channels:
        edge = edges.get(edge_name(state))
        where = f"in-flight records of {describe_edge(edge_name(state))}, {state.side} side of subtask {state.subtask}"
        if edge is None:
            raise CorruptStateError(f"{where}: the snapshot's own graph has no such edge", operator=state.target)
        ends = _ends(old, edge) if state.side == "input" else _ends(old, edge)[::-1]
        outside = [peer for peer in (piece.peer for piece in state.pieces) if not 0 <= peer < ends[0].parallelism]
        if not 0 <= state.subtask < ends[1].parallelism or outside or edge.partitioning != state.partitioning:
            raise CorruptStateError(f"{where}: the edge had no such channel", operator=state.target, subtask=state.subtask)


def _ends(graph: JobGraph, edge: JobEdge) -> tuple[JobVertex, JobVertex]:
    return graph.vertex(edge.source), graph.vertex(edge.target)


def _difference(old: JobEdge, new: JobEdge | None) -> str | None:
    """Why records that were on one edge can't be restored on another."""
    if new is None:
        return "the job has no such edge"
    if old.partitioning != new.partitioning:
        return f"it was partitioned by {old.partitioning}, and is by {new.partitioning}"
    if (old.key, old.key_type) != (new.key, new.key_type):
        return f"its key was {_key(old)}, and is {_key(new)}"
    if new.columns is msgspec.UNSET or old.columns is msgspec.UNSET:
        return "its rows have no declared columns"
    if old.columns != new.columns:
        gone, added = ([each for each in some if each not in others] for some, others in _both_ways(old.columns, new.columns))
        texts = [f"without {', '.join(gone)}"] * bool(gone) + [f"with {', '.join(added)}"] * bool(added)
        return f"its columns are others: {' and '.join(texts) or 'in another order'}"
    return None


def _both_ways(old: tuple[str, ...], new: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    return (old, new), (new, old)


def _key(edge: JobEdge) -> str:
    columns = "a function" if edge.key is None else ", ".join(edge.key) or "one for all"
    return f"{columns} ({edge.key_type})" if edge.key_type else columns


def _mismatch(channels: Sequence[ChannelState], problems: Mapping[EdgeName, str], checkpoint_id: int) -> InFlightStateError:
    flights = [each for each in summarise(channels) if each.name in problems]
    shown = "; ".join(f"{each}: {problems[each.name]}" for each in flights[:EDGES_SHOWN_MAX])
    more = f"; and {len(flights) - EDGES_SHOWN_MAX} more" if len(flights) > EDGES_SHOWN_MAX else ""
    return InFlightStateError(
        f"the snapshot holds records in flight that the job has no place for: {shown}{more}. Restore it with the graph that it was "
        f"taken of and take a savepoint, which holds none, or lose them with without_channel_state={checkpoint_id}",
        edges=[
            {**each.name._asdict(), "rows": each.rows, "size": each.size, "reason": problems[each.name]} for each in flights
        ],
        rows=sum(each.rows for each in flights),
        size=sum(each.size for each in flights),
        checkpoint_id=checkpoint_id,
    )
