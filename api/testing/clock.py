"""All the time that a job under test sees: it stands still unless the test moves it."""

from __future__ import annotations

_BOOT_MS = 1_000_000
"""What the monotonic clock is ahead of the wall clock, so that nobody takes one for the other."""


class ManualClock:
    """Implements the clocks of workers and of coordinators. Work takes no time."""

    def __init__(self, wall_ms: int) -> None:
        self._wall_ms = wall_ms

    def wall_ms(self) -> int:
        return self._wall_ms

    def monotonic_ms(self) -> int:
        return self._wall_ms + _BOOT_MS

    def seconds(self) -> float:
        return self.monotonic_ms() / 1000

    def wall_of(self, monotonic_ms: int) -> int:
        """Wall clock at a monotonic time."""
        return monotonic_ms - _BOOT_MS

    def set(self, wall_ms: int) -> None:
        """Never back: `Job` refuses that."""
        self._wall_ms = wall_ms
