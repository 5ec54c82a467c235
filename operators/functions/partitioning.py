"""The function of `partition_custom`: the subtask that gets a record, as the user's code says, judged record by record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.barriers.elements import Batch
from holdfast.barriers.rows import values_of
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import Key
from holdfast.operators.task.user_failures import STOPPED, check_returns, function_name, place_of_function, raise_located, shown
from holdfast.statebackends.errors import GraphError, PartitionOutOfRangeError

_WHAT = "partition_custom"


class CustomPartitioning:
    """Implements `partition.SubtaskFunction`: `function(key, parallelism)` of each record's key."""

    def __init__(
        self, function: Callable[[Any, int], int], key: Callable[[Any], Any] | tuple[str, ...], input_type: RowType
    ) -> None:
        self.function = function
        self.key = key
        self.input_type = input_type

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Of the key; None if a function computes it."""
        return self.key if isinstance(self.key, tuple) else None

    def subtasks(self, batch: Batch, *, parallelism: int, operator: str) -> npt.NDArray[np.int32]:
        """Subtasks of all rows. Raises UserFunctionError and PartitionOutOfRangeError, naming operator and record."""
        found = self._results(self.function, batch, operator, self._keys(batch, operator), repeat(parallelism))
        if not set(map(type, found)) <= {int} or (found and not 0 <= min(found) <= max(found) < parallelism):
            for index, partition in enumerate(found):
                if not _is_subtask(partition, parallelism):
                    raise self._out_of_range(partition, self._rows(batch)[index], parallelism, operator)
        return np.array(found, dtype=np.int32)

    def _keys(self, batch: Batch, operator: str) -> Sequence[Any]:
        """Keys of all rows; a null is a key like others. A key of several columns is a tuple."""
        if not isinstance(self.key, tuple):
            return self._results(self.key, batch, operator, self._rows(batch))
        columns = batch.columns()
        values = [values_of(columns.column(name), name) for name in self.key]
        return values[0] if len(values) == 1 else list(zip(*values, strict=True))

    def _results(self, function: Callable[..., Any], batch: Batch, operator: str, *arguments: Iterable[Any]) -> list[Any]:
        results: list[Any] = []
        try:
            # on an exception the list has the results before it, so that its length is the index of the row
            results.extend(map(function, *arguments))
            if len(results) < batch.num_rows:
                raise RuntimeError(STOPPED)
        except Exception as error:
            record = self._rows(batch)[len(results)]
            raise_located(error, operator=operator, subtask=None, function=function, record=record)
        return results

    def _rows(self, batch: Batch) -> Sequence[Any]:
        return batch.rows(self.input_type.record)

    def _out_of_range(self, partition: Any, record: Any, parallelism: int, operator: str) -> PartitionOutOfRangeError:
        function, place = function_name(self.function), place_of_function(self.function)
        return PartitionOutOfRangeError(
            f"operator {operator!r}: {function}{f' ({place})' * bool(place)}, given to {_WHAT} in front of it, returned "
            f"{shown(partition)} for record {shown(record)}: a subtask is an integer from 0 to {parallelism - 1}",
            operator=operator,
            function=function,
            record=shown(record),
            frames="",
            returned=shown(partition),
            parallelism=parallelism,
        )

    def __repr__(self) -> str:
        key = ", ".join(self.key) if isinstance(self.key, tuple) else f"{function_name(self.key)}(...)"
        return f"{function_name(self.function)} of {key}"


def _is_subtask(partition: Any, parallelism: int) -> bool:
    """True and False are integers to Python alone."""
    return isinstance(partition, int | np.integer) and not isinstance(partition, bool) and int(partition) in range(parallelism)


def custom_partitioning(function: Callable[[Any, int], int], key: Key, input_type: RowType) -> CustomPartitioning:
    """Return the function of `partition_custom(function, key)` on rows of `input_type`. Raises GraphError, UnknownColumnError."""
    if not callable(function):
        raise GraphError(f"operator {_WHAT!r}: {function!r} is not a function of a key and a parallelism", operator=_WHAT)
    check_returns(function, _WHAT)
    input_type.check_rows(_WHAT)
    if callable(key):
        check_returns(key, _WHAT)
        return CustomPartitioning(function, key, input_type)
    columns = (key,) if isinstance(key, str) else tuple(key)
    if not columns or len(set(columns)) != len(columns):
        raise GraphError(f"operator {_WHAT!r}: a key needs distinct columns, not {list(columns)}", operator=_WHAT)
    for name in columns:
        input_type.column(name, _WHAT)
    return CustomPartitioning(function, columns, input_type)
