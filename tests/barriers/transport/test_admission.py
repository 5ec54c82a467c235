"""Who may hand a frame to a worker: strangers, replaced workers, foreign channels and odd headers; nothing is decoded for them."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers.elements import Batch, EndOfData
from holdfast.barriers.exchange.credits import CreditAnnouncement
from holdfast.barriers.exchange.frames import HEADER_BYTES_MAX, ChannelId, EncodedFrame, Frame, FrameEncoder
from holdfast.barriers.transport.admission import Admission, AttemptPeers, Peer, Refusal
from holdfast.statebackends.errors import InvalidConfigError, ProtocolError
from tests.examples import examples

IN, OUT = ChannelId(0, 0, 1), ChannelId(1, 1, 0)
ANY_INTEGER = st.integers(-(2**63), 2**64 - 1)
CREDIT = CreditAnnouncement(1, 1, 0, 0)


def peers(attempt: int, *, zero: str = "zero", two: str = "two") -> AttemptPeers:
    return AttemptPeers(attempt, {0: Peer("a", zero), 2: Peer("c", two)}, frozenset((IN, OUT)))


def parts(payload: Any = None, *, attempt: int = 1, channel: ChannelId = IN, sequence: int = 1) -> list[Any]:
    return FrameEncoder().encode(Frame(attempt, channel, sequence, payload or EndOfData()))


@pytest.fixture
def door() -> Admission:
    """Slot 1's, in attempt 1."""
    door = Admission(1)
    door.start(peers(1))
    return door


@pytest.mark.parametrize(
    ("identity", "message", "why"),
    [
        ("stranger", parts(), Refusal.UNKNOWN_PEER),
        ("stranger", [b"hello"], Refusal.UNKNOWN_PEER),
        ("", parts(), Refusal.UNKNOWN_PEER),
        ("zero", [], Refusal.BAD_HEADER),
        ("zero", [b""], Refusal.BAD_HEADER),
        ("zero", [b"hello", b"world"], Refusal.BAD_HEADER),
        ("zero", [b"\x9a" + b"\x91" * 5_000, b""], Refusal.BAD_HEADER),
        ("zero", [bytes(HEADER_BYTES_MAX + 1), b""], Refusal.BAD_HEADER),
        ("zero", parts(attempt=0), Refusal.OVER),
        ("zero", parts(attempt=2), Refusal.UNKNOWN_ATTEMPT),
        ("zero", parts(attempt=10**6), Refusal.UNKNOWN_ATTEMPT),
        ("two", parts(), Refusal.WRONG_CHANNEL),
        ("zero", parts(channel=ChannelId(7, 0, 1)), Refusal.WRONG_CHANNEL),
        ("zero", parts(channel=OUT), Refusal.WRONG_CHANNEL),
        ("two", parts(CREDIT, channel=OUT), Refusal.WRONG_CHANNEL),
        ("zero", parts(CREDIT, channel=IN), Refusal.WRONG_CHANNEL),
    ],
)
def test_what_fits_nothing_is_dropped_and_counted(door: Admission, identity: str, message: list[Any], why: Refusal) -> None:
    assert door.read(identity, message) is None
    assert door.refused == {why: 1}
    assert door.refused_count == (0 if why is Refusal.OVER else 1)


@pytest.mark.parametrize("message", [parts(), parts(CREDIT, channel=OUT), parts(sequence=99)])
def test_a_peers_frames_on_its_channels_are_taken_unread(door: Admission, message: list[Any]) -> None:
    """Also out of turn: that is the channel's to judge, and fails the attempt."""
    frame = door.read("zero", [message[0], b"not decoded"])
    assert isinstance(frame, EncodedFrame)
    assert door.refused == {}


def test_each_reason_is_logged_once(door: Admission, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "holdfast.data"):
        for _ in range(100):
            door.read("stranger", parts())
            door.read("two", parts())
            door.read("zero", parts(attempt=0))
    assert len(caplog.records) == 2
    assert sum(door.refused.values()) == 300


def test_what_a_worker_sent_that_has_just_been_replaced_is_no_surprise(door: Admission) -> None:
    door.start(peers(2, zero="its successor"))
    assert door.read("zero", parts(attempt=1)) is None
    assert door.read("zero", parts(attempt=2)) is None
    assert door.refused == {Refusal.OVER: 2}
    door.start(peers(3, zero="its successor"))
    assert door.read("zero", parts(attempt=3)) is None
    assert door.refused == {Refusal.OVER: 2, Refusal.UNKNOWN_PEER: 1}


def test_credit_of_a_later_attempt_waits_and_is_judged_again_when_that_begins(door: Admission) -> None:
    early = parts(CREDIT, attempt=3, channel=OUT)
    assert door.read("zero", early) is None
    assert door.start(peers(2)) == []
    (kept,) = door.start(peers(3))
    assert (kept.attempt, kept.channel) == (3, OUT)
    assert door.refused == {}


def test_credit_of_a_later_attempt_counts_only_if_its_sender_is_in_it(door: Admission) -> None:
    door.read("zero", parts(CREDIT, attempt=2, channel=OUT))
    assert door.start(peers(2, zero="its successor")) == []


def test_large_credit_is_not_kept(door: Admission) -> None:
    header = parts(CREDIT, attempt=2, channel=OUT)[0]
    assert door.read("zero", [header, bytes(1_000_000)]) is None
    assert door.refused == {Refusal.UNKNOWN_ATTEMPT: 1}


def test_early_frames_are_bounded() -> None:
    door = Admission(1, early_frames_max=2)
    door.start(peers(1))
    for _ in range(2):
        door.read("zero", parts(CREDIT, attempt=3, channel=OUT))
    with pytest.raises(ProtocolError, match="before attempt 3"):
        door.read("zero", parts(CREDIT, attempt=3, channel=OUT))
    assert door.start(peers(2)) == []
    assert len(door.start(peers(3))) == 2


def test_nobody_is_known_before_the_first_attempt() -> None:
    door = Admission(1)
    assert door.read("zero", parts(CREDIT, channel=OUT)) is None
    assert door.refused == {Refusal.UNKNOWN_PEER: 1}


def test_stopped_means_over(door: Admission) -> None:
    door.stop()
    assert door.read("zero", parts()) is None
    assert not door.is_current(Frame(1, ChannelId(0, 1, 1), 1, EndOfData()))
    assert door.refused == {Refusal.OVER: 1}


def test_attempts_only_rise(door: Admission) -> None:
    with pytest.raises(InvalidConfigError):
        door.start(peers(1))


def test_the_secret_is_not_printed() -> None:
    assert "hush" not in repr(AttemptPeers(1, {}, frozenset(), "hush"))


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=4), st.sampled_from(["zero", "two", "stranger"]))
def test_no_bytes_raise(message: list[bytes], identity: str) -> None:
    door = Admission(1)
    door.start(peers(1))
    assert door.read(identity, message) is None or identity != "stranger"


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.one_of(ANY_INTEGER, st.booleans(), st.none(), st.lists(ANY_INTEGER)), max_size=12))
def test_no_header_raises(fields: list[Any]) -> None:
    door = Admission(1)
    door.start(peers(1))
    frame = door.read("zero", [msgspec.msgpack.encode(fields), b""])
    assert frame is None or frame.channel in (IN, OUT)


def test_rows_travel_unread_to_the_channel(door: Admission) -> None:
    message = parts(Batch(rows=[1]))
    assert isinstance(door.read("zero", message), EncodedFrame)
