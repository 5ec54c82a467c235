"""Runs: immutable rows sorted by (code of the key, order), and what reads of a few of them give.

Four numbers of each row (code, order, namespace, time) are NumPy arrays; the key's fields and the columns are Arrow batches, the
*blocks* of a run. Both are in memory, or mapped from files. Which rows are dead is kept beside them: a bitmap that only the loop
thread reads, and a log of what was marked, whose first entries another thread may read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.statebackends.row_tables.key_codes import Codes, Positions, equal_rows
from holdfast.statebackends.row_tables.time_order import TimeOrder
from holdfast.statebackends.state import NO_TIME

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

RunNumbers: TypeAlias = tuple[Codes, Numbers, Numbers, Numbers]
"""Codes, orders, namespaces, times."""

NUMBERS_BYTES = 32
"""Of a row beside its columns."""
_TIME_MAX = 2**63 - 1


class RunReader(Protocol):
    """What writes a run again, and hears of what dies in it meanwhile."""

    def delete(self, run: Run, positions: Positions) -> None: ...
    def drop(self, namespaces: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class RunContents:
    """What a run keeps of its rows, so that nobody has to look at all of them."""

    order_min: int
    order_max: int
    time_min: int
    """Of rows that have a time; where no row has one, above `time_max`."""
    time_max: int
    namespaces: Numbers
    """Distinct, ascending."""
    counts: Numbers
    """Rows of each."""
    shared_codes: Codes
    """Codes that several keys have."""

    @staticmethod
    def of(numbers: RunNumbers, blocks: Sequence[pa.RecordBatch], key_fields: int) -> RunContents:
        """Of a small run: looks at all rows."""
        codes, orders, namespaces, times = numbers
        contents = ContentsBuilder(key_fields)
        contents.add_rows(orders, namespaces, times)
        start = 0
        for block in blocks:
            contents.add_block(codes[start : start + block.num_rows], block)
            start += block.num_rows
        return contents.build()


class Run:
    """Rows of some orders. Immutable, but for what is dead."""

    def __init__(
        self,
        numbers: RunNumbers,
        blocks: Sequence[pa.RecordBatch],
        contents: RunContents,
        *,
        by_time: TimeOrder | None = None,
        paths: tuple[str, ...] = (),
    ) -> None:
        """At least one row. `by_time`: for `until`. `paths`: the files that are mapped, if they are."""
        self.codes, self.orders, self.namespaces, self.times = numbers
        self.blocks = list(blocks)
        self.starts = np.cumsum([0, *(block.num_rows for block in blocks)])
        self.paths = paths
        self.is_mapped = bool(paths)
        self._by_time = by_time
        self.nbytes = 0 if paths else len(self) * NUMBERS_BYTES + sum(block.nbytes for block in blocks)
        if by_time is not None and not paths:
            self.nbytes += by_time.nbytes
        self.order_min, self.order_max = contents.order_min, contents.order_max
        self.time_min, self.time_max = contents.time_min, contents.time_max
        self.shared_codes = contents.shared_codes
        self._namespaces, self._counts = contents.namespaces, contents.counts
        self.dead: Mask | None = None
        """Rows that were deleted by position; None: none was."""
        self.dead_rows = 0
        self.log: list[Positions] = []
        """What was set in `dead`, in pieces. Only appended to."""
        self.dropped: list[int] = []
        """Namespaces all of whose rows here were dropped, each once. Only appended to."""
        self._is_dropped: Mask | None = None  # of the distinct namespaces
        self.dropped_rows = 0
        """Rows of these namespaces; those that were deleted before count, too."""
        self.is_current = True
        """Whether its table still has it."""
        self.merge: RunReader | None = None
        """What is reading the run to write it again."""

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def is_all_dead(self) -> bool:
        return self.dead_rows == len(self) or len(self.dropped) == len(self._namespaces)

    @property
    def is_mostly_dead(self) -> bool:
        return 2 * (self.dead_rows + self.dropped_rows) > len(self)

    @property
    def bytes_per_row(self) -> int:
        first = self.blocks[0]
        size: int = first.nbytes // max(1, first.num_rows)
        return size + NUMBERS_BYTES

    def holds(self, namespace: int) -> bool:
        """Whether some row of a namespace is here that was not dropped with it. O(log namespaces)."""
        place = int(np.searchsorted(self._namespaces, namespace))
        if place == len(self._namespaces) or self._namespaces[place] != namespace:
            return False
        return self._is_dropped is None or not self._is_dropped[place]

    def mark_dead(self, positions: Positions) -> None:
        """Rows that are alive, each once."""
        if self.dead is None:
            self.dead = np.zeros(len(self), np.bool_)
        self.dead[positions] = True
        self.dead_rows += len(positions)
        self.log.append(positions)

    def drop(self, namespaces: Sequence[int]) -> None:
        """All rows of some namespaces, ascending, that are here. O(namespaces * log namespaces)."""
        known = self._namespaces
        if not namespaces or namespaces[0] > known[-1] or namespaces[-1] < known[0]:
            return
        gone = np.array(namespaces, np.int64)
        places = np.minimum(np.searchsorted(known, gone), len(known) - 1)
        places = places[known[places] == gone]
        if self._is_dropped is not None:
            places = places[~self._is_dropped[places]]
        if not len(places):
            return
        if self._is_dropped is None:
            self._is_dropped = np.zeros(len(known), np.bool_)
        self._is_dropped[places] = True
        dropped = known[places].tolist()
        self.dropped += dropped
        self.dropped_rows += int(self._counts[places].sum())
        if self.merge is not None:
            self.merge.drop(dropped)

    def dead_among(self, rows: Positions | slice) -> Mask | None:
        """Loop thread: which of some rows are dead; None: no row is."""
        dead = None if self.dead is None else self.dead[rows]
        if self._is_dropped is None:
            return dead
        dropped: Mask = self._is_dropped[np.searchsorted(self._namespaces, self.namespaces[rows])]
        return dropped if dead is None else dead | dropped

    def until(self, moment: int, rows_max: int, after: int = NO_TIME) -> Positions:
        """Loop thread: living rows with a time behind `after` and up to `moment`, the earliest first; of equal times the first of
        the run.

        O(rows that it gives, those between them that are not known to be dead, and chunks of the run)."""
        if self.time_min > moment or self.time_max <= after:
            return np.empty(0, np.int64)
        assert self._by_time is not None
        return self._by_time.first(moment, rows_max, after, self.dead_among)

    def alive_at(self, log_length: int, dropped_length: int) -> Positions | None:
        """Any thread: the rows that were alive when log and `dropped` had these lengths; None: all."""
        if not log_length and not dropped_length:
            return None
        alive = np.ones(len(self), np.bool_)
        for positions in self.log[:log_length]:
            alive[positions] = False
        if dropped_length:
            alive &= ~np.isin(self.namespaces, np.array(self.dropped[:dropped_length], np.int64))
        return np.flatnonzero(alive)

    def discard(self) -> None:
        """The run is of no more use to its table: its files lose their names. What reads it still has them."""
        self.is_current = False
        for path in self.paths:
            os.unlink(path)
        self.paths = ()

    def slice(self, start: int, stop: int) -> list[pa.RecordBatch]:
        """Key fields and columns of the rows [start, stop), without a copy."""
        found = []
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        for block, at in zip(self.blocks[first:], self.starts[first:].tolist(), strict=False):
            if at >= stop:
                break
            begin = max(start - at, 0)
            found.append(block.slice(begin, min(stop - at, block.num_rows) - begin))
        return [batch for batch in found if batch.num_rows]


class _SharedCodes:
    """Codes that several keys have, of rows that come block by block. Where keys of one code are mixed, some neighbours differ."""

    def __init__(self, key_fields: int) -> None:
        self._key_fields = key_fields
        self._pieces: list[Codes] = []
        self._last: tuple[np.uint64, list[pa.Array]] | None = None

    def add(self, codes: Codes, block: pa.RecordBatch) -> None:
        count = block.num_rows - 1
        if count < 0:
            return
        keys = block.columns[: self._key_fields]
        same = codes[1:] == codes[:-1]
        if same.any():
            differ = same & ~equal_rows([key.slice(0, count) for key in keys], [key.slice(1, count) for key in keys])
            if differ.any():
                self._pieces.append(codes[1:][differ])
        first = [key.slice(0, 1) for key in keys]
        if self._last is not None and self._last[0] == codes[0] and not equal_rows(self._last[1], first)[0]:
            self._pieces.append(codes[:1].copy())
        last = pa.array([count])
        self._last = codes[-1], [key.take(last) for key in keys]

    @property
    def found(self) -> Codes:
        return np.unique(np.concatenate(self._pieces)) if self._pieces else np.empty(0, np.uint64)


class ContentsBuilder:
    """`RunContents` of rows that come slice by slice, and are put into blocks."""

    def __init__(self, key_fields: int) -> None:
        self._orders: list[tuple[int, int]] = []
        self._times: list[tuple[int, int]] = [(_TIME_MAX, NO_TIME)]
        self._namespaces: list[tuple[Numbers, Numbers]] = []
        self._shared = _SharedCodes(key_fields)

    def add_rows(self, orders: Numbers, namespaces: Numbers, times: Numbers) -> None:
        self._orders.append((int(orders.min()), int(orders.max())))
        lowest = int(times.min(where=times != NO_TIME, initial=_TIME_MAX))
        self._times.append((lowest, int(times.max())))
        self._namespaces.append(namespaces_of(namespaces))

    def add_block(self, codes: Codes, block: pa.RecordBatch) -> None:
        self._shared.add(codes, block)

    def build(self) -> RunContents:
        """O(slices, and distinct namespaces of each)."""
        lowest, highest = zip(*self._orders, strict=True)
        earliest, latest = zip(*self._times, strict=True)
        values, places = np.unique(np.concatenate([values for values, _ in self._namespaces]), return_inverse=True)
        counts = np.zeros(len(values), np.int64)
        np.add.at(counts, places, np.concatenate([each for _, each in self._namespaces]))
        return RunContents(min(lowest), max(highest), min(earliest), max(latest), values, counts, self._shared.found)


def namespaces_of(namespaces: Numbers) -> tuple[Numbers, Numbers]:
    """(distinct namespaces, ascending; rows of each)."""
    if len(namespaces) and namespaces.min() == namespaces.max():
        return namespaces[:1].copy(), np.array([len(namespaces)])
    if bool((namespaces[1:] >= namespaces[:-1]).all()):
        starts = np.flatnonzero(np.concatenate(([len(namespaces) > 0], namespaces[1:] != namespaces[:-1])))
        return namespaces[starts], np.diff(starts, append=len(namespaces))
    values, counts = np.unique(namespaces, return_counts=True)
    return values, counts.astype(np.int64)


@dataclass(frozen=True, slots=True)
class RowColumns:
    """The columns of a table's blocks: the key's fields, then the user's."""

    schema: pa.Schema
    key_fields: int


class Matches:
    """`state.RowMatches`: rows of some runs, by position. The runs are immutable, so it stays valid whatever the table does."""

    __slots__ = ("_columns", "origins", "positions", "queries", "runs")

    def __init__(
        self, runs: Sequence[Run], origins: Positions, positions: Positions, queries: Positions, columns: RowColumns
    ) -> None:
        """Row i is row positions[i] of runs[origins[i]]."""
        self.runs = runs
        self.origins = origins
        self.positions = positions
        self.queries = queries
        self._columns = columns

    @staticmethod
    def of_run(run: Run, positions: Positions, columns: RowColumns) -> Matches:
        """Rows of one run; each is a query's."""
        return Matches([run], np.zeros(len(positions), np.int64), positions, np.arange(len(positions)), columns)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def orders(self) -> Numbers:
        return self._numbers("orders")

    @property
    def namespaces(self) -> Numbers:
        return self._numbers("namespaces")

    @property
    def times(self) -> Numbers:
        return self._numbers("times")

    @property
    def codes(self) -> Codes:
        return self._numbers("codes").view(np.uint64)

    def take(self, names: Sequence[str] | None = None) -> pa.RecordBatch:
        schema = self._columns.schema
        wanted = list(range(len(schema))) if names is None else [schema.names.index(name) for name in names]
        if not wanted:
            return pa.RecordBatch.from_struct_array(pa.array([{}] * len(self), pa.struct([])))
        return pa.RecordBatch.from_arrays(self._gathered(wanted), schema=pa.schema([schema.field(column) for column in wanted]))

    def keys(self) -> list[pa.Array]:
        """One array for each field of the key."""
        return self._gathered(range(self._columns.key_fields))

    def select(self, rows: Positions | Mask) -> Matches:
        return Matches(self.runs, self.origins[rows], self.positions[rows], self.queries[rows], self._columns)

    def by_run(self) -> Iterable[tuple[Run, Positions]]:
        """Rows of each run."""
        for number, run in enumerate(self.runs):
            rows = np.flatnonzero(self.origins == number)
            if len(rows):
                yield run, rows

    def _numbers(self, name: str) -> Numbers:
        if len(self.runs) == 1:
            found: Numbers = getattr(self.runs[0], name)[self.positions]
            return found.view(np.int64)
        numbers = np.empty(len(self), np.int64)
        for run, rows in self.by_run():
            numbers[rows] = getattr(run, name)[self.positions[rows]].view(np.int64)
        return numbers

    def _gathered(self, wanted: Sequence[int]) -> list[pa.Array]:
        units: list[tuple[pa.RecordBatch, Positions]] = []
        places: list[Positions] = []
        for run, rows in self.by_run():
            positions = self.positions[rows]
            for block, start, of_block in _by_block(run, positions):
                units.append((block, positions[of_block] - start))
                places.append(rows[of_block])
        if not units:
            return [pa.array([], self._columns.schema.field(column).type) for column in wanted]
        taken = [pa.array(positions) for _, positions in units]
        if len(units) == 1:
            return [units[0][0].column(column).take(taken[0]) for column in wanted]  # its rows are in order
        order = np.empty(len(self), np.int64)
        order[np.concatenate(places)] = np.arange(len(self))
        back = pa.array(order)
        return [
            pa.concat_arrays([block.column(column).take(rows) for (block, _), rows in zip(units, taken, strict=True)]).take(back)
            for column in wanted
        ]


def _by_block(run: Run, positions: Positions) -> Iterable[tuple[pa.RecordBatch, int, Positions | slice]]:
    """(block, its first row, which of the positions are in it)."""
    if len(run.blocks) == 1:
        yield run.blocks[0], 0, slice(None)
        return
    numbers = np.searchsorted(run.starts, positions, side="right") - 1
    order = np.argsort(numbers.astype(np.uint16) if len(run.blocks) < 1 << 16 else numbers, kind="stable")
    ordered = numbers[order]
    cuts = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(ordered)]
    for start, stop in pairwise(cuts):
        if start < stop:
            number = int(ordered[start])
            yield run.blocks[number], int(run.starts[number]), order[start:stop]
