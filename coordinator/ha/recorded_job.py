"""CORE: the recorded job: its facts, derived from the objects in its directory alone by pure functions.

No fact comes from a leader's memory: a recovery derives the same facts from the same objects, whenever it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias, assert_never

import msgspec

from holdfast.barriers.jobgraph import JobConfig
from holdfast.barriers.messages import CheckpointKind
from holdfast.barriers.tunable import apply_settings
from holdfast.coordinator.ha.records import (
    AbortRecord,
    AttemptRecord,
    ClaimRecord,
    ConfigRecord,
    OwnerRecord,
    RestorePoint,
    ResultRecord,
    SavepointRecord,
    SubmissionRecord,
)
from holdfast.coordinator.ha.shared_state import shared_handles
from holdfast.coordinator.totals import COUNTERS_PROPERTY, Totals, decode_totals
from holdfast.statebackends.decoding import UNDECODABLE, decode_json
from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError, SnapshotClaimedError
from holdfast.statebackends.handles import FileHandle
from holdfast.statebackends.layout import (
    METADATA_NAME,
    DecisionTag,
    JobPaths,
    checkpoint_name,
    decode_decision_tag,
    metadata_path,
    shared_name,
    writer_of,
)
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, decode_metadata


class CheckpointFact(StrEnum):
    """State of the register of one id."""

    UNDECIDED = "undecided"
    """Claimed and not decided: pending, or left behind by a lost leader."""
    COMPLETED = "completed"
    ABORTED = "aborted"
    CLAIMED = "claimed"
    """Completed, and owned by another job, which deletes it."""
    ORPHANED = "orphaned"
    """Files without a claim, such as the rest of a deletion; or a snapshot that its user is deleting."""


class Completed(msgspec.Struct, frozen=True):
    """A `_metadata` that is a snapshot itself."""

    checkpoint_id: int
    timestamp_ms: int
    size: int = 0
    """Bytes of state, those shared with its base included, and of in-flight data."""
    shared: tuple[FileHandle, ...] = ()
    """Files that other checkpoints refer to, too, or may later."""
    totals: Totals = {}
    """Counts of its submission's operators at its cut."""
    in_flight_size: int = 0
    """Bytes of in-flight data; 0 for a checkpoint without."""

    @property
    def new_size(self) -> int:
        """Bytes that were written for it; all others are its base's."""
        writers = ((writer_of(handle.path.rpartition("/")[2]), handle.length) for handle in self.shared)
        return self.size - sum(length for writer, length in writers if writer != self.checkpoint_id)


class Unreadable(msgspec.Struct, frozen=True):
    """A `_metadata` that exists and can't be decoded. It counts as COMPLETED: its output may be committed."""

    reason: str


Decision: TypeAlias = Completed | SavepointRecord | AbortRecord | Unreadable


_SNAPSHOT_START = b'{"format":'


def decode_decision(
    content: bytes, path: str = METADATA_NAME, decode: Callable[[bytes, str], SnapshotMetadata] = decode_metadata
) -> Decision:
    """Decision on an id; never raises. Content of any other kind counts as a damaged snapshot.

    `decode`: replaces `decode_metadata`, for a caller that keeps its result."""
    if content.startswith(_SNAPSHOT_START):
        try:
            metadata = decode(content, path)
        except CorruptStateError as error:
            return Unreadable(error.message)
        shared = shared_handles(state for operator in metadata.operators for state in operator.subtasks)
        totals = decode_totals(metadata.properties.get(COUNTERS_PROPERTY, "{}"))
        in_flight = sum(channel.part.length for channel in metadata.in_flight)
        size = metadata.size + in_flight
        return Completed(metadata.checkpoint_id, metadata.trigger_timestamp_ms, size, shared, totals, in_flight)
    try:
        match decode_decision_tag(content):
            case DecisionTag.ABORTED:
                return decode_json(content, AbortRecord)
            case DecisionTag.SAVEPOINT:
                return decode_json(content, SavepointRecord)
            case other:
                return Unreadable(f"{path} is neither a snapshot nor a decision: {other!r}")
    except UNDECODABLE as error:
        return Unreadable(f"{path}: {error}")


class RecordedCheckpoint(msgspec.Struct, frozen=True):
    """One id, as its folder has it."""

    checkpoint_id: int
    claim: ClaimRecord | None
    decision: Decision | None
    owner: str = ""
    """Id of the other job that claimed it; empty: none."""
    is_disposed: bool = False
    """Its user is deleting it."""

    @property
    def fact(self) -> CheckpointFact:
        if self.owner:
            return CheckpointFact.CLAIMED
        if self.claim is None or self.is_disposed:
            return CheckpointFact.ORPHANED
        match self.decision:
            case None:
                return CheckpointFact.UNDECIDED
            case AbortRecord():
                return CheckpointFact.ABORTED
            case Completed() | SavepointRecord() | Unreadable():
                return CheckpointFact.COMPLETED
            case decision:
                assert_never(decision)

    @property
    def folder(self) -> str:
        """Folder of the snapshot's files; empty without a claim."""
        return self.claim.folder if self.claim is not None else ""

    @property
    def kind(self) -> CheckpointKind:
        return self.claim.kind if self.claim is not None else CheckpointKind.CHECKPOINT

    @property
    def is_aborted(self) -> bool:
        """The id is decided as ABORTED."""
        return self.fact is CheckpointFact.ABORTED

    @property
    def is_recovery_point(self) -> bool:
        """The job may recover from it, or could before another job claimed it: completed, and not a plain savepoint."""
        return self.fact in (CheckpointFact.COMPLETED, CheckpointFact.CLAIMED) and self.kind is not CheckpointKind.SAVEPOINT

    def restore_point(self) -> RestorePoint:
        """The checkpoint as a restore point. Raises CorruptStateError if its decision can't be read, SnapshotClaimedError if
        another job owns it: falling back to an older one is the user's decision."""
        if self.owner:
            raise SnapshotClaimedError(
                f"checkpoint {self.checkpoint_id} was claimed by job {self.owner}, which deletes it", owner=self.owner, path=""
            )
        assert self.claim is not None
        if isinstance(self.decision, Unreadable):
            path = metadata_path(self.claim.folder)
            raise CorruptStateError(
                f"checkpoint {self.checkpoint_id} is unreadable: {self.decision.reason}", path=path, reason=self.decision.reason
            )
        assert isinstance(self.decision, Completed | SavepointRecord)
        return RestorePoint(
            checkpoint_id=self.checkpoint_id,
            folder=self.claim.folder,
            timestamp_ms=self.decision.timestamp_ms,
            kind=self.claim.kind,
        )


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """Everything that the job's directory holds, sorted by number."""

    job_id: str
    epochs: tuple[int, ...]
    submissions: Mapping[int, SubmissionRecord]
    attempts: Mapping[int, AttemptRecord]
    results: Mapping[int, ResultRecord]
    checkpoints: Mapping[int, RecordedCheckpoint]
    last_submission: int = 0
    """Highest number of a submission or of a VoidRecord."""
    shared: tuple[str, ...] = ()
    """Names of all files in the folder of shared files."""
    given: Mapping[int, OwnerRecord] = field(default_factory=dict)
    """Checkpoint id -> the other job that claimed it, or its user, who is deleting it."""
    returned: frozenset[str] = frozenset()
    """Nonces of claims that the job has given back."""
    voids: frozenset[int] = frozenset()
    """Numbers of VoidRecords: no submission has them."""
    configs: Mapping[int, ConfigRecord] = field(default_factory=dict)
    """The newest ones, back to the one that holds."""
    last_config: int = 0
    """Highest number of a ConfigRecord, 0 for none."""
    labelled: tuple[int, ...] = ()
    """Ids that may have labels: the registers beside them tell."""
    seals: Mapping[int, int] = field(default_factory=dict)
    """Epoch of a leader that took the job over -> highest number of a ConfigRecord that it found."""

    @property
    def exists(self) -> bool:
        return bool(self.submissions)

    @property
    def newest_submission(self) -> SubmissionRecord | None:
        return self.submissions[max(self.submissions)] if self.submissions else None

    @property
    def result(self) -> ResultRecord | None:
        """Result of the newest submission; None while the job is live."""
        return self.results.get(max(self.submissions)) if self.submissions else None

    @property
    def is_live(self) -> bool:
        return self.exists and self.result is None

    @property
    def newest_attempt(self) -> AttemptRecord | None:
        return self.attempts[max(self.attempts)] if self.attempts else None

    @property
    def last_checkpoint_id(self) -> int:
        """Highest id that was ever claimed, 0 for none."""
        known = [*self.checkpoints, *(result.last_checkpoint_id for result in self.results.values())]
        known.extend(record.first_checkpoint_id - 1 for record in self.submissions.values())
        return max(known, default=0)

    @property
    def newest_completed(self) -> int:
        """Highest id whose output may have been committed, 0 for none."""
        completed = [number for number, checkpoint in self.checkpoints.items() if checkpoint.is_recovery_point]
        completed.extend(result.newest_completed for result in self.results.values())
        return max(completed, default=0)

    def with_fact(self, fact: CheckpointFact) -> tuple[RecordedCheckpoint, ...]:
        """Checkpoints of which the fact holds, by id."""
        return tuple(self.checkpoints[number] for number in sorted(self.checkpoints) if self.checkpoints[number].fact is fact)


def is_late(record: ConfigRecord, seals: Mapping[int, int]) -> bool:
    """Whether a leader stored it behind the back of a newer one, which leads the job without it. `seals`: see RecordedJob."""
    return any(epoch > record.epoch and found < record.number for epoch, found in seals.items())


def find_config(job: RecordedJob, submission: SubmissionRecord) -> ConfigRecord | None:
    """The record that holds for a submission; None: its settings are as submitted."""
    counted = [each for each in job.configs.values() if each.submission == submission.number and not is_late(each, job.seals)]
    return max(counted, key=lambda each: each.number, default=None)


def derive_config(job: RecordedJob, submission: SubmissionRecord) -> JobConfig:
    """Settings that hold for a submission: as submitted, with those that were changed since.

    Raises CorruptStateError for a record with settings that can't hold."""
    newest = find_config(job, submission)
    if newest is None:
        return submission.graph.config
    try:
        return apply_settings(submission.graph.config, newest.settings)
    except InvalidConfigError as error:
        path = JobPaths(job.job_id).config(newest.number)
        raise CorruptStateError(f"{path} has settings that can't hold: {error.message}", path=path, reason=error.message) from error


def derive_checkpoint(checkpoint_id: int, claim: ClaimRecord | None, metadata: bytes | None) -> RecordedCheckpoint:
    """The register of one id from its two objects."""
    path = metadata_path(checkpoint_name(checkpoint_id))
    return RecordedCheckpoint(checkpoint_id, claim, None if metadata is None else decode_decision(metadata, path))


def derive_recovery_point(job: RecordedJob, submission: SubmissionRecord) -> RestorePoint | None:
    """Restore point of a failover of `submission`: its newest completed checkpoint, else its base; None: it starts empty.

    Raises CorruptStateError if the newest one can't be read: falling back is the user's decision."""
    own = [
        checkpoint
        for number, checkpoint in job.checkpoints.items()
        if checkpoint.is_recovery_point and number >= submission.first_checkpoint_id
    ]
    if not own:
        return _as_owned(job, submission.base)
    return max(own, key=lambda checkpoint: checkpoint.checkpoint_id).restore_point()


def _as_owned(job: RecordedJob, base: RestorePoint | None) -> RestorePoint | None:
    """Base of a submission, without the claim if the job has given it back."""
    if base is None or base.claim not in job.returned:
        return base
    return msgspec.structs.replace(base, claim="")


def derive_latest(job: RecordedJob) -> RestorePoint | None:
    """Meaning of `restore="latest"`: the point from which the newest submission, ended or not, would recover.

    None if it has ended and dropped the checkpoints that it completed after its base: the base is not its latest."""
    submission, result = job.newest_submission, job.result
    if submission is None:
        return None
    point = derive_recovery_point(job, submission)
    has_dropped = result is not None and result.newest_completed >= submission.first_checkpoint_id
    return None if has_dropped and point == _as_owned(job, submission.base) else point


def derive_descent(job: RecordedJob) -> Iterator[RecordedCheckpoint | RestorePoint]:
    """Line of descent of the newest submission, newest first: its own recovery points, those of the submission whose checkpoint it
    was started from, and so on, up to a snapshot given by its path. Checkpoints on other lines of the job are left out."""
    submission = job.newest_submission
    below: int | None = None
    while submission is not None:
        for number in sorted(job.checkpoints, reverse=True):
            entry = job.checkpoints[number]
            in_reach = number >= submission.first_checkpoint_id and (below is None or number <= below)
            if in_reach and entry.is_recovery_point:
                yield entry
        base = _as_owned(job, submission.base)
        if base is None:
            return
        if base.explicit:
            yield base
            return
        below = base.checkpoint_id
        earlier = [
            each for each in job.submissions.values() if each.number < submission.number and each.first_checkpoint_id <= below
        ]
        submission = max(earlier, key=lambda each: each.number, default=None)


def derive_finishing(job: RecordedJob, submission: SubmissionRecord) -> int:
    """Id of the completed final checkpoint or stop-savepoint that ends `submission`: its tasks only commit and finish. 0: none."""
    ending = (CheckpointKind.FINAL, CheckpointKind.STOP_SAVEPOINT)
    ids = [
        number
        for number, checkpoint in job.checkpoints.items()
        if checkpoint.is_recovery_point and checkpoint.kind in ending and number >= submission.first_checkpoint_id
    ]
    return max(ids, default=0)


def derive_abandoned_stop(job: RecordedJob, submission: SubmissionRecord) -> bool:
    """Whether a stop-with-savepoint of the newest attempt was aborted: sources may have stopped, so the job must fail over.

    The leader that stored ABORTED may have died before it failed the job over."""
    newest = job.newest_attempt
    for number, checkpoint in job.checkpoints.items():
        decision = checkpoint.decision
        if (
            number >= submission.first_checkpoint_id
            and checkpoint.claim is not None
            and checkpoint.claim.kind is CheckpointKind.STOP_SAVEPOINT
            and isinstance(decision, AbortRecord)
            and newest is not None
            and newest.attempt <= checkpoint.claim.attempt
        ):
            return True
    return False


def derive_leftovers(job: RecordedJob) -> tuple[RecordedCheckpoint, ...]:
    """Ids to delete of a job that has ended and keeps no checkpoint: all but savepoints, which are their user's.

    Ids above the result's last are left out: they were taken for a new start of the job, and are the id counter."""
    last = job.result.last_checkpoint_id if job.result is not None else 0
    return tuple(
        checkpoint
        for number, checkpoint in sorted(job.checkpoints.items())
        if number <= last
        and checkpoint.fact is not CheckpointFact.CLAIMED
        and (checkpoint.fact is not CheckpointFact.COMPLETED or not checkpoint.kind.is_savepoint)
    )


def derive_garbage(job: RecordedJob) -> tuple[RecordedCheckpoint, ...]:
    """Ids whose folders can be deleted: orphans, and aborted ids below the newest completed one.

    Aborted ids above it keep claim and decision: they keep a stale leader from claiming them again, and are the id counter."""
    newest = max((number for number, checkpoint in job.checkpoints.items() if checkpoint.is_recovery_point), default=0)
    return tuple(
        checkpoint
        for number, checkpoint in sorted(job.checkpoints.items())
        if checkpoint.fact is CheckpointFact.ORPHANED or (checkpoint.fact is CheckpointFact.ABORTED and number < newest)
    )


def derive_shared_garbage(job: RecordedJob) -> tuple[str, ...]:
    """Names of shared files that no checkpoint refers to, now or later.

    A checkpoint refers to its own files and to its base's, and each later base is completed: a file of a decided id that no
    completed one names stays unused. An unreadable checkpoint may refer to any file of its time: these stay."""
    needed: set[str | None] = set()
    unreadable, last = 0, job.last_checkpoint_id
    for number, checkpoint in job.checkpoints.items():
        if checkpoint.fact is CheckpointFact.UNDECIDED:
            last = min(last, number - 1)
        elif checkpoint.fact is CheckpointFact.COMPLETED and isinstance(checkpoint.decision, Completed):
            needed.update(shared_name(handle.path) for handle in checkpoint.decision.shared)
        elif checkpoint.fact is CheckpointFact.COMPLETED and isinstance(checkpoint.decision, Unreadable):
            # also a savepoint, which shares nothing: its decision, which would prove that, can't be read
            unreadable = max(unreadable, number)
    writers = ((name, writer_of(name)) for name in job.shared if name not in needed)
    return tuple(name for name, writer in writers if writer is not None and unreadable < writer <= last)


def keeps_checkpoints(job_state: str, config: JobConfig) -> bool:
    """Whether retained checkpoints outlive the job. FINISHED and CANCELED keep them if that is set; FAILED always does."""
    match job_state:
        case "FINISHED":
            return config.retain_on_finish
        case "CANCELED":
            return config.retention_on_cancel == "retain"
        case _:
            return True
