"""Combiners: rows of an exchange folded by key and pane before they travel, where that makes far fewer of them.

What travels is one row for each key and pane: key columns, the parts of the accumulators, and how many records they stand for. The
operator merges it as it would add the records. A pane is a tumbling window, or the longest time in which no sliding window begins
or ends, so that all records of a row are late, or none is. A combiner is no state: it holds nothing over a barrier, a change of
status or the end of data, and a watermark leaves behind the rows in front of it (ADR 69)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.barriers.elements import MAX_WATERMARK, Batch, Element, ElementEvent, Watermark
from holdfast.barriers.partition import ROWS_METADATA
from holdfast.operators.base import OperatorContext
from holdfast.operators.functions.aggregates import state_columns
from holdfast.operators.functions.selectors import Selector
from holdfast.statebackends.columnar.accumulators import create_accumulator, is_exact
from holdfast.statebackends.columnar.key_index import KeyIndex, create_key_index
from holdfast.statebackends.columnar.parts import Slots, extended
from holdfast.statebackends.columnar.state import part_fields_of
from holdfast.statebackends.errors import InvariantError
from holdfast.statebackends.state import ColumnAggregate, ColumnarState, ColumnarStateDescriptor, KeyColumn

RECORDS_HELD_MAX = 1 << 20
"""Folded into what is held."""
KEYS_MIN = 1 << 12
"""Keys that there is room for at first."""
KEYS_KEPT_MAX = 1 << 17
"""Known keys, above which all are forgotten with what is held."""
CELLS_MAX = 1 << 19
"""Rows of accumulators: a combiner of eight parts has 32 MiB of them at most."""
PANES_MAX = 16
"""Side by side, that are held at one time."""

PAYS = 4
"""Records of each row that travels, below which combining costs more than it saves (measured)."""
HOPELESS = 1.1
"""Records of each row of a first batch, below which further batches won't make it pay."""
WAITED_FOR_MIN = 4096
"""Records that are held, at least 1, from which on a watermark waits with them. With fewer all go at once: a stream that is slow,
or given by hand, has its event time as early as without a combiner."""
SAMPLE_RECORDS_MIN = 4096
"""Of a first batch that is judged by itself."""
PAUSE, PAUSE_MAX = 64, 512
"""Records that pass by uncombined, for each one of the attempt that did not pay; doubled after each further one."""

COUNT_COLUMN = "combined_records"
"""How many records a combined row stands for."""
_METADATA = {ROWS_METADATA: b"combined"}
_TIME = np.iinfo(np.int64)

Span: TypeAlias = tuple[int, int]
"""Earliest and latest event time of a batch, ms."""


@dataclass(frozen=True, slots=True)
class ColumnarCombining:
    """How the records of a columnar aggregate are combined; picklable."""

    descriptor: ColumnarStateDescriptor
    selector: Selector
    pane_ms: int | None = None
    """None: a running aggregate, without panes."""
    offset_ms: int = 0
    waited_for_min: int = WAITED_FOR_MIN

    @property
    def schema(self) -> pa.Schema:
        """Of combined rows."""
        selector = self.selector
        keys = zip(selector.names, selector.key_type.arrow_types, strict=True)
        fields = [*(pa.field(name, kind, nullable=False) for name, kind in keys), *part_fields_of(self.descriptor)]
        return pa.schema([*fields, pa.field(COUNT_COLUMN, pa.int64(), nullable=False)], metadata=_METADATA)

    def combiner(self, *, max_parallelism: int, operator: str) -> ColumnarCombiner:
        """That of one producer subtask. `max_parallelism` and `operator` (uid): of the operator that the rows are for."""
        return ColumnarCombiner(self, max_parallelism, operator)


def combining_of(
    descriptor: ColumnarStateDescriptor, selector: Selector, pane_ms: int | None = None, offset_ms: int = 0
) -> ColumnarCombining | str:
    """How records of these aggregates are combined, or why they are not."""
    if selector.columns is None:
        return "the key is a function of the row"
    for aggregate in descriptor.aggregates:
        if not is_exact(aggregate):
            return f"{aggregate.function} of {aggregate.column!r} ({aggregate.input_type}) {_reason(aggregate.function)}"
    combining = ColumnarCombining(descriptor, selector, pane_ms, offset_ms)
    names = combining.schema.names
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        return f"two columns of combined rows would be called {repeated[0]!r}"
    return combining


def _reason(function: str) -> str:
    return "goes by the order of records" if function in ("sum", "mean", "stddev") else "keeps values as they are"


def is_combined(batch: Batch) -> bool:
    """Whether its rows stand for several records each."""
    return batch.schema is not None and batch.schema.metadata is not None and batch.schema.metadata == _METADATA


def record_count(batch: Batch) -> int:
    """Records that the rows of a batch are, or stand for."""
    return int(pc.sum(batch.columns().column(COUNT_COLUMN)).as_py() or 0) if is_combined(batch) else batch.num_rows


def count_records(batch: Batch, context: OperatorContext) -> None:
    """A combined row counts as the records that it stands for: as one it was counted when the batch came."""
    if is_combined(batch):
        context.counters.records_in += record_count(batch) - batch.num_rows


def fold(
    state: ColumnarState,
    keys: KeyColumn,
    namespaces: npt.NDArray[np.int64] | int,
    batch: Batch,
    descriptor: ColumnarStateDescriptor,
    context: OperatorContext,
) -> None:
    """Fold records, or combined rows, into the state of these aggregates.

    Raises StateOverflowError, errors of `where`, and InvariantError for combined rows of other aggregates."""
    if not is_combined(batch):
        values = state_columns(descriptor, batch.columns(), operator=context.uid, subtask=context.subtask)
        state.update(keys, namespaces, values, batch.timestamps)
        return
    columns, first = batch.columns(), len(keys.arrays)
    expected = [(field.name, field.type) for field in part_fields_of(descriptor)]
    if [(field.name, field.type) for field in list(columns.schema)[first:-1]] != expected:
        raise InvariantError(f"operator {context.uid!r}: combined rows of {columns.schema.names} came for {descriptor.name!r}")
    state.merge(keys, namespaces, columns.columns[first:-1])


class ColumnarCombiner:
    """Implements `partition.Combiner` for one producer subtask: accumulators by cell, a cell for each key and pane.

    Whether it pays is decided by counts alone, so that it is the same in every run."""

    def __init__(self, combining: ColumnarCombining, max_parallelism: int, operator: str) -> None:
        self._combining = combining
        self._schema = combining.schema
        self._max_parallelism = max_parallelism
        self._operator = operator
        self._times: Slots = np.zeros(PANES_MAX, np.int64)
        """Event time of the combined rows of each pane: the earliest of its records; of a running aggregate the latest."""
        self._has_times = False
        self._watermark: Watermark | None = None
        """Behind the records that are held."""
        self._records = 0
        """That are held."""
        self._base = 0
        """Number of the first pane that may be held."""
        self._pause = PAUSE
        self._passing = 0
        """Records that still pass by uncombined; nothing is held meanwhile."""
        self.since_ms: int | None = None
        self._counting = next((number for number, each in enumerate(combining.descriptor.aggregates) if _counts_all(each)), None)
        self._index = self._new_index()
        self._lay_out(KEYS_MIN)

    @property
    def size(self) -> int:
        return 8 * len(self._schema) * min(self._records, len(self._counts))

    # ------------------------------------------------------------------------------------------------------------ elements

    def add(self, batch: Batch, *, now_ms: int) -> Sequence[Element]:
        span = None if batch.timestamps is None else batch.time_range()
        ready: list[Element] = []
        if self._records and self._must_go_first(span):
            ready += self.flush()
        if self._passing > 0:
            self._passing -= batch.num_rows
            return [*ready, batch]
        slots = self._slots(batch, ready)
        if not self._fits(span):
            ready += self.flush()
            if self._passing > 0 or not self._fits(span):
                return [*ready, batch]
        is_first = not self._records
        self._fold(batch, slots, span)
        if is_first:
            self.since_ms = now_ms
        if self._records >= RECORDS_HELD_MAX or (is_first and self._is_hopeless()):
            ready += self.flush()
        return ready

    def event(self, event: ElementEvent) -> Sequence[Element]:
        is_worth_it = self._records >= self._combining.waited_for_min
        if is_worth_it and isinstance(event, Watermark) and event.timestamp_ms < MAX_WATERMARK:
            self._watermark = event
            return ()
        return [*self.flush(), event]

    def flush(self) -> Sequence[Element]:
        records = self._records
        ready = self._release()
        if records:
            self._judge(records, sum(element.num_rows for element in ready if isinstance(element, Batch)))
        return ready

    def _judge(self, records: int, rows: int) -> None:
        if rows * PAYS <= records:
            self._pause = PAUSE
        else:
            self._passing = records * self._pause
            self._pause = min(PAUSE_MAX, 2 * self._pause)

    def _is_hopeless(self) -> bool:
        records = self._records
        return records >= SAMPLE_RECORDS_MIN and int(np.count_nonzero(self._counts)) * HOPELESS > records

    def _must_go_first(self, span: Span | None) -> bool:
        """Whether what is held must not wait for a batch: it holds back a watermark at which a record of the batch is late."""
        if (span is not None) != self._has_times:
            return True
        return self._watermark is not None and (span is None or span[0] <= self._watermark.timestamp_ms)

    def _release(self) -> list[Element]:
        """What is held, as it travels, and its watermark."""
        ready: list[Element] = [self._combined()] if self._records else []
        if self._watermark is not None:
            ready.append(self._watermark)
        self._records, self._watermark, self.since_ms = 0, None, None
        return ready

    # --------------------------------------------------------------------------------------------------------------- panes

    def _pane(self, moment: int) -> int:
        """Number of the pane of an event time."""
        combining = self._combining
        assert combining.pane_ms is not None
        return (moment - combining.offset_ms) // combining.pane_ms

    def _fits(self, span: Span | None) -> bool:
        """Whether all panes of a batch can be held, beside those that are."""
        if self._combining.pane_ms is None:
            return True
        if span is None:
            return False
        first, last = map(self._pane, span)
        if not self._records:
            self._base = first
        return self._base <= first and last < self._base + self._panes

    def _cells(self, batch: Batch, slots: Slots, span: Span | None) -> Slots:
        """Cell of each record. Notes the times of the panes."""
        if span is None or self._combining.pane_ms is None:
            if span is not None:
                self._times[0] = max(span[1], int(self._times[0]))
            return slots
        first, last = (self._pane(moment) - self._base for moment in span)
        self._reserve((last + 1) * self._stride)
        if first == last:
            self._times[first] = min(span[0], int(self._times[first]))
            return slots + first * self._stride if first else slots
        assert batch.timestamps is not None
        panes = (batch.timestamps - self._combining.offset_ms) // self._combining.pane_ms - self._base
        np.minimum.at(self._times, panes, batch.timestamps)
        cells: Slots = slots + panes * self._stride
        return cells

    # --------------------------------------------------------------------------------------------------------------- cells

    def _new_index(self) -> KeyIndex:
        key_type = self._combining.selector.key_type
        return create_key_index(
            key_type.arrow_types,
            lambda arrays: key_type.column(arrays, max_parallelism=self._max_parallelism, operator=self._operator),
        )

    def _slots(self, batch: Batch, ready: list[Element]) -> Slots:
        """Slot of each record's key. What is held goes first where there are more keys than room."""
        keys = self._combining.selector.keys(batch, max_parallelism=self._max_parallelism, operator=self._operator)
        slots = self._index.slots(keys)
        if self._index.count > self._stride:
            ready += self._release()
            if self._index.count > KEYS_KEPT_MAX:
                self._index = self._new_index()
                slots = self._index.slots(keys)
            self._lay_out(max(KEYS_MIN, 1 << (2 * self._index.count - 1).bit_length()))
        return slots

    def _lay_out(self, stride: int) -> None:
        """Make room for so many keys, a power of two; nothing is held. The cell of a key in the pane n is its slot + n * stride."""
        self._stride = stride
        self._panes = min(PANES_MAX, max(1, CELLS_MAX // stride))
        self._own_counts = np.zeros(stride, np.int64)
        self._accumulators = [
            create_accumulator(aggregate, stride, operator=self._operator, state=self._combining.descriptor.name)
            for aggregate in self._combining.descriptor.aggregates
        ]

    def _reserve(self, cells: int) -> None:
        if cells > len(self._own_counts):
            self._own_counts = extended(self._own_counts, cells, 0)
            for accumulator in self._accumulators:
                accumulator.resize(cells)

    @property
    def _counts(self) -> Slots:
        """Records of each cell: those that an aggregate counts, if one counts them all."""
        return self._own_counts if self._counting is None else self._accumulators[self._counting].columns[0]

    def _fold(self, batch: Batch, slots: Slots, span: Span | None) -> None:
        descriptor = self._combining.descriptor
        if not self._records:
            self._has_times = span is not None
            self._times.fill(_TIME.min if self._combining.pane_ms is None else _TIME.max)
        cells = self._cells(batch, slots, span)
        columns = state_columns(descriptor, batch.columns(), operator=self._operator)
        for accumulator, values in zip(self._accumulators, columns, strict=True):
            if accumulator.seen is None and accumulator.parts[0].nullable and values.null_count:  # type: ignore[union-attr]
                accumulator.seen = self._counts > 0
        for accumulator, values in zip(self._accumulators, columns, strict=True):
            accumulator.update(cells, values, 0)
        if self._counting is None:
            np.add.at(self._own_counts, cells, 1)
        self._records += batch.num_rows

    def _combined(self) -> Batch:
        """What the cells hold, which are empty then."""
        cells = np.flatnonzero(self._counts)
        arrays = [*self._index.key_arrays_of(cells & (self._stride - 1))]
        counts = pa.array(self._counts[cells])
        for accumulator in self._accumulators:
            seen = None if accumulator.seen is None else accumulator.seen[cells]
            arrays += accumulator.snapshot_arrays([column[cells] for column in accumulator.columns], seen)
            accumulator.seen = None
            for column, part in zip(accumulator.columns, accumulator.parts, strict=True):
                column[cells] = part.initial
        self._own_counts[cells] = 0
        stamps = self._times[cells // self._stride] if self._has_times else None
        return Batch(columns=pa.RecordBatch.from_arrays([*arrays, counts], schema=self._schema), timestamps=stamps)


def _counts_all(aggregate: ColumnAggregate) -> bool:
    return aggregate.function == "count" and aggregate.column is None and aggregate.where is None
