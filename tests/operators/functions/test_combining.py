"""Combined rows make what the records themselves would have made: results, late records, counters, state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers.elements import (
    MAX_WATERMARK,
    Batch,
    CheckpointBarrier,
    Element,
    EndOfData,
    Watermark,
    WatermarkStatus,
)
from holdfast.operators.functions import combining
from holdfast.operators.functions.aggregates import (
    Aggregate,
    columnar_descriptor,
    count,
    count_distinct,
    first,
    max,
    mean,
    min,
    stddev,
    sum,
)
from holdfast.operators.functions.combining import ColumnarCombiner, ColumnarCombining, is_combined
from holdfast.operators.functions.running_aggregates import RunningAggregateOperator
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import key_selector
from holdfast.operators.functions.windows.assigners import Sliding, Tumbling
from holdfast.operators.functions.windows.columnar import TumblingWindowOperator
from holdfast.operators.functions.windows.sliding import SlidingWindowOperator
from holdfast.statebackends.errors import InvalidKeyError, InvariantError, StateOverflowError
from tests.examples import examples
from tests.operators.harness import OperatorHarness

ROWS = RowType(
    pa.schema(
        [
            *(("k", pa.int64()), ("t", pa.string()), ("v", pa.int64())),
            *(("x", pa.float64()), ("d", pa.decimal128(9, 2)), ("b", pa.bool_())),
        ]
    )
)
EXACT: dict[str, Aggregate] = {
    "n": count(),
    "some": count("v"),
    "picked": count(where="b"),
    "total": sum("v", where="b"),
    "mean": mean("v"),
    "least": min("x"),
    "most": max("v"),
    "money": sum("d"),
    "any": max("b"),
}
Record: TypeAlias = tuple[int, int, int | None, float | None]
"""Key, event time, two values."""
Operators: TypeAlias = TumblingWindowOperator | SlidingWindowOperator | RunningAggregateOperator


def operator(
    windows: Tumbling | Sliding | None, aggregates: dict[str, Aggregate] | None = None, key: Sequence[str] = ("k",)
) -> Operators:
    descriptor = columnar_descriptor("state", EXACT if aggregates is None else aggregates, ROWS, key, "op")
    selector = key_selector(key, None, ROWS, "op")
    if isinstance(windows, Tumbling):
        return TumblingWindowOperator(windows, descriptor, selector, ROWS)
    if isinstance(windows, Sliding):
        return SlidingWindowOperator(windows, descriptor, selector, ROWS)
    return RunningAggregateOperator(descriptor, selector, ROWS, emits_changes=True)


def combiner_of(made: Operators) -> ColumnarCombiner:
    found = made.combining()
    assert isinstance(found, ColumnarCombining)
    return replace(found, waited_for_min=1).combiner(max_parallelism=128, operator="op")


def batch(records: Sequence[Record]) -> Batch:
    rows = [
        {"k": k, "t": f"key {k}", "v": v, "x": x, "d": None if v is None else Decimal(v) / 100, "b": None if x is None else x > 0}
        for k, _, v, x in records
    ]
    return Batch(
        columns=pa.RecordBatch.from_pylist(rows, schema=ROWS.schema), timestamps=np.array([at for _, at, _, _ in records], np.int64)
    )


def passed(combiner: ColumnarCombiner, elements: Iterable[Element]) -> list[Element]:
    """What leaves a combiner."""
    found: list[Element] = []
    for element in elements:
        found += combiner.add(element, now_ms=0) if isinstance(element, Batch) else combiner.event(element)
    return found


def run(made: Operators, elements: Iterable[Element], key_type: str = "int64") -> tuple[Any, ...]:
    """Everything that a user sees of it at the end."""
    with OperatorHarness(made, key_type=key_type) as harness:
        for element in elements:
            match element:
                case Batch():
                    harness.context.counters.records_in += element.num_rows
                    harness.operator.process_batch(element, 0)
                case Watermark(timestamp_ms):
                    harness.watermark(timestamp_ms)
        counters = harness.context.counters
        rows = harness.output.rows()
        if isinstance(made, RunningAggregateOperator):
            rows = list({row["k"]: row for row in rows}.values())
        return sorted(map(repr, rows)), counters.late_dropped, counters.late_ms_max, counters.records_in


records = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.integers(0, 60),
        st.none() | st.integers(-50, 50),
        st.none() | st.sampled_from([-1.5, 0.0, 2.5, float("inf"), float("-inf")]),
    ),
    min_size=1,
    max_size=12,
)
steps = st.lists(st.tuples(records, st.integers(-5, 6), st.booleans(), st.booleans()), min_size=1, max_size=8)
"""Records, by how much time goes on, whether a watermark follows, whether a barrier does."""


def elements_of(drawn: list[tuple[list[Record], int, bool, bool]]) -> list[Element]:
    found: list[Element] = []
    now, watermark = 0, -(10**6)
    for rows, step, has_watermark, has_barrier in drawn:
        now += step * 10
        found.append(batch([(k, now + at, v, x) for k, at, v, x in rows]))
        if has_watermark and now + 20 > watermark:
            watermark = now + 20
            found.append(Watermark(watermark))
        if has_barrier:
            found.append(CheckpointBarrier(len(found), 0))
    return [*found, Watermark(MAX_WATERMARK), EndOfData()]


@pytest.mark.parametrize(
    "windows", [Tumbling(20), Tumbling(30, offset=7), Sliding(40, 15, offset=4), Sliding(10, 25), None], ids=repr
)
@settings(max_examples=examples(25), deadline=None)
@given(drawn=steps, key=st.sampled_from([("k",), ("t",), ("k", "t")]))
def test_results_are_those_of_the_records(
    windows: Tumbling | Sliding | None, drawn: list[tuple[list[Record], int, bool, bool]], key: tuple[str, ...]
) -> None:
    if windows is None:
        key = ("k",)
    made, elements = operator(windows, key=key), elements_of(drawn)
    combiner = combiner_of(made)
    combiner._judge = lambda *_: None  # type: ignore[method-assign]  # however small they are
    key_type = made.selector.key_type_text
    combined = passed(combiner, elements)
    assert all(is_combined(element) for element in combined if isinstance(element, Batch))
    assert run(made, combined, key_type) == run(made, elements, key_type)


def test_rows_are_as_many_as_keys_and_carry_their_records() -> None:
    combiner = combiner_of(operator(Tumbling(10)))
    assert passed(combiner, [batch([(1, 3, 5, None), (2, 4, 7, 1.0), (1, 2, 6, 2.0)]), batch([(1, 5, None, None)] * 13)]) == []
    assert combiner.since_ms == 0
    assert combiner.size > 0
    (rows,) = combiner.flush()
    assert isinstance(rows, Batch)
    assert rows.columns().select(["k", "n", "total", "combined_records"]).to_pylist() == [
        {"k": 1, "n": 15, "total": 6, "combined_records": 15},
        {"k": 2, "n": 1, "total": 7, "combined_records": 1},
    ]
    assert rows.timestamps is not None
    assert rows.timestamps.tolist() == [2, 2]
    assert combiner.flush() == []
    assert (combiner.since_ms, combiner.size) == (None, 0)


@pytest.mark.parametrize("event", [CheckpointBarrier(1, 0), WatermarkStatus(True), EndOfData(), Watermark(MAX_WATERMARK)], ids=repr)
def test_nothing_is_held_over_an_event(event: Any) -> None:
    combiner = combiner_of(operator(Tumbling(10)))
    found = passed(combiner, [batch([(1, 3, 5, None)] * 9), Watermark(2), event])
    assert [type(element) for element in found] == [Batch, Watermark, type(event)]


def test_a_watermark_waits_with_what_is_in_front_of_it_and_the_newest_counts() -> None:
    combiner = combiner_of(operator(Tumbling(10)))
    assert passed(combiner, [batch([(1, 3, 5, None)] * 9), Watermark(3), batch([(1, 4, 5, None)] * 9), Watermark(4)]) == []
    rows, watermark = combiner.flush()
    assert isinstance(rows, Batch)
    assert rows.columns().column("n").to_pylist() == [18]
    assert watermark == Watermark(4)


def test_a_watermark_goes_in_front_of_a_record_that_is_late_at_it() -> None:
    combiner = combiner_of(operator(Tumbling(10)))
    found = passed(combiner, [batch([(1, 13, 5, None)] * 9), Watermark(9), batch([(1, 9, 5, None)] * 9)])
    assert [type(element) for element in found] == [Batch, Watermark]
    assert found[1] == Watermark(9)


def test_a_watermark_takes_few_records_along() -> None:
    made = operator(Tumbling(10)).combining()
    assert isinstance(made, ColumnarCombining)
    combiner = made.combiner(max_parallelism=128, operator="op")
    records = batch([(1, 3, 5, None)] * (combining.WAITED_FOR_MIN // 2))
    assert [type(each) for each in passed(combiner, [records, Watermark(2)])] == [Batch, Watermark]
    assert passed(combiner, [records, records, Watermark(3)]) == []


def test_a_watermark_with_nothing_in_front_of_it_goes_at_once() -> None:
    assert passed(combiner_of(operator(Tumbling(10))), [Watermark(3)]) == [Watermark(3)]


def test_it_steps_aside_where_it_does_not_pay_and_tries_again() -> None:
    combiner = combiner_of(operator(Tumbling(1000)))
    different = [batch([(key, 3, 5, None) for key in range(start, start + 100)]) for start in range(0, 10_000, 100)]
    passed(combiner, [different[0]])
    assert all(is_combined(element) for element in combiner.flush() if isinstance(element, Batch))
    for each in different[1 : 1 + combining.PAUSE]:
        assert passed(combiner, [each]) == [each]
    assert passed(combiner, [batch([(1, 3, 5, None)] * 100)]) == []
    combiner.flush()
    assert passed(combiner, [different[0]]) == []


def test_a_first_batch_of_different_keys_is_hopeless() -> None:
    combiner = combiner_of(operator(Tumbling(1000)))
    rows = combining.SAMPLE_RECORDS_MIN
    columns = batch([(0, 3, 1, None)]).columns().take(pa.array([0] * rows)).set_column(0, "k", pa.array(range(rows), pa.int64()))
    (found,) = combiner.add(Batch(columns=columns.cast(ROWS.schema), timestamps=np.full(rows, 3)), now_ms=0)
    assert isinstance(found, Batch)
    assert found.num_rows == rows
    assert combiner.since_ms is None


def test_more_keys_than_room_and_more_panes_than_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combining, "KEYS_MIN", 8)
    monkeypatch.setattr(combining, "KEYS_KEPT_MAX", 64)
    monkeypatch.setattr(combining, "CELLS_MAX", 64)
    made = operator(Tumbling(10))
    combiner = combiner_of(made)
    combiner._judge = lambda *_: None  # type: ignore[method-assign]
    spread = batch([(key, 10 * key, 1, None) for key in range(40)])
    elements: list[Element] = [
        *(batch([(key, 5 + key % 3 * 10, key, None) for key in range(count) for _ in range(3)]) for count in (5, 9, 40, 70, 3)),
        *(spread, batch([(1, at, 1, None) for at in (900, 905, 950)]), batch([(1, 100, 1, None)])),
        Watermark(MAX_WATERMARK),
    ]
    found = passed(combiner, elements)
    assert spread in found
    assert run(made, found) == run(made, elements)


def test_records_without_event_times_are_combined_in_running_aggregates() -> None:
    combiner = combiner_of(operator(None))
    untimed = Batch(columns=batch([(1, 0, 5, None)] * 9).columns())
    found = passed(combiner, [untimed, untimed, batch([(1, 70, 5, None)] * 9), EndOfData()])
    assert [element.timestamps is None for element in found if isinstance(element, Batch)] == [True, False]


@pytest.mark.parametrize(
    ("aggregates", "reason"),
    [
        ({"x": sum("x")}, "sum of 'x' (double) goes by the order of records"),
        ({"x": mean("x")}, "mean of 'x' (double) goes by the order of records"),
        ({"x": stddev("v")}, "stddev of 'v' (int64) goes by the order of records"),
        ({"n": count(), "x": first("v")}, "first of 'v' (int64) keeps values as they are"),
        ({"x": count_distinct("v")}, "count_distinct of 'v' (int64) keeps values as they are"),
        ({"x": max("t")}, "max of 't' (string) keeps values as they are"),
        ({"combined_records": count()}, "two columns of combined rows would be called 'combined_records'"),
    ],
)
def test_what_is_not_combined_says_why(aggregates: dict[str, Aggregate], reason: str) -> None:
    assert operator(Tumbling(10), aggregates).combining() == reason


def test_a_key_that_a_function_computes_is_not_combined() -> None:
    descriptor = columnar_descriptor("state", EXACT, ROWS, ("key",), "op")
    selector = key_selector(lambda row: row["k"], int, ROWS, "op")
    assert TumblingWindowOperator(Tumbling(10), descriptor, selector, ROWS).combining() == "the key is a function of the row"


def test_null_keys_and_overflows_are_errors_of_the_operator() -> None:
    combiner = combiner_of(operator(Tumbling(10), {"total": sum("v")}))
    columns = batch([(1, 0, 5, None)]).columns().set_column(0, "k", pa.array([None], pa.int64()))
    with pytest.raises(InvalidKeyError, match="operator 'op'"):
        combiner.add(Batch(columns=columns, timestamps=np.zeros(1, np.int64)), now_ms=0)
    columns = batch([(1, 0, 5, None), (1, 0, 1, None)]).columns().set_column(2, "v", pa.array([2**63 - 1, 1]))
    with pytest.raises(StateOverflowError, match="beyond int64"):
        combiner.add(Batch(columns=columns, timestamps=np.zeros(2, np.int64)), now_ms=0)


def test_combined_rows_of_other_aggregates_are_refused() -> None:
    combined = passed(combiner_of(operator(Tumbling(10), {"n": count()})), [batch([(1, 3, 5, None)]), EndOfData()])
    with pytest.raises(InvariantError, match="combined rows of"):
        run(operator(Tumbling(10), {"total": sum("v")}), combined)
