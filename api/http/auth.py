"""Access to the service: who a request is from, whether that caller may make it, and which paths need no credential.

It decides before any route runs and before any byte of a body is read; it knows nothing of jobs but their ids in paths."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.api.access.audit import Noted
from holdfast.api.access.audit_log import AuditLog
from holdfast.api.access.authenticator import HERE, Authenticator
from holdfast.api.access.roles import ANY_JOB, Access, Caller, Classified, classify, is_plain
from holdfast.api.docs.page import OPEN_PATHS as DOCUMENTATION_PATHS
from holdfast.api.errors import encode_error, status_of
from holdfast.api.http.connection_budget import CallerKind
from holdfast.api.http.protocol import prove
from holdfast.api.tokens import is_loopback
from holdfast.api.ui.files import OPEN_PATHS as DASHBOARD_PATHS
from holdfast.statebackends.errors import AccessDeniedError, AuthenticationError, HoldfastError, NotFoundError

OPEN_PATHS = DOCUMENTATION_PATHS | DASHBOARD_PATHS | {"/healthz", "/readyz", "/leader", "/standby"}
"""Paths that need no token; they reveal nothing about jobs."""

CALLER = "holdfast.caller"
"""Key of the scope under which the Caller is; absent for open paths."""

RECHECK = "holdfast.recheck"
"""Key of the scope under which a coroutine function is that decides again, for answers that last: it raises as this module does."""

_CHARACTERS_SHOWN_MAX = 64


class CheckAccess:
    """ASGI middleware: 401 unless a request is from somebody known or asks for an open path, 403 unless that caller may make it.

    A service without a token lets loopback callers in, if they name a loopback host: a web page that rebinds its name to 127.0.0.1
    still sends its own name. A page that posts to 127.0.0.1 by that name sends its own origin."""

    def __init__(
        self, app: ASGIApp, *, authenticator: Authenticator, audit: AuditLog, open_paths: Iterable[str] = OPEN_PATHS
    ) -> None:
        """`audit` gets what is refused."""
        self._app = app
        self._authenticator = authenticator
        self._audit = audit
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            try:
                caller = await self._caller_of(scope)
                scope[CALLER] = caller
                scope[RECHECK] = functools.partial(self._again, scope)
                check_request(caller, scope["method"], scope["path"])
            except HoldfastError as error:
                if isinstance(error, AuthenticationError | AccessDeniedError):
                    self._audit.note(refused(scope, status_of(error)))
                await refuse(error, send)
                return
            prove(scope, CallerKind.CLIENT)
        await self._app(scope, receive, send)

    async def _again(self, scope: Scope) -> None:
        check_request(await self._caller_of(scope), scope["method"], scope["path"])

    async def _caller_of(self, scope: Scope) -> Caller:
        if self._authenticator.has_token:
            return await self._authenticator.caller_of(header_of(scope, b"authorization"))
        if is_loopback(_host_of(header_of(scope, b"host"))) and _from_here(header_of(scope, b"origin")):
            return HERE
        raise AuthenticationError("missing or wrong bearer token")


def check_request(caller: Caller, method: str, path: str) -> None:
    """Raise AccessDeniedError unless the caller may make a request, NotFoundError for a path that no route may have. What no rule
    names is for administrators alone."""
    if not is_plain(path):
        raise NotFoundError("no path has control characters")
    access, job_id, is_job_in_body = classify(method, path) or Classified(Access.ADMINISTER, ANY_JOB, is_job_in_body=False)
    if not caller.may(access):
        text = f"a token of role {caller.role} may not {access}: {method} {path[:_CHARACTERS_SHOWN_MAX]}"
        raise AccessDeniedError(text, role=caller.role.value, needed=access.value)
    if not is_job_in_body:
        confine(caller, access, job_id)


def confine(caller: Caller, access: Access, job_id: str) -> None:
    """Raise AccessDeniedError for a caller who is confined to another job than this (ANY_JOB: than all)."""
    if caller.is_confined_from(job_id):
        text = f"the token is for job {caller.job_id} alone: it can't ask for others, nor for all jobs"
        raise AccessDeniedError(text, role=caller.role.value, needed=access.value, job=caller.job_id)


def refused(scope: Scope, status: int) -> Noted:
    """The line of the audit log about a refused request."""
    caller: Caller | None = scope.get(CALLER)
    client = scope.get("client")
    return Noted(
        request=f"{scope['method']} {scope['path']}",
        credential=caller.credential if caller is not None else "",
        role=caller.role.value if caller is not None else "",
        peer=f"{client[0]}:{client[1]}" if client else "unknown",
        status=status,
    )


async def refuse(error: HoldfastError, send: Send) -> None:
    """Answer a request with an error, without its body having been read."""
    wire = encode_error(error)
    headers = [(name.lower().encode(), value.encode()) for name, value in wire.headers.items()]
    headers.append((b"content-length", str(len(wire.body)).encode()))
    await send({"type": "http.response.start", "status": wire.status, "headers": headers})
    await send({"type": "http.response.body", "body": wire.body})


def header_of(scope: Scope, name: bytes) -> bytes:
    """The first header of a name, in lower case; empty without one."""
    return next((value for key, value in scope["headers"] if key == name), b"")


def _from_here(origin: bytes) -> bool:
    """Whether no browser sent it, or a page of this machine did. Browsers add an origin to every request that may change
    something."""
    return not origin or is_loopback(_host_of(origin.partition(b"://")[2]))


def _host_of(header: bytes) -> str:
    text = header.decode("latin-1")
    return text[: text.rfind("]") + 1] if text.startswith("[") else text.partition(":")[0]
