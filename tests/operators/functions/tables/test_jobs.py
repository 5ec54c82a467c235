"""Tables of a keyed stream as users meet them, over crashes and rescales, on every backend; what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.operators.datastream.stream import KeyedStream, Stream

BIDS = {"auction": int, "bidder": str, "price": int | None}
Tables = Callable[[KeyedStream], Stream]


def bid(auction: int, bidder: str, price: int | None) -> dict[str, Any]:
    return {"auction": auction, "bidder": bidder, "price": price}


@contextmanager
def bids(tables: Tables, **settings: Any) -> Iterator[tuple[hf.testing.Job, Any, Any]]:
    with hf.testing.Job(**settings) as job:
        feed = job.input("bids", BIDS)
        out = job.output(tables(feed.stream.key_by("auction")).uid("table"))
        job.start()
        yield job, feed, out


def refused(tables: Callable[[KeyedStream], Any], types: Any = BIDS) -> None:
    with hf.testing.Job() as job:
        tables(job.input("bids", types).stream.key_by("auction", key_type=int))


@pytest.mark.parametrize(("before", "after"), [("memory", "filesystem"), ("filesystem", "rocksdb"), ("rocksdb", "rocksdb")])
def test_every_table_goes_on_over_a_crash_and_a_rescale(before: Any, after: Any) -> None:
    tables: dict[str, Tables] = {
        "top": lambda keyed: keyed.top(2, by="price"),
        "first": lambda keyed: keyed.deduplicate(),
        "last": lambda keyed: keyed.deduplicate(keep="last", by="price"),
        "most": lambda keyed: keyed.max_by("price"),
        "sums": lambda keyed: keyed.reduce(lambda old, row: {**old, "price": old["price"] + row["price"]}),
        "numbered": lambda keyed: keyed.map_with_state(
            lambda row, n: ({"auction": row["auction"], "n": (n or 0) + 1}, (n or 0) + 1), int, returns={"auction": int, "n": int}
        ),
    }
    with hf.testing.Job(parallelism=2, state_backend=before) as job:
        feed = job.input("bids", BIDS)
        keyed = feed.stream.key_by("auction")
        outs = {name: job.output(make(keyed).uid(name)) for name, make in tables.items()}
        job.start()
        feed.add([bid(auction, "early", 10 + auction) for auction in range(6)], at=1)
        if before == after:
            job.checkpoint()
            job.fail()
        else:
            job.restart(parallelism=3, state_backend=after)
        feed.add([bid(auction, "ann", 20) for auction in range(6)], at=2)
        job.checkpoint()
        job.restart(parallelism=1)
        for out in outs.values():
            out.take()
        feed.add([bid(0, "bob", 15), bid(1, "bob", 20), bid(2, "bob", 30)], at=3)
        found = {name: sorted(out.rows(), key=repr) for name, out in outs.items()}
    assert found == {
        "top": [
            {**bid(0, "bob", 15), "rank": 2},
            {**bid(1, "bob", 20), "rank": 2},
            {**bid(2, "ann", 20), "rank": 2},
            {**bid(2, "bob", 30), "rank": 1},
        ],
        "first": [],
        "last": [bid(1, "bob", 20), bid(2, "bob", 30)],
        "most": [bid(2, "bob", 30)],
        "sums": [bid(0, "early", 45), bid(1, "early", 51), bid(2, "early", 62)],
        "numbered": [{"auction": auction, "n": 3} for auction in range(3)],
    }


def test_an_update_of_a_rank_has_the_latest_time_of_the_rows_up_to_it() -> None:
    with bids(lambda keyed: keyed.top(2, by="price", rank_column="place")) as (_, feed, out):
        feed.add([bid(1, "ann", 10), bid(1, "bob", 5)], at=[70, 40])
        assert out.take() == [({**bid(1, "ann", 10), "place": 1}, 70), ({**bid(1, "bob", 5), "place": 2}, 70)]
        feed.add(bid(1, "cat", 7), at=50)  # the first rank keeps its row, and is not emitted again
        assert out.take() == [({**bid(1, "cat", 7), "place": 2}, 70)]
        feed.add(bid(1, "dan", 20), at=60)
        assert out.take() == [({**bid(1, "dan", 20), "place": 1}, 60), ({**bid(1, "ann", 10), "place": 2}, 70)]


def test_a_key_that_a_function_computes_is_in_the_updates() -> None:
    with hf.testing.Job() as job:
        stream = job.input("bids", BIDS).stream
        top = stream.key_by(lambda row: row["auction"] % 2, key_type=int).top(1, by=["price", "bidder"], descending=[True, False])
        assert top.schema is not None
        assert top.schema.names == ["key", "auction", "bidder", "price", "rank"]


def test_columns_may_be_called_as_a_state_calls_its_own() -> None:
    types = {"key_0": int, "key": int, "order": int, "time": int, "value": int}
    row = {"key_0": 1, "key": 2, "order": 3, "time": 4, "value": 5}
    with hf.testing.Job(state_backend="filesystem") as job:
        feed = job.input("rows", types)
        out = job.output(feed.stream.key_by("key_0").top(2, by="key").uid("top"))
        job.start()
        feed.add(row)
        job.restart(parallelism=2)
        out.take()
        feed.add({**row, "key": 9, "value": 6})
        assert sorted(out.rows(), key=repr) == [{**row, "rank": 2}, {**row, "key": 9, "value": 6, "rank": 1}]


def test_ties_go_to_the_earlier_or_the_later() -> None:
    for ties, first in (("earlier", "bob"), ("later", "cat")):
        with bids(lambda keyed, ties=ties: keyed.top(1, by="price", ties=ties)) as (_, feed, out):  # type: ignore[misc]
            feed.add([bid(1, "ann", 5), bid(1, "bob", 5), bid(1, "cat", 5)], at=[20, 10, 30])
            assert [row["bidder"] for row in out.rows()] == [first]


# --------------------------------------------------------------------------------------------------------- time to live


@pytest.mark.parametrize("by", [None, "price"])
def test_a_key_is_forgotten_one_ttl_after_its_row(by: str | None) -> None:
    with bids(lambda keyed: keyed.deduplicate(by=by, ttl=1_000), parallelism=2) as (job, feed, out):
        job.advance(to_ms=500)
        feed.add(bid(1, "ann", 5))
        job.advance(to_ms=1_499)  # the next stretch of time, in which ann's row is still known
        feed.add([bid(1, "bob", 5), bid(2, "eve", 5)])
        job.checkpoint()
        job.restart(parallelism=3)
        feed.add(bid(1, "cat", 6))
        assert out.rows() == [bid(1, "ann", 5), bid(2, "eve", 5)]
        job.advance(to_ms=1_500)
        feed.add([bid(1, "dan", 7), bid(2, "fay", 5), bid(1, "gil", 8)], to=0)
        assert out.rows() == [bid(1, "dan", 7)]
        job.advance(to_ms=2_499)
        feed.add([bid(1, "hal", 6 if by else 7), bid(2, "ida", 9)], to=0)
        assert out.rows() == ([bid(1, "hal", 6)] if by else []) + [bid(2, "ida", 9)]


def test_what_has_expired_leaves_the_state() -> None:
    with bids(lambda keyed: keyed.deduplicate(ttl=1_000)) as (job, feed, _):
        job.advance(to_ms=100)
        feed.add([bid(auction, "ann", 5) for auction in range(10)])
        job.advance(to_ms=1_050)
        feed.add(bid(99, "bob", 5))
        job.checkpoint()
        assert len(job.state("table")["kept"]) == 11
        job.advance(to_ms=2_100)
        job.checkpoint()
        assert len(job.state("table")["kept"]) == 1
        job.advance(to_ms=10_000)
        job.checkpoint()
        assert job.state("table")["kept"] == []


# ------------------------------------------------------------------------------------------------------- row functions


@dataclasses.dataclass
class Reading:
    sensor: int
    value: int


def add(old: Reading, new: Reading) -> Reading:
    old.value += new.value  # of what reduce keeps, and never of what it has emitted
    return old


def test_reduce_emits_what_each_row_makes_of_its_key() -> None:
    with hf.testing.Job() as job:
        feed = job.input("readings", Reading)
        out = job.output(feed.stream.key_by("sensor").reduce(add).uid("sum"))
        job.start()
        feed.add([Reading(1, 2), Reading(2, 10), Reading(1, 3)], at=[5, 6, 7])
        assert out.take() == [(Reading(1, 2), 5), (Reading(2, 10), 6), (Reading(1, 5), 7)]


def test_map_with_state_emits_and_forgets_as_it_is_told() -> None:
    def changes(row: dict[str, Any], last: int | None) -> tuple[dict[str, Any] | None, int | None]:
        price = row["price"]
        return (None if price == last else row), price

    with bids(lambda keyed: keyed.map_with_state(changes, int, returns=BIDS)) as (job, feed, out):
        feed.add([bid(1, "ann", 5), bid(1, "bob", 5), bid(1, "cat", 6), bid(1, "dan", None), bid(1, "eve", 6)])
        assert [row["bidder"] for row in out.rows()] == ["ann", "cat", "dan", "eve"]
        feed.add(bid(1, "fay", None))
        job.checkpoint()
        assert job.state("table")["value"] == []


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (lambda keyed: keyed.map_with_state(lambda row, value: row, int), "must return a pair"),
        (lambda keyed: keyed.map_with_state(lambda row, value: 1 / 0, int), "ZeroDivisionError"),
        (lambda keyed: keyed.reduce(lambda old, row: old.get("nothing")), "returned None, not a row"),
    ],
)
def test_a_function_that_fails_is_named_with_its_record(tables: Tables, message: str) -> None:
    with bids(tables) as (_, feed, _), pytest.raises(hf.UserFunctionError, match=message) as failure:
        feed.add([bid(1, "ann", 5), bid(1, "bob", 6)])
    assert "lambda" in str(failure.value.function)
    assert failure.value.operator == "table"


def test_the_top_of_each_window_comes_once_over_a_crash_and_a_rescale() -> None:
    with hf.testing.Job(parallelism=2, state_backend="filesystem") as job:
        feed = job.input("bids", BIDS)
        windowed = feed.stream.key_by("auction").window(hf.Tumbling(10)).side_output_late("late")
        highest = windowed.top(2, by="price", rank_column="place").uid("highest")
        out, late = job.output(highest), job.output(highest.side_output("late"))
        job.start()
        feed.add([bid(1, "ann", 5), bid(1, "bob", 9), bid(2, "cat", 7)], at=[1, 2, 3])
        job.checkpoint()
        job.restart(parallelism=3, state_backend="rocksdb")
        feed.add([bid(1, "dan", 6), bid(1, "eve", None), bid(2, "fay", 1)], at=[9, 4, 12])
        assert out.take() == []
        feed.watermark(9)
        found = [(row["auction"], row["bidder"], row["place"], row["window_start"].microsecond, time) for row, time in out.take()]
        assert sorted(found) == [(1, "bob", 1, 0, 9), (1, "dan", 2, 0, 9), (2, "cat", 1, 0, 9)]
        feed.add(bid(1, "gus", 99), at=8)
        assert late.take() == [(bid(1, "gus", 99), 8)]
        feed.end()
        assert [(row["bidder"], row["place"], time) for row, time in out.take()] == [("fay", 1, 19)]


def test_the_top_of_each_window_over_all_keys() -> None:
    with hf.testing.Job(parallelism=2) as job:
        feed = job.input("bids", {**BIDS, "key": int})  # as the state calls its own key
        out = job.output(feed.stream.window_all(hf.Sliding(10, 5)).top(1, by=["price", "auction"]).uid("highest"))
        job.start()
        rows = [bid(1, "ann", 5), bid(2, "bob", 9), bid(3, "cat", 9), bid(4, "dan", 8)]
        feed.add([{**row, "key": 7} for row in rows], at=[6, 7, 8, 12])
        feed.end()
        found = sorted((row["bidder"], row["key"], time) for row, time in out.take())
    assert found == [("cat", 7, 9), ("cat", 7, 14), ("dan", 7, 19)]


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (lambda keyed: keyed.window(hf.Session(10)), "takes tumbling and sliding windows of event time"),
        (lambda keyed: keyed.window(hf.Tumbling(10, time="processing")), "takes tumbling and sliding windows of event time"),
        (lambda keyed: keyed.window(hf.Tumbling(10)).allowed_lateness(5), "takes no lateness, such as 5"),
        (lambda keyed: keyed.window(hf.Tumbling(10)).trigger(hf.CountTrigger(5)), "takes no trigger"),
        (lambda keyed: keyed.window(hf.Sliding(5_000, 1)), "in more than 1,000 windows"),
    ],
)
def test_windows_without_a_top_are_refused(window: Callable[[KeyedStream], Any], message: str) -> None:
    with pytest.raises(hf.GraphError, match=f"operator 'window': top: .*{message}"):
        refused(lambda keyed: window(keyed).top(1, by="price"))
    with pytest.raises(hf.UnknownColumnError):
        refused(lambda keyed: keyed.window(hf.Tumbling(10)).top(1, by="prize"))


# --------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (lambda keyed: keyed.top(0, by="price"), "operator 'top': n must be 1"),
        (lambda keyed: keyed.top(True, by="price"), "operator 'top': n must be 1"),
        (lambda keyed: keyed.top(1, by=[]), "operator 'top': by must name distinct columns"),
        (lambda keyed: keyed.top(1, by=["price", "price"]), "operator 'top': by must name distinct columns"),
        (lambda keyed: keyed.top(1, by="price", descending=[True, False]), "operator 'top': descending must be"),
        (lambda keyed: keyed.top(1, by="price", ties="first"), "operator 'top': ties must be 'earlier' or 'later'"),
        (lambda keyed: keyed.top(1, by="price", rank_column="bidder"), "operator 'top': two columns .* 'bidder'"),
        (lambda keyed: keyed.top(1, by="price", rank_column=""), "operator 'top': rank_column"),
        (lambda keyed: keyed.deduplicate(keep="newest"), "operator 'deduplicate': keep must be"),
        (lambda keyed: keyed.deduplicate(ttl=0), "operator 'deduplicate': .*at least 1 ms"),
        (lambda keyed: keyed.reduce(3), "operator 'reduce': 3 is not a function"),
        (lambda keyed: keyed.map_with_state(None, int), "operator 'map_with_state': None is not a function"),
        (lambda keyed: keyed.reduce(max, ttl=-1), "operator 'reduce': .*at least 1 ms"),
    ],
)
def test_what_makes_no_sense_is_refused_when_the_graph_is_built(tables: Tables, message: str) -> None:
    with pytest.raises((hf.GraphError, hf.InvalidConfigError), match=message):
        refused(tables)


@pytest.mark.parametrize("kind", ["top", "deduplicate", "max_by", "min_by"])
def test_a_column_must_be_there_and_have_an_order(kind: str) -> None:
    def table(column: str) -> Tables:
        calls: dict[str, Tables] = {
            "top": lambda keyed: keyed.top(1, by=column),
            "deduplicate": lambda keyed: keyed.deduplicate(keep="last", by=column),
            "max_by": lambda keyed: keyed.max_by(column),
            "min_by": lambda keyed: keyed.min_by(column),
        }
        return calls[kind]

    with pytest.raises(hf.UnknownColumnError, match=f"operator '{kind}': there is no column 'nothing'"):
        refused(table("nothing"))
    types = pa.schema({"auction": pa.int64(), "tags": pa.list_(pa.string())})
    with pytest.raises(hf.GraphError, match=f"operator '{kind}': column 'tags' is list<.*no order"):
        refused(table("tags"), types)
    with pytest.raises(hf.GraphError, match=f"operator '{kind}'.*no declared columns"), hf.testing.Job() as job:
        table("price")(job.input("bids").stream.key_by(lambda row: 1, key_type=int))


def test_without_keys_there_are_no_tables() -> None:
    assert not {"top", "deduplicate", "max_by", "min_by", "reduce", "map_with_state"} & set(vars(Stream))
