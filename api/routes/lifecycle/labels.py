"""Labels of a job's checkpoints and savepoints: a labelled one is not deleted."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import Field

from holdfast.api.flink import schemas
from holdfast.api.routes.common import ERRORS, JobId, Service, body_of, describe_model
from holdfast.coordinator.ownership.labels import LabelView, check_users_label

router = APIRouter(prefix="/v1", tags=["snapshots"], responses=ERRORS)

NAME_CHARS_MAX = 256
"""Characters of a name in a path; which of them make a label is the service's to judge."""

LabelName = Annotated[str, Path(alias="label", max_length=NAME_CHARS_MAX, description="1 to 64 letters, digits, `.`, `_`, `-`")]


class Labelling(schemas.RequestBody):
    checkpoint: int = Field(ge=1, lt=2**63)
    """Id of a completed checkpoint or savepoint of the job."""


class Label(schemas.Record):
    label: str
    checkpoint_id: int
    kind: str
    """checkpoint, final, savepoint or stop_savepoint."""
    location: str
    created_ms: int
    """When it was given; of a label from before that was recorded, when the labels of its snapshot were last changed before."""


class Labels(schemas.Record):
    labels: list[Label]
    """By name."""
    damage: list[str]
    """What can't be read, and is left out; the snapshots concerned are not deleted."""
    as_of_ms: int
    """When the read began, ms since the epoch."""


class Removed(schemas.Record):
    removed: list[Label]


def render(view: LabelView) -> Label:
    return Label(
        label=view.label,
        checkpoint_id=view.checkpoint_id,
        kind=view.kind.value,
        location=view.folder,
        created_ms=view.created_ms,
    )


@router.get("/jobs/{jobid}/labels", response_model=Labels)
async def labels(request: Request, service: Service, job_id: JobId) -> Labels:
    """Labels of a job's snapshots, from its directory; also of a job that has ended."""
    as_of_ms = time.time_ns() // 1_000_000
    found = await request.app.state.readers.run(service.labels, job_id)
    return Labels(labels=[render(view) for view in found.labels], damage=list(found.damage), as_of_ms=as_of_ms)


@router.put("/jobs/{jobid}/labels/{label}", response_model=Label, openapi_extra=describe_model(Labelling, required=True))
async def label(
    request: Request,
    service: Service,
    job_id: JobId,
    name: LabelName,
    body: Annotated[Labelling, Depends(body_of(Labelling))],
) -> Label:
    """Gives a completed checkpoint or savepoint a label, which keeps it from being deleted; idempotent. 409 if its deletion has
    begun, or another one has the label."""
    found = await request.app.state.commands.run(service.add_label, job_id, body.checkpoint, check_users_label(name))
    return render(found)


@router.delete("/jobs/{jobid}/labels/{label}", response_model=Removed)
async def remove(
    request: Request,
    service: Service,
    job_id: JobId,
    name: LabelName,
    checkpoint: Annotated[int | None, Query(ge=1, lt=2**63, description="Of this one alone")] = None,
) -> Any:
    """Removes a label. What the job keeps no longer is deleted then."""
    found = await request.app.state.commands.run(service.remove_label, job_id, name, checkpoint)
    return Removed(removed=[render(view) for view in found])
