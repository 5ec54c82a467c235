"""How many rows a slice has, by what slices have cost: no clock, costs are made up."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from holdfast.operators.task.input import PROBE_EVERY, RowBudget
from holdfast.operators.task.pool import RunQueueDelay

BUDGET_MS = 5
ROWS_MAX = 65_536
MS = 0.001


def run(budget: RowBudget, fixed_s: float, cost_s: float, slices: int, *, noise: float = 0.0) -> list[tuple[int, float]]:
    """(rows, seconds) of slices that cost something by themselves, and something for each row."""
    rng, found = random.Random(3), []
    for _ in range(slices):
        rows = budget.rows()
        seconds = (fixed_s + cost_s * rows) * (1 + noise * rng.random())
        budget.measured(rows, seconds)
        found.append((rows, seconds))
    return found


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("cost_s", [5e-7, 1e-5, 1e-3])
@pytest.mark.parametrize("fixed_s", [0.0, 0.5 * MS, 4 * MS, 6 * MS, 20 * MS])
def test_rows_get_their_part_of_the_time_whatever_a_slice_costs_by_itself(fixed_s: float, cost_s: float, noise: float) -> None:
    later = run(RowBudget(BUDGET_MS, ROWS_MAX), fixed_s, cost_s, 600, noise=noise)[300:]
    own_s = cost_s * sum(rows for rows, _ in later)
    assert own_s / sum(seconds for _, seconds in later) > 0.2
    assert max(seconds for _, seconds in later) < (2 * max(BUDGET_MS * MS, 4 * fixed_s) + 4 * cost_s) * (1 + noise)


def test_costly_rows_come_one_by_one() -> None:
    later = run(RowBudget(BUDGET_MS, ROWS_MAX), 0.1 * MS, 0.05, 400)[100:]
    assert max(rows for rows, _ in later) == 2, "a probe now and then"
    assert sum(rows == 1 for rows, _ in later) >= len(later) * (1 - 2 / PROBE_EVERY)


def test_slices_are_short_again_once_they_cost_little_by_themselves() -> None:
    budget = RowBudget(BUDGET_MS, ROWS_MAX)
    assert run(budget, 20 * MS, 1e-6, 300)[-1][1] > 25 * MS
    assert run(budget, 0.1 * MS, 1e-6, 400)[-1][1] < 2 * BUDGET_MS * MS


def test_slices_shrink_at_once_when_rows_become_costly() -> None:
    budget = RowBudget(BUDGET_MS, ROWS_MAX)
    run(budget, 6 * MS, 1e-6, 300)
    first, second = run(budget, 6 * MS, 0.01, 2)
    assert first[0] > 1_000
    assert second[0] == 1


def test_what_is_left_of_a_batch_is_no_probe() -> None:
    budget = RowBudget(BUDGET_MS, ROWS_MAX)
    for _ in range(300):
        for rows in (budget.rows(), 3):
            budget.measured(rows, 0.2 * MS + 1e-6 * rows)
    assert budget.rows() * 1e-6 > BUDGET_MS * MS / 4


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fixed_s", [3 * MS, 4.5 * MS, 7 * MS])
def test_slices_stay_large_where_some_merge_and_batches_leave_rests(fixed_s: float, seed: int) -> None:
    rng, budget, cost_s, batch_rows, found = random.Random(seed), RowBudget(BUDGET_MS, ROWS_MAX), 4.5e-7, 13_333, []
    for _ in range(300):
        left = batch_rows
        while left:
            rows = budget.rows_of(left)
            merged_s = 16 * MS * rng.random() if rng.random() < 0.3 else 0.0
            seconds = (fixed_s + cost_s * rows) * (1 + 0.3 * rng.random()) + merged_s
            budget.measured(rows, seconds)
            found.append((rows, seconds))
            left -= rows
    later = found[len(found) // 5 :]
    one_slice_s = (fixed_s + cost_s * batch_rows) * 1.15 + 0.3 * 8 * MS
    assert sum(seconds for _, seconds in later) / sum(rows for rows, _ in later) < 2 * one_slice_s / batch_rows
    assert max(seconds for _, seconds in later) < 8 * fixed_s + 16 * MS


def test_a_rest_of_a_batch_that_takes_as_long_as_a_slice_changes_nothing() -> None:
    budget = RowBudget(BUDGET_MS, ROWS_MAX)
    large = run(budget, 6 * MS, 1e-6, 300)[-1][0]
    for _ in range(100):
        budget.measured(300, 6.3 * MS)
    assert budget.rows() >= large > 3_000


def test_a_small_rest_of_a_batch_goes_with_the_last_slice_where_slices_cost_much_by_themselves() -> None:
    budget = RowBudget(BUDGET_MS, ROWS_MAX)
    run(budget, 6 * MS, 1e-6, 300)
    rows = budget.rows()
    assert [budget.rows_of(left) for left in (rows + rows // 3, 2 * rows, rows - 1)] == [rows + rows // 3, rows, rows - 1]
    for _ in range(2 * PROBE_EVERY):  # they say nothing of slices as they are wanted
        budget.measured(rows + rows // 3, 10 * MS)
    assert budget.rows() == rows
    budget = RowBudget(BUDGET_MS, ROWS_MAX)
    run(budget, 0.0, 1e-3, 50)
    rows = budget.rows()
    assert budget.rows_of(rows + 1) == rows, "cheap by itself"


def test_after_one_very_long_slice_they_grow_again_within_twenty() -> None:
    budget = RowBudget(BUDGET_MS, ROWS_MAX)
    large = run(budget, 3 * MS, 5e-7, 300)[-1][0]
    budget.measured(budget.rows(), 0.4)
    assert budget.rows() < large / 50
    assert run(budget, 3 * MS, 5e-7, 20)[-1][0] >= large / 2


def test_time_in_which_others_had_the_cpu_is_no_cost() -> None:
    waited_s = 0.0
    budget = RowBudget(BUDGET_MS, ROWS_MAX, delayed_s=lambda: waited_s)
    turn_s, found = 3 * MS, []
    for _ in range(1_000):
        rows = budget.rows()
        work_s = left_s = 1.5 * MS + 4e-7 * rows
        before_s = waited_s
        while left_s > turn_s:  # then four others have theirs
            left_s -= turn_s
            waited_s += 12 * MS
            turn_s = 3 * MS
        turn_s -= left_s
        budget.measured(rows, work_s + waited_s - before_s)
        found.append(rows)
    assert min(found[50:]) > 4_000, "as many as fit into the budget"


def test_rests_of_batches_that_waited_for_a_cpu_make_slices_no_larger() -> None:
    waited_s = 0.0
    budget = RowBudget(BUDGET_MS, ROWS_MAX, delayed_s=lambda: waited_s)
    before = run(budget, 0.0, 1e-5, 300)[-1][0]
    for _ in range(50):
        waited_s += 20 * MS  # the thread waits outside of slices, too
        budget.measured(10, 10e-5 + 3 * MS)
    assert before / 2 < budget.rows() < 1.5 * before


def test_the_delay_of_a_thread_is_what_linux_counts() -> None:
    delay = RunQueueDelay()
    first = delay()
    assert 0 <= first <= delay()
    if sys.platform == "linux":
        assert (first > 0) == (int(Path("/proc/thread-self/schedstat").read_text().split()[1]) > 0)
    delay.close()
    delay.close()
    assert delay() == 0
