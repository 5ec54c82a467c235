"""Flows that recover a job from an older leader: they decide every id, fence the next one, and sweep files without an owner.

They know nothing of running workers: whether the job's tasks go on is decided in `jobmaster`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.coordinator.ha.leadership import check_newest
from holdfast.coordinator.ha.recorded_job import (
    CheckpointFact,
    RecordedJob,
    derive_garbage,
    derive_shared_garbage,
    find_config,
)
from holdfast.coordinator.ha.records import AbortRecord, ClaimRecord
from holdfast.coordinator.ha.store import (
    abort_checkpoint,
    claim_checkpoint,
    discard_shared,
    drop_checkpoint,
    read_job,
    read_submission,
    sweep_checkpoints,
)
from holdfast.statebackends.errors import FencedError, ObjectMissingError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.snapshot.parts import read_metadata_file
from holdfast.statebackends.storage.flows import make_durable
from holdfast.statebackends.storage.port import Flow, InParallel

RECOVERY_TRIES_MAX = 4
"""Tries while files disappear: a leader that is being replaced has few deletions under way, and begins none."""


@dataclass(frozen=True, slots=True)
class Takeover:
    """The leader that recovers a job; `now_ms` is wall clock."""

    epoch: int
    nonce: str
    now_ms: int


def recover_job(paths: JobPaths, takeover: Takeover, known: RecordedJob | None = None) -> Flow[RecordedJob]:
    """Recover a job that an older leader left: decide every claimed, undecided id, fence the next one, sweep.

    Afterwards no leader of a lower epoch can complete a checkpoint: what it claimed is decided, and the id that it would claim
    next is ours and ABORTED. Idempotent. `known`: see `read_job`."""
    for _ in range(RECOVERY_TRIES_MAX - 1):
        try:
            return (yield from _recover(paths, takeover, known))
        except ObjectMissingError:
            continue  # the last leader of an ended job deleted a file meanwhile
    return (yield from _recover(paths, takeover, known))


def _recover(paths: JobPaths, takeover: Takeover, known: RecordedJob | None) -> Flow[RecordedJob]:
    """Reads the job again only after it has changed it: the directory of a first submission is read once."""
    job = yield from read_job(paths, known)
    check_newest(job, takeover.epoch)
    undecided = job.with_fact(CheckpointFact.UNDECIDED)
    for checkpoint in undecided:
        yield from abort_undecided(paths, checkpoint.checkpoint_id, takeover)
    is_behind_another = bool(job.epochs) and min(job.epochs) < takeover.epoch
    if is_behind_another:
        yield from _fence_next(paths, job, takeover)
    if undecided or is_behind_another:
        job = yield from read_job(paths, job)
    yield from sweep_checkpoints(paths, job.with_fact(CheckpointFact.ABORTED))
    garbage = derive_garbage(job)
    yield InParallel([drop_checkpoint(paths, checkpoint.checkpoint_id) for checkpoint in garbage], [0] * len(garbage))
    if garbage:
        job = yield from read_job(paths, job)
    if orphans := derive_shared_garbage(job):
        yield from discard_shared(paths, orphans)
        job = replace(job, shared=tuple(name for name in job.shared if name not in orphans))
    yield from _make_durable(paths, job)
    return job


def _make_durable(paths: JobPaths, job: RecordedJob) -> Flow[None]:
    """Make the records durable that the job goes on from: their writer may have died before they were.

    Older checkpoints are left out: nothing depends on them, and they may be being deleted."""
    record = job.newest_submission
    if record is not None:
        yield from make_durable(paths.submission(record.number), read_submission)
        config = find_config(job, record)
        if config is not None:
            yield from make_durable(paths.config(config.number))
    kept = job.with_fact(CheckpointFact.COMPLETED)
    newest = max((checkpoint.checkpoint_id for checkpoint in kept if checkpoint.is_recovery_point), default=0)
    if newest > 0:
        yield from make_durable(paths.claim(newest))
        yield from make_durable(paths.decision(newest), read_metadata_file)


def _fence_next(paths: JobPaths, job: RecordedJob, takeover: Takeover) -> Flow[None]:
    """Claim and abort the id that a stale leader would take next, and abort ids that it took meanwhile."""
    number = job.last_checkpoint_id + 1
    while True:
        claim = ClaimRecord(
            checkpoint_id=number,
            epoch=takeover.epoch,
            submission=0,
            attempt=0,
            kind=CheckpointKind.CHECKPOINT,
            folder=paths.checkpoint(number),
            nonce=takeover.nonce,
            created_ms=takeover.now_ms,
        )
        existing = yield from claim_checkpoint(paths, claim)
        if existing.epoch > takeover.epoch:
            raise FencedError(
                f"epoch {existing.epoch} leads this job, not {takeover.epoch}", epoch=takeover.epoch, newer=existing.epoch
            )
        yield from abort_checkpoint(paths, _leader_changed(number, takeover))
        if existing.nonce == takeover.nonce:
            return
        number += 1


def abort_undecided(paths: JobPaths, checkpoint_id: int, takeover: Takeover) -> Flow[None]:
    """Decide an id that an older leader left undecided."""
    yield from abort_checkpoint(paths, _leader_changed(checkpoint_id, takeover))


def _leader_changed(checkpoint_id: int, takeover: Takeover) -> AbortRecord:
    return AbortRecord(
        checkpoint_id=checkpoint_id,
        reason=FailureReason.LEADER_CHANGED,
        epoch=takeover.epoch,
        nonce=takeover.nonce,
        message=f"epoch {takeover.epoch} leads",
        created_ms=takeover.now_ms,
    )
