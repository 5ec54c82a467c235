"""Key field types by text, Python class or Arrow type, and the Python values of scalars."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.statebackends.serialization.key_fields import (
    DECIMAL_DIGITS_MAX,
    BinaryField,
    BoolField,
    DateField,
    DecimalField,
    FloatField,
    Int64Field,
    KeyFieldType,
    TimestampField,
    Utf8Field,
)

_SIMPLE: dict[str, KeyFieldType] = {
    field.text: field
    for field in (BoolField(), Int64Field(), FloatField(), Utf8Field(), BinaryField(), DateField(), TimestampField())
}
_PYTHON_TYPES: dict[Any, str] = {
    bool: "bool",
    int: "int64",
    float: "float64",
    str: "utf8",
    bytes: "binary",
    date: "date32",
    datetime: "timestamp[us, UTC]",
}
_MARKS = re.compile(r'"(?:[^"\\]|\\.)*"?|[,()<>\[\]]', re.DOTALL)
"""Marks in a type's text: brackets, commas, and quoted names (JSON), which are one mark each."""
_DECIMAL_TEXT = re.compile(r"decimal128\(\s*(\d+)\s*,\s*(-?\d+)\s*\)")


@functools.lru_cache(maxsize=1024)
def parse_field(text: str) -> KeyFieldType:
    """Field type of a canonical text. Raises ValueError."""
    simple = _SIMPLE.get(text)
    if simple is not None:
        return simple
    match = _DECIMAL_TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not the type of a key field")
    return DecimalField(int(match[1]), int(match[2]))


def field_of_python(python_type: Any) -> KeyFieldType:
    """Field type of a Python class. Raises ValueError with what to say instead."""
    if isinstance(python_type, pa.DataType):
        return field_of_arrow(python_type)
    if python_type is Decimal:
        raise ValueError("Decimal has no fixed precision: say pyarrow.decimal128(precision, scale)")
    text = _PYTHON_TYPES.get(python_type)
    if text is None:
        raise ValueError(f"{python_type!r} is not the type of a key field; use {', '.join(t.__name__ for t in _PYTHON_TYPES)}")
    return _SIMPLE[text]


def field_of_arrow(data_type: pa.DataType) -> KeyFieldType:
    """Field type that holds every value of an Arrow type. Raises ValueError if there is none."""
    types = pa.types
    if types.is_dictionary(data_type):
        return field_of_arrow(data_type.value_type)
    if types.is_uint64(data_type):
        raise ValueError("uint64 does not fit int64: cast the column")
    if types.is_integer(data_type):
        return _SIMPLE["int64"]
    for text, accepts in _ARROW_CHECKS:
        if accepts(data_type):
            return _SIMPLE[text]
    if types.is_timestamp(data_type):
        if data_type.tz is None:
            raise ValueError("a timestamp without time zone is refused: cast the column to timestamp[us, UTC]")
        if data_type.unit == "ns":
            raise ValueError("nanosecond timestamps are refused: cast the column to microseconds")
        return _SIMPLE["timestamp[us, UTC]"]
    if types.is_decimal(data_type) and data_type.precision <= DECIMAL_DIGITS_MAX:
        return parse_field(f"decimal128({data_type.precision}, {data_type.scale})")
    raise ValueError(f"Arrow type {data_type} is not the type of a key field")


_ARROW_CHECKS = (
    ("bool", pa.types.is_boolean),
    ("float64", pa.types.is_floating),
    ("utf8", lambda t: pa.types.is_string(t) or pa.types.is_large_string(t) or pa.types.is_string_view(t)),
    ("binary", lambda t: pa.types.is_binary(t) or pa.types.is_large_binary(t) or pa.types.is_binary_view(t)),
    ("binary", pa.types.is_fixed_size_binary),
    ("date32", pa.types.is_date32),
)


def split_arguments(text: str) -> list[str]:
    """Arguments of a type's text, split at the commas outside of brackets and quoted names: `utf8,decimal128(10, 2)`,
    `namedtuple<"a<b": int>,str`."""
    arguments, depth, start = [], 0, 0
    for match in _MARKS.finditer(text):
        mark = match[0]
        depth += (mark in "([<") - (mark in ")]>")
        if mark == "," and depth == 0:
            arguments.append(text[start : match.start()])
            start = match.end()
    return [*arguments, text[start:]]


def unwrap(value: Any) -> Any:
    """The Python value of a NumPy or Arrow scalar; other values as they are. Raises ValueError for null and for nanoseconds."""
    if isinstance(value, np.generic):
        if isinstance(value, np.timedelta64 | np.datetime64) and np.datetime_data(value.dtype)[0] != "D":
            raise ValueError("a naive NumPy time is refused: use a datetime with a time zone")
        value = value.item()
    elif isinstance(value, pa.Scalar):
        if not pa.types.is_null(value.type):
            field_of_arrow(value.type)  # refuses types that Python would round, such as nanoseconds
        value = value.as_py()
    if value is None:
        raise ValueError("the key is null")
    return value


_EXACT = {"bool", "int64", "utf8", "binary", "date32"}
"""Fields whose values need only Arrow's checks if they have exactly the field's class."""


def array_of_exact(field: KeyFieldType, values: Sequence[Any]) -> pa.Array | None:
    """The column of values that all have exactly the field's Python class; None if a value needs a further check."""
    if field.text not in _EXACT or set(map(type, values)) != {field.exact}:
        return None
    try:
        return pa.array(values, field.arrow_type)
    except (OverflowError, UnicodeEncodeError, pa.ArrowException):
        return None


def check_member(field: KeyFieldType, value: Any) -> Any:
    """The canonical value of one field. Raises ValueError."""
    return field.check(value if type(value) is field.exact else unwrap(value))
