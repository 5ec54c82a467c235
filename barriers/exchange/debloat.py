"""CORE: how many bytes may be in flight on a channel, so that its consumer has them done in about a set time.

A barrier waits for what lies in front of it. Four MiB are nothing for a consumer that takes 100 MB a second, and minutes for one
that takes a millisecond for each row; so a channel gets what its consumer takes in half of the target, and its producer may keep
as much again. The other half of the target lies there.

The rate is that of the time in which the channel had something to read and was not blocked: how long it had nothing says nothing
of its consumer, and an alignment is not the consumer's slowness. Time that went to the consumer's other channels counts, and time
in which its own output was full: what is queued waits for these, too.

A channel is looked at once in a period, when some of it is processed. What came before counts half as much at each look. Where a
whole allocation goes within a quarter of a period (or of the target, whichever is shorter) the next look is not awaited: the
allocation doubles at once, and what was measured before counts no more. Such a rate asks for at least as much, so a look does not
take it back, and a channel is never small because it was small.

Source: Flink's BufferDebloater, which sizes buffers by the throughput of the whole subtask."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.barriers.jobgraph import JobConfig

ALLOCATION_BYTES_MIN = 4 * 1024
"""The smallest allocation, unless `channel_credit_bytes` is smaller."""
HURRY_FRACTION = 4
"""A whole allocation that went within this fraction of a period doubles the next one."""
ANNOUNCED_DIFFERENCE = 0.25
"""By so much of itself an allocation must be wrong before another one is announced."""
MEMORY = 0.5
"""What part of all that was measured before counts behind a look."""
UNITS_HELD = 8
"""Slices that an allocation holds where a slice costs much by itself: with fewer rows each would take as long, and more of them be
needed. A frame, a quarter of the allocation, has two then: enough to learn whether a larger slice would pay."""
READABLE_S_MIN = 1e-6
"""Shortest time that is measured, in seconds: a simulated clock may stand still."""


@dataclass(frozen=True, slots=True)
class DebloatSettings:
    """Settings of a job's channels."""

    target_s: float
    period_s: float
    start_bytes: int
    max_bytes: int

    @staticmethod
    def of(config: JobConfig) -> DebloatSettings | None:
        """None: allocations are what `channel_credit_bytes` says."""
        if not config.buffer_debloat:
            return None
        return DebloatSettings(
            config.buffer_debloat_target_ms / 1000,
            config.buffer_debloat_period_ms / 1000,
            config.credit_bytes_start,
            config.channel_credit_bytes,
        )


class ChannelBudget:
    """Allocation of one channel, in bytes. Times are seconds of a monotonic clock; one that goes back counts as standing still."""

    __slots__ = (
        "_bytes", "_hurried_bytes", "_hurried_from_s", "_hurry_s", "_known_bytes", "_known_s", "_looked_s", "_rate_max",
        "_readable_s", "_settings", "_since_s", "allocated_bytes",
    )  # fmt: skip

    def __init__(self, settings: DebloatSettings) -> None:
        self._settings = settings
        self.allocated_bytes = settings.start_bytes
        self._hurry_s = min(settings.period_s, settings.target_s) / HURRY_FRACTION
        self._rate_max = settings.max_bytes / (settings.target_s / 2)
        """Bytes a second, above which the allocation is the largest anyhow."""
        self._since_s: float | None = None
        """Since when the channel can be read, as far as that is not in `_readable_s`; None: it can't."""
        self._looked_s: float | None = None
        self._readable_s = 0.0
        """Time that the channel could be read, and bytes of it that were processed, since the last look."""
        self._bytes = 0
        self._known_s = 0.0
        """The same up to the last look, each look's half of what the next one's is."""
        self._known_bytes = 0.0
        self._hurried_bytes = 0
        """Of the allocation that is watched for haste: what went of it, and the readable time at which it began."""
        self._hurried_from_s = 0.0

    @property
    def bytes_max(self) -> int:
        """The largest allocation."""
        return self._settings.max_bytes

    @property
    def bytes_per_s(self) -> float | None:
        """What the consumer takes of this channel, at most as much as makes a difference; None before anything was processed."""
        read_bytes = self._known_bytes + self._bytes
        if not read_bytes:
            return None
        return min(self._rate_max, read_bytes / max(READABLE_S_MIN, self._known_s + self._readable_s))

    def readable(self, now_s: float) -> None:
        """There is something to read, and the channel is not blocked; may be said again."""
        if self._since_s is None:
            self._since_s = now_s

    def unreadable(self, now_s: float) -> None:
        """All was processed, or the channel is blocked; may be said again."""
        if self._since_s is not None:
            self._readable_s += max(0.0, now_s - self._since_s)
            self._since_s = None

    def processed(self, size: int, now_s: float, unit_bytes: int = 0) -> bool:
        """So many bytes of the channel were processed. Whether the allocation is another one now.

        `unit_bytes`: of a slice that would hardly take less time if it were smaller; 0: none is known."""
        since_s = self._since_s
        if since_s is not None:
            self._readable_s += max(0.0, now_s - since_s)
            self._since_s = now_s
        self._bytes += size
        self._hurried_bytes += size
        before = self.allocated_bytes
        if self._readable_s - self._hurried_from_s > self._hurry_s:
            self._hurried_bytes, self._hurried_from_s = 0, self._readable_s
        elif self._hurried_bytes >= before:
            self._double()
        if self._looked_s is None:
            self._looked_s = now_s
        elif not 0 <= now_s - self._looked_s < self._settings.period_s:
            self._look(now_s, unit_bytes)
        return self.allocated_bytes != before

    def _double(self) -> None:
        """Only what was measured in this haste counts: with what was before, the next look would take the growth back."""
        self.allocated_bytes = min(2 * self.allocated_bytes, self._settings.max_bytes)
        self._bytes, self._readable_s = self._hurried_bytes, self._readable_s - self._hurried_from_s
        self._known_bytes = self._known_s = 0.0
        self._hurried_bytes, self._hurried_from_s = 0, self._readable_s

    def _look(self, now_s: float, unit_bytes: int) -> None:
        """A period is over."""
        rate = self.bytes_per_s
        if rate is not None:
            wanted = max(int(rate * self._settings.target_s / 2), UNITS_HELD * unit_bytes, ALLOCATION_BYTES_MIN)
            wanted = min(wanted, self._settings.max_bytes)
            if abs(wanted - self.allocated_bytes) >= ANNOUNCED_DIFFERENCE * self.allocated_bytes:
                self.allocated_bytes = wanted
        self._looked_s = now_s
        self._hurried_from_s -= self._readable_s
        # No more than makes a difference, or a consumer that has become slow would be believed to be fast for long. Nor does one
        # look count for more than several would, or one that took a minute for a slice would be believed to be slow for long.
        known_s = max(READABLE_S_MIN, self._known_s + self._readable_s)
        share = MEMORY * min(1.0, 2 * self._settings.period_s / known_s)
        self._known_s = share * known_s
        self._known_bytes = min(share * (self._known_bytes + self._bytes), self._known_s * self._rate_max)
        self._bytes, self._readable_s = 0, 0.0
