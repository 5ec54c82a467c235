"""The head of a source chain: a rewindable reader as an operator, with its positions as split operator state.

It decides nothing about pace: the subtask bounds the rows of one slice."""

from __future__ import annotations

from holdfast.barriers.elements import MIN_WATERMARK
from holdfast.operators.base import Operator, Poll, Source, SourceReader
from holdfast.statebackends.errors import InvariantError
from holdfast.statebackends.state import OperatorListStateDescriptor, StateDescriptor

SOURCE_POSITIONS = OperatorListStateDescriptor("positions")
"""One entry per split: the position behind the last record that the reader returned."""


class SourceOperator(Operator):
    """Wraps the reader that a source makes for this subtask."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.is_restored = False
        """Set by the deployment: the snapshot contains this operator, so that no split may be read from its start."""
        self._reader: SourceReader | None = None
        self._watermark_ms = MIN_WATERMARK
        self._last_record_ms = 0
        """Monotonic: of the last record, or of the beginning."""

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return (SOURCE_POSITIONS,)

    def initialize_state(self) -> None:
        context = self.context
        entries = context.operator_state.list_state(SOURCE_POSITIONS.name).entries
        self._reader = self.source.create_reader(context.subtask, context.parallelism, context.max_parallelism)
        self._reader.open(context, list(entries) if self.is_restored else None)
        self._last_record_ms = context.monotonic_ms()

    def poll(self, rows_max: int, now_ms: int) -> Poll:
        """Take up to rows_max records and emit them; the reader's answer is returned for its times."""
        polled = self.reader.poll(rows_max, now_ms)
        if polled.batch is not None:
            self._last_record_ms = now_ms
            stamps = polled.batch.timestamps
            if stamps is not None and len(stamps):
                self.context.counters.emit_lag_ms = self.context.now_ms() - int(stamps[-1])
            self.output.collect(polled.batch)
        if polled.watermark_ms is not None and polled.watermark_ms > self._watermark_ms:
            self._watermark_ms = polled.watermark_ms
            self.output.emit_watermark(polled.watermark_ms)
        return polled

    def idle_ms(self) -> int:
        """Time since the last record."""
        return max(0, self.context.monotonic_ms() - self._last_record_ms)

    @property
    def reader(self) -> SourceReader:
        if self._reader is None:
            raise InvariantError("a source is read before it was opened")
        return self._reader

    def snapshot_state(self, checkpoint_id: int) -> None:
        self.context.operator_state.list_state(SOURCE_POSITIONS.name).update(self.reader.snapshot())

    def external_files(self, checkpoint_id: int) -> tuple[str, ...]:
        return self.reader.external_files()

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self.reader.notify_checkpoint_complete(checkpoint_id)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
