"""State with a TTL in slots: the state objects of ttl_states.py over slots, and a cleanup that notes slots instead of keys."""

from __future__ import annotations

import functools
from typing import Any, Generic, TypeVar

from holdfast.statebackends.columnar.key_index import Slots
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.heap.slot_collections import SlotListState, SlotMapState
from holdfast.statebackends.heap.slot_context import SlotContext, SlotPosition
from holdfast.statebackends.heap.slot_pages import PAGE_BITS, PLACE_MASK, SlotPages
from holdfast.statebackends.heap.slot_states import SlotAggregatingState, SlotReducingState
from holdfast.statebackends.heap.state_table import MISSING
from holdfast.statebackends.heap.ttl import Cleanup, Item, StateTtl, TableTtl
from holdfast.statebackends.heap.ttl_states import TtlListState, TtlMapState
from holdfast.statebackends.serialization.type_serializer import Copier
from holdfast.statebackends.serialization.value_checks import CONDITION_NAMES, Checks
from holdfast.statebackends.state import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    ValueStateDescriptor,
)

V = TypeVar("V")
K = TypeVar("K")


class SlotCleanup(Cleanup):
    """Notes slots, and (slot, entry) of maps."""

    __slots__ = ("_pages",)

    def __init__(self, state_ttl: StateTtl, pages: SlotPages) -> None:
        super().__init__(state_ttl)
        self._pages = pages

    def renumber(self, numbers: Slots) -> None:
        """Slots were dropped: numbers[slot] is the new number of each, below 0 for one that is no more."""
        new = numbers.tolist()
        if self._state_ttl.serializer.kind == "map":
            self._state_ttl.rename(self, lambda item: (new[item[0]], item[1]) if new[item[0]] >= 0 else None)
        else:
            self._state_ttl.rename(self, lambda item: new[item] if new[item] >= 0 else None)

    def drop_expired(self, item: Item, horizon_ms: int) -> None:
        kind, pages = self._state_ttl.serializer.kind, self._pages
        slot = item[0] if kind == "map" else item
        found = pages.get(slot)
        if found is MISSING:
            return
        if kind == "map":
            self._drop_entry(slot, item[1], horizon_ms)
        elif kind != "list":
            if found[0] <= horizon_ms:
                pages.put(slot, MISSING)
        else:
            kept = [element for element in found if element[0] > horizon_ms]
            if not kept:
                pages.put(slot, MISSING)
            elif len(kept) < len(found):
                copy = self._state_ttl.serializer.copy
                is_shared = pages.pinned and not pages.is_marked(slot)
                pages.put(slot, [copy(element) for element in kept] if is_shared and copy is not None else kept)

    def _drop_entry(self, slot: int, entry: Any, horizon_ms: int) -> None:
        at: SlotMapState[Any, Any] = SlotMapState(_Place(slot), self._pages, self._state_ttl.serializer.copy)
        found: Any = at.get(entry, MISSING)
        if found is not MISSING and found[0] <= horizon_ms:
            at.remove(entry)


class _Place(SlotPosition):
    """A slot that is not the current key's."""

    __slots__ = ()

    def __init__(self, slot: int) -> None:
        self.page, self.place = slot >> PAGE_BITS, slot & PLACE_MASK


class SlotTtlValueState(Generic[V]):
    """Implements `state.ValueState`."""

    __slots__ = ("_check", "_copy", "_marks", "_pages", "_position", "_table", "_ttl")

    def __init__(self, position: SlotPosition, table: SlotPages, copy: Copier | None, checks: Checks, ttl: TableTtl) -> None:
        """`copy` copies a value with its stamp."""
        self._position = position
        self._table = table
        self._pages = table.pages
        self._marks = table.marks
        self._copy = copy
        self._check = checks.value
        self._ttl = ttl

    def value(self, default: V | None = None) -> V | None:
        position, ttl = self._position, self._ttl
        page, place = position.page, position.place
        found = self._pages[page][place]
        if found is not MISSING:
            if self._copy is not None and self._table.pinned:
                marks = self._marks[page]
                if marks is None or not marks[place]:
                    found = self._copy(found)
            stamp_ms, value = found
            now_ms = ttl.clock.now_ms
            if stamp_ms <= now_ms - ttl.duration_ms:
                self._table.put((page << PAGE_BITS) + place, MISSING)
                default = value if ttl.shows_expired else default
            else:
                default = value
                if ttl.refreshes and stamp_ms < now_ms:
                    self.update(value)
        ttl.accessed()
        return default

    def update(self, value: V) -> None:
        self._check(value)
        position, ttl = self._position, self._ttl
        page, place = position.page, position.place
        marks = self._marks[page] or self._table.own(page)
        marks[place] = 1
        self._pages[page][place] = (ttl.clock.now_ms, value)
        ttl.stamped((page << PAGE_BITS) + place)

    def clear(self) -> None:
        position = self._position
        if self._pages[position.page][position.place] is not MISSING:
            self._table.put((position.page << PAGE_BITS) + position.place, MISSING)
        self._ttl.accessed()

    def unexpired(self) -> V | None:
        """The value to combine with an added one; None if there is none, or it has expired."""
        position, ttl = self._position, self._ttl
        found = self._pages[position.page][position.place]
        if found is MISSING or found[0] <= ttl.clock.now_ms - ttl.duration_ms:
            return None
        slot = (position.page << PAGE_BITS) + position.place
        if self._copy is not None and self._table.pinned and not self._table.is_marked(slot):
            found = self._copy(found)
        value: V = found[1]
        return value


@functools.lru_cache(maxsize=256)
def _checking(condition: str) -> type[SlotTtlValueState[Any]]:
    """The class with the check of obviously right values in its `update`, as slot_states.py has it."""
    source = [
        "def update(self, value):",
        f" if not ({condition}):",
        "  self._check(value)",
        " position, ttl = self._position, self._ttl",
        " page, place = position.page, position.place",
        " marks = self._marks[page] or self._table.own(page)",
        " marks[place] = 1",
        " self._pages[page][place] = (ttl.clock.now_ms, value)",
        f" ttl.stamped((page << {PAGE_BITS}) + place)",
    ]
    found: dict[str, Any] = {"__name__": __name__, **CONDITION_NAMES}
    exec(compile("\n".join(source), "<update of a value>", "exec"), found)
    return type("SlotTtlValueState", (SlotTtlValueState,), {"__slots__": (), "update": found["update"]})


class SlotTtlListState(TtlListState[V]):
    """TtlListState in slots."""

    __slots__ = ()

    _context: SlotContext

    def _stamped(self) -> None:
        self._ttl.stamped((self._context.position.page << PAGE_BITS) + self._context.position.place)


class SlotTtlMapState(TtlMapState[K, V]):
    """TtlMapState in slots."""

    __slots__ = ()

    _context: SlotContext

    def _stamped(self, key: K) -> None:
        self._ttl.stamped(((self._context.position.page << PAGE_BITS) + self._context.position.place, key))


def create_slot_ttl_state(
    descriptor: Any, position: SlotPosition, table: SlotPages, copy: Copier | None, checks: Checks, ttl: TableTtl
) -> Any:
    """The state object of a descriptor with a TTL. Raises InvalidConfigError for a kind that isn't keyed by row."""
    kind = _checking(checks.condition) if checks.condition else SlotTtlValueState
    match descriptor:
        case ListStateDescriptor():
            return SlotTtlListState(position.context, SlotListState(position, table, copy), checks, ttl)
        case MapStateDescriptor():
            return SlotTtlMapState(position.context, SlotMapState(position, table, copy), checks, ttl)
        case ValueStateDescriptor():
            return kind(position, table, copy, checks, ttl)
        case ReducingStateDescriptor():
            return SlotReducingState(kind(position, table, copy, checks, ttl), descriptor.reduce)
        case AggregatingStateDescriptor():
            return SlotAggregatingState(kind(position, table, copy, checks, ttl), descriptor.aggregate)
    raise InvalidConfigError(f"{descriptor!r} has no state object for one key", state=getattr(descriptor, "name", ""))
