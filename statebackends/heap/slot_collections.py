"""Lists and maps by slot: the value of a slot is a list, or the entries of a map.

The first write to one behind a barrier copies it, if a snapshot may read it. A map may have very many entries, and entries that can
be changed in place are copied one by one: then what is written lies in a layer of that one key above the entries that the snapshot
reads (`LayeredEntries`), and is folded back by the first write when none is in flight. Which lists and maps there are is for
slot_states.py. For the loop thread only, but for `plain`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from holdfast.statebackends.heap.slot_context import SlotPosition
from holdfast.statebackends.heap.slot_pages import PAGE_BITS, SlotPages
from holdfast.statebackends.heap.state_table import MISSING, TOMBSTONE, apply_entries
from holdfast.statebackends.serialization.type_serializer import Copier
from holdfast.statebackends.serialization.value_checks import Checks

V = TypeVar("V")
K = TypeVar("K")

ENTRIES_COPIED_MAX = 256
"""Entries up to which a map is copied as a whole, as a page is: in two microseconds."""
LAYERS_MAX = 8
"""Layers of a map that snapshots in flight may read, above which it is copied."""


class LayeredEntries:
    """Entries of one key's map: those written since the last barrier, above those that snapshots may read."""

    __slots__ = ("count", "layers", "top")

    def __init__(self, layers: tuple[Any, ...], count: int) -> None:
        """`layers`: newest first; removed entries are tombstones in all but the oldest. `count`: entries that are there."""
        self.top: dict[Any, Any] = {}
        self.layers = layers
        self.count = count

    def find(self, entry: Any) -> tuple[Any, bool]:
        """(value or MISSING, whether it was written since the last barrier)."""
        found = self.top.get(entry, MISSING)
        if found is not MISSING:
            return (MISSING if found is TOMBSTONE else found), True
        for layer in self.layers:
            found = layer.get(entry, MISSING)
            if found is not MISSING:
                return (MISSING if found is TOMBSTONE else found), False
        return MISSING, False

    def put(self, entry: Any, value: Any) -> None:
        if self.find(entry)[0] is MISSING:
            self.count += 1
        self.top[entry] = value

    def remove(self, entry: Any) -> None:
        """An entry that is there."""
        self.count -= 1
        self.top[entry] = TOMBSTONE

    def above(self) -> LayeredEntries:
        """The same entries for writing, while a snapshot reads these."""
        return LayeredEntries((self.top, *self.layers), self.count)

    def flat(self) -> dict[Any, Any]:
        """A dict of its own."""
        found = dict(self.layers[-1])
        self._apply_to(found)
        return found

    def folded(self) -> dict[Any, Any]:
        """The oldest layer with all others applied to it: no snapshot reads it any more."""
        found: dict[Any, Any] = self.layers[-1]
        self._apply_to(found)
        return found

    def _apply_to(self, found: dict[Any, Any]) -> None:
        for layer in (*reversed(self.layers[:-1]), self.top):
            apply_entries(found, layer)


def plain(values: Sequence[Any]) -> list[Any]:
    """Values of map state as dicts. Pool thread."""
    return [value.flat() if type(value) is LayeredEntries else value for value in values]


class SlotListState(Generic[V]):
    """Implements `state.ListState`. `get` returns a new list."""

    __slots__ = ("_checks", "_copy", "_marks", "_pages", "_position", "_table")

    def __init__(self, position: SlotPosition, table: SlotPages, copy: Copier | None, checks: Checks | None = None) -> None:
        """`copy` copies one element. `checks`: None if the caller checks values."""
        self._position = position
        self._table = table
        self._pages = table.pages
        self._marks = table.marks
        self._copy = copy
        self._checks = checks

    def get(self) -> list[V]:
        position = self._position
        page, place = position.page, position.place
        found = self._pages[page][place]
        if found is MISSING:
            return []
        if self._copy is None or not self._table.pinned:
            return list(found)
        marks = self._marks[page]
        return list(found) if marks is not None and marks[place] else [self._copy(value) for value in found]

    def add(self, value: V) -> None:
        if self._checks is not None:
            self._checks.value(value)
        self._own().append(value)

    def add_all(self, values: Iterable[V]) -> None:
        given = list(values)
        if self._checks is not None:
            self._checks.values(given)
        if given:
            self._own().extend(given)

    def update(self, values: Iterable[V]) -> None:
        replacement = list(values)
        if self._checks is not None:
            self._checks.values(replacement)
        if replacement:
            self._table.put((self._position.page << PAGE_BITS) + self._position.place, replacement)
        else:
            self.clear()

    def clear(self) -> None:
        position = self._position
        if self._pages[position.page][position.place] is not MISSING:
            self._table.put((position.page << PAGE_BITS) + position.place, MISSING)

    def _own(self) -> list[V]:
        """The current key's list, to be appended to."""
        position = self._position
        page, place = position.page, position.place
        marks = self._marks[page] or self._table.own(page)
        found = self._pages[page][place]
        if found is MISSING:
            found = []
        elif marks[place]:
            own: list[V] = found
            return own
        elif self._table.pinned:
            found = list(found) if self._copy is None else [self._copy(value) for value in found]
        marks[place] = 1
        self._pages[page][place] = found
        values: list[V] = found
        return values


class SlotMapState(Generic[K, V]):
    """Implements `state.MapState`. Iteration is over the entries as they are when it begins."""

    __slots__ = ("_check", "_check_key", "_copy", "_marks", "_pages", "_position", "_table")

    def __init__(self, position: SlotPosition, table: SlotPages, copy: Copier | None, checks: Checks | None = None) -> None:
        """`copy` copies the value of an entry. `checks`: None if the caller checks keys and values."""
        self._position = position
        self._table = table
        self._pages = table.pages
        self._marks = table.marks
        self._copy = copy
        self._check = None if checks is None else checks.value
        self._check_key = None if checks is None else checks.key

    def get(self, key: K, default: V | None = None) -> V | None:
        position = self._position
        page, place = position.page, position.place
        entries = self._pages[page][place]
        if type(entries) is dict:
            found, is_written = entries.get(key, MISSING), True
        elif entries is MISSING:
            return default
        else:
            found, is_written = entries.find(key)
        if found is MISSING:
            return default
        if self._copy is not None and self._table.pinned and not (is_written and self._is_marked(page, place)):
            found = self._copy(found)
        value: V = found
        return value

    def put(self, key: K, value: V) -> None:
        if self._check is not None and self._check_key is not None:
            self._check_key(key)
            self._check(value)
        position = self._position
        page, place = position.page, position.place
        marks = self._marks[page] or self._table.own(page)
        entries = self._pages[page][place]
        if entries is MISSING:
            self._pages[page][place] = {key: value}
            marks[place] = 1
            return
        if not marks[place]:
            entries = self._unshared(page, place, entries)
        if type(entries) is dict:
            entries[key] = value
        else:
            entries.put(key, value)

    def remove(self, key: K) -> None:
        page, place = self._position.page, self._position.place
        entries = self._pages[page][place]
        if entries is MISSING or (key not in entries if type(entries) is dict else entries.find(key)[0] is MISSING):
            return
        marks = self._marks[page] or self._table.own(page)
        if not marks[place]:
            entries = self._unshared(page, place, entries)
        if type(entries) is dict:
            del entries[key]
        else:
            entries.remove(key)
        if not (entries if type(entries) is dict else entries.count):
            self._table.put((page << PAGE_BITS) + place, MISSING)

    def contains(self, key: K) -> bool:
        entries = self._pages[self._position.page][self._position.place]
        if type(entries) is dict:
            return key in entries
        return entries is not MISSING and entries.find(key)[0] is not MISSING

    def items(self) -> Iterator[tuple[K, V]]:
        page, place = self._position.page, self._position.place
        entries = self._pages[page][place]
        shared, copy, own = False, self._copy, frozenset[Any]()
        if copy is not None and self._table.pinned:
            is_marked = self._is_marked(page, place)
            shared = type(entries) is LayeredEntries or not is_marked
            own = frozenset(entries.top if type(entries) is LayeredEntries and is_marked else ())
        for key, value in self._listed(entries):
            yield key, copy(value) if shared and copy is not None and key not in own else value

    def keys(self) -> Iterator[K]:
        entries = self._pages[self._position.page][self._position.place]
        return iter([key for key, _ in self._listed(entries)])

    def values(self) -> Iterator[V]:
        return (value for _, value in self.items())

    def is_empty(self) -> bool:
        return self._pages[self._position.page][self._position.place] is MISSING

    def clear(self) -> None:
        position = self._position
        if self._pages[position.page][position.place] is not MISSING:
            self._table.put((position.page << PAGE_BITS) + position.place, MISSING)

    @staticmethod
    def _listed(entries: Any) -> list[tuple[K, V]]:
        if entries is MISSING:
            return []
        return list(entries.items() if type(entries) is dict else entries.flat().items())

    def _is_marked(self, page: int, place: int) -> bool:
        marks = self._marks[page]
        return marks is not None and bool(marks[place])

    def _unshared(self, page: int, place: int, entries: Any) -> Any:
        """The entries of a slot that is written for the first time since a barrier, with its mark set."""
        if not self._table.pinned:
            entries = entries if type(entries) is dict else entries.folded()
        elif type(entries) is dict:
            is_copied = self._copy is None and len(entries) <= ENTRIES_COPIED_MAX
            entries = entries.copy() if is_copied else LayeredEntries((entries,), len(entries))
        elif len(entries.layers) < LAYERS_MAX:
            entries = entries.above()
        else:
            found, copy = entries.flat(), self._copy
            entries = found if copy is None else {key: copy(value) for key, value in found.items()}
        marks = self._marks[page]
        assert marks is not None
        marks[place] = 1
        self._pages[page][place] = entries
        return entries
