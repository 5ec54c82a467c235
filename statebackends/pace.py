"""Work of a pool thread that holds the interpreter lock, at a pace that leaves most of it to the task loop.

Converting a million Python objects takes a few tenths of a second of the interpreter. A busy task loop would lose them at once,
half of its speed while they last; spread out, it loses a tenth. Nobody else wanting the interpreter, there are no pauses."""

from __future__ import annotations

import time
from collections.abc import Callable

SHARE = 1 / 12
"""Of the time that passes, while others want the interpreter."""
_TURN_S = 0.002
"""Of processor time: shorter turns count together. Most tables are small, and never pause."""
_CONTENDED = 1.5
"""A turn that took so many times its own processor time had to wait for others."""


class Pace:
    """Of one pool thread's turns of a few milliseconds each, which do little else than hold the interpreter lock."""

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
        self._began_s, self._used_s = wall_s(), cpu_s()

    def turn(self) -> None:
        """A turn has ended: pause if others wanted the interpreter meanwhile and have had less than their part of it."""
        passed, used = self._wall_s() - self._began_s, self._cpu_s() - self._used_s
        if used < _TURN_S:
            return
        if passed > _CONTENDED * used:
            self._sleep(max(0.0, used / self._share - passed))
        self._began_s, self._used_s = self._wall_s(), self._cpu_s()
