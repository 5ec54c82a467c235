"""`where=` of an aggregate: which rows of a batch it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.operators.functions import expressions
from holdfast.operators.functions.schema import RowType
from holdfast.operators.task.user_failures import check_returns, function_name, raise_located
from holdfast.statebackends.errors import GraphError, SchemaMismatchError

Where: TypeAlias = str | Callable[[pa.RecordBatch], Any]
"""A boolean column's name, a condition in SQL, or a function of a batch's columns that returns a boolean for each row, as a NumPy
or Arrow array."""
Predicate: TypeAlias = Callable[[pa.RecordBatch], Any]
Selection: TypeAlias = Where | expressions.Predicate
"""`Where` as an operator has it: a condition in SQL is compiled."""


def selection(where: Where | None, input_type: RowType, operator: str) -> Selection | None:
    """What an operator is given. Text that is no name of a column, and could be none, is SQL.

    Raises GraphError and UnknownColumnError, naming the operator, for what selects no rows of this type; InvalidConfigError for SQL
    without DuckDB."""
    if where is None:
        return None
    if isinstance(where, str):
        if input_type.schema is not None and where not in input_type.schema.names and not where.isidentifier():
            return expressions.predicate_of(where, input_type.schema, operator)
        found = input_type.column(where, operator).type
        if not pa.types.is_boolean(found):
            raise GraphError(f"operator {operator!r}: where={where!r} must be a boolean column, not {found}", operator=operator)
    elif callable(where):
        check_returns(where, operator)
    else:
        raise GraphError(
            f"operator {operator!r}: where={where!r} is neither the name of a boolean column, nor a condition in SQL, nor a "
            "function of the columns",
            operator=operator,
        )
    return where


def predicate_of(where: Where) -> Predicate:
    """The function that returns a boolean for each row of a batch."""
    return where if callable(where) else lambda columns: columns.column(where)


def rows_where(where: Selection, columns: pa.RecordBatch, *, operator: str, subtask: int | None) -> npt.NDArray[np.bool_]:
    """Which rows of a batch are taken; null counts as false.

    Raises UserFunctionError and SchemaMismatchError, naming the operator, for a function that raises or returns something else."""
    if isinstance(where, expressions.Predicate):
        where.expressions.named(operator)
        return where.mask(columns, subtask=subtask)
    try:
        found = predicate_of(where)(columns)
    except Exception as error:
        raise_located(error, operator=operator, subtask=subtask, function=predicate_of(where))
    array = found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found
    mask = np.asarray(array.fill_null(False)) if isinstance(array, pa.BooleanArray) else array
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (columns.num_rows,):
        what = function_name(where) if callable(where) else repr(where)
        raise SchemaMismatchError(
            f"operator {operator!r}: where={what} must return {columns.num_rows} booleans for a batch of as many rows, "
            f"as an Arrow or NumPy array, not {_described(found)}",
            operator=operator,
            subtask=subtask,
            column=None,
        )
    return mask


def _described(found: Any) -> str:
    if isinstance(found, np.ndarray):
        return f"an array of {found.dtype}, of shape {found.shape}"
    if isinstance(found, pa.Array | pa.ChunkedArray):
        return f"{len(found)} values of {found.type}"
    return f"a {type(found).__name__}"
