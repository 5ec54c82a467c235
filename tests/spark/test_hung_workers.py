"""Workers that are stopped and never end, on real Spark: their driver replaces each of them, in time, and the output is exact."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import holdfast as hf
from tests.spark.test_end_to_end import _runs, wait_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(280)]

ROWS = 12_000
REPLACED_S_MAX = 20.0
"""Far above the 2 s that it takes on a machine with nothing else to do: what is asserted is that nobody waits for the worker."""


class Marked(hf.ProcessFunction):
    """Emits every record, and leaves a file when its process sees its first one."""

    seen = hf.ValueStateDescriptor("seen", int)
    states = (seen,)

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.marked = False

    def process_element(self, value: dict[str, Any], ctx: hf.ProcessContext, out: hf.Collector) -> None:
        if not self.marked:
            self.marked = True
            Path(self.folder, str(os.getpid())).touch()
        state = ctx.state(self.seen)
        count = (state.value() or 0) + 1
        state.update(count)
        out({"k": value["k"], "id": value["id"], "nth": count})


def build(spark: SparkSession, folder: Path, *, seconds: float, **settings: Any) -> tuple[hf.Environment, hf.ParquetSink]:
    import pyarrow as pa

    (folder / "marks").mkdir(exist_ok=True)
    settings = {"parallelism": 2, "checkpoint_interval_ms": 300, "state_dir": str(folder / "state"), **settings}
    env = hf.Environment(folder.name, **settings)
    frame = spark.range(0, ROWS, 1, 2).selectExpr("id", "id % 17 as k").orderBy("id")
    sink = hf.ParquetSink(folder / "out")
    returns = pa.schema([("k", pa.int64()), ("id", pa.int64()), ("nth", pa.int64())])
    keyed = env.from_dataframe(frame, rows_per_second=ROWS / seconds).uid("source").key_by("k")
    keyed.process(Marked(str(folder / "marks")), returns=returns).uid("marked").sink_to(sink).uid("out")
    return env, sink


def assert_exact(spark: SparkSession, sink: hf.ParquetSink) -> None:
    rows = sink.dataframe(spark).select("k", "id", "nth").collect()
    assert sorted(row.id for row in rows) == list(range(ROWS))
    of_key = {key: len(range(key, ROWS, 17)) for key in range(17)}
    assert sorted((row.k, row.nth) for row in rows) == sorted((k, nth + 1) for k, count in of_key.items() for nth in range(count))


def lost_at(job: Any) -> float:
    """When the coordinator gave the newest worker up, wall clock in seconds; 0 if it never did."""
    entries = job.client.exceptions(job.job_id)["exceptionHistory"]["entries"]
    return next((entry["timestamp"] / 1000 for entry in entries if "WorkerLost" in entry["stacktrace"]), 0.0)


@pytest.mark.endurance
def test_each_worker_is_stopped_and_replaced_and_the_output_is_exact(spark: SparkSession, tmp_path: Path) -> None:
    env, sink = build(spark, tmp_path, seconds=14, heartbeat_interval_ms=300, heartbeat_timeout_ms=2_000)
    times: list[float] = []
    with env.execute(progress=False) as job:
        for slot in (0, 1):
            completed = job.client.checkpoints(job.job_id)["counts"]["completed"]
            wait_for(lambda completed=completed: job.client.checkpoints(job.job_id)["counts"]["completed"] > completed)  # type: ignore[misc]
            (pid,) = (worker["pid"] for worker in job.client.workers(job.job_id)["workers"] if worker["slot"] == slot)
            before, stopped = lost_at(job), time.time()
            os.kill(pid, signal.SIGSTOP)

            def successor(slot: int = slot, pid: int = pid) -> int:
                worker = next(each for each in job.client.workers(job.job_id)["workers"] if each["slot"] == slot)
                return int(worker["pid"]) if worker["registered"] and worker["pid"] != pid else 0

            new = wait_for(successor)
            mark = tmp_path / "marks" / str(new)
            wait_for(mark.exists)
            lost = lost_at(job)
            assert lost > max(before, stopped)
            times.append(round(mark.stat().st_mtime - lost, 2))
            wait_for(lambda pid=pid: not _runs(pid))  # type: ignore[misc]
        assert job.wait(120) == "FINISHED"
    assert_exact(spark, sink)
    sys.stdout.write(f"seconds from the end of its lease to the successor's first record: {times}\n")
    assert max(times) < REPLACED_S_MAX


def test_jobs_are_executed_in_other_threads_and_on_an_event_loop(spark: SparkSession, tmp_path: Path) -> None:
    """A session is active in the thread that made it alone. Two at once share Spark's slots and the embedded coordinators."""

    def run(name: str) -> None:
        folder = tmp_path / name
        folder.mkdir()
        env, sink = build(spark, folder, seconds=1, parallelism=1)
        with env.execute(progress=False) as job:
            assert job.wait(120) == "FINISHED"
        assert_exact(spark, sink)
        done.append(name)

    done: list[str] = []
    threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)

    async def beside_a_loop() -> None:
        await asyncio.to_thread(run, "async")

    asyncio.run(beside_a_loop())
    assert sorted(done) == ["async", "one", "other"]
