"""kill -9 of workers on real Spark, with one that stands by and without: the output is exact, and who stood by takes the slot."""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.api.client import RestClient
from holdfast.api.tokens import read_token
from holdfast.statebackends.layout import RUN_FILE, TOKEN_FILE
from tests.spark.test_end_to_end import ROWS, assert_exact, build, drive, events, wait_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.endurance, pytest.mark.timeout(280)]

KILLS = 6


def of_slot(job: Any, slot: int) -> dict[str, Any]:
    (found,) = (worker for worker in job.client.workers(job.job_id)["workers"] if worker["slot"] == slot)
    return dict(found)


@pytest.mark.parametrize("standbys", [1, 0])
def test_workers_are_killed_again_and_again(spark: SparkSession, tmp_path: Path, standbys: int) -> None:
    frame = events(spark)
    settings: dict[str, Any] = {"state_dir": str(tmp_path / "state"), "standby_workers_per_host": standbys}
    env, windows, counts = build(frame, tmp_path, ROWS / 25, **settings)
    job = env.execute(progress=False)
    times: list[float] = []
    for number in range(KILLS):
        completed = job.client.checkpoints(job.job_id)["counts"]["completed"]
        wait_for(lambda completed=completed: job.client.checkpoints(job.job_id)["counts"]["completed"] > completed)  # type: ignore[misc]
        wait_for(lambda: len(job.client.workers(job.job_id)["standbys"]) == standbys)
        standing = job.client.workers(job.job_id)["standbys"]
        attempt, victim = job.client.workers(job.job_id)["attempt"], of_slot(job, number % 2)["pid"]
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda attempt=attempt: job.client.workers(job.job_id)["attempt"] > attempt and job.state() == "RUNNING")  # type: ignore[misc]
        times.append(round(time.monotonic() - began, 3))
        successor = of_slot(job, number % 2)["pid"]
        assert successor != victim
        if standing:
            assert successor == standing[0]["pid"], "the one that stood by, and no other"
    assert job.wait(120) == "FINISHED"
    assert_exact(spark, frame, windows, counts)
    sys.stdout.write(f"{standbys} stand by: seconds from kill -9 to RUNNING: {times}, median {statistics.median(times)}\n")


def test_a_task_that_spark_repeats_supersedes_nobody(tmp_path: Path) -> None:
    """On a cluster Spark runs a failed task again by itself, up to four times: its worker comes behind the one that stood by."""
    driver, described = drive(tmp_path, "local-cluster[1,5,1024]", ROWS / 12, restarts=1)
    try:
        state = tmp_path / "state"
        client = RestClient(str(json.loads((state / RUN_FILE).read_text())["url"]), read_token(state / TOKEN_FILE))
        (job,) = (each["jid"] for each in client.jobs())
        wait_for(lambda: client.workers(job)["standbys"] and list((tmp_path / "counts").glob("part-*.parquet")))
        os.kill(described["workers"][1]["pid"], signal.SIGKILL)
        assert driver.wait(200) == 0, (tmp_path / "driver.log").read_text()[-3000:]
    finally:
        driver.kill()
        driver.wait()
    told = (tmp_path / "driver.log").read_text()
    assert (told.count("; restart "), told.count("WorkerSuperseded")) == (1, 0), told[-3000:]
