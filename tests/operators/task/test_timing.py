"""Where a subtask's time goes: each moment is busy, backpressured or idle, and the last second has 1,000 ms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.operators.task.timing import BUCKET_S, Spent, SubtaskTime, TimePerSecond, later_second

IDLE, BUSY, FULL = Spent.IDLE, Spent.BUSY, Spent.BACKPRESSURED

Entry = tuple[float, float | None, float, Spent]
"""(a step begins, since when it was due, it ends, what the subtask waits for)."""

TABLE: dict[str, tuple[list[Entry], float, TimePerSecond]] = {
    "nothing yet": ([], 0.0, TimePerSecond(0, 1_000, 0)),
    "no step for long": ([], 9.0, TimePerSecond(0, 1_000, 0)),
    "a step of 300 ms, then nothing": ([(0.2, None, 0.5, IDLE)], 1.0, TimePerSecond(300, 700, 0)),
    "younger than a second": ([(0.0, None, 0.3, IDLE)], 0.4, TimePerSecond(300, 700, 0)),
    "waits for the loop with more to do": ([(0.0, None, 0.1, BUSY)], 1.0, TimePerSecond(1_000, 0, 0)),
    "waits at a full output": ([(0.0, None, 0.25, FULL)], 1.0, TimePerSecond(250, 0, 750)),
    "input came at 0.6 s, its turn at 0.8 s": ([(0.0, None, 0.1, IDLE), (0.8, 0.6, 0.9, IDLE)], 1.0, TimePerSecond(400, 600, 0)),
    "room came at 0.6 s, its turn at 0.8 s": ([(0.0, None, 0.1, FULL), (0.8, 0.6, 0.9, FULL)], 1.0, TimePerSecond(400, 0, 600)),
    "due before its last step ended": ([(0.0, None, 0.5, IDLE), (0.7, 0.4, 0.8, IDLE)], 1.0, TimePerSecond(800, 200, 0)),
    "a step of 5 s": ([(0.0, None, 5.0, FULL)], 5.25, TimePerSecond(750, 0, 250)),
    "a second ago is forgotten": ([(0.0, None, 1.0, IDLE)], 2.0, TimePerSecond(0, 1_000, 0)),
    "half of a piece": ([(0.0, None, 0.5, IDLE)], 1.475, TimePerSecond(25, 975, 0)),
    "the clock goes back in a step": ([(100.0, None, 100.2, FULL), (100.3, None, 50.0, IDLE)], 50.4, TimePerSecond(200, 700, 100)),
    "the clock goes ahead by a day": ([(0.0, None, 0.1, FULL)], 86_400.0, TimePerSecond(0, 0, 1_000)),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_last_second(name: str) -> None:
    steps, now_s, expected = TABLE[name]
    time = SubtaskTime(0.0)
    for began_s, due_s, ended_s, waits in steps:
        time.step_begins(began_s, due_s)
        time.step_ends(ended_s, waits)
    time.observe(now_s)
    assert time.last_second() == expected


OPERATIONS = st.tuples(
    st.sampled_from(["begin", "due", "end", "observe"]),
    st.one_of(st.floats(0, 0.2), st.floats(-5, 5), st.just(BUCKET_S), st.floats(0, 1e6)),
    st.sampled_from(Spent),
)


@given(st.lists(OPERATIONS, max_size=60))
def test_it_always_has_1_000_ms_and_no_time_is_lost(operations: list[tuple[str, float, Spent]]) -> None:
    time, now_s, elapsed_s = SubtaskTime(0.0), 0.0, 0.0
    for name, passed_s, spent in operations:
        before_s = now_s
        now_s += passed_s
        elapsed_s += max(0.0, now_s - before_s)
        match name:
            case "begin":
                time.step_begins(now_s)
            case "due":
                time.step_begins(now_s, before_s + passed_s / 2)
            case "end":
                time.step_ends(now_s, spent)
            case _:
                time.observe(now_s)
        found = time.last_second()
        assert sum(found) == 1_000
        assert min(found) >= 0
    assert sum(time.total_ms(each) for each in Spent) == pytest.approx(elapsed_s * 1000, rel=1e-6, abs=3)


@given(st.lists(st.tuples(st.floats(0, 0.3), st.sampled_from(Spent)), min_size=1, max_size=100))
def test_it_is_what_was_spent_but_for_a_part_of_the_oldest_piece(pieces: list[tuple[float, Spent]]) -> None:
    time, now_s, spans = SubtaskTime(0.0), 0.0, []
    for length_s, spent in pieces:
        time.step_ends(now_s, spent)
        spans.append((now_s, now_s + length_s, spent))
        now_s += length_s
        time.observe(now_s)
    exact = {
        spent: 1000 * sum(max(0.0, end_s - max(begin_s, now_s - 1)) for begin_s, end_s, kind in spans if kind is spent)
        for spent in (BUSY, FULL)
    }
    found = time.last_second()
    assert abs(found.busy_ms - exact[BUSY]) <= 1000 * BUCKET_S + 1
    assert abs(found.backpressured_ms - exact[FULL]) <= 1000 * BUCKET_S + 1


@pytest.mark.parametrize(
    ("spent", "passed_ms", "expected"),
    [
        (BUSY, 0, TimePerSecond(160, 640, 200)),
        (BUSY, 500, TimePerSecond(580, 320, 100)),
        (BUSY, 1_000, TimePerSecond(1_000, 0, 0)),
        (BUSY, 30_000, TimePerSecond(1_000, 0, 0)),
        (IDLE, 30_000, TimePerSecond(0, 1_000, 0)),
        (FULL, 750, TimePerSecond(40, 160, 800)),
    ],
)
def test_a_second_that_was_told_is_carried_on(spent: Spent, passed_ms: int, expected: TimePerSecond) -> None:
    assert later_second(TimePerSecond(160, 640, 200), spent, passed_ms) == expected


@given(st.integers(0, 1_000), st.integers(0, 1_000), st.sampled_from(Spent), st.integers(0, 5_000))
def test_what_is_carried_on_sums_to_a_second(busy: int, full: int, spent: Spent, passed_ms: int) -> None:
    full = min(full, 1_000 - busy)
    found = later_second(TimePerSecond(busy, 1_000 - busy - full, full), spent, passed_ms)
    assert sum(found) == 1_000
    assert min(found) >= 0
