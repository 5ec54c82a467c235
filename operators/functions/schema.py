"""Row types of streams: declared columns and an optional record type, decided when the graph is built and never from data.

It knows types and annotations, and nothing of streams, batches or operators."""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa

from holdfast.statebackends.errors import GraphError, UnknownColumnError

EVENT_TIME_TYPE = pa.timestamp("us", tz="UTC")
"""Type of the timestamps that Holdfast itself writes into columns."""

_SCALARS: dict[Any, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
    date: pa.date32(),
    datetime: EVENT_TIME_TYPE,
}
_ITERABLES = (
    list,
    tuple,
    set,
    collections.abc.Iterable,
    collections.abc.Iterator,
    collections.abc.Generator,
    collections.abc.Sequence,
    collections.abc.Collection,
)


@dataclass(frozen=True, slots=True)
class RowType:
    """Declared type of a stream's rows. Without a schema, rows are any objects and can't become columns."""

    schema: pa.Schema | None = None
    record: Callable[..., Any] | None = None
    """Record type (msgspec.Struct, dataclass, NamedTuple) that rows are instances of; None: dicts by column name."""

    @property
    def names(self) -> list[str]:
        return [] if self.schema is None else list(self.schema.names)

    def described(self) -> str:
        """Record type and columns as text."""
        return "undeclared rows" if self.schema is None else _text(self)

    def column(self, name: str, operator: str) -> pa.Field:
        """Return the field called `name`. Raises GraphError (undeclared rows) or UnknownColumnError, naming the operator."""
        if self.schema is None:
            raise undeclared_error(operator, f"the column {name!r}")
        if self.names.count(name) != 1:
            raise UnknownColumnError(
                f"operator {operator!r}: there is no column {name!r}; available: {', '.join(self.names) or 'none'}",
                operator=operator,
                column=name,
                available=self.names,
            )
        return self.schema.field(name)

    def check_rows(self, operator: str) -> None:
        """Raise GraphError for columns without Python values, before a row function asks for them."""
        for field in self.schema or ():
            if _holds_nanoseconds(field.type):
                raise GraphError(
                    f"operator {operator!r} works on rows, but column {field.name!r} is {field.type}: "
                    "cast nanoseconds to microseconds first",
                    operator=operator,
                    column=field.name,
                )


UNDECLARED = RowType()


def undeclared_error(operator: str, wanted: str) -> GraphError:
    """Return the error of an operator that needs columns after a function whose rows were not declared."""
    return GraphError(
        f"operator {operator!r} needs {wanted}, but the rows that reach it have no declared columns: "
        "give the function before it returns= or a return annotation",
        operator=operator,
    )


def declared_type(returns: Any, operator: str) -> RowType:
    """Return the row type that `returns=` declares: pa.Schema, {name: type}, or a record type. Raises GraphError."""
    if isinstance(returns, RowType):
        return returns
    if isinstance(returns, pa.Schema):
        return RowType(_checked(returns, operator))
    if isinstance(returns, Mapping):
        return RowType(_schema_of(returns, operator))
    found = record_type(returns, operator)
    if found is None:
        raise GraphError(
            f"operator {operator!r}: returns= must be a pyarrow.Schema, a dict of column name to type, or a record type "
            f"(dataclass, msgspec.Struct, NamedTuple, TypedDict), not {returns!r}",
            operator=operator,
        )
    return found


def annotated_type(function: Callable[..., Any], operator: str, *, each: bool = False) -> RowType:
    """Row type declared by a function's return annotation, if it names a record type; else UNDECLARED.

    `each`: the function returns an iterable of rows."""
    annotation = return_annotation(function)
    if each and typing.get_origin(annotation) in _ITERABLES:
        arguments = typing.get_args(annotation)
        annotation = arguments[0] if arguments else None
    return record_type(annotation, operator) or UNDECLARED


def return_annotation(function: Callable[..., Any]) -> Any:
    """Resolved return annotation of a function or callable object; None if there is none or it does not resolve."""
    target = function if hasattr(function, "__annotations__") else type(function).__call__
    try:
        return typing.get_type_hints(target, include_extras=False).get("return")
    except (NameError, TypeError, AttributeError):
        return None


def arrow_type(declared: Any, operator: str, column: str) -> tuple[pa.DataType, bool]:
    """(Arrow type, nullable) of a declared column type: an Arrow type, or a Python one such as `int` or `str | None`.

    Raises GraphError for a type without an exact column."""
    if isinstance(declared, pa.DataType):
        return declared, True
    if isinstance(declared, pa.Field):
        return declared.type, declared.nullable
    origin, arguments = typing.get_origin(declared), typing.get_args(declared)
    if origin is typing.Annotated:
        return arrow_type(arguments[0], operator, column)
    if origin in (typing.Union, types.UnionType) and type(None) in arguments and len(arguments) == 2:
        member = next(argument for argument in arguments if argument is not type(None))
        return arrow_type(member, operator, column)[0], True
    if isinstance(declared, Hashable) and declared in _SCALARS:
        return _SCALARS[declared], False
    if origin is list and len(arguments) == 1:
        element, nullable = arrow_type(arguments[0], operator, column)
        return pa.list_(pa.field("item", element, nullable)), False
    hint = "; give pyarrow.decimal128(precision, scale)" if declared is Decimal else ""
    raise GraphError(
        f"operator {operator!r}: column {column!r} is declared as {declared!r}, which has no column type{hint}",
        operator=operator,
        column=column,
    )


def merged_type(left: RowType, right: RowType, operator: str) -> RowType:
    """Row type of a union: equal columns, nullable if either side is. Raises GraphError."""
    if left.schema is None or right.schema is None:
        if left.schema is None and right.schema is None:
            return UNDECLARED
        raise GraphError(f"operator {operator!r}: a union of declared and undeclared rows; declare both with returns=")
    same_names = left.names == right.names
    if not same_names or [f.type for f in left.schema] != [f.type for f in right.schema] or left.record is not right.record:
        raise GraphError(
            f"operator {operator!r}: a union needs equal columns on every side, got {_text(left)} and {_text(right)}",
            operator=operator,
        )
    fields = [one.with_nullable(one.nullable or other.nullable) for one, other in zip(left.schema, right.schema, strict=True)]
    return RowType(pa.schema(fields), left.record)


def _text(row_type: RowType) -> str:
    columns = ", ".join(f"{field.name}: {field.type}" for field in row_type.schema or ())
    record = getattr(row_type.record, "__name__", "") if row_type.record else ""
    return f"{record}({columns})"


def record_type(declared: Any, operator: str) -> RowType | None:
    """Row type of a record class; None for any other object. Raises GraphError for a field without a column type."""
    if not isinstance(declared, type):
        return None
    if issubclass(declared, msgspec.Struct) or dataclasses.is_dataclass(declared):
        names = declared.__struct_fields__ if issubclass(declared, msgspec.Struct) else _init_fields(declared)
        hints = _hints(declared, operator)
        return RowType(_schema_of({name: hints[name] for name in names}, operator), declared)
    if issubclass(declared, tuple) and hasattr(declared, "_fields"):
        hints = _hints(declared, operator)
        return RowType(_schema_of({name: hints.get(name, Any) for name in declared._fields}, operator), declared)
    if typing.is_typeddict(declared):
        return RowType(_schema_of(_hints(declared, operator), operator))
    return None


def _init_fields(declared: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(declared) if field.init]


def _hints(declared: type, operator: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(declared)
    except NameError as error:
        raise GraphError(
            f"operator {operator!r}: the annotations of {declared.__name__} can't be resolved: {error}", operator=operator
        ) from error


def _schema_of(columns: Mapping[Any, Any], operator: str) -> pa.Schema:
    fields = []
    for name, declared in columns.items():
        if not isinstance(name, str):
            raise GraphError(f"operator {operator!r}: a column's name must be text, not {name!r}", operator=operator)
        data_type, nullable = arrow_type(declared, operator, name)
        fields.append(pa.field(name, data_type, nullable))
    return _checked(pa.schema(fields), operator)


def _checked(schema: pa.Schema, operator: str) -> pa.Schema:
    """Return the schema without metadata, which would make equal schemas differ. Raises GraphError for a repeated name."""
    if len(set(schema.names)) != len(schema.names):
        raise GraphError(f"operator {operator!r}: two columns have one name: {', '.join(schema.names)}", operator=operator)
    return schema.remove_metadata()


def _holds_nanoseconds(data_type: pa.DataType) -> bool:
    if pa.types.is_nested(data_type):
        return any(_holds_nanoseconds(data_type.field(index).type) for index in range(data_type.num_fields))
    temporal = pa.types.is_timestamp(data_type) or pa.types.is_duration(data_type) or pa.types.is_time64(data_type)
    return bool(temporal and data_type.unit == "ns")
