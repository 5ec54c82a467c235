"""Flows over the files of a job's history: write one and delete the oldest beyond the bound, and read a page.

A file is created once, by put-if-absent, and never changes. A file or line that can't be read is named and left out."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from holdfast.coordinator.ha.store import put_once
from holdfast.coordinator.history.lines import place_lines
from holdfast.coordinator.history.recorder import WRITE_BYTES, WriteHistory
from holdfast.coordinator.history.records import (
    LINE_BYTES_MAX,
    HistoryDamage,
    HistoryEntry,
    HistoryGap,
    HistoryPage,
    Line,
    Position,
    RecordKind,
)
from holdfast.statebackends.errors import HoldfastError, InvalidConfigError, ObjectMissingError
from holdfast.statebackends.layout import JobPaths, parse_history_name
from holdfast.statebackends.storage.port import (
    DeleteFile,
    DeleteFolder,
    DescribeFiles,
    FileFacts,
    Flow,
    InParallel,
    ListFolder,
    ReadFile,
)

HISTORY_BYTES_MAX = 64 << 20
"""Bytes of a job's history: beyond, the oldest files go."""

HISTORY_FILES_MAX = 20_000
"""Files of a job's history; one every five seconds for 27 hours."""

PAGE_BYTES_MAX = 4 << 20
"""Bytes that one page is read from: one that finds few records of the kinds in them is short, and says where the next begins."""

PAGE_RECORDS_MAX = 1_000

PAGE_FILES_MAX = 1_000
"""Files that one page is read from: small ones of a storage that takes its time for each. No fewer than its records."""

_FILE_BYTES_MAX = WRITE_BYTES + LINE_BYTES_MAX

FAULTS_MAX = 1_000
"""Damaged places of a history that are named one by one, and gaps: garbage has as many lines as it likes."""

_LAST_STATES = frozenset({"FINISHED", "CANCELED", "FAILED", "SUSPENDED"})
"""A leader that recorded one of these had come to its end."""


# ------------------------------------------------------------------------------------------------------------------ write


class HistoryWriter:
    """The files of one leader, among those of the job. One flow that deletes runs at a time."""

    def __init__(self, paths: JobPaths, epoch: int) -> None:
        self._paths = paths
        self._epoch = epoch
        self._sizes: dict[tuple[int, int], int] | None = None
        """Files by epoch and first number; None: not listed yet."""

    def write(self, action: WriteHistory) -> Flow[bool]:
        """Create a file, then delete the oldest beyond the bounds; False if another one has its name. Raises HoldfastError as
        storage does: the file may or may not exist then."""
        stored = yield from put_once(self._paths.history(self._epoch, action.first), action.content)
        if stored != action.content:
            return False
        try:
            yield from self._prune((self._epoch, action.first), len(action.content))
        except HoldfastError:
            self._sizes = None  # what is written is written; the next write lists the files again
        return True

    def _prune(self, name: tuple[int, int], size: int) -> Flow[None]:
        if self._sizes is None:
            facts: list[FileFacts] = yield DescribeFiles(self._paths.histories)
            named = ((parse_history_name(fact.path.rpartition("/")[2]), fact.size) for fact in facts)
            self._sizes = {found: length for found, length in named if found is not None}
        sizes = self._sizes
        sizes[name] = size
        surplus_bytes, surplus_files = sum(sizes.values()) - HISTORY_BYTES_MAX, len(sizes) - HISTORY_FILES_MAX
        while max(surplus_bytes, surplus_files) > 0 and (oldest := min(sizes)) != name:
            yield DeleteFile(self._paths.history(*oldest))
            surplus_bytes, surplus_files = surplus_bytes - sizes.pop(oldest, 0), surplus_files - 1


def erase_history(paths: JobPaths) -> Flow[int]:
    """Delete every file of a job's history, unreadable ones too; how many. Idempotent. Raises HoldfastError as storage does."""
    count: int = yield DeleteFolder(paths.histories)
    return count


# ------------------------------------------------------------------------------------------------------------------- read


@dataclass(frozen=True, slots=True)
class HistoryQuery:
    """Which records of a history to read."""

    after: Position | None = None
    """Only those behind it; None: from the oldest on."""
    kinds: frozenset[str] | None = None
    """None: all."""
    limit: int = 100
    newest: bool = False
    """The last `limit` records, in place of the first."""
    before: Position | None = None
    """Of the newest: only those in front of it."""


def parse_position(text: str, setting: str = "after") -> Position | None:
    """The position in `<epoch>-<number>`, None for an empty text. Raises InvalidConfigError that names the setting."""
    if not text:
        return None
    epoch, _, number = text.partition("-")
    if len(text) > 40 or not (epoch.isdecimal() and number.isdecimal() and text.isascii()):
        raise InvalidConfigError(f"a position in a history is <epoch>-<number>, not {text[:60]!r}", setting=setting)
    return Position(int(epoch), int(number))


_NO_RECORDS = HistoryQuery(kinds=frozenset())


@dataclass(slots=True)
class _Found:
    """What was read so far, in order."""

    entries: list[HistoryEntry] = field(default_factory=list)
    gaps: list[HistoryGap] = field(default_factory=list)
    damage: list[HistoryDamage] = field(default_factory=list)
    last: Position | None = None
    """Of the last record that was looked at, or the last place of an unreadable one."""
    is_closed: bool = True
    """The leader of `last` recorded its end, or nothing that was looked at says."""

    def note(self, entry: Line | str) -> None:
        """A record was looked at. A checkpoint that ended with the job is explained behind the job's end, in a file of its own as a
        rule: who begins to read there is told of no gap."""
        if not (isinstance(entry, Line) and entry.kind == RecordKind.EXPLANATION):
            self.is_closed = _is_last(entry)


def read_history(paths: JobPaths, query: HistoryQuery, now_ms: int) -> Flow[HistoryPage]:
    """A page of a job's history; without a record for a job that has none. `now_ms`: wall clock."""
    files = yield from list_files(paths)
    if query.newest:
        return (yield from _read_newest(paths, files, query, now_ms))
    start = 0
    if query.after is not None:
        start = max(0, bisect_right(files, (query.after.epoch, query.after.number)) - 1)
    found = _Found(last=query.after)
    size = 0
    for index in range(start, len(files)):
        content = yield from _read_file(paths, files[index])
        size += len(content or b"")
        if not _take(paths, files[index], content, query, found):
            return _page(found, more=True, now_ms=now_ms)
        is_enough = size >= PAGE_BYTES_MAX or index + 1 - start >= PAGE_FILES_MAX
        if is_enough and index + 1 < len(files) and found.last != query.after:  # a page that led no further would be asked for ever
            return _page(found, more=True, now_ms=now_ms)
    return _page(found, more=False, now_ms=now_ms)


def _read_newest(paths: JobPaths, files: Sequence[tuple[int, int]], query: HistoryQuery, now_ms: int) -> Flow[HistoryPage]:
    """Read from the end until there are enough records; then show these in order."""
    wanted = HistoryQuery(None, query.kinds, PAGE_BYTES_MAX, before=query.before)
    if query.before is not None:
        files = files[: bisect_left(files, (query.before.epoch, query.before.number))]
    contents: list[tuple[tuple[int, int], bytes | None]] = []
    size = count = 0
    for name in reversed(files):
        content = yield from _read_file(paths, name)
        contents.append((name, content))
        size += len(content or b"")
        alone = _Found()
        _take(paths, name, content, wanted, alone)
        count += len(alone.entries)
        if count >= query.limit or size >= PAGE_BYTES_MAX or len(contents) >= PAGE_FILES_MAX:
            break
    found = _Found()
    if contents and len(contents) < len(files):
        epoch, first = contents[-1][0]
        found.last = Position(epoch, first - 1)  # what is in front of it was not read, and is no gap
    for name, content in reversed(contents):
        _take(paths, name, content, wanted, found)
    surplus = len(found.entries) - query.limit
    found.entries = found.entries[-query.limit :]
    since = Position(*contents[-1][0]) if len(contents) < len(files) else None
    if surplus > 0:
        since = Position(found.entries[0].epoch, found.entries[0].number)
    return replace(_page(found, more=False, now_ms=now_ms), since=str(since) if since is not None else "")


@dataclass(frozen=True, slots=True)
class HistoryFaults:
    """What is wrong with a whole history, as its pages name it."""

    damage: tuple[HistoryDamage, ...] = ()
    gaps: tuple[HistoryGap, ...] = ()
    left_out: int = 0
    """Further ones of both, beyond FAULTS_MAX of each."""


def find_faults(paths: JobPaths) -> Flow[HistoryFaults]:
    """Read every file of a history, some at a time, for what can't be read and what is not there."""
    facts: list[FileFacts] = yield DescribeFiles(paths.histories)
    named = ((parse_history_name(fact.path.rpartition("/")[2]), fact.size) for fact in facts)
    files = sorted((name, min(size, _FILE_BYTES_MAX + 1)) for name, size in named if name is not None)
    found, left_out = _Found(), 0
    for group in _groups(files):
        flows = [_read_file(paths, name) for name, _ in group]
        contents: list[bytes | None] = yield InParallel(flows, [size for _, size in group])
        for (name, _), content in zip(group, contents, strict=True):
            _take(paths, name, content, _NO_RECORDS, found)
            left_out += max(0, len(found.damage) - FAULTS_MAX) + max(0, len(found.gaps) - FAULTS_MAX)
            del found.damage[FAULTS_MAX:], found.gaps[FAULTS_MAX:]
    return HistoryFaults(tuple(found.damage), tuple(found.gaps), left_out)


def _groups(files: Sequence[tuple[tuple[int, int], int]]) -> Iterator[list[tuple[tuple[int, int], int]]]:
    """Files with their sizes, as many together as are read for one page."""
    group: list[tuple[tuple[int, int], int]] = []
    size = 0
    for file in files:
        group.append(file)
        size += file[1]
        if size >= PAGE_BYTES_MAX or len(group) >= PAGE_FILES_MAX:
            yield group
            group, size = [], 0
    if group:
        yield group


def list_files(paths: JobPaths) -> Flow[list[tuple[int, int]]]:
    """Epoch and first number of each file, oldest first."""
    names: list[str] = yield ListFolder(paths.histories)
    return sorted(found for found in (parse_history_name(name) for name in names) if found is not None)


def read_file_entries(paths: JobPaths, name: tuple[int, int], kinds: frozenset[str]) -> Flow[tuple[HistoryEntry, ...]]:
    """Records of one file, oldest first; those that can't be read are left out."""
    found = _Found()
    _take(paths, name, (yield from _read_file(paths, name)), HistoryQuery(None, kinds, PAGE_BYTES_MAX), found)
    return tuple(found.entries)


def _read_file(paths: JobPaths, name: tuple[int, int]) -> Flow[bytes | None]:
    """None: it was deleted meanwhile."""
    try:
        content: bytes = yield ReadFile(paths.history(*name), 0, _FILE_BYTES_MAX + 1)
    except ObjectMissingError:
        return None
    return content


def _page(found: _Found, *, more: bool, now_ms: int) -> HistoryPage:
    where = str(found.last) if found.last is not None else ""
    return HistoryPage(tuple(found.entries), tuple(found.gaps), tuple(found.damage), where, more, now_ms)


def _take(
    paths: JobPaths, name: tuple[int, int], content: bytes | None, query: HistoryQuery, found: _Found
) -> bool:
    """Add the records of a file; False if there is no room for one of them, which is then not looked at."""
    if content is None:
        return True
    epoch, first = name
    path = paths.history(epoch, first)
    if len(content) > _FILE_BYTES_MAX:
        place = Position(epoch, first)
        if query.after is None or query.after < place:
            found.damage.append(HistoryDamage(path, 0, f"larger than {_FILE_BYTES_MAX} bytes"))
            _note_gap(found, place)
            found.last, found.is_closed = place, False
        return True
    for number, line, entry in place_lines(content, first):
        place = Position(epoch, number)
        if query.before is not None and place >= query.before:
            return True
        if query.after is not None and place <= query.after:
            found.note(entry)
            continue
        if isinstance(entry, Line) and _is_wanted(entry, query) and len(found.entries) >= query.limit:
            return False
        _note_gap(found, place)
        if isinstance(entry, str):
            found.damage.append(HistoryDamage(path, line, entry))
        elif _is_wanted(entry, query):
            found.entries.append(HistoryEntry(epoch, number, entry.at_ms, entry.kind, entry.facts))
        found.last = place
        found.note(entry)
    return True


def _is_wanted(line: Line, query: HistoryQuery) -> bool:
    return query.kinds is None or line.kind in query.kinds


def _is_last(entry: Line | str) -> bool:
    return isinstance(entry, Line) and entry.kind == RecordKind.STATE and entry.facts.get("state") in _LAST_STATES


def _note_gap(found: _Found, place: Position) -> None:
    last = found.last
    if last is None or last.epoch < place.epoch:
        if last is not None and not found.is_closed:
            found.gaps.append(HistoryGap(last.epoch, last.number, None, None))
        last = Position(place.epoch, 0)
    if place.number > last.number + 1:
        found.gaps.append(HistoryGap(place.epoch, last.number, place.number, place.number - last.number - 1))
