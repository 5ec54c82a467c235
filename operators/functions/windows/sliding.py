"""Sliding event-time windows over columns. A record updates one row, that of its key in its pane: the longest time in which no
window begins or ends. The panes of a window are merged when it fires.

As with tumbling windows [start, end) fires when the watermark reaches end - 1, in slices of bounded size, and what has fired stays
fired: the snapshot has the last window that fired for each range of key groups, and the rows of one window that was made and not
yet emitted whole. A record is late when the last of its windows has fired; it enters those of its windows that have not."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK, Batch
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import Selector
from holdfast.operators.functions.windows.assigners import Sliding
from holdfast.operators.functions.windows.columnar import ColumnarWindowOperator
from holdfast.statebackends.columnar.accumulators import check_descriptor, result_field
from holdfast.statebackends.errors import GraphError, InvalidConfigError
from holdfast.statebackends.state import (
    ColumnAggregate,
    ColumnarState,
    ColumnarStateDescriptor,
    OperatorListStateDescriptor,
    Redistribution,
    StateDescriptor,
    WindowRows,
)

_FIRED = OperatorListStateDescriptor("fired_until", Redistribution.UNION)
"""Entries of a subtask: msgpack [first key group, key group behind the last one, start of the last window that fired], ms."""


PANES_MAX = 10_000
"""Of a window."""


class SlidingWindowOperator(ColumnarWindowOperator):
    """Sliding windows: one row per key and window that has records."""

    windows: Sliding

    def __init__(
        self, windows: Sliding, descriptor: ColumnarStateDescriptor, selector: Selector, input_type: RowType
    ) -> None:
        """Raises GraphError when a column of results is called like one that state needs, and for a window of more than PANES_MAX
        panes."""
        panes = windows.size_ms // windows.pane_ms
        if panes > PANES_MAX:
            raise GraphError(
                f"operator 'window': a window of {windows.size_ms} ms that slides by {windows.slide_ms} ms has {panes} panes of "
                f"{windows.pane_ms} ms; it may have {PANES_MAX}: take a longer slide, or one that divides the size",
                operator="window",
            )
        super().__init__(windows, descriptor, selector, input_type)
        results = (result_field(aggregate) for aggregate in descriptor.aggregates)
        waiting = tuple(ColumnAggregate("first", field.name, field.name, field.type) for field in results)
        self.waiting = ColumnarStateDescriptor(f"{descriptor.name}_waiting", waiting)
        """Results of a window that a barrier met half emitted; the namespace is the window's start."""
        try:
            check_descriptor(self.waiting)
        except InvalidConfigError as error:
            raise GraphError(f"operator 'window': {error}", operator="window") from error

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return (*super().declared_states(), self.waiting, _FIRED)

    def initialize_state(self) -> None:
        super().initialize_state()
        self._fired = np.full(self.context.max_parallelism, MIN_WATERMARK, np.int64)
        for entry in self.context.operator_state.list_state(_FIRED.name).entries:
            start, stop, fired = msgspec.msgpack.decode(entry)
            self._fired[start:stop] = fired
        self._is_restored = self._watermark > MIN_WATERMARK

    def open(self) -> None:
        windows, context = self.windows, self.context
        self._state: ColumnarState = context.keyed_state.columnar_state(self.descriptor, self.selector.names)
        self._waiting: ColumnarState = context.keyed_state.columnar_state(self.waiting, self.selector.names)
        panes = windows.size_ms // windows.pane_ms
        self._merged: WindowRows = self._state.panes(windows.pane_ms, panes, windows.offset_ms % windows.pane_ms)
        groups = context.keyed_state.key_groups
        self._own = self._fired[groups.start : groups.stop]
        """Of each key group of ours: start of the last window that fired."""
        self._emitting: tuple[int, pa.RecordBatch] | None = None

    def snapshot_state(self, checkpoint_id: int) -> None:
        super().snapshot_state(checkpoint_id)
        first = self.context.keyed_state.key_groups.start
        bounds = [0, *(np.flatnonzero(np.diff(self._own)) + 1).tolist(), len(self._own)]
        runs = ((first + start, first + stop, int(self._own[start])) for start, stop in pairwise(bounds))
        self.context.operator_state.list_state(_FIRED.name).update([msgspec.msgpack.encode(run) for run in runs])
        if self._emitting is not None:
            start, rows = self._emitting
            self._waiting.remove(start)
            if rows.num_rows:
                arrays = rows.columns
                self._waiting.update(self._keys(arrays), start, arrays[len(self.selector.names) :])

    def process_batch(self, batch: Batch, input_index: int) -> None:
        stamps = self._stamps(batch)
        if not batch.num_rows:
            return
        self._go_on()
        panes, batch = self._panes_of(batch, stamps)
        if batch.num_rows:
            self._update(self._state, panes, batch)
            self._merged.changed(panes if isinstance(panes, int) else int(panes.min()))

    def _panes_of(self, batch: Batch, stamps: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64] | int, Batch]:
        """Start of each record's pane (one number when it is the same for all), and the records that are not late."""
        pane, offset = self.windows.pane_ms, self.windows.offset_ms
        earliest, latest = int(stamps.min()), int(stamps.max())
        late_until, is_gapless = self._fired_until, self.windows.slide_ms <= self.windows.size_ms
        is_in_time = self._last_window(earliest) > late_until
        first = earliest - (earliest - offset) % pane
        if is_in_time and is_gapless and first == latest - (latest - offset) % pane:
            return first, batch
        taken = np.ones(len(stamps), np.bool_)
        if not (is_in_time and is_gapless):
            since = (stamps - offset) % self.windows.slide_ms
            in_time, in_window = stamps - since > late_until, since < self.windows.size_ms
            if (late := in_window & ~in_time).any():
                self._count_late(stamps[late])
            taken = in_time & in_window
        if not taken.all():
            batch, stamps = batch.filter(taken), stamps[taken]
        starts: npt.NDArray[np.int64] = stamps - (stamps - offset) % pane
        return starts, batch

    def _last_window(self, moment: int) -> int:
        """Start of the last window that begins at this moment or before it."""
        return moment - (moment - self.windows.offset_ms) % self.windows.slide_ms

    def _first_window(self, moment: int) -> int:
        """Start of the first window that begins at this moment or behind it."""
        return moment + (self.windows.offset_ms - moment) % self.windows.slide_ms

    # ------------------------------------------------------------------------------------------------------------ firing

    def _go_on(self) -> None:
        """After a restore, what was due at the barrier fires before a record comes: it must not see that record."""
        if self._is_restored:
            for _ in self._fire_due():
                pass

    def _fire_due(self) -> Iterator[None]:
        self._is_restored = False
        for start in self._waiting.namespaces():
            yield from self._emit_waiting(start)
        while (due := self._next_window()) is not None and due <= self._fired_until:
            yield from self._fire(due)
        self._settle()

    def _next_window(self) -> int | None:
        """Start of the next window that has records."""
        panes = self._state.namespaces()
        if not panes:
            return None
        slide, pane = self.windows.slide_ms, self.windows.pane_ms
        first = self._first_window(panes[0] + pane - self.windows.size_ms)
        fired = int(self._own.min())
        return first if fired == MIN_WATERMARK else max(first, fired + slide)

    def _fire(self, start: int) -> Iterator[None]:
        keys, results = self._merged.window(start)
        names = [*self.selector.names, *(aggregate.output for aggregate in self.descriptor.aggregates)]
        rows = self._not_fired(start, pa.RecordBatch.from_arrays([*keys, *results], names=names))
        np.maximum(self._own, start, out=self._own)
        self._clean(start)
        yield from self._emit(start, rows)

    def _clean(self, start: int) -> None:
        """Remove the panes that no window behind this one has."""
        for pane in self._state.namespaces():
            if self._last_window(pane) > start:
                break
            self._state.remove(pane)

    def _not_fired(self, start: int, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of key groups for which the window has not fired: after a restore they may differ."""
        if int(self._own.max()) < start:
            return rows
        groups = self._keys(rows.columns).key_groups
        return rows.filter(pa.array(self._fired[groups] < start))

    def _emit(self, start: int, rows: pa.RecordBatch) -> Iterator[None]:
        while rows.num_rows:
            some, rows = rows.slice(0, self.rows_per_slice_max), rows.slice(self.rows_per_slice_max)
            self._emitting = start, rows
            self.output.collect(self._result(start, some))
            yield
        self._emitting = None
        self._waiting.remove(start)

    def _emit_waiting(self, start: int) -> Iterator[None]:
        """What a barrier had cut off: rows leave the state as they are emitted."""
        while self._waiting.row_count(start):
            rows = self._waiting.read(start, 0, self.rows_per_slice_max)
            self._waiting.drop_front(start, rows.num_rows)
            self.output.collect(self._result(start, rows))
            yield
        self._waiting.remove(start)

    def _settle(self) -> None:
        """All windows that the watermark has passed have fired, with records or without. After a drain, as before it: when the job
        goes on, records may come for windows that the drain has cut in two."""
        if self._watermark < MAX_WATERMARK:
            np.maximum(self._own, self._passed(self._watermark), out=self._own)
        else:
            self._own[:] = self._passed(self._kept_watermark)

    def _passed(self, watermark_ms: int) -> int:
        """Start of the last window that a watermark has passed."""
        if watermark_ms == MIN_WATERMARK:
            return MIN_WATERMARK
        return max(MIN_WATERMARK, self._last_window(watermark_ms - self.windows.size_ms + 1))

    def _keys(self, arrays: list[pa.Array]) -> Any:
        count, context = len(self.selector.names), self.context
        return self.selector.key_type.column(arrays[:count], max_parallelism=context.max_parallelism, operator=context.uid)
