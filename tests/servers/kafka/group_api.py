"""Requests on groups: their offsets and their members."""

from __future__ import annotations

from typing import Any

from kafka.protocol.admin import DeleteGroupsResponse, DescribeGroupsResponse, ListGroupsResponse
from kafka.protocol.consumer import (
    HeartbeatResponse,
    JoinGroupResponse,
    LeaveGroupResponse,
    OffsetCommitResponse,
    OffsetFetchResponse,
    SyncGroupResponse,
)

from tests.servers.kafka.broker import Broker
from tests.servers.kafka.errors import Code, RefusedError
from tests.servers.kafka.groups import CommittedOffset, MemberIdRequiredError, Stage
from tests.servers.kafka.messages import Caller, make

METADATA_BYTES_MAX = 4096
CONSUMER = "consumer"


def commit_offsets(broker: Broker, request: Any, caller: Caller) -> Any:
    code: int = Code.NONE
    try:
        broker.check_refusal()
        broker.groups.check_member(request.group_id, request.member_id, request.generation_id_or_member_epoch)
    except RefusedError as error:
        code = error.code
    topics = [
        {
            "name": topic.name,
            "partitions": [
                {"partition_index": each.partition_index, "error_code": code or _commit(broker, request.group_id, topic.name, each)}
                for each in topic.partitions
            ],
        }
        for topic in request.topics
    ]
    return make(OffsetCommitResponse, topics=topics)


def _commit(broker: Broker, group: str, topic: str, part: Any) -> int:
    metadata = part.committed_metadata or ""
    if len(metadata) > METADATA_BYTES_MAX:
        return Code.OFFSET_METADATA_TOO_LARGE
    try:
        broker.partition(topic, part.partition_index)
    except RefusedError as error:
        return error.code
    offset = CommittedOffset(part.committed_offset, part.committed_leader_epoch, metadata)
    broker.groups.commit(group, topic, part.partition_index, offset)
    return Code.NONE


def fetch_offsets(broker: Broker, request: Any, caller: Caller) -> Any:
    if caller.version >= 8:
        groups = [
            {
                "group_id": each.group_id,
                "error_code": 0,
                "topics": _fetched(broker, each.group_id, each.topics, request.require_stable),
            }
            for each in request.groups
        ]
        return make(OffsetFetchResponse, groups=groups)
    topics = _fetched(broker, request.group_id, request.topics, request.require_stable)
    return make(OffsetFetchResponse, topics=topics, error_code=0)


def _fetched(broker: Broker, group: str, topics: Any, stable: bool) -> list[dict[str, Any]]:
    """All that the group has, without topics."""
    asked: dict[str, list[int]] = {}
    if topics is None:
        for name, index in broker.groups.partitions_of(group):
            asked.setdefault(name, []).append(index)
    else:
        asked = {topic.name: list(topic.partition_indexes) for topic in topics}
    return [
        {"name": name, "partitions": [_stored(broker, group, name, i, stable) for i in indexes]} for name, indexes in asked.items()
    ]


def _stored(broker: Broker, group: str, topic: str, index: int, stable: bool) -> dict[str, Any]:
    unstable = stable and broker.transactions.is_unstable(group, topic, index)
    found = None if unstable else broker.groups.committed(group, topic, index)
    offset = found if found is not None else CommittedOffset(-1, -1, "")
    return {
        "partition_index": index,
        "committed_offset": offset.offset,
        "committed_leader_epoch": offset.leader_epoch,
        "metadata": offset.metadata,
        "error_code": Code.UNSTABLE_OFFSET_COMMIT if unstable else Code.NONE,
    }


async def join(broker: Broker, request: Any, caller: Caller) -> Any:
    protocols = {each.name: bytes(each.metadata) for each in request.protocols}
    timeouts_ms = (request.session_timeout_ms, max(request.rebalance_timeout_ms, 0) or request.session_timeout_ms)
    refused: dict[str, Any] = {"generation_id": -1, "protocol_name": "", "leader": "", "members": []}
    try:
        broker.check_refusal()
        joined = await broker.groups.join(
            request.group_id, request.member_id, caller.client_id, timeouts_ms, request.protocol_type, protocols, broker.now_ms()
        )
    except MemberIdRequiredError as error:
        return make(JoinGroupResponse, **refused, error_code=error.code, member_id=error.member_id)
    except RefusedError as error:
        return make(JoinGroupResponse, **refused, error_code=error.code, member_id=request.member_id)
    return make(
        JoinGroupResponse,
        error_code=0,
        generation_id=joined.generation,
        protocol_type=request.protocol_type,
        protocol_name=joined.protocol,
        leader=joined.leader,
        member_id=joined.member,
        members=[{"member_id": name, "metadata": subscription} for name, subscription in joined.members],
    )


async def sync(broker: Broker, request: Any, caller: Caller) -> Any:
    assignments = {each.member_id: bytes(each.assignment) for each in request.assignments}
    try:
        broker.check_refusal()
        share = await broker.groups.sync(request.group_id, request.member_id, request.generation_id, assignments, broker.now_ms())
    except RefusedError as error:
        return make(SyncGroupResponse, error_code=error.code, assignment=b"")
    protocol = broker.groups.groups[request.group_id].protocol
    return make(SyncGroupResponse, error_code=0, protocol_type=CONSUMER, protocol_name=protocol, assignment=share)


def heartbeat(broker: Broker, request: Any, caller: Caller) -> Any:
    code = Code.NONE
    try:
        broker.check_refusal()
        broker.groups.heartbeat(request.group_id, request.member_id, request.generation_id, broker.now_ms())
    except RefusedError as error:
        code = error.code
    return make(HeartbeatResponse, error_code=code)


def leave(broker: Broker, request: Any, caller: Caller) -> Any:
    members = [each.member_id for each in request.members] if caller.version >= 3 else [request.member_id]
    codes: list[int] = []
    for member_id in members:
        try:
            broker.groups.leave(request.group_id, member_id, broker.now_ms())
            codes.append(Code.NONE)
        except RefusedError as error:
            codes.append(error.code)
    if caller.version < 3:
        return make(LeaveGroupResponse, error_code=codes[0])
    answers = [{"member_id": each, "error_code": code} for each, code in zip(members, codes, strict=True)]
    return make(LeaveGroupResponse, error_code=0, members=answers)


def list_all(broker: Broker, request: Any, caller: Caller) -> Any:
    groups = [
        {"group_id": name, "protocol_type": CONSUMER, "group_state": _stage(broker, name), "group_type": "classic"}
        for name in broker.groups.names()
    ]
    return make(ListGroupsResponse, error_code=0, groups=groups)


def describe(broker: Broker, request: Any, caller: Caller) -> Any:
    groups = []
    for name in request.groups:
        group = broker.groups.groups.get(name)
        members = [] if group is None else list(group.members.values())
        protocol = group.protocol if group is not None else ""
        groups.append(
            {
                "error_code": 0,
                "group_id": name,
                "group_state": _stage(broker, name),
                "protocol_type": group.protocol_type if group is not None else "",
                "protocol_data": protocol,
                "members": [
                    {
                        "member_id": each.member_id,
                        "client_id": "",
                        "client_host": "",
                        "member_metadata": each.protocols.get(protocol, b""),
                        "member_assignment": each.assignment,
                    }
                    for each in members
                ],
            }
        )
    return make(DescribeGroupsResponse, groups=groups)


def _stage(broker: Broker, name: str) -> str:
    group = broker.groups.groups.get(name)
    if group is not None:
        return group.stage.value
    return Stage.EMPTY.value if name in broker.groups.names() else "Dead"


def delete(broker: Broker, request: Any, caller: Caller) -> Any:
    results = []
    for name in request.groups_names:
        code = Code.NONE
        try:
            broker.groups.delete(name)
        except RefusedError as error:
            code = error.code
        results.append({"group_id": name, "error_code": code})
    return make(DeleteGroupsResponse, results=results)
