"""The questions of a worker that stands by, and what a worker becomes that is given a slot."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from holdfast.barriers import codec
from holdfast.barriers.messages import LOOKS_MAX, ProcessLook, ShutdownWorker, StandBy, StandbyOrder
from holdfast.barriers.processes import fingerprint_of, has_ended, is_running, sight
from holdfast.operators.spark import slots as spark_slots
from holdfast.operators.spark.access import count_hosts
from holdfast.operators.spark.progress import seen_workers
from holdfast.operators.spark.slots import WorkerTemplate, run_in_task
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
from holdfast.operators.worker.standby import LOOKING_MS, Ask, Look, Waiting, look_for
from holdfast.statebackends.errors import ProtocolError

MESSAGE = StandBy("job", 2, 3, 4, "nonce", 5, "host", 1, "proof")


@pytest.fixture
def waiting() -> Waiting:
    return Waiting(MESSAGE, random.Random(1))


def test_it_asks_until_there_is_a_slot(waiting: Waiting) -> None:
    assert waiting.begin() == Ask(MESSAGE, 0)
    assert waiting.answered(StandbyOrder(1)) == Ask(MESSAGE, 0), "the coordinator holds the question back: there is no pause"
    order = StandbyOrder(1, 0, 1, 9, "its proof")
    assert waiting.answered(order) == order


def test_it_looks_for_others_and_tells_what_it_found_once(waiting: Waiting) -> None:
    looks = (ProcessLook(7, "f"), ProcessLook(8, "g"))
    assert waiting.answered(StandbyOrder(1, looks=looks)) == Look(looks)
    assert waiting.looked(["g"]) == Ask(replace_message(ended=("g",)), 0)
    assert waiting.failed(0).message == MESSAGE, "what got lost is asked for again"
    assert waiting.looked([]) == Ask(MESSAGE, 0)


def replace_message(**fields: object) -> StandBy:
    return msgspec.structs.replace(MESSAGE, **fields)


def test_more_than_it_can_be_asked_for_is_no_message() -> None:
    for message in (
        replace_message(ended=("f",) * (LOOKS_MAX + 1)),
        replace_message(ended=("f" * 65,)),
        replace_message(sight="f" * 65),
        StandbyOrder(1, looks=(ProcessLook(1, "f"),) * (LOOKS_MAX + 1)),
    ):
        with pytest.raises(ProtocolError):
            codec.decode(codec.encode(message), type(message))


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


@pytest.mark.parametrize(
    ("executors", "hosts"),
    [
        ([], 1),
        (["driver"], 1),
        (["driver", "driver"], 1),
        (["driver", "a", "b"], 2),
        (["a", "driver", "driver", "a"], 2),
        (["10.0.0.9", "a"], 2),
    ],
)
def test_hosts_are_those_of_executors_with_the_drivers_if_one_runs_there(executors: list[str], hosts: int) -> None:
    """Spark names the driver among its executors, once; under a name that it is not known by, it counts as a host."""
    assert count_hosts(executors, "driver") == hosts


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
    assert template.launched("", seat, spawn).stands_by(seat, is_repeated=True) is (slots > 0), "its slot may be taken by now"


@pytest.mark.parametrize("attempt", [None, 0, 1])
def test_a_task_that_spark_runs_again_asks_for_a_slot(monkeypatch: pytest.MonkeyPatch, attempt: int | None) -> None:
    """On a cluster Spark repeats a failed task itself: its worker has the number of the first one, and a later task."""
    import pyspark

    context = SimpleNamespace(taskAttemptId=lambda: 7, attemptNumber=lambda: attempt)
    ran: list[WorkerSpec] = []

    def run(spec: WorkerSpec) -> ShutdownWorker:
        ran.append(spec)
        return ShutdownWorker("over")

    monkeypatch.setattr(pyspark.TaskContext, "get", lambda: None if attempt is None else context)
    monkeypatch.setattr(spark_slots, "run_worker", run)
    run_in_task(WorkerTemplate("job", 1, "", None, "", b"", 0, slots=2).launched("", 1, 1), 1)
    assert [(spec.stands_by, spec.has_slot, spec.spawn) for spec in ran] == [(attempt == 1, True, 1)]


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


@contextmanager
def a_process() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@ON_LINUX
def test_a_killed_process_is_found_to_have_ended_and_a_stopped_one_is_not() -> None:
    with a_process() as dies, a_process() as lives:
        looks = [ProcessLook(child.pid, fingerprint_of(child.pid)) for child in (dies, lives)]
        lives.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        assert look_for(looks) == []
        assert time.monotonic() - began >= LOOKING_MS / 1000 - 0.01
        dies.kill()
        assert look_for(looks) == [looks[0].fingerprint]
        dies.wait()
        assert look_for(looks) == [looks[0].fingerprint]
        lives.send_signal(signal.SIGCONT)
        assert not has_ended(lives.pid, looks[1].fingerprint)


@ON_LINUX
def test_what_cant_be_told_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_process() as child:
        fingerprint = fingerprint_of(child.pid)
        assert has_ended(child.pid, "0" * 32), "another one has its pid"
        assert not has_ended(child.pid, ""), "a process without a fingerprint was never seen"
        monkeypatch.setattr("holdfast.barriers.processes._PROC", "/nowhere")
        assert not has_ended(child.pid, fingerprint), "no process can be seen at all"
        assert sight() == ""


@ON_LINUX
def test_processes_of_one_owner_and_namespace_see_each_other() -> None:
    code = "from holdfast.barriers.processes import sight; print(sight())"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == sight()
    assert len(sight()) == 32


@ON_LINUX
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
