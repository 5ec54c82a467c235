"""State objects that user functions see, over copy-on-write tables; the same for every backend.

They follow the backend's current key, and decide when a value is copied: when a pinned layer holds it and it can be changed in
place. They don't know what lies below the layers. For the loop thread only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from holdfast.statebackends.errors import InvalidConfigError, InvariantError
from holdfast.statebackends.heap.map_table import CopyOnWriteMapTable
from holdfast.statebackends.heap.state_table import MISSING, TOMBSTONE, CopyOnWriteStateTable, MapLayer
from holdfast.statebackends.serialization.type_serializer import Copier
from holdfast.statebackends.serialization.value_checks import Checks
from holdfast.statebackends.state import (
    AggregateFunction,
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    ValueStateDescriptor,
)

V = TypeVar("V")
K = TypeVar("K")
IN = TypeVar("IN")
ACC = TypeVar("ACC")
OUT = TypeVar("OUT")


class KeyContext:
    """The current key: its canonical bytes and its key group."""

    __slots__ = ("has_slot", "key", "key_group")

    key: bytes
    key_group: int

    def __init__(self) -> None:
        self.has_slot = False
        """Whether the key's slot is known: see slot_states.SlotContext."""

    def leave_slot(self) -> None:
        """Another key was set."""

    def __getattr__(self, name: str) -> Any:
        raise InvariantError("keyed state was used outside of a record and of a timer: there is no current key")


class HeapValueState(Generic[V]):
    """Implements `state.ValueState`."""

    __slots__ = ("__weakref__", "_check", "_context", "_copy", "_table")

    def __init__(
        self, context: KeyContext, table: CopyOnWriteStateTable, copy: Copier | None, checks: Checks | None = None
    ) -> None:
        """`copy`: None for values that can't be changed in place. `checks`: None if the caller checks values; so in every class."""
        self._context = context
        self._table = table
        self._copy = copy
        self._check = None if checks is None else checks.value

    def value(self, default: V | None = None) -> V | None:
        table = self._table
        found = table.active.get(self._context.key, MISSING)
        if found is not MISSING and found is not TOMBSTONE:
            active: V = found
            return active
        if not table.layered:
            return default
        found, frozen = table.find(self._context.key)
        if found is MISSING:
            return default
        value: V = self._copy(found) if frozen and self._copy is not None else found
        return value

    def update(self, value: V) -> None:
        if self._check is not None:
            self._check(value)
        self._table.active[self._context.key] = value

    def store(self, value: V) -> None:
        """`update`, unchecked, of a value that no user made. Not part of the contract."""
        self._table.active[self._context.key] = value

    def clear(self) -> None:
        self._table.remove(self._context.key)


class HeapListState(Generic[V]):
    """Implements `state.ListState`. `get` returns a new list."""

    __slots__ = ("__weakref__", "_checks", "_context", "_copy", "_table")

    def __init__(
        self, context: KeyContext, table: CopyOnWriteStateTable, copy: Copier | None, checks: Checks | None = None
    ) -> None:
        """`copy` copies one element."""
        self._context = context
        self._table = table
        self._copy = copy
        self._checks = checks

    def get(self) -> list[V]:
        found, frozen = self._table.find(self._context.key)
        if found is MISSING:
            return []
        return self._own(found) if frozen else list(found)

    def add(self, value: V) -> None:
        if self._checks is not None:
            self._checks.value(value)
        self._active().append(value)

    def add_all(self, values: Iterable[V]) -> None:
        self.extend(list(values))

    def extend(self, values: list[V]) -> bool:
        """`add_all`; whether the list was empty before. Not part of the contract."""
        if self._checks is not None:
            self._checks.values(values)
        if not values:
            return False
        active = self._active()
        was_empty = not active
        active.extend(values)
        return was_empty

    def update(self, values: Iterable[V]) -> None:
        replacement = list(values)
        if self._checks is not None:
            self._checks.values(replacement)
        if replacement:
            self._table.active[self._context.key] = replacement
        else:
            self.clear()

    def clear(self) -> None:
        self._table.remove(self._context.key)

    def _active(self) -> list[V]:
        """The current key's list, moved to the active layer so that it can be appended to."""
        found, frozen = self._table.find(self._context.key)
        if found is MISSING:
            found = []
        elif frozen:
            found = self._own(found)
        self._table.active[self._context.key] = found
        values: list[V] = found
        return values

    def _own(self, values: list[V]) -> list[V]:
        return list(values) if self._copy is None else [self._copy(value) for value in values]


class HeapMapState(Generic[K, V]):
    """Implements `state.MapState`. Iteration is over the entries as they are when it begins."""

    __slots__ = ("__weakref__", "_check", "_check_key", "_context", "_copy", "_table")

    def __init__(
        self, context: KeyContext, table: CopyOnWriteMapTable, copy: Copier | None, checks: Checks | None = None
    ) -> None:
        self._context = context
        self._table = table
        self._copy = copy
        self._check = None if checks is None else checks.value
        self._check_key = None if checks is None else checks.key

    def get(self, key: K, default: V | None = None) -> V | None:
        found, frozen = self._table.find_entry(self._context.key, key)
        if found is MISSING:
            return default
        value: V = self._copy(found) if frozen and self._copy is not None else found
        return value

    def put(self, key: K, value: V) -> None:
        if self._check is not None and self._check_key is not None:
            self._check_key(key)
            self._check(value)
        active = self._table.active
        entries = active.get(self._context.key)
        if entries is None:
            entries = active[self._context.key] = MapLayer()
        entries[key] = value

    def remove(self, key: K) -> None:
        self._table.remove_entry(self._context.key, key)

    def contains(self, key: K) -> bool:
        return self._table.find_entry(self._context.key, key)[0] is not MISSING

    def items(self) -> Iterator[tuple[K, V]]:
        entries, frozen = self._table.entries(self._context.key)
        copy = self._copy
        for key, value in entries.items():
            yield key, copy(value) if copy is not None and key in frozen else value

    def keys(self) -> Iterator[K]:
        return iter(self._table.entries(self._context.key)[0])

    def values(self) -> Iterator[V]:
        return (value for _, value in self.items())

    def is_empty(self) -> bool:
        return not self._table.entries(self._context.key)[0]

    def clear(self) -> None:
        self._table.remove(self._context.key)


class HeapReducingState(HeapValueState[V]):
    """Implements `state.AppendingState` with a reduce function."""

    __slots__ = ("_reduce",)

    def __init__(
        self,
        context: KeyContext,
        table: CopyOnWriteStateTable,
        copy: Copier | None,
        reduce: Callable[[V, V], V],
        checks: Checks | None = None,
    ) -> None:
        super().__init__(context, table, copy, checks)
        self._reduce = reduce

    def get(self) -> V | None:
        return self.value()

    def add(self, value: V) -> None:
        old = self.value()
        self.update(value if old is None else self._reduce(old, value))


class HeapAggregatingState(HeapValueState[ACC], Generic[IN, ACC, OUT]):
    """Implements `state.AppendingState` with an AggregateFunction."""

    __slots__ = ("_aggregate",)

    def __init__(
        self,
        context: KeyContext,
        table: CopyOnWriteStateTable,
        copy: Copier | None,
        aggregate: AggregateFunction[IN, ACC, OUT],
        checks: Checks | None = None,
    ) -> None:
        super().__init__(context, table, copy, checks)
        self._aggregate = aggregate

    def get(self) -> OUT | None:
        accumulator = self.value()
        return None if accumulator is None else self._aggregate.get_result(accumulator)

    def add(self, value: IN) -> None:
        accumulator = self.value()
        if accumulator is None:
            accumulator = self._aggregate.create_accumulator()
        self.update(self._aggregate.add(value, accumulator))


def create_state(
    descriptor: Any, context: KeyContext, table: CopyOnWriteStateTable, copy: Copier | None, checks: Checks
) -> Any:
    """The state object of a descriptor. Raises InvalidConfigError for a kind that isn't keyed by row."""
    match descriptor:
        case ValueStateDescriptor():
            return HeapValueState(context, table, copy, checks)
        case ListStateDescriptor():
            return HeapListState(context, table, copy, checks)
        case MapStateDescriptor() if isinstance(table, CopyOnWriteMapTable):
            return HeapMapState(context, table, copy, checks)
        case ReducingStateDescriptor():
            return HeapReducingState(context, table, copy, descriptor.reduce, checks)
        case AggregatingStateDescriptor():
            return HeapAggregatingState(context, table, copy, descriptor.aggregate, checks)
    raise InvalidConfigError(f"{descriptor!r} has no state object for one key", state=getattr(descriptor, "name", ""))
