"""The worker protocol as JSON: every message both ways, and refusals that name the message."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.barriers.codec import decode, encode
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
