"""Access to the service: who a request is from, whether that caller may make it, and which paths need no credential.

It decides before any route runs and before any byte of a body is read; it knows nothing of jobs but their ids in paths."""

from __future__ import annotations

import asyncio
import functools
import math
import re
import time
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.api.access.audit import Noted
from holdfast.api.access.audit_log import AuditLog
from holdfast.api.access.authenticator import HERE, Authenticator
from holdfast.api.access.request_budget import RequestBudget
from holdfast.api.access.roles import ANY_JOB, Access, Caller, Classified, classify, is_plain
from holdfast.api.docs.page import OPEN_PATHS as DOCUMENTATION_PATHS
from holdfast.api.errors import ForeignOriginError, encode_error, status_of
from holdfast.api.http.connection_budget import CallerKind
from holdfast.api.http.origin import SAFE_METHODS, foreign, header_of, is_of_this_service, session_text
from holdfast.api.http.protocol import prove
from holdfast.api.tokens import is_loopback
from holdfast.api.ui.files import OPEN_PATHS as DASHBOARD_PATHS
from holdfast.api.ui.files import VISITOR_PATH
from holdfast.statebackends.errors import (
    AccessDeniedError,
    AuthenticationError,
    HoldfastError,
    NotFoundError,
    TooManyRequestsError,
)

OPEN_PATHS = DOCUMENTATION_PATHS | DASHBOARD_PATHS | {"/healthz", "/readyz", "/leader", "/standby", "/ui/login", VISITOR_PATH}
"""Paths that need no token; they reveal nothing about jobs."""

_OWN, _ALL = "own", "all"
"""Keys of budgets that are no token's id."""

CALLER = "holdfast.caller"
"""Key of the scope under which the Caller is; absent for open paths."""

RECHECK = "holdfast.recheck"
"""Key of the scope under which a coroutine function is that decides again, for answers that last: it raises as this module does."""

TAKE_REQUESTS = "holdfast.take_requests"
"""Key of the scope under which a function is that counts so many more requests of the caller, for one that is several: 0, or the ms
until it may ask for as many again, and for the one that brought them."""

SHARED_FACTOR = 5
"""The service's own token, and all that looks at jobs together, may have so many times the requests of one issued token."""
DELAYED_MAX = 1_000
"""Refusals of callers that ask too often, which wait for a while: a client that asks in a loop is slowed down, and costs little."""
_DELAY_MS_MAX = 1_000
_CHARACTERS_SHOWN_MAX = 64
_JOB_IN_PATH = re.compile(r"/(?:jobs|applications)/([0-9a-f]{32})(?![^/])")


class CheckAccess:
    """ASGI middleware: 401 unless a request is from somebody known or asks for an open path, 403 unless that caller may make it.

    A service without a token lets loopback callers in, if they name a loopback host: a web page that rebinds its name to 127.0.0.1
    still sends its own name. A page that posts to 127.0.0.1 by that name sends its own origin."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticator: Authenticator,
        audit: AuditLog,
        requests: RequestBudget,
        per_s: float,
        open_paths: Iterable[str] = OPEN_PATHS,
    ) -> None:
        """`audit` gets what is refused. `per_s`: requests a second of one issued token."""
        self._app = app
        self._authenticator = authenticator
        self._audit = audit
        self._requests = requests
        self._per_s = per_s
        self._delayed = 0
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_open(scope):
            try:
                caller = await self._caller_of(scope)
                scope[CALLER] = caller
                scope[RECHECK] = functools.partial(self._again, scope)
                access = check_request(caller, scope["method"], scope["path"])
            except HoldfastError as error:
                if isinstance(error, AuthenticationError | AccessDeniedError | ForeignOriginError):
                    self._audit.note(refused(scope, status_of(error)))
                if _is_visitor(scope) and isinstance(error, AuthenticationError):
                    await self._app(scope, receive, send)
                else:
                    await refuse(error, send)
                return
            scope[TAKE_REQUESTS] = functools.partial(self._wait_ms, caller, access)
            prove(scope, CallerKind.CLIENT)
            wait_ms = self._wait_ms(caller, access)
            if wait_ms:
                await self._refuse_later(wait_ms, send)
                return
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        """Whether nobody has to be known for it."""
        is_somebody = not self._authenticator.has_token or header_of(scope, b"authorization") or session_text(scope)
        return scope["path"] in self._open_paths and not (scope["path"] == VISITOR_PATH and is_somebody)

    async def _again(self, scope: Scope) -> None:
        check_request(await self._caller_of(scope), scope["method"], scope["path"])

    async def _caller_of(self, scope: Scope) -> Caller:
        if self._authenticator.has_token:
            authorization = header_of(scope, b"authorization")
            if not authorization and (text := session_text(scope)):
                if scope["method"] not in SAFE_METHODS and not is_of_this_service(scope, unsaid=False):
                    raise foreign()
                return await self._authenticator.caller_of_session(text)
            return await self._authenticator.caller_of(authorization)
        if is_loopback(_host_of(header_of(scope, b"host"))) and _from_here(header_of(scope, b"origin")):
            return HERE
        raise AuthenticationError("missing or wrong bearer token")

    def _wait_ms(self, caller: Caller, access: Access, more: int = 0) -> int:
        """0, or the time until the caller may ask again; of one request, or of so many more. The worker protocol has no such bound:
        viewers must never hold it up."""
        if access is Access.WORK:
            return 0
        now_ms = time.monotonic_ns() // 1_000_000
        per_s = self._per_s if caller.account else self._per_s * SHARED_FACTOR
        count = max(1, more)
        own = caller.account or _OWN
        wait_ms = self._requests.take(own, per_s=per_s, now_ms=now_ms, count=count)
        if not wait_ms and access is Access.VIEW and caller.account:  # the owner is heard beside any number of viewers
            per_s = self._per_s * SHARED_FACTOR
            wait_ms = self._requests.take(_ALL, per_s=per_s, now_ms=now_ms, count=count)
            if wait_ms:
                self._requests.give_back(own, count)
        return wait_ms + math.ceil(1000 / per_s) if wait_ms and more else wait_ms

    async def _refuse_later(self, wait_ms: int, send: Send) -> None:
        text = "too many requests: this token, or all viewers together, ask too often"
        error = TooManyRequestsError(text, retry_after_ms=wait_ms)
        if self._delayed < DELAYED_MAX:
            self._delayed += 1
            try:
                await asyncio.sleep(min(wait_ms, _DELAY_MS_MAX) / 1000)
            finally:
                self._delayed -= 1
        await refuse(error, send)


def _is_visitor(scope: Scope) -> bool:
    """A page asks whether anybody is signed in: its cookie may be of a session that is over. A token is judged as elsewhere."""
    return scope["path"] == VISITOR_PATH and not header_of(scope, b"authorization")


def check_request(caller: Caller, method: str, path: str) -> Access:
    """The kind of a request that the caller may make. Raises AccessDeniedError for one that it may not, NotFoundError for a path
    that no route may have. What no rule names is for administrators alone."""
    if not is_plain(path):
        raise NotFoundError("a path begins with a slash and has no control characters")
    access, job_id, is_job_in_body = classify(method, path) or Classified(Access.ADMINISTER, ANY_JOB, is_job_in_body=False)
    if not caller.may(access):
        text = f"a token of role {caller.role} may not {access}: {method} {path[:_CHARACTERS_SHOWN_MAX]}"
        raise AccessDeniedError(text, role=caller.role.value, needed=access.value)
    if not is_job_in_body:
        confine(caller, access, job_id)
    return access


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
        job=_job_named(str(scope["path"])),
        credential=caller.credential if caller is not None else "",
        role=caller.role.value if caller is not None else "",
        peer=f"{client[0]}:{client[1]}" if client else "unknown",
        status=status,
    )


def _job_named(path: str) -> str:
    """Id of the job that a path names, whether or not there is such a route; empty: none."""
    found = _JOB_IN_PATH.search(path)
    return found[1] if found is not None else ""


async def refuse(error: HoldfastError, send: Send) -> None:
    """Answer a request with an error, without its body having been read."""
    wire = encode_error(error)
    headers = [(name.lower().encode(), value.encode()) for name, value in wire.headers.items()]
    headers.append((b"content-length", str(len(wire.body)).encode()))
    await send({"type": "http.response.start", "status": wire.status, "headers": headers})
    await send({"type": "http.response.body", "body": wire.body})


def _from_here(origin: bytes) -> bool:
    """Whether no browser sent it, or a page of this machine did. Browsers add an origin to every request that may change
    something."""
    return not origin or is_loopback(_host_of(origin.partition(b"://")[2]))


def _host_of(header: bytes) -> str:
    text = header.decode("latin-1")
    return text[: text.rfind("]") + 1] if text.startswith("[") else text.partition(":")[0]
