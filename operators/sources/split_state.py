"""CORE: the splits of a connector as entries, which checkpoints keep and an enumerator sends to readers, and back."""

from __future__ import annotations

from typing import Any, Generic, TypeAlias

import msgspec
import numpy as np

from holdfast.barriers.exchange.split_entries import STATE_VERSION, EnumeratorEntry, SplitEntry
from holdfast.operators.sources.splits import (
    SPLIT_ID_CHARACTERS_MAX,
    AssignedSplit,
    Position,
    SourceSplit,
    SplitRecords,
    SplitT,
)
from holdfast.statebackends.decoding import UNDECODABLE, decode_msgpack
from holdfast.statebackends.errors import CorruptStateError, InvalidSplitError

_Entry: TypeAlias = SplitEntry | EnumeratorEntry


class SplitCodec(Generic[SplitT]):
    """Entries of one source."""

    def __init__(self, split_type: type[SplitT], operator: str) -> None:
        self._type = split_type
        self._operator = operator

    def encode(self, assigned: AssignedSplit[SplitT]) -> bytes:
        return msgspec.msgpack.encode(SplitEntry(STATE_VERSION, msgspec.msgpack.encode(assigned.split), assigned.position))

    def decode(self, entry: bytes) -> AssignedSplit[SplitT]:
        """Raises CorruptStateError for the entry of another source, or of a later version."""
        found = self._entry(entry)
        if not isinstance(found, SplitEntry):
            raise self._corrupt("an enumerator's state, where a split is expected")
        return self._split_of(found)

    def decode_enumerator(self, entries: list[bytes]) -> tuple[EnumeratorEntry, list[SplitT]]:
        """The enumerator's own entry, and the splits that wait. Raises CorruptStateError."""
        own: list[EnumeratorEntry] = []
        waiting: list[SplitT] = []
        for entry in entries:
            found = self._entry(entry)
            if isinstance(found, EnumeratorEntry):
                own.append(found)
            else:
                waiting.append(self._split_of(found).split)
        if len(own) != 1:
            raise self._corrupt(f"{len(own)} states of an enumerator, where there is one")
        return own[0], waiting

    def _entry(self, entry: bytes) -> _Entry:
        try:
            found: _Entry = decode_msgpack(entry, _Entry)  # type: ignore[arg-type]
        except UNDECODABLE as error:
            raise self._corrupt(f"a split can't be read: {error}") from error
        if found.version != STATE_VERSION:
            raise self._corrupt(f"split format {found.version} is not known to this version ({STATE_VERSION})")
        return found

    def _split_of(self, entry: SplitEntry) -> AssignedSplit[SplitT]:
        try:
            return AssignedSplit(decode_msgpack(entry.split, self._type), entry.position)
        except UNDECODABLE as error:
            raise self._corrupt(f"a split is no {self._type.__name__}: {error}") from error

    def _corrupt(self, reason: str) -> CorruptStateError:
        return CorruptStateError(f"source {self._operator}: {reason}", operator=self._operator, reason=reason)


def check_split(split: Any, split_type: type[Any], operator: str) -> None:
    """Raise InvalidSplitError for what a connector found that is no split of its source."""
    reason = None
    if not isinstance(split, SourceSplit) or not isinstance(split, split_type):
        reason = f"{split!r} is no {split_type.__name__}"
    elif not isinstance(split.split_id, str) or not 0 < len(split.split_id) <= SPLIT_ID_CHARACTERS_MAX:
        reason = f"the id of a split has 1..{SPLIT_ID_CHARACTERS_MAX} characters, not {split.split_id!r}"
    if reason is not None:
        raise InvalidSplitError(f"source {operator}: {reason}", operator=operator, split="", reason=reason)


def position_problem(records: SplitRecords, known: Position) -> str | None:
    """What is wrong with the positions of records behind a known one, which a restore would have to read."""
    numbers = len(known)
    if records.num_rows:
        assert records.positions is not None
        width = 1 if records.positions.ndim == 1 else records.positions.shape[1]
        if width != (numbers or width):
            return f"its positions have {width} numbers, and had {numbers}"
        known, numbers = (0,) * width, width
    said = [] if records.position is None else [records.position]
    row = 0
    for letter in records.dead_letters:
        if not row <= letter.row <= records.num_rows:
            return f"dead letters must be in the order of its {records.num_rows} rows; one is in front of row {letter.row}"
        row = letter.row
        said += [letter.position, letter.behind]
    for position in said:
        problem = form_problem(position, known)
        if problem is not None:
            return problem
        known = position
    return None


def form_problem(position: Any, known: Position) -> str | None:
    """What is wrong with a position behind a known one, empty if none is; for an error's text."""
    if not isinstance(position, tuple) or not position or not all(_is_int64(number) for number in position):
        return f"position {position!r}: a position is a tuple of ints of 64 bits, such as (5,)"
    if known and len(position) != len(known):
        return f"position {position!r}, and it had {len(known)} numbers"
    return None


def _is_int64(number: Any) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool) and -(2**63) <= int(number) < 2**63
