"""Tumbling event-time windows over columns. The state holds one row per (window, key), and nothing else.

A window [start, end) fires when the watermark reaches end - 1, in slices of bounded size; a record whose window has
fired is late: it is dropped and counted. Rows leave the state as they are emitted, so that a barrier between two slices
cuts exactly there. The watermark is kept in the snapshot, so that no window fires a second time after a restore."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK, Batch
from holdfast.barriers.partition import Combining
from holdfast.operators.base import Operator
from holdfast.operators.functions.aggregates import close_selections, columns_of, result_fields, state_columns
from holdfast.operators.functions.combining import combining_of, count_records, fold, record_count
from holdfast.operators.functions.schema import EVENT_TIME_TYPE, RowType
from holdfast.operators.functions.selectors import Selector
from holdfast.operators.functions.windows.assigners import Session, Sliding, Tumbling
from holdfast.operators.functions.windows.kept_assigner import ASSIGNER, check_assigner, keep_assigner
from holdfast.operators.functions.windows.kept_watermark import LATE_UNTIL, WATERMARKS, keep_moment, kept_moments
from holdfast.statebackends.columnar.parts import Values
from holdfast.statebackends.errors import InvalidTimestampError
from holdfast.statebackends.state import (
    ColumnarState,
    ColumnarStateDescriptor,
    KeyColumn,
    OperatorListStateDescriptor,
    StateDescriptor,
)

FIRED_ROWS_PER_SLICE_MAX = 8192
WINDOW_COLUMNS = ("window_start", "window_end")
_WATERMARK_COPIES = OperatorListStateDescriptor("watermark")
"""The form of older snapshots (ADR 8): split, so many copies that each new subtask was dealt one. Read, and never written again."""


class ColumnarWindowOperator(Operator):
    """Base of keyed event-time windows with columnar aggregates: key columns, window_start, window_end, aggregates.

    It keeps the watermark. Late records go to the late output, or are counted."""

    lateness_ms = 0  # these two, of one pickled before windows could take late records
    late_tag = ""

    def __init__(
        self,
        windows: Tumbling | Sliding | Session,
        descriptor: ColumnarStateDescriptor,
        selector: Selector,
        input_type: RowType,
        *,
        lateness_ms: int = 0,
        late_tag: str = "",
    ) -> None:
        """`late_tag`: the side output for late records; empty: there is none."""
        self.lateness_ms = lateness_ms
        self.late_tag = late_tag
        self.windows: Any = windows
        self.descriptor = descriptor
        self.selector = selector
        self.input_type = input_type
        self.output_type = RowType(self._result_schema())
        self.rows_per_slice_max = FIRED_ROWS_PER_SLICE_MAX
        self._watermark = MIN_WATERMARK
        self._lowest = MIN_WATERMARK
        """The watermark that all subtasks had reached at the cut."""
        self._kept_watermark = MIN_WATERMARK
        """As stored: the last one that records brought. The maximum of a drain is not kept, for a resumed job has a future."""

    def _result_schema(self) -> pa.Schema:
        keys = zip(self.selector.names, self.selector.key_type.arrow_types, strict=True) if self.selector.is_shown else ()
        return pa.schema(
            [
                *(pa.field(name, data_type, nullable=False) for name, data_type in keys),
                *(pa.field(name, EVENT_TIME_TYPE, nullable=False) for name in WINDOW_COLUMNS),
                *result_fields(self.descriptor),
            ]
        )

    def columns_read(self, wanted: frozenset[str] | None) -> frozenset[str] | None:
        return None if self.late_tag else columns_of(self.descriptor, self.selector.columns)

    def combining(self) -> Combining | str:
        if self.late_tag:
            return "late records go on unchanged"
        if not self.windows.is_event_time:
            return "the clock at arrival decides"
        if isinstance(self.windows, Session):
            return "sessions begin and end with their records"
        return combining_of(self.descriptor, self.selector, self.windows.pane_ms, self.windows.offset_ms)

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return (self.descriptor, _WATERMARK_COPIES, WATERMARKS, ASSIGNER)

    def initialize_state(self) -> None:
        self._check_assigner()
        state = self.context.operator_state
        copies = state.list_state(_WATERMARK_COPIES.name)
        found = [*kept_moments(state.list_state(WATERMARKS.name)), *kept_moments(copies)]
        copies.update([])
        if found:
            self._lowest, self._clock_was = min(found), max(found)
            # An input that returned from idleness may have let one subtask go further than another. What the first one has fired
            # must stay so; what the other one has not is in the state, and is due.
            self._watermark = self._kept_watermark = self._clock_was if self.windows.is_event_time else self._lowest

    def _check_assigner(self) -> None:
        """Namespaces of state are starts of windows, and would be taken for those of other ones."""
        advice = "give windows of another length, offset or gap a uid of their own"
        check_assigner(self.context, self._lengths(), self.descriptor.name, "kind, lengths in ms", advice)

    def _lengths(self) -> list[Any]:
        windows = self.windows
        if isinstance(windows, Session):
            return ["session", windows.gap_ms]
        slide_ms = windows.slide_ms if isinstance(windows, Sliding) else windows.size_ms
        return ["sliding", windows.size_ms, slide_ms, windows.offset_ms]  # tumbling ones are those that slide by their size

    def process_batch(self, batch: Batch, input_index: int) -> None:
        if not self.windows.is_event_time:
            batch = self._arrived(batch)
        stamps = self._stamps(batch)
        if batch.num_rows:
            count_records(batch, self.context)
            self._take(batch, stamps)

    @abstractmethod
    def _take(self, batch: Batch, stamps: npt.NDArray[np.int64]) -> None:
        """Records with their times."""

    def close(self) -> None:
        close_selections(self.descriptor)

    def snapshot_state(self, checkpoint_id: int) -> None:
        keep_moment(self.context.operator_state.list_state(WATERMARKS.name), self._kept_watermark)
        keep_assigner(self.context, self._lengths())

    def _stamps(self, batch: Batch) -> npt.NDArray[np.int64]:
        if batch.timestamps is None:
            raise InvalidTimestampError(
                f"operator {self.context.uid!r}: records reach a window without event times",
                operator=self.context.uid,
                subtask=self.context.subtask,
                record=None,
            )
        return batch.timestamps

    def _take_late(self, batch: Batch, is_late: npt.NDArray[np.bool_]) -> None:
        """Some records of a batch go to the late output as they are, or, where the job does not read it, are counted."""
        late = batch.filter(is_late)
        if self.late_tag and self.output.has_readers(self.late_tag):
            self.output.collect_side(self.late_tag, late)
        else:
            self._count_late(late)

    def _count_late(self, late: Batch) -> None:
        counters = self.context.counters
        counters.late_dropped += record_count(late)
        watermark = min(self._watermark, self._kept_watermark)  # the maximum of a drain is no moment
        counters.late_ms_max = max(counters.late_ms_max, watermark - int(self._stamps(late).min()))

    @property
    def _fired_until(self) -> int:
        """Start of the last window that the watermark has passed; every window up to it has fired."""
        return self._watermark - self.windows.size_ms + 1 if self._watermark < MAX_WATERMARK else MAX_WATERMARK

    def process_watermark(self, watermark_ms: int) -> Iterator[None]:
        return self._advance(watermark_ms) if self.windows.is_event_time else iter(())

    def _advance(self, watermark_ms: int) -> Iterator[None]:
        """What is late is decided at once; what is due fires in slices."""
        self._watermark = max(self._watermark, watermark_ms)
        if watermark_ms < MAX_WATERMARK:
            self._kept_watermark = self._watermark
        return self._fire_due()

    @abstractmethod
    def _fire_due(self) -> Iterator[None]: ...

    # ---------------------------------------------------------------------------------------------- processing time

    _clock_was = MIN_WATERMARK
    """The latest clock of a subtask at the cut; time does not go back."""

    def _arrived(self, batch: Batch) -> Batch:
        """With the clock as event time: that of a window that has not fired, so that none fires twice."""
        now_ms = max(self.context.now_ms(), self._watermark + 1, self._clock_was + 1)
        due_ms = self.next_processing_time_ms()
        if due_ms is not None and due_ms < now_ms:
            for _ in self._advance(now_ms - 1):
                pass
        return batch.with_timestamps(np.full(batch.num_rows, now_ms, np.int64))

    def next_processing_time_ms(self) -> int | None:
        return None if self.windows.is_event_time else self._next_due()

    def process_processing_time(self, now_ms: int) -> Iterator[None]:
        """No further than windows are due, so that a record that comes in the same ms has the clock as its time."""
        due_ms = self.next_processing_time_ms()
        if due_ms is not None and due_ms < now_ms:
            yield from self._advance(now_ms - 1)
            due_ms = self.next_processing_time_ms()
        if due_ms == now_ms:
            yield from self._advance(now_ms)

    def finish(self) -> Iterator[None]:
        """Windows of processing time that are open at the end of input fire once."""
        return iter(()) if self.windows.is_event_time else self._advance(MAX_WATERMARK)

    @abstractmethod
    def _next_due(self) -> int | None:
        """When the clock fires a window next, ms; what a restore found unfinished is due at once."""

    def _update(self, state: ColumnarState, namespaces: npt.NDArray[np.int64] | int, batch: Batch) -> KeyColumn:
        keys = self._batch_keys(batch)
        fold(state, keys, namespaces, batch, self.descriptor, self.context)
        return keys

    def _batch_keys(self, batch: Batch) -> KeyColumn:
        context = self.context
        return self.selector.keys(
            batch, max_parallelism=context.max_parallelism, operator=context.uid, subtask=context.subtask
        )

    def _values(self, batch: Batch) -> list[Values]:
        context = self.context
        return state_columns(self.descriptor, batch.columns(), operator=context.uid, subtask=context.subtask)

    def _result(self, start: int, rows: pa.RecordBatch) -> Batch:
        keys = len(self.selector.names)
        starts = np.full(rows.num_rows, start, np.int64)
        return self._results(rows.columns[:keys], starts, starts + self.windows.size_ms, rows.columns[keys:])

    def _results(
        self, keys: Sequence[pa.Array], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], results: Sequence[pa.Array]
    ) -> Batch:
        times = [pa.array(moments * 1000).view(EVENT_TIME_TYPE) for moments in (starts, ends)]
        arrays = [*(keys if self.selector.is_shown else ()), *times, *results]
        columns = pa.RecordBatch.from_arrays(arrays, schema=self.output_type.schema)
        return Batch(columns=columns, timestamps=ends - 1)

    def _keys(self, arrays: Sequence[pa.Array]) -> KeyColumn:
        """Of columns of which the first are the key's."""
        count, context = len(self.selector.names), self.context
        return self.selector.key_type.column(arrays[:count], max_parallelism=context.max_parallelism, operator=context.uid)

    def _taken(self, keys: KeyColumn, rows: npt.NDArray[np.int64]) -> KeyColumn:
        return self._keys([array.take(pa.array(rows)) for array in keys.arrays])


class LateWindowOperator(ColumnarWindowOperator):
    """Base of windows that keep their state when they have fired, for late records."""

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return (*super().declared_states(), LATE_UNTIL)

    def initialize_state(self) -> None:
        super().initialize_state()
        kept = kept_moments(self.context.operator_state.list_state(LATE_UNTIL.name))
        self._restored_late_until = max(kept) if kept else self._late_at(self._watermark, 0)

    def snapshot_state(self, checkpoint_id: int) -> None:
        super().snapshot_state(checkpoint_id)
        late_until = max(self._restored_late_until, self._late_at(self._kept_watermark, self.lateness_ms))
        keep_moment(self.context.operator_state.list_state(LATE_UNTIL.name), late_until)

    @property
    def _late_until(self) -> int:
        """Up to where windows are late: their state is gone."""
        if self._watermark == MAX_WATERMARK:
            return MAX_WATERMARK
        return max(self._restored_late_until, self._late_at(self._watermark, self.lateness_ms))

    @abstractmethod
    def _late_at(self, watermark_ms: int, lateness_ms: int) -> int:
        """Up to where windows are late at a watermark."""


class TumblingWindowOperator(ColumnarWindowOperator):
    """Tumbling windows without allowed lateness: a record updates one row, which is the result when its window fires."""

    def open(self) -> None:
        self._state: ColumnarState = self.context.keyed_state.columnar_state(self.descriptor, self.selector.names)

    def _take(self, batch: Batch, stamps: npt.NDArray[np.int64]) -> None:
        windows, batch = self._windows_of(batch, stamps)
        if batch.num_rows:
            self._update(self._state, windows, batch)

    def _next_due(self) -> int | None:
        windows = self._state.namespaces()
        return windows[0] + self.windows.size_ms - 1 if windows else None

    def _windows_of(self, batch: Batch, stamps: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64] | int, Batch]:
        """Start of each record's window (one number when it is the same for all), and the records that are not late."""
        size, offset = self.windows.size_ms, self.windows.offset_ms
        earliest, latest = int(stamps.min()), int(stamps.max())
        first, last = (stamp - (stamp - offset) % size for stamp in (earliest, latest))
        late_until = self._fired_until
        if first > late_until and first == last:
            return first, batch
        starts: npt.NDArray[np.int64] = stamps - (stamps - offset) % size
        if first <= late_until:
            in_time = starts > late_until
            self._take_late(batch, ~in_time)
            batch, starts = batch.filter(in_time), starts[in_time]
        return starts, batch

    def _fire_due(self) -> Iterator[None]:
        while due := [start for start in self._state.namespaces() if start <= self._fired_until]:
            for start in due:
                yield from self._fire(start)

    def _fire(self, start: int) -> Iterator[None]:
        while self._state.row_count(start):
            rows = self._state.read(start, 0, self.rows_per_slice_max)
            self._state.drop_front(start, rows.num_rows)
            self.output.collect(self._result(start, rows))
            yield
        self._state.remove(start)
