"""Which rows of some runs are of given keys: a bisection of all keys in each run, and a look at the keys themselves.

All at once, or in slices of bounded size: a key may have any number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from holdfast.statebackends.row_tables.key_codes import Codes, Positions, equal_rows, key_codes, stable_order
from holdfast.statebackends.row_tables.run import Mask, Matches, Numbers, RowColumns, Run
from holdfast.statebackends.state import NO_ORDER, NO_TIME, KeyColumn

_SMALL = 1 << 16


@dataclass(frozen=True, slots=True)
class MatchFilter:
    """What is asked of a row beside its key: one answer for all queries, or one for each."""

    namespaces: Numbers | int | None
    times: tuple[Numbers | int, Numbers | int] | None
    """Lowest and highest, both inclusive. Rows without a time are in no range."""

    def is_beside(self, run: Run) -> bool:
        """Whether no row of a run can be wanted, by what the run keeps of all of them."""
        if isinstance(self.namespaces, int) and not run.holds(self.namespaces):
            return True
        if self.times is None:
            return False
        lowest, highest = self.times
        return bool(np.min(lowest) > run.time_max or np.max(highest) < run.time_min)

    def admits(self, run: Run, positions: Positions, queries: Positions) -> Mask | None:
        """Which rows are wanted; None: all."""
        wanted: Mask | None = None
        if self.namespaces is not None:
            wanted = run.namespaces[positions] == _of(self.namespaces, queries)
        if self.times is not None:
            lowest, highest = (_of(bound, queries) for bound in self.times)
            times = run.times[positions]
            within = (times >= lowest) & (times <= highest) & (times != NO_TIME)
            wanted = within if wanted is None else wanted & within
        return wanted


class Probe:
    """`state.RowProbe`: what was there when it began, whatever the table does meanwhile."""

    def __init__(
        self, runs: Sequence[Run], keys: KeyColumn, asked: MatchFilter, after: Numbers | None, columns: RowColumns
    ) -> None:
        """`after`: for each key, the order behind which rows are wanted; None: all."""
        self._runs = runs
        self._keys = keys
        self._asked = asked
        self._after = after
        self._columns = columns
        origins, self._first, counts, self._queries, self._is_shared = self._found()
        order = _by_query(self._queries, len(keys))  # of one key the older run's rows come first
        self._origins, self._first, self._counts = origins[order], self._first[order], counts[order]
        self._queries, self._is_shared = self._queries[order], self._is_shared[order]
        self._ends = np.cumsum(self._counts)
        self._total = int(self._ends[-1]) if len(self._ends) else 0
        self._at = 0
        self._last = (-1, NO_ORDER)

    def _found(self) -> tuple[Positions, Positions, Positions, Positions, Mask]:
        """(run, first row, rows, query, whether keys share the code) of each key and run that has it."""
        codes = key_codes(self._keys)
        by_code = stable_order(codes)
        codes = codes[by_code]
        none = np.empty(0, np.int64)
        found: list[tuple[Positions, Positions, Positions, Positions, Mask]] = [(none, none, none, none, none.astype(np.bool_))]
        for number, run in enumerate(self._runs if len(codes) else ()):
            if self._asked.is_beside(run) or (self._after is not None and run.order_max <= self._after.min()):
                continue
            first = np.searchsorted(run.codes, codes, side="left")
            hits = np.flatnonzero(run.codes[np.minimum(first, len(run) - 1)] == codes)
            if len(hits):
                first, counts, queries, shared = _ranges(
                    run, self._keys, self._columns, codes[hits], first[hits], by_code[hits]
                )
                is_shared = np.zeros(len(first), np.bool_) if shared is None else shared
                found.append((np.full(len(first), number), first, counts, queries, is_shared))
        origins, first, counts, queries, is_shared = (np.concatenate(pieces) for pieces in zip(*found, strict=True))
        return origins, first, counts, queries, is_shared

    @property
    def complete(self) -> int:
        return len(self._keys) if self._at >= self._total else int(self._queries[self._segment])

    @property
    def last_order(self) -> int:
        return self._last[1] if self._last[0] == self.complete else NO_ORDER

    @property
    def _segment(self) -> int:
        """Where the next row is."""
        return int(np.searchsorted(self._ends, self._at, side="right"))

    def next(self, rows_max: int) -> Matches | None:
        if self._at >= self._total:
            return None
        until = min(self._at + rows_max, self._total)
        rows = slice(self._segment, int(np.searchsorted(self._ends, until, side="left")) + 1)
        begins = self._ends[rows] - self._counts[rows]
        low, high = np.maximum(self._at - begins, 0), np.minimum(until - begins, self._counts[rows])
        counts = high - low
        starts = np.cumsum(counts) - counts
        positions = np.arange(until - self._at) + np.repeat(self._first[rows] + low - starts, counts)
        origins, queries = np.repeat(self._origins[rows], counts), np.repeat(self._queries[rows], counts)
        self._at = until
        self._last = int(queries[-1]), int(self._runs[origins[-1]].orders[positions[-1]])
        found = Matches(self._runs, origins, positions, queries, self._columns)
        return self._wanted(found, np.repeat(self._is_shared[rows], counts))

    def _wanted(self, found: Matches, is_shared: Mask) -> Matches:
        wanted = np.ones(len(found), np.bool_)
        for run, rows in found.by_run():
            positions, queries = found.positions[rows], found.queries[rows]
            dead = run.dead_among(positions)
            if dead is not None:
                wanted[rows] &= ~dead
            admitted = self._asked.admits(run, positions, queries)
            if admitted is not None:
                wanted[rows] &= admitted
            if self._after is not None:
                wanted[rows] &= run.orders[positions] > self._after[queries]
            suspects = np.flatnonzero(is_shared[rows])
            if len(suspects):
                equal = _are_equal(run, positions[suspects], self._keys, queries[suspects], self._columns)
                wanted[rows[suspects]] &= equal
        return found if wanted.all() else found.select(wanted)


def matches_in(runs: Sequence[Run], keys: KeyColumn, asked: MatchFilter, columns: RowColumns) -> Matches:
    """The living rows of the keys: by query, and for each by order. Runs are given oldest first."""
    if not len(keys):
        return _joined(runs, [], 0, columns)
    codes = key_codes(keys)
    by_code = stable_order(codes)
    codes = codes[by_code]
    found: list[tuple[int, Positions, Positions]] = []
    for number, run in enumerate(runs):
        if asked.is_beside(run):
            continue
        first = np.searchsorted(run.codes, codes, side="left")
        hits = np.flatnonzero(run.codes[np.minimum(first, len(run) - 1)] == codes)
        if not len(hits):
            continue
        positions, queries = _expanded(run, keys, columns, codes[hits], first[hits], by_code[hits])
        dead = run.dead_among(positions)
        wanted = asked.admits(run, positions, queries)
        if dead is not None:
            wanted = ~dead if wanted is None else wanted & ~dead
        if wanted is not None:
            positions, queries = positions[wanted], queries[wanted]
        if len(positions):
            found.append((number, positions, queries))
    return _joined(runs, found, len(keys), columns)


def _ranges(
    run: Run, keys: KeyColumn, columns: RowColumns, codes: Codes, first: Positions, queries: Positions
) -> tuple[Positions, Positions, Positions, Mask | None]:
    """(first row, rows, query) of each query whose key the run has, and for which of them each row is to be compared."""
    stop = np.searchsorted(run.codes, codes, side="right")
    is_shared = np.isin(codes, run.shared_codes) if len(run.shared_codes) else None
    equal = _are_equal(run, first, keys, queries, columns)
    if is_shared is not None:
        equal |= is_shared
    if not equal.all():
        first, stop, queries = first[equal], stop[equal], queries[equal]
        is_shared = None if is_shared is None else is_shared[equal]
    return first, stop - first, queries, is_shared


def _expanded(
    run: Run, keys: KeyColumn, columns: RowColumns, codes: Codes, first: Positions, queries: Positions
) -> tuple[Positions, Positions]:
    """(positions, queries) of all rows whose key is that of the query. Of most codes all rows are of one key."""
    first, counts, queries, is_shared = _ranges(run, keys, columns, codes, first, queries)
    starts = np.cumsum(counts) - counts
    positions = np.arange(int(counts.sum())) + np.repeat(first - starts, counts)
    queries = np.repeat(queries, counts)
    if is_shared is not None and is_shared.any():
        suspects = np.flatnonzero(np.repeat(is_shared, counts))
        wrong = suspects[~_are_equal(run, positions[suspects], keys, queries[suspects], columns)]
        positions, queries = np.delete(positions, wrong), np.delete(queries, wrong)
    return positions, queries


def _are_equal(run: Run, positions: Positions, keys: KeyColumn, queries: Positions, columns: RowColumns) -> Mask:
    rows = Matches.of_run(run, positions, columns)
    taken = pa.array(queries)
    return equal_rows(rows.keys(), [array.take(taken) for array in keys.arrays])


def _joined(
    runs: Sequence[Run], found: Sequence[tuple[int, Positions, Positions]], queries_count: int, columns: RowColumns
) -> Matches:
    if not found:
        empty = np.empty(0, np.int64)
        return Matches(runs, empty, empty, empty, columns)
    used = [runs[number] for number, *_ in found]
    origins = np.repeat(np.arange(len(used)), [len(positions) for _, positions, _ in found])
    positions = np.concatenate([positions for _, positions, _ in found])
    queries = np.concatenate([queries for *_, queries in found])
    order = _by_query(queries, queries_count)
    return Matches(used, origins[order], positions[order], queries[order], columns)


def _by_query(queries: Positions, queries_count: int) -> Positions:
    """Their order, stable: numbers of two bytes are counted, not compared."""
    return np.argsort(queries.astype(np.uint16) if queries_count <= _SMALL else queries, kind="stable")


def _of(bound: Numbers | int, queries: Positions) -> Numbers | int:
    return bound[queries] if isinstance(bound, np.ndarray) else bound
