"""A merge: neighbouring runs, oldest first, written as one, slice by slice on the loop thread, without their dead rows.

The runs stay in use until it has finished. A row that is deleted after it was copied is deleted here, too. What it writes is in
memory, or in two files that are mapped when it has finished: an Arrow IPC file, and the four numbers of the rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.statebackends.row_tables.key_codes import Codes, Positions, merged_order
from holdfast.statebackends.row_tables.run import NUMBERS_BYTES, ContentsBuilder, Mask, Numbers, Run, RunNumbers
from holdfast.statebackends.row_tables.time_order import PLACE_BYTES, Places, TimeOrder, sort_chunks

SLICE_ROWS = 1 << 14
"""Rows of all runs that one slice takes at most."""
SLICE_BYTES = 32 << 20
BLOCK_ROWS = 1 << 16
BLOCK_BYTES = 64 << 20


class Merge:
    """One merge, and how far it is."""

    def __init__(self, runs: Sequence[Run], key_fields: int, path: str | None, *, by_time: bool) -> None:
        """The first `key_fields` columns are the key. `path`: of files to be written, without their endings; None: in memory.
        `by_time`: of a table that is asked for rows by time. Raises OSError."""
        self.runs = list(runs)
        self.rows = sum(map(len, runs))
        self._cursors = [0] * len(runs)
        self._size = 0
        self._path = path
        self._numbers, self._places = _new_numbers(self.rows, path, by_time=by_time)
        self._sorted_until = 0
        self._waiting: list[pa.RecordBatch] = []
        self._blocks: list[pa.RecordBatch] = []
        self._writer: Any = None
        self._contents = ContentsBuilder(key_fields)
        self._deleted: list[Positions] = []
        self._dropped: set[int] = set()
        for run in runs:
            run.merge = self

    @property
    def is_mapped(self) -> bool:
        return self._path is not None

    @property
    def nbytes(self) -> int:
        """Of what is in memory when it has finished; an estimate from above."""
        return 0 if self.is_mapped else sum(len(run) * run.bytes_per_row for run in self.runs)

    @property
    def is_done(self) -> bool:
        return all(cursor == len(run) for run, cursor in zip(self.runs, self._cursors, strict=True))

    def step(self) -> int:
        """One slice; rows that were looked at. Raises OSError."""
        stops = self._stops()
        kept: list[Positions] = []
        batches: list[pa.RecordBatch] = []
        count = 0
        for run, start, stop in zip(self.runs, self._cursors, stops, strict=True):
            if start == stop:
                continue
            rows = self._alive(run, start, stop)
            kept.append(rows + count)
            batches += run.slice(start, stop)
            count += stop - start
        pieces = [(run, slice(start, stop)) for run, start, stop in zip(self.runs, self._cursors, stops, strict=True)]
        self._cursors = stops
        alive = np.concatenate(kept)
        if len(alive):
            codes = np.concatenate([run.codes[rows] for run, rows in pieces])[alive]
            order = alive[merged_order(codes)]  # of one code the older runs' rows come first, as their orders do
            self._append(pieces, order, pa.Table.from_batches(batches).take(pa.array(order)).combine_chunks())
        return count

    def delete(self, run: Run, positions: Positions) -> None:
        """Rows of one of the runs were deleted: those that are copied are deleted in what is written."""
        copied = positions[positions < self._cursors[self.runs.index(run)]]
        if len(copied):
            codes, orders = self._numbers[0][: self._size], self._numbers[1][: self._size]
            self._deleted.append(places_of(codes, orders, run.codes[copied], run.orders[copied])[0])

    def drop(self, namespaces: Sequence[int]) -> None:
        """Namespaces of one of the runs were dropped, and so of all of them."""
        self._dropped.update(namespaces)

    def finish(self) -> Run | None:
        """What was written; None if no row is left. The runs are the caller's to discard. Raises OSError."""
        self._flush()
        for run in self.runs:
            run.merge = None
        if not self._size:
            self.abandon()
            return None
        size = self._size
        codes, orders, namespaces, times = self._numbers
        kept = codes[:size], orders[:size], namespaces[:size], times[:size]
        by_time = None if self._places is None else TimeOrder(kept[3], self._places[:size], self._sorted_until)
        paths: tuple[str, ...] = ()
        if self._path is not None:
            self._writer.close()
            paths = (f"{self._path}.arrow", f"{self._path}.numbers")
            reader = pa.ipc.open_file(pa.memory_map(paths[0]))
            self._blocks = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        contents = self._contents.build()
        run = Run(kept, self._blocks, contents, by_time=by_time, paths=paths)
        for positions in self._deleted:
            run.mark_dead(positions)
        run.drop(sorted(self._dropped))
        return run

    def abandon(self) -> None:
        """Delete what was written; the runs are as they were. Idempotent."""
        for run in self.runs:
            run.merge = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for ending in ("arrow", "numbers") if self._path is not None else ():
            if os.path.exists(f"{self._path}.{ending}"):
                os.unlink(f"{self._path}.{ending}")

    def _stops(self) -> list[int]:
        """Where the slice ends in each run: rows of the least (code, order) of all that are left."""
        left = [index for index, run in enumerate(self.runs) if self._cursors[index] < len(run)]
        rows = max(1, SLICE_ROWS // len(left))
        ends, bounds = {}, []
        for index in left:
            run, start = self.runs[index], self._cursors[index]
            ends[index] = min(start + max(1, min(rows, SLICE_BYTES // len(left) // run.bytes_per_row)), len(run))
            if ends[index] < len(run):
                bounds.append((int(run.codes[ends[index] - 1]), int(run.orders[ends[index] - 1])))
        stops = list(self._cursors)
        for index, end in ends.items():
            stops[index] = end if not bounds else self._cut(index, end, *min(bounds))
        return stops

    def _cut(self, index: int, end: int, code: int, order: int) -> int:
        """Behind the last row up to (code, order), but not behind `end`."""
        run, start = self.runs[index], self._cursors[index]
        window = run.codes[start:end]
        first, last = (start + int(np.searchsorted(window, np.uint64(code), side=side)) for side in ("left", "right"))
        return first + int(np.searchsorted(run.orders[first:last], order, side="right"))

    def _alive(self, run: Run, start: int, stop: int) -> Positions:
        """Which of the rows [start, stop), counted from `start`."""
        dead = run.dead_among(slice(start, stop))
        return np.arange(stop - start) if dead is None else np.flatnonzero(~dead)

    def _append(self, pieces: Sequence[tuple[Run, slice]], order: Positions, table: pa.Table) -> None:
        start, stop = self._size, self._size + len(order)
        for column, name in zip(self._numbers, ("codes", "orders", "namespaces", "times"), strict=True):
            column[start:stop] = np.concatenate([getattr(run, name)[rows] for run, rows in pieces])[order]
        self._size = stop
        if self._places is not None:
            self._sorted_until = sort_chunks(self._numbers[3], self._places, self._sorted_until, stop)
        self._contents.add_rows(*(column[start:stop] for column in self._numbers[1:]))
        self._waiting += table.to_batches()
        waiting_rows = sum(batch.num_rows for batch in self._waiting)
        if waiting_rows >= BLOCK_ROWS or sum(batch.nbytes for batch in self._waiting) >= BLOCK_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        block = self._waiting[0] if len(self._waiting) == 1 else pa.concat_batches(self._waiting)
        self._waiting = []
        self._contents.add_block(self._numbers[0][self._size - block.num_rows : self._size], block)
        if self._path is None:
            self._blocks.append(block)
            return
        if self._writer is None:
            self._writer = pa.ipc.new_file(f"{self._path}.arrow", block.schema)
        self._writer.write_batch(block)


def places_of(codes: Codes, orders: Numbers, wanted: Codes, wanted_orders: Numbers) -> tuple[Positions, Mask]:
    """(where the rows of some (code, order) are among sorted ones, which of them were found): only those that were found."""
    first = np.searchsorted(codes, wanted, side="left")
    stop = np.searchsorted(codes, wanted, side="right")
    end = stop.copy()
    while len(open_ := np.flatnonzero(first < stop)):  # a bisection of all at once
        middle = (first[open_] + stop[open_]) >> 1
        below = orders[middle] < wanted_orders[open_]
        first[open_[below]] = middle[below] + 1
        stop[open_[~below]] = middle[~below]
    found = first < end
    found[found] = orders[first[found]] == wanted_orders[found]
    return first[found], found


def _new_numbers(rows: int, path: str | None, *, by_time: bool) -> tuple[RunNumbers, Places | None]:
    if path is None:
        numbers = np.empty(rows, np.uint64), np.empty(rows, np.int64), np.empty(rows, np.int64), np.empty(rows, np.int64)
        return numbers, np.empty(rows, np.uint16) if by_time else None
    os.makedirs(os.path.dirname(path), exist_ok=True)
    row_bytes = NUMBERS_BYTES + (PLACE_BYTES if by_time else 0)
    with open(f"{path}.numbers", "xb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, rows * row_bytes))  # a map of a file with holes dies where a disk is full
    plain = np.asarray(np.memmap(f"{path}.numbers", np.int64, "r+", shape=(4, rows)))
    numbers = plain[0].view(np.uint64), plain[1], plain[2], plain[3]
    if not by_time:
        return numbers, None
    return numbers, np.asarray(np.memmap(f"{path}.numbers", np.uint16, "r+", offset=rows * NUMBERS_BYTES, shape=(rows,)))
