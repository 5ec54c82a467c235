"""Every aggregate against DuckDB, over any types, batches, nulls, disorder and restores; what they refuse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.operators.functions.aggregates import (
    Aggregate,
    arg_max,
    arg_min,
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
from holdfast.operators.functions.running_aggregates import RunningAggregateOperator
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import key_selector
from holdfast.statebackends.errors import GraphError, SchemaMismatchError, UnknownColumnError, UserFunctionError
from tests.examples import examples
from tests.operators.harness import OperatorHarness

TYPES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int64": (pa.int64(), st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1)),
    "uint64": (pa.uint64(), st.integers(0, 3) | st.integers(2**63, 2**64 - 1)),
    "int8": (pa.int8(), st.integers(-128, 127)),
    "float64": (pa.float64(), st.sampled_from([-math.inf, -1.5, -0.0, 0.0, 1.5, math.inf, math.nan])),
    "float32": (pa.float32(), st.sampled_from([-1.5, -0.0, 0.0, 1.5, math.nan])),
    "bool": (pa.bool_(), st.booleans()),
    "text": (pa.string(), st.sampled_from(["", "a", "ab", "b", "Ä", "\U0001f600", "\uffff", "z" * 40])),
    "binary": (pa.binary(), st.sampled_from([b"", b"\x00", b"\xff", b"ab", b"a"])),
    "date": (pa.date32(), st.dates(date(1900, 1, 1), date(2100, 1, 1))),
    "timestamp": (
        pa.timestamp("us", tz="UTC"),
        st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1)).map(lambda at: at.replace(tzinfo=UTC)),
    ),
    "time": (pa.time64("us"), st.times()),
    "duration": (pa.duration("us"), st.integers(-5, 5).map(lambda seconds: timedelta(seconds=seconds))),
    "decimal": (pa.decimal128(20, 2), st.integers(-(10**19), 10**19).map(lambda cents: Decimal(cents).scaleb(-2))),
}
Row = tuple[int, Any, Any, bool | None, int]
"""Key, value, what it is compared by, whether it is picked, event time."""


def row_type(value: str, by: str) -> RowType:
    return RowType(
        pa.schema([("k", pa.int64()), ("v", TYPES[value][0]), ("b", TYPES[by][0]), ("picked", pa.bool_())])
    )


def operator(rows: RowType, aggregates: dict[str, Aggregate]) -> RunningAggregateOperator:
    descriptor = columnar_descriptor("aggregates", aggregates, rows, ("k",), "op")
    return RunningAggregateOperator(descriptor, key_selector("k", None, rows, "op"), rows, emits_changes=True)


def columns(rows: RowType, batch: Sequence[Row]) -> pa.RecordBatch:
    arrays = [pa.array([row[index] for row in batch], field.type) for index, field in enumerate(rows.schema or ())]
    return pa.RecordBatch.from_arrays(arrays, schema=rows.schema)


def results(rows: RowType, aggregates: dict[str, Aggregate], batches: Sequence[Sequence[Row]], *, times: bool = True) -> Any:
    """The last row of each key; a restore behind every second batch."""
    found: dict[int, dict[str, Any]] = {}
    harness = OperatorHarness(operator(rows, aggregates), key_type="int64").open()
    for index, batch in enumerate(batches):
        if index % 2:
            snapshot = harness.snapshot()
            harness.close()
            harness = OperatorHarness.restored(operator(rows, aggregates), [snapshot], key_type="int64").open()
        harness.process(columns(rows, batch), [row[4] for row in batch] if times else None)
        for row in harness.output.rows():
            found[row.pop("k")] = row
        harness.output.clear()
    harness.close()
    return found


def sql(rows: RowType, batches: Sequence[Sequence[Row]], query: str) -> dict[int, dict[str, Any]]:
    everything = [row for batch in batches for row in batch]
    table = pa.Table.from_batches([columns(rows, everything)])
    table = table.append_column("t", pa.array([row[4] for row in everything], pa.int64()))
    table = table.append_column("i", pa.array(range(len(everything)), pa.int64()))
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("rows", table)
        found = connection.sql(f"SELECT k, {query} FROM rows GROUP BY k").to_arrow_table().to_pylist()
    return {row.pop("k"): row for row in found}


def same(one: Any, other: Any) -> bool:
    if isinstance(other, pa.MonthDayNano):  # what DuckDB makes of a duration
        other = timedelta(days=other.days, microseconds=other.nanoseconds // 1000)
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def check(found: dict[int, dict[str, Any]], expected: dict[int, dict[str, Any]]) -> None:
    assert found.keys() == expected.keys()
    for key, row in found.items():
        for name, value in row.items():
            assert same(value, expected[key][name]), (key, name, value, expected[key][name])


@st.composite
def jobs(draw: st.DrawFn) -> tuple[RowType, list[list[Row]]]:
    value, by = draw(st.sampled_from(sorted(TYPES))), draw(st.sampled_from(sorted(TYPES)))
    rows = st.tuples(
        st.integers(0, 2),
        st.none() | TYPES[value][1],
        st.none() | TYPES[by][1],
        st.none() | st.booleans(),
        st.integers(-3, 3),
    )
    return row_type(value, by), draw(st.lists(st.lists(rows, min_size=1, max_size=12), min_size=1, max_size=5))


@settings(max_examples=examples(80), deadline=None)
@given(jobs(), st.booleans())
def test_what_is_kept_and_counted_is_what_sql_keeps_and_counts(job: tuple[RowType, list[list[Row]]], filtered: bool) -> None:
    rows, batches = job
    where = "picked" if filtered else None
    found = results(
        rows,
        {
            "n": count(where=where),
            "values": count("v", where=where),
            "different": count_distinct("v", where=where),
            "different_rest": count_distinct("v", where=lambda batch: pc.invert(pc.fill_null(batch.column("picked"), False))),
            "different_all": count_distinct("v"),
            "least": min("v", where=where),
            "most": max("v", where=where),
            "earliest": first("v", where=where),
            "latest": last("v", where=where),
            "of_most": arg_max("v", "b", where=where),
            "of_least": arg_min("v", "b", where=where),
        },
        batches,
    )
    taken = "FILTER (WHERE picked)" if filtered else ""
    there, compared = (
        f"FILTER (WHERE {' AND '.join([*names, *(['picked'] if filtered else [])])})"
        for names in (["v IS NOT NULL"], ["v IS NOT NULL", "b IS NOT NULL"])
    )
    check(
        found,
        sql(
            rows,
            batches,
            f"""count(*) {taken} AS n, count(v) {taken} AS "values", count(DISTINCT v) {taken} AS different,
            count(DISTINCT v) FILTER (picked IS NOT TRUE) AS different_rest, count(DISTINCT v) AS different_all,
            min(v) {taken} AS least, max(v) {taken} AS most,
            first(v ORDER BY t, i) {there} AS earliest, first(v ORDER BY t DESC, i DESC) {there} AS latest,
            first(v ORDER BY b DESC, t, i) {compared} AS of_most, first(v ORDER BY b, t, i) {compared} AS of_least""",
        ),
    )


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(
                st.integers(0, 2), st.none() | st.integers(-(10**6), 10**6), st.none(), st.none() | st.booleans(), st.just(0)
            ),
            min_size=1,
            max_size=12,
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(["int64", "float64", "decimal"]),
)
def test_sums_means_and_deviations_are_those_of_sql(batches: list[list[Row]], value: str) -> None:
    rows = row_type(value, "int64")
    found = results(
        rows,
        {"total": sum("v", where="picked"), "average": mean("v", where="picked"), "spread": stddev("v", where="picked")},
        batches,
    )
    taken = "FILTER (WHERE picked)"
    expected = sql(rows, batches, f"sum(v) {taken} AS total, avg(v) {taken} AS average, stddev_samp(v) {taken} AS spread")
    assert found.keys() == expected.keys()
    for key, row in found.items():
        assert row["total"] == expected[key]["total"]
        for name in ("average", "spread"):
            assert (row[name] is None) == (expected[key][name] is None)
            if row[name] is not None:
                assert float(row[name]) == pytest.approx(float(expected[key][name]), rel=1e-9, abs=1e-4)


def test_a_deviation_far_from_zero_loses_no_digits_and_is_the_same_wherever_batches_end() -> None:
    rows = row_type("float64", "int64")
    values: list[Row] = [(1, 1e9 + offset / 10, None, None, 0) for offset in range(100)]
    whole = results(rows, {"spread": stddev("v")}, [values])
    pieces = results(rows, {"spread": stddev("v")}, [values[start : start + 7] for start in range(0, 100, 7)])
    assert whole == pieces
    assert whole[1]["spread"] == pytest.approx(np.std(np.arange(100) / 10, ddof=1), rel=1e-6)


def test_without_event_times_the_order_of_arrival_decides() -> None:
    rows = row_type("text", "int64")
    aggregates = {"early": first("v"), "late": last("v"), "most": arg_max("v", "b")}
    batches: list[list[Row]] = [[(1, "a", 5, None, 0), (1, "b", 7, None, 0)], [(1, "c", 7, None, 0), (1, None, 9, None, 0)]]
    assert results(rows, aggregates, batches, times=False) == {1: {"early": "a", "late": "c", "most": "b"}}


def test_where_may_be_a_function_of_the_columns() -> None:
    rows = row_type("int64", "int64")
    aggregates = {
        "cheap": count(where=lambda batch: np.asarray(batch.column("v").fill_null(99)) < 10),
        "of_cheap": sum("v", where=lambda batch: pa.compute.less(batch.column("v"), 10)),
        "none": max("v", where=lambda batch: np.zeros(batch.num_rows, np.bool_)),
    }
    batches: list[list[Row]] = [[(1, 5, None, None, 0), (1, 50, None, None, 0), (1, None, None, None, 0)]]
    assert results(rows, aggregates, batches) == {1: {"cheap": 1, "of_cheap": 5, "none": None}}


def test_dictionaries_are_read_as_their_values() -> None:
    rows = RowType(pa.schema([("k", pa.int64()), ("v", pa.dictionary(pa.int32(), pa.string()))]))
    made = operator(rows, {"most": max("v"), "different": count_distinct("v", where=lambda batch: batch.column("k").is_valid())})
    with OperatorHarness(made, key_type="int64") as harness:
        harness.process(pa.record_batch({"k": [1, 1, 1], "v": pa.array(["a", "b", "a"]).dictionary_encode()}, schema=rows.schema))
        assert harness.output.rows() == [{"k": 1, "most": "b", "different": 2}]


def test_where_may_be_a_condition_in_sql_which_is_evaluated_once_for_all_that_have_it() -> None:
    rows = row_type("int64", "text")
    dear = max("v", where="v >= 10 and b = 'x'")
    aggregates = {"cheap": count(where="v < 10"), "of_cheap": sum("v", where="v < 10"), "dear": dear}
    cheap, of_cheap, other = operator(rows, aggregates).descriptor.aggregates
    assert cheap.where is of_cheap.where is not other.where
    batches: list[list[Row]] = [[(1, 5, "x", None, 0), (1, 50, "x", None, 0)], [(1, 70, None, None, 0), (2, None, "x", None, 0)]]
    assert results(rows, aggregates, batches) == {
        1: {"cheap": 1, "of_cheap": 5, "dear": 50}, 2: {"cheap": 0, "of_cheap": None, "dear": None}
    }  # fmt: skip


def test_a_condition_in_sql_that_fails_names_the_operator_and_the_row() -> None:
    rows = row_type("int64", "text")
    made = operator(rows, {"n": count(where="cast(b AS BIGINT) > 1")})
    with OperatorHarness(made, key_type="int64") as harness, pytest.raises(UserFunctionError, match=r"operator 'op'.*cast.*abc"):
        harness.process(columns(rows, [(1, 1, "7", True, 0), (1, 1, "abc", True, 0)]))


@pytest.mark.parametrize("returned", [None, "text", np.zeros(1, np.bool_), np.zeros(2, np.int64), pa.array([1, 2])])
def test_a_where_that_returns_no_booleans_fails_with_the_operator_s_name(returned: Any) -> None:
    rows = row_type("int64", "int64")
    made = operator(rows, {"n": count(where=lambda batch: returned)})
    wanted = r"operator 'op': where=.*must return 2 booleans"
    with OperatorHarness(made, key_type="int64") as harness, pytest.raises(SchemaMismatchError, match=wanted):
        harness.process(columns(rows, [(1, 1, 1, True, 0), (1, 1, 1, True, 0)]))


def test_a_where_that_raises_fails_with_the_operator_s_name() -> None:
    rows = row_type("int64", "int64")
    made = operator(rows, {"n": count(where=lambda batch: batch.column("no"))})
    wanted = r"operator 'op'.*raised KeyError"
    with OperatorHarness(made, key_type="int64") as harness, pytest.raises(UserFunctionError, match=wanted):
        harness.process(columns(rows, [(1, 1, 1, True, 0)]))


def test_a_wrong_aggregate_is_refused_when_the_graph_is_built() -> None:
    rows = RowType(pa.schema([("k", pa.int64()), ("v", pa.int64()), ("many", pa.list_(pa.int64()))]))
    for wrong, error, text in [
        (count(where="v"), GraphError, "where='v' must be a boolean column, not int64"),
        (count(where="no"), UnknownColumnError, "no"),
        (count(where=3), GraphError, "where=3 is neither"),  # type: ignore[arg-type]
        (count(where="v + 1"), GraphError, "a condition is BOOLEAN"),
        (count(where="v < missing"), UnknownColumnError, "missing"),
        (count(where="sum(v) > 3"), GraphError, "sum"),
        (arg_max("v", "no"), UnknownColumnError, "no"),
        (arg_max("v", "many"), GraphError, "'many' of type list"),
        (first("many"), GraphError, "'many' of type list"),
        (count_distinct("many"), GraphError, "'many', of type list"),
        (stddev("many"), GraphError, "needs a column of an integer"),
    ]:
        with pytest.raises(error, match="operator 'op'") as raised:
            operator(rows, {"result": wrong})
        assert text in str(raised.value)
    with pytest.raises(GraphError, match=r"more than one column named x\.time"):
        operator(rows, {"x": first("v"), "x.time": count()})
