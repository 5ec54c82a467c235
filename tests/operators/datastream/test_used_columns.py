"""Only columns that are read are made by sources and sent over exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import holdfast as hf
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.stream import Stream

SCHEMA = pa.schema([("key", pa.int64()), ("price", pa.int64()), ("at", pa.int64()), ("note", pa.string())])


def made(indices: npt.NDArray[np.int64], names: Sequence[str]) -> pa.RecordBatch:
    columns = {"key": indices % 3, "price": indices, "at": indices, "note": [f"note {index}" for index in indices]}
    return pa.record_batch([pa.array(columns[name], SCHEMA.field(name).type) for name in names], names=list(names))


def source(**settings: Any) -> Stream:
    env = hf.Environment("job", parallelism=2, **settings)
    return env.from_source(hf.GeneratorSource(made, 100, SCHEMA, takes_columns=True)).uid("source")


def plan_of(stream: Stream) -> JobPlan:
    stream.sink_to(hf.Blackhole(), uid="out")
    return stream.environment.build()


def read(stream: Stream) -> tuple[list[str], dict[int, tuple[str, ...]]]:
    """(columns of the source, those of each exchange that sends some)."""
    plan = plan_of(stream)
    schema = plan.sources["source"].schema
    assert schema is not None
    return schema.names, plan.columns


def timed(stream: Stream) -> Stream:
    return stream.assign_timestamps("at", 0)


ALL = SCHEMA.names


@pytest.mark.parametrize(
    ("make", "columns", "sent"),
    [
        (lambda s: s.key_by("key").aggregate(n=hf.count()), ["key"], {}),
        (lambda s: s.key_by("key").aggregate(n=hf.sum("price")), ["key", "price"], {0: ("key", "price")}),
        (lambda s: s.key_by("key").aggregate(n=hf.count(where="price < 5")), ["key", "price"], {0: ("key", "price")}),
        (lambda s: s.key_by("key").aggregate(n=hf.count(where=lambda rows: rows.column("price"))), ALL, {}),
        (lambda s: s.key_by(lambda row: row["key"], key_type=int).aggregate(n=hf.count()), ALL, {}),
        (lambda s: timed(s).key_by("key").window(hf.Tumbling(10)).aggregate(n=hf.max("price")), ["key", "price", "at"], {}),
        (lambda s: timed(s).key_by("key").window(hf.Sliding(10, 5)).aggregate(n=hf.count()), ["key", "at"], {0: ("key",)}),
        (
            lambda s: timed(s).key_by("key").window(hf.Tumbling(10)).side_output_late("late").aggregate(n=hf.count()),
            ALL,
            {},
        ),
        (lambda s: s.filter("price > 3").key_by("key").aggregate(n=hf.count()), ["key", "price"], {0: ("key",)}),
        (lambda s: s.select("key", twice="2 * price").rebalance().filter(bool), ["key", "price"], {}),
        (lambda s: s.filter(bool).key_by("key").aggregate(n=hf.count()), ALL, {0: ("key",)}),
        (lambda s: s.map(lambda row: row, returns=SCHEMA).key_by("key").aggregate(n=hf.count()), ALL, {0: ("key",)}),
        (lambda s: s.rebalance().filter("price > 3").key_by("key").aggregate(n=hf.count()), ["key", "price"], {}),
        (lambda s: s.key_by("key").map(lambda row: row, returns=SCHEMA), ALL, {}),
        (lambda s: s, ALL, {}),
    ],
)
def test_what_is_read(make: Any, columns: list[str], sent: dict[int, tuple[str, ...]]) -> None:
    found, exchanges = read(make(source()))
    assert found == columns
    if sent:
        assert {edge: exchanges[edge] for edge in sent} == sent


def test_a_second_reader_has_its_columns() -> None:
    stream = source()
    stream.key_by("key").aggregate(n=hf.sum("price")).uid("sums").sink_to(hf.Blackhole(), uid="first")
    found, exchanges = read(stream.rebalance().select("note"))
    assert found == ["key", "price", "note"]
    assert sorted(exchanges.values()) == [("key", "price"), ("note",)]


def test_a_reader_of_all_leaves_the_source_as_it_is() -> None:
    stream = source()
    stream.key_by("key").aggregate(n=hf.sum("price")).uid("sums").sink_to(hf.Blackhole(), uid="first")
    found, exchanges = read(stream)
    assert (found, exchanges) == (ALL, {0: ("key", "price")})


def test_parquet_columns_that_are_read(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_batches([made(np.arange(50), ALL)], SCHEMA), tmp_path / "a.parquet")
    env = hf.Environment("job", parallelism=2)
    plan = plan_of(env.from_parquet(tmp_path).uid("source").key_by("key").aggregate(n=hf.sum("price")))
    schema = plan.sources["source"].schema
    assert schema is not None
    assert schema.names == ["key", "price"]


@pytest.mark.parametrize("combine", [False, True])
def test_the_job_runs_on_them_and_its_results_are_those_of_all_columns(combine: bool) -> None:
    with hf.testing.Job(parallelism=2, combine_aggregates=combine) as job:
        feed = job.input("bids", {"key": int, "price": int, "note": str})
        stream = feed.stream.filter("price >= 0").key_by("key").window(hf.Tumbling(10))
        out = job.output(stream.aggregate(n=hf.count(), total=hf.sum("price")).uid("window"))
        job.start()
        for number in range(40):
            feed.add({"key": number % 3, "price": number, "note": "x"}, at=number)
        feed.watermark(19)
        job.checkpoint()
        job.restart(parallelism=3)
        for number in range(40, 60):
            feed.add({"key": number % 3, "price": number, "note": "x"}, at=number)
        feed.end()
        found = sorted(((time or 0) // 10, row["key"], row["n"], row["total"]) for row, time in out.take())
    expected: dict[tuple[int, int], list[int]] = {}
    for number in range(60):
        expected.setdefault((number // 10, number % 3), []).append(number)
    assert found == sorted((window, key, len(some), sum(some)) for (window, key), some in expected.items())
