"""Combinations of faults: each can be carried out, is drawn where it fits and its kinds are wanted, and leads where it should."""

from __future__ import annotations

import random

import pytest

from holdfast.barriers.jobgraph import JobConfig, RestartStrategy
from holdfast.chaos.campaign.user_runs import run_seed
from holdfast.chaos.checkers.sometimes import SOMETIMES
from holdfast.chaos.cluster.world import RunRequest
from holdfast.chaos.faults.combinations import COMBINATIONS, SHARE, Combination, draw_combination
from holdfast.chaos.faults.faults import KINDS, check_plan

HORIZON_MS = 2_000
SEEDS_MAX = 12

ANY = JobConfig(max_concurrent_checkpoints=3, state_backend="rocksdb", restart=RestartStrategy(jitter_factor=0.1))
LEADS_TO = {
    "overtaken_savepoint": ("savepoint_overtaken", "timers", None),
    "half_deleted": ("crash_between_deletions", "timers", "rocksdb"),
    "restarts_over_leaders": ("restarts_counted_on", "counter", None),
    "failing_over_leaders": ("pause_continued", "restarts", None),
    "ended_in_alignment": ("ended_in_alignment", "windows", None),
    "slow_firing": ("barrier_in_firing", "windows", None),
    "unsynced_name": ("power_lost_behind_found", "counter", None),
}
"""Combination -> the dangerous state that it is about, a workload, and a state backend in which it is met."""


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda each: each.name)
def test_it_can_be_carried_out(combination: Combination) -> None:
    for seed in range(20):
        plan = combination.draw(random.Random(seed), HORIZON_MS)
        check_plan(plan)
        assert {fault.kind for fault in plan} == set(combination.kinds)
    assert combination.fits(ANY)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda each: each.name)
def test_it_leads_to_its_dangerous_state(combination: Combination) -> None:
    name, workload, backend = LEADS_TO[combination.name]
    assert name in SOMETIMES
    for seed in range(SEEDS_MAX):
        plan = combination.draw(random.Random(seed), HORIZON_MS)
        result = run_seed(RunRequest(seed, workload, plan=plan, backend=backend)).result
        assert result.violations == ()
        if result.sometimes.get(name):
            return
    pytest.fail(f"{combination.name} never led to {name} in {SEEDS_MAX} seeds of {workload}")


def test_one_is_drawn_now_and_then() -> None:
    drawn = [draw_combination(random.Random(seed), tuple(KINDS), ANY, (), HORIZON_MS) for seed in range(1_000)]
    assert 0.7 * SHARE < sum(map(bool, drawn)) / len(drawn) < 1.3 * SHARE


def test_none_is_drawn_whose_kinds_are_not_wanted() -> None:
    assert not any(draw_combination(random.Random(seed), ("kill_worker",), ANY, (), HORIZON_MS) for seed in range(100))


def test_none_is_drawn_that_does_not_fit() -> None:
    kinds = ("savepoint", "store_slow")
    kinds_of_restarts = ("user_error", "kill_coordinator")
    drawn = [draw_combination(random.Random(seed), kinds_of_restarts, JobConfig(), (), HORIZON_MS) for seed in range(100)]
    assert not any(len(plan) > 3 for plan in drawn)
    one_by_one = JobConfig(max_concurrent_checkpoints=1)
    assert not any(draw_combination(random.Random(seed), kinds, one_by_one, (), HORIZON_MS) for seed in range(100))
    windows = ("window",)
    assert not any(draw_combination(random.Random(seed), ("slow_operator",), ANY, (), HORIZON_MS) for seed in range(100))
    assert any(draw_combination(random.Random(seed), ("slow_operator",), ANY, windows, HORIZON_MS) for seed in range(100))
    assert any(draw_combination(random.Random(seed), kinds, ANY, (), HORIZON_MS) for seed in range(100))
