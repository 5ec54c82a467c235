"""Stable sort of record batches of keyed rows by key group. Pure.

Rows are converted in the order of memory, and sorted afterwards: each batch by itself, then merged into output batches. Both steps
move a few megabytes without the interpreter lock. Converting rows in sorted order would visit objects all over the heap while it
holds the lock, and is several times slower."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Groups = npt.NDArray[np.int32]

BATCH_ROWS = 1 << 17
"""Rows of an output batch at most."""

_BATCH_BYTES_MAX = 1 << 30
"""Bytes of an output batch of several rows. Beyond 2 GiB Arrow makes two batches, and the rows of the second would be lost."""

LARGE_POOL = pa.system_memory_pool()
"""Memory for data that lives as long as a snapshot is written. Arrow's own pool asks for huge pages, which take the kernel seconds
where free memory is fragmented (measured: 3.4 s instead of 1 s for 100 MB)."""


@dataclass(frozen=True, slots=True)
class RowStream:
    """A table as a stream of batches."""

    schema: pa.Schema
    size: int
    """Bytes of all batches in memory; an estimate."""
    batches: Callable[[], Iterator[pa.RecordBatch]]
    """May be called again."""

    @staticmethod
    def of(table: pa.Table) -> RowStream:
        return RowStream(table.schema, table.nbytes, lambda: iter(table.to_batches(max_chunksize=BATCH_ROWS)))

    def table(self) -> pa.Table:
        return pa.Table.from_batches(self.batches(), self.schema)


def stable_order(groups: Groups) -> npt.NDArray[np.int64]:
    """Indices of rows in key-group order; rows of one key group keep their order. 0 <= groups < 2**16."""
    return np.argsort(groups.astype(np.uint16), kind="stable")  # radix sort: 10 times faster than on int32


def is_sorted(groups: Groups) -> bool:
    return bool((groups[1:] >= groups[:-1]).all())


def bytes_of(array: pa.Array) -> int:
    """Bytes of an array's buffers: `nbytes` of an array that is not a slice, without releasing the interpreter lock for each."""
    return sum(buffer.size for buffer in array.buffers() if buffer is not None)


class GroupSort:
    """Takes batches of one schema, then gives all rows by key group; rows of one key group keep their order."""

    def __init__(self, column: str) -> None:
        """`column`: name of the column of key groups, int32 without nulls."""
        self._column = column
        self._parts: list[pa.RecordBatch] = []
        self.size = 0
        """Bytes added; a slice that is in order counts as much as the array that it is a slice of."""

    def add(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            part = self._in_order(batch)
            self._parts.append(part)
            self.size += sum(map(bytes_of, part.columns))

    def batches(self, rows: int) -> Iterator[pa.RecordBatch]:
        """Batches of `rows` rows, or fewer where rows are very large, each made when it is asked for."""
        parts = self._parts
        if not parts:
            return
        groups = [part.column(self._column).to_numpy() for part in parts]
        everything = np.concatenate(groups)
        if is_sorted(everything):
            yield from pa.Table.from_batches(parts).to_batches(max_chunksize=rows)
            return
        origin = np.repeat(np.arange(len(parts), dtype=np.int32), [len(of_part) for of_part in groups])
        order = stable_order(everything)
        starts = np.zeros(len(parts), np.int64)
        first = 0
        while first < len(order):
            count = rows
            while True:
                # The sort is stable and each part sorted, so the next rows of the whole are the next few rows of each part.
                counts = np.bincount(origin[order[first : first + count]], minlength=len(parts))
                slices = zip(parts, starts.tolist(), counts.tolist(), strict=True)
                some = pa.Table.from_batches([part.slice(start, length) for part, start, length in slices if length])
                if count == 1 or some.nbytes <= _BATCH_BYTES_MAX:
                    break
                count = (count + 1) // 2
            first += count
            starts += counts
            yield self._in_order(some.combine_chunks().to_batches()[0])

    def _in_order(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        groups = batch.column(self._column).to_numpy()
        if is_sorted(groups):
            return batch
        return pc.take(batch, pa.array(stable_order(groups)), boundscheck=False, memory_pool=LARGE_POOL)
