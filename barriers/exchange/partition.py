"""Partitioners: how a producer's batches are distributed over the channels of one edge.

Pure and vectorised: a partitioner returns (channel, batch) pairs and keeps at most a few counters. It knows nothing of
credit, queues or frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

from holdfast.barriers.elements import Batch, Element, ElementEvent
from holdfast.barriers.jobgraph import JobEdge, Partitioning
from holdfast.statebackends.errors import InvalidConfigError, InvalidRowError
from holdfast.statebackends.keygroups import check_parallelism
from holdfast.statebackends.serialization.key_columns import ArrowKeyColumn
from holdfast.statebackends.serialization.key_group_columns import subtasks_of_key_groups

REBALANCE_SLICE_ROWS_MIN = 1024
"""Rows; a batch is cut for rebalancing only if every slice has at least so many, else it goes whole to one channel."""

SCAN_PARALLELISM_MAX = 12
"""Subtasks; for so few, selecting each one's rows is faster than sorting all rows (measured: 2.5 times for two)."""

Parts: TypeAlias = Sequence[tuple[int, Batch]]


class Partitioner(Protocol):
    """Distributes the rows of a batch. Order within a channel is the order of the batch; empty parts are left out."""

    def split(self, batch: Batch) -> Parts: ...


class ForwardPartitioner:
    """All rows to the first channel: of a FORWARD edge the only one, of a GLOBAL edge that to subtask 0."""

    def split(self, batch: Batch) -> Parts:
        return ((0, batch),) if batch.num_rows else ()


class BroadcastPartitioner:
    """All rows to every channel. Those that leave the process share the batch. The one that ends in it gets the very rows, which
    its reader may change while others still wait for credit, to be encoded then: it has rows of its own."""

    def __init__(self, channel_count: int, *, producer: int) -> None:
        self._channel_count = channel_count
        self._producer = producer

    def split(self, batch: Batch) -> Parts:
        if batch.num_rows == 0:
            return ()
        if self._channel_count == 1:
            return ((0, batch),)
        return [(channel, _own_rows(batch) if channel == self._producer else batch) for channel in range(self._channel_count)]


def _own_rows(batch: Batch) -> Batch:
    try:
        return batch.unshared()
    except InvalidRowError:  # what can't be copied can't be sent either: the sender says so, and names both ends
        return batch


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


_GOLDEN = 0x9E3779B97F4A7C15
_MASK_64 = 2**64 - 1


def _mixed(value: int) -> int:
    """The finaliser of splitmix64: 64 bits of which each depends on all of `value`."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


class ShufflePartitioner:
    """Each row to a pseudo-random channel, a function of seed, producer and the row's number, from 0 in each attempt.

    Where batches end makes no difference. Source: Steele, Lea and Flood, splitmix64; Lemire, the range by multiplication."""

    def __init__(self, channel_count: int, *, seed: int, producer: int) -> None:
        self._channel_count = channel_count
        self._state = _mixed((_mixed(seed & _MASK_64) + (producer + 1) * _GOLDEN) & _MASK_64)

    def split(self, batch: Batch) -> Parts:
        if batch.num_rows == 0:
            return ()
        if self._channel_count == 1:
            return ((0, batch),)
        return split_by_subtask(batch, self._channels(batch.num_rows), self._channel_count)

    def _channels(self, rows: int) -> npt.NDArray[np.int32]:
        """Channels of the next rows."""
        value = np.uint64(self._state) + np.arange(1, rows + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        self._state = (self._state + rows * _GOLDEN) & _MASK_64
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        high = (value ^ (value >> np.uint64(31))) >> np.uint64(32)
        return ((high * np.uint64(self._channel_count)) >> np.uint64(32)).astype(np.int32)


class SubtaskFunction(Protocol):
    """Finds the target subtask of each row; picklable."""

    def subtasks(self, batch: Batch, *, parallelism: int, operator: str) -> npt.NDArray[np.int32]:
        """All in range(parallelism). `operator`: uid of the target. Raises UserFunctionError naming operator and record."""


class CustomPartitioner:
    """Rows to the subtask that the user's function returns; it is called with one subtask, too."""

    def __init__(self, function: SubtaskFunction, *, parallelism: int, operator: str) -> None:
        self._function = function
        self._parallelism = parallelism
        self._operator = operator

    def split(self, batch: Batch) -> Parts:
        if batch.num_rows == 0:
            return ()
        found = self._function.subtasks(batch, parallelism=self._parallelism, operator=self._operator)
        return split_by_subtask(batch, found, self._parallelism)


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


ROWS_METADATA = b"holdfast.rows"
"""Metadata of the columns of rows that a combiner made: their columns are its own, not those of the edge."""


class Combiner(Protocol):
    """Makes fewer rows of those that one producer subtask sends over a HASH edge, before they are dealt to channels.

    It may hold rows back, and one watermark behind them; what a call returns travels now, in order."""

    @property
    def since_ms(self) -> int | None:
        """When the first of the rows held came; None: nothing is held."""

    @property
    def size(self) -> int:
        """Bytes held, at most."""

    def add(self, batch: Batch, *, now_ms: int) -> Sequence[Element]:
        """Take a batch of at least one row. Raises the errors of the target's selector and aggregates."""

    def event(self, event: ElementEvent) -> Sequence[Element]:
        """Take an event: behind what is held, which only a watermark may wait with."""

    def flush(self) -> Sequence[Element]:
        """Hold nothing any more."""


class Combining(Protocol):
    """How the rows of an edge are combined; picklable."""

    def combiner(self, *, max_parallelism: int, operator: str) -> Combiner:
        """That of one producer subtask. `max_parallelism` and `operator` (uid): of the edge's target."""


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
    present = [subtask for subtask, length in enumerate(counts) if length]
    return list(zip(present, batch.take(order).cut(counts), strict=True))


class EdgeTarget(NamedTuple):
    """The consumers of an edge as a producer subtask's partitioner needs them."""

    operator: str
    """Uid of the target vertex's head."""
    parallelism: int
    max_parallelism: int
    producer: int
    """The subtask that the partitioner belongs to."""
    channel_count: int
    """Channels of this producer: fewer than `parallelism` on pointwise edges."""


def partitioner_of(
    edge: JobEdge, target: EdgeTarget, *, selector: KeySelector | None = None, function: SubtaskFunction | None = None
) -> Partitioner:
    """The partitioner of one producer subtask of an edge. A HASH edge needs the target's `selector`, a CUSTOM edge its `function`.

    Raises InvalidConfigError on an edge without them."""
    match edge.partitioning:
        case Partitioning.FORWARD | Partitioning.GLOBAL:
            return ForwardPartitioner()
        case Partitioning.REBALANCE | Partitioning.RESCALE:
            return RebalancePartitioner(target.channel_count)
        case Partitioning.BROADCAST:
            return BroadcastPartitioner(target.channel_count, producer=target.producer)
        case Partitioning.SHUFFLE:
            return ShufflePartitioner(target.channel_count, seed=edge.seed or 0, producer=target.producer)
        case Partitioning.HASH:
            if selector is None:
                raise _missing("selector", edge, target.operator)
            return SelectorPartitioner(
                selector, parallelism=target.parallelism, max_parallelism=target.max_parallelism, operator=target.operator
            )
        case Partitioning.CUSTOM:
            if function is None:
                raise _missing("function", edge, target.operator)
            return CustomPartitioner(function, parallelism=target.parallelism, operator=target.operator)
        case _:
            assert_never(edge.partitioning)


def _missing(what: str, edge: JobEdge, operator: str) -> InvalidConfigError:
    message = f"operator {operator!r}: no {what} for {edge.partitioning} edge {edge.edge_id}"
    return InvalidConfigError(message, operator=operator)
