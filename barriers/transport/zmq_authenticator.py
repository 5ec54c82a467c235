"""SHELL: answers ZeroMQ's authentication requests (ZAP, RFC 27) on a thread of its own; authentication.py decides the answers.

pyzmq's own authenticator answers one request after the other: a peer that is not known yet would keep all others waiting. This one
holds each request on its own."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from typing import Any

import zmq
from zmq.utils.z85 import encode as z85_encode

from holdfast.barriers.transport.authentication import HELD_TIMEOUT_MS, Handshake, HandshakeAnswer, PeerAuthentication

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
_FIELDS = 7
"""Of a request: version, id, domain, address, routing id, mechanism, credentials."""


class ZmqAuthenticator:
    """Serves all sockets of a context, which must be made after it. `allow` from any thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, held_timeout_ms: int = HELD_TIMEOUT_MS) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(ZAP_ADDRESS)
        self._core = PeerAuthentication(held_timeout_ms=held_timeout_ms)
        self._tickets: dict[int, tuple[list[bytes], bytes]] = {}
        """Ticket -> (envelope, request id)."""
        self._asked = 0
        self._allowed: deque[tuple[frozenset[str], str]] = deque()
        """Taken by the thread, in order."""
        self._closed = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run, name="holdfast-data-door", daemon=True)
        self._thread.start()

    def allow(self, keys: frozenset[str], secret: str) -> None:
        """Let in these peers, and no others, from now on."""
        self._allowed.append((keys, secret))
        self._wake()

    def close(self) -> None:
        """End the thread; no peer is let in any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._wake()
        self._thread.join()
        self._socket.close(linger=0)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        while not self._closed:
            deadline_ms = self._core.next_deadline_ms()
            events = dict(poller.poll(None if deadline_ms is None else max(0, deadline_ms - _now_ms())))
            if self._wake_read in events:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            while self._allowed:
                self._answer(self._core.allow(*self._allowed.popleft()))
            if self._socket in events:
                self._take(self._socket.recv_multipart())
            self._answer(self._core.expire(now_ms=_now_ms()))

    def _take(self, message: list[bytes]) -> None:
        envelope, request = message[:2], message[2:]
        if len(request) < _FIELDS - 1 or request[0] != ZAP_VERSION:
            return  # libzmq itself asks, and waits for no answer
        self._asked += 1
        self._tickets[self._asked] = (envelope, request[1])
        handshake = _handshake(self._asked, request[5], request[6:])
        if handshake is None:
            self._answer([HandshakeAnswer(self._asked, "", let_in=False)])
        else:
            self._answer(self._core.ask(handshake, now_ms=_now_ms()))

    def _answer(self, answers: list[HandshakeAnswer]) -> None:
        for each in answers:
            envelope, request_id = self._tickets.pop(each.ticket)
            verdict = [b"200", b"OK", each.identity.encode()] if each.let_in else [b"400", b"no peer of this attempt", b""]
            self._socket.send_multipart([*envelope, ZAP_VERSION, request_id, *verdict, b""])


def _handshake(ticket: int, mechanism: bytes, credentials: list[bytes]) -> Handshake | None:
    """None for what these sockets do not speak."""
    match mechanism, credentials:
        case b"CURVE", [key] if len(key) == 32:
            return Handshake(ticket, _text(z85_encode(key)))
        case b"PLAIN", [key, secret]:
            return Handshake(ticket, _text(key), secret)
        case _:
            return None


def _text(key: Any) -> str:
    return bytes(key).decode("ascii", "replace")


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
