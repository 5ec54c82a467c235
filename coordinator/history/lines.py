"""Which record each line of a history's file is, also where lines are damaged. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from holdfast.coordinator.history.records import Line
from holdfast.statebackends.decoding import UNDECODABLE, decode_json


class PlacedLine(NamedTuple):
    """One line of a file, in order."""

    number: int
    """Of the record; of a line that is none a number beside it, never below that of a line before."""
    line: int
    """From 1."""
    entry: Line | str
    """The record, or why there is none."""


def place_lines(content: bytes, first: int) -> Iterator[PlacedLine]:
    """The lines of a file whose first record has the number `first`.

    A record has the number that its place says. Where lines were broken in two, run together or taken out, the records behind are
    not at their places any more: then their own numbers count, if broken lines account for it, or the line behind agrees. A single
    line that says another number is a damaged one."""
    entries = [_decoded(line) for line in content.removesuffix(b"\n").split(b"\n")]
    good = _good(entries, first)
    last = first - 1
    following = iter([*sorted(good), len(entries)])
    upcoming = next(following)
    for index, entry in enumerate(entries):
        if isinstance(entry, Line) and index == upcoming:
            last, upcoming = entry.number, next(following)
            yield PlacedLine(last, index + 1, entry)
            continue
        if upcoming == len(entries) or good[upcoming] > last + 1:
            last += 1
        why = entry if isinstance(entry, str) else f"record {last} is expected here, not {entry.number}"
        yield PlacedLine(last, index + 1, why)


def _good(entries: Sequence[Line | str], first: int) -> dict[int, int]:
    """Indexes of the lines that are the records they say they are, and their numbers, which rise."""
    good = dict[int, int]()
    expected, last, is_broken = first, first - 1, False
    for index, entry in enumerate(entries):
        if isinstance(entry, Line) and entry.number > last:
            is_explained = entry.number == expected or (is_broken and entry.number < expected)
            if is_explained or _agrees(entries, index):
                good[index] = last = entry.number
                expected, is_broken = last + 1, False
                continue
        expected, is_broken = expected + 1, True
    return good


def _agrees(entries: Sequence[Line | str], index: int) -> bool:
    """Whether the next line is the record behind this one."""
    entry, following = entries[index], entries[index + 1] if index + 1 < len(entries) else None
    return isinstance(entry, Line) and isinstance(following, Line) and following.number == entry.number + 1


def _decoded(line: bytes) -> Line | str:
    """The record, or why it can't be read."""
    try:
        return decode_json(line, Line)
    except UNDECODABLE as error:
        return str(error)[:200] or type(error).__name__
