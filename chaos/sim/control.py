"""The control plane in virtual time: requests to a coordinator, and the command streams back to its workers.

It stands for HTTP: a request is answered, refused because no process listens, or times out; a command stream is a response without
an end.
Messages travel encoded by the product's codec, so that no process can change what another one holds."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from holdfast.api.errors import ConnectionLostError
from holdfast.barriers import codec
from holdfast.barriers.messages import (
    AlignWatermarks,
    CancelTasks,
    Deploy,
    FinishTasks,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    NumberedCommand,
    RegisterWorker,
    ShutdownWorker,
    StatusBatch,
    SubtaskStatus,
    TriggerCheckpoint,
    WorkerCommand,
)
from holdfast.chaos.checkers.observations import Answered, Commanded, Observation, Requested
from holdfast.chaos.sim.injector import Injector
from holdfast.chaos.sim.kernel import Kernel, Process
from holdfast.coordinator.dispatcher.command_stream import Subscription
from holdfast.operators.worker.leader_retrieval import Target, next_target
from holdfast.statebackends.errors import HoldfastError, NotFoundError, NotLeaderError

WAY_US = (100, 1_500)
"""Least and most time of a message one way."""
ANSWER_TIMEOUT_US = 10_000_000
"""How long a request waits for its answer, as in holdfast.operators.worker.gateway."""

Reply = Callable[[Any], None]
"""Receives the answer, or the HoldfastError in its place."""


class Endpoint(Protocol):
    """A coordinator process, as clients reach it."""

    process: Process
    url: str

    def serve(self, request: str, job_id: str, body: Any) -> Future[Any]:
        """Answer a request: a Future of the answer or of a HoldfastError."""

    def subscribe(self, job_id: str, slot: int, session: str, after: int) -> tuple[Subscription, Future[Any]]:
        """Open a command stream. Raises HoldfastError."""

    def leader_unreachable(self, job_id: str, epoch: int) -> None:
        """A client of a job did not reach the leader of that epoch."""


class OpenStream(Protocol):
    """One open command stream."""

    def is_of(self, process: Process) -> bool: ...

    def break_off(self, unnoticed_us: int) -> None: ...

    def process_gone(self, process: Process) -> None: ...


class Call(msgspec.Struct, frozen=True):
    """The sender and the content of a request."""

    sender: Process
    request: str
    job_id: str
    slot: int = -1
    """Slot of a worker; -1 for a driver."""


class ControlNetwork:
    """Addresses of the coordinators, and the fate of each message."""

    def __init__(self, kernel: Kernel, injector: Injector, observe: Callable[[Observation], None]) -> None:
        self.kernel = kernel
        self.injector = injector
        self.observe = observe
        self.random = kernel.streams.of("control network")
        self.address = ""
        """URL in the state directory, which clients look up."""
        self._listening: dict[str, Endpoint] = {}
        self.streams: list[OpenStream] = []

    def announce(self, endpoint: Endpoint) -> None:
        """A coordinator listens, and writes its address to the state directory."""
        self._listening[endpoint.url] = endpoint
        self.address = endpoint.url

    def listen(self, endpoint: Endpoint) -> None:
        """A coordinator listens; its address is not in the state directory."""
        self._listening[endpoint.url] = endpoint

    def at(self, url: str) -> Endpoint | None:
        """The process that listens at an address, dead or alive; None if none ever did."""
        return self._listening.get(url)

    @property
    def leader(self) -> Endpoint | None:
        """Address at which clients look for the leader."""
        return self.at(self.address)

    def next_target(self, target: Target, error: HoldfastError) -> Target:
        """Address that a client asks next, after an error or a lost connection."""
        answered = None if isinstance(error, ConnectionLostError) else error
        return next_target(target, answered, lambda: self.address)

    def way_us(self) -> int:
        return self.random.between(*WAY_US)

    def process_gone(self, process: Process) -> None:
        """Close the sockets of a dead process: their other ends notice."""
        for stream in list(self.streams):
            stream.process_gone(process)

    def break_streams(self, process: Process, unnoticed_us: int) -> bool:
        """Break a worker's command stream; its coordinator notices later. False if the worker had none."""
        streams = [stream for stream in self.streams if stream.is_of(process)]
        for stream in streams:
            stream.break_off(unnoticed_us)
        return bool(streams)

    def ask(self, call: Call, target: Target, body: Any, kind: Any, reply: Reply) -> None:
        """Send a request. `reply` is called once, as the sender, with the answer (of type `kind`) or an error."""
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
    """A request without the paths in its tracebacks, which differ between machines."""
    statuses: tuple[SubtaskStatus, ...] = body.subtasks if isinstance(body, StatusBatch | RegisterWorker) else ()
    if not any(status.traceback for status in statuses):
        return content
    bare = tuple(msgspec.structs.replace(status, traceback="") for status in statuses)
    return codec.encode(msgspec.structs.replace(body, subtasks=bare))


class JobClient:
    """Requests about one job, as holdfast.api.client.RestClient: again at once at the address of a redirect, else at the looked-up
    one."""

    def __init__(self, network: ControlNetwork) -> None:
        self._network = network
        self._target: Target | None = None

    def ask(self, call: Call, body: Any, kind: Any, reply: Reply) -> None:
        """As ControlNetwork.ask."""
        target = self._target
        if target is None or not target.url:  # no coordinator has listened yet
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
        """The request arrives at the coordinator's machine."""
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
        """Send the coordinator's answer back; the process may die, or the network lose it, on the way."""
        error = future.exception()
        if error is not None and not isinstance(error, HoldfastError):
            raise error
        if isinstance(error, NotLeaderError) and self._unreachable_epoch:  # as holdfast.api.server.app
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
        """The sender has an answer or gave up; later answers are dropped."""
        if not self._ended:
            self._ended = True
            self._reply(answer)


def unreachable(reason: str) -> HoldfastError:
    return ConnectionLostError(f"the coordinator can't be reached: {reason}")


KEEP_ALIVE_US = 2_000_000
"""Silence on a command stream after which a line without a command is sent, as in holdfast.api.routes.command_stream."""
SILENCE_US = 10_000_000
"""Silence on a command stream after which its reader gives it up, as in holdfast.operators.worker.gateway."""


class CommandStream:
    """One open command stream: lines in order, keep-alives, and an end that both sides notice.

    A fault may drop, repeat or move a line, as a proxy or a bug would; the session must notice."""

    def __init__(
        self, network: ControlNetwork, call: Call, heard: Callable[[NumberedCommand], None], ended: Callable[[Any], None]
    ) -> None:
        """`heard` receives each line, `ended` the reason of the end (None: closed), both as the reader."""
        self._network = network
        self._call = call
        self._heard = heard
        self._ended = ended
        self._endpoint: Endpoint | None = None
        self._subscription: Subscription | None = None
        self._session = ""
        self._open = True
        self._last_us = 0
        self._sent_us = 0
        self._heard_us = network.kernel.now_us

    def ask(self, target: Target, session: str, after: int) -> None:
        """Send the request that opens it."""
        network = self._network
        endpoint = network.at(target.url)
        self._endpoint, self._session = endpoint, session
        network.streams.append(self)
        self._watch_silence()
        if endpoint is None or not endpoint.process.alive:
            self._end_soon(unreachable("connection refused"))
            return
        fate = network.injector.message("stream", self._call.slot)
        if not fate.lost:
            network.kernel.after(network.way_us() + fate.delay_us, lambda: self._serve(after), endpoint.process)

    def close(self) -> None:
        """Close it from the reader's side."""
        if self._open:
            self._shut()
            self._leave()

    @property
    def is_open(self) -> bool:
        """Open at both ends, as far as the reader knows."""
        return self._open and self._subscription is not None

    def is_of(self, process: Process) -> bool:
        """Open, and read by this process."""
        return process is self._call.sender and self._subscription is not None

    def break_off(self, unnoticed_us: int) -> None:
        """Break the connection: the reader notices soon, the writer after that time."""
        kernel, subscription = self._network.kernel, self._subscription
        if not self._open or subscription is None or self._endpoint is None:
            return
        self._network.kernel.run_as(self._call.sender, lambda: self._end(unreachable("the stream broke")))
        kernel.after(unnoticed_us + self._network.way_us(), subscription.close, self._endpoint.process)

    def process_gone(self, process: Process) -> None:
        """A process at one end has died."""
        if self._open and self._endpoint is not None and process is self._endpoint.process:
            self._end_soon(unreachable("the stream broke"))
        elif self._open and process is self._call.sender:
            self.close()

    # ---------------------------------------------------------------------------------------------- at the coordinator

    def _serve(self, after: int) -> None:
        assert self._endpoint is not None
        self._network.injector.point("coordinator.receive.stream", self._endpoint.process)
        if not self._open or not self._endpoint.process.alive:
            return
        try:
            subscription, opened = self._endpoint.subscribe(self._call.job_id, self._call.slot, self._session, after)
        except HoldfastError as error:
            self._end_soon(error)
            return
        opened.add_done_callback(lambda done: self._opened(subscription, done))

    def _opened(self, subscription: Subscription, done: Future[Any]) -> None:
        error = done.exception()
        if error is not None:
            self._end_soon(error)
            return
        self._subscription = subscription
        self._network.kernel.trace.add(self._call.sender.name, "stream open", self._session[:4])
        if not self._open:
            self._leave()
            return
        subscription.add_listener(self._pump)
        self._keep_alive()

    def _pump(self) -> None:
        """Send waiting commands, or the end of the stream."""
        subscription = self._subscription
        assert subscription is not None
        assert self._endpoint is not None
        closed = subscription.closed
        for line in subscription.take():
            if not self._send(line):
                return
        if closed:
            self._end_soon(None)

    def _send(self, line: NumberedCommand) -> bool:
        """Send a line; False if the coordinator died meanwhile."""
        assert self._endpoint is not None
        network, process = self._network, self._endpoint.process
        kind = command_kind(line.command)
        network.kernel.trace.add(process.name, f"sends {kind}", f"slot {self._call.slot} {line.number} of {line.session[:4]}")
        if line.command is not None:
            network.injector.point(f"coordinator.send.{command_point(line.command)}", process)
            if not process.alive:
                return False
            network.observe(Commanded(network.kernel.now_ms, process.name, line.epoch, self._call.slot, line.command))
        fate = network.injector.message(kind, self._call.slot)
        self._sent_us = network.kernel.now_us
        if fate.lost:
            return True
        content = codec.encode(line)
        for copy in range(fate.copies):
            due_us = network.kernel.now_us + network.way_us() + fate.delay_us
            if fate.delay_us == 0 and copy == 0:
                due_us = self._last_us = max(self._last_us + 1, due_us)
            network.kernel.after(due_us - network.kernel.now_us, lambda: self._arrive(content), self._call.sender)
        return True

    def _keep_alive(self) -> None:
        """Send a line without a command after each silent interval, so that a reader that missed the last command notices."""
        assert self._endpoint is not None
        subscription, kernel = self._subscription, self._network.kernel
        if not self._open or subscription is None or subscription.closed:
            return
        if kernel.now_us - self._sent_us >= KEEP_ALIVE_US:
            self._send(NumberedCommand(subscription.epoch, self._session, subscription.last_number, None))
        kernel.after(KEEP_ALIVE_US, self._keep_alive, self._endpoint.process)

    def _leave(self) -> None:
        """The reader's socket is closed: notify the coordinator."""
        if self._endpoint is not None and self._subscription is not None:
            self._network.kernel.after(self._network.way_us(), self._subscription.close, self._endpoint.process)

    # --------------------------------------------------------------------------------------------------- at the worker

    def _arrive(self, content: bytes) -> None:
        if self._open:
            self._heard_us = self._network.kernel.now_us
            self._heard(codec.decode(content, NumberedCommand))

    def _watch_silence(self) -> None:
        kernel = self._network.kernel

        def look() -> None:
            if not self._open:
                return
            silent_us = kernel.now_us - self._heard_us
            if silent_us >= SILENCE_US:
                self._end(unreachable("the stream is silent"))
                self._leave()
            else:
                kernel.after(SILENCE_US - silent_us, look, self._call.sender)

        kernel.after(SILENCE_US, look, self._call.sender)

    def _end_soon(self, reason: Any) -> None:
        due_us = max(self._last_us + 1, self._network.kernel.now_us + self._network.way_us())
        self._network.kernel.after(due_us - self._network.kernel.now_us, lambda: self._end(reason), self._call.sender)

    def _end(self, reason: Any) -> None:
        if self._open:
            self._shut()
            self._ended(reason)

    def _shut(self) -> None:
        self._open = False
        self._network.kernel.trace.add(self._call.sender.name, "stream closed", self._session[:4])
        if self in self._network.streams:
            self._network.streams.remove(self)


_KINDS: dict[type, str] = {
    Deploy: "deploy",
    TriggerCheckpoint: "trigger",
    NotifyCheckpointComplete: "complete",
    NotifyCheckpointAborted: "abort",
    CancelTasks: "cancel",
    FinishTasks: "finish",
    AlignWatermarks: "align",
    ShutdownWorker: "shutdown",
}


def command_kind(command: WorkerCommand | None) -> str:
    """A command's kind of message; `keep_alive` for a line without one."""
    return "keep_alive" if command is None else _KINDS[type(command)]


def command_point(command: WorkerCommand) -> str:
    """A command's kind; of a trigger also that of its checkpoint."""
    kind = command_kind(command)
    return f"{kind}.{command.kind.value}" if isinstance(command, TriggerCheckpoint) else kind
