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


def test_a_row_costs_two_bytes() -> None:
    assert order_of(np.arange(CHUNK_ROWS + 5)).nbytes == 2 * (CHUNK_ROWS + 5)
