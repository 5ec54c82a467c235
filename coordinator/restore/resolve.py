"""Which snapshot a submission names: the newest, the newest that can be read, one by its id, or one by its path. Reads only."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from holdfast.barriers.jobgraph import Submission
from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.ha.recorded_job import (
    CheckpointFact,
    RecordedCheckpoint,
    RecordedJob,
    decode_decision,
    derive_descent,
    derive_latest,
)
from holdfast.coordinator.ha.records import CHECKPOINT_DIGITS_MAX, AbortRecord, RestorePoint, SavepointRecord
from holdfast.coordinator.ha.snapshots import check_files, load_snapshot
from holdfast.coordinator.ownership.ownership import derive_releases, find_leftovers
from holdfast.coordinator.restore.preflight import SkippedFinding
from holdfast.statebackends.errors import (
    CorruptStateError,
    InvalidConfigError,
    JobExistsError,
    NotFoundError,
    ObjectMissingError,
    RestoreError,
)
from holdfast.statebackends.snapshot.parts import read_metadata_file
from holdfast.statebackends.storage import is_absolute_folder
from holdfast.statebackends.storage.port import Flow

LATEST = "latest"
LATEST_READABLE = "latest-readable"

FALLBACK_HINT = (
    "restore='latest-readable' with allow_output_repeat=True goes back to the newest one that can be read, and says what it skips"
)

_KINDS = {
    "checkpoint": CheckpointKind.CHECKPOINT,
    "savepoint": CheckpointKind.SAVEPOINT,
    "stop_savepoint": CheckpointKind.STOP_SAVEPOINT,
}
"""Kinds as a snapshot's metadata names them."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a submission starts from."""

    base: RestorePoint | None
    """None: empty."""
    skipped: tuple[SkippedFinding, ...] = ()
    """Newer ones that can't be read."""


def is_path(restore: str) -> bool:
    """Neither one of the job's own by a word, nor by its id."""
    return restore not in (LATEST, LATEST_READABLE) and not restore.isdecimal()


def _without_leftovers(job: RecordedJob) -> RecordedJob:
    """The job as it will be once its end has deleted what it does not keep: none of that can be gone on from, deleted or not.

    Nor can a savepoint of its own that it claimed and subsumed: its record stays, for whoever asked for it, and its files don't."""
    leaving = {checkpoint.checkpoint_id for checkpoint in find_leftovers(job)}
    released = _released(job)
    kept = {
        number: checkpoint
        for number, checkpoint in job.checkpoints.items()
        if number not in leaving and checkpoint.folder.rstrip("/") not in released
    }
    return replace(job, checkpoints=kept)


def _released(job: RecordedJob) -> set[str]:
    """Folders of snapshots that the job claimed, and deletes or has deleted."""
    return {point.folder.rstrip("/") for point in derive_releases(job)}


def resolve_snapshot(job: RecordedJob, submission: Submission) -> Flow[Resolved]:
    """What `Submission.restore` names.

    Raises InvalidConfigError, JobExistsError, NotFoundError, RestoreError, CorruptStateError."""
    released = _released(job)
    job = _without_leftovers(job)
    if submission.restore == LATEST_READABLE:
        return (yield from _latest_readable(job, submission, released))
    return Resolved((yield from _resolve(job, submission)))


def _resolve(job: RecordedJob, submission: Submission) -> Flow[RestorePoint | None]:
    restore = submission.restore
    if restore is None:
        if job.result is not None and not submission.fresh:
            raise _ended_error(job, submission.graph.name, job.result.state)
        return _latest(job) if job.is_live and not submission.fresh else None
    if restore == LATEST:
        latest = _latest(job)
        if latest is None:
            raise _nothing_error(job, submission)
        return latest
    if restore.isdecimal():
        return _by_id(job, restore)
    return (yield from _by_path(restore))


def _nothing_error(job: RecordedJob, submission: Submission) -> RestoreError:
    ended = "" if job.result is None else f": it is {job.result.state}, and its checkpoints went with it"
    return RestoreError(
        f"job {submission.graph.name!r} has no completed checkpoint to restore{ended}. "
        "Give the path of a savepoint, or fresh=True to start anew",
        job_id=job.job_id,
    )


def deleted_error(job: RecordedJob, base: RestorePoint) -> NotFoundError:
    """Of a snapshot outside the job's directory that the job goes on from, and that is not there: nothing is damaged.

    Says what can be restored instead."""
    folder = base.folder.rstrip("/")
    others = [
        each.checkpoint_id
        for each in derive_descent(_without_leftovers(job))
        if isinstance(each, RecordedCheckpoint) and each.checkpoint_id != base.checkpoint_id
    ]
    choices = "restore='PATH' names another snapshot, fresh=True starts anew"
    if others:
        kept = ", ".join(map(str, sorted(others)))
        choices = f"The job has kept {kept}: restore={str(max(others))!r} goes on from there. {FALLBACK_HINT}; {choices}"
    return NotFoundError(
        f"job {job.job_id} would go on from checkpoint {base.checkpoint_id}, a {base.kind.value.replace('_', ' ')} at {folder}, "
        f"which was deleted or moved: {folder}/_metadata does not exist. Put it back, or choose. {choices}",
        path=folder,
        job=job.job_id,
        checkpoint=base.checkpoint_id,
        kept=sorted(others),
    )


def _ended_error(job: RecordedJob, name: str, state: str) -> JobExistsError:
    """Says only what can be done: a job that finished kept no checkpoint to go on from."""
    kept = job.with_fact(CheckpointFact.COMPLETED)
    choices = "restore='latest' to go on from its last checkpoint, " if kept else "restore='PATH' to go on from a savepoint, "
    return JobExistsError(
        f"job {name!r} has ended ({state}). Give {choices}or fresh=True to start anew", job_id=job.job_id, state=state
    )


def _latest(job: RecordedJob) -> RestorePoint | None:
    """The newest recovery point. Raises CorruptStateError when it is unreadable: nobody falls back silently."""
    try:
        return derive_latest(job)
    except CorruptStateError as error:
        raise CorruptStateError(f"{error.message}. {FALLBACK_HINT}", **error.fields) from error


def _latest_readable(job: RecordedJob, submission: Submission, released: Collection[str]) -> Flow[Resolved]:
    """The newest snapshot of the job's line of descent that can be read whole; those that can't are told.

    What the job itself has released is no damage, and not told.

    Raises SnapshotClaimedError when one of them is another job's, CorruptStateError when none can be read."""
    skipped: list[SkippedFinding] = []
    for candidate in derive_descent(job):
        number, folder = candidate.checkpoint_id, candidate.folder
        if folder.rstrip("/") in released:
            continue
        try:
            point = candidate.restore_point() if isinstance(candidate, RecordedCheckpoint) else candidate
            metadata = yield from load_snapshot(folder)
            yield from check_files(metadata, folder, checksums=point.explicit)
        except CorruptStateError as error:
            skipped.append(SkippedFinding(number, folder, error.message))
        else:
            return Resolved(point, tuple(skipped))
    if not skipped:
        raise _nothing_error(job, submission)
    told = "; ".join(f"{each.checkpoint_id}: {each.reason}" for each in skipped)
    raise CorruptStateError(
        f"job {submission.graph.name!r} has no checkpoint that can be read: {told}",
        path=skipped[0].location,
        operator=None,
        reason="unreadable",
        skipped=[each.checkpoint_id for each in skipped],
    )


def _by_id(job: RecordedJob, digits: str) -> RestorePoint:
    checkpoint = job.checkpoints.get(int(digits)) if len(digits) <= CHECKPOINT_DIGITS_MAX else None
    if checkpoint is None or checkpoint.fact not in (CheckpointFact.COMPLETED, CheckpointFact.CLAIMED):
        kept = [entry.checkpoint_id for entry in job.with_fact(CheckpointFact.COMPLETED)]
        raise NotFoundError(
            f"job {job.job_id} has no completed checkpoint {digits}; it has {kept}", job=job.job_id, checkpoint=digits
        )
    return checkpoint.restore_point()


def _by_path(location: str) -> Flow[RestorePoint]:
    """A savepoint's or checkpoint's folder, or its `_metadata`; a pointer to a savepoint is followed."""
    folder = location.rstrip("/").removesuffix("/_metadata")
    if not is_absolute_folder(folder):
        raise InvalidConfigError(
            f"restore={location!r} is neither 'latest', 'latest-readable', nor a checkpoint id, nor an absolute path or URL",
            setting="restore",
        )
    path = f"{folder}/_metadata"
    try:
        decision = decode_decision((yield from read_metadata_file(path)), path)
    except ObjectMissingError:
        decision = None
    if isinstance(decision, SavepointRecord):
        folder = decision.folder
    elif isinstance(decision, AbortRecord):
        raise RestoreError(f"{folder} is an aborted checkpoint: {decision.reason.value} {decision.message}", path=folder)
    metadata = yield from load_snapshot(folder)
    return RestorePoint(
        checkpoint_id=metadata.checkpoint_id,
        folder=folder,
        timestamp_ms=metadata.trigger_timestamp_ms,
        kind=_KINDS[metadata.kind],
        explicit=True,
    )
