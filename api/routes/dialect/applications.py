"""Flink's monitoring dialect: applications. Each job is one, with the job's id."""

from __future__ import annotations

from fastapi import APIRouter, Request

from holdfast.api.flink import job_schemas as shapes
from holdfast.api.flink import render_applications, schemas, worker_schemas
from holdfast.api.routes.common import ERRORS, JobId, Service
from holdfast.api.routes.dialect.execution import now_ms
from holdfast.api.routes.dialect.job_manager import Configuration
from holdfast.api.routes.viewed import VIEWED

router = APIRouter(tags=["flink"], responses=ERRORS)

@router.get("/applications/overview", **VIEWED)
def applications(service: Service) -> shapes.ApplicationsOverview:
    """All applications, with times and states."""
    at_ms = now_ms()
    found = [render_applications.application_overview(each, now_ms=at_ms) for each in service.jobs()]
    return shapes.ApplicationsOverview(applications=found)


@router.get("/applications/{jobid}", **VIEWED)
def application(service: Service, job_id: JobId) -> shapes.ApplicationDetails:
    """One application and its job."""
    return render_applications.application_details(service.job(job_id))


@router.get("/applications/{jobid}/exceptions", **VIEWED)
def application_exceptions(service: Service, job_id: JobId) -> shapes.ApplicationExceptions:
    """The failure that ended it; empty for one that runs."""
    return render_applications.application_exceptions(service.job(job_id))


@router.get("/applications/{jobid}/jobmanager/config")
def application_config(service: Service, job_id: JobId, configuration: Configuration) -> list[worker_schemas.ConfigurationEntry]:
    """Settings of the coordinator, without secrets."""
    service.checkpoint_config(job_id)
    return configuration


@router.post("/applications/{jobid}/cancel", status_code=202)
async def cancel_application(request: Request, service: Service, job_id: JobId) -> schemas.Empty:
    """Begin to cancel its job."""
    await request.app.state.commands.cancel(service.cancel, job_id)
    return schemas.Empty()
