"""Windows that fire again: whatever the order of late records, those of a key are the windows that any of its records touches."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.operators.functions.windows.touched import TouchedWindows
from holdfast.statebackends.serialization.keys import KeyType
from tests.examples import examples

SLIDE = 4
RUNS = st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 20), st.integers(0, 6)), min_size=1, max_size=12)
"""(key, number of the first window, windows behind it)."""


def made(runs: list[tuple[int, int, int]]) -> TouchedWindows:
    keys, firsts, more = (np.array(column, np.int64) for column in zip(*runs, strict=True))
    column = KeyType.parse("int64").column([pa.array(keys)], max_parallelism=8)
    return TouchedWindows(column, keys, SLIDE * firsts, SLIDE * (firsts + more), SLIDE)


def windows(runs: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """(key, window) of runs (key, first, last)."""
    return [(key, window) for key, first, last in runs for window in range(first, last + 1, SLIDE)]


def told(touched: TouchedWindows) -> list[tuple[int, int]]:
    keys, firsts, lasts = touched.rest()
    return windows(zip(keys.arrays[0].to_pylist(), firsts.tolist(), lasts.tolist(), strict=True))


def test_a_record_that_comes_behind_a_later_one_takes_no_window_from_it() -> None:
    assert told(made([(0, 2, 2), (0, 2, 1)])) == [(0, 8), (0, 12), (0, 16)]
    assert told(made([(0, 2, 2), (0, 3, 0)])) == [(0, 8), (0, 12), (0, 16)]


@given(runs=RUNS, block=st.integers(1, 30))
@settings(max_examples=examples(200), deadline=None)
def test_each_window_of_a_key_is_there_once_and_in_order(runs: list[tuple[int, int, int]], block: int) -> None:
    expected = sorted(set(windows((key, SLIDE * first, SLIDE * (first + more)) for key, first, more in runs)))
    touched = made(runs)
    assert sorted(told(touched)) == expected
    fired = []
    for numbers, some in touched.blocks(lambda start: start + block):
        keys = touched.keys.take(numbers).arrays[0].to_pylist()
        for window in some:
            ends = zip(keys, touched.firsts[numbers].tolist(), touched.lasts[numbers].tolist(), strict=True)
            fired += [(window, key) for key, first, last in ends if first <= window <= last]
            touched.pass_by(window)
            assert sorted(fired + [(at, key) for key, at in told(touched)]) == sorted((at, key) for key, at in expected)
    assert sorted(fired) == sorted((at, key) for key, at in expected)
    assert [at for at, _ in fired] == sorted(at for at, _ in fired)
