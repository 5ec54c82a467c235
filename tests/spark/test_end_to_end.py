"""Whole jobs on real Spark, killed where it hurts, compared with what Spark SQL says of the same rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import holdfast as hf

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(280)]

ROWS = 24_000


class Counted(hf.ProcessFunction):
    """Emits every record with how many of its key came before it."""

    seen = hf.ValueStateDescriptor("seen", int)
    states = (seen,)

    def __init__(self, gate: Path | None = None) -> None:
        """`gate`: a file without which the last quarter of the records takes a subtask twelve seconds more, and more on a busy
        machine."""
        self._gate = None if gate is None else str(gate)

    def process_element(self, value: dict[str, Any], ctx: hf.ProcessContext, out: hf.Collector) -> None:
        if self._gate is not None and value["id"] >= ROWS * 3 // 4 and not os.path.exists(self._gate):
            time.sleep(0.004)
        state = ctx.state(self.seen)
        count = (state.value() or 0) + 1
        state.update(count)
        out({"k": value["k"], "id": value["id"], "nth": count})


def events(spark: SparkSession) -> DataFrame:
    return spark.range(0, ROWS, 1, 3).selectExpr("id", "id % 17 as k", "timestamp_millis(id * 10) as ts").orderBy("id")


def build(
    frame: DataFrame, folder: Path, rows_per_second: float, *, gate: Path | None = None, **where: Any
) -> tuple[hf.Environment, hf.ParquetSink, hf.ParquetSink]:
    import pyarrow as pa

    where = where or {"state_dir": str(folder / "state")}
    env = hf.Environment("e2e", parallelism=2, checkpoint_interval_ms=300, **where)
    keyed = (
        env.from_dataframe(frame, rows_per_second=rows_per_second)
        .uid("source")
        .assign_timestamps("ts", max_out_of_orderness_ms=0)
        .uid("time")
        .key_by("k")
    )
    windows, counts = hf.ParquetSink(folder / "windows"), hf.ParquetSink(folder / "counts")
    keyed.window(hf.Tumbling(seconds=10)).aggregate(n=hf.count(), total=hf.sum("id")).uid("windowed").sink_to(windows).uid("w-out")
    returns = pa.schema([("k", pa.int64()), ("id", pa.int64()), ("nth", pa.int64())])
    keyed.process(Counted(gate), returns=returns).uid("counted").sink_to(counts).uid("c-out")
    return env, windows, counts


def assert_exact(spark: SparkSession, frame: DataFrame, windows: hf.ParquetSink, counts: hf.ParquetSink) -> None:
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    found = windows.dataframe(spark).selectExpr("k", "unix_seconds(window_start) w", "n", "total").collect()
    wanted = (
        frame.groupBy("k", F.expr("id * 10 div 10000 * 10 w")).agg(F.count("*").alias("n"), F.sum("id").alias("total")).collect()
    )
    assert sorted(map(tuple, found)) == sorted(map(tuple, wanted))
    # Two source subtasks feed a key, so which of its records is the n-th is open; that each n and each id comes once is not.
    nth = F.row_number().over(Window.partitionBy("k").orderBy("id"))
    expected, counted = (
        frame.select("k", "id", nth.alias("nth")).collect(),
        counts.dataframe(spark).select("k", "id", "nth").collect(),
    )
    assert sorted((row.k, row.id) for row in counted) == sorted((row.k, row.id) for row in expected)
    assert sorted((row.k, row.nth) for row in counted) == sorted((row.k, row.nth) for row in expected)


def assert_totals(spark: SparkSession, progress: hf.Progress, windows: hf.ParquetSink, counts: hf.ParquetSink) -> None:
    """What the driver counted is what there is, however often it was read."""
    taken = {operator.uid: operator.records_in for operator in progress.operators if operator.kind == "sink_writer"}
    assert taken == {"w-out": windows.dataframe(spark).count(), "c-out": counts.dataframe(spark).count()}
    assert (progress.records_in, progress.records_out, progress.late_dropped) == (ROWS, sum(taken.values()), 0)
    assert progress.checkpoints > 0


def wait_for(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "condition not met"
        time.sleep(0.01)
    return value


@pytest.mark.endurance
def test_the_same_worker_is_killed_six_times_and_the_output_is_exact(spark: SparkSession, tmp_path: Path) -> None:
    frame = events(spark)
    env, windows, counts = build(frame, tmp_path, ROWS / 20)
    job = env.execute(progress=False)
    times: list[float] = []
    for _ in range(6):
        assert job.state() == "RUNNING", f"the job ended after {len(times)} kills"
        completed = job.client.checkpoints(job.job_id)["counts"]["completed"]
        wait_for(lambda completed=completed: job.client.checkpoints(job.job_id)["counts"]["completed"] > completed)  # type: ignore[misc]
        described = job.client.workers(job.job_id)
        (pid,) = (worker["pid"] for worker in described["workers"] if worker["slot"] == 0)
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda before=described["attempt"]: job.client.workers(job.job_id)["attempt"] > before)  # type: ignore[misc]
        wait_for(lambda: job.state() == "RUNNING")
        times.append(round(time.monotonic() - began, 2))
    assert job.wait(120) == "FINISHED"
    assert job.progress().restarts >= 6
    assert_exact(spark, frame, windows, counts)
    assert_totals(spark, job.progress(), windows, counts)
    sys.stdout.write(f"seconds from kill -9 to RUNNING: {times}\n")


def serve(state: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A real `holdfast serve`; returns when it says where it is."""
    record = state / "_coordinator.json"
    command = [sys.executable, "-m", "holdfast", "serve", "--state-dir", str(state)]
    root = Path(__file__).resolve().parents[2]
    with open(state.parent / "coordinator.log", "ab") as log:
        process = subprocess.Popen(command, cwd=root, stdout=log, stderr=log)

    def url() -> str | None:
        assert process.poll() is None, (state.parent / "coordinator.log").read_text()[-3000:]
        described = json.loads(record.read_text()) if record.exists() else {}
        return described["url"] if described.get("pid") == process.pid else None

    return process, wait_for(url)


def test_the_coordinator_is_killed_and_the_workers_run_on(spark: SparkSession, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    coordinator, url = serve(state)
    try:
        frame = events(spark)
        token, gate = (state / "_token").read_text().strip(), tmp_path / "gate"
        env, windows, counts = build(frame, tmp_path, ROWS / 10, gate=gate, coordinator=url, token=token)
        with env.execute(progress=False) as job:

            def completed() -> int:
                return int(job.client.checkpoints(job.job_id)["counts"]["completed"])

            def pids() -> list[int]:
                return [worker["pid"] for worker in job.client.workers(job.job_id)["workers"] if worker["connected"]]

            def all_pids() -> list[int]:
                """Empty while a worker has no stream: what is compared later must be whole."""
                workers = job.client.workers(job.job_id)["workers"]
                return [worker["pid"] for worker in workers] if all(worker["connected"] for worker in workers) else []

            wait_for(completed)
            before, attempt = wait_for(all_pids), job.client.workers(job.job_id)["attempt"]
            coordinator.kill()
            coordinator.wait()
            coordinator, again = serve(state)
            assert again == url
            wait_for(lambda: job.state() == "RUNNING" and sorted(pids()) == sorted(before))
            wait_for(completed)
            assert job.client.workers(job.job_id)["attempt"] == attempt
            gate.touch()
            assert job.wait(120) == "FINISHED"
            assert job.progress().restarts == 0
        assert_exact(spark, frame, windows, counts)
        assert_totals(spark, job.progress(), windows, counts)
    finally:
        coordinator.kill()
        coordinator.wait()


DRIVER = """
import json, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from pyspark.sql import SparkSession
spark = (SparkSession.builder.master({master!r}).config("spark.ui.enabled", "false").config("spark.driver.memory", "600m")
    .config("spark.executor.memory", "512m").config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.bindAddress", "127.0.0.1").config("spark.sql.shuffle.partitions", "2").getOrCreate())
spark.sparkContext.setLogLevel("OFF")
from tests.spark.test_end_to_end import assert_exact, assert_totals, build, events
folder, frame = Path({folder!r}), events(spark)
env, windows, counts = build(frame, folder, {rate})
job = env.execute(progress=False)
(folder / "job.json").write_text(json.dumps(job.client.workers(job.job_id)))
print(job.wait(200))
assert job.progress().restarts >= {restarts}, job.progress()
assert_exact(spark, frame, windows, counts)
if {restarts}:
    assert_totals(spark, job.progress(), windows, counts)
spark.stop()
"""


def drive(folder: Path, master: str, rate: float, restarts: int = 0) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """A driver in a process of its own; returns when its workers run."""
    root = str(Path(__file__).resolve().parents[2])
    (folder / "job.json").unlink(missing_ok=True)
    script = folder / "driver.py"
    script.write_text(DRIVER.format(root=root, master=master, folder=str(folder), rate=rate, restarts=restarts))
    with open(folder / "driver.log", "ab") as log:
        driver = subprocess.Popen([sys.executable, str(script)], cwd=folder, stdout=log, stderr=log)
    described = folder / "job.json"

    def workers() -> bool:
        assert driver.poll() is None, (folder / "driver.log").read_text()[-3000:]
        return described.exists() and described.stat().st_size > 0

    wait_for(workers, 150)
    return driver, dict(json.loads(described.read_text()))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.endurance
def test_a_killed_driver_leaves_no_worker_and_its_job_is_resumed_exactly(spark: SparkSession, tmp_path: Path) -> None:
    driver, described = drive(tmp_path, "local[3]", ROWS / 8)
    pids = [worker["pid"] for worker in described["workers"]]
    wait_for(lambda: list((tmp_path / "counts").glob("part-*.parquet")))
    assert all(_runs(pid) for pid in pids)
    driver.kill()
    driver.wait()
    wait_for(lambda: not any(_runs(pid) for pid in pids), 30)
    env, windows, counts = build(events(spark), tmp_path, ROWS)
    job = env.execute(progress=False)
    assert job.wait(120) == "FINISHED"
    assert_exact(spark, events(spark), windows, counts)


@pytest.mark.endurance
def test_a_killed_executor_of_a_cluster_costs_nothing_but_time(tmp_path: Path) -> None:
    driver, described = drive(tmp_path, "local-cluster[2,2,1024]", ROWS / 8, restarts=1)
    try:
        wait_for(lambda: list((tmp_path / "counts").glob("part-*.parquet")))
        os.kill(_executor_of(described["workers"][0]["pid"]), signal.SIGKILL)
        assert driver.wait(200) == 0, (tmp_path / "driver.log").read_text()[-3000:]
    finally:
        driver.kill()
        driver.wait()


def _executor_of(pid: int) -> int:
    """The JVM above a Python worker: worker -> daemon -> executor."""
    for _ in range(4):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        if Path(f"/proc/{pid}/comm").read_text().strip() == "java":
            return pid
    raise AssertionError("no executor found")
