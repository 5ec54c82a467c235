"""The core that decides which connections stay: deadlines, caps, and whom a newcomer displaces; and the budget of bodies."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from holdfast.api.http.connection_budget import (
    Accepted,
    BodyBudget,
    BodyReceived,
    CallerKind,
    CloseConnection,
    Closed,
    CloseReason,
    ConnectionBudget,
    ConnectionLimits,
    DeadlineReached,
    Event,
    Phase,
    PhaseEntered,
    Proved,
    SendingResumed,
    SendingStopped,
)
from holdfast.statebackends.errors import InvariantError

LIMITS = ConnectionLimits(connections_max=6, unknown_max=4, unknown_per_address_max=3)
HERE, THERE = "127.0.0.1", "192.0.2.7"


class Bench:
    """A budget, and the connections that it closed."""

    def __init__(self, limits: ConnectionLimits = LIMITS) -> None:
        self.budget = ConnectionBudget(limits)
        self.closed: list[tuple[int, CloseReason]] = []

    def at(self, now_ms: int, *events: Event) -> list[tuple[int, CloseReason]]:
        """Closed by these events."""
        actions = []
        for event in events:
            actions += self.budget.handle(event, now_ms=now_ms)
            self.budget.check_lists()
        found = [(action.connection, action.reason) for action in actions]
        self.closed += found
        return found

    def accept(self, *numbers: int, address: str = HERE, now_ms: int = 0) -> None:
        self.at(now_ms, *(Accepted(number, address) for number in numbers))

    def known(self, *numbers: int, caller: CallerKind = CallerKind.CLIENT, phase: Phase = Phase.IDLE) -> None:
        for number in numbers:
            self.at(0, Accepted(number, HERE), PhaseEntered(number, Phase.ANSWERING), Proved(number, caller))
            self.at(0, PhaseEntered(number, phase))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_counts_that_disagree_are_found(bench: Bench) -> None:
    bench.accept(1)
    bench.budget._callers[CallerKind.UNKNOWN] += 1
    with pytest.raises(InvariantError, match="of 2 connections"):
        bench.accept(2)


def test_a_silent_connection_is_closed_after_the_time_for_a_head(bench: Bench) -> None:
    bench.accept(1)
    assert bench.at(4_999, DeadlineReached()) == []
    assert bench.at(5_000, DeadlineReached()) == [(1, CloseReason.HEAD_DEADLINE)]
    assert len(bench.budget) == 0
    assert bench.at(5_001, Closed(1), DeadlineReached()) == []


def test_bytes_of_a_head_buy_no_time_but_its_end_does(bench: Bench) -> None:
    bench.accept(1, 2)
    bench.at(4_000, BodyReceived(1, 10_000_000), PhaseEntered(2, Phase.ANSWERING), Proved(2, CallerKind.CLIENT))
    assert bench.at(5_000, DeadlineReached()) == [(1, CloseReason.HEAD_DEADLINE)]
    assert bench.at(10**9, DeadlineReached()) == []


def test_the_next_head_of_a_connection_has_its_own_time(bench: Bench) -> None:
    bench.known(1, caller=CallerKind.WORKER)
    bench.at(60_000, PhaseEntered(1, Phase.HEAD))
    assert bench.at(64_999, DeadlineReached()) == []
    assert bench.at(65_000, DeadlineReached()) == [(1, CloseReason.HEAD_DEADLINE)]


def test_a_body_that_stands_still_or_trickles_is_cut_off(bench: Bench) -> None:
    bench.known(1, 2, phase=Phase.BODY)
    for second in range(30):
        bench.at(second * 1_000, BodyReceived(2, 10))
    assert bench.at(29_999, DeadlineReached()) == []
    assert bench.at(30_002, DeadlineReached()) == [(1, CloseReason.BODY_DEADLINE), (2, CloseReason.BODY_DEADLINE)]


def test_a_large_body_has_as_long_as_it_comes_fast_enough(bench: Bench) -> None:
    bench.known(1, phase=Phase.BODY)
    for second in range(600):
        assert bench.at(second * 1_000, BodyReceived(1, LIMITS.body_bytes_per_s_min), DeadlineReached()) == []
    assert bench.at(629_999, DeadlineReached()) == []
    assert bench.at(630_000, DeadlineReached()) == [(1, CloseReason.BODY_DEADLINE)]


def test_what_is_left_of_a_body_is_not_read_for_ever(bench: Bench) -> None:
    bench.known(1, phase=Phase.DRAINING)
    bench.at(4_000, BodyReceived(1, 10_000_000))
    assert bench.at(5_000, DeadlineReached()) == [(1, CloseReason.DRAIN_DEADLINE)]


def test_a_reader_that_does_not_read_is_closed_and_one_that_reads_again_is_not(bench: Bench) -> None:
    bench.known(1, 2, caller=CallerKind.WORKER, phase=Phase.ANSWERING)
    bench.at(1_000, SendingStopped(1), SendingStopped(2))
    bench.at(2_000, SendingResumed(2))
    assert bench.at(30_999, DeadlineReached()) == []
    assert bench.at(31_000, DeadlineReached()) == [(1, CloseReason.SEND_DEADLINE)]
    assert bench.at(10**9, DeadlineReached()) == []


def test_idle_connections_and_streams_have_no_deadline_here(bench: Bench) -> None:
    bench.known(1)
    bench.known(2, caller=CallerKind.WORKER, phase=Phase.ANSWERING)
    assert bench.at(10**9, DeadlineReached()) == []


def test_a_newcomer_displaces_the_oldest_silent_one_of_its_address(bench: Bench) -> None:
    bench.accept(1, address=THERE)
    bench.accept(2, 3, 4)
    assert bench.closed == []
    bench.accept(5)
    assert bench.closed == [(2, CloseReason.ADDRESS_CAP)]


def test_one_that_is_being_answered_makes_no_room(bench: Bench) -> None:
    bench.accept(1, 2, 3)
    bench.at(0, PhaseEntered(1, Phase.ANSWERING))
    bench.accept(4)
    assert bench.closed == [(2, CloseReason.ADDRESS_CAP)]


@pytest.mark.parametrize("phase", [Phase.ANSWERING, Phase.BODY])
def test_a_stranger_that_leaves_its_answer_unread_makes_room(bench: Bench, phase: Phase) -> None:
    bench.accept(1, 2, 3)
    bench.at(0, *(PhaseEntered(number, phase) for number in (1, 2, 3)))
    bench.at(0, *(SendingStopped(number) for number in (1, 2, 3)))
    bench.accept(4, 5)
    assert bench.closed == [(1, CloseReason.ADDRESS_CAP), (2, CloseReason.ADDRESS_CAP)]


def test_reading_a_little_makes_no_stranger_younger(bench: Bench) -> None:
    bench.accept(1, 2)
    bench.at(0, PhaseEntered(1, Phase.ANSWERING), SendingStopped(1))
    bench.accept(3)
    bench.at(1_000, SendingResumed(1), SendingStopped(1))
    bench.at(2_000, SendingResumed(1))
    bench.accept(4, 5, now_ms=2_000)
    assert bench.closed == [(2, CloseReason.ADDRESS_CAP), (1, CloseReason.ADDRESS_CAP)]


def test_a_known_caller_that_reads_slowly_makes_no_room(bench: Bench) -> None:
    bench.known(1, phase=Phase.ANSWERING)
    bench.accept(2)
    bench.at(0, PhaseEntered(2, Phase.ANSWERING), SendingStopped(1), SendingStopped(2), Proved(2, CallerKind.WORKER))
    bench.accept(*range(10, 100))
    assert {1, 2} <= {number for number in range(10) if number in bench.budget}


def test_a_stranger_has_one_time_for_its_answer_and_a_client_reads_as_slowly_as_it_must(bench: Bench) -> None:
    bench.accept(1, 2, 3)
    bench.at(0, *(PhaseEntered(number, Phase.ANSWERING) for number in (1, 2, 3)), Proved(2, CallerKind.CLIENT))
    for second in range(0, 60, 10):
        assert bench.at(second * 1_000, SendingStopped(1), SendingStopped(2), DeadlineReached()) == []
    bench.at(59_000, PhaseEntered(1, Phase.IDLE))  # all of it is handed to the socket, and not read
    assert bench.at(59_999, DeadlineReached()) == []
    expected = [(1, CloseReason.SEND_DEADLINE), (3, CloseReason.SEND_DEADLINE)]
    assert bench.at(60_000, SendingStopped(2), DeadlineReached()) == expected


def test_an_answer_that_was_read_has_no_deadline(bench: Bench) -> None:
    bench.accept(1, 2)
    bench.at(0, PhaseEntered(1, Phase.ANSWERING), PhaseEntered(2, Phase.ANSWERING), SendingStopped(2))
    bench.at(0, PhaseEntered(1, Phase.IDLE), PhaseEntered(2, Phase.IDLE), SendingResumed(2))
    assert bench.at(10**9, DeadlineReached()) == []


def test_all_addresses_together_are_bounded(bench: Bench) -> None:
    for number in range(1, 6):
        bench.accept(number, address=f"192.0.2.{number}")
    assert bench.closed == [(1, CloseReason.UNKNOWN_CAP)]


def test_a_flood_from_their_own_address_displaces_no_worker(bench: Bench) -> None:
    bench.known(1, caller=CallerKind.WORKER, phase=Phase.ANSWERING)
    bench.known(2, caller=CallerKind.WORKER)
    bench.accept(*range(10, 5_000))
    assert {1, 2} <= {number for number in range(10) if number in bench.budget}
    assert bench.budget.count(CallerKind.WORKER) == 2
    assert bench.budget.count(CallerKind.UNKNOWN) == 3


def test_a_worker_that_comes_in_a_flood_is_taken_and_stays(bench: Bench) -> None:
    bench.accept(*range(10, 100))
    bench.accept(1)
    bench.at(0, PhaseEntered(1, Phase.ANSWERING), Proved(1, CallerKind.WORKER), PhaseEntered(1, Phase.IDLE))
    bench.accept(*range(200, 300))
    assert 1 in bench.budget


def test_when_all_places_are_taken_an_idle_client_makes_room_before_a_newcomer_is_refused(bench: Bench) -> None:
    bench.known(1, 2)
    bench.known(3, 4, 5, 6, caller=CallerKind.WORKER)
    bench.accept(7)
    bench.at(0, PhaseEntered(7, Phase.ANSWERING))
    bench.accept(8)
    bench.at(0, PhaseEntered(8, Phase.ANSWERING))
    assert bench.closed == [(1, CloseReason.CONNECTIONS_CAP), (2, CloseReason.CONNECTIONS_CAP)]
    bench.accept(9)
    assert bench.closed[-1] == (9, CloseReason.CONNECTIONS_CAP)
    assert len(bench.budget) == LIMITS.connections_max


def test_standing_only_rises(bench: Bench) -> None:
    bench.known(1, caller=CallerKind.WORKER)
    bench.at(0, Proved(1, CallerKind.CLIENT))
    assert bench.budget.count(CallerKind.WORKER) == 1


def test_what_is_closed_is_heard_no_more(bench: Bench) -> None:
    bench.accept(1)
    bench.at(5_000, DeadlineReached())
    late = (PhaseEntered(1, Phase.IDLE), BodyReceived(1, 1), Proved(1, CallerKind.WORKER), SendingStopped(1), SendingResumed(1))
    assert bench.at(5_000, *late) == []
    assert len(bench.budget) == 0
    assert bench.budget.count(CallerKind.WORKER) == 0


def test_a_number_is_used_once(bench: Bench) -> None:
    bench.accept(1)
    with pytest.raises(InvariantError):
        bench.accept(1)


class AnyTraffic(RuleBasedStateMachine):
    """Whatever callers do: the bounds hold, no known caller is displaced by one that is not, and every silence ends."""

    @initialize()
    def begin(self) -> None:
        self.budget = ConnectionBudget(LIMITS)
        self.now_ms = 0
        self.next = 0
        self.open: dict[int, tuple[CallerKind, Phase]] = {}

    def tell(self, event: Event) -> list[CloseConnection]:
        actions = self.budget.handle(event, now_ms=self.now_ms)
        for action in actions:
            caller, phase = self.open.pop(action.connection)
            if action.reason in (CloseReason.ADDRESS_CAP, CloseReason.UNKNOWN_CAP):
                assert caller is CallerKind.UNKNOWN
            if action.reason is CloseReason.CONNECTIONS_CAP:
                assert caller is not CallerKind.WORKER
                assert phase is not Phase.ANSWERING
        return actions

    @rule(address=st.sampled_from([HERE, THERE, "::1"]))
    def accept(self, address: str) -> None:
        self.next += 1
        self.open[self.next] = (CallerKind.UNKNOWN, Phase.HEAD)
        assert len(self.tell(Accepted(self.next, address))) <= 1

    @rule(choice=st.integers(0, 10**6), phase=st.sampled_from(list(Phase)))
    def enter(self, choice: int, phase: Phase) -> None:
        if self.open:
            number = sorted(self.open)[choice % len(self.open)]
            self.open[number] = (self.open[number][0], phase)
            self.tell(PhaseEntered(number, phase))

    @rule(choice=st.integers(0, 10**6), caller=st.sampled_from(list(CallerKind)))
    def prove(self, choice: int, caller: CallerKind) -> None:
        if self.open:
            number = sorted(self.open)[choice % len(self.open)]
            self.open[number] = (max(caller, self.open[number][0]), self.open[number][1])
            self.tell(Proved(number, caller))

    @rule(choice=st.integers(0, 10**6), event=st.sampled_from([SendingStopped, SendingResumed]))
    def send(self, choice: int, event: type[SendingStopped | SendingResumed]) -> None:
        if self.open:
            self.tell(event(sorted(self.open)[choice % len(self.open)]))

    @rule(number=st.integers(0, 50))
    def close(self, number: int) -> None:
        self.open.pop(number, None)
        self.tell(Closed(number))

    @rule(by_ms=st.integers(0, 40_000))
    def pass_time(self, by_ms: int) -> None:
        self.now_ms += by_ms
        self.tell(DeadlineReached())

    @rule()
    def a_long_time_ends_all_that_owe_bytes(self) -> None:
        self.now_ms += 10**9
        self.tell(DeadlineReached())
        assert {phase for _, phase in self.open.values()} <= {Phase.ANSWERING, Phase.IDLE}
        assert (CallerKind.UNKNOWN, Phase.ANSWERING) not in self.open.values()

    @invariant()
    def bounds_hold(self) -> None:
        if not hasattr(self, "budget"):
            return
        assert len(self.budget) == len(self.open) <= LIMITS.connections_max
        for caller in CallerKind:
            assert self.budget.count(caller) == sum(found is caller for found, _ in self.open.values())
        assert self.budget.count(CallerKind.UNKNOWN) <= LIMITS.unknown_max


TestAnyTraffic = AnyTraffic.TestCase
TestAnyTraffic.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# --------------------------------------------------------------------------------------------------------------- bodies


def test_half_of_the_bytes_are_for_workers_alone() -> None:
    bodies = BodyBudget(100, kept_for_workers=50)
    assert bodies.take(1, 50, CallerKind.CLIENT)
    assert not bodies.take(2, 1, CallerKind.CLIENT)
    assert bodies.take(3, 50, CallerKind.WORKER)
    assert not bodies.take(4, 1, CallerKind.WORKER)
    assert (bodies.held, bodies.refused) == (100, 2)
    bodies.give_back(1)
    bodies.give_back(1)
    assert bodies.held == 50
    assert bodies.take(4, 50, CallerKind.WORKER)


def test_who_proved_nothing_holds_nothing() -> None:
    assert not BodyBudget(100, kept_for_workers=0).take(1, 1, CallerKind.UNKNOWN)
