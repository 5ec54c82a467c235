"""CORE: decides which checkpoints of a job are explained once they have ended, so that the explanation is kept. Pure.

What somebody asks in the morning was seen in the night alone: who was busy, who was silent, in which function. So the leader
explains a checkpoint that failed with acknowledgements missing, and one that was slow, when it ends. One that is about to expire is
probed before: with its end the attempt may be fenced, and its workers have nothing to say about it any more."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from holdfast.barriers.messages import FailureReason
from holdfast.coordinator.explain.usual import Usual
from holdfast.coordinator.views import CheckpointView

KEPT_INTERVAL_MS = 60_000
"""Between two explanations of failed checkpoints that are kept, and between two of slow ones: a job whose checkpoints fail each
second fails for the same cause, and its history has a bound."""

PROBE_AHEAD_MS = 5_000
PROBE_AHEAD_SHARE = 0.4
"""A checkpoint is probed so long before it expires, and so much of its timeout at most: a worker answers in a second or two."""

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
"""Reasons that explain themselves; no explanation is kept."""


class Expiry(NamedTuple):
    """A pending checkpoint whose tasks have been triggered, and not all acknowledged."""

    checkpoint_id: int
    attempt: int
    deadline_ms: int
    """When it expires, monotonic."""


class ProbeExpiring(msgspec.Struct, frozen=True):
    """Action: see what the job and the workers of missing acknowledgements are doing."""

    checkpoint_id: int
    attempt: int
    left_ms: int
    """Until it expires."""


class ExplanationSchedule:
    """One job under one leader. Its caller hands it everything in the order in which it happened."""

    def __init__(self) -> None:
        self._expiry: Expiry | None = None
        self._timeout_ms = 0
        self._probed: int | None = None
        self._probed_ms: int | None = None
        """When one was probed last, monotonic."""
        self._failed_ms: int | None = None
        """When a failed one was explained last, or one that is about to expire was probed, monotonic."""
        self._failed_before_ms: int | None = None
        """The same before the last probe."""
        self._slow_ms: int | None = None
        """When a slow one was explained last, monotonic."""
        self._used: dict[str, _Used] = {}
        """By status: what the newest one that is being explained used up."""

    def watch(self, expiry: Expiry | None, timeout_ms: int) -> None:
        """The pending checkpoint that expires first. `timeout_ms`: how long each may take."""
        self._expiry, self._timeout_ms = expiry, timeout_ms

    def next_deadline_ms(self) -> int | None:
        """When a probe is due, monotonic; None: none is."""
        expiry = self._expiry
        if expiry is None or expiry.checkpoint_id == self._probed:
            return None
        due_ms = expiry.deadline_ms - min(PROBE_AHEAD_MS, int(PROBE_AHEAD_SHARE * self._timeout_ms))
        for last_ms in (self._failed_ms, self._probed_ms):
            if last_ms is not None:
                due_ms = max(due_ms, last_ms + KEPT_INTERVAL_MS)
        return due_ms if due_ms < expiry.deadline_ms else None

    def advance(self, now_ms: int) -> ProbeExpiring | None:
        """The probe that is due."""
        due_ms, expiry = self.next_deadline_ms(), self._expiry
        if due_ms is None or expiry is None or now_ms < due_ms:
            return None
        self._failed_before_ms = self._failed_ms
        self._probed, self._probed_ms, self._failed_ms = expiry.checkpoint_id, now_ms, now_ms
        return ProbeExpiring(expiry.checkpoint_id, expiry.attempt, max(0, expiry.deadline_ms - now_ms))

    def ended(self, checkpoint: CheckpointView, usual: Usual, now_ms: int) -> bool:
        """Whether a checkpoint that has ended is to be explained now."""
        was_probed = checkpoint.checkpoint_id == self._probed
        if was_probed:
            self._probed = None
            if not has_failed(checkpoint):  # the next one may, and its minute is not used up
                self._failed_ms = self._failed_before_ms
        if has_failed(checkpoint):
            # Of checkpoints that expire one behind the other, the one is explained that could be probed, and not the one before.
            at_ms = now_ms - PROBE_AHEAD_MS if checkpoint.failure_reason == FailureReason.EXPIRED else now_ms
            if was_probed or _is_over(self._failed_ms, at_ms):
                before_ms = self._failed_before_ms if was_probed else self._failed_ms
                self._used[checkpoint.status] = _Used(checkpoint.checkpoint_id, now_ms, before_ms)
                self._failed_ms = now_ms
                return True
        elif (
            checkpoint.status == "COMPLETED"
            and usual.is_slow(checkpoint, checkpoint.end_to_end_ms)
            and (was_probed or _is_over(self._slow_ms, now_ms))
        ):
            self._used[checkpoint.status] = _Used(checkpoint.checkpoint_id, now_ms, self._slow_ms)
            self._slow_ms = now_ms
            return True
        return False

    def dropped(self, checkpoint_id: int, status: str) -> None:
        """One that was to be explained is not, after all: its minute is the next one's."""
        used = self._used.get(status)
        if used is None or used.checkpoint_id != checkpoint_id:
            return  # another one was explained since
        del self._used[status]
        if status == "COMPLETED" and self._slow_ms == used.at_ms:
            self._slow_ms = used.before_ms
        elif status != "COMPLETED" and self._failed_ms == used.at_ms:  # else one was probed since
            self._failed_ms = used.before_ms


class _Used(NamedTuple):
    """The minute of one that is to be explained."""

    checkpoint_id: int
    at_ms: int
    before_ms: int | None
    """When one of its kind was explained before it, monotonic."""


def has_failed(checkpoint: CheckpointView) -> bool:
    """It expired, or failed with acknowledgements missing, and not for a reason that is no fault."""
    reason = checkpoint.failure_reason
    if checkpoint.status != "FAILED" or reason in _IS_NO_FAULT:
        return False
    return reason == FailureReason.EXPIRED or checkpoint.num_acknowledged_subtasks < checkpoint.num_subtasks


def _is_over(since_ms: int | None, now_ms: int) -> bool:
    return since_ms is None or now_ms - since_ms >= KEPT_INTERVAL_MS
