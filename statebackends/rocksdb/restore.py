"""Restore of native RocksDB files, also into other ranges of key groups.

It clones the handle that shares most key groups with the subtask, deletes the rows of other key groups by range, and ingests the
wanted rows of the other handles as sorted tables. Runs on a pool thread, before the subtask processes records. Downloads are
checked by snapshot/parts.py. Source: Flink, RocksDBIncrementalRestoreOperation."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from holdfast.statebackends.errors import CorruptStateError, StateValueError, StorageUnavailableError
from holdfast.statebackends.handles import (
    FileHandle,
    KeyedStateHandle,
    KeyGroupRange,
    SegmentHandle,
    StateHandle,
    StateMeta,
)
from holdfast.statebackends.layout import TABLE_SUFFIX, is_file_name, shared_name
from holdfast.statebackends.rocksdb.database import WRITE_ROWS, RocksStore
from holdfast.statebackends.rocksdb.row_keys import RowKey, row_key
from holdfast.statebackends.serialization.state_serializer import StateSerializer, migrate_rows, not_widened
from holdfast.statebackends.snapshot.parts import download_part
from holdfast.statebackends.snapshot.rows import KeyedRows
from holdfast.statebackends.storage.failures import unavailable
from holdfast.statebackends.storage.port import Flow, InParallel, Storage, perform

_MANIFESTS = "MANIFEST-*"


class NativeRestore:
    """One restore of one subtask."""

    def __init__(
        self,
        rows: KeyedRows,
        serializers: Mapping[str, StateSerializer],
        key_groups: KeyGroupRange,
        storage: Storage,
        folder: str,
        open_store: Callable[..., RocksStore],
        now_ms: int,
    ) -> None:
        """`folder`: of the snapshot, in `storage`. `open_store(folder, read_only=...)` opens a database. `now_ms`: stamp of rows
        stored before their state had a TTL."""
        self._operator = rows.operator
        self._serializers = serializers
        self._key_groups = key_groups
        self._storage = storage
        self._folder = folder
        self._open_store = open_store
        self._now_ms = now_ms
        self.shared: dict[str, FileHandle] = {}
        """Local name -> shared file, of the cloned tables: the first increment needs not store them again."""

    def run(self, handles: Sequence[KeyedStateHandle], database: str, scratch: str) -> RocksStore:
        """Restore into the new folder `database` and return it open. `scratch`: folder for the other handles, deleted in the end.

        Raises CorruptStateError, IncompatibleStateError, StorageUnavailableError, StateBackendError."""
        base = max(handles, key=lambda handle: len(handle.key_groups.intersection(self._key_groups)))
        self._download(base, database)
        for name, part in zip(base.names, base.parts, strict=True):
            if isinstance(part, FileHandle) and not isinstance(part, SegmentHandle) and shared_name(part.path) is not None:
                self.shared[name] = part
        store = self._opened(base, database)
        try:
            self._adopt(store, base)
            for handle in handles:
                if handle is not base:
                    self._download(handle, scratch)
                    self._take_in(handle, scratch, store)
                    shutil.rmtree(scratch)
        except BaseException:
            store.close()
            raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        store.restored()
        return store

    def _opened(self, handle: KeyedStateHandle, folder: str, *, read_only: bool = False) -> RocksStore:
        """Open a database whose files were just downloaded.

        A file that RocksDB misses is damage of the snapshot only if all downloaded files are still there."""
        try:
            return self._open_store(folder, read_only=read_only)
        except (StorageUnavailableError, CorruptStateError) as error:
            gone = _gone(handle.names, folder)
            if gone:
                message = f"{folder}: {gone[0]} was there, and is gone: {error}"
                raise StorageUnavailableError(message, path=folder) from error
            if error.fields.get("errno") == errno.ENOENT:
                raise self._corrupt("", f"a file of the database is not in it: {error}") from error
            raise

    def _adopt(self, store: RocksStore, base: KeyedStateHandle) -> None:
        """Turn a clone into this subtask's database: delete other key groups and undeclared states, rewrite older types."""
        if base.key_groups.intersection(self._key_groups) != base.key_groups:
            store.keep_only(self._key_groups)
        for meta in base.states:
            serializer = self._serializers.get(meta.name)
            if meta.name not in store.state_ids:
                continue
            if serializer is None:
                store.delete_state(meta.name, self._key_groups)
            elif serializer.meta.value_type != meta.value_type:
                store.write(self._rows_of(store, self._key_groups, store.state_ids[meta.name], meta, serializer))

    def _take_in(self, handle: KeyedStateHandle, scratch: str, store: RocksStore) -> None:
        """Ingest the wanted rows of another old subtask. Its key groups are its own, so no stored row lies among them."""
        old = self._opened(handle, scratch, read_only=True)
        try:
            wanted = [
                (meta, serializer)
                for meta in handle.states
                if (serializer := self._serializers.get(meta.name)) is not None and meta.name in old.state_ids
            ]
            store.ingest(self._sorted_rows(old, store, wanted, handle.key_groups.intersection(self._key_groups)), scratch)
        finally:
            old.close()

    def _sorted_rows(
        self, old: RocksStore, store: RocksStore, wanted: list[tuple[StateMeta, StateSerializer]], groups: KeyGroupRange
    ) -> Iterator[tuple[bytes, bytes]]:
        """Rows for `store`, ascending. Each database has state ids of its own: rows are rewritten where ids or types differ."""
        ids = {meta.name: store.state_id(meta.name) for meta, _ in wanted}
        if ids == old.state_ids and all(meta.value_type == serializer.meta.value_type for meta, serializer in wanted):
            yield from old.group_rows(groups)
            return
        wanted = sorted(wanted, key=lambda pair: ids[pair[0].name])
        for group in range(groups.start, groups.stop):
            for meta, serializer in wanted:
                yield from self._rows_of(old, KeyGroupRange(group, group + 1), ids[meta.name], meta, serializer)

    def _rows_of(
        self, source: RocksStore, groups: KeyGroupRange, state_id: int, meta: StateMeta, serializer: StateSerializer
    ) -> Iterator[tuple[bytes, bytes]]:
        """Rows of one state of `source`, ascending, with the state id `state_id` and the declared type."""
        rows = source.state_rows(source.state_ids[meta.name], groups)
        while batch := list(islice(rows, WRITE_ROWS)):
            values = self._values(meta, serializer, [value for _, value in batch])
            yield from ((_row_key(row, state_id), value) for (row, _), value in zip(batch, values, strict=True))

    def _values(self, meta: StateMeta, serializer: StateSerializer, values: list[bytes]) -> list[bytes]:
        if meta.value_type == serializer.meta.value_type:
            return values
        try:
            return migrate_rows(meta, serializer, values, self._now_ms)
        except StateValueError as error:
            raise not_widened(meta, serializer.meta, error, operator=self._operator) from error

    def _download(self, handle: KeyedStateHandle, local_folder: str) -> None:
        if not handle.names:
            raise self._corrupt("", "it has no files")
        if len(set(handle.names)) < len(handle.names):
            raise self._corrupt("", "two of its files have one name")
        try:
            os.makedirs(local_folder)
            flows = [self._download_file(*each, local_folder) for each in zip(handle.names, handle.parts, strict=True)]
            perform(InParallel(flows, [part.length for part in handle.parts]), self._storage)
        except OSError as error:
            raise unavailable(error, local_folder, path=local_folder) from error
        except ValueError as error:
            raise self._corrupt("", f"{len(handle.parts)} files have {len(handle.names)} names") from error

    def _download_file(self, name: str, part: StateHandle, local_folder: str) -> Flow[None]:
        if not is_file_name(name):
            raise self._corrupt(name[:100], "it is not the name of a file")
        yield from download_part(part, self._folder, os.path.join(local_folder, name), operator=self._operator)

    def _corrupt(self, path: str, reason: str) -> CorruptStateError:
        return CorruptStateError(
            f"operator {self._operator!r}: {path}: {reason}", path=path, operator=self._operator, reason=reason
        )


def _gone(names: Sequence[str], folder: str) -> list[str]:
    """Files that somebody else deleted. RocksDB itself deletes those that it has replaced, never a table, as soon as it has
    recovered the database, for which it writes a manifest of its own: a table may turn out damaged only then."""
    gone = [name for name in names if not os.path.exists(os.path.join(folder, name))]
    has_recovered = any(found.name not in names for found in Path(folder).glob(_MANIFESTS))
    return [name for name in gone if name.endswith(TABLE_SUFFIX)] if has_recovered else gone


def _row_key(row: RowKey, state_id: int) -> bytes:
    return row_key(row.key_group, state_id, row.key, row.namespace, row.map_key)
