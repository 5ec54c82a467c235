"""CORE: when a leader asks storage whether it still leads, before it acts upon what is due.

A leader that was stopped, and wakes, would record failures of workers that went to its successor long ago. The shell reads the
clock, asks storage, and tells the answer; nothing here is trusted for safety, which rests on write-once registers."""

from __future__ import annotations

from enum import StrEnum

LATE_MS = 2_000
"""Behind a deadline that is so late the process stood still (SIGSTOP, a virtual machine without a core): another may lead the job
by now, and what is due says nothing about its workers."""

LEAD_CHECK_MS_MAX = 10_000
"""Longest wait for storage to say who leads the job; then the late turn is taken all the same."""


class LeadVerdict(StrEnum):
    """What a turn does."""

    GO_ON = "go_on"
    ASK = "ask"
    """Ask storage, and wait for its answer."""
    WAIT = "wait"
    """The answer is under way."""


class LeadCheck:
    """The check of one leader of one job; times are monotonic."""

    def __init__(self) -> None:
        self._known_ms = 0
        """When storage answered last, or the wait for it ended."""
        self._waits_until_ms: int | None = None

    @property
    def deadline_ms(self) -> int | None:
        """When turns wait no longer; None: they don't wait."""
        return self._waits_until_ms

    def judge(self, now_ms: int, due_ms: int | None) -> LeadVerdict:
        """Of a turn at `now_ms`, by the job's own deadline; None: it has none."""
        until_ms = self._waits_until_ms
        if until_ms is not None:
            if now_ms < until_ms:
                return LeadVerdict.WAIT
            self.known(now_ms)
        if due_ms is None or now_ms - max(due_ms, self._known_ms) < LATE_MS:
            return LeadVerdict.GO_ON
        self._waits_until_ms = now_ms + LEAD_CHECK_MS_MAX
        return LeadVerdict.ASK

    def known(self, now_ms: int) -> None:
        """Storage answered, or can't say: the job goes on as if it were led here, and its next write tells."""
        self._known_ms, self._waits_until_ms = now_ms, None
