"""ASGI middleware: what a viewer is answered quotes no record. Who may read rows is told which one a function failed on, in the one
line that says why a job fails; a viewer is told the class and the place."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.access.quoted_rows import without_rows_in_event, without_rows_in_json
from holdfast.api.access.roles import Caller, Role
from holdfast.api.http.auth import CALLER
from holdfast.barriers.codec import FIELDS_HEADER, decode_fields

_STREAM = b"text/event-stream"
_OF_ROWS = frozenset({"key", "record", "returned", "value"})


class WithholdRows:
    """Behind the check of access, which tells who asks."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller: Caller | None = scope.get(CALLER)
        is_viewer = caller is not None and caller.role is Role.VIEWER
        await self._app(scope, receive, _Withholding(send).send if is_viewer else send)


class _Withholding:
    """One answer. It is held until it is whole, but for a stream, whose messages are events each."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._is_held = False
        self._held: list[bytes] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = _content_type(message)
            self._is_held = b"json" in kind
            _drop_fields(MutableHeaders(scope=message))
            self._start = message
            if not self._is_held:
                await self._send(message)
        elif message["type"] != "http.response.body" or self._start is None:
            await self._send(message)
        elif self._is_held:
            self._held.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self._answer(b"".join(self._held))
        elif _STREAM in _content_type(self._start):
            await self._send({**message, "body": without_rows_in_event(message.get("body", b""))})
        else:
            await self._send(message)

    async def _answer(self, body: bytes) -> None:
        assert self._start is not None
        shown = without_rows_in_json(body)
        if shown is not body:
            headers = MutableHeaders(scope=self._start)
            headers["content-length"] = str(len(shown))
            del headers["etag"]  # that of the whole answer
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": shown})


def _drop_fields(headers: MutableHeaders) -> None:
    """Fields of an error that are a record, or of one."""
    fields = decode_fields(headers.get(FIELDS_HEADER))
    if not _OF_ROWS.isdisjoint(fields):
        del headers[FIELDS_HEADER]


def _content_type(start: Message) -> bytes:
    return next((value for name, value in start.get("headers", ()) if name.lower() == b"content-type"), b"").lower()
