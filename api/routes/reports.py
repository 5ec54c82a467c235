"""What workers post, served without FastAPI: acknowledgements, states, heartbeats and answers, thousands a second.

A request that is one of these by its method and path alone is judged by the same parts as any other (access, bodies, connection),
and answered by the same functions; only the resolving of routes and parameters, which came to most of its cost, is left out.
Everything else, such as a password in place of a token or a slot that is written oddly, is FastAPI's, which also describes these
routes."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.errors import error_body
from holdfast.api.http.basic import is_password
from holdfast.api.http.origin import header_of
from holdfast.api.http.page_headers import API_HEADERS
from holdfast.api.http.request_ids import HEADER, named
from holdfast.api.logs import REQUEST_ID
from holdfast.api.routes import workers
from holdfast.api.routes.service.metrics import HttpMetrics
from holdfast.coordinator.dispatcher.job_log import TEXT_CHARACTERS_MAX, printable
from holdfast.coordinator.interface import Coordinator
from holdfast.statebackends.errors import HoldfastError

log = logging.getLogger("holdfast.api")

Endpoint = Callable[[Request, Coordinator, str, int], Awaitable[Response]]

ENDPOINTS: Mapping[str, Endpoint] = {
    "acks": workers.acks,
    "states": workers.states,
    "heartbeat": workers.heartbeat,
    "answers": workers.answers,
}
"""By the last segment of the path: the functions of the described routes."""

ROUTES: Mapping[str, str] = {name: f"{workers.router.prefix}/{{slot}}/{name}" for name in ENDPOINTS}
"""Templates of their paths, for metrics."""

_PATH = re.compile(r"/v1/jobs/([0-9a-f]{32})/workers/(0|[1-9][0-9]{0,4})/(acks|states|heartbeat|answers)")
_SLOTS = 32_768

_ENDPOINT = "holdfast.endpoint"
"""Key of the scope of such a request: its function, job and slot."""


class Reports:
    """ASGI application for the requests that `takes` names."""

    def __init__(
        self,
        app: FastAPI,
        *,
        check: Callable[[ASGIApp], ASGIApp],
        metrics: HttpMetrics,
        refuse: Callable[[Request, Exception], Awaitable[Response]],
    ) -> None:
        """`check`: puts the check of access in front. `refuse`: the answer to a typed error, as of every route."""
        self._app = app
        self._service: Coordinator = app.state.service
        self._checked = check(self._serve)
        self._metrics = metrics
        self._refuse = refuse

    def takes(self, scope: Scope) -> bool:
        """Whether a request is one of these; if so it is noted in its scope which one."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return False
        found = _PATH.fullmatch(scope["path"])
        if found is None or int(found[2]) >= _SLOTS or is_password(header_of(scope, b"authorization")):
            return False
        scope[_ENDPOINT] = (found[3], found[1], int(found[2]))
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As the outer middleware does: name the request, measure it, and say to browsers what every answer says."""
        began = time.perf_counter()
        scope["app"] = self._app
        name, status = named(scope), 500

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *API_HEADERS, (HEADER, name)]
            await send(message)

        token = REQUEST_ID.set(name.decode())
        try:
            await self._checked(scope, receive, tell)
        finally:
            REQUEST_ID.reset(token)
            self._metrics.observe("POST", ROUTES[scope[_ENDPOINT][0]], status, time.perf_counter() - began)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose caller may make it."""
        request = Request(scope, receive)
        name, job_id, slot = scope[_ENDPOINT]
        try:
            answer = await ENDPOINTS[name](request, self._service, job_id, slot)
        except HoldfastError as error:
            answer = await self._refuse(request, error)
        except ClientDisconnect:
            log.debug("POST %s: the caller disconnected before its request was complete", scope["path"])
            return
        except Exception as error:
            log.exception("POST %s failed", printable(scope["path"], TEXT_CHARACTERS_MAX // 2))
            answer = Response(error_body(f"internal error: {type(error).__name__}"), 500, media_type="application/json")
        await send({"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers})
        await send({"type": "http.response.body", "body": answer.body})
