"""Sliding windows against a plain model and against DuckDB, with slices, barriers, crashes and rescaling in between."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.barriers.elements import MAX_WATERMARK
from holdfast.operators.functions.aggregates import (
    Aggregate,
    arg_max,
    columnar_descriptor,
    count,
    count_distinct,
    first,
    last,
    max,
    mean,
    min,
    stddev,
    sum,
)
from holdfast.operators.functions.selectors import key_selector
from holdfast.operators.functions.windows.assigners import Sliding
from holdfast.operators.functions.windows.sliding import PANES_MAX, SlidingWindowOperator
from holdfast.statebackends.errors import GraphError, InvalidConfigError, InvalidTimestampError
from tests.examples import examples
from tests.operators.functions.windows.fleets import RECORDS, ROWS, STEPS, Row, columns, drive, feed
from tests.operators.harness import OperatorHarness

AGGREGATES: dict[str, Aggregate] = {"n": count(), "total": sum("v"), "different": count_distinct("v")}


def operator(
    windows: Sliding, aggregates: dict[str, Aggregate] | None = None, rows_per_slice_max: int = 8192, lateness_ms: int = 0
) -> SlidingWindowOperator:
    descriptor = columnar_descriptor("windows", aggregates or AGGREGATES, ROWS, (), "op")
    selector = key_selector("k", None, ROWS, "op")
    made = SlidingWindowOperator(windows, descriptor, selector, ROWS, lateness_ms=lateness_ms, late_tag="late")
    made.rows_per_slice_max = rows_per_slice_max
    return made


def shown(harness: OperatorHarness) -> list[tuple[Any, ...]]:
    """(key, window start in ms, results ...) of each row."""
    return [
        (row["k"], round(row["window_start"].timestamp() * 1000), *list(row.values())[3:]) for row in harness.output.rows()
    ]


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


class Model:
    """What a run without failures gives."""

    def __init__(self, windows: Sliding, lateness_ms: int) -> None:
        self.windows = windows
        self.lateness_ms = lateness_ms
        self.watermark = -(10**6)
        self.rows: dict[tuple[str, int], list[int | None]] = {}
        self.output: Counter[Any] = Counter()

    def process(self, rows: list[Row]) -> None:
        size, slide, offset = self.windows.size_ms, self.windows.slide_ms, self.windows.offset_ms
        again = set()
        for key, at, value in rows:
            starts = list(range(at - (at - offset) % slide, at - size, -slide))
            in_time = [start for start in starts if start + size - 1 + self.lateness_ms > self.watermark]
            for start in in_time:
                self.rows.setdefault((key, start), []).append(value)
                if start + size - 1 <= self.watermark:
                    again.add((key, start))
            if starts and not in_time:
                self.output[key, at, value] += 1
        for key, start in again:
            self._fire(key, start)

    def advance(self, watermark: int) -> None:
        for key, start in self.rows:
            if self.watermark < start + self.windows.size_ms - 1 <= watermark:
                self._fire(key, start)
        self.watermark = np.maximum(self.watermark, watermark)

    def drain(self) -> None:
        watermark = self.watermark
        self.advance(MAX_WATERMARK)
        self.rows, self.watermark = {}, watermark

    def _fire(self, key: str, start: int) -> None:
        values = self.rows[key, start]
        there = [value for value in values if value is not None]
        self.output[key, start, len(values), int(np.sum(there)) if there else None, len(set(there))] += 1


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
@settings(max_examples=examples(60), deadline=None)
@given(steps=STEPS, slice_rows=st.integers(1, 4), shape=WINDOWS, lateness=st.sampled_from([0, 0, 4, 25]))
def test_every_window_is_emitted_once_and_again_for_late_records_whatever_happens(
    steps: list[Any], slice_rows: int, shape: tuple[int, int, int], lateness: int
) -> None:
    """`barrier` takes a snapshot in the middle of a firing: after so many slices on each subtask. A crash throws away what
    was emitted since the last barrier, and starts again behind it, at another parallelism."""
    windows = Sliding(shape[0], shape[1], offset=shape[2])
    model = Model(windows, lateness)
    drive(steps, partial(operator, windows, rows_per_slice_max=slice_rows, lateness_ms=lateness), shown, model)


@settings(max_examples=examples(30), deadline=None)
@given(rows=st.lists(RECORDS, min_size=1, max_size=6), shape=WINDOWS, batch_rows=st.sampled_from([1, 7, 65_536]))
def test_all_aggregates_over_sliding_windows_are_those_of_sql(
    rows: list[list[Row]], shape: tuple[int, int, int], batch_rows: int
) -> None:
    size, slide, offset = shape
    everything = sorted((row for some in rows for row in some), key=lambda row: row[1])
    aggregates = {
        "n": count(), "total": sum("v"), "least": min("v"), "most": max("v"), "different": count_distinct("v"),
        "early": first("v"), "late": last("v"), "best": arg_max("k", "v"), "average": mean("v"), "spread": stddev("v"),
    }  # fmt: skip
    with OperatorHarness(operator(Sliding(size, slide, offset=offset), aggregates), key_type="utf8") as harness:
        for start in range(0, len(everything), batch_rows):
            some = everything[start : start + batch_rows]
            feed(harness, *some)
            harness.watermark(some[-1][1] - 1)  # equal times follow
        harness.watermark(MAX_WATERMARK)
        found = {row[:2]: row[2:] for row in shown(harness)}
        assert len(found) == len(shown(harness))
    table = pa.table(
        {
            "k": [row[0] for row in everything],
            "t": pa.array([row[1] for row in everything], pa.int64()),
            "v": pa.array([row[2] for row in everything], pa.int64()),
            "i": pa.array(range(len(everything)), pa.int64()),
        }
    )
    with duckdb.connect() as connection:
        connection.register("records", table)
        expected = connection.sql(
            f"""SELECT k, s, count(*), sum(v), min(v), max(v), count(DISTINCT v),
            first(v ORDER BY t, i) FILTER (WHERE v IS NOT NULL), first(v ORDER BY t DESC, i DESC) FILTER (WHERE v IS NOT NULL),
            first(k ORDER BY v DESC, t, i) FILTER (WHERE v IS NOT NULL), avg(v), stddev_samp(v)
            FROM records, (SELECT range * {slide} + {offset} AS s FROM range(-40, 60)) WHERE s <= t AND t < s + {size}
            GROUP BY k, s"""
        ).fetchall()
    assert found.keys() == {row[:2] for row in expected}
    for row in expected:
        assert found[row[:2]][:-2] == row[2:-2]
        for ours, theirs in zip(found[row[:2]][-2:], row[-2:], strict=True):
            assert ours == (None if theirs is None else pytest.approx(theirs))
