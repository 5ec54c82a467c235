"""Health and metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from holdfast.api.flink import schemas
from holdfast.api.routes.common import ERRORS
from holdfast.api.routes.service import metrics
from holdfast.api.routes.viewed import AS_OF_HEADER
from holdfast.statebackends.errors import RecoveringError

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> schemas.Empty:
    """The process answers."""
    return schemas.Empty()


@router.get("/readyz", responses={503: {"model": schemas.Errors}})
async def readyz(request: Request) -> schemas.Empty:
    """Ready once every live job of the state directory is recovered. Workers and drivers may connect before, and wait for their own
    job."""
    if not request.app.state.service.ready:
        raise RecoveringError("the coordinator is recovering the jobs of its state directory, or stopping")
    return schemas.Empty()


@router.get("/metrics", response_class=Response, responses={**ERRORS, 200: {"content": {metrics.CONTENT_TYPE: {}}}})
def prometheus(request: Request) -> Response:
    """Metrics in Prometheus' text format."""
    headers = {AS_OF_HEADER: str(request.app.state.service.moment().as_of_ms)}
    return Response(metrics.render(request.app.state.registry), media_type=metrics.CONTENT_TYPE, headers=headers)
