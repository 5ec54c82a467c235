"""SHELL: what stands in front of HTTP on a port with TLS: the handshake, within the connection budget.

asyncio's own TLS servers tell of a connection once its handshake is over: until then none would be counted, and each could take
a minute. Here a connection counts from the accept on, and its handshake is part of its first head. A caller without TLS is told so,
in the clear: else it would see a connection that breaks."""

from __future__ import annotations

import asyncio
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from ssl import SSLContext
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.utils import get_remote_addr
from uvicorn.server import ServerState

from holdfast.api.errors import encode_error
from holdfast.api.http.protocol import ConnectionGuard, GuardedProtocol
from holdfast.statebackends.errors import TransportSecurityError

SHUTDOWN_S = 30
"""Seconds that a closing side waits for the other one to read what is left, and for its goodbye."""

_HANDSHAKE = 0x16
"""First byte of a TLS connection; no HTTP request begins so."""


class TlsDoor(asyncio.Protocol):
    """One connection, until its first byte says what it speaks."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        guard: ConnectionGuard,
        context: Callable[[], SSLContext],
    ) -> None:
        """`context`: TLS as it is now."""
        self.loop = _loop or asyncio.get_event_loop()
        self._guard = guard
        self._context = context
        self._inner = GuardedProtocol(config, server_state, app_state, _loop, guard=guard)
        self._number = 0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        address = get_remote_addr(self.transport)
        self._number = self._guard.accept(self, address[0] if address else "")

    def data_received(self, data: bytes) -> None:
        if data[0] == _HANDSHAKE:
            self._shake_hands(data)
        else:
            self.transport.write(_PLAIN)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.forget(self._number, self.loop)

    def _shake_hands(self, data: bytes) -> None:
        """The budget's deadline for heads is that of the handshake, too, so that asyncio's own never comes first."""
        ended = self.loop.create_future()
        ended.add_done_callback(self._end_handshake)
        self._inner.number = self._number
        self._inner.below = self.transport
        late_s = 1 + 2 * self._guard.limits.head_timeout_ms // 1000
        tls = SSLProtocol(
            self.loop,
            self._inner,
            self._context(),
            ended,
            server_side=True,
            ssl_handshake_timeout=late_s,
            ssl_shutdown_timeout=SHUTDOWN_S,
        )
        self.transport.set_protocol(tls)
        tls.connection_made(self.transport)
        while data:  # its buffer may be smaller than what came
            room = tls.get_buffer(len(data))
            size = min(len(room), len(data))
            room[:size] = data[:size]
            tls.buffer_updated(size)
            data = data[size:]

    def _end_handshake(self, ended: asyncio.Future[None]) -> None:
        """Whoever was not made known to HTTP is not missed by it: this side forgets it."""
        if ended.cancelled() or ended.exception() is not None or not self._inner.is_made:
            self._guard.forget(self._number, self.loop)


def _plain_answer() -> bytes:
    text = "this port speaks TLS: the coordinator's URL begins with https://"
    wire = encode_error(TransportSecurityError(text, reason="plain_http"))
    headers = {
        **wire.headers,
        "Content-Length": str(len(wire.body)),
        "Upgrade": "TLS/1.2, HTTP/1.1",
        "Connection": "Upgrade, close",
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {wire.status} Upgrade Required\r\n{head}\r\n".encode() + wire.body


_PLAIN = _plain_answer()
