"""Which rows fit a table of PostgreSQL, type by type, and which values; without a server."""

from __future__ import annotations

import datetime
import decimal
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.operators.connectors.postgres.catalog import literal, split_name
from holdfast.operators.connectors.postgres.table import TableColumn, TableFit, fit, misfit

UTC = pa.timestamp("us", "UTC")


def column(kind: str, **options: Any) -> TableColumn:
    return TableColumn("c", kind, kind, **options)


def numeric(precision: int, scale: int) -> TableColumn:
    return column("numeric", modifier=(precision << 16 | scale & 0x7FF) + 4)


FITS = [
    (pa.int16(), column("int2")),
    (pa.uint8(), column("int2")),
    (pa.int32(), column("int8")),
    (pa.uint32(), column("int8")),
    (pa.float32(), column("float8")),
    (pa.int32(), column("float8")),
    (pa.uint64(), column("numeric")),
    (pa.decimal128(10, 2), numeric(12, 2)),
    (pa.int16(), numeric(5, 0)),
    (pa.dictionary(pa.int8(), pa.string()), column("text")),
    (pa.large_string(), column("varchar", modifier=9)),
    (pa.string(), column("jsonb")),
    (pa.binary(16), column("uuid")),
    (pa.string(), column("mood", labels=("sad", "happy"))),
    (pa.timestamp("ms", "Europe/Berlin"), column("timestamptz")),
    (pa.list_(pa.int64()), column("_int8")),
    (pa.list_(pa.string()), column("_text")),
]
MISFITS = [
    (pa.int64(), column("int4"), "lose"),
    (pa.uint64(), column("int8"), "lose"),
    (pa.int64(), column("float8"), "lose"),
    (pa.float64(), column("float4"), "lose"),
    (pa.float64(), column("numeric"), "no decimal"),
    (pa.decimal128(10, 3), numeric(12, 2), "3 digits behind the point, the column 2"),
    (pa.decimal128(12, 2), numeric(10, 2), "10 digits before the point, the column 8"),
    (pa.int64(), column("text"), "means something else"),
    (pa.string(), column("int8"), "means something else"),
    (pa.timestamp("us"), column("timestamptz"), "no time zone"),
    (UTC, column("timestamp"), "time zone, which the column would drop"),
    (pa.string(), column("inet"), "are not written"),
    (pa.list_(pa.int32()), column("_int8"), "lose"),
]


@pytest.mark.parametrize(("given", "wanted"), FITS, ids=lambda each: str(getattr(each, "shown", each)))
def test_a_type_that_loses_nothing_fits(given: pa.DataType, wanted: TableColumn) -> None:
    assert misfit(given, wanted) is None


@pytest.mark.parametrize(("given", "wanted", "reason"), MISFITS, ids=lambda each: str(getattr(each, "shown", each)))
def test_a_type_that_would_lose_something_does_not(given: pa.DataType, wanted: TableColumn, reason: str) -> None:
    assert reason in (misfit(given, wanted) or "")


def fitted(given: pa.DataType, wanted: TableColumn, *, key: tuple[str, ...] = ()) -> TableFit:
    return fit("here", "public", "t", pa.schema([("c", given)]), [wanted], key=key, unwritten=None)


REFUSED = [
    ("a null, and the column has none", pa.array([1, None]), column("int8", not_null=True)),
    ("code 0", pa.array(["a", "b\0c"]), column("text")),
    ("code 0", pa.array(['{"a": "\\u0000"}']), column("jsonb")),
    ("more than 3 characters", pa.array(["ähm", None, "größe"]), column("varchar", modifier=7)),
    ("16,383 digits behind the point", pa.array(['{"a": "e-99999"}', '[1e-16384]']), column("jsonb")),
    ("16,383 digits behind the point", pa.array(["1e-9", f"-0.{'0' * 16_384}1"]), column("jsonb")),
    ("131,072 digits before the point", pa.array(["1e131071", '{"a": [1e131072]}']), column("jsonb")),
    ("131,072 digits before the point", pa.array([f"-{'9' * 131_073}"]), column("jsonb")),
    ("is no JSON", pa.array(['{"a":']), column("json")),
    *(("is no JSON", pa.array([text]), column("json")) for text in ("[1e400", "[1e400, 01]", "[1e400, 1.]", '[1e400, "\\q"]')),
    ("is no UUID", pa.array(["0123"]), column("uuid")),
    ("is none of sad, happy", pa.array(["sad", "glad"]), column("mood", labels=("sad", "happy"))),
    ("before 4713 BC", pa.array([-(2**62)], UTC), column("timestamptz")),
    ("no time of a day", pa.array([86_400_000_001], pa.int64()).cast(pa.time64("us")), column("time")),
    ("no time of a day", pa.array([-1], pa.int32()).cast(pa.time32("s")), column("time")),
    ("would result in data loss|out of bounds", pa.array([2**62], pa.timestamp("s")), column("timestamp")),
    ("too late", pa.array([2**31 - 1], pa.int32()).cast(pa.date32()), column("date")),
    ("code 0", pa.array([["a"], None, ["\0"]]), column("_text")),
]


@pytest.mark.parametrize(("reason", "values", "wanted"), REFUSED, ids=[each[0] for each in REFUSED])
def test_a_value_that_the_table_would_refuse_is_refused_before(reason: str, values: pa.Array, wanted: TableColumn) -> None:
    with pytest.raises(hf.InvalidRowError, match=reason) as raised:
        fitted(values.type, wanted).check_rows(pa.record_batch({"c": values}))
    assert raised.value.column == "c"


def test_a_refused_row_is_named_wherever_it_is() -> None:
    rows = pa.schema([("k", pa.int64()), ("c", pa.string()), ("t", pa.timestamp("s"))])
    columns = [TableColumn("k", "int8", "bigint", not_null=True), column("text"), TableColumn("t", "timestamp", "timestamp")]
    columns[1] = replace(columns[1], name="c")
    found = fit("here", "public", "t", rows, columns, key=("k",), unwritten=None)
    for row in (0, 1, 6, 99):
        batch = pa.record_batch({"k": range(100), "c": ["a"] * row + ["\0"] + ["a"] * (99 - row), "t": [2**62] * 100}, schema=rows)
        with pytest.raises(hf.InvalidRowError, match="column c of row") as raised:
            found.check_rows(batch)
        assert raised.value.record == f"{{'k': {row}, 'c': '\\x00', 't': {2**62}}}"
        if row:
            with pytest.raises(hf.InvalidRowError, match="column t of row"):
                found.check_rows(batch, np.arange(100) == row)
    keyless = pa.record_batch({"k": [1, None, 3], "c": ["a", "b", "c"], "t": [0, 0, 0]}, schema=rows)
    with pytest.raises(hf.InvalidKeyError, match=r"key column k has a null: row {'k': None, 'c': 'b'"):
        found.check_rows(keyless)


def test_a_key_is_not_null_and_what_is_deleted_needs_nothing_else() -> None:
    rows = pa.schema([("k", pa.int64()), ("c", pa.int64())])
    columns = [TableColumn("k", "int8", "bigint", not_null=True), TableColumn("c", "int8", "bigint", not_null=True)]
    found = fit("here", "public", "t", rows, columns, key=("k",), unwritten=None)
    with pytest.raises(hf.InvalidKeyError, match="key column k has a null"):
        found.check_rows(pa.record_batch({"k": [1, None], "c": [1, 2]}, schema=rows))
    batch = pa.record_batch({"k": [1, 2], "c": [1, None]}, schema=rows)
    with pytest.raises(hf.InvalidRowError, match=r"column c of row {'k': 2, 'c': None}: a null"):
        found.check_rows(batch)
    found.check_rows(batch, np.array([False, True]))


def test_columns_are_matched_by_name() -> None:
    rows = pa.schema([("a", pa.int64()), ("gone", pa.bool_())])
    columns = [TableColumn("a", "int8", "bigint"), TableColumn("id", "int8", "bigint", not_null=True, has_default=True)]
    assert [each.name for each in fit("here", "s", "t", rows, columns, key=(), unwritten="gone").columns] == ["a"]
    with pytest.raises(hf.InvalidConfigError, match="column gone: the table has no such column"):
        fit("here", "s", "t", rows, columns, key=(), unwritten=None)
    needed = [*columns, TableColumn("more", "text", "text", not_null=True)]
    with pytest.raises(hf.InvalidConfigError, match="column more: the rows don't have it"):
        fit("here", "s", "t", rows, needed, key=(), unwritten="gone")
    computed = [TableColumn("a", "int8", "bigint", is_generated=True)]
    with pytest.raises(hf.InvalidConfigError, match="the server computes it"):
        fit("here", "s", "t", rows, computed, key=(), unwritten="gone")
    with pytest.raises(hf.InvalidConfigError, match="column id: it is part of the key"):
        fit("here", "s", "t", rows, columns, key=("id",), unwritten="gone")


def test_decimals_and_days_are_sent_as_they_are() -> None:
    values = pa.array([decimal.Decimal("1.20"), None], pa.decimal128(10, 2))
    found = fitted(values.type, column("numeric"))
    found.check_rows(pa.record_batch({"c": values}))
    assert found.encode(pa.record_batch({"c": values})).column("c").equals(values)
    days = pa.array([datetime.date(1, 1, 1), datetime.date(9999, 12, 31)])
    fitted(days.type, column("date")).check_rows(pa.record_batch({"c": days}))


def test_names_and_texts_of_statements_are_quoted() -> None:
    assert literal("it's \\ \"") == "E'it''s \\\\ \"'"
    assert split_name("My.Table") == ["My", "Table"]
    for wrong in ("", "a.b.c", ".a", "a\0"):
        with pytest.raises(hf.InvalidConfigError, match="no name of a table"):
            split_name(wrong)


def test_numbers_that_the_table_takes_are_not_refused() -> None:
    texts = ["1e-16383", f"[1e-1000, {'1' * 40}]", '"apple-123456"', '{"1e-99999": 1}', None, f"0.{'1' * 16_383}"]
    taken = pa.record_batch({"c": pa.array(texts)})
    found = fit("here", "public", "t", taken.schema, [column("jsonb")], key=(), unwritten=None)
    found.check_rows(taken)
    json_column = fit("here", "public", "t", taken.schema, [column("json")], key=(), unwritten=None)
    json_column.check_rows(pa.record_batch({"c": ["1e-99999", "-1e400", '["1e", 1E+999999999, "\\u0000"]', "9" * 200_000]}))
    found.check_rows(pa.record_batch({"c": ["1e400", "9" * 131_072, '"\\\\u0000"', '{"a\\"1e9": [1e131071]}']}))
