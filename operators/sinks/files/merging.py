"""Merges of committed files: which are merged, and the flows of one merge. It knows nothing of operators.

A merge takes neighbours: small files of one folder and one format that follow each other in the log, so that rows keep the order of
their commits. Its file is not merged again.

Order of a merge, and what a crash after each step leaves:
1. put the plan: names a file that is not there yet; without an entry it means nothing.
2. write the merged file at its final place: no reader knows it.
3. put the log entry: the merge. Readers of the log see the new file in place of the old ones, in one step.
4. delete the published names of the old files, publish the new one: plain readers miss rows between the two, and see none twice.
5. once their time is over, delete the old files, and their published names again, which a late commit may have linked.
6. delete the plan.

The entry is only put at the number behind all that its writer has read, and only if no entry of another writer came since the
merge began. So whoever finds a plan, puts an entry of its own, and finds no entry of the merge in front of that, knows that there
will never be one: its file can go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from holdfast.barriers.sinks.log import (
    MERGE_VERSION,
    CommitEntry,
    LogEntry,
    MergeEntry,
    MergePlan,
    SinkPaths,
    StagedFile,
    decode_plan,
)
from holdfast.barriers.sinks.reading import read_log_flow
from holdfast.operators.sinks.files.combining import combiner_of
from holdfast.operators.sinks.files.formats import format_of
from holdfast.operators.sinks.files.log import (
    Claimant,
    MergeSettings,
    OpenLog,
    append_flow,
    follow_flow,
    parse_name,
)
from holdfast.statebackends.errors import AmbiguousWriteError, CorruptStateError, ObjectMissingError, StorageUnavailableError
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.flows import delete_files, read_whole
from holdfast.statebackends.storage.port import (
    DeleteFile,
    Flow,
    InParallel,
    LinkFile,
    ListFolder,
    PutIfAbsent,
    ReadFile,
    StatFile,
    WriteFile,
)

_logger = logging.getLogger("holdfast.sinks")

ENTRIES_BACK = 10_000
"""Entries of the log that an attempt reads back to find small files; those in front of them stay as they are."""
FILES_PER_MERGE_MAX = 2_000
"""An entry names all of them; so many are merged whatever their size."""
FILES_TRACKED_MAX = 100_000
"""Small files that wait, of all partitions; beyond, those that have waited longest stay as they are."""
FILES_LEFT = FILES_TRACKED_MAX * 9 // 10
"""Those that still wait then."""
MERGED = "m"
"""In front of the nonce in a merged file's name, beside which a writer has no such names."""
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class SmallFile:
    """A committed file that may be merged."""

    file: StagedFile
    size: int
    """Bytes."""
    checkpoint_id: int
    written_ms: int
    """When it was committed."""


@dataclass(slots=True)
class _Run:
    """Small files that follow each other."""

    files: dict[str, SmallFile] = field(default_factory=dict)
    size: int = 0
    is_over: bool = False
    """A large file follows: no more can join."""

    def add(self, small: SmallFile) -> None:
        self.files[small.file.name] = small
        self.size += small.size

    def remove(self, name: str) -> None:
        small = self.files.pop(name, None)
        self.size -= small.size if small is not None else 0


class Runs:
    """CORE: the small files of a log, and which of them are to be merged now."""

    def __init__(self, settings: MergeSettings) -> None:
        self._settings = settings
        self._runs: dict[tuple[str, str], list[_Run]] = {}
        """By folder and format, in the order of the log."""
        self._count = 0

    @property
    def count(self) -> int:
        """Files that wait."""
        return self._count

    def follow(self, entry: LogEntry, sizes: Mapping[str, int | None]) -> None:
        """Take in the next entry. `sizes`: bytes of the files that it commits; None for one that is gone."""
        if isinstance(entry, MergeEntry):
            self.drop(file.name for file in entry.replaced)
        elif isinstance(entry, CommitEntry):
            for file in entry.files:
                self._add(SmallFile(file, sizes.get(file.name) or 0, entry.checkpoint_id, entry.written_ms))
            self._bound()

    def _add(self, file: SmallFile) -> None:
        kind = _kind(file.file.name)
        if file.size == 0 or 2 * file.size >= self._settings.target_file_size:
            for run in self._runs.get(kind, ())[-1:]:
                run.is_over = True
            return
        runs = self._runs.setdefault(kind, [])
        if not runs or runs[-1].is_over:
            runs.append(_Run())
        runs[-1].add(file)
        self._count += 1

    def _bound(self) -> None:
        if self._count <= FILES_TRACKED_MAX:
            return
        runs = [(next(iter(run.files.values())).written_ms, kind, run) for kind, some in self._runs.items() for run in some]
        for _, kind, run in sorted(runs, key=lambda each: each[0]):
            if self._count <= FILES_LEFT:  # fewer than may be: not at each commit once more, of so many partitions
                break
            self._drop_run(kind, run)

    def drop(self, names: Iterable[str]) -> None:
        """Leave files as they are."""
        for name in names:
            kind = _kind(name)
            for run in self._runs.get(kind, ()):
                if name in run.files:
                    run.remove(name)
                    self._count -= 1
            self._runs[kind] = [run for run in self._runs.get(kind, ()) if run.files]
            if not self._runs[kind]:
                del self._runs[kind]

    def _drop_run(self, kind: tuple[str, str], run: _Run) -> None:
        self._count -= len(run.files)
        self._runs[kind].remove(run)
        if not self._runs[kind]:
            del self._runs[kind]

    def due(self, now_ms: int) -> tuple[SmallFile, ...]:
        """Files to be merged now, of the folder where the oldest is; empty if there are none."""
        for kind in sorted(self._runs, key=lambda kind: _age(self._runs[kind])):
            for run in list(self._runs[kind]):
                first = next(iter(run.files.values()))
                rolls = self._settings.roll_interval_ms
                is_old = run.is_over or (rolls is not None and now_ms - first.written_ms >= rolls)
                if len(run.files) == 1 and is_old:  # there is nothing to merge it with
                    self._drop_run(kind, run)
                elif len(run.files) > 1 and (is_old or run.size >= self._settings.target_file_size or self._is_long(run)):
                    return self._first_of(run)
        return ()

    @staticmethod
    def _is_long(run: _Run) -> bool:
        return len(run.files) >= FILES_PER_MERGE_MAX

    def _first_of(self, run: _Run) -> tuple[SmallFile, ...]:
        """As many as make one file."""
        taken: list[SmallFile] = []
        size = 0
        for small in islice(run.files.values(), FILES_PER_MERGE_MAX):
            if len(taken) > 1 and size >= self._settings.target_file_size:
                break
            taken.append(small)
            size += small.size
        return tuple(taken)


def _kind(name: str) -> tuple[str, str]:
    return name.rpartition("/")[0], format_of(name)


def _age(runs: Sequence[_Run]) -> int:
    return next(iter(runs[0].files.values())).written_ms


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged file that is written, and has no entry yet."""

    file: StagedFile
    size: int
    checksum: str
    sources: tuple[SmallFile, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Outcome of the steps 1 and 2."""

    merged: Merged | None
    """None: fewer than two files can be merged."""
    refused: tuple[str, ...]
    """A file that can't be merged with those in front of it: it is gone, damaged, or has other columns."""


def sizes_flow(entries: Sequence[LogEntry]) -> Callable[[SinkPaths], Flow[dict[str, int | None]]]:
    """Sizes of the files that these entries commit and none of them replaces."""
    gone = {file.name for entry in entries if isinstance(entry, MergeEntry) for file in entry.replaced}
    names = [file.name for entry in entries if isinstance(entry, CommitEntry) for file in entry.files if file.name not in gone]

    def flow(paths: SinkPaths) -> Flow[dict[str, int | None]]:
        sizes: list[int | None] = []
        for start in range(0, len(names), _AT_ONCE):
            some = names[start : start + _AT_ONCE]
            sizes += yield InParallel([_size(paths.data(name)) for name in some], [0] * len(some))
        return dict(zip(names, sizes, strict=True))

    return flow


def _size(path: str) -> Flow[int | None]:
    found: int | None = yield StatFile(path)
    return found


def read_entries_flow(
    paths: SinkPaths, first: int, stop: int, *, sizes: bool
) -> Flow[tuple[list[LogEntry], dict[str, int | None]]]:
    """Entries of the sequences [first, stop), and the sizes of files that they commit."""
    entries = (yield from read_log_flow(paths, first))[: stop - first]
    return entries, (yield from sizes_flow(entries)(paths)) if sizes else {}


def prepare_flow(paths: SinkPaths, plan: MergePlan, sources: Sequence[SmallFile]) -> Flow[Prepared]:
    """Steps 1 and 2. `sources`: neighbours, of one folder and format."""
    yield PutIfAbsent(paths.merge(plan.name), msgspec.json.encode(plan))
    combiner = combiner_of(format_of(plan.name))
    taken: list[SmallFile] = []
    for start in range(0, len(sources), _AT_ONCE):
        some = sources[start : start + _AT_ONCE]
        contents: list[bytes | None]
        contents = yield InParallel([_content(paths.data(each.file.name)) for each in some], [each.size for each in some])
        for small, content in zip(some, contents, strict=True):
            if content is None or not combiner.add(content, small.file.rows):
                break
            taken.append(small)
        if len(taken) < start + len(some):
            break
    refused = (sources[len(taken)].file.name,) if len(taken) < len(sources) else ()
    if len(taken) < 2:
        yield DeleteFile(paths.merge(plan.name))
        return Prepared(None, (*(each.file.name for each in taken), *refused))
    chunks = combiner.finish()
    size: int = yield WriteFile(paths.data(plan.name), chunks)
    file = StagedFile(plan.name, sum(each.file.rows for each in taken))
    return Prepared(Merged(file, size, checksum_of(*chunks), tuple(taken)), ())


def _content(path: str) -> Flow[bytes | None]:
    try:
        content: bytes = yield ReadFile(path)
    except ObjectMissingError:
        return None
    return content


@dataclass(frozen=True, slots=True)
class Appended:
    """Outcome of step 3."""

    log: OpenLog
    entry: MergeEntry | None
    """None: there is none, or it is not known whether there is one."""
    is_lost: bool = False
    """Another one has the number: there is none, and will be none."""


def append_merge_flow(
    paths: SinkPaths, log: OpenLog, merged: Merged, settings: MergeSettings, claimant: Claimant
) -> Flow[Appended]:
    """Step 3, once: whoever finds the number taken gives the merge up. Raises FencedError when another job took the sink."""
    entry = _merge_entry(log, merged, settings, claimant)
    try:
        won = yield from append_flow(paths, entry)
    except (StorageUnavailableError, AmbiguousWriteError):
        return Appended(log, None)  # a later entry, of a commit or a merge, finds what became of it
    if not won:
        return Appended((yield from follow_flow(paths, log, claimant)), None, is_lost=True)
    position = msgspec.structs.replace(log.position, next_sequence=entry.sequence + 1)
    # `replaced` stays: what is merged here was published before, and the names of a job's life are too many to keep.
    return Appended(OpenLog(position, log.committed, log.replaced), entry)


def _merge_entry(log: OpenLog, merged: Merged, settings: MergeSettings, claimant: Claimant) -> MergeEntry:
    return MergeEntry(
        version=MERGE_VERSION,
        sequence=log.position.next_sequence,
        owner=log.position.owner,
        owner_nonce=log.position.owner_nonce,
        job_id=claimant.job_id,
        attempt=claimant.attempt,
        checkpoint_id=max(each.checkpoint_id for each in merged.sources),
        file=merged.file,
        size=merged.size,
        checksum=merged.checksum,
        replaced=tuple(each.file for each in merged.sources),
        kept_until_ms=claimant.now_ms + settings.kept_ms,
        writer_nonce=claimant.nonce,
        written_ms=claimant.now_ms,
    )


def publish_flow(paths: SinkPaths, entry: MergeEntry) -> Flow[None]:
    """Step 4."""
    yield from delete_files(paths.published(file.name) for file in entry.replaced)
    try:
        yield LinkFile(paths.data(entry.file.name), paths.published(entry.file.name))
    except ObjectMissingError:
        return  # deleted since by the owner of the output: nothing to publish


def end_flow(paths: SinkPaths, entry: MergeEntry) -> Flow[None]:
    """Steps 5 and 6: nothing can link a published name once its file is gone."""
    yield from delete_files(paths.data(file.name) for file in entry.replaced)
    yield from delete_files(paths.published(file.name) for file in entry.replaced)
    yield DeleteFile(paths.merge(entry.file.name))


def give_up_flow(paths: SinkPaths, names: Iterable[str]) -> Flow[None]:
    """What is left of merges that have no entry, and will have none."""
    for name in names:
        yield DeleteFile(paths.data(name))
        yield DeleteFile(paths.merge(name))


def plans_flow(paths: SinkPaths) -> Flow[list[MergePlan]]:
    """Plans of merges that are not over, of any attempt. What is none says nothing: at worst, a file that no reader knows stays."""
    plans = []
    for name in (yield ListFolder(paths.merges_folder)):
        path = f"{paths.merges_folder}/{name}"
        try:
            plan = decode_plan((yield from read_whole(path)), path)
        except ObjectMissingError:
            continue  # ended meanwhile
        except CorruptStateError as error:
            _logger.warning("sink %s: a plan of a merge can't be read, and is passed over: %s", paths.sink_id, error)
            continue
        if paths.merge(plan.name) == path and is_merged_name(plan.name):
            plans.append(plan)
        else:  # what it names might be deleted
            _logger.warning("sink %s: %s names %r, which is no file of a merge: it is passed over", paths.sink_id, path, plan.name)
    return plans


def is_merged_name(text: str) -> bool:
    """Whether a file's name is one of a merge: a writer's is not."""
    name = parse_name(text)
    return name is not None and name.nonce.startswith(MERGED)
