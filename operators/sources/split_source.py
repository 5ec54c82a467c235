"""A source with splits as the runtime reads it: it keeps the splits of one subtask, and where each stands, row by row.

The connector's reader gives records; what a checkpoint says follows from those that were passed on, and from nothing else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic

import numpy as np
import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.operators.base import NEVER_MS, OperatorContext, Poll
from holdfast.operators.sources.dead_letters import batch_of
from holdfast.operators.sources.enumerator import EnumeratorSource
from holdfast.operators.sources.fetching import make_reader
from holdfast.operators.sources.split_state import SplitCodec, check_split, form_problem, position_problem
from holdfast.operators.sources.splits import AssignedSplit, Position, Source, SourceReader, SplitRecords, SplitT
from holdfast.statebackends.errors import InvalidConfigError, InvalidSplitError

CHECKPOINTS_AWAITED_MAX = 100
"""Checkpoints whose completion is awaited, at most: what an older one says is told with the next."""


@dataclass
class SplitSource(Generic[SplitT]):
    """Implements `base.Source` over a connector's source."""

    source: Source[SplitT]

    def __post_init__(self) -> None:
        self.name = self.source.name

    @property
    def schema(self) -> pa.Schema:
        return self.source.schema

    @property
    def gives_event_times(self) -> bool:
        return self.source.gives_event_times

    def with_columns(self, names: list[str]) -> SplitSource[SplitT]:
        """The same source, of which only these columns are read, if it can do that."""
        narrow = getattr(self.source, "with_columns", None)
        return self if narrow is None else SplitSource(narrow(names))

    def enumerator(self, readers: int) -> EnumeratorSource[SplitT]:
        return EnumeratorSource(self.source, readers)

    def create_reader(self, subtask: int, parallelism: int, max_parallelism: int) -> SplitSourceReader[SplitT]:
        return SplitSourceReader(self.source)


def split_source_of(source: object) -> SplitSource[SplitT] | None:
    """A connector's source for the runtime; None for a source of the runtime's own. Raises InvalidConfigError."""
    if not isinstance(source, Source):
        return None
    if not isinstance(getattr(source, "split_type", None), type):
        name = type(source).__name__
        raise InvalidConfigError(f"{name} has no split_type: the class of its splits", setting="split_type")
    return SplitSource(source)


class SplitSourceReader(Generic[SplitT]):
    """Implements `base.SplitInput` over a connector's reader."""

    def __init__(self, source: Source[SplitT]) -> None:
        self._source = source
        self._reader: SourceReader[SplitT] | None = None
        self._splits: dict[str, AssignedSplit[SplitT]] = {}
        """Not finished, at the position behind the last row passed on."""
        self._pending: dict[str, int] = {}
        """Split -> records that wait behind those passed on, as it was told last."""
        self._finished: dict[str, Position] = {}
        """Finished since the last checkpoint."""
        self._rest: SplitRecords | None = None
        """Given by the connector, and not passed on."""
        self._awaited: OrderedDict[int, dict[str, Position]] = OrderedDict()
        """Checkpoint -> what it says."""
        self._received = 0
        self._has_all = False
        """The enumerator has no further split."""
        self._says_idle = False
        """The status behind this reader."""
        self._idle_is_told = False
        """Since it had a split last."""

    def open(self, context: OperatorContext, entries: list[bytes] | None) -> None:
        self._uid = context.uid
        self._codec = SplitCodec(self._source.split_type, context.uid)
        restored = [self._codec.decode(entry) for entry in entries or ()]
        self._reader = make_reader(self._source, context)
        self._reader.open(context)
        self._add(restored)
        told = {assigned.split_id: assigned.position for assigned in restored if assigned.position}
        if told:  # its notice may not have come
            self._reader.notify_checkpoint_complete(context.restored_checkpoint_id, told)

    # ----------------------------------------------------------------------------------------------------------- splits

    def add_splits(self, entries: list[bytes]) -> None:
        self._received += len(entries)
        self._add([self._codec.decode(entry) for entry in entries])

    def _add(self, splits: list[AssignedSplit[SplitT]]) -> None:
        for assigned in splits:
            if assigned.split_id in self._splits:
                raise self._invalid(assigned.split_id, "this reader has it already")
            self._splits[assigned.split_id] = assigned
        if splits:
            self._idle_is_told = False
            self._connected.add_splits(splits)

    def no_more_splits(self) -> None:
        self._has_all = True
        self._connected.no_more_splits()

    def pause_or_resume_splits(self, to_pause: Sequence[str], to_resume: Sequence[str]) -> None:
        self._connected.pause_or_resume_splits(to_pause, to_resume)

    @property
    def reads_in_turn(self) -> bool:
        return self._source.reads_in_turn

    @property
    def splits(self) -> Collection[str]:
        return self._splits

    @property
    def splits_requested(self) -> int:
        if self._has_all:
            return self._received
        return self._received + max(0, self._connected.splits_max - len(self._splits))

    @property
    def is_processing_backlog(self) -> bool:
        return self._connected.is_processing_backlog

    @property
    def _connected(self) -> SourceReader[SplitT]:
        assert self._reader is not None
        return self._reader

    # ---------------------------------------------------------------------------------------------------------- records

    def poll(self, rows_max: int, now_ms: int) -> Poll:
        if self._rest is None:
            if not self._splits:
                return self._without_splits()
            polled = self._connected.poll(rows_max)
            if not isinstance(polled, SplitRecords):
                return Poll(ready_at_ms=NEVER_MS if polled is None else now_ms + max(1, polled))
            self._check(polled)
            self._rest = polled
            if self._says_idle and polled.num_rows:  # in front of the records, which a status of the same poll would follow
                self._says_idle = False
                return Poll(idle=False)
        return self._pass_on(self._rest, max(1, rows_max))

    def _without_splits(self) -> Poll:
        """Event time does not wait for a reader that has nothing to read, also where it has had an empty split since it said so."""
        if self._has_all:
            return Poll(finished=True)
        idle = None if self._idle_is_told else True
        self._says_idle = self._idle_is_told = True
        return Poll(ready_at_ms=NEVER_MS, idle=idle)

    def _pass_on(self, records: SplitRecords, rows_max: int) -> Poll:
        """The first rows, and the position behind them; the others wait."""
        split_id, self._rest = records.split_id, None
        if records.num_rows > rows_max:
            records, self._rest = records.cut(rows_max)
        self._note_pending(records)
        assigned = self._splits[split_id]
        position = _position_behind(records) or assigned.position
        if records.finished:
            del self._splits[split_id]
            self._pending.pop(split_id, None)
            self._finished[split_id] = position
        else:
            self._splits[split_id] = replace(assigned, position=position)
        return Poll(
            batch=Batch(columns=records.columns, timestamps=records.timestamps) if records.num_rows else None,
            split=split_id,
            ended_split=split_id if records.finished else "",
            dead_letters=batch_of(split_id, records.dead_letters),
        )

    def _note_pending(self, passed_on: SplitRecords) -> None:
        rest = self._rest
        said = passed_on.pending_records if rest is None else rest.pending_records
        if said is not None:
            self._pending[passed_on.split_id] = said + (0 if rest is None else rest.num_rows)

    def pending_records(self) -> int | None:
        said = self._connected.pending_records()
        return said if said is None or self._rest is None else said + self._rest.num_rows

    @property
    def pending_by_split(self) -> Mapping[str, int]:
        return self._pending

    def _check(self, records: SplitRecords) -> None:
        """Raises InvalidSplitError for what would make a wrong position."""
        if records.split_id not in self._splits:
            raise self._invalid(records.split_id, "the reader does not have it, or it has finished")
        reason = self._problem(records) or position_problem(records, self._splits[records.split_id].position)
        if reason is not None:
            raise self._invalid(records.split_id, reason)

    def _problem(self, records: SplitRecords) -> str | None:
        """What is wrong with the rows."""
        if records.columns is not None and not isinstance(records.columns, pa.RecordBatch):
            return f"its columns are a {type(records.columns).__name__}, no pa.RecordBatch"
        rows, positions, stamps = records.num_rows, records.positions, records.timestamps
        if rows and not (_is_of_int64(positions, rows) and positions.ndim in (1, 2)):  # type: ignore[union-attr]
            return f"{rows} rows need as many positions, int64"
        if stamps is not None and not _is_of_int64(stamps, rows):
            return f"{rows} rows need as many event times, int64"
        if rows and stamps is None and self._source.gives_event_times:
            return f"{rows} rows need as many event times: its source says that it gives them"
        if records.columns is not None and not records.columns.schema.equals(self._source.schema):
            return f"its columns are {records.columns.schema.names}, not as declared: {self._source.schema.names}"
        return None

    def _invalid(self, split: str, reason: str) -> InvalidSplitError:
        message = f"source {self._uid}: split {split!r}: {reason}"
        return InvalidSplitError(message, operator=self._uid, split=split, reason=reason)

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def snapshot(self) -> list[bytes]:
        raise NotImplementedError("a checkpoint has an id")

    def snapshot_of(self, checkpoint_id: int) -> list[bytes]:
        kept = self._connected.snapshot_state(checkpoint_id, list(self._splits.values()))
        self._check_kept(kept)
        said = {**self._finished, **{split_id: assigned.position for split_id, assigned in self._splits.items()}}
        self._finished.clear()
        self._awaited[checkpoint_id] = said
        if len(self._awaited) > CHECKPOINTS_AWAITED_MAX:
            _, oldest = self._awaited.popitem(last=False)
            following = next(iter(self._awaited))
            self._awaited[following] = {**oldest, **self._awaited[following]}
        return [self._codec.encode(assigned) for assigned in kept]

    def _check_kept(self, kept: Sequence[AssignedSplit[SplitT]]) -> None:
        """A checkpoint that no restore could read, or that has other splits, must not be."""
        left = dict(self._splits)
        for assigned in kept:
            known = left.pop(assigned.split_id, None) if isinstance(assigned, AssignedSplit) else None
            if known is None:
                split_id = str(getattr(assigned, "split_id", ""))
                raise self._invalid(split_id, f"snapshot_state gave {assigned!r}: no split of the reader, or given before")
            if assigned is known:
                continue
            check_split(assigned.split, self._source.split_type, self._uid)
            reason = form_problem(assigned.position, known.position) if assigned.position else None
            if reason is not None:
                raise self._invalid(assigned.split_id, f"snapshot_state gave {reason}")
        if left:
            raise self._invalid(next(iter(left)), "snapshot_state left it out, and it is not finished")

    def external_files(self) -> tuple[str, ...]:
        return ()

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """What finished in front of an earlier checkpoint, whose notice did not come, is told now, too."""
        said: dict[str, Position] = {}
        for awaited in [each for each in self._awaited if each <= checkpoint_id]:
            said.update(self._awaited.pop(awaited))
        said = {split_id: position for split_id, position in said.items() if position}
        if said:
            self._connected.notify_checkpoint_complete(checkpoint_id, said)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


def _is_of_int64(given: object, rows: int) -> bool:
    return isinstance(given, np.ndarray) and given.ndim > 0 and len(given) == rows and given.dtype == np.int64


def _position_behind(records: SplitRecords) -> Position:
    """Behind all of it; empty where it has nothing."""
    rows, letters = records.num_rows, records.dead_letters
    if records.position is not None:
        return tuple(map(int, records.position))
    if letters and letters[-1].row >= rows:
        return tuple(map(int, letters[-1].behind))
    if records.positions is None or not rows:
        return ()
    return tuple(np.atleast_1d(records.positions[-1]).tolist())
