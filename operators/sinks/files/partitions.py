"""CORE: folders of a file sink's partitions, `<column>=<value>/...`, as Hive, Spark, DuckDB and pyarrow read them. Pure.

The columns of the partition are in the names alone; our readers put them back, with the types that the sink declared."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.barriers.rows import PYTHON_DATES
from holdfast.operators.sources.hive import NULL_VALUE
from holdfast.statebackends.errors import GraphError, InvalidConfigError, InvalidRowError

PARTITIONS_MAX = 10_000
"""Partitions that one writer has rows of at one time: each is a file."""
VALUE_BYTES_MAX = 200
"""Of one folder's name, column included; file systems take 255."""
_ESCAPED = re.compile(r"[\x00-\x1f\x7f\"#%'*/:=?\\{}\[\]^|]")
"""Hive's and Spark's characters, and `|`, which separates locations in a snapshot."""


def check_partitions(columns: Sequence[str], schema: pa.Schema, sink: str) -> None:
    """Raises GraphError naming the column."""
    for name in columns:
        if name not in schema.names:
            raise GraphError(f"sink {sink}: there is no column {name!r} to partition by", column=name)
        kind = schema.field(name).type
        types = pa.types
        if not (types.is_string(kind) or types.is_integer(kind) or types.is_boolean(kind) or types.is_date32(kind)):
            message = f"sink {sink}: {name} is {kind}: partitions are by text, integers, booleans and dates (date32)"
            raise GraphError(message, column=name)
    if len(set(columns)) == len(schema.names):
        raise GraphError(f"sink {sink}: every column is one of the partition, so that files would have none")


def split_rows(table: pa.Table, columns: Sequence[str], sink: str) -> Iterator[tuple[str, pa.Table]]:
    """(folder, rows without the partition's columns, in their order), in the order of first rows. Raises InvalidRowError for a
    value that is too long, InvalidConfigError for too many partitions."""
    groups = _numbered(table, columns)
    firsts, starts = np.unique(groups, return_index=True)
    if len(firsts) > PARTITIONS_MAX:
        message = f"sink {sink}: rows of {len(firsts):,} partitions at one time, at most {PARTITIONS_MAX:,}"
        raise InvalidConfigError(message, setting="partition_by")
    rest = table.drop_columns(list(columns))
    order = np.argsort(groups, kind="stable")
    rest, bounds = rest.take(pa.array(order)), [*np.searchsorted(groups[order], firsts).tolist(), len(order)]
    keys = {name: _values(table.column(name).take(pa.array(starts)), name, sink) for name in columns}
    for index in np.argsort(starts).tolist():
        folder = "/".join(_segment(name, values[index], sink) for name, values in keys.items())
        yield folder, rest.slice(bounds[index], bounds[index + 1] - bounds[index])


def _numbered(table: pa.Table, columns: Sequence[str]) -> Any:
    """A number for each row, equal where the columns are."""
    numbers = np.zeros(table.num_rows, np.int64)
    for name in columns:
        coded = pc.dictionary_encode(table.column(name).combine_chunks(), null_encoding="encode")
        coded = coded.combine_chunks() if isinstance(coded, pa.ChunkedArray) else coded
        codes = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        # numbered without gaps after each column, so that products stay small
        numbers = np.unique(numbers * (len(coded.dictionary) + 1) + codes, return_inverse=True)[1].astype(np.int64)
    return numbers


def _segment(name: str, value: Any, sink: str) -> str:
    text = _text_of(value)
    if text == NULL_VALUE:
        raise _refused(sink, name, "a folder of that name stands for null", text)
    # readers pass over folders that begin with a dot
    segment = f"{'%2E' * name.startswith('.')}{_escape(name.removeprefix('.'))}={_escape(text) if text else NULL_VALUE}"
    if len(segment.encode()) > VALUE_BYTES_MAX:
        raise _refused(sink, name, f"the name of its partition has more than {VALUE_BYTES_MAX} bytes", text)
    return segment


def _values(column: pa.ChunkedArray, name: str, sink: str) -> list[Any]:
    """Values of a column of the partition as Python's."""
    try:
        found: list[Any] = column.to_pylist()
    except (OverflowError, ValueError) as error:  # a date: of the other types Python has all values
        first, last = PYTHON_DATES
        odd = next(day for day in column.cast(pa.int32()).to_pylist() if day is not None and not first <= day <= last)
        raise _refused(sink, name, f"{odd} days since 1970 are no date of the years 1 to 9999", str(odd)) from error
    return found


def _refused(sink: str, column: str, reason: str, value: str) -> InvalidRowError:
    message = f"sink {sink}: {column}: {reason}"
    return InvalidRowError(message, operator=sink, column=column, reason=reason, record=repr(value)[:200])


def _text_of(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.isoformat() if isinstance(value, date) else str(value)


def _escape(text: str) -> str:
    return _ESCAPED.sub(lambda found: f"%{ord(found.group()):02X}", text)
