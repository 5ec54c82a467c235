"""Which rows of some runs are of given keys: a bisection of all keys in each run, and a look at the keys themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from holdfast.statebackends.row_tables.key_codes import Codes, Positions, equal_rows, key_codes, stable_order
from holdfast.statebackends.row_tables.run import Mask, Matches, Numbers, RowColumns, Run
from holdfast.statebackends.state import NO_TIME, KeyColumn

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


def _expanded(
    run: Run, keys: KeyColumn, columns: RowColumns, codes: Codes, first: Positions, queries: Positions
) -> tuple[Positions, Positions]:
    """(positions, queries) of all rows whose key is that of the query. Of most codes all rows are of one key."""
    stop = np.searchsorted(run.codes, codes, side="right")
    is_shared = np.isin(codes, run.shared_codes) if len(run.shared_codes) else None
    equal = _are_equal(run, first, keys, queries, columns)
    if is_shared is not None:
        equal |= is_shared
    if not equal.all():
        first, stop, queries = first[equal], stop[equal], queries[equal]
        is_shared = None if is_shared is None else is_shared[equal]
    counts = stop - first
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
    order = np.argsort(queries.astype(np.uint16) if queries_count <= _SMALL else queries, kind="stable")
    return Matches(used, origins[order], positions[order], queries[order], columns)


def _of(bound: Numbers | int, queries: Positions) -> Numbers | int:
    return bound[queries] if isinstance(bound, np.ndarray) else bound
