"""One row of each key: the first, the last, the greatest, the least. The rows that take that place are emitted, as they are.

The state has no rows: what they are compared by is enough to know which one takes the place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.operators.base import Operator
from holdfast.operators.functions.schema import RowType, undeclared_error
from holdfast.operators.functions.selectors import Selector
from holdfast.operators.functions.tables.carried import expiring
from holdfast.operators.functions.tables.ordering import ordered_column, plain
from holdfast.operators.functions.tables.stretches import TTLS, Stretches
from holdfast.statebackends.columnar.key_index import create_key_index
from holdfast.statebackends.columnar.ordering import comes_before
from holdfast.statebackends.errors import GraphError
from holdfast.statebackends.serialization.key_columns import ArrowKeyColumn
from holdfast.statebackends.state import NO_TIME, ColumnAggregate, ColumnarState, ColumnarStateDescriptor, StateDescriptor

Rows = npt.NDArray[np.int64]

_STATE = "kept"
_BY, _TIME, _SEEN, _WRITTEN = "by", "time", "seen", "written"
"""Columns of the state: what the kept row has in the column, its event time, that there is one, processing time when it came."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which row of a key is kept."""

    by: str | None
    """Column by which rows are compared; None: they are not, but for their order of arrival."""
    greatest: bool
    """Of `by` the greatest value comes first, else the least; null last."""
    latest: bool
    """Of equals the latest, by event time and then by arrival, else the earliest."""
    ttl_ms: int | None = None
    """A key is forgotten so long after its row was kept, processing time; None: never."""


def deduplication(keep: str, by: str | None, ttl: timedelta | int | None) -> Place:
    """What `deduplicate` keeps. Raises GraphError, InvalidConfigError."""
    if keep not in ("first", "last"):
        raise GraphError(f"operator 'deduplicate': keep must be 'first' or 'last', not {keep!r}", operator="deduplicate")
    is_last = keep == "last"
    lifetime = expiring(ttl, "deduplicate")
    return Place(by, greatest=is_last, latest=is_last, ttl_ms=None if lifetime is None else lifetime.duration_ms)


def one_row_operator(kind: str, place: Place, selector: Selector, input_type: RowType, *, is_timed: bool) -> OneRowOperator:
    """Raises GraphError, UnknownColumnError. `is_timed`: rows have event times."""
    if input_type.schema is None:
        raise undeclared_error(kind, "columns")
    by_type = None if place.by is None else ordered_column(place.by, input_type, kind)
    return OneRowOperator(place, by_type, selector, input_type, is_timed=is_timed and place.by is not None)


class OneRowOperator(Operator):
    """Emits each row that takes its key's place, of a batch at most one of each key."""

    def __init__(
        self, place: Place, by_type: pa.DataType | None, selector: Selector, input_type: RowType, *, is_timed: bool
    ) -> None:
        self.place = place
        self.selector = selector
        self.input_type = input_type
        self._is_timed = is_timed
        fold = "max" if place.greatest else "min"
        columns: list[ColumnAggregate] = []
        if by_type is not None:
            columns.append(ColumnAggregate(fold, place.by, _BY, by_type))
        if is_timed:
            columns.append(ColumnAggregate("max" if place.latest else "min", _TIME, _TIME, pa.int64()))
        self._greatest = [place.greatest, place.latest][: len(columns)]
        if place.ttl_ms is not None:
            columns.append(ColumnAggregate("max", _WRITTEN, _WRITTEN, pa.int64()))
        elif not columns:
            columns.append(ColumnAggregate("count", None, _SEEN))
        self.descriptor = ColumnarStateDescriptor(_STATE, tuple(columns))

    @property
    def _keeps_state(self) -> bool:
        """The last row to arrive is the last one whatever came before."""
        return self.place.by is not None or not self.place.latest

    @property
    def _expires(self) -> bool:
        return self._keeps_state and self.place.ttl_ms is not None

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        if not self._keeps_state:
            return ()
        return (self.descriptor, TTLS) if self._expires else (self.descriptor,)

    def open(self) -> None:
        self._stretches: Stretches | None = None
        if self._keeps_state:
            self._state: ColumnarState = self.context.keyed_state.columnar_state(self.descriptor, self.selector.names)
        if self._expires:
            assert self.place.ttl_ms is not None
            self._stretches = Stretches(self._state, self.place.ttl_ms, self._stored.entries, self.context.now_ms())

    def process_batch(self, batch: Batch, input_index: int) -> None:
        if not batch.num_rows:
            return
        context = self.context
        keys = self.selector.keys(
            batch, max_parallelism=context.max_parallelism, operator=context.uid, subtask=context.subtask
        )
        rows = self._kept(keys, batch) if self._keeps_state else self._last(keys)
        if len(rows) == batch.num_rows:
            self.output.collect(batch)
        elif len(rows):
            kept = np.zeros(batch.num_rows, np.bool_)
            kept[rows] = True
            self.output.collect(batch.filter(kept))

    def _last(self, keys: ArrowKeyColumn) -> Rows:
        """The last row of each key in the batch."""
        slots = create_key_index(self.selector.key_type.arrow_types, self._column_of).slots(keys)
        last = np.empty(int(slots.max()) + 1, np.int64)
        last[slots] = np.arange(len(slots))  # of several rows of a slot the last assignment stays
        return np.sort(last)

    def _kept(self, keys: ArrowKeyColumn, batch: Batch) -> Rows:
        now_ms = self.context.now_ms()
        columns, rows = self._columns(batch, now_ms), np.arange(batch.num_rows)
        namespace = 0
        if self._stretches is not None:
            namespace = self._stretches.at(now_ms)
            for other in self._stretches.others(namespace):
                rows = self._unbeaten(rows, keys, columns, other, now_ms)
            if not len(rows):
                return rows
        if len(rows) < batch.num_rows:
            taken = pa.array(rows)
            keys, columns = keys.take(taken), [column.take(taken) for column in columns]
        kept: Rows = rows[self._state.keep_first(keys, namespace, columns, self._greatest, latest=self.place.latest)]
        return kept

    def _columns(self, batch: Batch, now_ms: int) -> list[pa.Array]:
        """What the state has of each row."""
        found: list[pa.Array] = []
        for aggregate in self.descriptor.aggregates:
            match aggregate.output:
                case "by":
                    found.append(plain(batch.columns().column(self.place.by)))
                case "time":
                    times = np.full(batch.num_rows, NO_TIME) if batch.timestamps is None else batch.timestamps
                    found.append(pa.array(times))
                case "written":
                    found.append(pa.array(np.full(batch.num_rows, now_ms)))
                case _:
                    found.append(pa.array(np.ones(batch.num_rows, np.int64)))
        return found

    def _unbeaten(
        self, rows: Rows, keys: ArrowKeyColumn, columns: Sequence[pa.Array], namespace: int, now_ms: int
    ) -> Rows:
        """Without the rows that don't come before what another namespace has of their keys, and has not expired."""
        assert self.place.ttl_ms is not None
        if not len(rows):
            return rows
        found, held = self._state.find(keys.take(rows), namespace)
        fresh = np.asarray(held[-1]) > now_ms - self.place.ttl_ms
        found, taken = found[fresh], pa.array(rows[found[fresh]])
        compared = range(len(self._greatest))
        offered = [columns[place].take(taken) for place in compared]
        others = [held[place].filter(pa.array(fresh)) for place in compared]
        stays = np.ones(len(rows), np.bool_)
        stays[found] = comes_before(len(found), offered, others, self._greatest, latest=self.place.latest)
        return rows[stays]

    def initialize_state(self) -> None:
        if self._expires:
            self._stored = self.context.operator_state.list_state(TTLS.name)

    def snapshot_state(self, checkpoint_id: int) -> None:
        if self._stretches is not None:
            self._stretches.forget(self.context.now_ms())
            self._stored.update(self._stretches.entries())

    def _column_of(self, arrays: list[pa.Array]) -> ArrowKeyColumn:
        context = self.context
        return self.selector.key_type.column(arrays, max_parallelism=context.max_parallelism, operator=context.uid)

