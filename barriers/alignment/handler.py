"""Events and actions that the two barrier handlers share: the aligner (exactly once) and the tracker (at least once).

A handler decides when a subtask snapshots and which channels wait. It knows nothing of queues, records or transports:
the gate feeds it what it read, and performs the actions."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import Protocol, TypeAlias

import msgspec

from holdfast.barriers.elements import CheckpointBarrier, Element
from holdfast.barriers.messages import FailureReason

ABORTED_IDS_MAX = 128
"""Abort notices remembered for checkpoints that have not reached the subtask yet."""


class AbortReason(StrEnum):
    """Why a checkpoint can't complete at this subtask."""

    CANCELLED = "cancelled"
    """A cancel marker came instead of a barrier."""
    SUBSUMED = "subsumed"
    """A channel went on to a higher id, so the barrier of this one can't complete any more."""
    END_OF_INPUT = "end-of-input"
    """A channel ended during the alignment while checkpoints-after-finish is off."""
    NOTIFIED = "notified"
    """The coordinator aborted it: cancel downstream, without a decline."""

    @property
    def decline_reason(self) -> FailureReason | None:
        """Reason of the subtask's decline; None if the coordinator itself aborted the checkpoint."""
        return _DECLINES[self]


_DECLINES: dict[AbortReason, FailureReason | None] = {
    AbortReason.CANCELLED: FailureReason.DECLINED,
    AbortReason.SUBSUMED: FailureReason.SUBSUMED,
    AbortReason.END_OF_INPUT: FailureReason.END_OF_INPUT,
    AbortReason.NOTIFIED: None,
}


# ------------------------------------------------------------------------------------------------------------- events


class BarrierReceived(msgspec.Struct, frozen=True):
    """A barrier was read from a channel that is not blocked."""

    channel: int
    barrier: CheckpointBarrier


class CancelReceived(msgspec.Struct, frozen=True):
    """A cancel marker was read from a channel that is not blocked."""

    channel: int
    checkpoint_id: int


class ChannelEnded(msgspec.Struct, frozen=True):
    """End of partition was read: neither records nor barriers follow on this channel. (End of data still lets barriers through.)"""

    channel: int


class BatchDelivered(msgspec.Struct, frozen=True):
    """A batch was handed to the operator; counts towards the bytes processed during an alignment."""

    size: int


class Overtake(msgspec.Struct, frozen=True):
    """A barrier that may overtake is old enough. It is queued on a channel, or was read from one."""

    barrier: CheckpointBarrier


class EndQueued(msgspec.Struct, frozen=True):
    """The end of a channel that has yet to deliver its barrier is queued: no barrier comes in front of it."""

    channel: int


class AbortNotice(msgspec.Struct, frozen=True):
    """The coordinator stored ABORTED(checkpoint_id); it may come before the barrier does."""

    checkpoint_id: int


BarrierEvent: TypeAlias = BarrierReceived | CancelReceived | ChannelEnded | BatchDelivered | Overtake | EndQueued | AbortNotice


# ------------------------------------------------------------------------------------------------------------ actions


class AlignmentMetrics(msgspec.Struct, frozen=True):
    """Numbers of one alignment; times in ms, sizes in bytes."""

    start_delay_ms: int = 0
    """Creation of the barrier to its first arrival."""
    alignment_duration_ms: int = 0
    """First arrival to last."""
    bytes_processed: int = 0
    """Delivered to the operator between the first arrival and the last."""
    bytes_persisted: int = 0
    """In-flight bytes of the input that are stored with the snapshot; 0 when aligned."""


class BlockChannel(msgspec.Struct, frozen=True):
    """Read nothing more from this channel until it is unblocked."""

    channel: int


class UnblockChannels(msgspec.Struct, frozen=True):
    """Read these channels again; what waited there comes before anything that arrives later."""

    channels: tuple[int, ...]


class TriggerSnapshot(msgspec.Struct, frozen=True):
    """Snapshot now: what was processed is in front of the barrier. If it `overtakes`, what waits in front of it belongs to the
    checkpoint, too; InFlightCollected of the gate tells it later, or AbortCheckpoint follows. Otherwise nothing waits there."""

    barrier: CheckpointBarrier
    metrics: AlignmentMetrics = AlignmentMetrics()
    overtakes: bool = False


class CollectChannels(msgspec.Struct, frozen=True):
    """What is queued on these channels in front of the barrier, and what comes before it, is in flight."""

    barrier: CheckpointBarrier
    channels: tuple[int, ...]


class CollectingEnded(msgspec.Struct, frozen=True):
    """The barrier has come on every channel that was collected."""

    checkpoint_id: int
    metrics: AlignmentMetrics


class InFlightCollected(msgspec.Struct, frozen=True):
    """The last barrier of a checkpoint that overtook has come: all that is stored of its input channels is known."""

    checkpoint_id: int
    channels: tuple[tuple[int, tuple[Element, ...]], ...]
    """(channel, elements in its order) of those that have any: batches, watermarks, statuses."""
    metrics: AlignmentMetrics = AlignmentMetrics()


class AbortCheckpoint(msgspec.Struct, frozen=True):
    """The checkpoint will not be taken here: send a cancel marker downstream, and decline unless the reason says no."""

    checkpoint_id: int
    why: AbortReason


BarrierAction: TypeAlias = BlockChannel | UnblockChannels | TriggerSnapshot | CollectChannels | CollectingEnded | AbortCheckpoint


class BarrierHandler(Protocol):
    """What a gate needs of an aligner or a tracker."""

    @property
    def channel_count(self) -> int: ...

    @property
    def pending(self) -> tuple[int, ...]:
        """Ids with a barrier seen and others awaited, ascending."""

    def handle(self, event: BarrierEvent, *, now_ms: int, wall_ms: int) -> list[BarrierAction]:
        """Take one event. `now_ms` is monotonic and measures durations; `wall_ms` is compared with a barrier's creation time."""


class AbortedIds:
    """Abort notices that came before their barrier: at most `count_max` ids, the oldest is dropped first (docs/invariants.md: K01,
    K02)."""

    def __init__(self, count_max: int = ABORTED_IDS_MAX) -> None:
        self._ids: deque[int] = deque(maxlen=count_max)

    def remember(self, checkpoint_id: int) -> None:
        if checkpoint_id not in self._ids:
            self._ids.append(checkpoint_id)

    def take(self, checkpoint_id: int) -> bool:
        """True if the id was remembered. Forgets it and every lower id: ids strictly increase, so those can't come any more."""
        known = checkpoint_id in self._ids
        self._ids = deque((other for other in self._ids if other > checkpoint_id), maxlen=self._ids.maxlen)
        return known

    def __len__(self) -> int:
        return len(self._ids)
