"""Flink's monitoring dialect: task managers, which are the worker processes that hold a slot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from holdfast.api.flink import render_stacks, render_workers, schemas
from holdfast.api.flink import worker_schemas as shapes
from holdfast.api.flink.render_vertices import worker_id
from holdfast.api.flink.vertex_schemas import AggregatedMetric
from holdfast.api.routes.common import ERRORS, JobId, Service
from holdfast.api.routes.dialect.vertices import MetricNames, Things, Wanted, aggregated, listed
from holdfast.api.routes.questions import ask_workers
from holdfast.api.routes.viewed import VIEWED
from holdfast.barriers.messages import LogTail, QuestionKind
from holdfast.coordinator.dispatcher.reading.questions import Question
from holdfast.coordinator.interface import Coordinator
from holdfast.coordinator.views import AnswerView, JobView
from holdfast.statebackends.errors import NotFoundError, QuestionNotKnownError

router = APIRouter(tags=["flink"], responses=ERRORS)

WorkerId = Annotated[str, Path(alias="taskmanagerid", max_length=200, description="`<job id>_slot-<number>`")]
FileName = Annotated[str, Path(alias="filename", max_length=200)]


def _jobs(service: Coordinator) -> Iterator[JobView]:
    """Those that may have workers, each as it was at one moment."""
    return (view.job for view in service.whole_jobs(live_only=True))


@router.get("/taskmanagers", **VIEWED)
def task_managers(service: Service) -> shapes.TaskManagers:
    """All workers that hold a slot."""
    found = [render_workers.task_manager(view, worker) for view in _jobs(service) for worker in render_workers.workers_of(view)]
    return shapes.TaskManagers(taskmanagers=found)


@router.get("/taskmanagers/metrics", response_model_exclude_none=True, **VIEWED)
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


@router.get("/taskmanagers/{taskmanagerid}", **VIEWED)
def task_manager(service: Service, named: WorkerId) -> shapes.TaskManagerDetails:
    """One worker."""
    job_id, slot = render_workers.parse_worker_id(named)
    return render_workers.task_manager_details(service.job(job_id), slot)


@router.get("/taskmanagers/{taskmanagerid}/metrics", **VIEWED)
def task_manager_metrics(
    service: Service, named: WorkerId, get: MetricNames = None
) -> list[schemas.Metric] | list[schemas.MetricName]:
    """Numbers of one worker: their names, or with `get` the values."""
    job_id, slot = render_workers.parse_worker_id(named)
    view = service.job(job_id)
    return listed(render_workers.worker_metrics(view, render_workers.worker_of(view, slot)), get)


LOG_NAME = "worker.log"

_TEXT = "text/plain; charset=utf-8"
_LOG: dict[int | str, dict[str, object]] = {200: {"content": {"text/plain": {}}, "description": "The newest lines of the log."}}
_STDOUT: dict[int | str, dict[str, object]] = {200: {"content": {"text/plain": {}}, "description": "The end of the output."}}


@router.get("/taskmanagers/{taskmanagerid}/logs")
async def logs(service: Service, named: WorkerId) -> shapes.LogFiles:
    """The worker's log, as far as it is kept; empty of a worker that does not tell it."""
    try:
        found = await _log_of(service, named)
    except QuestionNotKnownError:
        return shapes.LogFiles(logs=[])
    return shapes.LogFiles(logs=[shapes.LogFile(name=LOG_NAME, size=len(found.text.encode()), mtime=found.changed_ms)])


@router.get("/taskmanagers/{taskmanagerid}/logs/{filename}", response_class=Response, responses=_LOG)
async def log_file(service: Service, named: WorkerId, name: FileName) -> Response:
    """The newest lines of a worker's log."""
    if name != LOG_NAME:
        raise NotFoundError(f"there is no log {name!r} of a worker: it is {LOG_NAME}")
    return await _log(service, named)


@router.get("/taskmanagers/{taskmanagerid}/log", response_class=Response, responses=_LOG)
async def log(service: Service, named: WorkerId) -> Response:
    """The newest lines of a worker's log: what its loggers let through, without secrets."""
    return await _log(service, named)


async def _log(service: Coordinator, named: str) -> Response:
    return _text((await _log_of(service, named)).text)


def _text(text: str) -> Response:
    return Response(text, media_type=_TEXT, headers={"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"})


async def _log_of(service: Coordinator, named: str) -> LogTail:
    found = await _ask(service, named, QuestionKind.LOG)
    return found.answer.log or LogTail()


@router.get("/taskmanagers/{taskmanagerid}/stdout", response_class=Response, responses=_STDOUT)
async def stdout(service: Service, named: WorkerId) -> Response:
    """The end of what functions printed in a worker, without secrets; all of it is in the log of its Spark executor."""
    found = await _ask(service, named, QuestionKind.STDOUT)
    return _text((found.answer.log or LogTail()).text)


@router.get("/taskmanagers/{taskmanagerid}/thread-dump")
async def thread_dump(service: Service, named: WorkerId) -> shapes.ThreadDump:
    """What each thread of a worker does at the moment, without any variable."""
    return render_stacks.thread_dump(await _ask(service, named, QuestionKind.STACKS))


async def _ask(service: Coordinator, named: str, kind: QuestionKind) -> AnswerView:
    job_id, slot = render_workers.parse_worker_id(named)
    return (await ask_workers(service, [Question(job_id, slot, kind)]))[0]


@router.get("/jobs/{jobid}/taskmanagers/{taskmanagerid}/log-url")
def log_url(request: Request, service: Service, job_id: JobId, named: WorkerId) -> shapes.LogUrl:
    """Where a worker's log would be asked for."""
    _known(service, named)
    service.checkpoint_config(job_id)
    return shapes.LogUrl(url=f"{request.base_url}v1/taskmanagers/{named}/log")


def _known(service: Coordinator, named: str) -> None:
    job_id, slot = render_workers.parse_worker_id(named)
    render_workers.worker_of(service.job(job_id), slot)
