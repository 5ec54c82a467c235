"""`top`, `deduplicate`, `max_by` and `min_by` against DuckDB's row_number(): any batches, ties, nulls, disorder, restores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cache
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.operators.base import Operator
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import Key, key_selector
from holdfast.operators.functions.tables import top, window_top
from holdfast.operators.functions.tables.one_row import Place, deduplication, one_row_operator
from holdfast.operators.functions.tables.top import ranking, top_operator
from holdfast.operators.functions.tables.window_top import window_top_operator
from holdfast.operators.functions.windows.assigners import Sliding, Tumbling
from holdfast.operators.functions.windows.options import RowWindowOptions
from tests.examples import examples
from tests.operators.harness import OperatorHarness

TYPES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int64": (pa.int64(), st.integers(-3, 3) | st.sampled_from([-(2**63), 2**63 - 1])),
    "int32": (pa.int32(), st.integers(-2, 2)),
    "float64": (pa.float64(), st.sampled_from([-math.inf, -1.5, -0.0, 0.0, 1.5, math.inf, math.nan])),
    "bool": (pa.bool_(), st.booleans()),
    "text": (pa.string(), st.sampled_from(["", "a", "ab", "b", "Ä", "\uffff", "\U0001f600"])),
    "timestamp": (
        pa.timestamp("us", tz="UTC"),
        st.integers(0, 4).map(lambda second: datetime(2026, 1, 1, 0, 0, second, tzinfo=UTC)),
    ),
    "decimal": (pa.decimal128(20, 2), st.integers(-2, 2).map(lambda cents: Decimal(cents).scaleb(-2))),
}
KEYS: list[Key] = ["k", ("k", "name"), "narrow", ("k", "narrow")]
Row = tuple[int, Any, Any, int]
"""Key, what is compared, what is compared next, event time. A row's number, `i`, is told by its place."""
Batches = Sequence[Sequence[Row]]


def row_type(by: str, then: str) -> RowType:
    fields = [
        pa.field("k", pa.int64(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("narrow", pa.int32(), nullable=False),
        ("order", TYPES[by][0]),
        ("then", TYPES[then][0]),
        ("i", pa.int64()),
    ]
    return RowType(pa.schema(fields))


def columns(rows: RowType, batch: Sequence[Row], first: int) -> pa.RecordBatch:
    keys = [row[0] for row in batch]
    values: list[list[Any]] = [keys, [f"key {key}" for key in keys], keys, [row[1] for row in batch], [row[2] for row in batch]]
    values.append(list(range(first, first + len(batch))))
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(values, rows.schema or (), strict=True)], schema=rows.schema
    )


@st.composite
def batches(draw: st.DrawFn, by: str, then: str) -> Batches:
    row = st.tuples(st.integers(-2, 3), st.none() | TYPES[by][1], st.none() | TYPES[then][1], st.integers(0, 5))
    rows, size = draw(st.lists(row, min_size=1, max_size=30)), draw(st.sampled_from([2, 7, 30]))
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def updates(
    operator: Operator, key_type: str, rows: RowType, given: Batches, identity: Sequence[str], *, timed: bool, restores: bool = True
) -> Any:
    """The last update of each identity, with its event time; a restore behind every second batch."""
    found: dict[Any, Any] = {}
    harness = OperatorHarness(operator, key_type=key_type).open()
    first = 0
    for number, batch in enumerate(given):
        if restores and number % 2:
            snapshot = harness.snapshot()
            harness.close()
            harness = OperatorHarness.restored(operator, [snapshot], key_type=key_type).open()
        harness.process(columns(rows, batch, first), [row[3] for row in batch] if timed else None)
        first += len(batch)
        for row, time in zip(harness.output.rows(), harness.output.timestamps(), strict=True):
            found[tuple(row[name] for name in identity)] = (row, time)
        harness.output.clear()
    harness.close()
    return found


def sql(
    rows: RowType, given: Batches, ranked: str, n: int, times: tuple[int, int] = (-(2**62), 2**62)
) -> list[dict[str, Any]]:
    """`times`: of the rows that count, from the first one on and before the second."""
    everything = [row for batch in given for row in batch]
    table = pa.Table.from_batches([columns(rows, everything, 0)])
    table = table.append_column("t", pa.array([row[3] for row in everything], pa.int64()))
    connection = database()
    connection.register("rows", table)
    query = f"SELECT *, row_number() OVER (PARTITION BY k ORDER BY {ranked}) AS rank FROM rows "
    query += f"WHERE t >= {times[0]} AND t < {times[1]} QUALIFY rank <= {n}"
    found: list[dict[str, Any]] = connection.sql(query).to_arrow_table().to_pylist()
    return found


@cache
def database() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(config={"threads": 1})
    connection.execute("SET TimeZone = 'UTC'")
    return connection


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(value == other[name] or (value != value and other[name] != other[name]) for name, value in one.items())


def one_by_one(given: Batches) -> Batches:
    return [[row] for batch in given for row in batch]


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_top(data: st.DataObject) -> None:
    by, then = data.draw(st.sampled_from(sorted(TYPES))), data.draw(st.sampled_from(sorted(TYPES)))
    rows, given = row_type(by, then), data.draw(batches(by, then))
    selector = key_selector(data.draw(st.sampled_from(KEYS)), None, rows, "key_by")
    n, timed, ties = data.draw(st.integers(1, 4)), data.draw(st.booleans()), data.draw(st.sampled_from(["earlier", "later"]))
    names = data.draw(st.sampled_from([("order",), ("order", "then"), ("narrow", "order")]))
    descending = [data.draw(st.booleans()) for _ in names]
    operator = top_operator(ranking(n, names, descending, ties, "rank"), selector, rows)
    how = "ASC" if ties == "earlier" else "DESC"
    order = [
        f'"{name}" {"DESC" if falls else "ASC"} NULLS LAST' for name, falls in zip(names, descending, strict=True)
    ] + ([f"t {how}"] if timed else [])
    expected = {(row["k"], row["rank"]): row for row in sql(rows, given, ", ".join([*order, f"i {how}"]), n)}
    for parts in (given, one_by_one(given)):
        found = updates(operator, selector.key_type.text, rows, parts, ("k", "rank"), timed=timed)
        assert found.keys() == expected.keys()
        for identity, (row, time) in found.items():
            assert same(row, expected[identity])
            above = [other["t"] for (key, rank), other in expected.items() if key == identity[0] and rank <= identity[1]]
            assert time == (max(above) if timed else None)


WINDOWS: tuple[Tumbling | Sliding, ...] = (Tumbling(10), Tumbling(7, offset=3), Sliding(10, 4), Sliding(4, 6))


@settings(max_examples=examples(25), deadline=None)
@given(st.data())
def test_window_top(data: st.DataObject) -> None:
    """In any order of arrival, with a restore between batches and in the middle of a firing."""
    by, then = data.draw(st.sampled_from(sorted(TYPES))), data.draw(st.sampled_from(sorted(TYPES)))
    rows, drawn = row_type(by, then), data.draw(batches(by, then))
    times = data.draw(st.lists(st.integers(-15, 15), min_size=30, max_size=30))
    given = [[(*row[:3], row[3] + times[at]) for at, row in enumerate(batch)] for batch in drawn]
    selector = key_selector(data.draw(st.sampled_from(KEYS)), None, rows, "key_by")
    windows, n = data.draw(st.sampled_from(WINDOWS)), data.draw(st.integers(1, 3))
    ties = data.draw(st.sampled_from(["earlier", "later"]))
    operator = window_top_operator(ranking(n, "order", True, ties, "rank"), windows, RowWindowOptions(), selector, rows)
    operator.rows_per_slice_max = data.draw(st.sampled_from([1, 8192]))
    how = "ASC" if ties == "earlier" else "DESC"
    expected = [
        {**row, "window_start": instant(start), "window_end": instant(start + windows.size_ms)}
        for start in starts_of(windows, given)
        for row in sql(rows, given, f'"order" DESC NULLS LAST, t {how}, i {how}', n, (start, start + windows.size_ms))
    ]
    found = fired(operator, selector.key_type.text, rows, given)
    identity = operator.output_type.names[-3:]
    by_rank = {(row["k"], *(row[name] for name in identity)): row for row in expected}
    assert sorted(map(str, ((row["k"], *(row[name] for name in identity)) for row, _ in found))) == sorted(map(str, by_rank))
    for row, time in found:
        assert same(row, by_rank[(row["k"], *(row[name] for name in identity))])
        assert instant(time + 1) == row["window_end"]


def instant(moment: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=moment)


def starts_of(windows: Tumbling | Sliding, given: Batches) -> list[int]:
    slide = windows.slide_ms if isinstance(windows, Sliding) else windows.size_ms
    times = {row[3] for batch in given for row in batch}
    return sorted(
        {start for at in times for start in range(at - (at - windows.offset_ms) % slide, at - windows.size_ms, -slide)}
    )


def fired(operator: Operator, key_type: str, rows: RowType, given: Batches) -> list[tuple[dict[str, Any], int]]:
    """Rows with their event times; a restore behind every second batch, and behind two slices of the firing."""
    harness, first = OperatorHarness(operator, key_type=key_type).open(), 0
    found: list[Any] = []
    for number, batch in enumerate(given):
        if number % 2:
            harness = again(operator, key_type, harness)
        harness.process(columns(rows, batch, first), [row[3] for row in batch])
        first += len(batch)
    harness.watermark(-20)
    slices = harness.watermark_slices(100)
    for _ in range(2):
        next(slices, None)
    found += zip(harness.output.rows(), harness.output.timestamps(), strict=True)
    harness = again(operator, key_type, harness)
    harness.processing_time(0)
    found += zip(harness.output.rows(), harness.output.timestamps(), strict=True)
    assert harness.operator.rows.table.count() == 0
    assert harness.context.counters.late_dropped == 0
    harness.close()
    return found


def again(operator: Operator, key_type: str, harness: OperatorHarness) -> OperatorHarness:
    snapshot = harness.snapshot()
    harness.close()
    return OperatorHarness.restored(operator, [snapshot], key_type=key_type).open()


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_one_row(data: st.DataObject) -> None:
    by = data.draw(st.sampled_from(sorted(TYPES)))
    rows, given = row_type(by, "int64"), data.draw(batches(by, "int64"))
    selector = key_selector(data.draw(st.sampled_from(KEYS)), None, rows, "key_by")
    timed = data.draw(st.booleans())
    places = {
        "first": (deduplication("first", None, None), "i"),
        "last": (deduplication("last", None, None), "i DESC"),
        "first by": (deduplication("first", "order", None), '"order" ASC NULLS LAST, %s i'),
        "last by": (deduplication("last", "order", None), '"order" DESC NULLS LAST, %s i DESC'),
        "expiring": (deduplication("last", "order", 1_000), '"order" DESC NULLS LAST, %s i DESC'),
        "max_by": (Place("order", greatest=True, latest=False), '"order" DESC NULLS LAST, %s i'),
        "min_by": (Place("order", greatest=False, latest=False), '"order" ASC NULLS LAST, %s i'),
    }
    place, order = places[data.draw(st.sampled_from(sorted(places)))]
    if "%s" in order:
        order %= ("t DESC," if place.latest else "t,") if timed else ""
    operator = one_row_operator("op", place, selector, rows, is_timed=timed)
    expected = {(row["k"],): row for row in sql(rows, given, order, 1)}
    for parts in (given, one_by_one(given)):
        found = updates(operator, selector.key_type.text, rows, parts, ("k",), timed=timed)
        assert found.keys() == expected.keys()
        for identity, (row, time) in found.items():
            assert same(row, expected[identity])
            assert time == (expected[identity]["t"] if timed else None)


@pytest.mark.parametrize("count", [1, 7, 5_000])
def test_thresholds_drop_nothing_that_belongs_to_the_top(count: int) -> None:
    """Many rows of few keys, so that most are behind their key's last rank; far from sorted; nothing is restored."""
    rows = row_type("int64", "int64")
    numbers = range(500 if count == 1 else 5_000)
    every = [(n % 3, (n * 7_919) % 101 if n % 17 else None, None, n % 50) for n in numbers]
    given = [every[at : at + count] for at in range(0, len(every), count)]
    operator = top_operator(ranking(5, "order", True, "earlier", "rank"), key_selector("k", None, rows, "key_by"), rows)
    found = updates(operator, "int64", rows, given, ("k", "rank"), timed=True, restores=False)
    expected = {(row["k"], row["rank"]): row for row in sql(rows, given, '"order" DESC NULLS LAST, t, i', 5)}
    assert found.keys() == expected.keys()
    assert all(same(row, expected[identity]) for identity, (row, _) in found.items())


@pytest.mark.parametrize(
    ("windows", "count", "entries_max", "thresholds_max"),
    [(Sliding(10, 4), 9, 1 << 18, 1 << 23), (Sliding(20, 2), 600, 50, 1 << 23), (Tumbling(10), 100, 1 << 18, 4_096)],
)
def test_thresholds_of_windows_drop_nothing_that_belongs_to_the_top(
    windows: Tumbling | Sliding, count: int, entries_max: int, thresholds_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While windows fire, of rows that come up to 5 ms late, in slices of a few rows, and where thresholds find no room."""
    monkeypatch.setattr(window_top, "ENTRIES_PER_SLICE_MAX", entries_max)
    monkeypatch.setattr(top, "WINDOW_THRESHOLDS_MAX", thresholds_max)
    rows = row_type("int64", "int64")
    every = [(n % 3, (n * 7_919) % 101 if n % 17 else None, None, n // 20 - n % 6) for n in range(600)]
    operator = window_top_operator(
        ranking(3, "order", True, "earlier", "rank"), windows, RowWindowOptions(), key_selector("k", None, rows, "key_by"), rows
    )
    harness = OperatorHarness(operator, key_type="int64").open()
    for first in range(0, len(every), count):
        batch = every[first : first + count]
        harness.process(columns(rows, batch, first), [row[3] for row in batch])
        harness.watermark(batch[-1][3] - 6)
    harness.watermark(1_000)
    found = sorted((row["window_start"], row["k"], row["rank"], row["i"]) for row in harness.output.rows())
    harness.close()
    expected = []
    for start in starts_of(windows, [every]):
        for key in range(3):
            inside = [i for i, row in enumerate(every) if row[0] == key and start <= row[3] < start + windows.size_ms]
            inside.sort(key=lambda i: (every[i][1] is None, -(every[i][1] or 0), every[i][3], i))
            expected += [(instant(start), key, rank, i) for rank, i in enumerate(inside[:3], 1)]
    assert found == sorted(expected)


@pytest.mark.parametrize("by", ["int64", "text"])
def test_a_batch_reads_the_table_once_however_many_windows_its_rows_enter(by: str) -> None:
    rows = row_type(by, "int64")
    ranks, selector = ranking(2, "order", True, "earlier", "rank"), key_selector("k", None, rows, "key_by")
    operator = window_top_operator(ranks, Sliding(60, 1), RowWindowOptions(), selector, rows)
    harness = OperatorHarness(operator, key_type="int64").open()
    table, reads = harness.operator.rows.table, list[Any]()
    read = table.rows_of

    def counted(*asked: Any) -> Any:
        reads.append(asked)
        return read(*asked)

    table.rows_of = counted
    for number in range(4):
        batch = [(n % 3, f"{n}" if by == "text" else n, None, number + n % 5) for n in range(30)]
        harness.process(columns(rows, batch, 30 * number), [row[3] for row in batch])
    assert len(table.namespaces()) == 67
    assert len(reads) <= 4
    harness.close()


def test_thresholds_of_windows_take_no_more_room_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    width, lines_max, made = top._WIDTH_MIN, 10, [0]
    extended = top._extended

    def counted(array: Any, shape: tuple[int, int], old_width: int) -> Any:
        made.append(shape[0] * shape[1])
        return extended(array, shape, old_width)

    monkeypatch.setattr(top, "WINDOW_THRESHOLDS_MAX", lines_max * width)
    monkeypatch.setattr(top, "_extended", counted)
    thresholds = top.Thresholds(ranking(3, "order", True, "earlier", "rank"), lambda: None, True)
    known = [thresholds.spaces(np.arange(windows)).is_known for windows in range(1, lines_max + 2)]
    assert known == [True] * lines_max + [False]
    assert max(made) == lines_max * width
