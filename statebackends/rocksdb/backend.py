"""Backend `rocksdb`: state larger than memory, in a RocksDB database behind a write buffer in memory.

Checkpoints store native files (incremental: new table files only), savepoints canonical tables. Columnar state and timers live in
memory, and are handles of tables beside the native one. Restores are in restore.py, write order in write_buffer.py. Source: Flink,
EmbeddedRocksDBStateBackend."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import pyarrow as pa

from holdfast.statebackends.backend import KeyCourse, SnapshotTarget
from holdfast.statebackends.backends.keyed import KeyedBackendBase, KeyedBackendConfig
from holdfast.statebackends.errors import InvariantError, StateValueError
from holdfast.statebackends.handles import NATIVE_FORMAT, FileHandle, KeyedStateHandle, KeyGroupRange, PlaceholderHandle
from holdfast.statebackends.heap.state_table import TOMBSTONE, CopyOnWriteStateTable
from holdfast.statebackends.heap.ttl import StateTtl, TableTtl
from holdfast.statebackends.layout import TABLE_SUFFIX
from holdfast.statebackends.rocksdb.database import RocksStore
from holdfast.statebackends.rocksdb.options import Compaction, shared_memory
from holdfast.statebackends.rocksdb.restore import NativeRestore
from holdfast.statebackends.rocksdb.row_keys import Row, row_key
from holdfast.statebackends.rocksdb.state_table import RocksDBMapTable, RocksDBStateTable
from holdfast.statebackends.rocksdb.ttl_cleanup import StoredRowCleanup
from holdfast.statebackends.rocksdb.write_buffer import ImmutableBuffer, WriteBuffer, WriteBufferLimits
from holdfast.statebackends.serialization.key_texts import KeyOf
from holdfast.statebackends.serialization.state_serializer import StateSerializer
from holdfast.statebackends.settings import StateBackendSettings
from holdfast.statebackends.snapshot.increments import ChainsByCheckpoint, StoredFiles, TablesSnapshot
from holdfast.statebackends.snapshot.parts import PartsWriter, WrittenPart
from holdfast.statebackends.snapshot.rows import ROWS_PER_BATCH, EncodedBatch, KeyedRows, unexpired_batches
from holdfast.statebackends.snapshot.sorting import RowStream
from holdfast.statebackends.snapshot.sources import ChangingSource, TableSource, write_tables
from holdfast.statebackends.state import KeyColumn
from holdfast.statebackends.storage.port import Flow, Storage

_CHECK_EVERY = 512
"""Key switches between two checks of the write buffer's limits."""


class RocksKeyedBackend(KeyedBackendBase):
    """Keyed backend over one RocksDB database.

    The config's `local_dir` is a folder of this attempt alone, for the database and the hard-linked copies of snapshots."""

    native_format = NATIVE_FORMAT

    def __init__(self, config: KeyedBackendConfig, *, settings: StateBackendSettings) -> None:
        super().__init__(config)
        self._settings = settings
        self._opened: WriteBuffer | None = None
        self._disposed = False
        self._snapshots = 0
        self._stored = StoredFiles()
        self._chains = ChainsByCheckpoint() if settings.incremental else None
        self._until_check = _CHECK_EVERY
        self._checks = 1

    # ------------------------------------------------------------------------------------------------------ while running

    def set_current_key(self, encoded_key: bytes, key_group: int) -> None:
        context = self._context
        context.key = encoded_key
        context.key_group = key_group
        self._until_check -= 1
        if self._until_check < 0:
            self._until_check = _CHECK_EVERY
            self._checks += 1
            self._keep_within_limits()

    def each_key(self, keys: KeyColumn) -> KeyCourse:
        return KeyCourse(self._context, ("key", "key_group"), (self._checked(keys.encoded()), keys.key_groups.tolist()))

    def _checked(self, encoded: list[bytes]) -> Iterator[bytes]:
        """The keys; between two of them the write buffer's limits are checked, as often as by `set_current_key`."""
        start = 0
        while start < len(encoded):
            stop = start + self._until_check
            self._until_check -= len(encoded[start:stop])
            yield from encoded[start:stop]
            start = stop
            if start < len(encoded):
                self._until_check = _CHECK_EVERY
                self._checks += 1
                self._keep_within_limits()

    def _keep_within_limits(self) -> None:
        if self._opened is not None:
            try:
                self._opened.maintain()
            except StateValueError as error:
                raise self._rows.named(error, error.fields["state"]) from error

    @property
    def writes_behind(self) -> bool:
        return True

    def write_behind(self) -> bool:
        is_behind = self._opened is not None and self._opened.write_behind(self._checks * _CHECK_EVERY - self._until_check)
        return super().write_behind() or is_behind

    def keys(self, state_name: str, namespace: bytes = b"") -> Iterator[bytes]:
        state_table = self._state_table(self._serializer(state_name), namespace)
        # All keys at once: between two that the caller takes, layers may reach the database and be dropped.
        shown = dict.fromkeys(key for layer in (state_table.active, *state_table.immutable) for key in layer)
        rows = self._write_buffer.store.state_rows(self._write_buffer.store.state_id(state_name), self._key_groups)
        stored = dict.fromkeys(row.key for row, _ in rows if row.namespace == namespace and row.key not in shown)
        groups = self._rows.groups_of(list(shown)).tolist() if shown else []
        present = [key for key, group in zip(shown, groups, strict=True) if self._has(state_table, key, group)]
        yield from chain(present, stored)

    def erase(self, key: KeyOf, states: frozenset[str] | None = None) -> bool:
        is_own = super().erase(key, states)
        self._write_buffer.purges = True  # tables restored before a rescale have rows of other key groups, too
        return is_own

    def _namespaces_of(self, serializer: StateSerializer, encoded_key: bytes, key_group: int) -> list[bytes]:
        store = self._write_buffer.store
        stored = store.namespaces_of(key_group, store.state_id(serializer.name), encoded_key)
        return list(dict.fromkeys([*super()._namespaces_of(serializer, encoded_key, key_group), *stored]))

    def _has(self, state_table: CopyOnWriteStateTable, key: bytes, key_group: int) -> bool:
        if not isinstance(state_table, RocksDBMapTable):
            newest = next(layer[key] for layer in (state_table.active, *state_table.immutable) if key in layer)
            return newest is not TOMBSTONE
        return bool(state_table.entries_of(key, key_group)[0])

    @property
    def write_buffer(self) -> WriteBuffer:
        """The write buffer, for metrics and tests."""
        return self._write_buffer

    def state_size(self) -> int:
        stored = 0 if self._opened is None else self._opened.store.size() + self._opened.size()
        return stored + self._memory_size()

    def dispose(self) -> None:
        """Idempotent. Snapshots in flight fail."""
        self._disposed = True
        if self._opened is not None:
            self._opened.close()
            self._opened = None
        for table in self._row_tables.values():
            table.dispose()
        shutil.rmtree(self._local_dir, ignore_errors=True)
        self._state_tables.clear()
        self._states.clear()

    # ---------------------------------------------------------------------------------------------------------- snapshots

    def snapshot(self, checkpoint_id: int) -> RocksSnapshot:
        write_buffer = self._write_buffer
        write_buffer.retire()
        self._forget_namespaces()
        self._snapshots += 1
        copy = os.path.join(self._local_dir, f"copy-{checkpoint_id}-{self._snapshots}")
        buffer = write_buffer.freeze(copy)
        stored = self._stored if self._settings.incremental else None
        states = [(serializer, self._barrier_horizon_ms(serializer.name)) for serializer in self._serializers.values()]
        sources = self._memory_sources()
        self._checkpoint_started(sources, checkpoint_id)
        return RocksSnapshot(self._rows, states, self._key_groups, write_buffer, buffer, sources, stored, self._chains)

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        super().notify_checkpoint_aborted(checkpoint_id)
        self._stored.forget(checkpoint_id)

    def _is_idle(self, state_table: CopyOnWriteStateTable) -> bool:
        return not state_table.active and not state_table.immutable

    def _forget_namespaces(self) -> dict[tuple[str, bytes], CopyOnWriteStateTable]:
        forgotten = super()._forget_namespaces()
        if forgotten:
            gone = {id(state_table) for state_table in forgotten.values()}
            self._write_buffer.tables = [table for table in self._write_buffer.tables if id(table) not in gone]
        return forgotten

    # ------------------------------------------------------------------------------------------------------------ storing

    @property
    def _write_buffer(self) -> WriteBuffer:
        if self._opened is None:
            self._opened = self._new_write_buffer(self._open_store(self._database_folder, is_new=True))
        return self._opened

    @property
    def _database_folder(self) -> str:
        return os.path.join(self._local_dir, "db")

    def _open_store(self, folder: str, *, read_only: bool = False, is_new: bool = False) -> RocksStore:
        if self._disposed:
            raise InvariantError(f"operator {self._operator!r}: the state backend was disposed of")
        return RocksStore(
            folder,
            write_buffer_bytes=self._settings.rocksdb.write_buffer_bytes,
            memory=shared_memory(self._settings.rocksdb.block_cache_bytes, self._settings.rocksdb.write_buffers_bytes_max),
            compaction=Compaction(
                self._settings.rocksdb.sorted_runs_max,
                self._settings.rocksdb.space_amplification_percent,
                self._settings.rocksdb.background_compaction,
            ),
            read_only=read_only,
            is_new=is_new,
            operator=self._operator,
        )

    def _new_write_buffer(self, store: RocksStore) -> WriteBuffer:
        settings = self._settings.rocksdb
        limits = WriteBufferLimits(
            settings.front_tier_bytes_max, settings.write_behind_rows, settings.cache_bytes_max
        )
        write_buffer = WriteBuffer(store, self._rows.groups_of, limits)
        write_buffer.state_ttls = list(self._state_ttls.values())
        cleaned = [state_ttl for state_ttl in self._state_ttls.values() if state_ttl.config.cleanup_entries]
        if cleaned and len(self._key_groups):
            write_buffer.cleanup = StoredRowCleanup(store, cleaned, self._key_groups)
        return write_buffer

    def _new_state_table(self, serializer: StateSerializer, namespace: bytes) -> CopyOnWriteStateTable:
        kind = RocksDBMapTable if serializer.kind == "map" else RocksDBStateTable
        state_table = kind(self._context, self._write_buffer.store, serializer, namespace, self._state_ttls.get(serializer.name))
        self._write_buffer.tables.append(state_table)
        return state_table

    def _new_table_ttl(self, state_ttl: StateTtl, state_table: CopyOnWriteStateTable) -> TableTtl:
        return TableTtl(state_ttl)  # keys of state larger than memory can't be noted: see ttl_cleanup.py

    def _load_rows(self, serializer: StateSerializer, table: pa.Table) -> None:
        store = self._write_buffer.store
        store.write(_rows_of_batches(serializer, store.state_id(serializer.name), self._rows.key_batches(serializer, table)))

    def _restore_native(
        self, handles: Sequence[KeyedStateHandle], storage: Storage, folder: str, checkpoint_id: int | None
    ) -> None:
        if not handles:
            return
        if self._opened is not None:
            raise InvariantError(f"operator {self._operator!r}: native files are restored before anything else")
        restore = NativeRestore(
            self._rows, self._serializers, self._key_groups, storage, folder, self._open_store, self._clock.now_ms
        )
        self._opened = self._new_write_buffer(restore.run(handles, self._database_folder, os.path.join(self._local_dir, "restore")))
        if checkpoint_id is not None:
            self._stored.remember(checkpoint_id, restore.shared)


class RocksSnapshot:
    """Implements `backend.PendingSnapshot`: an immutable buffer, and sources in memory."""

    def __init__(
        self,
        rows: KeyedRows,
        states: list[tuple[StateSerializer, int | None]],
        key_groups: KeyGroupRange,
        write_buffer: WriteBuffer,
        buffer: ImmutableBuffer,
        memory_sources: list[ChangingSource],
        stored: StoredFiles | None,
        chains: ChainsByCheckpoint | None,
    ) -> None:
        """`stored`: shared files of earlier checkpoints; None: all files are written, into the snapshot's own folder."""
        self._rows = rows
        self._states = states
        self._key_groups = key_groups
        self._write_buffer = write_buffer
        self._buffer = buffer
        self._copy = str(buffer.copy_folder)
        self._memory_sources = memory_sources
        self._stored = stored
        self._chains = chains
        self._released = False
        self.stalled_s = 0.0

    def flow(self, target: SnapshotTarget) -> Flow[tuple[KeyedStateHandle, ...]]:
        try:
            self._flush()
            if target.canonical:
                handles = yield from self._tables(target)
            else:
                handles = yield from self._files(target)
        finally:
            shutil.rmtree(self._copy, ignore_errors=True)
        self._write_buffer.clean_up()
        return handles

    def release(self) -> None:
        """Idempotent."""
        if self._released:
            return
        self._released = True
        self._write_buffer.abandon(self._buffer)
        shutil.rmtree(self._copy, ignore_errors=True)
        for source in self._memory_sources:
            source.release()
        self._write_buffer.retire()

    def _flush(self) -> None:
        stalled_s = self._write_buffer.store.stalled_s
        try:
            self._write_buffer.flush(self._buffer)
        except StateValueError as error:
            raise self._rows.named(error, error.fields["state"]) from error
        self.stalled_s = self._write_buffer.store.stalled_s - stalled_s

    def _files(self, target: SnapshotTarget) -> Flow[tuple[KeyedStateHandle, ...]]:
        stored = self._stored if target.shared_prefix else None
        known = {} if stored is None else stored.of_base(target.base)
        if not self._buffer.names:
            raise InvariantError(f"{self._copy}: a snapshot without any file of its database")
        writer = PartsWriter(target)
        parts: dict[str, PlaceholderHandle | WrittenPart] = {}
        for name in self._buffer.names:
            local_path = os.path.join(self._copy, name)
            if name in known:
                parts[name] = _placeholder(known[name], local_path)
            else:
                is_shared = stored is not None and name.endswith(TABLE_SUFFIX)
                parts[name] = writer.add_file(local_path, name, is_shared=is_shared)
        yield from writer.store()
        if stored is not None:
            stored.remember(target.checkpoint_id, _shared(parts, known))
        metas = tuple(serializer.meta for serializer, _ in self._states)
        handles = tuple(part.handle if isinstance(part, WrittenPart) else part for part in parts.values())
        native = KeyedStateHandle(self._key_groups, NATIVE_FORMAT, metas, handles, tuple(parts))
        tables = yield from TablesSnapshot(self._memory_sources, self._key_groups, self._chains).flow(target)
        return native, *tables

    def _tables(self, target: SnapshotTarget) -> Flow[tuple[KeyedStateHandle, ...]]:
        copy = RocksStore(
            self._copy,
            write_buffer_bytes=1 << 20,
            block_cache_bytes=8 << 20,
            read_only=True,
            is_whole=True,
            operator=self._rows.operator,
        )
        try:
            stored: list[TableSource] = [
                _StoredRows(self._rows, serializer, copy, self._key_groups, horizon_ms) for serializer, horizon_ms in self._states
            ]
            handle: KeyedStateHandle = yield from write_tables([*stored, *self._memory_sources], self._key_groups, target)
        finally:
            copy.close()
        return (handle,)


def _placeholder(handle: FileHandle, local_path: str) -> PlaceholderHandle:
    """The placeholder of a stored table. Raises InvariantError if the local file of its name, used once a database, differs."""
    length = os.path.getsize(local_path)
    if length != handle.length:
        raise InvariantError(f"{local_path} has {length} bytes and is stored as {handle.path} with {handle.length}")
    return PlaceholderHandle(handle.path, handle.length)


def _shared(parts: Mapping[str, PlaceholderHandle | WrittenPart], known: Mapping[str, FileHandle]) -> dict[str, FileHandle]:
    """Local name -> shared file of a checkpoint's tables: those of its base, and those stored for it."""
    shared = {name: known[name] for name in parts if name in known}
    for name, part in parts.items():
        if name.endswith(TABLE_SUFFIX) and isinstance(part, WrittenPart) and isinstance(part.handle, FileHandle):
            shared[name] = part.handle
    return shared


class _StoredRows:
    """Implements `TableSource`: one state's rows in a hard-linked copy."""

    def __init__(
        self, rows: KeyedRows, serializer: StateSerializer, copy: RocksStore, key_groups: KeyGroupRange, horizon_ms: int | None
    ) -> None:
        """`horizon_ms`: values stamped at or before it have expired, and are left out; None: state without a TTL."""
        self._horizon_ms = horizon_ms
        self.meta = serializer.meta
        self._rows = rows
        self._serializer = serializer
        self._copy = copy
        self._key_groups = key_groups

    def stream(self) -> RowStream:
        batches = self._batches()
        if self._horizon_ms is not None:
            batches = unexpired_batches(self._serializer.kind, batches, self._horizon_ms)
        return self._rows.stream(self._serializer, batches)

    def release(self) -> None:
        """No work: the snapshot's flow deletes the copy."""

    def _batches(self) -> Iterator[EncodedBatch]:
        state_id = self._copy.state_ids.get(self._serializer.name)
        if state_id is None:
            return
        namespace, keys, values = b"", list[bytes](), list[Any]()
        for row, value in self._copy.state_rows(state_id, self._key_groups):
            if row.namespace != namespace or len(keys) == ROWS_PER_BATCH:
                yield namespace, keys, values
                namespace, keys, values = row.namespace, [], []
            keys.append(row.key)
            decoded = self._serializer.decode(value)
            values.append({self._serializer.decode_entry(row.map_key): decoded} if self._serializer.kind == "map" else decoded)
        yield namespace, keys, values


def _rows_of_batches(serializer: StateSerializer, state_id: int, batches: Iterator[Any]) -> Iterator[Row]:
    """Rows to write for restored batches; a list that comes in several batches is put together first."""
    lists: dict[tuple[int, bytes, bytes], list[Any]] = {}
    for namespace, keys, groups, values in batches:
        for key, group, value in zip(keys, groups.tolist(), values, strict=True):
            if serializer.kind == "list":
                lists.setdefault((group, key, namespace), []).extend(value)
            elif serializer.kind == "map":
                prefix = row_key(group, state_id, key, namespace)
                yield from [(prefix + serializer.encode_entry(entry), serializer.encode(member)) for entry, member in value.items()]
            else:
                yield row_key(group, state_id, key, namespace), serializer.encode(value)
    for (group, key, namespace), elements in lists.items():
        yield row_key(group, state_id, key, namespace), serializer.encode(elements)
