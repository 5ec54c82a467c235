"""Session windows over columns. A record updates one row, that of its key in its pane of one gap; rows are merged to sessions when
these fire (ADR 64).

A session [start, end) fires when the watermark reaches end - 1, and again, once for a batch, when late records have changed it.
Those that end in one pane are made at once and leave in slices, then those of the next pane: the snapshot has the end up to which
sessions have fired, for each range of key groups, and what was made and not emitted. A record is late when the session that it is
to be merged into is gone; which that is depends on the records in front of it, one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK, Batch
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import Selector
from holdfast.operators.functions.windows.assigners import Session
from holdfast.operators.functions.windows.columnar import WINDOW_COLUMNS, LateWindowOperator, occurrences
from holdfast.operators.functions.windows.firing import check_event_times
from holdfast.operators.functions.windows.kept_watermark import WATERMARKS, kept_moments
from holdfast.statebackends.columnar.accumulators import check_descriptor, result_field
from holdfast.statebackends.errors import GraphError, InvalidConfigError
from holdfast.statebackends.serialization.key_columns import ArrowKeyColumn
from holdfast.statebackends.state import (
    ColumnAggregate,
    ColumnarState,
    ColumnarStateDescriptor,
    SessionRows,
    StateDescriptor,
)


class SessionWindowOperator(LateWindowOperator):
    """Sessions: one row per key and session."""

    def __init__(
        self,
        windows: Session,
        descriptor: ColumnarStateDescriptor,
        selector: Selector,
        input_type: RowType,
        *,
        lateness_ms: int = 0,
        late_tag: str = "",
    ) -> None:
        """Raises GraphError when a column of results is called like one that state needs."""
        super().__init__(windows, descriptor, selector, input_type, lateness_ms=lateness_ms, late_tag=late_tag)
        start, end = WINDOW_COLUMNS
        bounds = (ColumnAggregate("min", start, start, pa.int64()), ColumnAggregate("max", end, end, pa.int64()))
        self.rows = ColumnarStateDescriptor("sessions", (*bounds, *descriptor.aggregates))
        """The namespace is a pane's start."""
        fields = [pa.field(start, pa.int64()), pa.field(end, pa.int64()), *map(result_field, descriptor.aggregates)]
        kept = tuple(ColumnAggregate("first", field.name, field.name, field.type) for field in fields)
        self.waiting = ColumnarStateDescriptor("sessions_waiting", kept)
        """What a barrier met that was not emitted yet; the namespace counts the sessions of a key."""
        try:
            check_descriptor(self.rows, selector.names)
            check_descriptor(self.waiting, selector.names)
        except InvalidConfigError as error:
            raise GraphError(f"operator 'window': {error}", operator="window") from error

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return (self.rows, *super().declared_states()[1:], self.waiting)

    def open(self) -> None:
        super().open()
        state, names = self.context.keyed_state, self.selector.names
        self._gap_ms: int = self.windows.gap_ms
        self._state: ColumnarState = state.columnar_state(self.rows, names)
        self._waiting: ColumnarState = state.columnar_state(self.waiting, names)
        self._sessions: SessionRows = self._state.sessions(self._gap_ms)
        self._pending: deque[pa.RecordBatch] = deque(self._waiting.read(namespace) for namespace in self._waiting.namespaces())
        """Key columns, start, end and results of sessions that have fired and are not emitted."""
        self._next_end = MAX_WATERMARK
        """By the clock: no session that has not fired ends before."""

    def snapshot_state(self, checkpoint_id: int) -> None:
        super().snapshot_state(checkpoint_id)
        for namespace in self._waiting.namespaces():
            self._waiting.remove(namespace)
        if self._pending:
            rows = pa.Table.from_batches(self._pending).combine_chunks().to_batches()[0]
            keys = self._keys(rows.columns)
            self._waiting.update(keys, occurrences(self._state.numbered(keys)[0]), rows.columns[len(self.selector.names) :])

    # ------------------------------------------------------------------------------------------------------ records

    def _add(self, batch: Batch, stamps: npt.NDArray[np.int64]) -> None:
        late_until = self._late_until
        earliest, latest = batch.time_range()
        check_event_times(earliest, latest, self.context)
        keys = self._batch_keys(batch)
        if earliest <= late_until:
            batch, keys = self._admitted(batch, keys, late_until)
            if not batch.num_rows:
                return
            stamps = self._stamps(batch)
        panes = np.maximum(stamps - stamps % self._gap_ms, self._sessions.first_pane(late_until))
        self._state.update(keys, panes, [stamps, stamps + self._gap_ms, *self._values(batch)], stamps)
        first_end = batch.time_range()[0] + self._gap_ms
        self._next_end = min(self._next_end, first_end)
        if self.lateness_ms and first_end <= self._fired_until:
            self._fire_again(keys, panes, stamps)

    def _admitted(self, batch: Batch, keys: ArrowKeyColumn, late_until: int) -> tuple[Batch, ArrowKeyColumn]:
        """The records that are not late."""
        stamps = self._stamps(batch)
        tardy = np.flatnonzero(stamps <= late_until)
        found = self._sessions.straddling(keys.take(tardy), late_until)
        in_time = stamps[tardy] + self._gap_ms > late_until
        if not in_time.all():
            _join(found.codes, stamps[tardy], found.starts, in_time, self._gap_ms)
        if found.has_remains[found.codes[in_time]].any():
            self._sessions.drop_remains(late_until)
        is_late = np.zeros(len(stamps), np.bool_)
        is_late[tardy[~in_time]] = True
        if not is_late.any():
            return batch, keys
        self._take_late(batch, is_late)
        return batch.filter(~is_late), keys.take(np.flatnonzero(~is_late))

    def _fire_again(self, keys: ArrowKeyColumn, panes: npt.NDArray[np.int64], stamps: npt.NDArray[np.int64]) -> None:
        """Sessions that have fired, and got a record: each once, as it is behind the batch."""
        rows = np.flatnonzero(stamps + self._gap_ms <= self._fired_until)
        self._pending.extend(self._named(self._sessions.touched(keys.take(rows), panes[rows], self._fired_until)))

    def remaining_output(self) -> Iterator[None] | None:
        return self._emit() if self._pending else None

    # ------------------------------------------------------------------------------------------------------- firing

    @property
    def _fired_until(self) -> int:
        """Sessions that end there, or before it, are due, or have fired."""
        return self._passed(self._reached.current)

    def _passed(self, watermark_ms: int) -> int:
        return min(watermark_ms + 1, MAX_WATERMARK)

    def _fired_before(self) -> int:
        """The subtask that came least far says it: what it has not fired must not be lost."""
        kept = kept_moments(self.context, WATERMARKS)
        return self._passed(min(kept, default=MIN_WATERMARK))

    def _late_at(self, watermark_ms: int, lateness_ms: int) -> int:
        """End of the last session that is late."""
        return max(MIN_WATERMARK, self._passed(watermark_ms) - lateness_ms)

    def _next_due(self) -> int | None:
        return None if self._next_end == MAX_WATERMARK else self._next_end - 1

    def _fire_due(self) -> Iterator[None]:
        yield from self._emit()
        until = self._fired_until
        while (pane := self._sessions.next_closing(fired := int(self._own.min()), until)) is not None:
            closing = self._sessions.closing(pane, fired, until)
            for rows in self._named([] if closing is None else [closing]):
                rows = self._not_fired(rows, rows.column(WINDOW_COLUMNS[1]).to_numpy())
                self._pending.extend([rows] * bool(rows.num_rows))
            np.maximum(self._own, min(until, self._sessions.last_end(pane)), out=self._own)
            yield from chain(self._emit(), self._forget(int(self._own.min())))
        yield from self._forget(until)
        self._settle()
        if not self.windows.is_event_time:
            end = self._sessions.next_end(self._fired_until)
            self._next_end = MAX_WATERMARK if end is None else end

    def _forget(self, fired: int) -> Iterator[None]:
        """Panes of sessions that have fired leave the state when no record can come for them any more."""
        while self._sessions.forget(min(fired, self._late_until)):
            yield

    def _named(self, found: Iterable[tuple[list[pa.Array], list[pa.Array]]]) -> Iterator[pa.RecordBatch]:
        names = [*self.selector.names, *(aggregate.output for aggregate in self.rows.aggregates)]
        for keys, results in found:
            yield pa.RecordBatch.from_arrays([*keys, *results], names=names)

    def _emit(self) -> Iterator[None]:
        count = len(self.selector.names)
        while self._pending:
            rows = self._pending.popleft()
            if rows.num_rows > self.rows_per_slice_max:
                self._pending.appendleft(rows.slice(self.rows_per_slice_max))
                rows = rows.slice(0, self.rows_per_slice_max)
            starts, ends = (column.to_numpy() for column in rows.columns[count : count + 2])
            self.output.collect(self._results(rows.columns[:count], starts, ends, rows.columns[count + 2 :]))
            yield


def _join(
    codes: npt.NDArray[np.int64],
    stamps: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    in_time: npt.NDArray[np.bool_],
    gap_ms: int,
) -> None:
    """Records whose own window is late are in time if they reach the session of their key that goes on: one by one, for each may
    move its start. `starts` of these sessions; `in_time` is filled in."""
    first = starts.tolist()
    for row, (code, at, is_in_time) in enumerate(zip(codes.tolist(), stamps.tolist(), in_time.tolist(), strict=True)):
        if is_in_time or at >= first[code] - gap_ms:
            in_time[row] = True
            first[code] = min(first[code], at)
