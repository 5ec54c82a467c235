"""Keyed state as tables: the canonical form, which every backend reads, and other tools without Holdfast.

Columns: key_group, key (or key_0, key_1 ... for a tuple), namespace, map_key (map state), position (list state), then the
value column or the columns of the state's own, ttl_stamp_ms (state with TTL). Rows are sorted by key group, so that a rescale reads
a slice. Files are Arrow IPC or Parquet, with the StateMeta in their schema. The format is described in docs/snapshot-format.md;
what rows must be is for row_rules.py."""

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
"""Returns the rows in canonical types. Raises ValueError, CorruptStateError or pyarrow's errors for rows that break a rule."""


EVERY_KEY_GROUP = KeyGroupRange(0, MAX_PARALLELISM_LIMIT)
"""Key groups of a table without a known handle."""

_ROW_GROUP_ROWS = 1 << 17
_COMPRESSED_BYTES_MIN = 64 * 1024
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


def state_meta_of(schema: pa.Schema) -> StateMeta | None:
    """StateMeta in a table's schema; None for a table that Holdfast did not write."""
    stored = (schema.metadata or {}).get(STATE_METADATA)
    if stored is None:
        return None
    try:
        return decode_json(stored, StateMeta)
    except UNDECODABLE:
        return None


def sort_by_key_group(table: pa.Table) -> pa.Table:
    """The rows in key-group order; rows of one key group keep their order."""
    groups = _key_groups(table)
    return table if is_sorted(groups) else table.take(pa.array(stable_order(groups)))


def encode_keyed_table(rows: pa.Table | RowStream, table_format: TableFormat) -> pa.Buffer:
    """The bytes of a table's file. Raises InvariantError for rows that are not sorted by key group."""
    stream = RowStream.of(rows) if isinstance(rows, pa.Table) else rows
    if stream.size >= _COMPRESSED_BYTES_MIN:
        # A growing buffer is copied again and again. Pages of a large one that are never written cost nothing.
        buffer = pa.allocate_buffer(stream.size + stream.size // 50 + _FILE_BYTES, memory_pool=LARGE_POOL)
        fixed = pa.FixedSizeBufferWriter(buffer)
        try:
            _write(stream, fixed, table_format)
            return buffer.slice(0, fixed.tell())
        except OSError:  # the buffer is full: rows compress worse than expected
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
    # Compressing a small table costs more than its bytes. Arrow's threads save no time, and take the core of the task loop.
    small = stream.size < _COMPRESSED_BYTES_MIN
    options = pa.ipc.IpcWriteOptions(compression=None if small else "lz4", use_threads=False)
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
    """The rows of some key groups, with the key columns and the namespace in their canonical types.

    Tables that other tools edited are read too: rows and columns in any order, large or dictionary types. `held`: key groups of the
    table's handle; rows of others are refused, since only some parallelisms would find them. `judge` applies further rules to the
    rows (row_rules.py). Raises CorruptStateError naming file and operator."""
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
    """Raises ValueError for rows of key groups outside of `held`, those of the table's handle."""
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
    """The rows of some key groups, sorted: a slice without a copy if they are in order, else a filter."""
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
