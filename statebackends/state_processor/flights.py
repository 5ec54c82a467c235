"""In-flight records of a snapshot as rows, for tools: those of one edge, whatever end of it stored them.

Watermarks and statuses between them are no rows, and are passed over. What a piece is, is for snapshot/pieces.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.handles import ChannelPiece, ChannelState
from holdfast.statebackends.snapshot.in_flight import EdgeName, describe_edge, edge_name, storing_uid
from holdfast.statebackends.snapshot.pieces import PieceBatch, read_piece
from holdfast.statebackends.state_processor.contents import StoredSnapshot
from holdfast.statebackends.state_processor.reading import PartReader
from holdfast.statebackends.state_processor.values import python_values

OWN = pa.schema([("side", pa.utf8()), ("producer", pa.int32()), ("consumer", pa.int32()), ("position", pa.int64())])
"""Columns before those of the edge: who stored the record (`input`: the reader of the edge), the subtasks at the channel's ends,
and its place in the channel, from 0."""

_encoder = msgspec.msgpack.Encoder(enc_hook=repr)


@dataclass(frozen=True, slots=True)
class StoredFlight:
    """In-flight records of one edge."""

    name: EdgeName
    channels: tuple[ChannelState, ...]

    def corrupt(self, reason: str, state: ChannelState) -> CorruptStateError:
        """The error for damage of what one end stored."""
        uid = storing_uid(state)
        where = f"in-flight records of {describe_edge(self.name)}, {state.side} side of subtask {state.subtask}"
        return CorruptStateError(f"{where}: {reason}", operator=uid, subtask=state.subtask, reason="contents")


def flights_of(snapshot: StoredSnapshot, uid: str | None = None) -> tuple[StoredFlight, ...]:
    """Edges with records in flight, in the snapshot's order: all, or those from and to one operator."""
    found: dict[EdgeName, list[ChannelState]] = {}
    for state in snapshot.metadata.in_flight:
        if uid in (None, state.source, state.target):
            found.setdefault(edge_name(state), []).append(state)
    return tuple(StoredFlight(name, tuple(states)) for name, states in found.items())


def flight_schema(reader: PartReader, flight: StoredFlight) -> pa.Schema:
    """Columns of `flight_batches`: OWN, then those of the edge; one that has such a name is `row.<name>`.

    Raises CorruptStateError."""
    found = OWN
    for state, _, schema, batches in _pieces(reader, flight):
        if any(batch.event is None for batch in batches):
            try:
                found = pa.unify_schemas([found, _shown(schema)])
            except pa.ArrowException as error:
                raise flight.corrupt(f"columns that other pieces have otherwise: {error}", state) from error
    return found


def flight_batches(reader: PartReader, flight: StoredFlight, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The records, in the order of each channel. `schema`: of `flight_schema`. Raises CorruptStateError."""
    counts: dict[tuple[int, int], int] = {}
    for state, piece, own, batches in _pieces(reader, flight):
        ends = (piece.peer, state.subtask) if state.side == "input" else (state.subtask, piece.peer)
        for columns, event in batches:
            if event is None:
                start = counts.get(ends, 0)
                counts[ends] = start + columns.num_rows
                yield _placed(columns.rename_columns(_shown(own).names), state.side, ends, start, schema)


def flight_rows(reader: PartReader, flight: StoredFlight | None) -> Counter[bytes]:
    """The records of an edge as a bag, with their timestamps, each as a digest of 16 bytes. Raises CorruptStateError."""
    found: Counter[bytes] = Counter()
    for _, _, schema, batches in _pieces(reader, flight) if flight is not None else ():
        names = _encoder.encode(schema.names)
        for columns, event in batches:
            if event is None:
                values = [python_values(column) for column in columns.columns]
                rows = zip(*values, strict=True) if values else repeat((), columns.num_rows)
                found.update(xxhash.xxh3_128_digest(names + _encoder.encode(row)) for row in rows)
    return found


def _pieces(
    reader: PartReader, flight: StoredFlight
) -> Iterator[tuple[ChannelState, ChannelPiece, pa.Schema, list[PieceBatch]]]:
    """The pieces, of each channel those first that its reader stored, with their schemas and batches."""
    for state in sorted(flight.channels, key=lambda state: state.side != "input"):
        data = memoryview(reader.read(state.part, operator=storing_uid(state), subtask=state.subtask))
        for piece in state.pieces:
            try:
                schema, batches = read_piece(data[piece.offset : piece.offset + piece.length], rows=piece.rows)
            except CorruptStateError as error:
                raise flight.corrupt(error.message, state) from error
            yield state, piece, schema, batches


def _shown(schema: pa.Schema) -> pa.Schema:
    return pa.schema([(f"row.{field.name}" if field.name in OWN.names else field.name, field.type) for field in schema])


def _placed(columns: pa.RecordBatch, side: str, ends: tuple[int, int], start: int, schema: pa.Schema) -> pa.RecordBatch:
    count = columns.num_rows
    found: dict[str, pa.Array] = {
        "side": pa.repeat(side, count),
        "producer": pa.repeat(pa.scalar(ends[0], pa.int32()), count),
        "consumer": pa.repeat(pa.scalar(ends[1], pa.int32()), count),
        "position": pa.array(np.arange(start, start + count, dtype=np.int64)),
        **dict(zip(columns.schema.names, columns.columns, strict=True)),
    }
    arrays = [found[field.name].cast(field.type) if field.name in found else pa.nulls(count, field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
