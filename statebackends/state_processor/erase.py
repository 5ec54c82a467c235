"""Erases one key from states of a snapshot: a savepoint of tables without its rows. Finds the rows of a key, too.

A snapshot in another form may hold rows of the key that its newest rows have replaced (bases of deltas, files of RocksDB): only
tables without deltas have no other rows than those that can be read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.handles import TABLE_FORMATS, FileHandle, OperatorState
from holdfast.statebackends.layout import STATE_METADATA
from holdfast.statebackends.serialization.key_texts import KeyOf
from holdfast.statebackends.serialization.keys import key_columns
from holdfast.statebackends.snapshot.deltas import StatePart
from holdfast.statebackends.state_processor.contents import StoredSnapshot, StoredState, states_of
from holdfast.statebackends.state_processor.edit import filter_snapshot
from holdfast.statebackends.state_processor.reading import PartReader
from holdfast.statebackends.state_processor.rows import state_batches, state_schema
from holdfast.statebackends.storage.port import Storage

Count: TypeAlias = tuple[int, int]
"""(rows of the key, all rows)."""
Counts: TypeAlias = dict[tuple[str, str], Count]
"""By (uid, state)."""
_NOTHING: Mapping[str, Count] = MappingProxyType({})

EVERY_STATE = "*"
"""In place of a state's name: all keyed states and timers of its operator."""


def chosen_states(snapshot: StoredSnapshot, wanted: Iterable[tuple[str, str]]) -> dict[tuple[str, str], StoredState]:
    """The keyed states that (uid, state) pairs name, EVERY_STATE included. Raises NotFoundError, InvalidConfigError."""
    found: dict[tuple[str, str], StoredState] = {}
    for uid, name in wanted:
        if name == EVERY_STATE:
            keyed = {(uid, each): state for each, state in states_of(snapshot.operator(uid)).items() if state.is_keyed}
            if not keyed:
                raise InvalidConfigError(f"operator {uid!r} has no keyed state", operator=uid, state=name)
            found |= keyed
            continue
        state = snapshot.state(uid, name)
        if not state.is_keyed:
            raise InvalidConfigError(f"operator {uid!r}: state {name!r} is not keyed", operator=uid, state=name)
        found[uid, name] = state
    return found


def is_tables(operator: OperatorState) -> bool:
    """Whether all keyed state of an operator is in tables without deltas, which hold what can be read and nothing else."""
    return all(handle.format in TABLE_FORMATS for subtask in operator.subtasks for handle in subtask.keyed)


def count_rows(
    snapshot: StoredSnapshot,
    states: Iterable[StoredState],
    key_text: str,
    known: Mapping[str, Count] = _NOTHING,
    further: set[tuple[str, str]] | None = None,
) -> Counts:
    """Rows of a key in those states whose key type can have it. Reads every row, but those of files in `known`: names of files in
    the snapshot's folder -> what is in them. Adds to `further` the states that have a table with more in it than rows: another
    tool's, which may quote the key where no row has it."""
    found: Counts = {}
    with snapshot.reader() as reader:
        for state in states:
            try:
                key = KeyOf.parse(key_text, state.key_type())
            except InvalidConfigError:
                continue
            names = [part.base.path if isinstance(part.base, FileHandle) else "" for part in state.keyed if not part.is_native]
            counts = [known[name] for name in names if name in known]
            if len(counts) < len(state.keyed):
                rows, total, is_plain = _counted(reader, _without(state, known), key)
                counts.append((rows, total))
                if not is_plain and further is not None:
                    further.add((state.operator.uid, state.meta.name))
            found[state.operator.uid, state.meta.name] = (sum(rows for rows, _ in counts), sum(total for _, total in counts))
            reader.forget()
    return found


def _without(state: StoredState, known: Mapping[str, Count]) -> StoredState:
    unread = [part for part in state.keyed if part.is_native or getattr(part.base, "path", "") not in known]
    return replace(state, keyed=tuple(unread))


def _counted(reader: PartReader, state: StoredState, key: KeyOf) -> tuple[int, int, bool]:
    """Rows of the key, all rows, and whether the tables have nothing else in them."""
    rows = total = 0
    are_plain: list[bool] = []
    schema = state_schema(reader, state)

    def opened(_: StatePart, stored: pa.Schema) -> None:
        are_plain.append(_is_plain(stored, schema))

    for batch in state_batches(reader, state, schema, columns=key_columns(key.key_type), opened=opened):
        rows += pc.sum(key.mask(batch)).as_py() or 0
        total += batch.num_rows
    return rows, total, all(are_plain)


class Erased(NamedTuple):
    """A snapshot without a key."""

    snapshot: StoredSnapshot
    before: Counts
    """Of each state that was to lose the key, as it was read from the source."""
    known: Mapping[str, Count]
    """Names of files of the snapshot that are tables of the source, byte for byte -> what was found in these."""


def erase_key(source: StoredSnapshot, wanted: Iterable[tuple[str, str]], key_text: str, storage: Storage, folder: str) -> Erased:
    """Write the snapshot without the rows of a key, into a folder that is new or empty; all other rows as they are.

    Of a table without deltas the keys alone are read; where the key is not among them the file is copied. All others become
    Parquet tables of the rows that stay. Raises as `filter_snapshot` and `chosen_states`; InvalidConfigError if the key can't be
    one of a state's."""
    states = chosen_states(source, wanted)
    erasures = {which: _Erasure(KeyOf.parse(key_text, state.key_type())) for which, state in states.items()}
    tables: dict[StatePart, Count] = {}

    def losing(reader: PartReader, state: StoredState) -> Collection[StatePart]:
        looked = erasures[state.operator.uid, state.meta.name].look(reader, state)
        tables.update((part, (0, total)) for part, total in looked.items())
        return frozenset(part for part in state.keyed if part not in looked)

    written, kept = filter_snapshot(source, erasures, storage, folder, losing=losing)
    known = {name: tables[part] for name, part in kept.items() if part in tables}
    return Erased(written, {which: (erasure.rows, erasure.total) for which, erasure in erasures.items()}, known)


class _Erasure:
    """The rows of one state but those of one key, counted."""

    def __init__(self, key: KeyOf) -> None:
        self._key = key
        self.rows = self.total = 0

    def look(self, reader: PartReader, state: StoredState) -> dict[StatePart, int]:
        """The tables of a state that lack the key and have no column but those that rows are read of, each with its rows, which
        count as read: the others are yet to be filtered."""
        found: dict[StatePart, int] = {}
        own: set[StatePart] = set()
        schema = state_schema(reader, state)
        newest: list[StatePart] = []

        def opened(part: StatePart, stored: pa.Schema) -> None:
            newest[:] = [part]
            found[part] = 0
            if not _is_plain(stored, schema):
                own.add(part)

        for batch in state_batches(reader, state, schema, columns=key_columns(self._key.key_type), opened=opened):
            (part,) = newest
            found[part] += batch.num_rows
            if pc.any(self._key.mask(batch)).as_py():
                own.add(part)
        lacking = {part: rows for part, rows in found.items() if part not in own}
        self.total += sum(lacking.values())
        return lacking

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        mask = self._key.mask(batch)
        found = pc.sum(mask).as_py() or 0
        self.rows += found
        self.total += batch.num_rows
        return batch.filter(pc.invert(mask)) if found else batch


def _is_plain(stored: pa.Schema, wanted: pa.Schema) -> bool:
    """Whether a table holds a state's columns in their canonical types, and nothing else: a dictionary, a further column or
    metadata of another tool may quote what no row has."""
    if {field.name: field.type for field in stored} != {field.name: field.type for field in wanted} or len(stored) != len(wanted):
        return False
    return set(stored.metadata or {}) <= {STATE_METADATA} and not any(field.metadata for field in stored)
