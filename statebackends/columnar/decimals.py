"""Decimals as numpy columns: 128-bit integers in two halves, as Arrow lays decimal128 out, and sums, extremes and means of them.

All values of a column have one scale, so that what is computed is computed with their unscaled integers, and is exact."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

DECIMAL = np.dtype([("low", "<u8"), ("high", "<i8")])
"""One unscaled value: high * 2**64 + low."""
ZERO = np.zeros((), DECIMAL)[()]
LOWEST = np.array((0, -(2**63)), DECIMAL)[()]
"""Below every decimal."""
HIGHEST = np.array((2**64 - 1, 2**63 - 1), DECIMAL)[()]
"""Above every decimal."""

PRECISION_MAX = 38
"""Digits of a decimal128."""
MEAN_DIGITS = 4
"""Digits that a mean has behind those of its column, as in Spark."""

Decimals = npt.NDArray[np.void]
Slots = npt.NDArray[np.int64]

_HALF = np.int64(32)
_LOW_HALF = np.uint64(2**32 - 1)
_LIMB = np.int64(2**32 - 1)
_DIVISORS = 2**31
_BOUND_HIGH, _BOUND_LOW = divmod(10**PRECISION_MAX, 2**64)


def is_decimal(data_type: pa.DataType | None) -> bool:
    """Whether a column of this type can be folded here."""
    return data_type is not None and bool(pa.types.is_decimal128(data_type))


def sum_type(column: pa.DataType) -> pa.DataType:
    """As many digits as there are, and the column's scale."""
    return pa.decimal128(PRECISION_MAX, column.scale)


def mean_type(column: pa.DataType) -> pa.DataType:
    """The column's digits and four more behind the point, or as many as there is room for: a mean is never beyond its values."""
    more = min(MEAN_DIGITS, PRECISION_MAX - column.precision)
    return pa.decimal128(column.precision + more, column.scale + more)


def from_arrow(array: pa.Array) -> Decimals:
    """The unscaled values of a decimal128 array; a copy. What stands where it is null has no meaning."""
    content = array.buffers()[1]
    if content is None or not len(array):
        return np.zeros(len(array), DECIMAL)
    return np.frombuffer(content, DECIMAL, len(array), array.offset * DECIMAL.itemsize).copy()


def to_arrow(column: Decimals, data_type: pa.DataType, null: npt.NDArray[np.bool_] | None) -> pa.Array:
    """A decimal128 array of unscaled values; null where `null` is true."""
    content = pa.py_buffer(np.ascontiguousarray(column).tobytes())
    valid = None if null is None else pa.array(~null).buffers()[1]
    return pa.Array.from_buffers(data_type, len(column), [valid, content])


def add_at(totals: Decimals, slots: Slots, values: Decimals) -> bool:
    """totals[slots] += values, for slots that may repeat. False, with nothing added, if a total would have more than 38 digits."""
    touched, rows = np.unique(slots, return_inverse=True)
    before = totals[touched]
    # Four limbs of 32 bits, the highest with the sign: 2**31 of them can be added up in 64 bits.
    sums = _limbs(before)
    for limb, added in zip(sums, _limbs(values), strict=True):
        np.add.at(limb, rows, added)
    for lower, higher in pairwise(sums):
        higher += lower >> _HALF
        lower &= _LIMB
    top = sums[3]
    if ((top < -(2**31)) | (top >= 2**31)).any():
        return False
    after = np.empty(len(touched), DECIMAL)
    after["low"] = sums[0].astype(np.uint64) | (sums[1].astype(np.uint64) << np.uint64(32))
    after["high"] = sums[2] | (top << _HALF)
    if not _fit(after).all():
        return False
    totals[touched] = after
    return True


def keep_greatest_at(column: Decimals, slots: Slots, values: Decimals) -> None:
    """column[slots] = the greater of both, for slots that may repeat."""
    _keep_at(column, slots, values, last=True)


def keep_least_at(column: Decimals, slots: Slots, values: Decimals) -> None:
    """column[slots] = the lesser of both, for slots that may repeat."""
    _keep_at(column, slots, values, last=False)


def means(sums: Decimals, counts: npt.NDArray[np.int64], column: pa.DataType) -> pa.Array:
    """sum / count, rounded half away from zero to the digits of `mean_type`; null where the count is 0."""
    result = mean_type(column)
    shift = 10 ** (result.scale - column.scale)
    is_empty = counts == 0
    divisors = np.where(is_empty, 1, counts)
    divided = _divided if int(divisors.max(initial=1)) < _DIVISORS else _divided_one_by_one
    return to_arrow(divided(sums, shift, divisors), result, is_empty if is_empty.any() else None)


def _divided(totals: Decimals, shift: int, divisors: npt.NDArray[np.int64]) -> Decimals:
    """total * shift / divisor, rounded half away from zero; shift is at most 10**MEAN_DIGITS, divisors are below _DIVISORS.

    By long division, a limb at a time: what is left of one, and the next, have 63 bits together."""
    is_negative = totals["high"] < 0
    quotient, left = [], np.zeros(len(totals), np.int64)
    for limb in reversed(_limbs(_negated(totals, is_negative))):
        place, left = np.divmod((left << _HALF) | limb, divisors)
        quotient.append(place)
    carried, left = np.divmod(left * shift, divisors)
    carried += 2 * left >= divisors
    limbs = []
    for place in reversed(quotient):
        carried += place * shift
        limbs.append(carried & _LIMB)
        carried = carried >> _HALF
    found = np.empty(len(totals), DECIMAL)
    found["low"] = (limbs[0] | (limbs[1] << _HALF)).view(np.uint64)
    found["high"] = limbs[2] | (limbs[3] << _HALF)
    return _negated(found, is_negative)


def _divided_one_by_one(totals: Decimals, shift: int, divisors: npt.NDArray[np.int64]) -> Decimals:
    """As `_divided`, of any divisors."""
    found = np.empty(len(totals), DECIMAL)
    for row, (total, divisor) in enumerate(zip(_integers(totals), divisors.tolist(), strict=True)):
        magnitude = (2 * abs(total) * shift + divisor) // (2 * divisor)
        high, low = divmod(-magnitude if total < 0 else magnitude, 2**64)
        found[row] = low, high
    return found


def _negated(values: Decimals, which: npt.NDArray[np.bool_]) -> Decimals:
    """A copy in which some have the other sign."""
    found = values.copy()
    found["low"][which] = ~values["low"][which] + np.uint64(1)
    found["high"][which] = ~values["high"][which] + (values["low"][which] == 0)
    return found


def _limbs(values: Decimals) -> list[npt.NDArray[np.int64]]:
    low, high = values["low"], values["high"]
    return [
        (low & _LOW_HALF).astype(np.int64),
        (low >> np.uint64(32)).astype(np.int64),
        high & _LIMB,
        high >> _HALF,
    ]


def _fit(values: Decimals) -> npt.NDArray[np.bool_]:
    """Whether -10**38 < value < 10**38."""
    low, high = values["low"], values["high"]
    below: npt.NDArray[np.bool_] = (high < _BOUND_HIGH) | ((high == _BOUND_HIGH) & (low < np.uint64(_BOUND_LOW)))
    lowest_high, lowest_low = divmod(-(10**PRECISION_MAX), 2**64)
    above: npt.NDArray[np.bool_] = (high > lowest_high) | ((high == lowest_high) & (low > np.uint64(lowest_low)))
    return below & above


def _keep_at(column: Decimals, slots: Slots, values: Decimals, *, last: bool) -> None:
    order = np.lexsort((values["low"], values["high"], slots))
    ordered = slots[order]
    changes = np.flatnonzero(np.diff(ordered)) if len(ordered) else np.empty(0, np.int64)
    ends = np.append(changes, len(ordered) - 1) if last else np.append(0, changes + 1)
    touched, found = ordered[ends], values[order[ends]]
    before = column[touched]
    greater = (found["high"] > before["high"]) | ((found["high"] == before["high"]) & (found["low"] > before["low"]))
    less = (found["high"] < before["high"]) | ((found["high"] == before["high"]) & (found["low"] < before["low"]))
    better = greater if last else less
    column[touched[better]] = found[better]


def _integers(values: Decimals) -> list[int]:
    pairs: list[Any] = list(zip(values["high"].tolist(), values["low"].tolist(), strict=True))
    return [(high << 64) + low for high, low in pairs]
