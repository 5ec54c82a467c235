"""The backends `memory` and `filesystem`: keyed state as Python objects, in slots of keys, and in one CopyOnWriteStateTable for
each namespace of a state.

They decide where a checkpoint goes. `memory` writes whole tables, as they are in memory: small ones into the acknowledgement, whose
size is bounded, and others into files of the checkpoint's own. `filesystem` writes compressed files: whole tables, or increments
(snapshot/increments.py). Savepoints of both are files. An empty namespace is forgotten once its state object is no longer in use.
Source: Flink, HashMapStateBackend with its two checkpoint storages."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from msgspec.structs import replace

from holdfast.statebackends.backend import KeptState, KeyCourse, SnapshotTarget
from holdfast.statebackends.backends.keyed import KeyedBackendBase, KeyedBackendConfig
from holdfast.statebackends.errors import SnapshotTooLargeError
from holdfast.statebackends.handles import KeyedStateHandle, KeyGroupRange, StateMeta
from holdfast.statebackends.heap.kept_slots import KeptSlots
from holdfast.statebackends.heap.map_table import CopyOnWriteMapTable
from holdfast.statebackends.heap.slot_states import SlotTables, create_slot_state
from holdfast.statebackends.heap.slot_ttl import SlotCleanup, create_slot_ttl_state
from holdfast.statebackends.heap.state_table import CopyOnWriteStateTable, MapLayer, visible_keys
from holdfast.statebackends.heap.ttl import TableTtl
from holdfast.statebackends.serialization.exact_values import may_be_exact
from holdfast.statebackends.serialization.key_texts import KeyOf
from holdfast.statebackends.serialization.state_serializer import StateSerializer
from holdfast.statebackends.snapshot.converted_slots import ConvertedSlots, has_small_width
from holdfast.statebackends.snapshot.deltas import newest_rows
from holdfast.statebackends.snapshot.increments import ChainsByCheckpoint, TablesSnapshot
from holdfast.statebackends.snapshot.sources import ChangingSource, StateTableSource, write_tables
from holdfast.statebackends.state import KeyColumn, StateDescriptor
from holdfast.statebackends.storage.port import Flow, Storage

_ROW_KINDS = ("value", "reducing", "aggregating")
_ENTRY_BYTES = 200
"""Estimate for one entry of a dict: key bytes, value object, slot."""
_SLOT_BYTES = 120
"""Estimate for one slot: key column, value object, place in a page."""


class HeapKeyedBackend(KeyedBackendBase):
    """Keyed state in dicts; a snapshot encodes it as tables."""

    def __init__(self, config: KeyedBackendConfig, *, incremental: bool = False) -> None:
        super().__init__(config)
        self._chains = ChainsByCheckpoint() if incremental else None
        self._is_tracking = False
        self._slot_ttls: dict[str, TableTtl] = {}
        self._slots = self._slot_tables()
        if self._slots is not None:
            self._context = self._slots.context
        self._converted = self._kept_columns()
        self._complete_from: dict[str, int] = {}
        """State -> the lowest base since which the changes of its forgotten namespaces are known."""

    def _slot_tables(self) -> SlotTables | None:
        """Slots for the states of rows; None: there are none."""
        if not self._serializers:
            return None
        slots = SlotTables(list(self._serializers), self.key_type, self._column_of)
        for name, state_ttl in self._state_ttls.items():
            if state_ttl.config.cleanup_entries:
                cleanup = self._slot_ttls[name] = SlotCleanup(state_ttl, slots[name])
                slots.renumbering.append(cleanup.renumber)
            else:
                self._slot_ttls[name] = TableTtl(state_ttl)
        return slots

    def _kept_columns(self) -> dict[str, ConvertedSlots]:
        """Of states without a TTL, of values that can't be changed in place; not where increments are written of what changed."""
        if self._slots is None or self._chains is not None:
            return {}
        kept = {}
        for name, serializer in self._serializers.items():
            is_row = serializer.kind in _ROW_KINDS and name not in self._state_ttls
            if is_row and serializer.copy is None and has_small_width(serializer):
                kept[name] = ConvertedSlots()
                self._slots[name].remembers_written = True
        return kept

    def set_current_key(self, encoded_key: bytes, key_group: int) -> None:
        context = self._context
        context.key = encoded_key
        context.key_group = key_group
        if context.has_slot:
            context.leave_slot()

    def each_key(self, keys: KeyColumn) -> KeyCourse:
        return super().each_key(keys) if self._slots is None else self._slots.course(keys)

    def get_state(self, descriptor: StateDescriptor, namespace: bytes = b"") -> Any:
        slots = self._slots
        if slots is None or namespace or descriptor.name not in slots:
            return super().get_state(descriptor, namespace)
        state = self._states.get((descriptor.name, b""))
        if state is None:
            serializer, declared = self._serializer(descriptor.name), self._descriptors[descriptor.name]
            if declared.kind != descriptor.kind:
                self._undeclared(descriptor.name)
            parts = (declared, slots.context.position, slots[descriptor.name], serializer.copy, serializer.checks)
            table_ttl = self._slot_ttls.get(descriptor.name)
            state = create_slot_state(*parts) if table_ttl is None else create_slot_ttl_state(*parts, table_ttl)
            self._states[descriptor.name, b""] = state
        return state

    def erase(self, key: KeyOf, states: frozenset[str] | None = None) -> bool:
        is_own = super().erase(key, states)
        if is_own and self._slots is not None:
            for name in self._slots.names:
                if states is None or name in states:
                    self._slots.remove(name, key.encoded)
        return is_own

    def keys(self, state_name: str, namespace: bytes = b"") -> Iterator[bytes]:
        self._serializer(state_name)
        if self._slots is not None and not namespace and state_name in self._slots:
            yield from self._slots.keys_of(state_name)
            return
        state_table = self._state_tables.get((state_name, namespace))
        if state_table is not None:
            yield from visible_keys((state_table.active, *state_table.immutable), maps=state_table.maps)

    def snapshot(self, checkpoint_id: int) -> TablesSnapshot:
        self._forget_namespaces()
        self._freeze_horizons()
        sources = self._row_sources() + self._memory_sources()
        self._checkpoint_started(sources, checkpoint_id)
        self._is_tracking = self._chains is not None
        return self._pending(sources)

    def _pending(self, sources: list[ChangingSource]) -> TablesSnapshot:
        return TablesSnapshot(sources, self._key_groups, self._chains)

    def keep(self) -> KeptSlots | None:
        """States whose rows are all in slots, of values that come back from a snapshot as they are."""
        slots = self._slots
        if slots is None:
            return None
        namespaced = {name for name, _ in self._state_tables}
        names = [name for name in slots.names if name not in namespaced and self._comes_back_as_it_is(name)]
        return slots.kept(names, self._key_groups) if names else None

    def _comes_back_as_it_is(self, name: str) -> bool:
        """Lists and maps are changed in place, and a time of expiry may have come since."""
        is_row = self._descriptors[name].kind in _ROW_KINDS and name not in self._state_ttls
        return is_row and may_be_exact(self._serializers[name].value.value_type)

    def take_over(self, kept: KeptState, names: frozenset[str]) -> frozenset[str]:
        slots = self._slots
        if slots is None or not isinstance(kept, KeptSlots) or kept.key_groups != self._key_groups:
            return frozenset()
        own = [name for name in sorted(names & kept.names) if name in slots]
        taken = [name for name in own if kept.is_exact(name, self._serializers[name].value.value_type)]
        if taken:
            slots.take_over(kept, taken)
        self._taken_over = frozenset(taken)
        return self._taken_over

    def _row_sources(self) -> list[ChangingSource]:
        by_name: dict[str, list[tuple[bytes, CopyOnWriteStateTable]]] = {name: [] for name in self._serializers}
        slots = {} if self._slots is None else self._slots.freeze()
        for (name, namespace), state_table in self._state_tables.items():
            by_name[name].append((namespace, state_table))
        return [
            StateTableSource(
                self._rows,
                self._serializers[name],
                tables,
                self._barrier_horizon_ms(name),
                self._complete_from.get(name, 0),
                slots.get(name),
                self._converted.get(name),
            )
            for name, tables in by_name.items()
        ]

    def _is_idle(self, state_table: CopyOnWriteStateTable) -> bool:
        return state_table.is_idle

    def _forget_namespaces(self) -> dict[tuple[str, bytes], CopyOnWriteStateTable]:
        forgotten = super()._forget_namespaces()
        for (name, _), state_table in forgotten.items():
            known_from = state_table.complete_from or 0  # None: no barrier has seen it, and no base can hold rows of it
            self._complete_from[name] = max(self._complete_from.get(name, 0), known_from)
        return forgotten

    def state_size(self) -> int:
        rows = sum(len(layer) for table in self._state_tables.values() for layer in (table.active, *table.immutable))
        slots = 0 if self._slots is None else self._slots.size
        return rows * _ENTRY_BYTES + slots * _SLOT_BYTES + self._memory_size()

    def dispose(self) -> None:
        self._state_tables.clear()
        self._states.clear()
        self._restored_timers.clear()
        self._converted.clear()
        if self._slots is not None:
            self._slots.clear()
        for state in self._columnar.values():
            for namespace in state.namespaces():
                state.remove(namespace)
        for table in self._row_tables.values():
            table.dispose()
        if self._row_tables:
            shutil.rmtree(self._local_dir, ignore_errors=True)

    def _new_state_table(self, serializer: StateSerializer, namespace: bytes) -> CopyOnWriteStateTable:
        state_table = CopyOnWriteMapTable() if serializer.kind == "map" else CopyOnWriteStateTable()
        if self._is_tracking:
            state_table.track_since(0)
        return state_table

    def restore(
        self, handles: Sequence[KeyedStateHandle], storage: Storage, folder: str, *, checkpoint_id: int | None = None
    ) -> None:
        super().restore(handles, storage, folder, checkpoint_id=checkpoint_id)
        self._is_tracking = self._restored_id is not None
        if self._restored_id is not None and self._slots is not None:
            for pages in self._slots:
                pages.track_since(self._restored_id, self._slots.keys.count)

    def _load_rows(self, serializer: StateSerializer, table: pa.Table) -> None:
        if self._slots is not None and serializer.name in self._slots:
            self._load_slots(self._slots, serializer, table)
            return
        for namespace, keys, _, values in self._rows.key_batches(serializer, table):
            self._load_by_key(serializer, namespace, keys, values)

    def _load_by_key(self, serializer: StateSerializer, namespace: bytes, keys: list[bytes], values: list[Any]) -> None:
        active = self._state_table(serializer, namespace).active
        table_ttl = self._table_ttls.get((serializer.name, namespace))
        if table_ttl is not None:
            table_ttl.load(keys, values)
        if serializer.kind in ("list", "map"):
            _merge(active, keys, values)
        else:
            active.update(zip(keys, values, strict=True))

    def _load_slots(self, slots: SlotTables, serializer: StateSerializer, table: pa.Table) -> None:
        pages, table_ttl = slots[serializer.name], self._slot_ttls.get(serializer.name)
        for namespace, keys, values in self._column_batches(serializer, table):
            if namespace:
                self._load_by_key(serializer, namespace, keys.encoded(), values)
                continue
            found = slots.slots_of(keys)
            if table_ttl is not None:
                table_ttl.load(found.tolist(), values)
            if serializer.kind in ("list", "map"):
                pages.merge(found, values)
            else:
                pages.load(found, values)

    def _column_batches(self, serializer: StateSerializer, table: pa.Table) -> Iterator[tuple[bytes, KeyColumn, list[Any]]]:
        """(namespace, keys, value of each); a list or map may come in several."""
        if serializer.kind not in ("list", "map"):
            yield from self._rows.column_batches(serializer, table)
            return
        for namespace, keys, _, values in self._rows.key_batches(serializer, table):
            yield namespace, self._column_of(self.key_type.arrays_of_encoded(keys)), values

    def _load_deltas(self, meta: StateMeta, table: pa.Table, deltas: Sequence[pa.Table]) -> bool:
        """For states with one row per key and no TTL: load the newest row of each key, a few key groups at a time."""
        if meta.kind not in _ROW_KINDS or meta.name in self._state_ttls:
            return False
        serializer = self._serializers[meta.name]
        for rows in newest_rows(table, deltas, self.key_type, self.max_parallelism):
            self._load_rows(serializer, rows)
        return True


def _merge(active: dict[Any, Any], keys: list[bytes], values: list[Any]) -> None:
    for key, value in zip(keys, values, strict=True):
        if isinstance(value, list):
            active.setdefault(key, []).extend(value)
        else:
            entries = active.get(key)
            if entries is None:
                entries = active[key] = MapLayer()
            entries.update(value)


class MemoryKeyedBackend(HeapKeyedBackend):
    """Backend `memory`: checkpoints are whole tables. Those below `inline_bytes` are inline; a checkpoint fails with
    SnapshotTooLargeError where these have more than `snapshot_bytes_max` bytes together."""

    def __init__(self, config: KeyedBackendConfig, *, inline_bytes: int, snapshot_bytes_max: int) -> None:
        super().__init__(config)
        self._inline_bytes = inline_bytes
        self._snapshot_bytes_max = snapshot_bytes_max

    def _pending(self, sources: list[ChangingSource]) -> TablesSnapshot:
        return WholeSnapshot(sources, self._key_groups, self._inline_bytes, self._admit)

    def _admit(self, size: int) -> None:
        if size > self._snapshot_bytes_max:
            raise SnapshotTooLargeError(
                f"operator {self._operator!r} subtask {self._subtask}: its small tables have more than the "
                f"{self._snapshot_bytes_max} bytes that the memory backend sends to the coordinator; raise "
                "memory_snapshot_bytes_max, or use the filesystem or rocksdb backend",
                operator=self._operator,
                subtask=self._subtask,
                size=size,
                limit=self._snapshot_bytes_max,
            )


class WholeSnapshot(TablesSnapshot):
    """Snapshot of the backend `memory`: whole tables, uncompressed; savepoints as usual."""

    def __init__(
        self, sources: list[ChangingSource], key_groups: KeyGroupRange, inline_bytes: int, admit: Callable[[int], None]
    ) -> None:
        super().__init__(sources, key_groups)
        self._inline_bytes = inline_bytes
        self._admit = admit

    def _write_whole(self, target: SnapshotTarget) -> Flow[KeyedStateHandle]:
        if target.canonical:
            return write_tables(self._sources, self._key_groups, target)
        own = replace(target, inline_threshold=self._inline_bytes)
        return write_tables(self._sources, self._key_groups, own, self._admit, compresses=False)


class FilesystemKeyedBackend(HeapKeyedBackend):
    """Backend `filesystem`: parts below the inline threshold travel in the acknowledgement, all others are files."""
