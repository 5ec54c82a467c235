"""Faults are left out as long as the run fails in the same way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.chaos.campaign.minimise import minimise
from holdfast.chaos.cluster.results import RunResult, ViolationRecord
from holdfast.chaos.faults.faults import Fault


def result(faults: int, *, hit: tuple[int, ...] | None = None, broke: str = "I5") -> RunResult:
    plan = tuple(Fault("kill_worker", f"worker-{index}", at_ms=index) for index in range(faults))
    violations = (ViolationRecord(broke, "broken"),) if broke else ()
    return RunResult(7, "counter", plan, violations, tuple(range(faults)) if hit is None else hit)


class Runs:
    """Runs with a part of the faults; fails when `guilty` says so."""

    def __init__(self, guilty: Callable[[set[int]], bool], other: Callable[[set[int]], bool] = lambda kept: False) -> None:
        self.guilty = guilty
        self.other = other
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, kept: tuple[int, ...]) -> RunResult:
        self.asked.append(kept)
        broke = "I5" if self.guilty(set(kept)) else "I1" if self.other(set(kept)) else ""
        return result(len(kept), broke=broke)


def test_one_of_many_faults_is_found() -> None:
    runs = Runs(lambda kept: 5 in kept)
    small = minimise(result(16), "I5", runs)
    assert (small.kept, small.complete) == ((5,), True)
    assert small.runs == len(runs.asked) < 16


def test_a_pair_that_lies_apart_is_found() -> None:
    small = minimise(result(12), "I5", Runs(lambda kept: {1, 10} <= kept))
    assert (small.kept, small.complete) == ((1, 10), True)


def test_a_failure_without_any_fault_takes_one_run() -> None:
    runs = Runs(lambda kept: True)
    assert minimise(result(12), "I5", runs).kept == ()
    assert runs.asked == [()]


def test_faults_that_never_hit_go_first() -> None:
    runs = Runs(lambda kept: {2, 3} <= kept)
    small = minimise(result(12, hit=(2, 3)), "I5", runs)
    assert small.kept == (2, 3)
    assert runs.asked[:2] == [(), (2, 3)]


def test_faults_that_are_all_needed_stay() -> None:
    small = minimise(result(4), "I5", Runs(lambda kept: len(kept) == 4))
    assert (small.kept, small.complete) == ((0, 1, 2, 3), True)


def test_another_invariant_is_another_failure() -> None:
    small = minimise(result(6), "I5", Runs(lambda kept: {0, 1} <= kept, other=lambda kept: True))
    assert small.kept == (0, 1)


def test_the_number_of_runs_is_bounded_and_said_so() -> None:
    runs = Runs(lambda kept: len(kept) >= 30)
    small = minimise(result(64), "I5", runs, runs_max=10)
    assert not small.complete
    assert small.runs == len(runs.asked) == 10
    assert len(small.kept) >= 30


def test_a_failure_that_does_not_come_back_keeps_its_faults() -> None:
    small = minimise(result(3), "I5", Runs(lambda kept: False))
    assert small.kept == (0, 1, 2)


@given(
    st.integers(0, 14).flatmap(lambda count: st.tuples(st.just(count), st.sets(st.integers(0, max(0, count - 1)), max_size=count)))
)
def test_what_is_left_fails_and_nothing_less_of_it_does(drawn: tuple[int, set[int]]) -> None:
    count, guilty = drawn
    guilty = {index for index in guilty if index < count}
    small = minimise(result(count), "I5", Runs(lambda kept: guilty <= kept), runs_max=1_000)
    assert small.kept == tuple(sorted(guilty))
    assert small.complete


@pytest.mark.parametrize("broke", ["", "I1"])
def test_no_subset_is_asked_twice(broke: str) -> None:
    runs = Runs(lambda kept: {0, 3, 4} <= kept)
    minimise(result(8, broke=broke or "I5"), "I5", runs)
    assert len(runs.asked) == len(set(runs.asked))
