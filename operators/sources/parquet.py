"""Parquet files as a rewindable source: files in sorted order, dealt round robin to subtasks; position = file and row.

The list of files is fixed when the graph is built. A file whose footer changes afterwards is refused, not read on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from holdfast.barriers.elements import Batch
from holdfast.operators.base import OperatorContext, Poll
from holdfast.operators.sources.generator import check_rate, rate_of_subtask
from holdfast.operators.sources.materialised import checksum_of
from holdfast.statebackends.decoding import UNDECODABLE, decode_msgpack
from holdfast.statebackends.errors import CorruptStateError, InputChangedError, InvalidConfigError, UnknownColumnError
from holdfast.statebackends.storage.failures import unavailable

BATCH_ROWS = 65_536

PREFETCH_BATCHES = 2
"""Most batches held ahead of the current one."""

WAIT_MS = 2
"""Interval at which a reader polls a batch that is being read."""

_FOOTER_TAIL = 8
"""Length of the footer (4 bytes, little endian) and the magic."""


class FilePosition(msgspec.Struct, frozen=True, array_like=True):
    """One entry of the source's split state: a file that is not read to its end."""

    version: int
    index: int
    """Index of the file in the sorted list; entries are read in this order."""
    path: str
    size: int
    """Bytes."""
    footer: str
    """`xxh3_128:<32 hex>` of the file's footer; empty until a reader has opened the file."""
    row: int
    """First unread row."""


@dataclass(frozen=True, slots=True)
class _FileEntry:
    path: str
    size: int


class ParquetSource:
    """Source of the Parquet files at a path (a file, or a folder read recursively) or at a list of paths or URLs.

    columns: columns to read, in this order; None for all. rows_per_second: of the whole source, shared equally by its subtasks.
    Raises InvalidConfigError when there is no file, UnknownColumnError on an unknown column."""

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str],
        *,
        columns: Sequence[str] | None = None,
        rows_per_second: float | None = None,
        batch_rows: int = BATCH_ROWS,
        name: str = "parquet",
    ) -> None:
        check_rate(rows_per_second)
        if batch_rows < 1:
            raise InvalidConfigError(f"batch_rows must be at least 1, got {batch_rows}", setting="batch_rows")
        self.name = name
        self.rows_per_second = rows_per_second
        self.batch_rows = batch_rows
        self.filesystem, self.files, found = _discover(path)
        self._schema = _select(found, columns)

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def with_columns(self, names: Sequence[str]) -> ParquetSource:
        """The same source, of which only these columns are read."""
        narrow = copy(self)
        narrow._schema = _select(self._schema, names)
        return narrow

    def create_reader(self, subtask: int, parallelism: int, max_parallelism: int) -> ParquetReader:
        return ParquetReader(self, subtask, parallelism)


def _discover(path: str | os.PathLike[str] | Sequence[str]) -> tuple[pafs.FileSystem, list[_FileEntry], pa.Schema]:
    """File system, files in sorted order, and the schema that all files are read with (unified by pyarrow.dataset)."""
    paths = [os.fspath(path)] if isinstance(path, (str, os.PathLike)) else [os.fspath(item) for item in path]
    if not paths:
        raise InvalidConfigError("a Parquet source needs at least one path", setting="path")
    try:
        filesystem, _ = pafs.FileSystem.from_uri(_uri(paths[0]))
        files: list[str] = []
        for item in paths:
            files += ds.dataset(pafs.FileSystem.from_uri(_uri(item))[1], format="parquet", filesystem=filesystem).files
        files = sorted(set(files))
        if not files:
            raise InvalidConfigError(f"no Parquet file in {', '.join(paths)}", path=paths[0])
        schema = ds.dataset(files, format="parquet", filesystem=filesystem).schema
        sizes = [int(info.size) for info in filesystem.get_file_info(files)]
    except FileNotFoundError as error:
        raise InvalidConfigError(f"{', '.join(paths)}: there is no such file or folder", path=paths[0]) from error
    except (OSError, pa.ArrowInvalid) as error:
        raise InvalidConfigError(f"{', '.join(paths)} can't be read as Parquet: {error}", path=paths[0]) from error
    return filesystem, [_FileEntry(file, size) for file, size in zip(files, sizes, strict=True)], schema.remove_metadata()


def _uri(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)


def _select(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    wanted = schema.names if columns is None else list(columns)
    for column in wanted:
        if column not in schema.names:
            raise UnknownColumnError(
                f"there is no column {column}; the files have {', '.join(schema.names)}",
                operator="parquet",
                column=column,
                available=schema.names,
            )
    chosen = pa.schema([schema.field(column).remove_metadata() for column in wanted])
    for field in chosen:
        if pa.types.is_timestamp(field.type) and field.type.unit == "ns":
            raise InvalidConfigError(f"column {field.name} holds nanoseconds: write it as microseconds", column=field.name)
    return chosen


class ParquetReader:
    """SourceReader: reads its files one after the other on the pool, a bounded number of batches ahead."""

    def __init__(self, source: ParquetSource, subtask: int, parallelism: int) -> None:
        self._source = source
        self._subtask = subtask
        files = list(enumerate(source.files))[subtask::parallelism]
        self._splits = [FilePosition(1, index, file.path, file.size, "", 0) for index, file in files]
        self._rate = rate_of_subtask(source.rows_per_second, parallelism)
        self._ahead: list[tuple[int, str, pa.RecordBatch | None]] = []
        """(file index, footer checksum, batch); None marks the end of a file."""
        self._stream: Iterator[tuple[int, str, pa.RecordBatch | None]] = iter(())
        self._reading = False
        self._error: BaseException | None = None
        self._closed = False

    def open(self, context: OperatorContext, entries: list[bytes] | None) -> None:
        self._context = context
        if entries is not None:
            self._splits = sorted((_decode(entry, context.uid) for entry in entries), key=lambda split: split.index)
        self._stream = _read_files(self._source, tuple(self._splits), context.uid)
        self._read_ahead()

    def _read_ahead(self) -> None:
        if self._reading or self._closed or self._error is not None or len(self._ahead) >= PREFETCH_BATCHES:
            return
        if not self._splits:
            return
        self._reading = True
        self._context.submit(lambda: next(self._stream, None), self._read)

    def _read(self, item: tuple[int, str, pa.RecordBatch | None] | None, error: BaseException | None) -> None:
        self._reading = False
        if error is not None:
            self._error = error
        elif item is not None:
            self._ahead.append(item)
            self._read_ahead()

    def poll(self, rows_max: int, now_ms: int) -> Poll:
        self._drop_ended()
        if not self._splits:
            return Poll(finished=True)
        if not self._ahead:
            if self._error is not None:
                raise self._error
            return Poll(ready_at_ms=now_ms + WAIT_MS)
        count = self._rate.allowed(rows_max, now_ms)
        if count == 0:
            return Poll(ready_at_ms=self._rate.ready_at_ms(now_ms))
        index, footer, batch = self._ahead[0]
        assert batch is not None
        given = batch.slice(0, count)
        self._rate.spend(given.num_rows)
        if given.num_rows == batch.num_rows:
            self._ahead.pop(0)
            self._read_ahead()
        else:
            self._ahead[0] = (index, footer, batch.slice(given.num_rows))
        split = self._splits[0]
        self._splits[0] = msgspec.structs.replace(split, row=split.row + given.num_rows, footer=footer)
        return Poll(batch=Batch(columns=given))

    def _drop_ended(self) -> None:
        while self._ahead and self._ahead[0][2] is None:
            self._ahead.pop(0)
            self._splits.pop(0)
            self._read_ahead()

    def snapshot(self) -> list[bytes]:
        return [msgspec.msgpack.encode(split) for split in self._splits]

    def external_files(self) -> tuple[str, ...]:
        return ()

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        return

    def close(self) -> None:
        self._closed = True
        self._ahead.clear()


def _decode(entry: bytes, operator: str) -> FilePosition:
    try:
        position = decode_msgpack(entry, FilePosition)
    except UNDECODABLE as error:
        raise CorruptStateError(
            f"source {operator}: a position can't be read: {error}", operator=operator, reason=str(error)
        ) from error
    if position.version != 1:
        reason = f"position format {position.version} is not known to this version (1)"
        raise CorruptStateError(f"source {operator}: {reason}", operator=operator, reason=reason)
    return position


def _read_files(
    source: ParquetSource, splits: tuple[FilePosition, ...], operator: str
) -> Iterator[tuple[int, str, pa.RecordBatch | None]]:
    """Batches of the splits in order, None after each file; runs on the pool, one call at a time."""
    for split in splits:
        try:
            for footer, batch in _read_file(source, split, operator):
                yield split.index, footer, batch
        except (OSError, pa.ArrowException) as error:
            raise unavailable(error, f"source {operator}: {split.path}", path=split.path, operator=operator) from error
        yield split.index, split.footer, None


def _read_file(source: ParquetSource, split: FilePosition, operator: str) -> Iterator[tuple[str, pa.RecordBatch]]:
    footer = _check_unchanged(source.filesystem, split, operator)
    with source.filesystem.open_input_file(split.path) as handle, pq.ParquetFile(handle) as file:
        groups, skip = _groups_from(file.metadata, split.row)
        if split.row > file.metadata.num_rows:
            raise _changed(split, operator, f"{file.metadata.num_rows} rows, the position is at row {split.row}")
        names = [name for name in source.schema.names if name in file.schema_arrow.names]
        for batch in file.iter_batches(source.batch_rows, row_groups=groups, columns=names, use_threads=False):
            dropped = min(skip, batch.num_rows)
            skip -= dropped
            if dropped < batch.num_rows:
                yield footer, _conform(batch.slice(dropped), source.schema, split, operator)


def _check_unchanged(filesystem: pafs.FileSystem, split: FilePosition, operator: str) -> str:
    """Return the checksum of the file's footer. Raises InputChangedError when the file is missing or has changed."""
    try:
        with filesystem.open_input_file(split.path) as handle:
            size = handle.size()
            if size != split.size:
                raise _changed(split, operator, f"{size} bytes, it had {split.size}")
            tail = handle.read_at(_FOOTER_TAIL, max(0, size - _FOOTER_TAIL))
            length = int.from_bytes(tail[:4], "little")
            footer = checksum_of(handle.read_at(min(length, size), max(0, size - _FOOTER_TAIL - length)))
    except FileNotFoundError as error:
        raise _changed(split, operator, "missing") from error
    if split.footer and footer != split.footer:
        raise _changed(split, operator, "its footer is not the one that was read before")
    return footer


def _changed(split: FilePosition, operator: str, reason: str) -> InputChangedError:
    return InputChangedError(f"source {operator}: {split.path}: {reason}", operator=operator, path=split.path, reason=reason)


def _groups_from(metadata: Any, row: int) -> tuple[list[int], int]:
    """Row groups with rows from `row` on, and the rows to skip in the first of them."""
    first = 0
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        if row < first + rows:
            return list(range(group, metadata.num_row_groups)), row - first
        first += rows
    return [], 0


def _conform(batch: pa.RecordBatch, schema: pa.Schema, split: FilePosition, operator: str) -> pa.RecordBatch:
    """Convert a batch to the source's columns and types; a column that the file lacks is null."""
    try:
        columns = [
            batch.column(field.name).cast(field.type) if field.name in batch.schema.names else pa.nulls(batch.num_rows, field.type)
            for field in schema
        ]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise _changed(split, operator, f"its columns don't fit the source's schema: {error}") from error
    return pa.RecordBatch.from_arrays(columns, schema=schema)
