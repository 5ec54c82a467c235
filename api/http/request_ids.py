"""ASGI middleware: each request has an id, in its answer and in every line of a JSON log that it brings.

The caller's own id is taken if it is fit for a line of a log; anything else is replaced, not refused."""

from __future__ import annotations

import random
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.logs import REQUEST_ID

HEADER = b"x-request-id"

_FIT = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_numbers = random.Random()
"""An id is no secret: the system is not asked for each, which costs a system call."""


def named(scope: Scope) -> bytes:
    """The id of a request: its caller's own, if that is fit, or a new one."""
    given = next((value for key, value in scope["headers"] if key == HEADER), b"")
    return given if _FIT.fullmatch(given) else new_id()


def new_id() -> bytes:
    return b"%016x" % _numbers.getrandbits(64)


class NameRequests:
    """The outermost middleware: whatever refuses a request does so under its id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = named(scope)

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, name)]}
            await send(message)

        token = REQUEST_ID.set(name.decode())
        try:
            await self._app(scope, receive, tell)
        finally:
            REQUEST_ID.reset(token)
