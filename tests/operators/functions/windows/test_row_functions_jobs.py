"""Windows of row functions as whole jobs: windows without keys, the wall clock, and the same windows in SQL."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.statebackends.errors import GraphError
from tests.examples import examples
from tests.operators.functions.windows.row_windows import ROWS, harness_of, operator_of

NUMBERED = {"key": str, "value": int}


class Total(hf.ProcessWindowFunction):
    """Bounds, and the total of the values."""

    returns = {"start": int, "end": int, "total": int}  # noqa: RUF012 - the contract's class attribute

    def process(self, key: Any, ctx: hf.WindowContext, elements: list[Any], out: hf.Collector) -> None:
        out({"start": ctx.window.start, "end": ctx.window.end, "total": sum(row["value"] for row in elements)})


def found(out: Any) -> list[tuple[Any, ...]]:
    return [(row["start"], row["end"], row["total"], time) for row, time in out.take()]


# ------------------------------------------------------------------------------------------------------------- without keys


def test_windows_of_a_stream_without_keys_are_of_all_records() -> None:
    with hf.testing.Job(parallelism=3) as job:
        feed = job.input("feed", NUMBERED)
        out = job.output(feed.stream.window_all(hf.Session(10)).process(Total()).uid("all"))
        job.start()
        feed.add([{"key": "a", "value": 1}, {"key": "b", "value": 2}, {"key": "c", "value": 4}], at=[0, 5, 30])
        job.checkpoint()
        job.restart(parallelism=2)
        feed.add({"key": "d", "value": 8}, at=14)
        feed.watermark(23)
        assert found(out) == [(0, 24, 11, 23)]
        feed.end()
        assert found(out) == [(30, 40, 4, 39)]


def test_aggregates_over_columns_of_all_records_have_no_key() -> None:
    with hf.testing.Job(parallelism=2) as job:
        feed = job.input("feed", NUMBERED)
        windows = feed.stream.window_all(hf.Tumbling(10))
        out = job.output(windows.aggregate(n=hf.count(), total=hf.sum("value")).uid("all"))
        job.start()
        feed.add([{"key": "a", "value": 1}, {"key": "b", "value": 2}], at=[1, 9])
        feed.end()
        ((row, time),) = out.take()
        assert (list(row), row["n"], row["total"], time) == (["window_start", "window_end", "n", "total"], 2, 3, 9)


def test_event_time_windows_of_all_records_need_event_times_too() -> None:
    stream = hf.Environment("all").from_collection([{"key": "a", "at": 0}], returns=ROWS)
    with pytest.raises(GraphError, match="event times"):
        stream.window_all(hf.Tumbling(10))


# -------------------------------------------------------------------------------------------------------- processing time


def clock_job(job: hf.testing.Job, windows: Any) -> tuple[Any, Any]:
    feed = job.input("feed", NUMBERED)
    out = job.output(feed.stream.key_by("key").window(windows).process(Total()).uid("windows"))
    job.start()
    return feed, out


@pytest.mark.parametrize("backend", ["memory", "rocksdb"])
def test_windows_of_the_clock_go_by_it_when_a_record_arrives(backend: Any) -> None:
    with hf.testing.Job(parallelism=1, state_backend=backend) as job:
        feed, out = clock_job(job, hf.Tumbling(1_000, time="processing"))
        job.advance(to_ms=10_000_000)
        feed.add([{"key": "a", "value": 1}], at=5)
        job.advance(to_ms=10_000_900)
        feed.add([{"key": "a", "value": 2}], at=99_000_000)
        assert found(out) == []
        job.advance(to_ms=10_001_200)
        feed.add([{"key": "a", "value": 4}], at=7)
        assert found(out) == [(10_000_000, 10_001_000, 3, 10_000_999)]
        feed.end()
        assert found(out) == [(10_001_000, 10_002_000, 4, 10_001_999)], "an open window fires once when input ends"


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_window_of_the_clock_that_is_overdue_fires_once_after_a_restore(parallelism: int) -> None:
    with hf.testing.Job(parallelism=2) as job:
        feed, out = clock_job(job, hf.Session(1_000, time="processing"))
        job.advance(to_ms=10_000_000)
        feed.add([{"key": key, "value": 1} for key in "abc"], at=0)
        job.advance(to_ms=10_000_500)
        feed.add({"key": "a", "value": 2}, at=0)
        job.checkpoint()
        job.restart(parallelism=parallelism, at_ms=10_900_000)
        assert Counter(found(out)) == Counter(
            [(10_000_000, 10_001_500, 3, 10_001_499), *2 * [(10_000_000, 10_001_000, 1, 10_000_999)]]
        )
        feed.add({"key": "a", "value": 4}, at=0)
        job.checkpoint()
        job.restart()
        feed.end()
        assert [row[2] for row in found(out)] == [4]
        assert sorted(row["total"] for row, _ in out.committed()) == [1, 1, 3, 4]


def added(a: Any, b: Any) -> Any:
    return {**a, "n": a["n"] + b["n"]}


BEHIND: dict[str, Any] = {
    "row functions": lambda totals: totals.key_by("key").window(hf.Tumbling(10_000)).reduce(added),
    "columns": lambda totals: totals.key_by("key").window(hf.Tumbling(10_000)).aggregate(n=hf.sum("n")),
    "join": lambda totals: totals.interval_join(totals, on="key", lower=0, upper=0, suffixes=("", "_")),
}


@pytest.mark.parametrize("windows", [hf.Tumbling(1_000, time="processing"), hf.Session(1_000, time="processing")], ids=repr)
@pytest.mark.parametrize("kind", sorted(BEHIND))
def test_event_time_behind_windows_of_the_clock_takes_what_they_fire_when_input_ends(windows: Any, kind: str) -> None:
    with hf.testing.Job(parallelism=2) as job:
        feed = job.input("feed", {"key": str, "n": int})
        totals = feed.stream.key_by("key").window(windows).reduce(added).uid("totals")
        out = job.output(BEHIND[kind](totals).uid("behind"))
        job.start()
        feed.add([{"key": key, "n": 1} for key in "abca"], at=5)
        feed.end()
        assert sorted((row["key"], row["n"]) for row, _ in out.take()) == [("a", 2), ("b", 1), ("c", 1)]


# -------------------------------------------------------------------------------------------------------------------- SQL

Record = tuple[str, int, int | None]
SCHEMA = pa.schema([pa.field("key", pa.string(), False), pa.field("at", pa.int64(), False), pa.field("value", pa.int64())])
RECORDS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(-30, 60), st.none() | st.integers(-3, 3)), min_size=1, max_size=30
)
WINDOWS: dict[str, Any] = {
    "tumbling": hf.Tumbling(10, offset=3),
    "sliding": hf.Sliding(10, slide=4),
    "gaps": hf.Sliding(3, slide=5),
    "session": hf.Session(6),
}


class Described(hf.ProcessWindowFunction):
    """What SQL says of a window: number, sum, and the values with their times."""

    returns = {"key": str, "start": int, "end": int, "n": int, "total": int | None, "ats": list[int]}  # noqa: RUF012

    def process(self, key: str, ctx: hf.WindowContext, elements: list[Any], out: hf.Collector) -> None:
        there = [row["value"] for row in elements if row["value"] is not None]
        total, ats = sum(there) if there else None, sorted(row["at"] for row in elements)
        out({"key": key, "start": ctx.window.start, "end": ctx.window.end, "n": len(elements), "total": total, "ats": ats})


def latest(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The record with the greatest time, value and all; of equals the one that came first."""
    return max(one, other, key=lambda row: row["at"])


class Named(hf.ProcessWindowFunction):
    returns = {"key": str, "start": int, "at": int}  # noqa: RUF012

    def process(self, key: str, ctx: hf.WindowContext, elements: list[Any], out: hf.Collector) -> None:
        out({"key": key, "start": ctx.window.start, "at": elements[0]["at"]})


def in_sql(kind: str, records: list[Record]) -> list[tuple[Any, ...]]:
    """(key, start, end, n, total, times)."""
    windows = WINDOWS[kind]
    columns = zip(*records, strict=True)
    table = pa.table([pa.array(list(column), each.type) for column, each in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)
    if kind == "session":
        query = f"""
            SELECT key, min(t), max(t) + {windows.gap_ms}, count(*), sum(value), list(t ORDER BY t) FROM
            (SELECT *, sum(opens) OVER (PARTITION BY key ORDER BY t ROWS UNBOUNDED PRECEDING) AS session FROM
             (SELECT *, coalesce(t - lag(t) OVER (PARTITION BY key ORDER BY t) > {windows.gap_ms}, true)::INT AS opens
              FROM records))
            GROUP BY key, session"""
    else:
        slide = getattr(windows, "slide_ms", windows.size_ms)
        query = f"""
            SELECT key, s, s + {windows.size_ms}, count(*), sum(value), list(t ORDER BY t)
            FROM records, (SELECT range * {slide} + {windows.offset_ms} AS s FROM range(-60, 60))
            WHERE s <= t AND t < s + {windows.size_ms}
            GROUP BY key, s"""
    connection = database()
    connection.register("records", table.rename_columns(["key", "t", "value"]))
    return connection.sql(query).fetchall()


@cache
def database() -> Any:
    return duckdb.connect(config={"threads": 1})


@pytest.mark.parametrize("kind", WINDOWS)
@settings(max_examples=examples(12), deadline=None)
@given(records=RECORDS, batch_rows=st.sampled_from([1, 7, 65_536]), disorder=st.integers(0, 200))
def test_windows_are_those_of_sql(kind: str, records: list[Record], batch_rows: int, disorder: int) -> None:
    """The watermark follows `disorder` ms behind, as far as no record to come is late, or touches a session that is gone."""
    types = {"key": str, "at": int, "value": int | None}
    described = operator_of(lambda stream: stream.key_by("key").window(WINDOWS[kind]).process(Described()), types=types)
    reduced = operator_of(lambda stream: stream.key_by("key").window(WINDOWS[kind]).reduce(latest, Named()), types=types)
    outputs = []
    for operator in (described, reduced):
        with harness_of(operator) as harness:
            for begin in range(0, len(records), batch_rows):
                some, left = records[begin : begin + batch_rows], records[begin + batch_rows :]
                harness.process([dict(zip(types, row, strict=True)) for row in some], [row[1] for row in some], SCHEMA)
                harness.watermark(min([row[1] - 2 for row in left] + [max(row[1] for row in records) - disorder]))
            harness.watermark(2**63 - 1)
            outputs.append(harness.output.rows())
    expected = in_sql(kind, records)
    assert sorted(map(str, (tuple(row.values()) for row in outputs[0]))) == sorted(map(str, expected))
    assert Counter(tuple(row.values()) for row in outputs[1]) == Counter((key, start, ats[-1]) for key, start, *_, ats in expected)
