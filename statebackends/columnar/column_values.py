"""Values of Arrow columns as numpy columns, and back: which dtype holds a type, and how its values are ordered.

Numbers and booleans are themselves, dates, times and durations the integers that Arrow keeps, decimals 128-bit integers in two
halves, text and binary values Python objects. It knows nothing of aggregates."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.statebackends.columnar import decimals

Column = npt.NDArray[Any]
Numbers = npt.NDArray[np.int64]

_SIGN = np.int64(-(2**63))
_POSITIVE = np.int64(2**63 - 1)
_SAMPLE = 1000


def is_text(data_type: pa.DataType) -> bool:
    """Whether values have no fixed width: text and binary."""
    return data_type in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def is_temporal(data_type: pa.DataType) -> bool:
    """Dates, times, timestamps and durations."""
    return bool(pa.types.is_temporal(data_type)) and not pa.types.is_interval(data_type)


def dtype_of(data_type: pa.DataType) -> np.dtype[Any] | None:
    """What holds values of this type; None for a type that can't be held."""
    if pa.types.is_boolean(data_type) or pa.types.is_integer(data_type) or pa.types.is_floating(data_type):
        dtype: np.dtype[Any] = np.dtype(data_type.to_pandas_dtype())
        return dtype
    if is_temporal(data_type):
        return np.dtype(f"int{data_type.bit_width}")
    if decimals.is_decimal(data_type):
        return decimals.DECIMAL
    return np.dtype(object) if is_text(data_type) else None


def from_arrow(array: pa.Array) -> Column:
    """The values of an array without nulls."""
    if decimals.is_decimal(array.type):
        return decimals.from_arrow(array)
    if is_temporal(array.type):
        array = array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())
    values: Column = array.to_numpy(zero_copy_only=False)
    return values


def to_arrow(column: Column, data_type: pa.DataType, null: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """An array of values; null where `null` is true."""
    if decimals.is_decimal(data_type):
        return decimals.to_arrow(column, data_type, null)
    if is_temporal(data_type):
        return pa.array(column, pa.from_numpy_dtype(column.dtype), mask=null).view(data_type)
    return pa.array(column, data_type, mask=null)


def ranks(array: pa.Array) -> Numbers:
    """Integers in the order of the values of an array without nulls, equal for equal ones. NaN is the largest number, -0.0 is 0.0;
    text is ordered by code points, binary values by bytes.

    Those of fixed-width types, but for decimals, compare across arrays, the others only within one."""
    if is_text(array.type) or decimals.is_decimal(array.type):
        return _ranks_in_order(array)
    values = from_arrow(array)
    if values.dtype.kind == "f":
        numbers = values.astype(np.float64) + 0.0
        numbers[np.isnan(numbers)] = np.nan  # a NaN may have any sign and content
        bits = numbers.view(np.int64)
        return bits ^ ((bits >> np.int64(63)) & _POSITIVE)
    if values.dtype == np.uint64:
        return values.view(np.int64) ^ _SIGN
    return values.astype(np.int64)


def _ranks_in_order(array: pa.Array) -> Numbers:
    encoded = array.dictionary_encode()
    order = pc.array_sort_indices(encoded.dictionary).to_numpy()
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    found: Numbers = rank[encoded.indices.to_numpy(zero_copy_only=False)]
    return found


def size_of(column: Column) -> int:
    """Bytes that the values take; of objects estimated by some of them."""
    if column.dtype != object:
        return column.nbytes
    some = [len(value) for value in column[:: max(1, len(column) // _SAMPLE)] if value is not None]
    return column.nbytes + (sum(some) * len(column) // max(1, min(len(column), _SAMPLE)))
