"""One RocksDB database of keyed rows: short writes, scans, and hard-linked copies.

It knows nothing of layers, types or snapshots. Calls that hold the interpreter lock (WriteBatch, create_checkpoint,
ingest_external_file) are cut into steps of a few milliseconds. All exceptions of rocksdict become errors of errors.py here: plain
Exception, by which it reports what the disk refuses (see storage/failures.py), and panics.

A panic (panics.py) fails the operation alone (StateBackendError).

After a failure of RocksDB's background work the database takes no writes, even if RocksDB recovers: every later write raises that
failure, until the attempt is over and the folder is deleted."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Annotated, Any

import msgspec
from rocksdict import (
    AccessType,
    BottommostLevelCompaction,
    Cache,
    Checkpoint,
    CompactOptions,
    DbClosedError,
    IngestExternalFileOptions,
    Rdict,
    ReadOptions,
    SstFileWriter,
    WriteBatch,
    WriteOptions,
)

from holdfast.statebackends.decoding import UNDECODABLE, decode_json
from holdfast.statebackends.errors import (
    CorruptStateError,
    HoldfastError,
    InvalidConfigError,
    StateBackendError,
    StorageUnavailableError,
)
from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.layout import TABLE_SUFFIX
from holdfast.statebackends.panics import is_panic
from holdfast.statebackends.rocksdb.options import LOADING, Compaction, RocksMemory, changeable, database_options
from holdfast.statebackends.rocksdb.row_keys import (
    GROUP_AND_STATE,
    NAMESPACE_BYTES_MAX,
    Row,
    RowKey,
    parse_row_key,
    row_key,
    row_key_start,
)
from holdfast.statebackends.storage.failures import rocksdb_failure

log = logging.getLogger("holdfast.rocksdb")

_STATE_ID_MAX = 0xFFFF
_StateIds = dict[str, Annotated[int, msgspec.Meta(ge=0, le=_STATE_ID_MAX)]]
_STATES_KEY = b"\xff\xffstates"
"""Row above every key group, which holds the JSON object state name -> state id."""

WRITE_ROWS = 1_000
"""Rows per write; a write holds the interpreter lock for a millisecond or two."""

STALL_S = 0.001
"""Seconds between two tries of a write that RocksDB has no room for yet."""
_STALLED = "Result incomplete"

_FLUSHED_AHEAD, _FLUSHED_AHEAD_MIN = 8, 2 << 20
"""A memtable is flushed ahead from this fraction (an eighth) of its size and from so many bytes, which take some 30 ms to write.
Below, flushes would make many small tables to merge; and a memtable takes a megabyte as soon as it has a row."""

INGEST_TABLE_BYTES = 32 << 20
"""Bytes of one ingested table, before compression. Linking one in holds the interpreter lock, mostly for two syncs of the disk."""

_UNUSED_FILES = frozenset({"LOCK", "LOG", "IDENTITY"})


class RocksStore:
    """An open database in a folder of its own. Thread-safe as RocksDB is; the caller decides which thread writes when.

    All methods may raise StateBackendError."""

    def __init__(
        self,
        folder: str,
        *,
        write_buffer_bytes: int,
        block_cache_bytes: int = 8 << 20,
        memory: RocksMemory | None = None,
        compaction: Compaction | None = None,
        read_only: bool = False,
        is_new: bool = False,
        is_whole: bool = False,
        operator: str = "",
    ) -> None:
        """Open the folder, or create it.

        `memory`: shared memory to use instead of a block cache of its own. `is_new`: rows are loaded before the first copy is
        made. `is_whole`: damage found later is damage of this disk, as after `restored`; always so for a new database. `operator`:
        uid of the rows' owner, for errors. Raises StorageUnavailableError; CorruptStateError for files of another kind."""
        self.folder = folder
        self.state_ids: dict[str, int] = {}
        self._operator = operator
        self._compaction = compaction or Compaction()
        self._is_loading = is_new and self._compaction.in_background
        cache = Cache(block_cache_bytes) if memory is None else memory.block_cache
        self._is_whole = is_new or is_whole
        options = database_options(write_buffer_bytes, cache, LOADING if self._is_loading else self._compaction)
        if memory is not None:
            options.set_write_buffer_manager(memory.write_buffers)
        self._db = self._open(options, AccessType.read_only() if read_only else AccessType.read_write())
        self._memory = memory
        self._table_options = database_options(write_buffer_bytes, cache, self._compaction)
        self._write_buffer_bytes = write_buffer_bytes
        self._without_wal = WriteOptions()
        self._without_wal.disable_wal = True
        self._without_wal.no_slowdown = True
        self._closed = self._refusing = self._is_purged = False
        self._is_read_only = read_only
        self.stalled_s = 0.0
        """Time that writes and flushes have waited for room in the database, s; it only grows."""
        self._refusal: StorageUnavailableError | None = None
        """Failure of the database's background work, raised by every later write; None: none failed."""

    def _open(self, options: Any, access: Any) -> Any:
        """Open the database and read its state ids."""
        folder = self.folder
        try:
            os.makedirs(folder, exist_ok=True)
            database = Rdict(folder, options, access_type=access)
            self.state_ids = _decode_state_ids(database.get(_STATES_KEY) or b"{}")
        except (ValueError, *UNDECODABLE) as error:
            raise CorruptStateError(f"{folder} holds no ids of states: {error}", path=folder, reason="rocksdb") from error
        except Exception as error:  # rocksdict raises plain Exception
            raise self._whose(rocksdb_failure(error, folder, opening=True)) from error
        except BaseException as error:
            self._check_panic(error)
            raise
        return database

    def restored(self) -> None:
        """The database was restored from files that matched their checksums: damage found later is damage of this disk, and a
        StateBackendError, which a restart mends."""
        self._is_whole = True

    def check(self) -> None:
        """Raises the StorageUnavailableError by which background work of the database failed, if it did."""
        if self._refusal is not None:
            raise type(self._refusal).of(self._refusal.message, self._refusal.fields)

    def state_id(self, name: str) -> int:
        """Id of a state, 0..65535; assigned at the first call, and fixed for the life of the database and its copies."""
        if name not in self.state_ids:
            state_id = max(self.state_ids.values(), default=-1) + 1
            if state_id > _STATE_ID_MAX:
                raise InvalidConfigError("a database holds at most 65,536 states", state=name)
            self.state_ids[name] = state_id
            self.write([(_STATES_KEY, json.dumps(self.state_ids).encode())])
        return self.state_ids[name]

    def get(self, key: bytes) -> bytes | None:
        try:
            value: bytes | None = self._db.get(key)
        except DbClosedError:
            raise
        except Exception as error:
            raise self._failure(error) from error
        except BaseException as error:
            self._check_panic(error, key)
            raise
        return value

    def write(self, rows: Iterable[Row]) -> None:
        """Write rows in order, WRITE_ROWS at a time, without the write-ahead log. Raises StorageUnavailableError."""
        rest = iter(rows)
        while batch := list(islice(rest, WRITE_ROWS)):
            self._commit(lambda batch=batch: _batch(batch), batch[0][0])  # type: ignore[misc]

    def write_batch(self, keys: Sequence[bytes], values: Sequence[bytes | None]) -> None:
        """`write` of at most WRITE_ROWS rows, without a Python step for each row unless one is deleted."""
        if None in values:
            self.write(zip(keys, values, strict=True))
            return

        def make() -> Any:
            batch = WriteBatch(raw_mode=True)
            deque(map(batch.put, keys, values), maxlen=0)
            return batch

        self._commit(make, keys[0] if keys else b"")

    def ingest(self, rows: Iterator[tuple[bytes, bytes]], scratch: str) -> None:
        """Add rows, strictly ascending, as finished tables: without a memtable or a compaction.

        The database must hold no row within their range. `scratch`: a folder in the database's file system; tables written there
        are moved into the database. Raises StorageUnavailableError."""
        write_batches = iter(lambda: list(islice(rows, WRITE_ROWS)), [])
        for number, first in enumerate(write_batches):
            path = os.path.join(scratch, f"ingest-{number}{TABLE_SUFFIX}")
            with self._storing(path, first[0][0]):
                writer = SstFileWriter(self._table_options)
                writer.open(path)
                size = _put(writer, first)
            while size < INGEST_TABLE_BYTES and (batch := next(write_batches, None)):
                with self._storing(path, batch[0][0]):
                    size += _put(writer, batch)
            options = IngestExternalFileOptions()
            options.set_move_files(True)
            with self._storing(path, first[0][0]):
                writer.finish()
                self._db.ingest_external_file([path], options)

    def refuse_writes(self) -> None:
        """Any thread, before `close`: writes raise StorageUnavailableError from now on, and long ones end soon."""
        self._refusing = True

    def _commit(self, make: Callable[[], Any], first: bytes) -> None:
        """Write the batch that `make` builds, once for each try; `first`: one of its row keys."""
        self._patiently(lambda: self._db.write(make(), self._without_wal), self.folder, first)

    def _patiently(self, write: Callable[[], Any], path: str, key: bytes = b"") -> None:
        """Call `write` until RocksDB has room for it.

        A wait within RocksDB would hold the interpreter lock. After a flush that met a full disk it would last until there is room,
        and no error would say why the worker stands still."""
        with self._storing(path, key):
            while True:
                if self._refusing:
                    raise StorageUnavailableError(f"{self.folder}: the database is being closed", path=self.folder)
                try:
                    write()
                    return
                except Exception as error:
                    if not str(error).startswith(_STALLED):
                        raise
                if self._has_stopped():
                    self._db.flush()  # whose error says what the disk refused
                    message = f"{self.folder}: its background work has failed"
                    self._refusal = StorageUnavailableError(message, path=self.folder)
                    self.check()
                began = time.monotonic()
                time.sleep(STALL_S)
                self.stalled_s += time.monotonic() - began

    def rows(self, prefix: bytes, after: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """(row key, value) of the rows that start with `prefix`, ascending; from behind the row key `after` if given.

        The iterator, as all others here, gives the rows as they are when it starts."""
        return self._rows_from(self._iterator(prefix), prefix, None if after is None else after + b"\0")

    def group_rows(self, groups: KeyGroupRange) -> Iterator[tuple[bytes, bytes]]:
        """(row key, value) of all rows of some key groups, ascending."""
        bound = ReadOptions()  # must live as long as the iterator, which reads the bound from it
        bound.set_iterate_upper_bound(groups.stop.to_bytes(2, "big"))
        yield from self._rows_from(self._iterator(b"", bound), b"", groups.start.to_bytes(2, "big"))

    def state_rows(self, state_id: int, groups: KeyGroupRange) -> Iterator[tuple[RowKey, bytes]]:
        """Rows of one state in some key groups, ascending."""
        iterator = self._iterator(GROUP_AND_STATE.pack(groups.start, state_id))
        for key_group in range(groups.start, groups.stop):
            for key, value in self._rows_from(iterator, GROUP_AND_STATE.pack(key_group, state_id)):
                yield parse_row_key(key), value

    def state_chunks(self, state_id: int, groups: KeyGroupRange, rows: int) -> Iterator[list[tuple[bytes, bytes]]]:
        """(row key, value) of one state in some key groups, ascending, at most `rows` at a time: for a pass over all rows, in which
        every call per row counts.

        rocksdict's own loop says nothing of a damaged table that it ends at. So behind its last row of each key group an iterator
        goes on, and finds either the end or the damage."""
        found: list[tuple[bytes, bytes]] = []
        ends = self._iterator(GROUP_AND_STATE.pack(groups.start, state_id))
        for key_group in range(groups.start, groups.stop):
            prefix = last = GROUP_AND_STATE.pack(key_group, state_id)
            bound = ReadOptions()  # must live as long as the loop, which reads the bound from it
            bound.set_iterate_upper_bound((int.from_bytes(prefix, "big") + 1).to_bytes(len(prefix), "big"))
            loop = self._items(prefix, bound)
            while some := self._taken(loop, rows - len(found), last):
                found += some
                last = some[-1][0]
                if len(found) == rows:
                    yield found
                    found = []
            for row in self._rows_from(ends, prefix, None if last is prefix else last + b"\0"):
                found.append(row)
                if len(found) == rows:
                    yield found
                    found = []
        if found:
            yield found

    def rows_after(self, key_group: int, state_id: int, after: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        """(row key, value) of one state in one key group, ascending, from behind the row key `after` if given."""
        prefix = GROUP_AND_STATE.pack(key_group, state_id)
        return self._rows_from(self._iterator(prefix), prefix, None if after is None else after + b"\0")

    def namespaces_of(self, key_group: int, state_id: int, key: bytes) -> list[bytes]:
        """Namespaces in which a state has rows of a key. A namespace's length stands in front of the key: one search for each
        length that the state has in this key group."""
        found: dict[bytes, None] = {}
        prefix = GROUP_AND_STATE.pack(key_group, state_id)
        iterator = self._iterator(prefix)
        start: bytes | None = row_key(key_group, state_id, key, b"")
        while start is not None:
            before, start = start, None
            for stored, _ in self._rows_from(iterator, prefix, before):
                parts = parse_row_key(stored)
                if len(parts.key) > len(key):
                    break
                if parts.key == key:
                    found[parts.namespace] = None
                    continue
                # the first row of the key with namespaces of this length, or with longer ones
                length = len(parts.namespace) + (parts.key > key)
                start = row_key_start(key_group, state_id, key, length) if length <= NAMESPACE_BYTES_MAX else None
                break
        return list(found)

    def purge(self) -> None:
        """Any thread, while no other writes: replaced and deleted rows leave every file that later copies have. O(rows)."""
        with self._storing(self.folder):
            self._flush()
            options = CompactOptions()
            options.set_bottommost_level_compaction(BottommostLevelCompaction.force())
            self._db.compact_range(None, None, options)
        self._is_purged = True

    @property
    def is_refusing(self) -> bool:
        """Whether `refuse_writes` was called."""
        return self._refusing

    def keep_only(self, groups: KeyGroupRange) -> None:
        """Delete the rows of all other key groups."""
        last = _STATES_KEY[:2]
        ranges = ((b"\0\0", groups.start.to_bytes(2, "big")), (groups.stop.to_bytes(2, "big"), last))
        for start, stop in ranges:
            if start < stop:
                self._patiently(partial(self._db.delete_range, start, stop, self._without_wal), self.folder)

    def delete_state(self, name: str, groups: KeyGroupRange) -> None:
        """Delete all rows of a state, which lie in `groups`."""
        state_id = self.state_ids[name]
        self.write((key, None) for group in range(groups.start, groups.stop)
                   for key, _ in self.rows(GROUP_AND_STATE.pack(group, state_id)))  # fmt: skip

    def link_copy(self, folder: str) -> list[str]:
        """Flush, then hard-link the database into a new folder; returns its file names, sorted. Raises StorageUnavailableError."""
        with self._storing(folder):
            self._flush()
            self._end_loading()
            if not self._compaction.in_background and self._is_crowded():
                self._db.compact_range(None, None)
            Checkpoint(self._db).create_checkpoint(folder)
            if self._is_purged:
                self._renew_manifest(folder)
            return sorted(name for name in os.listdir(folder) if name not in _UNUSED_FILES)

    def _renew_manifest(self, folder: str) -> None:
        """A database's manifest has the first and the last key of every table that it ever had. An opened copy gets a new one."""
        options = database_options(self._write_buffer_bytes, Cache(1 << 20), Compaction(in_background=False))
        Rdict(folder, options).close()

    def _flush(self) -> None:
        """Flush; a flush itself waits while RocksDB slows writes down or has stopped them, until its background work has caught
        up."""
        is_stalled, began = self._is_stalled(), time.monotonic()
        self._db.flush()
        if is_stalled:
            self.stalled_s += time.monotonic() - began

    def _is_stalled(self) -> bool:
        return self._number("is-write-stopped") > 0 or self._number("actual-delayed-write-rate") > 0

    def flush_ahead(self) -> None:
        """Start to flush a memtable that is an eighth full, so that the next copy finds little in it.

        Only if no other flush is under way, and with compaction in the background. Raises StorageUnavailableError."""
        enough = max(self._write_buffer_bytes // _FLUSHED_AHEAD, _FLUSHED_AHEAD_MIN)
        is_free = self._compaction.in_background and not self._number("num-immutable-mem-table") and not self._is_crowded()
        if is_free and self._number("cur-size-active-mem-table") >= enough:
            with self._storing(self.folder):
                self._db.flush(False)

    def _end_loading(self) -> None:
        if self._is_loading:
            self._db.set_options(changeable(self._compaction))
            self._is_loading = False

    def _is_crowded(self) -> bool:
        return self._number("num-files-at-level0") >= self._compaction.runs_max

    def _number(self, name: str) -> int:
        try:
            return int(self._db.property_int_value(f"rocksdb.{name}") or 0)
        except BaseException as error:
            self._check_panic(error)
            raise

    def size(self) -> int:
        """Bytes of files and memtables, estimated."""
        return self._number("total-sst-files-size") + self._number("cur-size-all-mem-tables")

    def close(self) -> None:
        """Idempotent. The files stay; rows that the disk does not take any more are lost, and belong to no snapshot."""
        if not self._closed:
            self._closed = True
            try:
                self._db.close()
            except Exception as error:  # of the last flush; the database is closed all the same
                log.warning("%s was closed without what it had not written: %s", self.folder, error)
            except BaseException as error:
                self._check_panic(error)
                raise

    # ------------------------------------------------------------------------------------------------ what it calls raises

    def _iterator(self, prefix: bytes, *options: Any) -> Any:
        """An iterator over the present rows. Not one of a Snapshot, which shows newer rows too (rocksdict 0.3.29)."""
        try:
            return self._db.iter(*options)
        except BaseException as error:
            self._check_panic(error, prefix)
            raise

    def _items(self, prefix: bytes, bound: ReadOptions) -> Any:
        try:
            return self._db.items(from_key=prefix, read_opt=bound)
        except BaseException as error:
            self._check_panic(error, prefix)
            raise

    def _taken(self, loop: Any, count: int, after: bytes) -> list[tuple[bytes, bytes]]:
        """The next rows of `loop`, at most `count`."""
        try:
            return list(islice(loop, count))
        except Exception as error:
            raise self._failure(error) from error
        except BaseException as error:
            self._check_panic(error, after)
            raise

    def _rows_from(self, iterator: Any, prefix: bytes, start: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        key = prefix
        try:
            iterator.seek(prefix if start is None else start)
            while iterator.valid():
                key = iterator.key()
                if not key.startswith(prefix):
                    return
                yield key, iterator.value()
                iterator.next()
        except BaseException as error:
            self._check_panic(error, key)
            raise
        try:  # an iterator ends at a damaged table as it does behind the last row; its status tells them apart
            iterator.status()
        except Exception as error:
            raise self._failure(error) from error

    @contextlib.contextmanager
    def _storing(self, path: str, key: bytes = b"") -> Iterator[None]:
        """Turn exceptions of rocksdict into ours. `key`: a row key, or its beginning, by which errors name the state."""
        self.check()
        try:
            yield
        except HoldfastError:  # raised within, and complete
            raise
        except Exception as error:
            failure = self._failure(error, path)
            if isinstance(failure, StorageUnavailableError) and not self._is_read_only and self._has_stopped():
                self._refusal = failure
            raise failure from error
        except BaseException as error:
            self._check_panic(error, key)
            raise

    def _failure(self, error: Exception, path: str = "") -> HoldfastError:
        """The error for an exception of RocksDB."""
        return self._whose(rocksdb_failure(error, path or self.folder))

    def _whose(self, failure: HoldfastError) -> HoldfastError:
        """Damage is the snapshot's (CorruptStateError) until the database is whole, and this disk's from then on."""
        if isinstance(failure, CorruptStateError) and self._is_whole:
            where = f"operator {self._operator!r}"
            return StateBackendError(f"{where}: {failure}", operator=self._operator, state="", path=self.folder)
        return failure

    def _has_stopped(self) -> bool:
        return not self._closed and self._number("background-errors") > 0

    def _check_panic(self, error: BaseException, key: bytes = b"") -> None:
        """Raises StateBackendError for a panic."""
        if not is_panic(error):
            return
        state = ""
        if len(key) >= GROUP_AND_STATE.size:
            _, state_id = GROUP_AND_STATE.unpack_from(key)
            state = next((name for name, given in self.state_ids.items() if given == state_id), "")
        where = f"operator {self._operator!r}" + (f", state {state!r}" if state else "")
        raise StateBackendError(
            f"{where}: RocksDB's library gave up on {self.folder}: {error}",
            operator=self._operator,
            state=state,
            path=self.folder,
        ) from error


def _decode_state_ids(content: bytes) -> dict[str, int]:
    """Raises ValueError for two names of one id, or one of UNDECODABLE."""
    ids = decode_json(content, _StateIds)
    if len(set(ids.values())) != len(ids):
        raise ValueError("two states have the same id")
    return ids


def _batch(rows: Iterable[Row]) -> Any:
    batch = WriteBatch(raw_mode=True)
    for key, value in rows:
        if value is None:
            batch.delete(key)
        else:
            batch.put(key, value)
    return batch


def _put(writer: Any, rows: list[tuple[bytes, bytes]]) -> int:
    """Add rows to a table; returns their bytes."""
    size = 0
    put = writer.__setitem__
    for key, value in rows:
        put(key, value)
        size += len(key) + len(value)
    return size
