"""Writing the summaries by which a long log is read in few reads (`holdfast.barriers.sinks.reading`).

A summary repeats a thousand entries in one file. It decides nothing: entries are the log, stay where they are, and are read where a
summary is missing or can't be believed. An entry never changes, so that all writers of a summary write the same bytes: a committer
that another one has replaced does no harm. A writer knows that the entries are durable; else, after a power loss, the summary would
tell of a commit that never was."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.barriers.sinks.log import (
    SUMMARY_BYTES_MAX,
    SUMMARY_ENTRIES,
    SinkPaths,
    decode_summary,
    encode_summary,
)
from holdfast.operators.base import OperatorContext
from holdfast.statebackends.storage.flows import read_whole
from holdfast.statebackends.storage.port import Flow, InParallel, ListFolder, PutIfAbsent, Storage

_AT_ONCE = 8
"""Entries read at one time for a summary."""


def summarise_flow(paths: SinkPaths, stop: int, done: frozenset[int] | None) -> Flow[frozenset[int]]:
    """Write a summary that is missing, the newest. stop: first sequence that none may have; those below are durable.

    `done`: first sequences of what has a summary, or needs none; None: not known. Returns that as of now."""
    if done is None:
        names: list[str] = yield ListFolder(paths.summaries_folder)
        done = frozenset(int(name[: -len(".jsonl")]) for name in names if name.endswith(".jsonl") and name[:-6].isdecimal())
    for first in range(stop - stop % SUMMARY_ENTRIES - SUMMARY_ENTRIES, -1, -SUMMARY_ENTRIES):
        if first not in done:
            yield from _write_summary(paths, first)
            return done | {first}
    return done


def _write_summary(paths: SinkPaths, first: int) -> Flow[None]:
    numbers = range(first, first + SUMMARY_ENTRIES)
    flows = [_read_entries(paths, numbers[index::_AT_ONCE]) for index in range(_AT_ONCE)]
    parts: list[list[bytes]] = yield InParallel(flows, [SUMMARY_BYTES_MAX // _AT_ONCE] * _AT_ONCE)
    entries = [parts[index % _AT_ONCE][index // _AT_ONCE] for index in range(SUMMARY_ENTRIES)]
    content = encode_summary(first, entries)
    # What an older writer left damaged would stay so; entries are read then. Bytes that no reader believes are not written.
    if content is not None and decode_summary(content, first) is not None:
        yield PutIfAbsent(paths.summary(first), content)


def _read_entries(paths: SinkPaths, numbers: Sequence[int]) -> Flow[list[bytes]]:
    """Files of entries; empty ones in place of those that are too long for a summary with the others."""
    found: list[bytes] = []
    left = SUMMARY_BYTES_MAX
    for number in numbers:
        content = yield from read_whole(paths.log(number))
        left -= len(content)
        found.append(content if left > 0 else b"")
    return found


class Summaries:
    """Writes summaries beside the commits of one attempt, one at a time. A failure is left to a later commit, and fails nothing."""

    def __init__(self, context: OperatorContext, paths: SinkPaths, storage: Storage) -> None:
        self._context = context
        self._paths = paths
        self._storage = storage
        self._done: frozenset[int] | None = None
        self._busy = False
        self._failed_below = 0

    def follow(self, next_sequence: int) -> None:
        """Called when the log is known, and durable, up to next_sequence."""
        if self._busy or next_sequence < SUMMARY_ENTRIES or next_sequence < self._failed_below:
            return
        if self._done is not None and len(self._done) >= next_sequence // SUMMARY_ENTRIES:
            return
        self._busy = True

        def ended(done: frozenset[int] | None, error: BaseException | None) -> None:
            self._busy = False
            if error is None:
                self._done = done
            else:  # not at each commit once more: each try reads a thousand entries
                self._failed_below = next_sequence + SUMMARY_ENTRIES

        self._context.submit_flow(summarise_flow(self._paths, next_sequence, self._done), self._storage, ended)
