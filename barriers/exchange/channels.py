"""CORE: both ends of a channel, and a subtask's output over all channels of one edge.

It decides which elements may be sent now, in which order, and whether a received frame is the next of its channel. The transport
moves the bytes.

What may wait here is what the receiver grants: of all that its time allows for, half lies at either end. A frame has at most a
quarter of that, so that credit comes and goes in parts, and always one row."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

import msgspec

from holdfast.barriers.elements import Batch, CheckpointBarrier, Element, ElementEvent, LatencyMarker, Watermark, WatermarkStatus
from holdfast.barriers.exchange.coalesce import Coalescer
from holdfast.barriers.exchange.credits import CreditAnnouncement, SenderCredit
from holdfast.barriers.exchange.frames import AnyFrame, ChannelId, EncodedFrame, Frame, FrameDecoder, FrameKind, LastSequence
from holdfast.barriers.exchange.partition import Combiner, Partitioner
from holdfast.barriers.jobgraph import JobConfig
from holdfast.statebackends.errors import InvariantError, ProtocolError

FRAME_FRACTION = 4
"""A frame has at most this fraction of the receiver's allocation, unless it is a single row."""
ROOM_BYTES_MAX = 2**62
"""Room of an output without channels that could be full."""
HIGH_WATER_ELEMENTS = 1_000
"""Elements waiting on one output channel, above which no further step is started: the bound of events, which have no size."""


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """Limits of an output; sizes in bytes, per channel."""

    batch_rows_max: int = 65_536
    buffer_timeout_ms: int = 10
    high_water_bytes: int = 4 * 1024 * 1024
    """What may wait before the receiver has announced how much it grants, which holds from then on."""
    high_water_elements: int = HIGH_WATER_ELEMENTS

    @staticmethod
    def of(config: JobConfig) -> OutputSettings:
        """A channel may keep as much waiting as its receiver grants it in flight."""
        start_bytes = config.credit_bytes_start if config.buffer_debloat else config.channel_credit_bytes
        return OutputSettings(config.batch_rows_max, config.buffer_timeout_ms, start_bytes)


class OutputChannel:
    """The producer's end: a queue of batches and events in order, numbered as they leave, batches only with credit."""

    __slots__ = (
        "_attempt", "_coalescer", "_credit", "_frame_bytes_max", "_queue", "_queued_bytes", "_sequence", "_timeout_ms", "channel",
        "mark_bytes", "queued_barriers",
    )  # fmt: skip

    def __init__(self, channel: ChannelId, *, attempt: int, settings: OutputSettings) -> None:
        self.channel = channel
        self._attempt = attempt
        self._coalescer = Coalescer(settings.batch_rows_max)
        self._timeout_ms = settings.buffer_timeout_ms
        self._credit = SenderCredit()
        self._queue: deque[tuple[Element, int]] = deque()
        self._queued_bytes = 0
        self._sequence = 0
        self.queued_barriers: set[int] = set()
        """Ids of the barriers that wait here."""
        self._allow(settings.high_water_bytes)

    def _allow(self, allocated_bytes: int) -> None:
        self.mark_bytes = allocated_bytes
        """How much may wait here before its producer does."""
        self._frame_bytes_max = max(1, allocated_bytes // FRAME_FRACTION)

    def add(self, batch: Batch, *, now_ms: int) -> None:
        """Queue a batch; a small one waits to be merged with the next, if both fit into a frame."""
        coalescer = self._coalescer
        if coalescer.size and coalescer.size + batch.size > self._frame_bytes_max:
            self.flush()
        for ready in coalescer.add(batch, now_ms=now_ms):
            self._push(ready)
        if coalescer.size >= self._frame_bytes_max:
            self.flush()

    def add_event(self, event: ElementEvent) -> None:
        """Queue an event behind everything added before. A watermark replaces one that still waits right in front of it."""
        self.flush()
        if isinstance(event, Watermark) and self._queue and isinstance(self._queue[-1][0], Watermark):
            self._queue.pop()
        self._queue.append((event, 0))
        if isinstance(event, CheckpointBarrier):
            self.queued_barriers.add(event.checkpoint_id)

    def overtake(self, checkpoint_id: int) -> tuple[Element, ...]:
        """Move the barrier of an id to the front, if it is queued; what it has overtaken that a snapshot stores, in order."""
        if checkpoint_id not in self.queued_barriers:
            return ()
        place = next(at for at, (each, _) in enumerate(self._queue) if _is_barrier(each, checkpoint_id))
        overtaken = [each for each, _ in islice(self._queue, place) if isinstance(each, Batch | Watermark | WatermarkStatus)]
        barrier = cast(CheckpointBarrier, self._queue[place][0])
        del self._queue[place]
        # Those behind know by it that it has overtaken, and do not wait for its age.
        self._queue.appendleft((msgspec.structs.replace(barrier, aligned_timeout_ms=0), 0))
        return tuple(overtaken)

    def flush(self) -> None:
        """Stop waiting for more small batches."""
        for ready in self._coalescer.flush():
            self._push(ready)

    def _push(self, batch: Batch) -> None:
        size = batch.size
        self._queue.append((batch, size))
        self._queued_bytes += size

    @property
    def flush_due_ms(self) -> int | None:
        """When collected small batches have waited long enough."""
        since = self._coalescer.since_ms
        return None if since is None else since + self._timeout_ms

    @property
    def pending_bytes(self) -> int:
        """Waiting here, in the queue or to be merged."""
        return self._queued_bytes + self._coalescer.size

    @property
    def pending_count(self) -> int:
        return len(self._queue)

    @property
    def overshoot_bytes(self) -> int:
        """What waits here above the mark: the last step's output was larger than its room, or the mark has sunk."""
        return max(0, self.pending_bytes - self.mark_bytes)

    @property
    def is_drained(self) -> bool:
        """True when nothing waits here."""
        return not self._queue and self._coalescer.since_ms is None

    @property
    def is_leaving(self) -> bool:
        """The next of what waits here leaves as soon as frames are taken."""
        if not self._queue or not self._credit.is_open:
            return False
        element, size = self._queue[0]
        if not isinstance(element, Batch):
            return True
        is_cut = size > self._frame_bytes_max and element.num_rows > 1
        return self._credit.can_send(self._frame_bytes_max if is_cut else size)

    def announced(self, announcement: CreditAnnouncement) -> None:
        """Take an announcement of the receiver. Raises ProtocolError on an impossible count."""
        self._credit.announced(announcement)
        allocated_bytes = self._credit.allocated_bytes
        if allocated_bytes is not None and allocated_bytes != self.mark_bytes:
            self._allow(allocated_bytes)

    @property
    def splits_requested(self) -> int:
        """Splits that the receiver has asked for since the attempt began."""
        return self._credit.splits_requested

    def take_frames(self) -> list[Frame]:
        """All that may leave now, in order."""
        frames: list[Frame] = []
        queue, credit = self._queue, self._credit
        if not credit.is_open:
            return frames
        while queue:
            element, size = queue[0]
            if isinstance(element, Batch):
                if size > self._frame_bytes_max and element.num_rows > 1:
                    if not credit.can_send(self._frame_bytes_max):
                        break
                    element, size = self._cut()
                if not credit.can_send(size):
                    break
                credit.sent(size)
                self._queued_bytes -= size
            elif isinstance(element, CheckpointBarrier):
                self.queued_barriers.discard(element.checkpoint_id)
            queue.popleft()
            self._sequence += 1
            frames.append(Frame(self._attempt, self.channel, self._sequence, element, size))
        return frames

    def _cut(self) -> tuple[Batch, int]:
        """As many rows of the first batch as fit into a frame, and at least one, as a batch of their own in front of the rest.

        Rows are of about one size; where they are not, those that don't fit are fewer with each attempt."""
        whole, size = cast("tuple[Batch, int]", self._queue.popleft())
        count = total = whole.num_rows
        part, part_bytes = whole, size
        while part_bytes > self._frame_bytes_max and count > 1:
            count = max(1, min(count - 1, count * self._frame_bytes_max // part_bytes))
            part = whole.slice(0, count)
            part_bytes = part.size
        rest_bytes = max(1, size - part_bytes)
        self._queue.appendleft((whole.slice(count, total - count), rest_bytes))
        self._queue.appendleft((part, part_bytes))
        self._queued_bytes += part_bytes + rest_bytes - size
        return part, part_bytes

    def last_sequence(self) -> Frame | None:
        """What the receiver should have seen by now; None before the channel is open."""
        if not self._credit.is_open:
            return None
        return Frame(self._attempt, self.channel, 0, LastSequence(self._sequence))


class InputChannel:
    """The consumer's end: takes frames of its attempt in their order and refuses gaps and repeats.

    A frame of another process is decoded here, once it is known to be the next one."""

    __slots__ = ("_attempt", "_decoder", "_received", "channel")

    def __init__(self, channel: ChannelId, *, attempt: int) -> None:
        self.channel = channel
        self._attempt = attempt
        self._decoder = FrameDecoder()
        self._received = 0

    def accept(self, frame: AnyFrame) -> Element | None:
        """The element of a frame that is due; None for one of another attempt and for a last-sequence frame that agrees.

        Raises ProtocolError, which fails the attempt, on a gap, a repeat, a peer that has sent more than came, or a payload
        that can't be decoded; InvalidRowError, which fails the subtask, for rows that can't be made anew: they are lost to it."""
        if frame.attempt != self._attempt:
            return None
        if _is_last_sequence(frame):
            payload = self._decoded(frame).payload
            if isinstance(payload, LastSequence) and payload.sequence > self._received:
                raise self._out_of_turn("the peer has sent frames that did not come", payload.sequence)
            return None
        if frame.to_producer:
            raise InvariantError(f"credit for {tuple(self.channel)} was routed to its receiver")
        if frame.sequence != self._received + 1:
            what = "a gap" if frame.sequence > self._received else "a repeat"
            raise self._out_of_turn(what, frame.sequence)
        self._received += 1
        return cast(Element, self._decoded(frame).payload)

    def _decoded(self, frame: AnyFrame) -> Frame:
        return self._decoder.decode(frame) if isinstance(frame, EncodedFrame) else frame

    def announcement(self, announcement: CreditAnnouncement) -> Frame:
        """Credit of this channel as a frame for its producer."""
        return Frame(self._attempt, self.channel, 0, announcement)

    def _out_of_turn(self, what: str, got: int) -> ProtocolError:
        edge, producer, consumer = self.channel
        message = f"edge {edge}, subtask {producer} to {consumer}: {what}: frame {got} after {self._received}"
        return ProtocolError(message, channel=tuple(self.channel), expected=self._received + 1, got=got)


def _is_barrier(element: Element, checkpoint_id: int) -> bool:
    return isinstance(element, CheckpointBarrier) and element.checkpoint_id == checkpoint_id


def _is_last_sequence(frame: AnyFrame) -> bool:
    if isinstance(frame, EncodedFrame):
        return frame.kind is FrameKind.LAST_SEQUENCE
    return isinstance(frame.payload, LastSequence)


class OutputGate:
    """One subtask's output over one edge: partitions batches, repeats events on every channel, queues what has no credit.

    `consumers` are the target's subtasks, in the partitioner's channel order (for a forward edge just the producer's own index)."""

    def __init__(
        self,
        *,
        attempt: int,
        edge_id: int,
        producer: int,
        consumers: Sequence[int],
        partitioner: Partitioner,
        settings: OutputSettings,
        combiner: Combiner | None = None,
        columns: Sequence[str] | None = None,
        overtakable: bool = False,
    ) -> None:
        """`columns`: those that the consumers read; None: all."""
        self.edge_id = edge_id
        self.producer = producer
        self._partitioner = partitioner
        self._combiner = combiner
        self._columns = columns
        self._settings = settings
        self._channels = [
            OutputChannel(ChannelId(edge_id, producer, consumer), attempt=attempt, settings=settings) for consumer in consumers
        ]
        self._by_consumer = {channel.channel.consumer: channel for channel in self._channels}
        self._overtakable = overtakable
        self._aging: tuple[int, int] | None = None
        """(id, when it overtakes) of a barrier that may still be queued."""
        self._overtaken: tuple[int, tuple[tuple[int, tuple[Element, ...]], ...]] | None = None
        """(id, by consumer what its barrier overtook)."""
        self._markers = 0
        self.records_out = 0
        self.bytes_out = 0
        self.dealt_bytes_max = 0
        """Bytes that one channel got, at most, since the attempt began: of each batch the largest part is counted."""

    def emit(self, batch: Batch, *, now_ms: int) -> None:
        """Partition and queue a batch. Never refuses: one call may overshoot the high-water mark, the next step waits."""
        if self._columns is not None:
            batch = batch.select(self._columns)
        if self._combiner is None:
            self._deal(batch, now_ms)
        else:
            self._queue(self._combiner.add(batch, now_ms=now_ms), now_ms)
        self.records_out += batch.num_rows

    def broadcast_event(self, event: ElementEvent) -> None:
        """An event to every channel, behind all that was emitted before."""
        if self._combiner is None:
            self._repeat(event)
        else:
            self._queue(self._combiner.event(event), 0)

    def let_overtake(self, checkpoint_id: int, due_ms: int, *, now_ms: int) -> None:
        """The barrier that was just queued overtakes what is still in front of it at that (monotonic) time. No other one does from
        now on: it is newer than they are."""
        self._aging = None
        self._overtaken = None
        if self._overtakable:
            self._aging = (checkpoint_id, due_ms)
            self.overtake_due(now_ms)

    def overtake_due(self, now_ms: int) -> None:
        """A barrier that is old enough overtakes what waits in front of it, in all channels that it has not left."""
        if self._aging is None or self._aging[1] > now_ms:
            return
        checkpoint_id, self._aging = self._aging[0], None
        found = ((channel.channel.consumer, channel.overtake(checkpoint_id)) for channel in self._channels)
        self._overtaken = (checkpoint_id, tuple(each for each in found if each[1]))

    @property
    def next_overtake_ms(self) -> int | None:
        """When `overtake_due` may have something to do next."""
        return None if self._aging is None else self._aging[1]

    def overtaken(self, checkpoint_id: int) -> tuple[tuple[int, tuple[Element, ...]], ...] | None:
        """What the barrier has overtaken, by consumer, in order. None: it is queued and may yet overtake."""
        if self._aging is not None and self._aging[0] == checkpoint_id:
            for channel in self._channels:
                if checkpoint_id in channel.queued_barriers:
                    return None
            self._aging = None
        if self._overtaken is None or self._overtaken[0] != checkpoint_id:
            return ()
        return self._overtaken[1]

    def forget(self, checkpoint_id: int) -> None:
        """The barrier overtakes nothing any more, and what it has overtaken is not asked for again."""
        if self._aging is not None and self._aging[0] == checkpoint_id:
            self._aging = None
        if self._overtaken is not None and self._overtaken[0] == checkpoint_id:
            self._overtaken = None

    def _deal(self, batch: Batch, now_ms: int) -> None:
        largest = 0
        for index, part in self._partitioner.split(batch):
            self._channels[index].add(part, now_ms=now_ms)
            size = part.size
            if size > largest:
                largest = size
        self.dealt_bytes_max += largest

    def _repeat(self, event: ElementEvent) -> None:
        for channel in self._channels:
            channel.add_event(event)

    def _queue(self, elements: Sequence[Element], now_ms: int) -> None:
        """What a combiner lets go."""
        for element in elements:
            if isinstance(element, Batch):
                self._deal(element, now_ms)
            else:
                self._repeat(element)

    def forward_marker(self, marker: LatencyMarker) -> None:
        """A marker to one channel, each in turn, behind all that was emitted to it before.

        To all of them each exchange would multiply it by the parallelism. Source: Flink, RecordWriter.randomEmit."""
        if self._combiner is not None:
            self._queue(self._combiner.flush(), 0)
        self._channels[self._markers % len(self._channels)].add_event(marker)
        self._markers += 1

    def announced(self, frame: AnyFrame) -> int:
        """A credit frame came for one of the channels; the splits that its receiver has asked for. Raises ProtocolError."""
        channel = self._by_consumer.get(frame.channel.consumer)
        if channel is None or not frame.to_producer:
            raise ProtocolError(f"no output channel for {frame.channel}", channel=tuple(frame.channel))
        payload = FrameDecoder().decode(frame).payload if isinstance(frame, EncodedFrame) else frame.payload
        channel.announced(cast(CreditAnnouncement, payload))
        return channel.splits_requested

    @property
    def is_available(self) -> bool:
        """True while every channel is below its high-water marks; a step starts only then."""
        return self.room_bytes > 0

    @property
    def room_bytes(self) -> int:
        """What the fullest channel may get before it is at its mark; 0 where one is, or has too many elements."""
        high_count = self._settings.high_water_elements
        room = ROOM_BYTES_MAX
        for channel in self._channels:
            left = channel.mark_bytes - channel.pending_bytes
            if left < room:
                room = left
            if channel.pending_count >= high_count:
                return 0
        return max(0, room)

    @property
    def overshoot_bytes(self) -> int:
        """What waits above the marks of all channels."""
        return sum(channel.overshoot_bytes for channel in self._channels)

    @property
    def is_drained(self) -> bool:
        """True when everything emitted has left."""
        if self._combiner is not None and self._combiner.since_ms is not None:
            return False
        for channel in self._channels:  # noqa: SIM110 - as above
            if not channel.is_drained:
                return False
        return True

    @property
    def is_leaving(self) -> bool:
        """Something of what waits in the channels leaves as soon as frames are taken."""
        return any(channel.is_leaving for channel in self._channels)

    @property
    def pending_bytes(self) -> int:
        held = 0 if self._combiner is None else self._combiner.size
        return held + sum(channel.pending_bytes for channel in self._channels)

    def flush(self, now_ms: int) -> None:
        """Let small batches go that have waited for the buffer timeout."""
        since_ms = None if self._combiner is None else self._combiner.since_ms
        if since_ms is not None and since_ms + self._settings.buffer_timeout_ms <= now_ms:
            self._release()
        for channel in self._channels:
            due = channel.flush_due_ms
            if due is not None and due <= now_ms:
                channel.flush()

    def flush_all(self) -> None:
        """Let all small batches go: the worker is idle."""
        if self._combiner is not None:
            self._release()
        for channel in self._channels:
            channel.flush()

    def _release(self) -> None:
        """What is combined goes, and does not wait once more to be merged with others."""
        assert self._combiner is not None
        self._queue(self._combiner.flush(), 0)
        for channel in self._channels:
            channel.flush()

    def take_frames(self) -> list[Frame]:
        """All that may leave now, channel by channel, in order within each."""
        frames: list[Frame] = []
        for channel in self._channels:
            if channel.pending_count:
                frames += channel.take_frames()
        for frame in frames:
            self.bytes_out += frame.size
        return frames

    def last_sequences(self) -> list[Frame]:
        """One last-sequence frame per open channel; the worker sends them now and then."""
        return [frame for channel in self._channels if (frame := channel.last_sequence()) is not None]
