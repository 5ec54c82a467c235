"""Flink's monitoring dialect: task managers, which are the worker processes that hold a slot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Path, Request

from holdfast.api.flink import render_workers, schemas
from holdfast.api.flink import worker_schemas as shapes
from holdfast.api.flink.render_vertices import worker_id
from holdfast.api.flink.vertex_schemas import AggregatedMetric
from holdfast.api.routes.common import ERRORS, JobId, Service
from holdfast.api.routes.dialect.vertices import MetricNames, Things, Wanted, aggregated, listed
from holdfast.coordinator.interface import Coordinator
from holdfast.coordinator.views import JobView
from holdfast.statebackends.errors import NotFoundError, NotLeaderError

router = APIRouter(tags=["flink"], responses=ERRORS)

WorkerId = Annotated[str, Path(alias="taskmanagerid", max_length=200, description="`<job id>_slot-<number>`")]
FileName = Annotated[str, Path(alias="filename", max_length=200)]


def _jobs(service: Coordinator) -> Iterator[JobView]:
    """Those that may have workers. One that has gone to another coordinator meanwhile is left out."""
    for overview in service.jobs():
        if not overview.is_terminal:
            try:
                yield service.job(overview.job_id)
            except (NotFoundError, NotLeaderError):
                continue


@router.get("/taskmanagers")
def task_managers(service: Service) -> shapes.TaskManagers:
    """All workers that hold a slot."""
    found = [render_workers.task_manager(view, worker) for view in _jobs(service) for worker in render_workers.workers_of(view)]
    return shapes.TaskManagers(taskmanagers=found)


@router.get("/taskmanagers/metrics", response_model_exclude_none=True)
def task_managers_metrics(
    service: Service, wanted: Wanted, get: MetricNames = None, taskmanagers: Things = None
) -> list[AggregatedMetric]:
    """Numbers over all workers, or over some (`taskmanagers=id,id`): their names, or with `get` the values."""
    chosen = set(taskmanagers.split(",")) if taskmanagers else None
    found = (
        render_workers.worker_metrics(view, worker)
        for view in _jobs(service)
        for worker in render_workers.workers_of(view)
        if chosen is None or worker_id(view.overview.job_id, worker.slot) in chosen
    )
    return aggregated(found, get, wanted)


@router.get("/taskmanagers/{taskmanagerid}")
def task_manager(service: Service, named: WorkerId) -> shapes.TaskManagerDetails:
    """One worker."""
    job_id, slot = render_workers.parse_worker_id(named)
    return render_workers.task_manager_details(service.job(job_id), slot)


@router.get("/taskmanagers/{taskmanagerid}/metrics")
def task_manager_metrics(
    service: Service, named: WorkerId, get: MetricNames = None
) -> list[schemas.Metric] | list[schemas.MetricName]:
    """Numbers of one worker: their names, or with `get` the values."""
    job_id, slot = render_workers.parse_worker_id(named)
    view = service.job(job_id)
    return listed(render_workers.worker_metrics(view, render_workers.worker_of(view, slot)), get)


@router.get("/taskmanagers/{taskmanagerid}/logs")
def logs(service: Service, named: WorkerId) -> shapes.LogFiles:
    """Files of a worker's log that can be read here: none."""
    _known(service, named)
    return shapes.LogFiles(logs=[])


@router.get("/taskmanagers/{taskmanagerid}/logs/{filename}")
@router.get("/taskmanagers/{taskmanagerid}/log")
@router.get("/taskmanagers/{taskmanagerid}/stdout")
def log(service: Service, named: WorkerId) -> schemas.Empty:
    """Not available: a worker's log is where Spark keeps that of its executor."""
    _known(service, named)
    text = f"the log of {named} can't be read here: a worker's output is in the log of its Spark executor"
    raise NotFoundError(text)


@router.get("/taskmanagers/{taskmanagerid}/thread-dump")
def thread_dump(service: Service, named: WorkerId) -> schemas.Empty:
    """Not available: workers are not asked for their threads."""
    _known(service, named)
    raise NotFoundError(f"there is no thread dump of {named}: workers are not asked for their threads")


@router.get("/jobs/{jobid}/taskmanagers/{taskmanagerid}/log-url")
def log_url(request: Request, service: Service, job_id: JobId, named: WorkerId) -> shapes.LogUrl:
    """Where a worker's log would be asked for."""
    _known(service, named)
    service.checkpoint_config(job_id)
    return shapes.LogUrl(url=f"{request.base_url}v1/taskmanagers/{named}/log")


def _known(service: Coordinator, named: str) -> None:
    job_id, slot = render_workers.parse_worker_id(named)
    render_workers.worker_of(service.job(job_id), slot)
