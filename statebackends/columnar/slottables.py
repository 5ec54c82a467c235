"""int64 key -> slot tables in numpy: direct-address while keys are small and dense, else open addressing.

They find and add whole batches with a constant number of vector operations per probe. Keys and slots are the caller's;
a table is only the way from one to the other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int64]

_DIRECT_CELLS_MIN = 1 << 12
_DIRECT_CELLS_PER_KEY = 16
"""A direct-address table may have this many cells (8 bytes each) per key; beyond that, keys are hashed."""
_HASH_CELLS_MIN = 1 << 10
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class DirectTable:
    """cells[key] = slot, or -1. For small non-negative keys."""

    __slots__ = ("_cells",)

    def __init__(self, size: int = _DIRECT_CELLS_MIN) -> None:
        self._cells: Slots = np.full(size, -1, np.int64)

    def reserve(self, highest: int, count: int) -> bool:
        """Make room for keys up to `highest`; False when a table for `count` keys may not be that large."""
        if highest < len(self._cells):
            return True
        if highest >= max(_DIRECT_CELLS_MIN, _DIRECT_CELLS_PER_KEY * count):
            return False
        bigger = np.full(1 << highest.bit_length(), -1, np.int64)
        bigger[: len(self._cells)] = self._cells
        self._cells = bigger
        return True

    def find(self, keys: Slots) -> Slots:
        found: Slots = self._cells[keys]
        return found

    def add(self, keys: Slots, first_slot: int, slots: Slots, rows: Slots) -> Slots:
        """Give absent keys (repeats allowed) the slots from first_slot on; fills slots[rows]; returns the distinct keys."""
        cells = self._cells
        order = np.arange(len(keys), dtype=np.int64)
        cells[keys[::-1]] = order[::-1]  # of several rows with one key the first wins, as it is written last
        new_keys: Slots = keys[cells[keys] == order]
        cells[new_keys] = np.arange(first_slot, first_slot + len(new_keys))
        slots[rows] = cells[keys]
        return new_keys

    def grown(self, keys: Slots) -> DirectTable:
        return self


class HashTable:
    """Open addressing with linear probing, at most half full; every probe of all rows is one vector operation."""

    __slots__ = ("_cell_keys", "_cell_slots", "_mask", "_shift")

    def __init__(self, keys: Slots) -> None:
        """keys[slot]: distinct keys to begin with."""
        size = max(_HASH_CELLS_MIN, 1 << (4 * len(keys) + 1).bit_length())
        self._cell_keys: Slots = np.zeros(size, np.int64)
        self._cell_slots: Slots = np.full(size, -1, np.int64)
        self._mask = np.int64(size - 1)
        self._shift = np.uint64(64 - (size.bit_length() - 1))
        self._insert(keys, 0)

    def find(self, keys: Slots) -> Slots:
        cells = self._home(keys)
        slots: Slots = self._cell_slots[cells]
        pending = np.flatnonzero((self._cell_keys[cells] != keys) & (slots >= 0))
        cells = cells[pending]
        while len(pending):
            cells = (cells + 1) & self._mask
            found = self._cell_slots[cells]
            slots[pending] = found
            again = np.flatnonzero((self._cell_keys[cells] != keys[pending]) & (found >= 0))
            pending, cells = pending[again], cells[again]
        return slots

    def add(self, keys: Slots, first_slot: int, slots: Slots, rows: Slots) -> Slots:
        """As DirectTable.add; may leave the table more than half full until `grown`."""
        distinct, first_rows, inverse = np.unique(keys, return_index=True, return_inverse=True)
        by_arrival = np.argsort(first_rows)
        new_keys: Slots = distinct[by_arrival]
        rank = np.empty(len(distinct), np.int64)
        rank[by_arrival] = np.arange(first_slot, first_slot + len(distinct))
        slots[rows] = rank[inverse]
        if 4 * (first_slot + len(new_keys)) <= 3 * len(self._cell_slots):
            self._insert(new_keys, first_slot)
        return new_keys

    def grown(self, keys: Slots) -> DirectTable | HashTable:
        """This table, or one that fits when it is more than half full; a direct one if the keys turned out dense."""
        if 2 * len(keys) <= len(self._cell_slots):
            return self
        highest = int(keys.view(np.uint64).max())
        direct = DirectTable()
        # half of the permitted size, so that the next key beyond it doesn't turn the table back
        if direct.reserve(2 * highest, len(keys)):
            direct.add(keys, 0, np.empty_like(keys), np.arange(len(keys)))
            return direct
        return HashTable(keys)

    def _home(self, keys: Slots) -> Slots:
        return ((keys.view(np.uint64) * _GOLDEN) >> self._shift).view(np.int64)

    def _insert(self, keys: Slots, first_slot: int) -> None:
        """Distinct, absent keys; keys[i] gets slot first_slot + i."""
        slots = np.arange(first_slot, first_slot + len(keys), dtype=np.int64)
        cells = self._home(keys)
        while len(keys):
            free = np.flatnonzero(self._cell_slots[cells] < 0)
            self._cell_slots[cells[free]] = slots[free]  # of several claims on one cell the last stays
            won = self._cell_slots[cells] == slots
            self._cell_keys[cells[won]] = keys[won]
            lost = ~won
            keys, slots, cells = keys[lost], slots[lost], (cells[lost] + 1) & self._mask
