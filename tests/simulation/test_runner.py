"""Seeds over processes: nothing is lost, whatever a run does, and the order of results is the order of requests."""

from __future__ import annotations

import ast
import contextlib
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from holdfast.chaos.campaign import runner
from holdfast.chaos.campaign.runner import HANG, SIMULATOR, Outcome, SeedRunner, Task, perform, start_server, tidy_up
from holdfast.chaos.cluster.results import RunResult
from tests.simulation import fakes
from tests.simulation.fakes import make_runner, make_task


def run(workload: str, seeds: int, *, jobs: int = 2, limit_s: float = 20.0) -> list[RunResult]:
    with make_runner(jobs, limit_s) as pool:
        return [outcome.result for outcome in pool.run(make_task(seed, workload) for seed in range(seeds))]


def broken(results: list[RunResult]) -> dict[int, str]:
    return {result.seed: result.violations[0].invariant for result in results if result.violations}


def test_results_come_in_the_order_of_requests() -> None:
    results = run("good", 40, jobs=3)
    assert [result.seed for result in results] == list(range(40))
    assert broken(results) == {}


def test_a_run_that_raises_is_a_failed_seed_and_says_where() -> None:
    results = run("raising", 12)
    assert [result.seed for result in results] == list(range(12))
    assert broken(results) == {3: SIMULATOR, 10: SIMULATOR}
    message = results[3].violations[0].message
    assert message.startswith("KeyError: 'missing' (run_seed fakes.py:")
    assert os.sep not in message


@pytest.mark.parametrize("workload", ["leaving", "dying"])
def test_a_run_that_takes_its_process_along_is_a_failed_seed(workload: str) -> None:
    results = run(workload, 12)
    assert [result.seed for result in results] == list(range(12))
    assert broken(results) == {3: SIMULATOR, 10: SIMULATOR}
    message = results[3].violations[0].message
    assert message.startswith("SystemExit: 3" if workload == "leaving" else "its process ended with code 9")


def test_a_run_that_hangs_is_cut_off_and_says_where_it_was() -> None:
    results = run("hanging", 6, limit_s=0.3)
    assert broken(results) == {3: HANG}
    assert results[3].violations[0].message.startswith("no end within 0.3 s of real time; it was in run_seed fakes.py:")


def test_a_run_that_hears_no_signal_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "GRACE_S", 0.5)
    results = run("deaf", 6, limit_s=0.5)
    assert broken(results) == {3: HANG}
    assert results[3].violations[0].message.endswith("it was killed")


def test_an_entry_that_does_not_exist_is_a_failed_seed() -> None:
    with SeedRunner(1, entry="tests.simulation.fakes:nothing") as pool:
        outcome = pool.run_one(make_task(1))
    assert outcome.result.violations[0].message.startswith("AttributeError: ")


def test_what_a_workload_prints_goes_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    assert broken(run("printing", 2)) == {}
    assert capfd.readouterr().out == ""


def test_events_come_along_when_they_are_wanted() -> None:
    with make_runner() as pool:
        outcomes = list(pool.run([make_task(1), make_task(1, events=2), make_task(1, events=None)]))
    none, last, whole = (outcome.events for outcome in outcomes)
    assert none == ()
    assert len(whole) == 1 + len(fakes.PLAN)
    assert last == whole[-2:]


def test_leaving_early_leaves_a_runner_that_can_go_on() -> None:
    with make_runner(2) as pool:
        with contextlib.closing(pool.run(make_task(seed) for seed in range(1_000))) as outcomes:
            assert next(outcomes).result.seed == 0
        assert pool.run_one(make_task(77)).result.seed == 77


def test_a_slow_run_keeps_what_is_buffered_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "AHEAD_PER_PROCESS", 3)
    asked: list[int] = []

    def tasks() -> Iterator[Task]:
        for seed in range(3, 30):
            asked.append(seed)
            yield make_task(seed, "hanging" if seed == 3 else "good")

    with make_runner(2, limit_s=1.0) as pool, contextlib.closing(pool.run(tasks())) as outcomes:
        assert next(outcomes).result.violations[0].invariant == HANG
        assert len(asked) == 6
        assert [outcome.result.seed for outcome in outcomes] == list(range(4, 30))


def test_a_process_is_replaced_after_its_number_of_runs() -> None:
    with SeedRunner(1, entry=fakes.ENTRY, runs_per_process=2) as pool:
        outcomes = list(pool.run(make_task(seed, "remembering", events=1) for seed in range(5)))
    runs = [outcome.events[0].rpartition("run ")[2][:1] for outcome in outcomes]
    assert runs == ["1", "2", "1", "2", "1"]


@pytest.mark.parametrize("hash_seed", ["101", "202"])
def test_a_new_interpreter_has_its_own_hash_seed_and_tells_its_code(monkeypatch: pytest.MonkeyPatch, hash_seed: str) -> None:
    monkeypatch.setattr(runner, "start_server", start_server)
    program = "print(list({'one', 'two', 'three', 'four', 'five', 'six', 'seven'}))"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    asked = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, check=True, text=True)
    with SeedRunner(1, entry=fakes.ENTRY, hash_seed=hash_seed) as pool:
        printed, hashed, dead = pool.run(
            [make_task(1, "printing"), make_task(1, "ordered by hash", events=7), make_task(3, "dying")]
        )
    assert printed.result.violations == ()
    assert [event.split()[-1] for event in hashed.events] == ast.literal_eval(asked.stdout)
    assert dead.result.violations[0].message == "its process ended with code 9"


def test_processes_end_with_who_started_them() -> None:
    """Killed without a chance to clean up: whoever waits for a task sees the end of its pipe."""
    program = (
        "import os\n"
        "from tests.simulation.fakes import make_runner, make_task\n"
        "runner = make_runner(1)\n"
        "runner.run_one(make_task(1))\n"
        "os._exit(0)\n"
    )
    # Its processes inherit stderr: that there is an end of it means that they are gone too.
    subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, check=True, timeout=60)


def test_an_error_in_this_process_is_told_as_well() -> None:
    outcome = perform(fakes.run_seed, make_task(3, "raising"))  # type: ignore[arg-type]
    assert isinstance(outcome, Outcome)
    assert outcome.result.violations[0].invariant == SIMULATOR


def test_what_a_run_leaves_in_cycles_is_freed_before_the_next() -> None:
    class Left:
        itself: Left

    try:
        tidy_up()  # the first call sets aside what is there
        gc.disable()
        left = Left()
        left.itself = left
        alive = weakref.ref(left)
        del left
        assert alive() is not None
        tidy_up()
        assert alive() is None
    finally:
        gc.enable()
        gc.unfreeze()
