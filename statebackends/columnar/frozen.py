"""Copy-on-write freezing of numpy columns: the loop thread goes on writing while a pool thread reads the frozen rows.

A freeze is O(1). Before the loop thread changes rows, it saves the chunks that it is about to touch, unless the reader
has already copied them; the reader copies chunk by chunk. Rows added after the freeze are not in it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[Any]

CHUNK_SHIFT = 12
CHUNK_ROWS = 1 << CHUNK_SHIFT


class FrozenColumns:
    """The first `count` rows of some equally long columns, as they were when this was made. None columns stay None."""

    __slots__ = ("_columns", "_done", "_lock", "_saved", "count")

    def __init__(self, columns: Sequence[Column | None], count: int) -> None:
        self.count = count
        self._columns = list(columns)
        self._done = np.zeros((count + CHUNK_ROWS - 1) >> CHUNK_SHIFT, np.bool_)  # saved here, or copied by the reader
        self._saved: dict[int, list[Column | None]] = {}
        self._lock = threading.Lock()

    @property
    def settled(self) -> bool:
        """Whether writes need not be announced any more."""
        return bool(self._done.all())

    def protect(self, slots: npt.NDArray[np.int64]) -> None:
        """Loop thread: rows `slots` are about to change in the columns that were frozen."""
        if self.settled:
            return
        touched = np.zeros(max(len(self._done), (int(slots.max()) >> CHUNK_SHIFT) + 1), np.bool_)
        touched[slots >> CHUNK_SHIFT] = True
        for chunk in np.flatnonzero(touched[: len(self._done)] & ~self._done).tolist():
            with self._lock:  # the reader may be in the middle of this very chunk
                if not self._done[chunk]:
                    self._saved[chunk] = [None if part is None else part.copy() for part in self._chunk(chunk)]
                    self._done[chunk] = True

    def copy(self) -> list[Column | None]:
        """Pool thread, once: private copies of the frozen rows of every column."""
        copies = [None if column is None else np.empty(self.count, column.dtype) for column in self._columns]
        for chunk in range(len(self._done)):
            with self._lock:
                parts = self._saved.pop(chunk, None) or self._chunk(chunk)
                for copy, part in zip(copies, parts, strict=True):
                    if copy is not None:
                        copy[chunk << CHUNK_SHIFT : (chunk + 1) << CHUNK_SHIFT] = part
                self._done[chunk] = True
        return copies

    def _chunk(self, chunk: int) -> list[Column | None]:
        start, stop = chunk << CHUNK_SHIFT, min((chunk + 1) << CHUNK_SHIFT, self.count)
        return [None if column is None else column[start:stop] for column in self._columns]
