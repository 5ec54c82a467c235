"""Reading one file as a split: CSV and JSON lines block by block, Parquet by row groups. A position is exact for any row.

A text file is cut into blocks of whole records, which follow from its bytes alone: the position of a row is where its block begins,
and how many of the block's rows are in front of it. So a restore reads one block again, not the file.

A failure while the file's bytes were read is the storage's, and may pass; any other one is the file's content, and stays."""

from __future__ import annotations

import gzip
import io
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.fs as pafs
import pyarrow.json as pajson
import pyarrow.parquet as pq

from holdfast.operators.sources.hive import repeated, values_of
from holdfast.operators.sources.splits import AssignedSplit, Position, SourceSplit, SplitReader, SplitRecords
from holdfast.statebackends.errors import InputChangedError, InvalidConfigError, InvalidRecordError
from holdfast.statebackends.storage.failures import unavailable

BLOCK_BYTES = 1024 * 1024
"""Of a block of text, but for the end of its last record."""
LINE_BYTES_MAX = 256 * 1024 * 1024
"""Of one line, or of one CSV record of several."""
BATCH_ROWS = 65_536

_OUTSIDE_QUOTES = re.compile(rb'(?:[^"]++|(?<=[^,\r\n])"|"[^"]*+(?:""[^"]*+)*+")*+')
"""From the beginning of a field on: all up to the end, or up to a quote that is not closed. A quote in a field that does not begin
with one, or behind its closing one, is a character as any other: Arrow's rules."""
_INSIDE_QUOTES = re.compile(rb'[^"]*+(?:""[^"]*+)*+"')
"""In a quoted field: its rest."""
_MARK = b"\xef\xbb\xbf"
"""A byte order mark of UTF-8."""
_BLANK_CSV, _BLANK_JSON = b"\r\n", b" \t\r\n"
"""What a block without a record consists of: a space is a text in CSV."""
_NONE_WANTED = pa.schema([("\0", pa.null())])
"""In place of no column of a file of JSON: its rows are counted, whatever their fields are. Without any, Arrow would take them all,
and refuse one that has a number here and a text there."""
_ARROW_BLOCK_BYTES = LINE_BYTES_MAX + BLOCK_BYTES
_BUFFER_BYTES = 256 * 1024
_UNREADABLE = (pa.ArrowException, OSError, EOFError, zlib.error, ValueError, KeyError)
"""What reading and decoding a file raises."""


class _Watched(io.RawIOBase):
    """A file that keeps the error of a read that failed."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.error: Exception | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._kept(self._file.tell))

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._kept(self._file.seek, offset, whence))

    def read(self, size: int | None = -1) -> bytes:
        found: bytes = self._kept(self._file.read, None if size is None or size < 0 else size)
        return found

    def readinto(self, target: Any) -> int:
        return int(self._kept(self._file.readinto, target))

    def read_buffer(self, size: int | None = None) -> pa.Buffer:
        """As Arrow reads, without a copy."""
        return self._kept(self._file.read_buffer, size)

    def close(self) -> None:
        """Nothing: readers of parts of the file close what they have, and the file stays open."""

    def _kept(self, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as error:
            self.error = error
            raise


class FileSplit(SourceSplit, frozen=True):
    """A file, as it was listed; its id is its path."""

    size: int
    """Bytes."""
    modified_ns: int
    """ns since the epoch; 0 where the file system does not say."""


def open_filesystem(path: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a folder or URL, and the path there. S3 is where the environment's variables say, as for boto3."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if not path.startswith("s3://") or not endpoint:
        return pafs.FileSystem.from_uri(path)  # type: ignore[no-any-return]
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    scheme, _, address = endpoint.rpartition("://")
    return pafs.S3FileSystem(endpoint_override=address, scheme=scheme or "https", region=region), path.removeprefix("s3://")


def parquet_schema(path: str, files: Sequence[str]) -> pa.Schema:
    """Columns of the first of these files. Raises InvalidConfigError where there is none."""
    if not files:
        raise InvalidConfigError(f"{path}: there is no Parquet file to take the columns from: give schema=", setting="schema")
    filesystem, _ = open_filesystem(path)
    try:
        with filesystem.open_input_file(files[0]) as handle:
            return pq.read_schema(handle)
    except (OSError, pa.ArrowException) as error:
        raise InvalidConfigError(f"{files[0]} can't be read as Parquet: {error}", path=files[0]) from error


class FileSplitReader(SplitReader[FileSplit]):
    """Reads files one after the other."""

    def __init__(self, path: str, format: str, schema: pa.Schema, operator: str) -> None:
        self._path = path
        self._format = format
        self._schema = schema
        self._operator = operator
        self._splits: list[AssignedSplit[FileSplit]] = []
        self._current: Iterator[SplitRecords] = iter(())

    def open(self) -> None:
        self._filesystem, self._root = open_filesystem(self._path)

    def add_splits(self, splits: Sequence[AssignedSplit[FileSplit]]) -> None:
        self._splits += splits

    def fetch(self) -> Sequence[SplitRecords]:
        records = next(self._current, None)
        if records is None and self._splits:
            self._current = self._read(self._splits.pop(0))
            records = next(self._current, None)
        return () if records is None else (records,)

    def _read(self, assigned: AssignedSplit[FileSplit]) -> Iterator[SplitRecords]:
        """Batches of a file from a position on; the last one says that it has ended, and that the file is still the same."""
        path = assigned.split_id
        read = {"csv": self._read_csv, "json": self._read_json, "parquet": self._read_parquet}[self._format]
        self._partition = values_of(path.removeprefix(self._root))
        self._held = pa.schema([field for field in self._schema if field.name not in self._partition])
        try:
            self._check_unchanged(assigned.split)
            with self._filesystem.open_input_file(path) as file:
                yield from read(_Watched(file), path, assigned.position)
            self._check_unchanged(assigned.split)
        except FileNotFoundError as error:
            raise self._changed(path, "it is missing") from error
        except (OSError, pa.ArrowException) as error:
            raise unavailable(error, f"source {self._operator}: {path}", path=path, operator=self._operator) from error
        yield SplitRecords(path, finished=True)

    def _unreadable(self, file: _Watched, path: str, position: Position, error: Exception) -> Exception:
        """What to raise for a failure at a position: the storage's own error, which may pass, or one that names the record."""
        return file.error if file.error is not None else self._invalid(path, position, str(error))

    def _check_unchanged(self, split: FileSplit) -> None:
        info = self._filesystem.get_file_info(split.split_id)
        if info.type == pafs.FileType.NotFound:
            raise self._changed(split.split_id, "it is missing")
        if info.size != split.size or int(info.mtime_ns or 0) != split.modified_ns:
            raise self._changed(split.split_id, f"{info.size} bytes of {info.mtime}, it had {split.size}: it has changed")

    def _changed(self, path: str, reason: str) -> InputChangedError:
        return InputChangedError(f"source {self._operator}: {path}: {reason}", operator=self._operator, path=path, reason=reason)

    # ------------------------------------------------------------------------------------------------------------- text

    def _read_csv(self, file: _Watched, path: str, position: Position) -> Iterator[SplitRecords]:
        header = self._block(file, path, self._open_text(file, path, 0), 0, 0)
        if not header:
            return
        names = self._csv_names(path, header)
        missing = [name for name in self._held.names if name not in names]
        if missing:
            raise self._invalid(path, (0, 0), f"its header has no column {missing[0]!r}: {', '.join(names)}")
        convert = csv_conversion(self._held)
        read = pacsv.ReadOptions(column_names=names, use_threads=False, block_size=_ARROW_BLOCK_BYTES)
        parse = pacsv.ParseOptions(newlines_in_values=True)
        table = lambda block: pacsv.read_csv(pa.BufferReader(block), read, parse, convert)  # noqa: E731
        yield from self._blocks(file, path, position or (len(header), 0), table)

    def _csv_names(self, path: str, header: bytes) -> list[str]:
        read = pacsv.ReadOptions(use_threads=False, block_size=_ARROW_BLOCK_BYTES)
        parse = pacsv.ParseOptions(newlines_in_values=True)
        try:
            table = pacsv.read_csv(pa.BufferReader(header.removeprefix(_MARK)), read, parse)
        except (pa.ArrowException, ValueError) as error:
            raise self._invalid(path, (0, 0), f"its header: {error}") from error
        if table.num_rows:  # they would be taken for a part of the header, and be in no block
            raise self._invalid(path, (0, 0), "its header ends with a carriage return alone: lines end with a line feed")
        return list(table.column_names)

    def _read_json(self, file: _Watched, path: str, position: Position) -> Iterator[SplitRecords]:
        read = pajson.ReadOptions(use_threads=False, block_size=_ARROW_BLOCK_BYTES)
        parse = json_parsing(self._held if self._held.names else _NONE_WANTED)

        def table(block: bytes) -> pa.Table:
            _check_json(block)
            return pajson.read_json(pa.BufferReader(block), read, parse)

        yield from self._blocks(file, path, position or (0, 0), table)

    def _blocks(self, file: _Watched, path: str, position: Position, parse: Any) -> Iterator[SplitRecords]:
        start, skip = position
        blank = _BLANK_CSV if self._format == "csv" else _BLANK_JSON
        text = self._open_text(file, path, start)
        while block := self._block(file, path, text, start, BLOCK_BYTES):
            stop = start + len(block)
            if block.strip(blank):
                columns = self._fitting(path, (start, 0), parse, block)
                if skip > columns.num_rows:
                    raise self._changed(path, f"the block at byte {start} has {columns.num_rows} rows, {skip} were read of it")
                yield _records(path, columns.slice(skip), _in_block(start, stop, skip, columns.num_rows))
            start, skip = stop, 0

    def _open_text(self, file: _Watched, path: str, start: int) -> Any:
        """The file's text from a byte on, without its compression. What is compressed is read from its beginning."""
        is_compressed = path.endswith(".gz")
        file.seek(0 if is_compressed else start)
        buffered = io.BufferedReader(file, _BUFFER_BYTES)
        if not is_compressed:
            return buffered
        text, left = gzip.GzipFile(fileobj=buffered), start
        try:
            while left and (skipped := len(text.read(min(left, BLOCK_BYTES)))):
                left -= skipped
        except _UNREADABLE as error:
            raise self._unreadable(file, path, (start, 0), error) from error
        return text

    def _block(self, file: _Watched, path: str, text: Any, start: int, size: int) -> bytes:
        """The next whole records: of `size` bytes and what completes the last of them. Size 0: one record. Empty at the end."""
        try:
            parts = [text.read(size) if size else b""]
            if size and not parts[0]:
                return b""
            if not parts[0].endswith(b"\n"):
                parts.append(text.readline(LINE_BYTES_MAX + 1))
            block = b"".join(parts)
            parts, length = [block], len(block)
            in_quotes = self._format == "csv" and _ends_in_quotes(block)
            while in_quotes and length <= LINE_BYTES_MAX:
                line = text.readline(LINE_BYTES_MAX + 1)
                if not line:
                    raise self._invalid(path, (start, 0), "its last field begins with a quote and has no closing one")
                in_quotes = _stays_in_quotes(line)
                parts.append(line)
                length += len(line)
        except _UNREADABLE as error:
            raise self._unreadable(file, path, (start, 0), error) from error
        if in_quotes or length > LINE_BYTES_MAX + size:
            raise self._invalid(path, (start, 0), f"a line of more than {LINE_BYTES_MAX:,} bytes")
        return b"".join(parts)

    def _fitting(self, path: str, position: Position, parse: Any, block: bytes) -> pa.RecordBatch:
        try:
            table = parse(block)
            table = (table.select(self._held.names) if self._held.names else table).combine_chunks()
        except (pa.ArrowException, ValueError, KeyError) as error:
            raise self._invalid(path, position, str(error)) from error
        found = table.to_batches()
        columns = found[0] if found else pa.RecordBatch.from_pylist([], schema=self._schema)
        return self._conform(path, position, columns)

    # ---------------------------------------------------------------------------------------------------------- Parquet

    def _read_parquet(self, file: _Watched, path: str, position: Position) -> Iterator[SplitRecords]:
        first = position[0] if position else 0
        row = first
        try:
            parquet = pq.ParquetFile(file, page_checksum_verification=True)
            names = [name for name in self._held.names if name in parquet.schema_arrow.names] or parquet.schema_arrow.names[:1]
            groups, row = _groups_from(parquet.metadata, first)
            batches = parquet.iter_batches(BATCH_ROWS, row_groups=groups, columns=names, use_threads=False)
            while (batch := next(batches, None)) is not None:
                skip = max(0, min(first - row, batch.num_rows))
                if skip < batch.num_rows:
                    columns = self._conform(path, (row + skip,), batch.slice(skip))
                    yield _records(path, columns, np.arange(row + skip + 1, row + batch.num_rows + 1, dtype=np.int64))
                row += batch.num_rows
        except _UNREADABLE as error:
            raise self._unreadable(file, path, (max(first, row),), error) from error

    def _conform(self, path: str, position: Position, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The source's columns and types; a column that a file lacks is null. Raises InvalidRecordError."""
        columns = []
        for field in self._schema:
            try:
                if field.name in self._partition:
                    found = repeated(self._partition[field.name], field.type, batch.num_rows)
                else:
                    found = batch.column(field.name) if field.name in batch.schema.names else pa.nulls(batch.num_rows, field.type)
                columns.append(found if found.type == field.type else found.cast(field.type))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise self._invalid(path, position, f"column {field.name!r}: {error}") from error
            if not field.nullable and columns[-1].null_count:
                raise self._invalid(path, position, f"column {field.name!r} is null")
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _invalid(self, path: str, position: Position, reason: str) -> InvalidRecordError:
        where = f"from {'byte' if self._format != 'parquet' else 'row'} {position[0]} on"
        message = f"source {self._operator}: {path}, {where}: {reason}"
        return InvalidRecordError(message, operator=self._operator, split=path, position=position, reason=reason)


def csv_conversion(schema: pa.Schema, *, include_missing_columns: bool = False) -> pacsv.ConvertOptions:
    """What is not quoted and empty is null, and nothing else: a country may be NA, and a number NaN."""
    return pacsv.ConvertOptions(
        column_types={field.name: field.type for field in schema},
        include_columns=schema.names,
        include_missing_columns=include_missing_columns,
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )


def json_parsing(schema: pa.Schema) -> pajson.ParseOptions:
    """Columns that have to be cast to the schema behind it: Arrow reads no date from text, and times of us alone."""
    fields = [field.with_type(_as_read(field.type)) for field in schema]
    return pajson.ParseOptions(explicit_schema=pa.schema(fields), unexpected_field_behavior="ignore")


def _check_json(block: bytes) -> None:
    """Raises ValueError for what Arrow does not refuse: bytes that are no text, and a line that is `null`, which ends the process
    if it is the first one, and else is a row of nulls."""
    block.decode()
    if block.removeprefix(_MARK).lstrip(_BLANK_JSON).startswith(b"null") or (
        b"\nnull" in block and any(line.strip(_BLANK_JSON) == b"null" for line in block.split(b"\n"))
    ):
        raise ValueError("a record is null, and no JSON object")


def _as_read(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    return pa.string() if pa.types.is_date(kind) else kind


def _records(path: str, columns: pa.RecordBatch, positions: npt.NDArray[np.int64]) -> SplitRecords:
    return SplitRecords(path, columns, positions)


def _in_block(start: int, stop: int, skip: int, rows: int) -> npt.NDArray[np.int64]:
    """Positions behind each row of a block but the first `skip`; behind the last row is the next block."""
    positions = np.empty((rows - skip, 2), np.int64)
    positions[:, 0] = start
    positions[:, 1] = np.arange(skip + 1, rows + 1)
    if rows > skip:
        positions[-1] = stop, 0
    return positions


def _ends_in_quotes(block: bytes) -> bool:
    """Whether text that begins with a record ends in a quoted field."""
    outside = _OUTSIDE_QUOTES.match(block) if b'"' in block else None
    return outside is not None and outside.end() < len(block)


def _stays_in_quotes(line: bytes) -> bool:
    """Whether text that begins in a quoted field ends in one."""
    closed = _INSIDE_QUOTES.match(line)
    if closed is None:
        return True
    outside = _OUTSIDE_QUOTES.match(line, closed.end())
    return outside is not None and outside.end() < len(line)


def _groups_from(metadata: Any, row: int) -> tuple[list[int], int]:
    """Row groups with rows from `row` on, and the first row of the first of them."""
    first = 0
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        if row < first + rows:
            return list(range(group, metadata.num_row_groups)), first
        first += rows
    return [], first
