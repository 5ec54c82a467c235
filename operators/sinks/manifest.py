"""What a two-phase file sink writes about itself: names, committables, and the entries of its log.

The log is one sequence of put-if-absent files, `_holdfast/<sink id>/log/<sequence>.json`, of two kinds: a job takes the sink
over, or one checkpoint's files are committed. Both compete for the next number, so that a takeover and the commits of the
owner before it are in one order: after it that owner's next commit fails, without a lock or a lease."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast
from urllib.parse import quote

import msgspec
import xxhash

from statebackends.decoding import UNDECODABLE, decode_json
from statebackends.errors import CorruptStateError, UnsupportedVersionError
from statebackends.storage.locations import open_output
from statebackends.storage.operations import Storage

LOG_VERSION = 1

ROOT_FOLDER = "_holdfast"
"""Below a sink's path; readers of plain Parquet skip names that begin with an underscore."""


class StagedFile(msgspec.Struct, frozen=True):
    """One data file; the same name in `staged/`, in `data/` and beside the plain readers."""

    name: str
    rows: int


class Committable(msgspec.Struct, frozen=True):
    """What one writer staged for one checkpoint: travels to the committer before the barrier."""

    version: int
    checkpoint_id: int
    subtask: int
    files: tuple[StagedFile, ...]


class LogPosition(msgspec.Struct, frozen=True, tag="position"):
    """Committer state: how far the log was known, and who owned the sink."""

    version: int
    next_sequence: int
    owner: int
    owner_nonce: str
    owner_job: str


class PendingCheckpoint(msgspec.Struct, frozen=True, tag="pending"):
    """Committer state: the files of one checkpoint whose commit is not known to be done."""

    checkpoint_id: int
    files: tuple[StagedFile, ...]


CommitterState: TypeAlias = LogPosition | PendingCheckpoint


class OwnerEntry(msgspec.Struct, frozen=True, tag="owner"):
    """A job takes the sink. Every entry up to the next one of this kind is this owner's."""

    version: int
    sequence: int
    owner: int
    """1, 2, 3 ..."""
    owner_nonce: str
    job_id: str
    attempt: int
    restored_checkpoint_id: int
    arrow_schema: str
    """Base64 of the Arrow schema message of the sink's rows; empty when unknown."""
    written_ms: int


class CommitEntry(msgspec.Struct, frozen=True, tag="commit"):
    """The commit point of one checkpoint's files."""

    version: int
    sequence: int
    owner: int
    owner_nonce: str
    job_id: str
    attempt: int
    checkpoint_id: int
    rows: int
    files: tuple[StagedFile, ...]
    writer_nonce: str
    written_ms: int


LogEntry: TypeAlias = OwnerEntry | CommitEntry


def decode_entry(data: bytes, path: str) -> LogEntry:
    """Raises CorruptStateError, UnsupportedVersionError."""
    try:
        version = msgspec.json.decode(data, type=dict[str, object]).get("version")
        if version != LOG_VERSION:
            raise UnsupportedVersionError(
                f"{path}: sink log version {version}, this version reads {LOG_VERSION}",
                path=path,
                version=version,
                supported=LOG_VERSION,
            )
        entry: LogEntry = decode_json(data, cast(Any, LogEntry))
        return entry
    except UNDECODABLE as error:
        raise CorruptStateError(f"{path}: not an entry of a sink's log: {error}", path=path, reason=str(error)) from error


@dataclass(slots=True)
class SinkSettings:
    """What a sink's operators share; the sink id may be set after they were made, until the plan is shipped."""

    path: str
    """The sink's own storage root: a folder or a URL."""
    sink_id: str
    file_size_max: int
    """Bytes of rows in memory, after which a file is closed."""
    open_storage: Callable[[str], Storage] | None = None
    """None: beside the state directory in a worker, by the path's own form elsewhere."""

    def storage(self, beside: Storage | None = None) -> Storage:
        """The sink's storage. `beside`: the storage whose reach it shares; None: whatever the path names."""
        if self.open_storage is not None:
            return self.open_storage(self.path)
        return open_output(self.path, beside)


@dataclass(frozen=True, slots=True)
class SinkPaths:
    """Paths of one sink, relative to its root."""

    sink_id: str

    @property
    def folder(self) -> str:
        return f"{ROOT_FOLDER}/{quote(self.sink_id, safe='')}"

    def log(self, sequence: int) -> str:
        return f"{self.folder}/log/{sequence:012d}.json"

    @property
    def staged_folder(self) -> str:
        return f"{self.folder}/staged"

    def staged(self, name: str) -> str:
        """Where a writer puts its bytes."""
        return f"{self.staged_folder}/{name}"

    def data(self, name: str) -> str:
        """Where readers find a committed file, for good: it is linked before the commit, and never moves."""
        return f"{self.folder}/data/{name}"

    def published(self, name: str) -> str:
        """The name for readers that know nothing of us."""
        return name


@dataclass(frozen=True, slots=True)
class FileName:
    """What the name of a staged file says; names are never used twice."""

    sink_id: str
    job: str
    """`job_tag` of the job id."""
    attempt: int
    subtask: int
    first_checkpoint: int
    """The lowest checkpoint id that can refer to the file."""
    nonce: str
    sequence: int

    @property
    def text(self) -> str:
        sink = quote(self.sink_id, safe="")
        writer = f"a{self.attempt}-s{self.subtask}-c{self.first_checkpoint}"
        return f"part-{sink}-{self.job}-{writer}-{self.nonce}-{self.sequence:05d}.parquet"


_NAME = re.compile(r"part-(.+)-([0-9a-f]{8})-a(\d+)-s(\d+)-c(\d+)-([^-]+)-(\d+)\.parquet")


def job_tag(job_id: str) -> str:
    """8 hex digits that stand for a job in file names."""
    return xxhash.xxh3_64_hexdigest(job_id.encode())[:8]


def nonce_tag(nonce: str) -> str:
    """A nonce as part of a file name: letters and digits only."""
    return nonce if nonce.isalnum() and nonce.isascii() else xxhash.xxh3_64_hexdigest(nonce.encode())


def parse_name(name: str) -> FileName | None:
    """None for a name that is not ours."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    sink, job, attempt, subtask, checkpoint, nonce, sequence = match.groups()
    return FileName(sink, job, int(attempt), int(subtask), int(checkpoint), nonce, int(sequence))
