"""Spark settings that long-lived workers need: forced, refused, or warned about; and the number of slots.

Each rule names the failure that it prevents."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.statebackends.errors import InvalidConfigError, NotEnoughSlotsError

if TYPE_CHECKING:
    from pyspark import SparkContext

FORCED = {"spark.python.task.killTimeout": "100ms"}
"""A cancelled worker's process must end at once; by default it would live on for 2 s beside its successor."""

_REFUSED = (
    ("spark.speculation", "it would start a second copy of every worker"),
    ("spark.excludeOnFailure.enabled", "a job hangs when the slots that are left are full"),
    ("spark.excludeOnFailure.application.enabled", "a job hangs when the slots that are left are full"),
    ("spark.excludeOnFailure.taskAndStage.enabled", "a job hangs when the slots that are left are full"),
    ("spark.python.worker.killOnIdleTimeout", "a worker that has nothing to report would be killed as idle"),
    ("spark.sql.execution.pyspark.udf.killOnIdleTimeout", "a worker that has nothing to report would be killed as idle"),
)

SLOTS_WAIT_S = 30.0
"""Time to wait for executors to register when there are too few slots."""


def check_settings(get: Callable[[str, str], str]) -> list[str]:
    """Check Spark's settings and return warnings; `get(name, default)` reads one. Raises InvalidConfigError on one that can't
    work."""
    for name, why in _REFUSED:
        if get(name, "false").strip().lower() == "true":
            raise InvalidConfigError(f"{name}=true can't be used with Holdfast: {why}. Set it to false", setting=name)
    reaper = get("spark.task.reaper.killTimeout", "-1").strip()
    if get("spark.task.reaper.enabled", "false").strip().lower() == "true" and not reaper.startswith("-"):
        raise InvalidConfigError(
            "spark.task.reaper.killTimeout would kill the executor of a worker that takes long to leave: set it to -1",
            setting="spark.task.reaper.killTimeout",
        )
    warnings = []
    dynamic = get("spark.dynamicAllocation.enabled", "false").strip().lower() == "true"
    if dynamic and get("spark.dynamicAllocation.minExecutors", "0").strip() == "0":
        warnings.append(
            "spark.dynamicAllocation.enabled without minExecutors: executors that are idle before the workers start may be released"
        )
    if get("spark.executor.pyspark.memory", ""):
        warnings.append(
            "spark.executor.pyspark.memory limits the address space of a worker: RocksDB and Arrow may fail to allocate below it"
        )
    return warnings


def apply_settings(context: SparkContext) -> list[str]:
    """Check a running context's settings, set those that are forced, and return warnings."""
    configuration = context.getConf()
    warnings = check_settings(lambda name, default: configuration.get(name, default) or default)
    live = context._jsc.sc().conf()  # the conf that tasks read; getConf() is a copy
    for name, value in FORCED.items():
        live.set(name, value)
    if is_local(context.master) and not os.environ.get("PYSPARK_PYTHON") and not configuration.get("spark.pyspark.python"):
        # Spark would start the first python3 on the PATH, which is seldom the virtual environment of this driver.
        context.pythonExec = sys.executable
    return warnings


def hide_progress_bar(context: SparkContext) -> None:
    """Switch off Spark's own progress bar for the life of the context: it overwrites our line, and shows the workers' Spark jobs,
    which never end."""
    bar = context._jsc.sc().progressBar()
    if bar.isDefined():
        bar.get().finishAll()
        bar.get().stop()


def is_local(master: str) -> bool:
    """True when executors run on this machine: local[N] and local-cluster."""
    return master.startswith("local")


def concurrent_tasks(context: SparkContext) -> int:
    """Tasks that the executors registered now can run at once."""
    scala = context._jsc.sc()
    return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))


def await_slots(
    context: SparkContext, workers: int, take: Callable[[int], int] = lambda room: 0, timeout_s: float = SLOTS_WAIT_S
) -> None:
    """Wait until there is a slot for each worker and one for Spark SQL. Raises NotEnoughSlotsError.

    `take` gets the number of slots that workers may use in all, takes ours if they are free, and returns how many the workers of
    this driver's other jobs hold. On local[N] the number never changes: no wait."""
    local = context.master.startswith("local") and not context.master.startswith("local-cluster")
    await_slots_of(lambda: concurrent_tasks(context), context.master, workers, take, is_fixed=local, timeout_s=timeout_s)


def await_slots_of(
    count: Callable[[], int],
    master: str,
    workers: int,
    take: Callable[[int], int],
    *,
    is_fixed: bool,
    timeout_s: float = SLOTS_WAIT_S,
) -> None:
    """`await_slots` of what `count` counts. `is_fixed`: the number never changes, so that there is no wait."""
    deadline = time.monotonic() + (0.0 if is_fixed else timeout_s)
    while True:
        available = count()
        occupied = take(available - 1)
        required = workers + occupied + 1
        if available >= required:
            return
        if time.monotonic() >= deadline:
            raise NotEnoughSlotsError(
                f"the job needs {required} slots ({workers} workers"
                + (f", {occupied} of other jobs" if occupied else "")
                + f", 1 for Spark SQL beside them), {master} has {available}: "
                + "lower the parallelism or give Spark more cores",
                required=required,
                available=available,
            )
        time.sleep(0.25)
