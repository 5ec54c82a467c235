"""Transports: delivery in order, waking, fencing by attempt, lost peers, and no open port without keys."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zmq

from barriers import zmq_transport
from barriers.credits import CreditAnnouncement
from barriers.elements import Batch, EndOfData, Watermark
from barriers.frames import ChannelId, Frame
from barriers.transport import AttemptFence, LocalNetwork, LocalTransport, PeerLost, Received, Transport
from barriers.zmq_transport import CurveKeys, ZmqTransport, is_loopback
from statebackends.errors import InvalidConfigError, InvariantError, ProtocolError

Maker = Callable[[int], Any]


@pytest.fixture(params=["local", "curve", "socket"])
def make(request: pytest.FixtureRequest) -> Iterator[Maker]:
    """Makes the transport of a slot; all are closed at the end."""
    network = LocalNetwork()
    with ExitStack() as stack:

        def make_one(slot: int) -> Any:
            if request.param == "local":
                transport: Any = LocalTransport(network, slot)
                stack.callback(transport.close)
                return transport
            return zmq_transport(stack, slot, socket=request.param == "socket")

        yield make_one


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def zmq_transport(stack: ExitStack, slot: int, *, socket: bool = False) -> ZmqTransport:
    """Open until the stack ends."""
    path = ""
    if socket:
        folder = make_socket_folder("/nowhere")
        assert folder
        stack.callback(folder.delete)
        path = folder.socket
    transport = ZmqTransport(slot, CurveKeys.generate(), socket_path=path)
    stack.callback(transport.close)
    return transport


SECRET = "the workers of attempt {}"
CHANNELS = frozenset(ChannelId(0, producer, consumer) for producer in range(4) for consumer in range(4))


def peers_of(attempt: int, transports: Sequence[Any], *, secret: str = "") -> AttemptPeers:
    """Any of the transports may be of another kind than the rest."""
    peers = {
        getattr(each, "_slot", 0): Peer(each.address, getattr(each, "key", ""), getattr(each, "socket_path", ""))
        for each in transports
    }
    return AttemptPeers(attempt, peers, CHANNELS, secret or SECRET.format(attempt))


def begin(attempt: int, *transports: Any) -> None:
    for transport in transports:
        transport.start(peers_of(attempt, transports))


CHANNEL = ChannelId(0, 0, 1)


def frame(sequence: int, payload: Any = None, *, attempt: int = 1, channel: ChannelId = CHANNEL) -> Frame:
    return Frame(attempt, channel, sequence, EndOfData() if payload is None else payload)


def collect(transport: Transport, count: int, deadline_s: float = 10) -> list[Received]:
    received: list[Received] = []
    deadline = time.monotonic() + deadline_s
    while len(received) < count and time.monotonic() < deadline:
        received += transport.poll(50)
    return received


# -------------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("bind", ["0.0.0.0", "192.168.1.1", "::", "example.org"])
def test_an_open_port_needs_keys(bind: str) -> None:
    with pytest.raises(InvalidConfigError, match="CURVE"):
        ZmqTransport(0, bind=bind)


def test_loopback() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("10.0.0.1", "::", "0.0.0.0", "localhost.evil.org", "")] == [False] * 5


def test_a_peer_beyond_loopback_needs_keys() -> None:
    transport = ZmqTransport(0)
    try:
        with pytest.raises(InvalidConfigError, match="slot 1"):
            transport.start(1, {0: transport.address, 1: "tcp://10.0.0.1:5000"})
    finally:
        transport.close()


def test_curve_needs_the_key_of_every_peer() -> None:
    transport = ZmqTransport(0, curve=CurveKeys.generate())
    try:
        with pytest.raises(InvalidConfigError, match="key of slot 1"):
            transport.start(1, {0: transport.address, 1: "tcp://127.0.0.1:5000"}, {})
    finally:
        transport.close()


def test_a_stranger_gets_nothing_through_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_transport, "UNKNOWN_KEY_WAIT_MS", 100)
    server, stranger, friend = (ZmqTransport(slot, curve=CurveKeys.generate()) for slot in (1, 0, 2))
    assert server._curve
    assert friend._curve
    try:
        keys = {1: server._curve.public, 2: friend._curve.public}
        server.start(1, {1: server.address}, {2: friend._curve.public})
        stranger.start(1, {1: server.address}, keys)
        friend.start(1, {1: server.address}, keys)
        stranger.send(frame(1))
        friend.send(frame(1, channel=ChannelId(0, 2, 1)))
        assert collect(server, 1) == [frame(1, channel=ChannelId(0, 2, 1))]
        assert server.poll(200) == []
        assert [lost.slot for lost in collect(stranger, 1) if isinstance(lost, PeerLost)] == [1]
    finally:
        for transport in (server, stranger, friend):
            transport.close()


def test_rubbish_on_the_port_fails_the_attempt() -> None:
    transport = ZmqTransport(0)
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    try:
        transport.start(1, {0: transport.address})
        push.connect(transport.address)
        push.send_multipart([b"hello", b"world"])
        with pytest.raises(ProtocolError, match="header"):
            collect(transport, 1)
    finally:
        push.close(linger=0)
        context.term()
        transport.close()


def test_a_frame_for_a_slot_that_is_no_peer_is_a_bug() -> None:
    transport = ZmqTransport(0)
    try:
        transport.start(1, {0: transport.address})
        with pytest.raises(InvariantError, match="slot 1"):
            transport.send(frame(1))
    finally:
        transport.close()


def test_a_peer_that_does_not_exist_is_lost(make: Maker) -> None:
    transport, peer = make(0), make(1)
    addresses = {0: transport.address, 1: peer.address}
    peer.close()
    start(transport, 1, addresses, (transport, peer))
    assert [(lost.slot, type(lost)) for lost in collect(transport, 1)] == [(1, PeerLost)]
    transport.send(frame(1))
    assert transport.poll(50) == []


def test_a_peer_that_leaves_is_lost_once_and_after_what_it_sent(make: Maker) -> None:
    transport, peer = make(0), make(1)
    begin(1, transport, peer)
    peer.send(frame(1, channel=ChannelId(0, 1, 0)))
    assert collect(transport, 1) == [frame(1, channel=ChannelId(0, 1, 0))]
    peer.close()
    (lost,) = collect(transport, 1)
    assert isinstance(lost, PeerLost)
    assert lost.slot == 1
    transport.send(frame(1))
    assert transport.poll(50) == []


def serve(address: str, pipe: Any) -> None:
    transport = ZmqTransport(1)
    pipe.send(transport.address)
    transport.start(1, {0: address, 1: transport.address})
    while True:
        transport.poll(1000)


def test_a_killed_process_is_lost_at_once() -> None:
    transport = ZmqTransport(0)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(transport.address, theirs), daemon=True)
    process.start()
    try:
        assert ours.poll(20)
        transport.start(1, {0: transport.address, 1: ours.recv()})
        transport.send(frame(1))
        assert transport.poll(100) == []
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
        began = time.monotonic()
        assert [type(lost) for lost in collect(transport, 1)] == [PeerLost]
        assert time.monotonic() - began < 2
    finally:
        transport.close()
        process.kill()
        process.join()
        process.close()
        ours.close()
        theirs.close()


# --------------------------------------------------------------------------------------------------------- delivery


def test_frames_arrive_in_order_and_whole(make: Maker) -> None:
    left, right = make(0), make(1)
    begin(1, left, right)
    table = pa.record_batch({"n": np.arange(20_000, dtype=np.int64)})
    sent = []
    for number in range(1, 301):
        payload: Any = Watermark(number)
        if number % 10 == 0:
            payload = Batch(columns=table.slice(number, number * 20))
        sent.append(frame(number, payload))
        left.send(sent[-1])
    received = collect(right, 300)
    assert [item.sequence for item in received if isinstance(item, Frame)] == list(range(1, 301))
    for before, after in zip(sent, received, strict=True):
        assert isinstance(after, Frame)
        if isinstance(before.payload, Batch):
            assert isinstance(after.payload, Batch)
            assert after.payload.columns().equals(before.payload.columns())
        else:
            assert after == before


def test_credit_goes_back_to_the_producer(make: Maker) -> None:
    left, right = make(0), make(1)
    begin(1, left, right)
    credit = frame(0, CreditAnnouncement(1, 1, 0, 0))
    right.send(credit)
    assert collect(left, 1) == [credit]


def test_a_worker_sends_to_itself_without_encoding(make: Maker) -> None:
    transport = make(0)
    begin(1, transport)
    batch = Batch(rows=[lambda: "not to be pickled"])
    transport.send(frame(1, batch, channel=ChannelId(0, 0, 0)))
    (received,) = transport.poll(10_000)
    assert isinstance(received, Frame)
    assert received.payload is batch


def test_wake_ends_the_wait_from_any_thread(make: Maker) -> None:
    transport = make(0)
    begin(1, transport)
    timer = threading.Timer(0.05, transport.wake)
    timer.start()
    began = time.monotonic()
    assert transport.poll(20_000) == []
    assert time.monotonic() - began < 10
    timer.join()


def test_wake_before_the_wait_is_not_forgotten_and_does_not_pile_up(make: Maker) -> None:
    transport = make(0)
    begin(1, transport)
    for _ in range(100_000):
        transport.wake()
    began = time.monotonic()
    assert transport.poll(20_000) == []
    assert time.monotonic() - began < 10
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        began = time.monotonic()
        transport.poll(20)
        if time.monotonic() - began > 0.015:
            return
    pytest.fail("poll never waits again")


# ---------------------------------------------------------------------------------------------------------- attempts


def test_frames_of_a_lower_attempt_are_dropped(make: Maker) -> None:
    left, right = make(0), make(1)
    begin(2, left, right)
    left.send(frame(1, attempt=1))
    left.send(frame(1, attempt=2))
    assert collect(right, 1) == [frame(1, attempt=2)]


def test_credit_of_an_attempt_that_has_not_begun_here_waits_for_it(make: Maker) -> None:
    left, right = make(0), make(1)
    begin(1, left, right)
    addresses = {0: left.address, 1: right.address}
    start(right, 2, addresses, (left, right))
    credit = frame(0, CreditAnnouncement(1, 1, 0, 0), attempt=2)
    right.send(credit)
    left.send(frame(1))
    # Whatever comes to `left` now belongs to attempt 2; that `right` left attempt 1 it may learn as a lost peer.
    deadline = time.monotonic() + 10
    while not left._fence._early and time.monotonic() < deadline:
        assert not any(isinstance(item, Frame) for item in left.poll(20))
    start(left, 2, addresses, (left, right))
    assert [item for item in collect(left, 1) if isinstance(item, Frame)] == [credit]


def test_curve_lets_a_peer_in_that_was_deployed_first() -> None:
    early, late = (ZmqTransport(slot, curve=CurveKeys.generate()) for slot in (0, 1))
    try:
        addresses = {0: early.address, 1: late.address}
        start(early, 1, addresses, (early, late))
        early.send(frame(1))
        assert early.poll(100) == late.poll(100) == []
        start(late, 1, addresses, (early, late))
        assert collect(late, 1) == [frame(1)]
    finally:
        early.close()
        late.close()


def test_stopped_means_silent_until_the_next_attempt(make: Maker) -> None:
    left, right = make(0), make(1)
    begin(1, left, right)
    left.send(frame(1))
    right.stop()
    assert collect(right, 1, deadline_s=0.2) == []
    left.stop()
    begin(2, left, right)
    left.send(frame(1, attempt=2))
    assert collect(right, 1) == [frame(1, attempt=2)]


def test_attempts_only_rise(make: Maker) -> None:
    transport = make(0)
    begin(2, transport)
    with pytest.raises(InvalidConfigError):
        begin(2, transport)


def test_early_frames_are_bounded() -> None:
    fence = AttemptFence(early_frames_max=2)
    fence.start(1)
    for number in range(2):
        assert not fence.admits(frame(number, attempt=3))
    with pytest.raises(ProtocolError, match="before attempt 3"):
        fence.admits(frame(2, attempt=3))
    assert len(fence.start(2)) == 0
    assert len(fence.start(3)) == 2


def test_close_twice(make: Maker) -> None:
    transport = make(0)
    transport.close()
    transport.close()
    transport.wake()
