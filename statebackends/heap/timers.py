"""Timers kept as the keys of generations: the rows that a snapshot stores, whole or those that changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from holdfast.statebackends.backend import TimerRow
from holdfast.statebackends.heap.state_table import MISSING, CopyOnWriteStateTable, FrozenDirtyKeys, lookup, visible_chunks

_ROWS_PER_CHUNK = 1 << 14


class TimerRows:
    """`backend.TimerRowProvider` over generations whose keys are the rows themselves."""

    def __init__(self, generations: CopyOnWriteStateTable, load: Callable[[Sequence[TimerRow]], None]) -> None:
        self._generations = generations
        self._load = load

    def freeze(self) -> FrozenTimerRows:
        return FrozenTimerRows(self._generations)

    def load(self, rows: Sequence[TimerRow]) -> None:
        self._load(rows)

    def track(self, base: int) -> None:
        self._generations.track(base)


class FrozenTimerRows:
    """`backend.FrozenTimerRows`."""

    def __init__(self, generations: CopyOnWriteStateTable) -> None:
        self._generations = generations
        self._layers = generations.freeze()
        self._changed: FrozenDirtyKeys | None = None

    def mark(self, barrier: int, base: int) -> None:
        self._changed = self._generations.mark(barrier, base)

    def rows(self) -> Iterator[TimerRow]:
        with self._generations.lock:
            for keys, _ in visible_chunks(self._layers, _ROWS_PER_CHUNK, maps=False):
                yield from keys
        self._done()

    def changes(self, base: int) -> tuple[list[TimerRow], list[TimerRow]] | None:
        changed = self._changed
        if changed is None or base < changed.complete_from:
            return None
        present: list[TimerRow] = []
        removed: list[TimerRow] = []
        with self._generations.lock:
            for keys in changed.chunks(base, _ROWS_PER_CHUNK):
                for key, found in zip(keys, lookup(keys, self._layers, maps=False), strict=True):
                    (removed if found is MISSING else present).append(key)
        self._done()
        return present, removed

    def _done(self) -> None:
        if self._changed is not None:
            self._changed.forgotten.clear()
        self._generations.fold(self._layers)

    def release(self) -> None:
        self._generations.thaw(len(self._layers))
