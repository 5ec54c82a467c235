"""What the files of a job take."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from holdfast.api.routes.common import ERRORS, JobId, Service, answer, describe_answer
from holdfast.coordinator.ownership.cost import Cost, priced

router = APIRouter(prefix="/v1", tags=["snapshots"], responses=ERRORS)


@router.get("/jobs/{jobid}/cost", response_class=Response, responses={200: describe_answer(Cost)})
async def cost(request: Request, service: Service, job_id: JobId) -> Response:
    """Bytes, files, small files and requests of a job's snapshots, from a listing of its directory; `money` with a price file."""
    found = await request.app.state.readers.run(service.cost, job_id)
    prices = request.app.state.settings.prices
    return answer(priced(found, prices) if prices is not None else msgspec.structs.replace(found, money=None))
