"""Watermark strategies: what each says of the same records, that batches don't matter where order does, and values that are
refused."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.barriers.elements import MAX_WATERMARK, Batch
from holdfast.operators.functions.event_time.timestamps import TimestampsOperator
from holdfast.operators.functions.event_time.watermarks import WatermarkOutput, WatermarkStrategy
from holdfast.operators.functions.schema import RowType
from holdfast.statebackends.errors import InvalidConfigError, InvalidTimestampError, UserFunctionError
from tests.operators.harness import OperatorHarness

ROWS = RowType(pa.schema([("t", pa.int64()), ("mark", pa.int64())]))


def harness(strategy: WatermarkStrategy, *, interval_ms: int = 0, now_ms: int = 0) -> OperatorHarness:
    operator = TimestampsOperator(strategy.assigner, strategy, ROWS)
    found = OperatorHarness(operator, now_ms=now_ms)
    found.context.auto_watermark_interval_ms = interval_ms
    return found


def batch(*times: int, marks: list[int | None] | None = None) -> pa.RecordBatch:
    return pa.record_batch({"t": pa.array(times, pa.int64()), "mark": pa.array(marks or [None] * len(times), pa.int64())})


def elements(one: OperatorHarness) -> list[Any]:
    """Times of records as text, watermarks as numbers, in order; where batches were cut does not show."""
    found: list[Any] = []
    for element in one.output.elements:
        if isinstance(element, int):
            found.append(element)
        else:
            assert element.timestamps is not None
            found += [f"t{time}" for time in element.timestamps.tolist()]
    return found


def test_bounded_out_of_orderness_is_what_assign_timestamps_does() -> None:
    with harness(WatermarkStrategy.for_bounded_out_of_orderness(timedelta(milliseconds=5)).with_timestamp_assigner("t")) as one:
        for time in (10, 7, 20, 3):
            one.process(batch(time))
    assert elements(one) == ["t10", 4, "t7", "t20", 14, "t3"]


def test_n18_monotonous_times_may_be_equal() -> None:
    with harness(WatermarkStrategy.for_monotonous_timestamps("fail").with_timestamp_assigner("t")) as one:
        one.process(batch(5, 5))
        one.process(batch(5, 6))
    assert elements(one) == ["t5", "t5", 4, "t5", "t6", 5]


def test_n18_a_time_that_falls_is_kept_where_that_is_ignored() -> None:
    with harness(WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("t")) as one:
        one.process(batch(5, 4))
    assert elements(one) == ["t5", "t4", 4]


def test_n18_a_time_that_falls_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "holdfast.functions")
    with harness(WatermarkStrategy.for_monotonous_timestamps("log").with_timestamp_assigner("t")) as one:
        one.process(batch(5, 4, 3))
        one.process(batch(4))
    assert elements(one) == ["t5", "t4", "t3", 4, "t4"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "event time 4 ms is below 5 ms" in caplog.text


def test_n18_a_time_that_falls_fails_with_operator_and_record() -> None:
    with harness(WatermarkStrategy.for_monotonous_timestamps("fail").with_timestamp_assigner("t")) as one:
        one.process(batch(5))
        with pytest.raises(InvalidTimestampError, match="event time 4 ms is below 9 ms") as caught:
            one.process(batch(9, 4))
    assert (caught.value.operator, caught.value.subtask) == ("op", 0)
    assert "'t': 4" in (caught.value.record or "")


def marked(row: Any) -> int | None:
    mark: int | None = row["mark"]
    return mark


def test_a_punctuated_watermark_stands_behind_its_row() -> None:
    with harness(WatermarkStrategy.for_punctuated(marked).with_timestamp_assigner("t")) as one:
        one.process(batch(1, 2, 3, 4, marks=[None, 2, None, 1]))
        one.process(batch(5, 6, marks=[4, None]))
    assert elements(one) == ["t1", "t2", 2, "t3", "t4", "t5", 4, "t6"]


@given(
    rows=st.lists(st.tuples(st.integers(0, 100), st.none() | st.integers(0, 100)), min_size=1, max_size=30),
    size=st.integers(1, 30),
)
def test_punctuated_watermarks_don_t_depend_on_where_batches_end(rows: list[tuple[int, int | None]], size: int) -> None:
    def run(rows_each: int) -> list[Any]:
        with harness(WatermarkStrategy.for_punctuated(marked).with_timestamp_assigner("t")) as one:
            for start in range(0, len(rows), rows_each):
                part = rows[start : start + rows_each]
                one.process(batch(*(time for time, _ in part), marks=[mark for _, mark in part]))
        return elements(one)

    assert run(size) == run(1)


def test_a_function_may_say_the_watermark_of_a_batch() -> None:
    def least(columns: pa.RecordBatch) -> int:
        return int(min(columns.column("t").to_pylist())) - 1

    with harness(WatermarkStrategy.for_punctuated(least, batches=True).with_timestamp_assigner("t")) as one:
        one.process(batch(7, 9))
    assert elements(one) == ["t7", "t9", 6]


def test_what_is_no_watermark_is_refused_with_operator_and_record() -> None:
    strategy = WatermarkStrategy.for_punctuated(lambda row: "soon").with_timestamp_assigner("t")  # type: ignore[arg-type,return-value]
    with harness(strategy) as one, pytest.raises(InvalidTimestampError, match="'soon' is no watermark"):
        one.process(batch(7))


def test_a_function_that_raises_is_named_with_its_record() -> None:
    strategy = WatermarkStrategy.for_punctuated(lambda row: 1 // 0).with_timestamp_assigner("t")
    with harness(strategy) as one, pytest.raises(UserFunctionError, match="'t': 7"):
        one.process(batch(7))


def test_n15_ingestion_time_is_the_clock_which_never_falls() -> None:
    with harness(WatermarkStrategy.for_ingestion_time(), now_ms=1_000) as one:
        one.process(batch(5))
        one.clock.now_ms = 900
        one.process(batch(6))
        one.clock.now_ms = 1_234
        one.process(batch(7))
    assert elements(one) == ["t1000", 999, "t1000", "t1234", 1_233]


def test_ingestion_time_goes_on_without_records() -> None:
    with harness(WatermarkStrategy.for_ingestion_time(), now_ms=1_000) as one:
        assert one.operator.uses_processing_time
        due = one.operator.next_processing_time_ms()
        assert due == 1_200
        one.clock.now_ms = due
        assert list(one.operator.process_processing_time(due)) == []
    assert elements(one) == [1_199]


def test_without_watermarks_records_have_times_alone() -> None:
    with harness(WatermarkStrategy.no_watermarks().with_timestamp_assigner("t")) as one:
        one.process(batch(7, 9))
    assert elements(one) == ["t7", "t9"]
    assert not one.operator.uses_processing_time


def test_an_interval_holds_watermarks_back_until_it_is_over() -> None:
    with harness(WatermarkStrategy.for_bounded_out_of_orderness(0).with_timestamp_assigner("t"), interval_ms=50) as one:
        one.process(batch(7))
        one.process(batch(9))
        due = one.operator.next_processing_time_ms()
        list(one.operator.process_processing_time(due))
        list(one.operator.process_processing_time(due + 50))
    assert due == 50
    assert elements(one) == ["t7", "t9", 8]


def test_a_clock_that_is_set_back_does_not_stop_an_interval() -> None:
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(0).with_timestamp_assigner("t")
    with harness(strategy, interval_ms=50, now_ms=9_000) as one:
        one.clock.now_ms = 1_000
        one.process(batch(7))
        assert one.operator.next_processing_time_ms() == 1_050


class Everything(hf.WatermarkGenerator):
    """Each record is the last of its time; it counts what it is told."""

    def __init__(self) -> None:
        self.periods = 0

    def on_event(self, row: Any, timestamp_ms: int, output: WatermarkOutput) -> None:
        output.emit_watermark(timestamp_ms)

    def on_periodic_emit(self, output: WatermarkOutput) -> None:
        self.periods += 1


class ByBatch(hf.WatermarkGenerator):
    def on_batch(self, columns: pa.RecordBatch, timestamps: Any, output: WatermarkOutput) -> None:
        assert columns.num_rows == len(timestamps)
        output.emit_watermark(int(np.max(timestamps)) - 100)


class Sleepy(hf.WatermarkGenerator):
    def on_batch(self, columns: pa.RecordBatch, timestamps: Any, output: WatermarkOutput) -> None:
        output.mark_idle()


def test_a_generator_of_one_s_own_by_event() -> None:
    with harness(WatermarkStrategy.for_generator(Everything).with_timestamp_assigner("t")) as one:
        one.process(batch(3, 2, 9))
        assert one.operator._generator._generator.periods == 1
    assert elements(one) == ["t3", 3, "t2", "t9", 9]


def test_a_generator_of_one_s_own_by_batch() -> None:
    with harness(WatermarkStrategy.for_generator(ByBatch).with_timestamp_assigner("t")) as one:
        one.process(batch(300, 200))
    assert elements(one) == ["t300", "t200", 200]


def test_a_generator_may_mark_its_subtask_idle_until_its_next_record() -> None:
    with harness(WatermarkStrategy.for_generator(Sleepy).with_timestamp_assigner("t")) as one:
        one.process(batch(1))
        one.process(batch(2))
    assert elements(one) == ["t1", "t2"]
    assert one.output.statuses == [(1, True), (1, False), (2, True)]


def test_no_record_knows_the_end() -> None:
    class Ends(hf.WatermarkGenerator):
        def on_event(self, row: Any, timestamp_ms: int, output: WatermarkOutput) -> None:
            output.emit_watermark(MAX_WATERMARK)

    with harness(WatermarkStrategy.for_generator(Ends).with_timestamp_assigner("t")) as one:
        one.process(batch(1))
    assert elements(one) == ["t1", MAX_WATERMARK - 1]


def test_records_keep_the_times_that_they_have_without_an_assigner() -> None:
    with harness(WatermarkStrategy.for_monotonous_timestamps()) as one:
        one.process(batch(1, 2), timestamps=[7, 8])
    assert elements(one) == ["t7", "t8", 7]


def test_a_strategy_is_never_changed() -> None:
    plain = WatermarkStrategy.for_monotonous_timestamps()
    assert plain.with_timestamp_assigner("t").with_idleness(5).advance_when_idle(timedelta(seconds=1)) != plain
    assert (plain.assigner, plain.idle_after_ms, plain.advance_after_ms) == (None, None, None)


class Neither(hf.WatermarkGenerator):
    pass


class Both(Everything):
    def on_batch(self, columns: pa.RecordBatch, timestamps: Any, output: WatermarkOutput) -> None: ...


@pytest.mark.parametrize(
    "make",
    [
        lambda: WatermarkStrategy.for_bounded_out_of_orderness(-1),
        lambda: WatermarkStrategy.for_bounded_out_of_orderness(1.5),  # type: ignore[arg-type]
        lambda: WatermarkStrategy.for_bounded_out_of_orderness(2**62),
        lambda: WatermarkStrategy.for_monotonous_timestamps("shout"),
        lambda: WatermarkStrategy.for_punctuated("t"),  # type: ignore[arg-type]
        lambda: WatermarkStrategy.for_generator(7),  # type: ignore[arg-type]
        lambda: WatermarkStrategy.for_generator(lambda: 7),  # type: ignore[arg-type,return-value]
        lambda: WatermarkStrategy.for_generator(Neither),
        lambda: WatermarkStrategy.for_generator(Both),
        lambda: WatermarkStrategy.for_ingestion_time().with_timestamp_assigner("t"),
        lambda: WatermarkStrategy.no_watermarks().with_timestamp_assigner(""),
        lambda: WatermarkStrategy.no_watermarks().with_idleness(0),
        lambda: WatermarkStrategy.no_watermarks().with_idleness(timedelta(seconds=-1)),
        lambda: WatermarkStrategy.no_watermarks().advance_when_idle(0),
    ],
)
def test_bad_values_are_refused_when_the_strategy_is_made(make: Any) -> None:
    with pytest.raises(InvalidConfigError):
        make()


def stream() -> hf.Stream:
    environment = hf.Environment("times")
    return environment.from_collection([{"t": 1, "name": "a"}], returns={"t": int, "name": str})


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (WatermarkStrategy.for_monotonous_timestamps(), "no event times"),
        (WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("name"), "'name' is string"),
        (WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("nope"), "nope"),
        (5, "not 5"),
    ],
)
def test_a_strategy_that_does_not_fit_its_stream_is_refused_when_the_graph_is_built(strategy: Any, message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        stream().assign_timestamps_and_watermarks(strategy)


def test_ingestion_time_needs_no_times_and_a_second_strategy_takes_those_of_the_first() -> None:
    timed = stream().assign_timestamps_and_watermarks(WatermarkStrategy.for_ingestion_time())
    timed.assign_timestamps_and_watermarks(WatermarkStrategy.for_monotonous_timestamps()).sink_to(hf.Blackhole())
    plan = timed.environment.build()
    assert [operator.kind for vertex in plan.graph.vertices for operator in vertex.operators].count("timestamps") == 2


def test_an_interval_below_zero_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="auto_watermark_interval_ms"):
        hf.Environment("times", auto_watermark_interval_ms=-1)


def test_batches_of_records_without_times_are_named() -> None:
    with harness(WatermarkStrategy.no_watermarks()) as one, pytest.raises(InvalidConfigError, match="no event times"):
        one.operator.process_batch(Batch(columns=batch(1)), 0)


