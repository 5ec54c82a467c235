"""Nexmark's queries beside DuckDB, and `holdfast bench nexmark`."""

from __future__ import annotations

import json
from dataclasses import replace

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import holdfast as hf
from holdfast.api.nexmark.check import Checker
from holdfast.api.nexmark.oracle import Expected
from holdfast.api.nexmark.queries import QUERIES, named_queries
from holdfast.api.nexmark.query import Judged, Picked, Query
from holdfast.api.nexmark.speed import FLINK, environment

EVENTS = 2_000
Pair = tuple[int, int]


@pytest.fixture(scope="module")
def checker() -> Checker:
    return Checker(EVENTS, parallelism=(1, 2))


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_gives_what_duckdb_gives_over_a_restart_at_another_parallelism(name: str, checker: Checker) -> None:
    checked = checker.check(QUERIES[name])
    assert checked.difference is None
    assert checked.rows > 0


def test_all_queries_are_there() -> None:
    assert list(QUERIES) == [f"q{number}" for number in range(23)]
    assert set(FLINK) <= set(QUERIES)


def test_days_of_utc_times_are_those_of_a_cast() -> None:
    times = pa.array([-86_400_001, -86_400_000, -1, 0, 86_399_999, None, 2**45]).view(pa.timestamp("ms", "UTC"))
    days = Picked(("at",), pa.schema({"day": pa.date32()}))(pa.record_batch({"at": times}))
    assert days.column("day") == times.cast(pa.date32())


def expected(judged: Judged, key: tuple[str, ...] = ()) -> Expected:
    query = replace(QUERIES["q0"], judged=judged, key=key)
    return Expected(query, ("key", "n"), ((1, 10), (2, 20), (2, 21)) if judged == "rows" else ((1, 10), (2, 20)))


@pytest.mark.parametrize(
    ("judged", "rows", "missing", "extra"),
    [
        ("rows", [(2, 21), (2, 20), (1, 10)], None, None),
        ("rows", [(1, 10), (2, 20)], ((2, 21),), ()),
        ("rows", [(1, 10), (1, 10), (2, 20), (2, 21)], (), ((1, 10),)),
        ("last", [(1, 3), (2, 20), (1, 10)], None, None),
        ("last", [(1, 10), (2, 20), (1, 3)], ((1, 10),), ((1, 3),)),
        ("totals", [(1, 4), (2, 20), (1, 6)], None, None),
        ("totals", [(1, 4), (2, 20)], ((1, 10),), ((1, 4),)),
    ],
)
def test_what_has_to_be_equal(
    judged: Judged, rows: list[Pair], missing: tuple[Pair, ...] | None, extra: tuple[Pair, ...] | None
) -> None:
    key = () if judged == "rows" else ("key",)
    difference = expected(judged, key).difference([(n, key) for key, n in rows], ("n", "key"))  # columns in another order
    if missing is None:
        assert difference is None
    else:
        assert difference is not None
        assert (difference.missing, difference.extra) == (missing, extra)


@pytest.mark.parametrize("name", ["q0", "q5", "q16"])
def test_the_job_that_is_measured_is_one_task_with_checkpoints_each_second(name: str) -> None:
    graph = environment(QUERIES[name], 1_000, "/nowhere").build().graph
    assert {vertex.parallelism for vertex in graph.vertices} == {1}
    assert (graph.config.state_backend, graph.config.checkpoint_interval_ms) == ("filesystem", 1_000)


# ----------------------------------------------------------------------------------------------------------- command line

runner = CliRunner()


def bench(*arguments: str, code: int = 0) -> str:
    result = runner.invoke(hf.command_line(), ["bench", "nexmark", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_the_command_shows_a_line_for_each_query() -> None:
    lines = bench("--check", "--queries", "q12,q0", "--events", "500").splitlines()
    assert [line.split()[0] for line in lines] == ["query", "q0", "q12"]
    assert all("yes" in line for line in lines[1:])


def test_a_query_that_differs_is_shown_and_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(QUERIES, "q2", Query("q2", "selection", QUERIES["q2"].build, "SELECT 1 AS auction, 2 AS price"))
    shown = bench("--queries", "q2", "--events", "500", code=1)
    assert "(1, 2)" in shown
    (found,) = json.loads(bench("--queries", "q2", "--events", "500", "--json", code=1))
    assert (found["query"], found["rows"], found["difference"]["missing"]) == ("q2", 1, [[1, 2]])


@pytest.mark.parametrize("arguments", [["--queries", "q23"], ["--check", "--speed"], ["--events", "0"]])
def test_what_is_refused(arguments: list[str]) -> None:
    bench(*arguments, code=2)


def test_queries_come_in_their_order() -> None:
    assert [query.name for query in named_queries(["q11", "q2"])] == ["q2", "q11"]
    with pytest.raises(hf.InvalidConfigError, match="q23"):
        named_queries(["q23"])
