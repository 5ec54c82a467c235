"""Flows of a preflight that ask whose a snapshot is: read only."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.barriers.jobgraph import ClaimMode, Submission
from holdfast.coordinator.ha.recorded_job import RecordedJob
from holdfast.coordinator.ha.records import DIRECTORY_FILE, OwnerRecord, RestorePoint, decode_nonce
from holdfast.coordinator.ha.snapshots import rebase
from holdfast.coordinator.ha.store import read_optional
from holdfast.coordinator.ownership.claims import check_name, check_owner, check_returnable, find_owner, job_folder
from holdfast.coordinator.ownership.ownership import derive_releases
from holdfast.coordinator.restore.preflight import Refusal
from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError, SnapshotClaimedError
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata
from holdfast.statebackends.snapshot.parts import file_handles
from holdfast.statebackends.storage import is_absolute_folder
from holdfast.statebackends.storage.port import Flow


@dataclass(frozen=True, slots=True)
class Ownership:
    """Of a snapshot, as far as it concerns one job."""

    owner: str | None = None
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()


def examine_owner(
    job: RecordedJob, submission: Submission, base: RestorePoint, metadata: SnapshotMetadata, *, now_ms: int
) -> Flow[Ownership]:
    """Who owns the snapshot, and whether that lets this job start from it, and claim it if it asks for that. By the wall clock."""
    if not is_absolute_folder(base.folder):
        return Ownership()
    if base.claim:  # claimed by an older submission, and still needed
        return Ownership(job.job_id)
    claims = submission.claim_mode is ClaimMode.CLAIM
    try:
        owner = yield from find_owner(base.folder)
    except CorruptStateError as error:
        if claims:
            return Ownership(refusals=(Refusal.of(error),))
        return Ownership(notes=(f"who owns the snapshot can't be read: {error.message}",))
    directory = yield from _directory_nonce()
    if owner is not None:
        mine = OwnerRecord(job.job_id, directory or owner.directory, "", now_ms)
        return (yield from _judge_owner(owner, mine, base.folder, derive_releases(job), claims=claims))
    if claims:
        yield from _check_foreign(base.folder, job.job_id, directory)
        try:
            yield from check_name(base.folder)
        except SnapshotClaimedError as error:
            return Ownership(refusals=(Refusal.of(error),))
    if claims and metadata.kind == "checkpoint" and any(_leaves_folder(metadata)):
        message = (
            f"snapshot {base.folder} shares files with other checkpoints of its job, and can't be claimed: take a savepoint, "
            "copy it (holdfast snapshot copy), or use claim_mode=NO_CLAIM"
        )
        return Ownership(None, (Refusal.of(SnapshotClaimedError(message, path=base.folder, owner=metadata.job_id)),))
    return Ownership()


def _judge_owner(
    owner: OwnerRecord, mine: OwnerRecord, folder: str, releases: Sequence[RestorePoint], *, claims: bool
) -> Flow[Ownership]:
    if any(owner.nonce == release.claim for release in releases):
        message = f"snapshot {folder} was claimed by this job, whose newer checkpoints have subsumed it: it is being deleted"
        return Ownership(owner.job_id, (Refusal.of(SnapshotClaimedError(message, path=folder, owner=owner.job_id)),))
    try:
        check_owner(owner, mine, folder)
    except SnapshotClaimedError:
        if claims:
            return (yield from _judge_claim(owner, folder, mine.created_ms))
        who = f"job {owner.job_id} owns the snapshot" if owner.job_id else "the snapshot is being deleted by its user"
        return Ownership(owner.job_id, notes=(f"{who}: it may be gone before it is restored",))
    return Ownership(owner.job_id)


def _judge_claim(owner: OwnerRecord, folder: str, now_ms: int) -> Flow[Ownership]:
    """Whether a snapshot that another job owns can be claimed: if that needs it no more."""
    try:
        yield from check_returnable(owner, folder, now_ms)
    except SnapshotClaimedError as error:
        return Ownership(owner.job_id, (Refusal.of(error),))
    note = f"job {owner.job_id}, which had claimed the snapshot, has no checkpoint since and needs it no more: it is given back"
    return Ownership(notes=(note,))


def _directory_nonce() -> Flow[str]:
    """Of the state directory that the paths are relative to; empty if it is none."""
    content = yield from read_optional(DIRECTORY_FILE)
    return "" if content is None else decode_nonce(content)


def _check_foreign(folder: str, job_id: str, directory: str) -> Flow[None]:
    """Raise InvalidConfigError for a checkpoint in this very job's directory: it is its own, by whatever name."""
    place = job_folder(folder)
    if place is None or place.job_id != job_id or not directory:
        return
    if (yield from rebase(_directory_nonce(), place.root)) == directory:
        raise InvalidConfigError(
            f"{folder} is a checkpoint of this job, which owns it: restore={str(place.checkpoint_id)!r}, without claim_mode=CLAIM",
            setting="claim_mode",
        )


def _leaves_folder(metadata: SnapshotMetadata) -> Iterator[bool]:
    """Of each file, whether it lies beside the snapshot's folder."""
    for operator in metadata.operators:
        for state in operator.subtasks:
            for handle in file_handles(state):
                yield posixpath.normpath(handle.path).startswith("../")
