"""CORE: aligned exactly-once barriers over the input channels of one subtask.

Decides when a snapshot is taken, which channels wait for it, and which ids are dead. It refuses to know what waits:
the gate keeps the queues and reads a blocked channel no further than its barrier."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from holdfast.barriers.alignment import (
    ABORTED_IDS_MAX,
    AbortCheckpoint,
    AbortedIds,
    AbortNotice,
    AbortReason,
    AlignmentMetrics,
    BarrierAction,
    BarrierEvent,
    BarrierReceived,
    BatchDelivered,
    BlockChannel,
    CancelReceived,
    ChannelEnded,
    TriggerSnapshot,
    UnblockChannels,
)
from holdfast.barriers.elements import CheckpointBarrier
from holdfast.statebackends.errors import InvalidConfigError, InvariantError, ProtocolError


@dataclass(slots=True)
class WaitingForFirstBarrier:
    """No checkpoint is pending; every open channel is read."""


@dataclass(slots=True)
class CollectingBarriers:
    """The first barrier of an id was read; its channel and the ones that followed are blocked until the last one."""

    barrier: CheckpointBarrier
    awaited: set[int]
    """Channels open when the first barrier came, without those that have delivered theirs or ended since."""
    began_ms: int
    start_delay_ms: int
    blocked: set[int] = field(default_factory=set)
    bytes_processed: int = 0


class Aligner:
    """Alignment of one subtask. An id triggers at most once, in rising order, and never both triggers and aborts.

    `after_finish`: a channel that ends during an alignment counts as arrived; when off, it aborts the checkpoint.
    A channel that ended before the first barrier is never awaited, either way."""

    def __init__(self, channel_count: int, *, after_finish: bool = True, aborted_ids_max: int = ABORTED_IDS_MAX) -> None:
        if channel_count < 1:
            raise InvalidConfigError(f"an aligner needs at least one channel, got {channel_count}")
        self._channel_count = channel_count
        self._after_finish = after_finish
        self._open = set(range(channel_count))
        self._newest_id = 0
        self._aborted = AbortedIds(aborted_ids_max)
        self._state: WaitingForFirstBarrier | CollectingBarriers = WaitingForFirstBarrier()

    @property
    def channel_count(self) -> int:
        return self._channel_count

    @property
    def pending(self) -> tuple[int, ...]:
        """The id under alignment, or nothing."""
        return (self._state.barrier.checkpoint_id,) if isinstance(self._state, CollectingBarriers) else ()

    def handle(self, event: BarrierEvent, *, now_ms: int, wall_ms: int) -> list[BarrierAction]:
        match event:
            case BatchDelivered(size=size):
                if isinstance(self._state, CollectingBarriers):
                    self._state.bytes_processed += size
                return []
            case BarrierReceived(channel=channel, barrier=barrier):
                actions = self._barrier(channel, barrier, now_ms, wall_ms)
            case CancelReceived(channel=channel, checkpoint_id=checkpoint_id):
                actions = self._cancel(channel, checkpoint_id)
            case ChannelEnded(channel=channel):
                actions = self._ended(channel, now_ms)
            case AbortNotice(checkpoint_id=checkpoint_id):
                actions = self._notified(checkpoint_id)
            case _:
                assert_never(event)
        self.check_invariants()
        return actions

    def _barrier(self, channel: int, barrier: CheckpointBarrier, now_ms: int, wall_ms: int) -> list[BarrierAction]:
        self._require_open(channel, "barrier")
        checkpoint_id = barrier.checkpoint_id
        state = self._state
        if isinstance(state, CollectingBarriers) and checkpoint_id == state.barrier.checkpoint_id:
            return self._arrived(state, channel, now_ms)
        if checkpoint_id <= self._newest_id:
            return []
        actions = self._abandon(AbortReason.SUBSUMED)
        self._newest_id = checkpoint_id
        if self._aborted.take(checkpoint_id):
            return [*actions, AbortCheckpoint(checkpoint_id, AbortReason.NOTIFIED)]
        # Read once, here: a channel that ends later counts as arrived, one that ended before was never awaited.
        state = CollectingBarriers(barrier, set(self._open), now_ms, max(0, wall_ms - barrier.timestamp_ms))
        self._state = state
        return actions + self._arrived(state, channel, now_ms)

    def _arrived(self, state: CollectingBarriers, channel: int, now_ms: int) -> list[BarrierAction]:
        state.awaited.discard(channel)
        if not state.awaited:
            return self._complete(state, now_ms)
        state.blocked.add(channel)
        return [BlockChannel(channel)]

    def _complete(self, state: CollectingBarriers, now_ms: int) -> list[BarrierAction]:
        metrics = AlignmentMetrics(state.start_delay_ms, max(0, now_ms - state.began_ms), state.bytes_processed)
        self._state = WaitingForFirstBarrier()
        return [TriggerSnapshot(state.barrier, metrics), *_unblock(state)]

    def _abandon(self, why: AbortReason) -> list[BarrierAction]:
        """Give up the alignment in progress, if there is one."""
        state = self._state
        if not isinstance(state, CollectingBarriers):
            return []
        self._state = WaitingForFirstBarrier()
        return [AbortCheckpoint(state.barrier.checkpoint_id, why), *_unblock(state)]

    def _cancel(self, channel: int, checkpoint_id: int) -> list[BarrierAction]:
        self._require_open(channel, "cancel marker")
        if self.pending == (checkpoint_id,):
            return self._abandon(AbortReason.CANCELLED)
        if checkpoint_id <= self._newest_id:
            return []
        actions = self._abandon(AbortReason.SUBSUMED)
        self._newest_id = checkpoint_id
        why = AbortReason.NOTIFIED if self._aborted.take(checkpoint_id) else AbortReason.CANCELLED
        return [*actions, AbortCheckpoint(checkpoint_id, why)]

    def _ended(self, channel: int, now_ms: int) -> list[BarrierAction]:
        self._require_open(channel, "end of partition")
        self._open.discard(channel)
        state = self._state
        if not isinstance(state, CollectingBarriers):
            return []
        if not self._after_finish:
            return self._abandon(AbortReason.END_OF_INPUT)
        state.awaited.discard(channel)
        return [] if state.awaited else self._complete(state, now_ms)

    def _notified(self, checkpoint_id: int) -> list[BarrierAction]:
        if self.pending == (checkpoint_id,):
            return self._abandon(AbortReason.NOTIFIED)
        if checkpoint_id > self._newest_id:
            self._aborted.remember(checkpoint_id)
        return []

    def _require_open(self, channel: int, what: str) -> None:
        if channel not in self._open:
            raise ProtocolError(f"{what} on channel {channel}, which has ended or does not exist", channel=channel)
        if isinstance(self._state, CollectingBarriers) and channel in self._state.blocked:
            raise InvariantError(f"{what} was read from channel {channel}, which is blocked", channel=channel)

    def check_invariants(self) -> None:
        """Raise InvariantError on a broken state. Cost: O(channels)."""
        state = self._state
        if not isinstance(state, CollectingBarriers):
            return
        if not state.awaited or not state.blocked:
            raise InvariantError(f"alignment of {state.barrier.checkpoint_id} waits for nothing or holds nothing")
        if state.awaited & state.blocked or not state.awaited | state.blocked <= self._open:
            raise InvariantError(f"alignment of {state.barrier.checkpoint_id}: awaited and blocked channels overlap or have ended")
        if state.barrier.checkpoint_id != self._newest_id:
            raise InvariantError(f"alignment of {state.barrier.checkpoint_id} is not the newest id {self._newest_id}")


def _unblock(state: CollectingBarriers) -> list[BarrierAction]:
    return [UnblockChannels(tuple(sorted(state.blocked)))] if state.blocked else []
