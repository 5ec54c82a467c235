"""The n first rows of each key and window: `keyed.window(hf.Tumbling(minutes=1)).top(10, by="price")`.

Rows that may be among them when the window fires are in a row table, in the namespace of the window's end. A window fires once,
with its ranks, in slices of whole keys: what is emitted leaves the state, so that a barrier may cut between two slices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK, Batch
from holdfast.operators.base import OperatorContext, Output
from holdfast.operators.functions.schema import EVENT_TIME_TYPE, RowType
from holdfast.operators.functions.selectors import Selector
from holdfast.operators.functions.tables.top import Entries, RankedRows, Ranking, check_distinct_columns, check_ordered
from holdfast.operators.functions.windows.assigners import Sliding, Tumbling, WindowAssigner
from holdfast.operators.functions.windows.bounds import WINDOWS_OF_A_RECORD_MAX, slide_of
from holdfast.operators.functions.windows.columnar import WINDOW_COLUMNS
from holdfast.operators.functions.windows.firing import FiringOperator, check_event_times, put_aside
from holdfast.operators.functions.windows.kept_assigner import ASSIGNER, check_lengths, keep_lengths
from holdfast.operators.functions.windows.kept_watermark import WATERMARKS
from holdfast.operators.functions.windows.options import RowWindowOptions
from holdfast.statebackends.errors import GraphError
from holdfast.statebackends.state import RowMatches, StateDescriptor

Numbers = npt.NDArray[np.int64]

ROWS_PER_SLICE_MAX = 8192
"""Rows that are emitted at once, beyond the first key's."""
ENTRIES_PER_SLICE_MAX = 1 << 18
"""Windows of rows that are entered at once, beyond the first row's."""


class WindowTopOperator(FiringOperator):
    """Emits of each key and window its first rows: the key if it is computed, the row's columns, the window's, the rank."""

    kind = "a window"

    def __init__(
        self, ranking: Ranking, windows: Tumbling | Sliding, selector: Selector, input_type: RowType, late_tag: str
    ) -> None:
        """`late_tag`: the side output for late rows; empty: they are dropped and counted."""
        self.windows = windows
        self.late_tag = late_tag
        self.rows = RankedRows(ranking, selector, input_type)
        self.rows_per_slice_max = ROWS_PER_SLICE_MAX
        self.entries_per_slice_max = ENTRIES_PER_SLICE_MAX
        bounds = [pa.field(name, EVENT_TIME_TYPE, nullable=False) for name in WINDOW_COLUMNS]
        rank = pa.field(ranking.rank_column, pa.int64(), nullable=False)
        self.output_type = RowType(pa.schema([*self.rows.key_fields, *self.rows.fields, *bounds, rank]))

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return (self.rows.descriptor, WATERMARKS, ASSIGNER)

    def setup(self, context: OperatorContext, output: Output) -> None:
        super().setup(context, output)
        self._emitted: list[RowMatches] = []
        """Rows that are emitted, and leave the state with their window, or when a barrier comes."""
        self._earliest_end = MIN_WATERMARK

    def initialize_state(self) -> None:
        check_lengths(self.context, self.windows, self.rows.descriptor.name)
        super().initialize_state()

    def open(self) -> None:
        self.rows.open(self.context)
        self._thresholds = self.rows.new_thresholds()

    def snapshot_state(self, checkpoint_id: int) -> None:
        super().snapshot_state(checkpoint_id)
        keep_lengths(self.context, self.windows)
        for rows in self._emitted:
            self.rows.table.delete(rows)
        self._emitted = []

    def _take(self, batch: Batch, stamps: Numbers, input_index: int) -> None:
        check_event_times(*batch.time_range(), self.context)
        size, slide, passed = self.windows.size_ms, slide_of(self.windows), self._reached.current
        ends = stamps - (stamps - self.windows.offset_ms) % slide + size
        """Of the last window of each row; before it, where the slide is longer than the size, the row is in none."""
        in_window = ends > stamps
        late = in_window & (ends - 1 <= passed)
        if late.any():
            put_aside(batch.filter(late), self.late_tag, self, self._reached)
        keys = self.rows.keys(batch)
        taken = np.flatnonzero(in_window & ~late)
        if len(taken):
            self.rows.offer_in(self._entries(taken, ends[taken], stamps[taken]), batch, keys, self._thresholds)

    def _entries(self, rows: Numbers, ends: Numbers, stamps: Numbers) -> Iterator[Entries]:
        """Each row's windows that have not fired, from the last one, which ends at `ends`, back; in slices of some rows."""
        slide, passed = slide_of(self.windows), self._reached.current
        if slide >= self.windows.size_ms:
            counts = np.ones(len(rows), np.int64)
        else:
            counts = (ends - 1 - np.maximum(stamps, passed + 1)) // slide + 1
        self._earliest_end = min(self._earliest_end, int((ends - (counts - 1) * slide).min()))
        totals = np.cumsum(counts)
        start = done = 0
        while start < len(rows):
            stop = max(start + 1, int(np.searchsorted(totals, done + self.entries_per_slice_max, side="right")))
            some = slice(start, stop)
            yield Entries(rows[some], ends[some], counts[some], slide)
            start, done = stop, int(totals[stop - 1])

    def _fire_due(self) -> Iterator[None]:
        if self._earliest_end - 1 > self._reached.current:
            return
        for end in self.rows.table.namespaces():
            self._earliest_end = end
            if end - 1 > self._reached.current:
                return
            yield from self._fire_window(end)
        self._earliest_end = MAX_WATERMARK

    def _fire_window(self, end: int) -> Iterator[None]:
        self._thresholds.drop(end)
        scan = self.rows.table.scan(end)
        while (rows := scan.next(self.rows_per_slice_max)) is not None:
            if len(rows):
                self.output.collect(self._result(rows, end))
                self._emitted.append(rows)
            yield
        self.rows.table.drop(end)
        self._emitted = []

    def _result(self, rows: RowMatches, end: int) -> Batch:
        """By key and rank."""
        ranked = self.rows.ranked(rows)
        first = ranked.positions < self.rows.ranking.count  # a restored job may have had more ranks
        picked = rows.select(ranked.order[first])
        count = len(picked)
        bounds = [pa.array(np.full(count, moment * 1_000)).view(EVENT_TIME_TYPE) for moment in (end - self.windows.size_ms, end)]
        arrays = [*self.rows.arrays_of(picked), *bounds, pa.array(ranked.positions[first] + 1)]
        columns = pa.RecordBatch.from_arrays(arrays, schema=self.output_type.schema)
        return Batch(columns=columns, timestamps=np.full(count, end - 1))


def window_top_operator(
    ranking: Ranking, windows: WindowAssigner, options: RowWindowOptions, selector: Selector, input_type: RowType
) -> WindowTopOperator:
    """The operator of `window(...).top(n, by=)`. Raises GraphError, UnknownColumnError."""
    if not isinstance(windows, Tumbling | Sliding) or not windows.is_event_time:
        raise _refused(f"it takes tumbling and sliding windows of event time, not {windows!r}; of others use process")
    for what, given in (("trigger", options.trigger), ("evictor", options.evictor), ("lateness", options.lateness_ms or None)):
        if given is not None:
            raise _refused(f"a window fires once, at its end, and takes no {what}, such as {given!r}: use process")
    if isinstance(windows, Sliding) and windows.size_ms > windows.slide_ms * WINDOWS_OF_A_RECORD_MAX:
        raise _refused(f"a row of {windows!r} is in more than {WINDOWS_OF_A_RECORD_MAX:,} windows: take a longer slide")
    check_ordered(ranking, input_type, "window")
    operator = WindowTopOperator(ranking, windows, selector, input_type, options.late_tag)
    check_distinct_columns(operator.output_type, _refused)
    return operator


def _refused(reason: str) -> GraphError:
    return GraphError(f"operator 'window': top: {reason}", operator="window")
