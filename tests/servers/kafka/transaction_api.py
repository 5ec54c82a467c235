"""Requests on transactions: InitProducerId, AddPartitionsToTxn, AddOffsetsToTxn, TxnOffsetCommit, EndTxn, and what is open."""

from __future__ import annotations

import re
from typing import Any

from kafka.protocol.admin import DescribeTransactionsResponse, ListTransactionsResponse
from kafka.protocol.producer import (
    AddOffsetsToTxnResponse,
    AddPartitionsToTxnResponse,
    EndTxnResponse,
    InitProducerIdResponse,
    TxnOffsetCommitResponse,
)

from tests.servers.kafka.broker import Broker
from tests.servers.kafka.errors import Code, RefusedError
from tests.servers.kafka.messages import Caller, make
from tests.servers.kafka.transactions import PendingOffset, Status

_FENCED_SINCE = {"InitProducerId": 4, "AddPartitionsToTxn": 2, "AddOffsetsToTxn": 2, "EndTxn": 2}
"""Older versions know PRODUCER_FENCED by the name of INVALID_PRODUCER_EPOCH."""


def _code(error: RefusedError, api: str, caller: Caller) -> int:
    if error.code is Code.PRODUCER_FENCED and caller.version < _FENCED_SINCE[api]:
        return Code.INVALID_PRODUCER_EPOCH
    return error.code


def init_producer_id(broker: Broker, request: Any, caller: Caller) -> Any:
    try:
        broker.check_refusal()
        producer_id, epoch = broker.transactions.init_producer(
            request.transactional_id, request.transaction_timeout_ms, request.producer_id, request.producer_epoch
        )
    except RefusedError as error:
        code = _code(error, "InitProducerId", caller)
        return make(InitProducerIdResponse, error_code=code, producer_id=-1, producer_epoch=-1)
    return make(InitProducerIdResponse, error_code=0, producer_id=producer_id, producer_epoch=epoch)


def add_partitions(broker: Broker, request: Any, caller: Caller) -> Any:
    """All partitions or none."""
    asked = [(topic.name, index) for topic in request.v3_and_below_topics for index in topic.partitions]
    codes: dict[tuple[str, int], int] = {}
    for name, index in asked:
        try:
            broker.partition(name, index)
        except RefusedError as error:
            codes[name, index] = error.code
    default = Code.OPERATION_NOT_ATTEMPTED if codes else Code.NONE
    if not codes:
        who = (request.v3_and_below_transactional_id, request.v3_and_below_producer_id, request.v3_and_below_producer_epoch)
        try:
            broker.transactions.add_partitions(*who, asked, broker.now_ms())
        except RefusedError as error:
            codes = dict.fromkeys(asked, _code(error, "AddPartitionsToTxn", caller))
    results = [
        {
            "name": topic.name,
            "results_by_partition": [
                {"partition_index": index, "partition_error_code": codes.get((topic.name, index), default)}
                for index in topic.partitions
            ],
        }
        for topic in request.v3_and_below_topics
    ]
    return make(AddPartitionsToTxnResponse, results_by_topic_v3_and_below=results)


def add_offsets(broker: Broker, request: Any, caller: Caller) -> Any:
    code: int = Code.NONE
    try:
        broker.check_refusal()
        who = (request.transactional_id, request.producer_id, request.producer_epoch)
        broker.transactions.add_offsets(*who, request.group_id, broker.now_ms())
    except RefusedError as error:
        code = _code(error, "AddOffsetsToTxn", caller)
    return make(AddOffsetsToTxnResponse, error_code=code)


def commit_offsets(broker: Broker, request: Any, caller: Caller) -> Any:
    code = Code.NONE
    offsets = [
        PendingOffset(
            request.group_id,
            topic.name,
            each.partition_index,
            each.committed_offset,
            each.committed_leader_epoch,
            each.committed_metadata or "",
        )
        for topic in request.topics
        for each in topic.partitions
    ]
    try:
        broker.check_refusal()
        if request.member_id or request.generation_id >= 0:
            broker.groups.check_member(request.group_id, request.member_id, request.generation_id)
        who = (request.transactional_id, request.producer_id, request.producer_epoch)
        broker.transactions.commit_offsets(*who, request.group_id, offsets)
    except RefusedError as error:
        code = error.code
    topics = [
        {
            "name": topic.name,
            "partitions": [{"partition_index": each.partition_index, "error_code": code} for each in topic.partitions],
        }
        for topic in request.topics
    ]
    return make(TxnOffsetCommitResponse, topics=topics)


def end(broker: Broker, request: Any, caller: Caller) -> Any:
    code: int = Code.NONE
    try:
        broker.check_refusal()
        who = (request.transactional_id, request.producer_id, request.producer_epoch)
        broker.transactions.end(*who, commit=request.committed)
    except RefusedError as error:
        code = _code(error, "EndTxn", caller)
    return make(EndTxnResponse, error_code=code)


def list_all(broker: Broker, request: Any, caller: Caller) -> Any:
    known = {each.value for each in Status}
    pattern = re.compile(request.transactional_id_pattern or "")
    states = [
        {"transactional_id": each.transactional_id, "producer_id": each.producer_id, "transaction_state": each.status.value}
        for each in broker.transactions.transactions.values()
        if (not request.state_filters or each.status.value in request.state_filters)
        and (not request.producer_id_filters or each.producer_id in request.producer_id_filters)
        and pattern.search(each.transactional_id)
    ]
    unknown = [each for each in request.state_filters if each not in known]
    return make(ListTransactionsResponse, error_code=0, unknown_state_filters=unknown, transaction_states=states)


def describe(broker: Broker, request: Any, caller: Caller) -> Any:
    states: list[dict[str, Any]] = []
    for transactional_id in request.transactional_ids:
        each = broker.transactions.transactions.get(transactional_id)
        if each is None:
            states.append(
                {
                    "error_code": Code.TRANSACTIONAL_ID_NOT_FOUND,
                    "transactional_id": transactional_id,
                    "transaction_state": "",
                    "transaction_timeout_ms": 0,
                    "transaction_start_time_ms": -1,
                    "producer_id": -1,
                    "producer_epoch": -1,
                    "topics": [],
                }
            )
            continue
        names = sorted({name for name, _ in each.partitions})
        states.append(
            {
                "error_code": 0,
                "transactional_id": transactional_id,
                "transaction_state": each.status.value,
                "transaction_timeout_ms": each.timeout_ms,
                "transaction_start_time_ms": each.started_ms,
                "producer_id": each.producer_id,
                "producer_epoch": each.epoch,
                "topics": [{"topic": name, "partitions": [i for topic, i in each.partitions if topic == name]} for name in names],
            }
        )
    return make(DescribeTransactionsResponse, transaction_states=states)
