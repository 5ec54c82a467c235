"""Work of a pool thread that holds the interpreter lock, at a pace that leaves most of it to the task loop.

Converting a million Python objects takes a few tenths of a second of the interpreter. A busy task loop would lose them at once,
half of its speed while they last; spread out, it loses a tenth to a fifth. Where nobody else wants the interpreter, there are no
pauses."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SHARE = 1 / 12
"""Of the time that passes, for one thread, while others want the interpreter."""
PAUSES_S_MAX = 30.0
"""Of one table. A checkpoint of many large ones may wait as long for each."""
_TURN_S = 0.002
"""Of processor time: shorter turns count together. Most tables are small, and never pause."""
_CONTENDED = 1.5
"""Work that took so many times its own processor time had to wait: for the interpreter, or for a processor."""


class Pace:
    """Of one pool thread that turns one table into columns."""

    def __init__(
        self,
        share: float = SHARE,
        *,
        wall_s: Callable[[], float] = time.perf_counter,
        cpu_s: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._share = share
        self._wall_s, self._cpu_s, self._sleep = wall_s, cpu_s, sleep
        self._passed_s = self._used_s = 0.0
        self._left_s = PAUSES_S_MAX

    def run(self, work: Callable[[], T]) -> T:
        """Do a few milliseconds of work that needs nothing but the interpreter; then pause, if others wanted it meanwhile and have
        had less than their part of it."""
        wall, cpu = self._wall_s(), self._cpu_s()
        result = work()
        self._passed_s += self._wall_s() - wall
        self._used_s += self._cpu_s() - cpu
        if self._used_s >= _TURN_S:
            if self._passed_s > _CONTENDED * self._used_s:
                self._pause(self._used_s / self._share - self._passed_s)
            self._passed_s = self._used_s = 0.0
        return result

    def _pause(self, seconds: float) -> None:
        seconds = min(seconds, self._left_s)
        if seconds > 0:
            self._left_s -= seconds
            self._sleep(seconds)
