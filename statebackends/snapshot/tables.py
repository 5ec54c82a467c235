"""Keyed state as tables: the canonical form, which every backend reads, and other tools without Holdfast.

Columns: key_group, key (or key_0, key_1 ... for a tuple), namespace, map_key (map state), position (list state), then the
value column or the columns of the state's own, ttl_stamp_ms (state with TTL). Rows are sorted by key group, so that a rescale reads
a slice. Files are Arrow IPC or Parquet, with the StateMeta in their schema. The format is described in docs/snapshot-format.md;
what rows must be is for row_rules.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.statebackends.errors import InvariantError
from holdfast.statebackends.handles import KeyGroupRange, StateMeta
from holdfast.statebackends.layout import KEY_GROUP, MAP_KEY, NAMESPACE, POSITION, STATE_METADATA, VALUE
from holdfast.statebackends.serialization.keys import KeyType, key_columns
from holdfast.statebackends.snapshot.sorting import LARGE_POOL, RowStream, is_sorted, stable_order
from holdfast.statebackends.storage.port import Buffer

TableFormat = Literal["arrow", "parquet"]
_ROW_GROUP_ROWS = 1 << 17
_COMPRESSED_BYTES_MIN = 64 * 1024
_PIECE_BYTES_MIN = 4 * 1024
"""Bytes from which a buffer is a piece of its own: each is a system call."""
_FILE_BYTES = 256 * 1024
"""Room for schema and footer, and for what a compressor adds to many small columns."""


def keyed_table_schema(
    key_type: KeyType,
    meta: StateMeta,
    values: pa.DataType | Sequence[pa.Field],
    *,
    map_key: pa.DataType | None = None,
    namespace: pa.DataType = pa.binary(),  # noqa: B008 - immutable
) -> pa.Schema:
    """Schema of one state's table. `values`: type of the column `value`, or the columns of the state's own. `map_key`: key type of
    map state. `namespace`: binary, or int64 for columnar state.

    List state has a row per element, numbered by `position`; map state a row per entry."""
    fields = [pa.field(KEY_GROUP, pa.int32(), nullable=False)]
    fields += [
        pa.field(name, field.arrow_type, nullable=False) for name, field in zip(key_columns(key_type), key_type.fields, strict=True)
    ]
    fields.append(pa.field(NAMESPACE, namespace, nullable=False))
    if map_key is not None:
        fields.append(pa.field(MAP_KEY, map_key))
    if meta.kind == "list":
        fields.append(pa.field(POSITION, pa.int32(), nullable=False))
    fields += [pa.field(VALUE, values)] if isinstance(values, pa.DataType) else list(values)
    return pa.schema(fields, metadata={STATE_METADATA: msgspec.json.encode(meta)})


def sort_by_key_group(table: pa.Table) -> pa.Table:
    """The rows in key-group order; rows of one key group keep their order."""
    groups = key_groups_of(table)
    return table if is_sorted(groups) else _taken(table, stable_order(groups))


def encode_keyed_table(rows: pa.Table | RowStream, table_format: TableFormat, *, compresses: bool = True) -> pa.Buffer:
    """The bytes of a table's file; without `compresses` Arrow's buffers are as they are in memory, whatever their size.

    Raises InvariantError for rows that are not sorted by key group."""
    stream = RowStream.of(rows) if isinstance(rows, pa.Table) else rows
    if stream.size >= _COMPRESSED_BYTES_MIN:
        # A growing buffer is copied again and again. Pages of a large one that are never written cost nothing.
        buffer = pa.allocate_buffer(stream.size + stream.size // 50 + _FILE_BYTES, memory_pool=LARGE_POOL)
        fixed = pa.FixedSizeBufferWriter(buffer)
        try:
            _write(stream, fixed, table_format, compresses=compresses)
            return buffer.slice(0, fixed.tell())
        except OSError:  # the buffer is full: rows compress worse than expected
            del buffer, fixed
    growing = pa.BufferOutputStream()
    _write(stream, growing, table_format, compresses=compresses)
    return growing.getvalue()


class _Pieces:
    """A file for Arrow's writer, which hands over its buffers: large ones are kept as they are."""

    closed = False

    def __init__(self) -> None:
        self.pieces: list[Buffer] = []

    def write(self, data: pa.Buffer | bytes) -> int:
        piece = memoryview(data)
        last = self.pieces[-1] if self.pieces else None
        if piece.nbytes >= _PIECE_BYTES_MIN:
            self.pieces.append(piece)
        elif isinstance(last, bytearray):
            last += piece
        else:
            self.pieces.append(bytearray(piece))
        return piece.nbytes

    def flush(self) -> None:
        """No work."""

    def close(self) -> None:
        self.closed = True


def keyed_table_pieces(rows: pa.Table | RowStream, table_format: TableFormat, *, compresses: bool = True) -> list[Buffer]:
    """The same bytes as those of `encode_keyed_table`, one piece behind the other, with the same errors.

    A large table that is not compressed is not copied: its pieces are the buffers of its batches, which nobody may change."""
    stream = RowStream.of(rows) if isinstance(rows, pa.Table) else rows
    if compresses or table_format != "arrow" or stream.size < _COMPRESSED_BYTES_MIN:
        return [memoryview(encode_keyed_table(stream, table_format, compresses=compresses))]
    found = _Pieces()
    with pa.PythonFile(found, mode="w") as sink:
        _write(stream, sink, table_format, compresses=compresses)
    return found.pieces


def _write(stream: RowStream, sink: pa.NativeFile, table_format: TableFormat, *, compresses: bool) -> None:
    batches = _checked(stream.batches())
    if table_format == "parquet":
        import pyarrow.parquet as pq

        with pq.ParquetWriter(sink, stream.schema, compression="zstd", store_schema=True) as writer:
            for table in _row_groups(stream.schema, batches):
                writer.write_table(table, _ROW_GROUP_ROWS)
        return
    # Compressing a small table costs more than its bytes. Arrow's threads save no time, and take the core of the task loop.
    plain = not compresses or stream.size < _COMPRESSED_BYTES_MIN
    options = pa.ipc.IpcWriteOptions(compression=None if plain else "lz4", use_threads=False)
    with pa.ipc.new_file(sink, stream.schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _row_groups(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """At least one table; all but the last have a multiple of _ROW_GROUP_ROWS rows."""
    held: list[pa.RecordBatch] = []
    count, given = 0, False
    for batch in batches:
        held.append(batch)
        count += batch.num_rows
        if count >= _ROW_GROUP_ROWS:
            table = pa.Table.from_batches(held, schema)
            whole = count - count % _ROW_GROUP_ROWS
            yield table.slice(0, whole)
            held, count, given = table.slice(whole).to_batches(), count - whole, True
    if held or not given:
        yield pa.Table.from_batches(held, schema)


def _checked(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same batches. Raises InvariantError for rows that are not sorted by key group."""
    last = -1
    for batch in batches:
        groups = key_groups_of(batch)
        if len(groups):
            if groups[0] < last or not is_sorted(groups):
                raise InvariantError("rows of a keyed table must be sorted by key group")
            last = groups[-1]
        yield batch


def restrict(table: pa.Table | pa.RecordBatch, key_groups: KeyGroupRange) -> pa.Table | pa.RecordBatch:
    """The rows of some key groups, sorted: a slice without a copy if they are in order, else a filter."""
    groups = key_groups_of(table)
    if is_sorted(groups):
        start, stop = np.searchsorted(groups, [key_groups.start, key_groups.stop], side="left").tolist()
        return table.slice(start, stop - start)
    rows = np.flatnonzero((groups >= key_groups.start) & (groups < key_groups.stop))
    return sort_by_key_group(_taken(table, rows))


def _taken(table: pa.Table | pa.RecordBatch, rows: npt.NDArray[np.int64]) -> pa.Table | pa.RecordBatch:
    """These rows. Columns of views, which another tool may have written, are taken as plain ones: pyarrow (26.0) takes no views."""
    taken = pa.array(rows)
    if not any(map(_is_view, table.schema.types)):
        return table.take(taken)
    fields = [field.with_type(_PLAIN[field.type]) if _is_view(field.type) else field for field in table.schema]
    return table.cast(pa.schema(fields, metadata=table.schema.metadata)).take(taken).cast(table.schema)


_PLAIN = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


def _is_view(kind: pa.DataType) -> bool:
    return kind in _PLAIN


def key_groups_of(table: pa.Table | pa.RecordBatch) -> npt.NDArray[np.int32]:
    index = table.schema.get_field_index(KEY_GROUP)
    if index < 0:
        raise ValueError(f"no column {KEY_GROUP!r}")
    column = table.column(index)
    if column.null_count or not pa.types.is_integer(column.type):
        raise ValueError(f"column {KEY_GROUP!r} holds nulls or is not an integer")
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    groups: npt.NDArray[np.int32] = column.to_numpy(zero_copy_only=False)
    return groups
