"""Both ends of channels: order, credit, merging of small batches, marks, and sequence numbers."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers.elements import Batch, CheckpointBarrier, Element, ElementEvent, EndOfData, Watermark
from holdfast.barriers.exchange.channels import InputChannel, OutputChannel, OutputGate, OutputSettings
from holdfast.barriers.exchange.coalesce import Coalescer
from holdfast.barriers.exchange.credits import CreditAnnouncement
from holdfast.barriers.exchange.frames import ChannelId, EncodedFrame, Frame, FrameEncoder, LastSequence
from holdfast.barriers.exchange.partition import BroadcastPartitioner, ForwardPartitioner, RebalancePartitioner
from holdfast.barriers.jobgraph import JobConfig
from holdfast.statebackends.errors import InvariantError, ProtocolError
from tests.examples import examples

CHANNEL = ChannelId(1, 0, 2)
SETTINGS = OutputSettings(batch_rows_max=100, buffer_timeout_ms=10, high_water_bytes=1000, high_water_elements=8)
PLENTY = CreditAnnouncement(10**9, 10**6, 0, 0)


def rows(count: int, start: int = 0) -> Batch:
    return Batch(rows=list(range(start, start + count)))


def output(announcement: CreditAnnouncement | None = PLENTY) -> OutputChannel:
    channel = OutputChannel(CHANNEL, attempt=3, settings=SETTINGS)
    if announcement is not None:
        channel.announced(announcement)
    return channel


def taken(channel: OutputChannel) -> list[object]:
    return [list(f.payload.rows()) if isinstance(f.payload, Batch) else f.payload for f in channel.take_frames()]


def data_frame(sequence: int, attempt: int = 3) -> Frame:
    return Frame(attempt, CHANNEL, sequence, rows(1), 64)


# --------------------------------------------------------------------------------------------------- the input end


@pytest.mark.parametrize(("sequence", "what"), [(2, "a gap"), (0, "a repeat")])
def test_a_frame_out_of_turn_is_a_protocol_error(sequence: int, what: str) -> None:
    with pytest.raises(ProtocolError, match=what) as caught:
        InputChannel(CHANNEL, attempt=3).accept(data_frame(sequence))
    assert (caught.value.channel, caught.value.expected, caught.value.got) == ((1, 0, 2), 1, sequence)


def test_a_repeated_frame_is_a_protocol_error() -> None:
    channel = InputChannel(CHANNEL, attempt=3)
    assert channel.accept(data_frame(1)) is not None
    with pytest.raises(ProtocolError, match="a repeat"):
        channel.accept(data_frame(1))


def test_a_peer_ahead_of_us_means_a_lost_frame() -> None:
    channel = InputChannel(CHANNEL, attempt=3)
    assert channel.accept(Frame(3, CHANNEL, 0, LastSequence(0))) is None
    channel.accept(data_frame(1))
    assert channel.accept(Frame(3, CHANNEL, 0, LastSequence(1))) is None
    with pytest.raises(ProtocolError, match="did not come"):
        channel.accept(Frame(3, CHANNEL, 0, LastSequence(2)))


def test_frames_of_another_attempt_are_dropped() -> None:
    channel = InputChannel(CHANNEL, attempt=3)
    assert channel.accept(data_frame(9, attempt=2)) is None
    assert channel.accept(data_frame(9, attempt=4)) is None
    assert channel.accept(data_frame(1)) is not None


def test_credit_never_reaches_the_receiver() -> None:
    channel = InputChannel(CHANNEL, attempt=3)
    frame = channel.announcement(PLENTY)
    assert (frame.to_producer, frame.target_slot) == (True, 0)
    with pytest.raises(InvariantError):
        channel.accept(frame)


# -------------------------------------------------------------------------------------------------- the output end


def test_nothing_leaves_before_the_receiver_has_spoken() -> None:
    channel = output(None)
    channel.add(rows(50), now_ms=0)
    channel.add_event(EndOfData())
    assert channel.take_frames() == []
    assert channel.last_sequence() is None
    channel.announced(PLENTY)
    assert taken(channel) == [list(range(50)), EndOfData()]
    assert channel.last_sequence() == Frame(3, CHANNEL, 0, LastSequence(2))


def test_events_keep_their_place_behind_batches_without_credit() -> None:
    channel = output(CreditAnnouncement(64 * 50, 1, 0, 0))
    barrier = CheckpointBarrier(1, 0)
    for start in (0, 10):
        channel.add(rows(10, start), now_ms=0)
    channel.add_event(barrier)
    channel.add(rows(1, 20), now_ms=0)
    channel.flush()
    assert taken(channel) == [list(range(10))]
    channel.announced(CreditAnnouncement(64 * 50, 1, 64 * 10, 1))
    assert taken(channel) == [list(range(10, 20)), barrier]
    assert not channel.is_drained
    channel.announced(CreditAnnouncement(64 * 50, 1, 64 * 20, 2))
    assert taken(channel) == [[20]]
    assert channel.is_drained
    assert channel.pending_bytes == 0


def sized(*bytes_of_rows: int) -> Batch:
    """Columns, of about so many bytes a row."""
    return Batch(columns=pa.record_batch({"x": pa.array(["x" * size for size in bytes_of_rows])}))


def test_a_frame_is_cut_to_a_quarter_of_the_allocation_and_shares_the_columns() -> None:
    channel = output(CreditAnnouncement(640, 100, 0, 0))
    batch = Batch(columns=pa.record_batch({"x": pa.array(range(100), pa.int64())}))
    channel.add(batch, now_ms=0)
    frames = channel.take_frames()
    parts = [frame.payload for frame in frames if isinstance(frame.payload, Batch)]
    assert [(part.num_rows, frame.size) for part, frame in zip(parts, frames, strict=True)] == [(20, 160)] * 4
    addresses = [part.columns().column(0).buffers()[1].address for part in parts]
    assert addresses == [batch.columns().column(0).buffers()[1].address] * 4, "no copy"
    assert channel.pending_bytes == 160
    channel.announced(CreditAnnouncement(320, 100, 640, 4))
    assert [frame.size for frame in channel.take_frames()] == [80, 80], "the allocation as announced last"
    assert channel.is_drained


@given(
    sizes=st.lists(st.integers(0, 3_000), min_size=1, max_size=40),
    allocations=st.lists(st.integers(1, 5_000), min_size=1, max_size=8),
)
def test_no_frame_is_above_a_quarter_unless_it_is_one_row(sizes: list[int], allocations: list[int]) -> None:
    channel = output(CreditAnnouncement(allocations[0], 10, 0, 0))
    channel.add(sized(*sizes), now_ms=0)
    channel.flush()
    sent_bytes = sent_batches = 0
    read: list[int] = []
    while not channel.is_drained:
        allocation = allocations[sent_batches % len(allocations)]
        channel.announced(CreditAnnouncement(allocation, 10, sent_bytes, sent_batches))
        frames = channel.take_frames()
        assert frames, "nothing is in flight, so something may go"
        for frame in frames:
            assert isinstance(frame.payload, Batch)
            read += [len(row["x"]) for row in frame.payload.rows()]
            sent_bytes, sent_batches = sent_bytes + frame.size, sent_batches + 1
            assert frame.payload.num_rows == 1 or frame.size <= allocation // 4
    assert read == sizes
    assert channel.pending_bytes == 0


@pytest.mark.parametrize("allocation", range(1, 200, 7))
def test_nothing_is_leaving_once_what_may_leave_has_left(allocation: int) -> None:
    """A row may be larger than a frame: room for a frame is none for it, and an output that ends would wait for ever."""
    channel = output(CreditAnnouncement(allocation, 100, 0, 0))
    channel.add(sized(24, 24, 1, 24, 24), now_ms=0)
    channel.flush()
    channel.take_frames()
    assert not channel.is_leaving


def test_small_batches_wait_for_company_only_while_both_fit_into_a_frame() -> None:
    channel = output(CreditAnnouncement(64 * 40, 100, 0, 0))
    for start in (0, 4, 8):
        channel.add(rows(4, start), now_ms=0)
    assert taken(channel) == [list(range(8))]
    channel.add(rows(10, 12), now_ms=0)
    assert taken(channel) == [list(range(8, 12)), list(range(12, 22))], "a whole frame waits for nobody"


def test_the_mark_is_the_allocation_as_announced() -> None:
    outputs = gate(1, partitioner=ForwardPartitioner())
    assert outputs.room_bytes == 1_000
    outputs.announced(credit(0, CreditAnnouncement(64 * 10, 1, 0, 0)))
    outputs.emit(rows(4), now_ms=0)
    assert (outputs.is_available, outputs.room_bytes, outputs.overshoot_bytes) == (True, 64 * 6, 0)
    outputs.emit(rows(9), now_ms=0)
    assert (outputs.is_available, outputs.room_bytes, outputs.overshoot_bytes) == (False, 0, 64 * 3)
    assert outputs.dealt_bytes_max == 64 * 13
    outputs.announced(credit(0, CreditAnnouncement(64 * 20, 1, 0, 0)))
    assert outputs.room_bytes == 64 * 7


def test_frames_are_numbered_without_gaps() -> None:
    channel, receiver = output(), InputChannel(CHANNEL, attempt=3)
    for number in range(20):
        channel.add(rows(number % 3, number), now_ms=number)
        if number % 4 == 0:
            channel.add_event(EndOfData())
        for frame in channel.take_frames():
            receiver.accept(frame)
    last = channel.last_sequence()
    assert last is not None
    assert receiver.accept(last) is None


def test_a_waiting_watermark_gives_way_to_a_newer_one() -> None:
    channel = output(None)
    for timestamp_ms in range(100):
        channel.add_event(Watermark(timestamp_ms))
    channel.add(rows(1), now_ms=0)
    channel.add_event(Watermark(200))
    channel.announced(PLENTY)
    assert taken(channel) == [Watermark(99), [0], Watermark(200)]


def test_small_batches_wait_for_the_timeout_for_company_or_for_an_event() -> None:
    channel = output()
    channel.add(rows(3), now_ms=5)
    channel.add(rows(2, 3), now_ms=9)
    assert (channel.flush_due_ms, channel.take_frames(), channel.is_drained) == (15, [], False)
    assert channel.pending_bytes == 64 * 5
    channel.flush()
    assert taken(channel) == [[0, 1, 2, 3, 4]]
    assert channel.flush_due_ms is None
    channel.add(rows(3), now_ms=5)
    channel.add_event(EndOfData())
    assert taken(channel) == [[0, 1, 2], EndOfData()]


# ---------------------------------------------------------------------------------------------------------- merging


def test_only_alike_batches_are_merged() -> None:
    coalescer = Coalescer(1000)
    table = Batch(columns=pa.record_batch({"x": [1, 2]}))
    stamped = table.with_timestamps(np.array([5, 6], np.int64))
    other = Batch(columns=pa.record_batch({"y": [1]}))
    ready = []
    for batch in (rows(1), table, table, stamped, stamped, other):
        ready += coalescer.add(batch, now_ms=0)
    ready += coalescer.flush()
    assert [batch.num_rows for batch in ready] == [1, 4, 4, 1]
    assert ready[2].timestamps is not None
    assert ready[2].timestamps.tolist() == [5, 6, 5, 6]
    assert ready[1].columns().column("x").to_pylist() == [1, 2, 1, 2]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 250), st.booleans()), max_size=30))
def test_merging_and_cutting_keeps_every_row_in_order(sizes: list[tuple[int, bool]]) -> None:
    coalescer = Coalescer(100)
    ready, start = [], 0
    for size, columnar in sizes:
        values = list(range(start, start + size))
        start += size
        table = pa.record_batch({"x": pa.array(values, pa.int64())})
        batch = Batch(columns=table) if columnar else Batch(rows=table.to_pylist())
        ready += coalescer.add(batch, now_ms=0)
    ready += coalescer.flush()
    assert [row["x"] for batch in ready for row in batch.rows()] == list(range(start))
    assert all(batch.num_rows <= 100 for batch in ready)
    assert coalescer.flush() == []


# ------------------------------------------------------------------------------------------------------- whole gate


def gate(consumers: int = 2, **kwargs: object) -> OutputGate:
    partitioner = kwargs.pop("partitioner", RebalancePartitioner(consumers))
    return OutputGate(
        attempt=3, edge_id=1, producer=0, consumers=range(consumers), partitioner=partitioner, settings=SETTINGS, **kwargs  # type: ignore[arg-type]
    )


class Holding:
    """Makes one row of all that it holds, and lets a watermark wait with it."""

    def __init__(self) -> None:
        self.since_ms: int | None = None
        self.size = 0
        self._held: list[Element] = []

    def add(self, batch: Batch, *, now_ms: int) -> list[Element]:
        self._held.append(batch.slice(0, 1))
        self.since_ms, self.size = now_ms if self.since_ms is None else self.since_ms, 64
        return []

    def event(self, event: ElementEvent) -> list[Element]:
        if self._held and isinstance(event, Watermark):
            self._held.append(event)
            return []
        return [*self.flush(), event]

    def flush(self) -> list[Element]:
        held, self._held = self._held, []
        self.since_ms, self.size = None, 0
        return held


def test_what_a_combiner_holds_goes_in_front_of_events_when_due_and_when_idle() -> None:
    outputs = gate(1, partitioner=ForwardPartitioner(), combiner=Holding())
    outputs.announced(credit(0))
    outputs.emit(rows(5), now_ms=7)
    outputs.broadcast_event(Watermark(3))
    assert outputs.take_frames() == []
    assert (outputs.is_drained, outputs.pending_bytes, outputs.records_out) == (False, 64, 5)
    outputs.flush(16)
    assert outputs.take_frames() == []
    outputs.flush(17)
    assert [type(frame.payload) for frame in outputs.take_frames()] == [Batch, Watermark]
    assert (outputs.is_drained, outputs.pending_bytes) == (True, 0)
    outputs.emit(rows(5), now_ms=20)
    outputs.flush_all()
    assert [frame.size for frame in outputs.take_frames()] == [64]
    outputs.emit(rows(5), now_ms=20)
    outputs.broadcast_event(CheckpointBarrier(1, 0))
    assert [type(frame.payload) for frame in outputs.take_frames()] == [Batch, CheckpointBarrier]


def credit(consumer: int, announcement: CreditAnnouncement = PLENTY) -> Frame:
    return Frame(3, ChannelId(1, 0, consumer), 0, announcement)


def test_credit_for_an_unknown_channel_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="no output channel"):
        gate().announced(credit(5))
    with pytest.raises(ProtocolError):
        gate().announced(data_frame(1))


def test_events_go_to_every_channel_behind_the_batches() -> None:
    outputs = gate()
    for consumer in range(2):
        outputs.announced(credit(consumer))
    outputs.emit(rows(1), now_ms=0)
    outputs.broadcast_event(EndOfData())
    frames = [(f.channel.consumer, f.sequence, type(f.payload)) for f in outputs.take_frames()]
    assert frames == [(0, 1, Batch), (0, 2, EndOfData), (1, 1, EndOfData)]
    assert outputs.is_drained
    assert (outputs.records_out, outputs.bytes_out) == (1, 64)
    assert [f.payload for f in outputs.last_sequences()] == [LastSequence(2), LastSequence(1)]


def test_one_channel_above_its_mark_makes_the_output_unavailable() -> None:
    outputs = gate()
    outputs.announced(credit(0))
    assert outputs.is_available
    outputs.emit(rows(90), now_ms=0)
    outputs.emit(rows(90), now_ms=0)
    outputs.take_frames()
    assert not outputs.is_available
    assert outputs.pending_bytes == 64 * 90
    outputs.announced(credit(1))
    outputs.take_frames()
    assert outputs.is_available


def test_too_many_events_make_the_output_unavailable() -> None:
    outputs = gate()
    for number in range(8):
        outputs.broadcast_event(CheckpointBarrier(number, 0))
    assert not outputs.is_available


def test_flush_when_due_and_when_idle() -> None:
    outputs = gate(1, partitioner=ForwardPartitioner())
    outputs.announced(credit(0))
    outputs.emit(rows(1), now_ms=7)
    outputs.flush(16)
    assert outputs.take_frames() == []
    outputs.flush(17)
    assert len(outputs.take_frames()) == 1
    outputs.emit(rows(1), now_ms=7)
    outputs.flush_all()
    assert len(outputs.take_frames()) == 1


def test_broadcast_shares_the_batch() -> None:
    outputs = gate(3, partitioner=BroadcastPartitioner(3, producer=0))
    for consumer in range(3):
        outputs.announced(credit(consumer))
    batch = rows(50)
    outputs.emit(batch, now_ms=0)
    assert [frame.payload is batch for frame in outputs.take_frames()] == [False, True, True]
    assert outputs.records_out == 50


@pytest.mark.parametrize("schema", [None, pa.schema([("n", pa.int64())])])
def test_what_a_reader_in_the_process_makes_of_its_rows_is_not_sent_to_others(schema: pa.Schema | None) -> None:
    outputs = gate(2, partitioner=BroadcastPartitioner(2, producer=0))
    outputs.announced(credit(0))
    outputs.emit(Batch(rows=[{"n": number} for number in range(50)], schema=schema), now_ms=0)
    (first,) = outputs.take_frames()
    assert isinstance(first.payload, Batch)
    for row in first.payload.rows():
        row["n"] = -1
    outputs.announced(credit(1))
    (second,) = outputs.take_frames()
    assert isinstance(second.payload, Batch)
    assert [row["n"] for row in second.payload.rows()] == list(range(50))


def test_rows_that_can_not_be_copied_are_left_to_the_sender() -> None:
    outputs = gate(2, partitioner=BroadcastPartitioner(2, producer=0))
    for consumer in range(2):
        outputs.announced(credit(consumer))
    batch = Batch(rows=[threading.Lock()] * 50)
    outputs.emit(batch, now_ms=0)
    assert [frame.payload for frame in outputs.take_frames()] == [batch, batch]


def test_settings_of_a_job() -> None:
    config = JobConfig(batch_rows_max=7, buffer_timeout_ms=3, channel_credit_bytes=99)
    assert OutputSettings.of(config) == OutputSettings(7, 3, 99)
    assert OutputSettings.of(JobConfig()).high_water_bytes == 65_536
    assert OutputSettings.of(JobConfig(buffer_debloat=False)).high_water_bytes == 4 * 1024 * 1024


@dataclass
class Bomb:
    """Makes a folder where it is unpickled."""

    path: str

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("sequence", [0, 2, 10**6, -1])
def test_what_is_not_due_is_refused_unread(tmp_path: Path, sequence: int) -> None:
    frame = Frame(1, ChannelId(0, 0, 0), sequence, Batch(rows=[Bomb(str(tmp_path / "unpickled"))]))
    with pytest.raises(ProtocolError, match="frame"):
        InputChannel(ChannelId(0, 0, 0), attempt=1).accept(EncodedFrame.of(FrameEncoder().encode(frame)))
    assert not (tmp_path / "unpickled").exists()


def test_what_is_due_is_decoded_and_what_cannot_be_fails_the_attempt() -> None:
    channel = InputChannel(ChannelId(0, 0, 0), attempt=1)
    parts = FrameEncoder().encode(Frame(1, ChannelId(0, 0, 0), 1, Batch(rows=["a"])))
    element = channel.accept(EncodedFrame.of(parts))
    assert isinstance(element, Batch)
    assert element.rows() == ["a"]
    parts = FrameEncoder().encode(Frame(1, ChannelId(0, 0, 0), 2, Batch(rows=["a"])))
    with pytest.raises(ProtocolError, match="can't be decoded"):
        channel.accept(EncodedFrame.of([parts[0], b"no pickle"]))
