"""SHELL: frames between worker processes over ZeroMQ.

A PULL socket on a TCP port, which speaks CURVE on any address, and one on a unix socket, which takes only peers of this user
and attempt; both are bound for the life of the process. Per attempt there is a PUSH socket to each peer. The handshake
(authentication.py) identifies the peer of each message, whose header is checked before the rest is read (admission.py).
High-water marks are off, because credit is the bound and a full socket would block or drop; linger is 0, because what was not
sent belongs to a dead attempt. A socket that disconnects is never reconnected: its monitor reports the peer as lost, and the
attempt fails."""

from __future__ import annotations

import contextlib
import os
import struct
from collections import deque
from dataclasses import dataclass

import zmq

from holdfast.barriers.exchange.frames import PART_BYTES_MAX, PORT_PART_BYTES_MAX, Frame, FrameEncoder
from holdfast.barriers.transport.admission import Admission, AttemptPeers, Peer
from holdfast.barriers.transport.authentication import CANCELLATION_TIMEOUT_MS, HANDSHAKE_SLACK_MS, HELD_SLACK_MS
from holdfast.barriers.transport.port import PeerLost, Received
from holdfast.barriers.transport.socketfolder import is_reachable
from holdfast.barriers.transport.zmq_authenticator import ZmqAuthenticator
from holdfast.statebackends.errors import InvalidConfigError, InvariantError

MESSAGES_PER_POLL_MAX = 256
"""Frames taken in one poll, so that mails get their turn."""

PART_SLACK_BYTES = 1_024
"""What ciphering adds to a part of a message."""

BACKLOG_MAX = 1_024
"""Connections that wait to be accepted: all peers connect at once when an attempt begins."""

HEARTBEAT_INTERVAL_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 30_000
"""ZeroMQ's own pings find a peer whose host is gone; its I/O thread answers them even while Python is busy."""

LOST_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """This process's CURVE key pair, Z85 text; the public half goes into its registration, the other one nowhere."""

    def __repr__(self) -> str:
        return f"CurveKeys({self.public})"

    public: str
    secret: str

    @staticmethod
    def generate() -> CurveKeys:
        public, secret = zmq.curve_keypair()
        return CurveKeys(public.decode("ascii"), secret.decode("ascii"))


class ZmqTransport:
    """Implements `transport.Transport`. Frames for the worker's own slot go through a deque and are never encoded.

    `bind` is a host address: the port there speaks CURVE only. `socket_path`: of a unix socket beside it, in a folder that is
    private (socketfolder.py); peers of this host use it, since enciphering costs more there than all the rest.
    `cancellation_timeout_ms`: what the job allows the slowest of its workers before it begins the next attempt."""

    def __init__(
        self,
        slot: int,
        keys: CurveKeys,
        *,
        bind: str = "127.0.0.1",
        socket_path: str = "",
        cancellation_timeout_ms: int = CANCELLATION_TIMEOUT_MS,
    ) -> None:
        self._slot = slot
        self._keys = keys
        self._admission = Admission(slot)
        self._encoder = FrameEncoder()
        self._own: deque[Received] = deque()
        """For this worker itself, or found while sending; returned by the next poll."""
        self._pushes: dict[int, zmq.Socket[bytes]] = {}
        self._part_bytes_max: dict[int, int] = {}
        """By slot: what the door takes that it is reached through."""
        self._monitors: dict[zmq.Socket[bytes], int] = {}
        self._lost: set[int] = set()
        self._closed = False
        self._is_woken = False
        """A byte is in the pipe, or soon will be: a worker with thousands of answers a second is woken once for many."""
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = ZmqAuthenticator(self._context, held_timeout_ms=cancellation_timeout_ms + HELD_SLACK_MS)
        self._handshake_timeout_ms = cancellation_timeout_ms + HANDSHAKE_SLACK_MS
        self._pulls: list[zmq.Socket[bytes]] = []
        self._poller = zmq.Poller()
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._socket_path = socket_path
        try:
            self._address = self._bind_port(_bracketed(bind))
            if socket_path:
                self._bind_socket(socket_path)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return self._address

    @property
    def socket_path(self) -> str:
        """Empty: peers of this host use the port, too."""
        return self._socket_path

    @property
    def key(self) -> str:
        """Public key: who this process is for its peers."""
        return self._keys.public

    @property
    def refused_count(self) -> int:
        return self._admission.refused_count

    def _bind_port(self, host: str) -> str:
        pull = self._pull(PORT_PART_BYTES_MAX)
        self._curve(pull)
        pull.curve_server = True
        return f"tcp://{host}:{pull.bind_to_random_port(f'tcp://{host}')}"

    def _bind_socket(self, path: str) -> None:
        pull = self._pull(PART_BYTES_MAX)
        pull.plain_server = True
        pull.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        pull.bind(f"ipc://{path}")

    def _pull(self, part_bytes_max: int) -> zmq.Socket[bytes]:
        """Closed with the transport, bound or not."""
        pull = self._context.socket(zmq.PULL)
        self._pulls.append(pull)
        self._configure(pull)
        pull.maxmsgsize = part_bytes_max + PART_SLACK_BYTES
        pull.backlog = BACKLOG_MAX
        self._poller.register(pull, zmq.POLLIN)
        return pull

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0
        socket.setsockopt(zmq.HANDSHAKE_IVL, self._handshake_timeout_ms)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)

    def _curve(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_publickey = self._keys.public.encode("ascii")
        socket.curve_secretkey = self._keys.secret.encode("ascii")

    def start(self, peers: AttemptPeers) -> None:
        """As Transport.start. Raises InvalidConfigError where the key of a peer is missing: it could not be told from others."""
        others = {slot: peer for slot, peer in peers.peers.items() if slot != self._slot}
        for slot, peer in others.items():
            if not peer.key:
                raise InvalidConfigError(f"the CURVE key of slot {slot} is unknown", slot=slot)
        self._disconnect()
        early = self._admission.start(peers)
        self._encoder = FrameEncoder()
        self._own.clear()
        self._own.extend(early)
        self._lost.clear()
        self._authenticator.allow(frozenset(peer.key for peer in others.values()), peers.secret)
        for slot, peer in sorted(others.items()):
            self._connect(slot, peer, peers.secret)

    def _connect(self, slot: int, peer: Peer, secret: str) -> None:
        push = self._context.socket(zmq.PUSH)
        self._pushes[slot] = push  # closed with the others, whatever comes: the context's end would wait for it
        self._configure(push)
        push.setsockopt(zmq.RECONNECT_IVL, -1)
        over_socket = bool(self._socket_path and peer.socket and secret) and is_reachable(peer.socket)
        if over_socket:
            push.plain_username = self._keys.public.encode("ascii")
            push.plain_password = secret.encode()
        else:
            self._curve(push)
            push.curve_serverkey = peer.key.encode("ascii")
        monitor = push.get_monitor_socket(LOST_EVENTS)
        self._part_bytes_max[slot] = PART_BYTES_MAX if over_socket else PORT_PART_BYTES_MAX
        self._monitors[monitor] = slot
        self._poller.register(monitor, zmq.POLLIN)
        push.connect(f"ipc://{peer.socket}" if over_socket else peer.address)

    def send(self, frame: Frame) -> None:
        slot = frame.target_slot
        if slot == self._slot:
            self._own.append(frame)
            return
        push = self._pushes.get(slot)
        if push is None:
            if slot in self._lost:
                return
            raise InvariantError(f"a frame for slot {slot}, which is no peer of this attempt", slot=slot)
        try:
            push.send_multipart(self._encoder.encode(frame, self._part_bytes_max[slot]), flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._lose(slot, "not connected", self._own)

    def poll(self, timeout_ms: int) -> list[Received]:
        received: list[Received] = []
        events = dict(self._poller.poll(0 if self._own else max(0, timeout_ms)))
        if self._wake_read in events:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
            self._is_woken = False  # before anything is looked at for which the next wake would be left out
        # Own frames first, then the network's, then losses: frames that a peer sent before it died come before its loss.
        own, self._own = self._own, deque()
        received += (item for item in own if isinstance(item, PeerLost) or self._admission.is_current(item))
        for pull in self._pulls:
            if pull in events:
                self._receive(pull, received)
        for monitor in [socket for socket in events if socket in self._monitors]:
            self._look(monitor, received)
        return received

    def _receive(self, pull: zmq.Socket[bytes], received: list[Received]) -> None:
        for _ in range(MESSAGES_PER_POLL_MAX):
            try:
                parts = pull.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            frame = self._admission.read(_sender(parts[0]), parts)
            if frame is not None:
                received.append(frame)

    def _look(self, monitor: zmq.Socket[bytes], received: list[Received]) -> None:
        """Read a monitor; any event that it was asked for means the peer is gone."""
        event = _event_of(monitor.recv_multipart())
        slot = self._monitors[monitor]
        if event & LOST_EVENTS:
            self._drop(slot)
            self._lose(slot, str(event.name).lower().replace("_", " "), received)

    def _lose(self, slot: int, reason: str, told: list[Received] | deque[Received]) -> None:
        if slot not in self._lost:
            self._lost.add(slot)
            told.append(PeerLost(slot, reason))

    def _drop(self, slot: int) -> None:
        push = self._pushes.pop(slot, None)
        if push is None:
            return
        for monitor in [socket for socket, owner in self._monitors.items() if owner == slot]:
            self._poller.unregister(monitor)
            del self._monitors[monitor]
            push.disable_monitor()
            # Not closed by that; the context's end would wait for it.
            monitor.close(linger=0)
        push.close(linger=0)

    def wake(self) -> None:
        if self._is_woken:
            return
        self._is_woken = True
        # A full pipe wakes as well; a closed one has no waiting reader.
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"\0")

    def stop(self) -> None:
        self._admission.stop()
        self._own.clear()
        self._disconnect()

    def _disconnect(self) -> None:
        for slot in list(self._pushes):
            self._drop(slot)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.stop()
        for pull in self._pulls:
            pull.close(linger=0)
        self._authenticator.close()
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)


def _sender(part: zmq.Frame) -> str:
    """The key that the sender's connection proved; empty if there is none, which no socket here lets through."""
    try:
        return str(part.get("User-Id"))
    except zmq.ZMQError:
        return ""


def _event_of(message: list[bytes]) -> zmq.Event:
    """The event of a monitor's message: 16 bits, and 32 of its value (zmq_socket_monitor(3)).

    pyzmq's own reader is in a module that loads asyncio, and would do so when a peer is lost."""
    event, _ = struct.unpack("=Hi", message[0])
    return zmq.Event(event)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
