"""Users' rows as Arrow batches: from Arrow, pandas, Spark, and any library with Arrow's C interface (Polars, DuckDB)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.statebackends.errors import HoldfastError, InvalidConfigError, StateValueError, UserFunctionError
from holdfast.statebackends.state_processor.edit import Batches, Change

if TYPE_CHECKING:
    from pyspark.sql import DataFrame as SparkDataFrame

ROWS_MAX = 1 << 15
"""Rows of a Spark DataFrame converted to Arrow at a time."""


def change_of(uid: str, state: str, wanted: Any) -> Change:
    """Replacement of a state's rows: by a function of a batch, or by a frame. Raises InvalidConfigError for any other type."""
    if callable(wanted) and not is_frame(wanted):
        return _applied(uid, state, wanted)
    if not is_frame(wanted):
        raise InvalidConfigError(
            f"operator {uid!r}, state {state!r}: {type(wanted).__name__} is neither a function nor a table or DataFrame",
            operator=uid,
            state=state,
        )
    return lambda _, schema: batches_of(wanted, schema, uid, state)


def _applied(uid: str, state: str, function: Callable[[pa.RecordBatch], Any]) -> Change:
    def change(batches: Batches, schema: pa.Schema) -> Iterator[pa.RecordBatch | pa.Table]:
        for batch in batches:
            try:
                made = function(batch)
            except HoldfastError:
                raise
            except Exception as error:
                name = getattr(function, "__qualname__", repr(function))
                message = f"operator {uid!r}, state {state!r}: {name} raised {type(error).__name__}: {error}"
                raise UserFunctionError(message, operator=uid, state=state, function=name, record="") from error
            if made is not None:
                yield from batches_of(made, schema, uid, state)

    return change


def is_frame(wanted: Any) -> bool:
    """Whether `batches_of` accepts it."""
    is_arrow = isinstance(wanted, pa.Table | pa.RecordBatch | pa.RecordBatchReader) or hasattr(wanted, "__arrow_c_stream__")
    return is_arrow or _library(wanted) in ("pandas", "pyspark")


def is_spark(frame: Any) -> bool:
    return _library(frame) == "pyspark"


def quoted(name: str) -> str:
    """A column's name quoted for Spark, which would interpret dots."""
    return "`" + name.replace("`", "``") + "`"


def _library(frame: Any) -> str:
    """Library of a DataFrame, found without importing any."""
    kind = type(frame)
    return kind.__module__.partition(".")[0] if kind.__name__ == "DataFrame" else ""


def batches_of(frame: Any, schema: pa.Schema, uid: str, state: str) -> Iterator[pa.RecordBatch | pa.Table]:
    """Rows of a frame. `schema`: types for columns of plain Python objects. Raises InvalidConfigError, StateValueError."""
    if isinstance(frame, pa.Table):
        yield from frame.to_batches()
    elif isinstance(frame, pa.RecordBatch):
        yield frame
    elif isinstance(frame, pa.RecordBatchReader):
        yield from frame
    elif _library(frame) == "pandas":
        yield _of_pandas(frame, schema, uid, state)
    elif is_spark(frame):
        yield from _of_spark(frame)
    elif hasattr(frame, "__arrow_c_stream__"):
        yield from pa.RecordBatchReader.from_stream(frame)
    else:
        raise InvalidConfigError(
            f"operator {uid!r}, state {state!r}: {type(frame).__name__} is no table or DataFrame", operator=uid, state=state
        )


def parquet_rows(path: str) -> pa.RecordBatchReader:
    """Rows of a local Parquet file, read on demand. Raises InvalidConfigError."""
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise InvalidConfigError(f"{path} is no Parquet file that can be read: {error}", path=path) from error
    return pa.RecordBatchReader.from_batches(file.schema_arrow, _parquet_batches(file, path))


def _parquet_batches(file: pq.ParquetFile, path: str) -> Iterator[pa.RecordBatch]:
    with file:
        try:
            yield from file.iter_batches(ROWS_MAX)
        except (pa.ArrowException, OSError) as error:
            raise InvalidConfigError(f"{path} can't be read: {error}", path=path) from error


def _of_pandas(frame: Any, schema: pa.Schema, uid: str, state: str) -> pa.Table:
    """Numbers keep pandas' own types, which are checked later; columns of Python objects get the state's types."""
    arrays: dict[str, pa.Array] = {}
    for name in map(str, frame.columns):
        column = frame[name]
        declared = schema.field(name).type if name in schema.names and column.dtype == object else None
        if declared == pa.utf8() and any(isinstance(value, Decimal) for value in column):
            declared = None  # Decimals become Arrow's own, which are checked later
        try:
            arrays[name] = pa.array(
                column.tolist() if declared is not None else column, type=declared, from_pandas=declared is None
            )
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise StateValueError(
                f"operator {uid!r}, state {state!r}, row {_failing(column, declared)}: column {name!r}: {error}",
                operator=uid,
                state=state,
                row=_failing(column, declared),
            ) from error
    return pa.table(arrays)


def _failing(column: Any, declared: pa.DataType | None) -> int:
    for row, value in enumerate(column.tolist()):
        try:
            pa.array([value], type=declared)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            return row
    return 0


def _of_spark(frame: SparkDataFrame) -> Iterator[pa.RecordBatch]:
    """Rows of a Spark DataFrame; holds one partition at a time."""
    from holdfast.operators.sources.dataframe_write import arrow_schema_of

    schema = arrow_schema_of(frame)
    rows = iter(frame.toLocalIterator())
    while some := [row.asDict(recursive=True) for row in islice(rows, ROWS_MAX)]:
        columns = [pa.array([row[field.name] for row in some], field.type) for field in schema]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)
