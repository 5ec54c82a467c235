"""Sliding event-time windows over columns, and tumbling ones with allowed lateness. A record updates one row, that of its key in
its pane: the longest time in which no window begins or ends. The panes of a window are merged when it fires.

As with tumbling windows [start, end) fires when the watermark reaches end - 1, in slices of bounded size, and what has fired stays
fired: the snapshot has the last window that fired for each range of key groups, and the rows of one window that was made and not
yet emitted whole. A record is late when the last of its windows has fired and its lateness has passed; it enters those of its
windows for which that is not so. Those among them that have fired fire again for its key, once for a batch, in slices, too: the
snapshot has the keys and windows that are left."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.barriers.elements import MIN_WATERMARK, Batch
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import Selector
from holdfast.operators.functions.windows.assigners import Sliding
from holdfast.operators.functions.windows.columnar import LateWindowOperator, occurrences
from holdfast.operators.functions.windows.firing import check_event_times
from holdfast.operators.functions.windows.touched import TouchedWindows
from holdfast.statebackends.columnar.accumulators import check_descriptor, result_field
from holdfast.statebackends.errors import GraphError, InvalidConfigError
from holdfast.statebackends.serialization.key_columns import ArrowKeyColumn
from holdfast.statebackends.state import (
    ColumnAggregate,
    ColumnarState,
    ColumnarStateDescriptor,
    StateDescriptor,
    WindowRows,
)

Numbers = npt.NDArray[np.int64]
Touched = tuple[ArrowKeyColumn, Numbers, Numbers]
"""Key of each record, and the starts of the first and of the last window that it touches."""

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
        run = (("min", "again_from"), ("max", "again_until"))
        runs = tuple(ColumnAggregate(function, name, name, pa.int64()) for function, name in run)
        self.again = ColumnarStateDescriptor(f"{descriptor.name}_again", runs)
        """Starts of the first and the last window that fire again for a key; the namespace counts the runs of a key."""
        try:
            check_descriptor(self.waiting)
            check_descriptor(self.again, selector.names)
        except InvalidConfigError as error:
            raise GraphError(f"operator 'window': {error}", operator="window") from error

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return (*super().declared_states(), self.waiting, self.again)

    def open(self) -> None:
        super().open()
        state, names = self.context.keyed_state, self.selector.names
        self._state: ColumnarState = state.columnar_state(self.descriptor, names)
        self._waiting: ColumnarState = state.columnar_state(self.waiting, names)
        self._again: ColumnarState = state.columnar_state(self.again, names)
        self._panes = self.windows.size_ms // self.windows.pane_ms
        self._merged = self._panes_merged()
        self._emitting: tuple[int, pa.RecordBatch] | None = None
        self._late: list[Touched] = []
        """Of the batches so far."""
        self._touched: TouchedWindows | None = None
        """What is firing again."""
        for namespace in self._again.namespaces():
            *keys, firsts, lasts = self._again.read(namespace).columns
            self._late.append((self._keys(keys), firsts.to_numpy(), lasts.to_numpy()))

    def snapshot_state(self, checkpoint_id: int) -> None:
        super().snapshot_state(checkpoint_id)
        if self._emitting is not None:
            start, rows = self._emitting
            self._waiting.remove(start)
            if rows.num_rows:
                arrays = rows.columns
                self._waiting.update(self._keys(arrays), start, arrays[len(self.selector.names) :])
        for namespace in self._again.namespaces():
            self._again.remove(namespace)
        if (touched := self._all_touched()) is not None:
            keys, firsts, lasts = touched.rest()
            self._again.update(keys, occurrences(self._state.numbered(keys)[0]), [firsts, lasts])

    def _add(self, batch: Batch, stamps: Numbers) -> None:
        panes, batch = self._panes_of(batch, stamps)
        if batch.num_rows:
            keys = self._update(self._state, panes, batch)
            earliest = panes if isinstance(panes, int) else int(panes.min())
            self._merged.changed(earliest)
            if self.lateness_ms and self._first_window_of(earliest) <= self._passed(self._reached.current):
                self._fire_again(keys, np.full(batch.num_rows, panes) if isinstance(panes, int) else panes)

    def _panes_of(self, batch: Batch, stamps: Numbers) -> tuple[Numbers | int, Batch]:
        """Start of each record's pane (one number when it is the same for all), and the records that are not late."""
        pane, offset = self.windows.pane_ms, self.windows.offset_ms
        earliest, latest = batch.time_range()
        check_event_times(earliest, latest, self.context)
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
        starts: Numbers = (stamps - offset) // pane * pane + offset  # // by one number is several times as fast as %
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

    def _first_windows_of(self, panes: Numbers) -> Numbers:
        """The same of many panes."""
        since: Numbers = panes + (self.windows.pane_ms - self.windows.size_ms)
        return since + (self.windows.offset_ms - since) % self.windows.slide_ms

    # ------------------------------------------------------------------------------------------------------------ firing

    def _fire_due(self) -> Iterator[None]:
        for start in self._waiting.namespaces():
            yield from self._emit_waiting(start)
        yield from self._fire_touched()
        while (due := self._next_window()) is not None and due <= self._fired_until:
            yield from self._fire_window(due)
        if self.lateness_ms:
            self._clean(self._late_until)
        self._settle()

    def _next_due(self) -> int | None:
        start = self._next_window()
        return None if start is None else start + self.windows.size_ms - 1

    def _next_window(self) -> int | None:
        """Start of the next window that has records."""
        fired = int(self._own.min())
        pane = self._state.first_namespace(self._first_window(fired + 1))
        if pane is None:
            return None
        first = self._first_window_of(pane)
        return first if fired == MIN_WATERMARK else max(first, fired + self.windows.slide_ms)

    def _fire_window(self, start: int) -> Iterator[None]:
        if self._panes > 1:
            yield from self._merged.merged(start)
        rows = self._state.read(start) if self._panes == 1 else self._named(*self._merged.window(start))
        rows = self._not_fired(rows, start)
        np.maximum(self._own, start, out=self._own)
        self._clean(min(start, self._late_until))
        yield from self._emit(start, rows)

    def _named(self, keys: list[pa.Array], results: list[pa.Array]) -> pa.RecordBatch:
        names = [*self.selector.names, *(aggregate.output for aggregate in self.descriptor.aggregates)]
        return pa.RecordBatch.from_arrays([*keys, *results], names=names)

    def _clean(self, start: int) -> None:
        """Remove the panes that no window behind this one has."""
        for pane in self._state.namespaces(until=self._first_window(start + 1)):
            self._state.remove(pane)

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

    def _passed(self, watermark_ms: int) -> int:
        """Start of the last window that a watermark has passed."""
        if watermark_ms == MIN_WATERMARK:
            return MIN_WATERMARK
        return max(MIN_WATERMARK, self._last_window(watermark_ms - self.windows.size_ms + 1))

    def _fired_before(self) -> int:
        return MIN_WATERMARK

    # ------------------------------------------------------------------------------------------------------ late records

    def remaining_output(self) -> Iterator[None] | None:
        return self._fire_touched() if self._late else None

    def _fire_again(self, keys: ArrowKeyColumn, panes: Numbers) -> None:
        """Windows that have fired, and are not late, are to fire again for the keys that got a record. `panes`: of each record."""
        fired = self._passed(self._reached.current)
        rows = np.flatnonzero(panes <= fired + self.windows.size_ms - self.windows.pane_ms)
        panes = panes[rows]
        firsts = np.maximum(self._first_windows_of(panes), self._first_window(self._late_until + 1))
        lasts = np.minimum(panes - (panes - self.windows.offset_ms) % self.windows.slide_ms, fired)
        are_there = firsts <= lasts
        if are_there.any():
            self._late.append((keys.take(rows[are_there]), firsts[are_there], lasts[are_there]))

    def _all_touched(self) -> TouchedWindows | None:
        """With the batches that came since it began to fire again, which are none while it does."""
        if self._late:
            keys, firsts, lasts = zip(*self._late, strict=True)
            joined = self._keys([pa.concat_arrays(arrays) for arrays in zip(*(each.arrays for each in keys), strict=True)])
            codes = self._state.numbered(joined)[0]
            slide_ms = self.windows.slide_ms
            self._touched = TouchedWindows(joined, codes, np.concatenate(firsts), np.concatenate(lasts), slide_ms)
            self._late.clear()
        return self._touched

    def _fire_touched(self) -> Iterator[None]:
        """Each row once, as it is behind the batches."""
        touched = self._all_touched()
        if touched is None:
            return
        for runs, windows in touched.blocks(self._end_of_block):
            keys, firsts, lasts = touched.keys.take(runs), touched.firsts[runs], touched.lasts[runs]
            merged = self._panes_merged(keys)
            for start in windows:
                some = keys.take(np.flatnonzero((firsts <= start) & (lasts >= start)))
                if len(some):
                    if self._panes > 1:
                        yield from merged.merged(start)
                    rows = self._state.rows_of(some, start) if self._panes == 1 else self._named(*merged.window(start, some))
                    touched.pass_by(start)
                    yield from self._emit(start, rows)
        self._touched = None

    def _panes_merged(self, keys: ArrowKeyColumn | None = None) -> WindowRows:
        pane_ms = self.windows.pane_ms
        return self._state.panes(pane_ms, self._panes, self.windows.offset_ms % pane_ms, keys)

    def _end_of_block(self, start: int) -> int:
        """Windows up to there are merged from the same two halves, see columnar/panes.py."""
        size_ms, offset_ms = self.windows.size_ms, self.windows.offset_ms % self.windows.pane_ms
        return start + size_ms - (start - offset_ms) % size_ms
