"""Workers that stand by: which slot each is given, when, and when never."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.barriers.launches import launch_token
from holdfast.barriers.messages import Deploy, ShutdownWorker, StandBy, StandbyOrder, TaskState
from holdfast.coordinator.dispatcher.submit import Starter, resume_submission
from holdfast.coordinator.jobmaster import actions as job_actions
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.slots import LIVENESS_GRACE_MS, STREAM_GRACE_MS
from holdfast.coordinator.jobmaster.standbys import LOOK_MS, OWN_WAIT_MS, PROMISE_MS, RETURN_MS, WAIT_MS
from holdfast.statebackends.errors import AuthenticationError, FencedError, NotFoundError, NotLeaderError, ProtocolError
from holdfast.statebackends.storage.port import run_flow
from tests.coordinator.rig import Rig
from tests.coordinator.world import JOB

NOTHING = StandbyOrder(1)


class Seats(Rig):
    """A rig with workers that stand by."""

    def stands_by(self, seat: int, **fields: Any) -> int:
        """A worker asks; returns its ticket."""
        given = {"submission": 1, "task_attempt": 0, "nonce": f"s{seat}", "pid": 9, "host": "host", "spawn": 1, **fields}
        message = StandBy(JOB, seat, **given)
        self.tickets += 1
        self.feed(job_events.StandbyReceived(self.tickets, message))
        answer = self.answers.get(self.tickets)
        if isinstance(answer, Exception):
            raise answer
        return self.tickets

    def order(self, ticket: int) -> StandbyOrder | None:
        """The answer, or None while there is none."""
        found: StandbyOrder | None = self.answers.get(ticket)
        return found

    def die(self, slot: int, *, seen: bool = True) -> None:
        """kill -9: the stream breaks, and the coordinator finds no process."""
        self.close_stream(slot)
        if seen:
            self.feed(job_events.ProcessEnded(slot, self.sessions[slot]))

    @property
    def looks(self) -> list[job_actions.LookForProcess]:
        return [action for action in self.actions if isinstance(action, job_actions.LookForProcess)]


@pytest.fixture
def rig() -> Seats:
    """Two slots, whose processes the coordinator sees, and attempt 1."""
    rig = Seats()
    for slot in range(2):
        rig.register(slot, is_near=True, spawn=1, pid=5, fingerprint="f")
    for slot in range(2):
        rig.report(slot, 1, TaskState.RUNNING)
    return rig


def test_nobody_is_given_a_slot_while_each_has_a_worker(rig: Seats) -> None:
    ticket = rig.stands_by(2)
    assert rig.order(ticket) is None
    rig.pass_time(WAIT_MS)
    assert rig.order(ticket) == NOTHING, "it asks again: a request has an end"
    assert rig.master.lifecycle.attempt == 1


def test_it_gets_the_slot_of_a_process_that_has_ended(rig: Seats) -> None:
    ticket = rig.stands_by(2)
    rig.die(1)
    assert rig.looks == [job_actions.LookForProcess(1, rig.sessions[1], 5, "f")]
    assert rig.order(ticket) == StandbyOrder(1, 1, 1, 1), "above the dead one's numbers, below those of a later spawn"
    assert rig.state == "RESTARTING"
    rig.report(0, 1, TaskState.CANCELED)
    rig.register(1, spawn=1, task_attempt=1, nonce="s2", seat=2, seat_spawn=1)
    assert rig.state == "RUNNING"
    assert rig.commands(1, Deploy)[-1].deployment.attempt == 2
    assert rig.commands(0, Deploy)[-1].deployment.attempt == 2


def test_a_process_is_looked_for_until_it_has_ended(rig: Seats) -> None:
    """A process closes its files some time before it has ended."""
    rig.stands_by(2)
    rig.close_stream(1)
    rig.pass_time(3 * LOOK_MS)
    assert len(rig.looks) == 4
    rig.open_stream(1)
    rig.pass_time(3 * LOOK_MS)
    assert len(rig.looks) == 4, "it lives: only its stream was broken"


def test_nobody_looks_for_a_process_elsewhere_or_without_use(rig: Seats) -> None:
    rig.close_stream(1)
    rig.pass_time(LOOK_MS)
    assert rig.looks == [], "nobody stands by"
    rig = Seats()
    rig.register(0, fingerprint="f", pid=5)
    rig.stands_by(2)
    rig.close_stream(0)
    rig.pass_time(LOOK_MS)
    assert rig.looks == [], "it may be in another namespace, and alive"


def test_an_end_that_is_told_late_changes_nothing(rig: Seats) -> None:
    session = rig.sessions[1]
    ticket = rig.stands_by(2)
    rig.close_stream(1)
    rig.open_stream(1)
    rig.feed(job_events.ProcessEnded(1, session))
    assert (rig.order(ticket), rig.state) == (None, "RUNNING"), "its stream is open again"
    rig.register(1, spawn=1, attempt=1, nonce="1-0")
    rig.feed(job_events.ProcessEnded(1, session))
    assert (rig.order(ticket), rig.state) == (None, "RUNNING"), "the session is over"


def test_elsewhere_it_waits_for_the_lease(rig: Seats) -> None:
    ticket = rig.stands_by(2)
    rig.die(1, seen=False)
    rig.pass_time(STREAM_GRACE_MS - 1)
    assert rig.order(ticket) is None
    rig.pass_time(1)
    order = rig.order(ticket)
    assert order is not None
    assert order.slot == 1


def test_one_that_fell_silent_is_named_until_its_seat_has_another(rig: Seats) -> None:
    """Its launcher is to end it: it holds a Spark slot, and never ends by itself."""
    rig.stands_by(2)
    silent_ms = rig.master.setup.graph.config.heartbeat_timeout_ms
    for _ in range(4):
        rig.pass_time(silent_ms // 4)
        rig.heartbeat(0)
    rig.register(1, spawn=1, task_attempt=1, nonce="s2", seat=2, seat_spawn=1)
    (silent,) = rig.master.slot_pool.silent_views()
    assert (silent.seat, silent.spawn, silent.pid, silent.fingerprint) == (1, 1, 5, "f")
    rig.stands_by(1, spawn=2)
    assert rig.master.slot_pool.silent_views() == ()


def test_one_that_died_is_not_named(rig: Seats) -> None:
    rig.stands_by(2)
    rig.die(1)
    rig.register(1, spawn=1, task_attempt=1, nonce="s2", seat=2, seat_spawn=1)
    assert rig.master.slot_pool.silent_views() == ()


def test_the_launchers_own_successor_is_no_worse_off(rig: Seats) -> None:
    """Whoever registers first has the slot; the other is refused, and its process asks for a new one."""
    rig.stands_by(2)
    rig.die(1)
    rig.register(1, spawn=2, task_attempt=7, nonce="own")
    with pytest.raises(FencedError, match="none that stood by may take its place"):
        rig.register(1, spawn=1, task_attempt=1, nonce="s2", seat=2, seat_spawn=1)
    rig.report(0, 1, TaskState.CANCELED)
    assert rig.state == "RUNNING"


def test_no_living_worker_is_superseded_by_one_that_stood_by(rig: Seats) -> None:
    """Whatever its numbers: it was ordered when the slot was free, and slept."""
    for numbers in ({"spawn": 1, "task_attempt": 1}, {"spawn": 99, "task_attempt": 99}):
        with pytest.raises(FencedError, match="none that stood by"):
            rig.register(1, nonce="s2", seat=2, seat_spawn=1, **numbers)
    assert rig.state == "RUNNING"


def test_a_zombie_finds_its_slot_taken(rig: Seats) -> None:
    rig.stands_by(2)
    rig.die(1, seen=False)
    rig.pass_time(STREAM_GRACE_MS)
    rig.register(1, spawn=1, task_attempt=1, nonce="s2", seat=2, seat_spawn=1)
    with pytest.raises(FencedError, match="newer process"):
        rig.register(1, spawn=1, task_attempt=0, nonce="1-0", attempt=1)


def test_a_worker_that_is_started_anew_takes_its_own_slot_if_that_is_free(rig: Seats) -> None:
    rig.die(1)
    ticket = rig.stands_by(1, spawn=2, task_attempt=7)
    assert rig.order(ticket) == StandbyOrder(1, 1, 2, 7)


def test_a_worker_that_is_started_anew_supersedes_its_predecessor_at_once(rig: Seats) -> None:
    """Its launcher knows that the task is over; the coordinator may not have seen the stream break."""
    ticket = rig.stands_by(1, spawn=2, task_attempt=7)
    assert rig.order(ticket) == StandbyOrder(1, 1, 2, 7)


def test_a_slot_is_promised_once(rig: Seats) -> None:
    """The launcher was quicker than the broken stream: no other one is ordered there, only to be superseded."""
    other, own = rig.stands_by(2), rig.stands_by(1, spawn=2, task_attempt=7)
    assert rig.order(own) is not None
    rig.die(1)
    assert rig.order(other) is None
    rig.register(1, spawn=2, task_attempt=7, nonce="own")
    rig.report(0, 1, TaskState.CANCELED)
    assert rig.state == "RUNNING"
    assert rig.order(other) is None


def test_a_worker_that_is_started_anew_behind_one_that_took_its_slot_stands_by(rig: Seats) -> None:
    rig.stands_by(2)
    rig.die(1)
    own = rig.stands_by(1, spawn=2, task_attempt=7)
    assert rig.order(own) is None, "the slot is promised"
    rig.register(1, spawn=1, task_attempt=1, nonce="s2", seat=2, seat_spawn=1, is_near=True, pid=6, fingerprint="g")
    assert rig.order(own) is None
    assert [(view.seat, view.spawn) for view in rig.master.standbys.views()] == [(1, 2)]
    assert [(view.slot, view.seat, view.seat_spawn) for view in rig.master.slot_pool.views()] == [(0, -1, 0), (1, 2, 1)]
    rig.die(1)
    assert rig.order(own) == StandbyOrder(1, 1, 2, 7), "its own numbers are above those of the one before it"


def test_a_promise_that_is_not_kept_goes_to_another_one(rig: Seats) -> None:
    rig.stands_by(2)
    rig.die(1)
    other = rig.stands_by(3)
    assert rig.order(other) is None
    rig.pass_time(PROMISE_MS)
    order = rig.order(other)
    assert order is not None
    assert order.slot == 1


def test_a_worker_that_is_started_anew_does_not_wait_long_for_one_that_died_with_its_predecessor(rig: Seats) -> None:
    """An executor is lost, and whoever stood by there with it: its order reaches nobody."""
    rig.stands_by(2)
    rig.die(1)
    rig.pass_time(300)
    own = rig.stands_by(1, spawn=2, task_attempt=7)
    rig.pass_time(OWN_WAIT_MS - 301)
    assert rig.order(own) is None, "it may be on its way"
    rig.pass_time(1)
    assert rig.order(own) == StandbyOrder(1, 1, 2, 7)


@pytest.mark.parametrize("numbers", [(2, 7), (1, 1)], ids=["the driver's next", "the same, which Spark repeats at once"])
def test_one_that_comes_late_is_not_let_in_to_be_superseded(rig: Seats, numbers: tuple[int, int]) -> None:
    """The slot's own successor was ordered in its place; if that does not come either, it may."""
    rig.stands_by(2)
    rig.die(1)
    rig.stands_by(1, spawn=numbers[0], task_attempt=numbers[1])
    rig.pass_time(OWN_WAIT_MS)
    late: dict[str, Any] = {"spawn": 1, "task_attempt": 1, "nonce": "s2", "seat": 2, "seat_spawn": 1}
    with pytest.raises(FencedError, match="newer process was ordered"):
        rig.register(1, **late)
    rig.pass_time(PROMISE_MS)
    rig.register(1, **late)


def test_one_of_the_same_host_is_taken_first(rig: Seats) -> None:
    far, near = rig.stands_by(2, host="another"), rig.stands_by(3)
    rig.die(1)
    assert rig.order(far) is None
    assert rig.order(near) is not None


def test_two_deaths_take_two_workers(rig: Seats) -> None:
    tickets = [rig.stands_by(2), rig.stands_by(3)]
    rig.die(0)
    rig.die(1)
    orders = [rig.order(ticket) for ticket in tickets]
    assert sorted(order.slot for order in orders if order is not None) == [0, 1]


def test_one_that_asks_again_is_one(rig: Seats) -> None:
    first = rig.stands_by(2)
    second = rig.stands_by(2)
    assert rig.order(first) == NOTHING
    rig.die(1)
    assert rig.order(second) is not None


def test_one_that_asks_no_more_is_forgotten(rig: Seats) -> None:
    rig.stands_by(2)
    rig.pass_time(WAIT_MS)
    assert len(rig.master.standbys.views()) == 1
    rig.pass_time(WAIT_MS)
    assert rig.master.standbys.views() == ()


def test_an_older_worker_of_the_seat_is_refused(rig: Seats) -> None:
    rig.stands_by(2, spawn=2)
    with pytest.raises(FencedError, match="a newer worker stands by"):
        rig.stands_by(2, spawn=1, nonce="old")


def test_they_leave_with_the_job(rig: Seats) -> None:
    ticket = rig.stands_by(2)
    rig.call(job_events.CancelRequested)
    for slot in range(2):
        rig.report(slot, 1, TaskState.CANCELED)
    assert rig.state == "CANCELED"
    order = rig.order(ticket)
    assert order is not None
    assert isinstance(order.shutdown, ShutdownWorker)
    assert order.shutdown.job_over
    with pytest.raises(FencedError):
        rig.stands_by(2)


def test_they_look_for_a_new_leader(rig: Seats) -> None:
    ticket = rig.stands_by(2)
    rig.feed(job_events.LeadershipEnded("another leads"))
    assert isinstance(rig.answers[ticket], NotLeaderError)


def resumed(rig: Seats) -> Seats:
    """Under a new leader."""
    rig.open(run_flow(resume_submission(JOB, Starter("leader 2", "", "directory", 0)), rig.storage))
    return rig


def test_a_new_leader_leaves_a_slot_to_the_worker_of_another_seat(rig: Seats) -> None:
    """It is on its way back, and the one that was started in the slot's own seat goes on standing by."""
    rig = resumed(rig)
    assert rig.state == "RECONCILING"
    own = rig.stands_by(1, spawn=2, task_attempt=7)
    rig.pass_time(500)
    assert rig.order(own) is None
    rig.register(1, spawn=1, task_attempt=1, nonce="s2", seat=2, seat_spawn=1, attempt=1)
    rig.register(0, spawn=1, attempt=1, nonce="0-0")
    assert (rig.state, rig.master.lifecycle.attempt) == ("RUNNING", 1)
    rig.pass_time(RETURN_MS)
    assert rig.order(own) is None


def test_a_new_leader_does_not_wait_long_for_it(rig: Seats) -> None:
    rig = resumed(rig)
    own = rig.stands_by(1, spawn=2, task_attempt=7)
    rig.register(0, spawn=1, attempt=1, nonce="0-0")
    rig.pass_time(RETURN_MS)
    assert rig.order(own) == StandbyOrder(rig.setup.epoch, 1, 2, 7)


def test_a_driver_that_leaves_takes_them_along(rig: Seats) -> None:
    ticket = rig.stands_by(2)
    rig.feed(job_events.DriverLeft(99, 1))
    rig.die(1)
    assert rig.order(ticket) is None, "no attempt follows"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"seat": 4}, NotFoundError),
        ({"seat": -1}, NotFoundError),
        ({"submission": 2}, FencedError),
        ({"pid": -1}, ProtocolError),
        ({"task_attempt": 2**63 - 1}, ProtocolError),
        ({"nonce": "\n"}, ProtocolError),
        ({"fingerprint": "x" * 10_000}, ProtocolError),
    ],
)
def test_what_no_worker_says_is_refused(rig: Seats, fields: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        rig.stands_by(**{"seat": 2, **fields})
    assert rig.master.standbys.views() == ()


def with_launch_key() -> Seats:
    rig = Seats()
    rig.open(msgspec.structs.replace(rig.setup, launch_key="key"))
    return rig


def test_a_process_that_no_launcher_started_stands_by_for_nothing() -> None:
    rig = with_launch_key()
    with pytest.raises(AuthenticationError):
        rig.stands_by(2, launch_token="no proof")
    proof = launch_token("key", job_id=JOB, submission=1, slot=2, spawn=1)
    with pytest.raises(AuthenticationError):
        rig.stands_by(3, launch_token=proof)
    rig.stands_by(2, launch_token=proof)


def test_an_order_has_the_proof_for_its_slot() -> None:
    rig = with_launch_key()
    proofs = [launch_token("key", job_id=JOB, submission=1, slot=slot, spawn=1) for slot in range(3)]
    for slot in range(2):
        rig.register(slot, spawn=1, launch_token=proofs[slot])
    ticket = rig.stands_by(2, launch_token=proofs[2])
    rig.die(1)
    order = rig.order(ticket)
    assert order is not None
    assert order.launch_token == proofs[1]
    rig.register(1, spawn=1, task_attempt=1, nonce="s2", seat=2, seat_spawn=1, launch_token=order.launch_token)
    rig.pass_time(LIVENESS_GRACE_MS)
    assert rig.state == "RUNNING"


def test_nothing_is_due_when_nobody_is_left(rig: Seats) -> None:
    """A look that is due, and nobody who could take the place: the owner's thread would never sleep again."""
    rig.stands_by(2)
    rig.close_stream(1)
    rig.feed(job_events.ProcessEnded(1, rig.sessions[1]))
    rig.pass_time(10_000)
    assert rig.master.standbys.next_deadline_ms() is None
