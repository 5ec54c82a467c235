"""Flows that claim, give back and delete snapshots that are not a job's own checkpoints (claim mode CLAIM).

Ownership is one conditional create. In a savepoint's folder it is that of `_owner` (`_owner-2` and so on, after an owner gave it
back). For a checkpoint in its job's directory it is that of the next record of that job's submissions, so that the job can't be
started from there unnoticed. A job that finds another owner's record is refused.

A claimed snapshot is deleted once the claiming submission's own checkpoints have subsumed it: no restore needs it then. A deletion
begins with `_metadata` and ends with `_owner`: after a crash the rest is still owned. Both are derived from records, so that a new
leader completes what its predecessor left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.ha.recorded_job import (
    CheckpointFact,
    Completed,
    RecordedCheckpoint,
    RecordedJob,
    Unreadable,
    decode_decision,
    derive_leftovers,
    derive_shared_garbage,
    keeps_checkpoints,
)
from holdfast.coordinator.ha.records import (
    OwnerRecord,
    RestorePoint,
    SubmissionRecord,
    VoidRecord,
    decode_nonce,
    decode_record,
    encode_record,
    is_job_id,
)
from holdfast.coordinator.ha.retention import Retention
from holdfast.coordinator.ha.snapshots import rebase
from holdfast.coordinator.ha.store import discard_shared, drop_checkpoint, put_once, read_job, read_optional, read_submission
from holdfast.coordinator.ownership.labels import Mark, begin_deletion, is_of_folder, kept_error, read_register
from holdfast.statebackends.errors import (
    CorruptStateError,
    InvalidConfigError,
    NotFoundError,
    ObjectMissingError,
    SnapshotClaimedError,
    StorageUnavailableError,
)
from holdfast.statebackends.layout import (
    DIRECTORY_FILE,
    JobPaths,
    claim_path,
    describe_absence,
    metadata_path,
    owner_name,
    parse_checkpoint_name,
    parse_owner_name,
    shared_name,
)
from holdfast.statebackends.snapshot.parts import read_metadata_file
from holdfast.statebackends.storage import is_absolute_folder
from holdfast.statebackends.storage.flows import delete_files
from holdfast.statebackends.storage.port import DeleteFile, DeleteFolder, Flow, ListFiles, ListFolder, StatFile

STARTING_MS_MAX = 600_000
"""After this time a claim without a recorded submission counts as cut off. A claimant that goes on even then is fenced."""


def find_leftovers(job: RecordedJob) -> tuple[RecordedCheckpoint, ...]:
    """Checkpoints that the end of a job drops and that are not deleted yet; none while a submission is live, or if it keeps
    them."""
    record, result = job.newest_submission, job.result
    if record is None or result is None:
        return ()
    kept = keeps_checkpoints(result.state, record.submission.graph.config)
    return () if kept else derive_leftovers(job)


def newest_kept(job: RecordedJob) -> RecordedCheckpoint | None:
    """The newest snapshot that a job goes back to; of one whose end drops its checkpoints: its stop-savepoint, or the newest
    checkpoint that a label may keep."""
    record, result = job.newest_submission, job.result
    points = [each for each in job.with_fact(CheckpointFact.COMPLETED) if each.is_recovery_point]
    if record is not None and result is not None and not keeps_checkpoints(result.state, record.submission.graph.config):
        # stop-savepoints of earlier submissions are behind this one's output, and may be claimed and deleted
        points = [
            each
            for each in points
            if (each.checkpoint_id >= record.first_checkpoint_id if each.kind.is_savepoint else each.checkpoint_id in job.labelled)
        ]
    return max(points, key=lambda each: each.checkpoint_id, default=None)


def derive_releases(job: RecordedJob) -> tuple[RestorePoint, ...]:
    """Claimed snapshots that have been subsumed: deleted, being deleted, or left by a lost leader. In the order of submissions."""
    found: dict[str, RestorePoint] = {}
    for record in job.submissions.values():
        claim = record.base.claim if record.base is not None else ""
        if record.base is not None and claim and claim not in job.returned and _is_subsumed(job, record):
            found[claim] = record.base
    return tuple(found.values())


def _is_subsumed(job: RecordedJob, record: SubmissionRecord) -> bool:
    """Whether the submission has as many checkpoints of its own as are retained, or has ended and dropped them, or a later one was
    started from one of them."""
    later = [other for other in job.submissions.values() if other.number > record.number]
    is_own = _own_ids(job, record)
    completed = job.with_fact(CheckpointFact.COMPLETED)
    points = [each for each in completed if each.is_recovery_point and is_own(each.checkpoint_id)]
    if any(isinstance(point.decision, Unreadable) for point in points):
        return False  # a restore that goes back behind it may need the claimed snapshot
    config = record.graph.config
    if sum(point.kind is not CheckpointKind.STOP_SAVEPOINT for point in points) >= config.retained_checkpoints:
        return True
    if any(other.base is not None and not other.base.explicit and is_own(other.base.checkpoint_id) for other in later):
        return True
    result = job.results.get(record.number)
    if result is None or keeps_checkpoints(result.state, config):
        return False
    return is_own(result.newest_completed)


def _own_ids(job: RecordedJob, record: SubmissionRecord) -> Callable[[int], bool]:
    """Predicate: whether an id is of this submission."""
    stop = min((other.first_checkpoint_id for other in job.submissions.values() if other.number > record.number), default=None)
    return lambda number: number >= record.first_checkpoint_id and (stop is None or number < stop)


def refuse_to_return(job: RecordedJob, claim: str, age_ms: int) -> str:
    """Why a job keeps a snapshot that it claimed `age_ms` ago; empty: it gives it back, since it ended before it had a checkpoint
    of its own, or was started again without it."""
    holders = [record for record in job.submissions.values() if record.base is not None and record.base.claim == claim]
    if not holders and age_ms < STARTING_MS_MAX:
        return "its job may be starting just now"
    if job.is_live and job.newest_submission in holders:
        return "its job runs, or goes on from it when it is started again"
    for record in holders:
        is_own = _own_ids(job, record)
        if any(each.is_recovery_point and is_own(number) for number, each in job.checkpoints.items()):
            return "its job has checkpoints of its own, which replace it"
        if _is_subsumed(job, record):
            return "its job has replaced it, and deletes it"
    return ""


def refuse_to_give(job: RecordedJob, checkpoint_id: int) -> str:
    """Why another job may not claim a checkpoint of this one; empty: it may. Checkpoints that may be being deleted are refused."""
    if job.is_live:
        return "its job is running and owns it"
    record = job.newest_submission
    kept = [each for each in job.with_fact(CheckpointFact.COMPLETED) if each.is_recovery_point]
    kept = [each for each in kept if each.kind is not CheckpointKind.STOP_SAVEPOINT]
    retention = Retention.of(record.graph.config) if record is not None else Retention(1)
    times = {each.checkpoint_id: each.decision.timestamp_ms for each in kept if isinstance(each.decision, Completed)}
    dated = [(each.checkpoint_id, times.get(each.checkpoint_id, 0)) for each in kept]
    chosen = retention.choose(dated, max(times.values(), default=0))
    leaving = {each.checkpoint_id for each in find_leftovers(job)}
    if checkpoint_id in leaving or checkpoint_id not in chosen:
        return "its job does not retain it"
    return ""


T = TypeVar("T")

CLAIM_TRIES_MAX = 16
"""Numbers that are tried in a row; each taken one means that the job was started again meanwhile."""


@dataclass(frozen=True, slots=True)
class JobFolder:
    """A checkpoint in the directory of a job."""

    root: str
    """Location of the state directory."""
    job_id: str
    checkpoint_id: int


def job_folder(folder: str) -> JobFolder | None:
    """The job's checkpoint that an absolute location names by its form; None for any other location. Reads nothing."""
    parent, _, name = folder.rstrip("/").rpartition("/")
    root, _, job_id = parent.rpartition("/")
    number = parse_checkpoint_name(name)
    if number is None or not is_job_id(job_id) or not is_absolute_folder(folder):
        return None
    return JobFolder(root, job_id, number)


def check_target(folder: str) -> Flow[None]:
    """Raise InvalidConfigError for an absolute folder in the directory of any job: a job deletes its checkpoints with all files in
    them."""
    names = folder.rstrip("/").split("/")
    for index, name in enumerate(names):
        if index and is_job_id(name):
            place = "/".join(names[: index + 1])
            leaders: list[str] = yield ListFolder(JobPaths(place).leaders)
            if leaders:
                raise InvalidConfigError(
                    f"{folder} lies in the directory of job {name}, which deletes what it does not need: name another folder",
                    path=folder,
                    setting="target",
                )


def find_owner(folder: str) -> Flow[OwnerRecord | None]:
    """Owner of the snapshot at a location; None: it is not claimed. Raises CorruptStateError for a record that can't be read.

    A record of another folder came with a copy, and does not count. It may be the same folder by another name: only a claim, which
    may write, finds that out."""
    _, owner = yield from _newest_owner(folder)
    if owner is not None and owner.folder in ("", folder):
        return owner
    place = job_folder(folder)
    if owner is not None or place is None:
        return None
    job = yield from rebase(read_job(JobPaths(place.job_id)), place.root)
    return job.given.get(place.checkpoint_id)


def _newest_owner(folder: str) -> Flow[tuple[int, OwnerRecord | None]]:
    """Number and record of the newest owner in a snapshot's folder; 0 and None if there is none."""
    names: list[str] = yield ListFolder(folder)
    newest = max((number for number in map(parse_owner_name, names) if number is not None), default=0)
    if not newest:
        return 0, None
    path = f"{folder}/{owner_name(newest)}"
    content = yield from read_optional(path)
    return (newest, decode_record(OwnerRecord, content, path)) if content is not None else (0, None)


def claim_snapshot(base: RestorePoint, mine: OwnerRecord) -> Flow[str]:
    """Claim the snapshot; returns the nonce of the claim, which may be that of an earlier try.

    Raises SnapshotClaimedError if another job owns it or keeps it, CorruptStateError if it was deleted."""
    place = yield from _jobs_own(base.folder)
    if place is not None:
        returned = yield from _returned_claim(base.folder, mine)
        return (yield from rebase(_take_from_job(place, base.folder, mine, returned), place.root))
    yield from check_name(base.folder)
    path, nonce = yield from _become_owner(base.folder, mine)
    if (yield StatFile(metadata_path(base.folder))) is None:
        # Its former owner deleted it just before: only our record is left.
        yield DeleteFile(path)
        gone = metadata_path(base.folder)
        raise CorruptStateError(f"{gone} does not exist: the snapshot was deleted", path=gone, operator=None, reason="missing")
    return nonce


def _become_owner(folder: str, mine: OwnerRecord) -> Flow[tuple[str, str]]:
    """Path and nonce of our owner record: an older one of this job if there is one, else a new one."""
    for _ in range(CLAIM_TRIES_MAX):
        number, existing = yield from _newest_owner(folder)
        path = f"{folder}/{owner_name(max(number, 1))}"
        if existing is not None and (yield from is_of_folder(existing.folder, folder, mine.nonce)):
            if _is_same_job(existing, mine) and not (yield from _has_returned(existing, mine)):
                return path, existing.nonce
            yield from give_back(existing, mine, folder)
        path = f"{folder}/{owner_name(number + 1)}"
        if (yield from put_once(path, encode_record(mine))) == encode_record(mine):
            return path, mine.nonce
    raise SnapshotClaimedError(f"snapshot {folder} can't be claimed: it is being claimed all the time", path=folder, owner="")


def _returned_claim(folder: str, mine: OwnerRecord) -> Flow[str]:
    """Nonce of the claim of a job's checkpoint that has been given back; empty if there is none, or it is this job's.

    Raises SnapshotClaimedError if another job keeps it."""
    owner = yield from find_owner(folder)
    if owner is None or not owner.job_id:
        return ""
    if _is_same_job(owner, mine) and not (yield from _has_returned(owner, mine)):
        return ""
    yield from give_back(owner, mine, folder)
    return owner.nonce


def _is_same_job(existing: OwnerRecord, mine: OwnerRecord) -> bool:
    return (existing.job_id, existing.directory) == (mine.job_id, mine.directory)


def _has_returned(existing: OwnerRecord, mine: OwnerRecord) -> Flow[bool]:
    """Whether this job has given the claim back. Relative paths are in its state directory."""
    if not mine.job_id:
        return False
    return existing.nonce in (yield from read_job(JobPaths(mine.job_id))).returned


def give_back(existing: OwnerRecord, taker: OwnerRecord, folder: str) -> Flow[None]:
    """Record in the owning job's submissions that it owns the snapshot no more. A new start of that job from the snapshot competes
    for the same number, as with a claim of its checkpoints.

    Raises SnapshotClaimedError if the job keeps it, or its records can't be read."""
    yield from _at_owner(existing, folder, _write_return(existing, taker, folder))


def check_returnable(existing: OwnerRecord, folder: str, now_ms: int) -> Flow[None]:
    """Raise SnapshotClaimedError if `give_back` would at `now_ms`, wall clock. Reads only."""
    yield from _at_owner(existing, folder, _read_holder(existing, folder, now_ms))


def _at_owner(existing: OwnerRecord, folder: str, flow: Flow[T]) -> Flow[T]:
    """Run a flow over the state directory of the owning job: the one of relative paths, or the recorded one."""
    if not existing.job_id:
        raise _claimed(existing, folder)
    is_here = (yield from _holds_directory(existing.directory))
    if not is_here and not is_absolute_folder(existing.root):
        raise _claimed(existing, folder, "where its records are is not written down")
    try:
        return (yield from (flow if is_here else rebase(flow, existing.root)))
    except (StorageUnavailableError, InvalidConfigError, CorruptStateError) as error:
        raise _claimed(existing, folder, f"its records can't be read: {error.message}") from error


def _holds_directory(nonce: str) -> Flow[bool]:
    """Whether relative paths are in the state directory of this nonce."""
    content = yield from read_optional(DIRECTORY_FILE)
    return content is not None and decode_nonce(content) == nonce


def _read_holder(existing: OwnerRecord, folder: str, now_ms: int) -> Flow[RecordedJob]:
    """The job that owns a snapshot and does not need it. Paths are relative to its state directory.

    Raises SnapshotClaimedError if the job needs it."""
    if not (yield from _holds_directory(existing.directory)):
        raise _claimed(existing, folder, f"its records are not at {existing.root} any more")
    job = yield from read_job(JobPaths(existing.job_id))
    reason = "" if existing.nonce in job.returned else refuse_to_return(job, existing.nonce, now_ms - existing.created_ms)
    if reason:
        raise _claimed(existing, folder, reason)
    return job


def _write_return(existing: OwnerRecord, taker: OwnerRecord, folder: str) -> Flow[None]:
    for _ in range(CLAIM_TRIES_MAX):
        job = yield from _read_holder(existing, folder, taker.created_ms)
        if existing.nonce in job.returned:
            return
        record = VoidRecord(
            number=job.last_submission + 1,
            epoch=max(job.epochs, default=0),
            nonce=taker.nonce,
            created_ms=taker.created_ms,
            returned=existing.nonce,
        )
        path = JobPaths(existing.job_id).submission(record.number)
        if (yield from put_once(path, encode_record(record), read_submission)) == encode_record(record):
            return
    raise _claimed(existing, folder, "its job is started all the time")


def _claimed(existing: OwnerRecord, folder: str, reason: str = "") -> SnapshotClaimedError:
    why = f" ({reason})" if reason else ""
    return SnapshotClaimedError(f"snapshot {folder} {_whose(existing)}{why}", path=folder, owner=existing.job_id)


def _jobs_own(folder: str) -> Flow[JobFolder | None]:
    """The job's checkpoint at a location, if its records show that there is such a job; else None."""
    place = job_folder(folder)
    if place is None or not (yield from rebase(read_job(JobPaths(place.job_id)), place.root)).exists:
        return None
    return place


def check_name(folder: str) -> Flow[None]:
    """Raise SnapshotClaimedError for a checkpoint of a job by another name than its own, such as a link: an `_owner` in it would
    take it from a job that does not know, and may restore or drop it."""
    if (yield StatFile(claim_path(folder))) is not None and (yield from _jobs_own(folder)) is None:
        raise SnapshotClaimedError(
            f"{folder} is a checkpoint of a job by another name, or a plain copy of one: name it as it lies in its job's "
            "directory, or copy it (holdfast snapshot copy)",
            path=folder,
            owner="",
        )


def check_owner(existing: OwnerRecord, mine: OwnerRecord, folder: str) -> str:
    """The nonce of this job's owner record. Raises SnapshotClaimedError for another job's record."""
    if _is_same_job(existing, mine):
        return existing.nonce
    raise _claimed(existing, folder)


def _whose(existing: OwnerRecord) -> str:
    if not existing.job_id:
        return "is being deleted by its user"
    return (
        f"was claimed by job {existing.job_id}, which deletes it once it has checkpoints of its own: "
        "start from a copy of it (holdfast snapshot copy), or with claim_mode=NO_CLAIM"
    )


def _take_from_job(place: JobFolder, folder: str, mine: OwnerRecord, returned: str) -> Flow[str]:
    """Claim a job's checkpoint by the next number of its submissions. Paths are relative to its state directory.

    `returned`: nonce of a claim that was given back; empty: none."""
    paths = JobPaths(place.job_id)
    for _ in range(CLAIM_TRIES_MAX):
        job = yield from read_job(paths)
        existing = job.given.get(place.checkpoint_id)
        if existing is not None and existing.nonce != returned:
            return check_owner(existing, mine, folder)
        reason = refuse_to_give(job, place.checkpoint_id) if existing is None else ""  # else it is not that job's any more
        if reason and not mine.job_id:
            raise _keeps(folder, place.job_id, reason)
        if reason:
            raise SnapshotClaimedError(
                f"snapshot {folder} can't be claimed: {reason}. Take a savepoint, copy it (holdfast snapshot copy), or use "
                "claim_mode=NO_CLAIM",
                path=folder,
                owner=place.job_id,
            )
        record = VoidRecord(
            number=job.last_submission + 1,
            epoch=max(job.epochs, default=0),
            nonce=mine.nonce,
            created_ms=mine.created_ms,
            given=place.checkpoint_id,
            owner=mine,
        )
        path = paths.submission(record.number)
        if (yield from put_once(path, encode_record(record))) == encode_record(record):
            return mine.nonce
    raise SnapshotClaimedError(
        f"snapshot {folder} can't be claimed: its job is started all the time", path=folder, owner=place.job_id
    )


def release_snapshot(folder: str, claim: str, now_ms: int = 0) -> Flow[None]:
    """Delete a snapshot that this claim owns, and no other; idempotent. One that has a label stays: the next recovery of its owner
    behind the label's removal deletes it. `now_ms`: wall clock."""
    _, owner = yield from _newest_owner(folder)
    if owner is not None:
        if owner.nonce == claim and not (yield from begin_deletion(folder, Mark(claim, now_ms))):
            yield from delete_owned(folder)
        return
    place = job_folder(folder)
    if place is not None:
        yield from rebase(_delete_given(place, claim, now_ms), place.root)


def holds_claim(folder: str, claim: str) -> Flow[bool]:
    """Whether files of a snapshot that this claim owns are left, and no label keeps it."""
    _, owner = yield from _newest_owner(folder)
    owner = owner or (yield from find_owner(folder))
    if owner is None or owner.nonce != claim:
        return False
    place = job_folder(folder)
    if place is not None:
        register = yield from rebase(read_register(JobPaths(place.job_id).checkpoint(place.checkpoint_id)), place.root)
    else:
        register = yield from read_register(folder)
    if register is not None and register.labels:
        return False
    files: list[str] = yield ListFiles(folder)
    return bool(files)


def dispose_snapshot(folder: str, nonce: str, now_ms: int) -> Flow[None]:
    """Delete a savepoint for its user, or a checkpoint that its ended job retains; idempotent after a crash.

    Raises SnapshotClaimedError if a job owns it and may need it, SnapshotLabelledError if it has a label, NotFoundError if there is
    no snapshot."""
    mine = OwnerRecord("", "", nonce, now_ms, folder=folder)
    place = yield from _jobs_own(folder)
    if place is not None:
        returned = yield from _returned_claim(folder, mine)
        yield from rebase(_dispose_of_job(place, folder, mine, returned), place.root)
        return
    yield from check_name(folder)
    for _ in range(CLAIM_TRIES_MAX):
        number, existing = yield from _newest_owner(folder)
        if existing is not None and (yield from is_of_folder(existing.folder, folder, nonce)):
            if not existing.job_id:
                yield from _begin(folder, mine)
                yield from delete_owned(folder)
                return
            yield from give_back(existing, mine, folder)
        yield from _check_snapshot(folder)
        yield from _begin(folder, mine)
        yield from put_once(f"{folder}/{owner_name(number + 1)}", encode_record(mine))
    raise SnapshotClaimedError(f"snapshot {folder} is being claimed all the time", path=folder, owner="")


def _begin(folder: str, mine: OwnerRecord) -> Flow[None]:
    """Begin a deletion, before a record says that it is under way: what has one is deleted whatever its labels are. Raises
    SnapshotLabelledError."""
    labels = yield from begin_deletion(folder, Mark(mine.nonce, mine.created_ms))
    if labels:
        raise kept_error(folder, labels)


def _check_snapshot(folder: str) -> Flow[None]:
    """Raise NotFoundError for a folder without a snapshot."""
    try:
        decision = decode_decision((yield from read_metadata_file(metadata_path(folder))))
    except ObjectMissingError as error:
        reason = describe_absence(folder, (yield ListFolder(folder)))
        raise NotFoundError(f"{folder} holds no snapshot: {reason}", path=folder) from error
    if not isinstance(decision, Completed):
        raise NotFoundError(f"{folder} holds no snapshot", path=folder)


def _dispose_of_job(place: JobFolder, folder: str, mine: OwnerRecord, returned: str) -> Flow[None]:
    """Delete a checkpoint of an ended job, and its shared files that no other checkpoint refers to, now or later."""
    paths = JobPaths(place.job_id)
    yield from _check_takeable(paths, place, folder, returned)
    yield from _begin(paths.checkpoint(place.checkpoint_id), mine)
    yield from _take_from_job(place, folder, mine, returned)
    found = (yield from read_job(paths)).checkpoints.get(place.checkpoint_id)
    decision = found.decision if found is not None else None
    names = {shared_name(handle.path) for handle in decision.shared} if isinstance(decision, Completed) else set()
    yield from drop_checkpoint(paths, place.checkpoint_id)
    job = yield from read_job(paths)
    yield from discard_shared(paths, [name for name in derive_shared_garbage(job) if name in names])


def _check_takeable(paths: JobPaths, place: JobFolder, folder: str, returned: str) -> Flow[None]:
    """Raise what a taker without a job would be told: the register of labels is for what is deleted then. A job that begins in
    between keeps its checkpoint, which can have no label any more."""
    job = yield from read_job(paths)
    existing = job.given.get(place.checkpoint_id)
    if existing is not None and existing.nonce != returned and existing.job_id:
        raise _claimed(existing, folder)
    if existing is None and (reason := refuse_to_give(job, place.checkpoint_id)):
        raise _keeps(folder, place.job_id, reason)


def _keeps(folder: str, job_id: str, reason: str) -> SnapshotClaimedError:
    return SnapshotClaimedError(
        f"{folder} is a checkpoint of job {job_id}, which deletes it by itself: {reason}", path=folder, owner=job_id
    )


def delete_owned(folder: str) -> Flow[None]:
    """Delete an owned snapshot: `_metadata` first, since a part of it must not count as a snapshot; `_owner` last; all other files
    in between, in any order."""
    yield DeleteFile(metadata_path(folder))
    files: list[str] = yield ListFiles(folder)
    owners = [path for path in files if path.rpartition("/")[0] == folder and parse_owner_name(path.rpartition("/")[2])]
    yield from delete_files(path for path in files if path not in owners)
    for path in sorted(owners, key=lambda path: parse_owner_name(path.rpartition("/")[2]) or 0)[:-1]:
        yield DeleteFile(path)
    yield DeleteFolder(folder)  # with the newest `_owner`: until the end the files are that one's


def _delete_given(place: JobFolder, claim: str, now_ms: int) -> Flow[None]:
    """Delete the folder of a claimed checkpoint, its `_claim` first, since no label is given without it; shared files
    stay the job's. The record of the claim stays, and ids are never used twice: a repeated deletion hits nothing else."""
    paths = JobPaths(place.job_id)
    job = yield from read_job(paths)
    owner = job.given.get(place.checkpoint_id)
    folder = paths.checkpoint(place.checkpoint_id)
    if owner is not None and owner.nonce == claim and not (yield from begin_deletion(folder, Mark(claim, now_ms))):
        yield DeleteFile(claim_path(folder))
        yield DeleteFolder(folder)
