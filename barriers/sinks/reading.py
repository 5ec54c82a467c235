"""Reading a sink's log: its entries, by summaries where it is long, and which files others have replaced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from holdfast.barriers.sinks.log import (
    SUMMARY_BYTES_MAX,
    SUMMARY_ENTRIES,
    CommitEntry,
    LogEntry,
    MergeEntry,
    SinkPaths,
    StagedFile,
    decode_entry,
    decode_summary,
    split_place,
    split_staged,
)
from holdfast.statebackends.errors import CorruptStateError, ObjectMissingError
from holdfast.statebackends.handles import external_places
from holdfast.statebackends.storage.flows import read_whole
from holdfast.statebackends.storage.port import Flow

SINGLES_MIN = 8
"""Entries that a reader takes one by one before it looks for a summary: a short log costs no read more."""

HEADER_BYTES_MAX = 1_000


class Place(NamedTuple):
    """Where the rows of a replaced file are."""

    name: str
    """Of the file that has them."""
    start: int
    """Row of it that is their first."""


def read_log_flow(paths: SinkPaths, sequence: int = 0, root: str = "") -> Flow[list[LogEntry]]:
    """All entries from `sequence` on, without listing: numbers have no gaps. root: the sink's path, with a `/` behind it, on a
    storage that is not the sink's own."""
    entries: list[LogEntry] = []
    singles, looked = 0, -1
    while True:
        at = sequence + len(entries)
        first = at - at % SUMMARY_ENTRIES
        if singles >= SINGLES_MIN and looked != first:
            looked = first
            summary = yield from _read_summary(root + paths.summary(first), first)
            if summary is not None:
                entries += summary[at - first :]
                continue
        path = root + paths.log(at)
        try:
            entries.append(decode_entry((yield from read_whole(path)), path))
        except ObjectMissingError:
            return entries
        singles += 1


def _read_summary(path: str, first: int) -> Flow[list[LogEntry] | None]:
    try:
        content = yield from read_whole(path, SUMMARY_BYTES_MAX + HEADER_BYTES_MAX)
    except (ObjectMissingError, CorruptStateError):
        return None
    return decode_summary(content, first)


def replaced_in(entries: Iterable[LogEntry]) -> dict[str, Place]:
    """Replaced file -> where its rows are."""
    places: dict[str, Place] = {}
    for entry in entries:
        if isinstance(entry, MergeEntry):
            start = 0
            for file in entry.replaced:
                places[file.name] = Place(entry.file.name, start)
                start += file.rows
    return places


def current_files(entries: Sequence[LogEntry]) -> list[StagedFile]:
    """Files that hold the committed rows, each row once, in the order of commits; a merged one in place of the first."""
    merged = {file.name: entry.file for entry in entries if isinstance(entry, MergeEntry) for file in entry.replaced}
    found: list[StagedFile] = []
    given: set[str] = set()
    for entry in entries:
        for file in entry.files if isinstance(entry, CommitEntry) else ():
            now = merged.get(file.name)
            if now is None:
                found.append(file)  # a file that two commits name comes twice: a reader does not hide what a log should not have
            elif now.name not in given:
                given.add(now.name)
                found.append(now)
    return found


def find_replaced(entries: Sequence[str]) -> Flow[frozenset[str]]:
    """Of a snapshot's external files that are gone, those that need not be there: staged files that were committed, and whose rows
    a later file of the sink has. On a storage that reaches their sinks. A log that can't be read says nothing."""
    logs: dict[str, dict[str, Place]] = {}
    found = set()
    for entry in entries:
        staged = split_staged(external_places(entry)[0])
        if staged is None:
            continue
        place, name = staged
        if place not in logs:
            try:
                logs[place] = replaced_in((yield from _read_at(place)))
            except CorruptStateError:
                logs[place] = {}
        if name in logs[place]:
            found.add(entry)
    return frozenset(found)


def _read_at(place: str) -> Flow[list[LogEntry]]:
    path, sink_id = split_place(place)
    return (yield from read_log_flow(SinkPaths(sink_id), root=f"{path.rstrip('/')}/"))
