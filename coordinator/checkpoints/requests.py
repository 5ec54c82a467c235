"""CORE: decides which checkpoint request is next, and when the next periodic one is due. Pure, given a random source.

The decider is a bounded priority queue; the schedule has a fixed rate and a random first delay. It knows nothing of tasks: whether
a checkpoint can be triggered is decided behind it. Source: Flink, CheckpointRequestDecider."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from holdfast.barriers.messages import FailureReason
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest


class PeriodicSchedule:
    """When periodic checkpoints are due. The first tick is in [min(pause, interval), interval], at random, so that many jobs do not
    trigger together. Missed ticks (a stopped machine) are skipped: the next one is a full interval later."""

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
        """Start, or start again with a new first delay."""
        if self._interval_ms is not None:
            first = self._rng.randint(min(self._min_pause_ms, self._interval_ms), self._interval_ms)
            self._next_ms = now_ms + first

    def stop(self) -> None:
        self._next_ms = None

    def take_tick(self, now_ms: int) -> bool:
        """Whether a tick is due; if so, the next one is set."""
        if self._next_ms is None or self._interval_ms is None or now_ms < self._next_ms:
            return False
        self._next_ms += self._interval_ms
        if self._next_ms <= now_ms:
            self._next_ms = now_ms + self._interval_ms
        return True

    def postpone(self, until_ms: int) -> None:
        """Move the next tick to a time, the end of a pause."""
        if self._next_ms is not None:
            self._next_ms = until_ms


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
