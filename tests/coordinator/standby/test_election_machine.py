"""Members in a world that kills, pauses and cuts them: no takeover is without a reason, and broken elections are found.

The world is the judge: it knows what each member has looked at, who held a lock, and when a probe was sent. Clocks disagree."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from holdfast.coordinator.standby import election as on
from holdfast.coordinator.standby.election import Election, ElectionConfig, Role
from holdfast.coordinator.standby.records import ActiveRecord, Observation, SignOfLife
from tests.examples import examples

WALKS = 200
AFTER_MS = 3_000
MEMBERS = ("aa", "bb", "cc")
LOCKS = {"aa": "host 1", "bb": "host 1", "cc": "host 2"}


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
    could_store: bool = True
    """Its last sign is stored."""
    unstored_ms: int = 0
    """Time that it has seen pass since its newest stored sign, or since it leads."""
    unstored_in_all_ms: int = 0
    """The same, with that of pauses."""
    lost_ms: int | None = None
    """When it stepped down last."""
    looks: list[tuple[int, ActiveRecord | None, SignOfLife | None]] = field(default_factory=list)

    def unchanged_looks(self) -> list[int]:
        """When it looked, since it first saw what it saw last. A sign that is gone is none that changed."""
        times: list[int] = []
        _, last, _ = self.looks[-1]
        newest = next((sign for _, record, sign in reversed(self.looks) if record == last and sign is not None), None)
        for at_ms, record, sign in reversed(self.looks):
            if record != last or (sign is not None and sign != newest):
                break
            times.insert(0, at_ms)
        return times


class World:
    def __init__(self, skews: Sequence[int] = (0, 0, 0), make: Callable[..., Election] = Election) -> None:
        self.now_ms = 100_000
        self.records: list[ActiveRecord] = []
        self.signs: dict[str, SignOfLife] = {}
        self.cut: set[frozenset[str]] = set()
        self.holder: dict[str, str | None] = {"host 1": None, "host 2": None}
        self.guarded: set[int] = set()
        """Epochs whose active member held the lock of its host, and said so."""
        self.processes: dict[str, Process] = {}
        for name, skew in zip(MEMBERS, skews, strict=True):
            election = make(name, ElectionConfig(AFTER_MS), lock=LOCKS[name], now_ms=self.now_ms + skew)
            self.processes[name] = Process(name, skew, election)

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
                process.unstored_ms = process.unstored_in_all_ms = 0
            case on.StopLeading():
                assert process.leads == action.epoch
                if action.is_cut_off:
                    assert process.unstored_in_all_ms >= 2 * AFTER_MS, "it gives up though it could store its sign"
                process.lost_ms, process.leads = self.now_ms, 0
            case on.GiveSign():
                process.giving.append(action)
                if action.is_leaving:
                    self._store_signs(process)
            case on.ReleaseLock():
                self._release(process)

    def _release(self, process: Process) -> None:
        lock = LOCKS[process.name]
        if self.holder[lock] == process.name:
            self.holder[lock] = None

    def _store_signs(self, process: Process) -> None:
        for action in process.giving:
            process.beat += 1
            holds = self.holder[LOCKS[process.name]] == process.name
            self.guarded |= {action.epoch} if holds else set()
            says = holds and not action.is_leaving
            found = SignOfLife(
                process.name,
                process.beat,
                "",
                action.epoch,
                LOCKS[process.name],
                says,
                action.is_leaving,
                gave_up=action.gave_up,
            )
            self.signs[process.name] = found
        process.giving.clear()

    def _judge_claim(self, process: Process, epoch: int) -> None:
        """A member may claim for five reasons, and each is the world's own knowledge."""
        assert process.could_store, "it could not lead"
        if epoch == 1:
            return
        previous = self.records[epoch - 2] if len(self.records) >= epoch - 1 else None
        assert previous is not None, "an epoch behind one that nobody has"
        sign = self.signs.get(previous.member)
        if sign is not None and (sign.is_leaving or sign.gave_up >= previous.epoch):
            return
        if len(self.records) >= epoch:
            return  # storage refuses it
        lock = LOCKS[process.name]
        has_lock = self.holder[lock] == process.name and LOCKS[previous.member] == lock
        if has_lock and previous.epoch in self.guarded:
            return
        assert process.probing is not None, "no probe that failed"
        assert process.probing.member == previous.member, "a probe of another one"
        unchanged = process.unchanged_looks()
        stale = [at_ms for at_ms in unchanged if at_ms - unchanged[0] >= AFTER_MS]
        assert stale, f"it saw its sign change {self.now_ms - unchanged[0]} ms ago"
        assert process.probe_sent_ms >= stale[0], "no probe since"
        assert process.lost_ms is None or process.probe_sent_ms - process.lost_ms >= 2 * AFTER_MS, "it grabs back"

    # ------------------------------------------------------------------------------------------------------- what happens

    def _awake(self) -> list[Process]:
        return [each for each in self.processes.values() if each.is_alive and not each.is_paused]

    def time_passes(self, ms: int, late: Collection[str] = (), failing: Collection[str] = ()) -> None:
        """Everything that is due happens, member by member, but no answers to probes and claims of the late ones; storage fails the
        failing ones."""
        self.now_ms += ms
        for name in MEMBERS:
            process = self.processes[name]
            process.unstored_in_all_ms += ms
            if process in self._awake() and ms <= 2 * AFTER_MS // 3:
                process.unstored_ms += ms
            due = process.election.next_deadline_ms()
            if process in self._awake() and due is not None and due <= self.now_ms + process.skew_ms:
                self._handle(process, on.DeadlineReached())
            if name not in late:
                self._answer_probe(name)
                self._answer_claim(name, fails=name in failing)
            self._store_sign(name, fails=name in failing)
            self._answer_look(name, fails=name in failing)
            self._try_lock(name)
        self.check()

    def _store_sign(self, name: str, *, fails: bool) -> None:
        process = self.processes[name]
        if process in self._awake() and process.giving:
            process.giving.clear() if fails else self._store_signs(process)
            process.could_store = not fails
            if not fails:
                process.unstored_ms = process.unstored_in_all_ms = 0
            self._handle(process, on.SignGiven(is_stored=not fails))

    def _answer_look(self, name: str, *, fails: bool) -> None:
        process = self.processes[name]
        if process not in self._awake() or not process.observing:
            return
        process.observing = False
        seen = Observation(self.records[-1] if self.records else None, dict(self.signs))
        if not fails:
            process.looks.append((self.now_ms, seen.active, seen.active_sign))
        self._handle(process, on.ObservationFailed() if fails else on.Observed(seen))
        if not fails and process.election.role is Role.ACTIVE:
            assert process.election.epoch == len(self.records), "it leads behind another one's back"

    def _answer_probe(self, name: str) -> None:
        process = self.processes[name]
        if process not in self._awake() or process.probing is None:
            return
        probe = process.probing
        other = self.processes[probe.member]
        answers = other in self._awake() and frozenset((name, other.name)) not in self.cut and other.election.role is Role.ACTIVE
        self._handle(process, on.ProbeAnswered(probe.number, is_active=answers))
        if process.probing == probe:
            process.probing = None

    def _answer_claim(self, name: str, *, fails: bool) -> None:
        """A claim whose answer is lost may have reached storage."""
        process = self.processes[name]
        if process not in self._awake() or process.claiming is None:
            return
        epoch, process.claiming = process.claiming.epoch, None
        if (not fails or epoch % 2) and len(self.records) == epoch - 1:
            self.records.append(ActiveRecord(epoch, name, ""))
        self._handle(process, on.ClaimFailed(epoch) if fails else on.ClaimAnswered(self.records[epoch - 1]))

    def _try_lock(self, name: str) -> None:
        process, lock = self.processes[name], LOCKS[name]
        if process in self._awake() and process.election.wants_lock and self.holder[lock] is None:
            self.holder[lock] = name
            self._handle(process, on.LockTaken())

    def kill(self, name: str) -> None:
        self.processes[name].is_alive = False
        self._release(self.processes[name])

    def stop(self, name: str) -> None:
        process = self.processes[name]
        if process in self._awake():
            self._handle(process, on.StopRequested())
            self.kill(name)

    def pause_or_wake(self, name: str) -> None:
        self.processes[name].is_paused = not self.processes[name].is_paused

    def cut_or_mend(self, first: str, second: str) -> None:
        if first != second:
            self.cut ^= {frozenset((first, second))}

    def check(self) -> None:
        leading = [each.leads for each in self.processes.values() if each.leads]
        assert len(leading) == len(set(leading)), "two lead in one epoch"
        for process in self.processes.values():
            assert not process.leads or process.unstored_ms < 2 * AFTER_MS + STEPS_MS[-1], "it leads, and is cut off from storage"
            assert process.leads == (process.election.epoch if process.election.role is Role.ACTIVE else 0)


STEPS_MS = (100, 500, 1_000, 1_500, 3_500)


class Members(RuleBasedStateMachine):
    """Rules are the world's mishaps; Hypothesis chooses them."""

    world: World

    @initialize(skews=st.tuples(*[st.integers(-50_000, 50_000)] * 3))
    def start(self, skews: tuple[int, int, int]) -> None:
        self.world = World(skews)

    @rule(ms=st.sampled_from(STEPS_MS), late=st.sets(st.sampled_from(MEMBERS)), failing=st.sets(st.sampled_from(MEMBERS)))
    def time_passes(self, ms: int, late: set[str], failing: set[str]) -> None:
        self.world.time_passes(ms, late, failing)

    @rule(ms=st.sampled_from(STEPS_MS))
    def time_passes_in_peace(self, ms: int) -> None:
        self.world.time_passes(ms)

    @rule(name=st.sampled_from(MEMBERS), what=st.sampled_from(["kill", "stop", "pause_or_wake", "pause_or_wake"]))
    def mishap(self, name: str, what: str) -> None:
        getattr(self.world, what)(name)

    @rule(names=st.sets(st.sampled_from(MEMBERS), min_size=1), steps=st.integers(2, 20))
    def storage_is_away(self, names: set[str], steps: int) -> None:
        for _ in range(steps):
            self.world.time_passes(1_000, failing=names)

    @rule(first=st.sampled_from(MEMBERS), second=st.sampled_from(MEMBERS))
    def cut_or_mend(self, first: str, second: str) -> None:
        self.world.cut_or_mend(first, second)


def test_members_take_over_for_a_reason_and_step_down_when_they_have_lost() -> None:
    run_state_machine_as_test(
        Members,
        settings=settings(
            max_examples=examples(150), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def walk(make: Callable[..., Election], seed: int, steps: int = 80) -> World:
    """A random life of three members."""
    draw = random.Random(seed)
    world = World([draw.randrange(-50_000, 50_000) for _ in MEMBERS], make)
    cut_off: list[str] = []
    for _ in range(steps):
        if draw.random() < 0.1:  # from storage, for a while
            cut_off = [name for name in MEMBERS if draw.random() < 0.4] if not cut_off else []
        some = [name for name in MEMBERS if draw.random() < 0.15]
        match draw.choices(("time", "pause", "cut", "stop", "kill"), (12, 3, 2, 0.2, 0.2))[0]:
            case "time":
                world.time_passes(draw.choice(STEPS_MS), some, [name for name in MEMBERS if name in cut_off or draw.random() < 0.1])
            case "pause":
                world.pause_or_wake(draw.choice(MEMBERS))
            case "cut":
                world.cut_or_mend(draw.choice(MEMBERS), draw.choice(MEMBERS))
            case "stop":
                world.stop(draw.choice(MEMBERS))
            case _:
                world.kill(draw.choice(MEMBERS))
    return world


def test_walks_have_what_they_are_to_find() -> None:
    """Takeovers, by every way: else the broken elections below would be found by chance, or not at all."""
    worlds = [walk(Election, seed) for seed in range(WALKS)]
    assert sum(len(world.records) > 1 for world in worlds) > WALKS // 2
    assert sum(process.lost_ms is not None for world in worlds for process in world.processes.values()) > WALKS // 10


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


class StaysCutOff(Election):
    """Leads on, and answers probes as the active one, though storage takes nothing from it."""

    def _is_cut_off(self, now_ms: int) -> bool:
        return False


class GivesUpAtOnce(Election):
    """Gives up as soon as one sign is not stored."""

    def _is_cut_off(self, now_ms: int) -> bool:
        return self.role is Role.ACTIVE and not self._can_store


class TakesOverUnable(Election):
    """Takes over though it can store no sign itself."""

    def _claim_if_able(self, epoch: int) -> list[on.Action]:
        return self._claim(epoch)


class LeadsWhatItClaimed(Election):
    """Takes a claim for its own, whoever storage says was first."""

    def _claimed(self, active: ActiveRecord, now_ms: int) -> list[on.Action]:
        return self._lead(ActiveRecord(active.epoch, self.member, ""))


MUTANTS = [
    SignAlone,
    ProbeAlone,
    LateProbe,
    AnyLock,
    NeverStepsDown,
    GrabsBack,
    StaysCutOff,
    GivesUpAtOnce,
    TakesOverUnable,
    LeadsWhatItClaimed,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_broken_election_is_found(mutant: type[Election]) -> None:
    def walk_all() -> None:
        for seed in range(WALKS):
            walk(mutant, seed)

    with pytest.raises(AssertionError):
        walk_all()
