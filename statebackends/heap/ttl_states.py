"""State objects of states with a TTL: those of states.py over stamped values, (ms, value).

An access drops the expired values that it meets, and no result is built on one: adding to an expired sum starts a new one. Where
reads count, a read writes the value with a new stamp, once for each time that the runtime sets. Which values have expired, and
their cleanup, is for ttl.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.heap.map_table import CopyOnWriteMapTable
from holdfast.statebackends.heap.state_table import MISSING, CopyOnWriteStateTable
from holdfast.statebackends.heap.states import HeapListState, HeapMapState, HeapValueState, KeyContext
from holdfast.statebackends.heap.ttl import TableTtl
from holdfast.statebackends.serialization.type_serializer import Copier
from holdfast.statebackends.serialization.value_checks import Checks
from holdfast.statebackends.state import (
    AggregateFunction,
    AggregatingStateDescriptor,
    ListState,
    ListStateDescriptor,
    MapState,
    MapStateDescriptor,
    ReducingStateDescriptor,
    ValueStateDescriptor,
)

V = TypeVar("V")
K = TypeVar("K")
IN = TypeVar("IN")
ACC = TypeVar("ACC")
OUT = TypeVar("OUT")


class TtlValueState(Generic[V]):
    """Implements `state.ValueState`."""

    __slots__ = ("__weakref__", "_checks", "_context", "_stored", "_ttl")

    def __init__(
        self, context: KeyContext, table: CopyOnWriteStateTable, copy: Copier | None, checks: Checks, ttl: TableTtl
    ) -> None:
        """`copy` copies a value with its stamp."""
        self._context = context
        self._stored: HeapValueState[Any] = HeapValueState(context, table, copy)
        self._ttl = ttl
        self._checks = checks

    def value(self, default: V | None = None) -> V | None:
        found: Any = self._stored.value(MISSING)
        ttl = self._ttl
        if found is not MISSING:
            stamp_ms, value = found
            now_ms = ttl.clock.now_ms
            if stamp_ms <= now_ms - ttl.duration_ms:
                self._stored.clear()
                default = value if ttl.shows_expired else default
            else:
                default = value
                if ttl.refreshes and stamp_ms < now_ms:
                    self.update(value)
        ttl.accessed()
        return default

    def update(self, value: V) -> None:
        self._checks.value(value)
        self._stored.update((self._ttl.clock.now_ms, value))
        self._ttl.stamped(self._context.key)

    def clear(self) -> None:
        self._stored.clear()
        self._ttl.accessed()

    def _unexpired(self) -> V | None:
        """The value to combine with an added one; None if there is none, or it has expired."""
        found: Any = self._stored.value(MISSING)
        if found is MISSING or found[0] <= self._ttl.clock.now_ms - self._ttl.duration_ms:
            return None
        value: V = found[1]
        return value


class TtlReducingState(TtlValueState[V]):
    """Implements `state.AppendingState` with a reduce function."""

    __slots__ = ("_reduce",)

    def __init__(
        self,
        context: KeyContext,
        table: CopyOnWriteStateTable,
        copy: Copier | None,
        checks: Checks,
        ttl: TableTtl,
        reduce: Callable[[V, V], V],
    ) -> None:
        super().__init__(context, table, copy, checks, ttl)
        self._reduce = reduce

    def get(self) -> V | None:
        return self.value()

    def add(self, value: V) -> None:
        old = self._unexpired()
        self.update(value if old is None else self._reduce(old, value))


class TtlAggregatingState(TtlValueState[ACC], Generic[IN, ACC, OUT]):
    """Implements `state.AppendingState` with an AggregateFunction."""

    __slots__ = ("_aggregate",)

    def __init__(
        self,
        context: KeyContext,
        table: CopyOnWriteStateTable,
        copy: Copier | None,
        checks: Checks,
        ttl: TableTtl,
        aggregate: AggregateFunction[IN, ACC, OUT],
    ) -> None:
        super().__init__(context, table, copy, checks, ttl)
        self._aggregate = aggregate

    def get(self) -> OUT | None:
        accumulator = self.value()
        return None if accumulator is None else self._aggregate.get_result(accumulator)

    def add(self, value: IN) -> None:
        accumulator = self._unexpired()
        if accumulator is None:
            accumulator = self._aggregate.create_accumulator()
        self.update(self._aggregate.add(value, accumulator))


class TtlListState(Generic[V]):
    """Implements `state.ListState`; each element expires by itself."""

    __slots__ = ("__weakref__", "_checks", "_context", "_stored", "_ttl")

    def __init__(self, context: KeyContext, stored: ListState[tuple[int, V]], checks: Checks, ttl: TableTtl) -> None:
        """`stored`: the elements with their stamps, unchecked."""
        self._context = context
        self._stored = stored
        self._ttl = ttl
        self._checks = checks

    def get(self) -> list[V]:
        found = self._stored.get()
        ttl = self._ttl
        now_ms = ttl.clock.now_ms
        horizon_ms = now_ms - ttl.duration_ms
        kept = [element for element in found if element[0] > horizon_ms]
        if ttl.refreshes and any(element[0] < now_ms for element in kept):
            self._stored.update([(max(stamp_ms, now_ms), value) for stamp_ms, value in kept])
            self._stamped()
        elif len(kept) < len(found):
            self._stored.update(kept)
        ttl.accessed()
        return [value for _, value in (found if ttl.shows_expired else kept)]

    def add(self, value: V) -> None:
        self._checks.value(value)
        self._stored.add((self._ttl.clock.now_ms, value))
        self._stamped()

    def add_all(self, values: Iterable[V]) -> None:
        given = list(values)
        self._checks.values(given)
        now_ms = self._ttl.clock.now_ms
        added = [(now_ms, value) for value in given]
        if added:
            self._stored.add_all(added)
            self._stamped()

    def update(self, values: Iterable[V]) -> None:
        given = list(values)
        self._checks.values(given)
        now_ms = self._ttl.clock.now_ms
        self._stored.update([(now_ms, value) for value in given])
        self._stamped()

    def clear(self) -> None:
        self._stored.clear()
        self._ttl.accessed()

    def _stamped(self) -> None:
        self._ttl.stamped(self._context.key)


class TtlMapState(Generic[K, V]):
    """Implements `state.MapState`; each entry expires by itself. Iteration reads all entries when it begins."""

    __slots__ = ("__weakref__", "_checks", "_context", "_stored", "_ttl")

    def __init__(self, context: KeyContext, stored: MapState[K, Any], checks: Checks, ttl: TableTtl) -> None:
        """`stored`: the values with their stamps, unchecked."""
        self._context = context
        self._stored = stored
        self._ttl = ttl
        self._checks = checks

    def get(self, key: K, default: V | None = None) -> V | None:
        found: Any = self._stored.get(key, MISSING)
        if found is not MISSING:
            found = self._read(key, found)
        self._ttl.accessed()
        return default if found is MISSING else found

    def put(self, key: K, value: V) -> None:
        self._checks.key(key)
        self._checks.value(value)
        self._stored.put(key, (self._ttl.clock.now_ms, value))
        self._stamped(key)

    def remove(self, key: K) -> None:
        self._stored.remove(key)
        self._ttl.accessed()

    def contains(self, key: K) -> bool:
        return self.get(key, MISSING) is not MISSING  # type: ignore[arg-type]

    def items(self) -> Iterator[tuple[K, V]]:
        entries = [(key, self._read(key, found)) for key, found in self._stored.items()]
        self._ttl.accessed()
        return ((key, value) for key, value in entries if value is not MISSING)

    def keys(self) -> Iterator[K]:
        return (key for key, _ in self.items())

    def values(self) -> Iterator[V]:
        return (value for _, value in self.items())

    def is_empty(self) -> bool:
        horizon_ms = self._ttl.clock.now_ms - self._ttl.duration_ms
        return not any(self._ttl.shows_expired or stamp_ms > horizon_ms for stamp_ms, _ in self._stored.values())

    def clear(self) -> None:
        self._stored.clear()
        self._ttl.accessed()

    def _read(self, key: K, found: tuple[int, V]) -> Any:
        """The value, or MISSING if it has expired; sets the stamp where reads count."""
        ttl = self._ttl
        stamp_ms, value = found
        now_ms = ttl.clock.now_ms
        if stamp_ms <= now_ms - ttl.duration_ms:
            self._stored.remove(key)
            return value if ttl.shows_expired else MISSING
        if ttl.refreshes and stamp_ms < now_ms:
            self.put(key, value)
        return value

    def _stamped(self, key: K) -> None:
        self._ttl.stamped((self._context.key, key))


def create_ttl_state(
    descriptor: Any, context: KeyContext, table: CopyOnWriteStateTable, copy: Copier | None, checks: Checks, ttl: TableTtl
) -> Any:
    """The state object of a descriptor with a TTL. Raises InvalidConfigError for a kind that isn't keyed by row."""
    match descriptor:
        case ValueStateDescriptor():
            return TtlValueState(context, table, copy, checks, ttl)
        case ListStateDescriptor():
            return TtlListState(context, HeapListState(context, table, copy), checks, ttl)
        case MapStateDescriptor() if isinstance(table, CopyOnWriteMapTable):
            return TtlMapState(context, HeapMapState(context, table, copy), checks, ttl)
        case ReducingStateDescriptor():
            return TtlReducingState(context, table, copy, checks, ttl, descriptor.reduce)
        case AggregatingStateDescriptor():
            return TtlAggregatingState(context, table, copy, checks, ttl, descriptor.aggregate)
    raise InvalidConfigError(f"{descriptor!r} has no state object for one key", state=getattr(descriptor, "name", ""))
