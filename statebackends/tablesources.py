"""Frozen state as sources of tables: what a barrier froze on the loop thread, turned into tables on a pool thread.

One source is one state of one subtask. The flow that encodes and writes them is here too, since it is the same for all
backends; which sources there are is theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statebackends.backend import SnapshotTarget, TimerRow, TimerRowProvider
from statebackends.columnar import NumpyColumnarState
from statebackends.errors import CorruptStateError
from statebackends.expiry import unexpired_chunks
from statebackends.generations import Generations, visible_chunks
from statebackends.handles import KeyedStateHandle, KeyGroupRange, StateHandle, StateMeta
from statebackends.keyedrows import ROWS_PER_BATCH, Chunk, KeyedRows
from statebackends.keyedtables import (
    KEY_GROUP,
    NAMESPACE,
    TableFormat,
    encode_keyed_table,
    key_columns,
    keyed_table_schema,
    sort_by_key_group,
)
from statebackends.keys import KeyType
from statebackends.snapshot import write_part
from statebackends.state import KeyColumn
from statebackends.statecodec import TIMERS_KIND, TIMERS_VALUE_TYPE, StateCodec
from statebackends.storage.operations import Flow

TIME = "time"
"""Column of a timer's time, int64 ms."""


class TableSource(Protocol):
    """The rows of one state at one barrier."""

    meta: StateMeta

    def table(self) -> pa.Table:
        """Pool thread, once: sorted by key group."""

    def release(self) -> None:
        """Loop thread: the frozen rows are not needed any more."""


class GenerationsSource:
    """A value, list, map, reducing or aggregating state in memory: all its namespaces."""

    def __init__(
        self, rows: KeyedRows, codec: StateCodec, tables: Sequence[tuple[bytes, Generations]], horizon_ms: int | None = None
    ) -> None:
        """`horizon_ms`: what is stamped at or before it has expired, and is left out."""
        self._horizon_ms = horizon_ms
        self.meta = codec.meta
        self._rows = rows
        self._codec = codec
        self._frozen = [(namespace, generations, generations.freeze()) for namespace, generations in tables]

    def table(self) -> pa.Table:
        maps = self._codec.kind == "map"
        chunks: Iterable[Chunk] = (
            (namespace, keys, values)
            for namespace, _, layers in self._frozen
            for keys, values in visible_chunks(layers, ROWS_PER_BATCH, maps=maps)
        )
        if self._horizon_ms is not None:
            chunks = unexpired_chunks(self._codec.kind, chunks, self._horizon_ms)
        return self._rows.table(self._codec, chunks)

    def release(self) -> None:
        for _, generations, layers in self._frozen:
            generations.thaw(len(layers))


class ColumnarSource:
    """A columnar state: its namespaces are int64."""

    def __init__(self, rows: KeyedRows, meta: StateMeta, state: NumpyColumnarState) -> None:
        self.meta = meta
        self._rows = rows
        self._fields = state.part_fields
        self._frozen = state.freeze()

    def table(self) -> pa.Table:
        keys, namespaces, parts = self._frozen.columns()
        schema = keyed_table_schema(self._rows.key_type, self.meta, self._fields, namespace=pa.int64())
        column = self._rows.key_type.column(keys, max_parallelism=self._rows.max_parallelism, operator=self._rows.operator)
        order = pa.array(np.argsort(column.key_groups.astype(np.uint16), kind="stable"))  # radix sort: 10 times faster
        columns = [pa.array(column.key_groups), *column.arrays, namespaces, *parts]
        return pa.Table.from_arrays([array.take(order) for array in columns], schema=schema)

    def release(self) -> None:
        self._frozen.release()


class TimerSource:
    """Timers of a provider."""

    def __init__(self, rows: KeyedRows, name: str, provider: TimerRowProvider) -> None:
        self.meta = timer_meta(name, rows.key_type)
        self._rows = rows
        self._frozen = provider.freeze()

    def table(self) -> pa.Table:
        timers = list(self._frozen.rows())
        times, keys, namespaces, groups = zip(*timers, strict=True) if timers else ((), (), (), ())
        schema = keyed_table_schema(self._rows.key_type, self.meta, [pa.field(TIME, pa.int64(), nullable=False)])
        columns = [
            pa.array(groups, pa.int32()),
            *self._rows.key_type.arrays_of_encoded(keys),
            pa.array(namespaces, pa.binary()),
            pa.array(times, pa.int64()),
        ]
        return sort_by_key_group(pa.Table.from_arrays(columns, schema=schema))

    def release(self) -> None:
        self._frozen.release()


class RestoredSource:
    """Timers that were restored and that nobody has asked for yet: handed on as they are."""

    def __init__(self, meta: StateMeta, table: pa.Table) -> None:
        self.meta = meta
        self._table = table

    def table(self) -> pa.Table:
        return sort_by_key_group(self._table)

    def release(self) -> None:
        """The table is immutable."""


def timer_meta(name: str, key_type: KeyType) -> StateMeta:
    return StateMeta(name, TIMERS_KIND, TIMERS_VALUE_TYPE, key_type.text)


def timer_rows(rows: KeyedRows, table: pa.Table) -> list[TimerRow]:
    """Timers of a table read by decode_keyed_table. Raises CorruptStateError."""
    if TIME not in table.column_names or table.column(TIME).type != pa.int64() or table.column(TIME).null_count:
        raise CorruptStateError(f"no column {TIME!r} of int64 without nulls", reason="table")
    keys = _keys(rows, table).encoded()
    columns = [table.column(name).to_pylist() for name in (TIME, NAMESPACE, KEY_GROUP)]
    return [(time, key, namespace, group) for key, time, namespace, group in zip(keys, *columns, strict=True)]


def columnar_rows(
    rows: KeyedRows, state: NumpyColumnarState, table: pa.Table
) -> tuple[KeyColumn, npt.NDArray[np.int64], list[pa.Array]]:
    """What NumpyColumnarState.load takes, of a table read by decode_keyed_table. Raises CorruptStateError."""
    if table.schema.field(NAMESPACE).type != pa.int64():
        raise CorruptStateError("the namespace of columnar state is int64", reason="table")
    parts = []
    for field in state.part_fields:
        if field.name not in table.column_names or (table.column(field.name).null_count and not field.nullable):
            raise CorruptStateError(f"no column {field.name!r}, or nulls in it", reason="table")
        parts.append(table.column(field.name).combine_chunks().cast(field.type))
    namespaces: npt.NDArray[np.int64] = table.column(NAMESPACE).to_numpy()
    return _keys(rows, table), namespaces, parts


def _keys(rows: KeyedRows, table: pa.Table) -> Any:
    arrays = [table.column(name) for name in key_columns(rows.key_type)]
    return rows.key_type.column(arrays, max_parallelism=rows.max_parallelism, operator=rows.operator)


def write_tables(
    sources: Sequence[TableSource],
    key_groups: KeyGroupRange,
    target: SnapshotTarget,
    admit: Callable[[int], None] | None = None,
) -> Flow[KeyedStateHandle]:
    """One part per source, empty ones included, so that a restore sees every state that was declared.

    `admit` is told the bytes encoded so far before each part is written, and may raise."""
    table_format: TableFormat = "parquet" if target.canonical else "arrow"
    parts: list[StateHandle] = []
    size = 0
    for source in sources:
        data = encode_keyed_table(source.table(), table_format)
        size += data.size
        if admit is not None:
            admit(size)
        part: StateHandle = yield from write_part(memoryview(data), f"{source.meta.name}.{table_format}", target)
        parts.append(part)
    return KeyedStateHandle(key_groups, table_format, tuple(source.meta for source in sources), tuple(parts))


class TablesSnapshot:
    """`backend.PendingSnapshot` of sources alone."""

    def __init__(self, sources: Sequence[TableSource], key_groups: KeyGroupRange) -> None:
        self._sources = list(sources)
        self._key_groups = key_groups
        self._released = False

    def flow(self, target: SnapshotTarget) -> Flow[tuple[KeyedStateHandle, ...]]:
        if not self._sources:
            return ()
        handle: KeyedStateHandle = yield from self._write(target)
        return (handle,)

    def _write(self, target: SnapshotTarget) -> Flow[KeyedStateHandle]:
        return write_tables(self._sources, self._key_groups, target)

    def release(self) -> None:
        """Idempotent."""
        if not self._released:
            self._released = True
            for source in self._sources:
                source.release()
