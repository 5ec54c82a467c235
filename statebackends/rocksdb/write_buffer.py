"""The front tier of the RocksDB backend: what is sealed, and in which order it reaches the database.

Live state is sealed into a generation at a barrier, or when it outgrows its budget. Sealed generations are written oldest
first by whoever gets to it: the loop thread in short pieces when memory is short, a snapshot's pool thread wholly. One
that belongs to a snapshot is hard-linked before anything newer is written. A lock guards writing; the loop thread never
waits for it, except when it closes."""

from __future__ import annotations

import shutil
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.statebackends.errors import StateBackendError, StateValueError, StorageUnavailableError
from holdfast.statebackends.heap.state_table import Layer
from holdfast.statebackends.heap.ttl import TtlConfigState
from holdfast.statebackends.rocksdb.database import RocksStore
from holdfast.statebackends.rocksdb.state_table import GroupsOf, Piece, RocksDBStateTable, weight
from holdfast.statebackends.rocksdb.ttl_cleanup import STRETCH_ROWS, SWEEP_ROWS_MIN, IncrementalCleanup

_SORTED_IN_POOL, _SORTED_ON_LOOP = 1 << 17, 1 << 13
"""Rows put in order before they are written: a few dozen milliseconds of a pool thread, which mostly don't hold the interpreter
lock, or two of the loop thread."""


_IDLE_ROW_BYTES_MAX = 4 << 10
"""Larger rows are left to the pool thread: a turn of the loop would write megabytes."""


class ImmutableBuffer:
    """Sealed layers on their way to the database."""

    def __init__(
        self, layers: list[tuple[RocksDBStateTable, Layer]], groups_of: GroupsOf, copy_folder: str | None, *, behind: bool
    ) -> None:
        self.layers = layers
        self.copy_folder = copy_folder
        """Where to hard-link the database once this generation is in it; None when no snapshot waits for it."""
        self.names: list[str] = []
        """Files of the hard-linked copy."""
        self.behind = behind
        """Sealed because there was time. What fails is left to the barrier that needs it, and ends nothing."""
        self.failed = False
        """Writing it behind has failed: the loop thread doesn't try again."""
        self.done = False
        """Written, and copied if that was wanted: newer generations may be written."""
        self._groups_of = groups_of
        self._left: Iterator[Piece] | None = None

    def advance(self, store: RocksStore, *, wholly: bool) -> None:
        """Write the next piece, or all that is left; then make the copy. Under the front tier's lock.

        After an error it starts again from its first row."""
        try:
            if self._left is None:
                self._left = self._pieces(_SORTED_IN_POOL if wholly else _SORTED_ON_LOOP)
            for keys, values in self._left:
                store.write_piece(keys, values)
                if not wholly:
                    return
            if self.copy_folder is not None:
                self.names = store.link_copy(self.copy_folder)
        except BaseException:
            self._left = None
            if self.copy_folder is not None:
                shutil.rmtree(self.copy_folder, ignore_errors=True)
            raise
        self.done = True

    def _pieces(self, sorted_rows: int) -> Iterator[Piece]:
        for table, layer in self.layers:
            try:
                yield from table.pieces(layer, self._groups_of, sorted_rows)
            except StateValueError as error:
                error.state = table.codec.name
                raise


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Bounds of one subtask's front tier; bytes are estimated."""

    dirty_bytes_max: int
    """Live state above this is sealed and written, when no snapshot is in the way."""
    idle_rows_min: int
    """Rows that changed, before a loop with nothing else to do writes them."""
    cache_bytes_max: int
    """Read cache of all states and namespaces together, shared out evenly."""


class WriteBuffer:
    """All generations of one backend. The loop thread's, but for `materialise`."""

    def __init__(self, store: RocksStore, groups_of: GroupsOf, limits: TierLimits) -> None:
        self.tables: list[RocksDBStateTable] = []
        self.eviction_waits = 0
        """Times that an eviction was due and had to wait for a snapshot."""
        self.evictions = 0
        """Generations sealed because memory was short."""
        self.rows_sealed = 0
        """Of all generations; keys, for map state."""
        self.store = store
        self.expiries: list[TtlConfigState] = []
        """Of states with a TTL: what has expired when a generation is sealed is not written."""
        self.sweep: IncrementalCleanup | None = None
        """Cleans up what has expired since it was written."""
        self._rows_swept = 0
        self._idle_failed = False
        """Nothing is written behind until the next barrier."""
        self._idle_at = 0
        """How often a key had been selected when the rows were counted, less those there were if they were too few."""
        self._groups_of = groups_of
        self._limits = limits
        self._sealed: deque[ImmutableBuffer] = deque()  # oldest first
        self._lock = threading.Lock()

    def seal(self, copy_folder: str | None = None, *, behind: bool = False) -> ImmutableBuffer:
        """Freeze what is live: O(states and namespaces). `copy_folder`, `behind`: as in ImmutableBuffer."""
        self.retire()
        self._idle_failed = False
        for expiry in self.expiries:
            expiry.mark()
        layers = [(table, table.seal()) for table in self.tables if table.live]
        self.rows_sealed += sum(len(layer) for _, layer in layers)
        generation = ImmutableBuffer(layers, self._groups_of, copy_folder, behind=behind)
        self._sealed.append(generation)
        return generation

    def abandon(self, generation: ImmutableBuffer) -> None:
        """The snapshot of a generation is over. What didn't reach the database becomes live again, if nothing newer is sealed.

        So a value that can't be encoded spoils only the snapshots that hold it."""
        if generation.done:
            return
        generation.copy_folder = None
        if self._sealed and self._sealed[-1] is generation and self._lock.acquire(blocking=False):
            try:
                while not generation.done:
                    self._sealed.pop()
                    for table, layer in generation.layers:
                        table.unseal(layer)
                    self._idle_at = 0  # more rows are live than keys were selected since
                    if not self._sealed or not self._sealed[-1].failed:
                        break
                    generation = self._sealed[-1]  # what failed behind, and would fail every later barrier
            finally:
                self._lock.release()

    def materialise(self, generation: ImmutableBuffer) -> None:
        """Pool thread: write this generation and all before it, with their copies.

        Raises StorageUnavailableError when writing fails, or the database was closed meanwhile."""
        with self._lock:
            for older in list(self._sealed):
                if generation.done:
                    break
                if not older.done:
                    older.advance(self.store, wholly=True)
            if not generation.done:
                raise StorageUnavailableError(f"{self.store.folder}: the database was closed", path=self.store.folder)

    def clean_up(self) -> None:
        """Pool thread, when a snapshot is written: look for expired rows, as many as were sealed since and a few more.

        In stretches, so that nobody waits long for the lock. Raises StorageUnavailableError when writing fails."""
        if self.sweep is None:
            return
        sealed = self.rows_sealed
        left, self._rows_swept = SWEEP_ROWS_MIN + sealed - self._rows_swept, sealed
        while left > 0:
            with self._lock:
                if self.store.is_refusing:
                    return
                left -= self.sweep.stretch(min(left, STRETCH_ROWS))

    def tick(self) -> None:
        """Keep within the limits; called every few hundred key switches, does a few milliseconds of work at most.

        Raises StorageUnavailableError when writing fails, or has failed for good."""
        self.store.check()
        self.retire()
        for table in self.tables:
            table.cache.shrink(self._limits.cache_bytes_max // len(self.tables))
        dirty = sum(weight(table.live) for table in self.tables)
        if dirty > self._limits.dirty_bytes_max and not self._sealed:
            self.evictions += 1
            self.seal()
        if self._sealed:
            self._write_a_piece(due=dirty > self._limits.dirty_bytes_max)

    def idle(self, selected: int) -> bool:
        """The loop has nothing else to do: write a piece of what changed, once that is a few thousand rows. Whether there is more.
        `selected`: how often a key was selected until now.

        Raises StateBackendError, and StorageUnavailableError once the database is not written any more. A value that can't be
        written is live again, and the next barrier tells of it, if it is still there. Of a generation that was sealed for another
        reason, the next tick or its barrier does."""
        self.store.check()
        self.retire()
        if self._idle_failed:
            return False
        if not self._sealed:
            if not self._is_worth_writing(selected):
                return False
            self.seal(behind=True)
        oldest = self._sealed[0]
        try:
            wrote = self._write_a_piece(due=False)
        except StateBackendError:
            raise
        except Exception:
            self._idle_failed = True
            return False
        if wrote and oldest.done:
            try:
                self.store.flush_ahead()
            except StorageUnavailableError:
                self._idle_failed = True
        return wrote

    def _is_worth_writing(self, selected: int) -> bool:
        # No more rows changed than keys were selected: a count that costs nothing, where there are thousands of namespaces.
        if selected - self._idle_at < self._limits.idle_rows_min:
            return False
        rows = sum(len(table.live) for table in self.tables)
        is_little = rows < self._limits.idle_rows_min
        self._idle_at = selected - (rows if is_little else 0)
        return not is_little and sum(weight(table.live) for table in self.tables) <= rows * _IDLE_ROW_BYTES_MAX

    def _write_a_piece(self, *, due: bool) -> bool:
        """Whether it was possible."""
        oldest = self._sealed[0]
        if oldest.copy_folder is not None or oldest.failed or not self._lock.acquire(blocking=False):
            self.eviction_waits += due
            return False
        try:
            if not oldest.done:
                oldest.advance(self.store, wholly=False)
        except StateBackendError:
            raise
        except Exception:  # also what a type's own encoding raises
            if not oldest.behind:
                raise
            oldest.failed = True
        finally:
            self._lock.release()
        if oldest.failed:
            self._idle_failed = True
            self.abandon(oldest)
        return not oldest.failed

    def retire(self) -> None:
        """Drop the layers that have reached the database."""
        while self._sealed and self._sealed[0].done:
            share = self._limits.cache_bytes_max // max(len(self.tables), 1)
            for table, layer in self._sealed.popleft().layers:
                table.drop_oldest(layer, share)

    def size(self) -> int:
        """Bytes in memory, estimated."""
        layers = sum(weight(layer) for table in self.tables for layer in (table.live, *table.older))
        return layers + sum(table.cache.size() for table in self.tables)

    def close(self) -> None:
        """Waits for the piece that is being written, a few milliseconds; nothing is written afterwards."""
        self.store.refuse_writes()
        with self._lock:
            self._sealed.clear()
            self.store.close()
