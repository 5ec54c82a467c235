"""CORE: retention decides which completed checkpoints of a job are kept, besides those that something else holds: labels, the
snapshot that the job was restored from, the bases of increments under way. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.barriers.jobgraph import RETAINED_MAX, JobConfig

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@dataclass(frozen=True, slots=True)
class Retention:
    """What is kept; see the settings of JobConfig."""

    newest: int
    hourly: int = 0
    daily: int = 0
    within_ms: int = 0

    @staticmethod
    def of(config: JobConfig) -> Retention:
        return Retention(
            config.retained_checkpoints, config.retained_hourly, config.retained_daily, config.retained_within_ms
        )

    @property
    def kept_max(self) -> int:
        """Checkpoints that are kept, at most."""
        return self.newest + (RETAINED_MAX if self.hourly or self.daily or self.within_ms else 0)

    def choose(self, completed: Iterable[tuple[int, int]], now_ms: int) -> frozenset[int]:
        """Ids to keep of (id, when it was triggered, ms since the epoch): the newest by id, the newest of each of the newest hours
        and days that have any, and those of the time within. `now_ms`: wall clock. Where that is more than RETAINED_MAX, those of
        hours and days come first: a short interval would else push them all out.

        The newest id is always among them. A clock that went back keeps no fewer than `newest`, and no more than `kept_max`."""
        ordered = sorted(completed, reverse=True)
        kept = {number for number, _ in ordered[: self.newest]}
        periodic: list[int] = []
        within: list[int] = []
        hours: set[int] = set()
        days: set[int] = set()
        for number, timestamp_ms in ordered:
            is_hourly = _takes(hours, timestamp_ms // HOUR_MS, self.hourly)
            is_daily = _takes(days, timestamp_ms // DAY_MS, self.daily)
            if number in kept:
                continue
            if is_hourly or is_daily:
                periodic.append(number)
            elif self.within_ms > 0 and timestamp_ms >= now_ms - self.within_ms:
                within.append(number)
        return frozenset(kept.union([*periodic, *within][:RETAINED_MAX]))


def _takes(taken: set[int], period: int, limit: int) -> bool:
    """Whether this is the newest of a period, of which there are not too many yet."""
    if period in taken or len(taken) >= limit:
        return False
    taken.add(period)
    return True
