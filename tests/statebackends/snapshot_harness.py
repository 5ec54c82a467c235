"""Whole snapshots for the tests of tools: some contents, written by the real backends at any parallelism and format."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from holdfast.statebackends.backend import SnapshotTarget, TimerRow
from holdfast.statebackends.factory import BackendKind, create_keyed_backend
from holdfast.statebackends.handles import OperatorListHandle, OperatorState, OperatorSubtaskState, StateMeta
from holdfast.statebackends.heap.state_table import CopyOnWriteStateTable
from holdfast.statebackends.heap.timers import TimerRows
from holdfast.statebackends.keygroups import assign_key_groups
from holdfast.statebackends.layout import METADATA_NAME
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.settings import RocksDBConfig, StateBackendSettings
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from holdfast.statebackends.snapshot.parts import write_part
from holdfast.statebackends.state import (
    ColumnAggregate,
    ColumnarStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
from holdfast.statebackends.state_processor.contents import StoredSnapshot
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import PutIfAbsent, Storage, run_flow

UID = "totals"
KEY = KeyType.of(str)
COUNT = ValueStateDescriptor("count", int)
LABELS = ValueStateDescriptor("labels", dict[str, set[str]])
SEEN = ListStateDescriptor("seen", str)
TAGS = MapStateDescriptor("tags", str, int)
WINDOWS = ColumnarStateDescriptor("windows", (ColumnAggregate("sum", "v", "sum_v", pa.int64()),))
DESCRIPTORS: tuple[StateDescriptor, ...] = (COUNT, LABELS, SEEN, TAGS, WINDOWS)
KINDS: tuple[BackendKind, ...] = ("memory", "filesystem", "rocksdb")

_SETTINGS = StateBackendSettings(
    memory_snapshot_bytes_max=1 << 30,
    rocksdb=RocksDBConfig(
        front_tier_bytes_max=1 << 20, cache_bytes_max=1 << 20, write_buffer_bytes=1 << 20, block_cache_bytes=1 << 20
    ),
)
_numbers = itertools.count()


@dataclass
class Contents:
    """What one operator has in its states."""

    count: dict[str, int] = field(default_factory=dict)
    labels: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    seen: dict[str, list[str]] = field(default_factory=dict)
    tags: dict[str, dict[str, int]] = field(default_factory=dict)
    windows: dict[tuple[str, int], int] = field(default_factory=dict)
    timers: set[tuple[str, int]] = field(default_factory=set)
    positions: list[Any] = field(default_factory=list)
    rules: list[Any] = field(default_factory=list)


SOME = Contents(
    count={"AA": 1, "UA": 2, "WN": 3},
    labels={"AA": {"x": {"b", "a"}}, "UA": {}},
    seen={"AA": ["one"], "WN": ["two", "three"]},
    tags={"AA": {"t": 1, "u": 2}, "UA": {"t": 3}},
    windows={("AA", 60): 5, ("AA", 120): 6, ("WN", 60): 7},
    timers={("AA", 1_000), ("UA", -5)},
    positions=[["a.parquet", 10], ["b.parquet", 0]],
    rules=["r1", "r2"],
)


def write(
    root: Path,
    folder: str,
    contents: Contents,
    *,
    kind: BackendKind = "memory",
    parallelism: int = 1,
    max_parallelism: int = 8,
    canonical: bool = False,
    inline_threshold: int = 0,
    storage: Storage | None = None,
) -> StoredSnapshot:
    """A completed snapshot in a folder below `root`; a savepoint if `canonical`."""
    storage = storage or LocalStorage(root / "state")
    subtasks = []
    for subtask in range(parallelism):
        target = SnapshotTarget(7, folder, f"{UID}-{subtask}-1-n", canonical, inline_threshold)
        keyed = _keyed(root, contents, kind, parallelism, max_parallelism, subtask, target, storage)
        lists = (
            _list("positions", "operator_list", contents.positions[subtask::parallelism], target, storage),
            _list("rules", "operator_broadcast", contents.rules, target, storage),
        )
        subtasks.append(OperatorSubtaskState(keyed, lists))
    operator = OperatorState(UID, "a" * 32, "Totals", parallelism, max_parallelism, tuple(subtasks))
    metadata = SnapshotMetadata(
        job_id="0" * 32,
        job_name="flights",
        checkpoint_id=7,
        kind="savepoint" if canonical else "checkpoint",
        attempt=1,
        epoch=1,
        trigger_timestamp_ms=0,
        completion_timestamp_ms=5,
        operators=(operator,),
    )
    storage.execute(PutIfAbsent(f"{folder}/{METADATA_NAME}", encode_metadata(metadata)))
    return StoredSnapshot(metadata, storage, folder)


def _keyed(
    root: Path,
    contents: Contents,
    kind: BackendKind,
    parallelism: int,
    max_parallelism: int,
    subtask: int,
    target: SnapshotTarget,
    storage: Storage,
) -> Any:
    groups = assign_key_groups(max_parallelism, parallelism, subtask)
    backend = create_keyed_backend(
        kind,
        descriptors=DESCRIPTORS,
        key_type=KEY,
        key_groups=groups,
        max_parallelism=max_parallelism,
        operator=UID,
        subtask=subtask,
        local_dir=str(root / f"local-{next(_numbers)}"),
        settings=_SETTINGS,
    )
    timers = CopyOnWriteStateTable()
    backend.register_timers("_timers", TimerRows(timers, lambda rows: None))

    def ours(key: str) -> bool:
        backend.set_current_key(KEY.encode(key), KEY.key_group(key, max_parallelism))
        return KEY.key_group(key, max_parallelism) in groups

    for key, count in contents.count.items():
        if ours(key):
            backend.get_state(COUNT).update(count)
    for key, labels in contents.labels.items():
        if ours(key):
            backend.get_state(LABELS).update(labels)
    for key, seen in contents.seen.items():
        if ours(key):
            backend.get_state(SEEN).add_all(seen)
    for key, tags in contents.tags.items():
        if ours(key):
            for tag, value in tags.items():
                backend.get_state(TAGS).put(tag, value)
    for (key, window), value in contents.windows.items():
        if ours(key):
            keys = KEY.column([pa.array([key])], max_parallelism=max_parallelism)
            backend.columnar_state(WINDOWS, ["user"]).update(keys, window, [pa.array([value], pa.int64())])
    for key, time in contents.timers:
        if ours(key):
            row: TimerRow = (time, KEY.encode(key), b"", KEY.key_group(key, max_parallelism))
            timers.active[row] = True
    pending = backend.snapshot(7)
    handles = run_flow(pending.flow(target), storage)
    pending.release()
    backend.dispose()
    return handles


def _list(name: str, kind: str, entries: Sequence[Any], target: SnapshotTarget, storage: Storage) -> OperatorListHandle:
    encoded = msgspec.msgpack.encode([msgspec.msgpack.encode(entry) for entry in entries])
    part = run_flow(write_part(encoded, f"list-{name}", target), storage)
    return OperatorListHandle(StateMeta(name, kind, "bytes"), part, len(entries))


def files_below(folder: Path) -> dict[str, bytes]:
    """Every file, by its path in the folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
