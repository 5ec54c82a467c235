"""The rows of one input of a join as state: those that wait for a partner, and those whose pairs were not all made yet.

A row is kept until no partner can follow. Rows go in stretches of event time, which are dropped as a whole; which of them have no
partner yet is a table of its own, with the rows' keys and orders alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK, Batch
from holdfast.operators.base import OperatorContext
from holdfast.operators.functions.joins.output import JoinSide
from holdfast.statebackends.serialization.key_columns import ArrowKeyColumn
from holdfast.statebackends.state import RowMatches, RowProbe, RowTable, RowTableStateDescriptor

Numbers = npt.NDArray[np.int64]

STRETCHES = 64
"""Stretches of the event time for which rows are kept: a large state is cleaned by a whole one, so much late."""
STRETCH_MS_MIN = 64
"""At hundreds of thousands of rows a second shorter ones have too few rows to pay."""
EXACT_ROWS_MAX = 1 << 16
"""A buffer of up to so many rows has none in a snapshot for which no partner can follow."""
_SLICE_ROWS = 8192
_ALL = 0
"""The namespace of tables that need none."""


@dataclass(frozen=True, slots=True)
class JoinInterval:
    """How far the time of a right row may be from that of the left one, both ends inclusive, ms."""

    lower_ms: int
    upper_ms: int


@dataclass(slots=True)
class Arrival:
    """Rows of one input, in order, that have come and have not made all of their pairs. All have a key, and none is late."""

    side: int
    keys: ArrowKeyColumn
    values: Sequence[pa.Array]
    times: Numbers
    after: Numbers
    """Of each row: the order in the other buffer up to which its pairs are made."""
    is_matched: npt.NDArray[np.bool_]
    settled: int = 0
    """Rows at the front that are done."""
    probe: RowProbe | None = field(default=None)


class SideBuffer:
    """The rows of one input as state. A template until `open`."""

    def __init__(self, name: str, side: JoinSide, partners: JoinInterval, *, is_outer: bool, late_tag: str) -> None:
        """`partners`: how far the times of partners may be from that of a row of this input."""
        self.name = name
        self.side = side
        self.partners = partners
        self.is_outer = is_outer
        self.late_tag = late_tag
        values = pa.schema(side.columns)
        self._rows = RowTableStateDescriptor(name, values)
        """All rows for which a partner can follow, in stretches of event time; a stretch's namespace is its first ms."""
        self._unmatched = RowTableStateDescriptor(f"{name}_unmatched", pa.schema([]), by_time=True)
        """Key, order and time of those that have no partner yet."""
        self._pending = RowTableStateDescriptor(f"{name}_pending", _with_own(values, side.selector.names))
        """Rows that a barrier met before all of their pairs were made."""
        keys = zip(side.selector.names, side.selector.key_type.arrow_types, strict=True)
        self._unkeyed = RowTableStateDescriptor(f"{name}_unkeyed", pa.schema([*keys, *side.columns]), by_time=True)
        """Rows with a null in the key, which have no partner."""

    @property
    def keeps_unkeyed(self) -> bool:
        return self.is_outer and self.side.key_is_nullable

    def declared_states(self) -> tuple[RowTableStateDescriptor, ...]:
        found = [self._rows, self._pending]
        if self.is_outer:
            found.append(self._unmatched)
        if self.keeps_unkeyed:
            found.append(self._unkeyed)
        return tuple(found)

    def open(self, context: OperatorContext, widest_ms: int) -> None:
        """`widest_ms`: of the stretches that restored rows are in; 0: there are none."""
        self._context = context
        kept_ms = min(max(0, self.partners.upper_ms), self.partners.upper_ms - self.partners.lower_ms)
        self._width_ms = max(STRETCH_MS_MIN, kept_ms // STRETCHES)
        names, state = self.side.selector.names, context.keyed_state
        self.rows: RowTable = state.row_table(self._rows, names)
        self._restored_width_ms = max(widest_ms, self._width_ms)
        self._restored_until = max(self.rows.namespaces(), default=MIN_WATERMARK)
        """Stretches up to this one may be as wide as that, since rows were put into them before the interval changed."""
        self._next_drop_ms = MIN_WATERMARK
        """Time before which no stretch has ended for good."""
        self.pending: RowTable = state.row_table(self._pending, names)
        if self.is_outer:
            self.unmatched: RowTable = state.row_table(self._unmatched, names)
        if self.keeps_unkeyed:
            own = [f"key {position}" for position in range(len(names))]
            self.unkeyed: RowTable = state.row_table(self._unkeyed, own)

    # -------------------------------------------------------------------------------------------------------------- rows

    def keys(self, batch: Batch) -> ArrowKeyColumn:
        context = self._context
        return self.side.selector.keys(
            batch, max_parallelism=context.max_parallelism, operator=context.uid, subtask=context.subtask
        )

    def keys_of(self, arrays: Sequence[pa.Array]) -> ArrowKeyColumn:
        context = self._context
        return self.side.selector.key_type.column(arrays, max_parallelism=context.max_parallelism, operator=context.uid)

    def is_due(self, times: Numbers, watermark_ms: int) -> npt.NDArray[np.bool_]:
        """For which rows no partner can follow."""
        found: npt.NDArray[np.bool_] = times <= self.due_until(watermark_ms)
        return found

    def due_until(self, watermark_ms: int) -> int:
        """Time of the last rows for which no partner can follow."""
        if watermark_ms in (MIN_WATERMARK, MAX_WATERMARK):
            return watermark_ms
        return max(MIN_WATERMARK, min(watermark_ms - self.partners.upper_ms, MAX_WATERMARK - 1))

    def result_times(self, times: Numbers) -> Numbers:
        """Event times of rows that come out without a partner: when none can follow, and never before their own."""
        return np.maximum(times, shifted(times, self.partners.upper_ms))

    def append(self, keys: ArrowKeyColumn, values: Sequence[pa.Array], times: Numbers, is_matched: npt.NDArray[np.bool_]) -> None:
        earliest = np.maximum(times, MIN_WATERMARK + self._width_ms)
        stretches = earliest - earliest % self._width_ms
        self._next_drop_ms = min(self._next_drop_ms, int(stretches.min()))
        orders = self.rows.append(keys, stretches, values, times)
        if self.is_outer and not is_matched.all():
            rows = np.flatnonzero(~is_matched)
            self.unmatched.append(keys.take(rows), _ALL, [], times[rows], orders[rows])

    def append_unkeyed(self, batch: Batch) -> None:
        """Rows with a null in the key."""
        columns = batch.columns()
        arrays = [*self.side.key_values(columns), *self.side.values(columns)]
        self.unkeyed.append(self.keys(batch), _ALL, arrays, batch.timestamps)

    def found(self, rows: RowMatches) -> None:
        """These rows have a partner."""
        if self.is_outer and self.unmatched.count():
            self.unmatched.delete(self.unmatched.counterparts(rows))

    def values_of(self, rows: RowMatches) -> list[pa.Array]:
        """Columns of rows of the buffer."""
        names = self._rows.schema.names
        return list(rows.take(names).columns) if names else []

    # ----------------------------------------------------------------------------------------------------------- cleaning

    def clean(self, watermark_ms: int) -> None:
        """Drop stretches in which no row can get a partner any more."""
        until = self.due_until(watermark_ms)
        if until < self._next_drop_ms:
            return
        self._next_drop_ms = MAX_WATERMARK
        ended: int | None = None
        for stretch in self.rows.namespaces():
            last = min(stretch + self._width_of(stretch) - 1, MAX_WATERMARK)
            if last > until:
                self._next_drop_ms = last
                break
            ended = stretch
        if ended is not None:
            self.rows.drop_until(ended)

    def _width_of(self, stretch: int) -> int:
        return self._restored_width_ms if stretch <= self._restored_until else self._width_ms

    @property
    def widest_ms(self) -> int:
        """Of the stretches that rows are in."""
        return self._width_of(min(self.rows.namespaces(), default=MAX_WATERMARK))

    def has_due(self, watermark_ms: int) -> bool:
        """Whether rows without a partner are to come out at this watermark."""
        until = self.due_until(watermark_ms)
        return (self.is_outer and len(self.unmatched.until(until, 1)) > 0) or (
            self.keeps_unkeyed and len(self.unkeyed.until(until, 1)) > 0
        )

    def clean_exactly(self, watermark_ms: int) -> None:
        """As `clean`, to the ms, where it costs little."""
        if watermark_ms == MIN_WATERMARK or self.rows.count() > EXACT_ROWS_MAX:
            return
        scan = self.rows.scan(times=(MIN_WATERMARK, self.due_until(watermark_ms)))
        while (rows := scan.next(EXACT_ROWS_MAX)) is not None:
            self.rows.delete(rows)

    # ------------------------------------------------------------------------------------------------------------ pending

    def store_pending(self, arrivals: Sequence[Arrival]) -> bool:
        """What is left of arrivals is state, and what was before it is not. Whether there is any."""
        self.pending.drop(_ALL)
        for arrival in arrivals:
            rows = np.arange(arrival.settled, len(arrival.times))
            after, is_matched = arrival.after[rows], arrival.is_matched[rows]
            if arrival.probe is not None:
                after[:1] = np.maximum(after[:1], arrival.probe.last_order)
            values = [column.take(pa.array(rows)) for column in arrival.values]
            columns = [pa.array(after), pa.array(is_matched), *values]
            self.pending.append(arrival.keys.take(rows), _ALL, columns, arrival.times[rows])
        return bool(arrivals)

    def restored_pending(self, side: int) -> Iterator[Arrival]:
        scan = self.pending.scan(_ALL)
        while (rows := scan.next(_SLICE_ROWS)) is not None:
            if not len(rows):
                continue
            columns = rows.take(self._pending.schema.names).columns
            after, is_matched = (column.to_numpy(zero_copy_only=False) for column in columns[:2])
            yield Arrival(side, self.keys_of(rows.keys()), columns[2:], rows.times, after.copy(), is_matched.copy())


def _with_own(values: pa.Schema, keys: Sequence[str]) -> pa.Schema:
    """With two columns of our own, called like no column of the user's."""
    names: list[str] = []
    for name in ("after", "is_matched"):
        while name in (*values.names, *keys, *names):
            name = f"{name}_"
        names.append(name)
    return pa.schema([(names[0], pa.int64()), (names[1], pa.bool_()), *values])


def shifted(times: Numbers, by_ms: int) -> Numbers:
    """Times so much later; those beyond all times are the first or the last of all."""
    if by_ms >= 0:
        return np.minimum(times, MAX_WATERMARK - by_ms) + by_ms
    return np.maximum(times, MIN_WATERMARK - by_ms) + by_ms
