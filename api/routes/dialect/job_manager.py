"""Flink's monitoring dialect: the job manager, which is this coordinator: settings, process, log, threads.

Nothing here shows a token, a password or what an environment variable holds."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from holdfast.api import logs
from holdfast.api.flink import process, render_applications, render_metrics, schemas
from holdfast.api.flink import worker_schemas as shapes
from holdfast.api.routes.common import ERRORS, JobId, Service
from holdfast.api.routes.dialect.vertices import MetricNames, listed
from holdfast.statebackends.errors import NotFoundError

router = APIRouter(tags=["flink"], responses=ERRORS)

LOG_NAME = "coordinator.log"

_TEXT = "text/plain; charset=utf-8"
_LOG: dict[int | str, dict[str, object]] = {200: {"content": {"text/plain": {}}, "description": "The newest lines of the log."}}


async def _configuration(request: Request) -> list[shapes.ConfigurationEntry]:
    settings = request.app.state.settings
    values = {each.name: getattr(settings, each.name) for each in fields(settings)}
    return [
        shapes.ConfigurationEntry(key=name, value=render_applications.shown(name, _plain(value)))
        for name, value in sorted(values.items())
        if value is not None
    ]


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float | tuple) else str(value)


Configuration = Annotated[list[shapes.ConfigurationEntry], Depends(_configuration)]


@router.get("/jobmanager/config")
def configuration(entries: Configuration) -> list[shapes.ConfigurationEntry]:
    """Settings of the coordinator; a token is hidden."""
    return entries


@router.get("/jobmanager/environment")
def environment() -> shapes.Environment:
    """The interpreter, its options and where it finds modules; no environment variables."""
    return process.environment()


@router.get("/jobmanager/metrics")
def metrics(service: Service, get: MetricNames = None) -> list[schemas.Metric] | list[schemas.MetricName]:
    """Numbers of the coordinator and of its process: their names, or with `get` the values."""
    return listed({**render_metrics.cluster_metrics(service.cluster()), **process.process_metrics()}, get)


@router.get("/jobmanager/logs")
def log_files() -> shapes.LogFiles:
    """The coordinator's log, as far as it is kept; empty inside a driver with logging of its own."""
    kept = logs.tail.read()
    if kept is None:
        return shapes.LogFiles(logs=[])
    text, changed_ms = kept
    return shapes.LogFiles(logs=[shapes.LogFile(name=LOG_NAME, size=len(text.encode()), mtime=changed_ms)])


@router.get("/jobmanager/logs/{filename}", response_class=Response, responses=_LOG)
def log_file(name: Annotated[str, Path(alias="filename", max_length=200)]) -> Response:
    """The newest lines of the coordinator's log."""
    if name != LOG_NAME:
        raise NotFoundError(f"there is no log {name!r}: it is {LOG_NAME}")
    return _log()


@router.get("/jobmanager/log", response_class=Response, responses=_LOG)
def log() -> Response:
    """The newest lines of the coordinator's log."""
    return _log()


def _log() -> Response:
    kept = logs.tail.read()
    if kept is None:
        raise NotFoundError("this coordinator writes no log of its own: its lines are in that of the driver around it")
    return Response(kept[0], media_type=_TEXT, headers={"X-Content-Type-Options": "nosniff"})


@router.get("/jobmanager/stdout")
def stdout() -> schemas.Empty:
    """Not kept: the coordinator writes its log to standard error."""
    raise NotFoundError("the coordinator's standard output is not kept: what it tells is in its log")


@router.get("/jobmanager/thread-dump")
def thread_dump() -> shapes.ThreadDump:
    """What each thread of the coordinator does at the moment, without any variable."""
    return process.thread_dump()


@router.get("/jobs/{jobid}/jobmanager/config")
def job_configuration(service: Service, job_id: JobId, entries: Configuration) -> list[shapes.ConfigurationEntry]:
    """Settings of the job's coordinator; a token is hidden."""
    service.checkpoint_config(job_id)
    return entries


@router.get("/jobs/{jobid}/jobmanager/environment")
def job_environment(service: Service, job_id: JobId) -> shapes.Environment:
    """The process of the job's coordinator."""
    service.checkpoint_config(job_id)
    return process.environment()


@router.get("/jobs/{jobid}/jobmanager/log-url")
def job_log_url(request: Request, service: Service, job_id: JobId) -> shapes.LogUrl:
    """Where the log of the job's coordinator is."""
    service.checkpoint_config(job_id)
    return shapes.LogUrl(url=f"{request.base_url}v1/jobmanager/log")
