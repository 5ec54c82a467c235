"""CORE: what a job keeps of a replication slot: the server that it is of, how far the first reading of the tables is, and which
server goes on with its log. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from holdfast.operators.connectors.postgres.published import ReadTable
from holdfast.operators.sources.splits import Position, SourceSplit, SplitRecords

Key = tuple[str, ...]
"""The server's texts of a row's key."""


class SnapshotProgress(msgspec.Struct, frozen=True, array_like=True):
    """What is still to be given of the rows that tables had."""

    tables: tuple[str, ...]
    """`schema.table` each, in the order in which they are read; at least one. Of the first some rows may have been given, of the
    others none. All rows of tables that are not here were given."""
    columns: tuple[str, ...] = ()
    """The first table's key."""
    key: Key = ()
    """The last one that was given; empty: none was."""
    late: tuple[Key, ...] = ()
    """Rows of the first table with keys up to that one which were not given, or are not any more: an update has moved them there
    without saying all of their values. They are the next to be read."""

    def behind(self, columns: tuple[str, ...], key: Key) -> SnapshotProgress:
        return SnapshotProgress(self.tables, columns, key)

    def with_late(self, late: Sequence[Key]) -> SnapshotProgress:
        return SnapshotProgress(self.tables, self.columns, self.key, tuple(late))

    @property
    def next_table(self) -> SnapshotProgress | None:
        return SnapshotProgress(self.tables[1:]) if len(self.tables) > 1 else None


class SlotSplit(SourceSplit, frozen=True):
    """A replication slot; `split_id` is its name."""

    system: str = ""
    """The server's identifier, which is in all copies of its data; empty: written by a version that did not know it."""
    timeline: int = 0
    """Of the server's log, as far as the position; 0: not known."""
    snapshot: SnapshotProgress | None = None
    """None: all rows that the tables had were given, or are not wanted."""
    tables: tuple[ReadTable, ...] = ()
    """That are read; empty: written by a version that did not keep them, all are taken for known."""


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    system: str
    timeline: int


def lsn_of(text: str) -> int:
    """`16/B374D848` as a number."""
    high, _, low = text.partition("/")
    return int(high, 16) << 32 | int(low, 16)


def lsn_text(lsn: int) -> str:
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def timeline_problem(timeline: int, lsn: int, found: int, history: str) -> str | None:
    """Why the log of another timeline does not go on where a position is; None: it does.

    history: the file that a server has of a timeline: `timeline, LSN at which it was left, reason` a line."""
    for line in history.splitlines():
        fields = line.split()
        if len(fields) >= 2 and fields[0] == str(timeline):
            if lsn <= lsn_of(fields[1]):
                return None
            return f"the server was promoted (timeline {found}) when it had the log up to {fields[1]} only"
    return f"the server is on timeline {found}, which does not go on from timeline {timeline}: it was restored from a backup"


@dataclass(frozen=True, slots=True)
class ChunkMarks:
    """Which progress each row of a chunk makes. Rows are at the positions (lsn, first + 1), (lsn, first + 2) ..."""

    lsn: int
    first: int
    before: SnapshotProgress
    columns: tuple[str, ...]
    keys: Sequence[pa.Array]
    """Texts, by column of the key."""
    last: Position
    """Behind the chunk."""
    after: SnapshotProgress | None

    def at(self, position: Position) -> SnapshotProgress | None:
        """Behind a position that is not in front of the chunk."""
        if position >= self.last:
            return self.after
        row = position[1] - self.first - 1
        return self.before if row < 0 else self.before.behind(self.columns, tuple(each[row].as_py().decode() for each in self.keys))


@dataclass(frozen=True, slots=True)
class LateMarks:
    """Which progress each of some late rows makes, at positions as of ChunkMarks."""

    lsn: int
    first: int
    before: SnapshotProgress
    counts: Sequence[int]
    """Late keys that are done behind each row."""
    last: Position
    after: SnapshotProgress

    def at(self, position: Position) -> SnapshotProgress:
        if position >= self.last:
            return self.after
        row = position[1] - self.first - 1
        return self.before if row < 0 else self.before.with_late(self.before.late[self.counts[row] :])


@dataclass(frozen=True, slots=True)
class LateChange:
    """From a position on a key is one of a late row, or is none any more."""

    position: Position
    key: Key
    is_late: bool


@dataclass(frozen=True, slots=True)
class ChunkRecords(SplitRecords):
    """Rows that a table had, or changes in front of them."""

    marks: ChunkMarks | LateMarks | None = None
    late: Sequence[LateChange] = ()


class SnapshotMarks:
    """The progress at the positions that checkpoints have; they never go back."""

    def __init__(self, progress: SnapshotProgress | None) -> None:
        self._progress = progress
        self._late = dict.fromkeys(() if progress is None else progress.late)
        self._changes: deque[LateChange] = deque()
        self._chunks: deque[ChunkMarks | LateMarks] = deque()

    def add(self, records: ChunkRecords) -> None:
        """Records that were given; some of their rows may not have been passed on yet."""
        self._changes += records.late
        if records.marks is not None:
            self._chunks.append(records.marks)

    def at(self, position: Position) -> SnapshotProgress | None:
        if self._changes and position >= self._changes[0].position:
            self._go_on(position)
        while self._chunks and position >= self._chunks[0].last:
            self._progress = self._chunks.popleft().after
        if self._chunks and position > (self._chunks[0].lsn, self._chunks[0].first):
            return self._chunks[0].at(position)
        return self._progress

    def _go_on(self, position: Position) -> None:
        """All of these are in front of the first chunk."""
        while self._changes and position >= self._changes[0].position:
            change = self._changes.popleft()
            if change.is_late:
                self._late[change.key] = None
            else:
                self._late.pop(change.key, None)
        if self._progress is not None:
            self._progress = self._progress.with_late(tuple(self._late))
