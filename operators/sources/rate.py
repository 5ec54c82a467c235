"""CORE: a token bucket that paces a source; time comes in, rows come out."""

from __future__ import annotations

from holdfast.statebackends.errors import InvalidConfigError

BURST_MS = 250
"""Longest run of unused tokens that is kept: what a subtask may emit at once after a pause."""


class RateLimit:
    """At most `rows_per_second` rows, evenly; None means no limit."""

    def __init__(self, rows_per_second: float | None) -> None:
        self._rate = rows_per_second
        self._tokens = 0.0
        self._filled_ms: int | None = None

    def allowed(self, rows_max: int, now_ms: int) -> int:
        """Rows that may be emitted now, 0..rows_max; `spend` what was emitted."""
        if self._rate is None:
            return rows_max
        if self._filled_ms is None:
            self._filled_ms = now_ms
            self._tokens = 1.0
        elapsed_ms = max(0, now_ms - self._filled_ms)
        bound = max(1.0, self._rate * BURST_MS / 1000)
        self._tokens = min(bound, self._tokens + self._rate * elapsed_ms / 1000)
        self._filled_ms = max(self._filled_ms, now_ms)
        return min(rows_max, int(self._tokens))

    def spend(self, rows: int) -> None:
        if self._rate is not None:
            self._tokens -= rows

    def ready_at_ms(self, now_ms: int) -> int:
        """When the next run of rows is worth a poll: at least one row, and some 10 ms of them at high rates."""
        if self._rate is None:
            return now_ms
        wanted = max(1.0, self._rate / 100)
        return now_ms + max(1, int((wanted - self._tokens) * 1000 / self._rate) + 1)


def rate_of_subtask(rows_per_second: float | None, parallelism: int) -> RateLimit:
    """The equal share of one subtask in the rate of the whole source: a rescale leaves the job's rate as it is."""
    return RateLimit(None if rows_per_second is None else rows_per_second / parallelism)


def check_rate(rows_per_second: float | None) -> None:
    """Raise InvalidConfigError unless it is None or above 0."""
    if rows_per_second is not None and not rows_per_second > 0:
        raise InvalidConfigError(f"rows_per_second must be above 0, got {rows_per_second}", setting="rows_per_second")
