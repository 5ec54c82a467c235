"""Windows of so many records of a key, over columns: key columns and aggregates, at the time of the record that filled the window.

A window fires as its last record comes, so that nothing is ever late, and nothing is due at a watermark, a barrier or the end of
input. A window that is not full then stays in the state: a job that goes on from a savepoint fills it."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.barriers.exchange.partition import Combining
from holdfast.operators.base import Operator
from holdfast.operators.functions.aggregates import (
    Aggregate,
    close_selections,
    columnar_descriptor,
    columns_of,
    result_fields,
    state_columns,
)
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import Selector
from holdfast.operators.functions.windows.assigners import Global
from holdfast.operators.functions.windows.evictors import CountEvictor
from holdfast.operators.functions.windows.kept_assigner import ASSIGNER, check_assigner, keep_assigner
from holdfast.operators.functions.windows.options import RowWindowOptions
from holdfast.operators.functions.windows.triggers import CountTrigger, PurgingTrigger
from holdfast.statebackends.columnar.accumulators import check_descriptor
from holdfast.statebackends.columnar.counted import panes_of
from holdfast.statebackends.errors import GraphError, InvalidConfigError
from holdfast.statebackends.state import ColumnAggregate, ColumnarStateDescriptor, StateDescriptor

PANES_MAX = 1_000
"""Of a window: count / gcd(count, slide). A key has a row for each."""
SET_PANES_MAX = 64
"""The same with count_distinct: each step of merging looks at the values of all of them."""
RECORDS_MAX = 2**62
"""Of a window, and of a slide: positions are 64-bit integers."""
_POSITION = ColumnAggregate("count", None, "window_records")
"""Records of a key; where windows lie side by side, those of the one that is not full."""


class CountWindowOperator(Operator):
    """Each key's windows of the last `count` records, one every `slide`."""

    def __init__(
        self, count: int, slide: int, aggregates: ColumnarStateDescriptor, selector: Selector, input_type: RowType
    ) -> None:
        """Raises GraphError when a column of results is called like one that state needs."""
        self.count = count
        self.slide = slide
        self.aggregates = aggregates
        self.descriptor = ColumnarStateDescriptor("count_windows", (_POSITION, *aggregates.aggregates))
        """The namespace is the number of a pane among those of a window."""
        self.selector = selector
        self.input_type = input_type
        keys = zip(selector.names, selector.key_type.arrow_types, strict=True) if selector.is_shown else ()
        fields = [*(pa.field(name, kind, nullable=False) for name, kind in keys), *result_fields(aggregates)]
        self.output_type = RowType(pa.schema(fields))
        try:
            check_descriptor(self.descriptor, selector.names)
        except InvalidConfigError as error:
            raise GraphError(f"operator 'window': {error}", operator="window") from error

    def columns_read(self, wanted: frozenset[str] | None) -> frozenset[str] | None:
        return columns_of(self.aggregates, self.selector.columns)

    def combining(self) -> Combining | str:
        return "windows are so many records of a key"

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return (self.descriptor, ASSIGNER)

    def initialize_state(self) -> None:
        advice = "give windows of another count or slide a uid of their own"
        check_assigner(self.context, self._lengths(), self.descriptor.name, "kind, records", advice)

    def _lengths(self) -> list[object]:
        return ["count", self.count, self.slide]

    def open(self) -> None:
        self._state = self.context.keyed_state.columnar_state(self.descriptor, self.selector.names)
        self._windows = self._state.count_windows(self.count, self.slide)

    def snapshot_state(self, checkpoint_id: int) -> None:
        keep_assigner(self.context, self._lengths())

    def close(self) -> None:
        close_selections(self.aggregates)

    def process_batch(self, batch: Batch, input_index: int) -> None:
        if not batch.num_rows:
            return
        context = self.context
        keys = self.selector.keys(
            batch, max_parallelism=context.max_parallelism, operator=context.uid, subtask=context.subtask
        )
        values = state_columns(self.aggregates, batch.columns(), operator=context.uid, subtask=context.subtask)
        for filled in self._windows.take(keys, values, batch.timestamps):
            records = pa.array(filled.records)
            shown = [array.take(records) for array in keys.arrays] if self.selector.is_shown else []
            columns = pa.RecordBatch.from_arrays([*shown, *filled.results], schema=self.output_type.schema)
            stamps = None if batch.timestamps is None else batch.timestamps[filled.records]
            self.output.collect(Batch(columns=columns, timestamps=stamps))


def count_window_operator(
    options: RowWindowOptions, aggregates: Mapping[str, Aggregate], selector: Selector, rows: RowType
) -> CountWindowOperator:
    """The operator of `count_window(...).aggregate(n=hf.count())`. Raises GraphError and UnknownColumnError, naming it."""
    count, slide = _lengths_of(options)
    if max(count, slide) > RECORDS_MAX:
        raise GraphError(
            f"operator 'window': windows of {count} records every {slide}: aggregates over columns take at most 2**62 of both",
            operator="window",
        )
    descriptor = columnar_descriptor("count_windows", aggregates, rows, selector.names if selector.is_shown else (), "window")
    has_sets = any(each.function == "count_distinct" for each in descriptor.aggregates)
    what, most = ("count_distinct takes", SET_PANES_MAX) if has_sets else ("aggregates over columns take", PANES_MAX)
    if (panes := panes_of(count, slide)) > most:
        raise GraphError(
            f"operator 'window': windows of {count} records every {slide} have {panes} panes of {count // panes}, and {what} at "
            f"most {most}: take a count and a slide with a larger common divisor, or row functions",
            operator="window",
        )
    return CountWindowOperator(count, slide, descriptor, selector, rows)


def _lengths_of(options: RowWindowOptions) -> tuple[int, int]:
    """Count and slide of a global window with this trigger and evictor."""
    for what, given in (("allowed lateness", options.lateness_ms), ("late output", options.late_tag)):
        if given:
            raise GraphError(f"operator 'window': a global window has no late records, and takes no {what}", operator="window")
    trigger, evictor = options.trigger, options.evictor
    purges = type(trigger) is PurgingTrigger
    inner = trigger.trigger if type(trigger) is PurgingTrigger else trigger
    has_evictor = type(evictor) is CountEvictor and not evictor.after
    if type(inner) is CountTrigger and (has_evictor or (purges and evictor is None)):
        slide = inner.count
        count = evictor.count if isinstance(evictor, CountEvictor) else slide
        return (min(count, slide) if purges else count), slide
    raise GraphError(
        f"operator 'window': aggregates over columns of {Global()!r} take count_window(n), count_window(n, slide), or the trigger "
        "and the evictor of these, hf.PurgingTrigger(hf.CountTrigger(n)) and hf.CountEvictor(n) "
        f"(given: {_told(trigger, evictor)}); give row functions: reduce, process or aggregate(function), or, for all records of "
        "a key, key_by(...).aggregate(...) without a window",
        operator="window",
    )


def _told(trigger: object, evictor: object) -> str:
    told = "no trigger" if trigger is None else type(trigger).__name__
    return told if evictor is None else f"{told} and {type(evictor).__name__}"
