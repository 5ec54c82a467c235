"""The same seed twice, in two interpreters with other hashes: the first event that differs is told."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

import holdfast.operators.task.subtask as subtask_module
from holdfast.chaos.campaign.determinism import DETERMINISM, HASH_SEEDS, Difference, first_difference, run_twice
from holdfast.chaos.campaign.runner import HANG, SIMULATOR, Outcome, SeedRunner, Task, perform
from holdfast.chaos.campaign.user_runs import run_seed
from holdfast.chaos.cluster.results import ViolationRecord
from holdfast.chaos.cluster.world import RunRequest
from holdfast.chaos.faults.faults import Fault
from holdfast.chaos.workloads import WORKLOADS
from tests.examples import FACTOR, examples
from tests.simulation import fakes
from tests.simulation.fakes import make_task
from tests.simulation.listed import first_seeds, listed_seeds


def outcome(*events: str) -> Outcome:
    return Outcome(perform(fakes.run_seed, make_task(1)).result, events)  # type: ignore[arg-type]


def twice(workload: str, seeds: int = 1, *, limit_s: float = 20.0) -> list[Outcome]:
    return list(run_twice((make_task(seed, workload) for seed in range(seeds)), jobs=2, entry=fakes.ENTRY, limit_s=limit_s))


def test_equal_runs_do_not_differ() -> None:
    assert first_difference(outcome("a", "b"), outcome("a", "b")) is None


@pytest.mark.parametrize(
    ("second", "difference"),
    [(("a", "x", "c"), Difference(2, "b", "x")), (("a", "b"), Difference(3, "c", "")), ((), Difference(1, "a", ""))],
)
def test_the_first_event_that_differs_is_told(second: tuple[str, ...], difference: Difference) -> None:
    assert first_difference(outcome("a", "b", "c"), outcome(*second)) == difference


def test_a_difference_names_both_events() -> None:
    text = str(Difference(12, "  1.500  worker-1   snapshot", ""))
    assert text.startswith(
        "event 12 is not the same when the run is repeated: first `1.500 worker-1 snapshot`, then `the end of the run`."
    )


def test_results_differ_too() -> None:
    first = outcome("a")
    second = replace(first, result=msgspec.structs.replace(first.result, records=3))
    assert first_difference(first, second) == Difference(2, "result: records=1000", "result: records=3")


def test_a_workload_that_repeats_is_not_blamed() -> None:
    outcomes = twice("good", 5)
    assert [outcome.result.seed for outcome in outcomes] == list(range(5))
    assert all(outcome.result.violations == () for outcome in outcomes)


def test_where_the_code_lies_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback names folders; another machine has others."""
    request = RunRequest(3, "counter", plan=(Fault("user_error", "count", at_ms=300),), backend="memory")
    here = run_seed(request).result
    assert here.faults_hit == (0,)
    monkeypatch.setattr(subtask_module, "TRACEBACK_BYTES_MAX", 100)
    assert run_seed(request).result.trace_digest == here.trace_digest


def test_the_order_of_a_set_is_found() -> None:
    (found,) = twice("ordered by hash")
    (violation,) = found.result.violations
    assert violation.invariant == DETERMINISM
    assert "nobody event seven" in violation.message


def test_what_outlives_a_run_is_found() -> None:
    first, second = twice("remembering", 2)
    assert first.result.violations == ()
    (violation,) = second.result.violations
    assert violation.invariant == DETERMINISM
    assert "run 2 of this process" in violation.message


def test_what_a_run_breaks_itself_is_kept() -> None:
    outcomes = twice("broken", 4)
    assert outcomes[3].result.violations == (ViolationRecord("I5", "after 6 faults", 420),)


@pytest.mark.parametrize(("workload", "invariant"), [("raising", SIMULATOR), ("hanging", HANG)])
def test_a_run_that_fails_twice_in_the_same_way_repeats(workload: str, invariant: str) -> None:
    outcomes = twice(workload, 4, limit_s=1.0)
    assert [violation.invariant for violation in outcomes[3].result.violations] == [invariant]


TWICE = ("counter", "random", "rules", "async", "outside", "splits", "windows")
"""Of the simplest to those with the most hands: files, drawn graphs, broadcasts, other threads, an outside, splits, alignment."""


@pytest.mark.slow
def test_workloads_hold_and_give_the_same_trace_twice() -> None:
    """Byte for byte, in two processes with other hashes, and whatever ran before in the same process. With `make chaos` all."""
    listed = first_seeds(listed_seeds())
    names = TWICE if FACTOR == 1 else tuple(WORKLOADS)
    tasks = [Task(RunRequest(listed[name].seed + number, name), None) for number in range(examples(1)) for name in names]
    with SeedRunner(1, hash_seed=HASH_SEEDS[0]) as one, SeedRunner(1, hash_seed=HASH_SEEDS[1]) as other:
        forth, back = one.run(tasks), other.run(reversed(tasks))
        for task, first, second in zip(tasks, list(forth), reversed(list(back)), strict=True):
            assert len(first.events) > 50
            assert first_difference(first, second) is None, task.request
            assert first.result.violations == (), task.request
