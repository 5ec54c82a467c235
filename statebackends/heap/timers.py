"""Timers as the keys of a copy-on-write table, from which a snapshot reads all rows or those that changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from holdfast.statebackends.backend import TimerRow
from holdfast.statebackends.heap.state_table import (
    MISSING,
    CopyOnWriteStateTable,
    FrozenDirtyKeys,
    lookup,
    visible_batches,
    visible_keys,
)

_ROWS_PER_BATCH = 1 << 14


class TimerRows:
    """Implements `backend.TimerRowProvider` over a table whose keys are the rows."""

    def __init__(
        self,
        table: CopyOnWriteStateTable,
        load: Callable[[Sequence[TimerRow]], None],
        remove: Callable[[TimerRow], object] | None = None,
    ) -> None:
        """`load` adds restored rows to the table, and to the order of its owner; `remove` takes one from both. None: there is no
        order."""
        self._table = table
        self._load = load
        self._remove = table.remove if remove is None else remove

    def freeze(self) -> FrozenTimerRows:
        return FrozenTimerRows(self._table)

    def load(self, rows: Sequence[TimerRow]) -> None:
        self._load(rows)

    def track_since(self, base: int) -> None:
        self._table.track_since(base)

    def erase(self, encoded_key: bytes) -> None:
        for row in visible_keys((self._table.active, *self._table.immutable), maps=False):
            if row[1] == encoded_key:
                self._remove(row)


class FrozenTimerRows:
    """Implements `backend.FrozenTimerRows`."""

    def __init__(self, table: CopyOnWriteStateTable) -> None:
        self._table = table
        self._layers = table.freeze()
        self._changed: FrozenDirtyKeys | None = None

    def checkpoint_started(self, barrier: int, base: int) -> None:
        self._changed = self._table.checkpoint_started(barrier, base)

    def rows(self) -> Iterator[TimerRow]:
        with self._table.lock:
            for keys, _ in visible_batches(self._layers, _ROWS_PER_BATCH, maps=False):
                yield from keys
        self._done()

    def changes(self, base: int) -> tuple[list[TimerRow], list[TimerRow]] | None:
        changed = self._changed
        if changed is None or base < changed.complete_from:
            return None
        present: list[TimerRow] = []
        removed: list[TimerRow] = []
        with self._table.lock:
            for keys in changed.batches(base, _ROWS_PER_BATCH):
                for key, found in zip(keys, lookup(keys, self._layers, maps=False), strict=True):
                    (removed if found is MISSING else present).append(key)
        self._done()
        return present, removed

    def _done(self) -> None:
        if self._changed is not None:
            self._changed.forgotten.clear()
        self._table.merge(self._layers)

    def release(self) -> None:
        self._table.release(len(self._layers))
