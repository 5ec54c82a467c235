"""The control plane in virtual time: requests of workers to a coordinator, as bytes. Command streams back: commandstream.py.

It stands for HTTP: a request is answered, or refused because nobody listens, or times out. Messages travel encoded by the
product's codec, so that what one process keeps is never what another one changes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from api.errors import ConnectionLostError
from barriers import codec
from barriers.messages import RegisterWorker, StatusBatch, SubtaskStatus
from chaos.injector import Injector
from chaos.observations import Answered, Observation, Requested
from chaos.processes import Kernel, Process
from coordinator.subscription import Subscription
from operators.leader_retrieval import Target, next_target
from statebackends.errors import HoldfastError, NotFoundError, NotLeaderError

WAY_US = (100, 1_500)
"""Least and most time of a message one way."""
ANSWER_TIMEOUT_US = 10_000_000
"""How long a request waits for its answer, as in operators.control_client."""

Reply = Callable[[Any], None]
"""Takes the answer, or the HoldfastError that came instead."""


class Endpoint(Protocol):
    """A coordinator process, as the network sees it."""

    process: Process
    url: str

    def serve(self, request: str, job_id: str, body: Any) -> Future[Any]:
        """Answer a request; the Future has the answer or a HoldfastError."""

    def subscribe(self, job_id: str, slot: int, session: str, after: int) -> tuple[Subscription, Future[Any]]:
        """Open a command stream. Raises HoldfastError."""

    def leader_unreachable(self, job_id: str, epoch: int) -> None:
        """A client of a job was sent to the leader of that epoch in vain."""


class OpenStream(Protocol):
    """One open command stream."""

    def is_of(self, process: Process) -> bool: ...

    def break_off(self, unnoticed_us: int) -> None: ...

    def process_gone(self, process: Process) -> None: ...


class Call(msgspec.Struct, frozen=True):
    """Who asks for what."""

    sender: Process
    request: str
    job_id: str
    slot: int = -1
    """Slot of a worker; -1 for a driver."""


class ControlNetwork:
    """Who listens where, and what happens on the way."""

    def __init__(self, kernel: Kernel, injector: Injector, observe: Callable[[Observation], None]) -> None:
        self.kernel = kernel
        self.injector = injector
        self.observe = observe
        self.random = kernel.streams.of("control network")
        self.address = ""
        """The URL in the state directory: where a client that looks it up goes."""
        self._listening: dict[str, Endpoint] = {}
        self.streams: list[OpenStream] = []

    def announce(self, endpoint: Endpoint) -> None:
        """A coordinator listens, and leaves its address in the state directory."""
        self._listening[endpoint.url] = endpoint
        self.address = endpoint.url

    def at(self, url: str) -> Endpoint | None:
        """Whoever began to listen there, dead or not."""
        return self._listening.get(url)

    @property
    def leader(self) -> Endpoint | None:
        """Where clients are sent."""
        return self.at(self.address)

    def next_target(self, target: Target, error: HoldfastError) -> Target:
        """Where a client asks that got an error, or lost the connection."""
        answered = None if isinstance(error, ConnectionLostError) else error
        return next_target(target, answered, lambda: self.address)

    def way_us(self) -> int:
        return self.random.between(*WAY_US)

    def process_gone(self, process: Process) -> None:
        """Its sockets are closed: who is at their other ends learns of it."""
        for stream in list(self.streams):
            stream.process_gone(process)

    def break_streams(self, process: Process, unnoticed_us: int) -> bool:
        """The command stream of a worker breaks; its coordinator finds out later. False if it had none."""
        streams = [stream for stream in self.streams if stream.is_of(process)]
        for stream in streams:
            stream.break_off(unnoticed_us)
        return bool(streams)

    def ask(self, call: Call, target: Target, body: Any, kind: Any, reply: Reply) -> None:
        """Send a request; `reply` is called once, as the sender: with the answer (of type `kind`) or an error."""
        endpoint = self.at(target.url)
        exchange = _Exchange(self, call, target.unreachable_epoch, kind, reply)
        sender, request, slot = call.sender, call.request, call.slot
        if endpoint is None or not endpoint.process.alive:
            self.kernel.after(self.way_us(), lambda: exchange.end(unreachable("connection refused")), sender)
            return
        self.observe(Requested(self.kernel.now_ms, sender.name, request, body))
        content = codec.encode(body)
        fate = self.injector.message(request, slot)
        said = "" if self.kernel.opaque else f" {zlib.crc32(_without_tracebacks(body, content)):08x}"
        self.kernel.trace.add(sender.name, f"asks {request}", f"{endpoint.process.name}{said}{' lost' if fate.lost else ''}")
        self.kernel.after(ANSWER_TIMEOUT_US, lambda: exchange.end(unreachable("no answer in time")), sender)
        if fate.lost:
            return
        for _ in range(fate.copies):
            delay_us = self.way_us() + fate.delay_us
            self.kernel.after(delay_us, lambda: exchange.arrive(endpoint, content, type(body)))


def _without_tracebacks(body: Any, content: bytes) -> bytes:
    """What a request says, but for the folders that the code lies in: the same on every machine."""
    statuses: tuple[SubtaskStatus, ...] = body.subtasks if isinstance(body, StatusBatch | RegisterWorker) else ()
    if not any(status.traceback for status in statuses):
        return content
    bare = tuple(msgspec.structs.replace(status, traceback="") for status in statuses)
    return codec.encode(msgspec.structs.replace(body, subtasks=bare))


class JobClient:
    """Asks about one job, as api.client.RestClient: at once again where it is sent, else where the address says."""

    def __init__(self, network: ControlNetwork) -> None:
        self._network = network
        self._target: Target | None = None

    def ask(self, call: Call, body: Any, kind: Any, reply: Reply) -> None:
        """As ControlNetwork.ask."""
        target = self._target
        if target is None or not target.url:  # there was no coordinator yet
            target = Target(self._network.address)

        def replied(answer: Any) -> None:
            if isinstance(answer, NotLeaderError | ConnectionLostError | NotFoundError):
                self._target = self._network.next_target(target, answer)
                if self._target.epoch > target.epoch:
                    self.ask(call, body, kind, reply)
                    return
            reply(answer)

        self._network.ask(call, target, body, kind, replied)


class _Exchange:
    """One request and its answer."""

    __slots__ = ("_call", "_ended", "_kind", "_network", "_reply", "_unreachable_epoch")

    def __init__(self, network: ControlNetwork, call: Call, unreachable_epoch: int, kind: Any, reply: Reply) -> None:
        self._network = network
        self._call = call
        self._unreachable_epoch = unreachable_epoch
        self._kind = kind
        self._reply = reply
        self._ended = False

    def arrive(self, endpoint: Endpoint, content: bytes, kind: Any) -> None:
        """At the coordinator's machine."""
        kernel = self._network.kernel
        if not endpoint.process.alive:
            kernel.after(self._network.way_us(), lambda: self.end(unreachable("connection reset")), self._call.sender)
            return

        def serve() -> None:
            self._network.injector.point(f"coordinator.receive.{self._call.request}", endpoint.process)
            if not endpoint.process.alive:
                return
            body = codec.decode(content, kind)
            future = endpoint.serve(self._call.request, self._call.job_id, body)
            future.add_done_callback(lambda done: self._answer(endpoint, body, done))

        kernel.run_as(endpoint.process, serve)

    def _answer(self, endpoint: Endpoint, body: Any, future: Future[Any]) -> None:
        """The coordinator has an answer; it may die, or the network lose it, before it is there."""
        error = future.exception()
        if error is not None and not isinstance(error, HoldfastError):
            raise error
        if isinstance(error, NotLeaderError) and self._unreachable_epoch:  # as api.app
            endpoint.leader_unreachable(self._call.job_id, self._unreachable_epoch)
        value = error if error is not None else future.result()
        answer = error if error is not None else codec.encode(value)
        injector, kernel = self._network.injector, self._network.kernel
        injector.point(f"coordinator.answer.{self._call.request}", endpoint.process)
        now_ms, call = kernel.now_ms, self._call
        self._network.observe(Answered(now_ms, endpoint.process.name, call.sender.name, call.request, value, body))
        fate = injector.message(f"answer:{self._call.request}", self._call.slot)
        if error is not None:
            self._network.kernel.trace.add(endpoint.process.name, f"refuses {call.request}", f"{call.sender.name}: {error}")
        if fate.lost or not endpoint.process.alive:
            return

        def deliver() -> None:
            if isinstance(answer, bytes):
                self.end(None if self._kind is None else codec.decode(answer, self._kind))
            else:
                self.end(answer)

        kernel.after(self._network.way_us() + fate.delay_us, deliver, self._call.sender)

    def end(self, answer: Any) -> None:
        """The sender has an answer, or gave up; what comes later is not heard."""
        if not self._ended:
            self._ended = True
            self._reply(answer)


def unreachable(reason: str) -> HoldfastError:
    return ConnectionLostError(f"the coordinator can't be reached: {reason}")
