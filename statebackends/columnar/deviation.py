"""The accumulator of stddev, the standard deviation of a sample, in one pass.

Each row keeps the number of its values, the first of them, and sums of the differences from it and of their squares: values that
lie close together far from zero lose no digits, and what is added in order of arrival does not depend on where batches end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.statebackends.columnar import decimals
from holdfast.statebackends.columnar.parts import AccumulatorColumns, Part, Slots, Values, arrow_values
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.state import ColumnAggregate


def parts_of_deviation(aggregate: ColumnAggregate) -> tuple[Part, ...]:
    """Number, first value, sums of differences and of their squares. Raises InvalidConfigError for what is no number."""
    source = aggregate.input_type
    if source is None or not (pa.types.is_integer(source) or pa.types.is_floating(source) or decimals.is_decimal(source)):
        raise InvalidConfigError(
            f"stddev({aggregate.column}) needs a column of an integer, floating or decimal128 type, not {source}",
            column=aggregate.column,
        )
    name, number = aggregate.output, np.dtype(np.float64)
    return (
        Part(f"{name}.count", np.dtype(np.int64), 0, nullable=False),
        Part(f"{name}.first", number, 0.0, nullable=False),
        Part(f"{name}.sum", number, 0.0, nullable=False),
        Part(f"{name}.squares", number, 0.0, nullable=False),
    )


class DeviationAccumulator(AccumulatorColumns):
    """One aggregate's columns."""

    __slots__ = ()

    def __init__(self, aggregate: ColumnAggregate, capacity: int, where: dict[str, Any]) -> None:
        super().__init__(aggregate, parts_of_deviation(aggregate), capacity, where)

    @property
    def result_type(self) -> pa.DataType:
        return pa.float64()

    def result(self, rows: slice | Slots) -> pa.Array:
        counts, _, sums, squares = (column[rows] for column in self.columns)
        with np.errstate(all="ignore"):
            variances = (squares - sums * sums / counts) / (counts - 1)
            return pa.array(np.sqrt(np.maximum(variances, 0.0)), pa.float64(), mask=counts < 2)

    def update(self, slots: Slots, values: Values, rows_before: int, times: Slots | None = None) -> None:
        assert self.aggregate.input_type is not None
        array = arrow_values(values, self.aggregate.input_type)
        if array.null_count:
            slots, array = slots[np.asarray(array.is_valid())], array.drop_null()
        if not len(slots):
            return
        numbers = array.cast(pa.float64(), safe=False).to_numpy()
        counts, firsts, sums, squares = self.columns
        new = np.flatnonzero(counts[slots] == 0)[::-1]
        firsts[slots[new]] = numbers[new]  # of several values of one row the earliest is written last
        with np.errstate(all="ignore"):  # NaN and infinities are values, not accidents
            differences = numbers - firsts[slots]
            np.add.at(counts, slots, 1)
            np.add.at(sums, slots, differences)
            np.add.at(squares, slots, differences * differences)

    def merge(self, slots: Slots, other: DeviationAccumulator, rows: Slots, rows_before: int) -> None:
        counts, firsts, sums, squares = self.columns
        more, first, total, square = (column[rows] for column in other.columns)
        with np.errstate(all="ignore"):
            is_new = counts[slots] == 0
            firsts[slots] = np.where(is_new, first, firsts[slots])
            apart = np.where(more > 0, first - firsts[slots], 0.0)
            squares[slots] += square + 2 * apart * total + more * apart * apart
            sums[slots] += total + more * apart
        counts[slots] += more
