"""Workers that stand by in a world that kills, stops and cuts them, and restarts their coordinator: who holds a slot is never
replaced from another seat, no two are promised one slot, and in the end each slot has a worker. Broken rules are found.

The world is the judge: it knows which process is dead, and which one only stood still."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from holdfast.barriers.messages import (
    Deploy,
    ProcessLook,
    Registered,
    RegisterWorker,
    StandBy,
    StandbyOrder,
    StatusBatch,
    TaskState,
)
from holdfast.coordinator.dispatcher.submit import Starter, resume_submission
from holdfast.coordinator.jobmaster import actions as job_actions
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.slots import STREAM_GRACE_MS, Slot, SlotPool, Verdict
from holdfast.coordinator.jobmaster.standbys import LOOK_MS, OWN_WAIT_MS, PROMISE_MS, RETURN_MS, WAIT_MS, Standbys
from holdfast.statebackends.errors import FencedError, HoldfastError
from holdfast.statebackends.storage.port import run_flow
from tests.coordinator.rig import Rig
from tests.coordinator.world import JOB
from tests.examples import examples

WALKS = 150
SLOTS = 2
SEATS = 4
LEASE_MS = 4_000


@dataclass
class Process:
    """One worker process, and what it knows."""

    name: str
    seat: int
    spawn: int
    task: int
    is_alive: bool = True
    is_stopped: bool = False
    """SIGSTOP: it does nothing, and its connections stay open."""
    ticket: int | None = None
    """Its question, under way."""
    asked_ms: int = 0
    looks: tuple[ProcessLook, ...] = ()
    order: StandbyOrder | None = None
    ordered_ms: int = 0
    slot: int = -1
    session: str = ""
    stream: int | None = None
    """Ticket of its open stream, as the coordinator sees it."""
    attempt: int = 0
    reported: int = 0
    """Attempt whose tasks it has reported to run."""

    @property
    def acts(self) -> bool:
        return self.is_alive and not self.is_stopped

    @property
    def numbers(self) -> tuple[int, int]:
        return (self.order.spawn, self.order.task_attempt) if self.order is not None else (self.spawn, self.task)


class World:
    """The job master, its launcher, and all processes that ever were."""

    def __init__(self, *, near: bool, sight: str, seats: int = SEATS) -> None:
        """`near`: the coordinator sees processes. `sight`: theirs. `seats`: Spark has so many slots."""
        self.seats = seats
        self.near, self.sight = near, sight
        self.rig = Rig(heartbeat_timeout_ms=LEASE_MS, heartbeat_interval_ms=1_000)
        self.processes: list[Process] = []
        self.spawns = dict.fromkeys(range(SEATS), 0)
        self.tasks = 0
        self.seen_actions = 0
        self.owed: list[job_actions.LookForProcess] = []
        """Looks of the coordinator without an outcome yet."""
        self.answered: set[int] = set()
        self.held: dict[int, tuple[str, int, int | None]] = {}
        """By slot: who held it when it was last looked at, when it was last heard of, and when its stream's grace is over."""
        for seat in range(seats):
            self.launch(seat)

    # ------------------------------------------------------------------------------------------------- the coordinator

    def call(self, make: Callable[[int], job_events.Event]) -> Any:
        self.rig.tickets += 1
        ticket = self.rig.tickets
        self.rig.feed(make(ticket))
        self.judge()
        return self.rig.answers.get(ticket)

    def pass_time(self, by_ms: int) -> None:
        end = self.rig.now + by_ms
        while self.rig.now < end:
            due = self.rig.master.next_deadline_ms()
            self.rig.pass_time(min(end, max(self.rig.now + 1, end if due is None else due)) - self.rig.now)
            self.judge()

    def restart_coordinator(self) -> None:
        """Another leader: connections, questions and promises are gone."""
        starter = Starter(f"leader {self.rig.setup.epoch + 1}", "", "directory", 0)
        now = self.rig.now
        self.rig.open(run_flow(resume_submission(JOB, starter), self.rig.storage))
        self.rig.now = now
        self.owed, self.seen_actions, self.answered, self.held = [], len(self.rig.actions), set(), {}
        for each in self.processes:
            each.ticket, each.stream, each.session, each.looks = None, None, "", ()
        self.judge()

    def judge(self) -> None:
        """Take the answers that came, and check each order."""
        new = self.rig.actions[self.seen_actions :]
        self.seen_actions = len(self.rig.actions)
        self.owed += [action for action in new if isinstance(action, job_actions.LookForProcess)]
        for action in new:
            if isinstance(action, job_actions.Answer | job_actions.Refuse):
                assert action.ticket not in self.answered, "a question is answered once"
                self.answered.add(action.ticket)
        for each in self.processes:
            answer = self.rig.answers.get(each.ticket) if each.ticket is not None else None
            if answer is not None:
                each.ticket = None
                self._answered(each, answer)
        self._judge_releases()

    def _judge_releases(self) -> None:
        """A slot is free once its process is dead, or has been given up in time: never because it stands still."""
        by_name = {each.name: each for each in self.processes}
        for slot in self.rig.master.slot_pool.slots:
            name, heard_ms, lost_ms = self.held.get(slot.index, ("", 0, None))
            if name and slot.holder is None and by_name[name].is_alive:
                assert self.rig.now >= min(heard_ms + LEASE_MS, heard_ms + LEASE_MS if lost_ms is None else lost_ms), name
            nonce = slot.holder.nonce if slot.holder is not None else ""
            self.held[slot.index] = (nonce, slot.last_seen_ms, slot.lost_at_ms)

    def _answered(self, process: Process, answer: Any) -> None:
        if isinstance(answer, HoldfastError):
            process.is_alive = process.is_alive and not isinstance(answer, FencedError)
            return
        assert isinstance(answer, StandbyOrder)
        process.looks = answer.looks
        if answer.slot < 0:
            return
        slot = self.rig.master.slot_pool.slots[answer.slot]
        numbers = (answer.spawn, answer.task_attempt)
        if answer.slot == process.seat:
            assert slot.holder is None or slot.holder.seat < 0, "its own slot, or what its launcher says is over"
        else:
            assert slot.holder is None, "a slot that a process holds is promised to none of another seat"
        if slot.last_holder is not None:
            assert numbers > (slot.last_holder.spawn, slot.last_holder.task_attempt)
        assert answer.slot != process.seat or numbers >= (process.spawn, 0)
        for other in self.processes:
            if other is not process and other.acts and other.order is not None and other.order.slot == answer.slot:
                has_come = other.session or (slot.holder is not None and slot.holder.nonce == other.name)
                patience_ms = OWN_WAIT_MS if answer.slot == process.seat else PROMISE_MS
                waits = has_come or self.rig.now - other.ordered_ms >= patience_ms
                assert waits or other.order.epoch != answer.epoch, "a slot is promised to one at a time"
        process.order, process.ordered_ms = answer, self.rig.now

    # --------------------------------------------------------------------------------------------------- the launcher

    def launch(self, seat: int, *, is_repeated: bool = False) -> Process | None:
        """The task of the seat is over, as far as Spark knows: another one is started, by the driver, or, `is_repeated`, by Spark
        itself, without another number of the driver. A stopped process may still be there."""
        if any(each.acts for each in self.processes if each.seat == seat):
            return None
        is_first = self.spawns[seat] == 0
        self.spawns[seat] += is_first or not is_repeated
        self.tasks += 1
        process = Process(f"p{self.tasks}", seat, self.spawns[seat], self.tasks)
        self.processes.append(process)
        if seat < SLOTS and is_first:
            process.order = StandbyOrder(0, seat, 1, process.task)
            self.register(process)
        return process

    # --------------------------------------------------------------------------------------------- what a process does

    def ask(self, process: Process, ended: tuple[str, ...] = ()) -> None:
        message = StandBy(
            JOB, process.seat, 1, process.task, process.name, 9, "host", process.spawn, "", process.name, self.sight, ended
        )
        process.looks = ()
        self.rig.tickets += 1
        process.ticket, process.asked_ms = self.rig.tickets, self.rig.now
        self.rig.feed(job_events.StandbyReceived(process.ticket, message))
        self.judge()

    def look(self, process: Process) -> None:
        looks, by_name = process.looks, {each.name: each for each in self.processes}
        self.ask(process, tuple(each.fingerprint for each in looks if not by_name[each.fingerprint].is_alive))

    def register(self, process: Process) -> None:
        """Raises nothing: one that is refused ends."""
        order = process.order
        assert order is not None
        slot, before = order.slot, self.rig.master.slot_pool.slots[order.slot].holder
        away = slot != process.seat
        statuses = self.rig.statuses(slot, process.attempt, TaskState.RUNNING) if process.attempt else ()
        message = RegisterWorker(
            job_id=JOB,
            slot=slot,
            submission=1,
            task_attempt=order.task_attempt,
            nonce=process.name,
            pid=9,
            host="host",
            data_address=f"tcp://{process.name}:1",
            directory_nonce="directory",
            attempt=process.attempt,
            subtasks=statuses,
            spawn=order.spawn,
            fingerprint=process.name,
            seat=process.seat if away else -1,
            seat_spawn=process.spawn if away else 0,
            sight=self.sight,
        )
        is_near = self.near
        answer = self.call(lambda ticket: job_events.RegistrationReceived(ticket, message, is_near))
        if not isinstance(answer, Registered):
            assert isinstance(answer, FencedError), answer
            process.is_alive = False
            return
        if before is not None and before.nonce != process.name:
            assert not away, "whoever stood by has taken the slot of one that held it"
            assert (before.spawn, before.task_attempt) < process.numbers
        process.slot, process.session = slot, answer.session
        self.open_stream(process)

    def open_stream(self, process: Process) -> None:
        commands = self.call(lambda ticket: job_events.StreamOpened(ticket, process.slot, process.session, 0))
        if isinstance(commands, HoldfastError):
            process.session, process.stream = "", None
            return
        process.stream = self.rig.tickets
        deployed = [each.command.deployment.attempt for each in commands if isinstance(each.command, Deploy)]
        process.attempt = max(deployed, default=process.attempt)

    def report(self, process: Process, state: TaskState) -> None:
        """It reports the tasks of an attempt, or learns that its session is over."""
        attempt = self.rig.master.lifecycle.attempt if state is TaskState.RUNNING else process.attempt or 1
        statuses = self.rig.statuses(process.slot, attempt, state)
        epoch, session = self.rig.setup.epoch, process.session
        current = self.rig.master.slot_pool.slots[process.slot].session
        answer = self.call(lambda ticket: job_events.StatesReceived(ticket, StatusBatch(epoch, process.slot, session, statuses)))
        if session != current:
            assert isinstance(answer, HoldfastError), "a session that is over reports nothing"
            process.session, process.stream = "", None
        elif state is TaskState.RUNNING:
            process.attempt = process.reported = attempt

    def cut(self, process: Process) -> None:
        """The coordinator's end of the stream breaks."""
        if process.stream is not None and process.session:
            self.rig.feed(job_events.StreamClosed(process.slot, process.session, process.stream))
            process.stream = None
            self.judge()

    def outcomes(self) -> None:
        """The coordinator looks where it was told to."""
        by_name = {each.name: each for each in self.processes}
        owed, self.owed = self.owed, []
        for look in owed:
            if not by_name[look.fingerprint].is_alive:
                self.rig.feed(job_events.ProcessEnded(look.slot, look.session))
                self.judge()

    # --------------------------------------------------------------------------------------------------------- the rules

    def check(self) -> None:
        master = self.rig.master
        assert len(master.standbys.views()) <= SEATS
        assert len(master.standbys._promises) <= SLOTS
        holders = [slot.holder.nonce for slot in master.slot_pool.slots if slot.holder is not None]
        assert len(set(holders)) == len(holders), "a process has one slot"
        for each in self.processes:
            assert each.ticket is None or self.rig.now <= each.asked_ms + WAIT_MS, "a question has an end"

    @property
    def is_served(self) -> bool:
        """Whether a process that goes on holds each slot: a death may be known, and its lease not yet over."""
        by_name = {each.name: each for each in self.processes}
        slots = self.rig.master.slot_pool.slots
        return all(slot.holder is not None and by_name[slot.holder.nonce].acts for slot in slots)

    def settle(self) -> None:
        """Nothing fails any more: whoever stood still goes on, whoever is dead has a successor."""
        for each in self.processes:
            each.is_stopped = False
        for _ in range(40):
            for each in self.processes:
                if not each.is_alive:
                    self.cut(each)
            for seat in range(self.seats):
                self.launch(seat)
            self.outcomes()
            for each in list(self.processes):
                self.act(each)
            self.pass_time(400)
            if self.rig.state == "RUNNING" and self.rig.master.lifecycle.is_up and self.is_served:
                break
        assert self.rig.state == "RUNNING", [self.processes, self.rig.state]
        assert self.is_served, self.processes

    def act(self, process: Process) -> None:
        """The next step of a process that is left alone."""
        if not process.acts:
            return
        if process.looks:
            self.look(process)
        elif process.order is None:
            if process.ticket is None:
                self.ask(process)
        elif not process.session:
            self.register(process)
        elif process.stream is None:
            self.open_stream(process)
        elif self.rig.state in ("RESTARTING", "CREATED"):
            self.report(process, TaskState.CANCELED)
        else:
            self.report(process, TaskState.RUNNING)


class Machine(RuleBasedStateMachine):
    """Any order of these."""

    world: World

    @initialize(near=st.booleans(), sight=st.sampled_from(["", "one"]))
    def begin(self, near: bool, sight: str) -> None:
        self.world = World(near=near, sight=sight)

    def _draw(self, data: st.DataObject, kind: Callable[[Process], bool]) -> Process | None:
        found = [each for each in self.world.processes if kind(each)]
        return data.draw(st.sampled_from(found), "process") if found else None

    @rule(data=st.data(), times=st.integers(1, 4))
    def a_process_goes_on(self, data: st.DataObject, times: int) -> None:
        process = self._draw(data, lambda each: each.acts)
        for _ in range(times):
            if process is not None:
                self.world.act(process)

    @rule()
    def all_go_on(self) -> None:
        for each in list(self.world.processes):
            self.world.act(each)

    @rule(data=st.data(), seen=st.booleans())
    def kill(self, data: st.DataObject, seen: bool) -> None:
        """`seen`: its stream breaks at once, as it should."""
        process = self._draw(data, lambda each: each.is_alive)
        if process is not None:
            process.is_alive = False
            if seen:
                self.world.cut(process)

    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        process = self._draw(data, lambda each: each.acts)
        if process is not None:
            process.is_stopped = True

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        process = self._draw(data, lambda each: each.is_stopped)
        if process is not None:
            process.is_stopped = False

    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        process = self._draw(data, lambda each: each.stream is not None)
        if process is not None:
            self.world.cut(process)

    @rule(seat=st.integers(0, SEATS - 1), is_repeated=st.booleans())
    def launch(self, seat: int, is_repeated: bool) -> None:
        self.world.launch(seat, is_repeated=is_repeated)

    @rule()
    def look(self) -> None:
        self.world.outcomes()

    @rule(by_ms=st.sampled_from([1, LOOK_MS, 200, OWN_WAIT_MS, STREAM_GRACE_MS, PROMISE_MS, RETURN_MS, WAIT_MS, 2 * LEASE_MS]))
    def pass_time(self, by_ms: int) -> None:
        self.world.pass_time(by_ms)

    @rule()
    def restart_coordinator(self) -> None:
        self.world.restart_coordinator()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()


def run(walks: int, *phases: Phase) -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=walks,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            derandomize=True,
            phases=phases or tuple(Phase),
        ),
    )


def test_whatever_dies_or_stands_still_a_slot_has_one_worker_and_in_the_end_each_has() -> None:
    run(examples(WALKS))


def _gives_what_is_held(self: Standbys, *, replaces: bool, reconciles: bool) -> None:
    SETTLE(self, replaces=True, reconciles=reconciles)
    for slot in self._slots.slots:
        if slot.holder is not None and slot.lost_at_ms is not None and slot.index not in self._promises:
            self._give(slot, slot.holder)


def _lets_in_whoever_stood_by(self: SlotPool, message: RegisterWorker) -> Verdict:
    return Verdict.RECONNECT if message.seat >= 0 else CHECK(self, message)


def _takes_stopped_for_dead(self: Standbys, message: StandBy) -> list[Slot]:
    return [slot for slot in self._slots.slots if slot.holder is not None and slot.lost_at_ms is not None]


def _forgets_promises(self: Standbys) -> None:
    self._promises.clear()
    FORGET(self)


def _never_answers(self: Standbys) -> None:
    """A question is kept until there is a slot."""
    for each in self._waiting.values():
        each.until_ms = self._turn.now_ms + 2 * WAIT_MS
    FORGET(self)


SETTLE, CHECK, FORGET = Standbys.settle, SlotPool.check_registration, Standbys._forget


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        (Standbys, "settle", _gives_what_is_held),
        (SlotPool, "check_registration", _lets_in_whoever_stood_by),
        pytest.param(Standbys, "ended", _takes_stopped_for_dead, marks=pytest.mark.endurance),
        (Standbys, "_forget", _forgets_promises),
        pytest.param(Standbys, "_forget", _never_answers, marks=pytest.mark.endurance),
    ],
)
def test_a_broken_rule_is_found(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, mutant: Any) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(AssertionError):
        run(10 * WALKS, Phase.generate)  # up to the first that finds it


# ------------------------------------------------------------------------------------------- between any two of its steps


def running(*, near: bool, sight: str, seats: int = SLOTS + 1) -> World:
    """Both slots have workers, whose tasks run; one stands by, if there is a seat for it."""
    world = World(near=near, sight=sight, seats=seats)
    for process in world.processes:
        world.act(process)
    assert world.rig.master.lifecycle.is_up
    return world


STEPS = ("stands by", "is asked to look", "is ordered", "has registered", "has reported")
"""What the worker that stands by has come to; to have imported and read its plan comes before it asks."""


def reached(world: World, standby: Process) -> str:
    if standby.order is None:
        return "is asked to look" if standby.looks else "stands by"
    is_up = standby.reported == world.rig.master.lifecycle.attempt
    return "is ordered" if not standby.session else "has reported" if is_up else "has registered"


def bring(world: World, victim: Process, step: str) -> bool:
    """Bring the worker that stands by so far, behind the broken stream of another one; False if it does not come by there."""
    standby = world.processes[2]
    if step == "stands by":
        world.cut(victim)
        return True
    world.cut(victim)
    for _ in range(STREAM_GRACE_MS):
        others = [lambda each=each: world.act(each) for each in world.processes[:1]]
        for act in (world.outcomes, *others, lambda: world.pass_time(5), lambda: world.act(standby)):
            if reached(world, standby) == step:
                return True
            act()
    return False


@pytest.mark.parametrize("end", ["killed", "stopped", "cut off"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("near", "sight"), [(True, ""), (False, "one"), (False, "")])
def test_one_that_stands_by_fails_at_any_step(near: bool, sight: str, step: str, end: str) -> None:
    world = running(near=near, sight=sight)
    victim, standby = world.processes[1:]
    victim.is_alive = False
    if not bring(world, victim, step):
        assert step == "is asked to look", "where nobody needs to be asked, or can be"
        assert near or not sight
        return
    standby.is_alive, standby.is_stopped = end != "killed", end == "stopped"
    if end != "stopped":
        world.cut(standby)
    world.launch(1)
    world.pass_time(3 * LEASE_MS)
    world.settle()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("near", "sight"), [(True, ""), (False, "one"), (False, "")])
def test_one_that_only_stood_still_comes_back_at_any_step(near: bool, sight: str, step: str) -> None:
    """SIGSTOP and a broken stream: nobody calls it dead, the lease gives its slot away. Back, it has its slot where that is still
    free, and else is refused, whatever numbers it has."""
    world = running(near=near, sight=sight)
    victim, standby = world.processes[1:]
    victim.is_stopped = True
    began, session, slot = world.rig.now, victim.session, world.rig.master.slot_pool.slots[1]
    bring(world, victim, step)
    if world.rig.now < began + STREAM_GRACE_MS:
        assert slot.session == session, "who stands still is not dead"
    is_taken = bool(standby.session)
    victim.is_stopped = False
    for _ in range(4):
        world.act(victim)
    assert victim.is_alive is not is_taken
    world.settle()


def test_the_end_of_a_process_elsewhere_is_told_by_a_worker_there() -> None:
    world = running(near=False, sight="one")
    victim, standby = world.processes[1:]
    began = world.rig.now
    victim.is_alive = False
    world.cut(victim)
    assert standby.looks == (ProcessLook(9, "p2"),)
    world.act(standby)
    assert standby.order is not None
    assert (standby.order.slot, world.rig.now) == (1, began), "without waiting for the lease"


def test_nobody_is_asked_who_does_not_see_the_process_or_could_not_take_its_place() -> None:
    world = running(near=False, sight="one")
    victim, standby = world.processes[1:]
    world.sight = "another"  # of those that register and ask from here on
    world.ask(standby)
    world.cut(victim)
    assert standby.looks == ()
    world = running(near=True, sight="one")
    world.cut(world.processes[1])
    assert world.processes[2].looks == (), "the coordinator looks itself"
    assert world.owed


@pytest.mark.parametrize("sight", ["", "another"])
def test_who_does_not_see_a_process_can_not_call_it_dead(sight: str) -> None:
    world = running(near=False, sight="one")
    victim, standby = world.processes[1:]
    world.cut(victim)
    world.sight = sight
    world.ask(standby, (victim.name,))
    assert world.rig.master.slot_pool.slots[1].holder is not None


def test_nor_one_whose_stream_is_open() -> None:
    world = running(near=False, sight="one")
    victim, standby = world.processes[1:]
    world.ask(standby, (victim.name,))
    assert world.rig.master.slot_pool.slots[1].holder is not None
    assert world.rig.state == "RUNNING"


@pytest.mark.parametrize("sight", ["one", ""])
def test_without_a_free_slot_the_launcher_replaces_the_dead(sight: str) -> None:
    world = running(near=False, sight=sight, seats=SLOTS)
    victim = world.processes[1]
    victim.is_alive = False
    world.cut(victim)
    world.pass_time(100)
    successor = world.launch(1)
    assert successor is not None
    world.act(successor)
    assert successor.order is not None, "at once: its slot has no other worker"
    world.settle()
    assert len([each for each in world.processes if each.is_alive]) == SLOTS
