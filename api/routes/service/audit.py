"""The audit log, newest first: who changed what, and who was refused. For administrators."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response

from holdfast.api.access.audit import AuditLine
from holdfast.api.access.audit_log import PAGE_LINES_MAX, read_audit_page
from holdfast.api.flink import schemas
from holdfast.api.routes.common import ERRORS

router = APIRouter(prefix="/v1/audit", tags=["audit"], responses=ERRORS)

LINES_DEFAULT = 100


class AuditRecord(schemas.Record):
    """One line of a chain; `holdfast audit verify` says whether the chains are whole."""

    number: int
    """Within its chain."""
    time_ms: int
    kind: str
    """started, request, refused, dropped (lines or refusals that were only counted), pruned (the oldest lines were deleted)."""
    request: str
    job: str
    subject: str
    credential: str
    """Name of the credential, never the credential itself."""
    role: str
    peer: str
    status: int
    """Of the answer; 0: the caller left before it was answered."""
    count: int


class Audit(schemas.Record):
    lines: list[AuditRecord]
    """Newest first."""
    next: str
    """`after` of the page with older ones; empty: there is none."""


def _shown(line: AuditLine) -> AuditRecord:
    return AuditRecord.model_validate({name: getattr(line, name) for name in AuditRecord.model_fields})


@router.get("", response_model=Audit)
async def audit(
    request: Request,
    after: Annotated[str, Query(max_length=128, description="`next` of the page before")] = "",
    limit: Annotated[int, Query(ge=1, le=PAGE_LINES_MAX)] = LINES_DEFAULT,
) -> Response:
    """Changes and refusals of all coordinators of the state directory. A line is there a second after its
    request, a refusal after ten at most, a change beyond its sender's share of a day after a minute."""
    state = request.app.state
    page = await request.app.state.readers.run(read_audit_page, state.settings.location, after, limit)
    found = Audit(lines=[_shown(line) for line in page.lines], next=page.next)
    return Response(msgspec.json.encode(found.model_dump(by_alias=True)), media_type="application/json")
