"""Messages of megabytes: decoded piece by piece to the same record, refused by their number of values before they are decoded."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.barriers import codec
from holdfast.barriers.messages import (
    AckBatch,
    AcknowledgeCheckpoint,
    DeclineCheckpoint,
    FailureReason,
    RegisterWorker,
    StatusBatch,
    SubtaskStatus,
    TaskState,
)
from holdfast.statebackends.errors import ProtocolError
from holdfast.statebackends.handles import InlineHandle, KeyedStateHandle, KeyGroupRange, OperatorSubtaskState

KEYED = KeyedStateHandle(KeyGroupRange(0, 128), "arrow", (), (InlineHandle(b"\0," * 1_000_000),))
ITEMS = (
    AcknowledgeCheckpoint(1, 2, "v", 0, {"u": OperatorSubtaskState((KEYED,), external=("a|b",))}),
    DeclineCheckpoint(1, 2, "v", 1, FailureReason.EXPIRED, "too, late"),
    AcknowledgeCheckpoint(1, 3, "v", 0),
)
WORKER = RegisterWorker("j", 0, 1, 1, "n", 1, "h", "d", "x", subtasks=(SubtaskStatus(1, "v", 0, TaskState.RUNNING),))


@pytest.mark.parametrize(
    ("message", "pieces"),
    [
        (AckBatch(1, 2, "s", ITEMS), "items"),
        (AckBatch(1, 2, "s", ()), "items"),
        (RegisterWorker("j", 0, 1, 1, "n", 1, "h", "d", "x", unanswered=ITEMS), "unanswered"),
        (WORKER, "unanswered"),
        (StatusBatch(1, 0, "s", WORKER.subtasks), None),
    ],
)
def test_they_are_what_they_are_when_decoded_at_once(message: Any, pieces: str | None) -> None:
    data = codec.encode(message)
    for form in (data, bytearray(data)):
        assert codec.decode_large(form, type(message), pieces) == message == codec.decode(data, type(message))


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"{", "not a valid AckBatch"),
        (b'{"epoch":1,"slot":0,"items":[]}', "session"),
        (b'{"epoch":1,"slot":0,"session":"s","items":{}}', "items"),
        (b'{"epoch":1,"slot":0,"session":"s","items":[{"type":"ack"}]}', "AckBatch.items[0]"),
        (b'{"epoch":1,"slot":0,"session":"s","items":[' + codec.encode(ITEMS[2]) + b',{"type":"x"}]}', "AckBatch.items[1]"),
    ],
)
def test_what_is_wrong_is_named(data: bytes, named: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        codec.decode_large(data, AckBatch, "items")
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("bound", "message", "kind", "pieces"),
    [
        ("PIECES_MAX", AckBatch(1, 2, "s", (ITEMS[2],) * 5), AckBatch, "items"),
        ("PIECE_COMMAS_MAX", AckBatch(1, 2, "s", (ITEMS[2],)), AckBatch, "items"),
        ("PIECE_COMMAS_MAX", StatusBatch(1, 0, "s", WORKER.subtasks), StatusBatch, None),
        ("COMMAS_MAX", AckBatch(1, 2, "s", ITEMS), AckBatch, "items"),
    ],
)
def test_more_values_than_it_may_hold_are_refused(
    monkeypatch: pytest.MonkeyPatch, bound: str, message: Any, kind: type[Any], pieces: str | None
) -> None:
    monkeypatch.setattr(codec, bound, 4)
    with pytest.raises(ProtocolError, match="more than 4"):
        codec.decode_large(codec.encode(message), kind, pieces)


def test_state_of_any_size_is_one_value() -> None:
    data = codec.encode(AckBatch(1, 2, "s", ITEMS[:1]))
    assert len(data) > 2_500_000
    assert data.count(b",") < 100
