"""How many events a second a query takes: one worker process, no output, state in files, a checkpoint each second."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.api.launch import Environment
from holdfast.api.nexmark.query import Auctions, Query
from holdfast.operators.sinks.files.parquet import FileSink
from holdfast.operators.sinks.simple import Blackhole
from holdfast.statebackends.errors import JobFailedError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVENTS = 20_000_000
EVENTS_PER_SECOND = 100_000
"""Of event time."""
CHECKPOINT_INTERVAL_MS = 1_000

FLINK: dict[str, int] = {
    "q0": 379, "q4": 28, "q5": 75, "q7": 23, "q8": 162, "q9": 14, "q11": 46, "q12": 194, "q16": 45, "q17": 161, "q18": 65,
    "q19": 43, "q20": 18,
}  # fmt: skip
"""Thousand events a second and core of Flink 2.0, as published with Nexmark."""


@dataclass(frozen=True)
class Measured:
    """One run of a query."""

    query: Query
    events: int
    seconds: float
    """From RUNNING to FINISHED, the final checkpoint included."""
    checkpoints: int
    """Completed."""

    @property
    def thousands(self) -> float:
        """Thousand events a second: those of all kinds that the query's streams cover, whether it reads them or not."""
        return self.events / self.seconds / 1_000


def environment(query: Query, events: int, state_dir: str | None = None) -> Environment:
    """The query's job."""
    env = Environment(
        query.name,
        parallelism=1,
        state_backend="filesystem",
        state_dir=state_dir,
        checkpoint_interval_ms=CHECKPOINT_INTERVAL_MS,
    )
    stream = query.build(Auctions(env, events, EVENTS_PER_SECOND))
    writes_files = bool(query.partition_by and state_dir)
    stream.sink_to(FileSink(f"{state_dir}/out", partition_by=query.partition_by) if writes_files else Blackhole(), uid="out")
    return env


def measure(query: Query, events: int = EVENTS) -> Measured:
    """Run the query on Spark's active session. Raises JobFailedError."""
    state_dir = tempfile.mkdtemp(prefix="holdfast-nexmark-")
    try:
        handle = environment(query, events, state_dir).execute(progress=False)
        try:
            state = handle.wait()
            job = handle.client.job(handle.job_id)
            counts: dict[str, Any] = handle.client.checkpoints(handle.job_id).get("counts", {})
        finally:
            handle.close()
    finally:
        shutil.rmtree(state_dir, ignore_errors=True)
    if state != "FINISHED":
        raise JobFailedError(f"query {query.name} ended {state}", job_id=handle.job_id, cause=state)
    seconds = (job["timestamps"]["FINISHED"] - job["timestamps"]["RUNNING"]) / 1_000
    return Measured(query, events, seconds, int(counts.get("completed", 0)))


@contextmanager
def spark() -> Iterator[SparkSession]:
    """A session of its own, in this process."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    session = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    try:
        yield session
    finally:
        session.stop()
