"""Tumbling windows against a plain model, with slices, barriers, crashes and rescaling in between."""

from __future__ import annotations

from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.barriers.elements import MAX_WATERMARK
from holdfast.operators.functions.aggregates import columnar_descriptor, count, max, mean, min, sum
from holdfast.operators.functions.event_time.timestamps import TIME_MS_MAX
from holdfast.operators.functions.selectors import key_selector
from holdfast.operators.functions.windows.assigners import Sliding, Tumbling
from holdfast.operators.functions.windows.columnar import TumblingWindowOperator
from holdfast.statebackends.errors import InvalidKeyError, InvalidTimestampError
from tests.examples import examples
from tests.operators.functions.windows.fleets import ROWS, STEPS, SlidingModel, columnar_operator, drive, shown
from tests.operators.harness import OperatorHarness

SIZE = 10
AGGREGATES: dict[str, Any] = {
    "n": count(), "values": count("v"), "total": sum("v"), "low": min("v"), "high": max("v"), "avg": mean("v"),
}  # fmt: skip


def operator(rows_per_slice_max: int = 8192, windows: Tumbling | None = None, **aggregates: Any) -> TumblingWindowOperator:
    selector = key_selector("k", None, ROWS, "op")
    descriptor = columnar_descriptor("windows", aggregates or {"n": count(), "total": sum("v")}, ROWS, (), "op")
    made = TumblingWindowOperator(windows or Tumbling(SIZE), descriptor, selector, ROWS)
    made.rows_per_slice_max = rows_per_slice_max
    return made


def columns(*rows: tuple[str, int | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"k": key, "v": value} for key, value in rows], schema=ROWS.schema)


def test_a_window_fires_when_the_watermark_reaches_its_last_millisecond() -> None:
    with OperatorHarness(operator(), key_type="utf8") as harness:
        harness.process(columns(("a", 1), ("b", 2), ("a", 3), ("a", 4)), [0, 9, 5, 10])
        harness.watermark(8)
        assert harness.output.elements == []
        harness.watermark(9)
        assert shown(harness) == [("a", 0, 2, 4), ("b", 0, 1, 2)]
        assert harness.output.timestamps() == [9, 9]
        harness.watermark(MAX_WATERMARK)
        assert shown(harness)[2:] == [("a", 10, 1, 4)]
        row = harness.output.rows()[0]
        assert (row["window_end"] - row["window_start"]).total_seconds() == 0.01
        assert harness.output.batches[0].columns().schema == harness.operator.output_type.schema


def test_windows_fire_in_order_and_keys_in_order_of_arrival() -> None:
    with OperatorHarness(operator(rows_per_slice_max=2), key_type="utf8") as harness:
        harness.process(columns(*[(key, 1) for key in "zyxzab"]), [25, 5, 5, 5, 5, 25])
        harness.watermark(100)
        assert [(key, start) for key, start, *_ in shown(harness)] == [
            ("y", 0), ("x", 0), ("z", 0), ("a", 0), ("z", 20), ("b", 20),
        ]  # fmt: skip
        assert [batch.num_rows for batch in harness.output.batches] == [2, 2, 2]


def test_late_records_are_dropped_and_counted() -> None:
    with OperatorHarness(operator(), key_type="utf8") as harness:
        harness.watermark(9)
        harness.process(columns(("a", 1), ("a", 2)), [9, 10])
        harness.process(columns(("a", 4)), [0])
        harness.watermark(100)
        assert shown(harness) == [("a", 10, 1, 2)]
        assert harness.context.counters.late_dropped == 2
        assert harness.context.counters.late_ms_max == 9, "the one at 0, when event time was 9"


def test_windows_before_the_epoch_and_with_an_offset() -> None:
    with OperatorHarness(operator(windows=Tumbling(SIZE, offset=3)), key_type="utf8") as harness:
        harness.process(columns(("a", 1), ("a", 1), ("a", 1)), [-8, 2, 3])
        harness.watermark(100)
        assert [(start, n) for _, start, n, _ in shown(harness)] == [(-17, 1), (-7, 1), (3, 1)]


def test_aggregates_ignore_nulls_as_in_sql() -> None:
    with OperatorHarness(operator(**AGGREGATES), key_type="utf8") as harness:
        harness.process(columns(("a", 3), ("a", None), ("b", None), ("a", -1)), [0, 1, 2, 3])
        harness.watermark(100)
        rows = [{name: row[name] for name in ("k", *AGGREGATES)} for row in harness.output.rows()]
    assert rows == [
        {"k": "a", "n": 3, "values": 2, "total": 2, "low": -1, "high": 3, "avg": 1.0},
        {"k": "b", "n": 1, "values": 0, "total": None, "low": None, "high": None, "avg": None},
    ]


def test_rows_without_event_times_or_with_a_null_key_are_refused() -> None:
    with OperatorHarness(operator(), key_type="utf8") as harness:
        with pytest.raises(InvalidTimestampError, match="'op'"):
            harness.process(columns(("a", 1)))
        with pytest.raises(InvalidKeyError, match="'op'"):
            harness.process(pa.record_batch({"k": ["a", None], "v": [1, 1]}, schema=ROWS.schema), [1, 2])


def test_a_barrier_between_two_slices_cuts_exactly_there() -> None:
    with OperatorHarness(operator(rows_per_slice_max=2), key_type="utf8") as harness:
        harness.process(columns(*[(key, 1) for key in "abcde"]), [0, 1, 2, 3, 4])
        slices = harness.watermark_slices(9)
        next(slices)
        snapshot = harness.snapshot()
        before = shown(harness)
    with OperatorHarness.restored(operator(rows_per_slice_max=2), [snapshot], key_type="utf8") as harness:
        assert harness.output.elements == []
        harness.watermark(-50)
        after = shown(harness)
    assert (len(before), len(after)) == (2, 3)
    assert sorted(before + after) == [(key, 0, 1, 1) for key in "abcde"]


@pytest.mark.parametrize("parallelism", [1, 3, 7])
def test_a_window_that_fired_stays_fired_after_a_restore(parallelism: int) -> None:
    with OperatorHarness(operator(), key_type="utf8", max_parallelism=8) as harness:
        harness.watermark(19)
        harness.watermark(MAX_WATERMARK)
        snapshot = harness.snapshot()
    for subtask in range(parallelism):
        restored = OperatorHarness.restored(
            operator(), [snapshot], parallelism=parallelism, subtask=subtask, key_type="utf8", max_parallelism=8
        )
        with restored as harness:
            harness.process(columns(("a", 1)), [19])
            harness.process(columns(("a", 1)), [20])
            harness.watermark(MAX_WATERMARK)
            assert [start for _, start, *_ in shown(harness)] == [20]
            assert harness.context.counters.late_dropped == 1


# ------------------------------------------------------------------------------------------------- crashes, against a model


@example(
    steps=[("records", [("a", 0, 0)], None), ("watermark", 9, 0), ("records", [("a", 0, 0)], None), ("crash", 1, 0)], slice_rows=1
)
@settings(max_examples=examples(120), deadline=None)
@given(steps=STEPS, slice_rows=st.integers(1, 4))
def test_every_window_is_emitted_once_whatever_happens(steps: list[Any], slice_rows: int) -> None:
    make = partial(columnar_operator, TumblingWindowOperator, Tumbling(SIZE), rows_per_slice_max=slice_rows)
    drive(steps, make, shown, SlidingModel(Sliding(SIZE, SIZE), 0))


def test_how_late_a_record_is_after_a_drain_is_told_by_the_last_moment_that_records_brought() -> None:
    with OperatorHarness(operator(), key_type="utf8") as harness:
        harness.watermark(50)
        harness.watermark(MAX_WATERMARK)
        harness.process(columns(("a", 1)), [20])
        assert (harness.context.counters.late_dropped, harness.context.counters.late_ms_max) == (1, 30)


def test_how_late_a_record_is_fits_into_its_counter() -> None:
    with OperatorHarness(operator(), key_type="utf8") as harness:
        harness.watermark(MAX_WATERMARK - 1)
        harness.process(columns(("a", 1)), [-TIME_MS_MAX])
        assert harness.context.counters.metrics("op").late_ms_max == 2**63 - 1
