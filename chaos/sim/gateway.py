"""The worker's session in virtual time: production's core (`operators.worker.session`) over the simulated control plane.

Like the control thread it performs one request at a time, and takes further work when that is answered. Large state, which
production posts in a sender of its own, does not occur here."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any, assert_never

import msgspec

from holdfast.api.errors import status_of
from holdfast.barriers.messages import AckAnswers, Answerable, Heartbeat, Registered, SubtaskMetrics, SubtaskStatus, WorkerCommand
from holdfast.chaos.sim.control import Call, CommandStream, ControlNetwork
from holdfast.chaos.sim.kernel import Kernel, Process, ProcessClock
from holdfast.operators.worker import session_events as on
from holdfast.operators.worker.gateway import CONTENT_STATUS, REJECTED_STATUS
from holdfast.operators.worker.leader_retrieval import Target
from holdfast.operators.worker.session import Session, SessionState
from holdfast.statebackends.errors import HoldfastError


class Epoch(msgspec.Struct):
    """Epoch in the answer to a heartbeat."""

    epoch: int = 0


class _FromStream(msgspec.Struct, frozen=True):
    """An event of a command stream; events of an older stream are dropped."""

    stream: CommandStream
    event: on.Event


class SimGateway:
    """Owns one session; `deliver` receives its commands."""

    def __init__(
        self,
        kernel: Kernel,
        process: Process,
        network: ControlNetwork,
        identity: on.WorkerIdentity,
        *,
        deliver: Callable[[WorkerCommand], None],
        metrics: Callable[[int], tuple[SubtaskMetrics, ...]],
        frames_refused: Callable[[], int] = lambda: 0,
        seed: int,
    ) -> None:
        self._kernel = kernel
        self._process = process
        self._network = network
        self._identity = identity
        self._deliver = deliver
        self._metrics = metrics
        self._frames_refused = frames_refused
        self._clock = ProcessClock(kernel, process)
        self.session = Session(identity, random.Random(seed))
        self._target = Target(network.address)
        self._inbox: deque[on.Event | _FromStream] = deque()
        self._answers: deque[on.Event] = deque()
        self._actions: deque[on.Action] = deque()
        self._busy = False
        self._stream: CommandStream | None = None
        self.rejection: HoldfastError | None = None
        self._deadline_us: int | None = None

    def start(self) -> None:
        self._post(on.DeadlineReached())

    def report(self, item: SubtaskStatus | Answerable) -> None:
        """As Gateway.report."""
        self._post(on.StatusChanged(item) if isinstance(item, SubtaskStatus) else on.AnswerReady(item))

    @property
    def unreachable_since_ms(self) -> int | None:
        return self.session.unreachable_since_ms

    @property
    def hears_commands(self) -> bool:
        """Its command stream is open."""
        return self._stream is not None and self._stream.is_open

    @property
    def is_flushed(self) -> bool:
        """No report waits to be sent."""
        return not (self._busy or self._inbox or self._answers or self._actions)

    def close(self) -> None:
        """End the session with its process."""
        if self._stream is not None:
            self._stream.close()

    # ---------------------------------------------------------------------------------------------------------- thread

    def _post(self, event: on.Event | _FromStream) -> None:
        self._inbox.append(event)
        self._kernel.after(0, self._turn, self._process)

    def _turn(self) -> None:
        """Run the control thread until it would wait."""
        while not self._busy:
            if self._actions:
                self._perform(self._actions.popleft())
            elif self._answers or self._inbox:
                event = self._answers.popleft() if self._answers else self._inbox.popleft()
                if isinstance(event, _FromStream):
                    if event.stream is not self._stream:
                        continue  # lines of an older stream
                    event = event.event
                self._actions.extend(self.session.handle(event, now_ms=self._clock.monotonic_ms()))
            else:
                break
        self._arm()

    def _arm(self) -> None:
        """Schedule a wakeup at the session's next deadline."""
        due_ms = self.session.next_deadline_ms()
        if due_ms is None or self._busy:
            return
        due_us = max(self._kernel.now_us, due_ms * 1000)
        if self._deadline_us is not None and self._kernel.now_us <= self._deadline_us <= due_us:
            return
        self._deadline_us = due_us

        def reached() -> None:
            self._deadline_us = None
            self._post(on.DeadlineReached())

        self._kernel.after(due_us - self._kernel.now_us, reached, self._process)

    def _perform(self, action: on.Action) -> None:
        match action:
            case on.Deliver(command=command):
                self._deliver(command)
            case on.OpenStream():
                self._open_stream(action)
            case on.SendRegister(body=body):
                self._ask("register", body, Registered, on.RegistrationAnswered)
            case on.PostAcks(body=acks):
                self._ask("acks", acks, AckAnswers, on.AcksAnswered)
            case on.PostStates(body=states):
                self._ask("states", states, None, lambda _: on.StatesAnswered())
            case on.PostHeartbeat(session=session, attempt=attempt, bare=bare):
                metrics = () if bare else self._metrics(attempt)
                beat = Heartbeat(self._identity.slot, session, attempt, metrics, self._frames_refused())
                self._ask("heartbeat", beat, Epoch, lambda answer: on.HeartbeatAnswered(answer.epoch or self.session.epoch))
            case on.TakeSample() | on.AnswerQuestion():
                pass  # a simulated worker says that it answers none: threads and logs are the real process's
            case _:
                assert_never(action)

    # -------------------------------------------------------------------------------------------------------- requests

    def _call(self, request: str) -> Call:
        return Call(self._process, request, self._identity.job_id, self._identity.slot)

    def _ask(self, request: str, body: Any, kind: Any, made: Callable[[Any], on.Event]) -> None:
        self._busy = True

        def reply(answer: Any) -> None:
            self._busy = False
            self._answers.append(self._refused(request, answer) if isinstance(answer, HoldfastError) else made(answer))
            self._turn()

        self._network.ask(self._call(request), self._target, body, kind, reply)

    def _refused(self, request: str, error: HoldfastError) -> on.Event:
        """The session's event for an error, by HTTP status: 404 and 409 refuse, some others reject, the rest are retried."""
        status = status_of(error)
        if status == 409:
            if request != "register":
                return on.refuse_post(request, error.message, error.fields)
            refused = on.refuse_registration(error.message, error.fields, submission=self._identity.submission)
            if refused.outdated:
                self._target = self._network.next_target(self._target, error)
            return refused
        if status in REJECTED_STATUS and request == "register":
            self.rejection = error
            return on.RequestRefused(request, error.message, rejected=True)
        if status in CONTENT_STATUS and request in ("acks", "states", "heartbeat"):
            return on.RequestRefused(request, error.message, rejected=True)
        self._target = self._network.next_target(self._target, error)
        if status == 404:
            return on.RequestRefused(request, error.message)
        return on.RequestFailed(request)

    def _open_stream(self, action: on.OpenStream) -> None:
        if self._stream is not None:
            self._stream.close()
        stream = CommandStream(
            self._network,
            self._call("stream"),
            lambda line: self._post(_FromStream(stream, on.CommandReceived(line))),
            lambda reason: self._stream_ended(stream, reason),
        )
        self._stream = stream
        stream.ask(self._target, action.session, action.after)

    def _stream_ended(self, stream: CommandStream, reason: Any) -> None:
        refused = isinstance(reason, HoldfastError) and status_of(reason) in (404, 409)
        event = on.RequestRefused("stream", str(reason)) if refused else on.RequestFailed("stream")
        self._post(_FromStream(stream, event))

    @property
    def has_ended(self) -> bool:
        """The session sends nothing more."""
        return self.session.state is SessionState.ENDED
