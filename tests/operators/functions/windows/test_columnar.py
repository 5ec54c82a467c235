"""Tumbling windows against a plain model, with slices, barriers, crashes and rescaling in between."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.barriers.elements import MAX_WATERMARK, Batch
from holdfast.operators.functions.aggregates import columnar_descriptor, count, max, mean, min, sum
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import key_selector
from holdfast.operators.functions.windows.assigners import Tumbling
from holdfast.operators.functions.windows.columnar import TumblingWindowOperator
from holdfast.statebackends.errors import InvalidKeyError, InvalidTimestampError
from holdfast.statebackends.keygroups import subtask_of_key_group
from tests.examples import examples
from tests.operators.harness import HarnessSnapshot, OperatorHarness

ROWS = RowType(pa.schema([("k", pa.string()), ("v", pa.int64())]))
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


def shown(harness: OperatorHarness) -> list[tuple[Any, ...]]:
    """(key, window start in ms, n, total) of each row."""
    return [(row["k"], _ms(row["window_start"]), row["n"], row["total"]) for row in harness.output.rows()]


def _ms(moment: Any) -> int:
    return round(moment.timestamp() * 1000)


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


class Fleet:
    """All subtasks of the operator."""

    def __init__(self, parallelism: int, slice_rows: int, snapshots: list[HarnessSnapshot] | None = None) -> None:
        self.subtasks = [
            OperatorHarness.restored(
                operator(slice_rows), snapshots or [], parallelism=parallelism, subtask=subtask, key_type="utf8", max_parallelism=8
            ).open()
            for subtask in range(parallelism)
        ]

    def process(self, rows: list[tuple[str, int, int]]) -> None:
        batch = Batch(columns=columns(*[(key, value) for key, _, value in rows]), timestamps=np.array([t for _, t, _ in rows]))
        groups = self.subtasks[0].operator.selector.keys(batch, max_parallelism=8, operator="op").key_groups
        owners = np.array([subtask_of_key_group(group, 8, len(self.subtasks)) for group in groups.tolist()])
        for subtask, harness in enumerate(self.subtasks):
            part = batch.filter(owners == subtask)
            if part.num_rows:
                harness.operator.process_batch(part, 0)

    def output(self) -> Counter[Any]:
        return Counter(row for harness in self.subtasks for row in shown(harness))

    def clear(self) -> None:
        for harness in self.subtasks:
            harness.output.clear()

    def close(self) -> None:
        for harness in self.subtasks:
            harness.close()


@dataclass
class Model:
    """What a run without failures gives."""

    watermark: int = -(10**6)
    windows: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    late: int = 0

    def process(self, rows: list[tuple[str, int, int]]) -> None:
        for key, time, value in rows:
            start = time // SIZE * SIZE
            if start + SIZE - 1 <= self.watermark:
                self.late += 1
            else:
                self.windows.setdefault((key, start), []).append(value)

    def output(self) -> Counter[Any]:
        totals = ((key, start, len(values), int(np.sum(values))) for (key, start), values in self.windows.items())
        return Counter(totals)


RECORDS = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(-15, 40), st.integers(-3, 3)), min_size=1, max_size=12)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("records"), RECORDS),
        st.tuples(st.just("watermark"), st.integers(-20, 60)),
        st.tuples(st.just("crash"), st.integers(1, 3)),
        st.tuples(st.just("barrier"), st.integers(0, 4), st.integers(-20, 60)),
    ),
    max_size=14,
)


@example(steps=[("records", [("a", 0, 0)]), ("barrier", 0, 9), ("records", [("a", 0, 0)]), ("crash", 1)], slice_rows=1)
@settings(max_examples=examples(120), deadline=None)
@given(steps=STEPS, slice_rows=st.integers(1, 4))
def test_every_window_is_emitted_once_whatever_happens(steps: list[Any], slice_rows: int) -> None:
    """`barrier` takes a snapshot in the middle of a firing: after so many slices on each subtask. A crash throws away what
    was emitted since the last barrier, and starts again behind it, at another parallelism."""
    model, fleet = Model(), Fleet(2, slice_rows)
    committed: Counter[Any] = Counter()
    kept: tuple[int, list[HarnessSnapshot]] = (0, [harness.snapshot() for harness in fleet.subtasks])
    seen = position = 0
    crashes = Counter(index for index, step in enumerate(steps) if step[0] == "crash")
    while position < len(steps):
        step = steps[position]
        position += 1
        watermark = step[-1] if step[0] in ("watermark", "barrier") else None
        if step[0] == "records":
            fleet.process(step[1])
        elif step[0] == "crash":
            if crashes[position - 1]:
                crashes[position - 1] = 0
                fleet.close()
                fleet = Fleet(step[1], slice_rows, kept[1])
                position = kept[0]
                continue
        elif watermark is not None:
            running = [harness.watermark_slices(watermark) for harness in fleet.subtasks]
            for slices in running:
                for _ in range(step[1] if step[0] == "barrier" else 0):
                    next(slices, None)
            if step[0] == "barrier":
                kept = (position, [harness.snapshot() for harness in fleet.subtasks])
                committed += fleet.output()
                fleet.clear()
            for slices in running:
                for _ in slices:
                    pass
        if position > seen:
            seen = position
            if step[0] == "records":
                model.process(step[1])
            elif watermark is not None:
                model.watermark = np.maximum(model.watermark, watermark)
    for harness in fleet.subtasks:
        harness.watermark(MAX_WATERMARK)
    assert committed + fleet.output() == model.output()
    fleet.close()


def test_how_late_a_record_is_after_a_drain_is_told_by_the_last_moment_that_records_brought() -> None:
    with OperatorHarness(operator(), key_type="utf8") as harness:
        harness.watermark(50)
        harness.watermark(MAX_WATERMARK)
        harness.process(columns(("a", 1)), [20])
        assert (harness.context.counters.late_dropped, harness.context.counters.late_ms_max) == (1, 30)


def test_how_late_a_record_is_fits_into_its_counter() -> None:
    with OperatorHarness(operator(), key_type="utf8") as harness:
        harness.watermark(2**62)
        harness.process(columns(("a", 1)), [-(2**62)])
        assert harness.context.counters.metrics("op").late_ms_max == 2**63 - 1
