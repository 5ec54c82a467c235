"""Jobs started through Spark Connect: what the access asks of a session, with the session's answers recorded; and a whole job at a
real server, a worker of which is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import holdfast as hf
from holdfast.api.launch import Exposure, exposure_of
from holdfast.operators.spark.access import ConnectAccess, ConnectBackend
from holdfast.operators.spark.slots import SparkStoppedError, WorkerTemplate
from holdfast.operators.spark.supervisor import WorkerEnd
from holdfast.statebackends.errors import InvalidConfigError, NotEnoughSlotsError

TEMPLATE = WorkerTemplate("job", 2, "http://127.0.0.1:1", None, "/state", b"", 1_000)


class Session:
    """A client of Spark Connect: settings of the server, a plan of so many parts, and queries that end as they are told."""

    def __init__(self, parts: int = 4, **settings: str) -> None:
        self.settings = {name.replace("_", "."): value for name, value in settings.items()}
        self.parts = parts
        self.is_stopped = False
        self.client = SimpleNamespace(host="127.0.0.1")
        self.conf = SimpleNamespace(get=lambda name, default: self.settings.get(name, default))
        self.ends: dict[str, threading.Event] = {}
        """Tag -> set when the query with it was interrupted."""
        self.outcome: Any = None
        self._tags = threading.local()

    def sql(self, query: str) -> Any:
        assert query.startswith("EXPLAIN ")
        return SimpleNamespace(collect=lambda: [[f"*(1) Range (0, 65536, step=1, splits={self.parts})"]])

    def addTag(self, tag: str) -> None:
        self._tags.tag = tag
        self.ends[tag] = threading.Event()

    def interruptTag(self, tag: str) -> None:
        self.ends[tag].set()

    def range(self, *_: int) -> Session:
        return self

    def mapInArrow(self, function: Any, schema: str) -> Session:
        return self

    def collect(self) -> list[Any]:
        if self.outcome is None:
            assert self.ends[self._tags.tag].wait(10)
            raise RuntimeError("[OPERATION_CANCELED] Operation has been canceled. SQLSTATE: HY008")
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return [self.outcome]


def access(session: Session) -> ConnectAccess:
    return ConnectAccess(session)


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({"spark_master": "local[4]", "spark_driver_host": "10.0.0.1"}, ("127.0.0.1", None)),
        ({"spark_master": "spark://10.0.0.9:7077", "spark_driver_host": "10.0.0.1"}, ("0.0.0.0", "10.0.0.1")),
    ],
)
def test_a_server_on_this_machine_says_where_its_executors_find_a_coordinator(
    settings: dict[str, str], host: tuple[str, str | None]
) -> None:
    found = access(Session(4, **settings)).coordinator_host
    assert found == host
    assert exposure_of(found, {}) == Exposure(*host)
    assert exposure_of(found, {"HOLDFAST_ADVERTISED_HOST": "client.example"}) == Exposure("0.0.0.0", "client.example")


def test_slots_are_the_parts_of_a_plan_by_the_cpus_of_a_task() -> None:
    local = {"spark_master": "local[4]"}
    taken: list[int] = []
    access(Session(4, **local)).await_slots(3, lambda room: taken.append(room) or 0)  # type: ignore[func-returns-value]
    assert taken == [3], "one is left for Spark SQL"
    with pytest.raises(NotEnoughSlotsError, match=r"needs 5 slots \(4 workers, 1 .*Spark Connect at 127\.0\.0\.1 has 4"):
        access(Session(4, **local)).await_slots(4, lambda room: 0)
    with pytest.raises(NotEnoughSlotsError, match="has 2"):
        access(Session(4, spark_task_cpus="2", **local)).await_slots(2, lambda room: 0)
    # a number that somebody set says nothing of cores: the job waits for its workers instead
    access(Session(1, spark_default_parallelism="1", **local)).await_slots(4, lambda room: 0)


def test_settings_of_the_server_are_checked_and_from_stream_is_refused_by_name() -> None:
    with pytest.raises(InvalidConfigError, match=r"spark\.speculation=true can't be used"):
        access(Session(spark_speculation="true")).prepare({})
    from holdfast.operators.sources.stream import StreamSource

    with pytest.raises(InvalidConfigError, match="source clicks: from_stream needs a classic session"):
        access(Session()).prepare({"clicks": StreamSource.__new__(StreamSource)})
    assert access(Session()).prepare({}) == []


def test_what_runs_python_in_the_driver_is_refused_by_name() -> None:
    of_connect = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    with pytest.raises(InvalidConfigError, match="register_formats needs a classic session"):
        hf.register_formats(of_connect)


def test_a_worker_is_a_query_whose_tag_ends_it_and_no_other() -> None:
    session, ended = Session(), dict[int, tuple[WorkerEnd, str]]()
    over = {slot: threading.Event() for slot in (0, 1)}
    backend = ConnectBackend(session, TEMPLATE, "job")

    def start(slot: int, spawn: int) -> None:
        def end(end: WorkerEnd, reason: str) -> None:
            ended[slot] = (end, reason)
            over[slot].set()

        backend.start(slot, spawn, end)

    start(0, 1)
    start(1, 1)
    wait(lambda: len(session.ends) == 2)
    backend.cancel(0, 1)
    assert over[0].wait(10)
    assert ended[0][0] is WorkerEnd.DIED
    assert not over[1].is_set()
    backend.cancel(1, 1)
    assert over[1].wait(10)

    for outcome, expected in (
        (SimpleNamespace(reason="over", respawn=False, superseded=False), WorkerEnd.LEFT),
        (SimpleNamespace(reason="taken", respawn=True, superseded=False), WorkerEnd.RESPAWN),
        (SimpleNamespace(reason="newer", respawn=False, superseded=True), WorkerEnd.SUPERSEDED),
        (RuntimeError("Traceback (most recent call last):\n  File\nModuleNotFoundError: No module named 'x'"), WorkerEnd.RAISED),
    ):
        session.outcome = outcome
        over[0].clear()
        start(0, 2)
        assert over[0].wait(10)
        assert ended[0][0] is expected
    session.is_stopped = True
    with pytest.raises(SparkStoppedError, match="has ended"):
        start(0, 3)


def wait(condition: Any) -> None:
    pause = threading.Event()
    for _ in range(10_000):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("not within 10 s")


JOB = """
import json
import os
import signal
import sys
import time

import pyarrow as pa
from pyspark.sql import SparkSession

import holdfast as hf

folder, rows = sys.argv[1], 6_000
spark = SparkSession.builder.remote("local[4]").getOrCreate()


class Counted(hf.ProcessFunction):
    seen = hf.ValueStateDescriptor("seen", int)
    states = (seen,)

    def process_element(self, value, ctx, out):
        state = ctx.state(self.seen)
        state.update(state.value(0) + 1)
        out({"k": value["k"], "nth": state.value()})


def build(parallelism, frame, out="/out"):
    env = hf.Environment("connect", parallelism=parallelism, checkpoint_interval_ms=300, state_dir=folder + "/state")
    counted = env.from_dataframe(frame, rows_per_second=rows / 8).uid("rows").key_by("k")
    sink = hf.ParquetSink(folder + out)
    counted.process(Counted(), returns=pa.schema([("k", pa.int64()), ("nth", pa.int64())])).uid("counted").sink_to(sink).uid("out")
    return env, sink


frame = spark.range(0, rows, 1, 3).selectExpr("id", "id % 17 as k")
found = {}
try:
    build(4, frame)[0].execute(progress=False)
except hf.NotEnoughSlotsError as error:
    found["refused"] = str(error)
env, sink = build(2, frame)
with env.execute(progress=False) as job:
    seen = job.client.workers(job.job_id)
    while job.client.checkpoints(job.job_id)["counts"]["completed"] < 2:
        time.sleep(0.05)
    os.kill(next(worker["pid"] for worker in seen["workers"] if worker["slot"] == 0), signal.SIGKILL)
    found["state"] = job.wait(120)
    found["restarts"] = job.progress().restarts
table = sink.dataframe(spark)
found["rows"] = sorted((row.k, row.nth) for row in table.collect())
# cancelled by its tag, while its workers run
cancelled, _ = build(2, frame, "/cancelled")  # another job owns the first one's output
with cancelled.execute(progress=False, fresh=True, job_id="0" * 31 + "1") as job:
    job.cancel()
    found["cancelled"] = job.state()
spark.stop()
print("FOUND", json.dumps(found))
"""


@pytest.mark.spark
@pytest.mark.endurance
@pytest.mark.timeout(280)
def test_a_job_on_a_connect_server_survives_kill_9_of_a_worker_and_is_exact(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    (tmp_path / "job.py").write_text(JOB)
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "job.py", str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout[-2_000:] + done.stderr[-4_000:]
    found = json.loads(lines[0].removeprefix("FOUND "))
    assert "needs 5 slots" in found["refused"]
    assert (found["state"], found["cancelled"]) == ("FINISHED", "CANCELED")
    assert found["restarts"] >= 1
    assert [tuple(row) for row in found["rows"]] == sorted((i % 17, i // 17 + 1) for i in range(6_000))
