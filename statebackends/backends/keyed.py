"""Base of the keyed backends: the current key, declared states, columnar state, timers, snapshots and restores of tables.

Subclasses decide where the rows of value, list, map, reducing and aggregating states live. Columnar state, row tables and timers
live in memory in every backend, and are tables of their own in its snapshots."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.statebackends.backend import KeptState, KeyCourse, PendingSnapshot, TimerRowProvider
from holdfast.statebackends.columnar.state import NumpyColumnarState
from holdfast.statebackends.errors import (
    CorruptStateError,
    IncompatibleStateError,
    InvalidConfigError,
    InvariantError,
    StateValueError,
    UnclaimedStateError,
    UndeclaredStateError,
)
from holdfast.statebackends.handles import DELTA_FORMATS, TABLE_FORMATS, KeyedStateHandle, KeyGroupRange, StateHandle, StateMeta
from holdfast.statebackends.heap.state_table import CopyOnWriteStateTable
from holdfast.statebackends.heap.states import KeyContext, create_state
from holdfast.statebackends.heap.ttl import IncrementalCleanup, StateTtl, TableTtl, TtlClock
from holdfast.statebackends.heap.ttl_states import create_ttl_state
from holdfast.statebackends.layout import file_name
from holdfast.statebackends.row_tables.table import SortedRowTable
from holdfast.statebackends.serialization.key_texts import KeyOf
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.serialization.state_serializer import (
    COLUMNAR_KIND,
    ROW_TABLE_KIND,
    TIMERS_KIND,
    StateSerializer,
    check_compatible,
    has_stamps,
    not_widened,
    state_metas,
)
from holdfast.statebackends.settings import ROW_TABLE_BYTES_MAX
from holdfast.statebackends.snapshot.deltas import StatePart, merged_deltas, of_few_values, own_keys_of, part_batches, state_parts
from holdfast.statebackends.snapshot.increments import ChainsByCheckpoint, restored_chains
from holdfast.statebackends.snapshot.list_order import in_list_order
from holdfast.statebackends.snapshot.parts import read_parts
from holdfast.statebackends.snapshot.row_rules import RowRules
from holdfast.statebackends.snapshot.rows import KeyedRows, stamped_rows, unexpired_rows
from holdfast.statebackends.snapshot.sources import (
    ChangingSource,
    ColumnarSource,
    RestoredSource,
    RowTableSource,
    TimerSource,
    columnar_rows,
    load_row_table,
    timer_meta,
    timer_rows,
)
from holdfast.statebackends.snapshot.table_file import decode_keyed_table
from holdfast.statebackends.state import (
    ColumnarStateDescriptor,
    KeyColumn,
    OperatorListStateDescriptor,
    RowTableStateDescriptor,
    StateDescriptor,
)
from holdfast.statebackends.storage.failures import refusal
from holdfast.statebackends.storage.port import Storage, run_flow

NAMESPACES_MIN = 4_096
"""Namespaces that a backend holds before it looks for idle ones between two barriers."""


@dataclass(frozen=True, slots=True)
class KeyedBackendConfig:
    """The subtask whose state a backend holds, and its declarations."""

    descriptors: tuple[StateDescriptor, ...]
    """All states that the operator declares; operator list states are ignored."""
    key_type: KeyType
    key_groups: KeyGroupRange
    max_parallelism: int
    operator: str
    """Uid, for errors."""
    subtask: int
    allow_unclaimed_state: bool = False
    """Drop stored states that are not declared, instead of refusing them."""
    now_ms: int | None = None
    """Processing time at the start, ms since the epoch; None only for operators without TTLs."""
    local_dir: str = ""
    """A folder of this deployment alone, which need not exist; row tables larger than `row_table_bytes_max` have files in it."""
    row_table_bytes_max: int = ROW_TABLE_BYTES_MAX


class KeyedBackendBase(ABC):
    """Implements `backend.KeyedStateBackend`, except where rows live."""

    native_format: str | None = None
    """Format of handles that only this backend reads; None: it has no such format."""

    def __init__(self, config: KeyedBackendConfig) -> None:
        """Raises InvalidConfigError for a repeated state name or an invalid type."""
        key_type = config.key_type
        keyed = [descriptor for descriptor in config.descriptors if not isinstance(descriptor, OperatorListStateDescriptor)]
        self._rows = KeyedRows(key_type, config.max_parallelism, config.operator)
        self._key_groups = config.key_groups
        self._operator = config.operator
        self._subtask = config.subtask
        self._allow_unclaimed_state = config.allow_unclaimed_state
        self._local_dir = config.local_dir
        self._context = KeyContext()
        self._metas = {meta.name: meta for meta in state_metas(keyed, key_type)}
        self._descriptors = {descriptor.name: descriptor for descriptor in keyed}
        self._serializers: dict[str, StateSerializer] = {}
        self._clock = TtlClock(config.now_ms or 0)
        self._state_ttls: dict[str, StateTtl] = {}
        self._columnar: dict[str, NumpyColumnarState] = {}
        self._row_tables: dict[str, SortedRowTable] = {}
        for descriptor in keyed:
            if isinstance(descriptor, ColumnarStateDescriptor):
                self._columnar[descriptor.name] = NumpyColumnarState(
                    descriptor, key_type.arrow_types, self._column_of, self._operator
                )
            elif isinstance(descriptor, RowTableStateDescriptor):
                self._row_tables[descriptor.name] = SortedRowTable(
                    descriptor,
                    key_type.arrow_types,
                    self._column_of,
                    self._operator,
                    bytes_max=config.row_table_bytes_max,
                    folder=os.path.join(config.local_dir, f"rows-{file_name(descriptor.name)}"),
                )
            else:
                serializer = self._serializers[descriptor.name] = StateSerializer.of(descriptor, key_type)
                if descriptor.ttl is not None:
                    self._state_ttls[descriptor.name] = StateTtl(serializer, descriptor.ttl, self._clock)
        if self._state_ttls and config.now_ms is None:
            raise InvariantError(f"operator {self._operator!r}: state with a TTL needs the time")
        self._states: dict[tuple[str, bytes], Any] = {}
        self._namespaced_states: WeakValueDictionary[tuple[str, bytes], Any] = WeakValueDictionary()
        self._state_tables: dict[tuple[str, bytes], CopyOnWriteStateTable] = {}
        self._table_ttls: dict[tuple[str, bytes], TableTtl] = {}
        self._namespaces_max = NAMESPACES_MIN  # above it idle ones are forgotten, and the bound is set again
        self._chains: ChainsByCheckpoint | None = None  # of a backend that writes increments
        self._restored_id: int | None = None  # of the checkpoint that its first increment may build on
        self._timers: dict[str, TimerRowProvider] = {}
        self._restored_timers: dict[str, pa.Table] = {}
        self._rules: dict[StateMeta, RowRules] = {}
        self._taken_over: frozenset[str] = frozenset()  # states that no restore loads

    # ------------------------------------------------------------------------------------------------------ while running

    @property
    def key_groups(self) -> KeyGroupRange:
        return self._key_groups

    @property
    def max_parallelism(self) -> int:
        return self._rows.max_parallelism

    @property
    def key_type(self) -> KeyType:
        return self._rows.key_type

    @property
    def current_key(self) -> tuple[bytes, int]:
        return self._context.key, self._context.key_group

    def set_current_key(self, encoded_key: bytes, key_group: int) -> None:
        context = self._context
        context.key = encoded_key
        context.key_group = key_group

    def each_key(self, keys: KeyColumn) -> KeyCourse:
        return KeyCourse(self._context, ("key", "key_group"), (keys.encoded(), keys.key_groups.tolist()))

    def get_state(self, descriptor: StateDescriptor, namespace: bytes = b"") -> Any:
        states = self._namespaced_states if namespace else self._states
        state = states.get((descriptor.name, namespace))
        if state is None:
            serializer = self._serializer(descriptor.name)
            declared = self._descriptors[descriptor.name]
            if declared.kind != descriptor.kind:
                self._undeclared(descriptor.name)
            state_table = self._state_table(serializer, namespace)
            table_ttl = self._table_ttls.get((serializer.name, namespace))
            if table_ttl is None:
                state = create_state(declared, self._context, state_table, serializer.copy, serializer.checks)
            else:
                state = create_ttl_state(declared, self._context, state_table, serializer.copy, serializer.checks, table_ttl)
            states[descriptor.name, namespace] = state
        return state

    @property
    def uses_processing_time(self) -> bool:
        return bool(self._state_ttls)

    def set_processing_time(self, now_ms: int) -> None:
        self._clock.now_ms = now_ms

    @property
    def writes_behind(self) -> bool:
        return bool(self._row_tables)

    def write_behind(self) -> bool:
        return any(table.work() for table in self._row_tables.values() if table.has_work)

    def columnar_state(self, descriptor: ColumnarStateDescriptor, key_names: Sequence[str]) -> NumpyColumnarState:
        state = self._columnar.get(descriptor.name)
        if state is None:
            self._undeclared(descriptor.name)
        state.key_names = self._checked_names(key_names)
        return state

    def row_table(self, descriptor: RowTableStateDescriptor, key_names: Sequence[str]) -> SortedRowTable:
        table = self._row_tables.get(descriptor.name)
        if table is None or table.descriptor.schema != descriptor.schema:
            self._undeclared(descriptor.name)
        table.name_keys(self._checked_names(key_names))
        return table

    def _checked_names(self, key_names: Sequence[str]) -> tuple[str, ...]:
        if len(key_names) != len(self.key_type.fields):
            raise InvalidConfigError(
                f"operator {self._operator!r}: a key of type {self.key_type.text} has {len(self.key_type.fields)} fields, "
                f"not {len(key_names)}",
                operator=self._operator,
            )
        return tuple(key_names)

    def register_timers(self, name: str, provider: TimerRowProvider) -> None:
        if name in self._metas or name in self._timers:
            raise InvalidConfigError(
                f"operator {self._operator!r}: {name!r} is the name of another state", operator=self._operator, state=name
            )
        self._timers[name] = provider
        restored = self._restored_timers.pop(name, None)
        if restored is not None:
            provider.load(timer_rows(self._rows, restored))
            if self._restored_id is not None:
                provider.track_since(self._restored_id)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:  # noqa: B027 - complete as it is
        """No work: a snapshot's pins are released with its flow."""

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        if self._chains is not None:
            self._chains.forget(checkpoint_id)

    def erase(self, key: KeyOf, states: frozenset[str] | None = None) -> bool:
        group = self.key_type.key_group(key.value, self.max_parallelism)
        if group not in self._key_groups:
            return False
        for name, serializer in self._serializers.items():
            if states is None or name in states:
                for namespace in self._namespaces_of(serializer, key.encoded, group):
                    self._state_table(serializer, namespace).remove(key.encoded)
        column = self._column_of(self.key_type.arrays_of_encoded([key.encoded]))
        for name, state in self._columnar.items():
            if states is None or name in states:
                state.erase(column)
        for name, rows in self._row_tables.items():
            if states is None or name in states:
                rows.delete(rows.rows_of(column))
        self._erase_timers(key, states)
        return True

    def _erase_timers(self, key: KeyOf, states: frozenset[str] | None) -> None:
        for name, provider in self._timers.items():
            if states is None or name in states:
                provider.erase(key.encoded)
        for name, table in self._restored_timers.items():
            if states is None or name in states:
                self._restored_timers[name] = table.filter(pc.invert(key.mask(table)))

    def _namespaces_of(self, serializer: StateSerializer, encoded_key: bytes, key_group: int) -> list[bytes]:
        """Namespaces in which a state may have rows of a key."""
        return [namespace for name, namespace in self._state_tables if name == serializer.name]

    @abstractmethod
    def keys(self, state_name: str, namespace: bytes = b"") -> Iterator[bytes]: ...

    @abstractmethod
    def snapshot(self, checkpoint_id: int) -> PendingSnapshot: ...

    @abstractmethod
    def state_size(self) -> int: ...

    def _memory_size(self) -> int:
        """Bytes of what every backend holds in memory; an estimate."""
        return sum(each.size() for each in self._columnar.values()) + sum(each.size() for each in self._row_tables.values())

    @abstractmethod
    def dispose(self) -> None: ...

    @abstractmethod
    def _new_state_table(self, serializer: StateSerializer, namespace: bytes) -> CopyOnWriteStateTable: ...

    @abstractmethod
    def _load_rows(self, serializer: StateSerializer, table: pa.Table) -> None:
        """Add the rows of a table of one of `self._serializers`."""

    @abstractmethod
    def _is_idle(self, state_table: CopyOnWriteStateTable) -> bool:
        """Whether the table can be forgotten without losing rows or changes."""

    def _restore_native(  # noqa: B027 - most have no native format
        self, handles: Sequence[KeyedStateHandle], storage: Storage, folder: str, checkpoint_id: int | None
    ) -> None:
        """Load handles of `native_format` whose states fit the declared ones. `checkpoint_id` as for `restore`."""

    def _state_table(self, serializer: StateSerializer, namespace: bytes) -> CopyOnWriteStateTable:
        state_table = self._state_tables.get((serializer.name, namespace))
        if state_table is None:
            if len(self._state_tables) > self._namespaces_max:
                self._forget_namespaces()
                self._namespaces_max = 2 * len(self._state_tables) + NAMESPACES_MIN  # so that a look costs O(1) per new one
            state_table = self._state_tables[serializer.name, namespace] = self._new_state_table(serializer, namespace)
            state_ttl = self._state_ttls.get(serializer.name)
            if state_ttl is not None:
                self._table_ttls[serializer.name, namespace] = self._new_table_ttl(state_ttl, state_table)
        return state_table

    def _new_table_ttl(self, state_ttl: StateTtl, state_table: CopyOnWriteStateTable) -> TableTtl:
        return IncrementalCleanup(state_ttl, state_table) if state_ttl.config.cleanup_entries else TableTtl(state_ttl)

    def _freeze_horizons(self) -> None:
        """Fix, on the loop thread, what the snapshot leaves out as expired."""
        for state_ttl in self._state_ttls.values():
            state_ttl.freeze_horizon()

    def _barrier_horizon_ms(self, name: str) -> int | None:
        """A snapshot leaves out values stamped at or before it; None for state without a TTL."""
        state_ttl = self._state_ttls.get(name)
        return None if state_ttl is None else state_ttl.barrier_horizon_ms

    def _forget_namespaces(self) -> dict[tuple[str, bytes], CopyOnWriteStateTable]:
        """Forget idle namespaces whose state object is no longer in use; returns their tables.

        At a barrier, and between two when there are many: a window of each ms would leave one behind each."""
        idle = [
            place
            for place, state_table in self._state_tables.items()
            if place[1] and self._is_idle(state_table) and place not in self._namespaced_states
        ]
        for place in idle:
            self._table_ttls.pop(place, None)
        return {place: self._state_tables.pop(place) for place in idle}

    def _serializer(self, name: str) -> StateSerializer:
        serializer = self._serializers.get(name)
        if serializer is None:
            self._undeclared(name)
        return serializer

    def _undeclared(self, name: str) -> NoReturn:
        raise UndeclaredStateError(
            f"operator {self._operator!r} has not declared such a state {name!r}", operator=self._operator, state=name
        )

    def _column_of(self, arrays: list[pa.Array]) -> Any:
        return self.key_type.column(arrays, max_parallelism=self.max_parallelism, operator=self._operator)

    # ---------------------------------------------------------------------------------------------------------- snapshots

    def _memory_sources(self) -> list[ChangingSource]:
        """Columnar state, row tables and timers, frozen; timers that were restored and are not registered yet included."""
        sources: list[ChangingSource] = [
            ColumnarSource(self._rows, self._metas[name], state) for name, state in self._columnar.items()
        ]
        sources += [RowTableSource(self._rows, self._metas[name], table) for name, table in self._row_tables.items()]
        sources += [TimerSource(self._rows, name, provider) for name, provider in self._timers.items()]
        sources += [RestoredSource(timer_meta(name, self.key_type), table) for name, table in self._restored_timers.items()]
        return sources

    def _checkpoint_started(self, sources: Sequence[ChangingSource], checkpoint_id: int) -> None:
        """At a barrier of a backend that writes increments: let the sources note their changes."""
        if self._chains is not None:
            base = self._chains.base
            for source in sources:
                reach = self._chains.reach(source.meta.name) if source.takes_in_deltas else base
                source.checkpoint_started(checkpoint_id, reach)

    # ----------------------------------------------------------------------------------------------------------- restoring

    def keep(self) -> KeptState | None:
        return None

    def take_over(self, kept: KeptState, names: frozenset[str]) -> frozenset[str]:
        return frozenset()

    def restore(
        self, handles: Sequence[KeyedStateHandle], storage: Storage, folder: str, *, checkpoint_id: int | None = None
    ) -> None:
        """As `KeyedStateBackend.restore`. Also raises IncompatibleStateError and UnclaimedStateError, before it loads anything."""
        ours = [handle for handle in handles if len(handle.key_groups.intersection(self._key_groups))]
        self._check(ours)
        native = [handle for handle in ours if handle.format == self.native_format]
        self._restore_native(native, storage, folder, checkpoint_id)
        stored = state_parts(ours, operator=self._operator)
        parts = [part for part in stored if not part.is_native and self._declared(part.meta) is not None]
        for some in part_batches([part for part in parts if part.meta.name not in self._taken_over]):
            read = self._read_tables(some, storage, folder)
            for part in some:
                self._restore_tables(part, read)
        if self._chains is not None and checkpoint_id is not None:
            declared = {part.meta.name: meta for part in parts if (meta := self._declared(part.meta)) is not None}
            self._chains.remember(checkpoint_id, restored_chains(parts, self._key_groups, declared))
            self._restored_id = checkpoint_id
            for state_table in self._state_tables.values():
                state_table.track_since(checkpoint_id)
            for state in self._columnar.values():
                state.track_since(checkpoint_id)
            for rows in self._row_tables.values():
                rows.track_since(checkpoint_id)

    def _declared(self, stored: StateMeta) -> StateMeta | None:
        if stored.kind == TIMERS_KIND and stored.name not in self._metas:
            return timer_meta(stored.name, self.key_type)
        return self._metas.get(stored.name)

    def _check(self, handles: Sequence[KeyedStateHandle]) -> None:
        unclaimed: dict[str, int] = {}
        for handle in handles:
            if handle.format not in (*TABLE_FORMATS, *DELTA_FORMATS, self.native_format):
                self._refuse_format(handle.format)
            for position, meta in enumerate(handle.states):
                declared = self._declared(meta)
                if declared is not None:
                    check_compatible(meta, declared, operator=self._operator)
                else:
                    native = handle.format == self.native_format
                    size = handle.size if native else handle.parts[position].length
                    unclaimed[meta.name] = unclaimed.get(meta.name, 0) + size
        if unclaimed and not self._allow_unclaimed_state:
            raise UnclaimedStateError(
                f"operator {self._operator!r} does not declare what the snapshot holds: {', '.join(sorted(unclaimed))}",
                operators={self._operator: sum(unclaimed.values())},
                operator=self._operator,
                states=sorted(unclaimed),
            )

    def _refuse_format(self, stored: str) -> NoReturn:
        raise IncompatibleStateError(
            f"operator {self._operator!r}: native {stored} files can't be read by this backend; restore with the backend that "
            "wrote them, or from a savepoint, which every backend reads",
            operator=self._operator,
            state="*",
            stored=stored,
            declared=self.native_format or "arrow",
        )

    def _read_tables(self, parts: Sequence[StatePart], storage: Storage, folder: str) -> Iterator[bytes]:
        """The bytes of all tables, in order: read together, and released one by one."""
        tables = [table for part in parts for table in part.tables]
        data = run_flow(read_parts(tables, folder, operator=self._operator), storage)
        data.reverse()
        while data:
            yield data.pop()

    def _restore_tables(self, part: StatePart, read: Iterator[bytes]) -> None:
        meta = part.meta
        path = getattr(part.base, "path", f"inline part of state {meta.name!r}")
        table = self._decode_table(part, part.base, part.handle.format, next(read))
        deltas = [self._decode_table(part, delta, "arrow", next(read)) for delta in part.deltas]
        try:
            if meta.name in self._row_tables:
                load_row_table(self._rows, self._row_tables[meta.name], table, deltas)
                return
            if deltas and self._load_deltas(meta, table, deltas):
                return
            if deltas:
                own_keys = own_keys_of(meta.kind)
                table = merged_deltas(table, deltas, self.key_type, self.max_parallelism, own_keys=own_keys, in_order=False)
            self._load_table(meta, table)
        except StateValueError as error:
            raise not_widened(meta, self._metas[meta.name], error, operator=self._operator) from error
        except (CorruptStateError, KeyError, ValueError, TypeError, OverflowError, pa.ArrowException) as error:
            if (refused := refusal(error, f"operator {self._operator!r}: {path}", path=path, operator=self._operator)) is not None:
                raise refused from error
            raise CorruptStateError(
                f"operator {self._operator!r}: {path}: state {meta.name!r}: {error}",
                path=path,
                operator=self._operator,
                reason="table",
            ) from error

    def _load_deltas(self, meta: StateMeta, table: pa.Table, deltas: Sequence[pa.Table]) -> bool:
        """Load a table and its deltas where the backend needs no merged table for it. False: nothing was loaded."""
        return False

    def _decode_table(self, part: StatePart, stored: StateHandle, table_format: str, data: bytes) -> pa.Table:
        path = getattr(stored, "path", f"inline part of state {part.meta.name!r}")
        return decode_keyed_table(
            data,
            table_format,
            self._key_groups,
            path=path,
            operator=self._operator,
            held=part.key_groups,
            judge=lambda table: self._judged(part.meta, table),
        )

    def _judged(self, meta: StateMeta, table: pa.Table) -> pa.Table:
        rules = self._rules.get(meta)
        if rules is None or meta.kind in (COLUMNAR_KIND, ROW_TABLE_KIND):
            rules = self._rules[meta] = RowRules.of(meta, self.key_type, self.max_parallelism, table.schema)
        return rules.judged(table)

    def _load_table(self, meta: StateMeta, table: pa.Table) -> None:
        if meta.kind == TIMERS_KIND:
            provider = self._timers.get(meta.name)
            if provider is not None:
                provider.load(timer_rows(self._rows, table))
            elif meta.name in self._restored_timers:
                self._restored_timers[meta.name] = pa.concat_tables([self._restored_timers[meta.name], table])
            else:
                self._restored_timers[meta.name] = table
        elif meta.name in self._columnar:
            state = self._columnar[meta.name]
            for some in of_few_values(table):
                state.load(*columnar_rows(self._rows, state, some))
        else:
            if meta.kind == "list":  # before expired elements are left out, and leave gaps
                table = in_list_order(table, self.key_type, self.max_parallelism)
            self._load_rows(self._serializers[meta.name], self._timed(meta, table))

    def _timed(self, meta: StateMeta, table: pa.Table) -> pa.Table:
        """The rows for the declared TTL: without expired ones, or stamped now if they were stored without stamps.

        A state that no longer has a TTL ignores its stamps."""
        state_ttl = self._state_ttls.get(meta.name)
        if state_ttl is None:
            return table
        return unexpired_rows(table, state_ttl.horizon_ms) if has_stamps(meta) else stamped_rows(table, self._clock.now_ms)
