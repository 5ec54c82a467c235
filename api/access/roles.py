"""What a caller may do: roles, kinds of requests, and which request is of which kind. Pure; nothing here knows a token.

A request that no rule names is for administrators alone: a new route is closed until it is classified."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

ANY_JOB = ""
"""Job of a caller that is not confined to one."""


class Role(StrEnum):
    """Roles of callers, weakest first, but for WORKER, which no person has."""

    VIEWER = "viewer"
    """Sees jobs, checkpoints and metrics; no rows of snapshots, and changes nothing."""
    OPERATOR = "operator"
    """Also reads rows and logs, submits, takes savepoints, labels and drills snapshots, stops and cancels jobs and changes their
    settings."""
    ADMIN = "admin"
    """Everything: also tokens, the deletion of savepoints, and the forgetting of keys."""
    WORKER = "worker"
    """The worker protocol of its own job, and nothing else."""


class Access(StrEnum):
    """Kinds of requests."""

    VIEW = "view"
    """Shows numbers, names and states."""
    OPERATE = "operate"
    """Changes a job, or reads what snapshots hold."""
    ADMINISTER = "administer"
    WORK = "work"
    """The worker protocol."""
    IDENTIFY = "identify"
    """Says who the caller is, or ends its session."""


_ALLOWED: Mapping[Role, frozenset[Access]] = {
    Role.VIEWER: frozenset({Access.VIEW, Access.IDENTIFY}),
    Role.OPERATOR: frozenset({Access.VIEW, Access.OPERATE, Access.IDENTIFY}),
    Role.ADMIN: frozenset(Access),
    Role.WORKER: frozenset({Access.WORK}),
}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, as its credential proves."""

    role: Role
    job_id: str = ANY_JOB
    """The only job that it may ask for; ANY_JOB: all."""
    credential: str = "token"
    """Name of the credential in logs, never the credential itself."""
    submission: int = 0
    """The only submission whose workers it speaks for; 0: all."""
    account: str = field(default="", compare=False)
    """Id of the issued token that it is known by, directly or by a session; empty: another credential."""
    expires_ms: int = field(default=0, compare=False)
    """When the credential ends, ms since the epoch; 0: not by itself."""

    def may(self, access: Access) -> bool:
        return access in _ALLOWED[self.role]

    def is_confined_from(self, job_id: str) -> bool:
        """Whether a request about this job (ANY_JOB: about none, or all) is outside of the one job it is confined to."""
        return self.job_id not in (ANY_JOB, job_id)


_RULES: tuple[tuple[str, str, Access], ...] = (
    ("GET", "/metrics", Access.VIEW),
    ("GET", "/overview", Access.VIEW),
    ("GET", "/config", Access.VIEW),
    ("GET", "/totals", Access.VIEW),
    ("GET", "/views", Access.VIEW),
    ("GET", "/members", Access.VIEW),
    ("GET", "/jobs", Access.VIEW),
    ("POST", "/jobs", Access.OPERATE),
    ("POST", "/preflight", Access.OPERATE),
    ("GET", "/jobs/overview", Access.VIEW),
    ("GET", "/jobs/metrics", Access.VIEW),
    ("GET", "/jobs/{jobid}/metrics", Access.VIEW),
    ("GET", "/jobs/{jobid}/config", Access.VIEW),
    ("GET", "/jobs/{jobid}/accumulators", Access.VIEW),
    ("GET", "/jobs/{jobid}/execution-result", Access.VIEW),
    ("GET", "/events", Access.VIEW),
    ("GET", "/jobs/{jobid}/events", Access.VIEW),
    ("GET", "/jobs/{jobid}/history", Access.VIEW),
    ("GET", "/jobs/{jobid}/failures", Access.VIEW),
    ("GET", "/jobs/{jobid}/series", Access.VIEW),
    ("GET", "/jobs/{jobid}/labels", Access.VIEW),
    ("GET", "/jobs/{jobid}/drills", Access.VIEW),
    ("POST", "/jobs/{jobid}/drills", Access.OPERATE),
    ("GET", "/jobs/{jobid}/cost", Access.VIEW),
    ("GET", "/jobs/{jobid}/forget", Access.ADMINISTER),
    ("POST", "/jobs/{jobid}/forget", Access.ADMINISTER),
    ("PUT", "/jobs/{jobid}/labels/{}", Access.OPERATE),
    ("DELETE", "/jobs/{jobid}/labels/{}", Access.OPERATE),
    ("GET", "/jobs/{jobid}/health", Access.VIEW),
    ("GET", "/jobs/{jobid}/preflight", Access.OPERATE),
    ("GET", "/jobs/{jobid}/resource-requirements", Access.VIEW),
    ("PUT", "/jobs/{jobid}/resource-requirements", Access.OPERATE),
    ("GET", "/jobs/{jobid}/rescales/{}", Access.VIEW),
    ("GET", "/jobs/{jobid}/rescales/details/{}", Access.VIEW),
    ("GET", "/jobs/{jobid}/rescaling/{}", Access.VIEW),
    ("PATCH", "/jobs/{jobid}/rescaling", Access.OPERATE),
    ("GET", "/jobs/{jobid}/yarn-cancel", Access.OPERATE),
    ("POST", "/jobs/{jobid}/coordinators/{}", Access.OPERATE),
    ("GET", "/jobs/{jobid}/jobmanager/{}", Access.VIEW),
    ("GET", "/jobs/{jobid}/taskmanagers/{}/log-url", Access.VIEW),
    ("GET", "/jobs/{jobid}", Access.VIEW),
    ("PATCH", "/jobs/{jobid}", Access.OPERATE),
    ("POST", "/jobs/{jobid}/leave", Access.OPERATE),
    ("GET", "/jobs/{jobid}/settings", Access.VIEW),
    ("GET", "/jobs/{jobid}/status", Access.VIEW),
    ("GET", "/jobs/{jobid}/plan", Access.VIEW),
    ("GET", "/jobs/{jobid}/exceptions", Access.VIEW),
    ("GET", "/jobs/{jobid}/vertices/{}", Access.VIEW),
    ("GET", "/jobs/{jobid}/vertices/{}/{}", Access.VIEW),
    ("GET", "/jobs/{jobid}/vertices/{}/subtasks/{}", Access.VIEW),
    ("GET", "/jobs/{jobid}/vertices/{}/subtasks/{}/metrics", Access.VIEW),
    ("GET", "/jobs/{jobid}/vertices/{}/subtasks/{}/attempts/{}", Access.VIEW),
    ("GET", "/jobs/{jobid}/vertices/{}/subtasks/{}/attempts/{}/accumulators", Access.VIEW),
    ("GET", "/jobs/{jobid}/checkpoints", Access.VIEW),
    ("POST", "/jobs/{jobid}/checkpoints", Access.OPERATE),
    ("GET", "/jobs/{jobid}/checkpoints/config", Access.VIEW),
    ("PATCH", "/jobs/{jobid}/checkpoints/config", Access.OPERATE),
    ("GET", "/jobs/{jobid}/checkpoints/{}", Access.VIEW),
    ("GET", "/jobs/{jobid}/checkpoints/details/{}", Access.VIEW),
    ("GET", "/jobs/{jobid}/checkpoints/details/{}/explain", Access.VIEW),
    ("GET", "/jobs/{jobid}/checkpoints/details/{}/subtasks/{}", Access.VIEW),
    ("POST", "/jobs/{jobid}/savepoints", Access.OPERATE),
    ("GET", "/jobs/{jobid}/savepoints/{}", Access.VIEW),
    ("POST", "/jobs/{jobid}/stop", Access.OPERATE),
    ("POST", "/savepoint-disposal", Access.ADMINISTER),
    ("GET", "/savepoint-disposal/{}", Access.ADMINISTER),
    ("GET", "/applications/overview", Access.VIEW),
    ("GET", "/applications/{jobid}", Access.VIEW),
    ("GET", "/applications/{jobid}/exceptions", Access.VIEW),
    ("GET", "/applications/{jobid}/jobmanager/config", Access.VIEW),
    ("POST", "/applications/{jobid}/cancel", Access.OPERATE),
    ("GET", "/taskmanagers", Access.VIEW),
    ("GET", "/taskmanagers/metrics", Access.VIEW),
    ("GET", "/taskmanagers/{}", Access.VIEW),
    ("GET", "/taskmanagers/{}/metrics", Access.VIEW),
    ("GET", "/taskmanagers/{}/{}", Access.OPERATE),
    ("GET", "/taskmanagers/{}/logs/{}", Access.OPERATE),
    ("GET", "/jobmanager/metrics", Access.VIEW),
    ("GET", "/jobmanager/config", Access.VIEW),
    ("GET", "/jobmanager/environment", Access.VIEW),
    ("GET", "/jobmanager/{}", Access.OPERATE),
    ("GET", "/jobmanager/logs/{}", Access.OPERATE),
    ("GET", "/snapshots", Access.VIEW),
    ("GET", "/snapshots/rows", Access.OPERATE),
    ("GET", "/snapshots/diff", Access.OPERATE),
    ("POST", "/snapshots/verify", Access.VIEW),
    ("GET", "/jobs/{jobid}/workers", Access.VIEW),
    ("POST", "/jobs/{jobid}/workers/register", Access.WORK),
    ("POST", "/jobs/{jobid}/workers/standby", Access.WORK),
    ("GET", "/jobs/{jobid}/workers/{}/commands", Access.WORK),
    ("POST", "/jobs/{jobid}/workers/{}/acks", Access.WORK),
    ("POST", "/jobs/{jobid}/workers/{}/states", Access.WORK),
    ("POST", "/jobs/{jobid}/workers/{}/heartbeat", Access.WORK),
    ("POST", "/jobs/{jobid}/workers/{}/answers", Access.WORK),
    *((method, path, Access.ADMINISTER) for method, path in (
        ("DELETE", "/cluster"),
        ("GET", "/taskmanagers/{}/profiler/{}"),
        ("POST", "/taskmanagers/{}/profiler"),
        ("GET", "/jobmanager/profiler/{}"),
        ("POST", "/jobmanager/profiler"),
        ("GET", "/datasets"),
        ("GET", "/datasets/delete/{}"),
        ("DELETE", "/datasets/{}"),
        ("GET", "/jars"),
        ("POST", "/jars/upload"),
        ("DELETE", "/jars/{}"),
        ("GET", "/jars/{}/plan"),
        ("POST", "/jars/{}/plan"),
        ("POST", "/jars/{}/run"),
        ("POST", "/jars/{}/run-application"),
    )),
    ("GET", "/ui/session", Access.IDENTIFY),
    ("GET", "/ui/visitor", Access.IDENTIFY),
    ("POST", "/ui/logout", Access.IDENTIFY),
    ("GET", "/audit", Access.ADMINISTER),
    ("GET", "/tokens", Access.ADMINISTER),
    ("POST", "/tokens", Access.ADMINISTER),
    ("DELETE", "/tokens/{}", Access.ADMINISTER),
)
"""Method, path without `/v1` or `/flink`, kind. A segment in braces stands for any one; `{jobid}` names the job. The first match
counts. Logs may hold what records hold, so that they are no viewer's. Jars, datasets and profilers, of which Holdfast has none, are
for administrators to be told so."""

_JOB_IN_BODY = frozenset({("POST", "/jobs"), ("POST", "/preflight")})
"""The job is known once the body is read: the route itself confines the caller."""

_ABOUT_CALLER = frozenset({("GET", "/ui/session"), ("GET", "/ui/visitor"), ("POST", "/ui/logout")})
"""About no job at all: also for a caller who is confined to one."""

_JOBS_IN_QUERY = frozenset({("GET", "/views")})
"""The route itself confines the caller, path by path."""

_JOB = "{jobid}"


class Classified(NamedTuple):
    """What a request asks for."""

    access: Access
    job_id: str
    """ANY_JOB: none, or all."""
    is_job_in_body: bool
    """Nothing in the path confines the caller: it is about the job of its body, the jobs of its query, or the caller alone."""


@dataclass(frozen=True, slots=True)
class _Rule:
    segments: tuple[str, ...]
    access: Access
    job_at: int
    """Index of the job's segment; -1: none."""
    is_job_in_body: bool

    def matches(self, segments: tuple[str, ...]) -> bool:
        if self.segments[-1][:1] != "{" and self.segments[-1] != segments[-1]:
            return False  # most rules of a length differ in their ends
        pairs = zip(self.segments, segments, strict=True)
        return all(theirs != "" if mine[:1] == "{" else mine == theirs for mine, theirs in pairs)


def _index() -> dict[tuple[str, int], list[_Rule]]:
    index: dict[tuple[str, int], list[_Rule]] = {}
    unconfined = _JOB_IN_BODY | _JOBS_IN_QUERY | _ABOUT_CALLER
    for method, path, access in _RULES:
        segments = tuple(path.split("/")[1:])
        job_at = segments.index(_JOB) if _JOB in segments else -1
        index.setdefault((method, len(segments)), []).append(_Rule(segments, access, job_at, (method, path) in unconfined))
    return index


_INDEX = _index()
_DIALECT = frozenset(path.split("/")[1] for _, path, _ in _RULES)
"""First segments of paths that routes have: no file of Flink's UI begins so."""


_PLAIN = re.compile(r"/[^\x00-\x1f\x7f]*")


def is_plain(path: str) -> bool:
    """Whether a decoded path begins with a slash and is free of control characters. A request may name any text in place of a path.
    Routes are regular expressions, whose `$` also matches in front of a line break at the end: such a path would be one for the
    table and another one for the router."""
    return _PLAIN.fullmatch(path) is not None


def classify(method: str, path: str) -> Classified | None:
    """What a request asks for; None if no rule names it."""
    if not is_plain(path):
        return None
    bare = path.removeprefix("/v1") if path.startswith("/v1/") else path.removeprefix("/flink")
    segments = tuple(bare.split("/")[1:])
    for rule in _INDEX.get((method, len(segments)), ()):
        if rule.matches(segments):
            return Classified(rule.access, segments[rule.job_at] if rule.job_at >= 0 else ANY_JOB, rule.is_job_in_body)
    if method == "GET" and (path == "/flink" or (path.startswith("/flink/") and segments[0] not in _DIALECT)):
        return Classified(Access.VIEW, ANY_JOB, is_job_in_body=False)  # the pages of Flink's UI, which know nothing
    return None
