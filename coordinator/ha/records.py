"""The durable records of a job: each is created once, by put-if-absent, and never changed.

`statebackends/layout.py` has their paths; `recorded_job.py` derives the job from them. No decision is made here."""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

from holdfast.barriers.jobgraph import JobGraph, Submission
from holdfast.barriers.messages import CheckpointKind, FailureReason, SubtaskMetrics
from holdfast.barriers.tunable import SettingValue
from holdfast.coordinator.totals import Totals
from holdfast.statebackends.decoding import UNDECODABLE, decode_json
from holdfast.statebackends.errors import CorruptStateError, UnsupportedVersionError
from holdfast.statebackends.layout import DIRECTORY_FILE, DecisionTag

RECORD_VERSION = 1

R = TypeVar("R", bound=msgspec.Struct)


class RestorePoint(msgspec.Struct, frozen=True):
    """A snapshot that an attempt starts from."""

    checkpoint_id: int
    folder: str
    """Storage-relative folder `<job>/chk-N`, or the absolute location of a savepoint's folder."""
    timestamp_ms: int
    kind: CheckpointKind = CheckpointKind.CHECKPOINT
    explicit: bool = False
    """A user gave its path: its checksums are verified, not only its lengths."""
    claim: str = ""
    """Nonce of the record by which this job owns it (CLAIM), and deletes it once it is subsumed. Empty: the job does not own it."""

    @property
    def is_savepoint(self) -> bool:
        return self.kind.is_savepoint


class LeaderRecord(msgspec.Struct, frozen=True):
    """`leader/<epoch>`: the leader of the job in this epoch, until a higher one exists."""

    epoch: int
    nonce: str
    url: str = ""
    created_ms: int = 0
    version: int = RECORD_VERSION


class OwnerRecord(msgspec.Struct, frozen=True):
    """The job that owns a snapshot: `_owner` in a savepoint's folder, or part of a VoidRecord for a job's checkpoint.

    After an owner has given a snapshot back, the next one writes `_owner-2`, and so on: the highest counts."""

    job_id: str
    """Empty: no job owns it, its user is deleting it."""
    directory: str
    """Nonce of the job's state directory."""
    nonce: str
    created_ms: int = 0
    version: int = RECORD_VERSION
    folder: str = ""
    """Location of the claimed snapshot: a record in another folder came with a copy, and does not count. Empty: not recorded."""
    root: str = ""
    """Location of the job's state directory, whose records tell whether the job still needs the snapshot. Empty: not recorded."""


class LabelRecord(msgspec.Struct, frozen=True):
    """`_label-<n>` in a snapshot's folder, n from 1 without gaps: the highest holds. Who labels a snapshot and who deletes it
    create the next one, so that of the two one comes second, and reads the other's."""

    number: int
    labels: tuple[str, ...]
    """Ascending; a snapshot with any is not deleted."""
    nonce: str
    folder: str
    """The snapshot's own, as its writer names it: a record in another folder came with a copy, and does not count."""
    deleting: bool = False
    """Its deletion has begun: nothing follows."""
    created_ms: int = 0
    version: int = RECORD_VERSION
    given_ms: tuple[int, ...] = ()
    """When each of the labels was given (wall clock). Empty in a record of an older version: `created_ms` stands for all."""

    def times(self) -> dict[str, int]:
        """When each label was given, as far as it is known."""
        given = self.given_ms or (self.created_ms,) * len(self.labels)
        return dict(zip(self.labels, given, strict=True))


class VoidRecord(msgspec.Struct, frozen=True):
    """`submissions/<n>.json` of a number that is no submission. A new leader takes it, so that no older leader can.

    Another job takes a number to claim one of this job's checkpoints, or a snapshot that this job had claimed and does not need: a
    submission of this job that restores it is either recorded before, or reads this record."""

    number: int
    epoch: int
    nonce: str
    void: bool = True
    created_ms: int = 0
    given: int = 0
    """Id of the checkpoint that another job owns from now on; 0: none."""
    owner: OwnerRecord | None = None
    """Its owner; a record without job id: its user is deleting it."""
    version: int = RECORD_VERSION
    returned: str = ""
    """Nonce of a claim that this job has given back; empty: none."""
    config: int | None = None
    """Highest number of a ConfigRecord that the new leader has found: one that an older leader stored later does not count. None:
    it has not looked (another job's, or an older version)."""


class SubmissionRecord(msgspec.Struct, frozen=True):
    """`submissions/<n>.json`: a graph that a driver submitted, and the snapshot that it starts from."""

    number: int
    epoch: int
    submission: Submission
    base: RestorePoint | None
    """Snapshot that the submission starts from while it has no completed checkpoint of its own; None: it starts empty."""
    first_checkpoint_id: int
    """Completed checkpoints from this id on belong to the submission and take precedence over `base`."""
    nonce: str
    created_ms: int = 0
    notes: tuple[str, ...] = ()
    """Notes of the restore: see SubmissionAccepted."""
    version: int = RECORD_VERSION

    @property
    def graph(self) -> JobGraph:
        return self.submission.graph


class ConfigRecord(msgspec.Struct, frozen=True):
    """`config/<n>.json`: settings that a user has changed while a submission runs; n counts up over the life of the job.

    The newest one of the submission holds, unless a VoidRecord says that it came too late. Written before its settings hold."""

    number: int
    epoch: int
    submission: int
    settings: dict[str, SettingValue]
    """Field of JobConfig -> value, of all changes since the submission; the others are as submitted."""
    nonce: str
    created_ms: int = 0
    version: int = RECORD_VERSION


class BackoffRecord(msgspec.Struct, frozen=True):
    """Where the restart strategy of a submission was when an attempt was recorded: a new leader continues there. Times in ms of the
    leader's wall clock."""

    pause_ms: int
    """Pause before the attempt, jitter included: drawn once."""
    until_ms: int
    """Its end."""
    failures_ms: tuple[int, ...] = ()
    """Of `failure_rate`: failures within the interval, ascending."""
    delays: int = 0
    """Of `exponential_delay`: pauses since the last reset."""
    restarts_since_reset: int = 0
    """Of `exponential_delay`: restarts since the last reset, at once or behind a pause."""


class AttemptRecord(msgspec.Struct, frozen=True):
    """`attempts/<a>.json`: written before anything of attempt a is deployed. Subtask i of every vertex runs in slot i."""

    attempt: int
    epoch: int
    submission: int
    graph_hash: str
    slots: int
    restored: RestorePoint | None
    restarts: int
    """Failovers of the submission so far that count for its restart strategy."""
    nonce: str
    created_ms: int = 0
    version: int = RECORD_VERSION
    totals: Totals = {}
    """Counts of the submission's operators at the cut that it begins with."""
    backoff: BackoffRecord | None = None
    """State of a restart strategy that outlasts its leader; None before the first failure, and for other strategies."""


class ClaimRecord(msgspec.Struct, frozen=True):
    """`chk-N/_claim`: id N is taken. Made before the triggers of N are sent."""

    checkpoint_id: int
    epoch: int
    submission: int
    attempt: int
    kind: CheckpointKind
    folder: str
    """Folder of the snapshot's files: `<job>/chk-N`, or a savepoint's absolute location."""
    nonce: str
    drain: bool = False
    trigger_id: str = ""
    created_ms: int = 0
    version: int = RECORD_VERSION
    native: bool = False
    """A savepoint in the state backend's own files."""
    erases: bool = False
    """A key leaves the state at its cut, which nobody records: complete, it is to be the oldest one."""
    erased_below: int = 0
    """Id of the newest completed checkpoint that `erases`, as its leader knew when it took this id: what is older is to go, also
    when that one has been dropped. 0: none; claims of older versions say nothing."""


class AbortRecord(msgspec.Struct, frozen=True, tag=DecisionTag.ABORTED.value, tag_field="decision"):
    """A `_metadata` that says ABORTED."""

    checkpoint_id: int
    reason: FailureReason
    epoch: int
    nonce: str
    message: str = ""
    created_ms: int = 0
    version: int = RECORD_VERSION


class SavepointRecord(msgspec.Struct, frozen=True, tag=DecisionTag.SAVEPOINT.value, tag_field="decision"):
    """A `_metadata` that says COMPLETED and points to the savepoint's folder, whose own `_metadata` is the snapshot."""

    checkpoint_id: int
    folder: str
    kind: CheckpointKind
    timestamp_ms: int
    epoch: int
    nonce: str
    created_ms: int = 0
    version: int = RECORD_VERSION
    totals: Totals = {}
    """Counts of the submission's operators at its cut."""


class ForgettingRecord(msgspec.Struct, frozen=True):
    """`forgotten/<epoch>.json`: where a forgetting of the ended job puts its result, written before that is begun. Nothing in it
    tells of the key."""

    epoch: int
    """By which it has fenced the job: of two results the one with the higher epoch was made of the other, or beside it."""
    nonce: str
    folder: str
    """Location of the savepoint; empty: it writes none."""
    snapshots: tuple[str, ...] = ()
    """Locations of further savepoints that it was given: the same call finds them on record once they are gone."""
    created_ms: int = 0
    version: int = RECORD_VERSION


class ResultRecord(msgspec.Struct, frozen=True):
    """`results/<n>.json`: submission n is over. Written before any checkpoint is dropped."""

    submission: int
    state: str
    """FINISHED, CANCELED or FAILED."""
    epoch: int
    nonce: str
    last_checkpoint_id: int
    """Highest id ever claimed: ids go on from here although the files are gone."""
    newest_completed: int
    """Highest id whose output may have been committed."""
    cause: str = ""
    started_ms: int = 0
    created_ms: int = 0
    metrics: tuple[SubtaskMetrics, ...] = ()
    """The last attempt's counters, as far as workers reported them."""
    version: int = RECORD_VERSION
    totals: Totals = {}
    """Counts of the submission's operators over all attempts, as far as workers reported them."""


class _Version(msgspec.Struct):
    version: int = RECORD_VERSION


def encode_record(record: msgspec.Struct) -> bytes:
    """A record as JSON with its fields in order: equal records have equal bytes."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1)


def decode_record(kind: type[R], content: bytes, path: str) -> R:
    """A record from its bytes. Raises UnsupportedVersionError for a newer version, CorruptStateError for malformed bytes."""
    try:
        try:
            record = decode_json(content, kind)
            version = record.version  # type: ignore[attr-defined]  # each of the kinds has one
        except UNDECODABLE:
            version = decode_json(content, _Version).version
            if version <= RECORD_VERSION:
                raise
        if version > RECORD_VERSION:
            raise UnsupportedVersionError(
                f"{path} has version {version}; this Holdfast reads up to {RECORD_VERSION}",
                path=path,
                version=version,
                supported=RECORD_VERSION,
            )
        return record
    except UNDECODABLE as error:
        raise CorruptStateError(f"{path} can't be decoded: {error}", path=path, reason=str(error)) from error


def decode_nonce(content: bytes) -> str:
    """The state directory's nonce from its file. Raises CorruptStateError for a malformed one."""
    try:
        nonce = content.decode("ascii").strip()
    except UnicodeDecodeError:
        nonce = ""
    if not nonce:
        raise CorruptStateError(f"{DIRECTORY_FILE} holds no name of a state directory", path=DIRECTORY_FILE, reason="not a nonce")
    return nonce


def hash_graph(graph: JobGraph) -> str:
    """32 hex digits over the graph's canonical JSON."""
    return hashlib.blake2b(msgspec.json.encode(graph, order="deterministic"), digest_size=16).hexdigest()


class _Void(msgspec.Struct):
    void: bool = False


def is_void(content: bytes) -> bool:
    """Whether a file of `submissions/` holds a VoidRecord; false for malformed content."""
    try:
        return decode_json(content, _Void).void
    except UNDECODABLE:
        return False


def is_job_id(text: str) -> bool:
    """32 lower-case hex digits."""
    return len(text) == 32 and all(digit in "0123456789abcdef" for digit in text)


def derive_job_id(name: str) -> str:
    """32 hex digits: the job id that belongs to a name."""
    return hashlib.blake2b(name.encode(), digest_size=16, person=b"holdfast-job").hexdigest()
