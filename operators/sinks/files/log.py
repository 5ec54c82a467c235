"""A two-phase file sink's log and the names of its files: take the sink over, commit a checkpoint's files, read what is committed.

Each flow may stop between any two operations, be run again from restored state, and race with an older self. It knows nothing of
operators and of Parquet. The log's records, and the committer's state, are in `holdfast.barriers.sinks.log`.

Where a link is a copy (S3), writers put their bytes in `data` at once, behind an empty marker in `staged`, for the sweep: step 1
finds them there, and step 4 deletes the marker.

Order of a commit, and what a crash after each step leaves:
1. link staged -> data: nothing names it yet; done again, a no-op.
2. put the log entry: the commit point. All files it names are at their final place, so readers never wait or fall back.
3. link data -> published: plain readers lag behind ours until the commit is run again, from state that still holds it.
4. delete the staged name: only now, since until 2 a repeated commit can link only from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from urllib.parse import quote

import msgspec
import xxhash

from holdfast.barriers.sinks.log import (
    LOG_VERSION,
    CommitEntry,
    LogEntry,
    LogPosition,
    MergeEntry,
    OwnerEntry,
    PendingCheckpoint,
    SinkPaths,
    StagedFile,
    decode_entry,
    place_of,
    split_place,
)
from holdfast.barriers.sinks.reading import read_log_flow
from holdfast.operators.sinks.files.formats import FileFormat
from holdfast.statebackends.errors import (
    AmbiguousWriteError,
    CommittableLostError,
    FencedError,
    ObjectMissingError,
    OutputMayRepeatError,
    StorageUnavailableError,
)
from holdfast.statebackends.storage.flows import make_durable, read_whole
from holdfast.statebackends.storage.locations import open_output
from holdfast.statebackends.storage.port import DeleteFile, Flow, LinkFile, PutIfAbsent, ReadFile, Storage


class Committable(msgspec.Struct, frozen=True):
    """Files that one writer staged for one checkpoint; sent to the committer before the barrier."""

    version: int
    checkpoint_id: int
    subtask: int
    files: tuple[StagedFile, ...]


@dataclass(frozen=True, slots=True)
class MergeSettings:
    """When committed small files are merged."""

    target_file_size: int
    """Bytes. A file is small below half of it; merged ones have up to one and a half."""
    roll_interval_ms: int | None
    """Age of the oldest small file at which it is merged with those there are; None: only size counts."""
    kept_ms: int
    """Time that replaced files stay."""


@dataclass(slots=True)
class SinkSettings:
    """Settings that a sink's operators share. The sink id may be set after they were made, until the plan is shipped."""

    path: str
    """Storage root of the sink: a folder or a URL."""
    sink_id: str
    file_size_max: int
    """Bytes of rows in memory at which a file is closed."""
    open_storage: Callable[[str], Storage] | None = None
    """None: the worker opens the sink beside the state directory, other programs by the form of the path."""
    format: FileFormat = "parquet"
    partition_by: tuple[str, ...] = ()
    """Columns whose values are the folders of files."""
    merging: MergeSettings | None = None
    """None: committed files stay as they are."""

    def storage(self, beside: Storage | None = None) -> Storage:
        """Open the sink's storage. `beside`: the storage whose reach it shares; None: any storage that the path names."""
        if self.open_storage is not None:
            return self.open_storage(self.path)
        return open_output(self.path, beside)

    @property
    def place(self) -> str:
        """Location of its log."""
        return place_of(self.path, self.sink_id)

    def at(self, place: str) -> SinkSettings:
        """The same sink at an earlier place."""
        path, sink_id = split_place(place)
        return replace(self, path=path, sink_id=sink_id)


@dataclass(frozen=True, slots=True)
class FileName:
    """Parsed name of a staged file; names are never used twice."""

    sink_id: str
    job: str
    """`job_tag` of the job id."""
    attempt: int
    subtask: int
    first_checkpoint: int
    """Lowest checkpoint id that can refer to the file."""
    nonce: str
    sequence: int
    suffix: str = "parquet"
    folder: str = ""
    """Of its partition; empty without one."""

    @property
    def text(self) -> str:
        sink = quote(self.sink_id, safe="")
        writer = f"a{self.attempt}-s{self.subtask}-c{self.first_checkpoint}"
        folder = f"{self.folder}/" if self.folder else ""
        return f"{folder}part-{sink}-{self.job}-{writer}-{self.nonce}-{self.sequence:05d}.{self.suffix}"


_NAME = re.compile(r"(?:(.+)/)?part-(.+)-([0-9a-f]{8})-a(\d+)-s(\d+)-c(\d+)-([^-/]+)-(\d+)\.(parquet|jsonl|csv)")


def job_tag(job_id: str) -> str:
    """8 hex digits that represent a job in file names."""
    return xxhash.xxh3_64_hexdigest(job_id.encode())[:8]


def nonce_tag(nonce: str) -> str:
    """A nonce as part of a file name: letters and digits only."""
    return nonce if nonce.isalnum() and nonce.isascii() else xxhash.xxh3_64_hexdigest(nonce.encode())


def parse_name(name: str) -> FileName | None:
    """Parse a file name; None if it is not of this form."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    folder, sink, job, attempt, subtask, checkpoint, nonce, sequence, suffix = match.groups()
    return FileName(sink, job, int(attempt), int(subtask), int(checkpoint), nonce, int(sequence), suffix, folder or "")


APPEND_TRIES_MAX = 5
"""Ambiguous answers in a row before an append gives up; the job then fails over and reads what was written."""


@dataclass(frozen=True, slots=True)
class Claimant:
    """The committer that wants to write: one attempt of one job."""

    job_id: str
    attempt: int
    nonce: str
    restored_checkpoint_id: int
    allow_output_repeat: bool
    arrow_schema: str
    now_ms: int
    takes_over: bool = False
    """Make sure that no earlier attempt commits from here on, whatever it may have."""


@dataclass(frozen=True, slots=True)
class OpenLog:
    """A log that this job may append to, as last read."""

    position: LogPosition
    committed: frozenset[str]
    """Files of pending checkpoints that an earlier attempt committed without living to forget them."""
    replaced: frozenset[str] = frozenset()
    """Files that a later one has replaced, as far as that was read: they are not published any more."""


def append_flow(paths: SinkPaths, entry: LogEntry) -> Flow[bool]:
    """Put one entry at its sequence; False if another writer has that number. Reads back before it trusts an answer."""
    path, data = paths.log(entry.sequence), msgspec.json.encode(entry)
    for _ in range(APPEND_TRIES_MAX):
        try:
            if (yield PutIfAbsent(path, data)):
                return True
        except AmbiguousWriteError:
            continue  # an entry that can be read is not yet durable: only a clear answer counts
        try:
            return bool((yield ReadFile(path, 0, len(data) + 1)) == data)
        except ObjectMissingError:
            continue
    raise StorageUnavailableError(f"{path}: no answer whether it was written, {APPEND_TRIES_MAX} times", path=path)


def open_log_flow(
    paths: SinkPaths, known: LogPosition | None, pending: tuple[PendingCheckpoint, ...], claimant: Claimant
) -> Flow[OpenLog]:
    """Find the end of the log and make sure that this job owns the sink. The owning job goes on; a job restored from the owner's
    newest state inherits it; any other job is refused.

    Raises FencedError when another job owns the sink, or, of a claimant that takes over, a later attempt of this one;
    OutputMayRepeatError when output beyond the restored checkpoint is already committed (unless allowed), CommittableLostError when
    the log at this path is not the one recorded in the state."""
    known = yield from check_known_flow(paths, known, pending)
    while True:
        start = known.next_sequence if known is not None else 0
        entries = yield from _durable_entries(paths, start)
        position = _advance(known, entries)
        if position is not None and not _must_claim(paths, position, known, entries, pending, claimant):
            return OpenLog(position, _committed(entries), _replaced(entries))
        sequence, owner = start + len(entries), 1 if position is None else position.owner + 1
        if (yield from append_flow(paths, _owner_entry(sequence, owner, claimant))):
            taken = LogPosition(LOG_VERSION, sequence + 1, owner, claimant.nonce, claimant.job_id)
            return OpenLog(taken, _committed(entries), _replaced(entries))


def _owner_entry(sequence: int, owner: int, claimant: Claimant) -> OwnerEntry:
    return OwnerEntry(
        version=LOG_VERSION,
        sequence=sequence,
        owner=owner,
        owner_nonce=claimant.nonce,
        job_id=claimant.job_id,
        attempt=claimant.attempt,
        restored_checkpoint_id=claimant.restored_checkpoint_id,
        arrow_schema=claimant.arrow_schema,
        written_ms=claimant.now_ms,
    )


def check_known_flow(
    paths: SinkPaths, known: LogPosition | None, pending: tuple[PendingCheckpoint, ...]
) -> Flow[LogPosition | None]:
    """The restored position, or None when the log at this path is a different one (the sink's path was changed)."""
    if known is None or known.next_sequence == 0:
        return None
    path = paths.log(known.next_sequence - 1)
    try:
        last = decode_entry((yield from read_whole(path)), path)
    except ObjectMissingError:
        last = None
    if last is not None and last.owner_nonce == known.owner_nonce:
        return known
    if pending:
        raise CommittableLostError(
            f"sink {paths.sink_id}: checkpoint {pending[0].checkpoint_id} has files to commit, but the log here is not the sink's "
            f"(searched for {path}): was its path changed?",
            sink=paths.sink_id,
            path=path,
            checkpoint=pending[0].checkpoint_id,
        )
    return None


def _durable_entries(paths: SinkPaths, sequence: int) -> Flow[list[LogEntry]]:
    """As read_log_flow, made durable first: the writer of the last entry may have died before it was, and the caller acts on it.

    Syncing one name is enough: it makes all names of the folder durable, and numbers have no gaps."""
    entries = yield from read_log_flow(paths, sequence)
    if entries:
        yield from make_durable(paths.log(entries[-1].sequence))
    return entries


def _advance(known: LogPosition | None, entries: Iterable[LogEntry]) -> LogPosition | None:
    position = known
    for entry in entries:
        position = LogPosition(LOG_VERSION, entry.sequence + 1, entry.owner, entry.owner_nonce, entry.job_id)
    return position


def _must_claim(
    paths: SinkPaths,
    position: LogPosition,
    known: LogPosition | None,
    entries: list[LogEntry],
    pending: tuple[PendingCheckpoint, ...],
    claimant: Claimant,
) -> bool:
    """Whether this job has to take the sink over before it may commit. Raises if it may not."""
    foreign = position.owner_job != claimant.job_id
    taken = any(isinstance(entry, OwnerEntry) for entry in entries)
    if foreign and (known is None or taken):
        raise FencedError(
            f"sink {paths.sink_id} is owned by job {position.owner_job}: give this one another sink_id or path",
            sink=paths.sink_id,
            owner=position.owner_job,
            job_id=claimant.job_id,
        )
    if claimant.takes_over:  # its files are not those of a later attempt, which would commit its own behind them
        _check_attempt(paths, entries, claimant)
    mine = {file.name for checkpoint in pending for file in checkpoint.files}
    beyond = [entry.checkpoint_id for entry in entries if isinstance(entry, CommitEntry) and not _committed([entry]) <= mine]
    if beyond and not claimant.allow_output_repeat:
        raise OutputMayRepeatError(
            f"sink {paths.sink_id}: output up to checkpoint {max(beyond)} is committed, and the job starts at "
            f"{claimant.restored_checkpoint_id}: it would repeat. Choose a newer snapshot, another path, or allow_output_repeat",
            sink=paths.sink_id,
            restored=claimant.restored_checkpoint_id,
            committed=max(beyond),
        )
    # A job without state of this log begins a new run: an older attempt of it that still lives must no longer commit.
    return foreign or bool(beyond) or known is None or claimant.takes_over


def _committed(entries: Iterable[LogEntry]) -> frozenset[str]:
    return frozenset(file.name for entry in entries if isinstance(entry, CommitEntry) for file in entry.files)


def _replaced(entries: Iterable[LogEntry]) -> frozenset[str]:
    return frozenset(file.name for entry in entries if isinstance(entry, MergeEntry) for file in entry.replaced)


def _names(files: Iterable[StagedFile]) -> frozenset[str]:
    return frozenset(file.name for file in files)


def commit_flow(paths: SinkPaths, log: OpenLog, checkpoint: PendingCheckpoint, claimant: Claimant) -> Flow[OpenLog]:
    """Commit one checkpoint's files, once, however often it is called; returns the log as known afterwards.

    Raises FencedError when another job took the sink, CommittableLostError when a file is missing and was not committed."""
    names = _names(checkpoint.files)
    if not names <= log.committed:
        missing = yield from _link_data(paths, checkpoint)
        while not names <= log.committed:
            entry = _commit_entry(log.position, checkpoint, claimant)
            if missing is None and (yield from append_flow(paths, entry)):
                position = msgspec.structs.replace(log.position, next_sequence=entry.sequence + 1)
                log = OpenLog(position, log.committed | names, log.replaced)
                break
            # The number is taken or a file is gone: another writer appended since, perhaps an earlier try of this very commit.
            entries = yield from _durable_entries(paths, log.position.next_sequence)
            log = _follow(paths, log, entries, claimant)
            if missing is not None and not names <= log.committed:
                raise CommittableLostError(
                    f"sink {paths.sink_id}: {missing} of checkpoint {checkpoint.checkpoint_id} is missing and was not committed",
                    sink=paths.sink_id,
                    path=missing,
                    checkpoint=checkpoint.checkpoint_id,
                )
            if names - log.committed:
                _check_attempt(paths, entries, claimant)
    yield from _publish(paths, checkpoint, log.replaced)
    return replace(log, committed=log.committed - names)


def end_log_flow(
    paths: SinkPaths, known: LogPosition | None, pending: tuple[PendingCheckpoint, ...], claimant: Claimant
) -> Flow[None]:
    """Commit what is due in another log of this job, which writes to a new one from here on.

    Raises FencedError where another job took the sink over and has not committed all of it: the new log may only begin when the old
    one is complete, and whether the other job will complete it is unknown here. Raises OutputMayRepeatError when the log went on
    with files other than these, which would then be committed twice; CommittableLostError when one is gone."""
    try:
        log = yield from open_log_flow(paths, known, pending, replace(claimant, allow_output_repeat=False))
        for checkpoint in pending:
            log = yield from commit_flow(paths, log, checkpoint, claimant)
    except FencedError as error:
        entries = yield from _durable_entries(paths, known.next_sequence if known is not None else 0)
        left = [each for each in pending if not _names(each.files) <= _committed(entries)]
        if left:
            raise FencedError(
                f"{error.message}, and has not committed {sum(each.rows for each in left)} rows of checkpoint "
                f"{left[0].checkpoint_id} that this job had staged there. Let that one commit them, or start this one again, "
                "with the `sinks` argument to decide about them",
                **error.fields,
            ) from error


def _commit_entry(position: LogPosition, checkpoint: PendingCheckpoint, claimant: Claimant) -> CommitEntry:
    return CommitEntry(
        version=LOG_VERSION,
        sequence=position.next_sequence,
        owner=position.owner,
        owner_nonce=position.owner_nonce,
        job_id=claimant.job_id,
        attempt=claimant.attempt,
        checkpoint_id=checkpoint.checkpoint_id,
        rows=sum(file.rows for file in checkpoint.files),
        files=checkpoint.files,
        writer_nonce=claimant.nonce,
        written_ms=claimant.now_ms,
    )


def _follow(paths: SinkPaths, log: OpenLog, entries: list[LogEntry], claimant: Claimant) -> OpenLog:
    """Take in entries appended by others. Raises FencedError when the sink has a new owner: another job, or a later attempt of this
    one.

    An older attempt of this job that opened the log late has nothing to commit and takes nothing away."""
    for entry in entries:
        late = entry.job_id == claimant.job_id and entry.attempt < claimant.attempt
        if isinstance(entry, OwnerEntry) and not late:
            raise FencedError(
                f"sink {paths.sink_id} was taken over by job {entry.job_id}, attempt {entry.attempt}",
                sink=paths.sink_id,
                owner=entry.job_id,
                job_id=claimant.job_id,
            )
    committed = log.committed | _committed(entries)
    return OpenLog(_advance(log.position, entries) or log.position, committed, log.replaced | _replaced(entries))


def follow_flow(paths: SinkPaths, log: OpenLog, claimant: Claimant) -> Flow[OpenLog]:
    """Read, and make durable, what others have appended. Raises FencedError as a commit does."""
    return _follow(paths, log, (yield from _durable_entries(paths, log.position.next_sequence)), claimant)


def _check_attempt(paths: SinkPaths, entries: list[LogEntry], claimant: Claimant) -> None:
    """Raise FencedError when a later attempt of this job commits already: files left here are its to commit, or orphans."""
    newest = max((entry.attempt for entry in entries if entry.job_id == claimant.job_id), default=0)
    if newest > claimant.attempt:
        raise FencedError(
            f"sink {paths.sink_id}: attempt {newest} of job {claimant.job_id} commits, this is {claimant.attempt}",
            sink=paths.sink_id,
            held=claimant.attempt,
            newer=newest,
        )


def _link_data(paths: SinkPaths, checkpoint: PendingCheckpoint) -> Flow[str | None]:
    """Step 1 of a commit; returns the path of the first missing file, if any."""
    for file in checkpoint.files:
        try:
            yield LinkFile(paths.staged(file.name), paths.data(file.name))
        except ObjectMissingError:
            return paths.staged(file.name)
    return None


def _publish(paths: SinkPaths, checkpoint: PendingCheckpoint, replaced: frozenset[str]) -> Flow[None]:
    """Steps 3 and 4 of a commit."""
    for file in checkpoint.files:
        if file.name in replaced:
            continue  # plain readers have its rows in another file
        try:
            yield LinkFile(paths.data(file.name), paths.published(file.name))
        except ObjectMissingError:
            # Committed before, and deleted since by the owner of the output: nothing to publish.
            continue
    for file in checkpoint.files:
        yield DeleteFile(paths.staged(file.name))  # also in place: an older version may have staged it
        if paths.in_place:
            yield DeleteFile(paths.marker(file.name))


def committed_flow(paths: SinkPaths, job_id: str, stop: int, first_checkpoint: int) -> Flow[frozenset[str]]:
    """Files that this job committed in the entries below `stop`, of checkpoints from `first_checkpoint` on: the last entries of the
    log, since the ids of a job rise."""
    found: set[str] = set()
    for sequence in range(stop - 1, -1, -1):
        path = paths.log(sequence)
        entry = decode_entry((yield from read_whole(path)), path)
        if isinstance(entry, CommitEntry) and entry.job_id == job_id:
            if entry.checkpoint_id < first_checkpoint:
                break
            found |= _committed([entry])
    return frozenset(found)
