"""JSON values as columns: each value one row, or one error, whatever stands next to it."""

from __future__ import annotations

import datetime as dt

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.operators.connectors.json_columns import read_json_columns

SCHEMA = pa.schema([pa.field("a", pa.int64(), nullable=False), ("b", pa.string())])


def test_fields_that_are_missing_are_null_and_others_are_left_out() -> None:
    found = read_json_columns([b'{"a":1,"b":"x"}', b'{"c":[{"d":1}],"a":2}'], SCHEMA)
    assert found.columns.to_pylist() == [{"a": 1, "b": "x"}, {"a": 2, "b": None}]
    assert found.columns.schema.equals(SCHEMA)
    assert (found.indexes.tolist(), list(found.errors)) == ([0, 1], [])


def test_values_of_several_lines_are_read() -> None:
    found = read_json_columns([b' {\n "a": 1,\n "b": "x\\ny"\n}\n', b'{"a":2}'], SCHEMA)
    assert found.columns.to_pylist() == [{"a": 1, "b": "x\ny"}, {"a": 2, "b": None}]


def test_times_and_dates_are_read_as_text() -> None:
    schema = pa.schema([("t", pa.timestamp("ms", "UTC")), ("d", pa.date32())])
    found = read_json_columns([b'{"t":"2024-01-31T01:02:03.456Z","d":"2024-01-02"}'], schema)
    assert found.columns.to_pylist() == [
        {"t": dt.datetime(2024, 1, 31, 1, 2, 3, 456000, tzinfo=dt.UTC), "d": dt.date(2024, 1, 2)}
    ]


@pytest.mark.parametrize("beside", [b'{"a":2}', b'{"a":"x"}'])
def test_a_value_that_is_nested_without_bound_fails_no_other_one_and_is_the_same_beside_any(beside: bytes) -> None:
    deep = b'{"c":' * 10_000 + b"1" + b"}" * 10_000
    found = read_json_columns([b'{"a":1}', b'{"a":2,"c":' + deep + b"}", b"\n" + deep, beside], SCHEMA)
    assert found.columns.to_pylist()[:2] == [{"a": 1, "b": None}, {"a": 2, "b": None}]
    assert found.errors[0] == (2, "it is nested too deeply")


BAD: dict[str, bytes | None] = {
    "null": None,
    "nothing": b"",
    "blank": b"  ",
    "no object": b"[1]",
    "a word": b"null",
    "half": b'{"a":',
    "its other half": b"1}",
    "an object in an object, half": b'{"a":{}',
    "two objects": b'{"a":1}{"a":2}',
    "another type": b'{"a":"x"}',
    "a null where none is allowed": b'{"a":null}',
    "no such field": b"{}",
    "no UTF-8": b'{"a":1,"b":"\xff"}',
    "a line feed in a text": b'{"a":1,"b":"x\ny"}',
    "too large": b'{"a":9223372036854775808}',
}


@pytest.mark.parametrize("what", BAD)
def test_what_can_not_be_read_is_apart(what: str) -> None:
    found = read_json_columns([b'{"a":1}', BAD[what], b'{"a":3}'], SCHEMA)
    assert found.columns.column("a").to_pylist() == [1, 3]
    assert found.indexes.tolist() == [0, 2]
    assert [index for index, _ in found.errors] == [1]
    assert found.errors[0][1]


@given(st.lists(st.sampled_from([b'{"a":%d}', *BAD.values()]), max_size=12))
def test_every_value_is_one_row_or_one_error(kinds: list[bytes | None]) -> None:
    values = [b'{"a":%d}' % index if kind == b'{"a":%d}' else kind for index, kind in enumerate(kinds)]
    good = [index for index, kind in enumerate(kinds) if kind == b'{"a":%d}']
    found = read_json_columns(values, SCHEMA)
    assert found.indexes.tolist() == good == found.columns.column("a").to_pylist()
    assert [index for index, _ in found.errors] == [index for index in range(len(kinds)) if index not in good]
