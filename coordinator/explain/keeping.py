"""CORE: decides which checkpoints of a job are explained once they have ended, so that the explanation is kept. Pure.

What somebody asks in the morning was seen in the night alone: who was busy, who was silent, in which function. So the leader
explains a checkpoint that failed with acknowledgements missing, and one that was slow, when it ends. One that is about to expire is
looked at before: with its end the attempt may be fenced, and its workers have nothing to say about it any more."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from holdfast.barriers.messages import FailureReason
from holdfast.coordinator.explain.usual import Usual
from holdfast.coordinator.views import CheckpointView

KEPT_INTERVAL_MS = 60_000
"""Between two explanations of failed checkpoints that are kept, and between two of slow ones: a job whose checkpoints fail each
second fails for the same cause, and its history has a bound."""

LOOK_AHEAD_MS = 5_000
LOOK_AHEAD_SHARE = 0.4
"""A checkpoint is looked at so long before it expires, and so much of its timeout at most: a worker answers in a second or two."""

_IS_NO_FAULT = frozenset(
    {
        FailureReason.SUBSUMED,
        FailureReason.END_OF_INPUT,
        FailureReason.SUSPENDED,
        FailureReason.COORDINATOR_SHUTDOWN,
        FailureReason.JOB_FINISHING,
        FailureReason.LEADER_CHANGED,
    }
)
"""Nothing of these was seen that their reason does not say."""


class Expiry(NamedTuple):
    """A pending checkpoint whose tasks have been triggered, and not all acknowledged."""

    checkpoint_id: int
    attempt: int
    deadline_ms: int
    """When it expires, monotonic."""


class TakeLook(msgspec.Struct, frozen=True):
    """Action: see what the job and the workers of missing acknowledgements are doing."""

    checkpoint_id: int
    attempt: int
    left_ms: int
    """Until it expires."""


class Keeping:
    """One job under one leader. Its caller hands it everything in the order in which it happened."""

    def __init__(self) -> None:
        self._expiry: Expiry | None = None
        self._timeout_ms = 0
        self._looked_at: int | None = None
        self._looked_ms: int | None = None
        """When the last look was taken, monotonic."""
        self._failed_ms: int | None = None
        """When a failed one was explained last, or one that is about to expire was looked at, monotonic."""
        self._failed_before_ms: int | None = None
        """The same before the last look."""
        self._slow_ms: int | None = None

    def watch(self, expiry: Expiry | None, timeout_ms: int) -> None:
        """The pending checkpoint that expires first. `timeout_ms`: how long each may take."""
        self._expiry, self._timeout_ms = expiry, timeout_ms

    def next_deadline_ms(self) -> int | None:
        """When a look is due, monotonic; None: none is."""
        expiry = self._expiry
        if expiry is None or expiry.checkpoint_id == self._looked_at:
            return None
        due_ms = expiry.deadline_ms - min(LOOK_AHEAD_MS, int(LOOK_AHEAD_SHARE * self._timeout_ms))
        for last_ms in (self._failed_ms, self._looked_ms):
            if last_ms is not None:
                due_ms = max(due_ms, last_ms + KEPT_INTERVAL_MS)
        return due_ms if due_ms < expiry.deadline_ms else None

    def advance(self, now_ms: int) -> TakeLook | None:
        """The look that is due."""
        due_ms, expiry = self.next_deadline_ms(), self._expiry
        if due_ms is None or expiry is None or now_ms < due_ms:
            return None
        self._failed_before_ms = self._failed_ms
        self._looked_at, self._looked_ms, self._failed_ms = expiry.checkpoint_id, now_ms, now_ms
        return TakeLook(expiry.checkpoint_id, expiry.attempt, max(0, expiry.deadline_ms - now_ms))

    def ended(self, checkpoint: CheckpointView, usual: Usual, now_ms: int) -> bool:
        """Whether a checkpoint that has ended is to be explained now."""
        was_looked_at = checkpoint.checkpoint_id == self._looked_at
        if was_looked_at:
            self._looked_at = None
            if not has_failed(checkpoint):  # the next one may, and its minute is not used up
                self._failed_ms = self._failed_before_ms
        if has_failed(checkpoint):
            # Of checkpoints that expire one behind the other, the one is explained that could be looked at, and not the one before.
            at_ms = now_ms - LOOK_AHEAD_MS if checkpoint.failure_reason == FailureReason.EXPIRED else now_ms
            if was_looked_at or _is_over(self._failed_ms, at_ms):
                self._failed_ms = now_ms
                return True
        elif (
            checkpoint.status == "COMPLETED"
            and usual.is_slow(checkpoint, checkpoint.end_to_end_ms)
            and (was_looked_at or _is_over(self._slow_ms, now_ms))
        ):
            self._slow_ms = now_ms
            return True
        return False


def has_failed(checkpoint: CheckpointView) -> bool:
    """It expired, or failed with acknowledgements missing, and not for a reason that is no fault."""
    reason = checkpoint.failure_reason
    if checkpoint.status != "FAILED" or reason in _IS_NO_FAULT:
        return False
    return reason == FailureReason.EXPIRED or checkpoint.num_acknowledged_subtasks < checkpoint.num_subtasks


def _is_over(since_ms: int | None, now_ms: int) -> bool:
    return since_ms is None or now_ms - since_ms >= KEPT_INTERVAL_MS
