"""Rows at hand as a source, and rows on a terminal as a sink."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest

from holdfast.operators.datastream.environment import Environment
from holdfast.operators.sinks.simple import PrintSink
from holdfast.operators.sources import collection
from holdfast.operators.sources.generator import GeneratorSource
from holdfast.statebackends.errors import GraphError, InvalidConfigError, SchemaMismatchError
from tests.operators.harness import OperatorHarness


@dataclass
class Order:
    shop: str
    price: float | None


def _rows(env: Environment) -> Any:
    """What the source gives, as it travels."""
    source: Any = cloudpickle.loads(cloudpickle.dumps(env.graph.nodes[0].source))
    assert isinstance(source, GeneratorSource)
    return source.make_batch(np.arange(source.rows)).to_pylist()


def test_dicts_have_the_columns_of_their_values() -> None:
    env = Environment("job")
    at = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [{"n": 1, "price": Decimal("1.5"), "at": at}, {"n": 2, "price": None, "at": at}]
    stream = env.from_collection(rows)
    assert stream.schema == pa.schema(
        [
            pa.field("n", pa.int64(), nullable=False),
            ("price", pa.decimal128(2, 1)),
            pa.field("at", pa.timestamp("us", tz="UTC"), nullable=False),
        ]
    )
    assert _rows(env) == rows


def test_records_have_those_of_their_class_and_declared_rows_those_that_are_declared() -> None:
    env = Environment("job")
    stream = env.from_collection([Order("a", 1.0), Order("b", None)])
    assert stream.schema == pa.schema([pa.field("shop", pa.string(), nullable=False), ("price", pa.float64())])
    assert stream._row_type.record is Order
    assert _rows(env) == [{"shop": "a", "price": 1.0}, {"shop": "b", "price": None}]
    assert Environment("job").from_collection([], returns={"n": int}).schema is not None
    assert Environment("job").from_collection(iter([{"n": 1}]), returns={"n": float}).schema == pa.schema(
        [pa.field("n", pa.float64(), nullable=False)]
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "without rows the columns are unknown: give returns="),
        ([1, "a"], "rows are dicts by column name, or records .* these are int, str"),
        ([{"n": None}], "column 'n' is null in all rows: give returns="),
        ([{"n": 1}, {"n": "a"}], "column 'n': .*; give returns="),
    ],
)
def test_rows_of_no_type_are_refused(rows: list[Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Environment("job").from_collection(rows)


def test_a_row_that_does_not_fit_the_others_is_shown() -> None:
    with pytest.raises(SchemaMismatchError, match="'b'"):
        Environment("job").from_collection([{"a": 1, "b": 2}, {"a": 3}])


def test_rows_that_are_too_many_to_travel_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "COLLECTION_BYTES_MAX", 100)
    with pytest.raises(GraphError, match="800 bytes of rows; a collection has at most 100"):
        Environment("job").from_collection([{"n": n} for n in range(100)])


def test_print_shows_rows_up_to_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    env = Environment("job")
    printed = env.from_collection([{"n": n} for n in range(5)]).print(limit=3, uid="look")
    assert repr(printed) == "<StreamSink 'print', uid 'look': PrintSink('', limit=3)>"
    sink: Any = env.sinks[0]
    with OperatorHarness(sink.create_writer(None)) as writer:
        writer.process([{"n": 0}, {"n": 1}])
        writer.process([{"n": 2}, {"n": 3}])
        writer.process([{"n": 4}])
    uid = writer.operator.context.uid
    assert capsys.readouterr().out.splitlines() == [
        f"{uid}[0] {{'n': 0}}",
        f"{uid}[0] {{'n': 1}}",
        f"{uid}[0] {{'n': 2}}",
        f"{uid}[0] printed 3 rows, and prints no more",
    ]
    with pytest.raises(InvalidConfigError):
        PrintSink(limit=0)
