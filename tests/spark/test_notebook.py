"""A notebook as nbconvert executes it: a cell that is interrupted, and executed again, as somebody does at a keyboard."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.endurance, pytest.mark.timeout(290)]

ROOT = Path(__file__).resolve().parents[2]

SETUP = """
import os, time
from pathlib import Path
import pyarrow as pa
from pyspark.sql import SparkSession
import holdfast as hf
spark = (SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false").config("spark.driver.memory", "600m")
    .config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1").getOrCreate())
spark.sparkContext.setLogLevel("OFF")
folder, jobs, workers = Path.cwd(), [], []
SCHEMA = pa.schema([("k", pa.int64()), ("id", pa.int64())])

def tell(name, text):
    (folder / "new").write_text(str(text))
    (folder / "new").rename(folder / name)
"""

JOB = """
class Counted(hf.ProcessFunction):
    seen = hf.ValueStateDescriptor("seen", int)
    states = (seen,)

    def process_element(self, value, ctx, out):
        count = (ctx.state(self.seen).value() or 0) + 1
        ctx.state(self.seen).update(count)
        out({"k": value["k"], "id": count})

def numbers(indices):
    return pa.record_batch([indices % 7, indices], schema=SCHEMA)

env = hf.Environment("cell", parallelism=2, checkpoint_interval_ms=200, state_dir=str(folder / "state"))
stream = env.from_source(hf.GeneratorSource(numbers, 100_000_000, SCHEMA, rows_per_second=2_000)).uid("numbers")
stream.key_by("k").process(Counted(), returns=SCHEMA).uid("counted").sink_to(hf.Blackhole()).uid("out")
job = env.execute()
jobs.append(job)
described = job.client.workers(job.job_id)
workers.append(sorted(worker["pid"] for worker in described["workers"]))
while not job.progress().last_checkpoint_id:
    time.sleep(0.05)
tell(f"waiting-{len(jobs)}", os.getpid())
job.wait()
"""

OWN = """
def slow(rows):
    time.sleep(300)
    yield from rows

tell("waiting-4", os.getpid())
spark.sparkContext.parallelize([1], 1).mapPartitions(slow).collect()
"""

END = """
described = job.client.workers(job.job_id)
before = job.progress().records_in
while job.progress().records_in <= before:
    time.sleep(0.05)
print("SAME", jobs[0] is jobs[1], jobs[2] is jobs[1])
print("WORKERS", workers[0] == workers[1], sorted(worker["pid"] for worker in described["workers"]) == workers[2])
print("SUBMISSION", described["submission"], "RESTARTS", described["restarts"])
print("STATE", Path(job.stop(str(folder / "savepoints"))).exists(), job.state())
"""


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[bytes], log: Path) -> Any:
    deadline = time.monotonic() + 200
    while not (value := condition()):
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.02)
    return value


def text_of(cell: dict[str, Any]) -> str:
    """All that is read below a cell."""
    parts: list[str] = []
    for output in cell["outputs"]:
        parts += output.get("text", ()), output.get("traceback", ()), output.get("data", {}).get("text/plain", ())
    return "".join("".join(part) for part in parts)


def is_idle(pid: int) -> bool:
    """The kernel's main thread waits."""
    return Path(f"/proc/{pid}/task/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "S"


def test_a_cell_is_interrupted_and_executed_again_and_its_job_goes_on(tmp_path: Path) -> None:
    edited = JOB.replace("+ 1", "+ 2")
    cells: list[Any] = [
        {"id": f"cell-{at}", "cell_type": "code", "source": source, "metadata": {}, "outputs": [], "execution_count": None}
        for at, source in enumerate((SETUP, JOB, JOB, edited, OWN, END))
    ]
    notebook = tmp_path / "notebook.ipynb"
    notebook.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--allow-errors", "--inplace", notebook.name]
    places = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    own = {name: str(tmp_path / name.lower()) for name in places}
    log = tmp_path / "nbconvert.log"
    with open(log, "ab") as out:
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=out, stderr=out, env={**os.environ, **own, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
        )
    try:
        for at in range(1, 5):
            kernel = int(wait_for((tmp_path / f"waiting-{at}").exists, process, log) and (tmp_path / f"waiting-{at}").read_text())
            wait_for(lambda kernel=kernel: is_idle(kernel), process, log)  # type: ignore[misc]
            os.killpg(os.getpgid(kernel), signal.SIGINT)  # as the button of a notebook does
        assert process.wait(200) == 0, log.read_text()[-4000:]
    finally:
        process.kill()
        process.wait()
    _, first, again, other, own_job, end = (text_of(cell) for cell in json.loads(notebook.read_text())["cells"])
    goes_on = "cell goes on until this program ends: job.wait() waits again, job.stop(folder) or job.cancel() ends it"
    for shown in (first, again, other):
        assert shown.count(goes_on) == 1, shown
        assert "KeyboardInterrupt" in shown
    assert "cell runs already in this program, with this plan (RUNNING, checkpoint " in again
    assert "cell runs already in this program, with another plan: the code, or the data, of operator 'counted'" in other
    assert "KeyboardInterrupt" in own_job
    assert "SAME True False" in end, end
    assert "WORKERS True True" in end
    assert "SUBMISSION 2 RESTARTS 0" in end
    assert "STATE True FINISHED" in end
    everything = first + again + other + end
    assert not [word for word in ("NotLeaderError", "NotEnoughSlots", "WorkerLost", "superseded") if word in everything], everything
