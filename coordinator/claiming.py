"""Flows by which a job takes ownership of a snapshot, and by which it deletes one that it owns.

Ownership is one conditional create: of `_owner` in a savepoint's folder; for a checkpoint in its job's directory, of the next
record of that job's submissions, so that it can't be started again and go on from there unnoticed. Whoever finds another's
record there is refused. Deleting begins with `_metadata` and ends with `_owner`: what a crash leaves is still owned."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.ownership import refuse_to_give
from coordinator.publication import Completed, decode_decision
from coordinator.records import (
    CLAIM,
    METADATA,
    OWNER,
    JobPaths,
    OwnerRecord,
    RestorePoint,
    VoidRecord,
    decode_record,
    encode_record,
    is_job_id,
    parse_checkpoint_folder,
)
from coordinator.snapshots import rebase
from coordinator.store import put_once, read_job, read_optional
from statebackends.errors import CorruptStateError, InvalidConfigError, NotFoundError, ObjectMissingError, SnapshotClaimedError
from statebackends.snapshot import read_metadata_file
from statebackends.storage import is_absolute_folder
from statebackends.storage.deleting import delete_files
from statebackends.storage.operations import DeleteFile, DeleteFolder, Flow, ListFiles, ListFolder, StatFile

CLAIM_TRIES_MAX = 16
"""Numbers that are tried in a row; each that is taken means that somebody started that job again just then."""


@dataclass(frozen=True, slots=True)
class JobFolder:
    """A checkpoint in the directory of a job."""

    root: str
    """Location of the state directory."""
    job_id: str
    checkpoint_id: int


def job_folder(folder: str) -> JobFolder | None:
    """What the absolute location of a snapshot says by its names; whether there is such a job its records tell."""
    parent, _, name = folder.rstrip("/").rpartition("/")
    root, _, job_id = parent.rpartition("/")
    number = parse_checkpoint_folder(name)
    if number is None or not is_job_id(job_id) or not is_absolute_folder(folder):
        return None
    return JobFolder(root, job_id, number)


def check_target(folder: str) -> Flow[None]:
    """Raise InvalidConfigError for an absolute folder in the directory of a job, whoever's: what lies in there is the job's, which
    deletes its checkpoints with all that was put into them."""
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
    """Who has claimed the snapshot at a location. Raises CorruptStateError for a record that can't be read."""
    path = f"{folder}/{OWNER}"
    content = yield from read_optional(path)
    if content is not None:
        return decode_record(OwnerRecord, content, path)
    place = job_folder(folder)
    if place is None:
        return None
    job = yield from rebase(read_job(JobPaths(place.job_id)), place.root)
    return job.given.get(place.checkpoint_id)


def claim_snapshot(base: RestorePoint, mine: OwnerRecord) -> Flow[str]:
    """Own the snapshot; returns the nonce by which it is ours, now or since an earlier try.

    Raises SnapshotClaimedError when another job owns it or has to, CorruptStateError when it is gone."""
    place = yield from _jobs_own(base.folder)
    if place is not None:
        return (yield from rebase(_take_from_job(place, base.folder, mine), place.root))
    yield from check_name(base.folder)
    path = f"{base.folder}/{OWNER}"
    content = yield from put_once(path, encode_record(mine))
    nonce = check_owner(decode_record(OwnerRecord, content, path), mine, base.folder)
    if (yield StatFile(f"{base.folder}/{METADATA}")) is None:
        # Its former owner had deleted it just before, and all that is there now is our record.
        yield DeleteFile(path)
        gone = f"{base.folder}/{METADATA}"
        raise CorruptStateError(f"{gone} does not exist: the snapshot was deleted", path=gone, operator=None, reason="missing")
    return nonce


def _jobs_own(folder: str) -> Flow[JobFolder | None]:
    """The checkpoint of a job that there is in this directory."""
    place = job_folder(folder)
    if place is None or not (yield from rebase(read_job(JobPaths(place.job_id)), place.root)).exists:
        return None
    return place


def check_name(folder: str) -> Flow[None]:
    """Raise SnapshotClaimedError for a checkpoint of a job by another name than its own, such as a link: whoever took it by an
    `_owner` would take it from a job that does not know, goes on from it, and drops it when it likes."""
    if (yield StatFile(f"{folder}/{CLAIM}")) is not None and (yield from _jobs_own(folder)) is None:
        raise SnapshotClaimedError(
            f"{folder} is a checkpoint of a job by another name, or a plain copy of one: name it as it lies in its job's "
            "directory, or copy it (holdfast snapshot copy)",
            path=folder,
            owner="",
        )


def check_owner(standing: OwnerRecord, mine: OwnerRecord, folder: str) -> str:
    """The nonce of a record that is this job's. Raises SnapshotClaimedError for another one's."""
    if (standing.job_id, standing.directory) == (mine.job_id, mine.directory):
        return standing.nonce
    raise SnapshotClaimedError(f"snapshot {folder} {_whose(standing)}", path=folder, owner=standing.job_id)


def _whose(standing: OwnerRecord) -> str:
    if not standing.job_id:
        return "is being deleted by its user"
    return (
        f"was claimed by job {standing.job_id}, which deletes it once it has checkpoints of its own: "
        "start from a copy of it (holdfast snapshot copy), or with claim_mode=NO_CLAIM"
    )


def _take_from_job(place: JobFolder, folder: str, mine: OwnerRecord) -> Flow[str]:
    """Take the next number of the job's submissions for our record. Paths are relative to its state directory."""
    paths = JobPaths(place.job_id)
    for _ in range(CLAIM_TRIES_MAX):
        job = yield from read_job(paths)
        standing = job.given.get(place.checkpoint_id)
        if standing is not None:
            return check_owner(standing, mine, folder)
        reason = refuse_to_give(job, place.checkpoint_id)
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


def release_snapshot(folder: str, claim: str) -> Flow[None]:
    """Delete a snapshot that is owned by this claim, and nothing else; again if a crash cut it off."""
    path = f"{folder}/{OWNER}"
    content = yield from read_optional(path)
    if content is not None:
        if decode_record(OwnerRecord, content, path).nonce == claim:
            yield from delete_owned(folder)
        return
    place = job_folder(folder)
    if place is not None:
        yield from rebase(_delete_given(place, claim), place.root)


def holds_claim(folder: str, claim: str) -> Flow[bool]:
    """Whether there is still something to delete: a snapshot owned by this claim."""
    owner = yield from find_owner(folder)
    if owner is None or owner.nonce != claim:
        return False
    files: list[str] = yield ListFiles(folder)
    return bool(files)


def dispose_snapshot(folder: str, nonce: str, now_ms: int) -> Flow[None]:
    """Delete a savepoint for its user; again if that was cut off.

    Raises SnapshotClaimedError where a job owns it, NotFoundError where there is no snapshot."""
    place = yield from _jobs_own(folder)
    if place is not None:
        raise SnapshotClaimedError(
            f"{folder} is a checkpoint of job {place.job_id}, which deletes it by itself", path=folder, owner=place.job_id
        )
    yield from check_name(folder)
    path = f"{folder}/{OWNER}"
    standing = yield from read_optional(path)
    if standing is None:
        try:
            decision = decode_decision((yield from read_metadata_file(f"{folder}/{METADATA}")))
        except ObjectMissingError:
            decision = None
        if not isinstance(decision, Completed):
            raise NotFoundError(f"{folder} holds no snapshot", path=folder)
        standing = yield from put_once(path, encode_record(OwnerRecord("", "", nonce, now_ms)))
    owner = decode_record(OwnerRecord, standing, path)
    if owner.job_id:
        raise SnapshotClaimedError(
            f"snapshot {folder} was claimed by job {owner.job_id}, which deletes it once it has checkpoints of its own",
            path=folder,
            owner=owner.job_id,
        )
    yield from delete_owned(folder)


def delete_owned(folder: str) -> Flow[None]:
    """Delete a snapshot whose `_owner` stands: `_metadata` first, for nobody may take the rest for a snapshot; `_owner` last,
    and what is between in any order."""
    yield DeleteFile(f"{folder}/{METADATA}")
    files: list[str] = yield ListFiles(folder)
    yield from delete_files(path for path in files if path != f"{folder}/{OWNER}")
    yield DeleteFolder(folder)


def _delete_given(place: JobFolder, claim: str) -> Flow[None]:
    """Delete a checkpoint's folder and nothing beside it: the job's directory stays its own. Its record says whose it is for ever,
    and no job uses an id twice."""
    paths = JobPaths(place.job_id)
    job = yield from read_job(paths)
    owner = job.given.get(place.checkpoint_id)
    if owner is not None and owner.nonce == claim:
        yield DeleteFolder(paths.checkpoint(place.checkpoint_id))
