"""Streaming DataFrames as inputs, on real Spark: what the query in the driver seals, and whole jobs that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import holdfast as hf
from holdfast.operators.sources import stream_input as si
from holdfast.operators.sources.stream import StreamSource
from holdfast.operators.sources.stream_query import StreamQuery
from holdfast.operators.sources.stream_savepoint import begin_stream
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import run_flow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(280)]

FOLDER = "job-a/sources/src/000001"


def wait_for(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "condition not met"
        time.sleep(0.01)
    return value


class Files:
    """A folder of input: one file a micro-batch, each with rows (file, n)."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        folder.mkdir()

    def add(self, rows: int = 10) -> None:
        lines = "".join(f'{{"file": {self.count}, "n": {n}}}\n' for n in range(rows))
        hidden = self.folder / f".{self.count}"
        hidden.write_text(lines)
        os.utime(hidden, (1_600_000_000 + self.count, 1_600_000_000 + self.count))  # Spark takes older files first
        hidden.rename(self.folder / f"{self.count:06d}.json")
        self.count += 1

    def stream(self, spark: SparkSession) -> DataFrame:
        return spark.readStream.schema("file bigint, n bigint").option("maxFilesPerTrigger", 1).json(str(self.folder))

    @property
    def rows(self) -> list[tuple[int, int]]:
        return [(file, n) for file in range(self.count) for n in range(10)]


class Job:
    """Implements JobView."""

    def __init__(self) -> None:
        self.is_running = True
        self.read = 0
        self.error = ""

    def rows_read(self, uid: str) -> int:
        return self.read

    def give_up(self, error: str) -> None:
        self.error, self.is_running = error, False


class Running:
    """A query whose readers have just begun."""

    def __init__(self, dataframe: DataFrame, root: Path, submission: int = 1, *, fresh: bool = False, **of: Any) -> None:
        self.storage, self.job = LocalStorage(root), Job()
        source = StreamSource(dataframe, **of)
        begin_stream(source, str(root), "job-a", "src", submission, fresh=fresh)
        self.folder = source.folder
        start = si.StartRecord(1, source.folder, 0, 1)
        run_flow(si.say_start_flow(source.folder, submission, 0, start), self.storage)
        self.query = StreamQuery(source, str(root), "job-a", "src", self.job)
        self.end = LocalStorage(root), f"{source.folder}/ends/job-a-{submission:06d}.json"
        self.query.start()

    @property
    def last(self) -> int:
        found = run_flow(si.last_batch_flow(self.folder), self.storage)
        return -1 if found is None else found.batch_id

    def close(self) -> None:
        self.job.is_running = False
        self.query.stop()


@pytest.fixture
def files(tmp_path: Path) -> Files:
    given = Files(tmp_path / "in")
    for _ in range(3):
        given.add()
    return given


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    opened: list[Running] = []

    def start(*of: Any, **by: Any) -> Running:
        opened.append(Running(*of, **by))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_batches_are_sealed_once_and_a_restarted_query_goes_on(
    spark: SparkSession, files: Files, tmp_path: Path, run: Callable[..., Running]
) -> None:
    root = tmp_path / "state"
    first = run(files.stream(spark), root)
    wait_for(lambda: first.last == 2)
    first.close()
    before = (root / FOLDER / "batches/000000000002/manifest.json").read_bytes()
    (root / FOLDER / "query/commits/2").unlink(missing_ok=True)  # as if the driver had died behind the seal
    (root / FOLDER / "query/commits/.2.crc").unlink(missing_ok=True)
    files.add()
    second = run(files.stream(spark), root, 2, available_now=True)
    wait_for(lambda: (root / FOLDER / "ends/job-a-000002.json").exists() or second.job.error)
    assert second.job.error == ""
    assert (root / FOLDER / "batches/000000000002/manifest.json").read_bytes() == before
    manifests = run_flow(si.unread_batches_flow(FOLDER, 0), LocalStorage(root))
    assert [(each.batch_id, each.first_row, each.rows) for each in manifests] == [(n, 10 * n, 10) for n in range(4)]


def test_a_query_with_another_checkpoint_is_refused(
    spark: SparkSession, files: Files, tmp_path: Path, run: Callable[..., Running]
) -> None:
    root, elsewhere = tmp_path / "state", str(tmp_path / "checkpoint")
    first = run(files.stream(spark), root, checkpoint=elsewhere)
    wait_for(lambda: first.last == 2)
    first.close()
    other = run(files.stream(spark), root, 2, checkpoint=str(tmp_path / "other"))
    wait_for(lambda: other.job.error)
    assert "batch 2 is of query" in other.job.error
    fresh = run(files.stream(spark), root, 3, fresh=True, checkpoint=elsewhere)
    files.add()
    wait_for(lambda: fresh.job.error)
    assert "batch 0 is the next, the checkpoint of the query has gone on to batch" in fresh.job.error  # 2, if it was not committed
    assert (first.last, fresh.last) == (2, -1)


def test_the_query_waits_while_much_is_unread_and_one_that_is_stopped_is_named(
    spark: SparkSession, files: Files, tmp_path: Path, run: Callable[..., Running]
) -> None:
    running = run(files.stream(spark), tmp_path / "state", backlog_batches_max=2)
    wait_for(lambda: running.last == 1)
    held = running.query._unread
    wait_for(lambda: len(held) == 2 and running.last == 1)
    assert running.last == 1
    running.job.read = 10
    wait_for(lambda: running.last == 2)
    (query,) = (each for each in spark.streams.active if each.id == running.query._query_id)
    query.stop()
    wait_for(lambda: running.job.error)
    assert f"QueryStoppedError: source src: its query {query.id} was stopped" in running.job.error
    assert not list((tmp_path / "state").rglob("ends/*")), "its rows have no end"


def test_a_query_that_fails_is_tried_again_and_then_given_up(
    spark: SparkSession, files: Files, tmp_path: Path, run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.operators.sources.stream_query.RETRY_S", 0.01)
    bad = files.stream(spark).selectExpr("file", "if(file = 1, raise_error('broken'), n) n")
    running = run(bad, tmp_path / "state")
    wait_for(lambda: running.job.error)
    assert "broken" in running.job.error
    assert running.last == 0


def test_another_owner_ends_the_query(spark: SparkSession, files: Files, tmp_path: Path, run: Callable[..., Running]) -> None:
    running = run(files.stream(spark), tmp_path / "state")
    wait_for(lambda: running.last == 2)
    run_flow(si.claim_input_flow(FOLDER, "job-b", 1, "other"), running.storage)
    files.add()
    wait_for(lambda: running.job.error)
    assert "FencedError" in running.job.error
    assert running.last == 2


def test_only_streaming_dataframes_and_known_settings_are_taken(spark: SparkSession, files: Files) -> None:
    env = hf.Environment("bad", state_dir="/nowhere")
    with pytest.raises(hf.InvalidConfigError, match="from_dataframe"):
        env.from_stream(spark.range(3))
    with pytest.raises(hf.InvalidConfigError, match="from_stream"):
        env.from_dataframe(files.stream(spark))
    for wrong in ({"backlog_batches_max": 0}, {"output_mode": "some"}, {"available_now": True, "trigger_interval": 5}):
        with pytest.raises(hf.InvalidConfigError):
            env.from_stream(files.stream(spark), **wrong)


# ------------------------------------------------------------------------------------------------------------ whole jobs


def build(spark: SparkSession, files: Files, folder: Path, **of: Any) -> tuple[hf.Environment, hf.ParquetSink]:
    env = hf.Environment(
        "streamed", parallelism=2, checkpoint_interval_ms=200, state_dir=str(folder / "state"), retain_on_finish=True
    )
    sink = hf.ParquetSink(folder / "out")
    env.from_stream(files.stream(spark), **of).uid("src").filter(lambda row: True).uid("all").sink_to(sink).uid("sink")
    return env, sink


def found(spark: SparkSession, sink: hf.ParquetSink) -> list[tuple[int, int]]:
    return sorted((row.file, row.n) for row in sink.dataframe(spark).collect())


def completed(job: hf.JobHandle) -> int:
    return int(job.client.checkpoints(job.job_id)["counts"]["completed"])


def test_a_job_reads_a_stream_over_a_kill_a_savepoint_and_an_end(spark: SparkSession, files: Files, tmp_path: Path) -> None:
    env, sink = build(spark, files, tmp_path)
    with env.execute(progress=False) as job:
        wait_for(lambda: job.progress().records_in >= 20)
        seen = completed(job)
        wait_for(lambda: completed(job) > seen)
        worker = job.client.workers(job.job_id)["workers"][0]
        os.kill(worker["pid"], signal.SIGKILL)
        for _ in range(3):
            files.add()
        wait_for(lambda: job.progress().restarts and job.progress().records_in == 60)
        savepoint = job.stop(str(tmp_path / "savepoints"))
    assert found(spark, sink) == files.rows
    files.add()
    env, sink = build(spark, files, tmp_path, available_now=True)
    with env.execute(progress=False, restore=savepoint) as job:
        assert job.wait(120) == "FINISHED"
    assert found(spark, sink) == files.rows


def is_read(state: Path, file: int) -> bool:
    """Whether a batch that is behind the query holds this file: a killed one may have left two files to the next batch."""
    query = next(state.glob("*/sources/src/000001/query"), None)
    batches = [int(path.name) for path in query.glob("commits/*") if path.name.isdigit()] if query else []
    if query is None or not batches:
        return False
    *_, offset = (query / "offsets" / str(max(batches))).read_text().splitlines()
    return int(json.loads(offset)["logOffset"]) >= file


PROGRAM = """
import sys
from pathlib import Path
import warnings
warnings.simplefilter("ignore")
from pyspark.sql import SparkSession
from tests.spark.test_from_stream import Files, build

spark = SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false").config("spark.driver.host", "127.0.0.1").config(
    "spark.sql.shuffle.partitions", "2").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
folder = Path(sys.argv[1])
files = Files.__new__(Files)
files.folder, files.count = folder / "in", int(sys.argv[2])
env, _ = build(spark, files, folder, available_now=sys.argv[3] == "end")
with env.execute(progress=False) as job:
    print("started", flush=True)
    print(job.wait(), flush=True)
"""


@pytest.mark.endurance
def test_the_driver_is_killed_again_and_again(spark: SparkSession, files: Files, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = Path(__file__).resolve().parents[2]
    for kill in range(4):
        command = [sys.executable, str(program), str(tmp_path), str(files.count), "end" if kill == 3 else "go on"]
        environ = {**os.environ, "PYTHONPATH": str(root)}
        with (tmp_path / "log").open("ab") as log:
            process = subprocess.Popen(command, cwd=root, env=environ, stdout=log, stderr=log)
        try:
            if kill == 3:
                assert process.wait(200) == 0, (tmp_path / "log").read_text()[-3000:]
                break
            last = files.count - 1 - (kill == 1)  # once in front of the last file
            wait_for(partial(is_read, tmp_path / "state", last), 120)
        finally:
            process.kill()
            process.wait()
        files.add()
        files.add()
    assert found(spark, hf.ParquetSink(tmp_path / "out")) == files.rows
