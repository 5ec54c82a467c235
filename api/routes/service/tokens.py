"""Issued tokens: create, list and revoke. For administrators."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from holdfast.api.access.authenticator import Authenticator
from holdfast.api.access.issued import LIFE_MS_MAX, NAME_CHARACTERS_MAX, TokenRecord, check_token_id
from holdfast.api.access.roles import ANY_JOB
from holdfast.api.flink import schemas
from holdfast.api.http.request_log import SUBJECT
from holdfast.api.routes.common import ERRORS, body_of, describe_model
from holdfast.coordinator.ha.records import derive_job_id, is_job_id

router = APIRouter(prefix="/v1/tokens", tags=["tokens"], responses=ERRORS)

_JOB_CHARACTERS_MAX = 1_024

TokenId = Annotated[
    str,
    Path(alias="tokenid", description="16 lower-case hex digits", json_schema_extra={"pattern": "^[0-9a-f]{16}$"}),
]
"""The form is for callers to read: `check_token_id` says what is wrong in plain words."""


class IssueToken(schemas.RequestBody):
    role: str
    """viewer, operator or admin."""
    job: str | None = Field(None, min_length=1, max_length=_JOB_CHARACTERS_MAX)
    """Id or name of the only job that it is for; it need not exist yet."""
    name: str | None = Field(None, max_length=NAME_CHARACTERS_MAX)
    """What logs and lists call it."""
    expires_in_ms: int | None = Field(None, gt=0, le=LIFE_MS_MAX)
    """Time until it ends; null: it ends when it is revoked."""


class IssuedToken(schemas.Record):
    """One token, without its text."""

    id: str
    name: str
    role: str
    job: str
    """Id of the only job that it is for; empty: all."""
    created: int
    expires: int
    """ms since the epoch; -1: never."""


class NewToken(IssuedToken):
    token: str
    """Shown this once: the state directory has a hash of it alone."""


class Tokens(schemas.Record):
    tokens: list[IssuedToken]


def _shown(record: TokenRecord) -> dict[str, str | int]:
    return {
        "id": record.token_id,
        "name": record.name,
        "role": record.role.value,
        "job": record.job_id,
        "created": record.created_ms,
        "expires": record.expires_ms or -1,
    }


async def _authenticator(request: Request) -> Authenticator:
    found: Authenticator = request.app.state.authenticator
    return found


Credentials = Annotated[Authenticator, Depends(_authenticator)]


@router.post("", status_code=201, openapi_extra=describe_model(IssueToken, required=True))
async def issue(
    request: Request, credentials: Credentials, body: Annotated[IssueToken, Depends(body_of(IssueToken))]
) -> NewToken:
    """Issue a token. The answer has its text, which is stored nowhere."""
    job = body.job or ANY_JOB
    job_id = job if job == ANY_JOB or is_job_id(job) else derive_job_id(job)
    request.scope[SUBJECT] = f"role {body.role}"
    token, record = await run_in_threadpool(
        credentials.issue, body.role, name=body.name or "", job_id=job_id, life_ms=body.expires_in_ms
    )
    request.scope[SUBJECT] = f"token {record.token_id} of role {record.role}"
    return NewToken.model_validate({**_shown(record), "token": token})


@router.get("")
async def tokens(credentials: Credentials) -> Tokens:
    """Tokens that are not revoked, expired ones included, oldest first."""
    found = await run_in_threadpool(credentials.tokens)
    return Tokens(tokens=[IssuedToken.model_validate(_shown(record)) for record in found])


@router.delete("/{tokenid}")
async def revoke(request: Request, credentials: Credentials, token_id: TokenId) -> schemas.Empty:
    """Revoke a token. Here it ends at once, at other coordinators of the state directory within 5 s."""
    request.scope[SUBJECT] = f"token {check_token_id(token_id)}"
    await run_in_threadpool(credentials.revoke, token_id)
    return schemas.Empty()
