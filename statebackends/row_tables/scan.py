"""A pass over a table by key, in bounded slices between which rows may come and go, and runs be merged.

All that it remembers is the code and the order up to which it has come, so that nothing can take its place from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from holdfast.statebackends.row_tables.key_codes import (
    CODE_MAX,
    Positions,
    distinct_keys,
    equal_rows,
    merged_order,
)
from holdfast.statebackends.row_tables.run import Matches, RowColumns, Run
from holdfast.statebackends.state import NO_ORDER, NO_TIME, KeyColumn

_SCANNED_MAX = 1 << 18
"""Rows that one slice looks at without finding enough."""
_WINDOW_ROWS_MAX = 1 << 16


class Scan:
    """`state.RowScan`."""

    def __init__(
        self,
        sealed: Callable[[], Sequence[Run]],
        namespace: int | None,
        columns: RowColumns,
        column_of: Callable[[list[pa.Array]], KeyColumn],
        times: tuple[int, int] | None = None,
        *,
        splits_keys: bool = False,
    ) -> None:
        """`sealed`: the table's runs as they are now, with all rows in them. `times`: lowest and highest, both inclusive.
        `splits_keys`: the rows of a key may come in several slices."""
        self._sealed = sealed
        self._namespace = namespace
        self._columns = columns
        self._column_of = column_of
        self._times = times
        self._splits_keys = splits_keys
        self._from: int | None = 0
        """The least code that was not given yet; None: there is none."""
        self._after = NO_ORDER
        """The order up to which its rows were given."""

    def next(self, rows_max: int) -> Matches | None:
        runs = [run for run in self._sealed() if self._may_want(run)]
        pieces: list[tuple[int, Positions]] = []
        found = scanned = 0
        window = max(1, rows_max // max(1, len(runs)))
        while self._from is not None and found < rows_max and scanned < _SCANNED_MAX:
            starts, stops = self._bounds(runs, min(window, _WINDOW_ROWS_MAX))
            before = found
            for number, (run, start, stop) in enumerate(zip(runs, starts, stops, strict=True)):
                positions = self._wanted(run, start, stop)
                scanned += stop - start
                found += len(positions)
                pieces.append((number, positions))
            if found == before:
                window *= 2
            elif found + len(runs) * window * found // scanned > rows_max:  # as many of the next ones as of those so far
                break
        if self._from is None and not found:
            return None
        return self._grouped(runs, pieces)

    def _may_want(self, run: Run) -> bool:
        """By what the run keeps of all of its rows."""
        if self._namespace is not None and not run.holds(self._namespace):
            return False
        return self._times is None or (run.time_min <= self._times[1] and run.time_max >= self._times[0])

    def _bounds(self, runs: Sequence[Run], window: int) -> tuple[list[int], list[int]]:
        """Rows of the next codes in each run, all rows of a code."""
        assert self._from is not None
        starts = [self._start(run, self._from) for run in runs]
        behind = [int(run.codes[start + window]) for run, start in zip(runs, starts, strict=True) if start + window < len(run)]
        until: int | None = min(behind, default=None)
        if until is not None and not any(
            start < len(run) and int(run.codes[start]) < until for run, start in zip(runs, starts, strict=True)
        ):
            if self._splits_keys:
                return starts, self._stops_within(runs, starts, until, window)
            until = None if until == CODE_MAX else until + 1  # one key has more rows than the window
        self._from, self._after = until, NO_ORDER
        if until is None:
            return starts, [len(run) for run in runs]
        return starts, [int(np.searchsorted(run.codes, np.uint64(until))) for run in runs]

    def _start(self, run: Run, code: int) -> int:
        first = int(np.searchsorted(run.codes, np.uint64(code)))
        if self._after == NO_ORDER:
            return first
        stop = int(np.searchsorted(run.codes, np.uint64(code), side="right"))
        return first + int(np.searchsorted(run.orders[first:stop], self._after, side="right"))

    def _stops_within(self, runs: Sequence[Run], starts: Sequence[int], code: int, window: int) -> list[int]:
        """The next rows of a code that has more of them than the window, of the oldest run that has some: its orders are lower."""
        stops = list(starts)
        for number, (run, start) in enumerate(zip(runs, starts, strict=True)):
            if start < len(run) and int(run.codes[start]) == code:
                stops[number] = min(start + window, int(np.searchsorted(run.codes, np.uint64(code), side="right")))
                self._from, self._after = code, int(run.orders[stops[number] - 1])
                break
        return stops

    def _wanted(self, run: Run, start: int, stop: int) -> Positions:
        rows = slice(start, stop)
        dead = run.dead_among(rows)
        wanted = None if self._namespace is None else run.namespaces[rows] == self._namespace
        if self._times is not None:
            times = run.times[rows]
            within = (times >= self._times[0]) & (times <= self._times[1]) & (times != NO_TIME)
            wanted = within if wanted is None else wanted & within
        if dead is not None:
            wanted = ~dead if wanted is None else wanted & ~dead
        return np.arange(start, stop) if wanted is None else np.flatnonzero(wanted) + start

    def _grouped(self, runs: Sequence[Run], pieces: Sequence[tuple[int, Positions]]) -> Matches:
        """Rows by code and order, and the number of its key for each."""
        origins = np.repeat([number for number, _ in pieces], [len(positions) for _, positions in pieces]).astype(np.int64)
        positions = np.concatenate([positions for _, positions in pieces]) if pieces else np.empty(0, np.int64)
        rows = Matches(runs, origins, positions, positions, self._columns)
        if not len(rows):
            return rows
        by_run = np.argsort(origins, kind="stable")  # of one code the older run's rows come first
        order = by_run[merged_order(rows.codes[by_run])]
        rows = rows.select(order)
        codes = rows.codes
        same = codes[1:] == codes[:-1]
        keys = rows.keys()
        count = len(codes) - 1
        if same.any():
            differ = same & ~equal_rows([key.slice(0, count) for key in keys], [key.slice(1, count) for key in keys])
            if differ.any():
                rows, same = self._regrouped(rows, keys)
        numbers = np.zeros(len(codes), np.int64)
        np.cumsum(~same, out=numbers[1:])
        return Matches(rows.runs, rows.origins, rows.positions, numbers, self._columns)

    def _regrouped(self, rows: Matches, keys: list[pa.Array]) -> tuple[Matches, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
        """Rows of keys that share a code are apart."""
        numbers = distinct_keys(self._column_of(keys))  # by first arrival, so that codes stay in order
        order = np.argsort(numbers, kind="stable")
        return rows.select(order), numbers[order][1:] == numbers[order][:-1]
