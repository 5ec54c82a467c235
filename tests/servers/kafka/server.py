"""The process: a broker behind sockets. `python -m tests.servers.kafka.server FOLDER SETTINGS` reads commands from its standard
input, a JSON object a line, and answers each with one; it ends when its standard input does, so it can't outlive the test that
started it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import json
import os
import signal
import socket
import struct
import sys
import traceback
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from tests.servers.kafka.apis import APIS, BEFORE_LOGIN, Api, unsupported_version
from tests.servers.kafka.broker import Broker, Settings
from tests.servers.kafka.errors import Code
from tests.servers.kafka.faults import Fault, Faults, Harm
from tests.servers.kafka.messages import Caller

FRAME_BYTES_MAX = 256 << 20
REQUESTS_KEPT = 100_000
_API_VERSIONS = 18
_HEAD = struct.Struct(">hhih")
"""Key, version and correlation id of a request, and the length of its client's id."""


class Launch(msgspec.Struct):
    """`proxied_port`: its clients are told `advertised_port`, that of a proxy in front of it."""

    port: int
    proxied_port: int
    advertised_port: int = 0
    settings: dict[str, Any] = {}


class Server:
    def __init__(self, folder: Path, launch: Launch) -> None:
        self.broker = Broker(folder, Settings(**launch.settings))
        self.advertised_port = launch.advertised_port
        self.faults = Faults()
        self.requests: deque[tuple[str, str]] = deque(maxlen=REQUESTS_KEPT)
        """(name, client id) of those that came since the last question for them."""
        self._released = asyncio.Event()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # -------------------------------------------------------------------------------------------------------------- connections

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, proxied: bool, port: int) -> None:
        advertised_port = self.advertised_port if proxied and self.advertised_port else port
        caller = Caller("", 0, ("127.0.0.1", advertised_port))
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                if not 0 < size <= FRAME_BYTES_MAX:
                    break
                if not await self._serve_one(await reader.readexactly(size), caller, writer):
                    break
        writer.transport.abort()

    async def _serve_one(self, frame: bytes, caller: Caller, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on."""
        key, version, correlation_id, length = _HEAD.unpack_from(frame)
        position = _HEAD.size + max(length, 0)
        caller.client_id = frame[_HEAD.size : position].decode()
        api = APIS.get(key)
        if api is None or not api.version_min <= version <= api.version_max:
            if key != _API_VERSIONS:
                print(f"refused: request {key} version {version} of {caller.client_id}", file=sys.stderr, flush=True)
                return False
            body = unsupported_version()
            writer.write(struct.pack(">ii", 4 + len(body), correlation_id) + body)
            return True
        if self.broker.settings.users and not caller.user and api.name not in BEFORE_LOGIN:
            return False
        self.requests.append((api.name, caller.client_id))
        fault = self.faults.meet(api.name, caller.client_id)
        if fault is not None and fault.before and not await self._harm(fault):
            return False
        caller.version = version
        refusal = fault.code if fault is not None and fault.harm is Harm.REFUSE else Code.NONE
        answer = await self._handle(api, frame, position, caller, correlation_id, refusal)
        if fault is not None and not fault.before and not await self._harm(fault):
            return False
        if answer is not None:
            writer.write(answer)
            self._finish()
            await writer.drain()
        return True

    async def _handle(
        self, api: Api, frame: bytes, position: int, caller: Caller, correlation_id: int, refusal: Code
    ) -> bytes | None:
        """The answer as it goes out, None for none."""
        request = None
        try:
            request = _decode(api, frame, position, caller.version)
            self.broker.refusal = refusal  # an answer that waits looks at it before it does
            answer = api.handler(self.broker, request, caller)
            answer = await answer if inspect.isawaitable(answer) else answer
            if answer is None:
                return None
            answer.API_VERSION = caller.version
            answer.with_header(correlation_id)
            encoded: bytes = answer.encode(header=True, framed=True)
            return encoded
        except Exception:  # a mistake of this server, never of a client: the log shows it
            print(f"at {api.name} version {caller.version}: {request}"[:2000], file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
            raise ConnectionError("a mistake of the server") from None
        finally:
            self.broker.refusal = Code.NONE

    def _finish(self) -> None:
        """Markers are written once the answer is: a producer may learn that it has committed before readers see it."""
        self.broker.write_markers()
        self._wake.set()

    async def _harm(self, fault: Fault) -> bool:
        """Whether the request goes on."""
        match fault.harm:
            case Harm.CLOSE:
                self._finish()
                return False
            case Harm.DROP:
                self._finish()
                await asyncio.Event().wait()
                return False
            case Harm.DELAY:
                await asyncio.sleep(fault.delay_ms / 1000)
            case Harm.HOLD:
                await self._released.wait()
            case Harm.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Harm.REFUSE:
                pass  # the handler does
        return True

    async def keep_time(self) -> None:
        while True:
            deadline = self.broker.next_deadline_ms()
            self._wake.clear()
            left_s = None if deadline is None else max(0.0, (deadline - self.broker.now_ms()) / 1000)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), left_s)
            deadline = self.broker.next_deadline_ms()
            if deadline is not None and deadline <= self.broker.now_ms():
                self.broker.expire()

    # ----------------------------------------------------------------------------------------------------------------- commands

    def obey(self, command: dict[str, Any]) -> Any:
        match command["do"]:
            case "plan":
                self.faults.plan(map(Fault.from_json, command["faults"]))
            case "heal":
                self.faults.clear()
            case "release":
                self._released.set()
                self._released = asyncio.Event()
            case "requests":
                requests = list(self.requests)
                self.requests.clear()
                return requests
            case "advance":
                self.broker.advance(command["ms"])
                self._wake.set()
            case "hold_markers":
                self.broker.holds_markers = command["held"]
                self.broker.write_markers()
            case "compact":
                for log in self.broker.topic(command["topic"]).partitions:
                    log.compact()
            case "deny":
                self.broker.denied = set(command["topics"])
            case "advertise":
                self.advertised_port = command["port"]
            case "transactions":
                return {name: each.to_json() for name, each in self.broker.transactions.transactions.items()}
            case other:
                raise ValueError(f"no command {other!r}")
        return None


def _decode(api: Api, frame: bytes, position: int, version: int) -> Any:
    """The body, behind the header's tagged fields where the version has some."""
    if api.request.flexible_version_q(version):
        tags = io.BytesIO(frame[position : position + 1])
        if tags.read(1) != b"\0":
            raise ConnectionError("tagged fields in a request's header")  # no client sends any
        position += 1
    return api.request.decode(memoryview(frame)[position:], version=version)


async def _commands(server: Server) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        try:
            answer = {"value": server.obey(json.loads(line))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


async def run(folder: Path, launch: Launch) -> None:
    server = Server(folder, launch)
    listeners = []
    for port, proxied in ((launch.port, False), (launch.proxied_port, True)):

        async def connected(reader: Any, writer: Any, proxied: bool = proxied, port: int = port) -> None:
            await server.serve(reader, writer, proxied=proxied, port=port)

        listeners.append(await asyncio.start_server(connected, "127.0.0.1", port, limit=4 << 20, reuse_address=True))
    keeping = asyncio.create_task(server.keep_time())
    print(json.dumps({"value": "ready"}), flush=True)
    await _commands(server)
    keeping.cancel()
    os._exit(0)  # connections that are silent on purpose would be waited for


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    asyncio.run(run(Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Launch)))
