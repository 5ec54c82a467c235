"""Sliding windows against a plain model and against DuckDB, with slices, barriers, crashes and rescaling in between."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.barriers.elements import MAX_WATERMARK
from holdfast.operators.functions.aggregates import (
    count,
)
from holdfast.operators.functions.windows.assigners import Sliding
from holdfast.operators.functions.windows.sliding import PANES_MAX, SlidingWindowOperator
from holdfast.statebackends.errors import GraphError, InvalidConfigError, InvalidTimestampError, StateOverflowError
from tests.examples import examples
from tests.operators.functions.windows.fleets import (
    EVERY_AGGREGATE,
    RECORDS,
    SQL_OF_EVERY_AGGREGATE,
    STEPS,
    Row,
    SlidingModel,
    assert_as_sql,
    columnar_operator,
    columns,
    drive,
    feed,
    shown,
)
from tests.operators.harness import OperatorHarness

operator = partial(columnar_operator, SlidingWindowOperator)


def test_each_window_that_holds_a_record_fires_at_its_last_millisecond() -> None:
    with OperatorHarness(operator(Sliding(10, 5)), key_type="utf8") as harness:
        feed(harness, ("a", 7, 1), ("b", 2, 2))
        harness.watermark(3)
        assert harness.output.elements == []
        harness.watermark(4)
        assert shown(harness) == [("b", -5, 1, 2, 1)]
        harness.watermark(9)
        assert sorted(shown(harness)[1:]) == [("a", 0, 1, 1, 1), ("b", 0, 1, 2, 1)]
        harness.watermark(MAX_WATERMARK)
        assert shown(harness)[3:] == [("a", 5, 1, 1, 1)]
        assert harness.output.timestamps() == [4, 9, 9, 14]
        assert harness.output.batches[0].columns().schema == harness.operator.output_type.schema
        row = harness.output.rows()[0]
        assert (row["window_end"] - row["window_start"]).total_seconds() == 0.01


def test_a_record_enters_those_of_its_windows_that_have_not_fired_and_is_late_when_all_have() -> None:
    with OperatorHarness(operator(Sliding(10, 5)), key_type="utf8") as harness:
        feed(harness, ("a", 7, 1))
        harness.watermark(9)
        feed(harness, ("a", 6, 10))
        feed(harness, ("a", 4, 100))
        assert harness.context.counters.late_dropped == 1, "windows -5 and 0 have fired"
        assert harness.context.counters.late_ms_max == 5
        harness.watermark(100)
        assert shown(harness) == [("a", 0, 1, 1, 1), ("a", 5, 2, 11, 2)]


def test_what_came_out_stays_as_it_is_when_later_windows_are_merged() -> None:
    with OperatorHarness(operator(Sliding(15, 5)), key_type="utf8") as harness:
        for pane in range(12):
            feed(harness, *((key, 5 * pane, 100 * (key == "a") + pane) for key in "abc"))
            harness.watermark(5 * pane + 4)
        found = {(key, start): rest for key, start, *rest in shown(harness)}
    for pane in range(12):
        held = range(max(0, pane - 2), pane + 1)
        for key in "abc":
            total = sum(100 * (key == "a") + number for number in held)
            assert found[key, 5 * pane - 10] == [len(held), total, len(held)]


@pytest.mark.parametrize(("second", "exact"), [(2**62 - 1, 2**63 - 1), (2**62, None)])
def test_a_sum_over_panes_is_exact_up_to_int64_and_an_error_beyond(second: int, exact: int | None) -> None:
    """The two panes lie in two blocks, so that they meet when the window comes out."""
    with OperatorHarness(operator(Sliding(10, 5)), key_type="utf8") as harness:
        feed(harness, ("a", 5, 2**62), ("a", 10, second))
        harness.watermark(9)
        if exact is None:
            with pytest.raises(StateOverflowError, match="beyond int64"):
                harness.watermark(14)
        else:
            harness.watermark(14)
            assert shown(harness)[-1] == ("a", 5, 2, exact, 2)


def test_records_between_windows_are_in_none_and_not_late() -> None:
    with OperatorHarness(operator(Sliding(4, 10, offset=3)), key_type="utf8") as harness:
        feed(harness, ("a", 2, 1), ("a", 3, 2), ("a", 6, 3), ("a", 7, 4), ("a", -7, 5))
        harness.watermark(100)
        assert shown(harness) == [("a", -7, 1, 5, 1), ("a", 3, 2, 5, 2)]
        assert harness.context.counters.late_dropped == 0
        feed(harness, ("a", 8, 1), ("a", 6, 3))
        assert harness.context.counters.late_dropped == 1


def test_what_sliding_windows_refuse() -> None:
    for size, slide, text in [
        (0, 5, "size of a window must be at least 1 ms"),
        (5, 0, "slide of a window must be at least 1 ms"),
        (5, -5, "slide of a window must be at least 1 ms"),
    ]:
        with pytest.raises(InvalidConfigError, match=text):
            Sliding(size, slide)
    with pytest.raises(GraphError, match=f"operator 'window': .* it may have {PANES_MAX}"):
        operator(Sliding(PANES_MAX + 1, 1))
    assert repr(Sliding(seconds=1, slide=500, offset=700)) == "Sliding(1000 ms by 500 ms, offset 200 ms)"
    with pytest.raises(GraphError, match=r"operator 'window': .*more than one column named n\.time"):
        operator(Sliding(10, 5), {"n": count(), "n.time": count()})
    with OperatorHarness(operator(Sliding(10, 5)), key_type="utf8") as harness, pytest.raises(InvalidTimestampError, match="'op'"):
        harness.process(columns([("a", 1, 1)]))


def test_what_a_barrier_cut_off_comes_out_in_slices_as_soon_as_the_job_goes_on() -> None:
    with OperatorHarness(operator(Sliding(10, 5)), key_type="utf8") as harness:
        feed(harness, *(("a", at, 1) for at in range(0, 100, 5)))
        next(harness.watermark_slices(89))
        found, snapshot = shown(harness), harness.snapshot()
    for _ in range(16):  # a crash behind each slice
        with OperatorHarness.restored(operator(Sliding(10, 5)), [snapshot], key_type="utf8") as harness:
            assert harness.operator.uses_processing_time
            next(harness.catch_up_slices())
            assert len(shown(harness)) == 1
            found, snapshot = found + shown(harness), harness.snapshot()
    with OperatorHarness.restored(operator(Sliding(10, 5)), [snapshot], key_type="utf8") as harness:
        harness.watermark(89)
        assert harness.operator.next_processing_time_ms() is None
        assert [start for _, start, *_ in found + shown(harness)] == list(range(-5, 85, 5))


def test_a_drain_that_a_barrier_cut_off_is_ended_and_the_job_goes_on_with_more_data() -> None:
    with OperatorHarness(operator(Sliding(10, 5), rows_per_slice_max=1), key_type="utf8") as harness:
        feed(harness, ("a", 1, 1), ("b", 2, 1), ("a", 12, 1))
        harness.watermark(3)
        next(harness.watermark_slices(MAX_WATERMARK))
        found, snapshot = shown(harness), harness.snapshot()
    with OperatorHarness.restored(operator(Sliding(10, 5)), [snapshot], key_type="utf8") as harness:
        feed(harness, ("a", 4, 100), ("b", 13, 100))
        harness.watermark(MAX_WATERMARK)
        found += shown(harness)
    assert sorted(row[:4] for row in found) == [
        ("a", -5, 1, 1), ("a", -5, 1, 100), ("a", 0, 1, 1), ("a", 0, 1, 100), ("a", 5, 1, 1), ("a", 10, 1, 1),
        ("b", -5, 1, 1), ("b", 0, 1, 1), ("b", 5, 1, 100), ("b", 10, 1, 100),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------- crashes, against a model


WINDOWS = st.sampled_from([(10, 5, 0), (10, 10, 3), (10, 4, 1), (7, 3, 0), (12, 2, 1), (3, 5, 2), (9, 6, 0)])
@example(
    steps=[("records", [("a", 0, 0), ("b", 1, 1)], None), ("watermark", 9, 1), ("records", [("a", 6, 5)], None), ("crash", 3, 1)],
    slice_rows=1,
    shape=(10, 5, 0),
    lateness=0,
)
@example(
    steps=[
        ("records", [("a", 0, 0), ("b", 1, 1), ("c", 2, 1)], None), ("watermark", 14, 1),
        ("records", [("a", 7, 1), ("b", 3, 1)], None),
        ("crash", 3, 1), ("watermark", 20, None), ("records", [("c", 1, 1), ("c", 9, 2)], None),
    ],
    slice_rows=1,
    shape=(10, 5, 0),
    lateness=8,
)  # fmt: skip
@example(
    steps=[("records", [("a", 0, 1)], None), ("watermark", 26, None), ("records", [("a", 17, 1), ("a", 15, 1)], None)],
    slice_rows=1,
    shape=(10, 4, 1),
    lateness=25,
)
@settings(max_examples=examples(60), deadline=None)
@given(steps=STEPS, slice_rows=st.integers(1, 4), shape=WINDOWS, lateness=st.sampled_from([0, 0, 4, 25]))
def test_every_window_is_emitted_once_and_again_for_late_records_whatever_happens(
    steps: list[Any], slice_rows: int, shape: tuple[int, int, int], lateness: int
) -> None:
    """`barrier` takes a snapshot in the middle of a firing: after so many slices on each subtask. A crash throws away what
    was emitted since the last barrier, and starts again behind it, at another parallelism."""
    windows = Sliding(shape[0], shape[1], offset=shape[2])
    model = SlidingModel(windows, lateness)
    drive(steps, partial(operator, windows, rows_per_slice_max=slice_rows, lateness_ms=lateness), shown, model)


@settings(max_examples=examples(30), deadline=None)
@given(rows=st.lists(RECORDS, min_size=1, max_size=6), shape=WINDOWS, batch_rows=st.sampled_from([1, 7, 65_536]))
def test_all_aggregates_over_sliding_windows_are_those_of_sql(
    rows: list[list[Row]], shape: tuple[int, int, int], batch_rows: int
) -> None:
    size, slide, offset = shape
    everything = sorted((row for some in rows for row in some), key=lambda row: row[1])
    with OperatorHarness(operator(Sliding(size, slide, offset=offset), EVERY_AGGREGATE), key_type="utf8") as harness:
        for start in range(0, len(everything), batch_rows):
            some = everything[start : start + batch_rows]
            feed(harness, *some)
            harness.watermark(some[-1][1] - 1)  # equal times follow
        harness.watermark(MAX_WATERMARK)
        found = shown(harness)
    query = f"""SELECT k, s, {SQL_OF_EVERY_AGGREGATE}
        FROM records, (SELECT range * {slide} + {offset} AS s FROM range(-40, 60)) WHERE s <= t AND t < s + {size} GROUP BY k, s"""
    assert_as_sql(found, 2, everything, query)
