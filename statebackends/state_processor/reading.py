"""Reader of a snapshot's parts, for tools, and of tables as streams of batches.

A part is checked against length and checksum before it is opened: a small one is held in memory, a larger one is copied into a
scratch folder once, and the copy is opened. Tables (Arrow IPC, Parquet) come as batches in key-group order. A table that a backend
wrote is in order, and is read once; one that another tool edited may not be, and is then read several times, each time for as many
key groups as fit in memory. The rules of rows are in rows.py."""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.statebackends.errors import CorruptStateError, StorageUnavailableError
from holdfast.statebackends.handles import (
    FileHandle,
    InlineHandle,
    KeyedStateHandle,
    KeyGroupRange,
    PlaceholderHandle,
    SegmentHandle,
    StateHandle,
)
from holdfast.statebackends.layout import KEY_GROUP
from holdfast.statebackends.snapshot.parts import damaged, download_file, length_problem, of_operator, read_file, unresolved
from holdfast.statebackends.snapshot.tables import EVERY_KEY_GROUP, check_held, restrict, sort_by_key_group
from holdfast.statebackends.snapshot.unpacking import check_arrow, check_parquet, checked_batch
from holdfast.statebackends.state_processor.progress import note
from holdfast.statebackends.storage.failures import unavailable
from holdfast.statebackends.storage.port import Flow, InParallel, Storage, perform, run_flow

MEMORY_BYTES_MAX = 4 << 20
"""Bytes up to which a file is read into memory; a larger one is copied into the scratch folder."""

FETCH_BYTES_MAX, FETCH_PARTS_MAX = 32 << 20, 64
"""Bytes and number of one state's parts that are read at one time; a single part may have more bytes."""

P = TypeVar("P")


class PathOf(Protocol):
    """Storage path of a file that a handle names."""

    def __call__(self, path: str, *, operator: str) -> str:
        """Raises CorruptStateError if the snapshot may not name it."""


class PartReader:
    """Reader of one snapshot's parts, and a context manager that deletes its copies. For one thread."""

    def __init__(self, storage: Storage, path_of: PathOf) -> None:
        self._storage = storage
        self._path_of = path_of
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._count = 0
        self._clones: dict[KeyedStateHandle, str] = {}
        self._fetched: dict[FileHandle, bytes] = {}

    def __enter__(self) -> PartReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.forget()

    def forget(self) -> None:
        """Delete all copies. Idempotent."""
        self._clones.clear()
        self._fetched.clear()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def open(self, part: StateHandle, *, operator: str, subtask: int) -> pa.NativeFile:
        """A part as a file that can be read at any position. Raises CorruptStateError naming file, operator and subtask."""
        if isinstance(part, InlineHandle):
            return pa.BufferReader(pa.py_buffer(part.data))
        if isinstance(part, PlaceholderHandle):
            raise unresolved(part, operator)
        if _is_small(part):
            return pa.BufferReader(pa.py_buffer(self.read(part, operator=operator, subtask=subtask)))
        return pa.OSFile(self.copy(part, operator=operator, subtask=subtask))  # pages of a map would stay in memory, all of them

    def read(self, part: StateHandle, *, operator: str, subtask: int) -> bytes:
        """All bytes of a part. Raises CorruptStateError."""
        if isinstance(part, InlineHandle):
            return part.data
        if isinstance(part, PlaceholderHandle):
            raise unresolved(part, operator)
        fetched = self._fetched.pop(part, None)
        return run_flow(self._read(part, operator, subtask), self._storage) if fetched is None else fetched

    def fetch(self, parts: Iterable[tuple[StateHandle, int]], *, operator: str) -> None:
        """Read small parts, each given with its subtask, at one time, for the next `read` or `open`. The caller bounds their bytes.

        Raises StorageUnavailableError. A damaged part raises when it is read or opened."""
        wanted = [(part, subtask) for part, subtask in parts if isinstance(part, FileHandle) and _is_small(part)]
        flows = [self._unless_damaged(part, operator, subtask) for part, subtask in wanted]
        read = perform(InParallel(flows, [max(part.length, 0) for part, _ in wanted]), self._storage)
        self._fetched.update((part, data) for (part, _), data in zip(wanted, read, strict=True) if data is not None)

    def _unless_damaged(self, part: FileHandle, operator: str, subtask: int) -> Flow[bytes | None]:
        try:
            return (yield from self._read(part, operator, subtask))
        except CorruptStateError:
            return None

    def _read(self, part: FileHandle, operator: str, subtask: int) -> Flow[bytes]:
        path = self._path_of(part.path, operator=operator)
        with _of_owner(operator, subtask):
            if isinstance(part, SegmentHandle):
                yield from _look(part, path, operator, subtask)
            data = yield from read_file(part, path, operator, subtask)
        note(size=part.length)
        return data

    def copy(self, part: FileHandle, *, operator: str, subtask: int, target: str | None = None) -> str:
        """Local path of a checked copy: `target` (on any thread), or a path in the scratch folder. Raises CorruptStateError."""
        local = target or self.new_path("part")
        run_flow(self._copy(part, operator, subtask, local), self._storage)
        return local

    def _copy(self, part: FileHandle, operator: str, subtask: int, local: str) -> Flow[None]:
        path = self._path_of(part.path, operator=operator)
        with _of_owner(operator, subtask), scratch_errors(local):
            yield from _look(part, path, operator, subtask)  # before a file of another length fills the disk
            yield from download_file(part, path, local, operator, subtask)
        note(size=part.length)

    def clone(self, handle: KeyedStateHandle, *, operator: str, subtask: int) -> str:
        """Folder with a native handle's files under their local names, copied once. Raises CorruptStateError."""
        folder = self._clones.get(handle)
        if folder is None:
            folder = self.new_path("native")
            with scratch_errors(folder):
                os.mkdir(folder)
            copies: list[tuple[FileHandle, str]] = []
            for part, name in zip(handle.parts, handle.names, strict=True):
                local = os.path.join(folder, name)
                if isinstance(part, FileHandle):
                    copies.append((part, local))
                    continue
                data = self.read(part, operator=operator, subtask=subtask)
                with scratch_errors(local), open(local, "wb") as file:
                    file.write(data)
            flows = [self._copy(part, operator, subtask, local) for part, local in copies]
            perform(InParallel(flows, [max(part.length, 0) for part, _ in copies]), self._storage)
            self._clones[handle] = folder
        return folder

    def discard(self, local: str) -> None:
        """Delete one copy that `copy` made."""
        os.unlink(local)

    def new_path(self, kind: str) -> str:
        """A new path in the scratch folder."""
        if self._scratch is None:
            with scratch_errors(tempfile.gettempdir()):
                self._scratch = tempfile.TemporaryDirectory(prefix="holdfast-snapshot-")
        self._count += 1
        return os.path.join(self._scratch.name, f"{kind}-{self._count}")


def fetch_windows(parts: Sequence[P], size: Callable[[P], int]) -> Iterator[Sequence[P]]:
    """The parts in windows to fetch at one time: one, two, four ..., so that a caller who stops early has read little in vain."""
    start, count = 0, 1
    while start < len(parts):
        stop, bytes_ = start + 1, size(parts[start])
        while stop < min(start + count, len(parts)) and bytes_ + size(parts[stop]) <= FETCH_BYTES_MAX:
            bytes_ += size(parts[stop])
            stop += 1
        yield parts[start:stop]
        start, count = stop, min(2 * count, FETCH_PARTS_MAX)


def _is_small(part: FileHandle) -> bool:
    return part.length <= MEMORY_BYTES_MAX or isinstance(part, SegmentHandle)


@contextmanager
def scratch_errors(path: str) -> Iterator[None]:
    """Report OSErrors within as StorageUnavailableError of the scratch file `path`."""
    try:
        yield
    except OSError as error:
        raise unavailable(error, f"scratch space {path}", path=path) from error


@contextmanager
def _of_owner(operator: str, subtask: int) -> Iterator[None]:
    """Errors of storage within name the operator and subtask."""
    try:
        yield
    except StorageUnavailableError as error:
        raise of_operator(error, operator, subtask) from error


def _look(part: FileHandle, path: str, operator: str, subtask: int) -> Flow[None]:
    """Raises CorruptStateError for a file that is missing, or has another length."""
    problem = yield from length_problem(part, path, operator, subtask)
    if problem is not None:
        raise damaged(problem.kind, path, problem.detail, operator, subtask)


BATCH_ROWS = 1 << 15
BATCH_BYTES = 32 << 20
"""Bytes of a batch, roughly: only the average row is known."""
_READ_BYTES = 1 << 20
"""Bytes of a column that are read at a time: a row group of another tool may be a whole file."""
SORT_ROWS_MAX = 1 << 20
"""Rows of an unsorted file that are sorted at a time; more only if they are of one key group."""


class TableFile(ABC):
    """One open table. Raises pyarrow's errors and ValueError; the caller names the file."""

    schema: pa.Schema
    held: KeyGroupRange = EVERY_KEY_GROUP
    """Key groups of the file's handle; rows of others are refused."""
    _counted: tuple[KeyGroupRange, npt.NDArray[np.int64], bool] | None = None
    """Last result of `_count`, with its key groups."""

    @staticmethod
    def open(source: pa.NativeFile, table_format: str, held: KeyGroupRange = EVERY_KEY_GROUP) -> TableFile:
        file = _ParquetFile(source) if table_format == "parquet" else _ArrowFile(source)
        file.held = held
        return file

    @abstractmethod
    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """All rows, at most BATCH_ROWS at a time, with all columns or those in `columns`."""

    def sorted_batches(self, groups: KeyGroupRange, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of some key groups in key-group order, with all columns, or the key group and those in `columns` that exist."""
        counts, in_order = self._count(groups)
        names = None if columns is None else [name for name in self.schema.names if name == KEY_GROUP or name in columns]
        schema = self.schema if names is None else pa.schema([self.schema.field(name) for name in names])
        for part in [groups] if in_order else _slices(counts, groups):
            found = (restrict(batch, part) for batch in self.batches(names))
            if in_order:
                yield from (batch for batch in found if batch.num_rows)
            else:
                table = sort_by_key_group(pa.Table.from_batches(list(found), schema))
                yield from table.to_batches(max_chunksize=BATCH_ROWS)

    def slices(self, groups: KeyGroupRange) -> Iterator[KeyGroupRange]:
        """Consecutive ranges of key groups with at most SORT_ROWS_MAX rows of the file each, or of one key group."""
        yield from _slices(self._count(groups)[0], groups)

    def _count(self, groups: KeyGroupRange) -> tuple[npt.NDArray[np.int64], bool]:
        """(rows of each key group of the range, whether all rows are in order)."""
        if self._counted is None or self._counted[0] != groups:
            self._counted = (groups, *self._count_rows(groups))
        return self._counted[1:]

    def _count_rows(self, groups: KeyGroupRange) -> tuple[npt.NDArray[np.int64], bool]:
        if self.schema.get_field_index(KEY_GROUP) < 0:
            raise ValueError(f"no column {KEY_GROUP!r}")
        counts = np.zeros(len(groups), np.int64)
        last, in_order = -1, True
        for batch in self.batches([KEY_GROUP]):
            column = batch.column(0)
            if column.null_count or not pa.types.is_integer(column.type):
                raise ValueError(f"column {KEY_GROUP!r} holds nulls or is not an integer")
            found = column.to_numpy(zero_copy_only=False).astype(np.int64)
            if len(found):
                check_held(found, self.held)
                in_order = in_order and int(found[0]) >= last and bool((found[1:] >= found[:-1]).all())
                last = int(found[-1])
                inside = found[(found >= groups.start) & (found < groups.stop)] - groups.start
                counts += np.bincount(inside, minlength=len(groups))
        return counts, in_order


def _slices(counts: npt.NDArray[np.int64], groups: KeyGroupRange) -> Iterator[KeyGroupRange]:
    """Consecutive ranges of at most SORT_ROWS_MAX rows, or of one key group."""
    start, rows = groups.start, 0
    for group, count in enumerate(counts.tolist(), groups.start):
        if rows and rows + count > SORT_ROWS_MAX:
            yield KeyGroupRange(start, group)
            start, rows = group, 0
        rows += count
    if start < groups.stop:
        yield KeyGroupRange(start, groups.stop)


class _ParquetFile(TableFile):
    def __init__(self, source: pa.NativeFile) -> None:
        row_bytes = check_parquet(source)
        self._rows = max(1, BATCH_BYTES // max(1, row_bytes))
        self._file = pq.ParquetFile(source, buffer_size=_READ_BYTES, pre_buffer=False)
        self.schema = self._file.schema_arrow

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        yield from self._file.iter_batches(min(BATCH_ROWS, self._rows), columns=None if columns is None else list(columns))


class _ArrowFile(TableFile):
    def __init__(self, source: pa.NativeFile) -> None:
        self._source = source
        self._unpacked = check_arrow(source)
        self._reader = pa.ipc.open_file(source)
        self.schema = self._reader.schema

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        reader = self._reader if columns is None else self._reader_of(columns)
        unpacked = self._unpacked.copy()
        for index in range(reader.num_record_batches):
            batch = checked_batch(reader.get_batch(index), unpacked)
            if columns is not None:
                batch = batch.select(list(columns))
            rows = min(BATCH_ROWS, max(1, BATCH_BYTES * batch.num_rows // max(1, batch.nbytes)))
            for start in range(0, batch.num_rows, rows):
                yield batch.slice(start, rows)

    def _reader_of(self, columns: Sequence[str]) -> pa.ipc.RecordBatchFileReader:
        """A reader that reads and decompresses these columns alone."""
        fields = [index for name in columns if (index := self.schema.get_field_index(name)) >= 0]
        return pa.ipc.open_file(self._source, options=pa.ipc.IpcReadOptions(included_fields=fields))


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with the columns of a schema, cast. Raises ValueError or pyarrow's errors."""
    if batch.schema.equals(schema):
        return batch
    arrays = []
    for field in schema:
        index = batch.schema.get_field_index(field.name)
        if index < 0:
            raise ValueError(f"no column {field.name!r}")
        column = batch.column(index)
        if column.null_count and not field.nullable:
            raise ValueError(f"null in column {field.name!r}")
        arrays.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
