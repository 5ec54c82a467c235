"""The questions of a worker that stands by, and what a worker becomes that is given a slot."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from holdfast.barriers.messages import ShutdownWorker, StandBy, StandbyOrder
from holdfast.barriers.processes import fingerprint_of, is_running
from holdfast.operators.spark.progress import seen_workers
from holdfast.operators.spark.slots import WorkerTemplate
from holdfast.operators.spark.supervisor import (
    LOSS_GRACE_MS,
    CancelWorker,
    GiveUp,
    Launch,
    SeenWorker,
    SlotSupervisor,
    SpawnWorker,
    StandbysReleased,
    WorkerEnd,
    WorkerEnded,
    WorkersSeen,
)
from holdfast.operators.worker.main import WorkerSpec, ordered
from holdfast.operators.worker.session import BACKOFF_MIN_MS
from holdfast.operators.worker.session_events import BACKOFF_MAX_MS
from holdfast.operators.worker.standby import Ask, Waiting

MESSAGE = StandBy("job", 2, 3, 4, "nonce", 5, "host", 1, "proof")


@pytest.fixture
def waiting() -> Waiting:
    return Waiting(MESSAGE, random.Random(1))


def test_it_asks_until_there_is_a_slot(waiting: Waiting) -> None:
    assert waiting.begin() == Ask(MESSAGE, 0)
    assert waiting.answered(StandbyOrder(1)) == Ask(MESSAGE, 0), "the coordinator holds the question back: there is no pause"
    order = StandbyOrder(1, 0, 1, 9, "its proof")
    assert waiting.answered(order) == order


def test_it_leaves_with_the_job(waiting: Waiting) -> None:
    over = ShutdownWorker("over", job_over=True)
    assert waiting.answered(StandbyOrder(1, shutdown=over)) == over
    left = waiting.refused("over", {"state": "FINISHED"}, 0)
    assert isinstance(left, ShutdownWorker)
    assert not left.respawn


def test_it_leaves_when_another_submission_runs_the_job(waiting: Waiting) -> None:
    left = waiting.refused("another", {"newer": 4}, 0)
    assert isinstance(left, ShutdownWorker)
    assert left.superseded


def test_it_leaves_for_a_newer_one_in_its_seat(waiting: Waiting) -> None:
    left = waiting.refused("a newer one", {"held": 2}, 0)
    assert isinstance(left, ShutdownWorker)
    assert left.respawn


def test_a_coordinator_that_knows_an_older_submission_only_is_asked_again(waiting: Waiting) -> None:
    assert isinstance(waiting.refused("stale", {"newer": 2}, 7), Ask)
    assert waiting.unreachable_since_ms == 7


def test_an_older_coordinator_keeps_no_worker_from_its_own_slot(waiting: Waiting) -> None:
    """It has no such path, and answers 404, as for a job that it does not know."""
    assert isinstance(waiting.unknown(0), Ask), "beyond the slots there is nothing to register for"
    own = Waiting(MESSAGE, random.Random(1), has_slot=True)
    order = own.unknown(0)
    assert order == StandbyOrder(0, 2, 1, 4, "proof")
    assert isinstance(order, StandbyOrder)
    assert ordered(replace(SPEC, spawn=1, task_attempt=4, launch_token="proof"), order).seat == -1


def test_it_asks_ever_more_rarely_while_nobody_answers(waiting: Waiting) -> None:
    pauses = [waiting.failed(100 + number).delay_ms for number in range(12)]
    assert BACKOFF_MIN_MS // 2 <= pauses[0] <= BACKOFF_MIN_MS
    assert BACKOFF_MAX_MS // 2 <= pauses[-1] <= BACKOFF_MAX_MS
    assert waiting.unreachable_since_ms == 100
    waiting.answered(StandbyOrder(1))
    assert waiting.unreachable_since_ms is None
    assert waiting.failed(500).delay_ms <= BACKOFF_MIN_MS


SPEC = WorkerSpec("job", 2, 3, 4, "http://here", None, "state", b"", "local", spawn=7, launch_token="mine", stands_by=True)


def test_in_anothers_slot_it_has_the_numbers_of_its_order_and_says_where_it_sits() -> None:
    became = ordered(SPEC, StandbyOrder(1, 0, 1, 9, "its proof"))
    expected = replace(SPEC, slot=0, spawn=1, task_attempt=9, launch_token="its proof", seat=2, seat_spawn=7, stands_by=False)
    assert became == expected


def test_in_its_own_slot_it_is_as_any_other_worker() -> None:
    assert ordered(SPEC, StandbyOrder(1, 2, 7, 4, "mine")) == replace(SPEC, stands_by=False)


@pytest.mark.parametrize(
    ("slots", "seat", "spawn", "stands_by"),
    [(0, 0, 1, False), (0, 0, 2, False), (2, 0, 1, False), (2, 1, 2, True), (2, 2, 1, True), (2, 2, 5, True)],
)
def test_who_asks_for_a_slot(slots: int, seat: int, spawn: int, stands_by: bool) -> None:
    template = WorkerTemplate("job", 1, "", None, "", b"", 0, slots=slots)
    assert template.launched("", seat, spawn).stands_by(seat) is stands_by


def test_the_driver_sees_workers_where_it_started_them() -> None:
    gone = {"slot": 0, "spawn": 1, "registered": False, "seat": -1, "seat_spawn": 0}
    moved = {"slot": 1, "spawn": 1, "registered": True, "seat": 2, "seat_spawn": 3, "pid": 9}
    standing = {"seat": 1, "spawn": 2, "pid": 8, "host": "here", "fingerprint": "f"}
    seen = seen_workers({"workers": [gone, moved], "standbys": [standing]})
    assert [(each.slot, each.spawn, each.registered, each.pid) for each in seen] == [
        (0, 1, False, 0),
        (1, 2, True, 8),
        (2, 3, True, 9),
    ]


def test_a_silent_worker_is_ended_though_another_has_its_slot() -> None:
    """A process that only stands still never ends by itself, and holds a Spark slot in which the next one could stand by."""
    holder = {"slot": 0, "spawn": 1, "registered": True, "seat": 1, "seat_spawn": 1, "pid": 9}
    silent = {"seat": 0, "spawn": 1, "pid": 8, "host": "here", "fingerprint": "f"}
    supervisor = SlotSupervisor(1, standby_count=1)
    supervisor.handle(Launch(), now_ms=0)
    seen = WorkersSeen(seen_workers({"workers": [holder], "standbys": [], "silent": [silent]}))
    assert supervisor.handle(seen, now_ms=1_000) == []
    (cancel,) = supervisor.handle(seen, now_ms=1_000 + LOSS_GRACE_MS)
    assert isinstance(cancel, CancelWorker)
    assert (cancel.slot, cancel.spawn) == (0, 1)
    assert supervisor.handle(WorkerEnded(0, 1, WorkerEnd.DIED), now_ms=1_500) == [SpawnWorker(0, 2)]
    assert supervisor.handle(seen, now_ms=1_600) == [], "it is the one before"


def test_a_job_does_without_a_worker_that_can_never_stand_by() -> None:
    supervisor = SlotSupervisor(1, standby_count=1)
    assert supervisor.handle(Launch(), now_ms=0) == [SpawnWorker(0, 1), SpawnWorker(1, 1)]
    now_ms, actions = 0, []
    for spawn in range(1, 6):
        actions += supervisor.handle(WorkerEnded(1, spawn, WorkerEnd.RAISED, "ImportError"), now_ms=now_ms)
        now_ms += 60_000
        actions += supervisor.handle(Launch(), now_ms=now_ms)
    assert not [action for action in actions if isinstance(action, GiveUp)]
    assert supervisor.running == (0,)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_runs_until_it_has_ended_even_if_nobody_has_taken_note() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        fingerprint = fingerprint_of(child.pid)
        assert is_running(child.pid, fingerprint)
        assert not is_running(child.pid, fingerprint_of(os.getpid())), "another one with its pid"
        assert not is_running(child.pid, "")
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert fingerprint_of(child.pid) == fingerprint, "its parent has not taken note of its end"
        assert not is_running(child.pid, fingerprint)
    finally:
        child.kill()
        child.communicate()
    assert not is_running(child.pid, fingerprint)


def seen(*workers: SeenWorker) -> WorkersSeen:
    return WorkersSeen(workers)


def test_a_seat_that_stands_by_is_released_and_no_other_one() -> None:
    supervisor = SlotSupervisor(2, standby_count=1)
    supervisor.handle(Launch(), now_ms=0)
    supervisor.handle(WorkerEnded(0, 1, WorkerEnd.DIED), now_ms=1)
    standing = SeenWorker(0, 2, True, pid=9, fingerprint="f", stands_by=True)
    supervisor.handle(seen(standing, SeenWorker(1, 1, True), SeenWorker(2, 1, True)), now_ms=2)
    assert supervisor.handle(StandbysReleased(), now_ms=3) == [CancelWorker(0, 2, standing)]
    assert supervisor.handle(WorkerEnded(0, 2, WorkerEnd.DIED), now_ms=4) == [], "it gets no successor"
    assert supervisor.handle(StandbysReleased(), now_ms=5) == []
    assert supervisor.running == (1, 2)
    assert supervisor.handle(WorkerEnded(2, 1, WorkerEnd.DIED), now_ms=6) == [SpawnWorker(2, 2)]


def test_one_that_was_never_seen_is_released_from_the_seats_beyond_the_slots() -> None:
    supervisor = SlotSupervisor(2, standby_count=1)
    supervisor.handle(Launch(), now_ms=0)
    assert supervisor.handle(StandbysReleased(), now_ms=1) == [CancelWorker(2, 1, None)]
