"""SHELL: the worker's session over HTTP. One control thread owns the session core; one reader thread reads the command stream, and
one sender posts acknowledgements that carry much state, which may travel for longer than a worker may be silent.

It decides nothing: requests are the core's actions, answers are its events. Heartbeats are answered from here, however busy
the loop is. Protocol: `/v1/jobs/{job}/workers`, records of holdfast.barriers.messages as JSON (codec.py), bearer token."""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
import urllib3

from holdfast.barriers import codec
from holdfast.barriers.messages import (
    AckAnswers,
    AckBatch,
    Answerable,
    Heartbeat,
    NumberedCommand,
    Registered,
    SubtaskMetrics,
    SubtaskStatus,
    WorkerCommand,
)
from holdfast.operators.task.context import Clock
from holdfast.operators.worker.control_client import (
    CONNECT_TIMEOUT_S,
    PIECE_BYTES,
    READ_TIMEOUT_S,
    CoordinatorAddress,
    CoordinatorHttp,
    RefusedError,
    RejectedError,
    lines,
)
from holdfast.operators.worker.leader_retrieval import Target
from holdfast.operators.worker.session import Session
from holdfast.operators.worker.session_events import (
    AcksAnswered,
    Action,
    AnswerReady,
    CommandReceived,
    DeadlineReached,
    Deliver,
    Event,
    HeartbeatAnswered,
    OpenStream,
    PostAcks,
    PostHeartbeat,
    PostStates,
    RegistrationAnswered,
    RequestFailed,
    RequestRefused,
    SendRegister,
    StatesAnswered,
    StatusChanged,
    WorkerIdentity,
    inline_bytes,
    refuse_post,
    refuse_registration,
)
from holdfast.statebackends.errors import HoldfastError, ProtocolError

log = logging.getLogger("holdfast.worker")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _FromStream:
    """What the reader of stream number `generation` saw; an older reader's is dropped."""

    generation: int
    event: Event


@dataclass(frozen=True, slots=True)
class _Sent:
    """What came of acknowledgements that the sender posted; an older post's answer is dropped."""

    number: int
    asked: Target
    outcome: AckAnswers | HoldfastError


class _Heartbeats(msgspec.Struct):
    """Answer to a heartbeat; a coordinator may leave the epoch out."""

    epoch: int = 0


def _outcome_of(sent: _Sent) -> Event:
    if isinstance(sent.outcome, HoldfastError):
        raise sent.outcome
    return AcksAnswered(sent.outcome)


class Gateway:
    """Runs a session. `report` may be called from any thread; `deliver` is called on the control thread."""

    def __init__(
        self,
        identity: WorkerIdentity,
        address: CoordinatorAddress,
        clock: Clock,
        *,
        deliver: Callable[[WorkerCommand], None],
        metrics: Callable[[int], tuple[SubtaskMetrics, ...]],
        frames_refused: Callable[[], int] = lambda: 0,
        random_source: random.Random | None = None,
    ) -> None:
        self._identity = identity
        self._clock = clock
        self._deliver = deliver
        self._metrics = metrics
        self._frames_refused = frames_refused
        self._http = CoordinatorHttp(address, identity.job_id, identity.slot)
        self._session = Session(identity, random_source or random.Random())
        self._inbox: queue.SimpleQueue[Event | _FromStream | _Sent | None] = queue.SimpleQueue()
        self._large: queue.SimpleQueue[tuple[int, AckBatch] | None] = queue.SimpleQueue()
        """To the sender: what it posts, under its number."""
        self._large_number = 0
        self._is_sending = False
        """The answer to that number is still to come."""
        self._is_flushing = False
        self._generation = 0
        self._stream: urllib3.BaseHTTPResponse | None = None
        self._stream_lock = threading.Lock()
        self._stopping = False
        self.rejection: HoldfastError | None = None
        """Why the coordinator does not take this worker at all; set before the worker is told to leave."""
        self._thread = threading.Thread(target=self._run, name="holdfast-control", daemon=True)
        self._sender = threading.Thread(target=self._send_large, name="holdfast-acknowledgements", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._sender.start()

    def report(self, item: SubtaskStatus | Answerable) -> None:
        """A state change, an acknowledgement or a decline of the worker; sent as soon as the coordinator can be reached."""
        self._inbox.put(StatusChanged(item) if isinstance(item, SubtaskStatus) else AnswerReady(item))

    @property
    def unreachable_since_ms(self) -> int | None:
        """Monotonic; None while the coordinator answers."""
        return self._session.unreachable_since_ms

    def flush(self, timeout_s: float) -> None:
        """Wait until what was reported has been sent, or time is up; then end. For the last states before leaving."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    def close(self) -> None:
        """End the threads without waiting for answers, both within the time of one request. Idempotent."""
        self._stopping = True
        self._inbox.put(None)
        self._large.put(None)
        self._end_stream()
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S + READ_TIMEOUT_S
        for thread in (self._thread, self._sender):
            if thread.is_alive() and threading.current_thread() is not thread:
                thread.join(max(0.0, deadline_s - time.monotonic()))
        self._http.close()

    # -------------------------------------------------------------------------------------------------- control thread

    def _run(self) -> None:
        self._handle(DeadlineReached())
        while not self._stopping and not (self._is_flushing and not self._is_sending):
            event = self._next_event()
            match event:
                case None:
                    self._is_flushing = True
                case _FromStream(generation=generation, event=seen):
                    if generation == self._generation:
                        self._handle(seen)
                case _Sent():
                    if event.number == self._large_number:
                        self._is_sending = False
                        self._handle(self._ask("acks", partial(_outcome_of, event), event.asked))
                case _:
                    self._handle(event)
        self._end_stream()

    def _next_event(self) -> Event | _FromStream | _Sent | None:
        due_ms = self._session.next_deadline_ms()
        timeout_s = None if due_ms is None else min(threading.TIMEOUT_MAX, max(0.0, (due_ms - self._clock.monotonic_ms()) / 1000))
        try:
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return DeadlineReached()

    def _handle(self, event: Event) -> None:
        """Digest an event, and the answers to what it made us send."""
        events: list[Event] = [event]
        while events:
            for action in self._session.handle(events.pop(0), now_ms=self._clock.monotonic_ms()):
                answer = self._perform(action)
                if answer is not None:
                    events.append(answer)

    def _perform(self, action: Action) -> Event | None:
        """Perform one action; its answer, when it has one at once."""
        slot = self._identity.slot
        match action:
            case Deliver(command=command):
                self._deliver(command)
                return None
            case OpenStream():
                self._open_stream(action)
                return None
            case SendRegister(body=body):
                self.rejection = None
                return self._ask("register", lambda: RegistrationAnswered(self._post("/register", body, Registered)))
            case PostAcks(body=acks):
                if sum(map(inline_bytes, acks.items)) > PIECE_BYTES:
                    self._large_number, self._is_sending = self._large_number + 1, True
                    self._large.put((self._large_number, acks))
                    return None
                return self._ask("acks", lambda: AcksAnswered(self._post(f"/{slot}/acks", acks, AckAnswers)))
            case PostStates(body=states):
                return self._ask("states", lambda: self._send(f"/{slot}/states", states))
            case PostHeartbeat(session=session, attempt=attempt, bare=bare):
                beat = Heartbeat(slot, session, attempt, () if bare else self._metrics(attempt), self._frames_refused())
                return self._ask("heartbeat", lambda: self._beat(self._post(f"/{slot}/heartbeat", beat, _Heartbeats)))

    def _post(self, path: str, message: Any, kind: type[T]) -> T:
        answer = self._http.post(path, message, kind)
        assert answer is not None
        return answer

    def _send(self, path: str, message: Any) -> Event:
        self._http.post(path, message, None)
        return StatesAnswered()

    def _beat(self, answer: _Heartbeats) -> Event:
        return HeartbeatAnswered(answer.epoch or self._session.epoch)

    def _ask(self, request: str, ask: Callable[[], Event], asked: Target | None = None) -> Event:
        try:
            return ask()
        except RefusedError as error:
            refused = refuse_post(request, error.message, error.named if error.fenced else {})
            if request == "register" and error.fenced:
                refused = refuse_registration(error.message, error.named, submission=self._identity.submission)
            if refused.outdated or not error.fenced:
                self._http.failed(error, asked)
            return refused
        except HoldfastError as error:
            if isinstance(error, RejectedError) and request == "register":
                self.rejection = error.error
                return RequestRefused(request, error.message, rejected=True)
            if isinstance(error, RejectedError) and error.content and request in ("acks", "states", "heartbeat"):
                log.warning("the coordinator does not take a message of %s, which is not repeated as it is: %s", request, error)
                return RequestRefused(request, error.message, rejected=True)
            self._http.failed(error, asked)
            return RequestFailed(request)

    # --------------------------------------------------------------------------------------------------------- sender

    def _send_large(self) -> None:
        """Post what carries much state, while the control thread sends heartbeats."""
        while (queued := self._large.get()) is not None:
            number, acks = queued
            if number != self._large_number or self._stopping:
                continue  # the session was registered again meanwhile, and has posted them anew
            asked = self._http.target
            try:
                outcome: AckAnswers | HoldfastError = self._post(f"/{self._identity.slot}/acks", acks, AckAnswers)
            except HoldfastError as error:
                outcome = error
            except Exception as error:  # without a sender nothing would be acknowledged any more, and heartbeats would go on
                outcome = RejectedError(f"{type(error).__name__}: {error}", error=ProtocolError(str(error)), content=True)
            self._inbox.put(_Sent(number, asked, outcome))

    # --------------------------------------------------------------------------------------------------- reader thread

    def _open_stream(self, action: OpenStream) -> None:
        """Read a new stream on its own thread; the one before is closed, and what it still says is dropped."""
        self._end_stream()
        reader = threading.Thread(
            target=self._read, args=(action, self._generation), name=f"holdfast-commands-{self._generation}", daemon=True
        )
        reader.start()

    def _read(self, action: OpenStream, generation: int) -> None:
        def post(event: Event) -> None:
            self._inbox.put(_FromStream(generation, event))

        try:
            answer = self._http.stream(action)
            if not self._adopt(answer, generation):
                answer.close()
                return
            for line in lines(answer):
                post(CommandReceived(codec.decode(line, NumberedCommand)))
            post(RequestFailed("stream"))
        except RefusedError as error:
            post(RequestRefused("stream", error.message))
        except HoldfastError:
            post(RequestFailed("stream"))

    def _adopt(self, answer: urllib3.BaseHTTPResponse, generation: int) -> bool:
        """Keep a stream that was opened, unless it is out of date by now."""
        with self._stream_lock:
            if generation != self._generation:
                return False
            self._stream = answer
            return True

    def _end_stream(self) -> None:
        """Shut the socket, which wakes the reader; the reader closes it. What it still says is dropped."""
        with self._stream_lock:
            self._generation += 1
            stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(Exception):
                stream.shutdown()
