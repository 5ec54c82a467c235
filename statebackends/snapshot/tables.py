"""Keyed state as tables: the open, canonical form of a savepoint, readable without Holdfast and by every backend.

Columns: key_group, key (or key_0, key_1 ... for a tuple), namespace, map_key (map state), position (list state), then the
value column or the user's columns, ttl_stamp_ms (state with TTL). Rows are sorted by key group, so that a rescale is a
slice. Files are Arrow IPC or Parquet; their schema carries the StateMeta for tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.statebackends.decoding import UNDECODABLE, decode_json
from holdfast.statebackends.errors import CorruptStateError, InvalidKeyError, InvariantError
from holdfast.statebackends.handles import KeyGroupRange, StateMeta
from holdfast.statebackends.keygroups import MAX_PARALLELISM_LIMIT
from holdfast.statebackends.layout import KEY_GROUP, MAP_KEY, NAMESPACE, POSITION, STATE_METADATA, VALUE
from holdfast.statebackends.serialization.keys import KeyType, key_columns
from holdfast.statebackends.snapshot.sorting import LARGE_POOL, RowStream, is_sorted, stable_order
from holdfast.statebackends.snapshot.unpacking import check_arrow, check_parquet, checked_batch, row_groups_of
from holdfast.statebackends.storage.failures import refusal

TableFormat = Literal["arrow", "parquet"]
Judge: TypeAlias = Callable[[pa.Table], pa.Table]
"""The rows in their canonical types. Raises ValueError, CorruptStateError and pyarrow's errors for rows that can't be."""


EVERY_KEY_GROUP = KeyGroupRange(0, MAX_PARALLELISM_LIMIT)
"""Of a table of which no handle is known."""

_ROW_GROUP_ROWS = 1 << 17
_COMPRESSED_BYTES_MIN = 64 * 1024
_FILE_BYTES = 256 * 1024
"""Schema, footer and what a compressor may add to many small columns."""


def keyed_table_schema(
    key_type: KeyType,
    meta: StateMeta,
    values: pa.DataType | Sequence[pa.Field],
    *,
    map_key: pa.DataType | None = None,
    namespace: pa.DataType = pa.binary(),  # noqa: B008 - immutable
) -> pa.Schema:
    """Schema of one state's table. `values`: type of the `value` column, or several columns of the state's own.

    `namespace`: binary, or int64 for columnar state.

    List state has a row per element, numbered by `position`; map state a row per entry, with its key of type `map_key`."""
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


def state_meta_of(schema: pa.Schema) -> StateMeta | None:
    """The StateMeta that a table was written with; None for a table that is not one of ours."""
    stored = (schema.metadata or {}).get(STATE_METADATA)
    if stored is None:
        return None
    try:
        return decode_json(stored, StateMeta)
    except UNDECODABLE:
        return None


def sort_by_key_group(table: pa.Table) -> pa.Table:
    """The rows in key-group order; rows of one key group keep theirs."""
    groups = _key_groups(table)
    return table if is_sorted(groups) else table.take(pa.array(stable_order(groups)))


def encode_keyed_table(rows: pa.Table | RowStream, table_format: TableFormat) -> pa.Buffer:
    """The bytes of a file. Raises InvariantError if the rows aren't sorted by key group."""
    stream = RowStream.of(rows) if isinstance(rows, pa.Table) else rows
    if stream.size >= _COMPRESSED_BYTES_MIN:
        # A buffer that grows is copied again and again; pages of one of the largest size that are never written cost nothing.
        buffer = pa.allocate_buffer(stream.size + stream.size // 50 + _FILE_BYTES, memory_pool=LARGE_POOL)
        fixed = pa.FixedSizeBufferWriter(buffer)
        try:
            _write(stream, fixed, table_format)
            return buffer.slice(0, fixed.tell())
        except OSError:  # it is full: the rows compress worse than expected
            del buffer, fixed
    growing = pa.BufferOutputStream()
    _write(stream, growing, table_format)
    return growing.getvalue()


def _write(stream: RowStream, sink: pa.NativeFile, table_format: TableFormat) -> None:
    batches = _checked(stream.batches())
    if table_format == "parquet":
        with pq.ParquetWriter(sink, stream.schema, compression="zstd", store_schema=True) as writer:
            for table in _row_groups(stream.schema, batches):
                writer.write_table(table, _ROW_GROUP_ROWS)
        return
    # A compressor costs more than a small table's bytes, and Arrow's threads save no time: they take the loop's core for a while.
    small = stream.size < _COMPRESSED_BYTES_MIN
    options = pa.ipc.IpcWriteOptions(compression=None if small else "lz4", use_threads=False)
    with pa.ipc.new_file(sink, stream.schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _row_groups(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """At least one; all but the last have a multiple of _ROW_GROUP_ROWS rows."""
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
    """The same batches. Raises InvariantError if their rows aren't sorted by key group."""
    last = -1
    for batch in batches:
        groups = _key_groups(batch)
        if len(groups):
            if groups[0] < last or not is_sorted(groups):
                raise InvariantError("rows of a keyed table must be sorted by key group")
            last = groups[-1]
        yield batch


def decode_keyed_table(
    data: bytes | pa.Buffer,
    table_format: str,
    key_groups: KeyGroupRange,
    key_type: KeyType,
    *,
    path: str = "",
    operator: str | None = None,
    held: KeyGroupRange | None = None,
    judge: Judge | None = None,
) -> pa.Table:
    """The rows of some key groups, with the key columns and the namespace cast to their canonical types.

    Tables edited with other tools are fine: rows in any order, columns in any order, large or dictionary types. With `held`, the
    key groups of the table's handle, rows of others are refused, which would be found at some parallelisms and at others not.
    `judge` refuses further rows that can't be, see row_rules.py. Raises CorruptStateError naming file and operator."""
    try:
        table = _read(pa.py_buffer(data), table_format, key_groups, held or EVERY_KEY_GROUP)
        table = _canonical(table, key_type) if judge is None else judge(table)
    except (pa.ArrowException, InvalidKeyError, ValueError, TypeError, KeyError, OSError, OverflowError) as error:
        owner = f"operator {operator!r}: " if operator else ""
        if (refused := refusal(error, f"{owner}{path}", path=path, operator=operator)) is not None:
            raise refused from error
        raise CorruptStateError(
            f"{owner}{path}: not a table of keyed state: {error}", path=path, operator=operator, reason="table"
        ) from error
    return table


def _read(data: pa.Buffer, table_format: str, key_groups: KeyGroupRange, held: KeyGroupRange) -> pa.Table:
    if table_format == "parquet":
        check_parquet(pa.BufferReader(data))
        return _read_parquet(data, key_groups, held)
    if table_format != "arrow":
        raise ValueError(f"unknown format {table_format!r}")
    unpacked = check_arrow(pa.BufferReader(data))
    reader = pa.ipc.open_file(data, memory_pool=LARGE_POOL)
    batches = []
    for index in range(reader.num_record_batches):
        batch = checked_batch(reader.get_batch(index), unpacked)
        check_held(_key_groups(batch), held)
        restricted = restrict(batch, key_groups)
        if len(restricted):
            batches.append(restricted)
    return pa.Table.from_batches(batches, reader.schema)


def check_held(groups: npt.NDArray[Any], held: KeyGroupRange) -> None:
    """Raises ValueError for rows of key groups that the table's handle does not have."""
    if len(groups) and not (held.start <= groups.min() and groups.max() < held.stop):
        wrong = groups[(groups < held.start) | (groups >= held.stop)]
        raise ValueError(f"{len(wrong)} rows of key groups outside of [{held.start}, {held.stop}), the first of {wrong[0]}")


def _read_parquet(data: pa.Buffer, key_groups: KeyGroupRange, held: KeyGroupRange) -> pa.Table:
    file = pq.ParquetFile(pa.BufferReader(data))
    if file.schema_arrow.get_field_index(KEY_GROUP) < 0:
        raise ValueError(f"no column {KEY_GROUP!r}")
    wanted = []
    for index, group in enumerate(row_groups_of(pa.BufferReader(data))):
        found = next((chunk for chunk in group.chunks if chunk.path == KEY_GROUP), None)
        if found is None or not found.lowest or not found.highest or found.kind not in (1, 2):
            wanted.append(index)
            continue
        lowest, highest = (int.from_bytes(each, "little", signed=True) for each in (found.lowest, found.highest))
        check_held(np.array([lowest, highest]), held)
        if highest >= key_groups.start and lowest < key_groups.stop:
            wanted.append(index)
    table = file.read_row_groups(wanted)
    check_held(_key_groups(table), held)
    return restrict(table, key_groups)


def restrict(table: pa.Table | pa.RecordBatch, key_groups: KeyGroupRange) -> pa.Table | pa.RecordBatch:
    """The rows of some key groups: a slice without copy when the rows are sorted, else a filter."""
    groups = _key_groups(table)
    if is_sorted(groups):
        start, stop = np.searchsorted(groups, [key_groups.start, key_groups.stop], side="left").tolist()
        return table.slice(start, stop - start)
    rows = np.flatnonzero((groups >= key_groups.start) & (groups < key_groups.stop))
    return sort_by_key_group(table.take(pa.array(rows)))


def _canonical(table: pa.Table, key_type: KeyType) -> pa.Table:
    wanted = [(KEY_GROUP, pa.int32()), *zip(key_columns(key_type), key_type.arrow_types, strict=True), _namespace(table.schema)]
    for name, data_type in wanted:
        index = table.schema.get_field_index(name)
        if index < 0:
            raise ValueError(f"no column {name!r}")
        column = table.column(index)
        if column.null_count:
            raise ValueError(f"null in column {name!r}")
        if column.type != data_type:
            table = table.set_column(index, pa.field(name, data_type, nullable=False), column.cast(data_type))
    return table


def _namespace(schema: pa.Schema) -> tuple[str, pa.DataType]:
    index = schema.get_field_index(NAMESPACE)
    is_number = index >= 0 and pa.types.is_integer(schema.field(index).type)
    return NAMESPACE, pa.int64() if is_number else pa.binary()


def _key_groups(table: pa.Table | pa.RecordBatch) -> npt.NDArray[np.int32]:
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
