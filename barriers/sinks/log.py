"""The log of a file sink and what its committer keeps in state: records and paths that committers and coordinator share.

`<sink's path>/_holdfast/<sink id>/log/<sequence>.json` is one sequence of put-if-absent files, of three kinds: a job takes the
sink over, one checkpoint's files are committed, or a file replaces committed ones that have the same rows. All compete for the next
number, so that a takeover and the commits of the owner before it are in one order: after it that owner's next commit fails, without
a lock or a lease; and a merge is of files that are current where it stands. Who commits is for
`holdfast.operators.sinks`; where a restored sink's log is, for `holdfast.coordinator.restore.sink_forks`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast
from urllib.parse import unquote

import msgspec
import xxhash

from holdfast.statebackends.decoding import UNDECODABLE, decode_msgpack, decode_versioned
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.layout import folder_name

LOG_VERSION = 1
MERGE_VERSION = 2
"""Version of entries that replace files: a Holdfast that knows nothing of them refuses a log that has one, by its version."""

SUMMARY_VERSION = 1
SUMMARY_ENTRIES = 1_000
"""Entries of one summary: those of the sequences [k * 1000, (k + 1) * 1000). Part of the format: names follow from it."""
SUMMARY_BYTES_MAX = 64 << 20
"""Bytes of a summary; entries that take more have none, and are read one by one."""

ROOT_FOLDER = "_holdfast"
"""Below a sink's path; readers of plain Parquet skip names that begin with an underscore."""


COMMITTABLES = "committables"
"""Name of the committer's one list state; its entries are `CommitterState`."""

PLACE_PROPERTY = "sink_path"
"""Property of a sink's operators in the job graph: the location of its output, if it has one."""

DISCARDS_PROPERTY = "discards"
"""Property of a sink's operator in the job graph: it makes nothing visible, so that nothing of it can repeat."""

MUTED_PROPERTY = "muted"
"""Property of a writer in the job graph of a branch: it only counts rows, and the sink's state in a snapshot is left to the job
that stored it."""

COMMITTER_SUFFIX = "-committer"
"""Behind the uid of a sink's writer: the uid of its committer."""

FORK_PROPERTY = "sink_fork"
"""Property of a committer in a job graph that was accepted: `SinkFork`, in its JSON form."""


class StagedFile(msgspec.Struct, frozen=True):
    """One data file; the same name in `staged/`, in `data/` and beside the plain readers."""

    name: str
    rows: int


class LogPosition(msgspec.Struct, frozen=True, tag="position", omit_defaults=True):
    """Committer state: how far the log was known, and who owned the sink."""

    version: int
    next_sequence: int
    owner: int
    owner_nonce: str
    owner_job: str
    place: str = ""
    """Location of the log, as of `place_of`; empty: not told, an older Holdfast wrote this."""


class PendingCheckpoint(msgspec.Struct, frozen=True, tag="pending", omit_defaults=True):
    """Committer state: the files of one checkpoint whose commit is not known to be done."""

    checkpoint_id: int
    files: tuple[StagedFile, ...]
    place: str = ""
    """As of `LogPosition`: of the log that they are to be committed to."""

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)


CommitterState: TypeAlias = LogPosition | PendingCheckpoint


def decode_committer_state(entry: bytes, operator: str) -> CommitterState:
    """One entry of the committer's state. Raises CorruptStateError naming the operator."""
    try:
        state: CommitterState = decode_msgpack(entry, cast(Any, CommitterState))
    except UNDECODABLE as error:
        raise CorruptStateError(
            f"sink {operator}: its committables can't be read: {error}", operator=operator, reason=str(error)
        ) from error
    return state


class SinkFork(msgspec.Struct, frozen=True):
    """What the coordinator decided of a sink that begins a new log where it is: written into the graph that is deployed, so that
    it holds for every attempt of the submission."""

    unnamed: str = ""
    """Place that entries of the committer's state are of which name none."""
    ends: tuple[str, ...] = ()
    """Places of logs that are this very job's: what they still have to get is committed there before the new log begins. What was
    staged for any other log is let go of."""


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


class MergeEntry(msgspec.Struct, frozen=True, tag="merge"):
    """One file takes the place of committed ones. It adds no rows and takes none away."""

    version: int
    sequence: int
    owner: int
    owner_nonce: str
    job_id: str
    attempt: int
    checkpoint_id: int
    """Highest one whose files are replaced."""
    file: StagedFile
    """The one to read from here on, at its place before this entry is."""
    size: int
    """Bytes of it."""
    checksum: str
    """`xxh3_128:<hex>` of them."""
    replaced: tuple[StagedFile, ...]
    """In the order of their rows in the new file: those of each are rows [n, n + rows) of it, n those in front. All of one folder,
    one format, one schema; each is current in front of this entry."""
    kept_until_ms: int
    """Wall clock up to which the replaced files stay, for readers that have listed them."""
    writer_nonce: str
    written_ms: int


LogEntry: TypeAlias = OwnerEntry | CommitEntry | MergeEntry


def decode_entry(data: bytes, path: str) -> LogEntry:
    """Raises CorruptStateError, UnsupportedVersionError."""
    supported = (LOG_VERSION, MERGE_VERSION)
    entry: LogEntry = decode_versioned(data, cast(Any, LogEntry), path, supported=supported, what="an entry of a sink's log")
    return entry


class MergePlan(msgspec.Struct, frozen=True):
    """Written in front of a merged file, and deleted behind the files that it replaces: so both are found again."""

    version: int
    name: str
    """Of the merged file."""
    first_sequence: int
    """Number from which on its entry may be, if there is one."""


def decode_plan(data: bytes, path: str) -> MergePlan:
    """Raises CorruptStateError, UnsupportedVersionError."""
    return decode_versioned(data, MergePlan, path, supported=MERGE_VERSION, what="a plan of a merge")


class SummaryHeader(msgspec.Struct, frozen=True):
    """First line of a summary."""

    version: int
    first: int
    """Sequence of its first entry."""
    entries: int
    checksum: str
    """`xxh3_128:<hex>` of all bytes behind this line."""


_ENTRIES: msgspec.json.Decoder[list[LogEntry]] = msgspec.json.Decoder(list[LogEntry])


def _checksum(content: bytes) -> str:
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(content)}"


def encode_summary(first: int, entries: Sequence[bytes]) -> bytes | None:
    """A summary: lines of JSON, a header and then the entries, each with the bytes of its file, so that all writers write the same.
    None for entries that don't fit into one."""
    lines = b"".join(entry + b"\n" for entry in entries)
    if len(lines) > SUMMARY_BYTES_MAX or lines.count(b"\n") != len(entries):
        return None
    header = SummaryHeader(SUMMARY_VERSION, first, len(entries), _checksum(lines))
    return msgspec.json.encode(header) + b"\n" + lines


def decode_summary(content: bytes, first: int) -> list[LogEntry] | None:
    """Entries of a summary; None for one that can't be believed: damaged, or of another version. Entries tell the same."""
    head, _, lines = content.partition(b"\n")
    try:
        header = msgspec.json.decode(head, type=SummaryHeader)
        wanted = SummaryHeader(SUMMARY_VERSION, first, SUMMARY_ENTRIES, _checksum(lines))
        entries = _ENTRIES.decode(b"[" + lines.rstrip(b"\n").replace(b"\n", b",") + b"]") if header == wanted else []
    except UNDECODABLE:
        return None
    sequences = range(first, first + SUMMARY_ENTRIES)
    is_known = all(entry.version in (LOG_VERSION, MERGE_VERSION) for entry in entries)
    is_whole = is_known and [entry.sequence for entry in entries] == [*sequences]
    return entries if is_whole else None


MARKER_SUFFIX = ".in-data"

_STAGED = re.compile(rf"(.*/{ROOT_FOLDER}/[^/]+)/staged/((?:[^/=]+=[^/]*/)*[^/]+)", re.DOTALL)
"""Location of a staged file, also of one in the folders of a partition."""


@dataclass(frozen=True, slots=True)
class SinkPaths:
    """Paths of one sink, relative to its root."""

    sink_id: str
    in_place: bool = False
    """Writers put their bytes in `data` at once, behind a marker: a link from `staged` would be a copy."""

    @property
    def folder(self) -> str:
        return f"{ROOT_FOLDER}/{folder_name(self.sink_id)}"

    def log(self, sequence: int) -> str:
        return f"{self.folder}/log/{sequence:012d}.json"

    @property
    def summaries_folder(self) -> str:
        """Beside the log's folder, not in it: older versions take the last name there for the last entry."""
        return f"{self.folder}/summaries"

    def summary(self, first: int) -> str:
        return f"{self.summaries_folder}/{first:012d}.jsonl"

    @property
    def staged_folder(self) -> str:
        return f"{self.folder}/staged"

    def staged(self, name: str) -> str:
        """Where a writer puts its bytes."""
        return f"{self.staged_folder}/{name}"

    def marker(self, name: str) -> str:
        """Says, where a link is a copy, that a writer put its bytes where readers find them, and that they may not be committed."""
        return f"{self.staged(name)}{MARKER_SUFFIX}"

    def data(self, name: str) -> str:
        """Where readers find a committed file, for good: it is linked before the commit, and never moves."""
        return f"{self.folder}/data/{name}"

    @property
    def merges_folder(self) -> str:
        """Plans of merges that are not over."""
        return f"{self.folder}/merges"

    def merge(self, name: str) -> str:
        """Plan of a merged file."""
        return f"{self.merges_folder}/{name.rpartition('/')[2]}.json"

    def published(self, name: str) -> str:
        """The name for readers that know nothing of us."""
        return name


def place_of(path: str, sink_id: str) -> str:
    """Where the log of a sink is, and what it stages and commits: a location of its own."""
    return f"{path.rstrip('/')}/{SinkPaths(sink_id).folder}"


def split_place(place: str) -> tuple[str, str]:
    """(path, sink id) of a `place_of`."""
    path, _, name = place.rpartition(f"/{ROOT_FOLDER}/")
    return path or "/", unquote(name)


def place_of_staged(location: str) -> str:
    """The place that a staged file at a location is of; empty for any other file."""
    found = _STAGED.fullmatch(location)
    return found[1] if found is not None else ""


def split_staged(location: str) -> tuple[str, str] | None:
    """(place, name) of a staged file at a location; None for any other file."""
    found = _STAGED.fullmatch(location)
    return (found[1], found[2]) if found is not None else None
