"""Tumbling event-time windows over columns. The state holds one row per (window, key), and nothing else.

A window [start, end) fires when the watermark reaches end - 1, in slices of bounded size; a record whose window has
fired is late: it is dropped and counted. Rows leave the state as they are emitted, so that a barrier between two slices
cuts exactly there. The watermark is kept in the snapshot, so that no window fires a second time after a restore. A drain that a
barrier cut off is in it, too, and is ended before a record is read (ADR 61)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK, Batch
from holdfast.barriers.partition import Combining
from holdfast.operators.functions.aggregates import close_selections, columns_of, result_fields, state_columns
from holdfast.operators.functions.combining import combining_of, count_records, fold, record_count
from holdfast.operators.functions.schema import EVENT_TIME_TYPE, RowType
from holdfast.operators.functions.selectors import Selector
from holdfast.operators.functions.windows.assigners import Session, Sliding, Tumbling
from holdfast.operators.functions.windows.firing import FiringOperator, check_event_times, event_times
from holdfast.operators.functions.windows.kept_assigner import ASSIGNER, check_lengths, keep_lengths
from holdfast.operators.functions.windows.kept_entries import kept_entries
from holdfast.operators.functions.windows.kept_watermark import LATE_UNTIL, WATERMARKS, keep_moment, restored_moment
from holdfast.statebackends.columnar.parts import Values
from holdfast.statebackends.decoding import decode_msgpack
from holdfast.statebackends.serialization.key_columns import ArrowKeyColumn
from holdfast.statebackends.state import (
    ColumnarState,
    ColumnarStateDescriptor,
    OperatorListStateDescriptor,
    Redistribution,
    StateDescriptor,
)

FIRED_ROWS_PER_SLICE_MAX = 8192
WINDOW_COLUMNS = ("window_start", "window_end")
_FIRED = OperatorListStateDescriptor("fired_until", Redistribution.UNION)
"""Entries of a subtask: msgpack of FiredUntil. Windows that leave the state as they fire have one only in the middle of a drain,
with the minimum."""
_WATERMARK_COPIES = OperatorListStateDescriptor("watermark")
"""The form of older snapshots (ADR 8): split, so many copies that each new subtask was dealt one. Read, and never written again."""


class FiredUntil(msgspec.Struct, frozen=True, array_like=True):
    """Up to where windows of some key groups had fired at a cut."""

    first: int
    """First key group."""
    stop: int
    """Key group behind the last one."""
    until: int
    """ms."""
    is_drain: bool = False
    """The cut was in the middle of a drain. Written only if so."""

    def encoded(self) -> bytes:
        """msgpack array."""
        fields = msgspec.structs.astuple(self)
        return msgspec.msgpack.encode(fields if self.is_drain else fields[:-1])


def _decoded(entry: bytes) -> FiredUntil:
    return decode_msgpack(entry, FiredUntil)


class ColumnarWindowOperator(FiringOperator):
    """Base of keyed event-time windows with columnar aggregates: key columns, window_start, window_end, aggregates.

    It keeps the watermark. Late records go to the late output, or are counted."""

    kind = "a window"
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
        check_lengths(self.context, self.windows, self.descriptor.name)
        lists = self.context.operator_state
        copies, watermarks = lists.list_state(_WATERMARK_COPIES.name), lists.list_state(WATERMARKS.name)
        watermarks.update([*watermarks.entries, *copies.entries])
        copies.update([])
        super().initialize_state()
        self._is_behind = bool(watermarks.entries)  # by the clock, too, and in a drain, before there was a watermark

    def process_batch(self, batch: Batch, input_index: int) -> None:
        super().process_batch(batch if self.windows.is_event_time else self._arrived(batch), input_index)

    def _take(self, batch: Batch, stamps: npt.NDArray[np.int64], input_index: int) -> None:
        count_records(batch, self.context)
        self._add(batch, stamps)

    @abstractmethod
    def _add(self, batch: Batch, stamps: npt.NDArray[np.int64]) -> None:
        """Records with their times; at least one."""

    def close(self) -> None:
        close_selections(self.descriptor)

    def snapshot_state(self, checkpoint_id: int) -> None:
        super().snapshot_state(checkpoint_id)
        keep_lengths(self.context, self.windows)

    def _restore_fired(self) -> list[FiredUntil]:
        """What the subtasks stored. A drain that the barrier cut off is ended first, all of it; then the job goes on. With
        records in flight only if all of those whose keys are ours were in it: to the others the end comes behind these records.

        Raises CorruptStateError."""
        groups = self.context.keyed_state.key_groups
        found = kept_entries(self.context, _FIRED.name, "up to where windows have fired", _decoded, self._is_of_the_job)
        in_drain = np.zeros(self.context.max_parallelism, np.bool_)
        for each in found:
            in_drain[each.first : each.stop] |= each.is_drain
        own = in_drain[groups.start : groups.stop]
        if own.any() and (own.all() or not self.context.restores_in_flight):
            self._reached.current = MAX_WATERMARK
        return found

    def _is_of_the_job(self, fired: FiredUntil) -> bool:
        return 0 <= fired.first < fired.stop <= self.context.max_parallelism and fired.until <= MAX_WATERMARK

    def _keep_fired(self, runs: Iterable[tuple[int, int, int]]) -> None:
        """What `_restore_fired` finds: (first key group, key group behind the last one, up to where windows have fired)."""
        is_drain = self._reached.current == MAX_WATERMARK
        entries = [FiredUntil(*run, is_drain).encoded() for run in runs]
        self.context.operator_state.list_state(_FIRED.name).update(entries)

    def _stamps(self, batch: Batch) -> npt.NDArray[np.int64]:
        return event_times(batch, self.context, self.kind)

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
        counters.late_ms_max = max(counters.late_ms_max, self._reached.behind(late.time_range()[0]))

    @property
    def _fired_until(self) -> int:
        """Start of the last window that the watermark has passed; every window up to it has fired."""
        reached = self._reached.current
        return reached - self.windows.size_ms + 1 if reached < MAX_WATERMARK else MAX_WATERMARK

    def process_watermark(self, watermark_ms: int) -> Iterator[None]:
        """Windows by the clock fire with the end of event time at the latest: their rows would be late behind it."""
        is_due = self.windows.is_event_time or watermark_ms == MAX_WATERMARK
        return super().process_watermark(watermark_ms) if is_due else iter(())

    # ---------------------------------------------------------------------------------------------- processing time

    def _arrived(self, batch: Batch) -> Batch:
        """With the clock as event time: that of a window that has not fired, so that none fires twice."""
        now_ms = max(self.context.now_ms(), self._reached.kept + 1)
        return batch.with_timestamps(np.full(batch.num_rows, now_ms, np.int64))

    @property
    def uses_processing_time(self) -> bool:
        return super().uses_processing_time or not self.windows.is_event_time

    def next_processing_time_ms(self) -> int | None:
        overdue_ms = super().next_processing_time_ms()
        return overdue_ms if overdue_ms is not None or self.windows.is_event_time else self._next_due()

    def process_processing_time(self, now_ms: int) -> Iterator[None]:
        """No further than windows are due, so that a record that comes in the same ms has the clock as its time."""
        if self._is_behind:
            yield from self._fire()
        due_ms = self.next_processing_time_ms()
        if due_ms is not None and due_ms < now_ms:
            yield from super().process_watermark(now_ms - 1)
            due_ms = self.next_processing_time_ms()
        if due_ms == now_ms:
            yield from super().process_watermark(now_ms)

    def finish(self) -> Iterator[None]:
        """Windows by the clock of records that came behind the end of event time: timers by the clock bring them."""
        return iter(()) if self.windows.is_event_time else super().process_watermark(MAX_WATERMARK)

    @abstractmethod
    def _next_due(self) -> int | None:
        """When the clock fires a window next, ms."""

    def _update(self, state: ColumnarState, namespaces: npt.NDArray[np.int64] | int, batch: Batch) -> ArrowKeyColumn:
        keys = self._batch_keys(batch)
        fold(state, keys, namespaces, batch, self.descriptor, self.context)
        return keys

    def _batch_keys(self, batch: Batch) -> ArrowKeyColumn:
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

    def _keys(self, arrays: Sequence[pa.Array]) -> ArrowKeyColumn:
        """Of columns of which the first are the key's."""
        count, context = len(self.selector.names), self.context
        return self.selector.key_type.column(arrays[:count], max_parallelism=context.max_parallelism, operator=context.uid)


class LateWindowOperator(ColumnarWindowOperator):
    """Base of windows that keep their state when they have fired, for late records or for further windows.

    What has fired is known for each key group: the subtasks of a snapshot may have come to different points."""

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return (*super().declared_states(), LATE_UNTIL, _FIRED)

    def initialize_state(self) -> None:
        super().initialize_state()
        late_until = restored_moment(self.context, LATE_UNTIL)
        self._restored_late_until = self._late_at(self._reached.current, 0) if late_until is None else late_until

    def open(self) -> None:
        groups = self.context.keyed_state.key_groups
        self._fired = np.full(self.context.max_parallelism, self._fired_before(), np.int64)
        for each in self._restore_fired():
            self._fired[each.first : each.stop] = each.until
        self._own = self._fired[groups.start : groups.stop]
        """Of each key group of ours: up to where windows have fired."""

    def snapshot_state(self, checkpoint_id: int) -> None:
        super().snapshot_state(checkpoint_id)
        late_until = max(self._restored_late_until, self._late_at(self._reached.kept, self.lateness_ms))
        keep_moment(self.context.operator_state.list_state(LATE_UNTIL.name), late_until)
        first = self.context.keyed_state.key_groups.start
        bounds = [0, *(np.flatnonzero(np.diff(self._own)) + 1).tolist(), len(self._own)]
        self._keep_fired((first + start, first + stop, int(self._own[start])) for start, stop in pairwise(bounds))

    @property
    def _late_until(self) -> int:
        """Up to where windows are late: their state is gone."""
        if self._reached.current == MAX_WATERMARK:
            return MAX_WATERMARK
        return max(self._restored_late_until, self._late_at(self._reached.current, self.lateness_ms))

    @abstractmethod
    def _late_at(self, watermark_ms: int, lateness_ms: int) -> int:
        """Up to where windows are late at a watermark."""

    @abstractmethod
    def _fired_before(self) -> int:
        """Up to where windows of key groups have fired of which the snapshot does not say it."""

    @abstractmethod
    def _passed(self, watermark_ms: int) -> int:
        """Up to where a watermark lets windows fire."""

    def _not_fired(self, rows: pa.RecordBatch, windows: npt.NDArray[np.int64] | int) -> pa.RecordBatch:
        """The rows of key groups for which their windows have not fired: after a restore these may differ."""
        if self._own.min() == self._own.max():
            return rows
        return rows.filter(pa.array(self._fired[self._keys(rows.columns).key_groups] < windows))

    def _settle(self) -> None:
        """All windows that the watermark has passed have fired, with records or without. After a drain, as before it: when the job
        goes on, records may come for windows that the drain has cut in two."""
        if self._reached.current < MAX_WATERMARK:
            np.maximum(self._own, self._passed(self._reached.current), out=self._own)
        else:
            self._reached.end_drain()
            self._own[:] = self._passed(self._reached.kept)


class TumblingWindowOperator(ColumnarWindowOperator):
    """Tumbling windows without allowed lateness: a record updates one row, which is the result when its window fires."""

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return (*super().declared_states(), _FIRED)

    def open(self) -> None:
        self._state: ColumnarState = self.context.keyed_state.columnar_state(self.descriptor, self.selector.names)
        self._restore_fired()

    def snapshot_state(self, checkpoint_id: int) -> None:
        super().snapshot_state(checkpoint_id)
        groups, is_drain = self.context.keyed_state.key_groups, self._reached.current == MAX_WATERMARK
        self._keep_fired([(groups.start, groups.stop, MIN_WATERMARK)] if is_drain else [])

    def _add(self, batch: Batch, stamps: npt.NDArray[np.int64]) -> None:
        windows, batch = self._windows_of(batch, stamps)
        if batch.num_rows:
            self._update(self._state, windows, batch)

    def _next_due(self) -> int | None:
        windows = self._state.namespaces()
        return windows[0] + self.windows.size_ms - 1 if windows else None

    def _windows_of(self, batch: Batch, stamps: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64] | int, Batch]:
        """Start of each record's window (one number when it is the same for all), and the records that are not late."""
        size, offset = self.windows.size_ms, self.windows.offset_ms
        earliest, latest = batch.time_range()
        check_event_times(earliest, latest, self.context)
        first, last = (stamp - (stamp - offset) % size for stamp in (earliest, latest))
        late_until = self._fired_until
        if first > late_until and first == last:
            return first, batch
        starts: npt.NDArray[np.int64] = (stamps - offset) // size * size + offset  # // by one number is several times as fast as %
        if first <= late_until:
            in_time = starts > late_until
            self._take_late(batch, ~in_time)
            batch, starts = batch.filter(in_time), starts[in_time]
        return starts, batch

    def _fire_due(self) -> Iterator[None]:
        while due := [start for start in self._state.namespaces() if start <= self._fired_until]:
            for start in due:
                yield from self._fire_window(start)
        if self._reached.current == MAX_WATERMARK:
            self._reached.end_drain()

    def _fire_window(self, start: int) -> Iterator[None]:
        while self._state.row_count(start):
            rows = self._state.read(start, 0, self.rows_per_slice_max)
            self._state.drop_front(start, rows.num_rows)
            self.output.collect(self._result(start, rows))
            yield
        self._state.remove(start)


def occurrences(codes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How often the code of each row came before."""
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    found = np.empty(len(codes), np.int64)
    found[order] = np.arange(len(codes)) - np.searchsorted(ordered, ordered)
    return found
