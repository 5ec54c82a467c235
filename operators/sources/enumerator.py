"""The split enumerator as an operator of parallelism 1: a source whose records are splits, in front of the vertex of its readers.

A split is here until it is emitted. In front of a barrier it is then the reader's, behind it still ours: a checkpoint has it once.
It decides who gets a split by the connector's word and by what the readers have asked for, and keeps sets of splits, never counts
that a lost or repeated message could change."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, overload

import msgspec
import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.barriers.exchange.split_entries import STATE_VERSION, EnumeratorEntry
from holdfast.operators.base import NEVER_MS, OperatorContext, Poll
from holdfast.operators.sources.split_state import SplitCodec, check_split
from holdfast.operators.sources.splits import AssignedSplit, EnumeratorContext, Source, SplitEnumerator, SplitT
from holdfast.operators.task.source_operator import SPLIT_SCHEMA
from holdfast.statebackends.errors import InvalidSplitError

log = logging.getLogger("holdfast.sources")

SPLITS_WAITING_MAX = 2_000_000
"""Splits that were found and not handed out, at most."""
DISCOVERIES_FAILED_MAX = 10
"""Discoveries that fail in a row, behind one that succeeded; so many fail the job."""


@dataclass
class EnumeratorSource(Generic[SplitT]):
    """Implements `base.Source`: the splits of a source as records."""

    source: Source[SplitT]
    readers: int
    """Parallelism of the vertex behind it."""

    def __post_init__(self) -> None:
        self.name = f"{self.source.name} enumerator"

    @property
    def schema(self) -> pa.Schema:
        return SPLIT_SCHEMA

    def create_reader(self, subtask: int, parallelism: int, max_parallelism: int) -> EnumeratorReader[SplitT]:
        return EnumeratorReader(self.source, self.readers)


class WaitingSplits(Sequence[SplitT]):
    """Splits that wait for a request, oldest first, with their entries in channel and checkpoint; the oldest leaves at no cost."""

    def __init__(self) -> None:
        self._splits: list[SplitT] = []
        self._entries: list[bytes] = []
        self._start = 0
        """Index of the oldest one; those in front of it have left."""

    def __len__(self) -> int:
        return len(self._splits) - self._start

    @overload
    def __getitem__(self, index: int) -> SplitT: ...
    @overload
    def __getitem__(self, index: slice) -> list[SplitT]: ...
    def __getitem__(self, index: int | slice) -> SplitT | list[SplitT]:
        if isinstance(index, slice):
            return [self._splits[self._start + each] for each in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._splits[index if index < 0 else self._start + index]

    def append(self, split: SplitT, entry: bytes) -> None:
        self._splits.append(split)
        self._entries.append(entry)

    def take(self, index: int) -> tuple[SplitT, bytes]:
        """The split at an index, which waits no more, and its entry."""
        at = self._start + index
        taken = self._splits[at], self._entries[at]
        if index:
            del self._splits[at], self._entries[at]
            return taken
        self._start += 1
        if self._start > len(self._splits) // 2:
            del self._splits[: self._start], self._entries[: self._start]
            self._start = 0
        return taken

    @property
    def entries(self) -> list[bytes]:
        return self._entries[self._start :]


class EnumeratorReader(Generic[SplitT]):
    """Implements `base.SplitRequests`."""

    def __init__(self, source: Source[SplitT], readers: int) -> None:
        self._source = source
        self._readers = readers
        self._enumerator: SplitEnumerator[SplitT] = source.create_enumerator()
        self._waiting: WaitingSplits[SplitT] = WaitingSplits()
        """Found, and without an owner."""
        self._owned: deque[tuple[int, str, bytes]] = deque()
        """Found, and to be given to an owner: reader, id, entry."""
        self._ids: set[str] = set()
        """Of all that wait."""
        self._given = [0] * readers
        """Splits that each reader was given in this attempt."""
        self._requested = [0] * readers
        """Splits that each reader wants to have been given in this attempt."""
        self._has_discovered = False
        self._is_discovering = False
        self._failures = 0
        self._next_discovery_ms = 0
        self._error: BaseException | None = None

    def open(self, context: OperatorContext, entries: list[bytes] | None) -> None:
        self._context = context
        self._codec = SplitCodec(self._source.split_type, context.uid)
        self._thread = context.open_thread(f"holdfast-{context.uid}")
        self._enumerator.open(EnumeratorContext(context.job_id, context.uid, self._readers, context.attempt))
        if entries:
            own, waiting = self._codec.decode_enumerator(entries)
            self._has_discovered = self._enumerator.has_discovered = own.discovered
            self._enumerator.restore_state(own.state)
            self._add(waiting)

    # -------------------------------------------------------------------------------------------------------- discovery

    @property
    def _has_all(self) -> bool:
        return self._has_discovered and not self._enumerator.finds_more

    def _discover_if_due(self, now_ms: int) -> None:
        if self._is_discovering or now_ms < self._next_discovery_ms or self._has_all:
            return
        self._is_discovering = True
        self._thread.run(self._enumerator.discover, self._discovered)

    def _discovered(self, found: Any, error: BaseException | None) -> None:
        self._is_discovering = False
        if error is None:
            try:
                self._take(self._enumerator.handle_discovered(found))
            except Exception as raised:
                self._error = raised
        else:
            self._failed(error)
        self._next_discovery_ms = self._context.monotonic_ms() + (self._enumerator.discovery_interval_ms or 0)
        self._context.source_is_ready()

    def _take(self, found: Sequence[SplitT]) -> None:
        for split in found:
            check_split(split, self._source.split_type, self._context.uid)
        self._add(found)
        if len(self._ids) > SPLITS_WAITING_MAX:
            raise self._invalid("", f"more than {SPLITS_WAITING_MAX:,} splits wait for a reader")
        self._has_discovered = self._enumerator.has_discovered = True
        self._failures = 0

    def _add(self, splits: Iterable[SplitT]) -> None:
        """Asks for the owner and encodes each split once, however long it waits and however often it is in a checkpoint."""
        for split in splits:
            if split.split_id in self._ids:
                raise self._invalid(split.split_id, "it was found twice")
            self._ids.add(split.split_id)
            entry = self._codec.encode(AssignedSplit(split))
            owner = self._enumerator.owner_of(split, self._readers)
            if owner is None:
                self._waiting.append(split, entry)
            elif 0 <= owner < self._readers:
                self._owned.append((owner, split.split_id, entry))
            else:
                raise self._invalid(split.split_id, f"its owner is reader {owner}, of 0..{self._readers - 1}")

    def _failed(self, error: BaseException) -> None:
        """Later discoveries may fail for a while: what was found before is read meanwhile."""
        self._failures += 1
        if not self._has_discovered or self._failures >= DISCOVERIES_FAILED_MAX:
            self._error = error
        else:
            log.warning("source %s: discovery %d in a row failed: %r", self._context.uid, self._failures, error)

    # ------------------------------------------------------------------------------------------------------- assignment

    def split_requested(self, subtask: int, total: int) -> None:
        if 0 <= subtask < self._readers:
            self._requested[subtask] = max(self._requested[subtask], total)

    def poll(self, rows_max: int, now_ms: int) -> Poll:
        if self._error is not None:
            raise self._error
        given = self._hand_out(rows_max)
        if given:
            subtasks = pa.array([subtask for subtask, _ in given], pa.int32())
            splits = pa.array([entry for _, entry in given], pa.binary())
            return Poll(batch=Batch(columns=pa.RecordBatch.from_arrays([subtasks, splits], schema=SPLIT_SCHEMA)))
        if self._has_all and not self._ids:
            return Poll(finished=True)
        self._discover_if_due(now_ms)
        waits = self._is_discovering or self._has_all
        return Poll(ready_at_ms=NEVER_MS if waits else self._next_discovery_ms)

    def _hand_out(self, splits_max: int) -> list[tuple[int, bytes]]:
        """Entries of the splits that leave now, with their readers; at least one if any may."""
        given: list[tuple[int, bytes]] = []
        while self._owned and len(given) < splits_max:
            owner, split_id, entry = self._owned.popleft()
            self._give(given, owner, split_id, entry)
        asking = [subtask for subtask in range(self._readers) if self._requested[subtask] > self._given[subtask]]
        asking.sort(key=lambda subtask: self._given[subtask])
        for subtask in asking:
            while self._requested[subtask] > self._given[subtask] and self._waiting and len(given) < splits_max:
                index = self._enumerator.handle_split_request(subtask, self._waiting)
                if index is None:
                    break
                if not isinstance(index, int) or not 0 <= index < len(self._waiting):
                    raise self._invalid("", f"handle_split_request gave {index!r}: {len(self._waiting)} splits wait")
                split, entry = self._waiting.take(index)
                self._give(given, subtask, split.split_id, entry)
        return given

    def _give(self, given: list[tuple[int, bytes]], subtask: int, split_id: str, entry: bytes) -> None:
        given.append((subtask, entry))
        self._ids.discard(split_id)
        self._given[subtask] += 1

    def _invalid(self, split: str, reason: str) -> InvalidSplitError:
        uid = self._context.uid
        what = f"split {split!r}: {reason}" if split else reason
        return InvalidSplitError(f"source {uid}: {what}", operator=uid, split=split, reason=reason)

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def snapshot(self) -> list[bytes]:
        raise NotImplementedError("a checkpoint has an id")

    def snapshot_of(self, checkpoint_id: int) -> list[bytes]:
        own = EnumeratorEntry(STATE_VERSION, self._has_discovered, self._enumerator.snapshot_state(checkpoint_id))
        return [msgspec.msgpack.encode(own), *(entry for _, _, entry in self._owned), *self._waiting.entries]

    def external_files(self) -> tuple[str, ...]:
        return ()

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._enumerator.notify_checkpoint_complete(checkpoint_id)

    def close(self) -> None:
        self._thread.run(self._enumerator.close, _ignore)
        self._thread.close()


def _ignore(result: Any, error: BaseException | None) -> None:
    if error is not None:
        log.warning("an enumerator was not closed: %r", error)
