"""Nexmark's q8 on real Spark: workers are killed, and the output is DuckDB's."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import holdfast as hf
from holdfast.api.nexmark.check import EVENTS_PER_SECOND
from holdfast.api.nexmark.oracle import Oracle
from holdfast.api.nexmark.queries import QUERIES
from holdfast.api.nexmark.query import Auctions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.endurance, pytest.mark.timeout(280)]

EVENTS = 200_000
SECONDS = 8
KILLS = 2


def wait_for(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "condition not met"
        time.sleep(0.01)
    return value


def test_new_sellers_are_exact_though_workers_are_killed(spark: SparkSession, tmp_path: Path) -> None:
    query = QUERIES["q8"]
    env = hf.Environment("q8", parallelism=2, checkpoint_interval_ms=300, state_dir=str(tmp_path / "state"))
    sink = hf.ParquetSink(tmp_path / "new")
    found = query.build(Auctions(env, EVENTS, EVENTS_PER_SECOND, EVENTS / SECONDS))
    assert found.schema is not None
    found.sink_to(sink, uid="out")
    job = env.execute(progress=False)
    for slot in range(KILLS):
        completed = job.client.checkpoints(job.job_id)["counts"]["completed"]
        wait_for(lambda completed=completed: job.client.checkpoints(job.job_id)["counts"]["completed"] > completed)  # type: ignore[misc]
        described = job.client.workers(job.job_id)
        (pid,) = (worker["pid"] for worker in described["workers"] if worker["slot"] == slot)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda before=described["attempt"]: job.client.workers(job.job_id)["attempt"] > before)  # type: ignore[misc]
        wait_for(lambda: job.state() == "RUNNING")
    assert job.wait(180) == "FINISHED"
    assert job.progress().restarts >= KILLS
    columns = found.schema.names
    # microseconds, for Spark shows times in the session's zone
    rows = sink.dataframe(spark).selectExpr("id", "name", "unix_micros(window_start) AS window_start").select(columns).collect()
    assert len(rows) > 100
    assert Oracle(EVENTS, EVENTS_PER_SECOND, 0).expected(query).difference(map(tuple, rows), columns) is None
