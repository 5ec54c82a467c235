"""The aligner behind its gate as a state machine: any order of records, barriers, markers, ends and abort notices."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.barriers.alignment.aligner import Aligner
from holdfast.barriers.alignment.gate import Delivered, InputGate
from holdfast.barriers.alignment.handler import AbortCheckpoint, TriggerSnapshot
from holdfast.barriers.elements import Batch
from tests.barriers.reference_gate import ReferenceGate
from tests.examples import examples
from tests.scenarios.gates import element_of
from tests.scenarios.notation import Event, channel_letter

IDS_MAX = 12


class GateMachine(RuleBasedStateMachine):
    """Each channel sends rising ids with records between; the gate must cut exactly in front of each barrier."""

    @initialize(channels=st.integers(1, 4), after_finish=st.booleans())
    def open_gate(self, channels: int, after_finish: bool) -> None:
        self.gate = InputGate(Aligner(channels, after_finish=after_finish))
        self.reference = ReferenceGate(channels, after_finish=after_finish)
        self.channels = channels
        self.next_id = [1] * channels
        self.sent = [0] * channels
        self.before: list[dict[int, int]] = [{} for _ in range(channels)]
        self.ended: set[int] = set()
        self.delivered = [0] * channels
        self.triggered: list[int] = []
        self.trace: list[str] = []

    def _offer(self, event: Event) -> None:
        element = element_of(event)
        self.gate.offer(event.channel, element, 10 if isinstance(element, Batch) else 0)
        self.reference.offer(event)
        while (output := self.gate.poll(now_ms=0)) is not None:
            match output:
                case Delivered(channel=channel, element=delivered):
                    letter = channel_letter(channel)
                    if isinstance(delivered, Batch):
                        self.delivered[channel] += 1
                        self.trace.append(f"{letter}{self.delivered[channel]}")
                    else:
                        self.trace.append(f"E.{letter}")
                case TriggerSnapshot(barrier=barrier):
                    self._triggered(barrier.checkpoint_id)
                case AbortCheckpoint(checkpoint_id=number, why=why):
                    self.trace.append(f"[A{number} {why.value}]")

    def _triggered(self, number: int) -> None:
        self.trace.append(f"[T{number}]")
        assert not self.triggered or number > self.triggered[-1]
        self.triggered.append(number)
        for channel in range(self.channels):
            cut = self.before[channel].get(number, self.sent[channel])
            assert self.delivered[channel] == cut, f"checkpoint {number} cuts channel {channel} at {self.delivered[channel]}"

    def _open(self, channel: int) -> int | None:
        channel %= self.channels
        return None if channel in self.ended else channel

    @rule(channel=st.integers(0, 3))
    def record(self, channel: int) -> None:
        if (at := self._open(channel)) is not None:
            self.sent[at] += 1
            self._offer(Event("record", at, self.sent[at]))

    @rule(channel=st.integers(0, 3), skip=st.integers(0, 2), cancel=st.booleans())
    def barrier_or_marker(self, channel: int, skip: int, cancel: bool) -> None:
        at = self._open(channel)
        if at is None or self.next_id[at] + skip > IDS_MAX:
            return
        number = self.next_id[at] + skip
        self.next_id[at] = number + 1
        self.before[at][number] = self.sent[at]
        self._offer(Event("cancel" if cancel else "barrier", at, number))

    @rule(channel=st.integers(0, 3))
    def end(self, channel: int) -> None:
        if (at := self._open(channel)) is not None:
            self.ended.add(at)
            self._offer(Event("end", at, 0))

    @precondition(lambda self: len(self.ended) < self.channels)
    @rule()
    def everybody_catches_up(self) -> None:
        """A barrier of one id on every open channel lets everything go."""
        number = max(self.next_id)
        for at in range(self.channels):
            if at not in self.ended:
                self.next_id[at] = number + 1
                self.before[at][number] = self.sent[at]
                self._offer(Event("barrier", at, number))
        assert list(self.gate.held()) == []
        assert all(self.delivered[at] == self.sent[at] for at in range(self.channels))

    @invariant()
    def as_the_reference(self) -> None:
        if hasattr(self, "gate"):
            assert [token.replace("-", " ") for token in self.trace] == [t.replace("-", " ") for t in self.reference.trace]


TestGateMachine = GateMachine.TestCase
TestGateMachine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
