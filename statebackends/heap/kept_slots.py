"""State in slots as one barrier found it, kept in memory for a later backend of the same process.

It has what the snapshot of that barrier had: pages by reference, which are copied before they are written, and the keys of their
slots. It may outlive the backend that froze it. Which states are kept, the backend says; whether a backend may take them over, its
caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.heap.slot_pages import SlotPages
from holdfast.statebackends.heap.state_table import MISSING
from holdfast.statebackends.serialization.exact_values import are_exact
from holdfast.statebackends.serialization.key_columns import ArrowKeyColumn
from holdfast.statebackends.serialization.value_types import ValueType

PAGES_AT_ONCE = 16
"""Pages whose values are looked at together."""


class KeptSlots:
    """Implements `backend.KeptState`."""

    def __init__(
        self, keys: Callable[[], ArrowKeyColumn], tables: Mapping[str, SlotPages], key_groups: KeyGroupRange
    ) -> None:
        """Loop thread, right behind the barrier's freeze. `keys` gives those of the slots that there are; `key_groups`: of the
        backend, which no other may take them over for: a handle may be given whole to a subtask that has a part of them."""
        self.keys = keys
        self.key_groups = key_groups
        self._tables = dict(tables)
        self._pages = {name: table.pages[:] for name, table in tables.items()}
        for table in tables.values():
            table.pin()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._pages)

    def pages_of(self, name: str) -> list[list[Any]]:
        return self._pages[name]

    def is_exact(self, name: str, value_type: ValueType) -> bool:
        """Whether all values of a state are what a snapshot would give back. Any thread."""
        pages = self._pages[name]
        return all(
            are_exact(value_type, [value for value in chain.from_iterable(some) if value is not MISSING]) for some in _some(pages)
        )

    def moved(self, tables: Mapping[str, SlotPages], keys: Callable[[], ArrowKeyColumn]) -> None:
        """Some states were taken over by other tables, which share the pages from now on: of these alone it stays. `keys`: the same
        ones from the index of these tables, since it would hold that of the others."""
        self.release()
        self.keys = keys
        self._tables = dict(tables)
        self._pages = {name: self._pages[name] for name in tables}
        for table in tables.values():
            table.pin()

    def release(self) -> None:
        """Loop thread: nobody takes it over any more."""
        for table in self._tables.values():
            table.release()
        self._tables.clear()

    def free(self) -> None:
        """Any thread, behind `release`: free what was replaced since. Page by page, so that others get the interpreter between."""
        for pages in self._pages.values():
            while pages:
                pages.pop()


def _some(pages: list[list[Any]]) -> Iterator[list[list[Any]]]:
    for first in range(0, len(pages), PAGES_AT_ONCE):
        yield pages[first : first + PAGES_AT_ONCE]
