"""A snapshot with some of its states made anew, as a canonical savepoint of its own; all other state is carried over.

Nothing is changed in place. Tables in Parquet are copied byte for byte, those of other formats are rewritten as Parquet in a
stream; `_metadata` comes last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
from statebackends.keyedtables import KEY_GROUP
from statebackends.metadata import NATIVE_PROPERTY, encode_metadata
from statebackends.snapshot import METADATA_NAME
from statebackends.snapshots.contents import StoredSnapshot, StoredState, states_of
from statebackends.snapshots.layout import StateLayout
from statebackends.snapshots.parts import PartReader
from statebackends.snapshots.rows import state_batches, state_schema
from statebackends.snapshots.sorting import KeyGroupSorter
from statebackends.snapshots.tablefiles import TableFiles
from statebackends.snapshots.targets import ClaimedFolder, claimed_folder
from statebackends.snapshots.values import stored_codec
from statebackends.storage.operations import Storage

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
    edited = {(uid, name): source.state(uid, name) for uid, name in changes}
    for (uid, name), state in edited.items():
        if not state.is_keyed:
            raise InvalidConfigError(
                f"operator {uid!r}, state {name!r}: {state.meta.kind} is not keyed state; its entries are the operator's own",
                operator=uid,
                state=name,
            )
    with claimed_folder(storage, folder, "edit") as target, source.reader() as reader:
        files = TableFiles(target, reader)
        operators = []
        for operator in source.metadata.operators:
            sorted_rows = {}
            for name, state in states_of(operator).items():
                if (operator.uid, name) in changes:
                    sorted_rows[name] = _changed(reader, state, changes[operator.uid, name], now_ms)
            operators.append(_Rewriting(source, reader, target, files, operator, sorted_rows).operator())
            reader.forget()
        names = ", ".join(f"{uid}.{name}" for uid, name in sorted(changes))
        properties = {name: value for name, value in source.metadata.properties.items() if name != NATIVE_PROPERTY}
        metadata = msgspec.structs.replace(
            source.metadata,
            kind="savepoint" if source.metadata.kind == "checkpoint" else source.metadata.kind,
            operators=tuple(operators),
            properties={**properties, "edited": names},
        )
        target.finish(METADATA_NAME, encode_metadata(metadata))
    return StoredSnapshot(metadata, storage, folder)


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
    ) -> None:
        self._source = source
        self._reader = reader
        self._target = target
        self._files = files
        self._operator = operator
        self._states = states_of(operator)
        self._changed = changed

    def operator(self) -> OperatorState:
        subtasks = tuple(
            msgspec.structs.replace(
                state,
                keyed=tuple(self._keyed(subtask, handle) for handle in state.keyed),
                operator=tuple(self._list(subtask, handle) for handle in state.operator),
            )
            for subtask, state in enumerate(self._operator.subtasks)
        )
        self._check_covered(subtasks)
        return msgspec.structs.replace(self._operator, subtasks=subtasks)

    def _keyed(self, subtask: int, handle: KeyedStateHandle) -> KeyedStateHandle:
        parts = tuple(self._part(subtask, handle, index) for index in range(len(handle.states)))
        return KeyedStateHandle(handle.key_groups, CANONICAL, handle.states, parts)

    def _part(self, subtask: int, handle: KeyedStateHandle, index: int) -> StateHandle:
        uid, name = self._operator.uid, handle.states[index].name
        state = self._states[name]
        if name in self._changed:
            schema = layout_of(self._reader, state).schema
            return self._files.write(uid, subtask, name, schema, self._changed[name].tables(handle.key_groups))
        if handle.format == CANONICAL and isinstance(handle.parts[index], FileHandle):
            return self._copied(subtask, handle.parts[index], f"{name}.parquet")
        schema = state_schema(self._reader, state)
        rows = state_batches(self._reader, state, schema, handle.key_groups) if len(handle.key_groups) else ()
        return self._files.write(uid, subtask, name, schema, rows)

    def _list(self, subtask: int, handle: OperatorListHandle) -> OperatorListHandle:
        return msgspec.structs.replace(handle, part=self._copied(subtask, handle.part, f"list-{handle.state.name}"))

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
