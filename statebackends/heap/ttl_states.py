"""The state objects of states with TTL: those of keyedstates.py over values that carry a stamp, (ms, value).

Expired values are dropped when they are met, and nothing is ever built on one: adding to an expired sum starts anew. A read
that counts gives the value a new stamp, which is a write; within one time it happens once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.heap.map_table import CopyOnWriteMapTable
from holdfast.statebackends.heap.state_table import MISSING, CopyOnWriteStateTable
from holdfast.statebackends.heap.states import GenerationalListState, GenerationalMapState, GenerationalValueState, KeyContext
from holdfast.statebackends.heap.ttl import TtlTable
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


class TtlValueState(Generic[V]):
    """`state.ValueState`."""

    __slots__ = ("__weakref__", "_checks", "_context", "_expiry", "_stored")

    def __init__(
        self, context: KeyContext, generations: CopyOnWriteStateTable, copy: Copier | None, checks: Checks, expiry: TtlTable
    ) -> None:
        """`copy` copies a value with its stamp."""
        self._context = context
        self._stored: GenerationalValueState[Any] = GenerationalValueState(context, generations, copy)
        self._expiry = expiry
        self._checks = checks

    def value(self, default: V | None = None) -> V | None:
        found: Any = self._stored.value(MISSING)
        expiry = self._expiry
        if found is not MISSING:
            stamp_ms, value = found
            now_ms = expiry.clock.now_ms
            if stamp_ms <= now_ms - expiry.duration_ms:
                self._stored.clear()
                default = value if expiry.shows_expired else default
            else:
                default = value
                if expiry.refreshes and stamp_ms < now_ms:
                    self.update(value)
        expiry.accessed()
        return default

    def update(self, value: V) -> None:
        self._checks.value(value)
        self._stored.update((self._expiry.clock.now_ms, value))
        self._expiry.stamped(self._context.key)

    def clear(self) -> None:
        self._stored.clear()
        self._expiry.accessed()

    def _unexpired(self) -> V | None:
        """What may be built on."""
        found: Any = self._stored.value(MISSING)
        if found is MISSING or found[0] <= self._expiry.clock.now_ms - self._expiry.duration_ms:
            return None
        value: V = found[1]
        return value


class TtlReducingState(TtlValueState[V]):
    """`state.AppendingState` of a reduce function."""

    __slots__ = ("_reduce",)

    def __init__(
        self,
        context: KeyContext,
        generations: CopyOnWriteStateTable,
        copy: Copier | None,
        checks: Checks,
        expiry: TtlTable,
        reduce: Callable[[V, V], V],
    ) -> None:
        super().__init__(context, generations, copy, checks, expiry)
        self._reduce = reduce

    def get(self) -> V | None:
        return self.value()

    def add(self, value: V) -> None:
        old = self._unexpired()
        self.update(value if old is None else self._reduce(old, value))


class TtlAggregatingState(TtlValueState[ACC], Generic[IN, ACC, OUT]):
    """`state.AppendingState` of an AggregateFunction."""

    __slots__ = ("_aggregate",)

    def __init__(
        self,
        context: KeyContext,
        generations: CopyOnWriteStateTable,
        copy: Copier | None,
        checks: Checks,
        expiry: TtlTable,
        aggregate: AggregateFunction[IN, ACC, OUT],
    ) -> None:
        super().__init__(context, generations, copy, checks, expiry)
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
    """`state.ListState`: every element expires on its own."""

    __slots__ = ("__weakref__", "_checks", "_context", "_expiry", "_stored")

    def __init__(
        self, context: KeyContext, generations: CopyOnWriteStateTable, copy: Copier | None, checks: Checks, expiry: TtlTable
    ) -> None:
        """`copy` copies an element with its stamp."""
        self._context = context
        self._stored: GenerationalListState[tuple[int, V]] = GenerationalListState(context, generations, copy)
        self._expiry = expiry
        self._checks = checks

    def get(self) -> list[V]:
        found = self._stored.get()
        expiry = self._expiry
        now_ms = expiry.clock.now_ms
        horizon_ms = now_ms - expiry.duration_ms
        kept = [element for element in found if element[0] > horizon_ms]
        if expiry.refreshes and any(element[0] < now_ms for element in kept):
            self._stored.update([(max(stamp_ms, now_ms), value) for stamp_ms, value in kept])
            expiry.stamped(self._context.key)
        elif len(kept) < len(found):
            self._stored.update(kept)
        expiry.accessed()
        return [value for _, value in (found if expiry.shows_expired else kept)]

    def add(self, value: V) -> None:
        self._checks.value(value)
        self._stored.add((self._expiry.clock.now_ms, value))
        self._expiry.stamped(self._context.key)

    def add_all(self, values: Iterable[V]) -> None:
        given = list(values)
        self._checks.values(given)
        now_ms = self._expiry.clock.now_ms
        added = [(now_ms, value) for value in given]
        if added:
            self._stored.add_all(added)
            self._expiry.stamped(self._context.key)

    def update(self, values: Iterable[V]) -> None:
        given = list(values)
        self._checks.values(given)
        now_ms = self._expiry.clock.now_ms
        self._stored.update([(now_ms, value) for value in given])
        self._expiry.stamped(self._context.key)

    def clear(self) -> None:
        self._stored.clear()
        self._expiry.accessed()


class TtlMapState(Generic[K, V]):
    """`state.MapState`: every entry expires on its own. Iterating reads all entries, at once."""

    __slots__ = ("__weakref__", "_checks", "_context", "_expiry", "_generations", "_stored")

    def __init__(
        self, context: KeyContext, generations: CopyOnWriteMapTable, copy: Copier | None, checks: Checks, expiry: TtlTable
    ) -> None:
        """`copy` copies a value with its stamp."""
        self._context = context
        self._generations = generations
        self._stored: GenerationalMapState[K, Any] = GenerationalMapState(context, generations, copy)
        self._expiry = expiry
        self._checks = checks

    def get(self, key: K, default: V | None = None) -> V | None:
        found: Any = self._stored.get(key, MISSING)
        if found is not MISSING:
            found = self._read(key, found)
        self._expiry.accessed()
        return default if found is MISSING else found

    def put(self, key: K, value: V) -> None:
        self._checks.key(key)
        self._checks.value(value)
        self._stored.put(key, (self._expiry.clock.now_ms, value))
        self._expiry.stamped((self._context.key, key))

    def remove(self, key: K) -> None:
        self._stored.remove(key)
        self._expiry.accessed()

    def contains(self, key: K) -> bool:
        return self.get(key, MISSING) is not MISSING  # type: ignore[arg-type]

    def items(self) -> Iterator[tuple[K, V]]:
        entries = [(key, self._read(key, found)) for key, found in self._stored.items()]
        self._expiry.accessed()
        return ((key, value) for key, value in entries if value is not MISSING)

    def keys(self) -> Iterator[K]:
        return (key for key, _ in self.items())

    def values(self) -> Iterator[V]:
        return (value for _, value in self.items())

    def is_empty(self) -> bool:
        horizon_ms = self._expiry.clock.now_ms - self._expiry.duration_ms
        stored = self._generations.entries(self._context.key)[0].values()
        return not any(self._expiry.shows_expired or stamp_ms > horizon_ms for stamp_ms, _ in stored)

    def clear(self) -> None:
        self._stored.clear()
        self._expiry.accessed()

    def _read(self, key: K, found: tuple[int, V]) -> Any:
        """The value, or MISSING; its stamp as reading leaves it."""
        expiry = self._expiry
        stamp_ms, value = found
        now_ms = expiry.clock.now_ms
        if stamp_ms <= now_ms - expiry.duration_ms:
            self._stored.remove(key)
            return value if expiry.shows_expired else MISSING
        if expiry.refreshes and stamp_ms < now_ms:
            self.put(key, value)
        return value


def create_ttl_state(
    descriptor: Any, context: KeyContext, generations: CopyOnWriteStateTable, copy: Copier | None, checks: Checks, expiry: TtlTable
) -> Any:
    """The state object of a descriptor with a TTL. Raises InvalidConfigError for a kind that isn't keyed by row."""
    match descriptor:
        case ValueStateDescriptor():
            return TtlValueState(context, generations, copy, checks, expiry)
        case ListStateDescriptor():
            return TtlListState(context, generations, copy, checks, expiry)
        case MapStateDescriptor() if isinstance(generations, CopyOnWriteMapTable):
            return TtlMapState(context, generations, copy, checks, expiry)
        case ReducingStateDescriptor():
            return TtlReducingState(context, generations, copy, checks, expiry, descriptor.reduce)
        case AggregatingStateDescriptor():
            return TtlAggregatingState(context, generations, copy, checks, expiry, descriptor.aggregate)
    raise InvalidConfigError(f"{descriptor!r} has no state object for one key", state=getattr(descriptor, "name", ""))
