"""The worker protocol: register, command stream, acknowledgements, task states, heartbeats.

Bodies are the frozen records of barriers.messages, decoded by msgspec: an acknowledgement may carry megabytes. A caller whose
request the job accepted counts as a worker from then on, and its connection is not closed to make room. What workers post again and
again is described here, and served by `reports.py`, which calls the same functions."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from anyio import to_thread
from fastapi import APIRouter, Query, Request, Response

from holdfast.api.access.roles import Access, Caller
from holdfast.api.flink import schemas
from holdfast.api.http.auth import CALLER
from holdfast.api.http.connection_budget import CallerKind
from holdfast.api.http.protocol import prove
from holdfast.api.members.membership import Membership
from holdfast.api.routes.command_stream import MEDIA_TYPE, CommandStream
from holdfast.api.routes.common import (
    ACKNOWLEDGEMENTS,
    ERRORS,
    REGISTRATION,
    REPORT,
    WORKER_ANSWER,
    JobId,
    Service,
    Slot,
    answer,
    describe_answer,
    describe_record,
    encoded,
    read_packed,
    read_record,
)
from holdfast.api.routes.viewed import VIEWED
from holdfast.barriers import codec
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
from holdfast.coordinator.totals import NOTHING
from holdfast.coordinator.views import JobView, WorkerView
from holdfast.statebackends.errors import AccessDeniedError, InvalidConfigError, RecoveringError

REGISTRATION_TIMEOUT_S = 8.0
"""Seconds that a registration waits for a job that is just being recovered: a worker gives up after ten."""

router = APIRouter(prefix="/v1/jobs/{jobid}/workers", tags=["workers"], responses=ERRORS)


class Worker(schemas.Record):
    slot: int
    registered: bool
    connected: bool
    pid: int
    host: str
    nonce: str
    data_address: str
    task_attempt: int
    last_seen: int
    spawn: int
    """Number of this start of the slot's worker by its launcher, 1, 2, 3 ...; 0: unknown."""
    timed_out: bool
    """The process sent no heartbeat for `heartbeat_timeout_ms`, although its connection was never closed: its launcher replaces
    it."""
    fingerprint: str
    """Identity of process `pid` for a launcher on the same host; empty: unknown."""
    frames_refused: int
    """Frames that the slot's data port dropped: from strangers, unreadable, or for channels that are not their sender's."""
    seat: int
    """Where its launcher started it, of a worker that stood by before it got the slot; -1: in the slot."""
    seat_spawn: int
    """As `spawn`, of the seat."""


class StandbyWorker(schemas.Record):
    """A worker without a slot."""

    seat: int
    spawn: int
    pid: int
    host: str
    fingerprint: str


class OperatorNumbers(schemas.Record):
    """Counters of one operator over all of its subtasks since the submission began. Records read again after a restart count once;
    a restart sets the counters back to the restored checkpoint."""

    uid: str
    name: str
    kind: str
    records_in: int
    records_out: int
    late_dropped: int
    """Flink's numLateRecordsDropped."""
    late_ms_max: int
    """Largest distance in event time between a late record and the watermark."""
    counters: dict[str, int]
    """Counters of the user's function."""
    rows_skipped: int
    """Left out by on_error="skip"."""
    first_skipped: str
    """Reason for the first of them; empty if there is none."""


class Workers(schemas.Record):
    attempt: int
    submission: int
    state: str
    """State of that submission."""
    epoch: int
    restarts: int
    restart_strategy: str
    """In a line, with its limits."""
    restarts_at: int
    """End of the pause before the next attempt, ms since the epoch; -1 unless the job is RESTARTING."""
    failure: str | None
    """Why the job is restarting or has ended; null once it runs again."""
    last_failure: str | None
    """The newest recorded failure, even if the job has recovered from it."""
    late_dropped: int
    """Records dropped as late, over all operators."""
    rows_skipped: int
    """Rows that functions with on_error="skip" have left out, over all operators."""
    restored_local_bytes: int
    restored_remote_bytes: int
    operators: list[OperatorNumbers]
    workers: list[Worker]
    standbys: list[StandbyWorker]
    silent: list[StandbyWorker]
    """Workers that sent no heartbeat for `heartbeat_timeout_ms`, and whose slots others have: their launcher replaces them."""
    as_of_ms: int
    """Until when this is known to have been so, ms since the epoch."""


class LeaderEpoch(schemas.Record):
    """Answer to a heartbeat."""

    epoch: int
    members: list[str]
    """URLs of the coordinators of which one leads, this one first; empty: there are no others."""


def _worker(view: WorkerView) -> Worker:
    return Worker(
        slot=view.slot,
        registered=view.registered,
        connected=view.connected,
        pid=view.pid,
        host=view.host,
        nonce=view.nonce,
        data_address=view.data_address,
        task_attempt=view.task_attempt,
        last_seen=view.last_seen_ms,
        spawn=view.spawn,
        timed_out=view.timed_out,
        fingerprint=view.fingerprint,
        frames_refused=view.frames_refused,
        seat=view.seat,
        seat_spawn=view.seat_spawn,
    )


@router.get("", **VIEWED)
def workers(service: Service, job_id: JobId) -> Workers:
    """The slots of a job and the workers that hold them."""
    view = service.job(job_id)
    metrics = [each.metrics for vertex in view.vertices for each in vertex.subtasks]
    return Workers(
        attempt=view.attempt,
        submission=view.submission,
        state=view.overview.state,
        epoch=view.epoch,
        restarts=view.restarts,
        restart_strategy=view.graph.config.restart.describe(),
        restarts_at=view.restarts_at_ms,
        failure=view.failure,
        last_failure=view.exceptions[0].error if view.exceptions else None,
        late_dropped=sum(each.late_dropped for each in view.totals.values()),
        rows_skipped=sum(each.rows_skipped for each in view.totals.values()),
        restored_local_bytes=sum(each.restored_local_bytes for each in metrics),
        restored_remote_bytes=sum(each.restored_remote_bytes for each in metrics),
        operators=_operators(view),
        workers=[_worker(each) for each in view.workers],
        standbys=[StandbyWorker(**msgspec.structs.asdict(each)) for each in view.standbys],
        silent=[StandbyWorker(**msgspec.structs.asdict(each)) for each in view.silent],
        as_of_ms=view.now_ms,
    )


def _operators(view: JobView) -> list[OperatorNumbers]:
    known = [operator for vertex in view.graph.vertices for operator in vertex.operators]
    return [
        OperatorNumbers(
            uid=operator.uid,
            name=operator.name,
            kind=operator.kind,
            **msgspec.structs.asdict(view.totals.get(operator.uid, NOTHING)),
        )
        for operator in known
    ]


@router.post(
    "/register",
    response_class=Response,
    responses={200: describe_answer(Registered)},
    openapi_extra=describe_record(RegisterWorker),
)
async def register(request: Request, service: Service, job_id: JobId) -> Response:
    """Register a worker with its full state; the answer is the full state that it should have."""
    message = await read_record(request, RegisterWorker, REGISTRATION)
    _match("job_id", message.job_id, job_id)
    _check_submission(request, message.submission)
    try:
        async with asyncio.timeout(REGISTRATION_TIMEOUT_S):
            registered = await request.app.state.outcomes.of(service.register_async(message))
    except TimeoutError as error:
        text = f"job {job_id} could not take slot {message.slot} within {REGISTRATION_TIMEOUT_S:.0f} s: try again"
        raise RecoveringError(text, job=job_id, slot=message.slot) from error
    prove(request.scope, CallerKind.WORKER)
    return answer(msgspec.structs.replace(registered, members=_members(request), msgpack=True))


@router.post(
    "/standby",
    response_class=Response,
    responses={200: describe_answer(StandbyOrder)},
    openapi_extra=describe_record(StandBy),
)
async def standby(request: Request, service: Service, job_id: JobId) -> Response:
    """A worker without a slot waits for one: answered as soon as there is one, and within a few seconds at all events."""
    message = await read_record(request, StandBy, REPORT)
    _match("job_id", message.job_id, job_id)
    _check_submission(request, message.submission)
    order = await request.app.state.outcomes.of(service.stand_by_async(message))
    prove(request.scope, CallerKind.WORKER)
    return answer(order)


def _members(request: Request) -> tuple[str, ...]:
    """URLs of the members, for workers; empty without others."""
    membership: Membership | None = request.app.state.membership
    return membership.urls() if membership is not None else ()


@router.get("/{slot}/commands", response_class=Response, responses={200: describe_answer(NumberedCommand, MEDIA_TYPE)})
async def commands(
    request: Request,
    service: Service,
    job_id: JobId,
    slot: Slot,
    session: Annotated[str, Query(max_length=256)],
    after: Annotated[int, Query(ge=0, lt=2**63)] = 0,
) -> Response:
    """Commands of a session after number `after`, one a line, without end; the newest stream wins."""
    limiter = request.app.state.worker_threads
    subscription = await to_thread.run_sync(service.commands, job_id, slot, session, after, limiter=limiter)
    prove(request.scope, CallerKind.WORKER)
    return CommandStream(subscription, session, keep_alive_s=request.app.state.settings.keep_alive_interval_ms / 1000)


@router.post(
    "/{slot}/acks",
    response_class=Response,
    responses={
        200: describe_answer(AckAnswers),
        415: {"model": schemas.Errors, "description": "Neither JSON nor msgpack"},
    },
    openapi_extra=describe_record(AckBatch, codec.MSGPACK_TYPE),
)
async def acks(request: Request, service: Service, job_id: JobId, slot: Slot) -> Response:
    """Acknowledgements and declines, answered item by item."""
    batch = await read_packed(request, AckBatch, ACKNOWLEDGEMENTS)
    _match("slot", batch.slot, slot)
    answers = await request.app.state.outcomes.of(service.acks_async(job_id, batch))
    prove(request.scope, CallerKind.WORKER)
    request.app.state.http_metrics.count_answers(answers.answers)
    return answer(answers)


@router.post("/{slot}/states", response_model=schemas.Empty, openapi_extra=describe_record(StatusBatch))
async def states(request: Request, service: Service, job_id: JobId, slot: Slot) -> Response:
    """States of a worker's subtasks."""
    batch = await read_record(request, StatusBatch, REPORT)
    _match("slot", batch.slot, slot)
    await request.app.state.outcomes.of(service.states_async(job_id, batch))
    prove(request.scope, CallerKind.WORKER)
    return encoded(schemas.Empty())


@router.post("/{slot}/heartbeat", response_model=LeaderEpoch, openapi_extra=describe_record(Heartbeat))
async def heartbeat(request: Request, service: Service, job_id: JobId, slot: Slot) -> Response:
    """Heartbeat of a worker, with its counters."""
    message = await read_record(request, Heartbeat, REPORT)
    _match("slot", message.slot, slot)
    epoch = await request.app.state.outcomes.of(service.heartbeat_async(job_id, message))
    prove(request.scope, CallerKind.WORKER)
    return encoded(LeaderEpoch(epoch=epoch, members=list(_members(request))))


@router.post("/{slot}/answers", response_model=schemas.Empty, openapi_extra=describe_record(WorkerAnswer))
async def answers(request: Request, service: Service, job_id: JobId, slot: Slot) -> Response:
    """What a worker says to a question that came with its command stream."""
    message = await read_record(request, WorkerAnswer, WORKER_ANSWER)
    _match("slot", message.slot, slot)
    await request.app.state.outcomes.of(service.answer_async(job_id, message))
    prove(request.scope, CallerKind.WORKER)
    return encoded(schemas.Empty())


def _check_submission(request: Request, submission: int) -> None:
    """Raise AccessDeniedError for a worker that registers for another submission than its token is for: an old token must not
    take slots of what was submitted since. Later requests need the session that a registration has opened."""
    caller: Caller = request.scope[CALLER]
    if caller.submission not in (0, submission):
        text = f"the token is for workers of submission {caller.submission}, not of {submission}"
        raise AccessDeniedError(text, role=caller.role.value, needed=Access.WORK.value, job=caller.job_id)


def _match(name: str, in_body: Any, in_path: Any) -> None:
    if in_body != in_path:
        raise InvalidConfigError(f"{name} is {in_body!r} in the body and {in_path!r} in the path", field=name)
