"""Flows that start a job or take one over: become its leader, recover it, plan the submission, record it.

A preflight comes first: a submission that can't run changes nothing. Which snapshot is restored is decided in the room
`restore`."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from holdfast.barriers.jobgraph import ClaimMode, Submission
from holdfast.coordinator.ha.leadership import become_leader, check_leadership, check_newest
from holdfast.coordinator.ha.recorded_job import (
    CheckpointFact,
    RecordedCheckpoint,
    RecordedJob,
    derive_recovery_point,
    derive_shared_garbage,
)
from holdfast.coordinator.ha.records import (
    LeaderRecord,
    OwnerRecord,
    SavepointRecord,
    SubmissionRecord,
    VoidRecord,
    derive_job_id,
    is_job_id,
)
from holdfast.coordinator.ha.recovery import Takeover, abort_undecided, recover_job
from holdfast.coordinator.ha.store import discard_shared, drop_checkpoint, read_job, void_submission, write_submission
from holdfast.coordinator.jobmaster.job import JobSetup
from holdfast.coordinator.ownership.claims import claim_snapshot, derive_releases, find_leftovers, holds_claim, release_snapshot
from holdfast.coordinator.ownership.labels import Mark, begin_deletion, find_kept
from holdfast.coordinator.restore.plan import check_graph, check_submission, derive_setup, plan_submission
from holdfast.coordinator.restore.preflight import PreflightReport, Refusal
from holdfast.statebackends.errors import (
    CorruptStateError,
    FencedError,
    InvalidConfigError,
    JobExistsError,
    NotFoundError,
    RestoreError,
    StorageUnavailableError,
)
from holdfast.statebackends.layout import JobPaths, parse_checkpoint_name, writer_of
from holdfast.statebackends.storage import is_absolute_folder
from holdfast.statebackends.storage.flows import make_durable
from holdfast.statebackends.storage.port import DeleteFolder, Flow, InParallel, ListFolder


@dataclass(frozen=True, slots=True)
class Starter:
    """The coordinator process that starts jobs."""

    nonce: str
    url: str
    directory_nonce: str
    now_ms: int
    root: str = ""
    """Location of the state directory."""


def identify_job(submission: Submission) -> str:
    """The job id of a submission. Raises InvalidConfigError or GraphError for a submission that no job can have."""
    check_graph(submission.graph)
    job_id = submission.job_id or derive_job_id(submission.graph.name)
    if not is_job_id(job_id):
        raise InvalidConfigError(f"job id {job_id!r} is not 32 lower-case hex digits", setting="job_id")
    return job_id

PREFLIGHT_TRIES_MAX = 3
"""Checks of a snapshot that is missing or damaged while its job goes on: the job may have dropped it while it was read."""


def preflight(
    job_id: str, submission: Submission, job: RecordedJob | None = None, *, external: bool = True, now_ms: int = 0
) -> Flow[PreflightReport]:
    """Check a submission and change nothing. All problems of the snapshot are in the report.

    `job`: its records, if they were read just before. `external`, `now_ms`: see `check_submission`. Raises InvalidConfigError,
    JobExistsError, NotFoundError."""
    if job is None:
        job = yield from read_job(JobPaths(job_id))
    tries = 0
    while True:
        tries += 1
        missing: NotFoundError | None = None
        try:
            report = (yield from check_submission(job, submission, external=external, now_ms=now_ms)).report
        except (CorruptStateError, RestoreError) as error:  # there is no snapshot to check
            report = PreflightReport(job_id=job_id, job_name=submission.graph.name, refusals=(Refusal.of(error),))
        except NotFoundError as error:
            missing = error
        if missing is None and not any(isinstance(refusal.error(), CorruptStateError) for refusal in report.refusals):
            return report
        seen, job = job, (yield from read_job(JobPaths(job_id)))
        if job != seen and tries < PREFLIGHT_TRIES_MAX:
            continue  # the job went on, or ended, and dropped the snapshot
        if missing is not None:
            raise missing
        return report


def start_submission(job_id: str, submission: Submission, starter: Starter, *, verified: bool = False) -> Flow[JobSetup]:
    """Become the job's leader, recover what an older one left, and record the submission under the next number.

    `verified`: a preflight has just verified the snapshot's checksums; snapshots never change, so they are not verified again."""
    paths = JobPaths(job_id)
    epoch = yield from become_leader(paths, LeaderRecord(1, starter.nonce, starter.url, starter.now_ms))
    job = yield from recover_job(paths, Takeover(epoch, starter.nonce, starter.now_ms))
    plan = yield from plan_submission(job, submission, checksums=not verified, now_ms=starter.now_ms)
    base = plan.base
    if base is not None and submission.claim_mode is ClaimMode.CLAIM and not base.claim and is_absolute_folder(base.folder):
        yield from check_leadership(paths, epoch)
        mine = OwnerRecord(
            job_id, starter.directory_nonce, starter.nonce, starter.now_ms, folder=base.folder, root=starter.root
        )
        base = msgspec.structs.replace(base, claim=(yield from claim_snapshot(base, mine)))
    record = SubmissionRecord(
        number=job.last_submission + 1,
        epoch=epoch,
        submission=plan.submission,
        base=base,
        first_checkpoint_id=plan.first_checkpoint_id,
        nonce=starter.nonce,
        created_ms=starter.now_ms,
        notes=plan.report.notes,
    )
    # The number was free when the job was read. If there is no newer leader after that, a later one reads it after us.
    yield from check_leadership(paths, epoch)
    existing = yield from write_submission(paths, record)
    if existing.nonce != record.nonce:
        raise FencedError(f"submission {record.number} of job {job_id} is another coordinator's", job=job_id, epoch=epoch)
    return derive_setup(job, existing, epoch=epoch, directory_nonce=starter.directory_nonce)


def clear_ended(job_id: str, starter: Starter) -> Flow[None]:
    """Delete the files that an ended job drops and its last leader left. Only a leader deletes: a submission may be starting, and
    would restore a checkpoint that is being deleted."""
    paths = JobPaths(job_id)
    recorded = yield from read_job(paths)
    kept = yield from find_kept(recorded)
    if not _free(recorded, kept) and not _shared_leftovers(recorded) and not (yield from _holds_subsumed(recorded)):
        return
    epoch = yield from become_leader(paths, LeaderRecord(1, starter.nonce, starter.url, starter.now_ms))
    takeover = Takeover(epoch, starter.nonce, starter.now_ms)
    job = yield from _fence_submissions(paths, takeover)
    if job.result is not None:
        yield from make_durable(paths.result(job.result.submission))
    drops = [_drop_leftover(paths, checkpoint, takeover) for checkpoint in _free(job, (yield from find_kept(job)))]
    yield InParallel(drops, [0] * len(drops))
    names = _shared_leftovers((yield from read_job(paths)))
    if names:
        yield from check_leadership(paths, epoch)
        yield from discard_shared(paths, names)
    yield from release_subsumed(paths, epoch, job)


def fence_ended(job_id: str, starter: Starter) -> Flow[int]:
    """Take the next epoch of an ended job; returns it. Raises JobExistsError for a job that has not ended, NotFoundError."""
    paths = JobPaths(job_id)
    check_ended((yield from read_job(paths)))
    return (yield from become_leader(paths, LeaderRecord(1, starter.nonce, starter.url, starter.now_ms)))


def erase_checkpoints(job_id: str, starter: Starter, epoch: int) -> Flow[None]:
    """Delete every checkpoint of an ended job with all files in their folders, aborted and half-deleted ones too; registers of
    savepoints stay, and what another job has claimed or a label keeps. Idempotent after a crash. `epoch`: as `fence_ended` gave it.

    Raises FencedError once a later epoch exists, JobExistsError for a job that has not ended, NotFoundError."""
    paths = JobPaths(job_id)
    yield from check_leadership(paths, epoch)
    takeover = Takeover(epoch, starter.nonce, starter.now_ms)
    job = yield from _fence_submissions(paths, takeover)
    check_ended(job)
    kept = {*job.given, *(yield from find_kept(job))}
    for number, checkpoint in sorted(job.checkpoints.items()):
        if number not in kept and not isinstance(checkpoint.decision, SavepointRecord):
            yield from _drop_leftover(paths, checkpoint, takeover)
    names: list[str] = yield ListFolder(job_id)
    for name in names:
        found = parse_checkpoint_name(name.rstrip("/"))
        if found is not None and found not in job.checkpoints:  # what a deletion has left
            yield from check_leadership(paths, epoch)
            yield DeleteFolder(f"{job_id}/{name.rstrip('/')}")
    left = yield from read_job(paths)
    completed = left.with_fact(CheckpointFact.COMPLETED)
    if all(isinstance(each.decision, SavepointRecord) for each in completed):
        yield from check_leadership(paths, epoch)
        yield from discard_shared(paths, left.shared)


def check_ended(job: RecordedJob) -> None:
    """Raise JobExistsError unless a job has a recorded end, NotFoundError if there is none."""
    if not job.exists:
        raise NotFoundError(f"there is no job {job.job_id}", job=job.job_id)
    if job.is_live or job.result is None:
        raise JobExistsError(
            f"job {job.job_id} has no recorded end, and may run: stop it first (holdfast stop, or cancel)",
            job_id=job.job_id,
            state="UNKNOWN",
        )


def _free(job: RecordedJob, kept: frozenset[int]) -> list[RecordedCheckpoint]:
    """Leftovers that no label keeps. Others stay until theirs are removed, and are no reason to become the job's leader again."""
    return [checkpoint for checkpoint in find_leftovers(job) if checkpoint.checkpoint_id not in kept]


def _drop_leftover(paths: JobPaths, checkpoint: RecordedCheckpoint, takeover: Takeover) -> Flow[None]:
    """Delete one id that an ended job left, in any order with the others: its result knows them all."""
    yield from check_leadership(paths, takeover.epoch)
    if checkpoint.fact is CheckpointFact.UNDECIDED:  # claimed by a stale leader after the end
        yield from abort_undecided(paths, checkpoint.checkpoint_id, takeover)
    if checkpoint.fact is CheckpointFact.COMPLETED:
        folder = paths.checkpoint(checkpoint.checkpoint_id)
        if (yield from begin_deletion(folder, Mark(takeover.nonce, takeover.now_ms))):
            return  # it got a label meanwhile
    yield from drop_checkpoint(paths, checkpoint.checkpoint_id)


def _shared_leftovers(job: RecordedJob) -> tuple[str, ...]:
    """Shared files that an ended job left and no checkpoint refers to. Only those of ids up to the result's last: a submission that
    is starting has higher ids."""
    last = job.result.last_checkpoint_id if job.result is not None else 0
    return tuple(name for name in derive_shared_garbage(job) if (writer_of(name) or 0) <= last)


def _holds_subsumed(job: RecordedJob) -> Flow[bool]:
    """Whether files of a subsumed claimed snapshot are left."""
    for point in derive_releases(job):
        try:
            if (yield from holds_claim(point.folder, point.claim)):
                return True
        except (StorageUnavailableError, CorruptStateError):
            continue
    return False


def release_subsumed(paths: JobPaths, epoch: int, job: RecordedJob) -> Flow[None]:
    """Delete subsumed claimed snapshots. Those whose storage can't be reached stay: garbage is no reason to fail."""
    for point in derive_releases(job):
        yield from check_leadership(paths, epoch)
        try:
            yield from release_snapshot(point.folder, point.claim)
        except (StorageUnavailableError, CorruptStateError):
            continue


def _fence_submissions(paths: JobPaths, takeover: Takeover, job: RecordedJob | None = None) -> Flow[RecordedJob]:
    """Take the next submission number by a VoidRecord; returns the job as it is then.

    Otherwise a stale leader that was starting the job again could record its submission later: that would be the newest one, and
    the job that runs here an older one. `job`: see `known` of `read_job`."""
    while True:
        job = yield from read_job(paths, job)
        check_newest(job, takeover.epoch)
        number, found = job.last_submission + 1, job.last_config
        record = VoidRecord(number, takeover.epoch, takeover.nonce, created_ms=takeover.now_ms, config=found)
        if (yield from void_submission(paths, record)):
            return job


def resume_submission(job_id: str, starter: Starter, known: RecordedJob | None = None) -> Flow[JobSetup]:
    """Take over a live job from an older leader; its workers may be running.

    `known`: the job's records, if they were read just before.

    Raises NotFoundError if the job is not live, CorruptStateError if its newest checkpoint can't be read."""
    paths = JobPaths(job_id)
    if known is None:
        known = yield from read_job(paths)
    if not known.is_live:
        raise NotFoundError(f"job {job_id} is not live", job=job_id)
    epoch = yield from become_leader(paths, LeaderRecord(1, starter.nonce, starter.url, starter.now_ms))
    takeover = Takeover(epoch, starter.nonce, starter.now_ms)
    recovered = yield from recover_job(paths, takeover, known)
    job = yield from _fence_submissions(paths, takeover, recovered)
    record = job.newest_submission
    if record is None or not job.is_live:
        raise NotFoundError(f"job {job_id} ended meanwhile", job=job_id)
    derive_recovery_point(job, record)
    return derive_setup(job, record, epoch=epoch, directory_nonce=starter.directory_nonce)
