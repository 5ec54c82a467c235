from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.operators.spark.settings import apply_settings, await_slots, check_settings, concurrent_tasks
from holdfast.operators.spark.slots import RddBackend, SlotRunner, WorkerReport, WorkerTemplate
from holdfast.operators.spark.supervisor import SlotSupervisor, StopRequested
from holdfast.statebackends.errors import InvalidConfigError, NotEnoughSlotsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

TEMPLATE = WorkerTemplate("job", 1, "http://127.0.0.1:1", None, "", b"", 1000)


def wait_for(condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "condition not met"
        time.sleep(0.005)
    return value


def idle_task(folder: Path) -> Callable[[WorkerTemplate, int], Callable[[Iterator[int]], Iterator[WorkerReport]]]:
    """A worker that writes its pid and waits for `<folder>/leave`."""

    def make(template: WorkerTemplate, slot: int) -> Callable[[Iterator[int]], Iterator[WorkerReport]]:
        def run(_: Iterator[int]) -> Iterator[WorkerReport]:
            (folder / f"{slot}-{os.getpid()}").touch()
            while not (folder / "leave").exists():
                time.sleep(0.01)
            yield WorkerReport("told to", False)

        return run

    return make


def pids(folder: Path, slot: int) -> set[int]:
    return {int(path.name.split("-")[1]) for path in folder.glob(f"{slot}-*")}


@pytest.mark.endurance
def test_the_same_slot_is_killed_six_times_and_the_other_left_alone(spark: SparkSession, tmp_path: Path) -> None:
    apply_settings(spark.sparkContext)
    runner = SlotRunner(SlotSupervisor(2), RddBackend(spark.sparkContext, TEMPLATE, "job", idle_task(tmp_path)), lambda *_: None)
    runner.start()
    wait_for(lambda: pids(tmp_path, 0) and pids(tmp_path, 1))
    durations = []
    for _ in range(6):
        before = pids(tmp_path, 0)
        (victim,) = (pid for pid in before if Path(f"/proc/{pid}").exists())
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda before=before: pids(tmp_path, 0) - before)  # type: ignore[misc]
        durations.append(round(time.monotonic() - began, 3))
    assert len(pids(tmp_path, 1)) == 1
    assert runner.respawns == 6
    assert spark.range(10).count() == 10, "Spark SQL runs beside the workers"
    (tmp_path / "leave").touch()
    assert runner.ended.wait(20)
    sys.stdout.write(f"seconds from kill -9 to the successor: {durations}\n")


def test_a_task_that_raises_at_once_is_given_up_with_its_error(spark: SparkSession, tmp_path: Path) -> None:
    def broken(template: WorkerTemplate, slot: int) -> Callable[[Iterator[int]], Iterator[WorkerReport]]:
        def run(_: Iterator[int]) -> Iterator[WorkerReport]:
            raise ValueError("no such thing")
            yield

        return run

    said: list[tuple[int, str]] = []
    runner = SlotRunner(
        SlotSupervisor(1), RddBackend(spark.sparkContext, TEMPLATE, "job", broken), lambda *error: said.append(error)
    )
    runner.start()
    assert runner.ended.wait(30)
    assert said[0][0] == 0
    assert "no such thing" in said[0][1]


def test_workers_of_a_driver_that_leaves_are_cancelled(spark: SparkSession, tmp_path: Path) -> None:
    runner = SlotRunner(SlotSupervisor(1), RddBackend(spark.sparkContext, TEMPLATE, "job", idle_task(tmp_path)), lambda *_: None)
    runner.start()
    (pid,) = wait_for(lambda: pids(tmp_path, 0))
    runner.post(StopRequested())
    assert runner.ended.wait(20)
    assert runner.abandoned == ()
    wait_for(lambda: not _runs(pid))


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"


def test_too_few_slots_are_counted(spark: SparkSession) -> None:
    assert concurrent_tasks(spark.sparkContext) == 4
    await_slots(spark.sparkContext, 3)
    with pytest.raises(NotEnoughSlotsError) as caught:
        await_slots(spark.sparkContext, 4)
    assert (caught.value.required, caught.value.available) == (5, 4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spark.speculation", "true"),
        ("spark.excludeOnFailure.enabled", "true"),
        ("spark.python.worker.killOnIdleTimeout", "true"),
    ],
)
def test_settings_that_kill_workers_are_refused(name: str, value: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        check_settings(lambda key, default: value if key == name else default)
    assert caught.value.setting == name


def test_a_reaper_with_a_timeout_is_refused_and_risks_are_told() -> None:
    reaper = {"spark.task.reaper.enabled": "true", "spark.task.reaper.killTimeout": "60s"}
    with pytest.raises(InvalidConfigError):
        check_settings(lambda key, default: reaper.get(key, default))
    risky = {"spark.dynamicAllocation.enabled": "true", "spark.executor.pyspark.memory": "1g"}
    assert len(check_settings(lambda key, default: risky.get(key, default))) == 2


CLUSTER_SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from pyspark.sql import SparkSession
spark = (SparkSession.builder.master("local-cluster[2,2,1024]").appName("t").config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.executor.memory", "512m").config("spark.driver.memory", "512m").getOrCreate())
context = spark.sparkContext
context.setLogLevel("OFF")
from holdfast.operators.spark.launcher import ship_package
from holdfast.operators.spark.settings import apply_settings, await_slots
apply_settings(context)
await_slots(context, 3)
ship_package(context)
ship_package(context)
before = len(context._python_includes)
def where(_):
    import holdfast.operators.spark.slots, holdfast.statebackends.errors
    yield holdfast.operators.spark.slots.__file__
print("PATHS", set(context.parallelize(range(4), 4).mapPartitions(where).collect()), before)
import holdfast.operators.spark.progress
print("DRIVER", holdfast.operators.spark.progress.__file__)
spark.stop()
"""


@pytest.mark.endurance
def test_executors_without_the_package_import_it_from_the_zip(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[2])
    script = tmp_path / "driver.py"
    script.write_text(CLUSTER_SCRIPT.format(root=root))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("PATHS", "DRIVER")))
    assert "holdfast-" in lines["PATHS"]
    assert ".zip/holdfast/operators/spark/slots.pyc" in lines["PATHS"]
    assert root not in lines["PATHS"]
    assert lines["PATHS"].endswith(" 1")
    assert lines["DRIVER"].startswith(root)


BAR_SCRIPT = """
import sys, time
sys.path.insert(0, {root!r})
from pyspark.sql import SparkSession
context = (SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.memory", "512m").getOrCreate()).sparkContext
from holdfast.operators.spark.settings import hide_progress_bar
def slow():
    context.parallelize([2], 1).map(time.sleep).collect()
slow()
hide_progress_bar(context)
hide_progress_bar(context)
sys.stderr.write("HIDDEN\\n")
slow()
context.stop()
"""


@pytest.mark.endurance
def test_spark_s_bar_is_gone_for_good(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(BAR_SCRIPT.format(root=str(Path(__file__).resolve().parents[2])))
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    before, _, after = done.stderr.partition("HIDDEN")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "[Stage" in before
    assert "[Stage" not in after
