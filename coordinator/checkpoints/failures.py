"""CORE: decides when failed checkpoints fail the job, by the number of consecutive failures of tasks or storage. Pure."""

from __future__ import annotations

from collections import OrderedDict

from holdfast.barriers.messages import FailureReason

COUNTED_IDS_MAX = 1_000
"""Failed ids remembered, so that each counts once."""

_COUNTED = frozenset(
    {
        FailureReason.DECLINED,
        FailureReason.EXPIRED,
        FailureReason.ASYNC_EXCEPTION,
        FailureReason.IO_EXCEPTION,
    }
)


class CheckpointFailureManager:
    """Counts each failed id once. A completed checkpoint resets the count, and failures of older ids no longer count.

    `tolerable` failures in a row are accepted; the next one fails the job and resets the count.
    Source: Flink, CheckpointFailureManager."""

    def __init__(self, tolerable: int) -> None:
        self._tolerable = tolerable
        self._failed: OrderedDict[int, None] = OrderedDict()
        self._count = 0
        self._last_completed = 0

    def allow(self, tolerable: int) -> None:
        """Another number is tolerable from now on: the next failure is judged by it."""
        self._tolerable = tolerable

    @property
    def count(self) -> int:
        """Consecutive counted failures."""
        return self._count

    def completed(self, checkpoint_id: int) -> None:
        """Note a completed checkpoint."""
        self._last_completed = max(self._last_completed, checkpoint_id)
        self._reset()

    def failed(self, checkpoint_id: int, reason: FailureReason, *, savepoint: bool = False) -> bool:
        """Note a failed checkpoint; True if the job must fail. A savepoint's storage errors don't count: a user chose the place."""
        if reason not in _COUNTED or (savepoint and reason is FailureReason.IO_EXCEPTION):
            return False
        if checkpoint_id <= self._last_completed or checkpoint_id in self._failed:
            return False
        self._failed[checkpoint_id] = None
        if len(self._failed) > COUNTED_IDS_MAX:
            self._failed.popitem(last=False)
        self._count += 1
        if self._count <= self._tolerable:
            return False
        self._reset()
        return True

    def _reset(self) -> None:
        self._count = 0
