"""The rows of a table at one barrier, as a pool thread reads them: all, or those of the orders since a base.

Runs never change but for what is dead in them, and that is only appended to: how long those logs were is all that is frozen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from holdfast.statebackends.row_tables.key_codes import Codes, Positions
from holdfast.statebackends.row_tables.run import Numbers, Run

_BATCH_ROWS = 1 << 17


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows: four numbers of each, and a batch with the key's fields and the columns."""

    codes: Codes
    orders: Numbers
    namespaces: Numbers
    times: Numbers
    batch: pa.RecordBatch

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, rows: Positions) -> Rows:
        batch = self.batch.take(pa.array(rows))
        return Rows(self.codes[rows], self.orders[rows], self.namespaces[rows], self.times[rows], batch)


@dataclass(frozen=True, slots=True)
class Tombstones:
    """Rows that were deleted: what names them."""

    epoch: int
    codes: Codes
    orders: Numbers
    namespaces: Numbers
    keys: list[pa.Array]


@dataclass(frozen=True, slots=True)
class RowChanges:
    """What is known of a table's changes at one barrier; immutable."""

    marks: Mapping[int, tuple[int, int]]
    """Bases that an increment can build on -> (the epoch that each ended, the first order that it does not have)."""
    removed: Mapping[int, int]
    """Namespaces that were dropped -> the epoch in which it was last."""
    tombstones: Sequence[Tombstones]
    """Oldest first."""


class FrozenRows:
    """The rows as they were. O(runs) to make."""

    def __init__(self, runs: Sequence[Run], head: Sequence[Rows], head_dropped: Mapping[int, int]) -> None:
        """`head_dropped`: namespace -> the order before which its rows in the head are dead."""
        self._runs = [(run, len(run.log), len(run.dropped)) for run in runs]
        self._head = list(head)
        self._head_dropped = dict(head_dropped)

    def rows(self, since: int | None = None) -> Iterator[Rows]:
        """All rows, or those of orders from `since` on, in pieces. The rows of one piece of a run are sorted by key group."""
        for run, log_length, dropped_length in self._runs:
            if since is not None and run.order_max < since:
                continue
            alive = run.alive_at(log_length, dropped_length)
            if since is not None and run.order_min < since:
                newer = run.orders >= since
                alive = np.flatnonzero(newer) if alive is None else alive[newer[alive]]
            yield from _of_run(run, alive)
        for rows, found in zip(self._head, head_alive(self._head, self._head_dropped), strict=True):
            if since is not None:
                newer = rows.orders >= since
                found = np.flatnonzero(newer) if found is None else found[newer[found]]
            yield rows if found is None else rows.take(found)


def head_alive(head: Sequence[Rows], dropped: Mapping[int, int]) -> list[Positions | None]:
    """Of each piece of the head the rows that are not of a dropped namespace; None: all."""
    if not dropped:
        return [None] * len(head)
    names = np.array(sorted(dropped), np.int64)
    bounds = np.array([dropped[name] for name in names.tolist()], np.int64)
    found: list[Positions | None] = []
    for rows in head:
        places = np.minimum(np.searchsorted(names, rows.namespaces), len(names) - 1)
        dead = (names[places] == rows.namespaces) & (rows.orders < bounds[places])
        found.append(np.flatnonzero(~dead) if dead.any() else None)
    return found


def _of_run(run: Run, alive: Positions | None) -> Iterator[Rows]:
    for block, start in zip(run.blocks, run.starts.tolist(), strict=False):
        for first in range(0, block.num_rows, _BATCH_ROWS):
            batch = block.slice(first, _BATCH_ROWS)
            begin = start + first
            rows = slice(begin, begin + batch.num_rows)
            piece = Rows(run.codes[rows], run.orders[rows], run.namespaces[rows], run.times[rows], batch)
            if alive is None:
                yield piece
                continue
            low, high = np.searchsorted(alive, [rows.start, rows.stop]).tolist()
            if low < high:
                yield piece if high - low == len(piece) else piece.take(alive[low:high] - begin)
