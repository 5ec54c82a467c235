"""Rows that each operator of a user's pipeline emits in a run without failures, with their counts.

A comparison of two such runs shows the first operator that emits other rows in another order of arrival."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.chaos.pipelines.rows import Row, frozen
from holdfast.operators.base import Operator, OperatorContext, Output
from holdfast.statebackends.errors import HoldfastError

ROWS_MAX = 500_000
"""Rows kept over all operators of a run; a run with more compares its sinks alone."""


class EmittedRows:
    """Emitted rows of one run."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = {}
        """Output -> frozen rows, in the order of emission. The main output of an operator is called by its uid, a side output
        `uid:tag`."""
        self.columns: dict[str, tuple[str, ...]] = {}
        self.complete = True
        self._count = 0

    def watch(self, operator: Operator, uid: str) -> None:
        """Record what an operator emits; to be called before its `setup`."""
        original = operator.setup

        def setup(context: OperatorContext, output: Output) -> None:
            original(context, _Noted(output, uid, self))

        operator.setup = setup  # type: ignore[method-assign]

    def outputs_of(self, uid: str) -> list[str]:
        """The main output, and the side outputs with rows."""
        return [uid, *sorted(output for output in self.rows if output.startswith(f"{uid}:"))]

    def add(self, output: str, batch: Batch) -> None:
        """Keep rows as they are now: their receiver may change them."""
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
    """Implements `holdfast.operators.base.Output` in front of another output."""

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

    def emit_watermark_now(self, timestamp_ms: int) -> None:
        self._output.emit_watermark_now(timestamp_ms)

    def emit_status(self, *, idle: bool) -> None:
        self._output.emit_status(idle=idle)


def _rows_of(batch: Batch) -> tuple[tuple[str, ...], list[Row]]:
    columns = batch.columns()
    values: list[list[Any]] = [column.to_pylist() for column in columns.columns]
    return tuple(columns.schema.names), [frozen(row) for row in zip(*values, strict=True)]
