"""Transports: delivery in order, waking, fencing by attempt, lost peers, and no open port without keys."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from holdfast.barriers.elements import Batch, EndOfData, Watermark
from holdfast.barriers.exchange.credits import CreditAnnouncement
from holdfast.barriers.exchange.frames import ChannelId, EncodedFrame, Frame, FrameDecoder, FrameEncoder
from holdfast.barriers.jobgraph import JobConfig
from holdfast.barriers.transport import zmq_authenticator
from holdfast.barriers.transport.admission import AttemptPeers, Peer
from holdfast.barriers.transport.authentication import PeerAuthentication
from holdfast.barriers.transport.port import LocalNetwork, LocalTransport, PeerLost, Received, Transport
from holdfast.barriers.transport.socketfolder import make_socket_folder
from holdfast.barriers.transport.zmq_transport import CurveKeys, ZmqTransport
from holdfast.statebackends.errors import InvalidConfigError, InvalidRowError, InvariantError

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


def collect(transport: Transport, count: int, deadline_s: float = 10) -> list[Any]:
    """What came, decoded."""
    decoder = FrameDecoder()
    received: list[Any] = []
    deadline = time.monotonic() + deadline_s
    while len(received) < count and time.monotonic() < deadline:
        for item in transport.poll(50):
            received.append(decoder.decode(item) if isinstance(item, EncodedFrame) else item)
    return received


# -------------------------------------------------------------------------------------------------- what goes wrong


def test_the_key_of_every_peer_is_needed(stack: ExitStack) -> None:
    transport = zmq_transport(stack, 0)
    peers = AttemptPeers(1, {0: Peer(transport.address), 1: Peer("tcp://127.0.0.1:5000")}, CHANNELS)
    with pytest.raises(InvalidConfigError, match="key of slot 1"):
        transport.start(peers)


def test_what_can_not_be_encoded_costs_no_connection(stack: ExitStack) -> None:
    sender, receiver = zmq_transport(stack, 0), zmq_transport(stack, 1)
    begin(1, sender, receiver)
    with pytest.raises(InvalidRowError, match="can't be pickled"):
        sender.send(frame(1, Batch(rows=[lambda: 1])))
    sender.send(frame(1))
    assert collect(receiver, 1) == [frame(1)]


def test_peers_wait_for_the_slowest_cancellation_that_the_job_allows() -> None:
    """A survivor that turned its peers away meanwhile would fail the next attempt, and the one after it."""
    transport = ZmqTransport(0, CurveKeys.generate(), cancellation_timeout_ms=120_000)
    try:
        held_ms = transport._authenticator._core._held_timeout_ms
        (pull,) = transport._pulls
        assert (held_ms, pull.getsockopt(zmq.HANDSHAKE_IVL)) == (145_000, 150_000)
    finally:
        transport.close()


@pytest.mark.parametrize("setting", [-1, 10**9])
def test_a_cancellation_has_its_bounds(setting: int) -> None:
    JobConfig(cancellation_timeout_ms=3_600_000).check()
    with pytest.raises(InvalidConfigError, match="cancellation_timeout_ms must be 0"):
        JobConfig(cancellation_timeout_ms=setting).check()


@pytest.mark.parametrize("peer", [Peer("tcp://127.0.0.1:1", "too short"), Peer("nonsense", "x" * 40)], ids=["key", "address"])
def test_a_peer_that_cannot_be_reached_at_all_keeps_nothing_open(peer: Peer) -> None:
    transport = ZmqTransport(0, CurveKeys.generate())
    caught = None
    try:
        transport.start(AttemptPeers(1, {1: peer}, frozenset()))
    except zmq.ZMQError as error:
        caught = error  # with its frames, and what they refer to
    assert caught
    transport.stop()
    assert not transport._pushes
    transport.close()  # which waits for every socket, and would not come back
    assert transport._context.closed


@pytest.mark.parametrize(("bind", "path"), [("203.0.113.1", ""), ("127.0.0.1", "/nowhere/d")], ids=["address", "socket"])
def test_what_cannot_be_bound_leaves_no_thread_and_no_descriptor(bind: str, path: str) -> None:
    """An advertised address that is another machine's, say."""
    ZmqTransport(0, CurveKeys.generate()).close()  # what the library opens once
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    with pytest.raises(zmq.ZMQError):
        ZmqTransport(0, CurveKeys.generate(), bind=bind, socket_path=path)
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def spoil_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not known is turned away soon."""
    monkeypatch.setattr(zmq_authenticator, "PeerAuthentication", lambda **_: PeerAuthentication(held_timeout_ms=100))


@pytest.mark.parametrize("over_socket", [False, True])
def test_a_stranger_gets_nothing_through(stack: ExitStack, monkeypatch: pytest.MonkeyPatch, over_socket: bool) -> None:
    """It knows all that a peer knows but a key of this attempt (or, at the socket, the attempt's secret)."""
    spoil_held(monkeypatch)
    server, stranger, friend = (zmq_transport(stack, slot, socket=over_socket) for slot in (1, 0, 2))
    server.start(peers_of(1, [server, friend]))
    stranger.start(peers_of(1, [server, stranger], secret="guessed"))
    friend.start(peers_of(1, [server, friend]))
    stranger.send(frame(1))
    friend.send(frame(1, channel=ChannelId(0, 2, 1)))
    assert collect(server, 1) == [frame(1, channel=ChannelId(0, 2, 1))]
    assert server.poll(200) == []
    assert [lost.slot for lost in collect(stranger, 1) if isinstance(lost, PeerLost)] == [1]
    assert server.poll(0) == []


def test_a_known_key_does_not_open_the_socket_without_the_secret(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_held(monkeypatch)
    server, peer = zmq_transport(stack, 1, socket=True), zmq_transport(stack, 0, socket=True)
    server.start(peers_of(1, [server, peer]))
    peer.start(peers_of(1, [server, peer], secret="of another attempt"))
    peer.send(frame(1))
    assert [lost.slot for lost in collect(peer, 1) if isinstance(lost, PeerLost)] == [1]
    assert not [item for item in server.poll(50) if not isinstance(item, PeerLost)]


@dataclass
class Bomb:
    """Writes a file where it is unpickled."""

    path: str

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))


def bomb(path: Path, *, attempt: int = 1, channel: ChannelId = CHANNEL) -> Frame:
    return frame(1, Batch(rows=[Bomb(str(path))]), attempt=attempt, channel=channel)


@pytest.mark.parametrize(
    ("mechanism", "parts"),
    [
        ("none", [b"hello", b"world"]),
        ("none", FrameEncoder().encode(frame(1))),
        ("curve", [b"hello", b"world"]),
        ("plain", [b"hello", b"world"]),
        ("wrong server key", [b"hello", b"world"]),
    ],
)
def test_strangers_on_the_port_neither_come_in_nor_fail_anything(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, mechanism: str, parts: list[bytes]
) -> None:
    spoil_held(monkeypatch)
    transport, peer = zmq_transport(stack, 1), zmq_transport(stack, 0)
    begin(1, transport, peer)
    context = zmq.Context()
    stack.callback(context.term)
    push = context.socket(zmq.PUSH)
    stack.callback(push.close, 0)
    if mechanism in ("curve", "wrong server key"):
        server = CurveKeys.generate().public if mechanism != "curve" else transport.key
        mine = CurveKeys.generate()
        push.curve_serverkey = server.encode()
        push.curve_publickey, push.curve_secretkey = mine.public.encode(), mine.secret.encode()
    elif mechanism == "plain":
        push.plain_username, push.plain_password = peer.key.encode(), SECRET.format(1).encode()
    monitor = push.get_monitor_socket()
    push.connect(transport.address)
    push.send_multipart(parts)
    failed = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    failed |= zmq.EVENT_DISCONNECTED
    deadline = time.monotonic() + 10
    while not (monitor.poll(100) and parse_monitor_message(monitor.recv_multipart())["event"] & failed):
        assert time.monotonic() < deadline, "it was let in"
        assert transport.poll(0) == []
    push.disable_monitor()
    monitor.close(linger=0)
    peer.send(frame(1))
    assert collect(transport, 1) == [frame(1)]


@pytest.mark.parametrize("over_socket", [False, True])
def test_a_zombie_that_is_still_connected_is_dropped_counted_and_logged_once(
    stack: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture, over_socket: bool
) -> None:
    """Its connection was let in for an older attempt; its bytes are not decoded, whatever attempt they name."""
    server, zombie, peer = (zmq_transport(stack, slot, socket=over_socket) for slot in (1, 0, 0))
    begin(1, server, zombie)
    zombie.send(frame(1))
    assert collect(server, 1) == [frame(1)]
    for attempt in (2, 3):
        server.start(peers_of(attempt, [server, peer]))
    peer.start(peers_of(3, [server, peer]))
    for attempt in (1, 2, 3, 4, 10**6):
        zombie.send(bomb(tmp_path / "unpickled", attempt=attempt))
    peer.send(frame(1, attempt=3))
    deadline = time.monotonic() + 10
    received: list[Received] = []
    while server.refused_count < 5 or not [each for each in received if not isinstance(each, PeerLost)]:
        assert time.monotonic() < deadline, (server.refused_count, received)
        received += server.poll(20)
    assert [each.attempt for each in received if not isinstance(each, PeerLost)] == [3]
    assert server.refused_count == 5
    assert not (tmp_path / "unpickled").exists()
    assert len([record for record in caplog.records if "dropped" in record.getMessage()]) == 1


def test_a_peer_sends_only_on_its_own_channels(make: Maker, tmp_path: Path) -> None:
    server, peer, other = make(1), make(0), make(2)
    if isinstance(server, LocalTransport):
        pytest.skip("within a process nothing is encoded")
    begin(1, server, peer, other)
    other.send(bomb(tmp_path / "unpickled"))
    other.send(frame(0, CreditAnnouncement(1, 1, 0, 0), channel=ChannelId(0, 1, 0)))
    other.send(frame(1, channel=ChannelId(9, 2, 1)))
    peer.send(frame(1))
    deadline = time.monotonic() + 10
    received: list[Received] = []
    while (server.refused_count < 3 or not received) and time.monotonic() < deadline:
        received += server.poll(20)
    assert [each.channel for each in received if not isinstance(each, PeerLost)] == [CHANNEL]
    assert server.refused_count == 3
    assert not (tmp_path / "unpickled").exists()


def test_half_handshakes_keep_nobody_out(stack: ExitStack) -> None:
    """Connections that say nothing, or half a greeting, beside a peer that comes later."""
    server, peer = zmq_transport(stack, 1), zmq_transport(stack, 0)
    port = int(server.address.rpartition(":")[2])
    for number in range(200):
        silent = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        if number % 2:
            silent.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f\3\1CURVE")
    begin(1, server, peer)
    peer.send(frame(1))
    assert collect(server, 1) == [frame(1)]


@pytest.mark.parametrize("announced", [1 << 40, (256 << 10) + 1])
def test_a_stranger_is_not_given_memory(stack: ExitStack, announced: int) -> None:
    """A handshake that says to be longer than 256 KiB ends the connection."""
    server = zmq_transport(stack, 1)
    stranger = stack.enter_context(socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))))
    stranger.settimeout(10)
    stranger.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f\3\1CURVE".ljust(64, b"\0") + b"\6" + announced.to_bytes(8, "big"))
    with contextlib.suppress(ConnectionResetError):
        while stranger.recv(4096):
            pass


def test_a_large_batch_travels_in_parts(make: Maker) -> None:
    left, right = make(0), make(1)
    begin(1, left, right)
    table = pa.record_batch({"n": np.arange(2_000_000, dtype=np.int64)})
    rows = [{"x": "y" * 9_000_000}]
    left.send(frame(1, Batch(columns=table, timestamps=np.arange(2_000_000, dtype=np.int64))))
    left.send(frame(2, Batch(rows=rows)))
    columns, objects = collect(right, 2)
    assert columns.payload.columns().equals(table)
    assert columns.payload.timestamps.tolist()[-1] == 1_999_999
    assert objects.payload.rows() == rows


def test_a_frame_for_a_slot_that_is_no_peer_is_a_bug(stack: ExitStack) -> None:
    transport = zmq_transport(stack, 0)
    begin(1, transport)
    with pytest.raises(InvariantError, match="slot 1"):
        transport.send(frame(1))


def test_a_peer_that_does_not_exist_is_lost(make: Maker) -> None:
    transport, peer = make(0), make(1)
    peers = peers_of(1, [transport, peer])
    peer.close()
    transport.start(peers)
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


def serve(peers: AttemptPeers, pipe: Any) -> None:
    with ExitStack() as stack:
        transport = zmq_transport(stack, 1, socket=bool(peers.peers[0].socket))
        me = Peer(transport.address, transport.key, transport.socket_path)
        pipe.send(me)
        transport.start(replace(peers, peers={**peers.peers, 1: me}))
        while True:
            transport.poll(1000)


@pytest.mark.parametrize("over_socket", [False, True])
def test_a_killed_process_is_lost_at_once(stack: ExitStack, over_socket: bool) -> None:
    transport = zmq_transport(stack, 0, socket=over_socket)
    peers = peers_of(1, [transport])
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(peers, theirs), daemon=True)
    process.start()
    try:
        assert ours.poll(20)
        transport.start(replace(peers, peers={**peers.peers, 1: ours.recv()}))
        transport.send(frame(1))
        assert transport.poll(100) == []
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
        began = time.monotonic()
        assert [type(lost) for lost in collect(transport, 1)] == [PeerLost]
        assert time.monotonic() - began < 2
    finally:
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


def test_of_many_wakes_before_a_wait_the_first_alone_writes(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    transport, write = zmq_transport(stack, 0), os.write
    written: list[int] = []

    def counted(descriptor: int, data: bytes) -> int:
        written.append(descriptor)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", counted)
    for turn in range(1, 4):
        for _ in range(1_000):
            transport.wake()
        assert written.count(transport._wake_write) == turn
        assert transport.poll(20_000) == [], "it does not wait"


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
    right.start(peers_of(2, [left, right]))
    credit = frame(0, CreditAnnouncement(1, 1, 0, 0), attempt=2)
    right.send(credit)
    left.send(frame(1))
    # Whatever comes to `left` now belongs to attempt 2; that `right` left attempt 1 it may learn as a lost peer.
    assert not any(isinstance(item, Frame) for item in collect(left, 2, deadline_s=0.2))
    left.start(peers_of(2, [left, right]))
    assert [item for item in collect(left, 1) if isinstance(item, Frame)] == [credit]


@pytest.mark.parametrize("over_socket", [False, True])
def test_a_peer_that_was_deployed_first_waits_at_the_door(stack: ExitStack, over_socket: bool) -> None:
    early, late, third = (zmq_transport(stack, slot, socket=over_socket) for slot in (0, 1, 2))
    begin(1, early, third)
    early.start(peers_of(2, [early, late]))
    early.send(frame(1, attempt=2))
    assert early.poll(100) == late.poll(100) == []
    late.start(peers_of(2, [early, late]))
    assert collect(late, 1) == [frame(1, attempt=2)]


def test_a_peer_of_another_host_is_reached_over_its_port(stack: ExitStack) -> None:
    """Its socket's path means nothing here, or somebody else's socket."""
    left, right = zmq_transport(stack, 0, socket=True), zmq_transport(stack, 1)
    peers = peers_of(1, [left, right])
    left.start(replace(peers, peers={**peers.peers, 1: replace(peers.peers[1], socket="/nowhere/d")}))
    right.start(peers)
    left.send(frame(1))
    right.send(frame(0, CreditAnnouncement(1, 1, 0, 0)))
    assert collect(right, 1) == [frame(1)]
    assert collect(left, 1) == [frame(0, CreditAnnouncement(1, 1, 0, 0))]


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


def test_close_twice(make: Maker) -> None:
    transport = make(0)
    transport.close()
    transport.close()
    transport.wake()
