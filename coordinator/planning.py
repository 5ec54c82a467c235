"""From a submission to what a job master starts with: which snapshot, does it fit, which ids come next.

Nothing is written before the plan stands: a submission that can't run leaves the job as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from barriers.jobgraph import ClaimMode, JobGraph, Submission
from barriers.messages import CheckpointKind
from coordinator.events import CompletedCheckpoint
from coordinator.examining import examine_owner
from coordinator.jobevents import JobSetup
from coordinator.judging import find_sinks, judge_snapshot
from coordinator.ownership import derive_releases, find_leftovers
from coordinator.preflight import PreflightReport, Refusal, SinkFinding, SnapshotFinding
from coordinator.publication import (
    CheckpointFact,
    Completed,
    RecordedCheckpoint,
    RecordedJob,
    Unreadable,
    decode_decision,
    derive_abandoned_stop,
    derive_finishing,
    derive_latest,
)
from coordinator.records import AbortRecord, RestorePoint, SavepointRecord, SubmissionRecord
from coordinator.snapshots import damage_error, file_finding, find_problems, load_snapshot
from coordinator.store import read_optional
from coordinator.views import TriggerView
from statebackends.errors import (
    CorruptStateError,
    GraphError,
    HoldfastError,
    InvalidConfigError,
    JobExistsError,
    NotFoundError,
    OutputMayRepeatError,
    RestoreError,
    SnapshotClaimedError,
)
from statebackends.storage import is_absolute_folder
from statebackends.storage.operations import Flow

_KINDS = {
    "checkpoint": CheckpointKind.CHECKPOINT,
    "savepoint": CheckpointKind.SAVEPOINT,
    "stop_savepoint": CheckpointKind.STOP_SAVEPOINT,
}
"""Kinds as a snapshot's metadata names them."""


@dataclass(frozen=True, slots=True)
class SubmissionPlan:
    """A submission judged; it can run if its report has no refusals."""

    submission: Submission
    """With the snapshot's max parallelism adopted."""
    base: RestorePoint | None
    first_checkpoint_id: int
    report: PreflightReport


def check_graph(graph: JobGraph) -> None:
    """Raise InvalidConfigError or GraphError on what no snapshot can mend."""
    graph.config.check()
    if not graph.name.strip():
        raise InvalidConfigError("the job has no name", setting="name")
    if not graph.vertices:
        raise GraphError(f"job {graph.name!r} has no vertices")
    if not any(vertex.is_source for vertex in graph.vertices):
        raise GraphError(f"job {graph.name!r} has no source")
    seen: set[str] = set()
    for vertex in graph.vertices:
        if not 1 <= vertex.parallelism <= vertex.max_parallelism:
            raise GraphError(
                f"vertex {vertex.name!r} has parallelism {vertex.parallelism} and max parallelism {vertex.max_parallelism}",
                operator=vertex.operators[0].uid,
            )
        for operator in vertex.operators:
            if operator.uid in seen:
                raise GraphError(f"uid {operator.uid!r} is given twice", operator=operator.uid)
            seen.add(operator.uid)


def plan_submission(job: RecordedJob, submission: Submission) -> Flow[SubmissionPlan]:
    """Resolve and judge the snapshot that a submission starts from; reads only.

    Raises JobExistsError, NotFoundError, RestoreError and its kinds, CorruptStateError."""
    plan = yield from examine_submission(job, submission)
    plan.report.check()
    return plan


def examine_submission(job: RecordedJob, submission: Submission, *, external: bool = True) -> Flow[SubmissionPlan]:
    """As `plan_submission`, but what is wrong with the snapshot is in the report. `external`: relative paths can be looked up.

    Raises InvalidConfigError, JobExistsError, NotFoundError; CorruptStateError and RestoreError where there is no snapshot to
    judge: none to go on from, or none whose `_metadata` can be read."""
    if submission.fresh and submission.restore is not None:
        raise InvalidConfigError("restore= and fresh=True exclude each other", setting="fresh")
    if submission.claim_mode is ClaimMode.CLAIM and (submission.restore is None or not is_path(submission.restore)):
        raise InvalidConfigError(
            "claim_mode=CLAIM is for restore=PATH: a job owns its own checkpoints anyway", setting="claim_mode"
        )
    try:
        base = yield from _resolve(_without_leftovers(job), submission)
    except CorruptStateError as error:
        raise _explain_missing(job, submission, error) from error
    if base is None:
        report = PreflightReport(
            job_id=job.job_id, job_name=submission.graph.name, sinks=find_sinks(submission.graph, repeats=False)
        )
        return SubmissionPlan(submission, None, job.last_checkpoint_id + 1, report)
    metadata = yield from load_snapshot(base.folder)
    judgement = judge_snapshot(metadata, submission.graph, allow_non_restored_state=submission.allow_non_restored_state)
    problems = yield from find_problems(metadata, base.folder, checksums=base.explicit, external=external)
    ownership = yield from examine_owner(job, submission, base, metadata)
    repeats = metadata.job_id == job.job_id and base.checkpoint_id < job.newest_completed
    sinks = find_sinks(submission.graph, repeats=repeats)
    refusals, notes = [*ownership.refusals, *judgement.refusals], [*judgement.notes, *ownership.notes]
    if problems:
        refusals.insert(0, Refusal.of(damage_error(base.folder, problems)))
    if repeats:
        rewound = _rewind_error(base.checkpoint_id, job.newest_completed, sinks)
        if submission.allow_output_repeat:
            notes.append(rewound.message)
        else:
            refusals.insert(0, Refusal.of(rewound))
    report = PreflightReport(
        job_id=job.job_id,
        job_name=submission.graph.name,
        snapshot=SnapshotFinding(
            location=base.folder,
            job_id=metadata.job_id,
            job_name=metadata.job_name,
            checkpoint_id=metadata.checkpoint_id,
            kind=metadata.kind,
            size=metadata.size,
            timestamp_ms=metadata.trigger_timestamp_ms,
            owner=ownership.owner,
        ),
        operators=judgement.operators,
        files=tuple(file_finding(problem) for problem in problems),
        unchecked=() if external else metadata.external,
        sinks=sinks,
        refusals=tuple(refusals),
        notes=tuple(notes),
    )
    first = max(job.last_checkpoint_id, base.checkpoint_id) + 1
    return SubmissionPlan(msgspec.structs.replace(submission, graph=judgement.graph), base, first, report)


def _explain_missing(job: RecordedJob, submission: Submission, error: CorruptStateError) -> HoldfastError:
    """Of a snapshot that is not there because this job claimed it, and deleted it when it was subsumed."""
    folder = (submission.restore or "").rstrip("/").removesuffix("/_metadata")
    if error.fields.get("reason") != "missing" or folder not in [release.folder for release in derive_releases(job)]:
        return error
    return SnapshotClaimedError(
        f"snapshot {folder} was claimed by this job, which deleted it: its own checkpoints had subsumed it. Use restore='latest'",
        path=folder,
        owner=job.job_id,
    )


def is_path(restore: str) -> bool:
    """Neither `latest` nor an id."""
    return restore != "latest" and not restore.isdecimal()


def _rewind_error(restored: int, committed: int, sinks: Sequence[SinkFinding]) -> OutputMayRepeatError:
    named = f" of {', '.join(repr(sink.sink_id) for sink in sinks)}" if sinks else ""
    return OutputMayRepeatError(
        f"checkpoint {restored} is older than {committed}, whose output is committed: what{named} came after it would be written "
        "again. Restore the newest one, or accept that: allow_output_repeat=True",
        restored=restored,
        committed=committed,
        sinks=[sink.sink_id for sink in sinks],
    )


def _without_leftovers(job: RecordedJob) -> RecordedJob:
    """The job as it will be once its end has deleted what it does not keep: none of that can be gone on from, deleted or not."""
    leaving = {checkpoint.checkpoint_id for checkpoint in find_leftovers(job)}
    kept = {number: checkpoint for number, checkpoint in job.checkpoints.items() if number not in leaving}
    return replace(job, checkpoints=kept)


def _resolve(job: RecordedJob, submission: Submission) -> Flow[RestorePoint | None]:
    restore = submission.restore
    if restore is None:
        if job.result is not None and not submission.fresh:
            raise _ended_error(job, submission.graph.name, job.result.state)
        return _latest(job) if job.is_live and not submission.fresh else None
    if restore == "latest":
        latest = _latest(job)
        if latest is None:
            ended = "" if job.result is None else f": it is {job.result.state}, and its checkpoints went with it"
            raise RestoreError(
                f"job {submission.graph.name!r} has no completed checkpoint to restore{ended}. "
                "Give the path of a savepoint, or fresh=True to start anew",
                job_id=job.job_id,
            )
        return latest
    if restore.isdecimal():
        return _by_id(job, int(restore))
    return (yield from _by_path(restore))


def _ended_error(job: RecordedJob, name: str, state: str) -> JobExistsError:
    """Says only what can be done: a job that finished kept no checkpoint to go on from."""
    kept = job.with_fact(CheckpointFact.COMPLETED)
    choices = "restore='latest' to go on from its last checkpoint, " if kept else "restore='PATH' to go on from a savepoint, "
    return JobExistsError(
        f"job {name!r} has ended ({state}). Give {choices}or fresh=True to start anew", job_id=job.job_id, state=state
    )


def _latest(job: RecordedJob) -> RestorePoint | None:
    """The newest recovery point; when it is unreadable the older ones are named, and nobody falls back silently."""
    try:
        return derive_latest(job)
    except CorruptStateError as error:
        readable = [
            entry.checkpoint_id
            for entry in job.with_fact(CheckpointFact.COMPLETED)
            if entry.is_recovery_point and isinstance(entry.decision, Completed | SavepointRecord)
        ]
        if not readable:
            raise
        fallback = max(readable)
        message = f"{error.message}; checkpoint {fallback} is readable: restore={fallback} with allow_output_repeat goes back to it"
        raise CorruptStateError(message, **{**error.fields, "fallback": fallback}) from error


def _by_id(job: RecordedJob, checkpoint_id: int) -> RestorePoint:
    checkpoint = job.checkpoints.get(checkpoint_id)
    if checkpoint is None or checkpoint.fact not in (CheckpointFact.COMPLETED, CheckpointFact.CLAIMED):
        kept = [entry.checkpoint_id for entry in job.with_fact(CheckpointFact.COMPLETED)]
        raise NotFoundError(
            f"job {job.job_id} has no completed checkpoint {checkpoint_id}; it has {kept}", job=job.job_id, checkpoint=checkpoint_id
        )
    return checkpoint.restore_point()


def _by_path(location: str) -> Flow[RestorePoint]:
    """A savepoint's or checkpoint's folder, or its `_metadata`; a pointer to a savepoint is followed."""
    folder = location.rstrip("/").removesuffix("/_metadata")
    if not is_absolute_folder(folder):
        raise InvalidConfigError(
            f"restore={location!r} is neither 'latest', nor a checkpoint id, nor an absolute path or URL", setting="restore"
        )
    content = yield from read_optional(f"{folder}/_metadata")
    decision = decode_decision(content, f"{folder}/_metadata") if content is not None else None
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


def derive_setup(job: RecordedJob, record: SubmissionRecord, *, epoch: int, directory_nonce: str) -> JobSetup:
    """What a master of this epoch starts with, from the directory of a settled job."""
    attempt = job.newest_attempt
    same = attempt is not None and attempt.submission == record.number
    return JobSetup(
        job_id=job.job_id,
        epoch=epoch,
        submission=record.number,
        graph=record.graph,
        directory_nonce=directory_nonce,
        base=record.base,
        first_checkpoint_id=record.first_checkpoint_id,
        next_checkpoint_id=max(job.last_checkpoint_id + 1, record.first_checkpoint_id),
        attempt=attempt.attempt if attempt is not None else 0,
        restarts=attempt.restarts if attempt is not None and same else 0,
        completed=tuple(_completed(entry) for entry in job.with_fact(CheckpointFact.COMPLETED)),
        aborted=tuple(entry.checkpoint_id for entry in job.with_fact(CheckpointFact.ABORTED)),
        reconcile=same,
        fail_over=same and derive_abandoned_stop(job, record),
        finishing=derive_finishing(job, record),
        triggers=derive_triggers(job),
        started_ms=record.created_ms,
        notes=record.notes,
        subsumed=derive_releases(job),
    )


def derive_triggers(job: RecordedJob) -> tuple[TriggerView, ...]:
    """Requests of users that took an id, and what became of them."""
    return tuple(_trigger(entry) for entry in job.checkpoints.values() if entry.claim is not None and entry.claim.trigger_id)


def _completed(entry: RecordedCheckpoint) -> CompletedCheckpoint:
    assert entry.claim is not None
    decision = entry.decision
    timestamp_ms = decision.timestamp_ms if isinstance(decision, Completed | SavepointRecord) else 0
    size = decision.size if isinstance(decision, Completed) else 0
    shared = decision.shared if isinstance(decision, Completed) else None if isinstance(decision, Unreadable) else ()
    return CompletedCheckpoint(entry.checkpoint_id, entry.claim.kind, entry.claim.folder, timestamp_ms, size, shared)


def _trigger(entry: RecordedCheckpoint) -> TriggerView:
    """What became of a request whose answer only the job's directory remembers."""
    assert entry.claim is not None
    claim, decision = entry.claim, entry.decision
    aborted = decision if isinstance(decision, AbortRecord) else None
    return TriggerView(
        trigger_id=claim.trigger_id,
        kind=claim.kind,
        in_progress=False,
        checkpoint_id=entry.checkpoint_id,
        location=claim.folder if aborted is None else None,
        failure=(aborted.message or aborted.reason.value) if aborted is not None else None,
        failure_reason=aborted.reason.value if aborted is not None else None,
    )
