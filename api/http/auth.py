"""Access to the service: bearer tokens, and which paths need none.

It decides access before any route runs; it knows nothing of jobs. Tokens are compared in constant time and never logged."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.api.docs.page import OPEN_PATHS as DOCUMENTATION_PATHS
from holdfast.api.errors import encode_error
from holdfast.api.http.connection_budget import CallerKind
from holdfast.api.http.protocol import prove
from holdfast.api.tokens import is_loopback
from holdfast.statebackends.errors import AuthenticationError

log = logging.getLogger("holdfast.auth")

OPEN_PATHS = DOCUMENTATION_PATHS | {"/healthz", "/readyz"}
"""Paths that need no token; they reveal nothing about jobs."""


class BearerAuth:
    """ASGI middleware: 401 unless a request carries the token or asks for an open path; decided before any byte of its body is
    read.

    `token=None` lets loopback callers in without one, if they name a loopback host: a web page that rebinds its name to 127.0.0.1
    still sends its own name. A page that posts to 127.0.0.1 by that name sends its own origin."""

    def __init__(self, app: ASGIApp, *, token: str | None, open_paths: Iterable[str] = OPEN_PATHS) -> None:
        self._app = app
        self._expected = token.encode() if token is not None else None
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in self._open_paths
        if is_open or self._allowed(scope):
            if not is_open:
                prove(scope, CallerKind.CLIENT)
            await self._app(scope, receive, send)
            return
        wire = encode_error(AuthenticationError("missing or wrong bearer token"))
        headers = [(name.lower().encode(), value.encode()) for name, value in wire.headers.items()]
        headers.append((b"content-length", str(len(wire.body)).encode()))
        await send({"type": "http.response.start", "status": wire.status, "headers": headers})
        await send({"type": "http.response.body", "body": wire.body})

    def _allowed(self, scope: Scope) -> bool:
        if self._expected is None:
            return is_loopback(_host_of(_header(scope, b"host"))) and _from_here(_header(scope, b"origin"))
        scheme, _, token = _header(scope, b"authorization").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._expected)


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _from_here(origin: bytes) -> bool:
    """Whether no browser sent it, or a page of this machine did. Browsers add an origin to every request that may change
    something."""
    return not origin or is_loopback(_host_of(origin.partition(b"://")[2]))


def _host_of(header: bytes) -> str:
    text = header.decode("latin-1")
    return text[: text.rfind("]") + 1] if text.startswith("[") else text.partition(":")[0]
