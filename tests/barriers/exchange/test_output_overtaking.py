"""The producer's end of a barrier that overtakes: what is queued in front of it, when it does, and any order of all that."""

from __future__ import annotations

import itertools

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.barriers.elements import (
    Batch,
    CancelMarker,
    CheckpointBarrier,
    Element,
    ElementEvent,
    LatencyMarker,
    Watermark,
    WatermarkStatus,
)
from holdfast.barriers.exchange.channels import OutputGate, OutputSettings
from holdfast.barriers.exchange.credits import CreditAnnouncement
from holdfast.barriers.exchange.frames import ChannelId, Frame
from holdfast.barriers.exchange.partition import RebalancePartitioner
from tests.examples import examples

ROW_BYTES = 8


def rows(*numbers: int) -> Batch:
    return Batch(columns=pa.record_batch({"n": pa.array(numbers, pa.int64())}))


def barrier(checkpoint_id: int, timeout_ms: int | None = 0) -> CheckpointBarrier:
    return CheckpointBarrier(checkpoint_id, 0, unaligned=True, aligned_timeout_ms=timeout_ms)


def told(element: Element) -> object:
    """A batch by its numbers, an event as it is."""
    return [row["n"] for row in element.rows()] if isinstance(element, Batch) else element


class Output:
    """An output over one edge, and what its channels were granted."""

    def __init__(self, channels: int = 1, *, overtakable: bool = True, credit_rows: int = 10**6, batch_rows_max: int = 100) -> None:
        self.gate = OutputGate(
            attempt=1,
            edge_id=0,
            producer=0,
            consumers=range(channels),
            partitioner=RebalancePartitioner(channels),
            settings=OutputSettings(batch_rows_max=batch_rows_max, buffer_timeout_ms=10),
            overtakable=overtakable,
        )
        self.consumed = [0] * channels
        self.frames: list[list[Frame]] = [[] for _ in range(channels)]
        for channel in range(channels):
            self.grant(channel, credit_rows)

    def grant(self, channel: int, credit_rows: int) -> None:
        """The consumer has processed all that came, and grants so much."""
        sent = [frame for frame in self.frames[channel] if isinstance(frame.payload, Batch)]
        announcement = CreditAnnouncement(credit_rows * ROW_BYTES, 10**6, sum(frame.size for frame in sent), len(sent))
        self.gate.announced(Frame(1, ChannelId(0, 0, channel), 0, announcement))

    def send(self) -> list[object]:
        """What may leave now, of all channels."""
        frames = self.gate.take_frames()
        for frame in frames:
            self.frames[frame.channel.consumer].append(frame)
        return [told(frame.payload) for frame in frames]  # type: ignore[arg-type]

    def overtaken(self, checkpoint_id: int) -> dict[int, list[object]] | None:
        """By consumer; None: not known yet."""
        found = self.gate.overtaken(checkpoint_id)
        return None if found is None else {consumer: [told(each) for each in elements] for consumer, elements in found}


def test_c13_a_barrier_overtakes_its_own_output() -> None:
    output = Output(credit_rows=4)
    output.gate.emit(rows(0), now_ms=0)
    output.gate.flush_all()
    assert output.send() == [[0]]
    output.gate.emit(rows(1, 2, 3, 4), now_ms=0)
    output.gate.broadcast_event(Watermark(5))
    output.gate.emit(rows(6), now_ms=0)  # small: it waits to be merged
    output.gate.broadcast_event(barrier(1))
    output.gate.let_overtake(1, 0, now_ms=0)
    output.gate.emit(rows(7), now_ms=0)
    output.gate.flush_all()
    assert output.overtaken(1) == {0: [[1, 2, 3, 4], Watermark(5), [6]]}
    sent = output.send()
    assert sent[0] == barrier(1), "in front of what it has overtaken"
    for _ in range(5):
        output.grant(0, 4)
        sent += output.send()
    assert sent[1:] == [[1], [2], [3], [4], Watermark(5), [6], [7]], "and that is sent as ever"
    assert [frame.sequence for frame in output.frames[0]] == list(range(1, len(output.frames[0]) + 1))


def test_what_is_no_record_of_the_past_is_not_stored() -> None:
    output = Output()
    for event in (LatencyMarker(1, "v", 0), CancelMarker(1), WatermarkStatus(idle=True), CheckpointBarrier(2, 0)):
        output.gate.broadcast_event(event)
    output.gate.broadcast_event(barrier(3))
    output.gate.let_overtake(3, 0, now_ms=0)
    assert output.overtaken(3) == {0: [WatermarkStatus(idle=True)]}


@pytest.mark.parametrize("overtakable", [True, False])
def test_an_edge_in_line_is_not_overtaken_whatever_the_barrier_says(overtakable: bool) -> None:
    """FLINK-22815, 37870: of an edge that must not be overtaken the timeout knows that, too."""
    for timeout_ms in (0, 10):
        output = Output(credit_rows=1, overtakable=overtakable)
        output.gate.emit(rows(1, 2, 3), now_ms=0)
        output.gate.broadcast_event(barrier(1, timeout_ms))
        output.gate.let_overtake(1, timeout_ms, now_ms=0)
        output.gate.overtake_due(1_000)
        assert output.overtaken(1) == ({0: [[1, 2, 3]]} if overtakable else {})
        first = output.send()[0]
        assert first == (barrier(1, 0) if overtakable else [1])


def test_a_barrier_that_waits_overtakes_at_its_age_and_says_so() -> None:
    output = Output(channels=2, credit_rows=1)
    for number in range(4):
        output.gate.emit(rows(number), now_ms=0)
    output.gate.broadcast_event(barrier(1, 10))
    output.gate.let_overtake(1, 10, now_ms=0)
    assert output.send() == [[0], [1]]
    assert output.gate.next_overtake_ms == 10
    output.gate.overtake_due(9)
    assert output.overtaken(1) is None, "it may overtake yet"
    output.gate.overtake_due(10)
    assert output.overtaken(1) == {0: [[2]], 1: [[3]]}
    assert output.gate.next_overtake_ms is None
    assert output.send() == [barrier(1), barrier(1)], "those behind do not wait for its age"


def test_a_savepoint_behind_it_keeps_no_barrier_from_overtaking() -> None:
    """FLINK-17342, 27251: a savepoint beside a checkpoint whose barrier waits in the producer's queue."""
    output = Output(credit_rows=1)
    output.gate.emit(rows(1, 2), now_ms=0)
    output.gate.broadcast_event(barrier(1, 10))
    output.gate.let_overtake(1, 10, now_ms=0)
    output.gate.emit(rows(3), now_ms=0)
    savepoint = CheckpointBarrier(2, 0, "savepoint")
    output.gate.broadcast_event(savepoint)
    assert output.overtaken(1) is None, "it has not left"
    output.gate.overtake_due(10)
    assert output.overtaken(1) == {0: [[1, 2]]}
    sent = output.send()
    for _ in range(3):
        output.grant(0, 1)
        sent += output.send()
    assert sent == [barrier(1), [1], [2], [3], savepoint]


def test_a_barrier_that_has_left_overtakes_nothing() -> None:
    output = Output(channels=2)
    output.gate.emit(rows(1), now_ms=0)
    output.gate.broadcast_event(barrier(1, 10))
    output.gate.let_overtake(1, 10, now_ms=0)
    assert output.send() == [[1], barrier(1, 10), barrier(1, 10)]
    assert output.overtaken(1) == {}
    assert output.gate.next_overtake_ms is None
    output.gate.emit(rows(2), now_ms=0)
    output.gate.overtake_due(1_000)
    assert output.overtaken(1) == {}


def test_one_that_is_aborted_or_replaced_overtakes_nothing_any_more() -> None:
    """FLINK-17869, 20331: nothing of an aborted checkpoint gets into the next."""
    output = Output(credit_rows=1)
    output.gate.emit(rows(1, 2), now_ms=0)
    output.gate.broadcast_event(barrier(1, 10))
    output.gate.let_overtake(1, 10, now_ms=0)
    output.gate.forget(1)
    output.gate.overtake_due(1_000)
    assert output.overtaken(1) == {}
    output.gate.emit(rows(3), now_ms=0)
    output.gate.broadcast_event(barrier(2, 10))
    output.gate.let_overtake(2, 1_010, now_ms=1_000)
    output.gate.emit(rows(4), now_ms=0)
    output.gate.overtake_due(1_010)
    assert output.overtaken(1) == {}
    assert output.overtaken(2) == {0: [[1, 2], [3]]}
    sent = output.send()
    for _ in range(6):
        output.grant(0, 1)
        sent += output.send()
    output.gate.flush_all()
    sent += output.send()
    assert sent == [barrier(2), [1], [2], barrier(1, 10), [3], [4]]


def test_what_is_leaving_is_what_the_next_frames_take() -> None:
    output = Output(credit_rows=8)
    seen = []
    output.gate.emit(rows(1), now_ms=0)
    assert not output.gate.is_leaving, "it waits to be merged"
    output.gate.emit(rows(*range(2, 21)), now_ms=0)
    output.gate.broadcast_event(Watermark(1))
    for _ in range(8):
        seen.append((output.gate.is_leaving, output.send()))
        seen.append((output.gate.is_leaving, output.send()))
        output.grant(0, 8)
    assert all(leaves is bool(sent) for leaves, sent in seen)
    assert 2 < sum(leaves for leaves, _ in seen) < 8
    unopened = OutputGate(
        attempt=1,
        edge_id=0,
        producer=0,
        consumers=(0,),
        partitioner=RebalancePartitioner(1),
        settings=OutputSettings(),
    )
    unopened.broadcast_event(Watermark(1))
    assert not unopened.is_leaving


# ---------------------------------------------------------------------------------------------------------- any order


class OutputMachine(RuleBasedStateMachine):
    """One output, its channels and their consumers: whatever happens, each element leaves once and in order but for barriers that
    overtake, and of one that did, what left in front of it and what is stored are all that was emitted in front of it."""

    @initialize(channels=st.integers(1, 3), overtakable=st.booleans(), batch_rows_max=st.sampled_from([1, 3, 100]))
    def open_output(self, channels: int, overtakable: bool, batch_rows_max: int) -> None:
        self.output = Output(channels, overtakable=overtakable, credit_rows=4, batch_rows_max=batch_rows_max)
        self.dealer = RebalancePartitioner(channels)
        self.overtakable = overtakable
        self.channels = channels
        self.now_ms = 0
        self.numbers = itertools.count()
        self.emitted: list[list[int]] = [[] for _ in range(channels)]
        self.in_front: dict[int, list[list[int]]] = {}
        self.stored: dict[int, dict[int, list[int]]] = {}
        self.newest = 0
        self.aging: tuple[int, int] | None = None
        """(id, when it overtakes) of a checkpoint that was not told yet what its barrier has overtaken."""

    @rule(count=st.integers(1, 12))
    def emit(self, count: int) -> None:
        batch = rows(*itertools.islice(self.numbers, count))
        for channel, part in self.dealer.split(batch):
            self.emitted[channel] += [row["n"] for row in part.rows()]
        self.output.gate.emit(batch, now_ms=self.now_ms)

    @rule(event=st.sampled_from([LatencyMarker(1, "v", 0), WatermarkStatus(idle=True), Watermark(7), CancelMarker(1)]))
    def event(self, event: ElementEvent) -> None:
        self.output.gate.broadcast_event(event)

    @rule(timeout_ms=st.sampled_from([0, 5, 20, None]))
    def barrier(self, timeout_ms: int | None) -> None:
        self.newest += 1
        self.in_front[self.newest] = [list(each) for each in self.emitted]
        self.output.gate.broadcast_event(
            CheckpointBarrier(self.newest, 0) if timeout_ms is None else barrier(self.newest, timeout_ms)
        )
        if timeout_ms is not None:
            self.aging = (self.newest, self.now_ms + timeout_ms)
            self.output.gate.let_overtake(*self.aging, now_ms=self.now_ms)

    @rule(ms=st.integers(1, 30))
    def pass_time(self, ms: int) -> None:
        self.now_ms += ms
        due_ms = self.output.gate.next_overtake_ms
        assert due_ms is None or (self.aging is not None and due_ms == self.aging[1])
        self.output.gate.overtake_due(self.now_ms)
        self.output.gate.flush(self.now_ms)

    @precondition(lambda self: self.aging is not None)
    @rule()
    def abort(self) -> None:
        assert self.aging is not None
        checkpoint_id, self.aging = self.aging[0], None
        self.output.gate.forget(checkpoint_id)
        assert self.output.overtaken(checkpoint_id) == {}
        assert self.output.gate.next_overtake_ms is None

    @rule(channel=st.integers(0, 2), credit_rows=st.integers(1, 40))
    def grant(self, channel: int, credit_rows: int) -> None:
        self.output.grant(channel % self.channels, credit_rows)

    @rule()
    def send(self) -> None:
        self.output.send()

    @precondition(lambda self: self.aging is not None)
    @rule()
    def ask(self) -> None:
        assert self.aging is not None
        checkpoint_id, due_ms = self.aging
        found = self.output.overtaken(checkpoint_id)
        queued = any(checkpoint_id not in ids_of(frames) for frames in self.output.frames)
        assert (found is None) is (self.overtakable and queued and self.now_ms < due_ms)
        if found is not None:
            self.aging = None
            self.stored[checkpoint_id] = {
                consumer: [number for each in elements if isinstance(each, list) for number in each]
                for consumer, elements in found.items()
            }
            told = [each for elements in found.values() for each in elements]
            assert all(isinstance(each, list | Watermark | WatermarkStatus) for each in told), "no markers, no barriers"
            if not self.overtakable:
                assert found == {}

    @invariant()
    def what_left_is_in_order(self) -> None:
        if hasattr(self, "output"):
            for channel, frames in enumerate(self.output.frames):
                left = numbers_of(frames)
                assert left == self.emitted[channel][: len(left)]
                assert [frame.sequence for frame in frames] == list(range(1, len(frames) + 1))

    def teardown(self) -> None:
        if not hasattr(self, "output"):
            return
        self.output.gate.flush_all()
        while not self.output.gate.is_drained:
            self.output.send()
            for channel in range(self.channels):
                self.output.grant(channel, 4)
        for channel, frames in enumerate(self.output.frames):
            assert numbers_of(frames) == self.emitted[channel]
            for checkpoint_id, stored in self.stored.items():
                place = ids_of(frames).index(checkpoint_id)
                barriers = [at for at, frame in enumerate(frames) if isinstance(frame.payload, CheckpointBarrier)]
                left = numbers_of(frames[: barriers[place]])
                assert left + stored.get(channel, []) == self.in_front[checkpoint_id][channel]


def numbers_of(frames: list[Frame]) -> list[int]:
    return [row["n"] for frame in frames if isinstance(frame.payload, Batch) for row in frame.payload.rows()]


def ids_of(frames: list[Frame]) -> list[int]:
    return [frame.payload.checkpoint_id for frame in frames if isinstance(frame.payload, CheckpointBarrier)]


TestOutputMachine = OutputMachine.TestCase
TestOutputMachine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
