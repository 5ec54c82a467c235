"""The command streams of a coordinator to its workers in virtual time, as bytes: they stand for a response that does not end."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from holdfast.barriers import codec
from holdfast.barriers.messages import (
    CancelTasks,
    Deploy,
    FinishTasks,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    NumberedCommand,
    ShutdownWorker,
    TriggerCheckpoint,
    WorkerCommand,
)
from holdfast.chaos.checkers.observations import Commanded
from holdfast.chaos.sim.control import Call, ControlNetwork, Endpoint, unreachable
from holdfast.chaos.sim.kernel import Process
from holdfast.coordinator.dispatcher.command_stream import Subscription
from holdfast.operators.worker.leader_retrieval import Target
from holdfast.statebackends.errors import HoldfastError

KEEP_ALIVE_US = 2_000_000
"""Silence on a command stream after which a line without a command is sent, as in holdfast.api.routes.command_stream."""
SILENCE_US = 10_000_000
"""Silence on a command stream after which its reader gives it up, as in holdfast.operators.worker.gateway."""


class CommandStream:
    """One open command stream: lines in order, keep-alives, and an end that both sides notice.

    A line that a fault takes out, repeats or moves stands for what a proxy or a bug may do; the session must notice."""

    def __init__(
        self, network: ControlNetwork, call: Call, heard: Callable[[NumberedCommand], None], ended: Callable[[Any], None]
    ) -> None:
        """`heard` takes each line and `ended` the reason why no more will come (None: just closed), both as the reader."""
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
        """Send the request."""
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
        """The reader does not want it any more."""
        if self._open:
            self._shut()
            self._leave()

    @property
    def is_open(self) -> bool:
        """At both ends, as far as its reader knows."""
        return self._open and self._subscription is not None

    def is_of(self, process: Process) -> bool:
        """It is open, and a process reads it."""
        return process is self._call.sender and self._subscription is not None

    def break_off(self, unnoticed_us: int) -> None:
        """The connection breaks: the reader learns of it soon, the writer after that time."""
        kernel, subscription = self._network.kernel, self._subscription
        if not self._open or subscription is None or self._endpoint is None:
            return
        self._network.kernel.run_as(self._call.sender, lambda: self._end(unreachable("the stream broke")))
        kernel.after(unnoticed_us + self._network.way_us(), subscription.close, self._endpoint.process)

    def process_gone(self, process: Process) -> None:
        """One of its ends has died."""
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
        """Commands wait, or the stream was closed."""
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
        """Put a line on its way; False when the coordinator died over it."""
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
        """A line without a command after each silent interval: a reader that missed the last command notices."""
        assert self._endpoint is not None
        subscription, kernel = self._subscription, self._network.kernel
        if not self._open or subscription is None or subscription.closed:
            return
        if kernel.now_us - self._sent_us >= KEEP_ALIVE_US:
            self._send(NumberedCommand(subscription.epoch, self._session, subscription.last_number, None))
        kernel.after(KEEP_ALIVE_US, self._keep_alive, self._endpoint.process)

    def _leave(self) -> None:
        """The reader's socket is closed: the coordinator is told."""
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
    ShutdownWorker: "shutdown",
}


def command_kind(command: WorkerCommand | None) -> str:
    """A command's kind of message; `keep_alive` for a line without one."""
    return "keep_alive" if command is None else _KINDS[type(command)]


def command_point(command: WorkerCommand) -> str:
    """A command's kind, of a trigger also that of its checkpoint."""
    kind = command_kind(command)
    return f"{kind}.{command.kind.value}" if isinstance(command, TriggerCheckpoint) else kind
