"""Event time of one subtask over the splits that it reads: the least of those that are neither idle nor ended. CORE.

Records of two splits have no order between them: one that is read further would make those of the others late.

Its time is *running time* (`OperatorContext.running_ms`): a split is silent while others are read, which reading time is not. In
backpressure, or while the source is paused, nothing could be read of it; a split that is paused by itself is not silent either."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from holdfast.barriers.elements import MIN_WATERMARK
from holdfast.operators.functions.event_time.watermarks import Generator


class _Split(msgspec.Struct, eq=False):
    generator: Generator
    since_ms: int
    """Running time of its last record, or of its beginning."""
    watermark_ms: int = MIN_WATERMARK
    is_paused: bool = False


class SplitWatermarks:
    """Without splits it changes nothing, until there was one, or `keep` was called."""

    def __init__(self, idle_after_ms: int | None) -> None:
        """`idle_after_ms`: running time without a record after which a split is not waited for; None: all are."""
        self._idle_after_ms = idle_after_ms
        self._splits: dict[str, _Split] = {}
        self._current: _Split | None = None
        self._keeps = False

    def __bool__(self) -> bool:
        """Whether event time is that of splits, of which there may be none for now."""
        return self._keeps

    def keep(self) -> None:
        """Event time is that of splits, though there is none."""
        self._keeps = True

    def add(self, split_id: str, make_generator: Callable[[], Generator], running_ms: int) -> bool:
        """Whether it is new."""
        if split_id in self._splits:
            return False
        self._splits[split_id] = _Split(make_generator(), running_ms)
        self._keeps = True
        return True

    def enter(self, split_id: str, running_ms: int) -> Generator:
        """The generator of the records that follow."""
        split = self._current = self._splits[split_id]
        split.since_ms = running_ms
        return split.generator

    def leave(self, split_id: str, running_ms: int) -> int | None:
        """The watermark without it; None: no split is left that says one."""
        if self._splits.pop(split_id, None) is self._current:
            self._current = None
        return self._least(running_ms)

    def advance(self, watermark_ms: int, running_ms: int) -> int:
        """The current split says so: the watermark of all. What is said for none is said by a split that has ended."""
        if self._current is None:
            return MIN_WATERMARK if self._keeps else watermark_ms
        self._current.watermark_ms = max(self._current.watermark_ms, watermark_ms)
        least_ms = self._least(running_ms)
        return MIN_WATERMARK if least_ms is None else least_ms

    def pause_or_resume(self, to_pause: Iterable[str], to_resume: Iterable[str], running_ms: int) -> None:
        """A split that is read again has its time to give a record."""
        for split_id in to_pause:
            if split_id in self._splits:
                self._splits[split_id].is_paused = True
        for split_id in to_resume:
            if split_id in self._splits:
                self._splits[split_id].is_paused, self._splits[split_id].since_ms = False, running_ms

    def each_generator(self) -> Iterator[Generator]:
        """Of each split, which is then the current one; nothing where there are none."""
        before = self._current
        for split in list(self._splits.values()):
            self._current = split
            yield split.generator
        self._current = before

    def watermarks_ms(self) -> dict[str, int]:
        return {split_id: split.watermark_ms for split_id, split in self._splits.items()}

    def idle(self, running_ms: int) -> set[str]:
        """Splits that are not waited for."""
        return {split_id for split_id, split in self._splits.items() if self._is_idle(split, running_ms)}

    def last_ms(self) -> int:
        """All are silent: the watermark of those that gave a record last, which were alone when the others had gone idle."""
        last_ms = max((split.since_ms for split in self._splits.values()), default=0)
        return min((split.watermark_ms for split in self._splits.values() if split.since_ms == last_ms), default=MIN_WATERMARK)

    def _is_idle(self, split: _Split, running_ms: int) -> bool:
        return self._idle_after_ms is not None and not split.is_paused and running_ms - split.since_ms >= self._idle_after_ms

    def _least(self, running_ms: int) -> int | None:
        waited_for = [split.watermark_ms for split in self._splits.values() if not self._is_idle(split, running_ms)]
        return min(waited_for, default=None)
