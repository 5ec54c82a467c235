"""Producers and consumers over real channels, gates and frames with tiny credits and any schedule: exact cuts, no deadlock."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers.alignment.aligner import Aligner
from holdfast.barriers.alignment.gate import Delivered, InputGate
from holdfast.barriers.alignment.handler import TriggerSnapshot
from holdfast.barriers.elements import Batch, CheckpointBarrier, EndOfPartition
from holdfast.barriers.exchange.channels import InputChannel, OutputGate, OutputSettings
from holdfast.barriers.exchange.credits import ReceiverCredit
from holdfast.barriers.exchange.debloat import ChannelBudget, DebloatSettings
from holdfast.barriers.exchange.frames import ChannelId, EncodedFrame, Frame, FrameEncoder
from holdfast.barriers.exchange.partition import SelectorPartitioner
from holdfast.operators.functions.selectors import ColumnKeySelector
from holdfast.statebackends.errors import ProtocolError
from holdfast.statebackends.serialization.keys import KeyType
from tests.examples import examples

SCHEMA = pa.schema([("k", pa.int64()), ("producer", pa.int64()), ("n", pa.int64())])


@dataclass
class Producer:
    """Emits numbered rows and barriers; knows how many rows lay before each barrier."""

    output: OutputGate
    index: int
    emitted: int = 0
    next_barrier: int = 1
    rows_before: dict[int, int] = field(default_factory=dict)
    ended: bool = False


@dataclass
class Consumer:
    channels: dict[ChannelId, InputChannel]
    positions: dict[ChannelId, int]
    gate: InputGate
    seen: list[tuple[int, int]] = field(default_factory=list)
    cuts: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    ended: int = 0
    rows_in_hand: int = 0


class Exchange:
    """A job of one edge. Frames of one producer-consumer pair stay in order, everything else is up to the schedule."""

    def __init__(self, rng: random.Random, producers: int, consumers: int, checkpoints: int) -> None:
        self.rng = rng
        self.checkpoints = checkpoints
        self.now_s = 0.0
        self.encoder = FrameEncoder()
        self.lines: dict[tuple[int, int, bool], deque[EncodedFrame]] = {}
        self.producers = [Producer(self._output(index, consumers), index) for index in range(producers)]
        self.consumers = [self._consumer(index, producers) for index in range(consumers)]

    def _output(self, index: int, consumers: int) -> OutputGate:
        selector = ColumnKeySelector(["k"], KeyType.parse("int64"))
        partitioner = SelectorPartitioner(selector, parallelism=consumers, max_parallelism=16, operator="c")
        limits = OutputSettings(batch_rows_max=8, buffer_timeout_ms=5, high_water_bytes=400, high_water_elements=10)
        return OutputGate(
            attempt=1, edge_id=1, producer=index, consumers=range(consumers), partitioner=partitioner, settings=limits
        )

    def _consumer(self, index: int, producers: int) -> Consumer:
        ids = [ChannelId(1, producer, index) for producer in range(producers)]
        small = DebloatSettings(target_s=0.05, period_s=0.01, start_bytes=300, max_bytes=2_000)
        budgets = [ChannelBudget(small) if self.rng.random() < 0.5 else None for _ in ids]
        credits = [ReceiverCredit(allocated_bytes=300, allocated_batches=2, budget=budget) for budget in budgets]
        gate = InputGate(Aligner(producers), credits=credits, seconds=self.seconds)
        return Consumer({i: InputChannel(i, attempt=1) for i in ids}, {i: n for n, i in enumerate(ids)}, gate)

    def seconds(self) -> float:
        """Time passes at random."""
        self.now_s += self.rng.choice((0.0, 0.001, 0.5))
        return self.now_s

    def step(self, now_ms: int) -> None:
        choice = self.rng.randrange(4)
        if choice == 0:
            self.produce(self.rng.choice(self.producers), now_ms)
        elif choice == 1:
            self.ship(self.rng.choice(self.producers))
        elif choice == 2 and self.lines:
            self.deliver(self.rng.choice(sorted(self.lines)))
        else:
            self.consume(self.rng.choice(self.consumers), now_ms)

    def produce(self, producer: Producer, now_ms: int) -> None:
        if producer.ended or not producer.output.is_available:
            return
        if self.rng.random() < 0.15:
            if producer.next_barrier > self.checkpoints:
                producer.output.broadcast_event(EndOfPartition())
                producer.ended = True
                return
            producer.rows_before[producer.next_barrier] = producer.emitted
            producer.output.broadcast_event(CheckpointBarrier(producer.next_barrier, 0))
            producer.next_barrier += 1
            return
        rows = [
            {"k": self.rng.randrange(50), "producer": producer.index, "n": producer.emitted + number}
            for number in range(self.rng.randint(1, 20))
        ]
        producer.emitted += len(rows)
        batch = Batch(rows=rows, schema=SCHEMA)
        producer.output.emit(batch if self.rng.random() < 0.5 else Batch(columns=batch.columns()), now_ms=now_ms)

    def ship(self, producer: Producer) -> None:
        if self.rng.random() < 0.3:
            producer.output.flush_all()
        for frame in [*producer.output.take_frames(), *producer.output.last_sequences()]:
            self.send(frame)

    def send(self, frame: Frame) -> None:
        parts = [bytes(memoryview(part)) for part in self.encoder.encode(frame)]
        key = (frame.channel.producer, frame.channel.consumer, frame.to_producer)
        self.lines.setdefault(key, deque()).append(EncodedFrame.of(parts))

    def deliver(self, line: tuple[int, int, bool]) -> None:
        if not self.lines[line]:
            return
        frame = self.lines[line].popleft()
        if frame.to_producer:
            self.producers[frame.channel.producer].output.announced(frame)
            return
        consumer = self.consumers[frame.channel.consumer]
        element = consumer.channels[frame.channel].accept(frame)
        if element is not None:
            consumer.gate.offer(consumer.positions[frame.channel], element, frame.size)

    def consume(self, consumer: Consumer, now_ms: int) -> None:
        if consumer.rows_in_hand:
            count = self.rng.randint(1, consumer.rows_in_hand)
            consumer.rows_in_hand -= count
            consumer.gate.processed(count, rows_min=self.rng.choice((0, 2)))
        else:
            self.poll(consumer, now_ms)
        for position, announcement in consumer.gate.take_announcements():
            channel = next(c for c, p in consumer.positions.items() if p == position)
            self.send(consumer.channels[channel].announcement(announcement))

    def poll(self, consumer: Consumer, now_ms: int) -> None:
        match consumer.gate.poll(now_ms=now_ms):
            case Delivered(element=Batch() as batch):
                consumer.seen += [(row["producer"], row["n"]) for row in batch.rows()]
                consumer.rows_in_hand = batch.num_rows
            case Delivered(element=EndOfPartition()):
                consumer.ended += 1
            case TriggerSnapshot(barrier=barrier):
                consumer.cuts[barrier.checkpoint_id] = list(consumer.seen)
            case _:
                pass

    def finish(self) -> None:
        """Let everyone run in turn; all must end."""
        for now_ms in range(2000):
            for producer in self.producers:
                self.produce(producer, now_ms)
                producer.output.flush_all()
                self.ship(producer)
            for line in sorted(self.lines):
                while self.lines[line]:
                    self.deliver(line)
            for consumer in self.consumers:
                while consumer.gate.has_input or consumer.rows_in_hand:
                    self.consume(consumer, now_ms)
                self.consume(consumer, now_ms)
            if all(c.ended == len(self.producers) for c in self.consumers):
                return
        pytest.fail("deadlock")


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32), producers=st.integers(1, 3), consumers=st.integers(1, 3), checkpoints=st.integers(0, 4))
def test_every_cut_is_exact_and_nothing_is_lost(seed: int, producers: int, consumers: int, checkpoints: int) -> None:
    exchange = Exchange(random.Random(seed), producers, consumers, checkpoints)
    for now_ms in range(300):
        exchange.step(now_ms)
    exchange.finish()
    everything = sorted(row for consumer in exchange.consumers for row in consumer.seen)
    assert everything == [(p.index, n) for p in exchange.producers for n in range(p.emitted)]
    for checkpoint_id in range(1, checkpoints + 1):
        in_snapshot = sorted(row for consumer in exchange.consumers for row in consumer.cuts[checkpoint_id])
        assert in_snapshot == [(p.index, n) for p in exchange.producers for n in range(p.rows_before[checkpoint_id])]
    for consumer in exchange.consumers:
        for producer in exchange.producers:
            own = [n for index, n in consumer.seen if index == producer.index]
            assert own == sorted(own)
        assert consumer.gate.queued_bytes == 0


def test_a_lost_frame_is_noticed_even_when_nothing_follows() -> None:
    exchange = Exchange(random.Random(1), 1, 1, 0)
    producer, consumer = exchange.producers[0], exchange.consumers[0]
    exchange.consume(consumer, 0)
    exchange.deliver((0, 0, True))
    producer.output.broadcast_event(CheckpointBarrier(1, 0))
    (lost,) = producer.output.take_frames()
    assert lost.sequence == 1
    (last,) = producer.output.last_sequences()
    with pytest.raises(ProtocolError, match="did not come"):
        consumer.channels[last.channel].accept(last)
