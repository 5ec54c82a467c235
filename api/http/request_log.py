"""ASGI middleware: for each request that changes something a log line, and a line of the audit log: caller, request and answer.

The worker protocol is left out, as its effects are in the lines about its job; so are requests that change nothing."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.access.audit import Noted
from holdfast.api.access.audit_log import AuditLog
from holdfast.api.access.roles import Caller
from holdfast.api.http.auth import CALLER
from holdfast.coordinator.dispatcher.job_log import TEXT_CHARACTERS_MAX, printable, printable_fields

logger = logging.getLogger("holdfast.requests")

_CHANGES = {
    ("POST", "/v1/jobs"): "submit",
    ("PATCH", "/jobs/{jobid}"): "cancel",
    ("GET", "/jobs/{jobid}/yarn-cancel"): "cancel",
    ("POST", "/applications/{jobid}/cancel"): "cancel",
    ("POST", "/jobs/{jobid}/checkpoints"): "checkpoint",
    ("POST", "/jobs/{jobid}/savepoints"): "savepoint",
    ("POST", "/jobs/{jobid}/stop"): "stop",
    ("PATCH", "/jobs/{jobid}/checkpoints/config"): "change settings",
    ("POST", "/jobs/{jobid}/drills"): "drill",
    ("POST", "/jobs/{jobid}/forget"): "forget a key",
    ("PUT", "/jobs/{jobid}/labels/{label}"): "label",
    ("DELETE", "/jobs/{jobid}/labels/{label}"): "remove a label",
    ("POST", "/savepoint-disposal"): "dispose of a savepoint",
    ("POST", "/tokens"): "issue a token",
    ("DELETE", "/tokens/{tokenid}"): "revoke a token",
}
"""By method and route. A changing request that is not listed is logged by method and path, so that a new one is not forgotten."""

_CHARACTERS_MAX = TEXT_CHARACTERS_MAX // 2
"""Characters of the request and of its subject, at most."""

_QUIET = ("/v1/jobs/{jobid}/workers", "/v1/preflight", "/v1/snapshots")
_CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})

_CHANGING_BY_GET = "/yarn-cancel"
"""End of the one path of Flink's dialect that changes something by GET."""

SUBJECT = "holdfast.subject"
"""Key of the scope under which a route names its subject where the path does not: a job's name, a folder."""


def _changes(scope: Scope) -> bool:
    return scope["method"] in _CHANGING or str(scope["path"]).endswith(_CHANGING_BY_GET)


class LogChanges:
    """Runs after the token check: a refused request changed nothing, and neither did one to an open path, which has no caller."""

    def __init__(self, app: ASGIApp, *, audit: AuditLog) -> None:
        self._app = app
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or CALLER not in scope or not _changes(scope) or "/workers/" in scope["path"]:
            await self._app(scope, receive, send)
            return
        answered = False

        async def watch(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                self._write(scope, message["status"])  # before the caller gets the answer
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            if not answered:
                self._write(scope, None)

    def _write(self, scope: Scope, status: int | None) -> None:
        """`status` None: the caller left before it was answered."""
        route = str(getattr(scope.get("route"), "path", ""))
        if route.startswith(_QUIET):
            return
        dialect = route.removeprefix("/flink").removeprefix("/v1") if route != "/v1/jobs" else route
        what = _CHANGES.get((scope["method"], dialect))
        what = what or f"{scope['method']} {scope['path']}"
        named = scope.get("path_params", {})
        job_id = str(named.get("jobid", ""))
        subject = str(scope.get(SUBJECT, "") or named.get("label", ""))
        about = " ".join(each for each in (f"job {job_id}" if job_id else "", subject) if each)
        client = scope.get("client")
        peer = f"{client[0]}:{client[1]}" if client else "unknown"
        caller: Caller = scope[CALLER]
        credential = printable(caller.credential)
        self._audit.note(Noted(what, job_id, subject, credential, caller.role.value, peer, status or 0))
        fields: dict[str, object] = {
            "event": "request",
            "request": what,
            "job_id": job_id,
            "subject": subject,
            "peer": peer,
            "credential": credential,
            "status": status,
        }
        level = logging.INFO if status is None or status < 400 else logging.WARNING
        outcome = "left before it was answered" if status is None else str(status)
        facts = (printable(what, _CHARACTERS_MAX), printable(about, _CHARACTERS_MAX) or "the service", printable(peer))
        extra = {"fields": printable_fields(fields)}
        logger.log(level, "%s of %s by %s (%s): %s", *facts, credential, outcome, extra=extra)
