"""What routes share: path parameters, the service behind them, and answers encoded by msgspec."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import Depends, Path, Request, Response

from holdfast.api.flink import schemas
from holdfast.api.snapshots.disposals import Disposals
from holdfast.api.snapshots.served import SnapshotDirectories
from holdfast.barriers import codec
from holdfast.coordinator.interface import Coordinator

JobId = Annotated[str, Path(alias="jobid", pattern=schemas.ID_PATTERN, description="32 lower-case hex digits")]
VertexId = Annotated[str, Path(alias="vertexid", pattern=schemas.ID_PATTERN, description="32 lower-case hex digits")]
TriggerId = Annotated[str, Path(alias="triggerid", pattern=schemas.ID_PATTERN, description="32 lower-case hex digits")]
CheckpointNumber = Annotated[int, Path(alias="checkpointid", ge=0, lt=2**63)]
Slot = Annotated[int, Path(ge=0, lt=32_768)]

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.Errors, "description": text}
    for status, text in (
        (400, "Malformed"),
        (401, "No token, or a wrong one"),
        (404, "No such thing"),
        (409, "Fenced, or in the way of what exists"),
        (503, "Try again"),
    )
}


async def service_of(request: Request) -> Coordinator:
    """The coordinator that the application was made for. Asynchronous, or each request would go through the thread pool."""
    service: Coordinator = request.app.state.service
    return service


Service = Annotated[Coordinator, Depends(service_of)]


async def _directories(request: Request) -> SnapshotDirectories:
    settings = request.app.state.settings
    return SnapshotDirectories((settings.location, *settings.snapshot_dirs))


Directories = Annotated[SnapshotDirectories, Depends(_directories)]


async def _disposals(request: Request) -> Disposals:
    found: Disposals = request.app.state.disposals
    return found


KnownDisposals = Annotated[Disposals, Depends(_disposals)]


def answer(record: msgspec.Struct, status: int = 200) -> Response:
    """A record of the worker protocol as a response."""
    return Response(codec.encode(record), status_code=status, media_type="application/json")
