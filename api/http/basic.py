"""Basic authentication: the password is the token, as clients of Flink and browsers know it; and which page a request is from.

A browser sends a password along with every request that any page makes it send. So with Basic, and for changes by GET with
anything but a bearer token, a change is taken from pages of this service alone. Whether the token is right is judged elsewhere."""

from __future__ import annotations

import base64
import binascii

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.access.audit_log import AuditLog
from holdfast.api.errors import status_of
from holdfast.api.http.auth import refuse, refused
from holdfast.api.http.origin import SAFE_METHODS, foreign, header_of, is_of_this_service

BROWSER_PATHS = "/flink/"
"""Below it are the pages of Flink's UI: a browser that is refused there asks for the password."""

_FROM_PASSWORD = "holdfast.password"
"""Key of the scope of a request whose token was a password."""
_CHALLENGE = 'Basic realm="Holdfast: the token is the password", charset="UTF-8"'


class BasicAsBearer:
    """ASGI middleware in front of the token check: makes a bearer token of a password. 403 for a change that a page elsewhere asks
    for with it."""

    def __init__(self, app: ASGIApp, *, audit: AuditLog) -> None:
        """`audit` gets what is refused."""
        self._app = app
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        password = _password(header_of(scope, b"authorization"))
        if password is not None:
            if scope["method"] not in SAFE_METHODS and not is_of_this_service(scope, unsaid=True):
                self._audit.note(refused(scope, status_of(foreign())))
                await refuse(foreign(), send)
                return
            others = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
            scope = {**scope, "headers": [*others, (b"authorization", b"Bearer " + password)], _FROM_PASSWORD: True}
        await self._app(scope, receive, _challenging(send) if scope["path"].startswith(BROWSER_PATHS) else send)


def is_password(authorization: bytes) -> bool:
    """Whether a header names Basic authentication, whatever follows."""
    return authorization.partition(b" ")[0].lower() == b"basic"


def check_same_origin(scope: Scope) -> None:
    """Raise ForeignOriginError for a change by GET that a page elsewhere may have made a browser ask for: one without a bearer
    token of its own, unless the browser says that a page of this service asks."""
    is_bearer = header_of(scope, b"authorization").lower().startswith(b"bearer ") and _FROM_PASSWORD not in scope
    if not is_bearer and not is_of_this_service(scope, unsaid=False):
        raise foreign()


def _challenging(send: Send) -> Send:
    async def challenge(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 401:
            MutableHeaders(scope=message).append("WWW-Authenticate", _CHALLENGE)
        await send(message)

    return challenge


def _password(authorization: bytes) -> bytes | None:
    """Of Basic authentication, with any user's name; None for what is none."""
    if not is_password(authorization):
        return None
    try:
        return base64.b64decode(authorization.partition(b" ")[2].strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return None
