"""Which snapshots a job owns beside its own checkpoints, which of them it may delete, and which another job may have. Pure.

A claimed snapshot is deleted once the claiming submission's own checkpoints have subsumed it: no restore needs it then. All of
that is derived from records, so a leader that died before it deleted something leaves it to the next one."""

from __future__ import annotations

from barriers.messages import CheckpointKind
from coordinator.publication import CheckpointFact, RecordedCheckpoint, RecordedJob, Unreadable, derive_leftovers
from coordinator.records import RestorePoint, SubmissionRecord
from coordinator.retained import keeps_checkpoints


def find_leftovers(job: RecordedJob) -> tuple[RecordedCheckpoint, ...]:
    """What a job's end does not keep and has not deleted yet; nothing while a submission is live, or when its end keeps all."""
    record, result = job.newest_submission, job.result
    if record is None or result is None:
        return ()
    kept = keeps_checkpoints(result.state, record.submission.graph.config)
    return () if kept else derive_leftovers(job)


def derive_releases(job: RecordedJob) -> tuple[RestorePoint, ...]:
    """Claimed snapshots that have been subsumed: deleted, being deleted, or left by a leader that died. By submission."""
    found: dict[str, RestorePoint] = {}
    for record in job.submissions.values():
        if record.base is not None and record.base.claim and _is_subsumed(job, record):
            found[record.base.claim] = record.base
    return tuple(found.values())


def _is_subsumed(job: RecordedJob, record: SubmissionRecord) -> bool:
    """The submission has as many checkpoints of its own as are retained, or has ended and dropped what it had, or another one
    went on from one of them."""
    later = [other for other in job.submissions.values() if other.number > record.number]
    stop = min((other.first_checkpoint_id for other in later), default=None)

    def is_own(number: int) -> bool:
        return number >= record.first_checkpoint_id and (stop is None or number < stop)

    completed = job.with_fact(CheckpointFact.COMPLETED)
    points = [each for each in completed if each.is_recovery_point and is_own(each.checkpoint_id)]
    if any(isinstance(point.decision, Unreadable) for point in points):
        return False  # whoever goes back behind it may need what it was to replace
    config = record.graph.config
    if sum(point.kind is not CheckpointKind.STOP_SAVEPOINT for point in points) >= config.retained_checkpoints:
        return True
    if any(other.base is not None and not other.base.explicit and is_own(other.base.checkpoint_id) for other in later):
        return True
    result = job.results.get(record.number)
    if result is None or keeps_checkpoints(result.state, config):
        return False
    return is_own(result.newest_completed)


def refuse_to_give(job: RecordedJob, checkpoint_id: int) -> str:
    """Why another job may not claim a checkpoint of this one; empty: it may. What might be being deleted is not given."""
    if job.is_live:
        return "its job is running and owns it"
    record = job.newest_submission
    kept = [each for each in job.with_fact(CheckpointFact.COMPLETED) if each.is_recovery_point]
    kept = [each for each in kept if each.kind is not CheckpointKind.STOP_SAVEPOINT]
    limit = record.graph.config.retained_checkpoints if record is not None else 1
    leaving = {each.checkpoint_id for each in find_leftovers(job)}
    if checkpoint_id in leaving or checkpoint_id not in [each.checkpoint_id for each in kept[-limit:]]:
        return "its job does not retain it"
    return ""
