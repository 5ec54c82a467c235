"""A piece of in-flight data: consecutive elements of a channel <-> one Arrow IPC stream.

The stream has the columns of the edge, then the timestamps where the batches have any; an event is a batch without rows, whose
metadata holds it as JSON. It knows nothing of files."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa

from holdfast.barriers.elements import Batch, Element, Watermark, WatermarkStatus
from holdfast.statebackends.errors import CorruptStateError

EVENT_METADATA = b"holdfast.event"
TIMESTAMPS = "_timestamp_ms"
END_OF_STREAM_BYTES = 8
"""What Arrow writes behind the last batch: a mark, and a length of 0."""

_events = msgspec.json.Decoder(Watermark | WatermarkStatus)


def encode(elements: Sequence[Element]) -> bytes:
    """One stream. The batches have one schema, and all or none have timestamps; other events than those of time are left out."""
    batches = [element for element in elements if isinstance(element, Batch)]
    schema = batches[0].columns().schema if batches else pa.schema([])
    if batches and batches[0].timestamps is not None:
        schema = schema.append(pa.field(TIMESTAMPS, pa.int64(), nullable=False))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for element in elements:
            if isinstance(element, Batch):
                writer.write_batch(_with_timestamps(element, schema))
            elif isinstance(element, Watermark | WatermarkStatus):
                event = {EVENT_METADATA: msgspec.json.encode(element)}
                writer.write_batch(pa.RecordBatch.from_pylist([], schema), custom_metadata=event)
    return bytes(sink.getvalue())


def _with_timestamps(batch: Batch, schema: pa.Schema) -> pa.RecordBatch:
    columns = batch.columns()
    if batch.timestamps is None:
        return columns
    stamps = pa.array(np.ascontiguousarray(batch.timestamps, np.int64))
    return pa.RecordBatch.from_arrays([*columns.columns, stamps], schema=schema)


def decode(data: bytes | memoryview, *, rows: int) -> list[Element]:
    """The elements of one stream. Raises CorruptStateError on bytes that are none, or that have another number of rows."""
    try:
        elements = list(_elements(data))
    except (pa.ArrowException, msgspec.MsgspecError, ValueError, OSError, LookupError) as error:
        raise CorruptStateError(f"in-flight data that can't be read: {error}") from error
    found = sum(element.num_rows for element in elements if isinstance(element, Batch))
    if found != rows:
        raise CorruptStateError(f"in-flight data of {found} rows instead of {rows}")
    return elements


def _elements(data: bytes | memoryview) -> list[Element]:
    found: list[Element] = []
    source = pa.BufferReader(pa.py_buffer(data))
    with pa.ipc.open_stream(source) as reader:
        names = reader.schema.names
        timed = bool(names) and names[-1] == TIMESTAMPS
        while True:
            read_bytes = source.tell()
            try:
                columns, metadata = reader.read_next_batch_with_custom_metadata()
            except StopIteration:
                # Arrow takes a stream that stops between two batches for a whole one: events at its end would be missing.
                if source.tell() - read_bytes != END_OF_STREAM_BYTES or source.tell() != len(data):
                    raise ValueError(f"the stream of {len(data)} bytes is cut off, or something follows its end") from None
                return found
            if metadata is not None and EVENT_METADATA in metadata:
                found.append(_events.decode(metadata[EVENT_METADATA]))
                continue
            columns.validate(full=True)
            stamps = None
            if timed:
                stamps = columns.column(len(names) - 1).to_numpy()
                columns = columns.select(names[:-1]).replace_schema_metadata(reader.schema.metadata)
            found.append(Batch(columns=columns, timestamps=stamps))
