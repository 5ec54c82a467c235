"""One RocksDB database of keyed rows: writing in short pieces, scans, and hard-linked copies.

It knows nothing of layers, types or snapshots' files. Calls that hold the interpreter lock (WriteBatch,
create_checkpoint, ingest_external_file) are kept to pieces of a few milliseconds. Everything that rocksdict raises is told
here as an error of ours: plain Exception for what the disk refuses (see storage/failures.py), and panics, which are
none that anybody else catches.

A database whose background work the disk refused once is not written any more, whether RocksDB finds its way back or not:
every later write raises what the disk said, until the attempt is over and the folder is gone.

Panics of native libraries. pyo3 raises them as a BaseException, so that nobody takes them for an error that was thought of; and
they would end whoever calls, with all that belongs to others. Here a panic is a failure of what was being done.

Which class that is can't be imported: every library has one of its own, made at its first panic."""

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
from typing import Any

from rocksdict import (
    AccessType,
    Cache,
    Checkpoint,
    DbClosedError,
    IngestExternalFileOptions,
    Rdict,
    ReadOptions,
    SstFileWriter,
    WriteBatch,
    WriteOptions,
)

from holdfast.statebackends.errors import (
    CorruptStateError,
    HoldfastError,
    InvalidConfigError,
    StateBackendError,
    StorageUnavailableError,
)
from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.layout import TABLE_SUFFIX
from holdfast.statebackends.rocksdb.options import LOADING, Compaction, RocksMemory, changeable, database_options
from holdfast.statebackends.rocksdb.row_keys import GROUP_AND_STATE, Row, RowKey, parse_row_key
from holdfast.statebackends.storage.failures import rocksdb_failure


def is_panic(error: BaseException) -> bool:
    return any(kind.__name__ == "PanicException" and kind.__module__ == "pyo3_runtime" for kind in type(error).__mro__)


def failure_of(error: BaseException) -> BaseException:
    """`error`, if the work that raised it failed by it. Raises it if it ends the one who does the work: an interrupt, an exit, the
    end of a generator."""
    if isinstance(error, Exception) or is_panic(error):
        return error
    raise error


log = logging.getLogger("holdfast.rocksdb")

_STATES_KEY = b"\xff\xffstates"
"""Above every key group: the JSON object state name -> state id."""

WRITE_ROWS = 1_000
"""Rows per write; a write holds the interpreter lock for a millisecond or two."""

STALL_S = 0.001
"""Between two tries of a write that RocksDB has no room for yet."""
_STALLED = "Result incomplete"

_FLUSHED_AHEAD, _FLUSHED_AHEAD_MIN = 8, 2 << 20
"""Such a part of a full memtable, and so many bytes, take some 30 ms to write. Less would make many small tables, to be merged
later; and a memtable has a megabyte as soon as there is anything in it."""

INGEST_TABLE_BYTES = 32 << 20
"""Of one ingested table, before compression: linking it in holds the interpreter lock, mostly for two syncs of the disk."""

_UNUSED_FILES = frozenset({"LOCK", "LOG", "IDENTITY"})


class RocksStore:
    """An open database in a folder of its own. Thread-safe as RocksDB is; who may write when is the caller's business."""

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
        """Opens the folder, or creates it. `memory`: what others share, in the place of a block cache of its own. `is_new`: rows
        will be loaded before the first copy is made. `is_whole`: what is damaged is this disk's copy, as if `restored` had been
        called; of a new database it always is. `operator`: whose rows they are, for errors.

        Raises StorageUnavailableError, or CorruptStateError if it isn't ours. Any call here may raise StateBackendError."""
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
        self._closed = self._refusing = False
        self._is_read_only = read_only
        self._refusal: StorageUnavailableError | None = None
        """What the disk refused of the database's background work."""

    def _open(self, options: Any, access: Any) -> Any:
        """The database; its `state_ids` are read."""
        folder = self.folder
        try:
            os.makedirs(folder, exist_ok=True)
            database = Rdict(folder, options, access_type=access)
            self.state_ids = json.loads(database.get(_STATES_KEY) or b"{}")
        except (ValueError, RecursionError) as error:
            raise CorruptStateError(f"{folder} holds no ids of states: {error}", path=folder, reason="rocksdb") from error
        except Exception as error:  # rocksdict raises plain Exception
            raise self._whose(rocksdb_failure(error, folder, opening=True)) from error
        except BaseException as error:
            self._check_panic(error)
            raise
        return database

    def restored(self) -> None:
        """Every file was whole when the database was put together: what is damaged from here on is this disk's copy of it, and a
        StateBackendError, which a restart mends."""
        self._is_whole = True

    def check(self) -> None:
        """Raises StorageUnavailableError, by its name, if the disk has refused the database something."""
        if self._refusal is not None:
            raise type(self._refusal).of(self._refusal.message, self._refusal.fields)

    def state_id(self, name: str) -> int:
        """Id of a state, 0..65535, given at the first call and kept for the life of the database and its copies."""
        if name not in self.state_ids:
            state_id = max(self.state_ids.values(), default=-1) + 1
            if state_id > 0xFFFF:
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
        """Write rows in order, WRITE_ROWS at a time, with the write-ahead log off."""
        rest = iter(rows)
        while batch := list(islice(rest, WRITE_ROWS)):
            self._commit(lambda batch=batch: _batch(batch), batch[0][0])  # type: ignore[misc]

    def write_batch(self, keys: Sequence[bytes], values: Sequence[bytes | None]) -> None:
        """As `write`, of no more than WRITE_ROWS rows, without a step of Python's for each unless one is deleted."""
        if None in values:
            self.write(zip(keys, values, strict=True))
            return

        def make() -> Any:
            batch = WriteBatch(raw_mode=True)
            deque(map(batch.put, keys, values), maxlen=0)
            return batch

        self._commit(make, keys[0] if keys else b"")

    def ingest(self, rows: Iterator[tuple[bytes, bytes]], scratch: str) -> None:
        """Add rows, strictly ascending, as finished tables: no memtable, and nothing to compact.

        The database must hold no row within their range. `scratch` is a folder of the database's file system; what is written
        there becomes the database's. Raises StorageUnavailableError."""
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
        """Any thread: the database is about to be closed, so a long write ends with StorageUnavailableError soon."""
        self._refusing = True

    def _commit(self, make: Callable[[], Any], first: bytes) -> None:
        """Write the batch that `make` makes, anew for each try; `first`: one of its row keys."""
        self._patiently(lambda: self._db.write(make(), self._without_wal), self.folder, first)

    def _patiently(self, write: Callable[[], Any], path: str, key: bytes = b"") -> None:
        """Make a write, when RocksDB has room for it.

        Waiting within RocksDB would keep the interpreter from every thread, and after a flush that found the disk full it would
        last until there is room: nobody would learn why this worker stands still."""
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
                time.sleep(STALL_S)

    def rows(self, prefix: bytes, after: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """(row key, value) of the rows that start with `prefix`, ascending, as they are when the iteration starts; behind the row
        key `after`, if one is given."""
        return self._rows_from(self._iterator(prefix), prefix, None if after is None else after + b"\0")

    def group_rows(self, groups: KeyGroupRange) -> Iterator[tuple[bytes, bytes]]:
        """(row key, value) of all rows of some key groups, ascending."""
        bound = ReadOptions()  # lives until the end: the iterator reads the bound where these options have it
        bound.set_iterate_upper_bound(groups.stop.to_bytes(2, "big"))
        yield from self._rows_from(self._iterator(b"", bound), b"", groups.start.to_bytes(2, "big"))

    def state_rows(self, state_id: int, groups: KeyGroupRange) -> Iterator[tuple[RowKey, bytes]]:
        """Rows of one state in some key groups, key group by key group, as they are when the iteration starts."""
        iterator = self._iterator(GROUP_AND_STATE.pack(groups.start, state_id))
        for key_group in range(groups.start, groups.stop):
            for key, value in self._rows_from(iterator, GROUP_AND_STATE.pack(key_group, state_id)):
                yield parse_row_key(key), value

    def rows_after(self, key_group: int, state_id: int, after: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        """(row key, value) of one state in one key group, behind the row key `after`; as they are when the iteration starts."""
        prefix = GROUP_AND_STATE.pack(key_group, state_id)
        return self._rows_from(self._iterator(prefix), prefix, None if after is None else after + b"\0")

    @property
    def is_refusing(self) -> bool:
        """`refuse_writes` was called."""
        return self._refusing

    def keep_only(self, groups: KeyGroupRange) -> None:
        """Delete the rows of all other key groups."""
        last = _STATES_KEY[:2]
        ranges = ((b"\0\0", groups.start.to_bytes(2, "big")), (groups.stop.to_bytes(2, "big"), last))
        for start, stop in ranges:
            if start < stop:
                self._patiently(partial(self._db.delete_range, start, stop, self._without_wal), self.folder)

    def delete_state(self, name: str, groups: KeyGroupRange) -> None:
        """Delete all rows of a state; it has `groups` only."""
        state_id = self.state_ids[name]
        self.write((key, None) for group in range(groups.start, groups.stop)
                   for key, _ in self.rows(GROUP_AND_STATE.pack(group, state_id)))  # fmt: skip

    def link_copy(self, folder: str) -> list[str]:
        """Flush, then hard-link the whole database into a new folder; returns its file names, sorted."""
        with self._storing(folder):
            self._db.flush()
            self._end_loading()
            if not self._compaction.in_background and self._is_crowded():
                self._db.compact_range(None, None)
            Checkpoint(self._db).create_checkpoint(folder)
            return sorted(name for name in os.listdir(folder) if name not in _UNUSED_FILES)

    def flush_ahead(self) -> None:
        """Begin to write a memtable that is an eighth full to a table, so that the next copy finds little in it; only where nobody
        would have to wait, and where tables are merged in the background.

        Raises StorageUnavailableError."""
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
        """Idempotent; the files stay, and hold what was written to them. What the disk does not take any more nobody wanted."""
        if not self._closed:
            self._closed = True
            try:
                self._db.close()
            except Exception as error:  # of its last flush; it is closed all the same
                log.warning("%s was closed without what it had not written: %s", self.folder, error)
            except BaseException as error:
                self._check_panic(error)
                raise

    # ------------------------------------------------------------------------------------------------ what it calls raises

    def _iterator(self, prefix: bytes, *options: Any) -> Any:
        """Of rows as they are now. Not a Snapshot's: rocksdict's iterates over newer rows too (0.3.29)."""
        try:
            return self._db.iter(*options)
        except BaseException as error:
            self._check_panic(error, prefix)
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
        try:  # an iterator over a damaged table ends as one behind the last row does; only its status tells
            iterator.status()
        except Exception as error:
            raise self._failure(error) from error

    @contextlib.contextmanager
    def _storing(self, path: str, key: bytes = b"") -> Iterator[None]:
        """`key`: a row key, or the beginning of one, that shows which state it is about."""
        self.check()
        try:
            yield
        except HoldfastError:  # within, which names what it was about
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
        """What one of RocksDB's errors is called here."""
        return self._whose(rocksdb_failure(error, path or self.folder))

    def _whose(self, failure: HoldfastError) -> HoldfastError:
        """Damage is the snapshot's until the database is whole, and this disk's from then on."""
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


def _batch(rows: Iterable[Row]) -> Any:
    batch = WriteBatch(raw_mode=True)
    for key, value in rows:
        if value is None:
            batch.delete(key)
        else:
            batch.put(key, value)
    return batch


def _put(writer: Any, rows: list[tuple[bytes, bytes]]) -> int:
    """Add rows to a table; their bytes."""
    size = 0
    put = writer.__setitem__
    for key, value in rows:
        put(key, value)
        size += len(key) + len(value)
    return size
