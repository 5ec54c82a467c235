"""CORE: which rows a file sink's log commits, entry by entry, and how readers share them. Pure.

A position in the log is the number of the next entry. A reader that keeps one gets each row once: the rows of an entry stay, and
what comes later has a later number. An entry that replaces files has no rows of its own: it says in which file those of earlier
entries are from there on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import xxhash

from holdfast.barriers.sinks.log import CommitEntry, LogEntry
from holdfast.barriers.sinks.reading import Place

TASKS_MAX = 64
ROWS_PER_TASK_MAX = 1_000_000
CUT_ROWS_MIN = 65_536
"""Rows of a part of a file, at least: the start of a read costs as much as some ten thousand rows."""


class FileRows(NamedTuple):
    """Rows [start, stop) of a committed file."""

    name: str
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


_NOWHERE: Mapping[str, Place] = {}


def rows_of(entries: Iterable[LogEntry], replaced: Mapping[str, Place] = _NOWHERE) -> list[FileRows]:
    """The rows that these entries commit, in order; `replaced`: files whose rows are in others. Neighbours in one of those are one
    piece, in place of the first."""
    commits = (entry for entry in entries if isinstance(entry, CommitEntry))
    pieces: list[FileRows] = []
    ends: dict[str, int] = {}
    """Merged file -> index of the last piece of it."""
    for file in (file for entry in commits for file in entry.files if file.rows):
        place = replaced.get(file.name)
        if place is None:
            pieces.append(FileRows(file.name, 0, file.rows))
            continue
        last = ends.get(place.name)
        if last is not None and pieces[last].stop == place.start:
            pieces[last] = FileRows(place.name, pieces[last].start, place.start + file.rows)
        else:
            ends[place.name] = len(pieces)
            pieces.append(FileRows(place.name, place.start, place.start + file.rows))
    return pieces


def admit(entries: Sequence[LogEntry], *, files_max: int | None = None, rows_max: int | None = None) -> int:
    """How many of these entries a reader takes at a time: as many as fit, and at least one that has rows, since a commit is never
    taken in part."""
    files = rows = 0
    for index, entry in enumerate(entries):
        some = rows_of([entry])
        had_rows = bool(rows)
        files, rows = files + len(some), rows + sum(piece.rows for piece in some)
        if (files_max is not None and files > files_max) or (rows_max is not None and rows > rows_max):
            return index if had_rows else index + 1
    return len(entries)


def shared(
    pieces: Sequence[FileRows], tasks: int = 0, *, may_cut: Callable[[str], bool], cut_rows_min: int = CUT_ROWS_MIN
) -> list[list[FileRows]]:
    """The rows in order, for tasks of about as many each.

    tasks: how many, at most; 0: by the rows, at most 64 for up to 64 million. may_cut: whether a file, by its name, can be read in
    part; another is in one task. cut_rows_min: rows of a part, at least 1: what is smaller stays with its neighbour."""
    total = sum(piece.rows for piece in pieces)
    wanted = tasks or max(min(TASKS_MAX, len(pieces)), -(-total // ROWS_PER_TASK_MAX))
    found: dict[int, list[FileRows]] = {}
    begin = 0
    for piece in pieces:
        bounds = _bounds(begin, begin + piece.rows, total, wanted, cut_rows_min) if may_cut(piece.name) else ()
        for first, last in pairwise((begin, *bounds, begin + piece.rows)):
            part = FileRows(piece.name, piece.start + first - begin, piece.start + last - begin)
            found.setdefault((first + last) * wanted // (2 * total), []).append(part)
        begin += piece.rows
    return list(found.values())


def _bounds(begin: int, end: int, total: int, tasks: int, rows_min: int) -> Iterator[int]:
    """Where rows [begin, end) of `total` are cut: at the ends of tasks, unless a part would be below `rows_min`."""
    while True:
        task = -(-(begin + rows_min) * tasks // total)
        begin = -(-task * total // tasks)
        if begin > end - rows_min:
            return
        yield begin


def digest_of(entry: LogEntry) -> str:
    """16 hex digits that tell an entry from that of another log with the same number."""
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(entry))
