"""Submission of jobs by their drivers, preflight reports, settings of running jobs, and counters of all jobs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from anyio import to_thread
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import ConfigDict

from holdfast.api.access.authenticator import Authenticator
from holdfast.api.access.roles import ANY_JOB, Access, Caller
from holdfast.api.flink import schemas
from holdfast.api.flink.render_backpressure import Level, worst_level
from holdfast.api.http.auth import CALLER, confine
from holdfast.api.http.request_log import SUBJECT
from holdfast.api.routes.common import (
    ERRORS,
    GRAPH,
    REPORT,
    JobId,
    Service,
    answer,
    body_of,
    describe_answer,
    describe_model,
    describe_record,
    read_record,
)
from holdfast.api.routes.viewed import VIEWED
from holdfast.api.snapshots.served import PATH_CHARACTERS_MAX, SnapshotDirectories
from holdfast.barriers.jobgraph import DriverDeparture, JobConfig, Submission, SubmissionAccepted
from holdfast.barriers.messages import clip
from holdfast.barriers.tunable import TUNABLE, SettingValue
from holdfast.coordinator.dispatcher.submit import identify_job
from holdfast.coordinator.interface import Coordinator
from holdfast.coordinator.restore.preflight import PreflightReport
from holdfast.coordinator.restore.resolve import LATEST, is_path
from holdfast.coordinator.totals import derive_job_totals
from holdfast.coordinator.views import CheckpointConfigView
from holdfast.statebackends.errors import AccessDeniedError, InvalidConfigError, StorageUnavailableError

router = APIRouter(prefix="/v1", tags=["jobs"], responses=ERRORS)

REASON_BYTES_MAX = 1_000
"""Of the reason why a job can't be read."""

CHECKS_MAX = 2
"""Checks of snapshots against running jobs at a time."""

_checking = threading.BoundedSemaphore(CHECKS_MAX)


@router.post(
    "/jobs",
    status_code=202,
    response_class=Response,
    responses={202: describe_answer(SubmissionAccepted)},
    openapi_extra=describe_record(Submission),
)
async def submit(request: Request, service: Service) -> Response:
    """Start a job, or supersede the running submission of its name. Repeatable with the same `driver_nonce`."""
    submission = await read_record(request, Submission, GRAPH)
    request.scope[SUBJECT] = f"job {submission.graph.name}"
    _check_job(request, submission)
    return answer(await _in_thread(request, _submit, service, request.app.state.authenticator, submission), 202)


T = TypeVar("T")


async def _in_thread(request: Request, work: Callable[..., T], *arguments: Any) -> T:
    """Work on storage, by threads that no viewer's request can take."""
    return await to_thread.run_sync(functools.partial(work, *arguments), limiter=request.app.state.submit_threads)


def _check_job(request: Request, submission: Submission) -> None:
    """Raise AccessDeniedError for a caller who is confined to another job, or who names a snapshot that is not in the folder of its
    own: others hold the rows of other jobs. Raises InvalidConfigError or GraphError for no job at all."""
    caller: Caller = request.scope[CALLER]
    if caller.job_id == ANY_JOB:
        return
    job_id = identify_job(submission)
    confine(caller, Access.OPERATE, job_id)
    named = submission.restore
    if named is not None and not is_path(named) and submission.branch is not msgspec.UNSET:  # a snapshot of the parent
        text = f"the token is for job {job_id} alone, and {named!r} is a snapshot of the job that this is a branch of"
        raise AccessDeniedError(text, role=caller.role.value, needed=Access.OPERATE.value, job=job_id)
    if named is not None and is_path(named):
        own = SnapshotDirectories((f"{request.app.state.settings.location.rstrip('/')}/{job_id}",))
        try:
            own.confine(named)
        except InvalidConfigError as error:
            text = f"the token is for job {job_id} alone: it restores {LATEST!r}, or a snapshot in the folder of that job"
            raise AccessDeniedError(text, role=caller.role.value, needed=Access.OPERATE.value, job=job_id) from error


def _submit(service: Coordinator, authenticator: Authenticator, submission: Submission) -> SubmissionAccepted:
    authenticator.prepare()
    accepted = service.submit(submission)
    return msgspec.structs.replace(accepted, worker_token=authenticator.worker_token(accepted.job_id, accepted.submission))


@router.post("/jobs/{jobid}/leave", response_model=schemas.Empty, openapi_extra=describe_record(DriverDeparture))
async def leave(request: Request, service: Service, job_id: JobId) -> schemas.Empty:
    """The driver of a submission takes its workers away: the job waits for another submission, and counts no failure."""
    departure = await read_record(request, DriverDeparture, REPORT)
    await _in_thread(request, service.leave, job_id, departure.submission)
    return schemas.Empty()


def _described(config: type[JobConfig]) -> dict[str, Any]:
    """OpenAPI's properties of the settings that can be changed."""
    known = msgspec.json.schema(config)["$defs"][config.__name__]["properties"]
    return {name: {key: value for key, value in known[name].items() if key != "default"} for name in TUNABLE}


class SettingsChange(schemas.RequestBody):
    """Settings of the job -> new values; those that are left out stay, and null is none."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"properties": _described(JobConfig), "additionalProperties": False})


class JobSettings(schemas.Record):
    settings: dict[str, SettingValue]
    """What holds, of the settings that can be changed while the job runs."""
    processing_backlog: bool
    """A source processes a backlog: checkpoint_interval_during_backlog_ms is the interval, if it is not null."""
    as_of_ms: int
    """Until when this is known to have been so, ms since the epoch."""


def _settings(view: CheckpointConfigView) -> JobSettings:
    settings = {name: getattr(view.config, name) for name in TUNABLE}
    return JobSettings(settings=settings, processing_backlog=view.is_processing_backlog, as_of_ms=view.as_of_ms)


@router.get("/jobs/{jobid}/settings", **VIEWED)
def settings(service: Service, job_id: JobId) -> JobSettings:
    """Settings of a job that can be changed while it runs, as they are."""
    return _settings(service.checkpoint_config(job_id))


@router.patch("/jobs/{jobid}/checkpoints/config", openapi_extra=describe_model(SettingsChange))
async def change_settings(
    request: Request, service: Service, job_id: JobId, body: Annotated[SettingsChange, Depends(body_of(SettingsChange))]
) -> JobSettings:
    """Change settings of a running job, for the checkpoints that are triggered from now on, until its next submission. Answered
    once the change is durable; repeatable."""
    changes = body.model_extra or {}
    found = _settings(await request.app.state.commands.run(service.change_settings, job_id, changes))
    request.scope[SUBJECT] = ", ".join(f"{name}={value}" for name, value in changes.items())
    return found


class JobNumbers(schemas.Record):
    """Counters of a job's newest submission: records read again after a restart count once."""

    jid: schemas.HexId
    records_in: int
    """Read by the sources."""
    records_out: int
    """Taken by the sinks."""
    late_dropped: int
    rows_skipped: int
    """Left out by on_error="skip"."""
    restarts: int
    restart_strategy: str
    """In a line, with its limits."""
    restarts_at: int
    """End of the pause before the next attempt, ms since the epoch; -1 unless the job is RESTARTING."""
    branch_of: str
    """Name of the job that it is a branch of; empty: it is none."""
    backpressure: Level | None = None
    """Level of its worst running subtask; null if none has told."""
    as_of_ms: int
    """Until when this is known to have been so, ms since the epoch."""


class UnreadableJob(schemas.Record):
    """A job that nobody leads, since its records can't be read."""

    jid: schemas.HexId
    reason: str


class Totals(schemas.Record):
    jobs: list[JobNumbers]
    unreadable: list[UnreadableJob]
    """Jobs that no list of jobs has."""


@router.get("/totals", **VIEWED)
def totals(service: Service) -> Totals:
    """Records read, written and dropped by each job, and whether it is backpressured."""
    return Totals(
        jobs=[
            JobNumbers(
                jid=job.overview.job_id,
                restarts=job.restarts,
                restart_strategy=job.graph.config.restart.describe(),
                restarts_at=job.restarts_at_ms,
                branch_of=job.branch_of,
                backpressure=worst_level(job.subtasks),
                as_of_ms=job.as_of_ms,
                **msgspec.structs.asdict(derive_job_totals(job.graph, job.totals)),
            )
            for job in service.numbers()
        ],
        unreadable=[
            UnreadableJob(jid=job_id, reason=clip(why, REASON_BYTES_MAX)) for job_id, why in service.broken_jobs().items()
        ],
    )


@router.post(
    "/preflight",
    response_class=Response,
    responses={200: describe_answer(PreflightReport)},
    openapi_extra=describe_record(Submission),
)
async def preflight(request: Request, service: Service) -> Response:
    """Check a submission against the snapshot it names; nothing is started and nothing changed."""
    submission = await read_record(request, Submission, GRAPH)
    _check_job(request, submission)
    return answer(await _in_thread(request, service.preflight, submission))


@router.get("/jobs/{jobid}/preflight", response_class=Response, responses={200: describe_answer(PreflightReport)})
async def preflight_of(
    request: Request,
    service: Service,
    job_id: JobId,
    restore: Annotated[
        str, Query(min_length=1, max_length=PATH_CHARACTERS_MAX, description="`latest`, a checkpoint's id, or a snapshot's path")
    ] = LATEST,
    allow_non_restored_state: Annotated[bool, Query(description="State that no operator of the job has may be dropped")] = False,
) -> Response:
    """Check a snapshot against the graph that a job runs now; nothing is started and nothing changed. 503 while two others are
    checked so."""
    commands = request.app.state.commands
    view = await commands.run(service.job, job_id)
    submission = Submission(view.graph, job_id, restore, allow_non_restored_state=allow_non_restored_state)
    _check_job(request, submission)
    return answer(await commands.run(_preflight, service, submission))


def _preflight(service: Coordinator, submission: Submission) -> PreflightReport:
    """Checks of pages read every file of a snapshot, and have no place among the threads of drivers. They take CHECKS_MAX of those
    of commands at most."""
    if not _checking.acquire(blocking=False):
        raise StorageUnavailableError(f"{CHECKS_MAX} snapshots are being checked: try again later", job=submission.job_id)
    try:
        return service.preflight(submission)
    finally:
        _checking.release()
