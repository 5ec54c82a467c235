"""A snapshot with some of its states made anew, as a canonical savepoint of its own; all other state is carried over.

Nothing is changed in place. Tables in Parquet are copied byte for byte, those of other formats are rewritten as Parquet in a
stream; `_metadata` comes last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

import msgspec
import pyarrow as pa

from statebackends.errors import InvalidConfigError
from statebackends.handles import (
    FileHandle,
    KeyedStateHandle,
    KeyGroupRange,
    OperatorListHandle,
    OperatorState,
    OperatorSubtaskState,
    StateHandle,
)
from statebackends.keyedtables import KEY_GROUP, VALUE
from statebackends.metadata import NATIVE_PROPERTY, encode_metadata
from statebackends.snapshot import METADATA_NAME
from statebackends.snapshots.contents import StoredSnapshot, StoredState, check_contents, states_of
from statebackends.snapshots.entries import EntryLists, refuse_json
from statebackends.snapshots.layout import StateLayout
from statebackends.snapshots.parts import PartReader
from statebackends.snapshots.rows import state_batches, state_schema
from statebackends.snapshots.sorting import KeyGroupSorter
from statebackends.snapshots.tablefiles import TableFiles
from statebackends.snapshots.targets import ClaimedFolder, claimed_folder
from statebackends.snapshots.values import stored_codec
from statebackends.state import Redistribution
from statebackends.storage.operations import Storage
from statebackends.tablepieces import DELTA_FORMAT

Batches: TypeAlias = Iterable[pa.RecordBatch | pa.Table]

Change: TypeAlias = Callable[[Batches, pa.Schema], Batches]
"""The rows that a state has, and its schema, to the rows that it is to have; both as a stream."""

CANONICAL = "parquet"


def edit_snapshot(
    source: StoredSnapshot, changes: Mapping[tuple[str, str], Change], storage: Storage, folder: str, *, now_ms: int
) -> StoredSnapshot:
    """Write the snapshot with the changed states (by operator uid and state name) into a folder that is new or empty.

    `now_ms`: the stamp of values with a TTL that come without one.

    Raises NotFoundError for a state that is not there; InvalidKeyError, StateValueError, InvalidConfigError naming operator, state
    and row for rows that it can't have; CorruptStateError, StorageUnavailableError. Then the folder is as it was."""
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
            operators.append(_Rewriting(source, reader, target, files, operator, sorted_rows, lists).operator())
            reader.forget()
        names = ", ".join(f"{uid}.{name}" for uid, name in sorted(changes))
        properties = {name: value for name, value in source.metadata.properties.items() if name != NATIVE_PROPERTY}
        metadata = msgspec.structs.replace(
            source.metadata,
            kind="savepoint" if source.metadata.kind == "checkpoint" else source.metadata.kind,
            operators=tuple(operators),
            properties={**properties, "edited": names},
        )
        edited_snapshot = StoredSnapshot(metadata, storage, folder)
        check_contents(edited_snapshot)  # what nobody could open is not to be left to its user
        target.finish(METADATA_NAME, encode_metadata(metadata))
    return edited_snapshot


def layout_of(reader: PartReader, state: StoredState) -> StateLayout:
    """The table of a stored state. Raises CorruptStateError."""
    schema = state_schema(reader, state)
    operator = state.operator
    return StateLayout(operator.uid, state.meta, state.key_type(), operator.max_parallelism, schema, stored_codec(state))


def _changed(reader: PartReader, state: StoredState, change: Change, now_ms: int) -> KeyGroupSorter:
    layout = replace(layout_of(reader, state), stamp_ms=now_ms)
    rows = KeyGroupSorter(layout, reader.new_path)
    for batch in change(state_batches(reader, state, layout.schema), layout.schema):
        rows.add(batch)
    return rows


def _changed_entries(reader: PartReader, state: StoredState, change: Change) -> dict[int, list[bytes]]:
    """The entries that each subtask with a share of an operator state is to have. Of a broadcast state, one copy is shown."""
    uid, schema = state.operator.uid, state_schema(reader, state)

    def check_json() -> None:
        for batch in state_batches(reader, state, schema):
            for entry in batch.column(VALUE).to_pylist():
                error = refuse_json(uid, state.meta, entry)
                if error is not None:
                    raise error

    entries = EntryLists(uid, state.meta, sorted({piece.subtask for piece in state.lists}), check_json)
    for batch in change(_one_copy(reader, state, schema), schema):
        entries.add(batch)
    return entries.dealt()


def _one_copy(reader: PartReader, state: StoredState, schema: pa.Schema) -> Batches:
    if state.meta.kind != Redistribution.BROADCAST.kind:
        yield from state_batches(reader, state, schema)
        return
    copies = [
        (piece, [entry for batch in state_batches(reader, replace(state, lists=(piece,)), schema) for entry in batch.column(VALUE)])
        for piece in state.lists
        if piece.handle.count
    ]
    for piece, entries in copies:
        if entries != copies[0][1]:
            raise InvalidConfigError(
                f"operator {state.operator.uid!r}, state {state.meta.name!r}: the copies of subtasks {copies[0][0].subtask} and "
                f"{piece.subtask} differ: say by a frame what it is to have",
                operator=state.operator.uid,
                state=state.meta.name,
            )
    for piece, _ in copies[:1]:
        yield from state_batches(reader, replace(state, lists=(piece,)), schema)


class _Rewriting:
    """One operator."""

    def __init__(
        self,
        source: StoredSnapshot,
        reader: PartReader,
        target: ClaimedFolder,
        files: TableFiles,
        operator: OperatorState,
        changed: Mapping[str, KeyGroupSorter],
        lists: Mapping[str, Mapping[int, list[bytes]]],
    ) -> None:
        self._source = source
        self._reader = reader
        self._target = target
        self._files = files
        self._operator = operator
        self._states = states_of(operator)
        self._changed = changed
        self._lists = lists

    def operator(self) -> OperatorState:
        subtasks = tuple(
            msgspec.structs.replace(
                state,
                keyed=tuple(self._keyed(subtask, handle) for handle in state.keyed if handle.format != DELTA_FORMAT),
                operator=tuple(self._list_handles(subtask, state)),
            )
            for subtask, state in enumerate(self._operator.subtasks)
        )
        self._check_covered(subtasks)
        return msgspec.structs.replace(self._operator, subtasks=subtasks)

    def _keyed(self, subtask: int, handle: KeyedStateHandle) -> KeyedStateHandle:
        """The tables of one handle, each with the delta runs upon it, which stay behind."""
        parts = tuple(self._part(subtask, handle, index) for index in range(len(handle.states)))
        return KeyedStateHandle(handle.key_groups, CANONICAL, handle.states, parts)

    def _part(self, subtask: int, handle: KeyedStateHandle, index: int) -> StateHandle:
        uid, name = self._operator.uid, handle.states[index].name
        state = self._states[name]
        if name in self._changed:
            schema = layout_of(self._reader, state).schema
            return self._files.write(uid, subtask, name, schema, self._changed[name].tables(handle.key_groups))
        has_runs = any(piece.runs for piece in state.keyed if piece.handle is handle)
        if handle.format == CANONICAL and isinstance(handle.parts[index], FileHandle) and not has_runs:
            return self._copied(subtask, handle.parts[index], f"{name}.parquet")
        schema = state_schema(self._reader, state)
        rows = state_batches(self._reader, state, schema, handle.key_groups) if len(handle.key_groups) else ()
        return self._files.write(uid, subtask, name, schema, rows)

    def _list_handles(self, subtask: int, state: OperatorSubtaskState) -> Iterator[OperatorListHandle]:
        written = set()
        for handle in state.operator:
            meta = handle.state
            if meta.name not in self._lists:
                yield msgspec.structs.replace(handle, part=self._copied(subtask, handle.part, f"list-{meta.name}"))
            elif meta.name not in written:
                written.add(meta.name)
                yield self._files.write_list(self._operator.uid, subtask, meta, self._lists[meta.name][subtask])

    def _copied(self, subtask: int, part: StateHandle, what: str) -> StateHandle:
        if not isinstance(part, FileHandle):
            return part
        uid = self._operator.uid
        local = self._reader.copy(part, operator=uid, subtask=subtask)
        name = self._files.name(uid, subtask, what)
        self._target.upload(local, name, expected=(part.length, part.checksum))
        self._reader.discard(local)
        return FileHandle(name, part.length, part.checksum)

    def _check_covered(self, subtasks: tuple[OperatorSubtaskState, ...]) -> None:
        """Raise InvalidConfigError if rows are of key groups that no subtask of the snapshot had."""
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
