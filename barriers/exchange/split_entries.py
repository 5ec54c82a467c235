"""CORE: the entries in which a source with splits keeps them in checkpoints, and sends them from enumerator to readers.

What a split is, its connector says: here it is bytes, of which no more is known than the id that every split has."""

from __future__ import annotations

import msgspec

from holdfast.statebackends.decoding import UNDECODABLE, decode_msgpack

STATE_VERSION = 1

ENUMERATOR_KIND = "source_enumerator"
"""Kind of the operator that hands splits to the vertex behind it."""


class SplitEntry(msgspec.Struct, frozen=True, array_like=True, tag="split"):
    """One split that is not finished: in the state of its reader, in that of the enumerator, or on its way between them."""

    version: int
    split: bytes
    """msgpack of the connector's own record."""
    position: tuple[int, ...] = ()


class EnumeratorEntry(msgspec.Struct, frozen=True, array_like=True, tag="enumerator"):
    """What the enumerator keeps besides the splits that wait; one entry."""

    version: int
    discovered: bool
    """A discovery has succeeded."""
    state: bytes
    """The connector's own."""


class _Named(msgspec.Struct, frozen=True):
    """Of a connector's record: the field that all have."""

    split_id: str


def find_split_id(entry: bytes) -> str | None:
    """Id of the split in an entry; None of what is no split, or is none of a form that is known here.

    A connector whose records are no maps (`array_like`), or that renames the field, keeps its ids to itself."""
    try:
        found = decode_msgpack(entry, SplitEntry)
        return decode_msgpack(found.split, _Named).split_id if found.version == STATE_VERSION else None
    except UNDECODABLE:
        return None
