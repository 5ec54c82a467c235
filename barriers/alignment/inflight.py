"""A piece of in-flight data: consecutive elements of a channel <-> one Arrow IPC stream.

The stream has the columns of the edge, then the timestamps where the batches have any; an event is a batch without rows, whose
metadata holds it as JSON. It knows nothing of files."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa

from holdfast.barriers.elements import Batch, Element, Watermark, WatermarkStatus
from holdfast.statebackends.decoding import UNDECODABLE
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.snapshot.pieces import EVENT_METADATA, TIMESTAMPS, is_timed, read_piece

ELEMENT_BYTES = 256
"""What an element takes beside its values, about: the head of an Arrow message, of 200 to 1,500 bytes by its columns. Without it
small batches and events would count for next to nothing, and have no bound."""

_events = msgspec.json.Decoder(Watermark | WatermarkStatus)


def held_bytes(elements: Sequence[Element]) -> int:
    """What elements that are referred to count for: about what they take, in memory or stored."""
    return sum(ELEMENT_BYTES + (element.size if isinstance(element, Batch) else 0) for element in elements)


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
    schema, batches = read_piece(data, rows=rows)
    names, timed = schema.names, is_timed(schema)
    found: list[Element] = []
    for columns, event in batches:
        if event is not None:
            found.append(_event(event))
            continue
        stamps = None
        if timed:
            stamps = columns.column(len(names) - 1).to_numpy()
            columns = columns.select(names[:-1]).replace_schema_metadata(schema.metadata)
        found.append(Batch(columns=columns, timestamps=stamps))
    return found


def _event(said: bytes) -> Watermark | WatermarkStatus:
    try:
        event: Watermark | WatermarkStatus = _events.decode(said)
    except UNDECODABLE as error:
        raise CorruptStateError(f"in-flight data with an event that can't be read: {error}") from error
    return event
