"""Sources of tables: state that a barrier froze on the loop thread, converted to tables on a pool thread.

A source is one state of one subtask. `write_tables`, the flow that encodes and writes them, is the same for all backends; which
sources there are is for the backends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import compress
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.statebackends.backend import SnapshotTarget, TimerRow, TimerRowProvider
from holdfast.statebackends.columnar.state import ColumnarChanges, Columns, NumpyColumnarState
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.handles import KeyedStateHandle, KeyGroupRange, StateMeta
from holdfast.statebackends.heap.slot_collections import plain
from holdfast.statebackends.heap.slot_pages import FrozenPages, present
from holdfast.statebackends.heap.state_table import MISSING, CopyOnWriteStateTable, FrozenDirtyKeys, lookup, visible_batches
from holdfast.statebackends.layout import KEY_GROUP, NAMESPACE, ORDER, TIME
from holdfast.statebackends.row_tables.frozen import RowChanges, Rows
from holdfast.statebackends.row_tables.key_codes import key_groups_of_codes
from holdfast.statebackends.row_tables.table import SortedRowTable
from holdfast.statebackends.row_tables.type_text import stored_fields, stored_name
from holdfast.statebackends.serialization.keys import KeyType, key_columns
from holdfast.statebackends.serialization.state_serializer import TIMERS_KIND, TIMERS_VALUE_TYPE, StateSerializer
from holdfast.statebackends.snapshot.converted_slots import ConvertedSlots
from holdfast.statebackends.snapshot.deltas import delta_table, replaced_by, tombstones
from holdfast.statebackends.snapshot.parts import PartsWriter, size_of
from holdfast.statebackends.snapshot.rows import (
    KEYS_PER_BATCH,
    ROWS_PER_BATCH,
    ColumnBatch,
    EncodedBatch,
    KeyBatch,
    KeyedRows,
    Keys,
    Throttle,
    unexpired,
    unexpired_batches,
)
from holdfast.statebackends.snapshot.sorting import BATCH_ROWS, GroupSort, RowStream, stable_order
from holdfast.statebackends.snapshot.tables import TableFormat, keyed_table_pieces, keyed_table_schema, sort_by_key_group
from holdfast.statebackends.state import NO_TIME, KeyColumn
from holdfast.statebackends.storage.port import Flow


class TableSource(Protocol):
    """The rows of one state at one barrier."""

    meta: StateMeta

    def stream(self) -> RowStream:
        """Pool thread, once: sorted by key group."""

    def release(self) -> None:
        """Loop thread: the snapshot no longer reads the frozen rows."""


class ChangingSource(TableSource, Protocol):
    """A source that also knows what changed since an earlier barrier."""

    takes_in_deltas: bool
    """Whether `changes` may be asked for several bases, and those of older checkpoints: what it tells takes the place of the runs
    since."""

    def checkpoint_started(self, barrier: int, base: int) -> None:
        """Loop thread, right after the source was made: note what changed before this barrier. Later calls name no lower `base`."""

    def changes(self, base: int) -> pa.Table | None:
        """Pool thread, once unless `takes_in_deltas`, and before `stream` if both are called: the delta on the checkpoint `base`.

        None: the changes since then are not known."""

    def written(self) -> None:
        """Pool thread: nothing of it is read any more."""


class StateTableSource:
    """A value, list, map, reducing or aggregating state in memory: all its namespaces."""

    takes_in_deltas = False

    def __init__(
        self,
        rows: KeyedRows,
        serializer: StateSerializer,
        tables: Sequence[tuple[bytes, CopyOnWriteStateTable]],
        horizon_ms: int | None = None,
        complete_from: int = 0,
        slots: FrozenPages | None = None,
        converted: ConvertedSlots | None = None,
    ) -> None:
        """`tables`: (namespace, table), frozen here. `horizon_ms`: values stamped at or before it have expired, and are left out.
        `complete_from`: the lowest base since which the changes of forgotten namespaces are known. `slots`: values without a
        namespace, if they are in slots. `converted`: columns of these that earlier snapshots converted, if any are kept."""
        self._converted = converted
        self._slots = slots
        self._horizon_ms = horizon_ms
        self.meta = serializer.meta
        self._rows = rows
        self._serializer = serializer
        self._complete_from = complete_from
        self._frozen = [(namespace, state_table, state_table.freeze()) for namespace, state_table in tables]
        self._changed: list[FrozenDirtyKeys] | None = None
        self._began_s = time.perf_counter()

    def checkpoint_started(self, barrier: int, base: int) -> None:
        self._changed = [state_table.checkpoint_started(barrier, base) for _, state_table, _ in self._frozen]
        if self._slots is not None:
            self._slots.checkpoint_started(barrier, base)

    def stream(self) -> RowStream:
        slots, converted = self._slots, self._converted
        if slots is None or converted is None or self._horizon_ms is not None:
            rows = self._rows.stream(self._serializer, self._all_batches(), self._began_s)
        else:
            columns = partial(self._columns, slots, converted)
            rows = self._rows.stream(self._serializer, self._unexpired(self._table_batches()), self._began_s, columns)
        self._done()
        return rows

    def _columns(self, frozen: FrozenPages, converted: ConvertedSlots, throttle: Throttle) -> Iterator[ColumnBatch]:
        keys = frozen.keys()
        for chunk in converted.chunks(frozen, self._serializer, throttle):
            yield keys.take(chunk.slots), chunk.arrays

    def changes(self, base: int) -> pa.Table | None:
        changed = self._changed
        if changed is None or base < max([self._complete_from, *(each.complete_from for each in changed)]):
            return None
        if self._slots is not None and base < self._slots.complete_from:
            return None
        batches, gone = self._changed_rows(base, changed)
        if self._slots is not None:
            keys = self._slots.keys()
            for slots, values in self._slots.changes(base, self._keys_per_batch):
                shown = self._shown(values)
                there = present([shown], len(shown))
                batches.append((b"", keys.take(slots[there]), list(compress(shown, there.tolist()))))
                gone.append((b"", keys.take(slots[~there])))
        delta = delta_table(self._rows.table(self._serializer, batches, self._began_s), self._rows.key_columns_of(gone))
        self._done()
        return delta

    def _changed_rows(self, base: int, changed: Sequence[FrozenDirtyKeys]) -> tuple[list[KeyBatch], list[tuple[bytes, Keys]]]:
        """Of the tables: (present rows of the keys that changed since `base`, keys that are gone)."""
        asked: list[tuple[bytes, list[bytes]]] = []
        shown: dict[bytes, set[bytes]] = {}
        batches: list[KeyBatch] = []
        for namespace, keys, values in self._unexpired(self._changed_batches(base, changed, asked)):
            shown.setdefault(namespace, set()).update(keys)
            batches.append((namespace, keys, values))
        return batches, [(namespace, [key for key in keys if key not in shown.get(namespace, ())]) for namespace, keys in asked]

    def _all_batches(self) -> Iterator[KeyBatch]:
        yield from self._unexpired(self._table_batches())
        if self._slots is not None:
            key_column = self._slots.keys()
            for slots, values in self._slots.batches(self._keys_per_batch):
                shown = self._shown(values)
                if self._horizon_ms is not None:
                    there = present([shown], len(shown))
                    slots, shown = slots[there], list(compress(shown, there.tolist()))
                yield b"", key_column.take(slots), shown

    def _shown(self, values: Sequence[Any]) -> Sequence[Any]:
        """Values of slots, maps as dicts; MISSING for what has expired."""
        kind, horizon_ms = self._serializer.kind, self._horizon_ms
        if kind == "map":
            values = plain(values)
        if horizon_ms is None:
            return values
        return [MISSING if value is MISSING else unexpired(kind, value, horizon_ms) or MISSING for value in values]

    @property
    def _keys_per_batch(self) -> int:
        return ROWS_PER_BATCH if self._serializer.kind in ("list", "map") else KEYS_PER_BATCH

    def _table_batches(self) -> Iterator[EncodedBatch]:
        rows = self._keys_per_batch
        for namespace, state_table, layers in self._frozen:
            with state_table.lock:
                for keys, values in visible_batches(layers, rows, maps=self._serializer.kind == "map"):
                    yield namespace, keys, values

    def _unexpired(self, batches: Iterable[EncodedBatch]) -> Iterable[EncodedBatch]:
        return batches if self._horizon_ms is None else unexpired_batches(self._serializer.kind, batches, self._horizon_ms)

    def _changed_batches(
        self, base: int, changed: Sequence[FrozenDirtyKeys], asked: list[tuple[bytes, list[bytes]]]
    ) -> Iterator[EncodedBatch]:
        """Present rows of keys that changed since `base`. All changed keys are added to `asked`."""
        for (namespace, state_table, layers), since in zip(self._frozen, changed, strict=True):
            with state_table.lock:
                for keys in since.batches(base, ROWS_PER_BATCH):
                    asked.append((namespace, keys))
                    values = lookup(keys, layers, maps=self._serializer.kind == "map")
                    there = [value is not MISSING for value in values]
                    yield namespace, list(compress(keys, there)), list(compress(values, there))

    def _done(self) -> None:
        """Merge frozen layers and free forgotten keys here instead of on the loop thread."""
        for changed in self._changed or ():
            changed.forgotten.clear()
        for _, state_table, layers in self._frozen:
            state_table.merge(layers)
        if self._slots is not None:
            self._slots.done()

    def written(self) -> None:
        if self._slots is not None:
            self._slots.written()

    def release(self) -> None:
        for _, state_table, layers in self._frozen:
            state_table.release(len(layers))
        if self._slots is not None:
            self._slots.release()


class ColumnarSource:
    """A columnar state; its namespaces are int64."""

    takes_in_deltas = False

    def __init__(self, rows: KeyedRows, meta: StateMeta, state: NumpyColumnarState) -> None:
        self.meta = meta
        self._rows = rows
        self._state = state
        self._fields = state.part_fields
        self._frozen = state.freeze()
        self._changes: ColumnarChanges | None = None

    def checkpoint_started(self, barrier: int, base: int) -> None:
        self._changes = self._state.checkpoint_started(barrier, base)

    def stream(self) -> RowStream:
        return RowStream.of(self._table(self._frozen.columns()))

    def changes(self, base: int) -> pa.Table | None:
        found = None if self._changes is None else self._frozen.changed_columns(self._changes, base)
        if found is None:
            return None
        replaced, columns = found
        return delta_table(self._table(columns), [], replaced, self._state.set_names)

    def _table(self, columns_of_rows: Columns) -> pa.Table:
        keys, namespaces, parts = columns_of_rows
        schema = keyed_table_schema(self._rows.key_type, self.meta, self._fields, namespace=pa.int64())
        column = self._rows.key_type.column(keys, max_parallelism=self._rows.max_parallelism, operator=self._rows.operator)
        order = pa.array(stable_order(column.key_groups))
        columns = [pa.array(column.key_groups), *column.arrays, namespaces, *parts]
        return pa.Table.from_arrays([array.take(order) for array in columns], schema=schema)

    def written(self) -> None:
        """No work."""

    def release(self) -> None:
        self._frozen.release()


class RowTableSource:
    """A row table: its namespaces are int64, and a row is told from the others of its key by its order."""

    takes_in_deltas = True

    def __init__(self, rows: KeyedRows, meta: StateMeta, state: SortedRowTable) -> None:
        self.meta = meta
        self._rows = rows
        fields = stored_fields(list(state.descriptor.schema))
        self._schema = keyed_table_schema(rows.key_type, meta, fields, namespace=pa.int64())
        self._key_fields = len(rows.key_type.fields)
        self._state = state
        self._frozen = state.freeze()
        self._changes: RowChanges | None = None

    def checkpoint_started(self, barrier: int, base: int) -> None:
        self._changes = self._state.checkpoint_started(barrier, base)

    def stream(self) -> RowStream:
        rows = GroupSort(KEY_GROUP)
        for piece in self._frozen.rows():
            rows.add(self._batch(piece))
        return RowStream(self._schema, rows.size, lambda: rows.batches(BATCH_ROWS))

    def changes(self, base: int) -> pa.Table | None:
        """Rows of the orders that the base does not have, and what names those of it that are gone."""
        known = self._changes
        if known is None or base not in known.marks:
            return None
        epoch, first_order = known.marks[base]
        rows = pa.Table.from_batches([self._batch(piece) for piece in self._frozen.rows(first_order)], self._schema)
        replaced = sorted(namespace for namespace, dropped_in in known.removed.items() if dropped_in > epoch)
        gone = [each for each in known.tombstones if each.epoch > epoch]
        orders = np.concatenate([each.orders for each in gone]) if gone else np.empty(0, np.int64)
        older = pa.array(orders < first_order)  # what came later is not in the base
        removed: list[pa.Array] = []
        if gone:
            keys = [pa.concat_arrays(fields) for fields in zip(*(each.keys for each in gone), strict=True)]
            groups = key_groups_of_codes(np.concatenate([each.codes for each in gone]))
            namespaces = np.concatenate([each.namespaces for each in gone])
            removed = [array.filter(older) for array in (pa.array(groups), *keys, pa.array(namespaces), pa.array(orders))]
        return delta_table(rows, removed, replaced)

    def _batch(self, rows: Rows) -> pa.RecordBatch:
        without = rows.times == NO_TIME
        times = pa.array(rows.times, mask=without if without.any() else None)
        keys, columns = rows.batch.columns[: self._key_fields], rows.batch.columns[self._key_fields :]
        groups = pa.array(key_groups_of_codes(rows.codes))
        arrays = [groups, *keys, pa.array(rows.namespaces), pa.array(rows.orders), times, *columns]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def written(self) -> None:
        """No work."""

    def release(self) -> None:
        """Runs are immutable: nothing waits for it."""


class TimerSource:
    """The timers of one provider."""

    takes_in_deltas = False

    def __init__(self, rows: KeyedRows, name: str, provider: TimerRowProvider) -> None:
        self.meta = timer_meta(name, rows.key_type)
        self._rows = rows
        self._frozen = provider.freeze()

    def checkpoint_started(self, barrier: int, base: int) -> None:
        self._frozen.checkpoint_started(barrier, base)

    def stream(self) -> RowStream:
        return RowStream.of(sort_by_key_group(self._table(self._columns(list(self._frozen.rows())))))

    def changes(self, base: int) -> pa.Table | None:
        found = self._frozen.changes(base)
        if found is None:
            return None
        present, removed = found
        return delta_table(self._table(self._columns(present)), self._columns(removed))

    def _table(self, columns: list[pa.Array]) -> pa.Table:
        schema = keyed_table_schema(self._rows.key_type, self.meta, [pa.field(TIME, pa.int64(), nullable=False)])
        return pa.Table.from_arrays(columns, schema=schema)

    def _columns(self, timers: list[TimerRow]) -> list[pa.Array]:
        times, keys, namespaces, groups = zip(*timers, strict=True) if timers else ((), (), (), ())
        return [
            pa.array(groups, pa.int32()),
            *self._rows.key_type.arrays_of_encoded(keys),
            pa.array(namespaces, pa.binary()),
            pa.array(times, pa.int64()),
        ]

    def written(self) -> None:
        """No work."""

    def release(self) -> None:
        self._frozen.release()


class RestoredSource:
    """Restored timers whose provider is not registered yet, stored again as they are."""

    takes_in_deltas = False

    def __init__(self, meta: StateMeta, table: pa.Table) -> None:
        self.meta = meta
        self._table = table

    def stream(self) -> RowStream:
        return RowStream.of(sort_by_key_group(self._table))

    def checkpoint_started(self, barrier: int, base: int) -> None:
        """No work: these timers don't change."""

    def changes(self, base: int) -> pa.Table | None:
        return delta_table(self._table.slice(0, 0), [])

    def written(self) -> None:
        """No work."""

    def release(self) -> None:
        """No work: the table is immutable."""


def timer_meta(name: str, key_type: KeyType) -> StateMeta:
    return StateMeta(name, TIMERS_KIND, TIMERS_VALUE_TYPE, key_type.text)


def timer_rows(rows: KeyedRows, table: pa.Table) -> list[TimerRow]:
    """Timers in a table that decode_keyed_table read. Raises CorruptStateError."""
    if TIME not in table.column_names or table.column(TIME).type != pa.int64() or table.column(TIME).null_count:
        raise CorruptStateError(f"no column {TIME!r} of int64 without nulls", reason="table")
    keys = _keys(rows, table).encoded()
    columns = [table.column(name).to_pylist() for name in (TIME, NAMESPACE, KEY_GROUP)]
    return [(time, key, namespace, group) for key, time, namespace, group in zip(keys, *columns, strict=True)]


def columnar_rows(
    rows: KeyedRows, state: NumpyColumnarState, table: pa.Table
) -> tuple[KeyColumn, npt.NDArray[np.int64], list[pa.Array]]:
    """Arguments of NumpyColumnarState.load, from a table that decode_keyed_table read. Raises CorruptStateError."""
    if table.schema.field(NAMESPACE).type != pa.int64():
        raise CorruptStateError("the namespace of columnar state is int64", reason="table")
    parts = []
    for field in state.part_fields:
        if field.name not in table.column_names or (table.column(field.name).null_count and not field.nullable):
            raise CorruptStateError(f"no column {field.name!r}, or nulls in it", reason="table")
        parts.append(table.column(field.name).combine_chunks().cast(field.type))
    namespaces: npt.NDArray[np.int64] = table.column(NAMESPACE).to_numpy()
    return _keys(rows, table), namespaces, parts


def load_row_table(rows: KeyedRows, state: SortedRowTable, table: pa.Table, runs: Sequence[pa.Table]) -> None:
    """Load a table read by decode_keyed_table, and the delta runs upon it. Raises CorruptStateError."""
    deltas = []
    for run in runs:
        deltas.append((_row_table_rows(rows, state, run), tombstones(run), replaced_by(run.schema)))
    state.load(_row_table_rows(rows, state, table), deltas)


def _row_table_rows(rows: KeyedRows, state: SortedRowTable, table: pa.Table) -> Rows:
    """Beside a tombstone stand values that nobody reads."""
    fields = list(state.descriptor.schema)
    for name in (ORDER, TIME, *(stored_name(each.name) for each in fields)):
        if name not in table.column_names:
            raise CorruptStateError(f"no column {name!r}", reason="table")
    if table.schema.field(NAMESPACE).type != pa.int64():
        raise CorruptStateError("the namespace of a row table is int64", reason="table")
    orders, namespaces = (table.column(name).cast(pa.int64()).to_numpy() for name in (ORDER, NAMESPACE))
    times = table.column(TIME).cast(pa.int64()).fill_null(NO_TIME).to_numpy()
    columns = [table.column(stored_name(each.name)).combine_chunks().cast(each.type) for each in fields]
    return state.rows_from(_keys(rows, table), orders, namespaces, times, columns)


def _keys(rows: KeyedRows, table: pa.Table) -> Any:
    arrays = [table.column(name) for name in key_columns(rows.key_type)]
    return rows.key_type.column(arrays, max_parallelism=rows.max_parallelism, operator=rows.operator)


def write_tables(
    sources: Sequence[TableSource],
    key_groups: KeyGroupRange,
    target: SnapshotTarget,
    admit: Callable[[int], None] | None = None,
    *,
    compresses: bool = True,
) -> Flow[KeyedStateHandle]:
    """Write one part per source, empty ones included, so that a restore sees every state that was declared.

    `admit` is called after each inline part with the bytes of all so far, and may raise."""
    table_format: TableFormat = "parquet" if target.canonical else "arrow"
    writer = PartsWriter(target)
    parts = []
    inline = 0
    for source in sources:
        pieces = keyed_table_pieces(source.stream(), table_format, compresses=compresses)
        size = size_of(pieces)
        if admit is not None and size < target.inline_threshold:
            inline += size
            admit(inline)
        parts.append(writer.add_pieces(pieces, f"{source.meta.name}.{table_format}"))
        if writer.is_full:
            yield from writer.store()
    yield from writer.store()
    metas = tuple(source.meta for source in sources)
    return KeyedStateHandle(key_groups, table_format, metas, tuple(part.handle for part in parts))
