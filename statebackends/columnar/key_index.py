"""Key -> dense slot, a batch at a time: the index in front of columnar accumulators.

Slots are numbered 0, 1, 2 ... in the order in which keys first arrive, and are never reused. It decides how keys are
looked up; it knows nothing of accumulators, namespaces or snapshots. Used on the worker's loop thread only; what
`frozen_keys` returns stays valid on another thread while the index goes on growing.

int64 key -> slot tables in numpy: direct-address while keys are small and dense, else open addressing; a few keys are a dict, since
there may be very many indexes. Keys of several fields of fixed width are looked up word by word: a slot for each word, and one for
each pair of slots.

They find and add whole batches with a constant number of vector operations per probe. Keys and slots are the caller's;
a table is only the way from one to the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.statebackends.columnar.key_words import Words, has_words, key_words

Slots = npt.NDArray[np.int64]

_FEW_KEYS_MAX = 64
"""So many keys are a dict while they come in batches of no more rows, for which it is as fast as a table."""
_DIRECT_CELLS_MIN = 1 << 12
_DIRECT_CELLS_PER_KEY = 16
"""A direct-address table may grow to this many cells (8 bytes each) per key; beyond that, keys are hashed."""
_DIRECT_CELLS_KEPT = 2 * _DIRECT_CELLS_PER_KEY
"""The same, when it is known how many keys a batch has added."""
_DIRECT_CELLS_SMALL = 1 << 9
"""So many don't count, see _HASH_CELLS_MIN: 4 KiB each."""
_HASH_CELLS_MIN = 1 << 8
_KEYS_MIN = 1 << 4
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class FewTable:
    """A dict. For a few keys, looked up a few at a time."""

    __slots__ = ("_slots",)

    def __init__(self, keys: Slots) -> None:
        """keys[slot]: distinct keys to begin with."""
        self._slots: dict[int, int] = dict(zip(keys.tolist(), range(len(keys)), strict=True))

    def find(self, keys: Slots) -> Slots:
        known = self._slots
        return np.array([known.get(key, -1) for key in keys.tolist()], np.int64)

    def add(self, keys: Slots, first_slot: int, slots: Slots, rows: Slots) -> Slots:
        """As DirectTable.add."""
        known = self._slots
        slots[rows] = [known.setdefault(key, len(known)) for key in keys.tolist()]
        return np.fromiter(islice(known, first_slot, None), np.int64)

    def grown(self, keys: Slots) -> FewTable | DirectTable | HashTable:
        return self if len(keys) <= _FEW_KEYS_MAX else _table_of(keys)


class DirectTable:
    """cells[key] = slot, or -1. For small non-negative keys."""

    __slots__ = ("_cells",)

    def __init__(self, keys: Slots, highest: int) -> None:
        """keys[slot]: distinct keys to begin with. `highest`: key that there is to be a cell for."""
        self._cells: Slots = np.full(1 << highest.bit_length(), -1, np.int64)
        self._cells[keys] = np.arange(len(keys))

    def reserve(self, highest: int, count: int) -> bool:
        """Make room for keys up to `highest`; False when a table for `count` keys may not be that large."""
        if highest < len(self._cells):
            return True
        if not _is_dense(highest, count):
            return False
        bigger = np.full(1 << highest.bit_length(), -1, np.int64)
        bigger[: len(self._cells)] = self._cells
        self._cells = bigger
        return True

    def find(self, keys: Slots) -> Slots:
        found: Slots = self._cells[keys]
        return found

    def holds(self, keys: Slots) -> npt.NDArray[np.bool_]:
        """Which keys have a cell; `find` takes no others."""
        return keys.view(np.uint64) < np.uint64(len(self._cells))

    def add(self, keys: Slots, first_slot: int, slots: Slots, rows: Slots) -> Slots:
        """Give absent keys (repeats allowed) the slots from first_slot on; fills slots[rows]; returns the distinct keys."""
        cells = self._cells
        order = np.arange(len(keys), dtype=np.int64)
        cells[keys[::-1]] = order[::-1]  # of several rows with one key the first wins, as it is written last
        new_keys: Slots = keys[np.flatnonzero(cells[keys] == order)]  # a mask takes twice as long
        cells[new_keys] = np.arange(first_slot, first_slot + len(new_keys))
        slots[rows] = cells[keys]
        return new_keys

    def grown(self, keys: Slots) -> DirectTable | HashTable:
        """This table, or a smaller one when its batch added fewer keys than it had room for."""
        kept = max(_DIRECT_CELLS_SMALL, _DIRECT_CELLS_KEPT * len(keys))
        return self if len(self._cells) <= kept else HashTable(keys)


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
        encoded = pa.array(keys).dictionary_encode()  # in the order of first arrival
        new_keys: Slots = encoded.dictionary.to_numpy()
        slots[rows] = encoded.indices.to_numpy().astype(np.int64) + first_slot
        if 4 * (first_slot + len(new_keys)) <= 3 * len(self._cell_slots):
            self._insert(new_keys, first_slot)
        return new_keys

    def grown(self, keys: Slots) -> DirectTable | HashTable:
        """This table, or one that fits when it is more than half full; a direct one if the keys turned out dense."""
        return self if 2 * len(keys) <= len(self._cell_slots) else _table_of(keys)

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


def _is_dense(highest: int, count: int) -> bool:
    """Whether a direct-address table may have a cell for a key, when there are as many keys."""
    return highest < max(_DIRECT_CELLS_MIN, _DIRECT_CELLS_PER_KEY * count)


def _table_of(keys: Slots) -> DirectTable | HashTable:
    """The table for some more keys like these, not few."""
    highest = 2 * int(keys.view(np.uint64).max())  # so that the next key beyond the highest doesn't turn the table back
    return DirectTable(keys, highest) if highest < _DIRECT_CELLS_PER_KEY * len(keys) else HashTable(keys)


_OWN_IDENTITY = (pa.string(), pa.binary())
_INT64_COMPATIBLE = (pa.int64(), pa.date32(), pa.timestamp("us", tz="UTC"))


class Identified(Protocol):
    """What an index needs to know of keys, or of other values."""

    @property
    def arrays(self) -> Sequence[pa.Array]: ...

    def encoded(self) -> Sequence[Any]:
        """What tells rows apart, as dict keys."""

    def __len__(self) -> int: ...


class KeyIndex(Protocol):
    """Dense slots of the keys of one namespace."""

    @property
    def count(self) -> int:
        """Keys seen; also the next slot."""

    def slots(self, keys: Identified) -> Slots:
        """Slot of each row's key; keys not seen before get the next slots, in row order."""

    def find(self, keys: Identified) -> Slots:
        """Slot of each row's key, -1 for one that was not seen before."""

    def frozen_keys(self) -> Callable[[], list[pa.Array]]:
        """O(1): the key columns of the slots known now, one array per key field, made when called (on any thread)."""

    def key_arrays(self, start: int, stop: int) -> list[pa.Array]:
        """Key columns of the slots [start, stop)."""

    def key_arrays_of(self, slots: Slots) -> list[pa.Array]:
        """Key columns of some slots, in their order."""


def create_key_index(field_types: Sequence[pa.DataType], column_of: Callable[[list[pa.Array]], Identified]) -> KeyIndex:
    """The fastest index for keys with these Arrow field types; `column_of` makes a KeyColumn from such arrays."""
    if len(field_types) == 1 and field_types[0] in _INT64_COMPATIBLE:
        return Int64KeyIndex(field_types[0])
    if len(field_types) > 1 or has_words(field_types[0]):
        return WordsKeyIndex(field_types, column_of)
    return EncodedKeyIndex(field_types, column_of)


class Int64KeyIndex:
    """Keys that are one 64-bit number: a direct-address table while they are dense, else open addressing in numpy."""

    __slots__ = ("_arrow_type", "_count", "_keys", "_table")

    def __init__(self, arrow_type: pa.DataType) -> None:
        self._arrow_type = arrow_type
        self._keys: Slots = np.empty(_KEYS_MIN, np.int64)
        self._count = 0
        self._table: FewTable | DirectTable | HashTable = FewTable(self._keys[:0])

    @property
    def count(self) -> int:
        return self._count

    def slots(self, keys: Identified) -> Slots:
        return self.slots_of(_int64_view(keys.arrays[0]))

    def find(self, keys: Identified) -> Slots:
        return self.find_numbers(_int64_view(keys.arrays[0]))

    def find_numbers(self, numbers: Slots) -> Slots:
        """As `find`, of the numbers themselves."""
        if not len(numbers):
            return np.empty(0, np.int64)
        table = self._table
        if isinstance(table, FewTable) and len(numbers) > _FEW_KEYS_MAX:
            table = HashTable(self.numbers())
        if not isinstance(table, DirectTable):
            return table.find(numbers)
        found = np.full(len(numbers), -1, np.int64)
        within = table.holds(numbers)
        found[within] = table.find(numbers[within])
        return found

    def slots_of(self, numbers: Slots) -> Slots:
        """As `slots`, of the numbers themselves."""
        if not len(numbers):
            return np.empty(0, np.int64)
        table, known = self._table_for(numbers), self._count
        slots = table.find(numbers)
        if slots.min() < 0:
            missing = np.flatnonzero(slots < 0) if known else np.arange(len(slots))
            self._append(table.add(numbers[missing] if known else numbers, known, slots, missing))
        if self._count > known or table is not self._table:
            self._table = table.grown(self.numbers())
        return slots

    def numbers(self) -> Slots:
        """All keys by slot. They stay as they are while the index goes on growing."""
        return self._keys[: self._count]

    def frozen_keys(self) -> Callable[[], list[pa.Array]]:
        keys, count = self._keys, self._count  # appended to beyond `count` only; a bigger array is a new one
        return lambda: [self._arrow(keys[:count])]

    def key_arrays(self, start: int, stop: int) -> list[pa.Array]:
        return [self._arrow(self._keys[start:stop].copy())]

    def key_arrays_of(self, slots: Slots) -> list[pa.Array]:
        return [self._arrow(self._keys[slots])]

    def _arrow(self, numbers: Slots) -> pa.Array:
        if self._arrow_type == pa.date32():
            return pa.array(numbers.astype(np.int32)).view(pa.date32())
        return pa.array(numbers).view(self._arrow_type)

    def _table_for(self, numbers: Slots) -> FewTable | DirectTable | HashTable:
        """The present table, or one of another kind when it is not for these keys."""
        table = self._table
        if isinstance(table, HashTable) or (isinstance(table, FewTable) and len(numbers) <= _FEW_KEYS_MAX):
            return table
        keys, highest = self.numbers(), int(numbers.view(np.uint64).max())  # a negative number is seen as a huge one
        if isinstance(table, FewTable):
            highest = max(highest, int(keys.view(np.uint64).max(initial=0)))
            return DirectTable(keys, highest) if _is_dense(highest, len(numbers)) else HashTable(keys)
        if not table.reserve(highest, self._count + len(numbers)):
            self._table = table = HashTable(keys)
        return table

    def _append(self, new_keys: Slots) -> None:
        needed = self._count + len(new_keys)
        if needed > len(self._keys):
            bigger = np.empty(max(needed, 2 * len(self._keys)), np.int64)
            bigger[: self._count] = self._keys[: self._count]
            self._keys = bigger
        self._keys[self._count : needed] = new_keys
        self._count = needed


class EncodedKeyIndex:
    """Keys of any type: distinct rows of a batch by Arrow's dictionary encoding, then a dict over their canonical bytes."""

    __slots__ = ("_column_of", "_field_types", "_pieces", "_slots")

    def __init__(self, field_types: Sequence[pa.DataType], column_of: Callable[[list[pa.Array]], Identified]) -> None:
        self._field_types = list(field_types)
        self._column_of = column_of
        self._slots: dict[Any, int] = {}
        self._pieces: list[list[pa.Array]] = []  # key columns in slot order, in runs of falling size

    @property
    def count(self) -> int:
        return len(self._slots)

    def slots(self, keys: Identified) -> Slots:
        if not len(keys):
            return np.empty(0, np.int64)
        codes, distinct = _distinct_rows(keys.arrays)
        identities = self._identities(distinct)
        known, count = self._slots, len(self._slots)
        found = list(map(known.get, identities))
        if None in found:
            # -0.0 and 0.0, or two NaNs, differ to Arrow and are one key: setdefault gives both the same slot
            found = [known.setdefault(identity, len(known)) for identity in identities]
            self._append_new(distinct, np.array(found, np.int64), count, len(known))
        slots_of_distinct: Slots = np.array(found, np.int64)
        return slots_of_distinct[codes]

    def find(self, keys: Identified) -> Slots:
        if not len(keys):
            return np.empty(0, np.int64)
        codes, distinct = _distinct_rows(keys.arrays)
        found: Slots = np.array([self._slots.get(identity, -1) for identity in self._identities(distinct)], np.int64)
        return found[codes]

    def frozen_keys(self) -> Callable[[], list[pa.Array]]:
        pieces = list(self._pieces)  # O(log count) of them
        return lambda: self._joined(pieces)

    def key_arrays(self, start: int, stop: int) -> list[pa.Array]:
        return [array.slice(start, stop - start) for array in self._all()]

    def key_arrays_of(self, slots: Slots) -> list[pa.Array]:
        taken = pa.array(slots)
        return [array.take(taken) for array in self._all()]

    def _all(self) -> list[pa.Array]:
        self._pieces = [self._joined(self._pieces)]
        return self._pieces[0]

    def _identities(self, arrays: list[pa.Array]) -> Sequence[Any]:
        """What tells keys apart, as dict keys: canonical bytes, or the values where those are as good and cheaper."""
        if len(arrays) == 1 and arrays[0].type in _OWN_IDENTITY:
            values: list[Any] = arrays[0].to_pylist()
            return values
        return self._column_of(arrays).encoded()

    def _joined(self, pieces: list[list[pa.Array]]) -> list[pa.Array]:
        if not pieces:
            return [pa.array([], arrow_type) for arrow_type in self._field_types]
        return [_concatenated(arrays) for arrays in zip(*pieces, strict=True)]

    def _append_new(self, arrays: Sequence[pa.Array], slots: Slots, before: int, after: int) -> None:
        """Keep the keys of the slots from `before` on: those of the first rows that have them."""
        new_rows = np.full(after - before, -1, np.int64)
        new = np.flatnonzero(slots >= before)[::-1]
        new_rows[slots[new] - before] = new
        self._append([array.take(pa.array(new_rows)) for array in arrays])

    def _append(self, arrays: list[pa.Array]) -> None:
        """Keep runs whose sizes at least halve, so that there are few and each row is copied O(log count) times."""
        self._pieces.append(arrays)
        while len(self._pieces) > 1 and len(self._pieces[-2][0]) < 2 * len(self._pieces[-1][0]):
            last = self._pieces.pop()
            self._pieces[-1] = self._joined([self._pieces[-1], last])


class _Texts:
    """A number for each text, or binary value."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    @property
    def count(self) -> int:
        return len(self._numbers)

    def slots_of(self, array: pa.Array) -> Slots:
        codes, values = self._distinct(array)
        found = list(map(self._numbers.get, values))
        if None in found:
            found = [self._numbers.setdefault(value, len(self._numbers)) for value in values]
        numbers: Slots = np.array(found, np.int64)
        return numbers[codes]

    def find_numbers(self, array: pa.Array) -> Slots:
        """-1 for a text that was not seen before."""
        codes, values = self._distinct(array)
        found: Slots = np.array([self._numbers.get(value, -1) for value in values], np.int64)
        return found[codes]

    def _distinct(self, array: pa.Array) -> tuple[Slots, list[bytes]]:
        codes, (distinct,) = _distinct_rows([array])
        return codes, distinct.view(pa.binary()).to_pylist()


class _Pairs:
    """A slot for each pair of slots.

    A pair is one number: the first slot, and behind it as many bits as second slots have needed so far. Where these are few, as
    the days of a key and a day are, the numbers are dense, and found without hashing."""

    __slots__ = ("_bits", "_index")

    def __init__(self) -> None:
        self._bits = 0
        self._index = Int64KeyIndex(pa.int64())

    @property
    def count(self) -> int:
        return self._index.count

    def slots_of(self, firsts: Slots, seconds: Slots, second_count: int) -> Slots:
        """As `KeyIndex.slots`. `second_count`: second slots that there are."""
        bits = (second_count - 1).bit_length()
        if bits > self._bits:
            self._widen(bits)
        return self._index.slots_of((firsts << self._bits) | seconds)

    def find(self, firsts: Slots, seconds: Slots) -> Slots:
        """As `KeyIndex.find`. The second slots were counted by a `slots_of`."""
        return self._index.find_numbers((firsts << self._bits) | seconds)

    def _widen(self, bits: int) -> None:
        """Number all pairs anew, in their order: at each doubling of second slots, of which there are no more than pairs."""
        numbers, index = self._index.numbers(), Int64KeyIndex(pa.int64())
        index.slots_of(((numbers >> self._bits) << bits) | (numbers & ((1 << self._bits) - 1)))
        self._bits, self._index = bits, index


class WordsKeyIndex(EncodedKeyIndex):
    """Keys of several fields, or of one that has a fixed width and is no 64-bit number. Of the fields only texts are looked up in a
    dict, each distinct one of a batch once.

    Each word of a key has a slot of its own, and so has each pair of a slot so far and the next word's slot, which tells keys apart
    exactly. A text is one word."""

    __slots__ = ("_pairs", "_words")

    def __init__(self, field_types: Sequence[pa.DataType], column_of: Callable[[list[pa.Array]], Identified]) -> None:
        super().__init__(field_types, column_of)
        self._words: list[Any] = []
        for kind in field_types:
            count = 2 if pa.types.is_decimal128(kind) else 1
            self._words += [Int64KeyIndex(pa.int64()) if has_words(kind) else _Texts() for _ in range(count)]
        self._pairs = [_Pairs() for _ in self._words[1:]]

    @property
    def count(self) -> int:
        found: int = (self._pairs or self._words)[-1].count
        return found

    def slots(self, keys: Identified) -> Slots:
        before = self.count
        words = _words_of(keys.arrays)
        slots: Slots = self._words[0].slots_of(words[0])
        for index, pairs, numbers in zip(self._words[1:], self._pairs, words[1:], strict=True):
            slots = pairs.slots_of(slots, index.slots_of(numbers), index.count)
        if self.count > before:
            self._append_new(keys.arrays, slots, before, self.count)
        return slots

    def find(self, keys: Identified) -> Slots:
        words = _words_of(keys.arrays)
        slots: Slots = self._words[0].find_numbers(words[0])
        for index, pairs, numbers in zip(self._words[1:], self._pairs, words[1:], strict=True):
            seconds = index.find_numbers(numbers)
            known = np.flatnonzero((slots >= 0) & (seconds >= 0))
            found = np.full(len(slots), -1, np.int64)
            found[known] = pairs.find(slots[known], seconds[known])
            slots = found
        return slots


def _words_of(arrays: Sequence[pa.Array]) -> list[Words | pa.Array]:
    """Numbers, and texts as they are."""
    found: list[Any] = []
    for array in arrays:
        found += [word.view(np.int64) for word in key_words(array)] if has_words(array.type) else [array]
    return found


def _int64_view(array: pa.Array) -> Slots:
    if array.type == pa.date32():
        days: Slots = array.view(pa.int32()).to_numpy(zero_copy_only=True).astype(np.int64)
        return days
    view: Slots = array.view(pa.int64()).to_numpy(zero_copy_only=True)
    return view


def _concatenated(arrays: Sequence[pa.Array]) -> pa.Array:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _distinct_rows(arrays: Sequence[pa.Array]) -> tuple[Slots, list[pa.Array]]:
    """(code of each row, distinct rows by code); codes are dense and numbered by first arrival."""
    if len(arrays) == 1:
        encoded = arrays[0].dictionary_encode()
        return encoded.indices.to_numpy(zero_copy_only=True), [encoded.dictionary]
    codes, count = distinct_codes(arrays[0])
    for array in arrays[1:]:
        field_codes, field_count = distinct_codes(array)
        codes, count = distinct_codes(pa.array(codes * field_count + field_codes))  # below rows squared: fits int64
    first_rows = np.empty(count, np.int64)
    first_rows[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)
    return codes, [array.take(pa.array(first_rows)) for array in arrays]


def distinct_codes(array: pa.Array) -> tuple[Slots, int]:
    """(code of each row, number of codes): equal values have one code; codes are numbered by first arrival."""
    encoded = array.dictionary_encode()
    codes: Slots = encoded.indices.to_numpy(zero_copy_only=True).astype(np.int64)
    return codes, len(encoded.dictionary)
