"""SHELL: a transport that sends the parts of an answer together: a head and its body are one send, and one TLS record, not two."""

from __future__ import annotations

import asyncio
from typing import Any

JOINED_BYTES_MAX = 16 * 1024
"""Bytes that are kept, at most: more is handed on at once, so that backpressure is seen."""


WAIT_S = 0.001
"""Seconds that a head waits for its body, at most; a stream's may be long in coming. Not until the loop's next turn, which would
cost as much as a second send; an answer that is complete is sent at once."""


class JoinedTransport(asyncio.Transport):
    """In front of a transport; all of it runs on the loop."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes | bytearray | memoryview] = []
        self._size = 0
        self._waiting: asyncio.TimerHandle | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not data:
            return
        if not self._parts:
            self._waiting = self._loop.call_later(WAIT_S, self.flush)
        self._parts.append(data)
        self._size += len(data)
        if self._size > JOINED_BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        """Hand on what was written. Idempotent."""
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        if self._parts:
            parts, self._parts, self._size = self._parts, [], 0
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def can_write_eof(self) -> bool:
        return self._transport.can_write_eof()

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._parts, self._size = [], 0
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_write_buffer_size(self) -> int:
        return self._size + self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def is_reading(self) -> bool:
        return self._transport.is_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._transport.get_protocol()
