"""Flink's monitoring dialect: a job's configuration, accumulators, result, metrics and parallelism; and its cancellation by GET."""

from __future__ import annotations

import time
from typing import NoReturn

from fastapi import APIRouter, Request

from holdfast.api.errors import NoCounterpartError
from holdfast.api.flink import job_schemas as shapes
from holdfast.api.flink import render_applications, render_metrics, schemas
from holdfast.api.flink.vertex_schemas import AggregatedMetric
from holdfast.api.http.basic import check_same_origin
from holdfast.api.routes.common import ERRORS, JobId, Service
from holdfast.api.routes.dialect.vertices import MetricNames, Things, Wanted, aggregated, listed
from holdfast.api.routes.viewed import VIEWED
from holdfast.barriers.messages import clip
from holdfast.coordinator.interface import Coordinator
from holdfast.coordinator.views import WholeJobView
from holdfast.statebackends.errors import InvalidConfigError, NotFoundError

router = APIRouter(tags=["flink"], responses=ERRORS)

_ID_BYTES_SHOWN_MAX = 64

JOBS_MAX = 1_000
"""Jobs over which one request aggregates, at most, those that began last."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@router.get("/jobs/metrics", response_model_exclude_none=True, **VIEWED)
def jobs_metrics(service: Service, wanted: Wanted, get: MetricNames = None, jobs: Things = None) -> list[AggregatedMetric]:
    """Numbers over all jobs, or over some (`jobs=id,id`): their names, or with `get` the values. 404 if one of them is unknown."""
    chosen = frozenset(job.strip() for job in jobs.split(",") if job.strip()) if jobs else None
    views = service.whole_jobs(chosen)
    unknown = sorted((chosen or frozenset()).difference(each.job.overview.job_id for each in views))
    if unknown:  # a number over the others would pass for one over all that were named
        shown = clip(unknown[0], _ID_BYTES_SHOWN_MAX)
        raise NotFoundError(f"jobs: there is no job {shown!r} here", job=shown)
    return aggregated((_metrics(service, each) for each in views[:JOBS_MAX]), get, wanted)


def _metrics(service: Coordinator, view: WholeJobView) -> dict[str, str]:
    return render_metrics.job_metrics(view.job, view.checkpoints, service.directory)


@router.get("/jobs/{jobid}/metrics", **VIEWED)
def job_metrics(service: Service, job_id: JobId, get: MetricNames = None) -> list[schemas.Metric] | list[schemas.MetricName]:
    """Numbers of a job, its checkpoints and restarts: their names, or with `get` the values."""
    return listed(_metrics(service, service.whole_job(job_id)), get)


@router.get("/jobs/{jobid}/config", **VIEWED)
def job_config(service: Service, job_id: JobId) -> shapes.JobConfiguration:
    """The job's restart strategy and parallelism, and in `user-config` its settings as they hold."""
    view = service.job(job_id)
    return render_applications.job_configuration(view, service.checkpoint_config(job_id).config)


@router.get("/jobs/{jobid}/accumulators", **VIEWED)
def job_accumulators(service: Service, job_id: JobId, includeSerializedValue: bool = False) -> shapes.JobAccumulators:
    """Counters of the user's functions, of the job's newest submission. There are no serialized values."""
    return render_applications.job_accumulators(service.job(job_id))


@router.get("/jobs/{jobid}/execution-result", response_model_exclude_none=True, **VIEWED)
def execution_result(service: Service, job_id: JobId) -> shapes.ExecutionResult:
    """How a job ended; IN_PROGRESS until then."""
    return render_applications.execution_result(service.job(job_id))


@router.get("/jobs/{jobid}/resource-requirements", **VIEWED)
def resource_requirements(service: Service, job_id: JobId) -> shapes.ResourceRequirements:
    """The parallelism of each vertex: both bounds are that of the submission."""
    return render_applications.resource_requirements(service.job(job_id))


@router.put("/jobs/{jobid}/resource-requirements")
def change_resource_requirements(service: Service, job_id: JobId) -> schemas.Empty:
    """Refused: a job changes its parallelism when it is submitted again."""
    service.checkpoint_config(job_id)
    text = f"job {job_id} keeps its parallelism while it runs: stop it with a savepoint and submit it with another"
    raise InvalidConfigError(text, setting="parallelism")


@router.get("/jobs/{jobid}/rescales/config")
@router.get("/jobs/{jobid}/rescales/overview")
@router.get("/jobs/{jobid}/rescales/history")
@router.get("/jobs/{jobid}/rescales/summary")
@router.get("/jobs/{jobid}/rescales/details/{rescaleuuid}")
def rescales(service: Service, job_id: JobId) -> schemas.Empty:
    """404, as of a job of Flink without the adaptive scheduler: no job is rescaled while it runs."""
    service.checkpoint_config(job_id)
    _no_rescales(job_id)


def _no_rescales(job_id: str) -> NoReturn:
    text = f"job {job_id} has no rescales: it has no adaptive scheduler, and its parallelism changes with a submission"
    raise NoCounterpartError(text, job=job_id)


@router.get("/jobs/{jobid}/yarn-cancel", status_code=202)
async def cancel(request: Request, service: Service, job_id: JobId) -> schemas.Empty:
    """Begin to cancel a job: what Flink's UI asks. A change by GET, and so taken with a bearer token, or from a page of this
    service."""
    check_same_origin(request.scope)
    await request.app.state.commands.cancel(service.cancel, job_id)
    return schemas.Empty()
