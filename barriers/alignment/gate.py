"""CORE: the input side of one subtask: a queue per channel, read in arrival order around blocked channels.

It performs what the barrier handler decides and hands the rest to the subtask, one output per poll.

A batch that the subtask takes in slices: the gate hands out whole batches, and *is polled again only when the remainder of
the last one is empty*. That keeps the cut exact and costs nothing. A snapshot triggers when every channel's barrier has
been read; the barrier of the remainder's channel lies behind the batch in the same queue, so it can't have been read, and
reading a barrier of another channel early could only block that channel sooner, never trigger. Mails (abort notices) may come
between slices: they never trigger a snapshot either.

A barrier that may overtake is known from the moment it is offered, and is served with a remainder in hand, too: the remainder is
then in flight, and its keeper adds it. The worker asks `next_urgent` before each slice and takes what follows with `take_urgent`:

    TriggerSnapshot(overtakes=True)     now; nothing is blocked, what waits in front of the barrier is collected
    InFlightCollected                   the barrier has come on every channel: what was collected
    AbortCheckpoint                     instead of it; what was collected is dropped

Collected elements are references: batches are immutable. They stay in their queues, too, and are processed as ever. The inputs of
one subtask can all be overtaken or none of them (JobEdge.overtakable): a snapshot has one moment for all of them."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, assert_never

import msgspec

from holdfast.barriers.alignment.handler import (
    AbortCheckpoint,
    AbortNotice,
    AlignmentMetrics,
    BarrierAction,
    BarrierEvent,
    BarrierHandler,
    BarrierReceived,
    BatchDelivered,
    BlockChannel,
    CancelReceived,
    ChannelEnded,
    CollectChannels,
    CollectingEnded,
    EndQueued,
    InFlightCollected,
    Overtake,
    TriggerSnapshot,
    UnblockChannels,
)
from holdfast.barriers.alignment.inflight import ELEMENT_BYTES
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
from holdfast.barriers.exchange.credits import CreditAnnouncement, ReceiverCredit
from holdfast.statebackends.errors import InvalidConfigError, ProtocolError

MARKERS_QUEUED_MAX = 16
"""Latency markers that wait on one channel; further ones are dropped, so that they don't fill the queue of a slow channel."""
QUEUED_ELEMENTS_MAX = 100_000
"""Elements queued on one channel. Batches are bounded by credit long before; this bounds events, which need none."""


class Delivered(NamedTuple):
    """A batch or an event for the operator, with the channel it came on. EndOfPartition is delivered too, once per channel."""

    channel: int
    element: Element


BarrierOutput: TypeAlias = TriggerSnapshot | InFlightCollected | AbortCheckpoint
GateOutput: TypeAlias = Delivered | BarrierOutput


def _standing_still() -> float:
    """Of a clock that nobody asks."""
    return 0.0


class _InHand:
    """A batch that was handed out: what of it is still to be processed."""

    __slots__ = ("channel", "rows", "rows_left", "size", "size_left", "takes_credit")

    def __init__(self, channel: int, rows: int, size: int, *, takes_credit: bool) -> None:
        self.channel = channel
        self.takes_credit = takes_credit
        self.rows = self.rows_left = rows
        self.size = self.size_left = size


class _Queued(NamedTuple):
    arrival: int
    element: Element
    size: int
    is_restored: bool = False
    """It came out of a snapshot, and took no credit."""


class _Announced(msgspec.Struct):
    """A barrier that may overtake and has not."""

    barrier: CheckpointBarrier
    due_ms: int | None = None
    """Monotonic; None until the clock was looked at."""


class _Collected(msgspec.Struct):
    """What is in flight for one checkpoint."""

    barrier: CheckpointBarrier
    elements: dict[int, list[Element]]
    awaited: set[int]
    """Channels whose barrier has not been seen: what comes is collected."""
    size: int = 0
    """Bytes of the batches, as their senders counted them."""
    count: int = 0
    """Elements."""

    def add(self, channel: int, element: _InFlight, size: int) -> None:
        """Behind what is collected of the channel. Of a run of watermarks only the last one matters, as in a queue."""
        found = self.elements[channel]
        if isinstance(element, Watermark) and found and isinstance(found[-1], Watermark):
            found[-1] = element
            return
        found.append(element)
        self.size += size
        self.count += 1


_InFlight: TypeAlias = Batch | Watermark | WatermarkStatus


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
        overtakable: bool = False,
    ) -> None:
        """`overtakable`: of the edges that end here."""
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
        self._queued_restored = [0] * handler.channel_count
        """Elements out of a snapshot: however many a channel inherits, they count for no bound."""
        self._blocked: set[int] = set()
        self._ready: list[tuple[int, int]] = []
        """Heap of (arrival, channel): the head of every unblocked, non-empty queue, once."""
        self._outputs: deque[GateOutput] = deque()
        self._arrivals = 0
        self._moved: set[int] = set(range(handler.channel_count))
        """Channels whose credit may be worth an announcement; at first all, to open them."""
        self._closed = False
        self._overtakable = overtakable
        self._announced: dict[int, _Announced] = {}
        """Checkpoint id -> its barrier, from its first frame on."""
        self._arrived: deque[tuple[int, CheckpointBarrier | EndOfPartition]] = deque()
        """Barriers of the checkpoint that is collected, taken out of their queues; and ends that stand for one."""
        self._collected: _Collected | None = None
        self._waiting_ends: set[int] = set()
        """Channels that are collected and whose end was next to be read when the worker last looked."""

    def restore(self, channel: int, elements: Sequence[Element]) -> None:
        """Queue what was in flight in the snapshot, in front of everything new: before the channel is opened."""
        for element in elements:
            size = element.size if isinstance(element, Batch) else 0
            self._arrivals += 1
            self._queued_restored[channel] += 1
            self._enqueue(channel, _Queued(self._arrivals, element, size, is_restored=True))

    def offer(self, channel: int, element: Element, size: int = 0) -> None:
        """An element came on a channel, in the channel's order. `size` in bytes as its sender counted it, 0 for events."""
        if self._closed:
            return
        if self._overtakable and self._is_taken_out(channel, element, size):
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
        if len(queue) - self._queued_restored[channel] >= QUEUED_ELEMENTS_MAX:
            raise ProtocolError(f"more than {QUEUED_ELEMENTS_MAX} elements wait on channel {channel}", channel=channel)
        if self._credits and isinstance(element, Batch):
            self._credits[channel].received(size)
        self._arrivals += 1
        self._enqueue(channel, _Queued(self._arrivals, element, size))

    def _enqueue(self, channel: int, queued: _Queued) -> None:
        queue = self._queues[channel]
        queue.append(queued)
        self._queued_bytes[channel] += queued.size
        if len(queue) == 1 and channel not in self._blocked:
            heapq.heappush(self._ready, (queued.arrival, channel))
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

    # --------------------------------------------------------------------------------------------------- overtaking

    def _is_taken_out(self, channel: int, element: Element, size: int) -> bool:
        """Note what a new element means for a barrier that overtakes. Whether it is one, and is not to be queued."""
        collected = self._collected
        if collected is not None and channel in collected.awaited:
            if isinstance(element, CheckpointBarrier) and element.checkpoint_id == collected.barrier.checkpoint_id:
                self._see(channel, element)
                return True
            if isinstance(element, EndOfPartition) and self._queues[channel]:
                self._see(channel, element)
            elif isinstance(element, _InFlight):
                collected.add(channel, element, size)
        if isinstance(element, CheckpointBarrier) and element.unaligned and element.aligned_timeout_ms is not None:
            known = self._announced.setdefault(element.checkpoint_id, _Announced(element))
            if element.aligned_timeout_ms == 0 and known.barrier.aligned_timeout_ms:  # it has overtaken upstream
                self._announced[element.checkpoint_id] = _Announced(element)
        return False

    def _see(self, channel: int, element: CheckpointBarrier | EndOfPartition) -> None:
        """Nothing behind this belongs to what is collected."""
        assert self._collected is not None
        self._collected.awaited.discard(channel)
        self._arrived.append((channel, element))

    def next_urgent(self, *, now_ms: int, wall_ms: int) -> int | None:
        """Id of a checkpoint of which something is to be done before anything is read; None: there is none."""
        if not self._announced and self._collected is None:
            return None
        self._look_for_ends()
        if self._arrived and self._collected is not None:
            return self._collected.barrier.checkpoint_id
        due = self._due(now_ms, wall_ms)
        return None if due is None else due.checkpoint_id

    def _look_for_ends(self) -> None:
        """An end that would be read next counts where it is read, if that is soon: the second look in vain is late."""
        if self._collected is None:
            return
        heads = {each for each in self._collected.awaited if self._queues[each]}
        heads = {each for each in heads if isinstance(self._queues[each][0].element, EndOfPartition)}
        for channel in sorted(heads & self._waiting_ends):
            self._see(channel, EndOfPartition())
        self._waiting_ends = heads

    def _due(self, now_ms: int, wall_ms: int) -> CheckpointBarrier | None:
        """The first barrier that is old enough."""
        for _, announced in sorted(self._announced.items()):
            if announced.due_ms is None:
                age_ms = max(0, wall_ms - announced.barrier.timestamp_ms)
                announced.due_ms = now_ms + max(0, (announced.barrier.aligned_timeout_ms or 0) - age_ms)
            if announced.due_ms <= now_ms:
                return announced.barrier
        return None

    @property
    def next_overtake_ms(self) -> int | None:
        """Monotonic time at which a barrier, unless it was served before, overtakes; None: none is known to wait."""
        return min((each.due_ms for each in self._announced.values() if each.due_ms is not None), default=None)

    def take_urgent(self, *, now_ms: int, wall_ms: int) -> list[BarrierOutput]:
        """Let one barrier overtake if it is due, and count those that have come; what follows, in order."""
        self._count_arrived(now_ms, wall_ms)
        barrier = self._due(now_ms, wall_ms)
        if barrier is not None:
            del self._announced[barrier.checkpoint_id]
            self._handle(Overtake(barrier), now_ms, wall_ms)
            self._count_arrived(now_ms, wall_ms)
        found: list[BarrierOutput] = []
        while self._outputs and not isinstance(self._outputs[0], Delivered):
            found.append(self._outputs.popleft())  # type: ignore[arg-type]
        return found

    def _count_arrived(self, now_ms: int, wall_ms: int) -> None:
        while self._arrived:
            channel, element = self._arrived.popleft()
            event = BarrierReceived(channel, element) if isinstance(element, CheckpointBarrier) else EndQueued(channel)
            self._handle(event, now_ms, wall_ms)

    def _collect(self, action: CollectChannels) -> None:
        """Refer to what is queued in front of the barrier; a barrier that is queued leaves its queue."""
        self._collected = _Collected(action.barrier, {channel: [] for channel in action.channels}, set(action.channels))
        self._arrived.clear()
        self._waiting_ends.clear()
        for channel in action.channels:
            self._collect_queued(channel, self._collected)

    def _collect_queued(self, channel: int, collected: _Collected) -> None:
        queue = self._queues[channel]
        for place, queued in enumerate(queue):
            element = queued.element
            if isinstance(element, CheckpointBarrier) and element.checkpoint_id == collected.barrier.checkpoint_id:
                del queue[place]
                if place == 0:
                    self._head_changed(channel)
                self._see(channel, element)
                return
            if isinstance(element, EndOfPartition):
                self._see(channel, element)
                return
            if isinstance(element, _InFlight):
                collected.add(channel, element, queued.size)

    def _head_changed(self, channel: int) -> None:
        """Another element is the head of an unblocked channel's queue. Cost: O(channels)."""
        self._ready = [each for each in self._ready if each[1] != channel]
        queue = self._queues[channel]
        if queue and channel not in self._blocked:
            self._ready.append((queue[0].arrival, channel))
        else:
            self._is_unreadable(channel)
        heapq.heapify(self._ready)

    @property
    def in_flight_bytes(self) -> int:
        """What is referred to for the checkpoint that is collected, its events and the heads of its batches included."""
        return 0 if self._collected is None else self._collected.size + ELEMENT_BYTES * self._collected.count

    # ------------------------------------------------------------------------------------------------------- reading

    def poll(self, *, now_ms: int, wall_ms: int | None = None) -> GateOutput | None:
        """The next output, or None when every unblocked channel is empty. To be called only with no remainder in hand.

        `now_ms` is monotonic, `wall_ms` (default: the same) the clock that barriers are stamped with."""
        wall = now_ms if wall_ms is None else wall_ms
        while not self._outputs and self._ready:
            self._read(heapq.heappop(self._ready)[1], now_ms, wall)
        return self._outputs.popleft() if self._outputs else None

    def _read(self, channel: int, now_ms: int, wall_ms: int) -> None:
        queue = self._queues[channel]
        _, element, size, is_restored = queue.popleft()
        self._queued_bytes[channel] -= size
        self._queued_restored[channel] -= is_restored
        match element:
            case Batch():
                if self._credits:
                    self._in_hand.append(_InHand(channel, element.num_rows, size, takes_credit=not is_restored))
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
        if batch.takes_credit:
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
            case CollectChannels():
                self._collect(action)
            case CollectingEnded(checkpoint_id=checkpoint_id, metrics=metrics):
                self._outputs.append(self._take_collected(checkpoint_id, metrics))
            case TriggerSnapshot(barrier=barrier):
                self._announced.pop(barrier.checkpoint_id, None)
                self._outputs.append(action)
            case AbortCheckpoint(checkpoint_id=checkpoint_id):
                self._announced.pop(checkpoint_id, None)
                if self._collected is not None and self._collected.barrier.checkpoint_id == checkpoint_id:
                    self._forget_collected()
                self._outputs.append(action)
            case _:
                assert_never(action)

    def _take_collected(self, checkpoint_id: int, metrics: AlignmentMetrics) -> InFlightCollected:
        collected = self._collected
        assert collected is not None
        assert collected.barrier.checkpoint_id == checkpoint_id
        self._forget_collected()
        channels = tuple((channel, tuple(found)) for channel, found in sorted(collected.elements.items()) if found)
        return InFlightCollected(checkpoint_id, channels, msgspec.structs.replace(metrics, bytes_persisted=collected.size))

    def _forget_collected(self) -> None:
        self._collected = None
        self._arrived.clear()
        self._waiting_ends.clear()

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
        self._announced.clear()
        self._forget_collected()
        self._outputs.clear()
        self._ready.clear()
        self._in_hand.clear()
        self._blocked.clear()
        for channel, queue in enumerate(self._queues):
            queue.clear()
            self._queued_bytes[channel] = self._queued_markers[channel] = self._queued_restored[channel] = 0
