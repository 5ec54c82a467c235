"""A worker's way to its coordinator in one process: the real session, whose requests are calls.

It decides nothing: what the session wants is done at once, and answers are its next events."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, assert_never

from holdfast.api.testing.clock import ManualClock
from holdfast.barriers.messages import Answerable, Heartbeat, SubtaskMetrics, SubtaskStatus, WorkerCommand
from holdfast.coordinator.dispatcher.calls import JobCalls
from holdfast.coordinator.dispatcher.command_stream import Subscription
from holdfast.coordinator.jobmaster import events as job
from holdfast.operators.worker import session_events as on
from holdfast.operators.worker.session import Session
from holdfast.statebackends.errors import FencedError, HoldfastError, NotFoundError


class LocalGateway:
    """Owns one session; `deliver` gets its commands, `metrics` gives the counters of an attempt as they are now."""

    def __init__(
        self,
        identity: on.WorkerIdentity,
        calls: JobCalls,
        clock: ManualClock,
        rng: random.Random,
        *,
        deliver: Callable[[WorkerCommand], None],
        metrics: Callable[[int], tuple[SubtaskMetrics, ...]],
    ) -> None:
        self._identity = identity
        self._calls = calls
        self._clock = clock
        self._deliver = deliver
        self._metrics = metrics
        self._session = Session(identity, rng)
        self._events: deque[on.Event] = deque([on.DeadlineReached()])
        self._asked: list[tuple[str, Future[Any], Callable[[Any], on.Event | None]]] = []
        self._stream: Subscription | None = None

    def report(self, item: SubtaskStatus | Answerable) -> None:
        """As Gateway.report."""
        self._events.append(on.StatusChanged(item) if isinstance(item, SubtaskStatus) else on.AnswerReady(item))

    def next_deadline_ms(self) -> int | None:
        return self._session.next_deadline_ms()

    def beat(self) -> None:
        """A heartbeat at once: the coordinator gets the counters as they are now."""
        session = self._session
        if session.session:
            self._perform(on.PostHeartbeat(session.session, session.attempt))

    def close(self) -> None:
        """The process is gone: its command stream breaks."""
        if self._stream is not None:
            self._stream.close()

    def step(self) -> bool:
        """Take what came: commands, answers, reports. False if there was nothing."""
        self._take_answers()
        self._take_commands()
        due_ms = self._session.next_deadline_ms()
        if not self._events and due_ms is not None and due_ms <= self._clock.monotonic_ms():
            self._events.append(on.DeadlineReached())
        moved = bool(self._events)
        while self._events:
            for action in self._session.handle(self._events.popleft(), now_ms=self._clock.monotonic_ms()):
                self._perform(action)
        return moved

    def _take_commands(self) -> None:
        if self._stream is None:
            return
        self._events.extend(on.CommandReceived(line) for line in self._stream.take())
        if self._stream.closed:
            self._stream = None
            self._events.append(on.RequestFailed("stream"))

    def _take_answers(self) -> None:
        asked, self._asked = self._asked, []
        for request, future, made in asked:
            if not future.done():
                self._asked.append((request, future, made))
                continue
            error = future.exception()
            if error is None:
                event = made(future.result())
                if event is not None:
                    self._events.append(event)
            else:
                self._events.append(self._refused(request, error))

    def _refused(self, request: str, error: BaseException) -> on.Event:
        """As HTTP tells it."""
        if isinstance(error, FencedError):
            if request != "register":
                return on.refuse_post(request, error.message, error.fields)
            return on.refuse_registration(error.message, error.fields, submission=self._identity.submission)
        if isinstance(error, NotFoundError):
            return on.RequestRefused(request, error.message)
        return on.RequestFailed(request)

    def _perform(self, action: on.Action) -> None:
        calls = self._calls
        match action:
            case on.Deliver(command=command):
                self._deliver(command)
            case on.OpenStream():
                self._ask("stream", partial(self._open_stream, action), lambda _: None)
            case on.SendRegister(body=body):
                self._ask("register", partial(calls.register, body), on.RegistrationAnswered)
            case on.PostAcks(body=acks):
                self._post("acks", partial(job.AckBatchReceived, batch=acks), on.AcksAnswered)
            case on.PostStates(body=states):
                self._post("states", partial(job.StatesReceived, batch=states), lambda _: on.StatesAnswered())
            case on.PostHeartbeat(session=session, attempt=attempt):
                beat = Heartbeat(self._identity.slot, session, attempt, self._metrics(attempt), 0)
                self._post("heartbeat", partial(job.HeartbeatReceived, message=beat), on.HeartbeatAnswered)
            case on.TakeSample() | on.AnswerQuestion():
                pass  # a worker in a test's own thread says that it answers none
            case _:
                assert_never(action)

    def _open_stream(self, action: on.OpenStream) -> Future[Any]:
        identity = self._identity
        self._stream, opened = self._calls.led_in_session(identity.job_id).subscribe(identity.slot, action.session, action.after)
        return opened

    def _post(self, request: str, make: Callable[[int], job.Event], made: Callable[[Any], on.Event]) -> None:
        self._ask(request, lambda: self._calls.call_in_session(self._identity.job_id, make), made)

    def _ask(self, request: str, call: Callable[[], Future[Any]], made: Callable[[Any], on.Event | None]) -> None:
        try:
            future = call()
        except HoldfastError as error:
            future = Future()
            future.set_exception(error)
        self._asked.append((request, future, made))
