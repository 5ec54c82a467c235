"""Consumer groups: their offsets, which last, and their members, who join again after a restart. Kafka's classic protocol: members
join, the leader assigns, all take their share (JoinGroup, SyncGroup); a member that is silent for its session timeout is dropped.

Answers that wait for other members are futures. Source: Kafka's GroupCoordinator."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from tests.servers.kafka.errors import Code, RefusedError
from tests.servers.kafka.journal import Journal


class Stage(StrEnum):
    """Values: as Kafka's DescribeGroups says them."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"


class CommittedOffset(NamedTuple):
    offset: int
    leader_epoch: int
    metadata: str


class Joined(NamedTuple):
    generation: int
    protocol: str
    leader: str
    member: str
    members: list[tuple[str, bytes]]
    """(member, its subscription) of all, for the leader; else none."""


@dataclass
class Member:
    member_id: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: dict[str, bytes]
    expires_ms: int
    assignment: bytes = b""
    joining: asyncio.Future[Joined] | None = None
    syncing: asyncio.Future[bytes] | None = None


@dataclass
class Group:
    name: str
    stage: Stage = Stage.EMPTY
    generation: int = 0
    protocol_type: str = ""
    protocol: str = ""
    leader: str = ""
    members: dict[str, Member] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)
    """Member ids that were given out, and did not join yet."""
    rebalance_deadline_ms: int = 0


class GroupCoordinator:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.groups: dict[str, Group] = {}
        self._numbers = itertools.count()

    # ------------------------------------------------------------------------------------------------------------------ offsets

    def commit(self, group: str, topic: str, partition: int, offset: CommittedOffset) -> None:
        self._journal.put("offset", group, topic, str(partition), **offset._asdict())

    def committed(self, group: str, topic: str, partition: int) -> CommittedOffset | None:
        fact = self._journal.facts.get(("offset", group, topic, str(partition)))
        return None if fact is None else CommittedOffset(fact["offset"], fact["leader_epoch"], fact["metadata"])

    def partitions_of(self, group: str) -> list[tuple[str, int]]:
        """With a committed offset."""
        return [(topic, int(index)) for (name, topic, index), _ in self._journal.of_kind("offset") if name == group]

    def names(self) -> list[str]:
        return sorted({*self.groups, *(name[0] for name, _ in self._journal.of_kind("offset"))})

    def delete(self, group: str) -> None:
        if group not in self.names():
            raise RefusedError(Code.GROUP_ID_NOT_FOUND)
        if group in self.groups and self.groups[group].members:
            raise RefusedError(Code.NON_EMPTY_GROUP)
        self.groups.pop(group, None)
        self.forget(name for name, _ in self._journal.of_kind("offset") if name[0] == group)

    def forget_topic(self, topic: str) -> None:
        self.forget(name for name, _ in self._journal.of_kind("offset") if name[1] == topic)

    def forget(self, names: Iterable[tuple[str, ...]]) -> None:
        for name in list(names):
            self._journal.remove("offset", *name)

    def check_member(self, group: str, member_id: str, generation: int) -> None:
        """Of a commit: one without a member is allowed while a group has none."""
        known = self.groups.get(group)
        if generation < 0 and not member_id:
            if known is not None and known.members:
                raise RefusedError(Code.UNKNOWN_MEMBER_ID, "the group has members")
            return
        self._member(group, member_id, generation)

    # ------------------------------------------------------------------------------------------------------------------ members

    def join(
        self,
        name: str,
        member_id: str,
        client_id: str,
        timeouts_ms: tuple[int, int],
        protocol_type: str,
        protocols: dict[str, bytes],
        now_ms: int,
    ) -> asyncio.Future[Joined]:
        """`timeouts_ms`: of the session, of a rebalance. Done once all members have joined, or the rebalance has timed out."""
        if not name:
            raise RefusedError(Code.INVALID_GROUP_ID)
        group = self.groups.setdefault(name, Group(name))
        if not member_id:
            new_id = f"{client_id}-{next(self._numbers)}-{now_ms}"
            group.named.add(new_id)
            raise MemberIdRequiredError(new_id)
        if member_id not in group.members and member_id not in group.named:
            raise RefusedError(Code.UNKNOWN_MEMBER_ID, member_id)
        others = [each for each in group.members.values() if each.member_id != member_id]
        if others and (protocol_type != group.protocol_type or not _common([protocols, *(each.protocols for each in others)])):
            raise RefusedError(Code.INCONSISTENT_GROUP_PROTOCOL)
        group.named.discard(member_id)
        group.protocol_type = protocol_type
        member = Member(member_id, *timeouts_ms, protocols, now_ms + timeouts_ms[0])
        joining = member.joining = asyncio.get_running_loop().create_future()
        group.members[member_id] = member
        if group.stage is not Stage.PREPARING:
            self._prepare(group, now_ms)
        self._complete_join(group, now_ms)
        return joining

    def sync(self, name: str, member_id: str, generation: int, assignments: dict[str, bytes], now_ms: int) -> asyncio.Future[bytes]:
        member = self._member(name, member_id, generation)
        group = self.groups[name]
        if group.stage is Stage.PREPARING:
            raise RefusedError(Code.REBALANCE_IN_PROGRESS)
        member.expires_ms = now_ms + member.session_timeout_ms
        member.syncing = asyncio.get_running_loop().create_future()
        syncing = member.syncing
        if group.stage is Stage.COMPLETING and member_id == group.leader:
            for each in group.members.values():
                each.assignment = assignments.get(each.member_id, b"")
            group.stage = Stage.STABLE
        if group.stage is Stage.STABLE:
            for each in group.members.values():
                if each.syncing is not None and not each.syncing.done():
                    each.syncing.set_result(each.assignment)
                each.syncing = None
        return syncing

    def heartbeat(self, name: str, member_id: str, generation: int, now_ms: int) -> None:
        member = self._member(name, member_id, generation)
        member.expires_ms = now_ms + member.session_timeout_ms
        if self.groups[name].stage is Stage.PREPARING:
            raise RefusedError(Code.REBALANCE_IN_PROGRESS)

    def leave(self, name: str, member_id: str, now_ms: int) -> None:
        group = self.groups.get(name)
        if group is None or member_id not in {*group.members, *group.named}:
            raise RefusedError(Code.UNKNOWN_MEMBER_ID, member_id)
        group.named.discard(member_id)
        self._drop(group, [member_id], now_ms)

    # --------------------------------------------------------------------------------------------------------------------- time

    def next_deadline_ms(self) -> int | None:
        deadlines = []
        for group in self.groups.values():
            deadlines += [each.expires_ms for each in group.members.values() if each.joining is None]
            if group.stage is Stage.PREPARING and group.members:
                deadlines.append(group.rebalance_deadline_ms)
        return min(deadlines, default=None)

    def expire(self, now_ms: int) -> None:
        for group in self.groups.values():
            silent = [each.member_id for each in group.members.values() if each.joining is None and each.expires_ms <= now_ms]
            if group.stage is Stage.PREPARING and group.rebalance_deadline_ms <= now_ms:
                silent = [each.member_id for each in group.members.values() if each.joining is None]
            if silent:
                self._drop(group, silent, now_ms)

    # ------------------------------------------------------------------------------------------------------------------- inside

    def _member(self, name: str, member_id: str, generation: int) -> Member:
        group = self.groups.get(name)
        if group is None or member_id not in group.members:
            raise RefusedError(Code.UNKNOWN_MEMBER_ID, member_id)
        if generation != group.generation:
            raise RefusedError(Code.ILLEGAL_GENERATION, f"{generation}, current {group.generation}")
        return group.members[member_id]

    def _prepare(self, group: Group, now_ms: int) -> None:
        """Members learn of a rebalance by the answer to their next heartbeat, or at once when they wait for their share."""
        group.stage = Stage.PREPARING
        group.rebalance_deadline_ms = now_ms + max(each.rebalance_timeout_ms for each in group.members.values())
        for each in group.members.values():
            if each.syncing is not None and not each.syncing.done():
                each.syncing.set_exception(RefusedError(Code.REBALANCE_IN_PROGRESS))
            each.syncing = None

    def _drop(self, group: Group, member_ids: list[str], now_ms: int) -> None:
        for member_id in member_ids:
            member = group.members.pop(member_id, None)
            for future in () if member is None else (member.joining, member.syncing):
                if future is not None and not future.done():
                    future.set_exception(RefusedError(Code.UNKNOWN_MEMBER_ID, member_id))
        if not group.members:
            group.stage, group.generation = Stage.EMPTY, group.generation + 1
        elif group.stage is not Stage.PREPARING:
            self._prepare(group, now_ms)
        self._complete_join(group, now_ms)

    def _complete_join(self, group: Group, now_ms: int) -> None:
        members = group.members
        if group.stage is not Stage.PREPARING or not members or any(each.joining is None for each in members.values()):
            return
        group.generation += 1
        group.stage = Stage.COMPLETING
        group.protocol = _common([each.protocols for each in members.values()])
        if group.leader not in members:
            group.leader = next(iter(members))
        subscriptions = [(each.member_id, each.protocols[group.protocol]) for each in members.values()]
        for each in members.values():
            listed = subscriptions if each.member_id == group.leader else []
            if each.joining is not None and not each.joining.done():
                each.joining.set_result(Joined(group.generation, group.protocol, group.leader, each.member_id, listed))
            each.joining = None
            each.expires_ms = now_ms + each.session_timeout_ms


class MemberIdRequiredError(RefusedError):
    def __init__(self, member_id: str) -> None:
        super().__init__(Code.MEMBER_ID_REQUIRED)
        self.member_id = member_id


def _common(protocols: list[dict[str, bytes]]) -> str:
    """The first of the first member's that all know, "" without one."""
    return next((name for name in protocols[0] if all(name in each for each in protocols)), "")
