"""Columns of values in slots, kept from one whole snapshot for the next, which converts what was written in between alone.

Values become columns one by one, under the interpreter lock; columns are joined without it, and much faster. A job with a million
keys and a checkpoint each second writes a third of them in between. Columns are kept of states whose values have a fixed and small
width, and unless most slots are written between two snapshots: else they would take memory for nothing. Which slots were written is
for heap/slot_pages.py."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import compress, islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.statebackends.columnar.key_index import Slots
from holdfast.statebackends.heap.slot_pages import PAGE_BITS, Flags, FrozenPages, present
from holdfast.statebackends.serialization.state_serializer import StateSerializer
from holdfast.statebackends.snapshot.rows import KEYS_PER_BATCH, ROWS_AT_HAND, ROWS_PER_BATCH, Throttle, arrays_of
from holdfast.statebackends.snapshot.sorting import LARGE_POOL

CHUNK_PAGES = 1 << 12
"""Pages whose columns are kept together. Each step of joining them may wait 5 ms until a busy loop gives the interpreter back, so
that few large ones cost less; each has its chunk twice in memory."""
WIDTH_MAX = 64
"""Bytes of a value above which its columns are not kept."""
WRITTEN_SHARE_MAX = 0.75
"""Share of the slots that are written between two snapshots, above which columns are not kept."""


def has_small_width(serializer: StateSerializer) -> bool:
    """Whether all values of a state take the same few bytes as columns."""
    widths = [_width(field.type) for field in serializer.value_fields]
    return all(widths) and sum(widths) <= WIDTH_MAX


def _width(kind: pa.DataType) -> int:
    """Bytes of a value; 0: they have no fixed width."""
    if pa.types.is_struct(kind):
        widths = [_width(kind.field(index).type) for index in range(kind.num_fields)]
        return sum(widths) if all(widths) else 0
    try:
        bits: int = kind.bit_width
        return -(-bits // 8)
    except ValueError:
        return 0


@dataclass(frozen=True, slots=True)
class Columns:
    """Of one chunk of slots."""

    slots: Slots
    """Those that have a value, ascending."""
    arrays: list[pa.Array]
    """`StateSerializer.value_fields` of their values."""


@dataclass(frozen=True, slots=True)
class _Kept:
    barrier: int
    numbering: int
    chunks: Mapping[int, Columns]
    """By first page."""


_NOTHING = _Kept(0, 0, {})


class ConvertedSlots:
    """The columns of one state as the newest snapshot wrote them. For pool threads; several may convert at one time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept = _NOTHING

    def chunks(self, frozen: FrozenPages, serializer: StateSerializer, throttle: Throttle) -> Iterator[Columns]:
        """All values of a frozen state without a TTL, by slot. When all were taken they are kept for later barriers. Raises
        StateValueError."""
        with self._lock:
            known = self._kept
        if known.numbering != frozen.numbering or known.barrier >= frozen.barrier:
            known = _NOTHING
        kept: dict[int, Columns] = {}
        pages_count = -(-frozen.count >> PAGE_BITS)
        for first in range(0, pages_count, CHUNK_PAGES):
            pages = range(first, min(first + CHUNK_PAGES, pages_count))
            columns = self._chunk(frozen, pages, known, serializer, throttle)
            newest = frozen.written_since(frozen.barrier - 1, pages)
            if newest is not None and np.count_nonzero(newest) <= WRITTEN_SHARE_MAX * len(columns.slots):
                kept[first] = columns
            yield columns
        self._keep(_Kept(frozen.barrier, frozen.numbering, kept))

    def _keep(self, kept: _Kept) -> None:
        with self._lock:
            if (kept.numbering, kept.barrier) > (self._kept.numbering, self._kept.barrier):
                self._kept = kept

    def _chunk(
        self, frozen: FrozenPages, pages: range, known: _Kept, serializer: StateSerializer, throttle: Throttle
    ) -> Columns:
        before = known.chunks.get(pages.start)
        written = None if before is None else frozen.written_since(known.barrier, pages)
        if before is None or written is None:
            return _all_columns(frozen, pages, serializer, throttle)
        newer = _written_columns(frozen, pages.start, written, serializer, throttle)
        return _joined(before, newer, pages.start << PAGE_BITS, written)


def _all_columns(frozen: FrozenPages, pages: range, serializer: StateSerializer, throttle: Throttle) -> Columns:
    """Of all slots of a chunk."""
    found: list[Slots] = []
    converted: list[list[pa.Array]] = [serializer.to_arrays([])]
    for slots, values in frozen.batches(KEYS_PER_BATCH, pages):
        found.append(slots)
        for start in range(0, len(values), ROWS_PER_BATCH):
            converted.append(throttle.run(partial(arrays_of, serializer, values[start : start + ROWS_PER_BATCH])))
    return Columns(np.concatenate([np.empty(0, np.int64), *found]), _concatenated(converted))


def _written_columns(
    frozen: FrozenPages, first: int, written: Flags, serializer: StateSerializer, throttle: Throttle
) -> Columns:
    """Of the slots of a chunk that have a flag, and a value."""
    blocks = frozen.flagged(written, first, ROWS_AT_HAND)
    there: list[Any] = []
    converted: list[list[pa.Array]] = [serializer.to_arrays([])]

    def convert() -> bool:
        some = list(islice(blocks, ROWS_PER_BATCH // ROWS_AT_HAND))
        for values in some:
            has_value = present([values], len(values))
            there.append(has_value)
            converted.append(serializer.to_arrays(values if has_value.all() else list(compress(values, has_value.tolist()))))
        return bool(some)

    while throttle.run(convert):
        pass
    slots = np.flatnonzero(written.reshape(-1)) + (first << PAGE_BITS)
    return Columns(slots[np.concatenate([np.empty(0, np.bool_), *there])], _concatenated(converted))


def _concatenated(converted: list[list[pa.Array]]) -> list[pa.Array]:
    return [pa.concat_arrays(each, memory_pool=LARGE_POOL) for each in zip(*converted, strict=True)]


def _joined(before: Columns, newer: Columns, start: int, written: Flags) -> Columns:
    """The columns of a chunk whose first slot is `start`: of what was written the newer ones, else those before."""
    rows = np.full(written.size, -1, np.int64)
    rows[before.slots - start] = np.arange(len(before.slots))
    rows[written.reshape(-1) != 0] = -1
    rows[newer.slots - start] = np.arange(len(newer.slots)) + len(before.slots)
    there = np.flatnonzero(rows >= 0)
    picked = pa.array(rows[there])
    arrays = [pa.concat_arrays(pair, memory_pool=LARGE_POOL) for pair in zip(before.arrays, newer.arrays, strict=True)]
    taken = [pc.take(array, picked, boundscheck=False, memory_pool=LARGE_POOL) for array in arrays]
    return Columns(there + start, taken)
