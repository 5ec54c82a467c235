"""Which of some records comes first, by several columns, each from its greatest or from its least; null comes last.

It knows neither keys nor states: numbers say which records belong together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.statebackends.columnar.column_values import dtype_of, is_text, ranks
from holdfast.statebackends.columnar.decimals import is_decimal

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

LAST = np.iinfo(np.int64).max
"""No number of `sort_numbers` is above it."""


_PACKED_BITS = 63
"""Of a number that is packed; the sign stays free."""


def has_order(data_type: pa.DataType) -> bool:
    """Whether values of this type can be compared: numbers, booleans, text, binary values, decimal128, dates and times."""
    return dtype_of(data_type) is not None


def is_lasting(data_type: pa.DataType) -> bool:
    """Whether `sort_numbers` of one array compare with those of another."""
    return not (is_text(data_type) or is_decimal(data_type))


def sort_numbers(array: pa.Array, *, greatest: bool) -> list[Numbers]:
    """One or two numbers for each value, by which it is compared: the least comes first. NaN is the greatest, -0.0 is 0.0."""
    if not array.null_count:
        found = ranks(array)
        return [~found if greatest else found]
    present = np.asarray(array.is_valid())
    numbers = np.zeros(len(array), np.int64)
    found = ranks(array.drop_null())
    numbers[present] = ~found if greatest else found
    return [(~present).astype(np.int64), numbers]


def first_of_each(owners: Numbers, numbers: Sequence[Numbers], *, latest: bool) -> Numbers:
    """Row of each owner's record that comes first; of equals the one that came last if `latest`, else first. Ascending."""
    shift = max(1, len(owners).bit_length())
    packed = np.sort((owners << shift) | np.arange(len(owners)))  # five times as fast as argsort
    sorted_owners, rows = packed >> shift, packed & ((1 << shift) - 1)
    starts = _starts(sorted_owners)
    if len(starts) == len(owners):
        return np.arange(len(owners))
    for number in numbers:
        compared = number[rows]
        counts = np.diff(starts, append=len(rows))
        kept = compared == np.repeat(np.minimum.reduceat(compared, starts), counts)
        rows, sorted_owners = rows[kept], sorted_owners[kept]
        starts = _starts(sorted_owners)
    chosen = np.append(starts[1:], len(rows)) - 1 if latest else starts
    first: Numbers = np.sort(rows[chosen])
    return first


def sorted_rows(numbers: Sequence[Numbers], times: Numbers | None = None, *, latest: bool = False) -> Numbers:
    """Rows by several numbers, of which the first counts most; of equals by time, then by place, if `latest` both in reverse.

    Numbers are sorted ten times as fast as rows: where they fit into one they are packed, with the row as its lowest bits. Equals
    mostly come in the order of their times, which are packed only where they don't."""
    found = _packed_order(numbers, latest=latest)
    if found is not None and (times is None or _is_in_time(*found, times, latest=latest)):
        return found[0]
    by_time = [] if times is None else [~times if latest else times]
    found = _packed_order([*numbers, *by_time], latest=latest)
    if found is not None:
        return found[0]
    place = np.arange(len(numbers[0]))
    rows: Numbers = np.lexsort([~place if latest else place, *by_time, *reversed(numbers)])
    return rows


def _packed_order(numbers: Sequence[Numbers], *, latest: bool) -> tuple[Numbers, Mask] | None:
    """(rows in order, whether each but the first equals the one before it); None: they don't fit into one number."""
    count = len(numbers[0])
    bits = count.bit_length()
    packed, width = np.zeros(count, np.int64), bits
    for number in numbers if count else ():
        low, high = int(number.min()), int(number.max())
        more = (high - low).bit_length()
        width += more
        if width > _PACKED_BITS:
            return None
        if more:
            packed <<= more
            packed |= number - low
    place = np.arange(count)
    packed <<= bits
    packed |= place[::-1] if latest else place
    packed.sort()
    rows = packed & ((1 << bits) - 1)
    packed >>= bits
    return (count - 1 - rows if latest else rows), packed[1:] == packed[:-1]


def _is_in_time(rows: Numbers, is_equal: Mask, times: Numbers, *, latest: bool) -> bool:
    """Whether the times of equal rows are in order."""
    in_order = times[rows]
    before, behind = (in_order[1:], in_order[:-1]) if latest else (in_order[:-1], in_order[1:])
    return not bool((is_equal & (before > behind)).any())


def comes_before(
    count: int, records: Sequence[pa.Array], others: Sequence[pa.Array], greatest: Sequence[bool], *, latest: bool
) -> Mask:
    """Whether each of `count` records comes before the other one, which arrived earlier: of equals it does if `latest`."""
    before, equal = np.zeros(count, np.bool_), np.ones(count, np.bool_)
    for one, other, is_greatest in zip(records, others, greatest, strict=True):
        for number in sort_numbers(pa.concat_arrays([one, other]), greatest=is_greatest):
            before |= equal & (number[:count] < number[count:])
            equal &= number[:count] == number[count:]
    return before | equal if latest else before


def _starts(owners: Numbers) -> Numbers:
    """Where each owner's records begin in what is sorted by owner."""
    return np.flatnonzero(np.append(True, owners[1:] != owners[:-1])) if len(owners) else np.empty(0, np.int64)
