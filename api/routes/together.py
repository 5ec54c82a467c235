"""Several answers from views in one request: who shows a job asks for all that is shown of it at once.

What a look costs is HTTP, the checks and FastAPI's way to a route, once a request each: an answer that is kept costs next to
nothing beside them."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import unquote_to_bytes

import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.api.access.audit_log import AuditLog
from holdfast.api.errors import status_of
from holdfast.api.flink import schemas
from holdfast.api.http.auth import CALLER, TAKE_REQUESTS, check_request, refuse, refused
from holdfast.api.http.origin import header_of
from holdfast.api.routes.common import ERRORS
from holdfast.api.routes.viewed import (
    AS_OF_HEADER,
    KEPT_PATH_CHARS_MAX,
    NOT_MODIFIED,
    Answered,
    KeptAnswers,
    etag_of,
    from_diagnosis,
    from_views,
    is_known,
    unmodified,
)
from holdfast.barriers.codec import ERROR_HEADER
from holdfast.coordinator.dispatcher.job_log import printable
from holdfast.coordinator.views import Moment
from holdfast.statebackends.errors import AccessDeniedError, HoldfastError, InvalidConfigError, TooManyRequestsError

router = APIRouter(tags=["jobs"], responses=ERRORS)

PATH = "/v1/views"
QUERIES_MAX = 256
"""Queries that are known, of up to KEPT_PATH_CHARS_MAX each."""

PATHS_MAX = 8
"""Answers of one request."""

_OF_THE_REQUEST = ("type", "asgi", "http_version", "method", "scheme", "server", "client", "root_path", "state", "app", CALLER)
"""What a path's own scope has of the request's: the rest is of the routes that it has passed."""
_TOGETHER = "holdfast.together"
"""Key of the scope of such a path."""
_ANSWER_TOGETHER = "holdfast.answer_together"
"""Key of the scope of a query that is not known: the `AnswerTogether` that it has passed."""
_PATH_CHARS_SHOWN_MAX = 128


async def only_views(request: Request) -> None:
    """Dependency of all routes: one that is not answered from views alone takes no request of this kind. It may wait, last, or do
    something. Raises InvalidConfigError."""
    if _TOGETHER in request.scope and not is_viewed(request.scope["route"]):
        shown = request.scope["path"][:_PATH_CHARS_SHOWN_MAX]
        raise InvalidConfigError(f"{shown!r} is not answered from what jobs publish: ask for it by itself", setting="path")


def is_viewed(route: BaseRoute) -> bool:
    return isinstance(route, APIRoute) and any(each.dependency in (from_views, from_diagnosis) for each in route.dependencies)


class AnswerOfPath(schemas.Record):
    status: int
    """As if the path had been asked for by itself; never 304."""
    error: str
    """Class of the error; empty without one."""
    as_of_ms: int
    """Until when the answer is known to have been so, ms since the epoch; 0 for an error."""
    body: Any
    """The path's own answer; null if it has none, as of a redirection."""


class AnswersTogether(schemas.Record):
    answers: list[AnswerOfPath]
    """By the order of the paths."""


_PathText = Annotated[str, Query(min_length=1, max_length=KEPT_PATH_CHARS_MAX)]


@router.get(PATH, response_class=Response, responses={200: {"model": AnswersTogether}, **NOT_MODIFIED})
async def views(
    request: Request,
    path: Annotated[
        list[_PathText],
        Query(
            min_length=1,
            max_length=PATHS_MAX,
            description="A path of this service, with its query, whose answer has an ETag: `/v1/jobs/overview`. Once for each",
        ),
    ],
) -> Response:
    """The answers of several paths that are answered from what jobs publish, each as if it had been asked for by itself. Each
    counts as a request of its caller. 304 if the caller has them all."""
    if len(set(path)) < len(path):
        raise InvalidConfigError("a path is named more than once", setting="path")
    together: AnswerTogether = request.scope[_ANSWER_TOGETHER]
    return await together.learn(request.scope, tuple(path))


class AnswerTogether:
    """ASGI middleware right in front of `KeptAnswers`: answers a query that FastAPI has taken before.

    For the event loop alone."""

    def __init__(self, app: ASGIApp, *, audit: AuditLog) -> None:
        assert isinstance(app, KeptAnswers)
        self._kept = app
        self._audit = audit
        self._known: OrderedDict[bytes, tuple[Any, tuple[str, ...]]] = OrderedDict()
        """By query: the route, for the metrics of requests, and the paths. By when it was asked last."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET" or scope["path"] != PATH:
            await self._kept(scope, receive, send)
            return
        known = self._known.get(scope["query_string"])
        if known is None:
            scope[_ANSWER_TOGETHER] = self
            await self._kept(scope, receive, send)
            return
        self._known.move_to_end(scope["query_string"])
        scope["route"], paths = known
        try:
            answer = await self._answer(scope, paths)
        except HoldfastError as error:
            await refuse(error, send)
            return
        await answer(scope, receive, send)

    async def learn(self, scope: Scope, paths: tuple[str, ...]) -> Response:
        """Answer a query, and from now on all that are equal to it."""
        query = scope["query_string"]
        if len(query) <= KEPT_PATH_CHARS_MAX:
            self._known[query] = scope["route"], paths
            if len(self._known) > QUERIES_MAX:
                self._known.popitem(last=False)
        return await self._answer(scope, paths)

    async def _answer(self, scope: Scope, paths: Sequence[str]) -> Response:
        scopes = [_scope_of(scope, each) for each in paths]
        for each in scopes:
            self._check(each)
        _take_requests(scope, len(scopes) - 1)

        moments = await asyncio.gather(*map(self._kept.moment_now, scopes))  # those that wait for a view wait at one time
        condition = header_of(scope, b"if-none-match").decode("latin-1")
        headers = _headers_now(paths, moments) if condition else {}
        if headers and is_known(condition, headers["ETag"]):
            return unmodified(headers)
        return _response(paths, [await self._read(each, moment) for each, moment in zip(scopes, moments, strict=True)])

    async def _read(self, scope: Scope, moment: Moment | None) -> Answered:
        try:
            return await self._kept.read(scope, moment)
        except Exception as error:
            error.add_note(f"it was to answer {printable(scope['path'], _PATH_CHARS_SHOWN_MAX)}")
            raise

    def _check(self, scope: Scope) -> None:
        """Raises AccessDeniedError and NotFoundError as if the path had been asked for by itself."""
        try:
            check_request(scope[CALLER], scope["method"], scope["path"])
        except AccessDeniedError as error:
            self._audit.note(refused(scope, status_of(error)))
            raise


def _scope_of(scope: Scope, path: str) -> Scope:
    """Of a GET of this path by the same caller, without any header: no answer from views depends on one."""
    raw, _, query = path.partition("?")
    decoded = unquote_to_bytes(raw).decode("utf-8", "replace")
    ours = {key: scope[key] for key in _OF_THE_REQUEST if key in scope}
    more = {"path": decoded, "raw_path": raw.encode(), "query_string": query.encode()}
    return {**ours, **more, "headers": [], _TOGETHER: True}


def _take_requests(scope: Scope, more: int) -> None:
    """Raises TooManyRequestsError if the caller may not make so many more."""
    take: Callable[[int], int] = scope[TAKE_REQUESTS]
    wait_ms = take(more) if more else 0
    if wait_ms:
        raise TooManyRequestsError("too many requests: each path counts as one", retry_after_ms=wait_ms)


def _headers_now(paths: Sequence[str], moments: Sequence[Moment | None]) -> dict[str, str]:
    """Of an answer with all of these; empty if one of them is not known."""
    known = [moment for moment in moments if moment is not None]
    return _headers(paths, map(etag_of, known), (each.as_of_ms for each in known)) if len(known) == len(moments) else {}


def _headers(paths: Sequence[str], tags: Iterable[str], as_of_ms: Iterable[int]) -> dict[str, str]:
    return {"ETag": _tag_together((*paths, *tags)), AS_OF_HEADER: str(min(as_of_ms)), "Cache-Control": "no-cache"}


@functools.lru_cache(256)
def _tag_together(parts: tuple[str, ...]) -> str:
    return f'W/"{hashlib.blake2b(" ".join(parts).encode(), digest_size=12).hexdigest()}"'


def _response(paths: Sequence[str], answers: Sequence[Answered]) -> Response:
    as_of_ms = [_as_of_ms(each) for each in answers]
    parts = [
        b'{"status":%d,"error":%s,"as_of_ms":%d,"body":%s}'
        % (each.status, msgspec.json.encode(each.header(ERROR_HEADER)), moment, each.body or b"null")
        for each, moment in zip(answers, as_of_ms, strict=True)
    ]
    are_all_known = all(each.status == HTTPStatus.OK for each in answers)
    headers = _headers(paths, (each.header("etag") for each in answers), as_of_ms) if are_all_known else {}
    return Response(b'{"answers":[%s]}' % b",".join(parts), media_type="application/json", headers=headers)


def _as_of_ms(answered: Answered) -> int:
    text = answered.header(AS_OF_HEADER)
    return int(text) if text.isdecimal() else 0
