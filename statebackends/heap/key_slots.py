"""Slots of the keys of one backend: a dense number for each key, which all its states share.

The keys of a batch are looked up together, by the index of columnar state, in a few nanoseconds each. A single key (a timer's, say)
is looked up by its canonical bytes, in a dict that is made when it is first needed; keys that came alone reach the index before the
next batch. Slots are never reused: those of keys that have no state any more go when they are most of all (slot_states.py)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from holdfast.statebackends.columnar.key_index import KeyIndex, Slots, create_key_index
from holdfast.statebackends.errors import InvariantError
from holdfast.statebackends.serialization.key_columns import ArrowKeyColumn
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.state import KeyColumn

ALONE_MAX = 4_096
"""Keys that came alone, above which they go into the index."""

ColumnOf = Callable[[list[pa.Array]], ArrowKeyColumn]


class KeySlots:
    """Key -> slot; slots are numbered in the order in which keys first arrive."""

    __slots__ = ("_alone", "_by_key", "_column_of", "_index", "_key_type")

    def __init__(self, key_type: KeyType, column_of: ColumnOf) -> None:
        """`column_of` makes a column of keys from their arrays."""
        self._key_type = key_type
        self._column_of = column_of
        self._index: KeyIndex = create_key_index(key_type.arrow_types, column_of)
        self._by_key: dict[bytes, int] | None = None
        self._alone: list[bytes] = []

    @property
    def count(self) -> int:
        return self._index.count + len(self._alone)

    def of_column(self, keys: KeyColumn) -> Slots:
        """Slots of the keys of a batch; new keys get the next ones."""
        self._flush()
        before = self._index.count
        slots = self._index.slots(keys)
        if self._by_key is not None and self._index.count > before:
            new = np.flatnonzero(slots >= before)
            numbers, firsts = np.unique(slots[new], return_index=True)
            encoded = keys.encoded()
            rows = new[firsts].tolist()
            self._by_key.update(zip([encoded[row] for row in rows], numbers.tolist(), strict=True))
        return slots

    def load(self, keys: ArrowKeyColumn) -> None:
        """Begin with distinct keys, whose slots are their places."""
        if len(keys):
            self._check(self._index.slots(keys), 0)

    def of_key(self, key: bytes) -> int:
        """Slot of one key, by its canonical bytes; a new key gets the next one."""
        by_key = self._known()
        slot = by_key.get(key)
        if slot is None:
            slot = by_key[key] = self.count
            self._alone.append(key)
            if len(self._alone) >= ALONE_MAX:
                self._flush()
        return slot

    def find(self, key: bytes) -> int | None:
        """As `of_key`; None for a key that has no slot."""
        if self._by_key is not None:
            return self._by_key.get(key)
        self._flush()
        slot = int(self._index.find(self._column_of(self._key_type.arrays_of_encoded([key])))[0])
        return None if slot < 0 else slot

    def _known(self) -> dict[bytes, int]:
        if self._by_key is None:
            encoded = self._column_of(self._index.frozen_keys()()).encoded()
            self._by_key = dict(zip(encoded, range(len(encoded)), strict=True))
        return self._by_key

    def _flush(self) -> None:
        """Put keys that came alone into the index: it gives them the slots that they have."""
        if self._alone:
            alone, self._alone = self._alone, []
            first = self._index.count
            slots = self._index.slots(self._column_of(self._key_type.arrays_of_encoded(alone)))
            self._check(slots, first)

    def frozen(self) -> Callable[[], ArrowKeyColumn]:
        """O(keys that came alone): the keys of the slots known now, made when called (on any thread)."""
        self._flush()
        arrays, column_of = self._index.frozen_keys(), self._column_of
        return lambda: column_of(arrays())

    def keep(self, slots: Slots) -> None:
        """Number some slots, ascending, anew, and forget the others."""
        self._flush()
        keys = self._column_of(self._index.key_arrays_of(slots))
        self._index = create_key_index(self._key_type.arrow_types, self._column_of)
        if len(slots):
            self._check(self._index.slots(keys), 0)
        if self._by_key is not None:
            self._by_key = dict(zip(keys.encoded(), range(len(slots)), strict=True)) if len(slots) else {}

    def _check(self, slots: Slots, first: int) -> None:
        if not np.array_equal(slots, np.arange(first, first + len(slots))):
            raise InvariantError(f"new keys got other slots than those from {first} on")

