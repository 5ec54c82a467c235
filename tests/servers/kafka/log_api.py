"""Requests on logs: Produce, Fetch, ListOffsets, OffsetForLeaderEpoch, DeleteRecords."""

from __future__ import annotations

import time
import uuid
from typing import Any

from kafka.protocol.admin import DeleteRecordsResponse
from kafka.protocol.consumer import FetchResponse, ListOffsetsResponse, OffsetForLeaderEpochResponse
from kafka.protocol.producer import ProduceResponse

from tests.servers.kafka.broker import Broker
from tests.servers.kafka.errors import Code, RefusedError
from tests.servers.kafka.messages import Caller, make
from tests.servers.kafka.partition import PartitionLog
from tests.servers.kafka.records import CorruptBatchError, headers_of

LATEST, EARLIEST, YOUNGEST = -1, -2, -3
READ_COMMITTED = 1
NO_ID = uuid.UUID(int=0)
Answer = dict[str, Any]


def produce(broker: Broker, request: Any, caller: Caller) -> Any:
    """None without acknowledgement."""
    responses = [
        {
            "name": topic.name,
            "partition_responses": [_append(broker, topic.name, each, request.transactional_id) for each in topic.partition_data],
        }
        for topic in request.topic_data
    ]
    broker.wake_readers()
    return make(ProduceResponse, responses=responses) if request.acks else None


def _append(broker: Broker, name: str, part: Any, transactional_id: str | None) -> dict[str, Any]:
    answer: Answer = {"index": part.index, "error_code": 0, "base_offset": -1, "log_append_time_ms": -1, "record_errors": []}
    try:
        log = broker.partition(name, part.index)
        data = memoryview(part.records or b"")
        batches = list(headers_of(data))
        for number, (header, position) in enumerate(batches):
            if header.size > broker.topics[name].message_bytes_max:
                raise RefusedError(Code.MESSAGE_TOO_LARGE, f"{header.size} bytes")
            if header.is_control:
                raise RefusedError(Code.INVALID_REQUEST, "a client writes no markers")
            base_offset = log.check(header)
            if base_offset is None:
                opened = log.producers.get(header.producer_id)
                if header.is_transactional and (opened is None or opened.open_since is None):
                    broker.transactions.verify(transactional_id, header.producer_id, header.producer_epoch, name, part.index)
                base_offset = log.append(header, data[position : position + header.size])
            if number == 0:
                answer["base_offset"] = base_offset
        answer["log_start_offset"] = log.start_offset
    except RefusedError as error:
        answer |= {"error_code": error.code, "error_message": error.why}
    except CorruptBatchError as error:
        answer |= {"error_code": Code.CORRUPT_MESSAGE, "error_message": str(error)}
    return answer


async def fetch(broker: Broker, request: Any, caller: Caller) -> Any:
    """Waits for `min_bytes`, at most `max_wait_ms`."""
    deadline = time.monotonic() + request.max_wait_ms / 1000
    while True:
        responses, size, failed = _read_all(broker, request, caller)
        left_s = deadline - time.monotonic()
        if size >= request.min_bytes or failed or left_s <= 0:
            return make(FetchResponse, error_code=0, session_id=0, responses=responses)
        await broker.rows_or(left_s)


def _read_all(broker: Broker, request: Any, caller: Caller) -> tuple[list[dict[str, Any]], int, bool]:
    """(answers by topic, bytes in them, whether one is an error)."""
    responses, size, failed = [], 0, False
    for topic in request.topics:
        parts = []
        for each in topic.partitions:
            bytes_max = max(0, min(each.partition_max_bytes, request.max_bytes - size))
            answer: Answer = {"partition_index": each.partition, "error_code": 0, "high_watermark": -1, "aborted_transactions": []}
            try:
                log = _log_of(broker, topic, each.partition, by_id=caller.version >= 13)
                answer |= _read(log, each.fetch_offset, bytes_max, request.isolation_level, whole=size == 0)
                size += len(answer["records"])
            except RefusedError as error:
                failed = True
                answer |= {"error_code": error.code, "records": b""}
            parts.append(answer)
        responses.append({"topic": topic.topic or "", "topic_id": topic.topic_id or NO_ID, "partitions": parts})
    return responses, size, failed


def _log_of(broker: Broker, topic: Any, index: int, *, by_id: bool) -> PartitionLog:
    name = broker.topic_of_id(topic.topic_id).name if by_id else topic.topic
    return broker.partition(name, index)


def _read(log: PartitionLog, offset: int, bytes_max: int, isolation: int, *, whole: bool) -> dict[str, Any]:
    """`whole`: one batch at least, however long."""
    if not log.start_offset <= offset <= log.end_offset:
        raise RefusedError(Code.OFFSET_OUT_OF_RANGE, f"{offset}, of {log.start_offset} to {log.end_offset}")
    committed = isolation == READ_COMMITTED
    stop = log.stable_offset if committed else log.end_offset
    data = log.read(offset, bytes_max, stop) if bytes_max > 0 or whole else b""
    aborted = log.aborted_between(offset, stop) if committed else []
    return {
        "high_watermark": log.end_offset,
        "last_stable_offset": log.stable_offset,
        "log_start_offset": log.start_offset,
        "aborted_transactions": [{"producer_id": each.producer_id, "first_offset": each.first_offset} for each in aborted],
        "records": data,
    }


def list_offsets(broker: Broker, request: Any, caller: Caller) -> Any:
    topics = []
    for topic in request.topics:
        parts = []
        for each in topic.partitions:
            answer = {"partition_index": each.partition_index, "error_code": 0, "timestamp": -1, "offset": -1, "leader_epoch": 0}
            try:
                log = broker.partition(topic.name, each.partition_index)
                answer["offset"], answer["timestamp"] = _offset_at(log, each.timestamp, request.isolation_level)
            except RefusedError as error:
                answer["error_code"] = error.code
            parts.append(answer)
        topics.append({"name": topic.name, "partitions": parts})
    return make(ListOffsetsResponse, topics=topics)


def _offset_at(log: PartitionLog, timestamp: int, isolation: int) -> tuple[int, int]:
    """(offset, timestamp); -1 where there is none."""
    stop = log.stable_offset if isolation == READ_COMMITTED else log.end_offset
    if timestamp == LATEST:
        return stop, -1
    if timestamp == EARLIEST:
        return log.start_offset, -1
    found = log.youngest() if timestamp == YOUNGEST else log.offset_at(timestamp, stop)
    return found if found is not None else (-1, -1)


def offset_for_leader_epoch(broker: Broker, request: Any, caller: Caller) -> Any:
    """There was never another leader: an epoch ends where the log does."""
    topics = []
    for topic in request.topics:
        parts = []
        for each in topic.partitions:
            answer = {"partition": each.partition, "error_code": 0, "leader_epoch": 0, "end_offset": -1}
            try:
                answer["end_offset"] = broker.partition(topic.topic, each.partition).end_offset
            except RefusedError as error:
                answer["error_code"] = error.code
            parts.append(answer)
        topics.append({"topic": topic.topic, "partitions": parts})
    return make(OffsetForLeaderEpochResponse, topics=topics)


def delete_records(broker: Broker, request: Any, caller: Caller) -> Any:
    topics = []
    for topic in request.topics:
        parts = []
        for each in topic.partitions:
            answer = {"partition_index": each.partition_index, "error_code": 0, "low_watermark": -1}
            try:
                answer["low_watermark"] = broker.delete_records(topic.name, each.partition_index, each.offset)
            except RefusedError as error:
                answer["error_code"] = error.code
            parts.append(answer)
        topics.append({"name": topic.name, "partitions": parts})
    return make(DeleteRecordsResponse, topics=topics)
