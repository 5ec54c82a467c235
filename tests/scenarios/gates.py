"""Groups A and E: the real gate with the real aligner or tracker, fed a row's events in arrival order."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.barriers.alignment.aligner import Aligner
from holdfast.barriers.alignment.gate import Delivered, GateOutput, InputGate
from holdfast.barriers.alignment.handler import AbortCheckpoint, BarrierHandler, TriggerSnapshot
from holdfast.barriers.alignment.tracker import BarrierTracker
from holdfast.barriers.elements import Batch, CancelMarker, CheckpointBarrier, Element, EndOfPartition
from tests.scenarios.notation import (
    Event,
    Trace,
    channel_letter,
    is_empty,
    mark,
    parse_cuts,
    parse_input,
    parse_setting,
    parse_trace,
)
from tests.scenarios.outcome import Failed, Outcome, Passed
from tests.scenarios.tables import Row, UnparsedError

RECORD_SIZE = 10


@dataclass
class GateRun:
    """What a gate did with a sequence of events."""

    trace: list[str] = field(default_factory=list)
    cuts: dict[int, dict[str, int]] = field(default_factory=dict)
    triggered: list[TriggerSnapshot] = field(default_factory=list)
    aborted: list[AbortCheckpoint] = field(default_factory=list)
    delivered: dict[str, list[int]] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    pending: tuple[int, ...] = ()
    held_bytes: int = 0


def element_of(event: Event) -> Element:
    match event.kind:
        case "record":
            return Batch(rows=[(channel_letter(event.channel), event.number)])
        case "barrier":
            return CheckpointBarrier(event.number, 0)
        case "cancel":
            return CancelMarker(event.number)
        case _:
            return EndOfPartition()


def token_of(channel: int, element: Element) -> str:
    letter = channel_letter(channel)
    match element:
        case Batch():
            return f"{letter}{element.rows()[0][1]}"
        case CheckpointBarrier():
            return f"B{element.checkpoint_id}.{letter}"
        case CancelMarker():
            return f"X{element.checkpoint_id}.{letter}"
        case _:
            return f"E.{letter}"


def run_gate(handler: BarrierHandler, events: list[Event]) -> GateRun:
    """Offer the events one by one; after each, take all that the gate gives."""
    run = GateRun(delivered={channel_letter(channel): [] for channel in range(handler.channel_count)})
    gate = InputGate(handler)
    now_ms = 0
    for event in events:
        if event.kind == "clock":
            now_ms = event.number
            run.trace.append(f"@{now_ms}")
            continue
        element = element_of(event)
        gate.offer(event.channel, element, RECORD_SIZE if isinstance(element, Batch) else 0)
        while (output := gate.poll(now_ms=now_ms)) is not None:
            _note(run, output)
    run.held = [token_of(channel, element) for channel, element in gate.held()]
    run.pending = gate.pending
    run.held_bytes = gate.held_bytes
    return run


def _note(run: GateRun, output: GateOutput) -> None:
    match output:
        case Delivered(channel=channel, element=element):
            token = token_of(channel, element)
            run.trace.append(token)
            if isinstance(element, Batch):
                run.delivered[channel_letter(channel)].append(int(token[1:]))
        case TriggerSnapshot(barrier=barrier):
            run.trace.append(f"[T{barrier.checkpoint_id}]")
            run.cuts[barrier.checkpoint_id] = {letter: len(records) for letter, records in run.delivered.items()}
            run.triggered.append(output)
        case AbortCheckpoint(checkpoint_id=checkpoint_id, why=why):
            run.trace.append(mark(f"[A{checkpoint_id} {why.value}]"))
            run.aborted.append(output)


def check_gate_row(row: Row) -> Outcome:
    """A row of group A (aligner) or E (tracker)."""
    channel_count, after_finish = parse_setting(row.cell("n"))
    events = parse_input(row.cell("input"))
    expected = parse_trace(row.cell("expected"))
    used = max((event.channel for event in events), default=0) + 1
    if channel_count is None:
        channel_count = used
    if used > channel_count:
        raise UnparsedError(f"channel {channel_letter(used - 1)} is beyond n={channel_count}")
    kind = Aligner if row.group == "A" else BarrierTracker
    run = run_gate(kind(channel_count, after_finish=after_finish), events)
    cut = row.cell("cut", default="")
    return _compare(run, expected, {} if is_empty(cut) else parse_cuts(cut))


def _compare(run: GateRun, expected: Trace, cuts: dict[int, dict[str, int]]) -> Outcome:
    clocked = any(token.startswith("@") for token in expected.tokens)
    trace = [token for token in run.trace if clocked or not token.startswith("@")]
    if tuple(trace) != expected.tokens:
        return Failed(" ".join(expected.tokens) or "(nothing)", " ".join(trace) or "(nothing)")
    for checkpoint_id, cut in cuts.items():
        got = {letter: run.cuts.get(checkpoint_id, {}).get(letter) for letter in cut}
        if got != cut:
            return Failed(f"cut of {checkpoint_id}: {cut}", str(got))
    if expected.held is not None:
        records_only = all(token[0].islower() for token in expected.held)
        held = [token for token in run.held if token[0].islower() or not records_only]
        if held != list(expected.held):
            return Failed(f"held: {' '.join(expected.held)}", " ".join(held))
    if expected.pending is not None and run.pending != expected.pending:
        return Failed(f"pending {expected.pending}", str(run.pending))
    return Passed()
