"""Read models from a job master, or from the records of a job that ended before this coordinator started. Pure."""

from __future__ import annotations

from holdfast.barriers.jobgraph import JobConfig
from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.ha.recorded_job import CheckpointFact, Completed, RecordedCheckpoint, RecordedJob
from holdfast.coordinator.ha.records import AbortRecord, SavepointRecord
from holdfast.coordinator.jobmaster.execution import Execution
from holdfast.coordinator.jobmaster.jobmaster import JobMaster
from holdfast.coordinator.views import (
    CheckpointCounts,
    CheckpointStatsView,
    CheckpointView,
    JobNumbersView,
    JobOverviewView,
    JobView,
    Quantiles,
    SavepointPlaces,
)

UNKNOWN_STATE = "UNKNOWN"
"""Of a job whose directory tells no end: nobody was asked whether it runs."""


def view_overview(master: JobMaster) -> JobOverviewView:
    setup, lifecycle = master.setup, master.lifecycle
    execution = lifecycle.execution or Execution(0, setup.graph)
    return JobOverviewView(
        job_id=setup.job_id,
        name=setup.graph.name,
        state=master.state.value,
        start_ms=lifecycle.timestamps.get("INITIALIZING", setup.started_ms),
        end_ms=lifecycle.end_wall_ms,
        last_modification_ms=max(lifecycle.timestamps.values(), default=setup.started_ms),
        task_counts=execution.counts(),
        slots_required=setup.graph.slots_required,
        slots_registered=master.workforce.registered,
    )


def view_numbers(master: JobMaster) -> JobNumbersView:
    lifecycle, stats = master.lifecycle, master.coordinator.stats
    return JobNumbersView(
        overview=view_overview(master),
        attempt=lifecycle.attempt,
        restarts=lifecycle.incidents.restarts,
        counts=stats.counts,
        latest_completed=stats.latest_completed,
        frames_refused=sum(slot.frames_refused for slot in master.workforce.slots),
        graph=master.setup.graph,
        totals=lifecycle.totals(),
        reached=lifecycle.reached(),
    )


def view_recorded_numbers(job: RecordedJob) -> JobNumbersView:
    """Of a job in a terminal state; walks over what is on record of it."""
    attempt, stats = job.newest_attempt, view_recorded_checkpoints(job)
    result, record = job.result, job.newest_submission
    assert result is not None
    assert record is not None
    return JobNumbersView(
        overview=view_recorded_job(job, 0).overview,
        attempt=attempt.attempt if attempt is not None else 0,
        restarts=attempt.restarts if attempt is not None else 0,
        counts=stats.counts,
        latest_completed=stats.latest_completed,
        frames_refused=0,
        graph=record.graph,
        totals=result.totals,
        reached=result.totals,
    )


def view_job(master: JobMaster, now_ms: int) -> JobView:
    setup, lifecycle = master.setup, master.lifecycle
    execution = lifecycle.execution or Execution(lifecycle.attempt, setup.graph)
    return JobView(
        overview=view_overview(master),
        now_ms=now_ms,
        timestamps=dict(lifecycle.timestamps),
        graph=setup.graph,
        vertices=execution.views(master.workforce.hosts()),
        workers=master.workforce.views(),
        exceptions=lifecycle.incidents.views(),
        submission=setup.submission,
        attempt=lifecycle.attempt,
        restarts=lifecycle.incidents.restarts,
        epoch=setup.epoch,
        failure=lifecycle.failure,
        totals=lifecycle.totals(),
    )


def view_recorded_job(job: RecordedJob, now_ms: int) -> JobView:
    """A job in a terminal state, as its directory remembers it: no tasks, no workers."""
    record, result = job.newest_submission, job.result
    assert record is not None
    assert result is not None
    execution = Execution(0, record.graph)
    execution.measure(result.metrics)
    attempt = job.newest_attempt
    return JobView(
        overview=view_recorded_overview(job),
        now_ms=now_ms,
        timestamps={"INITIALIZING": record.created_ms, result.state: result.created_ms},
        graph=record.graph,
        vertices=execution.views({}),
        workers=(),
        exceptions=(),
        submission=record.number,
        attempt=attempt.attempt if attempt is not None else 0,
        restarts=attempt.restarts if attempt is not None else 0,
        epoch=result.epoch,
        failure=result.cause or None,
        totals=result.totals,
    )


def view_recorded_overview(job: RecordedJob) -> JobOverviewView:
    """A job that somebody submitted, as its directory remembers it. One without an end there may run, or wait for a coordinator:
    its state is UNKNOWN, and its last modification the newest thing that was written down of it."""
    record, result = job.newest_submission, job.result
    assert record is not None
    execution = Execution(0, record.graph)
    if result is not None:
        execution.measure(result.metrics)
    return JobOverviewView(
        job_id=job.job_id,
        name=record.graph.name,
        state=result.state if result is not None else UNKNOWN_STATE,
        start_ms=(result.started_ms if result is not None else 0) or record.created_ms,
        end_ms=result.created_ms if result is not None else -1,
        last_modification_ms=result.created_ms if result is not None else _last_written_ms(job),
        task_counts=execution.counts(),
        slots_required=record.graph.slots_required,
        slots_registered=0,
    )


def _last_written_ms(job: RecordedJob) -> int:
    times = [record.created_ms for record in (job.newest_submission, job.newest_attempt) if record is not None]
    times += [entry.claim.created_ms for entry in job.checkpoints.values() if entry.claim is not None]
    times += [entry.decision.timestamp_ms for entry in job.checkpoints.values() if isinstance(entry.decision, Completed)]
    return max(times, default=-1)


def view_savepoint_places(master: JobMaster) -> SavepointPlaces:
    return SavepointPlaces(_directories(master.setup.graph.config), master.triggers.savepoints())


def view_recorded_savepoint_places(job: RecordedJob) -> SavepointPlaces:
    decisions = [checkpoint.decision for checkpoint in job.checkpoints.values()]
    folders = frozenset(decision.folder for decision in decisions if isinstance(decision, SavepointRecord))
    record = job.newest_submission
    return SavepointPlaces(_directories(record.graph.config) if record is not None else frozenset(), folders)


def _directories(config: JobConfig) -> frozenset[str]:
    return frozenset({config.savepoint_directory} if config.savepoint_directory else ())


def view_recorded_checkpoints(job: RecordedJob) -> CheckpointStatsView:
    """What is still on record of a job's checkpoints. Of a job without an end what is not decided is in progress, or was."""
    entries = [job.checkpoints[number] for number in sorted(job.checkpoints)]
    views = [_recorded(entry, is_live=job.is_live) for entry in entries if entry.fact is not CheckpointFact.ORPHANED]
    completed = [view for view in views if view.status == "COMPLETED"]
    failed = [view for view in views if view.status == "FAILED"]
    pending = len(views) - len(completed) - len(failed)
    return CheckpointStatsView(
        counts=CheckpointCounts(restored=0, total=len(views), in_progress=pending, completed=len(completed), failed=len(failed)),
        summary=dict.fromkeys(
            ("checkpointed_size", "state_size", "end_to_end_duration", "alignment_buffered", "processed_data", "persisted_data"),
            Quantiles(),
        ),
        history=tuple(sorted(views, key=lambda view: -view.checkpoint_id)),
        latest_completed=next((view for view in reversed(completed) if not view.is_savepoint), None),
        latest_savepoint=next((view for view in reversed(completed) if view.is_savepoint), None),
        latest_failed=failed[-1] if failed else None,
        latest_restored=None,
    )


def _recorded(entry: RecordedCheckpoint, *, is_live: bool) -> CheckpointView:
    claim, decision = entry.claim, entry.decision
    completed = isinstance(decision, Completed | SavepointRecord)
    pending = is_live and entry.fact is CheckpointFact.UNDECIDED
    aborted = decision if isinstance(decision, AbortRecord) else None
    trigger_ms = decision.timestamp_ms if isinstance(decision, Completed | SavepointRecord) else -1
    return CheckpointView(
        checkpoint_id=entry.checkpoint_id,
        kind=claim.kind if claim is not None else CheckpointKind.CHECKPOINT,
        status="COMPLETED" if completed else "IN_PROGRESS" if pending else "FAILED",
        trigger_ms=trigger_ms if claim is None or trigger_ms >= 0 else claim.created_ms,
        latest_ack_ms=-1,
        checkpointed_size=decision.new_size if isinstance(decision, Completed) else 0,
        state_size=decision.size if isinstance(decision, Completed) else 0,
        end_to_end_ms=-1,
        processed_bytes=0,
        persisted_bytes=0,
        num_subtasks=0,
        num_acknowledged_subtasks=0,
        vertices={},
        location=claim.folder if completed and claim is not None else None,
        failure_ms=aborted.created_ms if aborted is not None else -1,
        failure_reason=aborted.reason.value if aborted is not None else None,
        failure_message=(aborted.message or aborted.reason.value) if aborted is not None else None,
    )
