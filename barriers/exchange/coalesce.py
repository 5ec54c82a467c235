"""Coalescing: small batches that leave a subtask are merged, so that a channel carries few large messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from holdfast.barriers.elements import Batch, Row

MERGE_FRACTION = 4
"""A batch of at least a quarter of the row limit travels as it is: copying it would cost more than its message."""


class Coalescer:
    """Collects small batches of one shape until they are worth a message. Order is kept; the channel flushes before any event."""

    __slots__ = ("_merge_rows_max", "_parts", "_rows", "_rows_max", "since_ms", "size")

    def __init__(self, rows_max: int) -> None:
        self._rows_max = rows_max
        self._merge_rows_max = max(1, rows_max // MERGE_FRACTION)
        self._parts: list[Batch] = []
        self._rows = 0
        self.size = 0
        """Bytes collected. Stored, not computed: back-pressure reads it before every slice."""
        self.since_ms: int | None = None
        """When the first of the collected batches was added; None if there is none."""

    def add(self, batch: Batch, *, now_ms: int) -> list[Batch]:
        """Take a batch; returns those ready to travel, in order. Batches above the row limit are cut."""
        ready: list[Batch] = []
        rows = batch.num_rows
        if self._parts and (not _alike(self._parts[0], batch) or self._rows + rows > self._rows_max):
            ready += self.flush()
        if rows < self._merge_rows_max:
            self._parts.append(batch)
            self._rows += rows
            self.size += batch.size
            if self.since_ms is None:
                self.since_ms = now_ms
            return ready
        ready += self.flush()
        if rows <= self._rows_max:
            return [*ready, batch]
        return ready + [batch.slice(offset, self._rows_max) for offset in range(0, rows, self._rows_max)]

    def flush(self) -> list[Batch]:
        """Remove the collected batches, merged into one; an empty list if there are none."""
        if not self._parts:
            return []
        merged = self._parts[0] if len(self._parts) == 1 else merge(self._parts)
        self._parts = []
        self._rows = self.size = 0
        self.since_ms = None
        return [merged]


def _alike(left: Batch, right: Batch) -> bool:
    """True if merging needs no conversion and loses nothing."""
    if left.is_columnar != right.is_columnar or (left.timestamps is None) != (right.timestamps is None):
        return False
    if left.schema is right.schema:
        return True
    return left.schema is not None and right.schema is not None and bool(left.schema.equals(right.schema, check_metadata=True))


def merge(parts: Sequence[Batch]) -> Batch:
    """One batch of the rows of several alike ones, in order."""
    first = parts[0]
    stamps = None
    if first.timestamps is not None:
        stamps = np.concatenate([part.timestamps for part in parts if part.timestamps is not None])
    if first.is_columnar:
        return first._like(pa.concat_batches([part.columns() for part in parts]), None, stamps)
    rows: list[Row] = []
    for part in parts:
        rows.extend(part.rows())
    return first._like(None, rows, stamps)
