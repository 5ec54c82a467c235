"""CORE, part of the job master: whether a failed job restarts, and how long it pauses before, as its restart strategy says.

It counts failovers and draws jitter; what failed, and what users see of it, it does not know. A leader's clock is monotonic; what a
new leader continues from is on record in wall-clock time."""

from __future__ import annotations

import random
from collections import deque

from holdfast.barriers.jobgraph import RestartStrategy
from holdfast.coordinator.ha.records import BackoffRecord
from holdfast.coordinator.jobmaster.failover import Failure, is_of_user_code


class RestartBackoff:
    """Of one submission under one leader. Times are in ms of the leader's monotonic clock."""

    def __init__(self, strategy: RestartStrategy, restarts: int, rng: random.Random) -> None:
        """`restarts`: of the submission under former leaders."""
        self._strategy = strategy
        self._rng = rng
        self.restarts = restarts
        """Failovers of the submission that count for its strategy."""
        self._is_merged = False
        self._is_first = True
        """No failure since the last reset."""
        self._delays = 0
        """Pauses since the last reset."""
        self._restarts_since_reset = 0
        self._failures_ms: deque[int] = deque()
        """Of `failure_rate`: failures that count, ascending; no more than the strategy allows."""
        self._pause_ms = 0
        self._paused_until_ms: int | None = None
        """End of the newest pause; None before the first failure."""
        self._is_unfinished = False
        """A former leader began the pause, and no attempt was deployed behind it."""

    def resume(self, record: BackoffRecord, *, progressed: bool, now_ms: int, wall_ms: int) -> None:
        """Continue where a former leader was. `progressed`: a checkpoint has completed in the attempt of the record.

        A wall clock that is behind the former leader's makes no pause longer than it was drawn, and no failure later than now."""
        ago_ms = wall_ms - record.until_ms
        self._pause_ms = record.pause_ms
        self._paused_until_ms = now_ms - max(ago_ms, -record.pause_ms)
        self._is_unfinished = ago_ms < 0 and not progressed
        self._failures_ms.extend(now_ms - max(0, wall_ms - failed_ms) for failed_ms in record.failures_ms)
        self._is_first = False
        self._delays, self._restarts_since_reset = record.delays, record.restarts_since_reset
        if progressed:
            self.progressed()

    def count_on(self, restarts: int) -> None:
        """An older leader, which did not know yet that it was replaced, counted so many: a failure that it saw counts, too."""
        self.restarts = max(self.restarts, restarts)

    def restart_delay_ms(self, failure: Failure, *, same_failure: bool, now_ms: int) -> int | None:
        """Count a failover; the pause before the next attempt, or None if the strategy allows none.

        A process that died before it ever reported the attempt is the old failure seen again: it is not counted, once. Nor is the
        failover of an attempt whose pause a former leader began: the pause goes on."""
        if self._is_unfinished and self._paused_until_ms is not None:
            self._is_unfinished = False
            return max(0, self._paused_until_ms - now_ms)
        if same_failure and not self._is_merged:
            self._is_merged = True
            return 0
        self._expire(now_ms)
        if not self._may_restart():
            return None
        self.restarts += 1
        self._restarts_since_reset += 1
        if self._strategy.kind == "failure_rate":
            self._failures_ms.append(now_ms)
        self._pause_ms = self._draw_pause(failure)
        self._paused_until_ms = now_ms + self._pause_ms
        return self._pause_ms

    def _expire(self, now_ms: int) -> None:
        """Forget failures older than the interval; reset the backoff after the threshold without a failure."""
        interval_ms = self._strategy.failure_rate_interval_ms
        while self._failures_ms and now_ms - self._failures_ms[0] > interval_ms:
            self._failures_ms.popleft()
        threshold_ms = self._threshold_ms
        if threshold_ms is not None and self._paused_until_ms is not None and now_ms - self._paused_until_ms >= threshold_ms:
            self._reset()

    def _may_restart(self) -> bool:
        strategy = self._strategy
        if strategy.kind == "none" or self.restarts >= strategy.attempts_max:
            return False
        if strategy.kind == "failure_rate":
            return len(self._failures_ms) < strategy.failures_per_interval_max
        return strategy.kind != "exponential_delay" or self._restarts_since_reset < strategy.attempts_before_reset_max

    def _draw_pause(self, failure: Failure) -> int:
        is_first, self._is_first = self._is_first, False
        if is_first and self._strategy.immediate_first and not is_of_user_code(failure.error):
            return 0
        self._delays += 1
        delay_ms = self._strategy.delay_after(self._delays - 1)
        jitter_ms = self._strategy.jitter_of(delay_ms)
        if jitter_ms == 0:
            return delay_ms
        return min(delay_ms + self._rng.randint(-jitter_ms, jitter_ms), self._strategy.delay_max_ms)

    @property
    def _threshold_ms(self) -> int | None:
        return self._strategy.reset_backoff_threshold_ms if self._strategy.kind == "exponential_delay" else None

    def progressed(self) -> None:
        """A checkpoint completed: a later failure is further on. It resets the backoff, unless the strategy leaves that to time."""
        if self._threshold_ms is None:
            self._reset()

    def _reset(self) -> None:
        self._is_first = True
        self._delays = self._restarts_since_reset = 0

    def recovered(self) -> None:
        """Every task runs: the next failure is a new one."""
        self._is_merged = self._is_unfinished = False

    def record(self, *, now_ms: int, wall_ms: int) -> BackoffRecord | None:
        """For the record of the next attempt; None where a new leader begins with the first pause."""
        if not self._strategy.is_lasting or self._paused_until_ms is None:
            return None
        return BackoffRecord(
            pause_ms=self._pause_ms,
            until_ms=wall_ms + self._paused_until_ms - now_ms,
            failures_ms=tuple(wall_ms + failed_ms - now_ms for failed_ms in self._failures_ms),
            delays=self._delays,
            restarts_since_reset=self._restarts_since_reset,
        )
