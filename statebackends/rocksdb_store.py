"""One RocksDB database of keyed rows: the layout of row keys, writing in short pieces, scans, and hard-linked copies.

A row key is key group, state id, lengths, then key, namespace and map key, so that key groups are ranges and the entries
of one map are neighbours. It knows nothing of generations, types or snapshots' files. Calls that hold the interpreter
lock (WriteBatch, create_checkpoint, ingest_external_file) are kept to pieces of a few milliseconds."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import add
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    Checkpoint,
    DBCompactionStyle,
    DBCompressionType,
    IngestExternalFileOptions,
    Options,
    Rdict,
    ReadOptions,
    SstFileWriter,
    UniversalCompactOptions,
    WriteBatch,
    WriteOptions,
)

from statebackends.errors import CorruptStateError, InvalidConfigError, StorageUnavailableError
from statebackends.handles import KeyGroupRange
from statebackends.rocksdb_memory import RocksMemory

_HEADER = struct.Struct(">HHIH")
_HEADERS = np.dtype([("group", ">u2"), ("state", ">u2"), ("key", ">u4"), ("namespace", ">u2")])
_LENGTH = struct.Struct(">H")
_GROUP_AND_STATE = struct.Struct(">HH")
_STATES_KEY = b"\xff\xffstates"
"""Above every key group: the JSON object state name -> state id."""

WRITE_ROWS = 1_000
"""Rows per write; a write holds the interpreter lock for a millisecond or two."""

_FLUSHED_AHEAD, _FLUSHED_AHEAD_MIN = 8, 2 << 20
"""Such a part of a full memtable, and so many bytes, take some 30 ms to write. Less would make many small tables, to be merged
later; and a memtable has a megabyte as soon as there is anything in it."""

TABLE_SUFFIX = ".sst"
"""Of files that never change, and whose names a database uses once; all others are written anew for every copy."""

INGEST_TABLE_BYTES = 32 << 20
"""Of one ingested table, before compression: linking it in holds the interpreter lock, mostly for two syncs of the disk."""

_UNUSED_FILES = frozenset({"LOCK", "LOG", "IDENTITY"})

Row = tuple[bytes, bytes | None]
"""(row key, encoded value), or None to delete."""


_RUNS_TO_SLOW_DOWN = 16
"""Runs beyond those that are merged, at which RocksDB holds writes back; twice as many stop them."""


@dataclass(frozen=True, slots=True)
class Compaction:
    """When tables are merged. What is merged is stored again by the next increment, so it is by size, never by level: with leveled
    compaction each hundredth of scattered changes rewrites all (measured: 21 % of the bytes an increment, against 2-4 %)."""

    runs_max: int = 8
    space_amplification_percent: int = 200
    in_background: bool = True


_LOADING = Compaction(runs_max=3, space_amplification_percent=50)
"""Before the first copy is made. What is merged then was stored nowhere yet, and what the first checkpoint finds is one large run
and a few small ones: several of one size would all be merged, and stored again, within a few increments."""


class RowKey(NamedTuple):
    """The parts of a row key."""

    key_group: int
    state_id: int
    key: bytes
    namespace: bytes
    map_key: bytes


def row_key(key_group: int, state_id: int, key: bytes, namespace: bytes, map_key: bytes = b"") -> bytes:
    """Raises struct.error if the namespace is longer than 65,535 bytes."""
    return _HEADER.pack(key_group, state_id, len(key), len(namespace)) + key + namespace + map_key


def row_keys(groups: npt.NDArray[np.int32], state_id: int, keys: Sequence[bytes], namespace: bytes) -> list[bytes]:
    """`row_key` of each key, without a map key."""
    headers = np.empty(len(keys), _HEADERS)
    headers["group"], headers["state"], headers["namespace"] = groups, state_id, _LENGTH.unpack(_LENGTH.pack(len(namespace)))
    headers["key"] = np.fromiter(map(len, keys), np.int64, len(keys))
    found: list[bytes] = list(map(add, headers.view(f"V{_HEADER.size}").tolist(), keys))
    return [key + namespace for key in found] if namespace else found


def write_order(groups: npt.NDArray[np.int32], keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """Indices of keys about in the order of their row keys: rows that go next to each other into a memtable cost a fifth of others.

    By key group, length and some bytes of the key; the rest is left as it is, and any order would be right."""
    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    stops = np.cumsum(lengths)
    bytes_ = np.frombuffer(b"".join(keys), np.uint8)
    first = (stops - lengths + 1)[:, None] + np.arange(8)  # the first byte is the tag of the type
    leading = bytes_[np.minimum(first, stops[:, None] - 1)].view(">u8").ravel()
    return np.lexsort((leading, lengths, groups))


def parse_row_key(encoded: bytes) -> RowKey:
    key_group, state_id, key_length, namespace_length = _HEADER.unpack_from(encoded)
    namespace_start = _HEADER.size + key_length
    map_key_start = namespace_start + namespace_length
    return RowKey(
        key_group,
        state_id,
        encoded[_HEADER.size : namespace_start],
        encoded[namespace_start:map_key_start],
        encoded[map_key_start:],
    )


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
    ) -> None:
        """Opens the folder, or creates it. `memory`: what others share, in the place of a block cache of its own. `is_new`: rows
        will be loaded before the first copy is made.

        Raises StorageUnavailableError, or CorruptStateError if it isn't ours."""
        self.folder = folder
        self._compaction = compaction or Compaction()
        self._is_loading = is_new and self._compaction.in_background
        cache = Cache(block_cache_bytes) if memory is None else memory.block_cache
        access = AccessType.read_only() if read_only else AccessType.read_write()
        try:
            os.makedirs(folder, exist_ok=True)
            options = _options(write_buffer_bytes, cache, _LOADING if self._is_loading else self._compaction)
            if memory is not None:
                options.set_write_buffer_manager(memory.write_buffers)
            self._db = Rdict(folder, options, access_type=access)
            self.state_ids: dict[str, int] = json.loads(self._db.get(_STATES_KEY) or b"{}")
        except OSError as error:
            raise StorageUnavailableError(f"{folder}: {error}", path=folder) from error
        except Exception as error:  # rocksdict raises plain Exception
            raise CorruptStateError(f"{folder} can't be opened by RocksDB: {error}", path=folder, reason="rocksdb") from error
        self._memory = memory
        self._table_options = _options(write_buffer_bytes, cache, self._compaction)
        self._write_buffer_bytes = write_buffer_bytes
        self._without_wal = WriteOptions()
        self._without_wal.disable_wal = True
        self._closed = self._refusing = False

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
        value: bytes | None = self._db.get(key)
        return value

    def write(self, rows: Iterable[Row]) -> None:
        """Write rows in order, WRITE_ROWS at a time, with the write-ahead log off."""
        batch, count = WriteBatch(raw_mode=True), 0
        for key, value in rows:
            if value is None:
                batch.delete(key)
            else:
                batch.put(key, value)
            count += 1
            if count == WRITE_ROWS:
                self._commit(batch)
                batch, count = WriteBatch(raw_mode=True), 0
        if count:
            self._commit(batch)

    def write_piece(self, keys: Sequence[bytes], values: Sequence[bytes | None]) -> None:
        """As `write`, of no more than WRITE_ROWS rows, without a step of Python's for each unless one is deleted."""
        if None in values:
            self.write(zip(keys, values, strict=True))
            return
        batch = WriteBatch(raw_mode=True)
        deque(map(batch.put, keys, values), maxlen=0)
        self._commit(batch)

    def ingest(self, rows: Iterator[tuple[bytes, bytes]], scratch: str) -> None:
        """Add rows, strictly ascending, as finished tables: no memtable, and nothing to compact.

        The database must hold no row within their range. `scratch` is a folder of the database's file system; what is written
        there becomes the database's. Raises StorageUnavailableError."""
        pieces = iter(lambda: list(islice(rows, WRITE_ROWS)), [])
        for number, first in enumerate(pieces):
            path = os.path.join(scratch, f"ingest-{number}{TABLE_SUFFIX}")
            with _storing(path):
                writer = SstFileWriter(self._table_options)
                writer.open(path)
            size = _put(writer, path, first)
            while size < INGEST_TABLE_BYTES and (piece := next(pieces, None)):
                size += _put(writer, path, piece)
            options = IngestExternalFileOptions()
            options.set_move_files(True)
            with _storing(path):
                writer.finish()
                self._db.ingest_external_file([path], options)

    def refuse_writes(self) -> None:
        """Any thread: the database is about to be closed, so a long write ends with StorageUnavailableError soon."""
        self._refusing = True

    def _commit(self, batch: Any) -> None:
        if self._refusing:
            raise StorageUnavailableError(f"{self.folder}: the database is being closed", path=self.folder)
        try:
            self._db.write(batch, self._without_wal)
        except Exception as error:
            raise StorageUnavailableError(f"{self.folder}: {error}", path=self.folder) from error

    def rows(self, prefix: bytes, after: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """(row key, value) of the rows that start with `prefix`, ascending, as they are when the iteration starts; behind the row
        key `after`, if one is given."""
        return _rows_from(self._db.iter(), prefix, self.folder, None if after is None else after + b"\0")

    def group_rows(self, groups: KeyGroupRange) -> Iterator[tuple[bytes, bytes]]:
        """(row key, value) of all rows of some key groups, ascending."""
        bound = ReadOptions()
        bound.set_iterate_upper_bound(groups.stop.to_bytes(2, "big"))
        iterator = self._db.iter(bound)
        iterator.seek(groups.start.to_bytes(2, "big"))
        while iterator.valid():
            yield iterator.key(), iterator.value()
            iterator.next()
        _check_ended(iterator, self.folder)

    def state_rows(self, state_id: int, groups: KeyGroupRange) -> Iterator[tuple[RowKey, bytes]]:
        """Rows of one state in some key groups, key group by key group, as they are when the iteration starts."""
        iterator = self._db.iter()  # not a Snapshot: rocksdict's iterates over newer rows too (0.3.29)
        for key_group in range(groups.start, groups.stop):
            for key, value in _rows_from(iterator, _GROUP_AND_STATE.pack(key_group, state_id), self.folder):
                yield parse_row_key(key), value

    def rows_after(self, key_group: int, state_id: int, after: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        """(row key, value) of one state in one key group, behind the row key `after`; as they are when the iteration starts."""
        prefix = _GROUP_AND_STATE.pack(key_group, state_id)
        return _rows_from(self._db.iter(), prefix, self.folder, None if after is None else after + b"\0")

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
                self._db.delete_range(start, stop, self._without_wal)

    def delete_state(self, name: str, groups: KeyGroupRange) -> None:
        """Delete all rows of a state; it has `groups` only."""
        state_id = self.state_ids[name]
        self.write((key, None) for group in range(groups.start, groups.stop)
                   for key, _ in self.rows(_GROUP_AND_STATE.pack(group, state_id)))  # fmt: skip

    def link_copy(self, folder: str) -> list[str]:
        """Flush, then hard-link the whole database into a new folder; returns its file names, sorted."""
        try:
            self._db.flush()
            self._end_loading()
            if not self._compaction.in_background and self._is_crowded():
                self._db.compact_range(None, None)
            Checkpoint(self._db).create_checkpoint(folder)
        except Exception as error:
            raise StorageUnavailableError(f"{folder}: {error}", path=folder) from error
        return sorted(name for name in os.listdir(folder) if name not in _UNUSED_FILES)

    def flush_ahead(self) -> None:
        """Begin to write a memtable that is an eighth full to a table, so that the next copy finds little in it; only where nobody
        would have to wait, and where tables are merged in the background.

        Raises StorageUnavailableError."""
        enough = max(self._write_buffer_bytes // _FLUSHED_AHEAD, _FLUSHED_AHEAD_MIN)
        is_free = self._compaction.in_background and not self._number("num-immutable-mem-table") and not self._is_crowded()
        if is_free and self._number("cur-size-active-mem-table") >= enough:
            try:
                self._db.flush(False)
            except Exception as error:
                raise StorageUnavailableError(f"{self.folder}: {error}", path=self.folder) from error

    def _end_loading(self) -> None:
        if self._is_loading:
            self._db.set_options(_changeable(self._compaction))
            self._is_loading = False

    def _is_crowded(self) -> bool:
        return self._number("num-files-at-level0") >= self._compaction.runs_max

    def _number(self, name: str) -> int:
        return int(self._db.property_int_value(f"rocksdb.{name}") or 0)

    def size(self) -> int:
        """Bytes of files and memtables, estimated."""
        return self._number("total-sst-files-size") + self._number("cur-size-all-mem-tables")

    def close(self) -> None:
        """Idempotent; the files stay."""
        if not self._closed:
            self._closed = True
            self._db.close()


def _rows_from(iterator: Any, prefix: bytes, folder: str, start: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
    iterator.seek(prefix if start is None else start)
    while iterator.valid():
        key = iterator.key()
        if not key.startswith(prefix):
            return
        yield key, iterator.value()
        iterator.next()
    _check_ended(iterator, folder)


def _check_ended(iterator: Any, folder: str) -> None:
    """An iterator over a damaged table ends as one behind the last row does; only its status tells."""
    try:
        iterator.status()
    except Exception as error:
        raise CorruptStateError(f"{folder} can't be read by RocksDB: {error}", path=folder, reason="rocksdb") from error


def _put(writer: Any, path: str, rows: list[tuple[bytes, bytes]]) -> int:
    """Add rows to a table; their bytes."""
    size = 0
    put = writer.__setitem__
    with _storing(path):
        for key, value in rows:
            put(key, value)
            size += len(key) + len(value)
    return size


@contextlib.contextmanager
def _storing(path: str) -> Iterator[None]:
    """rocksdict raises plain Exception for what the disk refuses."""
    try:
        yield
    except Exception as error:
        raise StorageUnavailableError(f"{path}: {error}", path=path) from error


def _changeable(compaction: Compaction) -> dict[str, str]:
    """Options of an open database that say when it merges."""
    return {
        "level0_file_num_compaction_trigger": str(compaction.runs_max),
        "compaction_options_universal": f"{{max_size_amplification_percent={compaction.space_amplification_percent};}}",
    }


def _options(write_buffer_bytes: int, cache: Any, compaction: Compaction) -> Any:
    tables = BlockBasedOptions()
    tables.set_block_cache(cache)
    tables.set_bloom_filter(10.0, False)
    tables.set_cache_index_and_filter_blocks(True)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(tables)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_write_buffer_size(write_buffer_bytes)
    options.set_max_write_buffer_number(2)
    options.set_max_background_jobs(2)
    universal = UniversalCompactOptions()
    universal.max_size_amplification_percent = compaction.space_amplification_percent
    options.set_compaction_style(DBCompactionStyle.universal())
    options.set_universal_compaction_options(universal)
    options.set_level_zero_file_num_compaction_trigger(compaction.runs_max)
    options.set_level_zero_slowdown_writes_trigger(compaction.runs_max + _RUNS_TO_SLOW_DOWN)
    options.set_level_zero_stop_writes_trigger(compaction.runs_max + 2 * _RUNS_TO_SLOW_DOWN)
    options.set_disable_auto_compactions(not compaction.in_background)
    options.set_keep_log_file_num(1)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    return options
