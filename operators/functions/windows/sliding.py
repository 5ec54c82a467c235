"""Sliding event-time windows over columns, and tumbling ones with allowed lateness. A record updates one row, that of its key in
its pane: the longest time in which no window begins or ends. The panes of a window are merged when it fires.

As with tumbling windows [start, end) fires when the watermark reaches end - 1, in slices of bounded size, and what has fired stays
fired: the snapshot has the last window that fired for each range of key groups, and the rows of one window that was made and not
yet emitted whole. A record is late when the last of its windows has fired and its lateness has passed; it enters those of its
windows for which that is not so. Those among them that have fired fire again for its key, once for a batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK, Batch
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import Selector
from holdfast.operators.functions.windows.assigners import Sliding
from holdfast.operators.functions.windows.columnar import LateWindowOperator
from holdfast.statebackends.columnar.accumulators import check_descriptor, result_field
from holdfast.statebackends.errors import GraphError, InvalidConfigError
from holdfast.statebackends.state import (
    ColumnAggregate,
    ColumnarState,
    ColumnarStateDescriptor,
    KeyColumn,
    OperatorListStateDescriptor,
    Redistribution,
    StateDescriptor,
    WindowRows,
)

_FIRED = OperatorListStateDescriptor("fired_until", Redistribution.UNION)
"""Entries of a subtask: msgpack [first key group, key group behind the last one, start of the last window that fired], ms."""

PANES_MAX = 10_000
"""Of a window."""


class SlidingWindowOperator(LateWindowOperator):
    """Sliding windows: one row per key and window that has records."""

    windows: Sliding

    def __init__(
        self,
        windows: Sliding,
        descriptor: ColumnarStateDescriptor,
        selector: Selector,
        input_type: RowType,
        *,
        lateness_ms: int = 0,
        late_tag: str = "",
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
        super().__init__(windows, descriptor, selector, input_type, lateness_ms=lateness_ms, late_tag=late_tag)
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
        self._panes = windows.size_ms // windows.pane_ms
        self._merged: WindowRows = self._state.panes(windows.pane_ms, self._panes, windows.offset_ms % windows.pane_ms)
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

    def _take(self, batch: Batch, stamps: npt.NDArray[np.int64]) -> None:
        self._go_on()
        panes, batch = self._panes_of(batch, stamps)
        if batch.num_rows:
            keys = self._update(self._state, panes, batch)
            earliest = panes if isinstance(panes, int) else int(panes.min())
            self._merged.changed(earliest)
            if self.lateness_ms and self._first_window_of(earliest) <= self._passed(self._watermark):
                self._fire_again(keys, np.full(batch.num_rows, panes) if isinstance(panes, int) else panes)

    def _panes_of(self, batch: Batch, stamps: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64] | int, Batch]:
        """Start of each record's pane (one number when it is the same for all), and the records that are not late."""
        pane, offset = self.windows.pane_ms, self.windows.offset_ms
        earliest, latest = int(stamps.min()), int(stamps.max())
        late_until, is_gapless = self._late_until, self.windows.slide_ms <= self.windows.size_ms
        is_in_time = self._last_window(earliest) > late_until
        first = earliest - (earliest - offset) % pane
        if is_in_time and is_gapless and first == latest - (latest - offset) % pane:
            return first, batch
        taken = np.ones(len(stamps), np.bool_)
        if not (is_in_time and is_gapless):
            since = (stamps - offset) % self.windows.slide_ms
            in_time, in_window = stamps - since > late_until, since < self.windows.size_ms
            if (late := in_window & ~in_time).any():
                self._take_late(batch, late)
            taken = in_time & in_window
        if not taken.all():
            batch, stamps = batch.filter(taken), stamps[taken]
        starts: npt.NDArray[np.int64] = stamps - (stamps - offset) % pane
        return starts, batch

    def _late_at(self, watermark_ms: int, lateness_ms: int) -> int:
        """Start of the last window that is late."""
        return max(MIN_WATERMARK, watermark_ms - lateness_ms - self.windows.size_ms + 1)

    def _last_window(self, moment: int) -> int:
        """Start of the last window that begins at this moment or before it."""
        return moment - (moment - self.windows.offset_ms) % self.windows.slide_ms

    def _first_window(self, moment: int) -> int:
        """Start of the first window that begins at this moment or behind it."""
        return moment + (self.windows.offset_ms - moment) % self.windows.slide_ms

    def _first_window_of(self, pane: int) -> int:
        """Start of the first window that has a pane."""
        return self._first_window(pane + self.windows.pane_ms - self.windows.size_ms)

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

    def _next_due(self) -> int | None:
        if self._is_restored:
            return 0
        start = self._next_window()
        return None if start is None else start + self.windows.size_ms - 1

    def _next_window(self) -> int | None:
        """Start of the next window that has records."""
        fired = int(self._own.min())
        pane = next((pane for pane in self._state.namespaces() if self._last_window(pane) > fired), None)
        if pane is None:
            return None
        first = self._first_window_of(pane)
        return first if fired == MIN_WATERMARK else max(first, fired + self.windows.slide_ms)

    def _fire(self, start: int) -> Iterator[None]:
        rows = self._not_fired(start, self._state.read(start) if self._panes == 1 else self._named(*self._merged.window(start)))
        np.maximum(self._own, start, out=self._own)
        self._clean(min(start, self._late_until))
        yield from self._emit(start, rows)

    def _named(self, keys: list[pa.Array], results: list[pa.Array]) -> pa.RecordBatch:
        names = [*self.selector.names, *(aggregate.output for aggregate in self.descriptor.aggregates)]
        return pa.RecordBatch.from_arrays([*keys, *results], names=names)

    def _fire_again(self, keys: KeyColumn, panes: npt.NDArray[np.int64]) -> None:
        """Windows that have fired, and are not late, for the keys that got a record: each row once, as it is behind the batch.

        `panes`: of each record."""
        windows, fired, late = self.windows, self._passed(self._watermark), self._late_until
        rows = np.flatnonzero(panes <= fired + windows.size_ms - windows.pane_ms)
        keys, panes = self._taken(keys, rows), panes[rows]
        changed: set[int] = set()
        for pane in np.unique(panes).tolist():
            last = min(fired, self._last_window(pane))
            changed.update(start for start in range(self._first_window_of(pane), last + 1, windows.slide_ms) if start > late)
        if not changed:
            return
        merged = self._state.panes(
            windows.pane_ms, self._panes, windows.offset_ms % windows.pane_ms, keys, (min(changed), max(changed) + windows.size_ms)
        )
        for start in sorted(changed):
            some = self._taken(keys, np.flatnonzero((panes >= start) & (panes < start + windows.size_ms)))
            found = self._state.rows_of(some, start) if self._panes == 1 else self._named(*merged.window(start, some))
            for offset in range(0, found.num_rows, self.rows_per_slice_max):
                self.output.collect(self._result(start, found.slice(offset, self.rows_per_slice_max)))

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
        if self.lateness_ms:
            self._clean(self._late_until)

    def _passed(self, watermark_ms: int) -> int:
        """Start of the last window that a watermark has passed."""
        if watermark_ms == MIN_WATERMARK:
            return MIN_WATERMARK
        return max(MIN_WATERMARK, self._last_window(watermark_ms - self.windows.size_ms + 1))
