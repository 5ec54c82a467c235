"""CORE: exactly-once barriers over the input channels of one subtask: aligned, unaligned, and aligned with a timeout.

Decides when a snapshot is taken, which channels wait for it, of which the rest is collected, and which ids are dead. It refuses to
know what waits, and how old a barrier is: the gate keeps the queues, reads a blocked channel no further than its barrier, and says
when a barrier overtakes. Without that, every checkpoint is aligned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from holdfast.barriers.alignment.handler import (
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
    CollectChannels,
    CollectingEnded,
    EndQueued,
    Overtake,
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


@dataclass(slots=True)
class CollectingInFlight:
    """The barrier of an id has overtaken: the snapshot was taken, no channel waits."""

    barrier: CheckpointBarrier
    awaited: set[int]
    """Channels whose barrier is still to come."""
    began_ms: int
    start_delay_ms: int
    bytes_processed: int = 0


class Aligner:
    """Alignment of one subtask. An id triggers at most once, in rising order, and aborts instead unless it overtook: then it may
    abort later, while channels are collected.

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
        self._state: WaitingForFirstBarrier | CollectingBarriers | CollectingInFlight = WaitingForFirstBarrier()

    @property
    def channel_count(self) -> int:
        return self._channel_count

    @property
    def pending(self) -> tuple[int, ...]:
        """The id under alignment, or whose channels are collected; or nothing."""
        return () if isinstance(self._state, WaitingForFirstBarrier) else (self._state.barrier.checkpoint_id,)

    def handle(self, event: BarrierEvent, *, now_ms: int, wall_ms: int) -> list[BarrierAction]:
        match event:
            case BatchDelivered(size=size):
                if not isinstance(self._state, WaitingForFirstBarrier):
                    self._state.bytes_processed += size
                return []
            case BarrierReceived(channel=channel, barrier=barrier):
                actions = self._barrier(channel, barrier, now_ms, wall_ms)
            case CancelReceived(channel=channel, checkpoint_id=checkpoint_id):
                actions = self._cancel(channel, checkpoint_id)
            case ChannelEnded(channel=channel):
                actions = self._ended(channel, now_ms)
            case Overtake(barrier=barrier):
                actions = self._overtake(barrier, now_ms, wall_ms)
            case EndQueued(channel=channel):
                actions = self._end_queued(channel, now_ms)
            case AbortNotice(checkpoint_id=checkpoint_id):
                actions = self._notified(checkpoint_id)
            case _:
                assert_never(event)
        self.check_invariants()
        return actions

    def _barrier(self, channel: int, barrier: CheckpointBarrier, now_ms: int, wall_ms: int) -> list[BarrierAction]:
        self._require_open(channel, "barrier")
        if self.pending == (barrier.checkpoint_id,):
            return self._arrived(channel, now_ms)
        actions, is_live = self._claim(barrier.checkpoint_id)
        if not is_live:
            return actions
        # Read once, here: a channel that ends later counts as arrived, one that ended before was never awaited.
        self._state = CollectingBarriers(barrier, set(self._open), now_ms, max(0, wall_ms - barrier.timestamp_ms))
        return actions + self._arrived(channel, now_ms)

    def _claim(self, checkpoint_id: int) -> tuple[list[BarrierAction], bool]:
        """An id's first barrier: gives up what is pending. (actions, whether the id may begin)."""
        if checkpoint_id <= self._newest_id:
            return [], False
        actions = self._abandon(AbortReason.SUBSUMED)
        self._newest_id = checkpoint_id
        if self._aborted.take(checkpoint_id):
            return [*actions, AbortCheckpoint(checkpoint_id, AbortReason.NOTIFIED)], False
        return actions, True

    def _overtake(self, barrier: CheckpointBarrier, now_ms: int, wall_ms: int) -> list[BarrierAction]:
        """Snapshot now, block nobody, and collect the channels that have not delivered the barrier.

        What a blocked channel held lies behind its barrier. The barrier goes on as one that overtakes at once."""
        state = self._state
        at_once = msgspec.structs.replace(barrier, aligned_timeout_ms=0)
        if isinstance(state, CollectingBarriers) and state.barrier.checkpoint_id == barrier.checkpoint_id:
            actions: list[BarrierAction] = []
            begun = CollectingInFlight(at_once, state.awaited, state.began_ms, state.start_delay_ms, state.bytes_processed)
            released = _unblock(state)
        else:
            actions, is_live = self._claim(barrier.checkpoint_id)
            if not is_live:
                return actions
            begun = CollectingInFlight(at_once, set(self._open), now_ms, max(0, wall_ms - barrier.timestamp_ms))
            released = []
        self._state = begun
        snapshot = TriggerSnapshot(at_once, _metrics(begun, now_ms), overtakes=True)
        return [*actions, snapshot, *released, CollectChannels(at_once, tuple(sorted(begun.awaited)))]

    def _arrived(self, channel: int, now_ms: int) -> list[BarrierAction]:
        """The barrier of the pending id, or an end in its stead, has come on a channel."""
        state = self._state
        assert not isinstance(state, WaitingForFirstBarrier)
        state.awaited.discard(channel)
        if not state.awaited:
            return self._complete(state, now_ms)
        if isinstance(state, CollectingInFlight):
            return []
        state.blocked.add(channel)
        return [BlockChannel(channel)]

    def _complete(self, state: CollectingBarriers | CollectingInFlight, now_ms: int) -> list[BarrierAction]:
        self._state = WaitingForFirstBarrier()
        if isinstance(state, CollectingInFlight):
            return [CollectingEnded(state.barrier.checkpoint_id, _metrics(state, now_ms))]
        return [TriggerSnapshot(state.barrier, _metrics(state, now_ms)), *_unblock(state)]

    def _abandon(self, why: AbortReason) -> list[BarrierAction]:
        """Give up what is pending, if anything is."""
        state = self._state
        if isinstance(state, WaitingForFirstBarrier):
            return []
        self._state = WaitingForFirstBarrier()
        released = _unblock(state) if isinstance(state, CollectingBarriers) else []
        return [AbortCheckpoint(state.barrier.checkpoint_id, why), *released]

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
        if isinstance(state, WaitingForFirstBarrier):
            return []
        if not self._after_finish:
            return self._abandon(AbortReason.END_OF_INPUT)
        state.awaited.discard(channel)
        return [] if state.awaited else self._complete(state, now_ms)

    def _end_queued(self, channel: int, now_ms: int) -> list[BarrierAction]:
        """Counts as arrived, while what is in front of it is in flight. The channel ends when it is read."""
        if not isinstance(self._state, CollectingInFlight) or not self._after_finish:
            return []
        return self._arrived(channel, now_ms)

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
        if isinstance(state, WaitingForFirstBarrier):
            return
        what = f"checkpoint {state.barrier.checkpoint_id}"
        if not state.awaited or not state.awaited <= self._open:
            raise InvariantError(f"{what} waits for nothing, or for a channel that has ended")
        if state.barrier.checkpoint_id != self._newest_id:
            raise InvariantError(f"{what} is not the newest id {self._newest_id}")
        if isinstance(state, CollectingInFlight):
            return
        if not state.blocked or state.awaited & state.blocked or not state.blocked <= self._open:
            raise InvariantError(f"{what}: no channel is blocked, or one that is awaited or has ended")


def _metrics(state: CollectingBarriers | CollectingInFlight, now_ms: int) -> AlignmentMetrics:
    return AlignmentMetrics(state.start_delay_ms, max(0, now_ms - state.began_ms), state.bytes_processed)


def _unblock(state: CollectingBarriers) -> list[BarrierAction]:
    return [UnblockChannels(tuple(sorted(state.blocked)))] if state.blocked else []
