"""Drills: a snapshot of a job is read as a restore would read it, in a process of its own."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from pydantic import Field

from holdfast.api.flink import schemas
from holdfast.api.routes.common import ERRORS, JobId, Service, body_of, describe_model
from holdfast.coordinator.drills.records import DrillView

router = APIRouter(prefix="/v1", tags=["snapshots"], responses=ERRORS)


class Drilling(schemas.RequestBody):
    checkpoint: int | None = Field(None, ge=1, lt=2**63)
    """Id of a completed checkpoint or savepoint of the job; null: what a failure now would go back to, or the newest that an ended
    job keeps."""


class Drill(schemas.Record):
    drill_id: str
    checkpoint_id: int
    kind: str
    location: str
    state: str
    """running, passed, failed (problems were found) or error (nothing is known: see `error`)."""
    by: str
    """user or schedule."""
    started_ms: int
    duration_ms: int
    """-1 while it runs, as what follows."""
    operators: int
    states: int
    rows: int
    """Read, of all states and of what was in flight."""
    size: int
    problem_count: int
    problems: list[str]
    """The first 20."""
    error: str


class Drills(schemas.Record):
    drills: list[Drill]
    """Newest first, 20 at most."""
    as_of_ms: int
    """When they were asked for, ms since the epoch."""


def render(view: DrillView) -> Drill:
    return Drill(
        drill_id=view.drill_id,
        checkpoint_id=view.checkpoint_id,
        kind=view.kind.value,
        location=view.location,
        state=view.state.value,
        by=view.by,
        started_ms=view.started_ms,
        duration_ms=view.duration_ms,
        operators=view.operators,
        states=view.states,
        rows=view.rows,
        size=view.size,
        problem_count=view.problem_count,
        problems=list(view.problems),
        error=view.error,
    )


@router.post("/jobs/{jobid}/drills", response_model=Drill, status_code=202, openapi_extra=describe_model(Drilling))
async def drill(
    request: Request, service: Service, job_id: JobId, body: Annotated[Drilling, Depends(body_of(Drilling))]
) -> Drill:
    """Begins a drill and answers at once. 503 while another one is under way, of whichever job, and if storage does not tell in
    time what is to be read: the drill may begin once it does."""
    return render(await request.app.state.readers.run(service.drill, job_id, body.checkpoint))


@router.get("/jobs/{jobid}/drills", response_model=Drills)
async def drills(request: Request, service: Service, job_id: JobId) -> Drills:
    """Drills of a job's snapshots, also of those under leaders before this one."""
    as_of_ms = time.time_ns() // 1_000_000
    found = await request.app.state.readers.run(service.drills, job_id)
    return Drills(drills=[render(view) for view in found], as_of_ms=as_of_ms)
