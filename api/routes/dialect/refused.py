"""Flink's monitoring dialect: what Holdfast has no counterpart for. Refused in Flink's shape, by name.

Without these routes a client could not tell a path that is wrong from a thing that there is not."""

from __future__ import annotations

from fastapi import APIRouter, Request

from holdfast.api.errors import NoCounterpartError
from holdfast.api.flink import schemas
from holdfast.api.routes.common import ERRORS

router = APIRouter(tags=["flink"], responses=ERRORS)

_REFUSED = {
    "jars": "jobs are Python programs, which their drivers submit: nothing is uploaded here",
    "datasets": "no data set outlives its job",
    "profiler": "no process is profiled from here",
    "cluster": "a coordinator is stopped where it was started, with SIGTERM",
    "rescaling": "a job changes its parallelism when it is submitted again: stop it with a savepoint first",
    "coordinators": "operators take no requests of clients",
}


@router.get("/jars")
@router.post("/jars/upload")
@router.delete("/jars/{jarid}")
@router.get("/jars/{jarid}/plan")
@router.post("/jars/{jarid}/plan")
@router.post("/jars/{jarid}/run")
@router.post("/jars/{jarid}/run-application")
@router.get("/datasets")
@router.delete("/datasets/{datasetid}")
@router.get("/datasets/delete/{triggerid}")
@router.get("/jobmanager/profiler")
@router.post("/jobmanager/profiler")
@router.get("/jobmanager/profiler/{filename}")
@router.get("/taskmanagers/{taskmanagerid}/profiler")
@router.post("/taskmanagers/{taskmanagerid}/profiler")
@router.get("/taskmanagers/{taskmanagerid}/profiler/{filename}")
@router.delete("/cluster")
@router.patch("/jobs/{jobid}/rescaling")
@router.get("/jobs/{jobid}/rescaling/{triggerid}")
@router.post("/jobs/{jobid}/coordinators/{operatorUid}")
async def refused(request: Request) -> schemas.Empty:
    """Refused: Holdfast has no jars, data sets, profiler, rescaling of a running job or shutdown over REST."""
    route = str(getattr(request.scope.get("route"), "path", ""))
    name = next(each for each in _REFUSED if f"/{each}" in route)
    raise NoCounterpartError(f"{request.method} {route}: Holdfast has no {name} as Flink does: {_REFUSED[name]}", name=name)
