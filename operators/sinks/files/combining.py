"""The bytes of one file made of several: the same rows, in the same order.

Text is joined as it is. Parquet is read and written again, a row group at a time, since many small row groups would cost readers
what many small files do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.operators.sinks.files.formats import COMPRESSED_BYTES_MIN, ROW_GROUP_BYTES, FileFormat
from holdfast.statebackends.storage.port import Buffer


class Combiner(Protocol):
    """One file on its way."""

    def add(self, content: bytes, rows: int) -> bool:
        """Append the rows of a file; False, and nothing is appended, if it does not have that many rows, or its columns differ from
        those of the first one."""

    def finish(self) -> Sequence[Buffer]:
        """Bytes of the file."""


def combiner_of(format: FileFormat) -> Combiner:
    match format:
        case "parquet":
            return _Parquet()
        case "csv":
            return _Csv()
        case "json":
            return _Json()


class _Parquet:
    def __init__(self) -> None:
        self._target = pa.BufferOutputStream()
        self._writer: pq.ParquetWriter | None = None
        self._schema: pa.Schema | None = None
        self._held: list[pa.Table] = []
        self._held_size = 0

    def add(self, content: bytes, rows: int) -> bool:
        try:
            with pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True) as file:
                table = file.read(use_threads=False)
        except (pa.ArrowException, OSError):
            return False
        if table.num_rows != rows or (self._schema is not None and not table.schema.equals(self._schema, check_metadata=True)):
            return False
        self._schema = table.schema
        self._held.append(table)
        self._held_size += table.get_total_buffer_size()
        if self._held_size >= ROW_GROUP_BYTES:
            self._write()
        return True

    def _write(self) -> None:
        table = pa.concat_tables(self._held)
        if self._writer is None:
            compression = "zstd" if self._held_size >= COMPRESSED_BYTES_MIN else "none"
            self._writer = pq.ParquetWriter(self._target, table.schema, compression=compression, write_page_checksum=True)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._held, self._held_size = [], 0

    def finish(self) -> Sequence[Buffer]:
        if self._held:
            self._write()
        if self._writer is not None:
            self._writer.close()
        return [memoryview(self._target.getvalue())]


class _Json:
    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def add(self, content: bytes, rows: int) -> bool:
        if content.count(b"\n") != rows or content[-1:] not in (b"", b"\n"):  # within a value it is `\n`
            return False
        self._parts.append(content)
        return True

    def finish(self) -> Sequence[Buffer]:
        return self._parts


class _Csv:
    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._header = b""

    def add(self, content: bytes, rows: int) -> bool:
        outside = content.split(b'"')[::2]
        if sum(part.count(b"\n") for part in outside) != rows + 1 or content[-1:] != b"\n":
            return False
        end = _end_of_line(content)
        if not self._parts:
            self._header = content[:end]
            self._parts.append(content)
        elif content[:end] == self._header:
            self._parts.append(content[end:])
        else:
            return False
        return True

    def finish(self) -> Sequence[Buffer]:
        return self._parts


def _end_of_line(content: bytes) -> int:
    """Behind the first end of a line that is not in quotes."""
    end = 0
    while True:
        end = content.index(b"\n", end) + 1
        if content.count(b'"', 0, end) % 2 == 0:
            return end
