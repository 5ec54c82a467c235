"""CORE: windows that have fired and got late records: of which keys, and from which window to which, they fire again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from holdfast.statebackends.serialization.key_columns import ArrowKeyColumn

Numbers = npt.NDArray[np.int64]


class TouchedWindows:
    """Runs of windows by key, in order of their first window; those of a key have no window in common.

    Windows are starts, ms, and slide by `slide_ms`. What has fired again leaves it with `pass_by`."""

    __slots__ = ("_next", "_slide_ms", "firsts", "keys", "lasts")

    def __init__(self, keys: ArrowKeyColumn, codes: Numbers, firsts: Numbers, lasts: Numbers, slide_ms: int) -> None:
        """A row for each record, or for each run that is left, in any order: the number of its key, and the first and the last
        window that it touches."""
        order = np.lexsort((firsts, codes))
        # Of a key the first windows and the last ones are in order, each by themselves: where a first window lies behind as many
        # last windows as there are first ones before it, all that began before it has ended.
        codes, firsts, lasts = codes[order], firsts[order], lasts[np.lexsort((lasts, codes))]
        begins = np.ones(len(order), np.bool_)
        begins[1:] = (codes[1:] != codes[:-1]) | (firsts[1:] > lasts[:-1] + slide_ms)
        starts = np.flatnonzero(begins)
        firsts, lasts = firsts[starts], lasts[np.append(starts[1:], len(order)) - 1]
        by_first = np.argsort(firsts, kind="stable")
        self.keys = keys.take(order[starts[by_first]])
        self.firsts, self.lasts = firsts[by_first], lasts[by_first]
        self._slide_ms = slide_ms
        self._next: int | None = None

    def pass_by(self, window: int) -> None:
        """This window, and all before it, have fired again."""
        self._next = window + self._slide_ms

    def rest(self) -> tuple[ArrowKeyColumn, Numbers, Numbers]:
        """(key, first, last) of each run that is left."""
        if self._next is None:
            return self.keys, self.firsts, self.lasts
        rows = np.flatnonzero(self.lasts >= self._next)
        return self.keys.take(rows), np.maximum(self.firsts[rows], self._next), self.lasts[rows]

    def blocks(self, end_of_block: Callable[[int], int]) -> Iterator[tuple[Numbers, Sequence[int]]]:
        """(runs, windows) of one block after the other: windows that begin in it, and the runs that have any of them.

        `end_of_block`: where the block of a window ends, ms."""
        active, position, behind = np.empty(0, np.int64), 0, 0
        while len(active) or position < len(self.firsts):
            start = behind if len(active) else int(self.firsts[position])
            end = end_of_block(start)
            stop = int(np.searchsorted(self.firsts, end))
            active, position = np.concatenate([active, np.arange(position, stop)]), stop
            windows = range(start, min(end, int(self.lasts[active].max()) + 1), self._slide_ms)
            yield active, windows
            behind = windows[-1] + self._slide_ms
            active = active[self.lasts[active] >= behind]
