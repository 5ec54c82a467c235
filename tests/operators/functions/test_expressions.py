"""SQL expressions: what is refused when the graph is built, values and types as plain DuckDB gives them over the whole table,
whatever the batches, and errors that name the row."""

from __future__ import annotations

import math
import pickle
import sys
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.operators.functions.expressions import Expressions, predicate_of
from holdfast.operators.functions.sql import EXPRESSION_CHARACTERS_MAX

BIDS = pa.schema(
    {
        "auction": pa.int64(),
        "price": pa.int64(),
        "channel": pa.string(),
        "at": pa.timestamp("us", "UTC"),
        "rate": pa.float64(),
        "fee": pa.decimal128(9, 2),
        "day": pa.date32(),
        "tags": pa.list_(pa.string()),
        "who": pa.struct({"name": pa.string()}),
        "kind": pa.dictionary(pa.int32(), pa.string()),
    }
)


def expressions(*texts: str, schema: pa.Schema = BIDS) -> Expressions:
    return Expressions({f"c{index}": text for index, text in enumerate(texts)}, schema, "select")


def stream(schema: pa.Schema = BIDS) -> hf.Stream:
    return hf.Environment("test").from_collection([], returns=schema)


# ------------------------------------------------------------------------------------------------------------------ refused

REFUSED = {
    "sum(price)": "across rows",
    "sum(price) filter (where price > 1)": "across rows",
    "count(*)": "across rows",
    "geomean(price)": "across rows",
    "row_number() over ()": "window function",
    "lag(price)": "across rows",
    "sum(price) over ()": "window function",
    "(select 1)": "subquery",
    "exists(select 1)": "subquery",
    "price in (select 1)": "subquery",
    "case when price > 1 then (select max(price) from bids) end": "subquery",
    "unnest(tags)": "makes rows",
    "generate_subscripts(tags, 1)": "makes rows",
    "read_text('/etc/passwd')": "makes rows",
    "duckdb_settings()": "makes rows",
    "random()": "does not follow",
    "list_transform([1], lambda x: random())": "does not follow",
    "coalesce(price, cast(random() as int))": "does not follow",
    "setseed(0.5)": "does not follow",
    "now()": "does not follow",
    "today()": "does not follow",
    "current_date": "does not follow",
    "current_timestamp": "does not follow",
    "current_localtimestamp()": "does not follow",
    "localtimestamp": "does not follow",
    "get_current_timestamp()": "does not follow",
    "ago(interval 1 day)": "current_timestamp",
    "age(at)": "reads the clock",
    "uuid()": "does not follow",
    "nextval('s')": "does not follow",
    "getenv('HOME')": "does not follow",
    "version()": "does not follow",
    "current_setting('threads')": "does not follow",
    "getvariable('x')": "does not follow",
    "pg_sleep(1)": "does not follow",
    "error('x')": "does not follow",
    "no_such(price)": "no such function",
    "*": "name the columns",
    "columns('a')": "name the columns",
    "?": "a parameter",
    "#1": "by position",
    "price as p": "more than one expression",
    "price p": "more than one expression",
    "1 from bids": "more than one expression",
    "1 where true": "more than one expression",
    "1 limit 1": "more than one expression",
    "distinct price": "more than one expression",
    "1 union select 2": "more than one expression",
    "1, 2": "more than one expression",
    "1; select 2": "more than one expression",
    "1; drop table x": "SELECT",
    "1) , (2": "syntax error",
    "price +": "syntax error",
    "/* price": "comment",
    "": "characters",
    "x" * (EXPRESSION_CHARACTERS_MAX + 1): "characters",
    "\ud800": "half a character",
    "(" * 3_000 + "1" + ")" * 3_000: "depth",
    "price + channel || 1": "GraphError|Binder|Conversion|operator",
    "interval 1 day": "INTERVAL, which has no column type; cast it to VARCHAR",
    "price::hugeint": r"HUGEINT, which has no column type; cast it to DECIMAL\(38, 0\)",
    "null": "no column type",
    "fee.x": "Binder",
}


@pytest.mark.parametrize("text", [*REFUSED])
def test_what_is_no_expression_of_one_row_is_refused_when_the_graph_is_built(text: str) -> None:
    with pytest.raises(hf.GraphError, match=REFUSED[text]) as caught:
        stream().select("price", c0=text)
    assert caught.value.operator == "select"
    assert caught.value.expression == f"c0 = {text!r}"
    assert text in str(caught.value) or repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["nope", "bids.price", "\"holdfast input\".price", "rowid", "price = 1 and nope = 2", "PRAGMA"])
def test_a_column_that_is_not_there_is_named_and_tables_have_no_names(text: str) -> None:
    with pytest.raises(hf.UnknownColumnError, match=r"operator 'filter': .*available: auction, price") as caught:
        stream().filter(text)
    assert caught.value.expression == repr(text)


@pytest.mark.parametrize("text", ["set x = 1", "PRAGMA version", "COPY bids TO 'x'", "ATTACH 'x'", "INSTALL httpfs"])
def test_statements_are_no_expressions(text: str) -> None:
    with pytest.raises(hf.GraphError):
        stream().filter(text)


def test_other_mistakes_are_told_when_the_graph_is_built() -> None:
    with pytest.raises(hf.GraphError, match=r"operator 'filter': 'price': a condition is BOOLEAN, and this is int64"):
        stream().filter("price")
    with pytest.raises(hf.GraphError, match="name at least one column"):
        stream().select()
    with pytest.raises(hf.GraphError, match="two columns have one name: price, price"):
        stream().select("price", price="1")
    with pytest.raises(hf.UnknownColumnError, match="'prise'"):
        stream().select("prise")
    with pytest.raises(hf.GraphError, match="on_error"):
        stream().select("price", on_error="never")
    with pytest.raises(hf.GraphError, match="differ in case alone"):
        expressions("a + A", schema=pa.schema({"a": pa.int64(), "A": pa.int64()}))
    with pytest.raises(hf.GraphError, match="cast nanoseconds"):
        expressions("at", schema=pa.schema({"at": pa.timestamp("ns", "UTC")}))
    undeclared = stream().map(lambda row: row)
    for call in (lambda: undeclared.select("price"), lambda: undeclared.filter("price > 1")):
        with pytest.raises(hf.GraphError, match="declared columns"):
            call()


def test_without_duckdb_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(hf.InvalidConfigError, match=r"pip install 'holdfast\[sql\]'") as caught:
        stream().filter("price > 1")
    assert caught.value.package == "duckdb"


def test_an_older_duckdb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duckdb, "__version__", "1.4.4")
    with pytest.raises(hf.InvalidConfigError, match=r"need DuckDB 2, not 1\.4\.4, here and on the executors"):
        stream().select(c0="price + 1")


def test_a_select_of_columns_alone_needs_no_duckdb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert stream().select("price", "auction").schema == pa.schema([BIDS.field("price"), BIDS.field("auction")])


def test_columns_as_they_are_go_past_duckdb_and_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = pa.schema({"price": pa.int64(), "at": pa.timestamp("ms", "UTC"), "is_hot": pa.bool_()})
    rows = pa.RecordBatch.from_pylist([{"price": 3, "at": 5, "is_hot": True}, {"price": 4, "at": None, "is_hot": None}], schema)
    mixed = expressions("price", "price + 1", "PRICE", "at", schema=schema)
    made = mixed.evaluate(rows)
    assert made.to_pydict() == {"c0": [3, 4], "c1": [4, 5], "c2": [3, 4], "c3": rows.column("at").to_pylist()}
    assert made.column("c0").buffers()[1].address == rows.column("price").buffers()[1].address
    assert made.schema.field("c3").type == pa.timestamp("us", "UTC")  # as DuckDB has it
    mixed.close()
    alone = pickle.dumps((expressions("price", " is_hot ", schema=schema), predicate_of("is_hot", schema, "filter")))
    monkeypatch.setitem(sys.modules, "duckdb", None)
    found, condition = pickle.loads(alone)
    found.open()
    assert found.evaluate(rows).to_pydict() == {"c0": [3, 4], "c1": [True, None]}
    assert condition.mask(rows).tolist() == [True, False]


# -------------------------------------------------------------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("text", "data_type"),
    [
        ("price * 0.908", pa.decimal128(23, 3)),
        ("price * 0.908::double", pa.float64()),
        ("strftime(at, '%Y-%m-%d')", pa.string()),
        ("at", pa.timestamp("us", "UTC")),
        ("at at time zone 'Europe/Berlin'", pa.timestamp("us")),
        ("date_trunc('hour', at)", pa.timestamp("us", "UTC")),
        ("at::date", pa.date32()),
        ("fee * 2", pa.decimal128(18, 2)),
        ("price::utinyint", pa.uint8()),
        ("'x'::blob", pa.binary()),
        ("tags[1]", pa.string()),
        ("list_transform(tags, lambda t: len(t))", pa.list_(pa.int64())),
        ("who.name", pa.string()),
        ("{'a': price}", pa.struct({"a": pa.int64()})),
        ("kind", pa.string()),
        ("PRICE + 1 -- a comment", pa.int64()),
        ("channel ->> '$.a'", pa.string()),
        ("1", pa.int32()),
        ("nullif(split_part(channel, 'p', 1), '')", pa.string()),
    ],
)
def test_types_are_known_when_the_graph_is_built_and_hold(text: str, data_type: pa.DataType) -> None:
    found = expressions(text)
    assert found.schema == pa.schema({"c0": data_type})
    rows = pa.RecordBatch.from_pylist(
        [{"price": 7, "channel": "null", "at": datetime(2026, 3, 1, tzinfo=UTC), "fee": Decimal("1.50"), "tags": ["x"]}, {}],
        schema=BIDS,
    )
    result = found.evaluate(rows)
    assert (result.schema, result.num_rows) == (found.schema, 2)
    found.close()


def test_times_are_utc_wherever_the_worker_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    rows = pa.RecordBatch.from_pylist([{"at": datetime(2026, 3, 1, 23, 30, tzinfo=UTC)}], schema=BIDS)
    assert expressions("strftime(at, '%d %H')").evaluate(rows).column(0).to_pylist() == ["01 23"]


def test_the_connection_reaches_nothing_and_stays_so() -> None:
    found = expressions("price + 1")
    found.open()
    assert found._connection is not None
    for statement in ("COPY (SELECT 1) TO '/tmp/x.csv'", "SELECT * FROM read_csv('/etc/passwd')", "LOAD httpfs", "SET threads = 4"):
        with pytest.raises(duckdb.Error):
            found._connection.execute(statement)
    found.close()


def test_columns_called_like_keywords_need_no_quotes() -> None:
    schema = pa.schema({"at": pa.timestamp("us", "UTC"), "select": pa.int64(), "order": pa.int64()})
    found = expressions("at at time zone 'UTC'", "select + \"order\"", "strftime(at, '%Y é at') || 'at'", schema=schema)
    rows = pa.RecordBatch.from_pylist([{"at": datetime(2026, 1, 1, tzinfo=UTC), "select": 1, "order": 2}], schema=schema)
    assert found.evaluate(rows).to_pylist() == [{"c0": datetime(2026, 1, 1), "c1": 3, "c2": "2026 é atat"}]


def test_columns_of_equal_names_but_for_case_are_told_apart() -> None:
    schema = pa.schema({"a": pa.int64(), "A": pa.string()})
    found = expressions("A", schema=schema)
    assert found.evaluate(pa.RecordBatch.from_pylist([{"a": 1, "A": "x"}], schema=schema)).to_pylist() == [{"c0": "x"}]


# ------------------------------------------------------------------------------------------------------------------- values

TEXTS = (
    "price * 0.908",
    "price // 7 + auction % 3",
    "case when price > 50 then channel else upper(channel) end",
    "strftime(at, '%Y-%m-%d')",
    "date_trunc('day', at)",
    "coalesce(fee * 2, 0)",
    "rate / price",
    "rate > 0.5 or channel like 'a%'",
    "price between 10 and 20 and channel <> 'b'",
    "try_cast(channel as int)",
    "day + 1",
    "list_transform(tags, lambda t: t || channel)",
    "length(channel) is distinct from price",
)
_ROWS = st.fixed_dictionaries(
    {
        "auction": st.integers(-5, 5),
        "price": st.none() | st.integers(-100, 100),
        "channel": st.none() | st.sampled_from(["", "a", "b", "apple", "12", "é"]),
        "at": st.none() | st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)),
        "rate": st.none() | st.floats(-1, 1),
        "fee": st.none() | st.decimals(-1000, 1000, places=2),
        "day": st.none() | st.dates(datetime(1970, 1, 1).date(), datetime(2100, 1, 1).date()),
        "tags": st.none() | st.lists(st.sampled_from(["x", "y"]), max_size=2),
    }
)


def plain(table: pa.Table, *texts: str) -> list[tuple[Any, ...]]:
    with duckdb.connect(":memory:") as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("bids", table)
        listed = ", ".join(text.replace("(at,", '("at",').replace(", at)", ', "at")') for text in texts)
        return connection.sql(f"SELECT {listed} FROM bids").fetchall()


COMPILED = expressions(*TEXTS)
CONDITION = predicate_of("price < 50 and (channel = 'apple' or rate > 0)", BIDS, "filter")


def _comparable(value: Any) -> Any:
    """NaN is not equal to itself."""
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


@given(st.lists(_ROWS, min_size=1, max_size=40), st.integers(1, 41))
def test_values_equal_plain_duckdb_s_over_the_whole_table_wherever_batches_end(rows: list[dict[str, Any]], size: int) -> None:
    columns = pa.RecordBatch.from_pylist(rows, schema=BIDS)
    parts = [columns.slice(start, size) for start in range(0, len(rows), size)]
    table = pa.Table.from_batches([COMPILED.evaluate(part) for part in parts])
    expected = plain(pa.Table.from_batches([columns]), *TEXTS)
    same_clock = [tuple(each.astimezone(UTC) if getattr(each, "tzinfo", None) else each for each in row) for row in expected]
    found = list(zip(*table.to_pydict().values(), strict=True))
    assert [[_comparable(each) for each in row] for row in found] == [[_comparable(each) for each in row] for row in same_clock]
    mask = np.concatenate([CONDITION.mask(part) for part in parts])
    (text,) = [each.text for each in CONDITION.expressions.expressions]
    assert mask.tolist() == [bool(met) for (met,) in plain(pa.Table.from_batches([columns]), text)]


# ------------------------------------------------------------------------------------------------------------------- errors


@given(st.lists(st.sampled_from(["1", "22", "x", "", "7"]), min_size=1, max_size=30), st.integers(1, 31))
def test_each_row_without_a_result_is_found_wherever_batches_end(values: list[str], size: int) -> None:
    found = NUMBERS
    columns = pa.RecordBatch.from_pylist([{"s": value} for value in values], schema=TEXT)
    bad = [position for position, value in enumerate(values) if not value.isdigit()]
    positions = [
        start + position
        for start in range(0, len(values), size)
        for position, _ in found.failing(columns.slice(start, size))
    ]
    assert positions == bad


TEXT = pa.schema({"s": pa.string()})
NUMBERS = expressions("s || '0'", "cast(s as int)", schema=TEXT)


def test_a_guard_does_not_depend_on_the_rows_beside() -> None:
    """A conjunction computes both sides for every row: whether it fails is a matter of the row alone."""
    condition = predicate_of("s <> '' and cast(s as int) > 1", TEXT, "filter")
    guarded = predicate_of("case when s <> '' then cast(s as int) > 1 end", TEXT, "filter")
    for rows in ([{"s": ""}], [{"s": ""}, {"s": "5"}], [{"s": "5"}] * 5_000 + [{"s": ""}]):
        columns = pa.RecordBatch.from_pylist(rows, schema=TEXT)
        with pytest.raises(hf.UserFunctionError, match=r"record \{'s': ''\}"):
            condition.mask(columns)
        assert guarded.mask(columns).tolist() == [row["s"] == "5" for row in rows]


def test_a_condition_travels_and_names_operator_expression_and_record() -> None:
    condition = pickle.loads(pickle.dumps(predicate_of("cast(s as int) > 1", TEXT, "count(where=)")))
    assert condition.columns == ("s",)
    columns = pa.RecordBatch.from_pylist([{"s": "5"}, {"s": "x"}, {"s": "y"}], schema=TEXT)
    with pytest.raises(hf.UserFunctionError) as caught:
        condition.mask(columns, subtask=3)
    error = caught.value
    assert (error.operator, error.subtask, error.record) == ("count(where=)", 3, "{'s': 'x'}")
    assert "operator 'count(where=)', subtask 3: 'cast(s as int) > 1' failed: Conversion Error: Could not" in str(error)
    assert condition.mask(columns.slice(0, 1)).tolist() == [True]
    again = pickle.loads(pickle.dumps(condition))  # one that has a connection
    condition.close()
    assert again.mask(columns.slice(0, 1)).tolist() == [True]
    assert condition.mask(columns.slice(0, 1)).tolist() == [True]


# --------------------------------------------------------------------------------------------------------------------- jobs

ROWS = {"id": int, "price": int, "text": str}


def converted(bids: hf.Stream) -> hf.Stream:
    cheap = bids.filter("price < 10000 and text <> 'no'").uid("cheap")
    return cheap.select("id", on_error="skip", doubled="price * 2", number="cast(text as int)").uid("converted")


@pytest.mark.parametrize("batch_rows", [1, 7, 65_536])
def test_a_job_keeps_times_leaves_failing_rows_out_and_goes_on_after_a_restore(batch_rows: int) -> None:
    with hf.testing.Job(parallelism=2, batch_rows=batch_rows) as job:
        feed = job.input("bids", ROWS)
        out = job.output(converted(feed.stream))
        job.start()
        feed.add([{"id": n, "price": n * 1000, "text": "x" if n == 3 else str(n)} for n in range(20)], at=range(100, 120))
        progress = job.progress("converted")
        assert progress.rows_skipped == 1
        assert "operator 'converted'" in progress.first_skipped
        assert "number = 'cast(text as int)' failed" in progress.first_skipped
        job.checkpoint()
        job.restart(parallelism=3)
        feed.add({"id": 30, "price": 1, "text": "no"}, at=130)
        feed.add({"id": 31, "price": 1, "text": "31"}, at=131)
        job.fail()
        job.checkpoint()
        expected = [({"id": n, "doubled": n * 2000, "number": n}, 100 + n) for n in range(10) if n != 3]
        assert sorted(out.committed(), key=str) == sorted([*expected, ({"id": 31, "doubled": 2, "number": 31}, 131)], key=str)


def test_a_job_fails_on_the_first_such_row_unless_it_skips() -> None:
    with hf.testing.Job() as job:
        feed = job.input("bids", ROWS)
        job.output(feed.stream.filter("9223372036854775807 - price + id > 0").uid("room"))
        job.start()
        with pytest.raises(hf.UserFunctionError, match=r"operator 'room', subtask 0: .* failed: Out of Range Error") as caught:
            feed.add([{"id": 1, "price": 5, "text": ""}, {"id": 7, "price": 2, "text": ""}, {"id": 9, "price": 3, "text": ""}])
        assert caught.value.record == "{'id': 7, 'price': 2}"


def test_a_limit_of_skipped_rows_holds() -> None:
    with hf.testing.Job(skipped_rows_max=2) as job:
        feed = job.input("bids", ROWS)
        job.output(feed.stream.filter("cast(text as int) > 0", on_error="skip").uid("numbers"))
        job.start()
        with pytest.raises(hf.TooManyRowsSkippedError):
            feed.add([{"id": n, "price": n, "text": "x"} for n in range(3)])
