"""Rows as JSON objects, by columns, for files of JSON lines, and for connectors whose records are bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.operators.sinks.refused_rows import check_times
from holdfast.statebackends.errors import InvalidConfigError

_ESCAPED = r'["\\\x00-\x1f]'
"""Characters that JSON does not take as they are."""


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def check_json(where: str, schema: pa.Schema, columns: Iterable[str]) -> None:
    """Raises InvalidConfigError for a column whose values can't be written as JSON."""
    for name in columns:
        reason = not_in_json(schema.field(name))
        if reason is not None:
            raise InvalidConfigError(f"{where}: {reason}", column=name)


def not_in_json(field: pa.Field) -> str | None:
    """Why values of a column can't be written as JSON; None: they can."""
    kind = field.type
    if pa.types.is_map(kind) and not is_text(kind.key_type):
        return f"column {field.name!r} holds {kind}: JSON has text as keys only"
    if pa.types.is_nested(kind):
        reasons = (not_in_json(kind.field(index)) for index in range(kind.num_fields))
        return next((reason for reason in reasons if reason is not None), None)
    plain = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_timestamp, pa.types.is_date,
             pa.types.is_decimal, pa.types.is_null, is_text)  # fmt: skip
    if not any(is_one(kind) for is_one in plain):
        return f"column {field.name!r} holds {kind}, for which JSON has nothing: cast it to text before the sink"
    return None


def json_objects(rows: pa.RecordBatch) -> pa.Array:
    """Each row as a JSON object, UTF-8: numbers as numbers (NaN and infinities as null), decimals as text with all their digits,
    dates and timestamps as ISO 8601 text, with `Z` where the column has a zone. Raises InvalidRowError for one that has no such
    text."""
    check_times(rows)
    return _objects(rows, "}")


def json_lines(rows: pa.RecordBatch) -> memoryview:
    """The same objects, each with a line feed behind it: at most 2 GiB."""
    texts = _objects(rows, "}\n")
    if not rows.num_rows:
        return memoryview(b"")
    _, offsets, content = texts.buffers()
    first, last = memoryview(offsets).cast("i")[texts.offset], memoryview(offsets).cast("i")[texts.offset + len(texts)]
    return memoryview(content)[first:last]


def _objects(rows: pa.RecordBatch, end: str) -> pa.Array:
    if not rows.num_columns:
        return pa.array([("{" + end).encode()] * rows.num_rows, pa.binary())
    parts: list[Any] = []
    for index, name in enumerate(rows.schema.names):
        before = "{" if index == 0 else ","
        parts += [pa.scalar(f"{before}{msgspec.json.encode(name).decode()}:"), _json_texts(rows.column(index))]
    return pc.binary_join_element_wise(*parts, pa.scalar(end), pa.scalar("")).cast(pa.binary())


def _json_texts(column: pa.Array) -> pa.Array:
    """Each value as JSON text, none null."""
    kind = column.type
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        texts = column.cast(pa.string())
    elif pa.types.is_floating(kind):
        finite = pc.if_else(pc.is_finite(column), column, pa.scalar(None, kind))
        texts = finite.cast(pa.string())
        whole = pc.fill_null(pc.match_substring_regex(texts, r"^-?\d+$"), False)
        if pc.any(whole).as_py():  # a reader that infers types would take a file of them for integers
            texts = pc.if_else(whole, pc.binary_join_element_wise(texts, pa.scalar(".0"), pa.scalar("")), texts)
    elif is_text(kind):
        texts = _quoted_texts(column.cast(pa.string()))
    elif pa.types.is_timestamp(kind):
        texts = _timestamps(column)
    elif pa.types.is_date(kind):
        texts = _quoted(column.cast(pa.string()))
    else:
        values = (None if value is None else msgspec.json.encode(_plain(value)).decode() for value in column.to_pylist())
        texts = pa.array(values, pa.string())
    return pc.fill_null(texts, "null")


def _quoted(texts: pa.Array) -> pa.Array:
    quote = pa.scalar('"')
    return pc.binary_join_element_wise(quote, texts, quote, pa.scalar(""))


def _quoted_texts(texts: pa.Array) -> pa.Array:
    escaped = pc.fill_null(pc.match_substring_regex(texts, _ESCAPED), False)
    quoted = _quoted(texts)
    if not pc.any(escaped).as_py():
        return quoted
    proper = pa.array([msgspec.json.encode(text).decode() for text in texts.filter(escaped).to_pylist()], pa.string())
    return pc.replace_with_mask(quoted, escaped, proper)


def _timestamps(column: pa.Array) -> pa.Array:
    """As `2024-01-31T12:00:00.123456`; in UTC with a `Z` where the column has a zone."""
    zone = column.type.tz
    naive = column.cast(pa.timestamp(column.type.unit, "UTC")).cast(pa.timestamp(column.type.unit)) if zone else column
    texts = pc.replace_substring(naive.cast(pa.string()), " ", "T", max_replacements=1)
    return _quoted(pc.binary_join_element_wise(texts, pa.scalar("Z"), pa.scalar("")) if zone else texts)


def _plain(value: Any) -> Any:
    """A value of a nested column for msgspec, which gives NaN as null and decimals as text."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(each) for each in value]
    return value
