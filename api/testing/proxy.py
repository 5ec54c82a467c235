"""A TCP proxy in front of a server, which cuts what goes through it at a chosen chunk.

A chunk is what one read of a socket gives. All connections of a proxy count together, each direction for itself and both in one: a
test that runs once without a cut learns how many there are, and then cuts at each. How bytes fall into chunks depends on timing,
so the last ones may not come in a later run: `was_cut` says whether a cut took place.

One thread does all of it, by asyncio. With a thread for each direction a connection can't be broken: `close()` of a socket that
another thread reads sends nothing (`shutdown` does, but no reset)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")
HOST = "127.0.0.1"
CALL_TIMEOUT_S = 30.0
CHUNK_BYTES_MAX = 256 << 10
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)


class Direction(StrEnum):
    TO_SERVER = "to_server"
    TO_CLIENT = "to_client"
    EITHER = "either"


class Break(StrEnum):
    RESET = "reset"
    """Both sides get a reset; bytes that they had not read are lost."""
    SHUTDOWN = "shutdown"
    """Both sides get an end, behind all that was sent before."""
    SWALLOW = "swallow"
    """The connection stays, and nothing more goes through it, in either direction: sides wait for their own timeouts."""


@dataclass(frozen=True)
class Cut:
    """At the chunk of a number, from 1 on. `delivered`: it still arrives, so what it asked for is done, and the answer is lost."""

    chunk: int
    direction: Direction = Direction.EITHER
    how: Break = Break.RESET
    delivered: bool = False
    silence_s: float | None = None
    """Of SWALLOW: so long neither side hears anything; then the client's gets a reset, and the server's after as long again: a
    server that has not found out yet holds what its client had asked for. None: neither does."""


@dataclass(eq=False)
class _Pipe:
    """A connection of a client, and its own to the server."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    passes: bool = True
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    whole: asyncio.Task[None] | None = None
    """Ends behind both."""

    def break_off(self, how: Break) -> None:
        self.passes = False
        if how is Break.SWALLOW:
            return
        for writer in (self.client, self.server):
            if how is Break.RESET:
                _reset(writer)
            else:
                writer.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    sock: socket.socket = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
    writer.transport.abort()


class Proxy:
    """A context manager, and callable from any thread. `target_port` may be set later, for connections that come then."""

    def __init__(self, target_port: int = 0) -> None:
        self.target_port = target_port
        self.port = 0
        self.was_cut = False
        self._chunks = {Direction.TO_SERVER: 0, Direction.TO_CLIENT: 0}
        self._cut: Cut | None = None
        self._refuses = False
        self._pipes: set[_Pipe] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._passing: asyncio.Event | None = None
        self._listener: asyncio.Server | None = None

    # --------------------------------------------------------------------------------------------------------------- what it does

    def cut(self, cut: Cut | None) -> None:
        """Counts from here; None: no cut. Connections that were cut before stay as they are."""
        self._call(lambda: self._plan(cut))

    def heal(self) -> None:
        """No cut, new connections are taken, nothing is held; connections that swallow are reset, as their sides found out."""
        self._call(self._heal)

    def break_all(self, how: Break = Break.RESET) -> None:
        """All connections that there are."""

        def act() -> None:
            for pipe in list(self._pipes):
                pipe.break_off(how)

        self._call(act)

    def refuse(self) -> None:
        """Connections that come from now on are reset, as if no server were there."""
        self._call(lambda: setattr(self, "_refuses", True))

    def hold(self) -> None:
        """Nothing goes through until `release`; then all does that was held."""
        self._call(lambda: self._event().clear())

    def release(self) -> None:
        self._call(lambda: self._event().set())

    def chunks(self, direction: Direction = Direction.EITHER) -> int:
        """So many since the last `cut`."""
        return self._call(lambda: self._count(direction))

    def connections(self) -> int:
        """Open ones, those that swallow among them."""
        return self._call(lambda: len(self._pipes))

    # ------------------------------------------------------------------------------------------------------- a context manager

    def __enter__(self) -> Self:
        self._thread.start()
        self.port = self._await(self._listen())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._await(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # --------------------------------------------------------------------------------------------------------- on the loop's thread

    def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_TIMEOUT_S)

    def _call(self, act: Callable[[], T]) -> T:
        async def call() -> T:
            return act()

        return self._await(call())

    def _event(self) -> asyncio.Event:
        assert self._passing is not None
        return self._passing

    async def _listen(self) -> int:
        self._passing = asyncio.Event()
        self._passing.set()
        self._listener = await asyncio.start_server(self._connected, HOST, 0, limit=CHUNK_BYTES_MAX)
        return int(self._listener.sockets[0].getsockname()[1])

    async def _end(self) -> None:
        assert self._listener is not None
        self._listener.close()
        tasks = [task for pipe in self._pipes for task in pipe.tasks]
        wholes = [pipe.whole for pipe in self._pipes if pipe.whole is not None]
        for pipe in list(self._pipes):
            pipe.break_off(Break.RESET)
        self._event().set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *wholes, return_exceptions=True)
        self._pipes.clear()

    def _plan(self, cut: Cut | None) -> None:
        self._cut, self.was_cut = cut, False
        self._chunks = dict.fromkeys(self._chunks, 0)

    def _heal(self) -> None:
        self._cut, self._refuses = None, False
        for pipe in [pipe for pipe in self._pipes if not pipe.passes]:
            pipe.break_off(Break.RESET)
        self._event().set()

    def _count(self, direction: Direction) -> int:
        return sum(self._chunks.values()) if direction is Direction.EITHER else self._chunks[direction]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._refuses:
                raise ConnectionRefusedError
            far_reader, far_writer = await asyncio.open_connection(HOST, self.target_port, limit=CHUNK_BYTES_MAX)
        except OSError:
            _Pipe(writer, writer).break_off(Break.RESET)
            return
        for each in (writer, far_writer):
            each.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pipe = _Pipe(writer, far_writer, whole=asyncio.current_task())
        self._pipes.add(pipe)
        pipe.tasks = [
            asyncio.create_task(self._pass(pipe, reader, far_writer, Direction.TO_SERVER)),
            asyncio.create_task(self._pass(pipe, far_reader, writer, Direction.TO_CLIENT)),
        ]
        await asyncio.gather(*pipe.tasks, return_exceptions=True)
        for each in (writer, far_writer):
            each.close()
            with contextlib.suppress(OSError):
                await each.wait_closed()  # what was written before a shutdown still goes out
        self._pipes.discard(pipe)

    async def _pass(self, pipe: _Pipe, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction) -> None:
        """A side that ends ends the other, once it has got what was sent; a side that is swallowed is read, and ends nothing."""
        with contextlib.suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES_MAX):
                await self._event().wait()
                if pipe.passes and self._goes_on(pipe, writer, chunk, direction):
                    writer.write(chunk)
                    await writer.drain()
        if pipe.passes:
            pipe.break_off(Break.SHUTDOWN)

    def _goes_on(self, pipe: _Pipe, writer: asyncio.StreamWriter, chunk: bytes, direction: Direction) -> bool:
        self._chunks[direction] += 1
        cut = self._cut
        if cut is None or self.was_cut or cut.direction not in (direction, Direction.EITHER):
            return True
        if self._count(cut.direction) != cut.chunk:
            return True
        self.was_cut = True
        if cut.delivered:
            writer.write(chunk)  # at once, as nothing waits before it
        pipe.break_off(cut.how)
        if cut.how is Break.SWALLOW and cut.silence_s is not None:
            self._loop.call_later(cut.silence_s, _reset, pipe.client)
            self._loop.call_later(2 * cut.silence_s, _reset, pipe.server)
        return False
