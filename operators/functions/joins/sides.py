"""One side of a join whose rows wait in a row table: what is put there, and what is made of rows that it gave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.operators.base import OperatorContext
from holdfast.operators.functions.joins.output import JoinSide
from holdfast.statebackends.errors import GraphError
from holdfast.statebackends.row_tables.key_codes import distinct_keys as numbers_of
from holdfast.statebackends.row_tables.key_codes import equal_rows, key_codes
from holdfast.statebackends.row_tables.type_text import unkept_column
from holdfast.statebackends.serialization.key_columns import ArrowKeyColumn
from holdfast.statebackends.state import RowMatches, RowTable, RowTableStateDescriptor

Positions = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StoredSide:
    """One input, and the state that keeps its rows."""

    side: JoinSide
    table: RowTableStateDescriptor

    @staticmethod
    def of(side: JoinSide, state: str, *, by_time: bool) -> StoredSide:
        fields = [pa.field(field.name, field.type) for field in side.columns]
        return StoredSide(side, RowTableStateDescriptor(state, pa.schema(fields), by_time=by_time))

    def opened(self, context: OperatorContext) -> RowTable:
        return context.keyed_state.row_table(self.table, self.side.selector.names)

    def keys(self, batch: Batch, context: OperatorContext) -> ArrowKeyColumn:
        return self.side.selector.keys(
            batch, max_parallelism=context.max_parallelism, operator=context.uid, subtask=context.subtask
        )

    def keys_of(self, arrays: Sequence[pa.Array], context: OperatorContext) -> ArrowKeyColumn:
        """Keys of rows that the table gave."""
        return self.side.selector.key_type.column(arrays, max_parallelism=context.max_parallelism, operator=context.uid)

    def append(self, table: RowTable, batch: Batch, namespaces: Positions | int, context: OperatorContext) -> None:
        """Put records into the table, with their event times."""
        table.append(self.keys(batch, context), namespaces, self.side.values(batch.columns()), batch.timestamps)

    def values(self, rows: RowMatches) -> list[pa.Array]:
        """The columns beside the key."""
        names = self.table.schema.names
        return list(rows.take(names).columns) if names else []

    def by_key(self, rows: RowMatches, context: OperatorContext) -> tuple[RowMatches, ArrowKeyColumn, Positions]:
        """(rows so that those of a key are together, in their order; the keys, each once; which of them each row has)."""
        keys = self.keys_of(rows.keys(), context)
        codes = key_codes(keys)
        order = np.argsort(codes, kind="stable")
        keys, codes = keys.take(order), codes[order]
        begins = np.ones(len(order), np.bool_)
        np.not_equal(codes[1:], codes[:-1], out=begins[1:])
        if not begins.all():
            count = len(order) - 1
            neighbours = [array.slice(0, count) for array in keys.arrays], [array.slice(1, count) for array in keys.arrays]
            share_code = ~begins[1:] & ~equal_rows(*neighbours)
            if share_code.any():  # the rows of these keys may be mixed
                numbers = numbers_of(keys)
                apart = np.argsort(numbers, kind="stable")
                order, keys, numbers = order[apart], keys.take(apart), numbers[apart]
                np.not_equal(numbers[1:], numbers[:-1], out=begins[1:])
        return rows.select(order), keys.take(np.flatnonzero(begins)), np.cumsum(begins) - 1

    def distinct_keys(self, rows: RowMatches, context: OperatorContext) -> tuple[ArrowKeyColumn, Positions]:
        """(the keys of rows that are grouped by key, and which of them each row has)."""
        queries = rows.queries
        begins = np.ones(len(rows), np.bool_)
        np.not_equal(queries[1:], queries[:-1], out=begins[1:])
        return self.keys_of(rows.select(begins).keys(), context), np.cumsum(begins) - 1


def rows_between(
    table: RowTable, since: int, until: int, rows_max: int, *, splits_keys: bool = False
) -> Iterator[RowMatches]:
    """Rows with times from `since` to `until`, both inclusive, by time and, of one time with more than `rows_max`, by key: about
    `rows_max` at once, and all of one key and time together, unless `splits_keys`.

    Between two of them rows may be deleted."""
    while since <= until and len(rows := table.until(until, rows_max, since - 1)):
        times = rows.times
        first, last = int(times[0]), int(times[-1])
        if len(rows) < rows_max:
            yield rows
        elif first < last:
            last -= 1
            yield rows.select(times <= last)
        else:
            yield from _rows_of_time(table, last, rows_max, splits_keys=splits_keys)
        since = last + 1


def _rows_of_time(table: RowTable, moment: int, rows_max: int, *, splits_keys: bool) -> Iterator[RowMatches]:
    scan = table.scan(times=(moment, moment), splits_keys=splits_keys)
    while (rows := scan.next(rows_max)) is not None:
        if len(rows):
            yield rows


def check_kept_columns(sides: Sequence[JoinSide], operator: str) -> None:
    """Raises GraphError naming the operator for a column that can't be kept in state."""
    for side in sides:
        if (column := unkept_column(pa.schema(side.columns))) is not None:
            raise GraphError(
                f"operator {operator!r} keeps rows in its state, and column {column.name!r} is {column.type}: cast it, or "
                "leave it out in front of the join",
                operator=operator,
                column=column.name,
            )
