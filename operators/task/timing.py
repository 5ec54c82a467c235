"""CORE: where the time of one subtask goes: busy, backpressured or idle, in all and in the last second.

Every moment is one of the three. Busy: in a step, or waiting for the worker's loop with something to do. Backpressured: the last
step ended at a full output, or at an operator that takes no more for now, and nothing has changed that. Idle: the rest.

It is given readings of a monotonic clock and adds up the time between two of them, so that a clock that goes back costs that
time and nothing else. It knows nothing of steps' content, and reads no clock itself."""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import NamedTuple

BUCKETS = 20
BUCKET_S = 0.05
"""The last second is kept in so many pieces of this length; the oldest, partly in it, counts in proportion."""


class Spent(IntEnum):
    """What a subtask does, or waits for."""

    IDLE = 0
    BUSY = 1
    BACKPRESSURED = 2


class TimePerSecond(NamedTuple):
    """ms of the last second; they sum to 1,000."""

    busy_ms: int
    idle_ms: int
    backpressured_ms: int


def later_second(told: TimePerSecond, spent: Spent, passed_ms: int) -> TimePerSecond:
    """The last second, `passed_ms` behind one that was told, if all of that time was spent in one way."""
    new = min(1_000, passed_ms)
    busy_ms, backpressured_ms = (each * (1_000 - new) // 1_000 for each in (told.busy_ms, told.backpressured_ms))
    if spent is Spent.BUSY:
        busy_ms += new
    elif spent is Spent.BACKPRESSURED:
        backpressured_ms += new
    return TimePerSecond(busy_ms, 1_000 - busy_ms - backpressured_ms, backpressured_ms)


class SubtaskTime:
    """Time of one subtask since its attempt began, and of its last second. Before there was a second, what is missing counts as
    idle."""

    __slots__ = ("_left_s", "_mark_s", "_open", "_pieces", "_totals", "_waits")

    def __init__(self, now_s: float) -> None:
        self._mark_s = now_s
        """Until here time is counted."""
        self._waits = Spent.IDLE
        self._totals = [0.0, 0.0, 0.0]
        self._open = [0.0, 0.0, 0.0]
        """Of the newest piece, of which `_left_s` are to come."""
        self._left_s = BUCKET_S
        self._pieces: deque[tuple[float, float, float]] = deque([(BUCKET_S, 0.0, 0.0)] * BUCKETS, maxlen=BUCKETS)

    def step_begins(self, now_s: float, due_s: float | None = None) -> None:
        """`due_s`: since when it is known that there is something to do; None: since now."""
        if due_s is not None and self._mark_s < due_s < now_s:
            self._until(due_s, self._waits)
            self._until(now_s, Spent.BUSY)
        else:
            self._until(now_s, self._waits if due_s is None or due_s >= now_s else Spent.BUSY)

    def step_ends(self, now_s: float, waits: Spent) -> None:
        """`waits`: how the time until the next step counts, as long as nothing changes: BUSY if there is more to do."""
        self._until(now_s, Spent.BUSY)
        self._waits = waits

    def observe(self, now_s: float) -> None:
        """Count the time up to now, between two steps."""
        self._until(now_s, self._waits)

    @property
    def waits(self) -> Spent:
        """How the time between two steps counts; for any thread."""
        return self._waits

    def total_ms(self, spent: Spent) -> int:
        """Since the attempt began."""
        return int(self._totals[spent] * 1000 + 1e-6)

    def last_second(self) -> TimePerSecond:
        """The second in front of the moment that was counted last."""
        share = self._left_s / BUCKET_S
        _, busy_s, backpressured_s = self._pieces[0]
        busy_s, backpressured_s = busy_s * share + self._open[Spent.BUSY], backpressured_s * share + self._open[Spent.BACKPRESSURED]
        for index in range(1, BUCKETS):
            _, busy, backpressured = self._pieces[index]
            busy_s += busy
            backpressured_s += backpressured
        busy_ms = min(1_000, round(busy_s * 1000))
        backpressured_ms = min(1_000 - busy_ms, round(backpressured_s * 1000))
        return TimePerSecond(busy_ms, 1_000 - busy_ms - backpressured_ms, backpressured_ms)

    def _until(self, now_s: float, spent: Spent) -> None:
        elapsed_s = now_s - self._mark_s
        self._mark_s = now_s
        if elapsed_s <= 0:
            return
        self._totals[spent] += elapsed_s
        if elapsed_s < self._left_s:
            self._open[spent] += elapsed_s
            self._left_s -= elapsed_s
        else:
            self._close_pieces(elapsed_s, spent)

    def _close_pieces(self, elapsed_s: float, spent: Spent) -> None:
        """The newest piece is full, and perhaps several behind it."""
        self._open[spent] += self._left_s
        elapsed_s -= self._left_s
        self._pieces.append((self._open[0], self._open[1], self._open[2]))
        whole, rest_s = divmod(elapsed_s, BUCKET_S)
        full = [0.0, 0.0, 0.0]
        full[spent] = BUCKET_S
        for _ in range(min(BUCKETS, int(whole))):
            self._pieces.append((full[0], full[1], full[2]))
        self._open = [0.0, 0.0, 0.0]
        self._open[spent] = rest_s
        self._left_s = BUCKET_S - rest_s
