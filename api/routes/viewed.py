"""GETs that are answered from the views that jobs publish: how old the answer is, 304 for one that the caller has, and one encoding
of an answer for all who ask for it.

The tag is weak: answers with equal tags differ at most in times that only say how long ago something was."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from fastapi import Depends, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.http.origin import header_of
from holdfast.api.routes.common import Service
from holdfast.api.version import REVISION, VERSION
from holdfast.coordinator.dispatcher.calls import VIEW_WAIT_MS
from holdfast.coordinator.dispatcher.published import MOMENT_MS
from holdfast.coordinator.interface import Coordinator
from holdfast.coordinator.views import Moment
from holdfast.statebackends.errors import HoldfastError

AS_OF_HEADER = "X-Holdfast-As-Of"
"""Until when the answer is known to have been so, ms since the epoch."""

TAGS_MAX = 64
"""Tags of an `If-None-Match` that are compared; further ones don't count."""

KEPT_S = MOMENT_MS / 1000
"""For how long an encoded answer is given again, as long as its tag is the newest. Its body may have durations, which stand still
for as long for who has the answer, too."""
KEPT_PATHS_MAX = 1_024
"""Paths with their queries of which anything is known; those that were asked for longest ago are forgotten first."""
KEPT_BYTES_MAX = 16 * 1024 * 1024
"""Of all encoded answers together."""
KEPT_BODY_BYTES_MAX = 4 * 1024 * 1024
"""A larger answer is encoded for each who asks for it. Five series of a job of 40 operators have 700 KB."""
KEPT_PATH_CHARS_MAX = 4_096
"""Of a path with a longer query, both together, nothing is kept."""

Headers = tuple[tuple[bytes, bytes], ...]
"""Of an answer, as ASGI has them."""

_SHOWN = "holdfast.shown"
"""Key of the scope of a request that is answered from views: which ones, as `Shown`."""


class NotModifiedError(Exception):
    """The caller has this answer."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__("not modified")
        self.headers = headers


@dataclass(frozen=True, slots=True)
class Shown:
    """The views that an answer is from."""

    job_id: str | None
    """None: those of all jobs."""
    diagnosed: bool
    """With what is known beside the view, as `Coordinator.health` tells it."""
    moment: Moment
    """Of the views; read before they are."""


async def moment_of(service: Coordinator, job_id: str | None, *, diagnosed: bool = False) -> Moment:
    """As `Coordinator.moment`, without a thread unless a job has no view yet. Raises its errors."""
    now = service.moment_now(job_id, diagnosed=diagnosed)
    if now.coming:
        await _come(now.coming)
        now = service.moment_now(job_id, diagnosed=diagnosed)
    if now.moment is not None:
        return now.moment
    return await run_in_threadpool(service.moment, job_id, diagnosed=diagnosed)


async def _come(views: Sequence[Future[Any]]) -> None:
    """Return once they have come, or after VIEW_WAIT_MS. What became of them is for who reads them to say."""
    waiting = [asyncio.wrap_future(view) for view in views]
    for each in waiting:
        each.add_done_callback(_heed)
    await asyncio.wait(waiting, timeout=VIEW_WAIT_MS / 1000)


def _heed(ended: asyncio.Future[Any]) -> None:
    """Its error is not one that nobody looked at."""
    if not ended.cancelled():
        ended.exception()


async def from_views(request: Request, response: Response, service: Service) -> None:
    """Dependency of routes that read views alone, of the job in their path or of all jobs. Raises NotModifiedError."""
    await _show(request, response, service, diagnosed=False)


async def from_diagnosis(request: Request, response: Response, service: Service) -> None:
    """As `from_views`, of routes that tell the health of the job in their path."""
    await _show(request, response, service, diagnosed=True)


async def _show(request: Request, response: Response, service: Coordinator, *, diagnosed: bool) -> None:
    shown: Shown | None = request.scope.get(_SHOWN)
    if shown is None:
        job_id = request.path_params.get("jobid")
        shown = Shown(job_id, diagnosed, await moment_of(service, job_id, diagnosed=diagnosed))
        request.scope[_SHOWN] = shown
    headers = headers_of(shown.moment)
    if is_known(request.headers.get("if-none-match", ""), headers["ETag"]):
        raise NotModifiedError(headers)
    response.headers.update(headers)


def headers_of(moment: Moment) -> dict[str, str]:
    """What an answer from views says of itself."""
    return _headers(etag_of(moment), moment.as_of_ms)


def _headers(etag: str, as_of_ms: int) -> dict[str, str]:
    return {"ETag": etag, AS_OF_HEADER: str(as_of_ms), "Cache-Control": "no-cache"}


def etag_of(moment: Moment) -> str:
    return _etag(moment.tag)


@functools.lru_cache(256)
def _etag(tag: str) -> str:
    digest = hashlib.blake2b(f"{VERSION} {REVISION} {tag}".encode(), digest_size=12).hexdigest()
    return f'W/"{digest}"'


def is_known(condition: str, etag: str) -> bool:
    """Whether an `If-None-Match` has a tag. Compares weakly, as RFC 9110 says."""
    wanted = etag.removeprefix("W/")
    tags = (tag.strip().removeprefix("W/") for tag in condition.split(",", TAGS_MAX)[:TAGS_MAX])
    return condition.strip() == "*" or wanted in tags


async def not_modified(request: Request, error: Exception) -> Response:
    """Error handler of the application."""
    assert isinstance(error, NotModifiedError)
    return unmodified(error.headers)


def unmodified(headers: Mapping[str, str]) -> Response:
    return Response(status_code=304, headers=dict(headers))


def tagged(request: Request, body: bytes, as_of_ms: int) -> Response:
    """Answer with JSON that depends on more than views: its tag is that of the body itself. Raises NotModifiedError."""
    etag = f'W/"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = _headers(etag, as_of_ms)
    if is_known(request.headers.get("if-none-match", ""), etag):
        raise NotModifiedError(headers)
    return Response(body, media_type="application/json", headers=headers)


NOT_MODIFIED: dict[int | str, dict[str, Any]] = {304: {"description": "The caller's If-None-Match has the tag of this answer"}}

VIEWED: dict[str, Any] = {"dependencies": [Depends(from_views)], "responses": NOT_MODIFIED}
"""Options of such a route. Not for one that changes anything, or reads anything else: its answer could be withheld, and be given to
another caller. So it must not depend on who asks, nor on any header."""

DIAGNOSED: dict[str, Any] = {"dependencies": [Depends(from_diagnosis)], "responses": NOT_MODIFIED}
"""As VIEWED, of a route that tells a job's health."""


@dataclass(slots=True)
class _Kept:
    """What is known of a path and its query."""

    route: Any
    """For the metrics of requests."""
    job_id: str | None
    diagnosed: bool
    etag: str = ""
    """Of `body`."""
    encoded_s: float = 0.0
    headers: Headers = ()
    body: bytes | None = None


@dataclass(slots=True)
class Answered:
    """An answer that no connection took."""

    status: int = 0
    headers: Headers = ()
    body: bytes = b""

    async def take(self, message: Message) -> None:
        """As ASGI's `send`."""
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], tuple(message["headers"])
        else:
            self.body += message.get("body", b"")

    def header(self, name: str) -> str:
        """Empty without one."""
        wanted = name.lower().encode()
        return next((value.decode("latin-1") for key, value in self.headers if key.lower() == wanted), "")


class KeptAnswers:
    """ASGI middleware in front of the routes, behind all checks: answers again what FastAPI has answered from the views that are
    still the newest, and 304 to who has it.

    It knows no route: a path is learnt from a request that FastAPI took to be one that is answered from views. Whatever it does not
    know goes on to FastAPI. Those who ask for the same answer while it is encoded wait for it. For the event loop alone."""

    def __init__(self, app: ASGIApp, *, service: Coordinator) -> None:
        self._app = app
        self._service = service
        self._kept: OrderedDict[tuple[str, bytes], _Kept] = OrderedDict()
        """By path and query, by when they were asked for."""
        self._bytes = 0
        self._encoding: dict[tuple[str, bytes, str], asyncio.Future[None]] = {}
        """By path, query and ETag: done once the answer is kept, or none comes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        key = (scope["path"], scope["query_string"])
        if len(key[0]) + len(key[1]) > KEPT_PATH_CHARS_MAX:
            await self._app(scope, receive, send)
            return
        kept = self._kept.get(key)
        if kept is None:
            await self._pass_on(key, scope, receive, send)
            return
        self._kept.move_to_end(key)
        try:
            moment = await moment_of(self._service, kept.job_id, diagnosed=kept.diagnosed)
        except HoldfastError:  # FastAPI has it, too, and answers it
            await self._pass_on(key, scope, receive, send)
            return
        await self._answer(key, kept, moment, scope, receive, send)

    async def moment_now(self, scope: Scope) -> Moment | None:
        """Of the views that the answer to a GET is from; None if nothing is known of it."""
        kept = self._kept.get((scope["path"], scope["query_string"]))
        if kept is None:
            return None
        try:
            return await moment_of(self._service, kept.job_id, diagnosed=kept.diagnosed)
        except HoldfastError:
            return None

    async def read(self, scope: Scope, moment: Moment | None) -> Answered:
        """The answer to a GET that no connection brought. `moment`: as `moment_now` has told."""
        answered, key = Answered(), (scope["path"], scope["query_string"])
        kept = self._kept.get(key)
        if kept is None or moment is None:
            await self(scope, _no_body, answered.take)
        else:
            self._kept.move_to_end(key)
            await self._answer(key, kept, moment, scope, _no_body, answered.take)
        return answered

    async def _answer(
        self, key: tuple[str, bytes], kept: _Kept, moment: Moment, scope: Scope, receive: Receive, send: Send
    ) -> None:
        headers = headers_of(moment)
        if is_known(header_of(scope, b"if-none-match").decode("latin-1"), headers["ETag"]):
            scope["route"] = kept.route
            await unmodified(headers)(scope, receive, send)
            return
        encoding = self._encoding.get((*key, headers["ETag"]))
        if encoding is not None:
            await asyncio.shield(encoding)
            kept = self._kept.get(key, kept)
        if kept.body is not None and kept.etag == headers["ETag"] and time.monotonic() - kept.encoded_s < KEPT_S:
            scope["route"] = kept.route
            await _send_again(kept, headers[AS_OF_HEADER].encode(), send)
            return
        scope[_SHOWN] = Shown(kept.job_id, kept.diagnosed, moment)
        await self._encode(key, headers["ETag"], scope, receive, send)

    async def _encode(self, key: tuple[str, bytes], etag: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Have FastAPI answer, for all who ask meanwhile."""
        place = (*key, etag)
        encoding = self._encoding.setdefault(place, asyncio.get_running_loop().create_future())

        def let_go() -> None:
            if self._encoding.get(place) is encoding:
                del self._encoding[place]
            if not encoding.done():
                encoding.set_result(None)

        try:
            await self._pass_on(key, scope, receive, send, let_go)
        finally:
            let_go()

    async def _pass_on(
        self, key: tuple[str, bytes], scope: Scope, receive: Receive, send: Send, kept: Callable[[], None] | None = None
    ) -> None:
        """Have FastAPI answer, and keep what may be given again. `kept`: called before anything is sent."""
        status = 0
        headers: Headers = ()

        start: Message | None = None

        async def tell(message: Message) -> None:
            nonlocal status, headers, start
            if message["type"] == "http.response.start":
                status, headers = message["status"], tuple(message["headers"])  # those further out add to the list
                if _SHOWN in scope:  # nobody else waits for a reader who does not take a head: what is to be kept comes first
                    start = message
                    return
            if message.get("more_body"):
                status = 0
            elif status:
                self._keep(key, scope, status, headers, message.get("body", b""))
            if kept is not None:
                kept()
            if start is not None:
                head, start = start, None
                await send(head)
            await send(message)

        await self._app(scope, receive, tell)

    def _keep(self, key: tuple[str, bytes], scope: Scope, status: int, headers: Headers, body: bytes) -> None:
        shown: Shown | None = scope.get(_SHOWN)
        self._forget(key)
        if shown is None or status not in (200, 304):
            return
        kept = _Kept(scope["route"], shown.job_id, shown.diagnosed)
        if status == 200 and len(body) <= KEPT_BODY_BYTES_MAX:
            kept.etag, kept.encoded_s, kept.headers, kept.body = etag_of(shown.moment), time.monotonic(), headers, body
            self._bytes += len(body)
        self._kept[key] = kept
        while len(self._kept) > KEPT_PATHS_MAX or self._bytes > KEPT_BYTES_MAX:
            self._forget(next(iter(self._kept)))

    def _forget(self, key: tuple[str, bytes]) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None and kept.body is not None:
            self._bytes -= len(kept.body)


async def _no_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


_AS_OF = AS_OF_HEADER.lower().encode()


async def _send_again(kept: _Kept, as_of: bytes, send: Send) -> None:
    headers = [(name, as_of if name == _AS_OF else value) for name, value in kept.headers]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": kept.body})
