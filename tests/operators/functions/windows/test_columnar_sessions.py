"""Sessions over columns against a model that goes record by record, and against DuckDB."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.barriers.elements import MAX_WATERMARK
from holdfast.operators.functions.aggregates import (
    Aggregate,
    columnar_descriptor,
    count,
    sum,
)
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import key_selector
from holdfast.operators.functions.windows.assigners import Session
from holdfast.operators.functions.windows.columnar_sessions import SessionWindowOperator
from holdfast.statebackends.errors import GraphError
from tests.examples import examples
from tests.operators.functions.windows.fleets import (
    EVERY_AGGREGATE,
    RECORDS,
    SQL_OF_EVERY_AGGREGATE,
    STEPS,
    Row,
    assert_as_sql,
    columnar_operator,
    drive,
    feed,
)
from tests.operators.harness import OperatorHarness


def operator(gap_ms: int, aggregates: dict[str, Aggregate] | None = None, **settings: int) -> SessionWindowOperator:
    return columnar_operator(SessionWindowOperator, Session(gap_ms), aggregates, **settings)


def shown(harness: OperatorHarness) -> list[tuple[Any, ...]]:
    """(key, start, end, results ...) of each row."""
    bounds = ("window_start", "window_end")
    return [
        (row["k"], *(round(row[bound].timestamp() * 1000) for bound in bounds), *list(row.values())[3:])
        for row in harness.output.rows()
    ]


def test_records_with_less_than_the_gap_between_them_are_one_session_and_those_that_touch_are() -> None:
    with OperatorHarness(operator(10), key_type="utf8") as harness:
        feed(harness, ("a", 25, 1), ("a", 0, 2), ("b", 3, 3), ("a", 10, 4), ("a", 36, 5))
        harness.watermark(18)
        assert shown(harness) == [("b", 3, 13, 1, 3, 1)]
        harness.watermark(19)
        assert shown(harness)[1:] == [("a", 0, 20, 2, 6, 2)], "10 is the end of one window and the start of the other"
        harness.watermark(MAX_WATERMARK)
        assert shown(harness)[2:] == [("a", 25, 35, 1, 1, 1), ("a", 36, 46, 1, 5, 1)]
        assert harness.output.timestamps() == [12, 19, 34, 45]
        assert harness.output.batches[0].columns().schema == harness.operator.output_type.schema


def test_the_merged_session_decides_what_is_late() -> None:
    with OperatorHarness(operator(10), key_type="utf8") as harness:
        harness.watermark(14)
        feed(harness, ("a", 5, 1), ("a", 6, 10), ("a", 3, 100))
        assert harness.context.counters.late_dropped == 1, "the first: at 5 there was no session yet; 3 joins that of 6"
        harness.watermark(30)
        assert shown(harness) == [("a", 3, 16, 2, 110, 2)]


def test_a_session_that_is_gone_is_not_taken_up_by_a_record_that_touches_it() -> None:
    with OperatorHarness(operator(10), key_type="utf8") as harness:
        feed(harness, ("a", 0, 1))
        harness.watermark(9)
        feed(harness, ("a", 1, 10), ("b", 1, 7))
        harness.watermark(MAX_WATERMARK)
        assert shown(harness) == [("a", 0, 10, 1, 1, 1), ("a", 1, 11, 1, 10, 1), ("b", 1, 11, 1, 7, 1)]


def test_a_session_that_goes_on_for_long_is_few_rows() -> None:
    with OperatorHarness(operator(10), key_type="utf8") as harness:
        for at in range(0, 1_000, 5):
            feed(harness, ("a", at, 1))
            harness.watermark(at)
            assert len(harness.operator._state.namespaces()) <= 3
        feed(harness, ("a", 500, 1))  # in the middle of it, in a pane that is gone
        assert harness.context.counters.late_dropped == 0
        harness.watermark(MAX_WATERMARK)
        assert shown(harness) == [("a", 0, 1_005, 201, 201, 1)]
        assert harness.operator._state.namespaces() == []


def test_sums_of_floats_do_not_go_by_when_panes_are_folded() -> None:
    schema = pa.schema([("k", pa.string()), ("v", pa.float64())])
    descriptor = columnar_descriptor("windows", {"total": sum("v")}, RowType(schema), (), "op")
    made = SessionWindowOperator(Session(10), descriptor, key_selector("k", None, RowType(schema), "op"), RowType(schema))
    totals = set()
    for watermark in range(-1, 19):
        with OperatorHarness(made, key_type="utf8") as harness:
            for at, value in ((9, 0.1), (18, 0.2), (19, 0.3)):
                if at == 19:
                    harness.watermark(watermark)
                harness.process(pa.RecordBatch.from_pylist([{"k": "a", "v": value}], schema=schema), [at])
            harness.watermark(MAX_WATERMARK)
            totals.add(shown(harness)[0][-1])
    assert len(totals) == 1


def test_late_records_fire_a_session_again_once_a_batch_and_may_join_two() -> None:
    with OperatorHarness(operator(10, lateness_ms=50), key_type="utf8") as harness:
        feed(harness, ("a", 0, 1), ("a", 20, 2))
        harness.watermark(40)
        assert shown(harness) == [("a", 0, 10, 1, 1, 1), ("a", 20, 30, 1, 2, 1)]
        harness.output.clear()
        feed(harness, ("a", 10, 10), ("a", 2, 100))
        assert shown(harness) == [("a", 0, 30, 4, 113, 4)]
        feed(harness, ("a", 38, 1))
        assert len(shown(harness)) == 1, "it has not fired yet"
        harness.watermark(47)
        assert shown(harness)[1:] == [("a", 38, 48, 1, 1, 1)]
        harness.watermark(79)
        feed(harness, ("a", 28, 1))
        assert shown(harness)[2:] == [("a", 28, 48, 2, 2, 1)], "that of 30 is gone"


def test_what_is_due_is_made_pane_by_pane() -> None:
    with OperatorHarness(operator(10), key_type="utf8") as harness:
        feed(harness, *(("a", 20 * number, 1) for number in range(50)))
        slices = harness.watermark_slices(MAX_WATERMARK)
        next(slices)
        assert len(shown(harness)) + len(harness.operator._pending) == 1
        assert len(harness.operator._state.namespaces()) >= 49
        snapshot = harness.snapshot()
        found = shown(harness)
    with OperatorHarness.restored(operator(10), [snapshot], key_type="utf8") as harness:
        feed(harness, ("a", 5, 7))
        harness.watermark(MAX_WATERMARK)
        assert sorted(found + shown(harness)) == sorted(
            [("a", 20 * number, 20 * number + 10, 1, 1, 1) for number in range(50)] + [("a", 5, 15, 1, 7, 1)]
        )


def test_with_a_lateness_a_session_that_one_subtask_has_fired_does_not_fire_again() -> None:
    snapshots = []
    for subtask, watermark in enumerate((30, 5)):
        harness = OperatorHarness(operator(10, lateness_ms=100), key_type="utf8", parallelism=2, subtask=subtask).open()
        if not subtask:
            feed(harness, ("b", 0, 1))
        harness.watermark(watermark)
        assert len(shown(harness)) == (not subtask)
        snapshots.append(harness.snapshot())
    with OperatorHarness.restored(operator(10, lateness_ms=100), snapshots, key_type="utf8") as harness:
        harness.watermark(50)
        assert shown(harness) == []


def test_what_sessions_refuse() -> None:
    with pytest.raises(GraphError, match=r"operator 'window': .*more than one column named n\.time"):
        operator(10, {"n": count(), "n.time": count()})


def test_a_job_with_sessions() -> None:
    with hf.testing.Job(parallelism=2) as job:
        clicks = job.input("clicks", {"user": str, "page": int})
        windowed = clicks.stream.key_by("user").window(hf.Session(seconds=10)).allowed_lateness(1_000).side_output_late("late")
        sessions = windowed.aggregate(n=hf.count(), pages=hf.count_distinct("page")).uid("sessions")
        rows, late = job.output(sessions), job.output(sessions.side_output("late"))
        job.start()
        clicks.add([{"user": "ann", "page": 1}, {"user": "bob", "page": 1}, {"user": "ann", "page": 1}], at=[0, 0, 9_000])
        clicks.watermark(9_999)
        assert [(row["user"], row["n"], time) for row, time in rows.take()] == [("bob", 1, 9_999)]
        job.checkpoint()
        job.restart(parallelism=3, state_backend="rocksdb")
        clicks.watermark(9_999)
        clicks.add([{"user": "bob", "page": 7}, {"user": "ann", "page": 2}], at=[5, 12_000])
        clicks.watermark(21_999)
        clicks.add({"user": "bob", "page": 8}, at=6)
        assert late.take() == [({"user": "bob", "page": 8}, 6)]
        assert [(row["user"], row["n"], row["pages"], time) for row, time in rows.take()] == [
            ("bob", 2, 2, 10_004), ("ann", 3, 2, 21_999)
        ]  # fmt: skip
        clicks.end()
        assert rows.take() == []


# ------------------------------------------------------------------------------------------------- crashes, against a model


class Model:
    """Record by record, as Flink's window operator; what fires again does once for a batch."""

    def __init__(self, gap_ms: int, lateness_ms: int) -> None:
        self.gap_ms = gap_ms
        self.lateness_ms = lateness_ms
        self.watermark = -(10**6)
        self.sessions: dict[str, list[tuple[int, int, list[int | None]]]] = {}
        self.output: Counter[Any] = Counter()

    def process(self, rows: list[Row]) -> None:
        touched = set()
        for key, at, value in rows:
            start, end, values, others = at, at + self.gap_ms, [value], []
            for session in self.sessions.get(key, []):
                if session[0] <= at + self.gap_ms and session[1] >= at:
                    start, end, values = np.minimum(start, session[0]), np.maximum(end, session[1]), [*session[2], *values]
                else:
                    others.append(session)
            if end - 1 + self.lateness_ms <= self.watermark:
                self.output[key, at, value] += 1
                continue
            self.sessions[key] = [*others, (start, end, values)]
            touched.add((key, at))
        again = {
            (key, *session[:2])
            for key, at in touched
            for session in self.sessions[key]
            if session[0] <= at < session[1] and session[1] - 1 <= self.watermark
        }
        for key, sessions in self.sessions.items():
            for session in sessions:
                if (key, *session[:2]) in again:
                    self._fire(key, session)

    def advance(self, watermark: int) -> None:
        for key, sessions in self.sessions.items():
            for session in sessions:
                if self.watermark < session[1] - 1 <= watermark:
                    self._fire(key, session)
        self.watermark = np.maximum(self.watermark, watermark)
        for key, sessions in self.sessions.items():
            self.sessions[key] = [each for each in sessions if each[1] - 1 + self.lateness_ms > self.watermark]

    def drain(self) -> None:
        watermark = self.watermark
        self.advance(MAX_WATERMARK)
        self.sessions, self.watermark = {}, watermark

    def _fire(self, key: str, session: tuple[int, int, list[int | None]]) -> None:
        start, end, values = session
        there = [value for value in values if value is not None]
        self.output[key, start, end, len(values), int(np.sum(there)) if there else None, len(set(there))] += 1


@example(
    steps=[
        ("records", [("a", 0, 0), ("a", 6, 1), ("b", 2, 1)], None), ("watermark", 14, 1),
        ("records", [("a", 7, 1), ("b", 3, 1)], None),
        ("crash", 3, 1), ("watermark", 20, None), ("records", [("a", 1, 1), ("a", 19, 2), ("a", 14, 1), ("a", 9, 1)], None),
    ],
    slice_rows=1,
    gap=5,
    lateness=8,
)  # fmt: skip
@settings(max_examples=examples(40), deadline=None)
@given(steps=STEPS, slice_rows=st.integers(1, 4), gap=st.sampled_from([1, 3, 5, 8, 20]), lateness=st.sampled_from([0, 0, 4, 25]))
def test_every_session_is_emitted_once_and_again_for_late_records_whatever_happens(
    steps: list[Any], slice_rows: int, gap: int, lateness: int
) -> None:
    make = partial(operator, gap, rows_per_slice_max=slice_rows, lateness_ms=lateness)
    drive(steps, make, shown, Model(gap, lateness))


@settings(max_examples=examples(20), deadline=None)
@given(
    rows=st.lists(RECORDS, min_size=1, max_size=6), gap=st.sampled_from([1, 3, 5, 20]), batch_rows=st.sampled_from([1, 7, 65_536])
)
def test_all_aggregates_over_sessions_are_those_of_sql(rows: list[list[Row]], gap: int, batch_rows: int) -> None:
    everything = sorted((row for some in rows for row in some), key=lambda row: row[1])
    with OperatorHarness(operator(gap, EVERY_AGGREGATE), key_type="utf8") as harness:
        for start in range(0, len(everything), batch_rows):
            some = everything[start : start + batch_rows]
            feed(harness, *some[::-1])
            harness.watermark(some[-1][1] - 2)  # equal times follow, and may touch a session that ends there
        harness.watermark(MAX_WATERMARK)
        found = shown(harness)
    arrived = [row for at in range(0, len(everything), batch_rows) for row in everything[at : at + batch_rows][::-1]]
    query = f"""SELECT k, min(t), max(t) + {gap}, {SQL_OF_EVERY_AGGREGATE}
        FROM (SELECT *, sum(starts) OVER (PARTITION BY k ORDER BY t, i) AS s FROM
        (SELECT *, CASE WHEN t - lag(t) OVER (PARTITION BY k ORDER BY t, i) <= {gap} THEN 0 ELSE 1 END AS starts FROM records))
        GROUP BY k, s"""
    assert_as_sql(found, 3, arrived, query)
