"""A stop with a savepoint while a worker dies, and while the coordinator does: whoever asked gets the savepoint all the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.test_two_processes import Cluster, committed, counting_plan, eventually, expected

ROWS = 12_000


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


@pytest.mark.slow
@pytest.mark.parametrize("who", ["worker", "coordinator"])
def test_a_stop_that_a_death_cuts_off_is_tried_again(cluster: Cluster, tmp_path: Path, who: str) -> None:
    plan = counting_plan(ROWS, 60.0, tmp_path / "out", "memory")
    job = cluster.submit(plan).job_id
    eventually(lambda: cluster.completed(job) >= 1, "a checkpoint")
    assert cluster.slots is not None
    held = cluster.slots.pid(1)
    assert held is not None
    os.kill(held, signal.SIGSTOP)  # without it the savepoint can't be complete before the death

    def stop_under_way() -> bool:
        history = cluster.client.checkpoints(job)["history"]
        return any(each["is_savepoint"] and each["status"] == "IN_PROGRESS" for each in history)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(cluster.client.stop, job, str(tmp_path / "savepoints"))
        eventually(stop_under_way, "the savepoint under way")
        if who == "worker":
            os.kill(held, signal.SIGKILL)
        else:
            cluster.restart_coordinator()
            os.kill(held, signal.SIGCONT)
        location = Path(asked.result(60))
    cluster.wait_finished(job)
    assert (location / "_metadata").exists()
    savepoints = [each for each in cluster.client.checkpoints(job)["history"] if each["is_savepoint"]]
    assert who == "coordinator" or [each["status"] for each in savepoints] == ["COMPLETED", "FAILED"]
    assert cluster.slots.wait(10), "workers leave when the job is over"
    cluster.slots.close()
    before = committed(tmp_path / "out")
    assert before
    assert before <= expected(ROWS), "what is committed is what was counted, once"
