"""A piece of in-flight data as Arrow knows it: one IPC stream of batches, in which an event is a batch without rows.

What an event says, and what becomes of the rows, is for `barriers/alignment/inflight.py`, which writes pieces too."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.snapshot.unpacking import check_stream, checked_batch

EVENT_METADATA = b"holdfast.event"
"""Metadata of a batch that stands for an event."""
TIMESTAMPS = "_timestamp_ms"
"""The last column, where records have timestamps."""


class PieceBatch(NamedTuple):
    """One element of a channel."""

    columns: pa.RecordBatch
    """Those of the edge, then TIMESTAMPS if the records have any; no rows for an event."""
    event: bytes | None
    """JSON; None: records."""


def read_piece(data: bytes | memoryview, *, rows: int) -> tuple[pa.Schema, list[PieceBatch]]:
    """The stream's schema, and its batches in order. Raises CorruptStateError on bytes that are no such stream, or all of one; on
    one that unpacks to more than tables may; and on another number of rows."""
    try:
        schema, batches = _read(data)
    except (pa.ArrowException, ValueError, OSError, LookupError) as error:
        raise CorruptStateError(f"in-flight data that can't be read: {error}") from error
    found = sum(batch.columns.num_rows for batch in batches)
    if found != rows:
        raise CorruptStateError(f"in-flight data of {found} rows instead of {rows}")
    return schema, batches


def _read(data: bytes | memoryview) -> tuple[pa.Schema, list[PieceBatch]]:
    unpacked = check_stream(data)
    found: list[PieceBatch] = []
    with pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(data))) as reader:
        schema = reader.schema
        _check_timestamps(schema)
        while True:
            try:
                columns, metadata = reader.read_next_batch_with_custom_metadata()
            except StopIteration:
                return schema, found
            event = None if metadata is None else metadata.get(EVENT_METADATA)
            if event is not None and columns.num_rows:
                raise ValueError(f"an event with {columns.num_rows} rows")
            columns = checked_batch(columns, unpacked)
            if is_timed(schema) and columns.column(len(schema) - 1).null_count:
                raise ValueError("a record without a timestamp among others that have one")
            found.append(PieceBatch(columns, event))


def _check_timestamps(schema: pa.Schema) -> None:
    """Raises ValueError for names that are there twice, and for timestamps that are none."""
    if len(set(schema.names)) != len(schema):
        raise ValueError(f"columns of one name: {schema.names}")
    if is_timed(schema) and schema.field(len(schema) - 1).type != pa.int64():
        raise ValueError(f"timestamps of type {schema.field(len(schema) - 1).type}")


def is_timed(schema: pa.Schema) -> bool:
    """Whether the last column is that of timestamps."""
    return bool(len(schema)) and schema.names[-1] == TIMESTAMPS
