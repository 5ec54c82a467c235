"""CORE: decides which checkpoint request is next, and when the next periodic one is due. Pure, given a random source.

The decider is a bounded priority queue; the schedule has a fixed rate, which a backlog changes, and a random first delay. Both
know nothing of tasks: whether a checkpoint can be triggered is decided behind them. Source: Flink, CheckpointRequestDecider."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from holdfast.barriers.messages import FailureReason
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest


class PeriodicSchedule:
    """When periodic checkpoints are due. The first tick is in [min(pause, interval), interval], at random, so that many jobs do not
    trigger together. Missed ticks (a stopped machine) are skipped: the next one is a full interval later.

    The next tick is one interval behind the last one, whatever the interval was then: a longer one (a backlog has begun) holds at
    once, and so does a shorter one, whose tick may be due already."""

    def __init__(self, interval_ms: int | None, backlog_interval_ms: int | None, min_pause_ms: int, rng: random.Random) -> None:
        """`interval_ms`: None for no ticks. `backlog_interval_ms`: holds during a backlog instead; 0 for no ticks then, None for
        the same interval."""
        self._interval_ms = interval_ms
        self._backlog_interval_ms = backlog_interval_ms
        self._min_pause_ms = min_pause_ms
        self._rng = rng
        self.in_backlog = False
        self._is_postponed = False
        self._last_ms: int | None = None
        """Of the last tick, or from where the first one is an interval away; None while stopped."""

    @property
    def interval_ms(self) -> int | None:
        """The interval that holds now; None: no ticks."""
        if self._interval_ms is None or not self.in_backlog or self._backlog_interval_ms is None:
            return self._interval_ms
        return self._backlog_interval_ms or None

    @property
    def next_ms(self) -> int | None:
        """Time of the next tick, which may have passed; None: there is none."""
        interval = self.interval_ms
        return None if self._last_ms is None or interval is None else self._last_ms + interval

    def start(self, now_ms: int) -> None:
        """Start, or start again with a new first delay."""
        interval, self._last_ms = self.interval_ms, now_ms
        if interval is not None:
            self._last_ms += self._rng.randint(min(self._min_pause_ms, interval), interval) - interval

    def stop(self) -> None:
        self._last_ms = None

    def note_backlog(self, *, in_backlog: bool) -> None:
        """Whether any source processes a backlog from now on."""
        self.in_backlog = in_backlog

    def retune(self, interval_ms: int | None, backlog_interval_ms: int | None, min_pause_ms: int, now_ms: int) -> None:
        """Other settings hold. A tick that a pause has postponed is due at once: the new pause may be over."""
        self._interval_ms, self._backlog_interval_ms, self._min_pause_ms = interval_ms, backlog_interval_ms, min_pause_ms
        interval = self.interval_ms
        if self._is_postponed and self._last_ms is not None and interval is not None:
            self._last_ms = min(self._last_ms, now_ms - interval)

    def take_tick(self, now_ms: int) -> bool:
        """Whether a tick is due; if so, the next one is set."""
        due_ms, interval = self.next_ms, self.interval_ms
        if due_ms is None or interval is None or now_ms < due_ms:
            return False
        self._last_ms = due_ms if due_ms + interval > now_ms else now_ms
        self._is_postponed = False
        return True

    def postpone(self, until_ms: int) -> None:
        """Move the next tick to a time, the end of a pause."""
        interval = self.interval_ms
        if self._last_ms is not None and interval is not None:
            self._last_ms, self._is_postponed = until_ms - interval, True


QUEUED_REQUESTS_MAX = 1_000
"""Requests that wait in one job."""


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    request: CheckpointRequest
    sequence: int

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """Smallest first: users' before periodic ones, savepoints before checkpoints, then in order of arrival."""
        return (self.request.periodic, not self.request.is_forced, self.sequence)


class Load(msgspec.Struct, frozen=True):
    """What is under way: the decision depends on it besides the queue."""

    preparing: bool
    """A claim is being written."""
    pending: int
    deleting: int
    """Dropped checkpoints that are still being deleted."""
    pause_until_ms: int
    """End of the pause after the last completed checkpoint."""


@dataclass(frozen=True, slots=True)
class Execute:
    request: CheckpointRequest


@dataclass(frozen=True, slots=True)
class TooEarly:
    """A periodic request within the pause: it is dropped, and the next tick moves to the end of the pause."""

    request: CheckpointRequest


@dataclass(frozen=True, slots=True)
class Refused:
    request: CheckpointRequest
    reason: FailureReason


class CheckpointRequestDecider:
    """Requests that wait, in order of rank; at most `size_max`."""

    def __init__(self, max_concurrent: int, *, size_max: int = QUEUED_REQUESTS_MAX) -> None:
        self._max_concurrent = max_concurrent
        self._size_max = size_max
        self._queue: list[QueuedRequest] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def has_periodic(self) -> bool:
        return any(queued.request.periodic for queued in self._queue)

    def add(self, request: CheckpointRequest) -> Refused | None:
        """Queue a request. A full queue refuses its lowest rank, which may be this request."""
        self._sequence += 1
        self._queue.append(QueuedRequest(request, self._sequence))
        self._queue.sort(key=lambda queued: queued.rank)
        if len(self._queue) <= self._size_max:
            return None
        return Refused(self._queue.pop().request, FailureReason.TOO_MANY_REQUESTS)

    def next(self, load: Load, now_ms: int) -> Execute | TooEarly | None:
        """Take the request that is next; None if all have to wait."""
        if load.preparing or not self._queue:
            return None
        first = self._queue[0].request
        if load.pending >= self._max_concurrent and not first.is_forced:
            return None
        if first.periodic:
            if now_ms < load.pause_until_ms:
                del self._queue[0]
                return TooEarly(first)
            if load.deleting > self._max_concurrent:
                return None
        del self._queue[0]
        return Execute(first)

    def remove(self, condition: Callable[[CheckpointRequest], bool]) -> list[CheckpointRequest]:
        """Remove every request that meets the condition; returns them in order of rank."""
        removed = [queued.request for queued in self._queue if condition(queued.request)]
        self._queue = [queued for queued in self._queue if not condition(queued.request)]
        return removed
