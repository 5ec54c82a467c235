"""Writes a canonical savepoint from a snapshot with some states replaced; all other state is carried over.

Nothing is changed in place. Parquet tables are copied byte for byte, tables in other formats are rewritten as Parquet in a stream;
`_metadata` comes last. Operators and states keep their names here; other arrangements are for arrange.py."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import msgspec
import pyarrow as pa

from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.handles import (
    DELTA_FORMATS,
    FileHandle,
    KeyedStateHandle,
    KeyGroupRange,
    OperatorListHandle,
    OperatorState,
    OperatorSubtaskState,
    StateHandle,
    StateMeta,
)
from holdfast.statebackends.keygroups import operator_id
from holdfast.statebackends.layout import KEY_GROUP, METADATA_NAME, STATE_METADATA, VALUE
from holdfast.statebackends.snapshot.deltas import StatePart
from holdfast.statebackends.snapshot.metadata import NATIVE_PROPERTY, SnapshotMetadata, encode_metadata
from holdfast.statebackends.state import Redistribution
from holdfast.statebackends.state_processor.arrangement import renamed
from holdfast.statebackends.state_processor.conform import EntryLists, StateLayout, refuse_json
from holdfast.statebackends.state_processor.contents import StoredSnapshot, StoredState, check_contents, refuse_in_flight, states_of
from holdfast.statebackends.state_processor.reading import PartReader
from holdfast.statebackends.state_processor.rows import state_batches, state_schema
from holdfast.statebackends.state_processor.values import stored_serializer
from holdfast.statebackends.state_processor.writing import ClaimedFolder, KeyGroupSorter, TableFiles, claimed_folder
from holdfast.statebackends.storage.port import Storage

Batches: TypeAlias = Iterable[pa.RecordBatch | pa.Table]

Change: TypeAlias = Callable[[Batches, pa.Schema], Batches]
"""(present rows of a state, its schema) -> its new rows; both as streams."""

Filter: TypeAlias = Callable[[pa.RecordBatch], pa.RecordBatch]
"""Some rows of a keyed state -> those that stay, as they are and in their order. It is given every row once."""

Losing: TypeAlias = Callable[[PartReader, StoredState], Collection[StatePart]]
"""The parts of a state, all of tables without deltas, that may lose rows by its filter."""


@dataclass(frozen=True, slots=True)
class _Filtering:
    """What becomes of one operator's tables whose rows are filtered."""

    filters: Mapping[str, Filter]
    """By name of the state."""
    losing: Callable[[StoredState], Collection[StatePart]]
    kept: dict[str, StatePart]
    """Names of files that are copies of tables, each with its part: filled."""


CANONICAL = "parquet"
EDITED_PROPERTY = "edited"
"""Property of the savepoint that says, for people, what was edited."""


def edit_snapshot(
    source: StoredSnapshot, changes: Mapping[tuple[str, str], Change], storage: Storage, folder: str, *, now_ms: int
) -> StoredSnapshot:
    """Write the snapshot with changed states into a folder that is new or empty.

    `changes`: (operator uid, state name) -> change. `now_ms`: stamp of values with a TTL that come without one. Raises
    NotFoundError for an unknown state; InvalidKeyError, StateValueError and InvalidConfigError naming operator, state and row for
    invalid rows; InFlightStateError where records are in flight; CorruptStateError, StorageUnavailableError. The folder is then
    as it was."""
    refuse_in_flight(source)
    for uid, name in changes:
        source.state(uid, name)
    with claimed_folder(storage, folder, "edit") as target, source.reader() as reader:
        files = TableFiles(target, reader)
        operators = []
        for operator in source.metadata.operators:
            sorted_rows, lists = {}, {}
            for name, state in states_of(operator).items():
                change = changes.get((operator.uid, name))
                if change is not None and state.is_keyed:
                    sorted_rows[name] = _changed(reader, state, change, now_ms)
                elif change is not None:
                    lists[name] = _changed_entries(reader, state, change)
            names = {name: name for name in states_of(operator)}
            rewriting = OperatorRewriting(reader, target, files, operator, operator.uid, names, sorted_rows, lists)
            operators.append(rewriting.operator())
            reader.forget()
        edited = ", ".join(f"{uid}.{name}" for uid, name in sorted(changes))
        return finish_edited(msgspec.structs.replace(source.metadata, operators=tuple(operators)), edited, target, storage, folder)


def filter_snapshot(
    source: StoredSnapshot, filters: Mapping[tuple[str, str], Filter], storage: Storage, folder: str, *, losing: Losing
) -> tuple[StoredSnapshot, dict[str, StatePart]]:
    """Write the snapshot without some rows of keyed states into a folder that is new or empty: rows that stay were judged as they
    were read, and stay in their order, so that nothing is sorted, and little held in memory.

    `filters`: (operator uid, state name) -> filter. `losing`: whether a table without deltas may lose rows; one that does not is
    copied byte for byte, and keeps its format, as tables of other states do. All else becomes Parquet.

    Returns the snapshot, and the name of each file that is such a copy -> the part of the source. Raises as `edit_snapshot`, and
    InvalidConfigError for a state that is not keyed; the folder is then as it was."""
    refuse_in_flight(source)
    for uid, name in filters:
        if not source.state(uid, name).is_keyed:
            raise InvalidConfigError(f"operator {uid!r}: state {name!r} is not keyed", operator=uid, state=name)
    with claimed_folder(storage, folder, "edit") as target, source.reader() as reader:
        files = TableFiles(target, reader)
        operators = []
        kept: dict[str, StatePart] = {}
        for operator in source.metadata.operators:
            names = {name: name for name in states_of(operator)}
            own = {name: each for (uid, name), each in filters.items() if uid == operator.uid}
            filtering = _Filtering(own, partial(losing, reader), kept)
            rewriting = OperatorRewriting(reader, target, files, operator, operator.uid, names, {}, {}, filtering)
            operators.append(rewriting.operator())
            reader.forget()
        edited = ", ".join(f"{uid}.{name}" for uid, name in sorted(filters))
        metadata = msgspec.structs.replace(source.metadata, operators=tuple(operators))
        return finish_edited(metadata, edited, target, storage, folder), kept


def finish_edited(metadata: SnapshotMetadata, edited: str, target: ClaimedFolder, storage: Storage, folder: str) -> StoredSnapshot:
    """Write `_metadata`, which makes the folder a canonical savepoint. `metadata`: that of the source, with the folder's operators.

    `edited`: what was edited, for people. Raises CorruptStateError for a result that could not be opened again."""
    properties = {name: value for name, value in metadata.properties.items() if name != NATIVE_PROPERTY}
    kind = "savepoint" if metadata.kind == "checkpoint" else metadata.kind
    properties |= {EDITED_PROPERTY: edited} if edited else {}
    written = StoredSnapshot(msgspec.structs.replace(metadata, kind=kind, properties=properties), storage, folder)
    check_contents(written)
    target.finish(METADATA_NAME, encode_metadata(written.metadata))
    return written


def named_schema(schema: pa.Schema, meta: StateMeta) -> pa.Schema:
    """A state's schema with the StateMeta that it has in the savepoint."""
    return schema.with_metadata({**(schema.metadata or {}), STATE_METADATA: msgspec.json.encode(meta)})


def layout_of(reader: PartReader, state: StoredState) -> StateLayout:
    """Table of a stored state. Raises CorruptStateError."""
    schema = state_schema(reader, state)
    operator = state.operator
    return StateLayout(operator.uid, state.meta, state.key_type(), operator.max_parallelism, schema, stored_serializer(state))


def _changed(reader: PartReader, state: StoredState, change: Change, now_ms: int) -> KeyGroupSorter:
    layout = replace(layout_of(reader, state), stamp_ms=now_ms)
    rows = KeyGroupSorter(layout, reader.new_path)
    for batch in change(state_batches(reader, state, layout.schema), layout.schema):
        rows.add(batch)
    return rows


def _changed_entries(reader: PartReader, state: StoredState, change: Change) -> dict[int, list[bytes]]:
    """Subtask -> new entries of an operator state. The change gets one copy of a broadcast state."""
    uid, schema = state.operator.uid, state_schema(reader, state)

    def check_json() -> None:
        for batch in state_batches(reader, state, schema):
            for entry in batch.column(VALUE).to_pylist():
                error = refuse_json(uid, state.meta, entry)
                if error is not None:
                    raise error

    entries = EntryLists(uid, state.meta, sorted({part.subtask for part in state.lists}), check_json)
    for batch in change(_one_copy(reader, state, schema), schema):
        entries.add(batch)
    return entries.dealt()


def _one_copy(reader: PartReader, state: StoredState, schema: pa.Schema) -> Batches:
    if state.meta.kind != Redistribution.BROADCAST.kind:
        yield from state_batches(reader, state, schema)
        return
    copies = [
        (part, [entry for batch in state_batches(reader, replace(state, lists=(part,)), schema) for entry in batch.column(VALUE)])
        for part in state.lists
        if part.handle.count
    ]
    for part, entries in copies:
        if entries != copies[0][1]:
            raise InvalidConfigError(
                f"operator {state.operator.uid!r}, state {state.meta.name!r}: the copies of subtasks {copies[0][0].subtask} and "
                f"{part.subtask} differ: say by a frame what it is to have",
                operator=state.operator.uid,
                state=state.meta.name,
            )
    for part, _ in copies[:1]:
        yield from state_batches(reader, replace(state, lists=(part,)), schema)


class OperatorRewriting:
    """Writer of one operator whose key groups stay where they are."""

    def __init__(
        self,
        reader: PartReader,
        target: ClaimedFolder,
        files: TableFiles,
        operator: OperatorState,
        uid: str,
        names: Mapping[str, str],
        changed: Mapping[str, KeyGroupSorter],
        lists: Mapping[str, Mapping[int, list[bytes]]],
        filtering: _Filtering | None = None,
    ) -> None:
        """`uid`: of the operator in the target. `names`: state name in the snapshot -> in the target; other states are dropped.
        `changed`, `lists`: rows and entries of replaced states, by name in the snapshot; `filtering`: of states that lose rows."""
        self._reader = reader
        self._target = target
        self._files = files
        self._operator = operator
        self._uid = uid
        self._names = names
        self._states = states_of(operator)
        self._changed = changed
        self._lists = lists
        self._filtering = filtering
        self._rewritten: dict[str, Collection[StatePart]] = {}

    def operator(self) -> OperatorState:
        subtasks = tuple(
            msgspec.structs.replace(
                state,
                keyed=tuple(self._keyed_handles(subtask, state)),
                operator=tuple(self._list_handles(subtask, state)),
            )
            for subtask, state in enumerate(self._operator.subtasks)
        )
        self._check_covered(subtasks)
        name = self._uid if self._operator.name == self._operator.uid else self._operator.name
        return msgspec.structs.replace(self._operator, uid=self._uid, operator_id=self._operator_id(), name=name, subtasks=subtasks)

    def _operator_id(self) -> str:
        return self._operator.operator_id if self._uid == self._operator.uid else operator_id(self._uid)

    def _keyed_handles(self, subtask: int, state: OperatorSubtaskState) -> Iterator[KeyedStateHandle]:
        """Handles of the kept tables. Deltas are merged into them, and have no handles."""
        for handle in state.keyed:
            kept = [index for index, meta in enumerate(handle.states) if meta.name in self._names]
            if handle.format in DELTA_FORMATS or not (kept or not handle.states):
                continue
            parts: dict[str, list[tuple[StateMeta, StateHandle]]] = {}
            for index in kept:
                table_format, part = self._part(subtask, handle, index)
                parts.setdefault(table_format, []).append((self._meta(handle.states[index]), part))
            for table_format, own in (parts or {CANONICAL: []}).items():
                metas, tables = tuple(meta for meta, _ in own), tuple(part for _, part in own)
                yield KeyedStateHandle(handle.key_groups, table_format, metas, tables)

    def _meta(self, meta: StateMeta) -> StateMeta:
        return renamed(meta, self._names[meta.name])

    def _schema(self, state: StoredState) -> pa.Schema:
        return named_schema(state_schema(self._reader, state), self._meta(state.meta))

    def _part(self, subtask: int, handle: KeyedStateHandle, index: int) -> tuple[str, StateHandle]:
        """(format, table) of one state's share."""
        name = handle.states[index].name
        to, state, schema = self._names[name], self._states[name], self._schema(self._states[name])
        if name in self._changed:
            return CANONICAL, self._files.write(self._uid, subtask, to, schema, self._changed[name].tables(handle.key_groups))
        part = next(each for each in state.keyed if each.handle is handle)
        if self._is_kept(state, part):
            copy = self._copied(subtask, handle.parts[index], f"{to}.{handle.format}")
            if self._filtering is not None and isinstance(copy, FileHandle):
                self._filtering.kept[copy.path] = part
            return handle.format, copy
        stored = state_schema(self._reader, state)
        rows: Iterable[pa.RecordBatch] = ()
        if len(handle.key_groups):
            rows = state_batches(self._reader, state, stored, handle.key_groups)
        kept = None if self._filtering is None else self._filtering.filters.get(name)
        return CANONICAL, self._files.write(self._uid, subtask, to, schema, rows if kept is None else map(kept, rows))

    def _is_kept(self, state: StoredState, part: StatePart) -> bool:
        """Whether the file of a state's share is copied as it is."""
        if part.is_native or part.deltas or not isinstance(part.base, FileHandle):
            return False
        filtering = self._filtering
        if filtering is None:
            return part.handle.format == CANONICAL
        name = state.meta.name
        if name not in filtering.filters:
            return True
        if name not in self._rewritten:
            tables = tuple(each for each in state.keyed if not each.is_native and not each.deltas)
            self._rewritten[name] = filtering.losing(replace(state, keyed=tables))
        return part not in self._rewritten[name]

    def _list_handles(self, subtask: int, state: OperatorSubtaskState) -> Iterator[OperatorListHandle]:
        written = set()
        for handle in state.operator:
            name = handle.state.name
            if name not in self._names:
                continue
            meta = self._meta(handle.state)
            if name not in self._lists:
                yield msgspec.structs.replace(handle, state=meta, part=self._copied(subtask, handle.part, f"list-{meta.name}"))
            elif name not in written:
                written.add(name)
                yield self._files.write_list(self._uid, subtask, meta, self._lists[name][subtask])

    def _copied(self, subtask: int, part: StateHandle, what: str) -> StateHandle:
        if not isinstance(part, FileHandle):
            return part
        name = self._files.name(self._uid, subtask, what)
        opened = self._reader.opened(part)
        local = opened or self._reader.copy(part, operator=self._operator.uid, subtask=subtask)
        self._target.upload(local, name, expected=(part.length, part.checksum))
        if opened is None:
            self._reader.discard(local)
        return FileHandle(name, part.length, part.checksum)

    def _check_covered(self, subtasks: tuple[OperatorSubtaskState, ...]) -> None:
        """Raises InvalidConfigError for rows of key groups that no subtask of the snapshot has."""
        for name, rows in self._changed.items():
            covered = [
                handle.key_groups for state in subtasks for handle in state.keyed if name in {each.name for each in handle.states}
            ]
            start = 0
            for groups in [*sorted(covered), KeyGroupRange(self._operator.max_parallelism, self._operator.max_parallelism)]:
                lost = next(rows.tables(KeyGroupRange(start, max(start, groups.start))), None)
                if lost is not None:
                    group = lost.column(KEY_GROUP)[0].as_py()
                    raise InvalidConfigError(
                        f"operator {self._operator.uid!r}, state {name!r}: a row is of key group {group}, for which the snapshot "
                        "has no share of this state",
                        operator=self._operator.uid,
                        state=name,
                    )
                start = max(start, groups.stop)
