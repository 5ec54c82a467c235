"""The application factory: routes, middleware and error handlers around a coordinator.

It owns no thread and no socket; `holdfast.api.server.main` serves it. Every error leaves as Flink's `{"errors": [...]}`."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from anyio import CapacityLimiter
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.access.audit_log import AuditLog
from holdfast.api.access.authenticator import Authenticator
from holdfast.api.access.request_budget import RequestBudget
from holdfast.api.access.roles import Access, Caller
from holdfast.api.docs import page
from holdfast.api.errors import BusyError, MethodNotAllowedError, RemoteError, encode_error, error_body
from holdfast.api.events.stream import EventStreams
from holdfast.api.events.traces import Traces, open_provider
from holdfast.api.events.webhook_file import read_webhooks
from holdfast.api.events.webhooks import Webhooks
from holdfast.api.flink.web_interface import WebInterface
from holdfast.api.http.auth import CALLER, OPEN_PATHS, CheckAccess
from holdfast.api.http.basic import BasicAsBearer
from holdfast.api.http.outcomes import Outcomes
from holdfast.api.http.page_headers import PageHeaders
from holdfast.api.http.protocol import ConnectionGuard
from holdfast.api.http.request_ids import NameRequests
from holdfast.api.http.request_log import LogChanges
from holdfast.api.http.turns import LookInTurn
from holdfast.api.http.withheld_rows import WithholdRows
from holdfast.api.members.membership import Membership
from holdfast.api.routes import diagnosis, history, jobs, series, together, workers
from holdfast.api.routes.common import REFERENCE
from holdfast.api.routes.dialect import routers as dialect
from holdfast.api.routes.forwarded import ForwardToActive
from holdfast.api.routes.lifecycle import cost, drills, forgetting, labels, snapshots
from holdfast.api.routes.reports import Reports
from holdfast.api.routes.service import audit, dashboard, events, health, members, sessions, tokens, web
from holdfast.api.routes.service.metrics import MeasureRequests, make_registry
from holdfast.api.routes.threads import CommandThreads, StorageReaders
from holdfast.api.routes.viewed import KeptAnswers, NotModifiedError, not_modified
from holdfast.api.settings import ServerSettings
from holdfast.api.snapshots.disposals import Disposals
from holdfast.api.snapshots.forgettings import Forgettings
from holdfast.api.snapshots.maintenance import dispose_confined
from holdfast.api.version import VERSION
from holdfast.barriers.codec import UNREACHABLE_HEADER
from holdfast.barriers.jobgraph import DriverDeparture, Submission, SubmissionAccepted
from holdfast.barriers.messages import (
    AckAnswers,
    AckBatch,
    Heartbeat,
    NumberedCommand,
    Registered,
    RegisterWorker,
    StandBy,
    StandbyOrder,
    StatusBatch,
    WorkerAnswer,
)
from holdfast.coordinator.dispatcher.job_log import TEXT_CHARACTERS_MAX, printable
from holdfast.coordinator.explain.records import Explanation, HealthView
from holdfast.coordinator.history.failures import FailurePage
from holdfast.coordinator.interface import Coordinator
from holdfast.coordinator.ownership.cost import Cost
from holdfast.coordinator.restore.preflight import PreflightReport
from holdfast.statebackends.errors import HoldfastError, InvalidConfigError, NotFoundError, NotLeaderError, RecoveringError

log = logging.getLogger("holdfast.api")

EPOCH_DIGITS_MAX = 18
"""Digits of an epoch in a header, at most."""

WORKER_THREADS = 16
"""Threads that open workers' streams of commands: what people ask for has others, and none of them waits here."""
SUBMIT_THREADS = 8
"""Threads of submissions, preflights and departures, which read snapshots."""

_RECORDS = (
    Submission,
    SubmissionAccepted,
    DriverDeparture,
    RegisterWorker,
    StandBy,
    StandbyOrder,
    Registered,
    NumberedCommand,
    AckBatch,
    AckAnswers,
    StatusBatch,
    Heartbeat,
    WorkerAnswer,
    PreflightReport,
    Explanation,
    HealthView,
    Cost,
    FailurePage,
)
"""Roots of the worker protocol, for OpenAPI's components."""


class RestApp(FastAPI):
    """The service as an ASGI application: what workers post again and again does not pass through FastAPI."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reports: Reports = self.state.reports
        if reports.takes(scope):
            await reports(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def create_app(
    service: Coordinator, settings: ServerSettings, guard: ConnectionGuard, membership: Membership | None = None
) -> FastAPI:
    """The REST service of one coordinator. `service` is neither started nor closed here; `guard` is the server's own. `membership`:
    of a coordinator that is one of several; while it stands by, it passes people's requests on."""
    app = RestApp(
        title="Holdfast",
        version=VERSION,
        description="Coordinator of checkpoints: Flink's monitoring dialect, and the protocol of drivers and workers.",
        openapi_url=None,  # the document and the page are our own: see holdfast.api.docs
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # its redirection believes the request's host, and knows nothing of a proxy's TLS
    )
    _open_parts(app, service, settings, guard, membership)
    app.router.routes.extend(_routes(with_web=settings.flink_ui is not None))
    _add_middleware(app, settings, membership)
    app.state.reports = Reports(app, check=_access_check(app, settings), metrics=app.state.http_metrics, refuse=_typed_error)
    app.add_exception_handler(HoldfastError, _typed_error)
    app.add_exception_handler(NotModifiedError, not_modified)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(HTTPException, _http_error)
    _describe(app, authenticated=settings.token is not None)
    return app


def _open_parts(
    app: FastAPI, service: Coordinator, settings: ServerSettings, guard: ConnectionGuard, membership: Membership | None
) -> None:
    """What routes and middleware of this app work on."""
    app.state.service = service
    app.state.settings = settings
    app.state.authenticator = Authenticator(settings.location, settings.token)
    app.state.audit = AuditLog(settings.location)
    app.state.requests = RequestBudget()
    app.state.outcomes = Outcomes()
    app.state.bodies = guard.bodies
    app.state.membership = membership
    app.state.decoding = ThreadPoolExecutor(1, "holdfast-decoding")
    app.state.describing = asyncio.Lock()
    app.state.readers = StorageReaders()
    app.state.commands = CommandThreads()
    app.state.worker_threads = CapacityLimiter(WORKER_THREADS)
    app.state.submit_threads = CapacityLimiter(SUBMIT_THREADS)
    app.state.events = EventStreams()
    receivers = read_webhooks(settings.webhooks) if settings.webhooks is not None else ()
    app.state.traces = Traces(service, open_provider() if settings.traces == "otlp" else None)
    app.state.webhooks = Webhooks(receivers, service, settings.location)
    app.state.disposals = Disposals(dispose_confined)
    app.state.forgettings = Forgettings()
    app.state.registry, app.state.http_metrics = make_registry(
        service, guard, app.state.events, app.state.webhooks, membership
    )
    if settings.flink_ui is not None:
        app.state.web = WebInterface(settings.flink_ui)


def _add_middleware(app: FastAPI, settings: ServerSettings, membership: Membership | None) -> None:
    """From the innermost to the outermost: a request meets the last one first."""
    app.add_middleware(KeptAnswers, service=app.state.service)
    app.add_middleware(together.AnswerTogether, audit=app.state.audit)
    app.add_middleware(AnswerFailures)
    if membership is not None:
        app.add_middleware(ForwardToActive, membership=membership)
    app.add_middleware(LogChanges, audit=app.state.audit)
    app.add_middleware(LookInTurn)
    app.add_middleware(WithholdRows)
    app.add_middleware(_access_check(app, settings))
    app.add_middleware(BasicAsBearer, audit=app.state.audit)
    app.add_middleware(PageHeaders)
    app.add_middleware(MeasureRequests, metrics=app.state.http_metrics)
    app.add_middleware(NameRequests)


def _access_check(app: FastAPI, settings: ServerSettings) -> Callable[[ASGIApp], CheckAccess]:
    """The check of access in front of an application; all share one budget of requests."""
    return functools.partial(
        CheckAccess,
        authenticator=app.state.authenticator,
        audit=app.state.audit,
        requests=app.state.requests,
        per_s=settings.requests_per_s_max,
        open_paths=OPEN_PATHS if settings.flink_ui is None else OPEN_PATHS | web.OPEN_PATHS,
    )


@functools.cache
def _routes(*, with_web: bool) -> tuple[BaseRoute, ...]:
    """Routes are of the process; what they work on is of the app (`app.state`). FastAPI builds what is included at the first
    request, for a tenth of a second, and would do so again for each service of a process."""
    router = APIRouter(dependencies=[Depends(together.only_views)])
    router.include_router(health.router)
    router.include_router(members.router)
    router.include_router(page.router)
    router.include_router(jobs.router)
    router.include_router(history.router)
    router.include_router(events.router)
    router.include_router(series.router)
    router.include_router(together.router)
    router.include_router(labels.router)
    router.include_router(drills.router)
    router.include_router(forgetting.router)
    router.include_router(cost.router)
    router.include_router(diagnosis.router)  # before Flink's paths: one of these would take `explain` for a trigger's id
    router.include_router(snapshots.router)
    router.include_router(workers.router)
    router.include_router(tokens.router)
    router.include_router(sessions.router)
    router.include_router(audit.router)
    router.include_router(dialect.router, prefix="/v1")
    router.include_router(dialect.router, include_in_schema=False)
    if with_web:
        router.include_router(dialect.router, prefix=web.PREFIX, include_in_schema=False)
        router.include_router(web.router)
    router.include_router(dashboard.router)  # last: it has every other path below its prefix
    return tuple(router.routes)


_ASK_AGAIN = (RecoveringError, NotLeaderError, BusyError)
"""Errors of a healthy service. Callers repeat such requests, and `/readyz` is open to everybody: a line for each would fill the
log."""


async def _typed_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HoldfastError)
    if isinstance(error, NotLeaderError):
        _note_unreachable(request, error)
    wire = encode_error(error)
    if wire.status >= 500 and not isinstance(error, _ASK_AGAIN):
        text = printable(f"{type(error).__name__}: {error}", TEXT_CHARACTERS_MAX // 2)
        log.warning("%s %s: %s", *_asked(request.scope), text)
    return Response(wire.body, status_code=wire.status, headers=wire.headers)


def _note_unreachable(request: Request, error: NotLeaderError) -> None:
    """A client that is being sent to a leader reports in a header that this leader did not answer it. The job is led from here
    then, which is a change: nobody's who may only look."""
    caller: Caller | None = request.scope.get(CALLER)
    if caller is None or not (caller.may(Access.OPERATE) or caller.may(Access.WORK)):
        return
    epoch, job_id = request.headers.get(UNREACHABLE_HEADER, ""), error.job
    if job_id is not None and epoch.isdecimal() and len(epoch) <= EPOCH_DIGITS_MAX:
        request.app.state.service.leader_unreachable(job_id, int(epoch))


async def _invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = [(_place(problem["loc"]), problem["msg"]) for problem in error.errors()]
    problems = [f"{place}: {text}" for place, text in found]
    wire = encode_error(InvalidConfigError("; ".join(problems), field=found[0][0]))
    return Response(error_body(*problems), status_code=400, headers=wire.headers)


def _place(location: Sequence[str | int]) -> str:
    """Which part of a request; of a parameter that may come several times also which time, from 0 on."""
    match location:
        case [*_, str(name), int(index)]:
            return f"{name}[{index}]"
        case [*_, last]:
            return str(last)
    return "request"


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{error.detail}: {request.method} {request.url.path}"
    wire = encode_error(_of_status(error.status_code, text, request.method))
    return Response(wire.body, status_code=error.status_code, headers={**(error.headers or {}), **wire.headers})


def _of_status(status: int, text: str, method: str) -> HoldfastError:
    """What Starlette refuses by itself, as one of our errors: callers tell errors by class."""
    match status:
        case 404:
            return NotFoundError(text)
        case 405:
            return MethodNotAllowedError(text, method=method)
    return InvalidConfigError(text) if status < 500 else RemoteError(text, status=status)


def _asked(scope: Scope) -> tuple[str, str]:
    """Method and path, clipped and escaped for a log line."""
    return str(scope.get("method", "")), printable(scope.get("path", ""), TEXT_CHARACTERS_MAX // 2)


class AnswerFailures:
    """ASGI middleware: an error without a kind is a bug. It is logged here, and the caller sees its class alone.

    Starlette's own handler raises again after it answered, and the server then drops the connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except ClientDisconnect:
            log.debug("%s %s: the caller disconnected before its request was complete", *_asked(scope))
        except Exception as error:
            log.exception("%s %s failed", *_asked(scope))
            if started:
                raise
            body = error_body(f"internal error: {type(error).__name__}")
            await Response(body, status_code=500, media_type="application/json")(scope, receive, send)


def _describe(app: FastAPI, *, authenticated: bool) -> None:
    """Complete the OpenAPI document: records that msgspec decodes, and the bearer token."""
    document = app.openapi
    lock = threading.Lock()

    def complete() -> dict[str, Any]:
        with lock:  # other threads must not see FastAPI's document before ours is added
            if not hasattr(app.state, "description"):
                schema = document()
                _, components = msgspec.json.schema_components(_RECORDS, ref_template=REFERENCE)
                parts = schema.setdefault("components", {})
                parts["schemas"] = {**components, **parts.get("schemas", {})}
                if authenticated:
                    parts["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
                    schema["security"] = [{"bearer": []}]
                app.state.description = schema
            description: dict[str, Any] = app.state.description
            return description

    app.openapi = complete  # type: ignore[method-assign]
