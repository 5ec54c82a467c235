"""Which parts of a snapshot's handles make up one table of keyed state: a base, and the delta runs upon it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.handles import KeyedStateHandle, KeyGroupRange, StateHandle, StateMeta

TABLE_FORMATS = ("arrow", "parquet")
"""Formats of handles whose parts are whole tables."""
DELTA_FORMAT = "arrow-delta"
"""Format of a handle whose parts are delta runs: several of one state, oldest first, upon the table of the same state and key
groups in the handle before it. Readers that don't know it refuse it, and so never take a base for all there is."""
RUNS_MAX = 32
"""Runs upon one base."""
BATCH_BYTES_MAX = 16 << 20
"""Tables are read at one time up to this sum; a larger one alone, with its runs."""


@dataclass(frozen=True, slots=True)
class TablePiece:
    """One state's share of one old subtask."""

    key_groups: KeyGroupRange
    format: str
    """Of the base."""
    meta: StateMeta
    base: StateHandle
    runs: tuple[StateHandle, ...] = ()
    """Oldest first."""

    @property
    def parts(self) -> tuple[StateHandle, ...]:
        return self.base, *self.runs

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(part.length for part in self.parts)


def table_pieces(handles: Iterable[KeyedStateHandle], *, operator: str) -> list[TablePiece]:
    """The tables of some handles, of one old subtask or several; native ones are passed over. Raises CorruptStateError."""
    bases: dict[tuple[KeyGroupRange, str], tuple[str, StateMeta, StateHandle]] = {}
    runs: dict[tuple[KeyGroupRange, str], list[StateHandle]] = {}
    for handle in handles:
        if handle.format in TABLE_FORMATS:
            for meta, part in zip(handle.states, handle.parts, strict=True):
                bases[handle.key_groups, meta.name] = (handle.format, meta, part)
        elif handle.format == DELTA_FORMAT:
            for meta, part in zip(handle.states, handle.parts, strict=True):
                place = (handle.key_groups, meta.name)
                if place not in bases or bases[place][1] != meta:
                    raise CorruptStateError(
                        f"operator {operator!r}: state {meta.name!r} has a delta run and no such table before it",
                        operator=operator,
                        state=meta.name,
                        reason="contents",
                    )
                runs.setdefault(place, []).append(part)
    return [
        TablePiece(place[0], table_format, meta, part, tuple(runs.get(place, ())))
        for place, (table_format, meta, part) in bases.items()
    ]


def piece_batches(pieces: Sequence[TablePiece]) -> Iterator[Sequence[TablePiece]]:
    """The same tables in order, in batches to be read at one time and held in memory."""
    start, size = 0, 0
    for position, piece in enumerate(pieces):
        if position > start and size + piece.size > BATCH_BYTES_MAX:
            yield pieces[start:position]
            start, size = position, 0
        size += piece.size
    if start < len(pieces):
        yield pieces[start:]
