"""What each operator of a user's pipeline gives in a run without failures: rows with their counts, as they leave it.

Two such runs tell which operator is the first to give other rows in another order of arrival."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.chaos.pipelines.rows import Row, frozen
from holdfast.operators.base import Operator, OperatorContext, Output
from holdfast.statebackends.errors import HoldfastError

ROWS_MAX = 500_000
"""Rows that are kept of all operators of a run; one with more tells of its sinks alone."""


class EmittedRows:
    """Of one run."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = {}
        """Output -> frozen rows, in the order in which they were given. The main output of an operator is called by its uid, a side
        output `uid:tag`."""
        self.columns: dict[str, tuple[str, ...]] = {}
        self.complete = True
        self._count = 0

    def watch(self, operator: Operator, uid: str) -> None:
        """Note what an operator gives from now on; before its `setup`."""
        original = operator.setup

        def setup(context: OperatorContext, output: Output) -> None:
            original(context, _Noted(output, uid, self))

        operator.setup = setup  # type: ignore[method-assign]

    def outputs_of(self, uid: str) -> list[str]:
        """The main output, and the side outputs that had rows."""
        return [uid, *sorted(output for output in self.rows if output.startswith(f"{uid}:"))]

    def add(self, output: str, batch: Batch) -> None:
        """Rows are noted as they are now: who takes them may change them."""
        self._count += batch.num_rows
        if not self.complete or self._count > ROWS_MAX:
            self.complete = False
            self.rows.clear()
            return
        try:
            columns, rows = _rows_of(batch)
        except (HoldfastError, pa.ArrowException):
            return  # rows of no declared type, which no sink takes
        known = self.columns.setdefault(output, columns)
        if known == columns:
            self.rows.setdefault(output, []).extend(rows)

    def counted(self, output: str) -> Counter[Row]:
        return Counter(self.rows.get(output, ()))


class _Noted:
    """Implements `holdfast.operators.base.Output` in front of another one."""

    def __init__(self, output: Output, uid: str, emitted: EmittedRows) -> None:
        self._output = output
        self._uid = uid
        self._emitted = emitted

    def collect(self, batch: Batch) -> None:
        if batch.num_rows:
            self._emitted.add(self._uid, batch)
        self._output.collect(batch)

    def collect_side(self, tag: str, batch: Batch) -> None:
        if batch.num_rows:
            self._emitted.add(f"{self._uid}:{tag}", batch)
        self._output.collect_side(tag, batch)

    def has_readers(self, tag: str) -> bool:
        return self._output.has_readers(tag)

    def emit_watermark(self, timestamp_ms: int) -> None:
        self._output.emit_watermark(timestamp_ms)


def _rows_of(batch: Batch) -> tuple[tuple[str, ...], list[Row]]:
    columns = batch.columns()
    values: list[list[Any]] = [column.to_pylist() for column in columns.columns]
    return tuple(columns.schema.names), [frozen(row) for row in zip(*values, strict=True)]
