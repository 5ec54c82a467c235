"""Bootstrap of a savepoint: states made of rows from elsewhere, so that a job starts with history.

Several processes may write a state: each gets the rows of some subtasks' key groups, and writes their files. File names belong to
one writer and one try, so that a repeated task, or one that lives on after its driver gave it up, overwrites nothing; `_metadata`
names only files that were reported to the driver. It does not know Spark. How rows are checked is for conform.py."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from holdfast.statebackends.columnar.state import part_fields_of
from holdfast.statebackends.errors import (
    ERROR_CLASSES,
    HoldfastError,
    InvalidConfigError,
    InvariantError,
    StorageUnavailableError,
)
from holdfast.statebackends.handles import FileHandle, KeyedStateHandle, OperatorState, OperatorSubtaskState, StateMeta
from holdfast.statebackends.keygroups import assign_key_groups, check_parallelism, operator_id
from holdfast.statebackends.layout import METADATA_NAME, TIME, file_name
from holdfast.statebackends.row_tables.type_text import stored_fields
from holdfast.statebackends.serialization.keys import KeyType, key_columns
from holdfast.statebackends.serialization.state_serializer import serializer_of_meta, state_meta
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from holdfast.statebackends.snapshot.rows import KeyedRows
from holdfast.statebackends.snapshot.sources import timer_meta
from holdfast.statebackends.snapshot.tables import keyed_table_schema
from holdfast.statebackends.state import (
    ColumnarStateDescriptor,
    OperatorListStateDescriptor,
    RowTableStateDescriptor,
    StateDescriptor,
)
from holdfast.statebackends.state_processor.conform import EntryLists, StateLayout
from holdfast.statebackends.state_processor.contents import StoredSnapshot, place_of
from holdfast.statebackends.state_processor.edit import CANONICAL, Batches
from holdfast.statebackends.state_processor.reading import PartReader
from holdfast.statebackends.state_processor.writing import ClaimedFolder, KeyGroupSorter, TableFiles, claimed_folder, write_table
from holdfast.statebackends.storage.port import Storage, UploadFile

SUBTASK_COLUMN = "__holdfast_subtask"


class WrittenRange(msgspec.Struct, frozen=True):
    """A file that a task wrote, or the error that it met."""

    subtask: int
    name: str = ""
    length: int = 0
    checksum: str = ""
    error: str = ""
    """Name of the error's class; empty for a file."""
    message: str = ""
    fields: str = "{}"
    """Fields of the error, JSON."""

    @staticmethod
    def failed(error: HoldfastError, subtask: int) -> WrittenRange:
        fields = msgspec.json.encode(error.fields, enc_hook=repr).decode()
        return WrittenRange(subtask, error=type(error).__name__, message=error.message, fields=fields)

    def check(self) -> None:
        """Raises the error that the task met, if any."""
        if self.error:
            raise ERROR_CLASSES.get(self.error, HoldfastError).of(self.message, msgspec.json.decode(self.fields))


@dataclass(frozen=True, slots=True)
class RangeTask:
    """Parameters of the tasks that write one state."""

    uid: str
    meta: StateMeta
    key_type: str
    max_parallelism: int
    parallelism: int
    schema: pa.Schema
    stamp_ms: int
    location: str
    """Location of the savepoint's folder: a path that all processes see, or a URL."""
    writer: str
    """Part of the name of every file."""

    @staticmethod
    def of(layout: StateLayout, parallelism: int, location: str, writer: str) -> RangeTask:
        key_type, schema = layout.key_type.text, layout.schema
        return RangeTask(
            layout.operator, layout.meta, key_type, layout.max_parallelism, parallelism, schema, layout.stamp_ms, location, writer
        )

    def layout(self) -> StateLayout:
        key_type = KeyType.parse(self.key_type)
        serializer = serializer_of_meta(self.meta)
        return StateLayout(self.uid, self.meta, key_type, self.max_parallelism, self.schema, serializer, self.stamp_ms)

    def numbered(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The batches with the subtask of each row. Rows of a batch with an invalid key go to subtask 0, which refuses them."""
        key_type = KeyType.parse(self.key_type)
        for batch in batches:
            keys = [batch.column(name) for name in key_columns(key_type)]
            try:
                groups = key_type.column(keys, max_parallelism=self.max_parallelism, operator=self.uid).key_groups
                subtasks = groups.astype(np.int64) * self.parallelism // self.max_parallelism
            except HoldfastError:
                subtasks = np.zeros(batch.num_rows, np.int64)
            yield batch.append_column(SUBTASK_COLUMN, pa.array(subtasks.astype(np.int32)))

    def write(self, batches: Iterable[pa.RecordBatch], attempt: str) -> Iterator[WrittenRange]:
        """Write a file for each subtask of `numbered` rows, which must be all rows of these subtasks. `attempt`: id of this try.

        Errors of rows are returned, since a repeated task would meet them too; StorageUnavailableError is raised. Memory is
        bounded by KeyGroupSorter."""
        subtask = 0
        try:
            place = place_of(self.location)
            with PartReader(place.storage, lambda path, *, operator: path) as scratch:
                rows = KeyGroupSorter(self.layout(), scratch.new_path)
                subtasks: set[int] = set()
                for batch in batches:
                    found = np.unique(batch.column(SUBTASK_COLUMN).to_numpy())
                    subtasks.update(map(int, found))
                    subtask = int(found[0]) if len(found) else subtask
                    rows.add(batch.drop_columns([SUBTASK_COLUMN]))
                for subtask in sorted(subtasks):
                    local = scratch.new_path("table")
                    groups = assign_key_groups(self.max_parallelism, self.parallelism, subtask)
                    write_table(local, self.schema, rows.tables(groups))
                    what = f"{self.writer}-{attempt}-{file_name(self.meta.name)}.parquet"
                    name = f"{file_name(self.uid)}-{subtask}-{what}"
                    length, checksum = place.storage.execute(UploadFile(local, f"{place.folder}/{name}"))
                    scratch.discard(local)
                    yield WrittenRange(subtask, name, length, checksum)
        except StorageUnavailableError:
            raise
        except HoldfastError as error:
            error.message += f" (rows are counted in the task of subtask {subtask})"
            yield WrittenRange.failed(error, subtask)


def as_row(written: WrittenRange) -> dict[str, Any]:
    return msgspec.structs.asdict(written)


JOB_ID = "0" * 32
"""Job id of bootstrapped savepoints; no job's name hashes to it."""
CHECKPOINT_ID = 1
"""Checkpoint id of bootstrapped savepoints; a job that starts from one continues with the next id."""


@dataclass(frozen=True, slots=True)
class NewState:
    """One keyed state of one operator, with its rows."""

    layout: StateLayout
    batches: Batches

    @property
    def uid(self) -> str:
        return self.layout.operator

    @property
    def meta(self) -> StateMeta:
        return self.layout.meta


@dataclass(frozen=True, slots=True)
class SpreadState:
    """One keyed state of one operator whose files other processes write."""

    layout: StateLayout
    write: Callable[[RangeTask], Iterable[WrittenRange]]
    """Has all rows written, those of a subtask by one task, and returns the results. A subtask without rows needs no file."""

    @property
    def uid(self) -> str:
        return self.layout.operator

    @property
    def meta(self) -> StateMeta:
        return self.layout.meta


@dataclass(frozen=True, slots=True)
class NewEntries:
    """One operator state of one operator, with its entries."""

    uid: str
    meta: StateMeta
    batches: Batches


AnyState: TypeAlias = NewState | SpreadState | NewEntries


@dataclass(frozen=True, slots=True)
class Shape:
    """Facts about the job that the savepoint is made for."""

    job_name: str
    max_parallelism: int
    parallelism: int
    created_ms: int

    def check(self) -> None:
        """Raises InvalidConfigError."""
        check_parallelism(self.max_parallelism, self.parallelism)
        if not self.job_name.strip():
            raise InvalidConfigError("the savepoint's job needs a name", setting="job_name")


def layout_of_descriptor(uid: str, descriptor: StateDescriptor, key_type: KeyType, shape: Shape) -> StateLayout:
    """Table of a declared keyed state. Raises InvalidConfigError for operator state, or a type that can't be stored."""
    if isinstance(descriptor, OperatorListStateDescriptor):
        reason = f"{descriptor.kind} is not keyed state: give its entries by with_operator_state"
        raise InvalidConfigError(f"operator {uid!r}, state {descriptor.name!r}: {reason}", operator=uid, state=descriptor.name)
    meta = state_meta(descriptor, key_type)
    if isinstance(descriptor, ColumnarStateDescriptor):
        schema = keyed_table_schema(key_type, meta, part_fields_of(descriptor), namespace=pa.int64())
        return StateLayout(uid, meta, key_type, shape.max_parallelism, schema, None)
    if isinstance(descriptor, RowTableStateDescriptor):
        schema = keyed_table_schema(key_type, meta, stored_fields(list(descriptor.schema)), namespace=pa.int64())
        return StateLayout(uid, meta, key_type, shape.max_parallelism, schema, None)
    serializer = serializer_of_meta(meta)
    assert serializer is not None
    schema = KeyedRows(key_type, shape.max_parallelism, uid).schema(serializer)
    return StateLayout(uid, meta, key_type, shape.max_parallelism, schema, serializer, shape.created_ms)


def layout_of_timers(uid: str, name: str, key_type: KeyType, shape: Shape) -> StateLayout:
    """Table of an operator's timers that are stored under `name`."""
    meta = timer_meta(name, key_type)
    schema = keyed_table_schema(key_type, meta, [pa.field(TIME, pa.int64(), nullable=False)])
    return StateLayout(uid, meta, key_type, shape.max_parallelism, schema, None)


def write_savepoint(states: Sequence[AnyState], shape: Shape, storage: Storage, folder: str) -> StoredSnapshot:
    """Write the states into a folder that is new or empty, `_metadata` last.

    Raises InvalidConfigError for a repeated state, or an operator with several key types; InvalidKeyError and StateValueError
    naming operator, state and row. The folder is then as it was."""
    shape.check()
    by_operator = grouped(states)
    with claimed_folder(storage, folder, "bootstrap") as target:
        operators = tuple(new_operator(uid, own, shape, target, storage) for uid, own in sorted(by_operator.items()))
        metadata = SnapshotMetadata(
            job_id=JOB_ID,
            job_name=shape.job_name,
            checkpoint_id=CHECKPOINT_ID,
            kind="savepoint",
            attempt=0,
            epoch=0,
            trigger_timestamp_ms=shape.created_ms,
            completion_timestamp_ms=shape.created_ms,
            operators=operators,
            properties={"bootstrap": "true"},
        )
        target.finish(METADATA_NAME, encode_metadata(metadata))
    return StoredSnapshot(metadata, storage, folder)


def grouped(states: Sequence[AnyState], kept: Mapping[str, Sequence[StateMeta]] | None = None) -> dict[str, list[AnyState]]:
    """Uid -> states of the operator. `kept`: states that operators already have, which count in the checks.

    Raises InvalidConfigError as `write_savepoint` does."""
    found: dict[str, list[AnyState]] = {}
    for state in states:
        found.setdefault(state.uid, []).append(state)
    for uid, own in found.items():
        _check_states(uid, own, (kept or {}).get(uid, ()))
    return found


def _check_states(uid: str, states: Sequence[AnyState], kept: Sequence[StateMeta]) -> None:
    operator_id(uid)  # raises for an invalid uid
    there = {meta.name for meta in kept}
    taken = next((state.meta.name for state in states if state.meta.name in there), None)
    if taken is not None:
        reason = f"operator {uid!r}: state {taken!r} is in the snapshot already: take it out first, or rename it"
        raise InvalidConfigError(reason, operator=uid, state=taken)
    names = [state.meta.name for state in states]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidConfigError(f"operator {uid!r}: state {twice!r} is given twice", operator=uid, state=twice)
    keys = sorted({text for meta in (*kept, *(state.meta for state in states)) if (text := meta.key_type) is not None})
    if len(keys) > 1:
        raise InvalidConfigError(f"operator {uid!r}: its states have keys of {' and '.join(keys)}", operator=uid)


def new_operator(
    uid: str, states: Sequence[AnyState], shape: Shape, target: ClaimedFolder, storage: Storage, files: TableFiles | None = None
) -> OperatorState:
    """Write an operator with these states alone. `storage`: that of the target; `files`: shared writer of the target's files."""
    with PartReader(storage, lambda path, *, operator: path) as scratch:
        files = files or TableFiles(target, scratch)
        keyed = sorted((state for state in states if not isinstance(state, NewEntries)), key=lambda state: state.meta.name)
        tables = [
            _spread(state, shape, target, files) if isinstance(state, SpreadState) else _sorted(state, shape, scratch, files)
            for state in keyed
        ]
        metas = tuple(state.meta for state in keyed)
        lists = [(state.meta, _dealt(state, shape)) for state in states if isinstance(state, NewEntries)]
        subtasks = []
        for subtask in range(shape.parallelism):
            groups = assign_key_groups(shape.max_parallelism, shape.parallelism, subtask)
            parts = tuple(write(subtask) for write in tables)
            handles = (KeyedStateHandle(groups, CANONICAL, metas, parts),) if keyed else ()
            entries = tuple(files.write_list(uid, subtask, meta, dealt[subtask]) for meta, dealt in lists)
            subtasks.append(OperatorSubtaskState(handles, entries))
    return OperatorState(uid, operator_id(uid), uid, shape.parallelism, shape.max_parallelism, tuple(subtasks))


def _dealt(state: NewEntries, shape: Shape) -> dict[int, list[bytes]]:
    entries = EntryLists(state.uid, state.meta, range(shape.parallelism))
    for batch in state.batches:
        entries.add(batch)
    return entries.dealt()


def _sorted(state: NewState, shape: Shape, scratch: PartReader, files: TableFiles) -> Callable[[int], FileHandle]:
    """Sort all rows; returns a function that writes those of a subtask."""
    rows = KeyGroupSorter(state.layout, scratch.new_path)
    for batch in state.batches:
        rows.add(batch)

    def write(subtask: int) -> FileHandle:
        groups = assign_key_groups(shape.max_parallelism, shape.parallelism, subtask)
        return files.write(state.uid, subtask, state.meta.name, state.layout.schema, rows.tables(groups))

    return write


def _spread(state: SpreadState, shape: Shape, target: ClaimedFolder, files: TableFiles) -> Callable[[int], FileHandle]:
    """Have all files written; returns a function that gives the file of a subtask, or writes one without rows."""
    writer = uuid.uuid4().hex
    target.expect(writer)
    found: dict[int, FileHandle] = {}
    written = list(state.write(RangeTask.of(state.layout, shape.parallelism, target.location, writer)))
    for each in written:
        each.check()
    for each in written:
        if each.subtask in found or not 0 <= each.subtask < shape.parallelism or writer not in each.name:
            raise InvariantError(f"operator {state.uid!r}, state {state.meta.name!r}: subtask {each.subtask} was written twice")
        found[each.subtask] = target.admit(each.name, each.length, each.checksum)

    def write(subtask: int) -> FileHandle:
        handle = found.get(subtask)
        return handle or files.write(state.uid, subtask, state.meta.name, state.layout.schema, ())

    return write
