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
from holdfast.api.routes.common import ERRORS, Service, body_of, describe_model
from holdfast.barriers.jobgraph import check_job_name
from holdfast.coordinator.ha.records import derive_job_id, is_job_id
from holdfast.coordinator.interface import Coordinator
from holdfast.statebackends.errors import HoldfastError, InvalidConfigError, NotFoundError

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
    # described, and not checked, here: `draw_token` says in words what is out of bounds
    expires_in_ms: int | None = Field(None, json_schema_extra={"exclusiveMinimum": 0, "maximum": LIFE_MS_MAX})
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
    job_exists: bool
    """false: it is for a job that is not known here, or not yet. A name that was mistyped shows nowhere else: jobs are known by a
    hash of it."""


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
    request: Request, service: Service, credentials: Credentials, body: Annotated[IssueToken, Depends(body_of(IssueToken))]
) -> NewToken:
    """Issue a token. The answer has its text, which is stored nowhere."""
    job = body.job or ANY_JOB
    request.scope[SUBJECT] = f"role {body.role}"
    job_id = job if job == ANY_JOB or is_job_id(job) else _id_of_named(job)
    job_exists = job_id == ANY_JOB or await run_in_threadpool(_exists, service, job_id)
    token, record = await run_in_threadpool(
        credentials.issue, body.role, name=body.name or "", job_id=job_id, life_ms=body.expires_in_ms
    )
    request.scope[SUBJECT] = f"token {record.token_id} of role {record.role}" + (f" for job {job}" if job else "")
    return NewToken.model_validate({**_shown(record), "token": token, "job_exists": job_exists})


def _id_of_named(name: str) -> str:
    """Raises InvalidConfigError for a name that no job can have."""
    try:
        check_job_name(name)
    except InvalidConfigError as error:
        raise InvalidConfigError(f"job: {error.message}", setting="job") from error
    return derive_job_id(name)


def _exists(service: Coordinator, job_id: str) -> bool:
    """Whether there is such a job, or that can't be told at the moment: it is another's, or the coordinator still recovers."""
    try:
        service.job(job_id)
    except NotFoundError:
        return False
    except HoldfastError:
        pass
    return True


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
