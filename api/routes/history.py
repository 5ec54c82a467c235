"""A job's history, page by page: what its leaders recorded in the state directory, also of jobs that have ended."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from holdfast.api.flink import schemas
from holdfast.api.routes.common import ERRORS, JobId, Service, answer, describe_answer
from holdfast.api.routes.threads import StorageReaders
from holdfast.coordinator.history.failures import FAILURE_KINDS, FailurePage, FailureView, derive_failures, page_of
from holdfast.coordinator.history.records import HistoryPage, RecordKind, parse_kinds
from holdfast.coordinator.history.store import PAGE_RECORDS_MAX, HistoryQuery, parse_position
from holdfast.coordinator.interface import Coordinator
from holdfast.statebackends.errors import InvalidConfigError

router = APIRouter(prefix="/v1", tags=["jobs"], responses=ERRORS)

PAGE_DEFAULT = 100
TEXT_CHARS_MAX = 256


class HistoryRecord(schemas.Record):
    epoch: int
    """Of the leader that recorded it."""
    number: int
    """Consecutive within the epoch."""
    at_ms: int
    kind: str
    """leader, state, failure, restart, initialized, first_record, checkpoint, explanation, request, label, drill; others may
    follow."""
    facts: dict[str, Any]


class HistoryGap(schemas.Record):
    """Records that are lost, or were deleted to make room."""

    epoch: int
    after: int
    """Number of the record in front of the gap; 0: there is none."""
    before: int | None
    """Number of the one behind it; null: the epoch has none."""
    missing: int | None
    """null: not known, and perhaps none, since the leader was cut off."""


class HistoryDamage(schemas.Record):
    path: str
    line: int
    """From 1; 0: the whole file."""
    reason: str


class History(schemas.Record):
    records: list[HistoryRecord]
    """Oldest first."""
    gaps: list[HistoryGap]
    damage: list[HistoryDamage]
    """Files and lines that can't be read, and are left out."""
    next: str
    """`after` of the next page; empty while there is no record."""
    more: bool
    """There are further records now."""
    since: str
    """Of the newest records: `before` of the page in front of this one; empty: nothing is in front of it. What is older was not
    looked at."""
    as_of_ms: int


def render(page: HistoryPage) -> History:
    return History(
        records=[
            HistoryRecord(epoch=each.epoch, number=each.number, at_ms=each.at_ms, kind=each.kind, facts=each.facts)
            for each in page.entries
        ],
        gaps=[HistoryGap(epoch=each.epoch, after=each.after, before=each.before, missing=each.missing) for each in page.gaps],
        damage=[HistoryDamage(path=each.path, line=each.line, reason=each.reason) for each in page.damage],
        next=page.next,
        more=page.more,
        since=page.since,
        as_of_ms=page.as_of_ms,
    )


@router.get("/jobs/{jobid}/history", response_model=History)
async def history(
    request: Request,
    service: Service,
    job_id: JobId,
    after: Annotated[str, Query(max_length=TEXT_CHARS_MAX, description="Show what is behind `<epoch>-<number>`")] = "",
    kinds: Annotated[str, Query(max_length=TEXT_CHARS_MAX, description="Of these kinds, separated by commas; all if empty")] = "",
    limit: Annotated[int, Query(ge=1, le=PAGE_RECORDS_MAX)] = PAGE_DEFAULT,
    newest: Annotated[bool, Query(description="The last `limit` records in place of the first; not with `after`")] = False,
    before: Annotated[str, Query(max_length=TEXT_CHARS_MAX, description="The newest in front of `<epoch>-<number>`")] = "",
) -> Response:
    """What happened to a job, oldest first. A record is there five seconds after it was made, as a rule."""
    query = history_query(after, kinds, limit, newest=newest, before=before)
    readers: StorageReaders = request.app.state.readers
    return await readers.run(_page, service, job_id, query)


def _page(service: Coordinator, job_id: str, query: HistoryQuery) -> Response:
    return Response(render(service.history(job_id, query)).model_dump_json(), media_type="application/json")


@router.get("/jobs/{jobid}/failures", response_class=Response, responses={200: describe_answer(FailurePage)})
async def failures(
    request: Request,
    service: Service,
    job_id: JobId,
    before: Annotated[str, Query(max_length=TEXT_CHARS_MAX, description="Show those in front of `<epoch>-<number>`")] = "",
    limit: Annotated[int, Query(ge=1, le=PAGE_RECORDS_MAX // 3)] = PAGE_DEFAULT,
) -> Response:
    """Failures of a job, newest first, each with the attempt behind it, the checkpoint that this was restored from, and the first
    record after it. From the job's history, a few seconds behind."""
    query = HistoryQuery(None, FAILURE_KINDS, 3 * limit, newest=True, before=parse_position(before, "before"))
    readers: StorageReaders = request.app.state.readers
    return await readers.run(_failures, service, job_id, query, limit)


def _failures(service: Coordinator, job_id: str, query: HistoryQuery, limit: int) -> Response:
    page = service.history(job_id, query)
    found = derive_failures(page.entries)
    is_last = len(found) <= limit and bool(page.since) and not _may_be_older(service, job_id, found, page.since)
    return answer(page_of(found, limit, "" if is_last else page.since, page.as_of_ms))


def _may_be_older(service: Coordinator, job_id: str, found: tuple[FailureView, ...], since: str) -> bool:
    """Whether a failure is in front of those found, or may be beyond what one page is read from: what is in front of a page may be
    other records alone, such as those of the first attempt."""
    before = parse_position(found[-1].position if found else since, "before")
    look = service.history(job_id, HistoryQuery(None, frozenset({RecordKind.FAILURE}), 1, newest=True, before=before))
    return bool(look.entries or look.since)


def history_query(after: str, kinds: str, limit: int, *, newest: bool, before: str = "") -> HistoryQuery:
    """`before` asks for the newest ones in front of it. Raises InvalidConfigError."""
    if after and before:
        raise InvalidConfigError("a page of a history is behind `after` or in front of `before`, not both", setting="before")
    wanted = parse_kinds(kinds)
    position = parse_position(before, "before")
    is_newest = (newest or position is not None) and not after
    return HistoryQuery(parse_position(after), wanted or None, limit, newest=is_newest, before=position)
