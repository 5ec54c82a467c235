"""Sessions of browsers, for the pages below `/ui/`: log in with a token, ask who one is, log out.

A page that a browser shows can't read the cookie, and none elsewhere can have it sent along. What it may do is what its token may,
each time anew."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field

from holdfast.api.access.audit import Noted
from holdfast.api.access.audit_log import AuditLog
from holdfast.api.access.authenticator import Authenticator, Login
from holdfast.api.access.roles import Caller
from holdfast.api.errors import ForeignOriginError, status_of
from holdfast.api.flink import schemas
from holdfast.api.http.auth import CALLER, refused
from holdfast.api.http.origin import is_of_this_service, session_text, set_cookie
from holdfast.api.routes.common import ERRORS, BodyLimits, body_of, describe_model
from holdfast.statebackends.errors import HoldfastError

router = APIRouter(prefix="/ui", tags=["sessions"], responses=ERRORS)

_TOKEN_CHARACTERS_MAX = 4_096
_LOGIN = BodyLimits(8 * 1024)


class LogIn(schemas.RequestBody):
    token: str = Field(min_length=1, max_length=_TOKEN_CHARACTERS_MAX)


class SessionView(schemas.Record):
    """Who the caller is."""

    role: str
    job: str
    """Id of the only job that it may ask for; empty: all."""
    name: str
    """What logs call its credential."""
    expires_at_ms: int
    """ms since the epoch, of the session or the token; -1: it does not end by itself."""


class Visitor(schemas.Record):
    """Who looks at a page, if anybody is known."""

    signed_in: bool
    session: SessionView | None = None


async def _authenticator(request: Request) -> Authenticator:
    found: Authenticator = request.app.state.authenticator
    return found


Credentials = Annotated[Authenticator, Depends(_authenticator)]


def _shown(caller: Caller) -> SessionView:
    return SessionView(
        role=caller.role.value, job=caller.job_id, name=caller.credential, expires_at_ms=caller.expires_ms or -1
    )


@router.post("/login", openapi_extra=describe_model(LogIn, required=True))
async def log_in(
    request: Request,
    response: Response,
    credentials: Credentials,
    body: Annotated[LogIn, Depends(body_of(LogIn, _LOGIN))],
) -> SessionView:
    """Begin a session with a token: its cookie is HttpOnly and SameSite=Strict, and Secure over TLS. It ends after 12 hours, with
    its token, and with the service."""
    audit: AuditLog = request.app.state.audit
    peer = request.client.host if request.client is not None else ""
    try:
        if not is_of_this_service(request.scope, unsaid=True):
            raise ForeignOriginError("a page elsewhere can't log in here")
        login: Login = await credentials.log_in(body.token, peer)
    except HoldfastError as error:
        audit.note(refused(request.scope, status_of(error)))
        raise
    caller = login.caller
    audit.note(Noted("log in", credential=caller.credential, role=caller.role.value, peer=peer, status=200))
    response.headers["Cache-Control"] = "no-store"
    if login.text:
        response.headers["Set-Cookie"] = set_cookie(request.scope, login.text, life_s=login.life_s)
    return _shown(caller)


@router.post("/logout")
async def log_out(request: Request, response: Response, credentials: Credentials) -> schemas.Empty:
    """End the session, and take its cookie away."""
    credentials.log_out(session_text(request.scope))
    response.headers["Cache-Control"] = "no-store"
    response.headers["Set-Cookie"] = set_cookie(request.scope, "", life_s=0)
    return schemas.Empty()


@router.get("/session")
async def session(request: Request, response: Response) -> SessionView:
    """Who the caller is, by its session or its token; 401 if nobody who is known."""
    response.headers["Cache-Control"] = "no-store"
    caller: Caller = request.scope[CALLER]
    return _shown(caller)


@router.get("/visitor")
async def visitor(request: Request, response: Response) -> Visitor:
    """Who the caller is, as `/ui/session` says it, or that it is nobody who is known: a page that is visited for the first time is
    refused nothing. 401 for a wrong token all the same."""
    response.headers["Cache-Control"] = "no-store"
    caller: Caller | None = request.scope.get(CALLER)
    return Visitor(signed_in=caller is not None, session=_shown(caller) if caller is not None else None)
