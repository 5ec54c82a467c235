"""CORE: columns in the names of folders, `<column>=<value>/...`, as Hive, Spark, DuckDB and pyarrow read them. Pure."""

from __future__ import annotations

from urllib.parse import unquote

import pyarrow as pa

NULL_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""Stands for null, and for an empty text, which no folder's name can hold: it is read as null."""


def values_of(name: str) -> dict[str, str | None]:
    """Partition of a file by its path below the root, as text; empty for one without."""
    found: dict[str, str | None] = {}
    for segment in name.split("/")[:-1]:
        column, equals, value = segment.partition("=")
        if column and equals:
            found[unquote(column)] = None if value == NULL_VALUE else unquote(value)
    return found


def repeated(text: str | None, kind: pa.DataType, rows: int) -> pa.Array:
    """A column of one value. Raises pa.ArrowException for a text that is none of the type."""
    return pa.repeat(pa.scalar(text, pa.string()).cast(kind), rows)


def with_partition(rows: pa.Table, name: str, schema: pa.Schema) -> pa.Table:
    """Rows of a file with those columns of a schema that its name holds."""
    for column, text in values_of(name).items():
        if column in schema.names:
            kind = schema.field(column).type
            rows = rows.append_column(pa.field(column, kind), repeated(text, kind, rows.num_rows))
    return rows
