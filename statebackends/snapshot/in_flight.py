"""In-flight records of a snapshot, by edge: what an edge is called, and how much of it there is. For tools and restores.

It knows records of `_metadata`, neither the graph nor the bytes of a piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.statebackends.handles import ChannelState
from holdfast.statebackends.keygroups import MAX_PARALLELISM_LIMIT


class EdgeName(NamedTuple):
    """What an edge is known by in a snapshot, whatever its number in the graph."""

    source: str
    """Uid of the operator that feeds it."""
    tag: str | None
    """Of its side output; None: its main output."""
    target: str
    """Uid of the target's head."""
    input: int
    """Which input of the target."""
    ordinal: int
    """Number among edges that are equal in all of this, in the graph's order."""


def edge_name(state: ChannelState) -> EdgeName:
    return EdgeName(state.source, state.tag, state.target, state.input, state.ordinal)


def storing_uid(state: ChannelState) -> str:
    """Uid of the operator at whose end of the edge the records were stored."""
    return state.target if state.side == "input" else state.source


def describe_edge(name: EdgeName) -> str:
    """Such as `'flights' -> 'days'`, with tag, input and number where the edge has them."""
    tag = f" ({name.tag})" if name.tag is not None else ""
    more = [f"input {name.input + 1}"] * (name.input > 0) + [f"edge {name.ordinal + 1}"] * (name.ordinal > 0)
    return f"{name.source!r}{tag} -> {name.target!r}" + (f" ({', '.join(more)})" if more else "")


@dataclass(frozen=True, slots=True)
class EdgeFlight:
    """What a snapshot has of one edge."""

    name: EdgeName
    rows: int
    size: int
    """Bytes."""

    def __str__(self) -> str:
        return f"{describe_edge(self.name)} ({self.rows} rows, {self.size} bytes)"


OVERTAKABLE = ("hash", "rebalance", "shuffle", "global")
"""How an edge may be partitioned that has any: others are never overtaken."""


ROWS_MAX = 1 << 40
"""Of one end of an edge: more than any subtask can hold, and few enough for sums over all ends to stay within 64 bits."""


def repeated_end(channels: Iterable[ChannelState]) -> ChannelState | None:
    """The first that tells of an end of an edge, at one subtask, of which another one told before: its rows would be restored
    twice."""
    known: set[tuple[EdgeName, str, int]] = set()
    for state in channels:
        end = edge_name(state), state.side, state.subtask
        if end in known:
            return state
        known.add(end)
    return None


def problem_of(state: ChannelState) -> str | None:
    """Why the record can be of no snapshot, whatever its graph; None if it can be of one."""
    if state.partitioning not in OVERTAKABLE:
        return f"an edge partitioned by {state.partitioning!r}, which is never overtaken"
    if not all(0 <= number < MAX_PARALLELISM_LIMIT for number in (state.subtask, state.input, state.ordinal)):
        return f"subtask {state.subtask}, input {state.input}, edge {state.ordinal}"
    peer = next((piece.peer for piece in state.pieces if not 0 <= piece.peer < MAX_PARALLELISM_LIMIT), None)
    return problem_of_pieces(state) if peer is None else f"a channel to subtask {peer}"


def problem_of_pieces(state: ChannelState) -> str | None:
    """Why the pieces can't be all of their part; None if they can."""
    length, end, rows = state.part.length, 0, 0
    for piece in state.pieces:
        if piece.offset != end or piece.length < 1 or not 0 <= piece.rows <= ROWS_MAX:
            return f"a piece of {piece.length} bytes and {piece.rows} rows at {piece.offset}, where {end} is next"
        end, rows = piece.offset + piece.length, rows + piece.rows
    if end != length or not state.pieces:
        return f"pieces of {end} bytes in a part of {length}"
    if rows > ROWS_MAX:
        return f"{rows} rows, which no subtask holds"
    return None if rows == state.rows else f"{state.rows} rows, and {rows} in its pieces"


def summarise(channels: Iterable[ChannelState]) -> tuple[EdgeFlight, ...]:
    """Rows and bytes of each edge, in the snapshot's order."""
    found: dict[EdgeName, list[int]] = {}
    for state in channels:
        totals = found.setdefault(edge_name(state), [0, 0])
        totals[0] += state.rows
        totals[1] += sum(piece.length for piece in state.pieces)
    return tuple(EdgeFlight(name, rows, size) for name, (rows, size) in found.items())
