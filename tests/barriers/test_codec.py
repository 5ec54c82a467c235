"""The worker protocol as JSON: every message both ways, and refusals that name the message."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.barriers.codec import MSGPACK_BYTES_MAX, decode, decode_packed, encode, encode_msgpack
from holdfast.barriers.jobgraph import (
    JobConfig,
    JobEdge,
    JobGraph,
    JobVertex,
    OperatorDescription,
    Partitioning,
    Submission,
    SubmissionAccepted,
)
from holdfast.barriers.messages import (
    AckAnswers,
    AckBatch,
    AcknowledgeCheckpoint,
    AckStatus,
    CancelTasks,
    CheckpointKind,
    CheckpointMetrics,
    DeclineCheckpoint,
    Deploy,
    Deployment,
    FailureReason,
    FinishTasks,
    Heartbeat,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    NumberedCommand,
    Registered,
    RegisterWorker,
    ShutdownWorker,
    StatusBatch,
    SubtaskDeployment,
    SubtaskMetrics,
    SubtaskStatus,
    TaskState,
    TriggerCheckpoint,
)
from holdfast.statebackends.errors import ProtocolError
from holdfast.statebackends.handles import (
    FileHandle,
    InlineHandle,
    KeyedStateHandle,
    KeyGroupRange,
    OperatorListHandle,
    OperatorSubtaskState,
    PlaceholderHandle,
    SegmentHandle,
    StateMeta,
)

STATE = OperatorSubtaskState(
    keyed=(
        KeyedStateHandle(
            KeyGroupRange(0, 64),
            "arrow",
            (StateMeta("sums", "value", "int64", "utf8"),),
            (FileHandle("a", 3, "xxh3_128:00"), InlineHandle(b"\x00\xff")),
        ),
    ),
    operator=(OperatorListHandle(StateMeta("offsets", "operator_list", "bytes"), InlineHandle(b""), 0),),
    external=("sources/x",),
)
OPERATOR = OperatorDescription("count", "0" * 32, "count", "process", properties={"window_ms": 5, "names": ["a"]})
GRAPH = JobGraph(
    "job",
    (JobVertex("0" * 32, "count", 2, 128, (OPERATOR,)),),
    (JobEdge(1, "v", "s", "0" * 32, 0, Partitioning.HASH, key=("k",), key_type="int64"),),
    JobConfig(checkpoint_interval_ms=1000),
)
DEPLOYMENT = Deployment(2, GRAPH, (SubtaskDeployment("v", 1, {"count": STATE}),), {0: "tcp://127.0.0.1:1", 1: "tcp://127.0.0.1:2"})
ACK = AcknowledgeCheckpoint(2, 7, "v", 1, {"count": STATE}, CheckpointMetrics(alignment_duration_ms=1.5))
DECLINE = DeclineCheckpoint(2, 7, "v", 1, FailureReason.ASYNC_EXCEPTION, "disk full: ü")
STATUS = SubtaskStatus(2, "v", 1, TaskState.FAILED, error="X: y")
COMMANDS = [
    Deploy(DEPLOYMENT),
    CancelTasks(2),
    TriggerCheckpoint(2, 7, 123, CheckpointKind.SAVEPOINT, "job/chk-7", drain=True, base=6),
    NotifyCheckpointComplete(2, 7, 123),
    NotifyCheckpointAborted(2, 7),
    FinishTasks(2, 7),
    ShutdownWorker("superseded", respawn=True),
    None,
]
MESSAGES: list[Any] = [
    RegisterWorker("j", 0, 1, 5, "n", 42, "h", "tcp://127.0.0.1:1", "d", 2, (STATUS,), (ACK, DECLINE)),
    Registered(3, "s", 2, DEPLOYMENT, 6, (7, 8), 2000, 50000, (AckStatus.DUPLICATE,)),
    Registered(3, "s", 0, None, 0, (), 2000, 50000),
    Heartbeat(0, "s", 2, (SubtaskMetrics("v", 1, records_in=5),)),
    AckBatch(3, 0, "s", (ACK, DECLINE)),
    AckAnswers(3, (AckStatus.SUCCESS, AckStatus.DISCARDED)),
    StatusBatch(3, 0, "s", (STATUS,)),
    Submission(GRAPH, restore="latest"),
    SubmissionAccepted("j", 1, 2, 3),
    *[NumberedCommand(3, "s", number, command) for number, command in enumerate(COMMANDS)],
]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a valid AckBatch"),
        (b"{", "not a valid AckBatch"),
        (b"\xff\xfe", "not a valid AckBatch"),
        (b"[]", "Expected `object`"),
        (b'{"epoch": 1, "slot": 0, "session": "s"}', "items"),
        (b'{"epoch": "1", "slot": 0, "session": "s", "items": []}', "Expected `int`"),
        (b'{"epoch": 1, "slot": 0, "session": "s", "items": [{"type": "hello"}]}', "hello"),
        (b'{"epoch": 1, "slot": 0, "session": "s", "items": [{"type": "ack", "attempt": 1}]}', "checkpoint_id"),
        (b'{"epoch": 1.5, "slot": 0, "session": "s", "items": []}', "Expected `int`"),
        (b"[" * 100_000, "not a valid AckBatch"),
    ],
)
def test_malformed_messages_are_refused_by_name(data: bytes, said: str) -> None:
    with pytest.raises(ProtocolError, match="AckBatch") as caught:
        decode(data, AckBatch)
    assert said in str(caught.value)
    assert caught.value.message_type == "AckBatch"


def test_what_is_no_record_is_refused() -> None:
    with pytest.raises(ProtocolError, match="object"):
        encode(object())


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_both_ways(message: Any) -> None:
    data = encode(message)
    assert decode(data, type(message)) == message
    assert decode(memoryview(data), type(message)) == message
    assert b"\n" not in data


def test_unknown_fields_of_a_newer_peer_are_ignored() -> None:
    assert decode(b'{"epoch": 1, "answers": ["SUCCESS"], "mood": "good"}', AckAnswers) == AckAnswers(1, (AckStatus.SUCCESS,))


STATE_META = StateMeta("s", "operator_list", "bytes")
NUMBERS = st.integers(0, 2**53)
TIMES = st.floats(0, 2**53)
TEXTS = st.text(max_size=20)
PARTS = st.one_of(
    st.builds(FileHandle, TEXTS, NUMBERS, TEXTS),
    st.builds(SegmentHandle, TEXTS, NUMBERS, TEXTS, NUMBERS, NUMBERS),
    st.builds(InlineHandle, st.binary(max_size=40)),
    st.builds(PlaceholderHandle, TEXTS, NUMBERS, st.none() | NUMBERS),
)
METAS = st.builds(StateMeta, TEXTS, TEXTS, TEXTS, st.none() | TEXTS)
KEYED = st.builds(
    KeyedStateHandle,
    st.builds(KeyGroupRange, NUMBERS, NUMBERS),
    TEXTS,
    st.lists(METAS, max_size=3).map(tuple),
    st.lists(PARTS, max_size=3).map(tuple),
)
STATES = st.builds(
    OperatorSubtaskState,
    keyed=st.lists(KEYED, max_size=3).map(tuple),
    operator=st.lists(st.builds(OperatorListHandle, METAS, PARTS, NUMBERS), max_size=3).map(tuple),
)
ACKS = st.builds(
    AcknowledgeCheckpoint,
    NUMBERS,
    NUMBERS,
    TEXTS,
    NUMBERS,
    st.dictionaries(TEXTS, STATES, max_size=3),
    st.builds(CheckpointMetrics, TIMES, TIMES, TIMES, TIMES, NUMBERS),
)
DECLINES = st.builds(DeclineCheckpoint, NUMBERS, NUMBERS, TEXTS, NUMBERS, st.sampled_from(FailureReason), TEXTS)


@given(st.builds(AckBatch, NUMBERS, NUMBERS, TEXTS, st.lists(ACKS | DECLINES, max_size=3).map(tuple)))
def test_json_and_msgpack_say_the_same(batch: AckBatch) -> None:
    packed = encode_msgpack(batch)
    assert packed is not None
    assert decode_packed(packed, AckBatch) == decode(encode(batch), AckBatch) == batch


@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_a_protocol_error(body: bytes) -> None:
    found: AckBatch | None = None
    with contextlib.suppress(ProtocolError):  # any other exception fails the test
        found = decode_packed(body, AckBatch)
    assert found is None or decode_packed(encode_msgpack(found) or b"", AckBatch) == found


def test_numbers_that_json_does_not_have_are_none_of_msgpack_either() -> None:
    for number in (float("nan"), float("inf"), -1.0):
        ack = AcknowledgeCheckpoint(1, 1, "v", 0, {}, CheckpointMetrics(number))
        packed = encode_msgpack(AckBatch(1, 0, "s", (ack,)))
        assert packed is not None
        with pytest.raises(ProtocolError, match="alignment_duration_ms"):
            decode_packed(packed, AckBatch)


def test_what_is_too_large_is_not_packed_and_not_unpacked() -> None:
    state = OperatorSubtaskState(operator=(OperatorListHandle(STATE_META, InlineHandle(b"x" * MSGPACK_BYTES_MAX), 1),))
    assert encode_msgpack(AckBatch(1, 0, "s", (AcknowledgeCheckpoint(1, 1, "v", 0, {"u": state}),))) is None
    with pytest.raises(ProtocolError, match="bytes of msgpack"):
        decode_packed(b"\x90" * (MSGPACK_BYTES_MAX + 1), AckBatch)
