"""The gate against a task written from the rules alone (reference_task.py), over random input: channels of several edges, barriers
of all modes, restored data, long calls, clocks that jump, cancels, ends, ids that are old or were aborted.

FLINK-18139, 20645, 20654: wrong channels or buffers were stored, with two gates, old barriers, cancellations."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from holdfast.barriers.alignment.aligner import Aligner
from holdfast.barriers.alignment.gate import Delivered, GateOutput, InputGate
from holdfast.barriers.alignment.handler import AbortCheckpoint, InFlightCollected, TriggerSnapshot
from holdfast.barriers.elements import Batch, CancelMarker, CheckpointBarrier, Element, EndOfPartition, LatencyMarker, Watermark
from holdfast.barriers.jobgraph import JobConfig, JobEdge, JobGraph, JobVertex, OperatorDescription, Partitioning
from holdfast.barriers.messages import SubtaskKey
from holdfast.operators.task.inflight import SubtaskEdges
from tests.barriers.reference_task import Event, ReferenceTask
from tests.examples import examples

RECORD_BYTES = 10


class RealTask:
    """The real gate in a task that takes what comes as soon as it may."""

    def __init__(self, reference: ReferenceTask) -> None:
        self.gate = InputGate(Aligner(reference.channels, after_finish=reference.after_finish), overtakable=reference.overtakable)
        self.created_ms = reference.created_ms
        self.now_ms = self.wall_ms = 0
        self.is_calling = False
        self.trace: list[str] = []
        self.stored: dict[int, tuple[tuple[int, tuple[Element, ...]], ...]] = {}
        self.persisted_bytes: dict[int, int] = {}

    def do(self, event: Event) -> None:
        match event.kind:
            case "call" | "return":
                self.is_calling = event.kind == "call"
            case "pass":
                self._pass(event.number)
            case "jump":
                self.wall_ms += event.number
            case "notice":
                self.gate.notify_aborted(event.number, now_ms=self.now_ms)
            case "restored":
                self.gate.restore(event.channel, [self._element(event)])
                return
            case _:
                element = self._element(event)
                self.gate.offer(event.channel, element, RECORD_BYTES if isinstance(element, Batch) else 0)
        if not self.is_calling:
            self._run()

    def _element(self, event: Event) -> Element:
        match event.kind:
            case "record" | "restored":
                return Batch(rows=[event.token])
            case "watermark":
                return Watermark(event.number)
            case "marker":
                return LatencyMarker(event.number, "v", 0)
            case "barrier":
                timeout_ms = event.timeout_ms
                return CheckpointBarrier(
                    event.number,
                    self.created_ms[event.number],
                    unaligned=timeout_ms is not None,
                    aligned_timeout_ms=timeout_ms,
                )
            case "cancel":
                return CancelMarker(event.number)
            case _:
                return EndOfPartition()

    def _pass(self, ms: int) -> None:
        end_ms = self.now_ms + ms
        while not self.is_calling:
            self.gate.next_urgent(now_ms=self.now_ms, wall_ms=self.wall_ms)
            due_ms = self.gate.next_overtake_ms
            if due_ms is None or due_ms > end_ms:
                break
            self.wall_ms += due_ms - self.now_ms
            self.now_ms = due_ms
            self._run()
        self.wall_ms += end_ms - self.now_ms
        self.now_ms = end_ms

    def _run(self) -> None:
        clocks = {"now_ms": self.now_ms, "wall_ms": self.wall_ms}
        while True:
            while self.gate.next_urgent(**clocks) is not None:
                for output in self.gate.take_urgent(**clocks):
                    self._note(output)
            polled = self.gate.poll(**clocks)
            if polled is None:
                return
            self._note(polled)

    def _note(self, output: GateOutput) -> None:
        match output:
            case Delivered(channel=channel, element=element):
                self.trace.append(token_of(channel, element))
            case TriggerSnapshot(barrier=barrier, overtakes=overtakes):
                self.trace.append(f"[{'U' if overtakes else 'T'}{barrier.checkpoint_id}]")
            case InFlightCollected(checkpoint_id=number, channels=channels, metrics=metrics):
                self.trace.append(f"[C{number}]")
                self.stored[number] = channels
                self.persisted_bytes[number] = metrics.bytes_persisted
            case AbortCheckpoint(checkpoint_id=number, why=why):
                self.trace.append(f"[A{number} {why.value}]")


def token_of(channel: int, element: Element) -> str:
    letter = "abcd"[channel]
    match element:
        case Batch():
            token: str = element.rows()[0]
            return token
        case Watermark(timestamp_ms=timestamp_ms):
            return f"W{letter}{timestamp_ms}"
        case LatencyMarker(marked_ms=marked_ms):
            return f"M{letter}{marked_ms}"
        case _:
            return f"E{letter}"


# -------------------------------------------------------------------------------------------------------------- input


def script_of(rng: random.Random, channel: int, modes: dict[int, int | None]) -> list[Event]:
    """What comes on a channel: ids in rising order, with records between."""
    script: list[Event] = []
    number = 0
    for checkpoint_id, timeout_ms in modes.items():
        for _ in range(rng.choice((0, 1, 1, 3))):
            number += 1
            script.append(Event(rng.choice(("record", "record", "record", "watermark", "marker")), channel, number))
        drawn = rng.random()
        if drawn < 0.08:
            script.append(Event("cancel", channel, checkpoint_id))
        elif drawn < 0.94:
            overtook = timeout_ms is not None and rng.random() < 0.1
            script.append(Event("barrier", channel, checkpoint_id, 0 if overtook else timeout_ms))
        if rng.random() < 0.05 and checkpoint_id > 1:
            script.append(Event("barrier", channel, checkpoint_id - 1, modes[checkpoint_id - 1]))  # old, or again
    script.append(Event("record", channel, number + 1))
    if rng.random() < 0.25:
        script = [*script[: rng.randint(0, len(script))], Event("end", channel)]
    return script


def input_of(rng: random.Random, channels: int) -> tuple[list[Event], dict[int, int]]:
    """(all that happens, in order; when each id was created)."""
    ids = rng.randint(1, 5)
    modes = {number: rng.choice((0, 0, 10, 10, 25, None)) for number in range(1, ids + 1)}
    scripts = [iter(script_of(rng, channel, modes)) for channel in range(channels)]
    events: list[Event] = []
    for channel in range(channels):
        events += [Event("restored", channel, number) for number in range(rng.choice((0, 0, 2)))]
    calling = False
    open_channels = list(range(channels))
    while open_channels:
        drawn = rng.random()
        if drawn < 0.12:
            calling = not calling
            events.append(Event("call" if calling else "return"))
        elif drawn < 0.24:
            events.append(Event("pass", number=rng.choice((1, 4, 12, 40))))
        elif drawn < 0.27:
            events.append(Event("jump", number=rng.choice((-1_000, -20, 5, 1_000))))
        elif drawn < 0.29:
            events.append(Event("notice", number=rng.randint(1, ids)))
        else:
            channel = rng.choice(open_channels)
            event = next(scripts[channel], None)
            if event is None:
                open_channels.remove(channel)
            else:
                events.append(event)
    events += [Event("return"), Event("pass", number=2_000)]
    return events, {number: rng.choice((-5, 0, 0, 8, 500)) for number in modes}


def graph_of(edges: list[int]) -> JobGraph:
    """One subtask that reads edges of so many channels each."""
    sources = [operator_of(f"up{index}") for index in range(len(edges))]
    vertices = [JobVertex(f"u{index}", "u", count, 128, (sources[index],), ()) for index, count in enumerate(edges)]
    vertices.append(JobVertex("v", "v", 1, 128, (operator_of("op"),), ()))
    links = [JobEdge(i, f"u{i}", f"up{i}", "v", 0, Partitioning.REBALANCE, overtakable=True) for i in range(len(edges))]
    return JobGraph("job", tuple(vertices), tuple(links), JobConfig())


def operator_of(uid: str) -> OperatorDescription:
    return OperatorDescription(uid, uid, uid, "test", (), None)


# ------------------------------------------------------------------------------------------------------------ the law


def last_of_runs(tokens: list[str]) -> list[str]:
    """Of a run of watermarks only the last matters."""
    return [each for each, after in zip(tokens, [*tokens[1:], ""], strict=True) if not (each[0] == after[:1] == "W")]


def compare(seed: int) -> Counter[str]:
    """Run a sequence through both; what happened in it."""
    rng = random.Random(seed)
    edges = [rng.randint(1, 2) for _ in range(rng.randint(1, 3))]
    while sum(edges) > 4:
        edges.pop()
    channels = sum(edges)
    events, created_ms = input_of(rng, channels)
    reference = ReferenceTask(channels, created_ms, after_finish=rng.random() < 0.8, overtakable=rng.random() < 0.9)
    real = RealTask(reference)
    for event in events:
        reference.do(event)
        real.do(event)
        assert real.is_calling or real.trace == reference.trace, (seed, event)
    stored = check_stored(edges, real, reference, seed)
    kinds: Counter[str] = Counter(token[1] for token in real.trace if token[0] == "[")
    kinds["stored"] = sum(map(bool, real.stored.values()))
    kinds["restored in flight"] = sum("^" in str(found) for found in reference.stored.values())
    kinds["two edges"] = sum(len(found) > 1 for found in stored.values())
    return kinds


def check_stored(
    edges: list[int], real: RealTask, reference: ReferenceTask, seed: object = ""
) -> dict[int, dict[tuple[int, int], list[str]]]:
    """What the real task has stored, and holds, is what the rules say; by id, edge and producer."""
    stored = {number: stored_by_edge(edges, found) for number, found in real.stored.items()}
    assert stored == {number: dealt(edges, found) for number, found in reference.stored.items()}, seed
    for number, found in real.stored.items():
        records = sum(isinstance(each, Batch) for _, elements in found for each in elements)
        restored = sum("^" in token for channel in reference.stored[number] for token in channel)
        assert real.persisted_bytes[number] >= RECORD_BYTES * (records - restored), seed
    held = sum(each.kind == "record" for each in reference.waiting)
    assert real.gate.queued_bytes == RECORD_BYTES * held, seed
    collected = sum(token[0] in "abcd" for channel in reference.collected for token in channel)
    assert (real.gate.in_flight_bytes > 0) >= (collected > 0), seed
    return stored


def stored_by_edge(edges: list[int], channels: tuple[tuple[int, tuple[Element, ...]], ...]) -> dict[tuple[int, int], list[str]]:
    """(edge, producer) -> what is stored, as a snapshot of the subtask files it."""
    logs = SubtaskEdges(graph_of(edges), SubtaskKey("v", 0)).inputs(channels)
    return {
        (log.edge_id, producer): last_of_runs([token_of(sum(edges[: log.edge_id]) + producer, each) for each in elements])
        for log in logs
        for producer, elements in log.channels
    }


def dealt(edges: list[int], channels: list[list[str]]) -> dict[tuple[int, int], list[str]]:
    places = [(edge, producer) for edge, count in enumerate(edges) for producer in range(count)]
    return {place: last_of_runs(tokens) for place, tokens in zip(places, channels, strict=True) if tokens}


def test_the_gate_does_what_the_rules_say() -> None:
    seen: Counter[str] = Counter()
    for seed in range(300):
        seen += compare(seed)
    assert min(seen[each] for each in ("T", "U", "C", "A", "stored", "restored in flight", "two edges")) >= 10, seen


@pytest.mark.endurance
def test_the_gate_does_what_the_rules_say_over_20_000_sequences() -> None:
    for seed in range(300, 20_300):
        compare(seed)


# ------------------------------------------------------------------------------------------------------------ any order

IDS = 9
MACHINE_EDGES = st.lists(st.integers(1, 2), min_size=1, max_size=3).filter(lambda edges: sum(edges) <= 4)


class OvertakenGateMachine(RuleBasedStateMachine):
    """Both tasks, step by step, in any order that a producer, a coordinator and two clocks may make: after each step they have done
    the same, and what they store is the same."""

    @initialize(
        edges=MACHINE_EDGES,
        timeouts=st.lists(st.sampled_from([0, 0, 10, 25, None]), min_size=IDS, max_size=IDS),
        created=st.lists(st.sampled_from([-5, 0, 8, 500]), min_size=IDS, max_size=IDS),
        restored=st.lists(st.integers(0, 3), max_size=4),
        after_finish=st.booleans(),
        overtakable=st.booleans(),
    )
    def open_gate(
        self,
        edges: list[int],
        timeouts: list[int | None],
        created: list[int],
        restored: list[int],
        after_finish: bool,
        overtakable: bool,
    ) -> None:
        self.edges, self.channels = edges, sum(edges)
        self.timeouts = dict(enumerate(timeouts, 1))
        created_ms = dict(enumerate(created, 1))
        self.reference = ReferenceTask(self.channels, created_ms, after_finish=after_finish, overtakable=overtakable)
        self.real = RealTask(self.reference)
        self.number = 0
        self.newest = [0] * self.channels
        self.ended: set[int] = set()
        for channel in restored:
            self.come("restored", channel)

    def come(self, kind: str, channel: int) -> None:
        if channel % self.channels not in self.ended:
            self.number += 1
            self.do(Event(kind, channel % self.channels, self.number))

    def do(self, event: Event) -> None:
        self.reference.do(event)
        self.real.do(event)

    @rule(kind=st.sampled_from(["record", "record", "record", "watermark", "marker"]), channel=st.integers(0, 3))
    def element(self, kind: str, channel: int) -> None:
        self.come(kind, channel)

    @rule(channels=st.lists(st.integers(0, 3), min_size=1, max_size=4))
    def records_during_a_call(self, channels: list[int]) -> None:
        """They are queued when it returns, with what comes meanwhile."""
        if not self.real.is_calling:
            self.do(Event("call"))
        for channel in channels:
            self.come("record", channel)

    @rule(
        channel=st.integers(0, 3),
        skipped=st.sampled_from([0, 0, 0, 1]),
        how=st.sampled_from(["barrier"] * 4 + ["cancel", "overtook"]),
    )
    def checkpoint(self, channel: int, skipped: int, how: str) -> None:
        """Ids rise on each channel, and some never come on it."""
        channel %= self.channels
        number = self.newest[channel] + 1 + skipped
        if channel in self.ended or number > IDS:
            return
        self.newest[channel] = number
        timeout_ms = self.timeouts[number]
        if how == "cancel":
            self.do(Event("cancel", channel, number))
        else:
            self.do(Event("barrier", channel, number, 0 if how == "overtook" and timeout_ms is not None else timeout_ms))

    @rule(channel=st.integers(0, 3), kind=st.sampled_from(["old", "old", "notice", "end"]), ahead=st.integers(0, 1))
    def disturb(self, channel: int, kind: str, ahead: int) -> None:
        """A barrier again, or of an id that was given up; an abort of the newest id, or of one that has not come; an end."""
        channel %= self.channels
        newest = self.newest[channel]
        if kind == "notice":
            self.do(Event("notice", number=max(1, max(self.newest) + ahead)))
        elif channel not in self.ended and kind == "end":
            self.ended.add(channel)
            self.do(Event("end", channel))
        elif channel not in self.ended and newest:
            self.do(Event("barrier", channel, newest, self.timeouts[newest]))

    @rule()
    def rest_of_barriers(self) -> None:
        """The current checkpoint comes on all channels on which it has not."""
        number = self.reference.current
        for channel in range(self.channels):
            if number and channel not in self.ended and self.newest[channel] < number:
                self.newest[channel] = number
                self.do(Event("barrier", channel, number, self.timeouts[number]))

    @rule()
    def call(self) -> None:
        """A long call begins, or the one that runs returns."""
        self.do(Event("return" if self.real.is_calling else "call"))

    @rule(ms=st.sampled_from([1, 4, 12, 40]))
    def pass_time(self, ms: int) -> None:
        self.do(Event("pass", number=ms))

    @rule(ms=st.sampled_from([-1_000, -20, 5, 1_000]))
    def set_the_clock(self, ms: int) -> None:
        self.do(Event("jump", number=ms))

    @invariant()
    def they_have_done_the_same(self) -> None:
        if hasattr(self, "real"):
            assert self.real.is_calling or self.real.trace == self.reference.trace

    def teardown(self) -> None:
        if not hasattr(self, "real"):
            return
        self.do(Event("return"))
        self.rest_of_barriers()
        self.do(Event("pass", number=2_000))
        self.they_have_done_the_same()
        check_stored(self.edges, self.real, self.reference)
        if len(self.ended) == self.channels:
            assert (self.real.gate.queued_bytes, self.real.gate.in_flight_bytes) == (0, 0), "nothing waits for ever"


TestOvertakenGate = OvertakenGateMachine.TestCase
TestOvertakenGate.settings = settings(max_examples=examples(150), stateful_step_count=50, deadline=None)
