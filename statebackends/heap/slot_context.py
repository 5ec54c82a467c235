"""The current key of a backend with slots: a page and a place in it, assigned for each record of a batch. Its canonical bytes are
made when somebody asks for them, and for whole batches once somebody has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import length_hint
from typing import Any

from holdfast.statebackends.backend import KeyCourse
from holdfast.statebackends.heap.slot_pages import PAGE_BITS, PLACE_MASK
from holdfast.statebackends.heap.states import KeyContext
from holdfast.statebackends.state import KeyColumn


class SlotPosition:
    """The place of the current key's values. No class with `__getattr__`, of which the interpreter would look up each attribute."""

    __slots__ = ("context", "page", "place")

    context: SlotContext
    page: int
    place: int


class UnknownPosition(SlotPosition):
    """A SlotPosition of a key whose slot is found when it is asked for."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name not in ("page", "place"):
            raise AttributeError(name)
        return self.context.find_slot(name)


class SlotContext(KeyContext):
    """The current key, and its slot: what is not set is found when it is asked for."""

    __slots__ = ("_keys", "_left", "_slot_of", "position", "wants_keys")

    def __init__(self, slot_of: Callable[[bytes], int]) -> None:
        """`slot_of` gives a key's slot."""
        super().__init__()
        self.position: SlotPosition = UnknownPosition()
        """The same object for good: state objects hold it."""
        self.position.context = self
        self._slot_of = slot_of
        self._keys: KeyColumn | None = None
        self._left: Iterator[int] = iter(())
        self.wants_keys = False
        """Keys are asked for: those of a batch are set with their slots."""

    def find_slot(self, name: str) -> Any:
        """`page` or `place` of a key whose slot is not known yet."""
        slot = self._slot_of(self.key)
        self._set(slot >> PAGE_BITS, slot & PLACE_MASK)
        return getattr(self.position, name)

    def _set(self, page: int, place: int) -> None:
        position = self.position
        position.__class__ = SlotPosition
        position.page, position.place = page, place
        self.has_slot = True

    def leave_slot(self) -> None:
        """Another key was set: its slot is found when it is asked for."""
        self.has_slot = False
        self._keys = None
        position = self.position
        del position.page, position.place
        position.__class__ = UnknownPosition

    def forget_slot(self) -> None:
        """Slots have other numbers now."""
        if self.has_slot:
            if self._keys is not None:
                self.key, self.key_group = self._of_course("key"), self._of_course("key_group")
            self.leave_slot()

    def course(self, keys: KeyColumn, pages: list[int], places: list[int]) -> KeyCourse:
        """The keys of a batch, which is not empty."""
        self._set(pages[0], places[0])
        if self.wants_keys:
            self._keys = None
            columns = (keys.encoded(), keys.key_groups.tolist(), pages, places)
            return KeyCourse(self.position, ("context.key", "context.key_group", "page", "place"), columns)
        self.key, self.key_group = b"", -1  # so that there is something to delete
        del self.key, self.key_group
        self._keys, self._left = keys, iter(pages)
        return KeyCourse(self.position, ("page", "place"), (self._left, places))

    def _of_course(self, name: str) -> Any:
        assert self._keys is not None
        position = len(self._keys) - 1 - length_hint(self._left)
        return self._keys.encoded()[position] if name == "key" else int(self._keys.key_groups[position])

    def __getattr__(self, name: str) -> Any:
        if name in ("key", "key_group") and self._keys is not None:
            self.wants_keys = True
            return self._of_course(name)
        return super().__getattr__(name)
