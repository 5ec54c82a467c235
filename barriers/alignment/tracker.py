"""CORE: at-least-once barrier tracking over the input channels of one subtask.

It counts barriers and blocks no channel of records: several ids may be pending at once, and records behind a barrier may be in the
snapshot and be replayed after a restore, too. Channels that are to stay aligned wait for the snapshot behind their barrier, for no
longer than it can still come. Numbers such as E12: docs/invariants.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

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
    EndQueued,
    Overtake,
    TriggerSnapshot,
    UnblockChannels,
)
from holdfast.barriers.elements import CheckpointBarrier
from holdfast.statebackends.errors import InvalidConfigError, InvariantError, ProtocolError

PENDING_IDS_MAX = 50
"""Ids remembered with barriers outstanding; the oldest is forgotten first (E12)."""


@dataclass(slots=True)
class PendingBarriers:
    """One id with barriers outstanding."""

    checkpoint_id: int
    barrier: CheckpointBarrier | None
    """None when a cancel marker came first."""
    awaited: set[int]
    began_ms: int
    start_delay_ms: int
    aborted: bool = False
    is_passed: bool = False
    """A channel that is to stay aligned was read behind its barrier: the cut would not be exact any more."""
    bytes_processed: int = 0


class BarrierTracker:
    """At-least-once tracking. A completed id drops every lower one without an action."""

    def __init__(
        self,
        channel_count: int,
        *,
        aligned: frozenset[int] = frozenset(),
        after_finish: bool = True,
        pending_ids_max: int = PENDING_IDS_MAX,
        aborted_ids_max: int = ABORTED_IDS_MAX,
    ) -> None:
        """`aligned`: channels that are read behind a barrier only when its snapshot is taken, or can't be any more."""
        if channel_count < 1:
            raise InvalidConfigError(f"a tracker needs at least one channel, got {channel_count}")
        if not aligned <= set(range(channel_count)):
            raise InvalidConfigError(f"of {channel_count} channels {sorted(aligned)} can't stay aligned")
        self._channel_count = channel_count
        self._after_finish = after_finish
        self._pending_ids_max = pending_ids_max
        self._open = set(range(channel_count))
        self._newest_id = 0
        self._pending: dict[int, PendingBarriers] = {}
        """By id, ascending: an id is added only above the newest."""
        self._aborted = AbortedIds(aborted_ids_max)
        self._aligned = aligned
        self._reached: dict[int, int] = {}
        """Channel -> highest id that came on it, where channels stay aligned."""
        self._waiting: dict[int, int] = {}
        """Blocked channel -> id that it waits for."""

    @property
    def channel_count(self) -> int:
        return self._channel_count

    @property
    def pending(self) -> tuple[int, ...]:
        return tuple(entry.checkpoint_id for entry in self._pending.values() if not entry.aborted)

    def handle(self, event: BarrierEvent, *, now_ms: int, wall_ms: int) -> list[BarrierAction]:
        actions = self._handle(event, now_ms, wall_ms)
        return actions + self._align(event) if self._aligned and not isinstance(event, BatchDelivered) else actions

    def _handle(self, event: BarrierEvent, now_ms: int, wall_ms: int) -> list[BarrierAction]:
        match event:
            case BatchDelivered(size=size):
                for entry in self._pending.values():
                    entry.bytes_processed += size
                return []
            case BarrierReceived(channel=channel, barrier=barrier):
                return self._barrier(channel, barrier, now_ms, wall_ms)
            case CancelReceived(channel=channel, checkpoint_id=checkpoint_id):
                return self._cancel(channel, checkpoint_id, now_ms)
            case ChannelEnded(channel=channel):
                return self._ended(channel, now_ms)
            case AbortNotice(checkpoint_id=checkpoint_id):
                return self._notified(checkpoint_id)
            case Overtake() | EndQueued():
                raise InvariantError(f"{type(event).__name__} at a tracker, which blocks nobody")
            case _:
                assert_never(event)

    def _barrier(self, channel: int, barrier: CheckpointBarrier, now_ms: int, wall_ms: int) -> list[BarrierAction]:
        self._require_open(channel, "barrier")
        entry = self._pending.get(barrier.checkpoint_id)
        if entry is None:
            if barrier.checkpoint_id <= self._newest_id:
                return []
            delay_ms = max(0, wall_ms - barrier.timestamp_ms)
            entry = self._add(PendingBarriers(barrier.checkpoint_id, barrier, set(self._open), now_ms, delay_ms))
            if self._aborted.take(barrier.checkpoint_id):
                entry.aborted = True
                return [AbortCheckpoint(barrier.checkpoint_id, AbortReason.NOTIFIED), *self._arrived(entry, channel, now_ms)]
        return self._arrived(entry, channel, now_ms)

    def _add(self, entry: PendingBarriers) -> PendingBarriers:
        self._newest_id = entry.checkpoint_id
        self._pending[entry.checkpoint_id] = entry
        if len(self._pending) > self._pending_ids_max:
            del self._pending[next(iter(self._pending))]
        return entry

    def _arrived(self, entry: PendingBarriers, channel: int, now_ms: int) -> list[BarrierAction]:
        entry.awaited.discard(channel)
        if entry.awaited:
            return []
        for lower in [other for other in self._pending if other <= entry.checkpoint_id]:
            del self._pending[lower]
        if entry.aborted or entry.is_passed or entry.barrier is None:
            return []
        metrics = AlignmentMetrics(entry.start_delay_ms, max(0, now_ms - entry.began_ms), entry.bytes_processed)
        return [TriggerSnapshot(entry.barrier, metrics)]

    def _cancel(self, channel: int, checkpoint_id: int, now_ms: int) -> list[BarrierAction]:
        self._require_open(channel, "cancel marker")
        actions: list[BarrierAction] = []
        for lower in [other for other in self._pending if other < checkpoint_id]:
            actions += self._abort(self._pending.pop(lower), AbortReason.CANCELLED)
        entry = self._pending.get(checkpoint_id)
        if entry is not None:
            return [*actions, *self._abort(entry, AbortReason.CANCELLED), *self._arrived(entry, channel, now_ms)]
        if checkpoint_id <= self._newest_id:
            return actions
        why = AbortReason.NOTIFIED if self._aborted.take(checkpoint_id) else AbortReason.CANCELLED
        entry = self._add(PendingBarriers(checkpoint_id, None, set(self._open), now_ms, 0))
        return [*actions, *self._abort(entry, why), *self._arrived(entry, channel, now_ms)]

    def _abort(self, entry: PendingBarriers, why: AbortReason) -> list[BarrierAction]:
        """Report an id dead, once. Its entry stays to be counted out where the caller keeps it."""
        if entry.aborted:
            return []
        entry.aborted = True
        return [AbortCheckpoint(entry.checkpoint_id, why)]

    def _ended(self, channel: int, now_ms: int) -> list[BarrierAction]:
        self._require_open(channel, "end of partition")
        self._open.discard(channel)
        actions: list[BarrierAction] = []
        if not self._after_finish:
            for entry in self._pending.values():
                actions += self._abort(entry, AbortReason.END_OF_INPUT)
            self._pending.clear()
            return actions
        # Newest first: the newest id that becomes complete triggers and drops the lower ones (E09).
        for entry in reversed(list(self._pending.values())):
            if entry.checkpoint_id in self._pending:
                actions += self._arrived(entry, channel, now_ms)
        return actions

    def _notified(self, checkpoint_id: int) -> list[BarrierAction]:
        entry = self._pending.get(checkpoint_id)
        if entry is not None:
            return self._abort(entry, AbortReason.NOTIFIED)
        if checkpoint_id > self._newest_id:
            self._aborted.remember(checkpoint_id)
        return []

    def _align(self, event: BarrierEvent) -> list[BarrierAction]:
        """Let go of channels whose snapshot is taken or can't come any more, and hold the one that has brought its barrier."""
        if isinstance(event, BarrierReceived):
            self._reach(event.channel, event.barrier.checkpoint_id)
        elif isinstance(event, CancelReceived):
            self._reach(event.channel, event.checkpoint_id)
        released = tuple(channel for channel, awaited in sorted(self._waiting.items()) if not self._can_come(awaited))
        for channel in released:
            self._pass(self._waiting.pop(channel))
        actions: list[BarrierAction] = [UnblockChannels(released)] if released else []
        if isinstance(event, BarrierReceived) and event.channel in self._aligned:
            if self._can_come(event.barrier.checkpoint_id):
                self._waiting[event.channel] = event.barrier.checkpoint_id
                actions.append(BlockChannel(event.channel))
            else:
                self._pass(event.barrier.checkpoint_id)
        return actions

    def _reach(self, channel: int, checkpoint_id: int) -> None:
        """A channel has come to an id. One that is to stay aligned has passed the lower ones that it skipped."""
        self._reached[channel] = max(checkpoint_id, self._reached.get(channel, 0))
        if channel in self._aligned:
            for entry in self._pending.values():
                if entry.checkpoint_id < checkpoint_id and channel in entry.awaited:
                    entry.is_passed = True

    def _pass(self, checkpoint_id: int) -> None:
        """An aligned channel goes on behind its barrier. If the channel that skipped the id ends, its barrier counts as come."""
        entry = self._pending.get(checkpoint_id)
        if entry is not None:
            entry.is_passed = True

    def _can_come(self, checkpoint_id: int) -> bool:
        """Whether every barrier that is awaited may still come: none of their channels has gone on to a higher id."""
        entry = self._pending.get(checkpoint_id)
        if entry is None or entry.aborted or entry.is_passed:
            return False
        return all(self._reached.get(channel, 0) <= checkpoint_id for channel in entry.awaited)

    def _require_open(self, channel: int, what: str) -> None:
        if channel not in self._open:
            raise ProtocolError(f"{what} on channel {channel}, which has ended or does not exist", channel=channel)
