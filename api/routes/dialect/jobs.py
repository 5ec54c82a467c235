"""Flink's monitoring dialect: parse, ask the service, render. Included twice, with and without `/v1`."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request

from holdfast.api.flink import checkpoint_schemas as checkpoints_of
from holdfast.api.flink import render_backpressure, render_checkpoints, render_jobs, schemas
from holdfast.api.http.request_log import SUBJECT
from holdfast.api.routes.common import (
    ERRORS,
    CheckpointNumber,
    HeldDirectories,
    JobId,
    KnownDisposals,
    Service,
    TriggerId,
    VertexId,
    body_of,
    describe_model,
)
from holdfast.api.routes.viewed import VIEWED
from holdfast.api.version import DIALECT_VERSION, REVISION
from holdfast.barriers.tunable import CheckpointMode
from holdfast.coordinator.interface import Coordinator
from holdfast.coordinator.views import TriggerView
from holdfast.statebackends.errors import InvalidConfigError, NotFoundError

router = APIRouter(tags=["flink"], responses=ERRORS)

REFRESH_INTERVAL_MS = 3_000

EXCEPTIONS_DEFAULT, EXCEPTIONS_MAX = 20, 1_000

METRIC_NAMES_CHARS_MAX = 16_384
"""Of the names in one request."""


@router.get("/overview", **VIEWED)
def overview(service: Service) -> schemas.Overview:
    """Slots, workers and jobs, counted."""
    view = service.cluster()
    return schemas.Overview(
        taskmanagers=view.workers,
        slots_total=view.slots_total,
        slots_available=view.slots_available,
        jobs_running=view.jobs_running,
        jobs_finished=view.jobs_finished,
        jobs_cancelled=view.jobs_canceled,
        jobs_failed=view.jobs_failed,
        flink_version=DIALECT_VERSION,
        flink_commit=REVISION,
    )


@router.get("/config")
def config() -> schemas.DashboardConfig:
    """Configuration that a dashboard reads first."""
    local = time.localtime()
    return schemas.DashboardConfig(
        refresh_interval=REFRESH_INTERVAL_MS,
        timezone_name=local.tm_zone or "UTC",
        timezone_offset=local.tm_gmtoff * 1000,
        flink_version=DIALECT_VERSION,
        flink_revision=REVISION,
        features=schemas.Features(web_cancel=True),
    )


@router.get("/jobs", **VIEWED)
def jobs(service: Service) -> schemas.Jobs:
    """Jobs with ids and states."""
    return schemas.Jobs(jobs=[schemas.JobIdWithStatus(id=job.job_id, status=job.state) for job in service.jobs()])


@router.get("/jobs/overview", **VIEWED)
def jobs_overview(service: Service) -> schemas.JobsOverview:
    """Jobs with names, times and task counts."""
    jobs, now_ms = service.jobs(), time.time_ns() // 1_000_000
    return schemas.JobsOverview(jobs=[render_jobs.job_overview(job, now_ms=now_ms) for job in jobs])


@router.get("/jobs/{jobid}", **VIEWED)
def job(service: Service, job_id: JobId) -> schemas.JobDetails:
    """One job with its vertices and plan."""
    return render_jobs.job_details(service.job(job_id))


@router.patch("/jobs/{jobid}", status_code=202)
async def cancel(
    request: Request, service: Service, job_id: JobId, mode: Annotated[Literal["cancel"], Query()] = "cancel"
) -> schemas.Empty:
    """Begin to cancel a job."""
    await request.app.state.commands.cancel(service.cancel, job_id)
    return schemas.Empty()


@router.get("/jobs/{jobid}/status", **VIEWED)
def job_status(service: Service, job_id: JobId) -> schemas.JobStatus:
    """State of one job."""
    return schemas.JobStatus(status=service.job(job_id).overview.state)


@router.get("/jobs/{jobid}/plan", **VIEWED)
def job_plan(service: Service, job_id: JobId) -> schemas.JobPlan:
    """Vertices of a job and the edges between them, sinks first."""
    return render_jobs.job_plan(service.job(job_id))


@router.get("/jobs/{jobid}/vertices/{vertexid}/watermarks", **VIEWED)
def vertex_watermarks(service: Service, job_id: JobId, vertex_id: VertexId) -> list[schemas.Metric]:
    """Watermark of each subtask of a vertex, as of its last heartbeat; a subtask without one is left out."""
    return render_jobs.vertex_watermarks(service.job(job_id), vertex_id)


@router.get("/jobs/{jobid}/vertices/{vertexid}/metrics", **VIEWED)
def vertex_metrics(
    service: Service,
    job_id: JobId,
    vertex_id: VertexId,
    get: Annotated[str | None, Query(max_length=METRIC_NAMES_CHARS_MAX)] = None,
) -> list[schemas.Metric] | list[schemas.MetricName]:
    """Numbers of each subtask of a vertex, as of its last heartbeat: their names, or with `get=name,name` their values.

    A name that no subtask has told a number of is left out."""
    found = render_jobs.vertex_metrics(service.job(job_id), vertex_id)
    if get is None:
        return [schemas.MetricName(id=name) for name in found]
    return [schemas.Metric(id=name, value=found[name]) for name in dict.fromkeys(get.split(",")) if name in found]


@router.get("/jobs/{jobid}/vertices/{vertexid}/backpressure", response_model_exclude_none=True, **VIEWED)
def vertex_backpressure(service: Service, job_id: JobId, vertex_id: VertexId) -> schemas.VertexBackPressure:
    """How much of its last second each running subtask of a vertex waited at full outputs, as of its last heartbeat."""
    return render_backpressure.vertex_backpressure(service.job(job_id), vertex_id)


@router.get("/jobs/{jobid}/exceptions", **VIEWED)
def job_exceptions(
    service: Service,
    job_id: JobId,
    exceptions_max: Annotated[int, Query(alias="maxExceptions", ge=0, le=EXCEPTIONS_MAX)] = EXCEPTIONS_DEFAULT,
) -> schemas.JobExceptions:
    """Failures, newest first."""
    return render_jobs.job_exceptions(service.job(job_id), exceptions_max)


# -------------------------------------------------------------------------------------------------------- checkpoints


@router.get("/jobs/{jobid}/checkpoints", **VIEWED)
def checkpoints(service: Service, job_id: JobId) -> checkpoints_of.Checkpoints:
    """Counts, summary, latest and history."""
    return render_checkpoints.checkpoints(service.checkpoints(job_id), service.directory)


@router.get("/jobs/{jobid}/checkpoints/config", **VIEWED)
def checkpoint_config(service: Service, job_id: JobId) -> checkpoints_of.CheckpointConfig:
    """The job's checkpoint settings."""
    return render_checkpoints.checkpoint_config(service.checkpoint_config(job_id))


@router.get("/jobs/{jobid}/checkpoints/details/{checkpointid}", **VIEWED)
def checkpoint(service: Service, job_id: JobId, checkpoint_id: CheckpointNumber) -> checkpoints_of.Checkpoint:
    """One checkpoint or savepoint of the history, with an entry for each vertex of the job."""
    view = render_checkpoints.with_all_vertices(service.checkpoint(job_id, checkpoint_id), service.job(job_id).graph)
    return render_checkpoints.checkpoint(view, service.directory)


@router.get("/jobs/{jobid}/checkpoints/details/{checkpointid}/subtasks/{vertexid}", **VIEWED)
def checkpoint_subtasks(
    service: Service, job_id: JobId, checkpoint_id: CheckpointNumber, vertex_id: VertexId
) -> checkpoints_of.TaskCheckpointDetails:
    """One vertex of a checkpoint, subtask by subtask; without subtasks where it has none of the vertex."""
    found = service.checkpoint(job_id, checkpoint_id)
    view = found.vertices.get(vertex_id)
    if view is None:
        vertex = render_jobs.vertex_of(service.job(job_id), vertex_id)
        view = render_checkpoints.absent_vertex(found, vertex_id, vertex.parallelism)
    return render_checkpoints.task_checkpoint(checkpoint_id, view)


@router.post("/jobs/{jobid}/checkpoints", status_code=202, openapi_extra=describe_model(checkpoints_of.CheckpointTriggerRequest))
async def trigger_checkpoint(
    request: Request,
    service: Service,
    job_id: JobId,
    body: Annotated[checkpoints_of.CheckpointTriggerRequest, Depends(body_of(checkpoints_of.CheckpointTriggerRequest))],
) -> checkpoints_of.TriggerAccepted:
    """Trigger a checkpoint. FULL and INCREMENTAL change nothing: that is the job's configuration. `unaligned` and
    `alignedCheckpointTimeout` are for this one, in place of the job's settings."""
    mode = CheckpointMode(body.unaligned, body.alignedCheckpointTimeout)
    request_id = await request.app.state.commands.run(service.request_checkpoint, job_id, body.triggerId, mode=mode)
    return checkpoints_of.TriggerAccepted(request_id=request_id)


@router.get("/jobs/{jobid}/checkpoints/{triggerid}")
def checkpoint_trigger(service: Service, job_id: JobId, trigger_id: TriggerId) -> checkpoints_of.CheckpointTriggerStatus:
    """Outcome of a triggered checkpoint."""
    return render_checkpoints.checkpoint_trigger(_trigger(service, job_id, trigger_id, savepoint=False))


# --------------------------------------------------------------------------------------------------------- savepoints


@router.post("/jobs/{jobid}/savepoints", status_code=202, openapi_extra=describe_model(checkpoints_of.SavepointTriggerRequest))
async def trigger_savepoint(
    request: Request,
    service: Service,
    job_id: JobId,
    body: Annotated[checkpoints_of.SavepointTriggerRequest, Depends(body_of(checkpoints_of.SavepointTriggerRequest))],
) -> checkpoints_of.TriggerAccepted:
    """Take a savepoint, and cancel the job afterwards if requested."""
    request_id = await request.app.state.commands.run(
        service.request_savepoint,
        job_id,
        _target(body.target_directory),
        format_type=body.formatType or "CANONICAL",
        cancel=bool(body.cancel_job),
        trigger_id=body.triggerId,
    )
    return checkpoints_of.TriggerAccepted(request_id=request_id)


@router.get("/jobs/{jobid}/savepoints/{triggerid}")
def savepoint_trigger(service: Service, job_id: JobId, trigger_id: TriggerId) -> checkpoints_of.SavepointTriggerStatus:
    """Outcome of a savepoint or a stop."""
    return render_checkpoints.savepoint_trigger(_trigger(service, job_id, trigger_id, savepoint=True))


@router.post("/jobs/{jobid}/stop", status_code=202, openapi_extra=describe_model(checkpoints_of.StopRequest))
async def stop(
    request: Request,
    service: Service,
    job_id: JobId,
    body: Annotated[checkpoints_of.StopRequest, Depends(body_of(checkpoints_of.StopRequest))],
) -> checkpoints_of.TriggerAccepted:
    """Stop with a savepoint; `drain` fires all timers and windows first."""
    request_id = await request.app.state.commands.run(
        service.stop,
        job_id,
        _target(body.targetDirectory),
        drain=bool(body.drain),
        format_type=body.formatType or "CANONICAL",
        trigger_id=body.triggerId,
    )
    return checkpoints_of.TriggerAccepted(request_id=request_id)


@router.post(
    "/savepoint-disposal", status_code=202, openapi_extra=describe_model(checkpoints_of.SavepointDisposalRequest, required=True)
)
def dispose(
    request: Request,
    directories: HeldDirectories,
    disposals: KnownDisposals,
    body: Annotated[checkpoints_of.SavepointDisposalRequest, Depends(body_of(checkpoints_of.SavepointDisposalRequest))],
) -> checkpoints_of.TriggerAccepted:
    """Begin to delete a savepoint. `savepoint-path`: a folder or its `_metadata`; a relative one is below the state directory."""
    request.scope[SUBJECT] = body.savepoint_path
    location = directories.confine_savepoint(body.savepoint_path)
    return checkpoints_of.TriggerAccepted(request_id=disposals.begin(location, body.triggerId))


@router.get("/savepoint-disposal/{triggerid}")
def disposal(disposals: KnownDisposals, trigger_id: TriggerId) -> checkpoints_of.DisposalStatus:
    """Outcome of a disposal: a cause if it failed."""
    return render_checkpoints.disposal(disposals.status(trigger_id))


def _trigger(service: Coordinator, job_id: str, trigger_id: str, *, savepoint: bool) -> TriggerView:
    """Raises NotFoundError for a checkpoint's trigger among savepoints, and the other way round: retention deletes checkpoints."""
    view = service.trigger_status(job_id, trigger_id)
    if view.kind.is_savepoint is not savepoint:
        text = f"trigger {trigger_id!r} of job {job_id} is that of a {view.kind.value.replace('_', '-')}"
        raise NotFoundError(text, job=job_id, trigger=trigger_id)
    return view


def _target(directory: str | None) -> str | None:
    if directory is not None and not directory.strip():
        raise InvalidConfigError("the target directory is empty: leave it out, or name one", setting="target-directory")
    return directory
