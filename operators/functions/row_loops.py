"""Loops of a user's function over the records of one batch: each row is made when its turn comes.

A row that nobody keeps is gone before the next is made, so that all of them have the same few places in memory; rows that were made
for the whole batch before would be scattered over it. A row is a dict of its own each time. Where the function reads some columns
alone (read_sets.py), it has no others. Rows that are at hand already are taken as they are, and so are instances of a record type.

A loop is compiled once for each set of names: it assigns what makes a row's key current (`KeyCourse`) and the row's columns in one
step, without a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import is_dataclass
from itertools import chain
from operator import length_hint
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.barriers.rows import own_copy, values_of
from holdfast.operators.functions.schema import RowType
from holdfast.statebackends.backend import KeyCourse
from holdfast.statebackends.errors import InvalidConfigError, InvalidRowError

Loop = Callable[..., None]


class LoopShape(NamedTuple):
    """What distinguishes loops."""

    names: tuple[str, ...] | None
    """Columns of the rows that it makes; None: rows are given."""
    selected: tuple[str, ...] = ()
    """Attributes of a KeyCourse's target; none without keys."""
    is_stamped: bool = False
    """Records have event times: `context.timestamp` is set, and it is counted how many rows each record has emitted."""
    carries: bool = False
    """`process` is called with the row and the key's value, and returns a row or None, and the next value or None; `context` is the
    state of that value."""


@functools.lru_cache(maxsize=256)
def row_loop(shape: LoopShape) -> Loop:
    """A loop (process, context, collect, emitted, counts, target, failed, columns).

    `columns`: those of the rows in the order of names, then those of the keys, then event times. On an exception it calls
    `failed(error, row)` with the row at hand."""
    targets, lines = _row_of(shape.names)
    targets += [f"target.{name}" for name in shape.selected]
    lines += _CARRYING if shape.carries else ["process(row, context, collect)"]
    if shape.is_stamped:
        targets.append("stamp" if shape.carries else "context.timestamp")
        lines.append("counts.append(len(emitted))")
    source = [
        "def loop(process, context, collect, emitted, counts, target, failed, columns):",
        *([" value, update, clear = context.value, context.update, context.clear"] if shape.carries else []),
        " row = None",
        " try:",
        f"  for {', '.join(targets)}, in zip(*columns, strict=True):",
        *(f"   {line}" for line in lines),
        " except Exception as error:",
        "  failed(error, row)",
    ]
    return _compiled(source)


_CARRYING = [
    "result = process(row, value())",
    "if type(result) is not tuple or len(result) != 2:",
    " raise no_pair(result)",
    "result, kept = result",
    "if kept is None:",
    " clear()",
    "else:",
    " update(kept)",
    "if result is not None:",
    " collect(own_copy(result) if result is kept else result)",
]


def row_copier(rows: RowType) -> Callable[[Any], Any]:
    """`own_copy` of these rows; faster where their declared columns have no lists and the like."""
    if rows.schema is None or any(pa.types.is_nested(kind) for kind in rows.schema.types):
        return own_copy
    return _flat_copy


def _flat_copy(row: Any) -> Any:
    return row.copy() if type(row) is dict else copy(row)


def emitted_copier(rows: RowType) -> Callable[[Any], Any]:
    """A row that a function emits, apart from what it keeps as state. Of rows without declared columns the row alone, not the lists
    in it."""
    return _shallow_copy if rows.schema is None else functools.partial(_copied_if_it_can_be, row_copier(rows))


def _shallow_copy(row: Any) -> Any:
    return copy(row) if isinstance(row, dict | list | msgspec.Struct) or is_dataclass(row) else row


def _copied_if_it_can_be(own: Callable[[Any], Any], row: Any) -> Any:
    try:
        return own(row)
    except Exception:  # such as of a generator: it does not fit its column either, and that error names the column
        return row


def _no_pair(result: Any) -> TypeError:
    return TypeError(f"it must return a pair, (row or None, value or None), and returned {result!r}")


@functools.lru_cache(maxsize=256)
def call_loop(names: tuple[str, ...] | None, *, counts: bool) -> Loop:
    """A loop (function, take, results, counted, failed, rows) that does `take(function(row))`, and with `counts`
    `counted.append(len(results))`, for each row.

    `names` as of `LoopShape`, `rows`: an iterator over the columns' values (`LoopRows.left`). On an exception it calls
    `failed(error, row)`; if that returns, another call goes on behind the row."""
    targets, lines = _row_of(names)
    lines.append("take(function(row))")
    if counts:
        lines.append("counted.append(len(results))")
    source = [
        "def loop(function, take, results, counted, failed, rows):",
        " row = None",
        " try:",
        f"  for {'row' if names is None else ', '.join(targets) + ','} in rows:",
        *(f"   {line}" for line in lines),
        " except Exception as error:",
        "  failed(error, row)",
    ]
    return _compiled(source)


def _row_of(names: tuple[str, ...] | None) -> tuple[list[str], list[str]]:
    """(targets of the values of a record, the statements that make its row of them)."""
    if names is None:
        return ["row"], []
    variables = [f"v{index}" for index in range(len(names))]
    fields = ", ".join(f"{name!r}: {variable}" for name, variable in zip(names, variables, strict=True))
    return variables or ["_"], [f"row = {{{fields}}}"]


def _compiled(source: list[str]) -> Loop:
    found: dict[str, Any] = {"__name__": __name__, "len": len, "zip": zip, "Exception": Exception}
    found |= {"type": type, "tuple": tuple, "no_pair": _no_pair, "own_copy": own_copy}
    exec(compile("\n".join(source), "<row loop>", "exec"), found)
    loop: Loop = found["loop"]
    return loop


class LoopRows:
    """The rows of one batch for a loop."""

    __slots__ = ("_batch", "_left", "columns", "names")

    def __init__(
        self, batch: Batch, record: Callable[..., Any] | None, reads: Collection[str] | None, *, is_declared: bool = False
    ) -> None:
        """`record`: type of rows, as of `Batch.rows`. `reads`: the columns that the function reads, and perhaps other names; None:
        all of them. `is_declared`: a row has these columns alone even if it was at hand already."""
        self._batch = batch
        self._left: Iterator[Any] | None = None  # rows that the loop has not come to, if these are narrower than those of the batch
        self.names: tuple[str, ...] | None = None
        self.columns: list[Iterable[Any]]
        if not batch.has_rows and batch.makes_dicts(record):
            self._make(batch.columns(), reads)
        elif is_declared and reads is not None:
            self._narrow(batch, batch.rows(record), reads)
        else:
            self.columns = [batch.rows(record)]

    def _narrow(self, batch: Batch, rows: Sequence[Any], reads: Collection[str]) -> None:
        """Rows at hand, with some of their columns. Raises SchemaMismatchError, of who made them, for one that lacks these."""
        names = reads if batch.schema is None else [name for name in batch.schema.names if name in reads]
        try:
            self._left = iter([{name: row[name] for name in names} for row in rows])
            self.columns = [self._left]
        except (LookupError, TypeError):
            self._make(batch.columns(), reads)  # a row that is an object has them, too

    def _make(self, columns: pa.RecordBatch, reads: Collection[str] | None) -> None:
        names = tuple(columns.schema.names)
        if reads is None or len(set(names)) < len(names):  # of columns of one name the last is in the row
            self.names = names
        else:
            self.names = tuple(name for name in names if name in reads)
        self.columns = [values_of(column, name) for name, column in zip(names, columns.columns, strict=True) if name in self.names]
        if not self.names:
            self.columns = [range(columns.num_rows)]
        if len(self.names) < len(names):
            self._left = iter(self.columns[0])
            self.columns[0] = self._left

    @property
    def count(self) -> int:
        return self._batch.num_rows

    @property
    def at_hand(self) -> Sequence[Any] | None:
        """The rows, if none is made in the loop."""
        return self._batch.rows() if self.names is None and self._left is None else None

    def left(self) -> Iterator[Any]:
        """What a `call_loop` iterates over: rows, or values of the columns."""
        return iter(self.columns[0]) if self.names is None else zip(*self.columns, strict=True)

    def record(self, position: int) -> Any:
        """A row with all its columns, as it came in: for an error that shows it."""
        batch = self._batch
        if batch.has_rows:
            return batch.rows()[position]
        alone = batch.slice(position, 1)
        try:
            return alone.rows()[0]
        except (InvalidConfigError, InvalidRowError):  # of a column that the function doesn't read: no reason to hide its own error
            columns = alone.columns()
            return {name: values_of(columns.column(name), name)[0] for name in self.names or ()}

    def whole(self, row: Any) -> Any:
        """The row at hand in the loop, with all its columns: for an error that shows it."""
        if self._left is None or row is None:
            return row
        return self.record(self._batch.num_rows - 1 - length_hint(self._left))


def course_columns(rows: LoopRows, course: KeyCourse | None, stamps: Iterable[int] | None) -> list[Iterable[Any]]:
    """Argument `columns` of a loop."""
    return list(chain(rows.columns, () if course is None else course.columns, () if stamps is None else (stamps,)))
