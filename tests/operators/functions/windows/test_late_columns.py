"""Allowed lateness and the late output of windows over columns."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.barriers.elements import MAX_WATERMARK
from holdfast.operators.functions.windows.assigners import Sliding, Tumbling
from holdfast.operators.functions.windows.columnar import TumblingWindowOperator
from holdfast.operators.functions.windows.sliding import SlidingWindowOperator
from holdfast.statebackends.columnar import distinct, panes
from tests.operators.functions.windows.fleets import EVERY_AGGREGATE, ROWS, batch, columnar_operator, feed, shown
from tests.operators.functions.windows.test_sliding import operator
from tests.operators.harness import OperatorHarness


def test_a_late_record_fires_its_windows_again_once_a_batch_with_complete_rows() -> None:
    with OperatorHarness(operator(Sliding(10, 5), lateness_ms=5), key_type="utf8") as harness:
        feed(harness, ("a", 7, 1), ("b", 7, 2))
        harness.watermark(14)
        harness.output.clear()
        feed(harness, ("a", 6, 10), ("a", 6, 100), ("b", 12, 3))
        assert shown(harness) == [("a", 5, 3, 111, 3), ("b", 5, 2, 5, 2)], "window 0 is late, window 10 is open"
        assert harness.output.timestamps() == [14, 14]
        harness.output.clear()
        feed(harness, ("a", 8, 1000))
        assert shown(harness) == [("a", 5, 4, 1111, 4)]
        feed(harness, ("a", 4, 1))
        assert harness.context.counters.late_dropped == 1


def test_a_row_that_has_been_emitted_does_not_change_with_a_late_record() -> None:
    windows = columnar_operator(SlidingWindowOperator, Sliding(10, 10), EVERY_AGGREGATE, lateness_ms=100)
    with OperatorHarness(windows, key_type="utf8") as harness:
        feed(harness, ("a", 5, 1), ("b", 5, 1))
        harness.watermark(20)
        fired = [batch.columns() for batch in harness.output.batches]
        before = [columns.to_pylist() for columns in fired]
        feed(harness, ("a", 4, 7), ("a", 6, 8))
        assert [columns.to_pylist() for columns in fired] == before, "a sink may still hold it"


def test_a_window_takes_records_until_its_lateness_has_passed_and_then_its_state_goes() -> None:
    with OperatorHarness(operator(Sliding(10, 10), lateness_ms=5), key_type="utf8") as harness:
        feed(harness, ("a", 3, 1))
        harness.watermark(13)
        feed(harness, ("a", 9, 2))
        assert shown(harness) == [("a", 0, 1, 1, 1), ("a", 0, 2, 3, 2)]
        assert harness.operator._state.namespaces() == [0]
        harness.watermark(14)
        assert harness.operator._state.namespaces() == []
        feed(harness, ("a", 9, 4))
        assert harness.context.counters.late_dropped == 1
        assert len(harness.output.rows()) == 2


def test_late_records_go_to_the_late_output_as_they_are_and_are_not_counted() -> None:
    tumbling = columnar_operator(TumblingWindowOperator, Tumbling(10))
    for made in (tumbling, operator(Sliding(10, 10))):
        with OperatorHarness(made, key_type="utf8") as harness:
            harness.output.sides["late"] = []
            harness.watermark(19)
            feed(harness, ("a", 19, 1), ("b", 20, 2), ("c", 3, None))
            (late,) = harness.output.sides["late"]
            assert late.columns() == pa.RecordBatch.from_pylist([{"k": "a", "v": 1}, {"k": "c", "v": None}], schema=ROWS.schema)
            assert late.timestamps is not None
            assert late.timestamps.tolist() == [19, 3]
            assert harness.context.counters.late_dropped == 0


def test_a_lateness_beyond_the_end_of_time_saturates() -> None:
    with OperatorHarness(operator(Sliding(10, 5), lateness_ms=2**63 - 1), key_type="utf8") as harness:
        feed(harness, ("a", 3, 1))
        harness.watermark(2**61)
        feed(harness, ("a", 3, 1))
        assert [n for _, _, n, *_ in shown(harness)] == [1, 1, 2, 2]
        harness.watermark(MAX_WATERMARK)
        assert harness.operator._state.namespaces() == []


def test_what_was_late_stays_late_when_the_lateness_grows() -> None:
    with OperatorHarness(operator(Sliding(10, 10)), key_type="utf8") as harness:
        feed(harness, ("a", 3, 1))
        harness.watermark(12)
        snapshot = harness.snapshot()
    with OperatorHarness.restored(operator(Sliding(10, 10), lateness_ms=100), [snapshot], key_type="utf8") as harness:
        feed(harness, ("a", 4, 1))
        assert harness.context.counters.late_dropped == 1, "its window is gone, and must not come back with one record"
        feed(harness, ("a", 10, 1))
        harness.watermark(30)
        feed(harness, ("a", 11, 1))
        assert shown(harness) == [("a", 10, 1, 1, 1), ("a", 10, 2, 2, 1)]


def test_a_tumbling_window_gets_a_lateness_with_a_new_version_of_the_job() -> None:
    before = columnar_operator(TumblingWindowOperator, Tumbling(10), rows_per_slice_max=1)
    with OperatorHarness(before, key_type="utf8") as harness:
        feed(harness, ("a", 3, 1), ("b", 4, 1), ("c", 12, 1))
        next(harness.watermark_slices(9))
        assert shown(harness) == [("a", 0, 1, 1, 1)]
        snapshot = harness.snapshot()
    with OperatorHarness.restored(operator(Sliding(10, 10), lateness_ms=100), [snapshot], key_type="utf8") as harness:
        feed(harness, ("a", 5, 1))
        assert harness.context.counters.late_dropped == 1
        harness.watermark(19)
        feed(harness, ("c", 19, 1))
        assert shown(harness) == [("b", 0, 1, 1, 1), ("c", 10, 1, 1, 1), ("c", 10, 2, 2, 1)]


@pytest.mark.parametrize("windows", [hf.Tumbling(10), hf.Sliding(10, 5)])
def test_a_job_with_late_records(windows: Any) -> None:
    with hf.testing.Job(parallelism=2) as job:
        records = job.input("records", {"key": str, "value": int})
        windowed = records.stream.key_by("key").window(windows).allowed_lateness(10).side_output_late("late")
        sums = windowed.aggregate(n=hf.count(), total=hf.sum("value")).uid("sums")
        rows, late = job.output(sums), job.output(sums.side_output("late"))
        job.start()
        records.add([{"key": "a", "value": 1}, {"key": "b", "value": 2}], at=10)
        records.watermark(24)
        job.checkpoint()
        rows.take()
        job.restart(parallelism=3, state_backend="rocksdb")
        records.watermark(24)
        records.add({"key": "a", "value": 10}, at=19)
        records.add({"key": "b", "value": 20}, at=3)
        assert {(row["n"], row["total"], time) for row, time in rows.take()} == {(2, 11, 19), (1, 10, 24)} - (
            {(1, 10, 24)} if isinstance(windows, hf.Tumbling) else set()
        )
        assert late.take() == [({"key": "b", "value": 20}, 3)]
        assert job.progress("sums").late_dropped == 0


def test_what_aggregates_over_columns_refuse() -> None:
    with hf.testing.Job() as job:
        keyed = job.input("records", {"key": str, "value": int}).stream.key_by("key")
        for windowed, text in [
            (keyed.window(hf.Tumbling(10)).trigger(hf.CountTrigger(3)), "no trigger of their own"),
            (keyed.window(hf.Sliding(10, 5)).evictor(hf.CountEvictor(3)), "no evictor of their own"),
            (keyed.window(hf.Global()), r"Global.*given: no trigger\)"),
            (keyed.window(hf.Session(lambda row: 5)), "not Session"),
        ]:
            with pytest.raises(hf.GraphError, match=f"operator 'window': .*{text}"):
                windowed.aggregate(n=hf.count())


def test_windows_fire_again_in_slices_between_which_a_barrier_may_fall() -> None:
    expected = [("a", start, 2, 11, 2) for start in range(-8, 2, 2)] + [("b", start, 1, 5, 1) for start in range(2, 12, 2)]
    for barrier in range(9):
        with OperatorHarness(operator(Sliding(10, 2), lateness_ms=100), key_type="utf8") as harness:
            feed(harness, ("a", 1, 1))
            harness.watermark(20)
            harness.output.clear()
            slices = harness.take_slices(batch([("a", 1, 10), ("b", 10, 5)]))
            assert harness.output.elements == [], "no more than is asked for"
            for _ in range(barrier):
                next(slices)
            found, snapshot = shown(harness), harness.snapshot()
        with OperatorHarness.restored(operator(Sliding(10, 2), lateness_ms=100), [snapshot], key_type="utf8") as harness:
            feed(harness, ("c", 40, 1))
            assert sorted(found + shown(harness)) == sorted(expected), "once each, before a record is read"


@pytest.mark.parametrize("is_late", [False, True])
def test_panes_are_merged_in_steps_between_which_a_barrier_may_fall(is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many values a pane has to be told apart: no step looks at all of them."""
    monkeypatch.setattr(panes, "ROWS_PER_STEP", 1)
    monkeypatch.setattr(distinct, "PAIRS_PER_STEP", 2)
    before = [("a", at, value) for at in (1, 3, 5) for value in range(at, at + 7)]
    late: list[tuple[str, int, int | None]] = [("a", 3, 100), ("a", 3, 101)]
    sliding = operator(Sliding(6, 2), lateness_ms=100)
    steps, expected = 0, None
    while True:
        with OperatorHarness(sliding, key_type="utf8") as harness:
            feed(harness, *before)
            if is_late:
                harness.watermark(40)
                harness.output.clear()
            slices = harness.take_slices(batch(late)) if is_late else harness.watermark_slices(40)
            done = sum(1 for _ in itertools.islice(slices, steps))
            found, snapshot = shown(harness), harness.snapshot()
        with OperatorHarness.restored(sliding, [snapshot], key_type="utf8") as harness:
            feed(harness, ("c", 60, 1))
            found += shown(harness)
        expected = expected or sorted(found)
        assert sorted(found) == expected, "once each"
        if done < steps:
            break
        steps += 1
    assert len(expected) == (3 if is_late else 5)
    assert steps > 21 / 2, "pairs of the panes, two at a time"


def test_a_late_batch_over_many_panes_looks_up_the_keys_of_its_neighbourhood_alone() -> None:
    with OperatorHarness(operator(Sliding(10, 5), lateness_ms=10**6), key_type="utf8") as harness:
        feed(harness, *((f"k{number}", 10 * number, 1) for number in range(100)))
        harness.watermark(1_000)
        looked_up: list[int] = []
        slots_of = harness.operator._state.slots_of

        def counted(namespace: int, keys: Any) -> Any:
            looked_up.append(len(keys))
            return slots_of(namespace, keys)

        harness.operator._state.slots_of = counted
        harness.output.clear()
        feed(harness, *((f"k{number}", 10 * number + 5, 1) for number in range(100)))
        assert len(shown(harness)) == 199, "the last one's second window has not fired"
        assert int(np.sum(looked_up)) < 100 * 20


def test_records_that_may_go_to_a_late_output_are_not_combined_before_an_exchange() -> None:
    assert operator(Sliding(10, 10)).combining() == "late records go on unchanged"
