"""Lookup joins: what is asked and what is kept, which rows come out, and that rows in flight are state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.functions.joins import lookup
from holdfast.operators.functions.joins.lookup import CacheSettings, LookupCache, LookupJoinOperator, check_lookup, function_lookup
from holdfast.operators.functions.schema import declared_type
from holdfast.statebackends.errors import GraphError, UserFunctionError
from tests.examples import examples
from tests.operators.ends import NamedSource
from tests.operators.harness import OperatorHarness

ORDERS = declared_type({"id": int, "user": str | None}, "orders")
USERS = {"name": str | None, "age": int}
KNOWN = {"a": {"name": "ann", "age": 1}, "b": [{"name": "bob", "age": 2}, {"name": "ben", "age": 3}], "n": {"name": None, "age": 4}}


def found(keys: list[str]) -> dict[str, Any]:
    return {key: KNOWN[key] for key in keys if key in KNOWN}


def operator(
    function: Any = found, how: str = "inner", *, cache_rows: int = 0, ttl_ms: int | None = None, **given: Any
) -> LookupJoinOperator:
    cache = check_lookup(how, cache_rows, ttl_ms, "op")
    asking = {"ordered": True, "capacity": 4, "timeout_ms": 1_000, "retry": None, "batch_rows": 3, "skips": False}
    return function_lookup(function, ORDERS, "user", how, USERS, None, cache, "op", **{**asking, **given})


class Calls(OperatorHarness):
    """A harness whose calls a test answers."""

    def put(self, *users: str | None, first: int = 0, at: int | None = None) -> None:
        rows = [{"id": first + number, "user": user} for number, user in enumerate(users)]
        self.process(rows, None if at is None else [at] * len(rows), ORDERS.schema)

    @property
    def asked(self) -> list[Any]:
        return [call.argument for call, _ in self.pool.calls]

    def answer(self, which: int = 0, error: Exception | None = None) -> None:
        call, ended = self.pool.calls.pop(which)
        ended(None if error else call.function(call.argument), error)
        self.turn()

    def turn(self, after_ms: int = 0) -> None:
        self.clock.now_ms += after_ms
        while (mail := self.context.mailbox.take()) is not None:
            mail.done(mail.result, mail.error)  # type: ignore[union-attr]
        while (due := self.operator.next_processing_time_ms()) is not None and due <= self.clock.now_ms:
            for _ in self.operator.process_processing_time(self.clock.now_ms):
                pass

    def out(self) -> list[Any]:
        rows = [(row["user"], row["id"], row["name"], row["age"]) for row in self.output.rows()]
        self.output.clear()
        return rows


@pytest.mark.parametrize("function", [found, lambda keys: [KNOWN.get(key) for key in keys]])
def test_each_key_of_a_call_is_asked_for_once_and_rows_keep_their_order(function: Any) -> None:
    with Calls(operator(function, "left")) as calls:
        calls.put("b", "a", "b", None, "x", at=7)
        assert calls.asked == [["b", "a"], ["x"]]
        calls.answer(1)
        assert calls.out() == []
        calls.answer()
        assert set(calls.output.timestamps()) == {7}
        assert calls.out() == [
            *(("b", 0, "bob", 2), ("b", 0, "ben", 3), ("a", 1, "ann", 1), ("b", 2, "bob", 2), ("b", 2, "ben", 3)),
            *((None, 3, None, None), ("x", 4, None, None)),
        ]


def test_an_inner_join_leaves_out_rows_without_a_match() -> None:
    with Calls(operator()) as calls:
        calls.put("x", None, "n")
        calls.answer()
        assert calls.out() == [("n", 2, None, 4)]
        calls.put(None, "x")
        calls.answer()
        assert calls.output.elements == []


def test_what_is_kept_is_not_asked_for_again_until_it_is_too_old_or_pushed_out() -> None:
    with Calls(operator(cache_rows=3, ttl_ms=100)) as calls:
        calls.put("a", "b")
        calls.answer()
        calls.put("b", "x", first=10)
        assert calls.asked == [["x"]]
        calls.answer()  # three rows, and a key without one: a goes
        assert [row[1] for row in calls.out()] == [0, 1, 1, 10, 10]
        calls.put("b", "x")
        assert calls.asked == []
        calls.turn()
        assert [row[2] for row in calls.out()] == ["bob", "ben"]
        calls.put("a", "x")
        assert calls.asked == [["a"]]
        calls.answer()
        calls.turn(after_ms=100)
        calls.put("x")
        assert calls.asked == [["x"]]


def test_unordered_a_request_that_is_answered_by_the_cache_leaves_at_once() -> None:
    with Calls(operator(cache_rows=10, ordered=False, batch_rows=1)) as calls:
        calls.put("a")
        calls.answer()
        calls.output.clear()
        calls.put("b", "a", first=1)
        calls.turn()
        assert calls.out() == [("a", 2, "ann", 1)]
        calls.answer()
        assert [row[2] for row in calls.out()] == ["bob", "ben"]


def test_rows_in_flight_are_asked_for_again_after_a_restore() -> None:
    made = operator(how="left", cache_rows=10)
    with Calls(made) as calls:
        calls.put("a", "x", "b", "n", at=5)
        calls.answer()
        before = calls.out()
        cut = calls.snapshot()
    with Calls.restored(made, [cut]) as calls:
        assert calls.asked == [["n"]]
        calls.answer()
        assert [*before, *calls.out()][-1] == ("n", 3, None, 4)
        assert calls.output.elements == []


def test_a_failed_call_is_tried_again_and_then_names_the_operator() -> None:
    with Calls(operator(retry=hf.RetryStrategy(attempts_max=2, delay_ms=10))) as calls:
        calls.put("a")
        calls.answer(error=OSError("gone"))
        calls.turn(after_ms=10)
        assert calls.asked == [["a"]]
        with pytest.raises(UserFunctionError, match="gone") as raised:
            calls.answer(error=OSError("gone"))
        assert raised.value.operator == "op"


@pytest.mark.parametrize("answer", [None, [], [1, 2], "ab"])
def test_an_answer_that_is_neither_a_mapping_nor_a_list_of_as_many_is_refused(answer: Any) -> None:
    with Calls(operator(lambda keys: answer)) as calls:
        calls.put("a")
        with pytest.raises(UserFunctionError, match="it must return a mapping of keys to rows"):
            calls.answer()


def test_a_found_row_that_does_not_fit_names_the_operator() -> None:
    with Calls(operator(lambda keys: {"a": {"name": "ann", "age": "old"}})) as calls:
        calls.put("a")
        with pytest.raises(hf.SchemaMismatchError, match="'op'"):
            calls.answer()


def test_the_cache_counts_rows_and_keeps_no_answer_that_is_larger() -> None:
    cache = LookupCache(CacheSettings(rows_max=3))
    cache.put("a", [1, 2, 3, 4], 0)
    assert (cache.get("a", 0), len(cache)) == (None, 0)
    cache.put("a", [1, 2], 0)
    cache.put("none", [], 0)
    assert (cache.get("a", 0), len(cache)) == ([1, 2], 3)
    cache.put("b", [1], 0)
    assert (cache.get("none", 0), cache.get("a", 0), len(cache)) == (None, [1, 2], 3)
    cache.put("a", [5], 0)
    assert (cache.get("a", 0), len(cache)) == ([5], 2)


# --------------------------------------------------------------------------------------------------------- whole jobs

TABLE = pa.table({"code": ["a", "b", None, "b"], "name": ["ann", "bob", "nobody", None]})


@pytest.mark.parametrize("batch_rows", [1, 65_536])
def test_lookups_go_on_anywhere(batch_rows: int) -> None:
    with hf.testing.Job(parallelism=2, batch_rows=batch_rows) as job:
        orders = job.input("orders", {"id": int, "user": str | None})
        asked = orders.stream.lookup_join(found, on="user", how="left", returns=USERS, cache_rows=100, cache_ttl_ms=1_000)
        both = asked.uid("asked").lookup_join(TABLE, on=("user", "code"), how="left", suffixes=("", "_of_table")).uid("table")
        assert both.schema is not None
        assert both.schema.names == ["user", "id", "name", "age", "name_of_table"]
        out = job.output(both)
        job.start()
        orders.add([{"id": 1, "user": "a"}, {"id": 2, "user": None}])
        job.checkpoint()
        job.restart(parallelism=3)
        orders.add([{"id": 3, "user": "b"}, {"id": 4, "user": "x"}])
        orders.end()
        rows = sorted(tuple(map(str, row.values())) for row, _ in out.take())
        assert rows == [
            ("None", "2", "None", "None", "None"),
            ("a", "1", "ann", "1", "ann"),
            *(("b", "3", name, age, other) for name, age in (("ben", "3"), ("bob", "2")) for other in ("None", "bob")),
            ("x", "4", "None", "None", "None"),
        ]


def test_many_matches_of_a_key_are_made_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a table and of a function, with rows that have none in between."""
    monkeypatch.setattr(lookup, "ROWS_PER_BATCH_MAX", 4)
    monkeypatch.setattr(lookup, "ROWS_AT_ONCE_MAX", 50)
    many = [{"name": str(n), "age": n} for n in range(11)]
    users = ["a", "x", "b", None, "a", "y"]
    matches = {"a": many, "b": many[:1]}
    found = [(user, number, row) for number, user in enumerate(users) for row in matches.get(str(user), [NONE])]
    expected = [(user, number, row["name"], row["age"]) for user, number, row in found]
    table = pa.Table.from_pylist([{"code": key, **row} for key, rows in matches.items() for row in rows])
    stream = Environment("job", parallelism=1).from_source(NamedSource(ORDERS.schema))
    made = stream.lookup_join(table, on=("user", "code"), how="left")._own("test").operator
    assert made is not None
    with Calls(made) as calls:
        calls.put(*users)
        assert [batch.num_rows for batch in calls.output.batches][:2] == [4, 4]
        assert max(batch.num_rows for batch in calls.output.batches) <= 4 + len(users)
        assert calls.out() == expected
        calls.put(*["x", None] * 3)  # with no match at all
        assert [row[2] for row in calls.out()] == [None] * 6
    with Calls(operator(lambda keys: matches, "left", batch_rows=6)) as calls:
        calls.put(*users)
        calls.answer()
        assert max(batch.num_rows for batch in calls.output.batches) == 4
        assert calls.out() == expected


NONE: dict[str, Any] = {"name": None, "age": None}
KEYS = st.sampled_from((1, 2, 3, None))


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(KEYS, max_size=8), st.lists(KEYS, max_size=8), st.sampled_from(("inner", "left")))
def test_a_table_is_joined_as_by_sql(left: list[int | None], right: list[int | None], how: Any) -> None:
    rows = declared_type({"k": int | None, "n": int}, "op")
    looked_up = pa.table({"k": pa.array(right, pa.int64()), "v": pa.array(range(len(right)), pa.int64())})
    stream = Environment("job", parallelism=1).from_source(NamedSource(rows.schema)).lookup_join(looked_up, on="k", how=how)
    made = stream._own("test").operator
    assert made is not None
    with OperatorHarness(made) as harness:
        if left:
            harness.process([{"k": key, "n": number} for number, key in enumerate(left)], schema=rows.schema)
        shown = [tuple(row.values()) for row in harness.output.rows()]
    lefts = pa.table({"k": pa.array(left, pa.int64()), "n": pa.array(range(len(left)), pa.int64())})  # noqa: F841
    query = f"SELECT l.k, l.n, r.v FROM lefts l {how} JOIN looked_up r ON l.k = r.k ORDER BY l.n, r.v"
    assert shown == duckdb.sql(query).fetchall()


@pytest.mark.parametrize(
    ("join", "told"),
    [
        (lambda a: a.lookup_join(found, on="user"), "give returns="),
        (lambda a: a.lookup_join(found, on="user", returns=USERS, how="full"), "how is 'inner' or 'left', not 'full'"),
        (lambda a: a.lookup_join(5, on="user", returns=USERS), "5 is not a function"),
        (lambda a: a.lookup_join(found, on="name", returns=USERS), "no column 'name'"),
        (lambda a: a.lookup_join(found, on=("user", 5), returns=USERS), "on= is a column of the stream"),
        (lambda a: a.lookup_join(found, on="user", returns={"id": int}), "two columns of one name: id"),
        (lambda a: a.lookup_join(found, on="user", returns=USERS, cache_rows=-1), "cache_rows must be"),
        (lambda a: a.lookup_join(found, on="user", returns=USERS, cache_ttl_ms=5), "cache_ttl_ms needs cache_rows"),
        (lambda a: a.lookup_join(found, on="user", returns=USERS, cache_rows=1, cache_ttl_ms=0), "cache_ttl_ms must be at least 1"),
        (lambda a: a.lookup_join(found, on="user", returns=USERS, cache_rows=1, cache_ttl_ms="5"), "cache_ttl_ms must be a timed"),
        (lambda a: a.lookup_join(found, on="user", returns=USERS, capacity=0), "capacity must be"),
        (lambda a: a.lookup_join(found, on="user", returns=USERS, batch_rows=None), "batch_rows must be"),
        (lambda a: a.lookup_join(TABLE, on=("id", "code")), "keys have different types"),
        (lambda a: a.map(lambda row: row).lookup_join(found, on="user", returns=USERS), "needs columns"),
    ],
)
def test_a_bad_lookup_is_refused_when_the_graph_is_built(join: Callable[[Stream], Stream], told: str) -> None:
    stream = Environment("job", parallelism=1).from_source(NamedSource(ORDERS.schema))
    with pytest.raises(GraphError, match=told) as raised:
        join(stream)
    assert "'lookup_join'" in str(raised.value)
