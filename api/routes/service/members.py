"""The members of a service: which one is active, for load balancers and for people.

A coordinator without `--ha` is its own only member, and the active one."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from holdfast.api.errors import error_body
from holdfast.api.flink import schemas
from holdfast.api.members.membership import KnownMember, Membership
from holdfast.api.members.peers import MEMBER_HEADER
from holdfast.api.routes.common import ERRORS

OWN_PATHS = frozenset({"/metrics", "/v1/members"})
"""What each member answers for itself, besides the open paths."""

router = APIRouter(tags=["members"])

_ANSWERS: dict[int | str, dict[str, Any]] = {503: {"model": schemas.Errors}}


class Member(schemas.Record):
    """One coordinator of several on a state directory."""

    id: str
    url: str
    role: str
    """`active`, `standby`, or `gone`: it has left, or given no other sign of life for long."""
    this: bool
    """It is the one that answers."""
    epoch: int
    """In which it is, or was last, the active one; 0: it stands by."""
    host: str
    pid: int
    seen_ms_ago: int | None
    """Since its sign of life last changed, on the clock of the one that answers; null: it has not since that one began."""
    leaving: bool
    """It has handed over, and its process is about to end."""
    holds_lock: bool | None
    """Of its host; null: not known, since it did, and has given no sign of life in time."""
    lock_problem: str
    """Why it has no lock by which others of its host see its death at once; empty if it has one."""


class Members(schemas.Record):
    """All members of which there is a sign of life, the active one first."""

    members: list[Member]


@router.get("/leader", responses=_ANSWERS)
async def leader(request: Request) -> Response:
    """200 from the active member, 503 from any other: for load balancers, without a token."""
    membership: Membership | None = request.app.state.membership
    is_active = membership is None or membership.is_active
    return _told(membership, is_so=is_active, what="this member stands by")


@router.get("/standby", responses=_ANSWERS)
async def standby(request: Request) -> Response:
    """200 from a member that stands by, 503 from the active one: for load balancers, without a token."""
    membership: Membership | None = request.app.state.membership
    is_standby = membership is not None and not membership.is_active
    return _told(membership, is_so=is_standby, what="this member is the active one")


def _told(membership: Membership | None, *, is_so: bool, what: str) -> Response:
    headers = {MEMBER_HEADER: membership.member} if membership is not None else {}
    body = b"{}" if is_so else error_body(what)
    return Response(body, status_code=200 if is_so else 503, headers=headers, media_type="application/json")


@router.get("/v1/members", responses=ERRORS)
async def members(request: Request) -> Members:
    """The members of the service, as the one that answers knows them; empty for a coordinator without `--ha`."""
    membership: Membership | None = request.app.state.membership
    return Members(members=[_member(each) for each in membership.members()] if membership is not None else [])


def _member(known: KnownMember) -> Member:
    sign = known.sign
    return Member(
        id=sign.member,
        url=sign.url,
        role="active" if known.is_active else "gone" if known.is_gone else "standby",
        this=known.is_this,
        epoch=sign.epoch,
        host=sign.host,
        pid=sign.pid,
        seen_ms_ago=known.seen_ms if known.is_seen else None,
        leaving=sign.is_leaving,
        holds_lock=known.holds_lock,
        lock_problem=sign.lock_problem,
    )
