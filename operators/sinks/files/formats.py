"""The formats of a file sink's files: which columns they preserve, and the bytes of rows, there and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.json as pajson
import pyarrow.parquet as pq

from holdfast.operators.sinks.files.json_rows import json_lines
from holdfast.operators.sources.file_formats import csv_conversion, json_parsing
from holdfast.statebackends.errors import GraphError, InvalidConfigError
from holdfast.statebackends.storage.port import Buffer

FileFormat = Literal["parquet", "json", "csv"]
SUFFIXES: dict[FileFormat, str] = {"parquet": "parquet", "json": "jsonl", "csv": "csv"}
"""Format -> ending of a file's name."""

COMPRESSED_BYTES_MIN = 8 * 1024
"""Bytes of a file's rows in memory from which it is compressed. For a smaller file the compressor alone takes as long as everything
else, when writing and when reading."""
ROW_GROUP_BYTES = 32 << 20
"""Bytes of rows in memory from which they are a row group of Parquet: what a reader can take of a file, and several can share."""
_ROWS_AT_ONCE = 10_000
"""Rows that are made text at one time."""
_READ_BYTES_MAX = (1 << 31) - 1
"""Of a block that Arrow reads at once: its bound for one."""


def checked_format(given: str) -> FileFormat:
    """Raises InvalidConfigError."""
    if given not in get_args(FileFormat):
        raise InvalidConfigError(f"format is {given!r}, must be one of {', '.join(SUFFIXES)}", setting="format")
    return given  # type: ignore[return-value]


def format_of(name: str) -> FileFormat:
    """Format of a file, by its name."""
    ending = name.rpartition(".")[2]
    return next((format for format, suffix in SUFFIXES.items() if suffix == ending), "parquet")


def check_columns(format: FileFormat, schema: pa.Schema, sink: str) -> None:
    """Raise GraphError for a column that files of this format do not preserve."""
    for field in schema:
        if pa.types.is_timestamp(field.type) and field.type.unit == "ns":
            raise GraphError(f"sink {sink}: column {field.name} holds nanoseconds, use microseconds", column=field.name)
        if pa.types.is_decimal(field.type) and field.type.scale < 0:
            message = f"sink {sink}: column {field.name} is {field.type}: {format} files have no decimals of negative scale"
            raise GraphError(message, column=field.name)
        if format == "parquet":
            check_parquet(field, sink)
            continue
        if not (_is_text(field.type) or (format == "json" and _is_list_of_text(field.type))):
            message = f"sink {sink}: column {field.name} is {field.type}, which {format} files can't hold"
            raise GraphError(message, column=field.name)


def check_parquet(field: pa.Field, sink: str) -> None:
    """Raise GraphError for a column that Parquet can't hold: no checkpoint with rows of it would ever be complete."""
    try:
        pq.write_table(pa.schema([field]).empty_table(), pa.BufferOutputStream())
    except (pa.ArrowException, OSError) as error:
        message = f"sink {sink}: column {field.name} is {field.type}, which Parquet files can't hold: {error}"
        raise GraphError(message, column=field.name) from error


def check_blank_lines(format: FileFormat, schema: pa.Schema, partition_by: Sequence[str], sink: str) -> None:
    """Raise GraphError for rows that would be blank lines: most readers of CSV, Spark's among them, pass over these."""
    written = [field for field in schema if field.name not in partition_by]
    if format == "csv" and len(written) == 1 and written[0].nullable:
        name = written[0].name
        raise GraphError(
            f"sink {sink}: column {name} is the only one of its CSV files, where null is a blank line, which Spark and others pass "
            "over: declare it as never null, add a column, or take another format",
            column=name,
        )


def _is_text(kind: pa.DataType) -> bool:
    """Whether a value is one of a text file, that is read as it was written."""
    types = pa.types
    floating = types.is_float32(kind) or types.is_float64(kind)
    known = types.is_boolean(kind), types.is_integer(kind), floating, types.is_decimal128(kind)
    is_time = types.is_date(kind) or types.is_timestamp(kind)
    return any(known) or is_time or types.is_string(kind) or types.is_large_string(kind)


def _is_list_of_text(kind: pa.DataType) -> bool:
    if not (pa.types.is_struct(kind) or pa.types.is_list(kind)):
        return False
    parts = [kind.field(index).type for index in range(kind.num_fields)]
    return all((_is_text(part) and not pa.types.is_temporal(part)) or _is_list_of_text(part) for part in parts)


def encode(
    format: FileFormat, batches: Sequence[pa.RecordBatch], schema: pa.Schema, *, is_output: bool = True
) -> Sequence[Buffer]:
    """Bytes of a file: the same for the same rows. is_output=False: Parquet for a committer alone, which reads it once: without
    dictionaries of the values, and compressed by what takes least time rather than least room."""
    table = pa.Table.from_batches(batches, schema)
    target = pa.BufferOutputStream()
    match format:
        case "parquet":
            codec = "zstd" if is_output else "lz4"
            compression = codec if table.get_total_buffer_size() >= COMPRESSED_BYTES_MIN else "none"
            rows = _group_rows(table) if is_output else max(1, table.num_rows)
            settings = {"compression": compression, "use_dictionary": is_output, "row_group_size": rows}
            pq.write_table(table, target, write_page_checksum=True, **settings)
        case "csv":
            pacsv.write_csv(table.cast(_in_utc(table.schema)), target)
        case "json":
            return [json_lines(some) for some in table.to_batches(_ROWS_AT_ONCE)]
    return [memoryview(target.getvalue())]


def _in_utc(schema: pa.Schema) -> pa.Schema:
    """With times in UTC: Arrow writes those of a zone without the seconds of its offset, which many had before 1940."""
    zoned = [field for field in schema if pa.types.is_timestamp(field.type) and field.type.tz is not None]
    types = {field.name: pa.timestamp(field.type.unit, "UTC") for field in zoned}
    return pa.schema([field.with_type(types.get(field.name, field.type)) for field in schema])


def _group_rows(table: pa.Table) -> int:
    """Rows of a row group: even ones, of ROW_GROUP_BYTES at most, about."""
    size, rows = int(table.nbytes), int(table.num_rows)
    return max(1, -(-rows // max(1, -(-size // ROW_GROUP_BYTES))))


def decode(format: FileFormat, data: bytes, schema: pa.Schema) -> pa.Table:
    """Rows of a file. schema: columns of a text file; one that it lacks is null. Without any, the rows have what the file says."""
    source = pa.BufferReader(data)
    match format:
        case "parquet":
            return pq.read_table(source, page_checksum_verification=True)
        case "csv":
            rows = pacsv.read_csv(
                source,
                pacsv.ReadOptions(block_size=_READ_BYTES_MAX, use_threads=False),
                pacsv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),  # null in the only column is one
                csv_conversion(schema, include_missing_columns=True),
            )
            return rows.cast(schema) if schema.names else rows
        case "json":
            read = pajson.ReadOptions(block_size=_READ_BYTES_MAX, use_threads=False)
            if not data:
                return schema.empty_table()
            if not schema.names:
                return pajson.read_json(source, read)
            return pajson.read_json(source, read, json_parsing(schema)).select(schema.names).cast(schema)
