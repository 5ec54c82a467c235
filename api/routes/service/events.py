"""What happens to jobs, as it happens: CloudEvents by server-sent events."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from holdfast.api.access.roles import Caller
from holdfast.api.events.cloudevents import KINDS
from holdfast.api.events.follower import Follower, ReadHistory, Told
from holdfast.api.events.stream import (
    MEDIA_TYPE,
    EventStream,
    EventStreams,
    begin_at,
    begin_at_job,
    global_id,
    job_id_of,
)
from holdfast.api.http.auth import CALLER, RECHECK
from holdfast.api.routes.common import ERRORS, JobId, Service
from holdfast.api.routes.history import TEXT_CHARS_MAX
from holdfast.api.routes.threads import StorageReaders
from holdfast.coordinator.history.records import HistoryPage, parse_kinds
from holdfast.coordinator.interface import Coordinator
from holdfast.statebackends.errors import NotFoundError, NotLeaderError

router = APIRouter(prefix="/v1", tags=["events"], responses=ERRORS)

Last = Annotated[str, Header(alias="Last-Event-ID", max_length=80)]
After = Annotated[str, Query(max_length=80, description="As the header `Last-Event-ID`, for those who can't send one")]

Kinds = Annotated[str, Query(max_length=TEXT_CHARS_MAX, description="Of these kinds, separated by commas; all if empty")]

_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"description": "Events, without end; the data of each is a CloudEvent.", "content": {MEDIA_TYPE: {}}}
}


@router.get("/events", response_class=Response, responses=_ANSWER)
async def events(request: Request, service: Service, last: Last = "", after: After = "", kinds: Kinds = "") -> Response:
    """What happens to the jobs that this coordinator leads. With `Last-Event-ID`: from behind that event on, some perhaps twice."""
    wanted = parse_kinds(kinds, KINDS)
    streams: EventStreams = request.app.state.events
    jobs = await run_in_threadpool(service.jobs)
    follower = Follower(service.feed)
    begin_at(
        follower,
        streams.boot,
        last or after,
        lambda since_ms: {job.job_id: job.name for job in jobs if not job.is_terminal or job.end_ms >= since_ms},
    )
    return _stream(request, service, follower, global_id, wanted)


@router.get("/jobs/{jobid}/events", response_class=Response, responses=_ANSWER)
async def job_events(
    request: Request, service: Service, job_id: JobId, last: Last = "", after: After = "", kinds: Kinds = ""
) -> Response:
    """What happens to one job. `Last-Event-ID` is a place in its history, `<epoch>-<number>`; `0-0`: from its oldest record on."""
    wanted = parse_kinds(kinds, KINDS)
    job = await run_in_threadpool(service.job, job_id)
    follower = Follower(service.feed, job_id)
    begin_at_job(follower, job_id, last or after, job.overview.name)
    return _stream(request, service, follower, job_id_of, wanted)


def _stream(
    request: Request, service: Coordinator, follower: Follower, name_event: Callable[[str, Told], str], kinds: frozenset[str]
) -> Response:
    scope = request.scope
    caller: Caller = scope[CALLER]
    read = functools.partial(_read, request, service)
    streams: EventStreams = request.app.state.events
    feed = service.feed

    async def recheck() -> None:
        """Raises NotLeaderError once another member leads: the reader finds that one when it comes back."""
        await scope[RECHECK]()
        if service.feed is not feed:
            raise NotLeaderError("another member leads the jobs of this stream")

    return EventStream(streams, caller.account or caller.credential, feed, follower, name_event, read, recheck, kinds)


def _read(request: Request, service: Coordinator, wanted: ReadHistory) -> Awaitable[HistoryPage | None]:
    readers: StorageReaders = request.app.state.readers
    return readers.run(_page, service, wanted)


def _page(service: Coordinator, wanted: ReadHistory) -> HistoryPage | None:
    try:
        return service.history(wanted.job_id, wanted.query)
    except NotFoundError:
        return None
