"""A real worker process that is stopped: its launcher replaces it, whether it can kill it or not; one that wakes leaves."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from holdfast.operators.base import JobPlan
from holdfast.operators.spark import slots as spark_slots
from holdfast.operators.spark.progress import seen_workers
from holdfast.operators.spark.slots import Ended, SlotRunner
from holdfast.operators.spark.supervisor import SlotSupervisor, StopRequested, WorkerEnd, WorkersSeen
from holdfast.operators.worker.main import EXIT_RESPAWN, WorkerSpec
from holdfast.operators.worker.working_folders import fingerprint_of, kill_process
from tests.harness.nursery import Child, start_worker
from tests.integration.test_two_processes import Cluster, committed, counting_plan, eventually, expected


class ProcessBackend:
    """As Spark does it: a cancelled task is over at once, and its process is not."""

    def __init__(self, spec: WorkerSpec, folder: Path) -> None:
        self._spec = spec
        self._folder = folder
        self.processes: dict[tuple[int, int], Child] = {}
        self._ended: dict[tuple[int, int], Ended] = {}
        self._attempts = 0

    def start(self, slot: int, spawn: int, ended: Ended) -> None:
        self._attempts += 1
        path = self._folder / f"spec-{slot}-{spawn}"
        # The kernel's death signal follows the thread that starts a process, which need not live as long.
        spec = replace(self._spec, slot=slot, spawn=spawn, task_attempt=self._attempts, watch_parent=False)
        path.write_bytes(pickle.dumps(spec))
        process = start_worker(str(path), str(self._folder / f"worker-{slot}-{spawn}.log"))
        self.processes[slot, spawn] = process
        self._ended[slot, spawn] = ended
        threading.Thread(target=self._watch, args=(process, ended), daemon=True).start()

    def _watch(self, process: Child, ended: Ended) -> None:
        code = process.wait()
        ended(WorkerEnd.LEFT if code == 0 else WorkerEnd.DIED, f"exit code {code}")

    def cancel(self, slot: int, spawn: int) -> None:
        self._ended[slot, spawn](WorkerEnd.DIED, "cancelled")

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def quick_to_miss(plan: JobPlan) -> JobPlan:
    """A worker counts as hung after 2 s, not 50."""
    config = msgspec.structs.replace(plan.graph.config, heartbeat_interval_ms=300, heartbeat_timeout_ms=2_000)
    return replace(plan, graph=msgspec.structs.replace(plan.graph, config=config))


@pytest.mark.slow
@pytest.mark.parametrize("in_reach", [pytest.param(True, marks=pytest.mark.endurance), False], ids=["killed", "wakes"])
def test_a_stopped_worker_gets_a_successor(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_reach: bool
) -> None:
    if not in_reach:
        monkeypatch.setattr(spark_slots, "kill_process", lambda pid, fingerprint: False)
    rows = 4_000
    plan = quick_to_miss(counting_plan(rows, 8.0, tmp_path / "out", "memory"))
    accepted = cluster.client.submit(cluster.submission(plan))
    job = accepted.job_id
    backend = ProcessBackend(cluster.spec(accepted, plan), cluster.logs)
    runner = SlotRunner(SlotSupervisor.of(accepted.slots, plan.graph.config), backend, lambda slot, error: None)
    runner.start()

    def look() -> dict[int, bool]:
        workers = cluster.client.workers(job)
        runner.post(WorkersSeen(seen_workers(workers)))
        return {worker["spawn"]: worker["registered"] for worker in workers["workers"] if worker["slot"] == 0}

    try:
        eventually(lambda: look() and cluster.completed(job) >= 2, "two checkpoints")
        hung = backend.processes[0, 1]
        attempt = cluster.client.workers(job)["attempt"]
        os.kill(hung.pid, signal.SIGSTOP)
        eventually(lambda: look() == {2: True} and cluster.state_of(job) == "RUNNING", "a successor in its place")
        assert cluster.client.workers(job)["attempt"] == attempt + 1
        if in_reach:
            assert hung.wait(20) == -signal.SIGKILL
        else:
            assert hung.poll() is None
            os.kill(hung.pid, signal.SIGCONT)
            # Told that another holds its slot, it leaves by itself; its launcher has started that one, and starts no third.
            assert hung.wait(20) == EXIT_RESPAWN
        assert (0, 3) not in backend.processes
        assert look() == {2: True}
        cluster.wait_finished(job)
        assert cluster.client.workers(job)["attempt"] == attempt + 1, "who wakes disturbs nobody"
    finally:
        runner.post(StopRequested())
        backend.close()
    assert runner.ended.wait(20)
    assert committed(tmp_path / "out") == expected(rows)


# ------------------------------------------------------------------------------------------------------ whom it kills


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_a_stopped_process_is_killed_by_its_fingerprint(sleeper: subprocess.Popen[bytes]) -> None:
    os.kill(sleeper.pid, signal.SIGSTOP)
    assert kill_process(sleeper.pid, fingerprint_of(sleeper.pid))
    assert sleeper.wait(20) == -signal.SIGKILL


def test_another_process_of_the_same_pid_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    assert not kill_process(sleeper.pid, fingerprint_of(os.getpid()))
    assert not kill_process(sleeper.pid, "")
    assert not kill_process(os.getpid(), fingerprint_of(os.getpid()))
    assert sleeper.poll() is None


def test_a_number_that_is_no_pid_kills_nobody() -> None:
    assert not kill_process(2**62, "f" * 32)


def test_a_process_that_is_gone_has_no_fingerprint(sleeper: subprocess.Popen[bytes]) -> None:
    fingerprint = fingerprint_of(sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    assert fingerprint_of(sleeper.pid) == ""
    assert not kill_process(sleeper.pid, fingerprint)
