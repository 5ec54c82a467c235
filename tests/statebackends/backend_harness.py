"""What the tests of keyed backends share: a job's declared states, backends of one subtask, snapshots and restores."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from holdfast.statebackends.backend import PendingSnapshot, SnapshotTarget
from holdfast.statebackends.backends.keyed import KeyedBackendBase
from holdfast.statebackends.factory import BackendKind, create_keyed_backend
from holdfast.statebackends.handles import KeyedStateHandle, OperatorState, OperatorSubtaskState
from holdfast.statebackends.keygroups import assign_key_groups
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.settings import RocksDBConfig, StateBackendSettings
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata
from holdfast.statebackends.state import (
    AggregatingStateDescriptor,
    ColumnAggregate,
    ColumnarStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
from holdfast.statebackends.state_processor.contents import StoredSnapshot
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import run_flow

MAX_PARALLELISM = 16
KEY = KeyType.of(str)


class Visit(msgspec.Struct):
    """A mutable value."""

    count: int
    pages: list[str] = []


class MeanAggregate:
    """(sum, count) -> mean."""

    def create_accumulator(self) -> tuple[int, int]:
        return 0, 0

    def add(self, value: int, accumulator: tuple[int, int]) -> tuple[int, int]:
        return accumulator[0] + value, accumulator[1] + 1

    def get_result(self, accumulator: tuple[int, int]) -> float:
        return accumulator[0] / accumulator[1]

    def merge(self, left: tuple[int, int], right: tuple[int, int]) -> tuple[int, int]:
        return left[0] + right[0], left[1] + right[1]


COUNT = ValueStateDescriptor("count", int)
VISIT = ValueStateDescriptor("visit", Visit)
SEEN = ListStateDescriptor("seen", str)
TAGS = MapStateDescriptor("tags", str, int)
TOTAL = ReducingStateDescriptor("total", int, lambda old, added: old + added)
MEAN = AggregatingStateDescriptor("mean", tuple[int, int], MeanAggregate())
WINDOWS = ColumnarStateDescriptor(
    "windows", (ColumnAggregate("count", None, "rows"), ColumnAggregate("sum", "v", "sum_v", pa.int64()))
)
ALL: tuple[StateDescriptor, ...] = (COUNT, VISIT, SEEN, TAGS, TOTAL, MEAN, WINDOWS)


class Cluster:
    """Makes backends of one operator with their own local folders, and takes their snapshots into one storage."""

    def __init__(self, root: Path, kind: BackendKind, settings: StateBackendSettings | None = None) -> None:
        self.kind = kind
        self.root = root
        self.storage = LocalStorage(root / "state")
        self.settings = settings or StateBackendSettings(
            memory_snapshot_bytes_max=1 << 30,
            rocksdb=RocksDBConfig(
                front_tier_bytes_max=1 << 20, cache_bytes_max=1 << 20, write_buffer_bytes=1 << 20, block_cache_bytes=1 << 20
            ),
        )
        self._numbers = itertools.count(1)
        self._backends: list[KeyedBackendBase] = []
        self.now_ms = 1_700_000_000_000
        """Processing time of new backends."""

    def backend(
        self,
        descriptors: Sequence[StateDescriptor] = ALL,
        *,
        kind: BackendKind | None = None,
        parallelism: int = 1,
        subtask: int = 0,
        key_type: KeyType = KEY,
        allow_unclaimed_state: bool = False,
    ) -> KeyedBackendBase:
        number = next(self._numbers)
        backend = create_keyed_backend(
            kind or self.kind,
            descriptors=descriptors,
            key_type=key_type,
            key_groups=assign_key_groups(MAX_PARALLELISM, parallelism, subtask),
            max_parallelism=MAX_PARALLELISM,
            operator="op",
            subtask=subtask,
            local_dir=str(self.root / f"local-{number}"),
            settings=self.settings,
            allow_unclaimed_state=allow_unclaimed_state,
            now_ms=self.now_ms,
        )
        self._backends.append(backend)
        return backend

    def target(self, *, canonical: bool = False, inline_threshold: int = 100) -> SnapshotTarget:
        number = next(self._numbers)
        return SnapshotTarget(number, f"job/chk-{number}", f"op-{number}-1-nonce", canonical, inline_threshold)

    def finish(
        self, pending: PendingSnapshot, *, canonical: bool = False, inline_threshold: int = 100
    ) -> tuple[tuple[KeyedStateHandle, ...], str]:
        """Run the asynchronous part; (handles, folder)."""
        target = self.target(canonical=canonical, inline_threshold=inline_threshold)
        handles = run_flow(pending.flow(target), self.storage)
        pending.release()
        return handles, target.folder

    def take(self, backend: KeyedBackendBase, *, canonical: bool = False) -> tuple[tuple[KeyedStateHandle, ...], str]:
        return self.finish(backend.snapshot(next(self._numbers)), canonical=canonical)

    def restored(
        self, snapshot: tuple[Sequence[KeyedStateHandle], str], descriptors: Sequence[StateDescriptor] = ALL, **options: Any
    ) -> KeyedBackendBase:
        backend = self.backend(descriptors, **options)
        backend.restore(snapshot[0], self.storage, snapshot[1])
        return backend

    def rescaled(
        self, backends: Sequence[KeyedBackendBase], parallelism: int, *, canonical: bool = False
    ) -> list[KeyedBackendBase]:
        """Snapshot all, restore at another parallelism; the old ones are disposed of."""
        target = self.target(canonical=canonical)
        handles: list[KeyedStateHandle] = []
        for number, backend in enumerate(backends):
            pending = backend.snapshot(target.checkpoint_id)
            own = SnapshotTarget(target.checkpoint_id, target.folder, f"op-{number}-1-nonce", canonical, 100)
            handles += run_flow(pending.flow(own), self.storage)
            pending.release()
        for backend in backends:
            backend.dispose()
        return [self.restored((handles, target.folder), parallelism=parallelism, subtask=subtask) for subtask in range(parallelism)]

    def close(self) -> None:
        for backend in self._backends:
            backend.dispose()


def smuggle(state: Any, value: Any) -> None:
    """Put a value of another type into a state that would refuse it: as one that was changed in place, deep inside."""
    check, state._check = state._check, None
    state.update(value)
    state._check = check


def use(backend: KeyedBackendBase, key: Any) -> None:
    """Make a key current."""
    key_type = backend.key_type
    backend.set_current_key(key_type.encode(key), key_type.key_group(key, backend.max_parallelism))


def owner(backends: Sequence[KeyedBackendBase], key: Any) -> KeyedBackendBase:
    """The backend whose key group a key is of, with the key made current."""
    group = KEY.key_group(key, MAX_PARALLELISM)
    backend = next(backend for backend in backends if group in backend.key_groups)
    use(backend, key)
    return backend


def columnar_update(backend: KeyedBackendBase, namespace: int, rows: Iterable[tuple[str, int]]) -> None:
    ours = [(key, value) for key, value in rows if KEY.key_group(key, MAX_PARALLELISM) in backend.key_groups]
    keys = KEY.column([pa.array([key for key, _ in ours], pa.string())], max_parallelism=MAX_PARALLELISM)
    state = backend.columnar_state(WINDOWS, ["user"])
    state.update(keys, namespace, [None, pa.array([value for _, value in ours], pa.int64())])


def contents(backend: KeyedBackendBase, namespaces: Sequence[bytes] = (b"",)) -> dict[Any, Any]:
    """Everything in the states of ALL, in a form that compares."""
    found: dict[Any, Any] = {}
    for descriptor in ALL:
        if descriptor is WINDOWS:
            state = backend.columnar_state(WINDOWS, ["user"])
            for window in state.namespaces():
                for row in state.read(window).to_pylist():
                    found["windows", window, row["user"]] = (row["rows"], row["sum_v"])
            continue
        for namespace in namespaces:
            for encoded in list(backend.keys(descriptor.name, namespace)):
                key = backend.key_type.decode(encoded)
                use(backend, key)
                found[descriptor.name, namespace, key] = _value(backend.get_state(descriptor, namespace), descriptor.kind)
    return found


def _value(state: Any, kind: str) -> Any:
    match kind:
        case "value":
            value = state.value()
            return msgspec.to_builtins(value) if isinstance(value, Visit) else value
        case "map":
            return dict(state.items())
    return state.get()


def fill(backends: Sequence[KeyedBackendBase], keys: Sequence[str], namespaces: Sequence[bytes] = (b"",)) -> None:
    """Something in every state for every key."""
    for number, key in enumerate(keys):
        backend = owner(backends, key)
        for namespace in namespaces:
            backend.get_state(COUNT, namespace).update(number)
            backend.get_state(VISIT, namespace).update(Visit(number, [key, "x"]))
            backend.get_state(SEEN, namespace).add_all([key, f"{key}{number}", ""])
            for tag in range(number % 4):
                backend.get_state(TAGS, namespace).put(f"t{tag}", number)
            backend.get_state(TOTAL, namespace).add(number)
            backend.get_state(TOTAL, namespace).add(1)
            backend.get_state(MEAN, namespace).add(number)
    for backend in backends:
        columnar_update(backend, 10, [(key, number) for number, key in enumerate(keys)])
        columnar_update(backend, -20, [(key, 1) for key in keys[::2]])


def union(backends: Sequence[KeyedBackendBase], namespaces: Sequence[bytes] = (b"",)) -> dict[Any, Any]:
    """Contents of all subtasks; fails if two have the same key."""
    found: dict[Any, Any] = {}
    for backend in backends:
        part = contents(backend, namespaces)
        assert not found.keys() & part.keys()
        found |= part
    return found


def stored(cluster: Cluster, snapshot: Any) -> StoredSnapshot:
    """What `Cluster.take` returned, as the tools see it."""
    handles, folder = snapshot
    operator = OperatorState("op", "0" * 32, "op", 1, 16, (OperatorSubtaskState(keyed=handles),))
    metadata = SnapshotMetadata(
        job_id="j",
        job_name="j",
        checkpoint_id=1,
        kind="checkpoint",
        attempt=1,
        epoch=1,
        trigger_timestamp_ms=0,
        completion_timestamp_ms=0,
        operators=(operator,),
    )
    return StoredSnapshot(metadata, cluster.storage, folder)


def assign(target: Any, name: str, value: Any) -> None:
    """`target.name = value`, of a KeyCourse's names, which may have dots."""
    *path, last = name.split(".")
    for each in path:
        target = getattr(target, each)
    setattr(target, last, value)
