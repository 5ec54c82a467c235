"""A worker that stands by takes the slot of one that was killed: real processes, HTTP and ZeroMQ, and the count is exact."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.coordinator.dispatcher.calls import JobCalls
from holdfast.coordinator.jobmaster.slots import Slot, SlotPool
from holdfast.statebackends.factory import BackendKind
from tests.integration.test_two_processes import Cluster, committed, counting_plan, eventually, expected
from tests.integration.test_two_processes import cluster as cluster


def holders(cluster: Cluster, job: str) -> dict[int, dict[str, Any]]:
    return {worker["slot"]: worker for worker in cluster.client.workers(job)["workers"] if worker["registered"]}


def seat_of(cluster: Cluster, job: str, slot: int) -> int | None:
    """Where the worker of a slot was started, if it is elsewhere."""
    return next((worker["seat"] for index, worker in holders(cluster, job).items() if index == slot), None)


def standing(cluster: Cluster, job: str) -> list[tuple[int, int]]:
    """(seat, spawn) of the workers that stand by."""
    return [(each["seat"], each["spawn"]) for each in cluster.client.workers(job)["standbys"]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The coordinator sees no process of a worker, as one on another host; slots whose process it was told has ended."""
    slots: list[int] = []
    release = SlotPool.process_ended

    def process_ended(self: SlotPool, index: int, session: str) -> Slot | None:
        found = release(self, index, session)
        slots.extend([index] if found is not None else [])
        return found

    monkeypatch.setattr(SlotPool, "process_ended", process_ended)
    defaults = {**(JobCalls.__init__.__kwdefaults__ or {}), "is_running": lambda _pid, _fingerprint: False}
    monkeypatch.setattr(JobCalls.__init__, "__kwdefaults__", defaults)
    return slots


@pytest.mark.slow
def test_its_word_does_where_the_coordinator_sees_nobody(told: list[int], cluster: Cluster, tmp_path: Path) -> None:
    rows = 3_000
    job = cluster.submit(counting_plan(rows, 4.0, tmp_path / "out", "memory"), standbys=1).job_id
    eventually(lambda: cluster.completed(job) >= 1 and standing(cluster, job) == [(2, 1)], "a checkpoint, one that stands by")
    cluster.kill_worker(1)
    eventually(lambda: seat_of(cluster, job, 1) == 2, "another one in its slot")
    cluster.wait_finished(job)
    assert told == [1], "not by the end of its lease"
    assert committed(tmp_path / "out") == expected(rows)


@pytest.mark.slow
@pytest.mark.endurance
def test_it_calls_no_stopped_worker_dead(told: list[int], cluster: Cluster, tmp_path: Path) -> None:
    """SIGSTOP, then SIGCONT: the worker goes on in its slot, and nobody has taken that."""
    rows = 3_000
    job = cluster.submit(counting_plan(rows, 8.0, tmp_path / "out", "memory"), standbys=1).job_id
    eventually(lambda: cluster.completed(job) >= 1 and standing(cluster, job) == [(2, 1)], "a checkpoint, one that stands by")
    assert cluster.slots is not None
    pid = cluster.slots.pid(1)
    assert pid is not None
    attempt = cluster.client.workers(job)["attempt"]
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(1.5)  # longer than a lost stream is waited for: it is the absence of an event that is to be seen
    finally:
        os.kill(pid, signal.SIGCONT)
    before = cluster.completed(job)
    eventually(lambda: cluster.completed(job) > before, "a checkpoint of the worker that went on")
    assert cluster.client.workers(job)["attempt"] == attempt
    assert holders(cluster, job)[1]["pid"] == pid
    cluster.wait_finished(job)
    assert told == []
    assert committed(tmp_path / "out") == expected(rows)


@pytest.mark.slow
def test_it_takes_the_slot_of_a_killed_worker(cluster: Cluster, tmp_path: Path) -> None:
    rows = 3_000
    job = cluster.submit(counting_plan(rows, 4.0, tmp_path / "out", "memory"), standbys=1).job_id
    eventually(lambda: cluster.completed(job) >= 2 and standing(cluster, job) == [(2, 1)], "checkpoints, one that stands by")
    assert cluster.slots is not None
    standby = cluster.slots.pid(2)
    cluster.kill_worker(1)
    eventually(lambda: seat_of(cluster, job, 1) == 2, "another one in its slot")
    assert holders(cluster, job)[1]["pid"] == standby
    eventually(lambda: standing(cluster, job) == [(1, 2)], "the killed one's successor, which stands by")
    cluster.wait_finished(job)
    assert committed(tmp_path / "out") == expected(rows)
    assert [cluster.slots.starts(seat) for seat in range(3)] == [1, 2, 1]
    assert cluster.slots.wait(10), "all leave when the job is over, one that stands by, too"


@pytest.mark.endurance
@pytest.mark.slow
@pytest.mark.parametrize("seats", [(0, 2, 1, 0, 2), (1, 2, 1, 2, 0, 0, 2, 1), (3, 0, 3, 1, 2)])
@pytest.mark.parametrize(("backend", "standbys"), [("rocksdb", 1), ("memory", 2), ("filesystem", 1)])
def test_the_count_is_exact_through_kills_of_whoever_is_there(
    cluster: Cluster, tmp_path: Path, backend: BackendKind, standbys: int, seats: tuple[int, ...]
) -> None:
    """Whoever is in a seat by then: a worker in a slot, one that stands by, or one that is just starting."""
    rows = 4_000
    job = cluster.submit(counting_plan(rows, 2.4 * len(seats), tmp_path / "out", backend), standbys=standbys).job_id
    assert cluster.slots is not None
    for seat in (each % (2 + standbys) for each in seats):
        before = cluster.completed(job)
        eventually(lambda before=before: cluster.completed(job) > before + 1, "checkpoints")  # type: ignore[misc]
        eventually(lambda seat=seat: cluster.slots.pid(seat) is not None, "a process in the seat")  # type: ignore[misc]
        cluster.kill_worker(seat)
    cluster.wait_finished(job)
    assert committed(tmp_path / "out") == expected(rows)
    assert cluster.slots.wait(15), "all leave when the job is over"


@pytest.mark.slow
def test_a_coordinator_that_restarts_finds_everybody_where_he_was(cluster: Cluster, tmp_path: Path) -> None:
    rows = 3_000
    job = cluster.submit(counting_plan(rows, 5.0, tmp_path / "out", "memory"), standbys=1).job_id
    eventually(lambda: cluster.completed(job) >= 1 and standing(cluster, job) == [(2, 1)], "a checkpoint, and one that stands by")
    cluster.kill_worker(0)
    eventually(lambda: seat_of(cluster, job, 0) == 2, "another one in its slot")
    eventually(lambda: standing(cluster, job) == [(0, 2)] and cluster.state_of(job) == "RUNNING", "the job runs on")
    attempt = cluster.client.workers(job)["attempt"]
    cluster.restart_coordinator()
    eventually(lambda: cluster.state_of(job) == "RUNNING" and standing(cluster, job) == [(0, 2)], "the job led on")
    assert seat_of(cluster, job, 0) == 2
    assert cluster.client.workers(job)["attempt"] == attempt, "no failover"
    cluster.wait_finished(job)
    assert committed(tmp_path / "out") == expected(rows)
