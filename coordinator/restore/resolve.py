"""Flows that resolve the snapshot of a submission: the newest, the newest readable one, or one by its id, label or path.

They also find whether a restore goes back behind output that may be committed, and which job committed it (docs/invariants.md,
I22). They only read, and do not decide whether the snapshot fits the job."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import msgspec

from holdfast.barriers.jobgraph import JobGraph, Submission
from holdfast.barriers.messages import CheckpointKind
from holdfast.barriers.sinks.log import DISCARDS_PROPERTY
from holdfast.coordinator.ha.recorded_job import (
    CheckpointFact,
    RecordedCheckpoint,
    RecordedJob,
    decode_decision,
    derive_descent,
    derive_latest,
)
from holdfast.coordinator.ha.records import AbortRecord, RestorePoint, SavepointRecord, is_job_id
from holdfast.coordinator.ha.snapshots import check_files, load_snapshot
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.ownership.claims import derive_releases, find_leftovers
from holdfast.coordinator.ownership.labels import RESTORE_PREFIX, find_kept, find_label, read_labels
from holdfast.coordinator.restore.preflight import SkippedFinding
from holdfast.statebackends.decoding import UNDECODABLE
from holdfast.statebackends.errors import (
    CorruptStateError,
    InvalidConfigError,
    JobExistsError,
    NotFoundError,
    ObjectMissingError,
    OutputMayRepeatError,
    RestoreError,
)
from holdfast.statebackends.layout import CHECKPOINT_DIGITS_MAX, JobPaths, folder_of_snapshot, metadata_path
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata
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
    """The snapshot that a submission starts from."""

    base: RestorePoint | None
    """None: it starts empty."""
    skipped: tuple[SkippedFinding, ...] = ()
    """Newer snapshots that can't be read."""


def is_path(restore: str) -> bool:
    """Whether `restore` is a path: none of the words for the job's own checkpoints, no id and no label."""
    return not (restore in (LATEST, LATEST_READABLE) or restore.isdecimal() or restore.startswith(RESTORE_PREFIX))


def _without_leftovers(job: RecordedJob, labelled: Collection[int] = ()) -> RecordedJob:
    """The job without the checkpoints that its end deletes: they can't be restored, deleted already or not.

    `labelled`: those that a label keeps.

    Savepoints of its own that it claimed and subsumed are left out, too: their records stay, for queries, and their files don't."""
    leaving = {checkpoint.checkpoint_id for checkpoint in find_leftovers(job)}.difference(labelled)
    released = _released(job)
    kept = {
        number: checkpoint
        for number, checkpoint in job.checkpoints.items()
        if number not in leaving and checkpoint.folder.rstrip("/") not in released
    }
    return replace(job, checkpoints=kept)


def _released(job: RecordedJob) -> set[str]:
    """Folders of claimed snapshots that the job deletes or has deleted."""
    return {point.folder.rstrip("/") for point in derive_releases(job)}


def resolve_snapshot(job: RecordedJob, submission: Submission) -> Flow[Resolved]:
    """The snapshot that `Submission.restore` names.

    Raises InvalidConfigError, JobExistsError, NotFoundError, RestoreError, CorruptStateError."""
    released = _released(job)
    if submission.restore is not None and (submission.restore.isdecimal() or submission.restore.startswith(RESTORE_PREFIX)):
        job = _without_leftovers(job, (yield from find_kept(job)))
    else:
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
    if restore.startswith(RESTORE_PREFIX):
        known = yield from read_labels(JobPaths(job.job_id), job.labelled)
        return _by_id(job, str(find_label(job.job_id, known, restore.removeprefix(RESTORE_PREFIX)).checkpoint_id))
    return (yield from _by_path(restore))


def _nothing_error(job: RecordedJob, submission: Submission) -> RestoreError:
    ended = "" if job.result is None else f": it is {job.result.state}, and its checkpoints went with it"
    return RestoreError(
        f"job {submission.graph.name!r} has no completed checkpoint to restore{ended}. "
        "Give the path of a savepoint, or fresh=True to start empty",
        job_id=job.job_id,
    )


def deleted_error(job: RecordedJob, base: RestorePoint) -> NotFoundError:
    """Error for a missing snapshot outside the job's directory from which the job would go on; its message has the alternatives."""
    folder = base.folder.rstrip("/")
    others = [
        each.checkpoint_id
        for each in derive_descent(_without_leftovers(job))
        if isinstance(each, RecordedCheckpoint) and each.checkpoint_id != base.checkpoint_id
    ]
    choices = "restore='PATH' names another snapshot, fresh=True starts empty"
    if others:
        kept = ", ".join(map(str, sorted(others)))
        choices = f"The job has kept {kept}: restore={str(max(others))!r} goes on from there. {FALLBACK_HINT}; {choices}"
    return NotFoundError(
        f"job {job.job_id} would go on from checkpoint {base.checkpoint_id}, a {base.kind.value.replace('_', ' ')} at {folder}, "
        f"which was deleted or moved: {metadata_path(folder)} does not exist. Put it back, or choose. {choices}",
        path=folder,
        job=job.job_id,
        checkpoint=base.checkpoint_id,
        kept=sorted(others),
    )


def _ended_error(job: RecordedJob, name: str, state: str) -> JobExistsError:
    """Error with the choices there are: a job that finished may have kept no checkpoint."""
    kept = job.with_fact(CheckpointFact.COMPLETED)
    choices = "restore='latest' to go on from its last checkpoint, " if kept else "restore='PATH' to go on from a savepoint, "
    return JobExistsError(
        f"job {name!r} has ended ({state}). Give {choices}or fresh=True to start empty", job_id=job.job_id, state=state
    )


def _latest(job: RecordedJob) -> RestorePoint | None:
    """The newest recovery point. Raises CorruptStateError if it can't be read: falling back is the user's decision."""
    try:
        return derive_latest(job)
    except CorruptStateError as error:
        raise CorruptStateError(f"{error.message}. {FALLBACK_HINT}", **error.fields) from error


def _latest_readable(job: RecordedJob, submission: Submission, released: Collection[str]) -> Flow[Resolved]:
    """The newest snapshot on the job's line of descent that can be read whole, with the newer ones that can't. Snapshots that the
    job itself has released are passed over.

    Raises SnapshotClaimedError if another job owns one of them, CorruptStateError if none can be read."""
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
    reasons = "; ".join(f"{each.checkpoint_id}: {each.reason}" for each in skipped)
    raise CorruptStateError(
        f"job {submission.graph.name!r} has no checkpoint that can be read: {reasons}",
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
    """The snapshot at a folder or a `_metadata` file; the record of a savepoint is followed to its folder."""
    folder = folder_of_snapshot(location)
    if not is_absolute_folder(folder):
        raise InvalidConfigError(
            f"restore={location!r} is neither 'latest', 'latest-readable', nor a checkpoint id, nor label:NAME, "
            "nor an absolute path or URL",
            setting="restore",
        )
    path = metadata_path(folder)
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


@dataclass(frozen=True, slots=True)
class Rewind:
    """A restore after which output may be written again."""

    restored: int
    committed: int
    """Highest id whose output may have been committed."""
    job_id: str
    """Id of the job that committed it."""
    sinks: tuple[str, ...]
    """Ids of the sinks concerned."""
    skipped: tuple[int, ...] = ()
    """Ids that can't be read."""

    def error(self) -> OutputMayRepeatError:
        named = f" of {', '.join(map(repr, self.sinks))}" if self.sinks else ""
        newer = f"{self.committed} of job {self.job_id}"
        if self.skipped:
            newer += f" (not readable: {', '.join(map(str, self.skipped))})"
        return OutputMayRepeatError(
            f"checkpoint {self.restored} is older than {newer}, whose output is committed: what{named} came after it would be "
            "written again. Restore the newest one, or accept that: allow_output_repeat=True",
            restored=self.restored,
            committed=self.committed,
            sinks=list(self.sinks),
            skipped=list(self.skipped),
        )


def find_rewind(
    job: RecordedJob, resolved: Resolved, metadata: SnapshotMetadata, graph: JobGraph, *, moved: Collection[str] = ()
) -> Flow[Rewind | None]:
    """The committed output that this job would write again; None if there is none.

    `moved`: ids of sinks that write elsewhere than the snapshot's job: output of that job is not theirs. Output that this job
    itself committed counts wherever it was written."""
    base = resolved.base
    assert base is not None
    own = tuple(sorted(set(_sink_ids(graph))))
    if not own and _has_sinks(graph):
        return None
    skipped = tuple(each.checkpoint_id for each in resolved.skipped)
    if metadata.job_id == job.job_id and base.checkpoint_id < job.newest_completed:
        return Rewind(base.checkpoint_id, job.newest_completed, job.job_id, own, skipped)
    since = _completed_since(job, base)
    if since:
        return Rewind(base.checkpoint_id, since, job.job_id, own, skipped)
    shared = tuple(sorted(set(own) & set(_stored_sink_ids(metadata)) - set(moved)))
    if metadata.job_id == job.job_id or not shared or not is_job_id(metadata.job_id):
        return None
    try:
        other = yield from read_job(JobPaths(metadata.job_id))
    except (CorruptStateError, ObjectMissingError):
        return None  # the sinks' own logs refuse it later
    if other.exists and base.checkpoint_id < other.newest_completed:
        return Rewind(base.checkpoint_id, other.newest_completed, other.job_id, shared)
    return None


def _completed_since(job: RecordedJob, base: RestorePoint) -> int:
    """Highest id that this job has completed since it was started from the same snapshot of another job; 0: none."""
    firsts = [
        record.first_checkpoint_id
        for record in job.submissions.values()
        if record.base is not None and record.base.explicit and record.base.folder == base.folder
    ]
    newest = job.newest_completed
    return newest if base.explicit and firsts and newest >= min(firsts) else 0


def _sink_ids(graph: JobGraph) -> Iterator[str]:
    """Ids of sinks whose output can be seen: all but those that discard it."""
    for vertex in graph.vertices:
        for operator in vertex.operators:
            if operator.sink_id and not operator.properties.get(DISCARDS_PROPERTY):
                yield operator.sink_id


def _has_sinks(graph: JobGraph) -> bool:
    return any(operator.sink_id for vertex in graph.vertices for operator in vertex.operators)


def _stored_sink_ids(metadata: SnapshotMetadata) -> Iterator[str]:
    """Ids of the sinks of the job that took the snapshot."""
    if metadata.graph is None:
        return
    try:
        yield from _sink_ids(msgspec.convert(metadata.graph, JobGraph))
    except UNDECODABLE:
        return  # a graph of another version: its sinks are not known
