"""Savepoints whose tables were not written by Holdfast: a folder with one table, and `_metadata` that names it."""

from __future__ import annotations

from pathlib import Path

from holdfast.statebackends.handles import (
    FileHandle,
    KeyedStateHandle,
    KeyGroupRange,
    OperatorState,
    OperatorSubtaskState,
    StateMeta,
)
from holdfast.statebackends.keygroups import operator_id
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from holdfast.statebackends.storage.checksums import checksum_of

UID = "op"
KEY = KeyType.of(str)
GROUPS = KeyGroupRange(0, 8)


def savepoint_of(operator: OperatorState) -> SnapshotMetadata:
    return SnapshotMetadata(
        job_id="0" * 32,
        job_name="job",
        checkpoint_id=1,
        kind="savepoint",
        attempt=1,
        epoch=1,
        trigger_timestamp_ms=0,
        completion_timestamp_ms=0,
        operators=(operator,),
    )


def describe_table(table: Path, table_format: str, meta: StateMeta) -> KeyedStateHandle:
    """Make the folder that a file is in a savepoint with that file as a state of `UID`, at max parallelism 8."""
    data = table.read_bytes()
    handle = KeyedStateHandle(GROUPS, table_format, (meta,), (FileHandle(table.name, len(data), checksum_of(data)),))
    operator = OperatorState(UID, operator_id(UID), UID, 1, GROUPS.stop, (OperatorSubtaskState((handle,)),))
    (table.parent / "_metadata").write_bytes(encode_metadata(savepoint_of(operator)))
    return handle
