"""The driver: `python -m tests.cluster.job`, on its own host. It runs one job on Spark, or on plain processes, and prints how the
job stands as a line of JSON, several times a second, until its end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

import holdfast as hf
from holdfast.operators.sources.generator import GeneratorSource
from tests.cluster.plan import HEARTBEAT_TIMEOUT_MS
from tests.cluster.workers import PlainLauncher

KEYS = 211
MS_PER_ROW = 10
WINDOW_S = 5
POLL_S = 0.25
TERMINAL = ("FINISHED", "FAILED", "CANCELED")
SCHEMA = pa.schema([("id", pa.int64()), ("key", pa.int64()), ("value", pa.int64()), ("time", pa.timestamp("ms", "UTC"))])
COUNTED = pa.schema([("key", pa.int64()), ("id", pa.int64()), ("nth", pa.int64())])
ROWS_SQL = f"SELECT i AS id, (i * 7919) % {KEYS} AS key, i % 1000 AS value, i * {MS_PER_ROW} AS time_ms FROM range({{rows}}) t(i)"
"""The rows that `make_rows` makes, as DuckDB says it."""


def make_rows(indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
    times = pa.array(indices * MS_PER_ROW).cast(pa.timestamp("ms", "UTC"))
    return pa.RecordBatch.from_arrays(
        [pa.array(indices), pa.array(indices * 7919 % KEYS), pa.array(indices % 1000), times], schema=SCHEMA
    )


class Counted(hf.ProcessFunction):
    """Each row with how many of its key came up to it: a loss or a repetition anywhere shows in the output."""

    seen = hf.ValueStateDescriptor("seen", int)
    states = (seen,)

    def process_element(self, value: dict[str, Any], ctx: hf.ProcessContext, out: hf.Collector) -> None:
        state = ctx.state(self.seen)
        count = (state.value() or 0) + 1
        state.update(count)
        out({"key": value["key"], "id": value["id"], "nth": count})


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one run of the job, JSON on the command line."""

    rows: int
    rows_per_second: float
    parallelism: int
    coordinator: str
    token: str
    output: str
    """Location below which the sinks write."""
    spark: dict[str, str] | None = None
    """Settings of the session; None: workers are plain processes."""
    remote: str | None = None
    """URL of Spark Connect, instead of a classic session."""
    workers: tuple[tuple[str, ...], ...] = ()
    """Of plain processes: for each host the words before a command that run it there."""
    folder: str = ""
    """Of plain processes: their local disks, and logs."""


def build(options: Options, launcher: Any = None) -> hf.Environment:
    env = hf.Environment(
        "cluster",
        parallelism=options.parallelism,
        coordinator=options.coordinator,
        token=options.token,
        launcher=launcher,
        checkpoint_interval_ms=1_000,
        heartbeat_interval_ms=1_000,
        heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
        state_backend="rocksdb",
        # what a cut leaves open is tried again: a job that gave up would prove nothing
        restart=hf.RestartStrategy(),
    )
    rows = GeneratorSource(make_rows, options.rows, SCHEMA, rows_per_second=options.rows_per_second)
    keyed = env.from_source(rows).uid("rows").assign_timestamps("time", max_out_of_orderness_ms=0).uid("time").key_by("key")
    windows = keyed.window(hf.Tumbling(seconds=WINDOW_S)).aggregate(n=hf.count(), total=hf.sum("value")).uid("windowed")
    windows.sink_to(hf.ParquetSink(f"{options.output}/windows")).uid("windows-out")
    counts = keyed.process(Counted(), returns=COUNTED).uid("counted")
    counts.sink_to(hf.ParquetSink(f"{options.output}/counts")).uid("counts-out")
    return env


@contextmanager
def session(options: Options) -> Iterator[Any]:
    """The Spark session; None without Spark."""
    if options.spark is None:
        yield None
        return
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("cluster")
    builder = builder.remote(options.remote) if options.remote else builder
    for name, value in options.spark.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def main(arguments: list[str]) -> int:
    options = msgspec.json.decode(arguments[0], type=Options)
    with ExitStack() as stack:
        spark = stack.enter_context(session(options))
        launcher = None if spark is not None else PlainLauncher(options.workers, options.folder)
        job = build(options, launcher).execute(progress=False)
        stack.enter_context(job)
        while (told := _standing(job)).get("state") not in TERMINAL:
            _tell(told)
            time.sleep(POLL_S)
        state = job.wait(60)
        _tell({**told, "state": state, "records_in": job.progress().records_in})
    return 0 if state == "FINISHED" else 1


def _standing(job: Any) -> dict[str, Any]:
    """How the job stands, as its coordinator says; without an answer nothing."""
    try:
        workers, checkpoints = job.client.workers(job.job_id), job.client.checkpoints(job.job_id)
    except hf.HoldfastError as error:
        return {"error": str(error)}
    latest = checkpoints["latest"]["completed"]
    return {
        "state": workers["state"],
        "attempt": workers["attempt"],
        "restarts": workers["restarts"],
        "failure": workers["last_failure"] or workers["failure"],
        "registered": sum(worker["registered"] for worker in workers["workers"]),
        "checkpoint": 0 if latest is None else latest["id"],
    }


def _tell(told: dict[str, Any]) -> None:
    print(json.dumps(told), flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
