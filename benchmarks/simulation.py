"""Speed of the simulator: whole jobs of the keyed counter in one process, each with three faults, beside the same jobs without.

A virtual machine's cores may be twice as slow in one minute as in the next, so each row has the duration of a loop of plain Python
meanwhile (`loop_ms`: median and least, measured once between any ten jobs).

    python -m benchmarks.simulation [--quick]"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from holdfast.chaos.campaign.runner import Outcome, SeedRunner, Task, cpu_count, perform, prepare_process, tidy_up
from holdfast.chaos.campaign.user_runs import run_seed
from holdfast.chaos.cluster.results import RunResult
from holdfast.chaos.cluster.world import RunRequest

Row = dict[str, Any]

WORKLOAD = "counter"
"""About 1,000 records and 10 checkpoints."""
FAULTS = 3
LOOP_EVERY = 10
"""Jobs between two measurements of the loop."""
WARM_UP = 5
"""Runs before the first measured one: imports and caches."""


def requests(count: int, faults: int) -> list[RunRequest]:
    """The same seeds, and so the same jobs, for every row."""
    return [RunRequest(seed, WORKLOAD, faults=faults, plan=None if faults else ()) for seed in range(count)]


def measure_one(faults: int, count: int) -> Row:
    """Runs in this process. Per core means CPU time: nothing in a run waits."""
    tasks = [Task(request) for request in requests(count, faults)]
    for task in tasks[:WARM_UP]:
        _perform(task)
    results: list[RunResult] = []
    loops: list[float] = []
    seconds = cpu_seconds = 0.0
    for first in range(0, len(tasks), LOOP_EVERY):
        loops.append(loop_ms())
        began, cpu_began = time.perf_counter(), time.process_time()
        results += [_perform(task).result for task in tasks[first : first + LOOP_EVERY]]
        seconds += time.perf_counter() - began
        cpu_seconds += time.process_time() - cpu_began
    row = _row(results, 1, faults, seconds, cpu_seconds)
    return {**row, "loop_ms": [round(statistics.median(loops), 1), round(min(loops), 1)]}


def _perform(task: Task) -> Outcome:
    """Perform a run as a campaign's process does."""
    outcome = perform(run_seed, task)
    tidy_up()
    return outcome


def loop_ms() -> float:
    """CPU time of a fixed amount of plain Python, a few milliseconds on a core of its own."""
    began = time.process_time()
    seen: dict[int, tuple[int, str]] = {}
    for number in range(40_000):
        seen[number & 1023] = (number, str(number))
    assert len(seen) == 1024
    return 1000 * (time.process_time() - began)


def measure_all_cores(faults: int, count: int) -> Row:
    """Runs as in a campaign; the start of its processes is left out."""
    jobs = cpu_count()
    tasks = [Task(request) for request in requests(count * jobs, faults)]
    with SeedRunner(jobs) as runner:
        list(runner.run(tasks[: WARM_UP * jobs]))
        began = time.perf_counter()
        results = [outcome.result for outcome in runner.run(tasks)]
        seconds = time.perf_counter() - began
    return _row(results, jobs, faults, seconds, seconds * jobs)


def _row(results: list[RunResult], processes: int, faults: int, seconds: float, core_seconds: float) -> Row:
    return {
        "workload": f"simulation of {WORKLOAD}",
        "processes": processes,
        "faults": faults,
        "jobs": len(results),
        "jobs_per_minute": round(60 * len(results) / seconds),
        "jobs_per_minute_per_core": round(60 * len(results) / core_seconds),
        "records": round(statistics.mean(result.records for result in results)),
        "checkpoints": round(statistics.mean(result.checkpoints for result in results), 1),
        "restarts": round(statistics.mean(result.restarts for result in results), 1),
        "steps": round(statistics.mean(result.steps for result in results)),
        "violations": sum(1 for result in results if result.violations),
    }


def measure(*, quick: bool = False) -> list[Row]:
    """With faults and without, on one core and on all."""
    prepare_process()
    count = 40 if quick else 300
    return [measure_one(FAULTS, count), measure_one(0, count), measure_all_cores(FAULTS, count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    for row in measure(quick=parser.parse_args().quick):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
