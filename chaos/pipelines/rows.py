"""Rows of a user's pipeline: their origin in the graph, and the difference of two runs' rows by operator, key and row.

It decides which rows are equal; the verdict on a run is judging.py's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa

from holdfast.barriers.jobgraph import JobGraph, OperatorDescription
from holdfast.chaos.expectations import Expectation
from holdfast.operators.base import JobPlan

Row = tuple[Any, ...]
"""Values of one output row, in the order of the sink's columns; timestamps as integers (us)."""

USER_KINDS = frozenset({"map", "filter", "flat_map", "map_batches", "process", "window", "aggregate"})
"""Operators that run a user's functions, or aggregate in their place."""

ROW_SHOWN_MAX = 300
"""Characters of a row in a message."""
NINE_DIGITS = 1e-9
"""Relative tolerance: sums of floats differ in the last digits when they are added in another order."""


@dataclass(frozen=True, slots=True)
class RowSource:
    """Origin of some rows."""

    operator: str
    """Uid of the operator that made them; for a sink that of the nearest such operator in front of it."""
    keys: tuple[str, ...]
    """Key columns of its records that its rows still have."""
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UserSink:
    """A sink of a user's pipeline, and the expectations about it."""

    sink_id: str
    rows: RowSource
    schema: pa.Schema
    expectations: tuple[Expectation, ...] = ()


class Difference(msgspec.Struct, frozen=True):
    """The first key whose rows differ."""

    key: str
    """The key as text; empty if its columns are unknown."""
    expected: str
    """Its first missing row; empty without one."""
    found: str
    """Its first extra row; empty without one."""
    missing: int
    extra: int
    place: int | None = None
    """Index of `found` among all rows found."""

    def __str__(self) -> str:
        if not self.expected:
            told = f"{self.found} is too many"
        elif not self.found:
            told = f"{self.expected} is missing"
        else:
            told = f"{self.found} instead of {self.expected}"
        return f"{self.key}: {told}" if self.key else told


# ----------------------------------------------------------------------------------------------------------- in the graph


def sink_rows(plan: JobPlan, sink_id: str, columns: tuple[str, ...]) -> RowSource:
    """Origin of a sink's rows."""
    writer = _writer(plan.graph, sink_id)
    behind = _behind(plan.graph, writer)
    kinds = {operator.uid: operator.kind for operator in _operators(plan.graph)}
    made = next((uid for uid in behind if kinds[uid] in USER_KINDS), behind[0] if behind else writer)
    return RowSource(made, _keys(plan, (made, *behind), columns), columns)


def operator_rows(plan: JobPlan, uid: str, columns: tuple[str, ...]) -> RowSource:
    """Origin of an operator's rows."""
    return RowSource(uid, _keys(plan, (uid, *_behind(plan.graph, uid)), columns), columns)


def operators_before(graph: JobGraph, sink_id: str) -> list[str]:
    """Uids of all operators whose records reach a sink, upstream ones first."""
    behind = set(_behind(graph, _writer(graph, sink_id)))
    return [operator.uid for operator in _operators(graph) if operator.uid in behind]


def _writer(graph: JobGraph, sink_id: str) -> str:
    return next(operator.uid for operator in _operators(graph) if operator.kind == "sink_writer" and operator.sink_id == sink_id)


def _operators(graph: JobGraph) -> list[OperatorDescription]:
    return [operator for vertex in graph.vertices for operator in vertex.operators]


def _behind(graph: JobGraph, uid: str) -> list[str]:
    """Operators upstream of one, nearest first."""
    found: list[str] = []
    waiting = [uid]
    while waiting:
        for each in _inputs(graph, waiting.pop(0)):
            if each not in found:
                found.append(each)
                waiting.append(each)
    return found


def _inputs(graph: JobGraph, uid: str) -> list[str]:
    vertex = next(vertex for vertex in graph.vertices if any(operator.uid == uid for operator in vertex.operators))
    chained = [source for source, target in vertex.chain_edges if target == uid]
    if chained or vertex.operators[0].uid != uid:
        return chained
    return [edge.source_operator for edge in graph.inputs(vertex.vertex_id)]


def _keys(plan: JobPlan, uids: Iterable[str], columns: tuple[str, ...]) -> tuple[str, ...]:
    """Key columns of the nearest keyed operator that the rows still have."""
    for uid in uids:
        names: tuple[str, ...] = getattr(plan.selectors.get((uid, 0)), "names", ())
        if names and set(names) <= set(columns):
            return names
    return ()


# ------------------------------------------------------------------------------------------------------------ differences


def frozen(value: Any) -> Any:
    """A hashable value, equal for equal values: NaN is one value, lists and structs are tuples."""
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, Mapping):
        return tuple(sorted((str(name), frozen(each)) for name, each in value.items()))
    if isinstance(value, list | tuple):
        return tuple(frozen(each) for each in value)
    return value


def frozen_rows(schema: pa.Schema, rows: Sequence[Row]) -> list[Row]:
    """Rows as read from outside, frozen for comparison."""
    return [frozen(row) for row in _with_times(schema, rows)]


def difference(source: RowSource, expected: Sequence[Row], found: Sequence[Row]) -> Difference | None:
    """The first difference of two outputs, in any order; rows are frozen. None without one."""
    wanted, had = Counter(expected), Counter(found)
    if wanted == had:
        return None
    missing, extra = wanted - had, had - wanted
    places = [source.columns.index(name) for name in source.keys]

    def key(row: Row) -> Row:
        return tuple(row[place] for place in places)

    keys = {key(row) for row in missing} & {key(row) for row in extra} or {key(row) for row in (*missing, *extra)}
    first = min(keys, key=repr)
    lost = next((row for row in expected if row in missing and key(row) == first), None)
    place = next((place for place, row in enumerate(found) if row in extra and key(row) == first), None)
    return Difference(
        key=key_text(source.keys, first),
        expected="" if lost is None else row_text(source.columns, lost),
        found="" if place is None else row_text(source.columns, found[place]),
        missing=missing.total(),
        extra=extra.total(),
        place=place if place is None else _last(found, found[place]),
    )


def last_difference(
    source: RowSource, keys: Sequence[str], compared: Sequence[str], expected: Sequence[Row], found: Sequence[Row]
) -> Difference | None:
    """The first difference of the last rows of each key, in these columns; rows are frozen."""
    places = [source.columns.index(name) for name in keys]
    columns = [source.columns.index(name) for name in compared]
    wanted, had = (
        {tuple(row[place] for place in places): (at, row) for at, row in enumerate(rows)} for rows in (expected, found)
    )
    wrong = [
        key
        for key in sorted({*wanted, *had}, key=repr)
        if key not in wanted or key not in had or not _alike(wanted[key][1], had[key][1], columns)
    ]
    if not wrong:
        return None
    first = wrong[0]
    lost, more = wanted.get(first), had.get(first)
    return Difference(
        key=key_text(keys, first),
        expected="" if lost is None else row_text(source.columns, lost[1]),
        found="" if more is None else row_text(source.columns, more[1]),
        missing=sum(key in wanted for key in wrong),
        extra=sum(key in had for key in wrong),
        place=None if more is None else more[0],
    )


def _alike(one: Row, other: Row, columns: Sequence[int]) -> bool:
    pairs = [(one[column], other[column]) for column in columns]
    return all(
        a == b or (isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=NINE_DIGITS, abs_tol=NINE_DIGITS))
        for a, b in pairs
    )


def _last(rows: Sequence[Row], row: Row) -> int:
    return max(place for place, each in enumerate(rows) if each == row)


def key_text(names: Sequence[str], key: Row) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in zip(names, key, strict=True))


def row_text(columns: Sequence[str], row: Row) -> str:
    text = repr(dict(zip(columns, row, strict=True)))
    return text if len(text) <= ROW_SHOWN_MAX else f"{text[:ROW_SHOWN_MAX]} ..."


def named_rows(schema: pa.Schema, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows for a user's function: dicts, times as datetime, as a reader of the sink gets them."""
    return [dict(zip(schema.names, row, strict=True)) for row in _with_times(schema, rows)]


def _with_times(schema: pa.Schema, rows: Sequence[Row]) -> Sequence[Row]:
    """Convert times, which are us since the epoch."""
    if not any(pa.types.is_timestamp(field.type) for field in schema):
        return rows
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    values = [_times(field.type, column) for field, column in zip(schema, columns, strict=True)]
    return list(zip(*values, strict=True))


def _times(kind: pa.DataType, column: Sequence[Any]) -> Sequence[Any]:
    if not pa.types.is_timestamp(kind):
        return column
    times: list[Any] = pa.array(column, pa.int64()).cast(pa.timestamp("us", kind.tz)).to_pylist()
    return times
