"""The head of a source chain: a rewindable reader as an operator, with its positions as split operator state.

It decides nothing about pace: the subtask bounds the rows of one slice. A split enumerator is such a source, too, whose records are
splits; the reader that they are for has an input channel, on which they come."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, cast

import pyarrow as pa
from msgspec import UNSET

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK, Batch
from holdfast.barriers.messages import INT_MAX, SPLIT_CHARACTERS_MAX, SPLITS_REPORTED_MAX, SplitMetrics, clip
from holdfast.operators.base import (
    CutsAtBoundaries,
    Operator,
    Output,
    Poll,
    SnapshotsById,
    Source,
    SourceReader,
    SplitInput,
    SplitRequests,
    SplitTimes,
    TellsBacklog,
)
from holdfast.statebackends.errors import InvalidRecordError, InvariantError
from holdfast.statebackends.state import OperatorListStateDescriptor, StateDescriptor

SPLIT_SCHEMA = pa.schema([pa.field("subtask", pa.int32(), nullable=False), pa.field("split", pa.binary(), nullable=False)])
"""What travels from an enumerator to its readers: who gets a split, and the split."""

DEAD_LETTERS_TAG = "dead-letters"
"""The side output of records that can't be read."""
DEAD_LETTER_SCHEMA = pa.schema(
    [
        pa.field("split", pa.string(), nullable=False),
        pa.field("position", pa.list_(pa.int64()), nullable=False),
        pa.field("error", pa.string(), nullable=False),
        pa.field("raw", pa.binary()),
    ]
)

SOURCE_POSITIONS = OperatorListStateDescriptor("positions")
"""One entry per split: the position behind the last record that the reader returned."""


class SourceOperator(Operator):
    """Wraps the reader that a source makes for this subtask."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.has_splits = False
        """Set by the deployment: an enumerator hands it splits."""
        self.is_restored = False
        """Set by the deployment: the snapshot contains this operator, so that no split may be read from its start."""
        self._reader: SourceReader | None = None
        self._watermark_ms = MIN_WATERMARK
        self.times: SplitTimes | None = None
        """Set by the deployment: the operator behind a source with splits, if it gives event times."""
        self.side_output: Callable[[], Output] | None = None
        """Set by the deployment: the output that has the source's side outputs, if it is not its own."""
        self._paused: set[str] = set()
        """Splits that are ahead of their watermark group."""
        self._requested: dict[int, int] = {}
        """Reader -> splits that it has asked for; of an enumerator."""
        self._last_record_ms = 0
        """Monotonic: of the last record, or of the beginning."""
        self._tells_backlog: TellsBacklog | None = None
        """The reader, if it tells."""
        self._cuts: CutsAtBoundaries | None = None
        """The reader, if it says where barriers may come."""
        self._by_id: SnapshotsById | None = None
        """The reader, if it keeps apart what it said in each checkpoint."""

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return (SOURCE_POSITIONS,)

    def initialize_state(self) -> None:
        context = self.context
        entries = context.operator_state.list_state(SOURCE_POSITIONS.name).entries
        self._reader = self.source.create_reader(context.subtask, context.parallelism, context.max_parallelism)
        self._reader.open(context, list(entries) if self.is_restored else None)
        self._tells_backlog = self._reader if isinstance(self._reader, TellsBacklog) else None
        self._cuts = self._reader if isinstance(self._reader, CutsAtBoundaries) else None
        self._by_id = self._reader if isinstance(self._reader, SnapshotsById) else None
        self._last_record_ms = context.monotonic_ms()
        for subtask, total in sorted(self._requested.items()):
            self.split_requested(subtask, total)

    def open(self) -> None:
        self._note_splits()

    # ----------------------------------------------------------------------------------------------------------- splits

    def process_batch(self, batch: Batch, input_index: int) -> None:
        """Splits from the enumerator."""
        cast(SplitInput, self.reader).add_splits(batch.columns().column("split").to_pylist())
        self._note_splits()

    def _note_splits(self) -> None:
        """Event time waits for those that are new, unless they wait for their turn."""
        if self.times is not None and not cast(SplitInput, self.reader).reads_in_turn:
            for split_id in cast(SplitInput, self.reader).splits:
                self.times.add_split(split_id)

    def align_splits(self, maximum_ms: int) -> None:
        """Splits whose event time is beyond that of their watermark group are not read for now."""
        if self.times is None:
            return
        ahead = {split_id for split_id, watermark_ms in self.times.split_watermarks_ms().items() if watermark_ms > maximum_ms}
        to_pause, to_resume = sorted(ahead - self._paused), sorted(self._paused - ahead)
        if to_pause or to_resume:
            self._paused = ahead
            self.times.pause_or_resume_splits(to_pause, to_resume)
            cast(SplitInput, self.reader).pause_or_resume_splits(to_pause, to_resume)

    def no_more_splits(self) -> None:
        cast(SplitInput, self.reader).no_more_splits()

    @property
    def splits_requested(self) -> int:
        """As of SplitInput; only of a source with input channels."""
        return cast(SplitInput, self.reader).splits_requested

    def split_requested(self, subtask: int, total: int) -> None:
        """A reader asks this enumerator, which may not be open yet."""
        self._requested[subtask] = max(total, self._requested.get(subtask, 0))
        if self._reader is not None:
            cast(SplitRequests, self._reader).split_requested(subtask, self._requested[subtask])

    # ---------------------------------------------------------------------------------------------------------- records

    def poll(self, rows_max: int, now_ms: int) -> Poll:
        """Take up to rows_max records and emit them; the reader's answer is returned for its times."""
        polled = self.reader.poll(rows_max, now_ms)
        if polled.batch is not None:
            self._last_record_ms = now_ms
            stamps = polled.batch.timestamps
            if stamps is not None and len(stamps):
                self.context.counters.emit_lag_ms = self.context.now_ms() - int(stamps[-1])
            if self.times is not None:
                self.times.add_split(polled.split)  # it may have waited for its turn
                self.times.enter_split(polled.split)
            self.output.collect(polled.batch)
        if polled.dead_letters is not None:
            self._leave(polled.dead_letters)
        if self.times is not None:
            if polled.ended_split:
                self._paused.discard(polled.ended_split)
                self.times.leave_split(polled.ended_split)
            if polled.idle:
                self.times.has_no_splits()
        if polled.watermark_ms is not None and polled.watermark_ms > self._watermark_ms:
            self._watermark_ms = polled.watermark_ms
            self.output.emit_watermark(polled.watermark_ms)
        return polled

    def _leave(self, letters: Batch) -> None:
        """Dead letters go to what reads them. Raises InvalidRecordError where nothing does."""
        output = self.output if self.side_output is None else self.side_output()
        if output.has_readers(DEAD_LETTERS_TAG):
            output.collect_side(DEAD_LETTERS_TAG, letters)
            return
        first, uid = letters.columns().slice(0, 1).to_pylist()[0], self.context.uid
        split, position, reason = first["split"], tuple(first["position"]), first["error"]
        message = f"source {uid}: split {split!r}, record at {', '.join(map(str, position))}: {reason}"
        raise InvalidRecordError(message, operator=uid, split=split, position=position, reason=reason)

    @property
    def may_cut(self) -> bool:
        """Whether a barrier may come behind what was polled last."""
        return self._cuts is None or self._cuts.may_cut

    @property
    def is_processing_backlog(self) -> bool:
        """Whether its reader says so."""
        return self._tells_backlog is not None and self._tells_backlog.is_processing_backlog

    def idle_ms(self) -> int:
        """Time since the last record."""
        return max(0, self.context.monotonic_ms() - self._last_record_ms)

    def split_metrics(self) -> dict[str, Any]:
        """Fields of SubtaskMetrics that tell of splits; none of a source that has none of its own."""
        if self._input is None:
            return {}
        watermarks = {} if self.times is None else self.times.split_watermarks_ms()
        idle = frozenset() if self.times is None else self.times.idle_splits()
        pending, waiting = self._input.pending_records(), self._input.pending_by_split

        def slowness(split: str) -> tuple[Any, ...]:
            return split in idle, watermarks.get(split, MAX_WATERMARK), -waiting.get(split, 0), split

        def told(split: str) -> SplitMetrics:
            watermark_ms = watermarks.get(split, MIN_WATERMARK)
            has_begun = watermark_ms > MIN_WATERMARK
            return SplitMetrics(
                clip(split, SPLIT_CHARACTERS_MAX),
                watermark_ms if has_begun else None,
                max(-INT_MAX, min(INT_MAX, self.context.now_ms() - watermark_ms)) if has_begun else UNSET,
                idle=split in idle or (self.times is not None and split not in watermarks),
                pending_records=max(0, waiting[split]) if split in waiting else UNSET,
            )

        return {
            "splits": len(self._input.splits),
            "pending_records": UNSET if pending is None else max(0, pending),
            "slowest_splits": tuple(map(told, heapq.nsmallest(SPLITS_REPORTED_MAX, self._input.splits, key=slowness))),
        }

    @property
    def _input(self) -> SplitInput | None:
        """The reader, of a source with splits."""
        return cast(SplitInput, self._reader) if self.has_splits and self._reader is not None else None

    @property
    def reader(self) -> SourceReader:
        if self._reader is None:
            raise InvariantError("a source is read before it was opened")
        return self._reader

    def snapshot_state(self, checkpoint_id: int) -> None:
        entries = self.reader.snapshot() if self._by_id is None else self._by_id.snapshot_of(checkpoint_id)
        self.context.operator_state.list_state(SOURCE_POSITIONS.name).update(entries)

    def external_files(self, checkpoint_id: int) -> tuple[str, ...]:
        return self.reader.external_files()

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self.reader.notify_checkpoint_complete(checkpoint_id)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
