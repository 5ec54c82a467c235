"""Forgetting a key of a job, running or stopped: begun here, done by a process of its own, told by polling."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field

from holdfast.api.flink import schemas
from holdfast.api.http.request_log import SUBJECT
from holdfast.api.routes.common import ERRORS, HeldDirectories, JobId, Service, body_of, describe_model
from holdfast.api.snapshots.forget_process import ForgetRequest
from holdfast.api.snapshots.forgettings import Forgetting, Forgettings
from holdfast.api.snapshots.live_erasure import LiveErasure, is_running
from holdfast.api.snapshots.served import PATH_CHARACTERS_MAX, SnapshotDirectories
from holdfast.barriers.erasure import Erasure
from holdfast.statebackends.errors import InvalidConfigError

router = APIRouter(prefix="/v1", tags=["snapshots"], responses=ERRORS)

KEY_CHARS_MAX = 65_536
NAME_CHARS_MAX = 1_000
STATES_MAX = 100


class ForgottenState(schemas.RequestBody):
    operator: str = Field(min_length=1, max_length=NAME_CHARS_MAX)
    """uid."""
    state: str = Field(min_length=1, max_length=NAME_CHARS_MAX)
    """`*`: all keyed states and timers of the operator."""


class Forget(schemas.RequestBody):
    states: list[ForgottenState] = Field(min_length=1, max_length=STATES_MAX)
    key: str = Field(default="", max_length=KEY_CHARS_MAX)
    """As after `holdfast forget --key`. It is in no answer, log or audit line."""
    empty_key: bool = False
    """The key is the empty text: without this a key that is empty or missing is a mistake."""
    to: str = Field(default="", max_length=PATH_CHARACTERS_MAX)
    """Of a stopped job: directory for the savepoint without the key, one whose snapshots are shown, or in which jobs have
    savepoints. Of a running one it is not used."""
    keep_history: bool = False


class ForgettingState(schemas.Record):
    forget_id: str
    started_ms: int
    state: str
    """running, complete, incomplete (something was kept: see the certificate), or error."""
    certificate: dict[str, Any] | None
    """docs/forget.md; null while it runs and after an error."""
    error: str
    error_kind: str


class KnownForgettings(schemas.Record):
    forgettings: list[ForgettingState]
    """Newest first; those of this coordinator since its start, 20 of all jobs."""


def _render(found: Forgetting) -> ForgettingState:
    return ForgettingState(
        forget_id=found.forget_id,
        started_ms=found.started_ms,
        state=found.state,
        certificate=found.certificate,
        error=found.error,
        error_kind=found.error_kind,
    )


def _check_key(body: Forget) -> None:
    if not body.key and not body.empty_key:
        raise InvalidConfigError("key: it is empty; say `empty_key` for the key that is the empty text", setting="key")
    if body.key and body.empty_key:
        raise InvalidConfigError("key: there is one, so that `empty_key` is not true", setting="key")


def _place(directories: SnapshotDirectories, to: str, location: str) -> str:
    """The directory for the savepoint. Raises InvalidConfigError for one where none is shown, or within the state directory, where
    it would be nobody's."""
    found = directories.confine(f"{to.rstrip('/')}/x").rpartition("/")[0]
    own = SnapshotDirectories((location,))
    try:
        own.confine(f"{found}/x")
    except InvalidConfigError:
        return found
    raise InvalidConfigError(f"{to!r} is within the state directory: name a directory beside it", setting="to", path=to)


async def _forgettings(request: Request) -> Forgettings:
    found: Forgettings = request.app.state.forgettings
    return found


Known = Annotated[Forgettings, Depends(_forgettings)]


@router.post(
    "/jobs/{jobid}/forget",
    response_model=ForgettingState,
    status_code=202,
    openapi_extra=describe_model(Forget, required=True),
)
def forget(
    request: Request,
    service: Service,
    directories: HeldDirectories,
    known: Known,
    job_id: JobId,
    body: Annotated[Forget, Depends(body_of(Forget))],
) -> ForgettingState:
    """Begins to forget a key of a job and answers at once; what becomes of it tells GET. A running job loses it at the barrier of a
    checkpoint, a stopped one by a savepoint without it. The same request goes on with one that was cut off. 503 while another one
    runs, of whichever job."""
    _check_key(body)
    location = request.app.state.settings.location
    states = tuple((each.operator, each.state) for each in body.states)
    request.scope[SUBJECT] = ", ".join(f"{uid}/{state}" for uid, state in states)
    to, erasure = "", None
    if is_running(service, job_id):
        erasure = LiveErasure(service, job_id, Erasure.of(states, body.key))
    elif not body.to:
        raise InvalidConfigError("a stopped job needs a directory for the savepoint without the key", setting="to")
    else:
        to = _place(directories.with_savepoints(), body.to, location)
    wanted = ForgetRequest(location, job_id, states, body.key, to, body.keep_history, 1)
    return _render(known.begin(wanted, secrets.token_hex(16), time.time_ns() // 1_000_000, erasure))


@router.get("/jobs/{jobid}/forget", response_model=KnownForgettings)
def forgettings(known: Known, job_id: JobId) -> KnownForgettings:
    """What became of the requests to forget a key of a job."""
    return KnownForgettings(forgettings=[_render(each) for each in known.of(job_id)])
