"""What is usual for the checkpoints of a job, and which of them are slow. Pure; O(checkpoints that are compared)."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import msgspec

from holdfast.barriers.jobgraph import JobConfig
from holdfast.coordinator.views import CheckpointPhases, CheckpointView

COMPARED_MIN = 3
"""Completed checkpoints that a median needs."""
FACTOR = 2
"""A time is unusual beyond so many times its median, and by more than the slack."""
SLACK_MS_MIN, SLACK_MS_MAX = 200, 1_000
SLACK_SHARE = 0.05
"""Of the interval: what a time may exceed its median by in any case, within the two bounds. Machines hesitate for less."""
CHRONIC_MS = 1_000
"""A checkpoint that takes longer than this, and than the interval, is slow, though all of them may be."""


def is_unusual(value_ms: float, median_ms: float, slack_ms: float) -> bool:
    return median_ms >= 0 and value_ms > max(FACTOR * median_ms, median_ms + slack_ms)


class Usual(msgspec.Struct, frozen=True):
    """What checkpoints of a job are compared with."""

    config: JobConfig
    """Settings that hold."""
    interval_ms: int | None
    """None: no periodic checkpoints are taken."""
    recent: tuple[CheckpointPhases, ...]
    """Of the newest completed checkpoints."""

    @property
    def slack_ms(self) -> float:
        return min(SLACK_MS_MAX, max(SLACK_MS_MIN, SLACK_SHARE * (self.interval_ms or 0)))

    def before(self, checkpoint_id: int) -> list[CheckpointPhases]:
        """Completed checkpoints to compare one with: all recent ones but itself."""
        return [phases for phases in self.recent if phases.checkpoint_id != checkpoint_id]

    def is_slow(self, checkpoint: CheckpointView, duration_ms: int) -> bool:
        """Whether a checkpoint takes, or has taken, longer than is usual or than the job can go on with. A savepoint stores
        everything, and is compared with nothing."""
        if checkpoint.is_savepoint:
            return self._is_near_timeout(duration_ms)
        median_ms = median_of_known(self.before(checkpoint.checkpoint_id), lambda phases: phases.end_to_end_ms)
        return is_unusual(duration_ms, median_ms, self.slack_ms) or self.is_chronic(duration_ms)

    def is_chronic(self, duration_ms: int) -> bool:
        """Whether a time is too long whatever the others take: beyond the intervals that it may last, or half of its timeout."""
        interval_ms = self.interval_ms
        if interval_ms is not None and duration_ms > max(CHRONIC_MS, interval_ms * self.config.max_concurrent_checkpoints):
            return True
        return self._is_near_timeout(duration_ms)

    def _is_near_timeout(self, duration_ms: int) -> bool:
        return duration_ms > max(CHRONIC_MS, self.config.checkpoint_timeout_ms / 2)


def median_of_known(compared: list[CheckpointPhases], read: Callable[[CheckpointPhases], float]) -> float:
    """-1 with fewer than COMPARED_MIN known values."""
    known = [value for phases in compared if (value := read(phases)) >= 0]
    return statistics.median(known) if len(known) >= COMPARED_MIN else -1
