"""Members in a world that kills, pauses and cuts them: Hypothesis looks for a takeover without a reason. Broken elections are found.

The world is the judge: it knows who lives, when a sign was stored, and when a probe was sent. Members have clocks that disagree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from holdfast.coordinator.standby import election as on
from holdfast.coordinator.standby.election import Election, ElectionConfig, Role
from holdfast.coordinator.standby.records import ActiveRecord, Observation, SignOfLife
from tests.examples import examples

AFTER_MS = 3_000
MEMBERS = ("aa", "bb", "cc")
LOCKS = {"aa": "host 1", "bb": "host 1", "cc": "host 2"}


@dataclass
class Fact:
    """What the world knows of a claim's reasons."""

    sign_at_ms: int = -10_000_000
    """When the active member's newest sign was stored."""


@dataclass
class Process:
    """One member: its election, and what storage and network still owe it."""

    name: str
    skew_ms: int
    election: Election
    beat: int = 0
    is_alive: bool = True
    is_paused: bool = False
    observing: bool = False
    probing: on.Probe | None = None
    probe_sent_ms: int = 0
    claiming: on.Claim | None = None
    giving: list[on.GiveSign] = field(default_factory=list)
    leads: int = 0
    stepped_down_from: int = 0


class World(RuleBasedStateMachine):
    make: Callable[..., Election] = Election

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 100_000
        self.records: list[ActiveRecord] = []
        self.signs: dict[str, SignOfLife] = {}
        self.stored_ms: dict[str, int] = {}
        self.cut: set[frozenset[str]] = set()
        self.holder: dict[str, str | None] = {"host 1": None, "host 2": None}
        self.freed_by: dict[str, str | None] = {"host 1": None, "host 2": None}
        self.processes: dict[str, Process] = {}

    @initialize(skews=st.lists(st.integers(-50_000, 50_000), min_size=3, max_size=3))
    def start(self, skews: list[int]) -> None:
        for name, skew in zip(MEMBERS, skews, strict=True):
            self._begin(name, skew)

    def _begin(self, name: str, skew_ms: int) -> None:
        make = type(self).make
        election = make(name, ElectionConfig(AFTER_MS), lock=LOCKS[name], now_ms=self.now_ms + skew_ms)
        self.processes[name] = Process(name, skew_ms, election)

    # ------------------------------------------------------------------------------------------------------------ events

    def _handle(self, process: Process, event: on.Event) -> None:
        for action in process.election.handle(event, now_ms=self.now_ms + process.skew_ms):
            self._perform(process, action)

    def _perform(self, process: Process, action: on.Action) -> None:
        match action:
            case on.Observe():
                process.observing = True
            case on.Probe():
                assert process.probing is None or process.probing.number < action.number
                process.probing, process.probe_sent_ms = action, self.now_ms
            case on.Claim():
                self._judge_claim(process, action.epoch)
                process.claiming = action
            case on.Lead():
                assert self.records[action.epoch - 1].member == process.name
                process.leads = action.epoch
            case on.StopLeading():
                assert process.leads == action.epoch
                process.stepped_down_from, process.leads = process.leads, 0
            case on.GiveSign():
                process.giving.append(action)
                if action.is_leaving:
                    self._store_signs(process)
            case on.ReleaseLock():
                self._release(process)

    def _release(self, process: Process) -> None:
        lock = LOCKS[process.name]
        if self.holder[lock] == process.name:
            self.holder[lock], self.freed_by[lock] = None, process.name

    def _store_signs(self, process: Process) -> None:
        for action in process.giving:
            process.beat += 1
            holds = self.holder[LOCKS[process.name]] == process.name
            self.signs[process.name] = SignOfLife(
                process.name, process.beat, "", action.epoch, LOCKS[process.name], holds and not action.is_leaving, action.is_leaving
            )
            self.stored_ms[process.name] = self.now_ms
        process.giving.clear()

    def _judge_claim(self, process: Process, epoch: int) -> None:
        """A member may claim for four reasons, and each is the world's own knowledge."""
        if epoch == 1:
            return
        previous = self.records[epoch - 2] if len(self.records) >= epoch - 1 else None
        assert previous is not None, "an epoch behind one that nobody has"
        sign = self.signs.get(previous.member)
        if sign is not None and sign.is_leaving:
            return
        if len(self.records) >= epoch:
            return  # storage refuses it
        lock = LOCKS[process.name]
        has_lock = self.holder[lock] == process.name and LOCKS[previous.member] == lock
        if has_lock and self.freed_by[lock] == previous.member:
            return
        silent_ms = self.now_ms - self.stored_ms.get(previous.member, -10_000_000)
        assert silent_ms >= AFTER_MS, f"its sign changed {silent_ms} ms ago"
        assert process.probe_sent_ms >= self.stored_ms.get(previous.member, -1), "no probe since its sign changed"
        assert process.probing is not None, "no probe that failed"
        assert process.stepped_down_from != epoch - 2 or silent_ms >= 2 * AFTER_MS or epoch < 3, "it grabs back"

    # ------------------------------------------------------------------------------------------------------------- rules

    def _awake(self) -> list[Process]:
        return [each for each in self.processes.values() if each.is_alive and not each.is_paused]

    @rule(ms=st.sampled_from([10, 100, 500, 1_000, 1_500, 3_000, 3_500, 7_000]))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms
        for process in self._awake():
            due = process.election.next_deadline_ms()
            if due is not None and due <= self.now_ms + process.skew_ms:
                self._handle(process, on.DeadlineReached())

    @rule(name=st.sampled_from(MEMBERS), fails=st.booleans())
    def sign_is_stored(self, name: str, fails: bool) -> None:
        process = self.processes[name]
        if process in self._awake() and process.giving:
            process.giving.clear() if fails else self._store_signs(process)
            self._handle(process, on.SignGiven())

    @rule(name=st.sampled_from(MEMBERS), fails=st.sampled_from([False, False, False, True]))
    def looks(self, name: str, fails: bool) -> None:
        process = self.processes[name]
        if process in self._awake() and process.observing:
            process.observing = False
            seen = Observation(self.records[-1] if self.records else None, dict(self.signs))
            self._handle(process, on.ObservationFailed() if fails else on.Observed(seen))

    @rule(name=st.sampled_from(MEMBERS))
    def probe_is_answered(self, name: str) -> None:
        process = self.processes[name]
        if process not in self._awake() or process.probing is None:
            return
        probe = process.probing
        other = self.processes.get(probe.member)
        is_cut = other is not None and frozenset((name, other.name)) in self.cut
        answers = other is not None and other in self._awake() and not is_cut and other.election.role is Role.ACTIVE
        self._handle(process, on.ProbeAnswered(probe.number, is_active=answers))
        if process.probing == probe:
            process.probing = None

    @rule(name=st.sampled_from(MEMBERS), answer=st.sampled_from(["stored", "stored", "lost", "failed"]))
    def claim_is_answered(self, name: str, answer: str) -> None:
        process = self.processes[name]
        if process not in self._awake() or process.claiming is None:
            return
        epoch, process.claiming = process.claiming.epoch, None
        if answer != "failed" and len(self.records) == epoch - 1:
            self.records.append(ActiveRecord(epoch, name, ""))
        if answer == "stored":
            self._handle(process, on.ClaimAnswered(self.records[epoch - 1]))
        else:
            self._handle(process, on.ClaimFailed(epoch))

    @rule(name=st.sampled_from(MEMBERS))
    def lock_is_tried(self, name: str) -> None:
        process = self.processes[name]
        lock = LOCKS[name]
        if process in self._awake() and process.election.wants_lock and self.holder[lock] is None:
            self.holder[lock] = name
            self._handle(process, on.LockTaken())

    @rule(name=st.sampled_from(MEMBERS))
    def is_killed(self, name: str) -> None:
        process = self.processes[name]
        process.is_alive = False
        self._release(process)

    @rule(name=st.sampled_from(MEMBERS))
    def stops(self, name: str) -> None:
        process = self.processes[name]
        if process in self._awake():
            self._handle(process, on.StopRequested())
            process.is_alive = False
            self._release(process)

    @rule(name=st.sampled_from(MEMBERS))
    def pauses_or_wakes(self, name: str) -> None:
        self.processes[name].is_paused = not self.processes[name].is_paused

    @rule(names=st.sampled_from([("aa", "bb"), ("aa", "cc"), ("bb", "cc")]))
    def is_cut_or_mended(self, names: tuple[str, str]) -> None:
        self.cut ^= {frozenset(names)}

    @precondition(lambda self: bool(self.records))
    @rule(name=st.sampled_from(MEMBERS))
    def looks_twice(self, name: str) -> None:
        """A member that is awake and reads storage knows, behind one look, whether it is still the active one."""
        process = self.processes[name]
        if process in self._awake():
            process.observing = True
            self.looks(name, False)
            if process.election.role is Role.ACTIVE:
                assert process.election.epoch == len(self.records), "it leads behind another one's back"
                assert process.leads == process.election.epoch

    @invariant()
    def one_leads_in_each_epoch(self) -> None:
        leading = [each.leads for each in self.processes.values() if each.leads]
        assert len(leading) == len(set(leading))


def run(machine: type[World], count: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=count, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
        ),
    )


def test_members_take_over_for_a_reason_and_step_down_when_they_have_lost() -> None:
    run(World, examples(150))


class SignAlone(Election):
    """Takes over from an active member that answers its probe."""

    def _probe_if_stale(self, active: ActiveRecord, now_ms: int) -> list[on.Action]:
        return self._claim(active.epoch + 1) if super()._probe_if_stale(active, now_ms) else []


class ProbeAlone(Election):
    """Probes at any time, and takes over when there is no answer, however often the sign changes."""

    def _probe_if_stale(self, active: ActiveRecord, now_ms: int) -> list[on.Action]:
        self._changed_ms = now_ms - AFTER_MS
        return super()._probe_if_stale(active, now_ms)


class LateProbe(Election):
    """Counts the answer to a probe behind which the sign has changed."""

    def _watch(self, active: ActiveRecord | None, sign: SignOfLife | None, now_ms: int) -> None:
        probe = self._probe
        super()._watch(active, sign, now_ms)
        self._probe = probe


class AnyLock(Election):
    """Takes the lock of its host for news of any active member."""

    @property
    def _is_guarded(self) -> bool:
        return True


class NeverStepsDown(Election):
    def _superseded(self, active: ActiveRecord, now_ms: int) -> list[on.Action]:
        return []


class GrabsBack(Election):
    """Takes over from the one that took over, as soon as from anybody."""

    def _superseded(self, active: ActiveRecord, now_ms: int) -> list[on.Action]:
        actions = super()._superseded(active, now_ms)
        self._quiet_until_ms = now_ms
        return actions


class LeadsWhatItClaimed(Election):
    """Takes a claim for its own, whoever storage says was first."""

    def _claimed(self, active: ActiveRecord, now_ms: int) -> list[on.Action]:
        return self._lead(ActiveRecord(active.epoch, self.member, ""))


MUTANTS = [SignAlone, ProbeAlone, LateProbe, AnyLock, NeverStepsDown, GrabsBack, LeadsWhatItClaimed]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_broken_election_is_found(mutant: type[Election]) -> None:
    world = type(f"World{mutant.__name__}", (World,), {"make": mutant})
    with pytest.raises(AssertionError):
        run(world, 2_000)
