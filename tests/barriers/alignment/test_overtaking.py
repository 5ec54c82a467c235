"""Barriers that overtake: what is collected, when a waiting barrier switches, and the law over random input."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from holdfast.barriers.alignment.aligner import Aligner
from holdfast.barriers.alignment.gate import BarrierOutput, Delivered, InputGate
from holdfast.barriers.alignment.handler import AbortCheckpoint, AbortReason, InFlightCollected, TriggerSnapshot
from holdfast.barriers.alignment.inflight import ELEMENT_BYTES
from holdfast.barriers.elements import Batch, CancelMarker, CheckpointBarrier, Element, EndOfPartition, Watermark, WatermarkStatus
from holdfast.barriers.exchange.credits import ReceiverCredit
from holdfast.statebackends.errors import ProtocolError

RECORD_BYTES = 10


def gate_of(channels: int) -> InputGate:
    return InputGate(Aligner(channels), overtakable=True)


def barrier(number: int, timeout_ms: int | None = 0, *, created: int = 0) -> CheckpointBarrier:
    return CheckpointBarrier(number, created, unaligned=True, aligned_timeout_ms=timeout_ms)


def record(name: str) -> Batch:
    return Batch(rows=[(name,)])


def offer(gate: InputGate, channel: int, *elements: Element | str) -> None:
    for each in elements:
        element = record(each) if isinstance(each, str) else each
        gate.offer(channel, element, RECORD_BYTES if isinstance(element, Batch) else 0)


def urgent(gate: InputGate, now_ms: int = 0) -> list[BarrierOutput]:
    found: list[BarrierOutput] = []
    while gate.next_urgent(now_ms=now_ms, wall_ms=now_ms) is not None:
        found += gate.take_urgent(now_ms=now_ms, wall_ms=now_ms)
    return found


def drain(gate: InputGate, now_ms: int = 0) -> list[object]:
    """All that the gate gives, records by their names."""
    found: list[object] = []
    while True:
        found += urgent(gate, now_ms)
        output = gate.poll(now_ms=now_ms, wall_ms=now_ms)
        if output is None:
            return found
        if isinstance(output, Delivered) and isinstance(output.element, Batch):
            found.append(name_of(output.element))
        else:
            found.append(output)


def name_of(element: Element) -> str:
    assert isinstance(element, Batch)
    name: str = element.rows()[0][0]
    return name


def names(collected: object) -> dict[int, list[str]]:
    assert isinstance(collected, InFlightCollected)
    return {channel: [each.rows()[0][0] for each in found if isinstance(each, Batch)] for channel, found in collected.channels}


def kinds(outputs: Sequence[object]) -> list[type]:
    return [type(each) for each in outputs]


def test_of_a_run_of_watermarks_that_is_collected_the_last_one_counts() -> None:
    """A producer that sends no barrier, and watermarks without end, would fill the memory: they are read, and take no credit."""
    gate = gate_of(2)
    offer(gate, 1, Watermark(1))
    offer(gate, 0, barrier(1))
    urgent(gate)
    for time_ms in range(2, 100):
        drain(gate)
        offer(gate, 1, Watermark(time_ms))
    assert gate.in_flight_bytes == ELEMENT_BYTES
    offer(gate, 1, "b1", Watermark(100), WatermarkStatus(idle=True), Watermark(101))
    assert gate.in_flight_bytes == 5 * ELEMENT_BYTES + RECORD_BYTES
    offer(gate, 1, barrier(1))
    (collected,) = urgent(gate)
    assert isinstance(collected, InFlightCollected)
    ((channel, (first, batch, *rest)),) = collected.channels
    assert (channel, first, name_of(batch)) == (1, Watermark(99), "b1")
    assert rest == [Watermark(100), WatermarkStatus(idle=True), Watermark(101)]
    assert collected.metrics.bytes_persisted == RECORD_BYTES


def test_c14_an_abort_while_channels_are_collected_leaves_nothing() -> None:
    gate = gate_of(2)
    offer(gate, 0, barrier(1))
    offer(gate, 1, "b1")
    assert kinds(urgent(gate)) == [TriggerSnapshot]
    assert gate.in_flight_bytes == RECORD_BYTES + ELEMENT_BYTES
    gate.notify_aborted(1, now_ms=0)
    assert gate.in_flight_bytes == 0
    assert drain(gate) == [AbortCheckpoint(1, AbortReason.NOTIFIED), "b1"]
    offer(gate, 1, "b2", barrier(1), barrier(2))
    offer(gate, 0, "a1", barrier(2))
    collected = [each for each in drain(gate) if isinstance(each, InFlightCollected)]
    assert [(each.checkpoint_id, names(each)) for each in collected] == [(2, {0: ["a1"], 1: ["b2"]})], "nothing of checkpoint 1"


def test_an_abort_before_the_first_barrier_lets_it_overtake_nothing() -> None:
    gate = gate_of(2)
    gate.notify_aborted(1, now_ms=0)
    offer(gate, 0, "a1", barrier(1))
    assert urgent(gate) == [AbortCheckpoint(1, AbortReason.NOTIFIED)]
    assert drain(gate) == ["a1"]


def test_c15_a_savepoint_aligns_where_checkpoints_overtake() -> None:
    gate = gate_of(2)
    offer(gate, 0, "a1", CheckpointBarrier(1, 0, "savepoint"), "a2")
    offer(gate, 1, "b1", CheckpointBarrier(1, 0, "savepoint"))
    (first, second, snapshot, third) = drain(gate)
    assert (first, second, third) == ("a1", "b1", "a2")
    assert isinstance(snapshot, TriggerSnapshot)
    assert not snapshot.overtakes


def test_c16_what_was_in_flight_comes_before_any_new_input() -> None:
    before = gate_of(2)
    offer(before, 0, "a1")
    assert drain(before) == ["a1"]
    offer(before, 0, barrier(1))
    assert kinds(drain(before)) == [TriggerSnapshot]
    offer(before, 1, "b1", "b2", barrier(1), "b3")
    (collected,) = urgent(before)
    assert isinstance(collected, InFlightCollected)
    gate = gate_of(2)
    for channel, elements in collected.channels:
        gate.restore(channel, elements)
    offer(gate, 0, Watermark(8), "a2")
    offer(gate, 1, Watermark(9), "b3")
    found: list[object] = []
    while (output := gate.poll(now_ms=0)) is not None:
        assert isinstance(output, Delivered)
        found.append(name_of(output.element) if isinstance(output.element, Batch) else output.element)
    assert found == ["b1", "b2", Watermark(8), "a2", Watermark(9), "b3"]


def test_d13_savepoints_between_checkpoints_that_switch() -> None:
    gate = gate_of(2)
    snapshots: list[tuple[int, bool]] = []
    for number in range(1, 101):
        is_savepoint = number % 2 == 1
        now_ms = 100 * number
        mark = CheckpointBarrier(number, now_ms) if is_savepoint else barrier(number, 10, created=now_ms)
        offer(gate, 0, f"a{number}", mark)
        outputs = drain(gate, now_ms)
        outputs += urgent(gate, now_ms + 10)
        offer(gate, 1, f"b{number}", mark)
        outputs += drain(gate, now_ms + 20)
        snapshots += [(each.barrier.checkpoint_id, each.overtakes) for each in outputs if isinstance(each, TriggerSnapshot)]
        assert [each for each in outputs if isinstance(each, str)] == [f"a{number}", f"b{number}"]
    assert snapshots == [(number, number % 2 == 0) for number in range(1, 101)]


def test_d14_a_queued_barrier_is_taken_out_from_behind_500_records() -> None:
    gate = gate_of(2)
    overtaken = [f"b{number}" for number in range(500)]
    offer(gate, 1, *overtaken, barrier(1, 10), "behind")
    assert urgent(gate, 9) == []
    assert gate.next_overtake_ms == 10
    assert kinds(urgent(gate, 10)) == [TriggerSnapshot]
    offer(gate, 0, barrier(1, 10))
    (collected,) = urgent(gate, 10)
    assert names(collected) == {1: overtaken}
    assert isinstance(collected, InFlightCollected)
    assert collected.metrics.bytes_persisted == 500 * RECORD_BYTES
    assert drain(gate, 10) == [*overtaken, "behind"]


def test_d15_elapsed_time_counts_from_creation() -> None:
    gate = gate_of(2)
    offer(gate, 0, barrier(1, 10, created=5))
    assert drain(gate, 12) == []
    assert gate.next_overtake_ms == 15, "7 ms have passed"
    assert kinds(urgent(gate, 15)) == [TriggerSnapshot]


def test_a_clock_that_is_behind_switches_a_timeout_late_and_not_never() -> None:
    gate = gate_of(2)
    offer(gate, 0, barrier(1, 10, created=1_000_000))
    assert drain(gate, 50) == []
    assert urgent(gate, 59) == []
    assert kinds(urgent(gate, 60)) == [TriggerSnapshot]


def test_d16_a_barrier_that_comes_after_the_timeout_switches_at_once() -> None:
    gate = gate_of(3)
    offer(gate, 0, "a1", barrier(1, 10))
    offer(gate, 1, barrier(1, 10))
    assert drain(gate, 5) == ["a1"]
    assert gate.blocked == {0, 1}
    offer(gate, 1, "b1")
    offer(gate, 2, "c1", barrier(1, 10))
    outputs = drain(gate, 30)
    assert kinds(outputs[:2]) == [TriggerSnapshot, InFlightCollected]
    assert outputs[2:] == ["b1", "c1"]
    assert names(outputs[1]) == {2: ["c1"]}, "what a blocked channel held lies behind its barrier"


def test_a_barrier_that_overtook_upstream_overtakes_here_before_the_timeout() -> None:
    gate = gate_of(2)
    offer(gate, 0, barrier(1, 1_000))
    assert drain(gate, 1) == []
    offer(gate, 1, "b1", barrier(1, 0))
    snapshot, collected = urgent(gate, 1)
    assert isinstance(snapshot, TriggerSnapshot)
    assert snapshot.overtakes
    assert snapshot.barrier.aligned_timeout_ms == 0, "it goes on as one that overtakes at once"
    assert names(collected) == {1: ["b1"]}


def test_d17_a_dead_or_complete_id_is_not_announced_again() -> None:
    gate = gate_of(3)
    offer(gate, 0, CancelMarker(1))
    assert drain(gate) == [AbortCheckpoint(1, AbortReason.CANCELLED)]
    offer(gate, 1, "b1", barrier(1))
    assert drain(gate) == ["b1"]
    assert gate.next_overtake_ms is None


def test_d18_a_closed_gate_switches_no_more() -> None:
    gate = gate_of(2)
    offer(gate, 0, "a1", barrier(1, 10))
    offer(gate, 1, "b1")
    assert urgent(gate, 1) == []
    gate.close()
    assert gate.next_overtake_ms is None
    assert drain(gate, 1_000) == []


def test_inputs_that_can_not_be_overtaken_align_whatever_the_barrier_says() -> None:
    gate = InputGate(Aligner(2))
    offer(gate, 0, "a1", barrier(1), "a2")
    offer(gate, 1, "b1")
    assert urgent(gate) == []
    assert drain(gate) == ["a1", "b1"]
    assert gate.blocked == {0}


def test_watermarks_in_flight_keep_their_places() -> None:
    gate = gate_of(2)
    offer(gate, 0, barrier(1))
    offer(gate, 1, Watermark(5), "b1", Watermark(7))
    assert kinds(urgent(gate)) == [TriggerSnapshot]
    offer(gate, 1, Watermark(8), "b2", barrier(1), Watermark(9))
    (collected,) = urgent(gate)
    assert isinstance(collected, InFlightCollected)
    shown = [each.rows()[0][0] if isinstance(each, Batch) else each for each in dict(collected.channels)[1]]
    assert shown == [Watermark(5), "b1", Watermark(8), "b2"], "of two watermarks in a row the last one matters"


def test_an_end_that_is_not_read_counts_at_the_second_look() -> None:
    """Outputs are full, and nothing is read: the checkpoint does not wait for that."""
    gate = gate_of(2)
    offer(gate, 0, barrier(1))
    assert kinds(urgent(gate)) == [TriggerSnapshot]
    offer(gate, 1, EndOfPartition())
    assert urgent(gate) == [], "it may be read at once"
    assert kinds(urgent(gate)) == [InFlightCollected]


def test_restored_elements_take_no_credit_and_are_in_flight_again() -> None:
    credits = [ReceiverCredit(allocated_bytes=100, allocated_batches=4) for _ in range(2)]
    gate = InputGate(Aligner(2), credits=credits, overtakable=True)
    gate.restore(1, [record(f"b{number}") for number in range(50)])
    offer(gate, 0, barrier(1))
    offer(gate, 1, barrier(1))
    snapshot, collected = urgent(gate)
    assert kinds([snapshot, collected]) == [TriggerSnapshot, InFlightCollected]
    assert names(collected) == {1: [f"b{number}" for number in range(50)]}
    offer(gate, 1, "new")
    assert drain(gate)[-2:] == ["b49", "new"]
    for _ in range(50):
        gate.processed(1)
    assert [each.batches_held for each in credits] == [0, 1], "the new one is in hand"
    gate.processed(1)
    assert [(each.batches_held, each.bytes_held) for each in credits] == [(0, 0), (0, 0)]


def test_what_a_channel_inherits_does_not_fill_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.barriers.alignment.gate.QUEUED_ELEMENTS_MAX", 3)
    gate = gate_of(1)
    gate.restore(0, [record(f"r{number}") for number in range(5)])
    offer(gate, 0, "a1", "a2", "a3")
    with pytest.raises(ProtocolError, match="more than 3 elements wait"):
        offer(gate, 0, "a4")
    assert drain(gate) == ["r0", "r1", "r2", "r3", "r4", "a1", "a2", "a3"]
    offer(gate, 0, "a4", "a5", "a6")
    with pytest.raises(ProtocolError, match="more than 3 elements wait"):
        offer(gate, 0, "a7")


# ------------------------------------------------------------------------------------------- measurements: B


def numbers_of(outputs: Sequence[object]) -> list[tuple[int, int, int, int]]:
    """(start delay, duration, bytes processed, bytes persisted) of what was collected."""
    found = [each.metrics for each in outputs if isinstance(each, InFlightCollected)]
    return [(each.start_delay_ms, each.alignment_duration_ms, each.bytes_processed, each.bytes_persisted) for each in found]


AT_ONCE_OR_TOO_OLD = pytest.mark.parametrize("timeout_ms", [0, 5])


@AT_ONCE_OR_TOO_OLD
def test_b01_to_b04_numbers_of_a_barrier_that_overtakes(timeout_ms: int) -> None:
    gate = gate_of(2)
    offer(gate, 1, "b0")
    assert drain(gate, 105) == ["b0"]
    offer(gate, 0, barrier(1, timeout_ms, created=100))
    (snapshot,) = urgent(gate, 110)
    assert isinstance(snapshot, TriggerSnapshot)
    assert (snapshot.metrics.start_delay_ms, snapshot.metrics.alignment_duration_ms) == (10, 0)
    offer(gate, 1, "b1", "b2", "b3")
    drain(gate, 120)
    offer(gate, 1, barrier(1, timeout_ms, created=100), "b4", "b5")
    assert numbers_of(drain(gate, 150)) == [(10, 40, 30, 30)]
    alone = gate_of(1)
    offer(alone, 0, barrier(1, timeout_ms, created=100))
    assert numbers_of(drain(alone, 130)) == [(30, 0, 0, 0)]


def test_b01_and_b03_numbers_of_a_barrier_that_waited_first() -> None:
    gate = gate_of(2)
    offer(gate, 0, barrier(1, 20, created=100))
    assert drain(gate, 110) == []
    offer(gate, 1, "b1")
    assert drain(gate, 111) == ["b1"]
    assert kinds(urgent(gate, 120)) == [TriggerSnapshot]
    offer(gate, 1, "b2", barrier(1, 20, created=100))
    assert numbers_of(drain(gate, 150)) == [(10, 40, 10, 10)], "b1 is in the state, b2 in flight"


def test_b05_the_timer_restarts_when_a_higher_id_takes_over() -> None:
    gate = gate_of(3)
    offer(gate, 0, barrier(1))
    urgent(gate, 0)
    offer(gate, 2, "c1")
    offer(gate, 1, barrier(2, created=30))
    assert kinds(urgent(gate, 40)) == [AbortCheckpoint, TriggerSnapshot]
    offer(gate, 0, barrier(2, created=30))
    offer(gate, 2, barrier(2, created=30))
    assert numbers_of(urgent(gate, 47)) == [(10, 7, 0, 10)]


@AT_ONCE_OR_TOO_OLD
def test_b06_a_marker_for_an_id_never_started_leaves_the_next_numbers_alone(timeout_ms: int) -> None:
    gate = gate_of(2)
    offer(gate, 0, CancelMarker(1))
    offer(gate, 1, CancelMarker(1))
    assert drain(gate, 5) == [AbortCheckpoint(1, AbortReason.CANCELLED)]
    offer(gate, 0, barrier(2, timeout_ms, created=6))
    urgent(gate, 12)
    offer(gate, 1, barrier(2, timeout_ms, created=6))
    assert numbers_of(drain(gate, 15)) == [(6, 3, 0, 0)]


def test_b07_a_gate_that_is_closed_while_it_collects_holds_and_tells_nothing() -> None:
    gate = gate_of(2)
    offer(gate, 0, barrier(1))
    offer(gate, 1, "b1")
    urgent(gate)
    assert gate.in_flight_bytes == RECORD_BYTES + ELEMENT_BYTES
    gate.close()
    offer(gate, 1, "b2", barrier(1))
    assert (drain(gate, 1_000), gate.in_flight_bytes, gate.queued_bytes) == ([], 0, 0)


def test_b08_awaited_channels_are_those_open_when_it_overtook() -> None:
    gate = gate_of(4)
    offer(gate, 3, EndOfPartition())
    drain(gate)
    offer(gate, 0, barrier(1))
    assert kinds(urgent(gate)) == [TriggerSnapshot]
    offer(gate, 2, EndOfPartition())
    assert kinds(drain(gate)) == [Delivered], "it counts, and b is awaited still"
    offer(gate, 1, barrier(1))
    assert kinds(urgent(gate)) == [InFlightCollected]


def test_k12_and_k13_the_same_or_a_lower_id_never_overtakes() -> None:
    gate = gate_of(1)
    offer(gate, 0, barrier(5))
    assert kinds(drain(gate)) == [TriggerSnapshot, InFlightCollected]
    offer(gate, 0, barrier(5), barrier(4), "a1", CancelMarker(5))
    assert drain(gate) == ["a1"]


# ----------------------------------------------------------------------------------------------------------- the law


class Law:
    """Random input to a gate, and what must hold of all that it says."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.channels = rng.randint(1, 4)
        self.gate = gate_of(self.channels)
        self.now_ms = 0
        self.sent: list[list[str]] = [[] for _ in range(self.channels)]
        self.front: dict[int, dict[int, list[str]]] = {}
        """Checkpoint id -> channel -> records in front of its barrier, or of the channel's end."""
        self.delivered: list[list[str]] = [[] for _ in range(self.channels)]
        self.cuts: dict[int, list[list[str]]] = {}
        self.overtook: set[int] = set()
        self.stored: dict[int, dict[int, list[str]]] = {}
        self.dead: set[int] = set()
        self.ended: set[int] = set()

    def run(self) -> None:
        self._restore()
        scripts = [self._script(channel) for channel in range(self.channels)]
        turns = [channel for channel, script in enumerate(scripts) for _ in script]
        self.rng.shuffle(turns)
        rests = [iter(script) for script in scripts]
        for channel in turns:
            self._offer(channel, next(rests[channel]))
            if self.rng.random() < 0.2:
                self.now_ms += self.rng.choice((1, 5, 20))
            for _ in range(self.rng.choice((0, 0, 1, 3, 50))):
                if not self._step():
                    break
        self.now_ms += 1_000
        while self._step():
            pass
        self._judge()

    def _restore(self) -> None:
        for channel in range(self.channels):
            found = [f"r{channel}.{number}" for number in range(self.rng.choice((0, 0, 1, 3)))]
            self.sent[channel] += found
            self.gate.restore(channel, [record(each) for each in found])

    def _script(self, channel: int) -> list[Element | str]:
        script: list[Element | str] = []
        modes = random.Random(self.channels)  # of an id, on each channel the same
        for number in range(1, 5):
            script += [f"{channel}.{number}.{index}" for index in range(self.rng.randint(0, 3))]
            timeout_ms = modes.choice((0, 10, None))
            if self.rng.random() < 0.08:
                script.append(CancelMarker(number))
            elif self.rng.random() > 0.05:
                script.append(barrier(number, timeout_ms) if modes.random() < 0.8 else CheckpointBarrier(number, 0))
        if self.rng.random() < 0.3:
            script = [*script[: self.rng.randint(0, len(script))], EndOfPartition()]
        return script

    def _offer(self, channel: int, element: Element | str) -> None:
        if isinstance(element, str):
            self.sent[channel].append(element)
        elif isinstance(element, CheckpointBarrier):
            self.front.setdefault(element.checkpoint_id, {})[channel] = list(self.sent[channel])
        elif isinstance(element, EndOfPartition):
            self.ended.add(channel)
        offer(self.gate, channel, element)

    def _step(self) -> bool:
        found: list[object] = []
        if self.gate.next_urgent(now_ms=self.now_ms, wall_ms=self.now_ms) is not None:
            found += self.gate.take_urgent(now_ms=self.now_ms, wall_ms=self.now_ms)
        elif (output := self.gate.poll(now_ms=self.now_ms, wall_ms=self.now_ms)) is not None:
            found.append(output)
        else:
            return False
        for each in found:
            self._note(each)
        return True

    def _note(self, output: object) -> None:
        match output:
            case Delivered(channel=channel, element=Batch() as batch):
                self.delivered[channel].append(batch.rows()[0][0])
            case TriggerSnapshot(barrier=mark, overtakes=overtakes):
                number = mark.checkpoint_id
                assert number > max(self.cuts, default=0), "once, in rising order"
                assert number not in self.dead
                self.cuts[number] = [list(each) for each in self.delivered]
                if overtakes:
                    assert mark.unaligned
                    self.overtook.add(number)
            case InFlightCollected(checkpoint_id=number):
                assert number in self.overtook - self.stored.keys() - self.dead
                self.stored[number] = names(output)
            case AbortCheckpoint(checkpoint_id=number):
                assert number not in self.dead | self.stored.keys() | (self.cuts.keys() - self.overtook)
                self.dead.add(number)

    def _judge(self) -> None:
        held: list[list[str]] | None = (
            [[] for _ in range(self.channels)] if self.gate.pending else None
        )  # an id that never came on some channel
        for each in self.gate.held():
            assert held is not None
            if isinstance(each.element, Batch):
                held[each.channel].append(each.element.rows()[0][0])
        read = [found + rest for found, rest in zip(self.delivered, held, strict=True)] if held else self.delivered
        assert read == self.sent, "each record once, in its channel's order"
        for number, cut in self.cuts.items():
            if number in self.dead:
                continue
            fronts = [self.front[number].get(channel) for channel in range(self.channels)]
            fronts = [self.sent[at] if each is None and at in self.ended else each for at, each in enumerate(fronts)]
            if number in self.overtook - self.stored.keys():
                assert None in fronts, "every barrier has come"
                continue
            stored = self.stored.get(number, {})
            assert [cut[channel] + stored.get(channel, []) for channel in range(self.channels)] == fronts


def test_state_and_in_flight_data_are_all_in_front_of_the_barrier() -> None:
    seen = {"overtook": 0, "stored": 0, "aligned": 0, "dead": 0}
    for seed in range(2_000):
        law = Law(seed)
        law.run()
        seen["overtook"] += len(law.overtook)
        seen["stored"] += sum(map(bool, law.stored.values()))
        seen["aligned"] += len(law.cuts.keys() - law.overtook)
        seen["dead"] += len(law.dead)
    assert min(seen.values()) > 200, seen


@pytest.mark.endurance
def test_state_and_in_flight_data_are_all_in_front_of_the_barrier_over_many_seeds() -> None:
    for seed in range(2_000, 40_000):
        Law(seed).run()
