"""Ctrl-C in a driver: the workers of its jobs run on, its own Spark jobs end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(280)]

ROOT = str(Path(__file__).resolve().parents[2])

START = """
import os, sys, threading, time
sys.path.insert(0, {root!r})
from pathlib import Path
import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark import InheritableThread
from pyspark.sql import SparkSession
import holdfast as hf
spark = (SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false").config("spark.driver.memory", "600m")
    .config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.ui.showConsoleProgress", "false").getOrCreate())
context = spark.sparkContext
context.setLogLevel("OFF")
folder = Path({folder!r})
STAGES = 3  # of two slots, and of the worker that stands by
SCHEMA = pa.schema([("k", pa.int64()), ("id", pa.int64())])

def say(name, text=""):
    (folder / (name + ".new")).write_text(str(text))
    (folder / (name + ".new")).rename(folder / name)

def wait_for(condition):
    deadline = time.monotonic() + 100
    while not (value := condition()):
        assert time.monotonic() < deadline, "condition not met"
        time.sleep(0.01)
    return value

def environment(factor=1):
    def numbers(indices):
        return pa.record_batch([indices % 7, indices * factor], schema=SCHEMA)
    env = hf.Environment("interrupted", parallelism=2, checkpoint_interval_ms=200, state_dir=str(folder / "state"),
                         restart=hf.RestartStrategy("none"))
    stream = env.from_source(hf.GeneratorSource(numbers, 100_000_000, SCHEMA, rows_per_second=2_000)).uid("numbers")
    stream.key_by("k").aggregate(n=hf.count()).uid("counted").sink_to(hf.Blackhole()).uid("out")
    return env

def pids(job):
    return sorted(worker["pid"] for worker in job.client.workers(job.job_id)["workers"] if worker["registered"])

def completed(job):
    return job.client.checkpoints(job.job_id)["counts"]["completed"]

def active_stages():
    try:
        return len(context.statusTracker().getActiveStageIds())
    except Py4JError:  # for a moment behind an interrupt of a call
        return -1

def goes_on(job, before):
    done = completed(job)
    wait_for(lambda: completed(job) > done + 1)
    assert (job.state(), pids(job)) == ("RUNNING", before), (job.state(), pids(job), before)

def slow(rows):
    time.sleep(300)
    yield from rows

def is_in(block):
    code = getattr(block, "__func__", block).__code__
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None

def interrupted(name, block, when=lambda: True):
    # The test sends SIGINT when it sees the name, which is said once this program is in `block` and `when` holds; exactly one
    # KeyboardInterrupt comes.
    # PySpark's own calls on its way out may meet a closed connection to Spark, and put their error in its place.
    threading.Thread(target=lambda: (wait_for(lambda: is_in(block) and when()), say(name)), daemon=True).start()
    try:
        block()
    except KeyboardInterrupt:
        pass
    except Py4JError as error:
        causes = [error]
        while (cause := causes[-1].__context__) is not None:
            causes.append(cause)
        assert any(isinstance(cause, KeyboardInterrupt) for cause in causes), causes
    else:
        raise AssertionError("no interrupt came")
    (folder / name).unlink()
"""

WAITS = START + """
ended = []
def own_job():
    try:
        context.parallelize([1], 1).mapPartitions(slow).collect()
    except Exception as error:
        ended.append(error)
job = environment().execute(progress=False)
before = pids(job)
wait_for(lambda: completed(job))
own = InheritableThread(target=own_job, daemon=True)
own.start()
wait_for(lambda: active_stages() == STAGES + 1)
interrupted("first", job.wait)
own.join(60)
assert "CANCELLED" in str(ended[0]).upper(), ended
goes_on(job, before)

# An interrupt of the main thread's own Spark job: py4j closes every connection. One that comes before Spark has the job cancels
# nothing, as without Holdfast.
interrupted("second", lambda: context.parallelize([1], 1).mapPartitions(slow).collect(), lambda: active_stages() == STAGES + 1)
wait_for(lambda: active_stages() == STAGES)
goes_on(job, before)
assert spark.range(10).count() == 10

again = environment().execute(progress=False)
assert again is job
interrupted("third", again.wait)
goes_on(job, before)
assert job.client.workers(job.job_id)["submission"] == 1

other = environment(factor=2).execute(progress=False)
assert other is not job
try:
    job.wait(60)
except hf.FencedError as error:
    assert error.newer == 2
else:
    raise AssertionError("the older handle still has the job")
goes_on(other, pids(other))
assert other.client.workers(job.job_id)["submission"] == 2
assert other.client.checkpoints(job.job_id)["latest"]["restored"]["id"] > 0
other.cancel()
assert other.state() == "CANCELED"
say("done")
"""

ENDS = START + """
env = environment()
if {scoped}:
    with env.execute() as job:
        wait_for(lambda: job.progress().last_checkpoint_id)
        say("pids", pids(job))
        say("first")
        job.wait()
else:
    job = env.execute()
    wait_for(lambda: job.progress().last_checkpoint_id)
    say("pids", pids(job))
    say("first")
    job.wait()
"""


def wait_for(condition: Callable[[], Any], driver: subprocess.Popen[bytes], log: Path, timeout_s: float = 120.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert driver.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, f"condition not met: {log.read_text()[-4000:]}"
        time.sleep(0.01)
    return value


def start(folder: Path, text: str, **fields: object) -> tuple[subprocess.Popen[bytes], Path]:
    """A driver that leads a process group, as a terminal and a notebook have it: the interrupt goes to all of the group."""
    script, log = folder / "driver.py", folder / "driver.log"
    script.write_text(text.format(root=ROOT, folder=str(folder), **fields))
    with open(log, "ab") as out:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYSPARK_GATEWAY")}
        command = [sys.executable, str(script)]
        driver = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out, env=environment, start_new_session=True)
    return driver, log


def interrupt(folder: Path, driver: subprocess.Popen[bytes], log: Path, name: str) -> None:
    wait_for((folder / name).exists, driver, log)
    deadline = time.monotonic() + 30
    while not _waits(driver.pid):  # it is on its way from the file to the call that is to be interrupted
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(driver.pid, signal.SIGINT)


def _waits(pid: int) -> bool:
    """Its main thread sleeps."""
    return Path(f"/proc/{pid}/task/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "S"


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def test_an_interrupt_reaches_no_worker_and_the_job_is_attached_to_again(tmp_path: Path) -> None:
    driver, log = start(tmp_path, WAITS)
    try:
        for name in ("first", "second", "third"):
            interrupt(tmp_path, driver, log, name)
            wait_for(lambda name=name: not (tmp_path / name).exists(), driver, log)  # type: ignore[misc]
        assert driver.wait(150) == 0, log.read_text()[-4000:]
    finally:
        driver.kill()
        driver.wait()
    said = log.read_text()
    assert (tmp_path / "done").exists()
    line = "interrupted goes on until this program ends: job.wait() waits again, job.stop(folder) or job.cancel() ends it\n"
    assert said.count(line) == 2
    assert not [word for word in ("NotLeaderError", "WorkerLost", "can't be") if word in said], said


@pytest.mark.parametrize("scoped", [pytest.param(False, marks=pytest.mark.endurance), True])
def test_a_program_that_ends_by_an_interrupt_leaves_the_job_and_says_so(tmp_path: Path, scoped: bool) -> None:
    driver, log = start(tmp_path, ENDS, scoped=scoped)
    try:
        interrupt(tmp_path, driver, log, "first")
        code = driver.wait(60)
    finally:
        driver.kill()
        driver.wait()
    said = log.read_text()
    assert code in (-signal.SIGINT, 128 + signal.SIGINT), said[-4000:]
    until = "its `with` block ends" if scoped else "this program ends"
    assert said.count(f"interrupted goes on until {until}: job.wait() waits again") == 1
    assert said.count("interrupted is left, and its workers go: execute() goes on from its newest checkpoint, ") == 1
    assert said.count("KeyboardInterrupt\n") == 1
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().strip("[]").split(",")]
    deadline = time.monotonic() + 30
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline, "workers are left"
        time.sleep(0.01)
    assert not [word for word in ("CRITICAL", "NotLeaderError", "Exception ignored") if word in said], said
    assert not list((tmp_path / "state").glob("*/result*"))
