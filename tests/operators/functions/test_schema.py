"""What `returns=` and annotations declare."""

from __future__ import annotations

import builtins
import datetime as datetimes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from typing import Any, NamedTuple, TypedDict

import msgspec
import pyarrow as pa
import pytest

from holdfast.barriers.rows import PYTHON_TYPES, nulls_hint
from holdfast.operators.functions.schema import (
    _SCALARS,
    UNDECLARED,
    RowType,
    annotated_type,
    arrow_type,
    declared_type,
    merged_type,
)
from holdfast.statebackends.errors import GraphError, UnknownColumnError

EXPECTED = pa.schema([pa.field("a", pa.int64(), nullable=False), pa.field("b", pa.string())])


@dataclass
class Data:
    a: int
    b: str | None
    hidden: int = field(init=False, default=0)


class Struct(msgspec.Struct):
    a: int
    b: str | None


class Named(NamedTuple):
    a: int
    b: str | None


class Typed(TypedDict):
    a: int
    b: str | None


def to_data(row: Any) -> Data: ...  # type: ignore[empty-body]
def each_list(row: Any) -> list[Struct]: ...  # type: ignore[empty-body]
def each_iterator(row: Any) -> Iterator[Struct]: ...  # type: ignore[empty-body]
def each_iterable(row: Any) -> Iterable[Typed]: ...  # type: ignore[empty-body]
def to_dict(row: Any) -> dict[str, Any]: ...  # type: ignore[empty-body]
def unresolved(row: Any) -> Nowhere: ...  # type: ignore[name-defined]  # noqa: F821


class Callable_:
    def __call__(self, row: Any) -> Named: ...  # type: ignore[empty-body]


@pytest.mark.parametrize(
    ("returns", "record"),
    [(EXPECTED, None), ({"a": int, "b": str | None}, None), (Data, Data), (Struct, Struct), (Named, Named), (Typed, None)],
)
def test_declared(returns: Any, record: Any) -> None:
    assert declared_type(returns, "op") == RowType(EXPECTED, record)


@pytest.mark.parametrize(
    ("function", "each", "record"),
    [
        (to_data, False, Data),
        (each_list, True, Struct),
        (each_iterator, True, Struct),
        (each_iterable, True, None),
        (Callable_(), False, Named),
    ],
)
def test_annotated(function: Any, each: bool, record: Any) -> None:
    assert annotated_type(function, "op", each=each) == RowType(EXPECTED, record)


@pytest.mark.parametrize("function", [to_dict, unresolved, lambda row: row, len, int])
def test_an_annotation_without_a_record_type_declares_nothing(function: Any) -> None:
    assert annotated_type(function, "op") is UNDECLARED


def test_python_types_have_exact_columns() -> None:
    declared = {
        "i": int, "f": float, "s": str, "y": bytes, "t": bool, "d": date, "m": datetime, "l": list[int | None],
        "x": pa.decimal128(9, 2), "n": pa.field("ignored", pa.int32(), nullable=False),
    }  # fmt: skip
    schema = declared_type(declared, "op").schema
    assert schema is not None
    assert [field.type for field in schema] == [
        pa.int64(), pa.float64(), pa.string(), pa.binary(), pa.bool_(), pa.date32(), pa.timestamp("us", "UTC"),
        pa.list_(pa.int64()), pa.decimal128(9, 2), pa.int32(),
    ]  # fmt: skip
    assert [field.nullable for field in schema] == [False] * 8 + [True, False]


@pytest.mark.parametrize(
    ("returns", "problem"),
    [
        (5, "must be a pyarrow.Schema"),
        (int, "must be a pyarrow.Schema"),
        ({"a": Decimal}, "decimal128"),
        ({"a": dict}, "no column type"),
        ({"a": int | str}, "no column type"),
        ({1: int}, "must be text"),
        (pa.schema([("a", pa.int64()), ("a", pa.int64())]), "one name"),
    ],
)
def test_refused(returns: Any, problem: str) -> None:
    with pytest.raises(GraphError, match=problem) as caught:
        declared_type(returns, "enrich")
    assert "'enrich'" in str(caught.value)


def test_an_unknown_column_is_named_with_those_there_are() -> None:
    with pytest.raises(UnknownColumnError) as caught:
        RowType(EXPECTED).column("c", "op")
    assert (caught.value.operator, caught.value.column, caught.value.available) == ("op", "c", ["a", "b"])


def test_a_union_is_nullable_where_either_side_is() -> None:
    left, right = declared_type({"a": int}, "x"), declared_type({"a": int | None}, "x")
    assert merged_type(left, right, "u").schema == right.schema
    assert merged_type(UNDECLARED, UNDECLARED, "u") is UNDECLARED
    for other in (UNDECLARED, declared_type({"a": float}, "x"), declared_type({"b": int}, "x")):
        with pytest.raises(GraphError):
            merged_type(left, other, "u")


def test_rows_of_nanoseconds_are_refused_when_the_graph_is_built() -> None:
    for kind in (pa.timestamp("ns"), pa.list_(pa.timestamp("ns", "UTC"))):
        with pytest.raises(GraphError, match="nanoseconds"):
            RowType(pa.schema([("t", kind)])).check_rows("map")


def test_who_is_told_to_declare_nulls_is_told_what_can_be_declared() -> None:
    named = {name: getattr(builtins, name, None) or getattr(datetimes, name) for name in PYTHON_TYPES.values()}
    assert {named[name]: kind for kind, name in PYTHON_TYPES.items()} == _SCALARS
    for kind, name in PYTHON_TYPES.items():
        assert f"declare it as {name} | None, or nullable in a schema" in nulls_hint(kind)
        assert arrow_type(named[name] | None, "op", "c") == (kind, True)
    assert "make the field of its schema nullable" in nulls_hint(pa.int32())
