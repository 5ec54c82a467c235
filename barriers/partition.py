"""How a producer's batches are dealt out over the channels of one edge: forward, hash, rebalance, broadcast.

Pure and vectorised: a partitioner returns (channel, batch) pairs and keeps at most a few counters. It knows nothing of
credit, queues or frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

from holdfast.barriers.elements import Batch, Row
from holdfast.barriers.jobgraph import JobEdge, Partitioning
from holdfast.statebackends.errors import InvalidConfigError, InvariantError, UnknownColumnError
from holdfast.statebackends.keygroups import check_parallelism, subtasks_of_key_groups
from holdfast.statebackends.serialization.key_columns import ArrowKeyColumn
from holdfast.statebackends.serialization.keys import KeyType

REBALANCE_SLICE_ROWS_MIN = 1024
"""Rows; a batch is cut for rebalancing only if every slice has at least so many, else it goes whole to one channel."""

SCAN_PARALLELISM_MAX = 12
"""Subtasks; for so few, looking for each one's rows is faster than sorting all rows (measured: 2.5 times for two)."""

Parts: TypeAlias = Sequence[tuple[int, Batch]]
KeyFunction: TypeAlias = Callable[[Sequence[Row]], Sequence[Any]]
"""Rows -> one key value per row, in the rows' order."""


class Partitioner(Protocol):
    """Deals out the rows of a batch. Order within a channel is the order of the batch; empty parts are left out."""

    def split(self, batch: Batch) -> Parts: ...


class ForwardPartitioner:
    """Everything to the only channel: subtask i feeds subtask i."""

    def split(self, batch: Batch) -> Parts:
        return ((0, batch),) if batch.num_rows else ()


class BroadcastPartitioner:
    """Everything to every channel; the batch is shared, not copied."""

    def __init__(self, channel_count: int) -> None:
        self._channel_count = channel_count

    def split(self, batch: Batch) -> Parts:
        return [(channel, batch) for channel in range(self._channel_count)] if batch.num_rows else ()


class RebalancePartitioner:
    """Equal row counts over the channels, whatever the sizes of the batches.

    A large batch is cut into contiguous slices, one a channel, the odd rows to the channels that have the fewest; a small one
    goes whole to the channel with the fewest rows so far (the next in turn among equals). Counts of two channels never differ
    by more than the largest batch that went whole."""

    def __init__(self, channel_count: int, *, slice_rows_min: int = REBALANCE_SLICE_ROWS_MIN) -> None:
        self._channel_count = channel_count
        self._slice_rows_min = slice_rows_min
        self._rows = [0] * channel_count
        """Rows given to each channel, less what all of them got."""
        self._turn = 0

    def split(self, batch: Batch) -> Parts:
        rows, channels = batch.num_rows, self._channel_count
        if rows == 0:
            return ()
        if channels == 1:
            return ((0, batch),)
        by_load = sorted(range(channels), key=lambda channel: (self._rows[channel], (channel - self._turn) % channels))
        if rows < channels * self._slice_rows_min:
            target = by_load[0]
            self._rows[target] += rows
            self._turn = target + 1
            self._settle()
            return ((target, batch),)
        base, odd = divmod(rows, channels)
        favoured = set(by_load[:odd])
        parts, offset = [], 0
        for channel in range(channels):
            length = base + (channel in favoured)
            parts.append((channel, batch.slice(offset, length)))
            self._rows[channel] += length
            offset += length
        self._settle()
        return parts

    def _settle(self) -> None:
        lowest = min(self._rows)
        self._rows = [count - lowest for count in self._rows]


class HashPartitioner:
    """Rows to the subtask that owns their key group.

    Keyed by `columns`, or by `key_function` when there are none. With one subtask no key is looked at: the keyed operator checks
    them anyway. Raises InvalidKeyError naming `operator` on a null or ill-typed key, UnknownColumnError on a missing column."""

    def __init__(
        self,
        *,
        key_type: KeyType,
        parallelism: int,
        max_parallelism: int,
        operator: str,
        columns: Sequence[str] | None = None,
        key_function: KeyFunction | None = None,
    ) -> None:
        if (columns is None) == (key_function is None):
            raise InvalidConfigError(f"operator {operator!r}: a hash edge needs key columns or a key function", operator=operator)
        check_parallelism(max_parallelism, parallelism)
        self._key_type = key_type
        self._parallelism = parallelism
        self._max_parallelism = max_parallelism
        self._operator = operator
        self._columns = tuple(columns) if columns is not None else None
        self._key_function = key_function

    def split(self, batch: Batch) -> Parts:
        if batch.num_rows == 0:
            return ()
        if self._parallelism == 1:
            return ((0, batch),)
        groups = self.keys(batch).key_groups
        return split_by_subtask(batch, subtasks_of_key_groups(groups, self._max_parallelism, self._parallelism), self._parallelism)

    def keys(self, batch: Batch) -> ArrowKeyColumn:
        """The keys of a batch's rows; taken from columns when it has them, from rows otherwise."""
        if self._key_function is not None:
            values = self._key_function(batch.rows())
            if len(values) != batch.num_rows:
                raise InvariantError(f"operator {self._operator!r}: {len(values)} keys for {batch.num_rows} rows")
            return self._of_values(values)
        assert self._columns is not None
        if batch.is_columnar:
            return self._of_columns(batch)
        return self._of_values(self._read(batch.rows()))

    def _of_columns(self, batch: Batch) -> ArrowKeyColumn:
        columns = batch.columns()
        names = columns.schema.names
        for name in self._columns or ():
            if name not in names:
                raise self._unknown(name, names)
        arrays = [columns.column(name) for name in self._columns or ()]
        return self._key_type.column(arrays, max_parallelism=self._max_parallelism, operator=self._operator)

    def _of_values(self, values: Sequence[Any]) -> ArrowKeyColumn:
        return self._key_type.column_of_values(values, max_parallelism=self._max_parallelism, operator=self._operator)

    def _read(self, rows: Sequence[Row]) -> list[Any]:
        """Key values of rows: the field itself for a scalar key, a tuple of the fields otherwise."""
        names = self._columns or ()
        as_dicts = isinstance(rows[0], dict)
        fields: list[list[Any]] = []
        for name in names:
            try:
                fields.append([row[name] for row in rows] if as_dicts else [getattr(row, name) for row in rows])
            except (KeyError, AttributeError) as error:
                available = sorted(rows[0]) if as_dicts else [key for key in dir(rows[0]) if not key.startswith("_")]
                raise self._unknown(name, available) from error
        return list(zip(*fields, strict=True)) if self._key_type.is_tuple else fields[0]

    def _unknown(self, name: str, available: Sequence[str]) -> UnknownColumnError:
        message = f"operator {self._operator!r} is keyed by {name!r}, which the stream lacks: it has {', '.join(available)}"
        return UnknownColumnError(message, operator=self._operator, column=name, available=list(available))


def split_by_subtask(batch: Batch, subtasks: npt.NDArray[np.int32], parallelism: int) -> Parts:
    """Parts of a batch by the subtask of each row, in row order within a part: one gather, then slices of it."""
    if parallelism <= SCAN_PARALLELISM_MAX:
        narrow = subtasks.astype(np.int8)
        found = [np.flatnonzero(narrow == subtask) for subtask in range(parallelism)]
        counts = [len(indices) for indices in found]
        order = np.concatenate(found)
    else:
        # 16 bits: numpy then sorts by radix. Subtasks are below 32768.
        wide = subtasks.astype(np.int16)
        counts = np.bincount(wide, minlength=parallelism).tolist()
        order = np.argsort(wide, kind="stable")
    if batch.num_rows in counts:
        return ((counts.index(batch.num_rows), batch),)
    gathered = batch.take(order)
    parts, offset = [], 0
    for subtask, length in enumerate(counts):
        if length:
            parts.append((subtask, gathered.slice(offset, length)))
            offset += length
    return parts


def partitioner_of(
    edge: JobEdge,
    *,
    parallelism: int,
    max_parallelism: int,
    operator: str,
    key_function: KeyFunction | None = None,
) -> Partitioner:
    """The partitioner of one producer subtask of an edge. `parallelism`, `max_parallelism` and `operator` (uid) are the target's.

    Raises InvalidConfigError on a hash edge without key or key type."""
    match edge.partitioning:
        case Partitioning.FORWARD:
            return ForwardPartitioner()
        case Partitioning.REBALANCE:
            return RebalancePartitioner(parallelism)
        case Partitioning.BROADCAST:
            return BroadcastPartitioner(parallelism)
        case Partitioning.HASH:
            if edge.key_type is None:
                raise InvalidConfigError(f"operator {operator!r}: edge {edge.edge_id} has no key type", operator=operator)
            return HashPartitioner(
                key_type=KeyType.parse(edge.key_type),
                parallelism=parallelism,
                max_parallelism=max_parallelism,
                operator=operator,
                columns=edge.key,
                key_function=None if edge.key is not None else key_function,
            )
        case _:
            assert_never(edge.partitioning)
