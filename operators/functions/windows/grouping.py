"""CORE: which windows the records of a batch are in, worked out for all of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.operators.functions.windows.assigners import Sliding, Tumbling
from holdfast.operators.functions.windows.bounds import slide_of

Integers = npt.NDArray[np.int64]


class Placed(NamedTuple):
    """Where the records of a batch belong, by their numbers in it."""

    open: list[tuple[int, list[int]]]
    """(start, records in turn) of each window that has not ended, by start."""
    behind: list[int]
    """Records of which some window has ended, in turn: each must be looked at by itself."""


def place(stamps: Integers, windows: Tumbling | Sliding, ended_at: int) -> Placed:
    """`stamps`: times of the records, ms. `ended_at`: windows whose last ms is up to it have ended."""
    size_ms, slide_ms = windows.size_ms, slide_of(windows)
    newest = stamps - (stamps - windows.offset_ms) % slide_ms
    first_open = max(ended_at - size_ms + 2, -(2**63))
    numbers = np.arange(len(stamps))
    starts, records = [], []
    is_behind = np.zeros(len(stamps), bool)
    for back in range(-(-size_ms // slide_ms)):
        start = newest - back * slide_ms
        holds, is_open = start > stamps - size_ms, start >= first_open
        is_behind |= holds & ~is_open
        there = holds & is_open
        starts.append(start[there])
        records.append(numbers[there])
    return Placed(_by_start(np.concatenate(starts), np.concatenate(records)), np.flatnonzero(is_behind).tolist())


def _by_start(starts: Integers, records: Integers) -> list[tuple[int, list[int]]]:
    if not len(starts):
        return []
    order = np.lexsort((records, starts))
    starts, records = starts[order], records[order]
    firsts = np.concatenate(([0], np.flatnonzero(np.diff(starts)) + 1))
    ends = [*firsts[1:].tolist(), len(starts)]
    found, numbers = records.tolist(), starts[firsts].tolist()
    return [(start, found[first:end]) for start, first, end in zip(numbers, firsts.tolist(), ends, strict=True)]


def by_key(keys: Sequence[bytes], records: Iterable[int]) -> dict[bytes, list[int]]:
    """Key -> those of these records that have it, in turn."""
    found: dict[bytes, list[int]] = {}
    for record in records:
        key = keys[record]
        there = found.get(key)
        if there is None:
            found[key] = [record]
        else:
            there.append(record)
    return found
