"""What becomes of rows on their way to Kafka, and which are refused."""

from __future__ import annotations

import datetime as dt
import decimal
import json
from typing import Any

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.operators.connectors.kafka.records import RecordFormat
from holdfast.operators.connectors.kafka.target import records_of
from holdfast.operators.sinks.files.json_rows import json_lines, json_objects

PLAIN: dict[str, Any] = {
    "sink": "KafkaSink to orders",
    "topic": "orders",
    "topic_column": "",
    "key": (),
    "null_keys": False,
    "value": None,
    "headers": {},
    "timestamp": "",
    "bytes_max": 1_000,
}
ROWS = pa.RecordBatch.from_pydict(
    {"id": [1, 2], "name": ["ann", None], "to": ["a", "b.c"], "raw": [b"\xff", None], "at": pa.array([5, 7], pa.timestamp("ms"))}
)


def records(rows: pa.RecordBatch = ROWS, **settings: Any) -> list[tuple[Any, ...]]:
    made = RecordFormat(**{**PLAIN, **settings})
    made.check(rows.schema)
    return list(records_of(made.encode(rows), made))


def test_every_kind_of_column_is_json() -> None:
    zone = pa.timestamp("us", "Europe/Berlin")
    rows = pa.RecordBatch.from_pydict(
        {
            "i": [1, None],
            "f": [1.5, float("nan")],
            "s": ['a"b\\\n\x01 größer 漢字', ""],
            "b": [True, None],
            "t": pa.array([dt.datetime(2024, 1, 31, 1, 2, 3, 456789), None]),
            "z": pa.array([dt.datetime(2024, 7, 1, 12), None], zone),
            "d": pa.array([dt.date(2024, 1, 2), None]),
            "n": pa.array([decimal.Decimal("1.50"), None]),
            "l": [[1, 2], None],
            "o": [{"x": 1.0, "y": ["q"]}, None],
            'na"me': ["x", "y"],
            "big": pa.array([2**63 - 1, -(2**63)]),
            "exact": [0.1, 1e300],
        }
    )
    first, second = (json.loads(text) for text in json_objects(rows).to_pylist())
    assert first == {
        "i": 1,
        "f": 1.5,
        "s": 'a"b\\\n\x01 größer 漢字',
        "b": True,
        "t": "2024-01-31T01:02:03.456789",
        "z": "2024-07-01T12:00:00.000000Z",
        "d": "2024-01-02",
        "n": "1.50",
        "l": [1, 2],
        "o": {"x": 1.0, "y": ["q"]},
        'na"me': "x",
        "big": 2**63 - 1,
        "exact": 0.1,
    }
    nulls = dict.fromkeys(("i", "f", "b", "t", "z", "d", "n", "l", "o"))
    assert second == {**nulls, "s": "", 'na"me': "y", "big": -(2**63), "exact": 1e300}


def test_a_slice_of_a_batch_gives_its_own_rows() -> None:
    rest = json_objects(ROWS.select(["id", "name"]).slice(1))
    assert [json.loads(text) for text in rest.to_pylist()] == [{"id": 2, "name": None}]
    assert records(ROWS.slice(1), key=("id",), value="raw") == [("orders", None, b"2")]


def test_parts_of_a_record() -> None:
    assert records(value="raw") == [("orders", b"\xff"), ("orders", None)]
    assert records(value="raw", key=("id",)) == [("orders", b"\xff", b"1"), ("orders", None, b"2")]
    assert records(value=("name",), topic="", topic_column="to") == [("a", b'{"name":"ann"}'), ("b.c", b'{"name":null}')]
    assert records(value="raw", key=("id", "to"))[0] == ("orders", b"\xff", b'{"id":1,"to":"a"}')
    assert records(value="raw", key=("name",), null_keys=True)[1] == ("orders", None, None)
    whole = records(value="raw", headers={"to": "to", "n": "name"}, timestamp="at")
    assert [(row[3:7], row[7]) for row in whole] == [
        ((-1, None, None, 5), [("to", b"a"), ("n", b"ann")]),
        ((-1, None, None, 7), [("to", b"b.c"), ("n", None)]),
    ]


def test_columns_that_are_parts_of_their_own_are_not_in_the_value() -> None:
    (_, value, *_), _ = records(ROWS.drop_columns(["raw"]), topic="", topic_column="to", timestamp="at", headers={"n": "name"})
    assert json.loads(value) == {"id": 1}


WRONG: dict[str, dict[str, Any]] = {
    "is no column": {"key": ("nothing",)},
    "cast it to text": {},  # bytes have no JSON
    "neither text nor bytes nor integers": {"key": ("at",), "value": "raw"},
    "give text or bytes": {"value": "id"},
    "not text": {"topic": "", "topic_column": "id", "value": "raw"},
    "neither timestamps nor integers": {"timestamp": "name", "value": "raw"},
    "the header from column": {"headers": {"at": "at"}, "value": "raw"},
    "no column is left": {"value": ()},
}


@pytest.mark.parametrize("reason", WRONG)
def test_columns_that_make_no_record_are_refused_before_the_job_runs(reason: str) -> None:
    with pytest.raises(hf.InvalidConfigError, match=f"KafkaSink to orders.*{reason}"):
        records(**WRONG[reason])


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "key is null": ({"k": ["a", None]}, {"key": ("k",)}),
    "has 1[0-9]{3} bytes": ({"k": ["a", "b"], "v": ["", "x" * 1_000]}, {"key": ("k",)}),
    "'a b' is no name of a topic": ({"to": ["a", "a b"], "v": ["", ""]}, {"topic": "", "topic_column": "to"}),
    "None is no name of a topic": ({"to": ["a", None], "v": ["", ""]}, {"topic": "", "topic_column": "to"}),
    "None is no time": ({"at": [1, None], "v": ["", ""]}, {"timestamp": "at"}),
    r"'\.' is no name of a topic": ({"to": ["a.", "."], "v": ["", ""]}, {"topic": "", "topic_column": "to"}),
    r"'\.\.' is no name of a topic": ({"to": [".a", ".."], "v": ["", ""]}, {"topic": "", "topic_column": "to"}),
    "-1 is no time": ({"at": [1, -1], "v": ["", ""]}, {"timestamp": "at"}),
    "0 is no time": ({"at": [1, 0], "v": ["", ""]}, {"timestamp": "at"}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_the_first_row_that_kafka_would_not_take_is_named(reason: str) -> None:
    columns, settings = REFUSED[reason]
    rows = pa.RecordBatch.from_pydict(columns)
    with pytest.raises(hf.InvalidRowError, match=f"KafkaSink to orders.*{reason}") as raised:
        records(rows, **settings)
    assert raised.value.record is not None
    assert raised.value.record[:50] == repr(rows.slice(1).to_pylist()[0])[:50]


def test_no_row_goes_to_the_topic_of_positions() -> None:
    with pytest.raises(hf.InvalidRowError, match=r"topic b\.c has the positions of sinks, and no rows"):
        records(topic="", topic_column="to", value="name", reserved="b.c")


def test_lines_are_the_same_objects_of_any_part_of_a_batch() -> None:
    rows = [{"n": number, "text": f'"{number}\n'} for number in range(5)]
    batch = pa.RecordBatch.from_pylist([{"n": -1, "text": None}, *rows]).slice(1)
    lines = bytes(json_lines(batch)).splitlines(keepends=True)
    assert [json.loads(line) for line in lines] == rows
    assert b"".join(lines) == b"".join(text + b"\n" for text in json_objects(batch).to_pylist())
    assert bytes(json_lines(batch.slice(0, 0))) == b""


def test_a_floating_point_number_is_told_from_an_integer() -> None:
    column = pa.array([1.0, -2.0, 0.5, 1e300, None])
    assert json_objects(pa.record_batch([column], ["x"])).to_pylist()[:3] == [b'{"x":1.0}', b'{"x":-2.0}', b'{"x":0.5}']
    assert [json.loads(text)["x"] for text in json_objects(pa.record_batch([column], ["x"])).to_pylist()] == column.to_pylist()


@pytest.mark.parametrize("slot", [lambda time: time, lambda time: [time], lambda time: {"at": time}], ids=["one", "list", "struct"])
def test_a_time_that_no_text_stands_for_is_refused(slot: Any) -> None:
    """Arrow writes `<value out of range>` for it."""
    kind = pa.timestamp("us", "UTC")
    given = {int: kind, list: pa.list_(kind), dict: pa.struct([("at", kind)])}[type(slot(1))]
    rows = pa.record_batch({"i": pa.array([1, 2, 3]), "t": pa.array([slot(1), None, slot(2**62)], given)})
    with pytest.raises(hf.InvalidRowError, match=rf"column t of row \{{'i': 3, .*: {2**62} is a timestamp"):
        json_objects(rows)
    assert len(json_objects(rows.slice(0, 2))) == 2
