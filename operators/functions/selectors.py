"""Key selectors: the key of a row, taken from columns or computed by a function. Keys are recomputed at the receiver.

A key has a declared type, and equal keys have equal bytes everywhere; statebackends.serialization.keys decides which types can be
keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.barriers.elements import Batch
from holdfast.operators.functions.schema import RowType, return_annotation
from holdfast.operators.task.user_failures import STOPPED, check_returns, function_name, place_of_function, raise_located, shown
from holdfast.statebackends.errors import GraphError, InvalidConfigError, InvalidKeyError
from holdfast.statebackends.serialization.key_columns import ArrowKeyColumn
from holdfast.statebackends.serialization.keys import KeyType

Key: TypeAlias = str | Sequence[str] | Callable[[Any], Any]
"""Argument of `key_by`: a column, several columns, or a function of the row."""


class OneKeySelector:
    """Gives all rows one key, of which their results say nothing."""

    is_shown = False

    def __init__(self) -> None:
        self.columns: tuple[str, ...] | None = ()
        self.key_type = KeyType.of(int)
        self.key_type_text = self.key_type.text

    @property
    def names(self) -> tuple[str, ...]:
        """Column name of the key in state."""
        return ("key",)

    def keys(self, batch: Batch, *, max_parallelism: int, operator: str, subtask: int | None = None) -> ArrowKeyColumn:
        """The key of all rows: 0."""
        zeros = pa.array(np.zeros(batch.num_rows, np.int64))
        return self.key_type.column([zeros], max_parallelism=max_parallelism, operator=operator)

    def __repr__(self) -> str:
        return "one key"


class ColumnKeySelector:
    """Takes the key from one column, or from several as a tuple."""

    is_shown = True
    """Results have columns of the key."""

    def __init__(self, columns: Sequence[str], key_type: KeyType) -> None:
        self.columns: tuple[str, ...] | None = tuple(columns)
        self.key_type = key_type
        self.key_type_text = key_type.text
        self._names = tuple(columns)

    @property
    def names(self) -> tuple[str, ...]:
        """Column names of the key in results."""
        return self._names

    def keys(self, batch: Batch, *, max_parallelism: int, operator: str, subtask: int | None = None) -> ArrowKeyColumn:
        """Keys of all rows. Raises InvalidKeyError naming the operator."""
        columns = batch.columns()
        arrays = [columns.column(name) for name in self._names]
        try:
            return self.key_type.column(arrays, max_parallelism=max_parallelism, operator=operator)
        except InvalidKeyError as error:
            for name, array in zip(self._names, arrays, strict=True):
                if array.null_count:
                    record = batch.rows()[pc.index(array.is_null(), pa.scalar(True)).as_py()]
                    hint = f".filter(lambda row: row[{name!r}] is not None)"
                    raise _null_key(f"the key column {name!r}", record, hint, operator, subtask) from error
            error.subtask = subtask
            raise

    def __repr__(self) -> str:
        return ", ".join(self._names)


class FunctionKeySelector:
    """Computes the key from the row; the function must be deterministic."""

    is_shown = True

    def __init__(self, function: Callable[[Any], Any], key_type: KeyType, input_type: RowType) -> None:
        self.columns: tuple[str, ...] | None = None
        self.key_type = key_type
        self.key_type_text = key_type.text
        self.function = function
        self.input_type = input_type

    @property
    def names(self) -> tuple[str, ...]:
        """Column names of the key in results: `key`, or `key_0`, `key_1` ... of a tuple."""
        if not self.key_type.is_tuple:
            return ("key",)
        return tuple(f"key_{position}" for position in range(len(self.key_type.fields)))

    def keys(self, batch: Batch, *, max_parallelism: int, operator: str, subtask: int | None = None) -> ArrowKeyColumn:
        """Keys of all rows. Raises UserFunctionError naming operator, subtask and record; InvalidKeyError."""
        rows = batch.rows(self.input_type.record)
        values: list[Any] = []
        try:
            # on an exception the list has the results before it, so that its length is the index of the row
            values.extend(map(self.function, rows))
            if len(values) < len(rows):
                raise RuntimeError(STOPPED)
        except Exception as error:
            raise_located(error, operator=operator, subtask=subtask, function=self.function, record=rows[len(values)])
        try:
            return self.key_type.column_of_values(values, max_parallelism=max_parallelism, operator=operator)
        except InvalidKeyError as error:
            for row, value in zip(rows, values, strict=True):
                if value is None or (isinstance(value, tuple) and None in value):
                    what = f"the key that {function_name(self.function)} ({place_of_function(self.function)}) returned"
                    raise _null_key(what, row, ".filter(...)", operator, subtask) from error
            error.subtask = subtask
            raise

    def __repr__(self) -> str:
        return f"{function_name(self.function)}(...)"


def _null_key(what: str, record: Any, hint: str, operator: str, subtask: int | None) -> InvalidKeyError:
    where = f"operator {operator!r}" + ("" if subtask is None else f", subtask {subtask}")
    return InvalidKeyError(
        f"{where}: {what} is null in record {shown(record)}. A key is never null: leave such rows out in front of key_by, "
        f"with {hint}, or give them a key of their own",
        operator=operator,
        subtask=subtask,
        value=None,
        record=shown(record),
    )


Selector: TypeAlias = ColumnKeySelector | FunctionKeySelector | OneKeySelector


def key_selector(key: Key, key_type: Any, input_type: RowType, operator: str) -> Selector:
    """Return the selector of `key_by(key, key_type=)` on rows of `input_type`. Raises GraphError, UnknownColumnError.

    `key_type`: a Python class, an Arrow type or a canonical text; needed for a function without a return annotation."""
    try:
        if callable(key):
            declared = return_annotation(key) if key_type is None else key_type
            if declared in (None, Any):
                raise GraphError(
                    f"operator {operator!r}: the type of the keys that {function_name(key)} returns is unknown: "
                    "give key_type= or a return annotation",
                    operator=operator,
                )
            check_returns(key, operator)
            input_type.check_rows(operator)
            return FunctionKeySelector(key, _key_type(declared), input_type)
        columns = (key,) if isinstance(key, str) else tuple(key)
        if not columns or len(set(columns)) != len(columns):
            raise GraphError(f"operator {operator!r}: a key needs distinct columns, not {list(columns)}", operator=operator)
        found = [input_type.column(name, operator).type for name in columns]
        if key_type is None:
            return ColumnKeySelector(columns, KeyType.from_arrow([_decoded(data_type) for data_type in found]))
        declared_type = _key_type(key_type)
        if len(declared_type.fields) != len(columns):
            raise GraphError(
                f"operator {operator!r}: key_type {declared_type.text} does not have one field per column", operator=operator
            )
        return ColumnKeySelector(columns, declared_type)
    except GraphError:
        raise
    except InvalidConfigError as error:
        raise GraphError(f"operator {operator!r}: {error}", operator=operator) from error


def _key_type(declared: Any) -> KeyType:
    return KeyType.parse(declared) if isinstance(declared, str) else KeyType.of(declared)


def _decoded(data_type: pa.DataType) -> pa.DataType:
    return data_type.value_type if pa.types.is_dictionary(data_type) else data_type
