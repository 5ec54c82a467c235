"""Stream elements: batches of records, and events that keep their place among them in a channel.

A Batch holds rows or columns and converts lazily, at most once, where the two meet. It knows nothing of channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.barriers.erasure import Erasure
from holdfast.barriers.rows import columns_to_rows, copied_apart, fitting_columns, rows_to_columns, text_of
from holdfast.statebackends.errors import InvalidConfigError, InvalidRowError

MIN_WATERMARK = -(2**63)
MAX_WATERMARK = 2**63 - 1

CLOCK_MS_MAX = 2**53
"""Latest wall clock that a marker tells, in ms: in 285,000 years."""
VERTEX_CHARACTERS_MAX = 128
"""Of the id of a vertex; ours have 32."""
SUBTASK_MAX = 2**15
"""Greatest index of a subtask, and more: there are 32,768 at most."""

Row: TypeAlias = Any
"""A dict by column name, an instance of the declared record type, or any object where no schema is declared."""


class Batch:
    """A run of records, in order, with optional event timestamps.

    Exactly one of rows and columns is given; the other is made on first use when a schema is known. Immutable."""

    __slots__ = ("_column_bytes", "_columns", "_row_factory", "_rows", "_time_range", "producer", "schema", "timestamps")

    def __init__(
        self,
        *,
        columns: pa.RecordBatch | None = None,
        rows: Sequence[Row] | None = None,
        schema: pa.Schema | None = None,
        timestamps: npt.NDArray[np.int64] | None = None,
        row_factory: Callable[..., Row] | None = None,
        producer: str = "",
    ) -> None:
        if (columns is None) == (rows is None):
            raise InvalidConfigError("a batch holds either rows or columns")
        self._columns = columns
        self._rows = rows
        self.schema: pa.Schema | None = columns.schema if columns is not None else schema
        self.timestamps = timestamps
        """Event time of each row, int64 ms since the epoch, UTC; None before timestamps are assigned."""
        self._row_factory = row_factory
        self.producer = producer
        """The operator that made the rows, named when one of them does not fit the schema."""
        self._column_bytes = 0
        self._time_range: tuple[int, int] | None = None

    @property
    def num_rows(self) -> int:
        if self._columns is not None:
            return int(self._columns.num_rows)
        assert self._rows is not None
        return len(self._rows)

    def __len__(self) -> int:
        return self.num_rows

    @property
    def is_columnar(self) -> bool:
        """True when columns are at hand without a conversion."""
        return self._columns is not None

    @property
    def has_rows(self) -> bool:
        """True when rows are at hand without a conversion."""
        return self._rows is not None

    def makes_dicts(self, row_factory: Callable[..., Row] | None = None) -> bool:
        """Whether `rows(row_factory)` makes dicts of the columns, where it makes rows."""
        return row_factory is None and self._row_factory is None

    def columns(self) -> pa.RecordBatch:
        """The records as columns. Raises InvalidConfigError when no schema was declared (found when the graph is built),
        SchemaMismatchError when a row does not fit it."""
        if self._columns is None:
            if self.schema is None:
                raise InvalidConfigError("rows without a declared schema can't become columns: declare returns=")
            self._columns = rows_to_columns(self._rows or (), self.schema, self.producer)
        return self._columns

    def fits(self) -> bool:
        """Whether the rows fit the declared columns, which are then at hand: `columns()` would raise, and search for the row."""
        if self._columns is None and self.schema is not None:
            self._columns = fitting_columns(self._rows or (), self.schema)
        return self._columns is not None

    def rows(self, row_factory: Callable[..., Row] | None = None) -> Sequence[Row]:
        """The records as rows: dicts by column name, or the declared record type (of the batch, or `row_factory`)."""
        if self._rows is None:
            assert self._columns is not None
            self._rows = columns_to_rows(self._columns, row_factory or self._row_factory)
        return self._rows

    def slice(self, offset: int, length: int | None = None) -> Batch:
        """Rows [offset, offset + length); no copy of columns."""
        stop = self.num_rows if length is None else min(self.num_rows, offset + length)
        stamps = None if self.timestamps is None else self.timestamps[offset:stop]
        rows = None if self._rows is None else self._rows[offset:stop]
        columns = None if self._columns is None else self._columns.slice(offset, stop - offset)
        return self._like(columns, rows, stamps)

    def cut(self, lengths: Sequence[int]) -> list[Batch]:
        """Consecutive slices of these many rows each, without an empty one. The size of columns is counted once, and each slice
        has its share by rows."""
        parts, offset = [], 0
        for length in lengths:
            if length:
                part = self.slice(offset, length)
                if self._columns is not None:
                    part._column_bytes = max(1, self.size * length // self.num_rows)
                parts.append(part)
                offset += length
        return parts

    def take(self, indices: npt.NDArray[np.int64]) -> Batch:
        """The named rows, in the order of `indices`."""
        stamps = None if self.timestamps is None else self.timestamps[indices]
        if self._columns is not None:
            return self._like(self._columns.take(pa.array(indices)), None, stamps)
        assert self._rows is not None
        rows = self._rows
        return self._like(None, [rows[i] for i in indices.tolist()], stamps)

    def filter(self, mask: npt.NDArray[np.bool_]) -> Batch:
        """The rows where `mask` is true; whatever representations are at hand are kept, so that nothing is converted twice."""
        stamps = None if self.timestamps is None else self.timestamps[mask]
        columns = None if self._columns is None else self._columns.filter(pa.array(mask))
        rows = None if self._rows is None else list(compress(self._rows, mask.tolist()))
        return self._like(columns, rows, stamps)

    def select(self, names: Sequence[str]) -> Batch:
        """The same records with some of their columns; as rows they are dicts. Rows that are no columns yet stay as they are."""
        if self._columns is None:
            return self
        return Batch(columns=self._columns.select(list(names)), timestamps=self.timestamps, producer=self.producer)

    def unshared(self) -> Batch:
        """The same records with rows of its own, for one of several consumers: a function that changes its row in place
        must not be seen by the others. Columns are immutable and stay shared. Raises InvalidRowError for a row that can't be
        copied, such as one with a lock in it."""
        if self._columns is None and self.schema is None:
            assert self._rows is not None
            return self._like(None, _copies(self._rows), self.timestamps)
        return self._like(self.columns(), None, self.timestamps)

    def with_timestamps(self, timestamps: npt.NDArray[np.int64]) -> Batch:
        """The same records with these event times."""
        return self._like(self._columns, self._rows, timestamps)

    def time_range(self) -> tuple[int, int]:
        """The earliest and the latest event time, found once: whoever assigns times, follows or combines them asks, and windows
        do. The batch has timestamps and at least one row."""
        if self._time_range is None:
            assert self.timestamps is not None
            self._time_range = int(self.timestamps.min()), int(self.timestamps.max())
        return self._time_range

    def _like(
        self,
        columns: pa.RecordBatch | None,
        rows: Sequence[Row] | None,
        stamps: npt.NDArray[np.int64] | None,
    ) -> Batch:
        batch = Batch.__new__(Batch)
        batch._columns = columns
        batch._rows = rows
        batch.schema = self.schema
        batch.timestamps = stamps
        batch._row_factory = self._row_factory
        batch.producer = self.producer
        batch._column_bytes = 0
        batch._time_range = None
        return batch

    @property
    def size(self) -> int:
        """Bytes: exact for columns but for those of `cut`, an estimate of 64 a row for rows. For credit and back-pressure only."""
        if self._columns is not None:
            if not self._column_bytes:  # asked on either side of every exchange
                self._column_bytes = max(1, int(self._columns.nbytes))
            return self._column_bytes
        return max(1, 64 * self.num_rows)


def _copies(rows: Sequence[Row]) -> list[Row]:
    """Raises InvalidRowError."""
    copies: list[Row] = []
    try:
        for row in rows:
            copies.append(copied_apart(row))
    except Exception as error:
        reason = f"it can't be copied: {type(error).__name__}: {text_of(error, str)}"
        record = text_of(rows[len(copies)], repr)
        message = f"a row can't be given to several readers, {reason}; record {record}"
        raise InvalidRowError(message, reason=reason, record=record) from error
    return copies


class Watermark(msgspec.Struct, frozen=True, tag="watermark"):
    """No record with event time <= timestamp_ms follows (records at exactly it are late)."""

    timestamp_ms: Annotated[int, msgspec.Meta(ge=MIN_WATERMARK, le=MAX_WATERMARK)]


class WatermarkStatus(msgspec.Struct, frozen=True, tag="status"):
    """The channel goes idle (its watermark no longer counts) or comes back."""

    idle: bool


class CheckpointBarrier(msgspec.Struct, frozen=True, tag="barrier"):
    """Separates the records that belong to checkpoint `checkpoint_id` from those that do not."""

    checkpoint_id: int
    timestamp_ms: int
    """Creation (trigger) time, wall clock ms."""
    kind: str = "checkpoint"
    """CheckpointKind value: checkpoint | savepoint | stop_savepoint | final."""
    drain: bool = False
    folder: str = ""
    """Storage-relative folder of the snapshot."""
    base: int | None = None
    """The only checkpoint that an increment may build on."""
    native: bool = False
    """A savepoint in the state backend's own files, not in tables that every backend reads."""
    unaligned: bool = False
    """It may overtake, on edges where that is allowed."""
    aligned_timeout_ms: int | None = None
    """Age of the checkpoint from which on it does; 0: at once, None: never."""
    erasure: Erasure | msgspec.UnsetType = msgspec.UNSET
    """A key that leaves keyed state at the cut; absent from all other checkpoints."""


def may_overtake(barrier: CheckpointBarrier) -> bool:
    """Whether it ever overtakes, on an edge where that is allowed."""
    return barrier.unaligned and barrier.aligned_timeout_ms is not None


def overtakes_at_ms(barrier: CheckpointBarrier, *, now_ms: int, wall_ms: int) -> int:
    """Monotonic time from which on a barrier that may overtake does, if it is seen first now.

    Its age is measured from here on by the monotonic clock: a wall clock that is ahead makes it early, one that is behind makes it
    late by its timeout at most."""
    age_ms = max(0, wall_ms - barrier.timestamp_ms)
    return now_ms + max(0, (barrier.aligned_timeout_ms or 0) - age_ms)


class CancelMarker(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop waiting for barrier `checkpoint_id`: it will not come on this channel."""

    checkpoint_id: int


class LatencyMarker(msgspec.Struct, frozen=True, tag="latency"):
    """Travels among the records to measure latency: it overtakes none of its channel, and user code does not see it.

    It waits behind a barrier as they do, and belongs to no snapshot."""

    marked_ms: Annotated[int, msgspec.Meta(ge=0, le=CLOCK_MS_MAX)]
    """ms since the epoch, by the clock of the source."""
    vertex: Annotated[str, msgspec.Meta(max_length=VERTEX_CHARACTERS_MAX)]
    subtask: Annotated[int, msgspec.Meta(ge=0, le=SUBTASK_MAX)]


class EndOfData(msgspec.Struct, frozen=True, tag="end_of_data"):
    """No more records on this channel; barriers may still come. `drain` False: stopped, windows stay open.

    `stopped`: the drain of a job that is stopped, and may go on later. Its maximum watermark is not sent: at a reader of other
    channels it would let event time run ahead of records that are read after the restore."""

    drain: bool = True
    stopped: bool = False


class EndOfPartition(msgspec.Struct, frozen=True, tag="end_of_partition"):
    """Nothing more on this channel, not even barriers."""


ElementEvent: TypeAlias = (
    Watermark | WatermarkStatus | CheckpointBarrier | CancelMarker | LatencyMarker | EndOfData | EndOfPartition
)
Element: TypeAlias = Batch | ElementEvent
