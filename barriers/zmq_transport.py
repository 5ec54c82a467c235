"""SHELL: frames between worker processes over ZeroMQ.

One PULL socket, bound for the life of the process, and per attempt one PUSH socket to each peer. High-water marks are off,
because credit is the bound and a full socket would block or drop; linger is 0, because what was not sent belongs to a dead attempt.
A socket that disconnects is never reconnected: its monitor reports the peer as lost, and the attempt fails."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from barriers.frames import Frame, FrameDecoder, FrameEncoder, decode_header
from barriers.transport import AttemptFence, PeerLost, Received
from statebackends.errors import InvalidConfigError, InvariantError

MESSAGES_PER_POLL_MAX = 256
"""Frames taken in one poll, so that mails get their turn."""

UNKNOWN_KEY_WAIT_MS = 10_000
"""How long a peer with an unknown key is kept waiting before it is turned away; below ZeroMQ's 30 s for a handshake."""

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
    """This process's CURVE key pair, Z85 text; the public half goes into its registration."""

    public: str
    secret: str

    @staticmethod
    def generate() -> CurveKeys:
        public, secret = zmq.curve_keypair()
        return CurveKeys(public.decode("ascii"), secret.decode("ascii"))


class _PeerKeys:
    """Which public keys may connect; asked by the authenticator's thread, replaced whole by the worker's."""

    def __init__(self) -> None:
        self.allowed: frozenset[str] = frozenset()
        self.closed = False

    async def callback(self, domain: str, key: bytes) -> bool:
        """True for a known key, Z85. An unknown one waits: its worker may have been deployed before this one was.

        Others wait behind it, but only who knows our own public key comes as far as this."""
        deadline = time.monotonic() + UNKNOWN_KEY_WAIT_MS / 1000
        while key.decode("ascii") not in self.allowed:
            if self.closed or time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.01)
        return True


class ZmqTransport:
    """Implements `transport.Transport`. Frames for the worker's own slot go through a deque and are never encoded.

    `bind` is a host address; anything but loopback needs `curve`. Raises InvalidConfigError."""

    def __init__(self, slot: int, *, bind: str = "127.0.0.1", curve: CurveKeys | None = None) -> None:
        if curve is None and not is_loopback(bind):
            raise InvalidConfigError(f"a data port on {bind} is open to all: beyond loopback it needs CURVE keys", setting="bind")
        self._slot = slot
        self._curve = curve
        self._fence = AttemptFence()
        self._encoder = FrameEncoder()
        self._decoder = FrameDecoder()
        self._own: deque[Received] = deque()
        """For this worker itself, or found while sending; returned by the next poll."""
        self._pushes: dict[int, zmq.Socket[bytes]] = {}
        self._monitors: dict[zmq.Socket[bytes], int] = {}
        self._lost: set[int] = set()
        self._closed = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peer_keys = _PeerKeys()
        self._authenticator = self._start_authenticator() if curve else None
        self._pull = self._context.socket(zmq.PULL)
        self._configure(self._pull)
        if curve:
            self._pull.curve_server = True
        port = self._pull.bind_to_random_port(f"tcp://{_bracketed(bind)}")
        self._address = f"tcp://{_bracketed(bind)}:{port}"
        self._poller = zmq.Poller()
        self._poller.register(self._pull, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    @property
    def address(self) -> str:
        return self._address

    def _start_authenticator(self) -> ThreadAuthenticator:
        authenticator = ThreadAuthenticator(self._context)
        authenticator.start()
        authenticator.configure_curve_callback(domain="*", credentials_provider=self._peer_keys)
        return authenticator

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        if self._curve:
            socket.curve_publickey = self._curve.public.encode("ascii")
            socket.curve_secretkey = self._curve.secret.encode("ascii")

    def start(self, attempt: int, addresses: Mapping[int, str], keys: Mapping[int, str] | None = None) -> None:
        """As Transport.start; `keys` are the peers' public CURVE keys by slot. Raises InvalidConfigError on an address beyond
        loopback without keys."""
        self._disconnect()
        early = self._fence.start(attempt)
        self._encoder, self._decoder = FrameEncoder(), FrameDecoder()
        self._own.clear()
        self._own.extend(early)
        self._lost.clear()
        self._peer_keys.allowed = frozenset((keys or {}).values())
        for slot, address in sorted(addresses.items()):
            if slot != self._slot:
                self._connect(slot, address, (keys or {}).get(slot))

    def _connect(self, slot: int, address: str, key: str | None) -> None:
        if self._curve is not None and key is None:
            raise InvalidConfigError(f"the CURVE key of slot {slot} is unknown", slot=slot)
        if self._curve is None and not is_loopback(_host(address)):
            raise InvalidConfigError(f"{address} of slot {slot} is beyond loopback and needs CURVE keys", slot=slot)
        push = self._context.socket(zmq.PUSH)
        self._configure(push)
        push.setsockopt(zmq.RECONNECT_IVL, -1)
        if key is not None:
            push.curve_serverkey = key.encode("ascii")
        monitor = push.get_monitor_socket(LOST_EVENTS)
        self._pushes[slot] = push
        self._monitors[monitor] = slot
        self._poller.register(monitor, zmq.POLLIN)
        push.connect(address)

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
            push.send_multipart(self._encoder.encode(frame), flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._lose(slot, "not connected", self._own)

    def poll(self, timeout_ms: int) -> list[Received]:
        received: list[Received] = []
        events = dict(self._poller.poll(0 if self._own else max(0, timeout_ms)))
        if self._wake_read in events:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        # Own frames first, then the network's, then losses: what a peer sent before it died is taken before its loss is told.
        own, self._own = self._own, deque()
        received += (item for item in own if isinstance(item, PeerLost) or self._fence.admits(item))
        if self._pull in events:
            self._receive(received)
        for monitor in [socket for socket in events if socket in self._monitors]:
            self._look(monitor, received)
        return received

    def _receive(self, received: list[Received]) -> None:
        for _ in range(MESSAGES_PER_POLL_MAX):
            try:
                parts = self._pull.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            attempt = decode_header(parts).attempt
            if attempt < self._fence.attempt:
                continue
            # Only credit can come early, and credit needs no memory of the channel.
            frame = (self._decoder if attempt == self._fence.attempt else FrameDecoder()).decode(parts)
            if self._fence.admits(frame):
                received.append(frame)

    def _look(self, monitor: zmq.Socket[bytes], received: list[Received]) -> None:
        """Read a monitor; any event that it was asked for means the peer is gone."""
        event = zmq.Event(parse_monitor_message(monitor.recv_multipart())["event"])
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
        # A full pipe wakes as well as a fuller one; a closed one has nobody waiting.
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"\0")

    def stop(self) -> None:
        self._fence.stop()
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
        self._peer_keys.closed = True
        self._pull.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)


def is_loopback(host: str) -> bool:
    """True for an address that only this machine can reach. A name is not looked up: it counts only if it is `localhost`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host(address: str) -> str:
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
