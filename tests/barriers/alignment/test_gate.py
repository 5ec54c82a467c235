"""The gate: order, what it holds, credit, and closing."""

from __future__ import annotations

import pytest

from holdfast.barriers.alignment import gate as gate_module
from holdfast.barriers.alignment.aligner import Aligner
from holdfast.barriers.alignment.gate import Delivered, GateOutput, InputGate
from holdfast.barriers.alignment.handler import AbortCheckpoint, AbortReason, TriggerSnapshot
from holdfast.barriers.alignment.tracker import BarrierTracker
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
from holdfast.barriers.exchange.debloat import ChannelBudget, DebloatSettings
from holdfast.statebackends.errors import InvalidConfigError, ProtocolError


def batch(*rows: str) -> Batch:
    return Batch(rows=rows)


def barrier(checkpoint_id: int) -> CheckpointBarrier:
    return CheckpointBarrier(checkpoint_id, 0)


def drain(gate: InputGate, now_ms: int = 0) -> list[GateOutput]:
    outputs = []
    while (output := gate.poll(now_ms=now_ms)) is not None:
        outputs.append(output)
    return outputs


def credits_of(count: int, size: int = 100, batches: int = 4) -> list[ReceiverCredit]:
    return [ReceiverCredit(allocated_bytes=size, allocated_batches=batches) for _ in range(count)]


def test_credits_must_match_the_channels() -> None:
    with pytest.raises(InvalidConfigError, match="2 channels"):
        InputGate(Aligner(2), credits=credits_of(1))


def test_a_batch_without_credit_is_a_protocol_error() -> None:
    gate = InputGate(Aligner(1), credits=credits_of(1))
    gate.offer(0, batch("x"), 100)
    with pytest.raises(ProtocolError, match="without credit"):
        gate.offer(0, batch("y"), 1)


def test_one_batch_of_any_size_may_come() -> None:
    gate = InputGate(Aligner(1), credits=credits_of(1))
    gate.offer(0, batch("x"), 10_000)
    assert gate.queued_bytes == 10_000
    assert len(drain(gate)) == 1
    with pytest.raises(ProtocolError, match="without credit"):
        gate.offer(0, batch("y"), 10_000)  # the first one is in hand


def test_the_next_batch_of_any_size_may_come_when_the_one_before_is_processed() -> None:
    gate = InputGate(Aligner(1), credits=credits_of(1))
    gate.offer(0, batch("x"), 10_000)
    assert len(drain(gate)) == 1
    gate.processed(1)
    gate.offer(0, batch("y"), 10_000)


def test_events_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "QUEUED_ELEMENTS_MAX", 3)
    gate = InputGate(Aligner(1))
    for idle in (True, False, True):
        gate.offer(0, WatermarkStatus(idle))
    with pytest.raises(ProtocolError, match="more than 3 elements"):
        gate.offer(0, WatermarkStatus(False))


def test_few_latency_markers_wait_on_a_channel() -> None:
    gate = InputGate(Aligner(2))
    gate.offer(0, barrier(1))
    assert drain(gate) == [], "channel 0 is blocked"
    for marked_ms in range(100):
        gate.offer(0, LatencyMarker(marked_ms, "v", 0))
        gate.offer(1, LatencyMarker(marked_ms, "w", 0))
        assert drain(gate) == [Delivered(1, LatencyMarker(marked_ms, "w", 0))], "a channel that is read loses none"
    held = [Delivered(0, LatencyMarker(marked_ms, "v", 0)) for marked_ms in range(gate_module.MARKERS_QUEUED_MAX)]
    assert list(gate.held()) == held, "the oldest, which have waited longest"
    gate.offer(1, barrier(1))
    assert drain(gate) == [TriggerSnapshot(barrier(1)), *held], "they wait behind the barrier, as records do"
    gate.offer(0, LatencyMarker(7, "v", 0))
    assert drain(gate) == [Delivered(0, LatencyMarker(7, "v", 0))]


def test_nothing_comes_of_nothing() -> None:
    gate = InputGate(Aligner(2))
    assert gate.poll(now_ms=0) is None
    assert not gate.has_input


def test_arrival_order_over_channels() -> None:
    gate = InputGate(Aligner(3))
    elements: list[Element] = [batch("x"), WatermarkStatus(True), batch("y"), EndOfData(), batch("z"), LatencyMarker(1, "v", 2)]
    channels = [2, 0, 0, 1, 2, 1]
    for channel, element in zip(channels, elements, strict=True):
        gate.offer(channel, element)
    assert gate.has_input
    assert drain(gate) == [Delivered(channel, element) for channel, element in zip(channels, elements, strict=True)]


def test_end_of_data_lets_barriers_through_and_end_of_partition_counts_as_one() -> None:
    gate = InputGate(Aligner(2))
    gate.offer(0, EndOfData())
    gate.offer(0, barrier(1))
    gate.offer(0, EndOfPartition())
    gate.offer(1, EndOfData())
    assert drain(gate) == [Delivered(0, EndOfData()), Delivered(1, EndOfData())]
    assert list(gate.held()) == [Delivered(0, EndOfPartition())]
    gate.offer(1, EndOfPartition())
    assert drain(gate) == [Delivered(1, EndOfPartition()), TriggerSnapshot(barrier(1)), Delivered(0, EndOfPartition())]


def test_the_snapshot_comes_before_anything_released_by_it() -> None:
    gate = InputGate(Aligner(2))
    first, second = batch("a1"), batch("b1")
    for channel, element in ((0, barrier(1)), (0, first), (1, barrier(1)), (1, second)):
        gate.offer(channel, element)
    assert drain(gate) == [TriggerSnapshot(barrier(1)), Delivered(0, first), Delivered(1, second)]


def test_a_run_of_watermarks_keeps_the_last() -> None:
    gate = InputGate(Aligner(2))
    gate.offer(0, barrier(1))
    assert drain(gate) == []
    for timestamp_ms in range(1000):
        gate.offer(0, Watermark(timestamp_ms))
    gate.offer(0, batch("a"))
    gate.offer(0, Watermark(2000))
    assert [output.element for output in gate.held()] == [Watermark(999), gate._queues[0][1].element, Watermark(2000)]


def test_held_bytes_are_those_behind_blocked_channels() -> None:
    gate = InputGate(Aligner(2))
    gate.offer(0, barrier(1))
    gate.offer(0, batch("a"), 7)
    gate.offer(1, batch("b"), 5)
    assert (gate.held_bytes, gate.queued_bytes, gate.pending) == (0, 12, ())
    assert len(drain(gate)) == 1
    assert (gate.held_bytes, gate.queued_bytes, gate.pending, gate.blocked) == (7, 7, (1,), {0})
    gate.offer(1, barrier(1))
    assert len(drain(gate)) == 2
    assert (gate.held_bytes, gate.queued_bytes, gate.pending, gate.blocked) == (0, 0, (), set())


def test_abort_notice_comes_out_as_an_abort_and_releases() -> None:
    gate = InputGate(Aligner(2))
    held = batch("a")
    gate.offer(0, barrier(4))
    gate.offer(0, held)
    drain(gate)
    gate.notify_aborted(4, now_ms=1)
    assert drain(gate) == [AbortCheckpoint(4, AbortReason.NOTIFIED), Delivered(0, held)]
    gate.offer(1, barrier(4))
    gate.offer(1, CancelMarker(4))
    assert drain(gate) == []


def test_b07_closing_drops_what_is_held_and_says_nothing() -> None:
    gate = InputGate(Aligner(2), credits=credits_of(2))
    gate.offer(0, barrier(1))
    gate.offer(0, batch("a"), 9)
    drain(gate)
    gate.close()
    gate.close()
    gate.offer(1, barrier(1))
    assert (drain(gate), list(gate.held()), gate.held_bytes, gate.queued_bytes) == ([], [], 0, 0)


def test_credit_is_announced_first_to_open_and_then_as_rows_are_processed() -> None:
    gate = InputGate(Aligner(2), credits=credits_of(2))
    assert gate.take_announcements() == [(0, CreditAnnouncement(100, 4, 0, 0)), (1, CreditAnnouncement(100, 4, 0, 0))]
    assert gate.take_announcements() == []
    gate.offer(1, batch(*"wxyz"), 99)
    assert gate.take_announcements() == []
    drain(gate)
    assert gate.take_announcements() == [], "in hand, and none of it processed"
    gate.processed(1)
    assert gate.take_announcements() == [], "less than a quarter of the allocation"
    gate.processed(2)
    assert gate.take_announcements() == [(1, CreditAnnouncement(100, 4, 24 + 49, 0))]
    assert (gate.credits[1].bytes_held, gate.credits[1].batches_held) == (26, 1)
    gate.processed(1)
    assert gate.take_announcements() == [(1, CreditAnnouncement(100, 4, 99, 1))]


def test_a_blocked_channel_gets_no_credit_back() -> None:
    gate = InputGate(Aligner(2), credits=credits_of(2))
    gate.take_announcements()
    gate.offer(0, barrier(1))
    gate.offer(0, batch("x"), 60)
    assert drain(gate) == []
    assert gate.take_announcements() == []
    gate.offer(1, barrier(1))
    assert len(drain(gate)) == 2
    gate.processed(1)
    assert gate.take_announcements() == [(0, CreditAnnouncement(100, 4, 60, 1))]


class Clock:
    """Seconds, as told."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_time_of_a_channel_is_that_in_which_it_has_something_to_read_and_is_not_blocked() -> None:
    clock = Clock()
    settings = DebloatSettings(target_s=0.2, period_s=0.2, start_bytes=65_536, max_bytes=2**22)
    credits = [ReceiverCredit(allocated_bytes=1, allocated_batches=9, budget=ChannelBudget(settings)) for _ in range(2)]
    gate = InputGate(Aligner(2), credits=credits, seconds=clock)
    clock.now_s += 5  # nothing is there
    gate.offer(0, batch(*"abcd"), 1_000)
    gate.offer(0, barrier(1))
    clock.now_s += 0.1  # the subtask does something else
    gate.poll(now_ms=0)
    clock.now_s += 0.4
    gate.processed(4)
    drain(gate)
    gate.offer(0, batch("e"), 1_000)
    clock.now_s += 7  # blocked
    gate.offer(1, barrier(1))
    drain(gate)
    clock.now_s += 0.5
    gate.processed(1)
    clock.now_s += 9  # nothing is there
    assert credits[0].budget is not None
    assert credits[0].budget.bytes_per_s == pytest.approx(2_000)
    gate.offer(0, batch("f"), 300)
    assert (credits[0].bytes_held, credits[0].time_to_consume_ms, credits[0].overshoot_bytes) == (300, 150, 0)
    assert credits[1].time_to_consume_ms is None


def test_bytes_processed_and_both_clocks_reach_the_metrics() -> None:
    gate = InputGate(Aligner(2))
    stamped = CheckpointBarrier(1, 1_000_000)
    gate.offer(0, stamped)
    assert gate.poll(now_ms=5, wall_ms=1_000_010) is None
    gate.offer(1, batch("x"), 42)
    gate.poll(now_ms=6, wall_ms=1_000_011)
    gate.offer(1, stamped)
    trigger = gate.poll(now_ms=9, wall_ms=1_000_500)
    assert isinstance(trigger, TriggerSnapshot)
    metrics = trigger.metrics
    assert (metrics.start_delay_ms, metrics.alignment_duration_ms, metrics.bytes_processed) == (10, 4, 42)


def test_the_tracker_never_blocks() -> None:
    gate = InputGate(BarrierTracker(2))
    late = batch("a")
    gate.offer(0, barrier(1))
    gate.offer(0, late)
    gate.offer(1, barrier(1))
    assert drain(gate) == [Delivered(0, late), TriggerSnapshot(barrier(1))]
