"""When the next periodic checkpoint is due: a fixed rate with a random first delay. Pure, given its random source."""

from __future__ import annotations

import random


class PeriodicSchedule:
    """The first tick falls in [min(pause, interval), interval], so that many jobs do not fire together.

    Ticks that were missed (a stopped machine) are not made up for: the next one is a full interval later."""

    def __init__(self, interval_ms: int | None, min_pause_ms: int, rng: random.Random) -> None:
        self._interval_ms = interval_ms
        self._min_pause_ms = min_pause_ms
        self._rng = rng
        self._next_ms: int | None = None

    @property
    def next_ms(self) -> int | None:
        """Time of the next tick; None while stopped."""
        return self._next_ms

    def start(self, now_ms: int) -> None:
        """Begin anew; an earlier start is forgotten."""
        if self._interval_ms is not None:
            first = self._rng.randint(min(self._min_pause_ms, self._interval_ms), self._interval_ms)
            self._next_ms = now_ms + first

    def stop(self) -> None:
        self._next_ms = None

    def take_tick(self, now_ms: int) -> bool:
        """True if a tick is due; the next one is then set."""
        if self._next_ms is None or self._interval_ms is None or now_ms < self._next_ms:
            return False
        self._next_ms += self._interval_ms
        if self._next_ms <= now_ms:
            self._next_ms = now_ms + self._interval_ms
        return True

    def postpone(self, until_ms: int) -> None:
        """Move the next tick to the end of a pause."""
        if self._next_ms is not None:
            self._next_ms = until_ms
