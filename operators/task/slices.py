"""CORE: how many rows one slice of input may have, from the measured cost of a row.

A step must end in about its time budget whatever a row costs; a cheap row must not pay for that. So a slice starts at one
row, grows eightfold while it stays cheap, and shrinks at once when it does not."""

from __future__ import annotations

GROWTH = 8
"""Bound on how much larger a slice may be than the largest one that is known to fit."""

SMOOTHING = 0.5
"""Weight of the newest measurement."""


class RowBudget:
    """Rows per slice for one subtask: at least 1, at most `rows_max`."""

    __slots__ = ("_budget_s", "_cost_s", "_proven", "_rows_max")

    def __init__(self, budget_ms: int, rows_max: int) -> None:
        self._budget_s = budget_ms / 1000
        self._rows_max = rows_max
        self._cost_s = 0.0
        self._proven = 0

    def rows(self) -> int:
        """Rows that the next slice may have."""
        if self._proven == 0:
            return 1
        ceiling = min(self._rows_max, self._proven * GROWTH)
        if self._cost_s * ceiling <= self._budget_s:
            return ceiling
        return max(1, int(self._budget_s / self._cost_s))

    def measured(self, rows: int, seconds: float) -> None:
        """A slice of `rows` took this long."""
        if rows < 1:
            return
        cost = seconds / rows
        if self._proven == 0 or cost > 4 * self._cost_s:
            self._cost_s = cost
        else:
            self._cost_s += SMOOTHING * (cost - self._cost_s)
        if seconds > 2 * self._budget_s:
            self._proven = max(1, rows // 2)
        elif rows > self._proven:
            self._proven = rows
