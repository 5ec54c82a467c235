"""Which rows of a run have the earliest times.

A run is sorted by key. Its rows are sorted by time in chunks of bounded size, when the run is written; which rows come first is
then found among all chunks at once, so that no read sorts more than it gives."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.statebackends.row_tables.key_codes import Positions
from holdfast.statebackends.state import NO_TIME

CHUNK_ROWS = 1 << 15
"""At most 1 << 16: the places of its rows are numbers of two bytes."""
PLACE_BYTES = 2
"""Of a row."""
_READ_SHARE_MAX = 4
"""Rows that are read at once for each row that is asked for."""
_READ_ROWS_MIN = 256
"""Rows that are read at once however few are asked for; behind dead rows twice as many as these, up to CHUNK_ROWS."""
_FEW = 16
"""Chunks that are bisected faster one by one."""
Numbers: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]
Places: TypeAlias = npt.NDArray[np.uint16]
DeadAmong: TypeAlias = Callable[[Positions], Mask | None]
"""Which rows of a run are dead; None: no row is."""


def sort_chunks(times: Numbers, places: Places, start: int, stop: int) -> int:
    """Sort the chunks of the rows [start, stop), of which the last one may go on behind `stop`: where that one begins.

    `start` begins a chunk; of equal times the first row comes first."""
    while start + CHUNK_ROWS <= stop:
        _sort_chunk(times, places, start, start + CHUNK_ROWS)
        start += CHUNK_ROWS
    return start


def _sort_chunk(times: Numbers, places: Places, start: int, stop: int) -> None:
    places[start:stop] = np.argsort(times[start:stop], kind="stable")


class TimeOrder:
    """The rows of one run by time, and up to where they are known to be dead."""

    def __init__(self, times: Numbers, places: Places, sorted_until: int = 0) -> None:
        """Chunks up to `sorted_until` are sorted; the others are now. `places`: of each row of a chunk its place there, by time."""
        size = len(times)
        if (last := sort_chunks(times, places, sorted_until, size)) < size:
            _sort_chunk(times, places, last, size)
        self._times, self._places = times, places
        self._starts = np.arange(0, size, CHUNK_ROWS)
        self._sizes = np.minimum(CHUNK_ROWS, size - self._starts)
        self._fronts = np.zeros(len(self._starts), np.int64)
        """Of each chunk, how many of its first rows are dead, or have no time."""
        self._next = np.empty(len(self._starts), np.int64)
        """Time of the row behind them, if there is one."""
        every = np.arange(len(self._starts))
        self._advance(every, self._up_to(every, NO_TIME))

    @property
    def nbytes(self) -> int:
        return self._places.nbytes

    def first(self, moment: int, rows_max: int, after: int, dead_among: DeadAmong) -> Positions:
        """The first living rows with a time behind `after` and up to `moment`, by time and place."""
        chunks = np.flatnonzero((self._next <= moment) & (self._fronts < self._sizes))
        if len(chunks) == 1:
            return self._first_in(int(chunks[0]), moment, rows_max, after, dead_among)
        begins = self._fronts[chunks]
        if after != NO_TIME and len(chunks):
            begins = np.maximum(begins, self._up_to(chunks, after))
        stops = self._up_to(chunks, moment)
        found: list[Positions] = [np.empty(0, np.int64)]
        count, passed, window = 0, 0, max(1, max(2 * rows_max, _READ_ROWS_MIN) // max(1, len(chunks)))
        read_max = max(_READ_SHARE_MAX * rows_max, _READ_ROWS_MIN)
        while count < rows_max:
            left = begins < stops
            chunks, begins, stops = chunks[left], begins[left], stops[left]
            if not len(chunks):
                break
            ends = self._ends(chunks, begins, stops, window, read_max)
            rows = self._rows(chunks, begins, ends)
            dead = dead_among(rows)
            if dead is not None and dead.any():
                self._skip(chunks, begins, ends, dead)
                rows = rows[~dead]
            found.append(rows[np.argsort(self._times[rows], kind="stable")])
            count += len(rows)
            passed += int((ends - begins).sum()) - len(rows)
            read_max = max(read_max, min(2 * passed, CHUNK_ROWS))
            begins, window = ends, min(2 * window, CHUNK_ROWS)
        return np.concatenate(found)[:rows_max]

    def _first_in(self, chunk: int, moment: int, rows_max: int, after: int, dead_among: DeadAmong) -> Positions:
        """`first`, where the others have none: its rows are in order."""
        start, at = self._starts[chunk], int(self._fronts[chunk])
        if after != NO_TIME:
            at = max(at, self._up_to_in(chunk, after))
        stop = self._up_to_in(chunk, moment)
        found: list[Positions] = []
        count, read_max = 0, max(rows_max, _READ_ROWS_MIN)
        while at < stop and count < rows_max:
            end = min(at + read_max, stop)
            rows: Positions = start + self._places[start + at : start + end]
            dead = dead_among(rows)
            if dead is not None and dead.any():
                if at == self._fronts[chunk]:
                    lead = len(rows) if dead.all() else int(np.argmin(dead))
                    self._advance(np.array([chunk]), np.array([at + lead]))
                rows = rows[~dead]
            found.append(rows)
            count += len(rows)
            read_max = max(read_max, 2 * (end - at - len(rows)))
            at = end
        if len(found) == 1:
            return found[0][:rows_max]
        return np.concatenate([np.empty(0, np.int64), *found])[:rows_max]

    def _ends(self, chunks: Positions, begins: Positions, stops: Positions, window: int, read_max: int) -> Positions:
        """Up to where to read: at least a row, and of all chunks together the earliest of those in [begins, stops).

        About `window` rows of a chunk; `read_max` of all, or one of each."""
        while True:
            ends = np.minimum(begins + window, stops)
            beyond = np.flatnonzero(ends < stops)
            if not len(beyond):
                bound, complete = 0, ends
            else:
                bound = int(self._times_at(chunks[beyond], ends[beyond]).min())
                complete = np.clip(self._up_to(chunks, bound - 1), begins, stops)
            count = int((complete - begins).sum())
            if window == 1 or count <= read_max:
                break
            window = max(1, window // 2)
        if count:
            return complete
        same = np.clip(self._up_to(chunks, bound), begins, stops) - begins  # rows of one time: chunk by chunk
        before = np.cumsum(same) - same
        tied: Positions = begins + np.clip(read_max - before, 0, same)
        return tied

    def _skip(self, chunks: Positions, begins: Positions, ends: Positions, dead: Mask) -> None:
        """Rows once dead stay so."""
        counts = ends - begins
        some = counts > 0
        starts = (np.cumsum(counts) - counts)[some]
        alive = np.where(dead, len(dead), np.arange(len(dead)))
        first = np.minimum(np.minimum.reduceat(alive, starts) - starts, counts[some])
        chunks, begins = chunks[some], begins[some]
        is_front = begins == self._fronts[chunks]
        self._advance(chunks[is_front], (begins + first)[is_front])

    def _advance(self, chunks: Positions, fronts: Positions) -> None:
        self._fronts[chunks] = fronts
        left = fronts < self._sizes[chunks]
        self._next[chunks[left]] = self._times_at(chunks[left], fronts[left])

    def _up_to(self, chunks: Positions, moment: int) -> Positions:
        """How many rows of each chunk have no later time: a bisection of all at once."""
        if len(chunks) <= _FEW:
            return np.array([self._up_to_in(chunk, moment) for chunk in chunks.tolist()], np.int64)
        low, high = np.zeros(len(chunks), np.int64), self._sizes[chunks]
        while len(open_ := np.flatnonzero(low < high)):
            middle = (low[open_] + high[open_]) >> 1
            is_up_to = self._times_at(chunks[open_], middle) <= moment
            low[open_[is_up_to]] = middle[is_up_to] + 1
            high[open_[~is_up_to]] = middle[~is_up_to]
        return low

    def _up_to_in(self, chunk: int, moment: int) -> int:
        start = int(self._starts[chunk])
        size = int(self._sizes[chunk])
        times, places = self._times[start : start + size], self._places[start : start + size]
        return bisect_right(range(size), moment, key=lambda place: times[places[place]])

    def _times_at(self, chunks: Positions, places: Positions) -> Numbers:
        starts = self._starts[chunks]
        times: Numbers = self._times[starts + self._places[starts + places]]
        return times

    def _rows(self, chunks: Positions, begins: Positions, ends: Positions) -> Positions:
        """Rows begins .. ends - 1 of each chunk by time, as positions in the run."""
        counts, starts = ends - begins, self._starts[chunks]
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        rows: Positions = np.repeat(starts, counts) + self._places[np.repeat(starts + begins, counts) + within]
        return rows
