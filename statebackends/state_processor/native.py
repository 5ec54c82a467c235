"""Native RocksDB files of one old subtask as batches of the same columns as a table's: a read-only open of a local clone.

Opening a database writes into its folder, and RocksDB needs names of its own, hence the clone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec
import pyarrow as pa

from holdfast.statebackends.errors import CorruptStateError, StateValueError
from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.rocksdb.database import RocksStore
from holdfast.statebackends.rocksdb.row_keys import RowKey
from holdfast.statebackends.serialization.state_serializer import StateCodec
from holdfast.statebackends.state_processor.contents import StoredState
from holdfast.statebackends.state_processor.tables import BATCH_ROWS
from holdfast.statebackends.state_processor.values import named

_MEMORY_BYTES = 8 << 20
"""Block cache: one pass, no reuse."""

_ELEMENTS = msgspec.msgpack.Decoder(list[bytes])


def native_batches(
    clone: str, state: StoredState, codec: StateCodec, schema: pa.Schema, groups: KeyGroupRange
) -> Iterator[pa.RecordBatch]:
    """Rows of one state in some key groups, in key-group order. Raises CorruptStateError naming operator and state."""
    try:
        store = RocksStore(clone, write_buffer_bytes=_MEMORY_BYTES, block_cache_bytes=_MEMORY_BYTES, read_only=True)
    except CorruptStateError as error:
        raise named(error, state) from error
    try:
        state_id = store.state_ids.get(state.meta.name)
        if state_id is None:
            return
        rows = store.state_rows(state_id, groups)
        while piece := list(islice(rows, BATCH_ROWS)):
            try:
                batch = _batch(state, codec, schema, piece)
            except (CorruptStateError, StateValueError) as error:
                raise named(error, state) from error
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(start, BATCH_ROWS)
    finally:
        store.close()


def _batch(state: StoredState, codec: StateCodec, schema: pa.Schema, rows: list[tuple[RowKey, bytes]]) -> pa.RecordBatch:
    keys, values = zip(*rows, strict=True)
    columns = [
        pa.array([key.key_group for key in keys], pa.int32()),
        *state.key_type().arrays_of_encoded([key.key for key in keys]),
        pa.array([key.namespace for key in keys], pa.binary()),
    ]
    decoded: list[Any] = []
    if codec.kind == "list":
        owners: list[int] = []
        positions: list[int] = []
        for row, value in enumerate(values):
            elements = _elements(value)
            owners += [row] * len(elements)
            positions += range(len(elements))
            decoded += map(codec.decode_value, elements)
        columns = [column.take(pa.array(owners, pa.int64())) for column in columns]
        columns.append(pa.array(positions, pa.int32()))
    else:
        decoded += map(codec.decode_value, values)
    if codec.map_key is not None:
        columns.append(codec.map_key.to_arrow([codec.map_key.decode(key.map_key) for key in keys]))
    columns += codec.to_arrays(decoded)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _elements(value: bytes) -> list[bytes]:
    try:
        return _ELEMENTS.decode(value)
    except msgspec.MsgspecError as error:
        raise CorruptStateError(f"not a list: {error}", reason="value encoding") from error
