"""The `memory` backend: state as Python objects, checkpoints inside the acknowledgement; for small jobs and tests.

A checkpoint writes no file at all, so its size is bounded. Savepoints are files as in every backend, since they must be
readable on their own."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.backends.heap import HeapKeyedBackend
from holdfast.statebackends.backends.keyed import KeyedBackendConfig
from holdfast.statebackends.errors import SnapshotTooLargeError
from holdfast.statebackends.handles import KeyedStateHandle, KeyGroupRange
from holdfast.statebackends.snapshot.sources import ChangingSource, write_tables
from holdfast.statebackends.snapshot.tablesnapshot import TablesSnapshot
from holdfast.statebackends.storage.port import Flow


class MemoryKeyedBackend(HeapKeyedBackend):
    """All parts of a checkpoint are inline. A larger checkpoint fails with SnapshotTooLargeError."""

    def __init__(self, config: KeyedBackendConfig, *, snapshot_bytes_max: int) -> None:
        super().__init__(config)
        self._snapshot_bytes_max = snapshot_bytes_max

    def _pending(self, sources: list[ChangingSource]) -> TablesSnapshot:
        return InlineSnapshot(sources, self._key_groups, self._admit)

    def _admit(self, size: int) -> None:
        if size > self._snapshot_bytes_max:
            raise SnapshotTooLargeError(
                f"operator {self._operator!r} subtask {self._subtask}: its snapshot is larger than the {self._snapshot_bytes_max} "
                "bytes that the memory backend sends to the coordinator; raise memory_snapshot_bytes_max, or use the "
                "filesystem or rocksdb backend",
                operator=self._operator,
                subtask=self._subtask,
                size=size,
                limit=self._snapshot_bytes_max,
            )


class InlineSnapshot(TablesSnapshot):
    """Every part of a checkpoint inline; a savepoint as usual."""

    def __init__(self, sources: list[ChangingSource], key_groups: KeyGroupRange, admit: Callable[[int], None]) -> None:
        super().__init__(sources, key_groups)
        self._admit = admit

    def _write_whole(self, target: SnapshotTarget) -> Flow[KeyedStateHandle]:
        if target.canonical:
            return write_tables(self._sources, self._key_groups, target)
        return write_tables(self._sources, self._key_groups, replace(target, inline_threshold=1 << 62), self._admit)
