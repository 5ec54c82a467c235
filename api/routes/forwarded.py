"""Requests of people that a member which stands by passes on to the active one, with the caller's own token.

Only what a caller asks whom this member knows, and who may ask it: access is checked before. Workers are not served here; they
learn who is active, and go there. A request is passed on once: the one that gets it and does not lead either says who does."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterable

import urllib3
from anyio import CapacityLimiter, WouldBlock, to_thread
from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.api.access.roles import Access, classify
from holdfast.api.errors import BusyError, ConnectionLostError
from holdfast.api.http.auth import CALLER, refuse
from holdfast.api.http.basic import check_same_origin
from holdfast.api.http.origin import header_of, session_text
from holdfast.api.members.membership import Membership
from holdfast.api.routes.common import BodyLimits, held_body
from holdfast.api.routes.service.members import OWN_PATHS
from holdfast.statebackends.errors import HoldfastError, NotLeaderError, RecoveringError

log = logging.getLogger("holdfast.members")

HOP_HEADER = "X-Holdfast-Forwarded-By"
"""Id of the member that passed a request on; with it none is passed on again."""

REQUESTS_MAX = 32
"""Requests under way to the active member at a time, event streams not counted."""
STREAMS_MAX = 32
"""Event streams under way at a time: they have places of their own, as each keeps its own for as long as somebody looks."""
PLACE_TIMEOUT_S = 5.0
"""Seconds that a request waits for a place."""
CHUNK_BYTES = 64 * 1024

_BODY = BodyLimits(1 << 62)
"""As the service's `body_bytes_max`: the active member has the bounds of each path."""
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
     "transfer-encoding", "upgrade"}
)
"""Headers that are of one connection. Source: RFC 9110, 7.6.1."""
_NOT_SENT = _HOP_BY_HOP | {
    "host", "content-length", "cookie", "origin", "referer", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest", "sec-fetch-user",
    "expect", "forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", HOP_HEADER.lower(),
}  # fmt: skip
"""Of a request besides: what is about this member's address, was judged here, or is sent by a browser of itself."""
_NOT_ANSWERED = _HOP_BY_HOP | {"set-cookie", "date", "server"}
_CHANGING_BY_GET = "/yarn-cancel"
_PAGES, _LOGIN = "/ui/", "/ui/login"
"""Pages, which are the same everywhere, and where a session of one member begins."""
_STREAMING = "/events"
"""End of the paths of event streams."""


class ForwardToActive:
    """ASGI middleware behind the access check of a member."""

    def __init__(self, app: ASGIApp, *, membership: Membership, own_paths: Iterable[str] = OWN_PATHS) -> None:
        """`own_paths`: paths that every member answers for itself."""
        self._app = app
        self._membership = membership
        self._own_paths = frozenset(own_paths)
        self._requests = CapacityLimiter(REQUESTS_MAX)
        self._streams = CapacityLimiter(STREAMS_MAX)
        self._threads = CapacityLimiter(REQUESTS_MAX + STREAMS_MAX)
        """Each request under way has one thread at most, so that none waits for that of another."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._is_for_active(scope):
            await self._app(scope, receive, send)
            return
        try:
            if header_of(scope, HOP_HEADER.lower().encode()) or _has_session(scope) or scope["path"] == _LOGIN:
                raise self._not_active()
            if scope["path"].endswith(_CHANGING_BY_GET):
                check_same_origin(scope)  # the active member can't see which page asked
            await self._forward(scope, receive, send)
        except HoldfastError as error:
            await refuse(error, send)

    def _is_for_active(self, scope: Scope) -> bool:
        """Whether the active member has the answer: it alone has jobs, and sessions, which are of one member and passed to none."""
        path = scope["path"]
        if self._membership.is_active or path in self._own_paths or _is_of_workers(scope["method"], path):
            return False
        return path == _LOGIN or (CALLER in scope and not path.startswith(_PAGES))

    def _not_active(self) -> HoldfastError:
        try:
            self._membership.led()
        except (NotLeaderError, RecoveringError) as error:
            return error
        return RecoveringError("this member has just become the active one: try again in a moment")

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        active = self._membership.active()
        if active is None or active.member == self._membership.member:
            raise self._not_active()
        is_stream = scope["path"].endswith(_STREAMING) or b"text/event-stream" in header_of(scope, b"accept")
        places = self._streams if is_stream else self._requests
        async with held_body(Request(scope, receive), _BODY) as body:
            await _take(places, wait_s=0.0 if is_stream else PLACE_TIMEOUT_S)
            try:
                answer = await self._ask(scope, active.url, bytes(body))
                await self._pass_back(answer, receive, send)
            finally:
                places.release()

    async def _ask(self, scope: Scope, url: str, body: bytes) -> urllib3.BaseHTTPResponse:
        query = scope.get("query_string", b"").decode("latin-1")
        raw = scope.get("raw_path") or scope["path"].encode()
        target = raw.decode("latin-1").partition("?")[0] + (f"?{query}" if query else "")
        ask = functools.partial(
            self._membership.peers.forward, url, scope["method"], target, self._headers(scope), body
        )
        try:
            return await to_thread.run_sync(ask, limiter=self._threads)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            text = f"the active member at {url} does not answer ({type(error).__name__}): try again in a moment"
            raise ConnectionLostError(text, url=url) from error

    def _headers(self, scope: Scope) -> dict[str, str]:
        """Of the request, without what is of this connection. The caller's token is among them; no other is ever sent."""
        pairs = ((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"])
        headers = {name: value for name, value in pairs if name not in _NOT_SENT}
        named = {name.strip() for name in header_of(scope, b"connection").decode("latin-1").lower().split(",")}
        headers = {name: value for name, value in headers.items() if name not in named}
        if scope["path"].endswith(_CHANGING_BY_GET):
            headers["sec-fetch-site"] = "same-origin"  # judged here
        return {**headers, HOP_HEADER: self._membership.member}

    async def _pass_back(self, answer: urllib3.BaseHTTPResponse, receive: Receive, send: Send) -> None:
        """The answer as it comes, until it ends or its reader leaves."""
        leaving = asyncio.create_task(_until_left(receive, answer))
        try:
            pairs = [(name.lower(), value) for name, value in answer.headers.items()]
            headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs if name not in _NOT_ANSWERED]
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            while chunk := await self._next_chunk(answer):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if chunk is not None or not answer.headers.get("content-length"):
                await send({"type": "http.response.body", "body": b""})  # without it the server cuts the connection
        finally:
            leaving.cancel()
            answer.close()

    async def _next_chunk(self, answer: urllib3.BaseHTTPResponse) -> bytes | None:
        """Bytes that have arrived; empty at the end, None when the connection broke."""
        try:
            return await to_thread.run_sync(functools.partial(answer.read1, CHUNK_BYTES), limiter=self._threads)
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            log.warning("an answer of the active member broke off: %s", type(error).__name__)
            return None


def _has_session(scope: Scope) -> bool:
    return not header_of(scope, b"authorization") and bool(session_text(scope))


def _is_of_workers(method: str, path: str) -> bool:
    """Whether it is of the worker protocol, by the same rules as who may ask it."""
    classified = classify(method, path)
    return classified is not None and classified.access is Access.WORK


async def _take(places: CapacityLimiter, *, wait_s: float) -> None:
    """Take a place. Raises BusyError if there is none in time."""
    try:
        if wait_s == 0:
            places.acquire_nowait()
        else:
            async with asyncio.timeout(wait_s):
                await places.acquire()
    except (WouldBlock, TimeoutError) as error:
        raise BusyError("this member passes on as many requests as it may: ask again, or ask the active one", size=0) from error


async def _until_left(receive: Receive, answer: urllib3.BaseHTTPResponse) -> None:
    """Wake the thread that reads the answer when its reader has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
    answer.shutdown()
