"""Why a checkpoint was slow, failed, is pending or missing, and how healthy a job is: explanations for people, as records."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from holdfast.api.routes.common import ERRORS, CheckpointNumber, JobId, Service, answer, describe_answer
from holdfast.api.routes.viewed import DIAGNOSED, NOT_MODIFIED, tagged
from holdfast.barriers import codec
from holdfast.coordinator.explain.records import Explanation, HealthView
from holdfast.coordinator.interface import Coordinator

router = APIRouter(prefix="/v1", tags=["jobs"], responses=ERRORS)


@router.get(
    "/jobs/{jobid}/health",
    response_class=Response,
    dependencies=DIAGNOSED["dependencies"],
    responses={200: describe_answer(HealthView), **DIAGNOSED["responses"]},
)
def health(service: Service, shown: Response, job_id: JobId) -> Response:
    """Whether a job is safe, why it is slow, and where it will resume, each with a verdict: ok, at_risk or bad."""
    found = answer(service.health(job_id))
    found.headers.update(shown.headers)
    return found


EXPLAINED: dict[int | str, dict[str, Any]] = {200: describe_answer(Explanation), **NOT_MODIFIED}


@router.get("/jobs/{jobid}/checkpoints/explain", response_class=Response, responses=EXPLAINED)
def explain_now(request: Request, service: Service, job_id: JobId) -> Response:
    """Explains the checkpoint that is late, or why none is triggered; else the newest that ended."""
    return _explained(request, service, job_id, None)


@router.get("/jobs/{jobid}/checkpoints/details/{checkpointid}/explain", response_class=Response, responses=EXPLAINED)
def explain(request: Request, service: Service, job_id: JobId, checkpoint_id: CheckpointNumber) -> Response:
    """Why a checkpoint was slow or failed, or is pending: a chain of causes, and one setting to change. One that is not shown any
    more is explained as the job's history has it."""
    return _explained(request, service, job_id, checkpoint_id)


def _explained(request: Request, service: Coordinator, job_id: str, checkpoint_id: int | None) -> Response:
    """Not one of VIEWED: it is also of the history and of what workers say, which may change while the view does not."""
    as_of_ms = service.moment(job_id).as_of_ms
    return tagged(request, codec.encode(service.explain(job_id, checkpoint_id)), as_of_ms)
