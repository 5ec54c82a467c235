"""Write buffer of the backend `rocksdb`: when layers are frozen, and in which order they reach the database.

Active layers are frozen into an immutable buffer at a barrier, when they exceed their budget, or when the loop is idle. Immutable
buffers are written oldest first: by the loop thread in short batches, or wholly by a snapshot's pool thread. The database is
hard-linked for a snapshot before a newer buffer is written. A lock guards writing; the loop thread waits for it only in `close`.
How rows are encoded is for state_table.py."""

from __future__ import annotations

import shutil
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.statebackends.errors import StateBackendError, StateValueError, StorageUnavailableError
from holdfast.statebackends.heap.state_table import Layer
from holdfast.statebackends.heap.ttl import StateTtl
from holdfast.statebackends.rocksdb.database import RocksStore
from holdfast.statebackends.rocksdb.state_table import GroupsOf, RocksDBStateTable, WriteBatch, weight
from holdfast.statebackends.rocksdb.ttl_cleanup import CLEANUP_BATCH_ROWS, CLEANUP_ROWS_MIN, StoredRowCleanup

_SORTED_IN_POOL, _SORTED_ON_LOOP = 1 << 17, 1 << 13
"""Rows that are put into write order at a time: a few dozen milliseconds of a pool thread, mostly without the interpreter lock, or
two milliseconds of the loop thread."""
_BEHIND_ROW_BYTES_MAX = 4 << 10
"""Average row above which the idle loop writes nothing: a batch of such rows would be megabytes."""


class ImmutableBuffer:
    """Frozen layers that are to be written to the database (RocksDB: immutable memtable)."""

    def __init__(
        self, layers: list[tuple[RocksDBStateTable, Layer]], groups_of: GroupsOf, copy_folder: str | None, *, behind: bool
    ) -> None:
        self.layers = layers
        self.copy_folder = copy_folder
        """Where to hard-link the database once this buffer is written; None: no snapshot waits for it."""
        self.names: list[str] = []
        """File names of the hard-linked copy."""
        self.behind = behind
        """Frozen by the idle loop. A failure to write it is left to the barrier that needs the rows."""
        self.failed = False
        """The idle loop failed to write it, and doesn't try again."""
        self.done = False
        """Written, and hard-linked if `copy_folder` is given: newer buffers may be written."""
        self.purges = False
        """Replaced and deleted rows leave the database before the copy is made."""
        self._groups_of = groups_of
        self._left: Iterator[WriteBatch] | None = None

    def advance(self, store: RocksStore, *, wholly: bool) -> None:
        """Write the next batch, or all that are left; after the last one hard-link the copy. Under the write buffer's lock.

        After an error the next call starts from the first row."""
        try:
            if self._left is None:
                self._left = self._write_batches(_SORTED_IN_POOL if wholly else _SORTED_ON_LOOP)
            for keys, values in self._left:
                store.write_batch(keys, values)
                if not wholly:
                    return
            if self.purges:
                store.purge()
            if self.copy_folder is not None:
                self.names = store.link_copy(self.copy_folder)
        except BaseException:
            self._left = None
            if self.copy_folder is not None:
                shutil.rmtree(self.copy_folder, ignore_errors=True)
            raise
        self.done = True

    def _write_batches(self, sorted_rows: int) -> Iterator[WriteBatch]:
        for table, layer in self.layers:
            try:
                yield from table.write_batches(layer, self._groups_of, sorted_rows)
            except StateValueError as error:
                error.state = table.serializer.name
                raise


@dataclass(frozen=True, slots=True)
class WriteBufferLimits:
    """Bounds of one subtask's write buffer; bytes are estimates."""

    dirty_bytes_max: int
    """Active layers above this size are frozen and written, unless a snapshot is in flight."""
    write_behind_rows_min: int
    """Changed rows from which the idle loop writes them."""
    cache_bytes_max: int
    """Read caches of all tables together, in equal shares."""


class WriteBuffer:
    """Active and immutable layers of one backend. For the loop thread, but for `flush` and `clean_up`."""

    def __init__(self, store: RocksStore, groups_of: GroupsOf, limits: WriteBufferLimits) -> None:
        self.tables: list[RocksDBStateTable] = []
        self.eviction_waits = 0
        """Batches that were due and had to wait for a snapshot."""
        self.evictions = 0
        """Buffers frozen because active layers exceeded their budget."""
        self.rows_frozen = 0
        """Rows of all buffers so far; for map state its keys."""
        self.store = store
        self.state_ttls: list[StateTtl] = []
        """TTLs of the states: values that have expired when a buffer is frozen are not written."""
        self.cleanup: StoredRowCleanup | None = None
        """Deletes values that expired after they were written."""
        self._rows_cleaned = 0
        self._behind_failed = False
        """The idle loop writes nothing until the next barrier."""
        self._counted_at = 0
        """Count of selected keys when rows were last counted; less the rows found, if they were too few."""
        self.purges = False
        """The next buffer of a snapshot purges the database: rows were erased."""
        self._groups_of = groups_of
        self._limits = limits
        self._immutable: deque[ImmutableBuffer] = deque()  # oldest first
        self._lock = threading.Lock()

    def freeze(self, copy_folder: str | None = None, *, behind: bool = False) -> ImmutableBuffer:
        """Freeze the active layers: O(states and namespaces). `copy_folder`, `behind`: as in ImmutableBuffer."""
        self.retire()
        self._behind_failed = False
        for state_ttl in self.state_ttls:
            state_ttl.freeze_horizon()
        layers = [(table, table.freeze_layer()) for table in self.tables if table.active]
        self.rows_frozen += sum(len(layer) for _, layer in layers)
        buffer = ImmutableBuffer(layers, self._groups_of, copy_folder, behind=behind)
        if copy_folder is not None:
            buffer.purges, self.purges = self.purges, False
        self._immutable.append(buffer)
        return buffer

    def abandon(self, buffer: ImmutableBuffer) -> None:
        """End the snapshot of a buffer. Rows that didn't reach the database become active again, if nothing newer is frozen.

        So a value that can't be encoded fails only the snapshots that hold it."""
        if buffer.done:
            return
        buffer.copy_folder = None
        if self._immutable and self._immutable[-1] is buffer and self._lock.acquire(blocking=False):
            try:
                while not buffer.done:
                    self._immutable.pop()
                    for table, layer in buffer.layers:
                        table.unfreeze_layer(layer)
                    self._counted_at = 0  # more rows are active than keys were selected since
                    if not self._immutable or not self._immutable[-1].failed:
                        break
                    buffer = self._immutable[-1]  # the idle loop failed to write it, and every later barrier would
            finally:
                self._lock.release()

    def flush(self, buffer: ImmutableBuffer) -> None:
        """Pool thread: write this buffer and all older ones, with their copies.

        Raises StorageUnavailableError if a write fails, or the database was closed meanwhile."""
        with self._lock:
            for immutable in list(self._immutable):
                if buffer.done:
                    break
                if not immutable.done:
                    immutable.advance(self.store, wholly=True)
            if not buffer.done:
                raise StorageUnavailableError(f"{self.store.folder}: the database was closed", path=self.store.folder)

    def clean_up(self) -> None:
        """Pool thread, after a snapshot: check rows for expiry, as many as were frozen since the last call and a few more.

        In batches, so that no other thread waits long for the lock. Raises StorageUnavailableError if a write fails."""
        if self.cleanup is None:
            return
        frozen = self.rows_frozen
        left, self._rows_cleaned = CLEANUP_ROWS_MIN + frozen - self._rows_cleaned, frozen
        while left > 0:
            with self._lock:
                if self.store.is_refusing:
                    return
                left -= self.cleanup.clean(min(left, CLEANUP_BATCH_ROWS))

    def maintain(self) -> None:
        """Enforce the limits, in a few milliseconds at most; called every few hundred key switches.

        Raises StorageUnavailableError if a write fails, or background work of the database has failed."""
        self.store.check()
        self.retire()
        for table in self.tables:
            table.cache.shrink(self._limits.cache_bytes_max // len(self.tables))
        dirty = sum(weight(table.active) for table in self.tables)
        if dirty > self._limits.dirty_bytes_max and not self._immutable:
            self.evictions += 1
            self.freeze()
        if self._immutable:
            self._write_batch(due=dirty > self._limits.dirty_bytes_max)

    def write_behind(self, selected: int) -> bool:
        """Idle loop: write one batch of changed rows, if there are at least `write_behind_rows_min`. Returns whether work is left.

        `selected`: how often a key was selected so far. A value that can't be encoded becomes active again, and the next barrier
        that holds it fails; in a buffer that was frozen for another reason, the next `maintain` or that buffer's barrier fails.
        Raises StateBackendError; StorageUnavailableError once background work of the database has failed."""
        self.store.check()
        self.retire()
        if self._behind_failed:
            return False
        if not self._immutable:
            if not self._is_worth_writing(selected):
                return False
            self.freeze(behind=True)
        oldest = self._immutable[0]
        try:
            wrote = self._write_batch(due=False)
        except StateBackendError:
            raise
        except Exception:
            self._behind_failed = True
            return False
        if wrote and oldest.done:
            try:
                self.store.flush_ahead()
            except StorageUnavailableError:
                self._behind_failed = True
        return wrote

    def _is_worth_writing(self, selected: int) -> bool:
        # Selected keys bound the rows that changed. Counting them is cheap; counting rows is not, with thousands of namespaces.
        if selected - self._counted_at < self._limits.write_behind_rows_min:
            return False
        rows = sum(len(table.active) for table in self.tables)
        is_little = rows < self._limits.write_behind_rows_min
        self._counted_at = selected - (rows if is_little else 0)
        return not is_little and sum(weight(table.active) for table in self.tables) <= rows * _BEHIND_ROW_BYTES_MAX

    def _write_batch(self, *, due: bool) -> bool:
        """Write a batch of the oldest buffer; False if that is not possible now, or failed. `due`: memory is short."""
        oldest = self._immutable[0]
        if oldest.copy_folder is not None or oldest.failed or not self._lock.acquire(blocking=False):
            self.eviction_waits += due
            return False
        try:
            if not oldest.done:
                oldest.advance(self.store, wholly=False)
        except StateBackendError:
            raise
        except Exception:  # errors of a type's own encoding included
            if not oldest.behind:
                raise
            oldest.failed = True
        finally:
            self._lock.release()
        if oldest.failed:
            self._behind_failed = True
            self.abandon(oldest)
        return not oldest.failed

    def retire(self) -> None:
        """Drop layers that are in the database."""
        while self._immutable and self._immutable[0].done:
            share = self._limits.cache_bytes_max // max(len(self.tables), 1)
            for table, layer in self._immutable.popleft().layers:
                table.drop_oldest(layer, share)

    def size(self) -> int:
        """Bytes in memory, estimated."""
        layers = sum(weight(layer) for table in self.tables for layer in (table.active, *table.immutable))
        return layers + sum(table.cache.size() for table in self.tables)

    def close(self) -> None:
        """Close the database, after waiting a few milliseconds for the batch that is being written."""
        self.store.refuse_writes()
        with self._lock:
            self._immutable.clear()
            self.store.close()
