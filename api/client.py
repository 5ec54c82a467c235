"""Typed client of the REST service, for drivers and the CLI: calls, waiting, retries, typed errors.

It decides how long to keep trying; operators.worker.leader_retrieval decides which coordinator to ask. It does not know how a job
runs. Every call may be repeated safely: submissions carry the driver's nonce and triggers an id drawn here."""

from __future__ import annotations

import functools
import json
import logging
import secrets
import threading
import time
import urllib.parse
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlencode

import msgspec
import urllib3

from holdfast.api.access.issued import check_token_id
from holdfast.api.errors import ConnectionLostError, decode_error
from holdfast.api.hedged import ask_first
from holdfast.api.settings import check_urls
from holdfast.barriers.codec import UNREACHABLE_HEADER
from holdfast.barriers.jobgraph import DriverDeparture, Submission, SubmissionAccepted
from holdfast.barriers.run_record import read_run_record
from holdfast.barriers.tunable import SettingValue
from holdfast.coordinator.explain.records import Explanation, HealthView
from holdfast.coordinator.restore.preflight import PreflightReport
from holdfast.operators.worker.leader_retrieval import MemberAddresses, Target, is_safe_step, next_target, split_urls
from holdfast.operators.worker.trust import client_context, transport_failure
from holdfast.statebackends.decoding import decode_json
from holdfast.statebackends.errors import (
    ERROR_CLASSES,
    CheckpointFailedError,
    ForgetError,
    HoldfastError,
    NotFoundError,
    NotLeaderError,
    ProtocolError,
    RecoveringError,
    TooManyRequestsError,
)
from holdfast.statebackends.layout import DIRECTORY_FILE

if TYPE_CHECKING:
    import tenacity

CONNECT_TIMEOUT_S = 5.0
"""Seconds after which a machine that does not answer a connect counts as away."""

REQUEST_TIMEOUT_S = 30.0
"""Seconds for one HTTP exchange; a submission reads a snapshot's metadata within it."""

LEAVE_TIMEOUT_S = 3.0
"""Bound on the call that tells of a driver's leaving."""

RECONNECT_TIMEOUT_S = 60.0
"""Seconds that a call keeps trying while the coordinator is away; a restart takes a few."""

SAY_WAITING_S = 2.0
"""Seconds of waiting in one call after which a warning is logged."""

TARGETS_MAX = 1_000
"""Jobs led elsewhere whose leader is remembered, at most; the oldest is forgotten first."""

CANONICAL = "CANONICAL"
"""Format of savepoints that every state backend reads; the other one is NATIVE."""

_POLL_S_MIN, _POLL_S_MAX = 0.01, 0.25

T = TypeVar("T")

log = logging.getLogger("holdfast.client")


class RestClient:
    """Client of the coordinator at `url` (or of several members, with commas between), and of the leaders that they name for jobs;
    thread-safe.

    `reconnect_timeout_s=0` fails at the first lost connection. Raises the typed errors of statebackends.errors as the coordinator
    raised them; ConnectionLostError when it can't be reached, RecoveringError when it has not recovered the job since its start,
    NotLeaderError when it is stopping, or when neither it nor the leader that it names leads the job; TransportSecurityError when
    its certificate is not trusted, or one side speaks no TLS."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        authorities: str | None = None,
        reconnect_timeout_s: float = RECONNECT_TIMEOUT_S,
        further: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        """`authorities`: certificates that it trusts, PEM; None: those of the system. `further`: finds URLs of further members,
        which may take seconds, and raises nothing; called once, when nobody at `url` answers. Raises InvalidConfigError."""
        self.url = check_urls(url)
        self.token = token
        self.authorities = authorities
        self._reconnect_timeout_s = reconnect_timeout_s
        self._directory: Path | None = None
        self._urls = split_urls(self.url)
        """Those of `url`, and of the members that were looked for since."""
        self._further = further
        self._looking = threading.Lock()
        self._addresses = MemberAddresses(self._urls)
        self._reached = self._addresses.next(None)
        """Where to ask first: the one of several members that answered last."""
        self._targets: OrderedDict[str, Target] = OrderedDict()
        """Coordinator to ask about a job, where that is not the one at `url`."""
        self._timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, total=REQUEST_TIMEOUT_S)
        self._pool = urllib3.PoolManager(maxsize=4, retries=False, ssl_context=client_context(authorities))

    def __repr__(self) -> str:
        return f"RestClient({self.url!r})"

    def close(self) -> None:
        """Close idle connections; the client may be used again."""
        self._pool.clear()

    # ------------------------------------------------------------------------------------------------------- reading

    def overview(self) -> dict[str, Any]:
        return self._get("/v1/overview")

    def jobs(self) -> list[dict[str, Any]]:
        """Jobs as in GET /v1/jobs/overview, newest first."""
        answer = self._get("/v1/jobs/overview")
        return _decode(lambda: sorted(answer["jobs"], key=lambda job: (-int(job["start-time"]), str(job["jid"]))), self.url)

    def totals(self) -> dict[str, dict[str, Any]]:
        """Records that each job has read, written and dropped, and how backpressured it is, by job id; empty from a coordinator
        of an older version."""
        try:
            answer = self._get("/v1/totals")
        except NotFoundError:
            return {}
        return _decode(lambda: {str(job["jid"]): dict(job) for job in answer["jobs"]}, self.url)

    def unreadable(self) -> list[dict[str, Any]]:
        """Jobs that nobody leads, since their records can't be read, in the shape of `jobs`; none from a coordinator of an older
        version."""
        try:
            answer = self._get("/v1/totals")
        except NotFoundError:
            return []
        found = answer.get("unreadable", [])
        return _decode(lambda: [unreadable_job(str(each["jid"]), str(each["reason"])) for each in found], self.url)

    def job(self, job_id: str) -> dict[str, Any]:
        return self._get(f"/v1/jobs/{job_id}")

    def job_state(self, job_id: str) -> str:
        answer = self._get(f"/v1/jobs/{job_id}/status")
        return _decode(lambda: str(answer["status"]), self.url)

    def plan(self, job_id: str) -> dict[str, Any]:
        return self._get(f"/v1/jobs/{job_id}/plan")

    def watermarks(self, job_id: str, vertex_id: str) -> dict[int, int]:
        """Subtask -> watermark, ms, of those that have one."""
        body = self._call("GET", f"/v1/jobs/{job_id}/vertices/{vertex_id}/watermarks")
        return _decode(lambda: {int(each["id"].partition(".")[0]): int(each["value"]) for each in json.loads(body)}, self.url)

    def exceptions(self, job_id: str) -> dict[str, Any]:
        return self._get(f"/v1/jobs/{job_id}/exceptions")

    def checkpoints(self, job_id: str) -> dict[str, Any]:
        return self._get(f"/v1/jobs/{job_id}/checkpoints")

    def checkpoint_config(self, job_id: str) -> dict[str, Any]:
        return self._get(f"/v1/jobs/{job_id}/checkpoints/config")

    def settings(self, job_id: str) -> dict[str, Any]:
        """Settings that can be changed while the job runs, as they are."""
        return self._get(f"/v1/jobs/{job_id}/settings")

    def checkpoint(self, job_id: str, checkpoint_id: int) -> dict[str, Any]:
        return self._get(f"/v1/jobs/{job_id}/checkpoints/details/{checkpoint_id}")

    def checkpoint_subtasks(self, job_id: str, checkpoint_id: int, vertex_id: str) -> dict[str, Any]:
        """One vertex's part of a checkpoint, subtask by subtask."""
        return self._get(f"/v1/jobs/{job_id}/checkpoints/details/{checkpoint_id}/subtasks/{vertex_id}")

    def series(self, job_id: str, metric: str, vertex_id: str = "", subtasks: Iterable[int] = ()) -> list[dict[str, Any]]:
        """One metric over the last 15 minutes, of one vertex or of each: `times_ms`, and for each time the `sum`, `avg`, `min` and
        `max` over the subtasks; `subtasks`: values by subtask."""
        query = urlencode({"metric": metric, "vertex": vertex_id, "subtasks": ",".join(map(str, subtasks))})
        answer = self._get(f"/v1/jobs/{job_id}/series?{query}")
        return _decode(lambda: [dict(each) for each in answer["series"]], self.url)

    def history(
        self, job_id: str, *, after: str = "", kinds: Iterable[str] = (), limit: int = 100, newest: bool = False, before: str = ""
    ) -> dict[str, Any]:
        """What happened to a job, oldest first: `records`, each with `epoch`, `number`, `at_ms`, `kind` and `facts`; `gaps` and
        `damage`, which are left out; `next`, the `after` of the next page, and whether there is `more`.

        `kinds`: only these (leader, state, failure, restart, initialized, first_record, checkpoint, explanation, request, label,
        drill).
        `newest`: the last `limit` records, in front of `before` if given; `since` is then the `before` of the page in front of
        them, empty if nothing is."""
        query = {"after": after, "kinds": ",".join(kinds), "limit": limit, "newest": str(newest).lower(), "before": before}
        return self._get(f"/v1/jobs/{job_id}/history?{urlencode({name: value for name, value in query.items() if value != ''})}")

    def failures(self, job_id: str, *, before: str = "", limit: int = 100) -> dict[str, Any]:
        """`failures`, newest first, each with its `restart`: attempt, restored checkpoint, records that are read again, and when
        its first record was told. `since` is the `before` of the page of older ones, empty if there are none."""
        return self._get(f"/v1/jobs/{job_id}/failures?{urlencode({'limit': limit, **({'before': before} if before else {})})}")

    def health(self, job_id: str) -> HealthView:
        """Whether the job is safe, why it is slow, and where it will resume."""
        body = self._call("GET", f"/v1/jobs/{job_id}/health")
        return _decode(lambda: decode_json(body, HealthView), self.url)

    def explain(self, job_id: str, checkpoint_id: int | None = None) -> Explanation:
        """Why a checkpoint was slow, failed or is pending; without an id, of the one that is worth it, or why there is none."""
        of_one = f"details/{checkpoint_id}/" if checkpoint_id is not None else ""
        body = self._call("GET", f"/v1/jobs/{job_id}/checkpoints/{of_one}explain")
        return _decode(lambda: decode_json(body, Explanation), self.url)

    def workers(self, job_id: str) -> dict[str, Any]:
        return self._get(f"/v1/jobs/{job_id}/workers")

    # -------------------------------------------------------------------------------------------------------- acting

    def submit(self, submission: Submission) -> SubmissionAccepted:
        """Submit a job. Raises GraphError, JobExistsError, RestoreError, CorruptStateError ..."""
        if not submission.driver_nonce:
            submission = msgspec.structs.replace(submission, driver_nonce=secrets.token_hex(16))
        body = self._call("POST", "/v1/jobs", msgspec.json.encode(submission))
        accepted = _decode(lambda: decode_json(body, SubmissionAccepted), self.url)
        self._directory = _visible_directory(accepted) or self._directory
        return accepted

    def preflight(self, submission: Submission) -> PreflightReport:
        """Check a submission against its snapshot; nothing is started."""
        body = self._call("POST", "/v1/preflight", msgspec.json.encode(submission))
        return _decode(lambda: decode_json(body, PreflightReport), self.url)

    def trigger_checkpoint(
        self,
        job_id: str,
        *,
        unaligned: bool | None = None,
        aligned_timeout_ms: int | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Trigger one checkpoint, wait until it is complete, and return its id.

        `unaligned`, `aligned_timeout_ms` (at least 0): whether its barriers may overtake what is queued, and from which age on;
        None is as the job's settings say. Raises InvalidConfigError for what the job can't have, CheckpointFailedError if the
        checkpoint was refused or aborted, TimeoutError after timeout_s."""
        mode = {"unaligned": unaligned, "alignedCheckpointTimeout": aligned_timeout_ms}
        request: dict[str, Any] = {"checkpointType": "CONFIGURED", "triggerId": secrets.token_hex(16)}
        request |= {name: value for name, value in mode.items() if value is not None}  # older coordinators know neither
        operation = self._operate(f"/v1/jobs/{job_id}/checkpoints", "checkpoints", request, job_id, timeout_s)
        _raise_cause(operation.get("failureCause"), job_id)
        return int(operation["checkpointId"])

    def savepoint(
        self, job_id: str, target: str | None = None, *, format_type: str = CANONICAL, timeout_s: float | None = None
    ) -> str:
        """Take a savepoint below `target` (or the job's savepoint directory) and return its location."""
        request: dict[str, Any] = {"target-directory": target, "cancel-job": False, "triggerId": secrets.token_hex(16)}
        request["formatType"] = format_type
        operation = self._operate(f"/v1/jobs/{job_id}/savepoints", "savepoints", request, job_id, timeout_s)
        _raise_cause(operation.get("failure-cause"), job_id)
        return str(operation["location"])

    def stop(
        self,
        job_id: str,
        target: str | None = None,
        *,
        drain: bool = False,
        format_type: str = CANONICAL,
        timeout_s: float | None = None,
    ) -> str:
        """Stop with a savepoint and return its location. `drain` fires all timers and windows first."""
        request: dict[str, Any] = {"targetDirectory": target, "drain": drain, "triggerId": secrets.token_hex(16)}
        request["formatType"] = format_type
        operation = self._operate(f"/v1/jobs/{job_id}/stop", "savepoints", request, job_id, timeout_s)
        _raise_cause(operation.get("failure-cause"), job_id)
        return str(operation["location"])

    def change_settings(self, job_id: str, settings: Mapping[str, SettingValue]) -> dict[str, Any]:
        """Change settings of a running job, until its next submission: `{"checkpoint_interval_ms": None}` pauses its periodic
        checkpoints. Returns what holds, as `settings`, once it is durable.

        Raises InvalidConfigError for a setting that is unknown, fixed, of a wrong type or out of bounds, FencedError for a job that
        has ended."""
        body = self._call("PATCH", f"/v1/jobs/{job_id}/checkpoints/config", msgspec.json.encode(settings))
        return _decode(lambda: dict(json.loads(body)), self.url)

    def labels(self, job_id: str) -> dict[str, Any]:
        """Labels of a job's snapshots, as `labels`: each with `label`, `checkpoint_id`, `kind`, `location` and `created_ms`."""
        return self._get(f"/v1/jobs/{job_id}/labels")

    def add_label(self, job_id: str, checkpoint_id: int, label: str) -> dict[str, Any]:
        """Give a completed checkpoint or savepoint a label: it is not deleted until its labels are removed.

        Raises InvalidConfigError, NotFoundError, SnapshotLabelledError."""
        from holdfast.coordinator.ownership.labels import check_users_label  # imports libraries that no other request needs

        check_users_label(label)  # before it is sent: with a slash it would be another path, of which nothing is known
        path = f"/v1/jobs/{job_id}/labels/{urllib.parse.quote(label, safe='')}"
        body = self._call("PUT", path, json.dumps({"checkpoint": checkpoint_id}).encode())
        return _decode(lambda: dict(json.loads(body)), self.url)

    def remove_label(self, job_id: str, label: str, checkpoint_id: int | None = None) -> list[dict[str, Any]]:
        """Remove a label, of one snapshot or of whichever has it; returns what was removed. Raises InvalidConfigError,
        NotFoundError."""
        from holdfast.coordinator.ownership.labels import check_label

        check_label(label)
        query = f"?checkpoint={checkpoint_id}" if checkpoint_id is not None else ""
        body = self._call("DELETE", f"/v1/jobs/{job_id}/labels/{urllib.parse.quote(label, safe='')}{query}")
        return _decode(lambda: [dict(each) for each in json.loads(body)["removed"]], self.url)

    def forget(
        self,
        job_id: str,
        states: Iterable[tuple[str, str]],
        key: str,
        *,
        to: str = "",
        keep_history: bool = False,
        empty_key: bool = False,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Forget a key of a job, running or stopped (`to`: where the savepoint goes), and return the certificate (docs/forget.md).
        `empty_key`: it is the empty text, by intent.

        Raises what `holdfast forget` of a stopped job does where there is none; ForgetError where its process died, or the
        coordinator does not know it any more; TimeoutError: it goes on."""
        named = [{"operator": uid, "state": name} for uid, name in states]
        request = {"states": named, "key": key, "to": to, "keep_history": keep_history}
        request |= {"empty_key": True} if empty_key else {}  # a coordinator of an older version does not know it
        body = self._call("POST", f"/v1/jobs/{job_id}/forget", json.dumps(request).encode())
        forget_id = _decode(lambda: str(json.loads(body)["forget_id"]), self.url)
        deadline, pause_s = None if timeout_s is None else time.monotonic() + timeout_s, _POLL_S_MIN
        while True:
            answer = self._get(f"/v1/jobs/{job_id}/forget")
            found = next((each for each in answer["forgettings"] if each["forget_id"] == forget_id), None)
            if found is None:
                raise ForgetError("the coordinator does not know the request any more: ask again", job=job_id)
            if found["certificate"] is not None:
                return dict(found["certificate"])
            if found["state"] != "running":
                raise _forget_error(found["error_kind"], found["error"], job_id)
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {job_id}: no certificate within {timeout_s} s; it goes on")
            time.sleep(pause_s)
            pause_s = min(_POLL_S_MAX, pause_s * 1.5)

    def drill(self, job_id: str, checkpoint_id: int | None = None) -> dict[str, Any]:
        """Begin a drill of a snapshot of the job, of the newest one if none is named: every row of it is read as a restore would.
        Returns its record: `drill_id`, `checkpoint_id`, `state` (`running`) and so on."""
        body = self._call("POST", f"/v1/jobs/{job_id}/drills", json.dumps({"checkpoint": checkpoint_id}).encode())
        return _decode(lambda: dict(json.loads(body)), self.url)

    def drills(self, job_id: str) -> list[dict[str, Any]]:
        """Drills of the job's snapshots, newest first. `state`: running, passed, failed (see `problems`), error (see `error`)."""
        answer = self._get(f"/v1/jobs/{job_id}/drills")
        return _decode(lambda: [dict(each) for each in answer["drills"]], self.url)

    def cost(self, job_id: str) -> dict[str, Any]:
        """What the job's files take: sizes, numbers of files, and money if the coordinator has a price file."""
        return self._get(f"/v1/jobs/{job_id}/cost")

    def cancel(self, job_id: str) -> None:
        """Request cancellation; the job is CANCELED when its tasks have ended."""
        self._call("PATCH", f"/v1/jobs/{job_id}?mode=cancel")

    def leave(self, job_id: str, submission: int) -> None:
        """Tell that the driver takes its workers away. Asks one coordinator once, for `LEAVE_TIMEOUT_S` at most: a driver that
        leaves does not wait for a coordinator that is not there."""
        target = self._targets.get(job_id) or Target(self._reached)
        timeout = urllib3.Timeout(total=LEAVE_TIMEOUT_S)
        self._request(target, "POST", f"/v1/jobs/{job_id}/leave", msgspec.json.encode(DriverDeparture(submission)), timeout)

    # -------------------------------------------------------------------------------------------------------- tokens

    def issue_token(
        self, role: str, *, job: str | None = None, name: str | None = None, expires_in_ms: int | None = None
    ) -> dict[str, Any]:
        """Issue a token of a role (viewer, operator or admin), for all jobs or for that of this id or name alone. The answer has
        its text, as `token`, which is stored nowhere. Raises InvalidConfigError, AccessDeniedError."""
        request = {"role": role, "job": job, "name": name, "expires_in_ms": expires_in_ms}
        body = self._call("POST", "/v1/tokens", msgspec.json.encode(request))
        return _decode(lambda: dict(json.loads(body)), self.url)

    def tokens(self) -> list[dict[str, Any]]:
        """Issued tokens that are not revoked, oldest first, without their texts."""
        answer = self._get("/v1/tokens")
        return _decode(lambda: [dict(each) for each in answer["tokens"]], self.url)

    def revoke_token(self, token_id: str) -> None:
        """Raises NotFoundError for a token that is unknown, or revoked already; InvalidConfigError for what is no id."""
        check_token_id(token_id)  # before it is sent: it may be a token itself, and paths are logged
        self._call("DELETE", f"/v1/tokens/{urllib.parse.quote(token_id, safe='')}")

    # ------------------------------------------------------------------------------------------------------ plumbing

    def _operate(self, path: str, kind: str, request: dict[str, Any], job_id: str, timeout_s: float | None) -> dict[str, Any]:
        """POST, then poll until the operation is complete; returns its result."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        body = self._call("POST", path, json.dumps(request).encode())
        request_id = _decode(lambda: str(json.loads(body)["request-id"]), self.url)
        pause_s = _POLL_S_MIN
        while True:
            answer = self._get(f"/v1/jobs/{job_id}/{kind}/{request_id}")
            if answer["status"]["id"] == "COMPLETED":
                return dict(answer["operation"])
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {job_id}: no outcome within {timeout_s} s; it goes on, request id {request_id}")
            time.sleep(pause_s)
            pause_s = min(_POLL_S_MAX, pause_s * 1.5)

    def _get(self, path: str) -> dict[str, Any]:
        body = self._call("GET", path)
        return _decode(lambda: dict(json.loads(body)), self.url)

    def _call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        if self._reconnect_timeout_s <= 0:
            return self._exchange(method, path, body)
        import tenacity

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((ConnectionLostError, NotLeaderError, RecoveringError, TooManyRequestsError)),
            stop=tenacity.stop_after_delay(self._reconnect_timeout_s),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
            before_sleep=self._say_waiting,
            reraise=True,
        )
        return retrying(self._exchange, method, path, body)

    def _say_waiting(self, call: tenacity.RetryCallState) -> None:
        """Log a warning, once per call, when the coordinator has been away for a while."""
        before, now = call.idle_for - (call.next_action.sleep if call.next_action else 0.0), call.idle_for
        if before < SAY_WAITING_S <= now and call.outcome is not None:
            log.warning("%s; trying for %.0f s at most", call.outcome.exception(), self._reconnect_timeout_s)

    def _exchange(self, method: str, path: str, body: bytes | None) -> bytes:
        """Make one call to the leader of its job.

        A leader that does not answer is tried once. The coordinator at the configured address is then asked with the leader's epoch
        before the call fails, since the next call may come from another process without that knowledge."""
        job_id = _job_of(path)
        target = self._targets.get(job_id) or Target(self._reached)
        lost: ConnectionLostError | None = None
        others, silent = 0, dict[str, str]()
        while True:
            try:
                target, ask = self._first(target, method, path, body)
                answer = ask()
                if target.epoch == 0:
                    self._reached = target.url
                    self._addresses.reached()
                return answer
            except (NotLeaderError, ConnectionLostError, NotFoundError) as error:
                answered = None if isinstance(error, ConnectionLostError) else error
                asked = target
                if answered is None:
                    silent[asked.url] = error.message
                    if asked.epoch == 0 and others >= len(self._urls) - 1:
                        self._look_further()
                target = next_target(asked, answered, functools.partial(self._address, asked.url))
                self._remember(job_id, target)
                if target.epoch > asked.epoch and (lost is None or target.epoch > target.unreachable_epoch):
                    continue
                if target.service_epoch > asked.service_epoch:
                    continue
                if isinstance(error, ConnectionLostError) and asked.epoch == 0 and others < len(self._urls) - 1:
                    others += 1
                    continue
                if isinstance(error, ConnectionLostError) and asked.epoch > 0 and lost is None:
                    lost = error
                    continue
                if lost is not None and isinstance(error, NotLeaderError):
                    raise lost from error
                if len(silent) > 1 and answered is None:
                    raise ConnectionLostError("; ".join(silent.values()), url=self.url) from error
                raise

    def _first(self, target: Target, method: str, path: str, body: bytes | None) -> tuple[Target, Callable[[], bytes]]:
        """Whom a call went to, and its answer or error: of a read, the one of several members that answered first."""
        urls, further = self._urls, self._look_further if self._further is not None else None
        if method != "GET" or target.epoch or target.url not in urls or (len(urls) < 2 and further is None):
            return target, functools.partial(self._request, target, method, path, body)

        def asked(url: str) -> Target:
            return target if url == target.url else Target(url)

        first = tuple(dict.fromkeys((target.url, *urls)))
        url, answer = ask_first(first, lambda url: self._request(asked(url), method, path, body), further)
        return asked(url), answer.result

    def _look_further(self) -> tuple[str, ...]:
        """Find further members, once; whoever comes meanwhile waits for the same. Returns all that are known."""
        with self._looking:
            further, self._further = self._further, None
            if further is not None:
                found = further()
                self._addresses.learn(found)
                self._urls = tuple(dict.fromkeys((*self._urls, *found)))
            return self._urls

    def _remember(self, job_id: str, target: Target) -> None:
        self._targets[job_id] = target
        while len(self._targets) > TARGETS_MAX:
            self._targets.popitem(last=False)

    def _address(self, failed: str) -> str:
        """URL of the last coordinator of the state directory, if this machine can read it there; else the configured URL."""
        record = read_run_record(self._directory) if self._directory is not None else None
        recorded = record.url.rstrip("/") if record is not None and is_safe_step(self._reached, record.url) else None
        return self._addresses.next(recorded, failed)

    def _request(self, target: Target, method: str, path: str, body: bytes | None, timeout: urllib3.Timeout | None = None) -> bytes:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        if target.unreachable_epoch:
            headers[UNREACHABLE_HEADER] = str(target.unreachable_epoch)
        try:
            response = self._pool.request(method, target.url + path, body=body, headers=headers, timeout=timeout or self._timeout)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            insecure = transport_failure(error, target.url)
            if insecure is not None:
                raise insecure from error
            leads = f", which leads job {_job_of(path)} with epoch {target.epoch}" if target.epoch else ""
            message = f"can't reach the coordinator at {target.url}{leads}: {_reason(error)}"
            raise ConnectionLostError(message, url=target.url) from error
        if response.status >= 400:
            raise decode_error(response.status, response.data, response.headers)
        return response.data


UNREADABLE_STATE = "UNREADABLE"
"""State of a job with a damaged record."""


def unreadable_job(job_id: str, why: str) -> dict[str, Any]:
    """Entry of a list of jobs."""
    unknown = {"start-time": -1, "end-time": -1, "duration": -1, "last-modification": -1}
    counts = {"total": 0, "running": 0}
    return {"jid": job_id, "name": "", "state": UNREADABLE_STATE, **unknown, "tasks": counts, "failure": why, "restarts": 0}


def _job_of(path: str) -> str:
    """Job of a path; empty if it has none."""
    parts = path.partition("?")[0].split("/")
    return parts[3] if len(parts) > 3 and parts[2] == "jobs" and parts[3] != "overview" else ""


def _visible_directory(accepted: SubmissionAccepted) -> Path | None:
    """The coordinator's state directory, if this machine sees it; the nonce identifies it, as another one may have the same
    path."""
    path = Path(accepted.directory)
    try:
        nonce = (path / DIRECTORY_FILE).read_text("utf-8").strip()
    except (OSError, ValueError):
        return None
    return path if nonce and nonce == accepted.directory_nonce else None


def _reason(error: BaseException) -> str:
    text = str(error)
    return text.rpartition(": ")[2] if isinstance(error, urllib3.exceptions.NewConnectionError) else text


def _forget_error(kind: str, text: str, job_id: str) -> HoldfastError:
    """As it was raised where the key was to be forgotten; of what is none of ours ForgetError says what it was."""
    found = ERROR_CLASSES.get(kind)
    return ForgetError(f"{kind}: {text}", job=job_id) if found is None else found.of(text, {"job": job_id})


def _raise_cause(cause: dict[str, Any] | None, job_id: str) -> None:
    if cause is not None:
        reason, text = str(cause["class"]), str(cause["stack-trace"])
        raise CheckpointFailedError(text, job_id=job_id, reason=reason)


def _decode(read: Callable[[], T], url: str) -> T:
    try:
        return read()
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"{url} did not answer like a coordinator: {error!r}", url=url) from error
