"""CORE: rows that a sink would refuse, or change, behind their checkpoint: found in front of it, and shown. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.statebackends.errors import InvalidRowError

_SECONDS = (-62_167_219_200, 253_402_300_799)
"""The first and the last second of the years 0 to 9999, since 1970: others have no text of ISO 8601, and Arrow writes `<value out
of range>` for some."""
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_DAY_S = 86_400


def first_refused(check: Callable[[pa.Array], str | None], values: pa.Array) -> tuple[int, str]:
    """The first value that a check refuses, and why: found by halves, since a check takes each value by itself."""
    begin, count = 0, len(values)
    while count > 1:
        half = count // 2
        if check(values.slice(begin, half)) is None:
            begin, count = begin + half, count - half
        else:
            count = half
    return begin, check(values.slice(begin, 1)) or ""


def shown_row(rows: pa.RecordBatch, row: int) -> str:
    """A row for an error's text, cut to 500 characters; also one with times that Python has no object for."""
    values = ", ".join(f"{name!r}: {_shown(column[row])}" for name, column in zip(rows.schema.names, rows.columns, strict=True))
    return f"{{{values}"[:499] + "}"


def _shown(value: pa.Scalar) -> str:
    try:
        return repr(value.as_py())
    except (ValueError, OverflowError):
        return repr(value.value) if hasattr(value, "value") else f"<{value.type}>"


def check_column(rows: pa.RecordBatch, name: str, check: Callable[[pa.Array], str | None], where: str) -> None:
    """Raises InvalidRowError for the first row whose value in a column is refused; its text begins with `where`."""
    values = rows.column(name)
    if check(values) is not None:
        row, reason = first_refused(check, values)
        record = shown_row(rows, row)
        raise InvalidRowError(f"{where}column {name} of row {record}: {reason}", column=name, reason=reason, record=record)


def check_times(rows: pa.RecordBatch, where: str = "") -> None:
    """Raises InvalidRowError for the first row with a date or a time, also within a list or a struct, that no text stands for."""
    for name, values in zip(rows.schema.names, rows.columns, strict=True):
        if _holds_times(values.type):
            check_column(rows, name, time_without_text, where)


def time_without_text(values: pa.Array) -> str | None:
    """Why one of these values has no text."""
    for part in _times_in(values):
        kind = part.type
        if pa.types.is_date32(kind):
            first, last = _SECONDS[0] // _DAY_S, _SECONDS[1] // _DAY_S
        else:
            scale = 1_000 if pa.types.is_date64(kind) else _PER_SECOND[kind.unit]
            first, last = _SECONDS[0] * scale, _SECONDS[1] * scale + scale - 1
        found = pc.min_max(part)
        for bound in (found["min"], found["max"]):
            if bound.is_valid and not first <= bound.value <= last:
                return f"{bound.value} is a {kind} beyond the years 0 to 9999, which has no text"
    return None


def _holds_times(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return any(_holds_times(kind.field(index).type) for index in range(kind.num_fields))
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def _times_in(values: pa.Array) -> Iterator[pa.Array]:
    """Its dates and times, with those of lists and structs; of what is null, none."""
    kind = values.type
    if not _holds_times(kind):
        return
    if pa.types.is_struct(kind):
        parts = values.flatten()
    elif pa.types.is_map(kind):
        entries = values.take(pa.array(np.arange(len(values))))  # `keys` and `items` of a slice are those of the whole
        parts = [entries.keys, entries.items]
    elif pa.types.is_nested(kind):
        parts = [values.flatten()]
    else:
        yield values
        return
    for part in parts:
        yield from _times_in(part)
