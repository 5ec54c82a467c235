"""States in slots, for backends in memory: all of row functions without a namespace. Those with one stay in tables by key: a
namespace comes and goes as a whole.

Slots of keys that have no state any more, and no change that an increment needs, are dropped when slots have doubled and most of
them are such: O(slots) then, and O(1) for each new key."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from holdfast.statebackends.backend import KeyCourse
from holdfast.statebackends.columnar.key_index import Slots
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.heap.kept_slots import KeptSlots
from holdfast.statebackends.heap.key_slots import ColumnOf, KeySlots
from holdfast.statebackends.heap.slot_collections import SlotListState, SlotMapState
from holdfast.statebackends.heap.slot_context import SlotContext, SlotPosition
from holdfast.statebackends.heap.slot_pages import PAGE_BITS, PLACE_MASK, FrozenPages, SlotPages, present
from holdfast.statebackends.heap.state_table import MISSING
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.serialization.type_serializer import Copier
from holdfast.statebackends.serialization.value_checks import CONDITION_NAMES, Checks
from holdfast.statebackends.state import (
    AggregateFunction,
    AggregatingStateDescriptor,
    KeyColumn,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    ValueStateDescriptor,
)

V = TypeVar("V")
IN = TypeVar("IN")
ACC = TypeVar("ACC")
OUT = TypeVar("OUT")

SLOTS_MIN = 1 << 12
"""Slots below which none are dropped."""


class SlotValueState(Generic[V]):
    """Implements `state.ValueState`, of values that can't be changed in place."""

    __slots__ = ("_check", "_marks", "_pages", "_position", "_table")

    def __init__(self, position: SlotPosition, table: SlotPages, checks: Checks | None = None) -> None:
        self._position = position
        self._table = table
        self._pages = table.pages
        self._marks = table.marks
        self._check = None if checks is None else checks.value

    def value(self, default: V | None = None) -> V | None:
        position = self._position
        found = self._pages[position.page][position.place]
        if found is MISSING:
            return default
        value: V = found
        return value

    unexpired = value
    """The value to combine with an added one. No method of its own: that would be one more call for each record."""

    def update(self, value: V) -> None:
        if self._check is not None:
            self._check(value)
        position = self._position
        page = position.page
        marks = self._marks[page] or self._table.own(page)
        place = position.place
        marks[place] = 1
        self._pages[page][place] = value

    def store(self, value: V) -> None:
        """`update`, unchecked, of a value that no user made. Not part of the contract."""
        self._table.put((self._position.page << PAGE_BITS) + self._position.place, value)

    def clear(self) -> None:
        position = self._position
        if self._pages[position.page][position.place] is not MISSING:
            self._table.put((position.page << PAGE_BITS) + position.place, MISSING)


class SlotCopiedState(SlotValueState[V]):
    """As SlotValueState, of values that can be changed in place: one that a snapshot may read is copied before it is given out."""

    __slots__ = ("_copy",)

    def __init__(self, position: SlotPosition, table: SlotPages, copy: Copier, checks: Checks | None = None) -> None:
        super().__init__(position, table, checks)
        self._copy = copy

    def value(self, default: V | None = None) -> V | None:
        position = self._position
        page, place = position.page, position.place
        found = self._pages[page][place]
        if found is MISSING:
            return default
        if self._table.pinned:
            marks = self._marks[page]
            if marks is None or not marks[place]:
                found = self._copy(found)
        value: V = found
        return value

    unexpired = value


class CombinedValue(Protocol[V]):
    """What a reducing or an aggregating state needs of the state that stores its value, with a TTL or without."""

    def value(self) -> V | None: ...

    def unexpired(self) -> V | None: ...

    def update(self, value: V) -> None: ...

    def clear(self) -> None: ...


class SlotReducingState(Generic[V]):
    """Implements `state.AppendingState` with a reduce function."""

    __slots__ = ("_reduce", "_stored")

    def __init__(self, stored: CombinedValue[V], reduce: Callable[[V, V], V]) -> None:
        self._stored = stored
        self._reduce = reduce

    def get(self) -> V | None:
        return self._stored.value()

    def add(self, value: V) -> None:
        old = self._stored.unexpired()
        self._stored.update(value if old is None else self._reduce(old, value))

    def clear(self) -> None:
        self._stored.clear()


class SlotAggregatingState(Generic[IN, ACC, OUT]):
    """Implements `state.AppendingState` with an AggregateFunction."""

    __slots__ = ("_aggregate", "_stored")

    def __init__(self, stored: CombinedValue[ACC], aggregate: AggregateFunction[IN, ACC, OUT]) -> None:
        self._stored = stored
        self._aggregate = aggregate

    def get(self) -> OUT | None:
        accumulator = self._stored.value()
        return None if accumulator is None else self._aggregate.get_result(accumulator)

    def add(self, value: IN) -> None:
        accumulator = self._stored.unexpired()
        if accumulator is None:
            accumulator = self._aggregate.create_accumulator()
        self._stored.update(self._aggregate.add(value, accumulator))

    def clear(self) -> None:
        self._stored.clear()


@functools.lru_cache(maxsize=256)
def _checking(kind: type[SlotValueState[Any]], condition: str) -> type[SlotValueState[Any]]:
    """The class with the check of obviously right values in its `update`: without a call, which costs as much as the rest of it."""
    source = [
        "def update(self, value):",
        f" if not ({condition}) and self._check is not None:",
        "  self._check(value)",
        " position = self._position",
        " page = position.page",
        " marks = self._marks[page] or self._table.own(page)",
        " place = position.place",
        " marks[place] = 1",
        " self._pages[page][place] = value",
    ]
    found: dict[str, Any] = {"__name__": __name__, **CONDITION_NAMES}
    exec(compile("\n".join(source), "<update of a value>", "exec"), found)
    checking: type[SlotValueState[Any]] = type(kind.__name__, (kind,), {"__slots__": (), "update": found["update"]})
    return checking


def create_slot_state(descriptor: Any, position: SlotPosition, table: SlotPages, copy: Copier | None, checks: Checks) -> Any:
    """The state object of a descriptor without a TTL. Raises InvalidConfigError for a kind that isn't keyed by row."""
    if isinstance(descriptor, ListStateDescriptor):
        return SlotListState(position, table, copy, checks)
    if isinstance(descriptor, MapStateDescriptor):
        return SlotMapState(position, table, copy, checks)
    stored: SlotValueState[Any]
    if copy is not None:
        stored = SlotCopiedState(position, table, copy, checks)
    else:
        kind = _checking(SlotValueState, checks.condition) if checks.condition else SlotValueState
        stored = kind(position, table, checks)
    match descriptor:
        case ValueStateDescriptor():
            return stored
        case ReducingStateDescriptor():
            return SlotReducingState(stored, descriptor.reduce)
        case AggregatingStateDescriptor():
            return SlotAggregatingState(stored, descriptor.aggregate)
    raise InvalidConfigError(f"{descriptor!r} has no state object for one key", state=getattr(descriptor, "name", ""))


class SlotTables:
    """All states in slots of one backend, and the slots of its keys."""

    def __init__(self, names: Sequence[str], key_type: KeyType, column_of: ColumnOf) -> None:
        self.keys = KeySlots(key_type, column_of)
        self.context = SlotContext(self._slot_of)
        self._tables = {name: SlotPages() for name in names}
        self.renumbering: list[Callable[[Slots], None]] = []
        """Called with the new number of each slot, below 0 for one that is no more, when slots are dropped."""
        self._slots_max = SLOTS_MIN
        """Slots at which those that are not needed are looked for."""

    @property
    def names(self) -> Sequence[str]:
        """Of the states."""
        return tuple(self._tables)

    def __contains__(self, name: str) -> bool:
        return name in self._tables

    def __getitem__(self, name: str) -> SlotPages:
        return self._tables[name]

    def __iter__(self) -> Iterator[SlotPages]:
        return iter(self._tables.values())

    @property
    def size(self) -> int:
        """Places for values, of all states."""
        return len(self._tables) * self.keys.count

    def course(self, keys: KeyColumn) -> KeyCourse:
        """The keys of a batch, one by one."""
        if not len(keys):
            return KeyCourse(self.context.position, ("page", "place"), ((), ()))
        slots = self.slots_of(keys)
        return self.context.course(keys, (slots >> PAGE_BITS).tolist(), (slots & PLACE_MASK).tolist())

    def slots_of(self, keys: KeyColumn) -> Any:
        """The slots of the keys of a batch, with pages for them."""
        self._make_room()
        try:
            slots = self.keys.of_column(keys)
        except UnicodeDecodeError:
            _ = keys.key_groups  # names the operator, and the key
            raise
        self._reserve()
        return slots

    def _slot_of(self, key: bytes) -> int:
        self._make_room()
        slot = self.keys.of_key(key)
        self._reserve()
        return slot

    def _reserve(self) -> None:
        count = self.keys.count
        for table in self._tables.values():
            if len(table.pages) << PAGE_BITS < count:
                table.reserve(count)

    def find(self, name: str, key: bytes) -> Any:
        """A key's value in a state, or MISSING."""
        slot = self.keys.find(key)
        return MISSING if slot is None else self._tables[name].get(slot)

    def remove(self, name: str, key: bytes) -> None:
        """Forget a key's value in a state."""
        slot = self.keys.find(key)
        if slot is not None and self._tables[name].get(slot) is not MISSING:
            self._tables[name].put(slot, MISSING)

    def keys_of(self, name: str) -> list[bytes]:
        """Canonical bytes of the keys that have a value in a state."""
        keys = self.keys.frozen()()
        if not len(keys):
            return []
        return keys.take(np.flatnonzero(present(self._tables[name].pages, len(keys)))).encoded()

    def freeze(self) -> dict[str, FrozenPages]:
        """All states, at a barrier."""
        keys = self.keys.frozen()
        return {name: FrozenPages(table, self.keys.count, keys) for name, table in self._tables.items()}

    def kept(self, names: Collection[str], key_groups: KeyGroupRange) -> KeptSlots:
        """Some states, right behind `freeze`."""
        return KeptSlots(self.keys.frozen(), {name: self._tables[name] for name in names}, key_groups)

    def take_over(self, kept: KeptSlots, names: Collection[str]) -> None:
        """Begin with states of another backend as they were kept; the other tables have nothing yet. O(keys), vectorised.

        Raises InvariantError; nothing may be done with these tables then."""
        self.keys.load(kept.keys())
        for name in names:
            self._tables[name].take_over(kept.pages_of(name))
        self._reserve()
        self._slots_max = max(SLOTS_MIN, 2 * self.keys.count)
        kept.moved({name: self._tables[name] for name in names}, self.keys.frozen())

    def _make_room(self) -> None:
        """Drop slots that are not needed, if slots have doubled since it was looked for the last time and half of them are such."""
        count = self.keys.count
        if count < self._slots_max:
            return
        needed = np.zeros(count, np.bool_)
        for table in self._tables.values():
            needed |= table.needed(count)
        kept = np.flatnonzero(needed)
        if 2 * len(kept) <= count:
            self.context.forget_slot()
            numbers = np.full(count, -1, np.int64)
            numbers[kept] = np.arange(len(kept))
            for table in self._tables.values():
                table.keep(kept, numbers)
            self.keys.keep(kept)
            for renumber in self.renumbering:
                renumber(numbers)
        self._slots_max = max(SLOTS_MIN, 2 * self.keys.count)

    def clear(self) -> None:
        """Forget everything."""
        for table in self._tables.values():
            table.clear()
