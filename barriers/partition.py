"""Partitioners: how a producer's batches are distributed over the channels of one edge: forward, hash, rebalance, broadcast.

Pure and vectorised: a partitioner returns (channel, batch) pairs and keeps at most a few counters. It knows nothing of
credit, queues or frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

from holdfast.barriers.elements import Batch
from holdfast.barriers.jobgraph import JobEdge, Partitioning
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.keygroups import check_parallelism, subtasks_of_key_groups
from holdfast.statebackends.serialization.key_columns import ArrowKeyColumn

REBALANCE_SLICE_ROWS_MIN = 1024
"""Rows; a batch is cut for rebalancing only if every slice has at least so many, else it goes whole to one channel."""

SCAN_PARALLELISM_MAX = 12
"""Subtasks; for so few, selecting each one's rows is faster than sorting all rows (measured: 2.5 times for two)."""

Parts: TypeAlias = Sequence[tuple[int, Batch]]


class Partitioner(Protocol):
    """Distributes the rows of a batch. Order within a channel is the order of the batch; empty parts are left out."""

    def split(self, batch: Batch) -> Parts: ...


class ForwardPartitioner:
    """All rows to the only channel: subtask i feeds subtask i."""

    def split(self, batch: Batch) -> Parts:
        return ((0, batch),) if batch.num_rows else ()


class BroadcastPartitioner:
    """All rows to every channel; the batch is shared, not copied."""

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


class KeySelector(Protocol):
    """Finds the key of each row of a stream; picklable, used by the producer and once more by the consumer."""

    def keys(self, batch: Batch, *, max_parallelism: int, operator: str, subtask: int | None = None) -> ArrowKeyColumn:
        """Keys of the batch's rows. Raises InvalidKeyError, UserFunctionError, naming operator and subtask."""


class SelectorPartitioner:
    """Rows to the subtask that owns the key group of their key, as the target's selector finds it.

    With one subtask no key is computed: the keyed operator checks them anyway. Raises the selector's errors, and
    InvalidConfigError on a parallelism out of bounds."""

    def __init__(self, selector: KeySelector, *, parallelism: int, max_parallelism: int, operator: str) -> None:
        check_parallelism(max_parallelism, parallelism)
        self._selector = selector
        self._parallelism = parallelism
        self._max_parallelism = max_parallelism
        self._operator = operator

    def split(self, batch: Batch) -> Parts:
        if batch.num_rows == 0:
            return ()
        if self._parallelism == 1:
            return ((0, batch),)
        groups = self._selector.keys(batch, max_parallelism=self._max_parallelism, operator=self._operator).key_groups
        return split_by_subtask(batch, subtasks_of_key_groups(groups, self._max_parallelism, self._parallelism), self._parallelism)


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
    edge: JobEdge, *, parallelism: int, max_parallelism: int, operator: str, selector: KeySelector | None = None
) -> Partitioner:
    """The partitioner of one producer subtask of an edge. `parallelism`, `max_parallelism` and `operator` (uid) are the target's,
    and so is `selector`, which a hash edge needs.

    Raises InvalidConfigError on a hash edge without one."""
    match edge.partitioning:
        case Partitioning.FORWARD:
            return ForwardPartitioner()
        case Partitioning.REBALANCE:
            return RebalancePartitioner(parallelism)
        case Partitioning.BROADCAST:
            return BroadcastPartitioner(parallelism)
        case Partitioning.HASH:
            if selector is None:
                raise InvalidConfigError(f"operator {operator!r}: no selector for hash edge {edge.edge_id}", operator=operator)
            return SelectorPartitioner(selector, parallelism=parallelism, max_parallelism=max_parallelism, operator=operator)
        case _:
            assert_never(edge.partitioning)
