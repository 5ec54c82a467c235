"""The earliest rows of a run, against a sort of all of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.statebackends.row_tables import time_order
from holdfast.statebackends.row_tables.time_order import CHUNK_ROWS, TimeOrder
from holdfast.statebackends.state import NO_TIME
from tests.examples import examples

Numbers = npt.NDArray[np.int64]


def order_of(times: Numbers) -> TimeOrder:
    return TimeOrder(times, np.empty(len(times), np.uint16))


def expected(times: Numbers, alive: npt.NDArray[np.bool_], moment: int, after: int) -> list[int]:
    wanted = np.flatnonzero(alive & (times > after) & (times <= moment))
    found: list[int] = wanted[np.argsort(times[wanted], kind="stable")].tolist()
    return found


@settings(max_examples=examples(60), deadline=None)
@given(
    times=st.lists(st.integers(0, 12) | st.just(NO_TIME), min_size=1, max_size=60),
    chunk_rows=st.sampled_from((1, 3, 8)),
    few=st.sampled_from((0, 16)),
    asked=st.lists(
        st.tuples(st.integers(-1, 13), st.just(NO_TIME) | st.integers(-1, 12), st.integers(1, 9), st.booleans()), max_size=12
    ),
)
def test_rows_come_by_time_and_place_whatever_was_deleted_before(
    times: list[int], chunk_rows: int, few: int, asked: list[tuple[int, int, int, bool]]
) -> None:
    stamps, alive = np.array(times, np.int64), np.ones(len(times), np.bool_)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time_order, "CHUNK_ROWS", chunk_rows)
        patch.setattr(time_order, "_FEW", few)
        patch.setattr(time_order, "_READ_ROWS_MIN", 1)
        order = order_of(stamps)
        for moment, after, rows_max, deletes in asked:
            found = order.first(moment, rows_max, after, lambda rows: ~alive[rows])
            assert found.tolist() == expected(stamps, alive, moment, after)[:rows_max]
            if deletes:
                alive[found] = False


@pytest.mark.parametrize("kind", ["spread", "one time", "one chunk is early", "ascending"])
def test_no_read_looks_at_more_than_a_few_times_what_it_gives(kind: str) -> None:
    """Of a run of twenty chunks, sorted when it was made; half of its rows are dead, and each of them is met once."""
    count, rows_max = 20 * CHUNK_ROWS, 1_000
    rng = np.random.default_rng(7)
    times = {
        "spread": rng.integers(0, 10**9, count),
        "one time": np.full(count, 5),
        "one chunk is early": np.where(np.arange(count) // CHUNK_ROWS == 3, 0, 10**6) + rng.integers(0, 10**6, count),
        "ascending": np.arange(count),
    }[kind]
    order, alive, looked = order_of(times), rng.random(count) < 0.5, []

    def dead_among(rows: Numbers) -> npt.NDArray[np.bool_]:
        looked.append(len(rows))
        return ~alive[rows]

    wanted = expected(times, alive, 2 * 10**9, NO_TIME)
    for start in range(0, 30 * rows_max, rows_max):
        found = order.first(2 * 10**9, rows_max, NO_TIME, dead_among)
        assert found.tolist() == wanted[start : start + rows_max]
        alive[found] = False
        assert sum(looked) <= 16 * rows_max, "rows that one read looked at"
        looked.clear()


@pytest.mark.parametrize("chunks", [1, 2, 40])
@pytest.mark.parametrize("dead", [400, 1_000, 20_000])
def test_dead_rows_are_passed_in_few_reads_however_few_rows_are_asked_for(dead: int, chunks: int) -> None:
    times = np.random.default_rng(7).permutation(chunks * CHUNK_ROWS)
    looked: list[int] = []

    def dead_among(rows: Numbers) -> npt.NDArray[np.bool_]:
        looked.append(len(rows))
        is_dead: npt.NDArray[np.bool_] = times[rows] < dead
        return is_dead

    assert not len(order_of(times).first(dead - 1, 1, NO_TIME, dead_among))
    assert len(looked) <= 24, "reads"
    assert sum(looked) == dead, "each row once"
    looked.clear()
    order = order_of(times)
    assert times[order.first(2 * dead, 1, NO_TIME, dead_among)].tolist() == [dead]
    assert len(looked) <= 24, "reads"
    looked.clear()
    assert times[order.first(2 * dead, 1, NO_TIME, dead_among)].tolist() == [dead]
    assert len(looked) == 1, "those before are known to be dead"


@settings(max_examples=examples(30), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.sampled_from((70, 300, 900)),
    chunk_rows=st.sampled_from((8, 64, 1_024)),
    spread=st.sampled_from((3, 100, 10**6)),
    dead_until=st.floats(0, 1),
    asked=st.lists(st.tuples(st.floats(0, 1), st.just(NO_TIME) | st.floats(0, 1), st.sampled_from((1, 2, 50))), max_size=8),
)
def test_rows_behind_many_dead_ones_are_those_of_a_sort(
    seed: int, rows: int, chunk_rows: int, spread: int, dead_until: float, asked: list[tuple[float, float, int]]
) -> None:
    """The times are of `spread`, shares of which the moments are; most rows up to one of them are dead."""
    rng = np.random.default_rng(seed)
    times = rng.integers(0, spread, rows)
    alive = (times > dead_until * spread) | (rng.random(rows) < 0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time_order, "CHUNK_ROWS", chunk_rows)
        patch.setattr(time_order, "_READ_ROWS_MIN", 4)
        order = order_of(times)
        for until, behind, rows_max in asked:
            moment, after = int(until * spread), behind if behind == NO_TIME else int(behind * spread)
            found = order.first(moment, rows_max, int(after), lambda rows: ~alive[rows])
            assert found.tolist() == expected(times, alive, moment, int(after))[:rows_max]
            alive[found[::2]] = False


def test_a_row_costs_two_bytes() -> None:
    assert order_of(np.arange(CHUNK_ROWS + 5)).nbytes == 2 * (CHUNK_ROWS + 5)
