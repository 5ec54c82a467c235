"""JSON objects as columns of a declared schema, for connectors whose records are bytes: all at once, and those that can't be read
apart.

The objects are read as lines by Arrow. That each line is exactly one row follows from what is checked before: a value that begins
with `{`, ends with `}` and has no line feed can't run into the next one, and gives at least one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pajson

from holdfast.operators.functions.schema import declared_type
from holdfast.operators.sources.file_formats import json_parsing
from holdfast.operators.sources.splits import DeadLetter, SplitRecords
from holdfast.statebackends.errors import InvalidConfigError

ERROR_CHARACTERS_MAX = 300


@dataclass(frozen=True, slots=True)
class JsonColumns:
    """What was made of some values."""

    columns: pa.RecordBatch
    """Those that could be read, in order."""
    indexes: npt.NDArray[np.int64]
    """Of these, among the values."""
    errors: Sequence[tuple[int, str]]
    """Index of each other value, and what is wrong with it."""


def declared_columns(schema: Any, connector: str, name: str) -> pa.Schema:
    """The columns that a user declares for a source. Raises InvalidConfigError for none."""
    found = declared_type(schema, name).schema
    if found is None or not found.names:
        raise InvalidConfigError(f"{connector}: schema has no columns", setting="schema")
    declared: pa.Schema = found.remove_metadata()
    return declared


def json_records(split: str, values: Sequence[bytes | None], behind: npt.NDArray[np.int64], schema: pa.Schema) -> SplitRecords:
    """Values of one split, at least one, as rows, and as dead letters those that can't be read. behind: the position behind each; a
    value's own is one less."""
    found = read_json_columns(values, schema)
    rows = np.searchsorted(found.indexes, [index for index, _ in found.errors])
    letters = [
        DeadLetter((int(behind[index]) - 1,), (int(behind[index]),), error, values[index], int(row))
        for (index, error), row in zip(found.errors, rows, strict=True)
    ]
    columns = found.columns if found.columns.num_rows else None
    positions = behind[found.indexes] if columns is not None else None
    return SplitRecords(split, columns, positions, position=(int(behind[-1]),), dead_letters=letters)


def read_json_columns(values: Sequence[bytes | None], schema: pa.Schema) -> JsonColumns:
    """Fields that the schema does not have are left out; those that are missing are null. A null in a column without nulls, another
    type, a null value, and what is no JSON object are errors of that value."""
    count = len(values)
    table = _read_lines(values, schema)
    if table is not None:
        return JsonColumns(table, np.arange(count, dtype=np.int64), ())
    parts: list[tuple[int, pa.RecordBatch]] = []
    errors: list[tuple[int, str]] = []
    if count:
        _bisect([None if value is None else _compact(value) for value in values], 0, schema, parts, errors)
    indexes = [np.arange(start, start + part.num_rows, dtype=np.int64) for start, part in parts]
    columns = pa.Table.from_batches([part for _, part in parts], schema).combine_chunks().to_batches()
    empty = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
    none = np.arange(0, dtype=np.int64)
    return JsonColumns(columns[0] if columns else empty, np.concatenate(indexes) if indexes else none, errors)


def _bisect(
    values: list[bytes | str | None],
    first: int,
    schema: pa.Schema,
    parts: list[tuple[int, pa.RecordBatch]],
    errors: list[tuple[int, str]],
) -> None:
    """Read halves, and halves of those that can't be read, down to the values that can't. A text is the error of its value."""
    if not any(value is None or isinstance(value, str) for value in values):
        table = _read_lines(values, schema)  # type: ignore[arg-type]
        if table is not None:
            parts.append((first, table))
            return
    if len(values) == 1:
        value = values[0]
        why = "its value is null" if value is None else value if isinstance(value, str) else _why(value, schema)
        errors.append((first, why[:ERROR_CHARACTERS_MAX]))
        return
    middle = len(values) // 2
    _bisect(values[:middle], first, schema, parts, errors)
    _bisect(values[middle:], first + middle, schema, parts, errors)


def _compact(value: bytes) -> bytes | str:
    """One line of it; a text that says what is wrong if it is no JSON.

    One that is nested too deeply to be made a line stays as it is: Arrow reads it all the same if it is one line, and what it is
    must not depend on the values beside it."""
    try:
        return msgspec.json.format(value, indent=-1)
    except RecursionError:
        return value if b"\n" not in value else "it is nested too deeply"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return str(error)


def _read_lines(values: Sequence[bytes | None], schema: pa.Schema) -> pa.RecordBatch | None:
    """A row for each value; None if one of them can't be read."""
    lines = pa.array(values, pa.binary())
    if not len(lines) or lines.null_count:
        return None
    whole = pc.and_(pc.starts_with(lines, b"{"), pc.ends_with(lines, b"}"))
    if not pc.all(whole).as_py():
        return None
    text = b"\n".join(values)  # type: ignore[arg-type]
    if text.count(b"\n") != len(values) - 1:
        return None
    try:
        return _parsed(text, len(values), schema)
    except (pa.ArrowException, ValueError):
        return None


def _parsed(text: bytes, rows: int, schema: pa.Schema) -> pa.RecordBatch:
    """Raises ArrowException, or ValueError, with what is wrong."""
    text.decode()  # Arrow takes any bytes for text
    read = pajson.ReadOptions(use_threads=False, block_size=len(text) + 1)
    parse = json_parsing(pa.schema([field.with_nullable(True) for field in schema]))
    table = pajson.read_json(pa.BufferReader(text), read, parse)
    if table.num_rows != rows:
        raise ValueError(f"{table.num_rows} objects, expected {rows}")
    for field in schema:
        if not field.nullable and table.column(field.name).null_count:
            raise ValueError(f"{field.name!r} is missing or null, in a column that was declared without nulls")
    arrays = []
    for field in schema:
        column = table.column(field.name)
        try:
            column = column if column.type == field.type else column.cast(field.type)
        except pa.ArrowException as error:
            raise ValueError(f"{field.name!r}: {error}") from error
        whole = column.combine_chunks()
        arrays.append(whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _why(value: bytes, schema: pa.Schema) -> str:
    if not value.startswith(b"{"):
        return "it is no JSON object"
    try:
        _parsed(value, 1, schema)
    except (pa.ArrowException, ValueError) as error:
        return str(error)
    return "it can't be read"
