"""Groups C, D and Y: the real gate with barriers that may overtake, and with a clock.

The task takes what comes as soon as it may; between `(` and `)` it is in one long call, in which no timer fires. Group C has no
timeout: barriers overtake at once, and its marks say T where the others say U."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.barriers.alignment.aligner import Aligner
from holdfast.barriers.alignment.gate import Delivered, GateOutput, InputGate
from holdfast.barriers.alignment.handler import AbortCheckpoint, InFlightCollected, TriggerSnapshot
from holdfast.barriers.elements import Batch, CheckpointBarrier, Element
from tests.scenarios.gates import RECORD_SIZE, element_of, token_of
from tests.scenarios.notation import (
    Event,
    channel_letter,
    is_empty,
    mark,
    parse_in_flight,
    parse_input,
    parse_setting,
    parse_times,
    parse_trace,
    plain,
)
from tests.scenarios.outcome import Covered, Failed, Outcome, Passed
from tests.scenarios.tables import Row, UnparsedError

TESTS = "tests/barriers/alignment/test_overtaking.py"
REQUIREMENTS = {
    "C13": "tests/barriers/exchange/test_output_overtaking.py::test_c13_a_barrier_overtakes_its_own_output",
    "C14": f"{TESTS}::test_c14_an_abort_while_channels_are_collected_leaves_nothing",
    "C15": f"{TESTS}::test_c15_a_savepoint_aligns_where_checkpoints_overtake",
    "C16": f"{TESTS}::test_c16_what_was_in_flight_comes_before_any_new_input",
    "C17": "tests/coordinator/restore/test_in_flight.py::test_c17_more_consumers_process_each_record_in_flight_once",
    "C18": "tests/operators/worker/test_loop.py::test_c18_barriers_stay_in_line_on_edges_that_can_not_be_dealt_out_again",
    "D13": f"{TESTS}::test_d13_savepoints_between_checkpoints_that_switch",
    "D14": f"{TESTS}::test_d14_a_queued_barrier_is_taken_out_from_behind_500_records",
    "D15": f"{TESTS}::test_d15_elapsed_time_counts_from_creation",
    "D16": f"{TESTS}::test_d16_a_barrier_that_comes_after_the_timeout_switches_at_once",
    "D17": f"{TESTS}::test_d17_a_dead_or_complete_id_is_not_announced_again",
    "D18": f"{TESTS}::test_d18_a_closed_gate_switches_no_more",
}
"""Row in prose -> test."""


@dataclass
class OvertakingTask:
    """A task around a gate. `timeout_ms`: None for never."""

    channel_count: int
    timeout_ms: int | None
    created: dict[int, int]
    after_finish: bool = True
    now_ms: int = 0
    trace: list[str] = field(default_factory=list)
    in_flight: dict[int, list[str]] = field(default_factory=dict)
    """Checkpoint id -> records, channel by channel."""
    is_calling: bool = False

    def __post_init__(self) -> None:
        self.gate = InputGate(Aligner(self.channel_count, after_finish=self.after_finish), overtakable=True)

    def take(self, event: Event, following: Event | None) -> None:
        """One event. A row's restored records are there before it begins."""
        match event.kind:
            case "clock":
                self._clock(event.number)
            case "call":
                self.is_calling = True
            case "return":
                self.is_calling = False
            case "restored":
                self.gate.restore(event.channel, [Batch(rows=[(channel_letter(event.channel), event.number)])])
            case _:
                element = self._element(event)
                self.gate.offer(event.channel, element, RECORD_SIZE if isinstance(element, Batch) else 0)
        begins = event.kind == "restored" and following is not None and following.kind in ("restored", "call")
        if not self.is_calling and not begins:
            self._run()

    def _element(self, event: Event) -> Element:
        if event.kind not in ("barrier", "savepoint"):
            return element_of(event)
        created = self.created.get(event.number, 0)
        may_overtake = event.kind == "barrier" and self.timeout_ms is not None
        return CheckpointBarrier(event.number, created, unaligned=may_overtake, aligned_timeout_ms=self.timeout_ms)

    def _clock(self, now_ms: int) -> None:
        """Time passes: an idle task wakes up when a barrier is old enough."""
        while not self.is_calling:
            self.gate.next_urgent(now_ms=self.now_ms, wall_ms=self.now_ms)
            due_ms = self.gate.next_overtake_ms
            if due_ms is None or due_ms > now_ms:
                break
            self.now_ms = due_ms
            self._run()
        self.now_ms = now_ms
        self.trace.append(f"@{now_ms}")

    def _run(self) -> None:
        while True:
            while self.gate.next_urgent(now_ms=self.now_ms, wall_ms=self.now_ms) is not None:
                for output in self.gate.take_urgent(now_ms=self.now_ms, wall_ms=self.now_ms):
                    self._note(output)
            polled = self.gate.poll(now_ms=self.now_ms, wall_ms=self.now_ms)
            if polled is None:
                return
            self._note(polled)

    def _note(self, output: GateOutput) -> None:
        match output:
            case Delivered(channel=channel, element=element):
                self.trace.append(token_of(channel, element))
            case TriggerSnapshot(barrier=barrier, overtakes=overtakes):
                self.trace.append(f"[{'U' if overtakes else 'T'}{barrier.checkpoint_id}]")
            case InFlightCollected(checkpoint_id=checkpoint_id, channels=channels):
                self.trace.append(f"[C{checkpoint_id}]")
                self.in_flight[checkpoint_id] = [token_of(channel, each) for channel, found in channels for each in found]
            case AbortCheckpoint(checkpoint_id=checkpoint_id, why=why):
                self.trace.append(mark(f"[A{checkpoint_id} {why.value}]"))


def check_overtaking_row(row: Row) -> Outcome:
    """A row of group C, D or Y; of one in prose the test that covers it."""
    if row.id in REQUIREMENTS:
        return Covered(REQUIREMENTS[row.id])
    channel_count, after_finish = parse_setting(row.cell("n"))
    if channel_count is None:
        raise UnparsedError("no number of channels")
    timeout_ms: int | None = 0
    if row.group != "C":
        timeout = plain(row.cell("τ"))
        timeout_ms = None if is_empty(timeout) else int(timeout)
    created = parse_times(row.cell("created", default="-"))
    task = OvertakingTask(channel_count, timeout_ms, created, after_finish)
    events = parse_input(row.cell("input"))
    for event, following in zip(events, [*events[1:], None], strict=True):
        task.take(event, following)
    return _compare(row, task)


def _compare(row: Row, task: OvertakingTask) -> Outcome:
    expected = list(parse_trace(row.cell("expected")).tokens)
    if row.group == "C":
        expected = [token.replace("[T", "[U") for token in expected]
    clocked = any(token.startswith("@") for token in expected)
    trace = [token for token in task.trace if clocked or not token.startswith("@")]
    if trace != expected:
        return Failed(" ".join(expected), " ".join(trace))
    wanted = {number: sorted(records) for number, records in parse_in_flight(row.cell("in-flight")).items()}
    found = {number: sorted(records) for number, records in task.in_flight.items() if records or number in wanted}
    return Passed() if found == wanted else Failed(f"in flight {wanted}", str(found))
