"""CORE: the input side of one subtask: a queue per channel, read in arrival order around blocked channels.

It performs what the barrier handler decides and hands the rest to the subtask, one output per poll.

A batch that the subtask takes in slices: the gate hands out whole batches, and *is polled again only when the remainder of
the last one is empty*. That keeps the cut exact and costs nothing. A snapshot triggers when every channel's barrier has
been read; the barrier of the remainder's channel lies behind the batch in the same queue, so it can't have been read, and
reading a barrier of another channel early could only block that channel sooner, never trigger. Mails (abort notices) may come
between slices: they never trigger a snapshot either."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, assert_never

from holdfast.barriers.alignment import (
    AbortCheckpoint,
    AbortNotice,
    BarrierAction,
    BarrierEvent,
    BarrierHandler,
    BarrierReceived,
    BatchDelivered,
    BlockChannel,
    CancelReceived,
    ChannelEnded,
    TriggerSnapshot,
    UnblockChannels,
)
from holdfast.barriers.credits import CreditAnnouncement, ReceiverCredit
from holdfast.barriers.elements import (
    Batch,
    CancelMarker,
    CheckpointBarrier,
    Element,
    EndOfData,
    EndOfPartition,
    LatencyMarker,
    Watermark,
    WatermarkStatus,
)
from holdfast.statebackends.errors import InvalidConfigError, ProtocolError

MARKERS_QUEUED_MAX = 16
"""Latency markers that wait on one channel; further ones are dropped, so that they don't fill the queue of a slow channel."""
QUEUED_ELEMENTS_MAX = 100_000
"""Elements queued on one channel. Batches are bounded by credit long before; this bounds events, which need none."""


class Delivered(NamedTuple):
    """A batch or an event for the operator, with the channel it came on. EndOfPartition is delivered too, once per channel."""

    channel: int
    element: Element


GateOutput: TypeAlias = Delivered | TriggerSnapshot | AbortCheckpoint


def _standing_still() -> float:
    """Of a clock that nobody asks."""
    return 0.0


class _InHand:
    """A batch that was handed out: what of it is still to be processed."""

    __slots__ = ("channel", "rows", "rows_left", "size", "size_left")

    def __init__(self, channel: int, rows: int, size: int) -> None:
        self.channel = channel
        self.rows = self.rows_left = rows
        self.size = self.size_left = size


class _Queued(NamedTuple):
    arrival: int
    element: Element
    size: int


class InputGate:
    """Input channels 0..n-1 of one subtask, over all its edges.

    `credits`, one per channel, are fed by what comes and what is processed, and bound the bytes behind blocked channels. `seconds`
    is the clock of their budgets: it tells how long each channel could be read.
    Raises ProtocolError on more than QUEUED_ELEMENTS_MAX elements in a channel."""

    def __init__(
        self,
        handler: BarrierHandler,
        *,
        credits: Sequence[ReceiverCredit] = (),
        seconds: Callable[[], float] = _standing_still,
    ) -> None:
        if credits and len(credits) != handler.channel_count:
            raise InvalidConfigError(f"{handler.channel_count} channels need as many credits, got {len(credits)}")
        self._handler = handler
        self._credits = credits
        self._seconds = seconds
        self._in_hand: deque[_InHand] = deque()
        """Handed out and not processed, the oldest first; the caller asks for the next when there is none, or few."""
        self._queues: list[deque[_Queued]] = [deque() for _ in range(handler.channel_count)]
        self._queued_bytes = [0] * handler.channel_count
        self._queued_markers = [0] * handler.channel_count
        self._blocked: set[int] = set()
        self._ready: list[tuple[int, int]] = []
        """Heap of (arrival, channel): the head of every unblocked, non-empty queue, once."""
        self._outputs: deque[GateOutput] = deque()
        self._arrivals = 0
        self._moved: set[int] = set(range(handler.channel_count))
        """Channels whose credit may be worth an announcement; at first all, to open them."""
        self._closed = False

    def offer(self, channel: int, element: Element, size: int = 0) -> None:
        """An element came on a channel, in the channel's order. `size` in bytes as its sender counted it, 0 for events."""
        if self._closed:
            return
        queue = self._queues[channel]
        if isinstance(element, Watermark) and queue and isinstance(queue[-1].element, Watermark):
            # Only the last of a run of watermarks matters, and a blocked channel must not grow by the others.
            queue[-1] = queue[-1]._replace(element=element)
            return
        if isinstance(element, LatencyMarker):
            if self._queued_markers[channel] >= MARKERS_QUEUED_MAX:
                return
            self._queued_markers[channel] += 1
        if len(queue) >= QUEUED_ELEMENTS_MAX:
            raise ProtocolError(f"more than {QUEUED_ELEMENTS_MAX} elements wait on channel {channel}", channel=channel)
        if self._credits and isinstance(element, Batch):
            self._credits[channel].received(size)
        self._arrivals += 1
        queue.append(_Queued(self._arrivals, element, size))
        self._queued_bytes[channel] += size
        if len(queue) == 1 and channel not in self._blocked:
            heapq.heappush(self._ready, (self._arrivals, channel))
            self._is_readable(channel)

    def _is_readable(self, channel: int) -> None:
        budget = self._credits[channel].budget if self._credits else None
        if budget is not None:
            budget.readable(self._seconds())

    def _is_unreadable(self, channel: int) -> None:
        """Empty or blocked."""
        budget = self._credits[channel].budget if self._credits else None
        if budget is not None:
            budget.unreadable(self._seconds())

    def poll(self, *, now_ms: int, wall_ms: int | None = None) -> GateOutput | None:
        """The next output, or None when every unblocked channel is empty. To be called only with no remainder in hand.

        `now_ms` is monotonic, `wall_ms` (default: the same) the clock that barriers are stamped with."""
        wall = now_ms if wall_ms is None else wall_ms
        while not self._outputs and self._ready:
            self._read(heapq.heappop(self._ready)[1], now_ms, wall)
        return self._outputs.popleft() if self._outputs else None

    def _read(self, channel: int, now_ms: int, wall_ms: int) -> None:
        queue = self._queues[channel]
        _, element, size = queue.popleft()
        self._queued_bytes[channel] -= size
        match element:
            case Batch():
                if self._credits:
                    self._in_hand.append(_InHand(channel, element.num_rows, size))
                self._handle(BatchDelivered(size), now_ms, wall_ms)
                self._outputs.append(Delivered(channel, element))
            case CheckpointBarrier():
                self._handle(BarrierReceived(channel, element), now_ms, wall_ms)
            case CancelMarker():
                self._handle(CancelReceived(channel, element.checkpoint_id), now_ms, wall_ms)
            case EndOfPartition():
                self._outputs.append(Delivered(channel, element))
                self._handle(ChannelEnded(channel), now_ms, wall_ms)
            case LatencyMarker():
                self._queued_markers[channel] -= 1
                self._outputs.append(Delivered(channel, element))
            case Watermark() | WatermarkStatus() | EndOfData():
                self._outputs.append(Delivered(channel, element))
            case _:
                assert_never(element)
        # A handler only ever releases *other* channels than the one being read, so this can't enter the heap twice.
        if queue and channel not in self._blocked:
            heapq.heappush(self._ready, (queue[0].arrival, channel))
        elif not queue and not isinstance(element, Batch):
            self._is_unreadable(channel)

    def processed(self, rows: int, *, rows_min: int = 0) -> None:
        """So many rows more of the oldest batch that was handed out and not processed yet: their credit goes back.

        `rows_min`: with fewer of them a slice would hardly take less time; 0: not known."""
        if not self._in_hand:
            return
        batch = self._in_hand[0]
        channel = batch.channel
        batch.rows_left -= rows
        if batch.rows_left > 0:
            size = min(batch.size_left, batch.size * rows // batch.rows)
            batch.size_left -= size
        else:
            self._in_hand.popleft()
            size = batch.size_left
        now_s = self._seconds()
        credit = self._credits[channel]
        unit_bytes = batch.size * rows_min // max(1, batch.rows) if rows_min else 0
        credit.consumed(size, batches=int(batch.rows_left <= 0), now_s=now_s, unit_bytes=unit_bytes)
        self._moved.add(channel)
        if batch.rows_left <= 0 and credit.budget is not None and not self._queues[channel]:
            credit.budget.unreadable(now_s)

    @property
    def credits(self) -> Sequence[ReceiverCredit]:
        """Of each channel what it was granted, what it holds, and how long that takes; empty where nothing bounds it."""
        return self._credits

    def _handle(self, event: BarrierEvent, now_ms: int, wall_ms: int) -> None:
        for action in self._handler.handle(event, now_ms=now_ms, wall_ms=wall_ms):
            self._perform(action)

    def _perform(self, action: BarrierAction) -> None:
        match action:
            case BlockChannel(channel=channel):
                self._blocked.add(channel)
                self._is_unreadable(channel)
            case UnblockChannels(channels=channels):
                for channel in channels:
                    self._blocked.discard(channel)
                    if self._queues[channel]:
                        heapq.heappush(self._ready, (self._queues[channel][0].arrival, channel))
                        self._is_readable(channel)
            case TriggerSnapshot() | AbortCheckpoint():
                self._outputs.append(action)
            case _:
                assert_never(action)

    def notify_aborted(self, checkpoint_id: int, *, now_ms: int) -> None:
        """The coordinator aborted an id; what follows from it comes out of the next polls."""
        self._handle(AbortNotice(checkpoint_id), now_ms, now_ms)

    @property
    def has_input(self) -> bool:
        """True if a poll may return something; what lies behind blocked channels does not count."""
        return bool(self._outputs or self._ready)

    @property
    def queued_bytes(self) -> int:
        """Bytes in all queues."""
        return sum(self._queued_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes waiting behind blocked channels."""
        return sum(self._queued_bytes[channel] for channel in self._blocked)

    @property
    def blocked(self) -> frozenset[int]:
        return frozenset(self._blocked)

    @property
    def pending(self) -> tuple[int, ...]:
        """Checkpoint ids with a barrier seen and others awaited."""
        return self._handler.pending

    def held(self) -> Iterator[Delivered]:
        """What waits behind blocked channels, in arrival order; for tests and for a checkpoint's story."""
        waiting = [(queued.arrival, channel, queued.element) for channel in self._blocked for queued in self._queues[channel]]
        for _, channel, element in sorted(waiting, key=lambda item: item[0]):
            yield Delivered(channel, element)

    def take_announcements(self) -> list[tuple[int, CreditAnnouncement]]:
        """Credit to announce now, by channel. The first call opens every channel; the worker calls it after each step."""
        if not self._credits or not self._moved:
            return []
        announcements = []
        for channel in sorted(self._moved):
            announcement = self._credits[channel].take_announcement()
            if announcement is not None:
                announcements.append((channel, announcement))
        self._moved.clear()
        return announcements

    def request_splits(self, total: int) -> None:
        """The reader behind the gate has asked each of its enumerators, of which there is one, for so many splits so far."""
        for channel, credit in enumerate(self._credits):
            if credit.request_splits(total):
                self._moved.add(channel)

    def repeat_requests(self) -> None:
        """Ask for the same splits once more."""
        for channel, credit in enumerate(self._credits):
            if credit.repeat_request():
                self._moved.add(channel)

    def close(self) -> None:
        """Drop everything held; nothing is delivered or reported any more. Idempotent."""
        self._closed = True
        self._outputs.clear()
        self._ready.clear()
        self._in_hand.clear()
        self._blocked.clear()
        for channel, queue in enumerate(self._queues):
            queue.clear()
            self._queued_bytes[channel] = self._queued_markers[channel] = 0
