"""Which snapshots a job owns beside its own checkpoints, which of them it may delete, and which another job may have. Pure.

A claimed snapshot is deleted once the claiming submission's own checkpoints have subsumed it: no restore needs it then. All of
that is derived from records, so a leader that died before it deleted something leaves it to the next one."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.ha.recorded_job import (
    CheckpointFact,
    RecordedCheckpoint,
    RecordedJob,
    Unreadable,
    derive_leftovers,
    keeps_checkpoints,
)
from holdfast.coordinator.ha.records import RestorePoint, SubmissionRecord

STARTING_MS_MAX = 600_000
"""After this time a claim whose submission is not on record was cut off; should it go on even then, it is fenced."""


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
        claim = record.base.claim if record.base is not None else ""
        if record.base is not None and claim and claim not in job.returned and _is_subsumed(job, record):
            found[claim] = record.base
    return tuple(found.values())


def _is_subsumed(job: RecordedJob, record: SubmissionRecord) -> bool:
    """The submission has as many checkpoints of its own as are retained, or has ended and dropped what it had, or another one
    went on from one of them."""
    later = [other for other in job.submissions.values() if other.number > record.number]
    is_own = _own_ids(job, record)
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


def _own_ids(job: RecordedJob, record: SubmissionRecord) -> Callable[[int], bool]:
    """Whether an id is of this submission."""
    stop = min((other.first_checkpoint_id for other in job.submissions.values() if other.number > record.number), default=None)
    return lambda number: number >= record.first_checkpoint_id and (stop is None or number < stop)


def refuse_to_return(job: RecordedJob, claim: str, age_ms: int) -> str:
    """Why a job holds on to a snapshot that it claimed so long ago; empty: it gives it back, having ended before it had a
    checkpoint of its own, or begun anew without it."""
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
