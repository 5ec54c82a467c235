"""Rows given by the program, as a rewindable source: they travel with the job and are replayed by their index."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.barriers.rows import rows_to_columns
from holdfast.operators.functions.schema import RowType, declared_type, record_type
from holdfast.operators.sources.generator import GeneratorSource
from holdfast.statebackends.errors import GraphError

COLLECTION_BYTES_MAX = 64 * 1024 * 1024
"""Bytes of the rows as columns, at most: each worker gets them all."""


@dataclass(frozen=True)
class RowsAt:
    """`make_batch` of a GeneratorSource: returns the rows at these indices."""

    columns: pa.RecordBatch

    def __call__(self, indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
        return self.columns.take(pa.array(indices))


def collection_source(
    rows: Iterable[Any], returns: Any, name: str, rows_per_second: float | None
) -> tuple[GeneratorSource, RowType]:
    """Make the source of these rows, and their type. `returns`: as for `map`; None: the records' type, or one derived from the
    values.

    Raises GraphError if the rows are neither dicts nor records of one type, have no type, or are too large; SchemaMismatchError for
    a row that does not fit."""
    given = list(rows)
    row_type = _type_of(given, name) if returns is None else declared_type(returns, name)
    assert row_type.schema is not None
    row_type.check_rows(name)
    columns = rows_to_columns(given, row_type.schema, name)
    if columns.nbytes > COLLECTION_BYTES_MAX:
        raise GraphError(
            f"source {name!r}: {columns.nbytes:,} bytes of rows; a collection has at most {COLLECTION_BYTES_MAX:,}: write them to "
            "Parquet and use from_parquet, or give a DataFrame to from_dataframe",
            operator=name,
        )
    source = GeneratorSource(RowsAt(columns), len(given), row_type.schema, rows_per_second=rows_per_second, name=name)
    return source, row_type


def _type_of(rows: list[Any], name: str) -> RowType:
    """Type declared by the records' class, or derived from all values of the dicts, which are complete and constant."""
    if not rows:
        raise GraphError(f"source {name!r}: without rows the columns are unknown: give returns=", operator=name)
    kinds: set[Callable[..., Any]] = {type(row) for row in rows}
    if len(kinds) == 1:
        declared = record_type(next(iter(kinds)), name)
        if declared is not None:
            return declared
    if not all(isinstance(row, dict) for row in rows):
        shown = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise GraphError(
            f"source {name!r}: rows are dicts by column name, or records (dataclass, msgspec.Struct, NamedTuple) of one type; "
            f"these are {shown}",
            operator=name,
        )
    columns = {column: [row.get(column) for row in rows] for column in dict.fromkeys(column for row in rows for column in row)}
    fields = []
    for column, values in columns.items():
        try:
            found = pa.array(values).type
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise GraphError(f"source {name!r}: column {column!r}: {error}; give returns=", operator=name) from error
        if pa.types.is_null(found):
            raise GraphError(f"source {name!r}: column {column!r} is null in all rows: give returns=", operator=name)
        fields.append(pa.field(column, found, nullable=any(value is None for value in values)))
    return declared_type(pa.schema(fields), name)
