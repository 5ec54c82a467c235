"""Where sources stand in a snapshot, as texts for people: from the entries of their state, which a restore goes on from. Pure.

An entry is what a source stored, and judged as anybody's bytes: of a form that is not known here nothing is said. Sources of the
runtime's own have stripes of row numbers; those with splits an id and the position behind the last row, whose meaning follows from
what the connector's record has (`operators/connectors`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import msgspec

from holdfast.barriers.exchange.split_entries import STATE_VERSION, SplitEntry
from holdfast.statebackends.decoding import UNDECODABLE, decode_msgpack

POSITIONS_SHOWN_MAX = 20
"""Texts of one source; the others are counted."""
POSITION_CHARACTERS_MAX = 300
_TEXT_CHARACTERS_MAX = 2 * POSITION_CHARACTERS_MAX
"""Of an id and a position, which is as long as its source has made it: they are kept for each job."""
_STREAM = "stream"
"""Tag of the entries of a streaming input."""


class SourcePlaces(msgspec.Struct, frozen=True):
    """Of one source."""

    splits: int
    """That are not finished; the rows of a source without splits are one."""
    shown: tuple[str, ...]
    """At most POSITIONS_SHOWN_MAX, in the order of their ids."""


class SnapshotPositions(msgspec.Struct, frozen=True):
    """Of one snapshot."""

    checkpoint_id: int
    sources: Mapping[str, SourcePlaces]
    """By uid; without those whose state says nothing that is known here, or is too large."""
    is_gone: bool = False
    """The snapshot is not in storage any more."""


def describe_positions(entries: Sequence[bytes]) -> SourcePlaces:
    """All entries of one source."""
    splits = sorted(text for entry in entries if (text := _split_text(entry)) is not None)
    rows = sorted(row for entry in entries if (row := _stripe_row(entry)) is not None)
    if rows:
        splits.append(f"row {rows[0]:,}" if rows[0] == rows[-1] else f"row {rows[0]:,}, and some read up to {rows[-1]:,}")
    return SourcePlaces(len(splits), tuple(text[:_TEXT_CHARACTERS_MAX] for text in splits[:POSITIONS_SHOWN_MAX]))


def _stripe_row(entry: bytes) -> int | None:
    """Number of the first row that is not read of a stripe: `StripePosition` and `StreamPosition` of operators/sources."""
    try:
        fields = decode_msgpack(entry, list[Any])
    except UNDECODABLE:
        return None
    stripe = fields[1:5] if fields[:1] == [_STREAM] else fields[:4]
    if len(stripe) != 4 or not all(map(_is_whole, stripe)) or stripe[0] != 1 or not 0 <= stripe[2] < stripe[1]:
        return None
    return int(stripe[3])


def _split_text(entry: bytes) -> str | None:
    try:
        found = decode_msgpack(entry, SplitEntry)
        record = decode_msgpack(found.split, dict[str, Any])
    except UNDECODABLE:
        return None
    split_id = record.get("split_id")
    if found.version != STATE_VERSION or not isinstance(split_id, str):
        return None
    return f"{split_id[:POSITION_CHARACTERS_MAX]} {_place(record, found.position)}"


def _place(split: Mapping[str, Any], position: tuple[int, ...]) -> str:
    match split:
        case {"topic": _, "partition": _, "start": start}:
            return f"at offset {_number(position[0] if position else start)}"
        case {"stream": _, "subject": _, "start": start}:
            return f"at sequence {_number(position[0] if position else start)}"
        case {"system": _, "timeline": _}:
            return _lsn_text(position, is_initial=split.get("snapshot") is not None)
        case {"size": _, "modified_ns": _}:
            return _file_text(position)
    return f"at {'.'.join(map(str, position))}" if position else "at its beginning"


def _lsn_text(position: tuple[int, ...], *, is_initial: bool) -> str:
    text = f"at LSN {position[0] >> 32:X}/{position[0] & 0xFFFFFFFF:X}" if position and position[0] >= 0 else "at its beginning"
    if len(position) > 1 and position[1]:
        text += f", {position[1]:,} rows of a transaction read"
    return text + ("; rows that the tables had are still read" if is_initial else "")


def _file_text(position: tuple[int, ...]) -> str:
    """A Parquet file's is a row; a text file's where a block begins, and the rows of it that were read."""
    if not position:
        return "at its beginning"
    if len(position) == 1:
        return f"at row {position[0]:,}"
    return f"at byte {position[0]:,}" + (f", {position[1]:,} rows on" if position[1] else "")


def _number(value: object) -> str:
    return f"{value:,}" if _is_whole(value) else "?"


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
