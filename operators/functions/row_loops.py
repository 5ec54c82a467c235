"""Loops of a user's function over the records of one batch: each row is made when its turn comes.

A row that nobody keeps is gone before the next is made, so that all of them have the same few places in memory; rows that were made
for the whole batch before would be scattered over it. A row is a dict of its own each time. Where the function reads some columns
alone (read_sets.py), it has no others. Rows that are at hand already are taken as they are, and so are instances of a record type.

A loop is compiled once for each set of names: it assigns what makes a row's key current (`KeyCourse`) and the row's columns in one
step, without a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from operator import length_hint
from typing import Any, NamedTuple

import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.barriers.rows import values_of
from holdfast.statebackends.backend import KeyCourse

Loop = Callable[..., None]


class LoopShape(NamedTuple):
    """What distinguishes loops."""

    names: tuple[str, ...] | None
    """Columns of the rows that it makes; None: rows are given."""
    selected: tuple[str, ...] = ()
    """Attributes of a KeyCourse's target; none without keys."""
    is_stamped: bool = False
    """Records have event times: `context.timestamp` is set, and it is counted how many rows each record has emitted."""


@functools.lru_cache(maxsize=256)
def row_loop(shape: LoopShape) -> Loop:
    """A loop (process, context, collect, emitted, counts, target, failed, columns).

    `columns`: those of the rows in the order of names, then those of the keys, then event times. On an exception it calls
    `failed(error, row)` with the row at hand."""
    variables = ["row"] if shape.names is None else [f"v{index}" for index in range(len(shape.names))]
    targets = [*(variables or ["_"]), *(f"target.{name}" for name in shape.selected)]
    lines = ["process(row, context, collect)"]
    if shape.names is not None:
        fields = ", ".join(f"{name!r}: {variable}" for name, variable in zip(shape.names, variables, strict=True))
        lines.insert(0, f"row = {{{fields}}}")
    if shape.is_stamped:
        targets.append("context.timestamp")
        lines.append("counts.append(len(emitted))")
    source = [
        "def loop(process, context, collect, emitted, counts, target, failed, columns):",
        " row = None",
        " try:",
        f"  for {', '.join(targets)}, in zip(*columns, strict=True):",
        *(f"   {line}" for line in lines),
        " except Exception as error:",
        "  failed(error, row)",
    ]
    found: dict[str, Any] = {"__name__": __name__, "len": len, "zip": zip, "Exception": Exception}
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
            self._left = iter([{name: row[name] for name in reads} for row in batch.rows(record)])
            self.columns = [self._left]
        else:
            self.columns = [batch.rows(record)]

    def _make(self, columns: pa.RecordBatch, reads: Collection[str] | None) -> None:
        names = tuple(columns.schema.names)
        if reads is None or len(set(names)) < len(names):  # of columns of one name the last is in the row
            self.names = names
        else:
            self.names = tuple(name for name in names if name in reads)
        self.columns = [values_of(column) for name, column in zip(names, columns.columns, strict=True) if name in self.names]
        if not self.names:
            self.columns = [range(columns.num_rows)]
        if len(self.names) < len(names):
            self._left = iter(self.columns[0])
            self.columns[0] = self._left

    def whole(self, row: Any) -> Any:
        """The row at hand in the loop, with all its columns: for an error that shows it."""
        if self._left is None or row is None:
            return row
        place = self._batch.num_rows - 1 - length_hint(self._left)
        return self._batch.slice(place, 1).rows()[0]


def course_columns(rows: LoopRows, course: KeyCourse | None, stamps: Iterable[int] | None) -> list[Iterable[Any]]:
    """Argument `columns` of a loop."""
    return list(chain(rows.columns, () if course is None else course.columns, () if stamps is None else (stamps,)))
