"""SHELL: the worker's session over HTTP. One control thread owns the session core; one reader thread reads the command stream.

It decides nothing: requests are the core's actions, answers are its events. Heartbeats are answered from here, however busy
the loop is. Protocol: `/v1/jobs/{job}/workers`, records of barriers.messages as JSON (codec.py), bearer token."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import urllib3

from barriers import codec
from barriers.messages import (
    AckAnswers,
    Answerable,
    Heartbeat,
    NumberedCommand,
    Registered,
    SubtaskMetrics,
    SubtaskStatus,
    WorkerCommand,
)
from operators.context import Clock
from operators.session import Session
from operators.sessionevents import (
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
)
from statebackends import errors
from statebackends.errors import AuthenticationError, HoldfastError, InvalidConfigError

T = TypeVar("T")

ADDRESS_FILE = "_coordinator.json"
"""In the state directory: {"url": ...} of the coordinator that leads now."""

CONNECT_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 10.0
STREAM_TIMEOUT_S = 10.0
"""Silence on the command stream, which carries a keep-alive every 2 s, after which it counts as broken."""

ERROR_HEADER = "X-Holdfast-Error"
REJECTED_STATUS = frozenset({400, 401, 403, 413, 422})
"""Answers that the same request will get again."""
LINE_BYTES_MAX = 256 * 1024 * 1024
"""A deployment with inline state can be large; a line beyond this is not from a coordinator."""


class _RefusedError(HoldfastError):
    """404 or 409. Fields: fenced."""


class _RejectedError(HoldfastError):
    """Asking again won't help. Fields: error, what a worker is to leave with."""


class _UnreachableError(HoldfastError):
    """No answer, or one that may be better later."""


@dataclass(frozen=True, slots=True)
class CoordinatorAddress:
    """Where the coordinator is, and what it asks for."""

    url: str
    token: str | None
    state_directory: str | None = None
    """Where a coordinator that restarted elsewhere leaves its URL; None: it never moves."""

    def current_url(self) -> str:
        """The URL in the state directory's file, if there is one, else the one that the worker was started with."""
        if self.state_directory is not None:
            path = os.path.join(self.state_directory, ADDRESS_FILE)
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(path, "rb") as file:
                return str(json.load(file)["url"])
        return self.url


class CoordinatorHttp:
    """Requests of one worker. Thread-safe: the control thread posts, the reader thread streams."""

    def __init__(self, address: CoordinatorAddress, job_id: str, slot: int) -> None:
        self._address = address
        self._base = f"/v1/jobs/{job_id}/workers"
        self._slot = slot
        self._url = address.current_url()
        headers = {"Content-Type": "application/json"}
        if address.token:
            headers["Authorization"] = f"Bearer {address.token}"
        self._pool = urllib3.PoolManager(num_pools=4, maxsize=4, headers=headers, retries=False)

    def look_up(self) -> None:
        """Read again where the coordinator is."""
        self._url = self._address.current_url()

    def post(self, path: str, message: Any, kind: type[T] | None) -> T | None:
        """Raises _RefusedError, _UnreachableError. `kind` None: the answer's body does not matter."""
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S)
        try:
            answer = self._pool.request(
                "POST", f"{self._url}{self._base}{path}", body=codec.encode(message), timeout=timeout
            )
        except urllib3.exceptions.HTTPError as error:
            raise _UnreachableError(str(error)) from error
        _check(answer.status, answer.headers.get(ERROR_HEADER), answer.data)
        return None if kind is None else codec.decode(answer.data, kind)

    def stream(self, action: OpenStream) -> urllib3.BaseHTTPResponse:
        """An open command stream, to be read by `lines`."""
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=STREAM_TIMEOUT_S)
        fields = {"epoch": str(action.epoch), "session": action.session, "after": str(action.after)}
        try:
            answer = self._pool.request(
                "GET",
                f"{self._url}{self._base}/{self._slot}/commands",
                fields=fields,
                timeout=timeout,
                preload_content=False,
            )
        except urllib3.exceptions.HTTPError as error:
            raise _UnreachableError(str(error)) from error
        if answer.status != 200:
            data = answer.read()
            answer.release_conn()
            _check(answer.status, answer.headers.get(ERROR_HEADER), data)
        return answer

    def close(self) -> None:
        self._pool.clear()


def lines(answer: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """Whole lines of a stream, as they come. Raises _UnreachableError when it breaks; ends when it ends."""
    rest = bytearray()
    try:
        while chunk := answer.read1(1 << 16):
            rest += chunk
            if b"\n" in chunk:
                *whole, tail = bytes(rest).split(b"\n")
                rest = bytearray(tail)
                yield from (line for line in whole if line.strip())
            if len(rest) > LINE_BYTES_MAX:
                raise _UnreachableError(f"a command of more than {LINE_BYTES_MAX} bytes")
    except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
        raise _UnreachableError(str(error)) from error
    finally:
        with contextlib.suppress(Exception):
            answer.close()


def _check(status: int, kind: str | None, data: bytes) -> None:
    if status == 200:
        return
    try:
        message = "; ".join(json.loads(data)["errors"])
    except (ValueError, KeyError, TypeError):
        message = data[:200].decode("utf-8", "replace")
    if status in (404, 409):
        raise _RefusedError(message, fenced=status == 409)
    if status in REJECTED_STATUS:
        raise _RejectedError(message, error=_typed(kind, status, message))
    raise _UnreachableError(f"{status} {kind or ''}: {message}")


def _typed(kind: str | None, status: int, message: str) -> HoldfastError:
    """The error that the coordinator named, so that a driver reads which it was."""
    found = getattr(errors, kind or "", None)
    if isinstance(found, type) and issubclass(found, HoldfastError):
        return found(message)
    return AuthenticationError(message) if status in (401, 403) else InvalidConfigError(message)


@dataclass(frozen=True, slots=True)
class _FromStream:
    """What the reader of stream number `generation` saw; an older reader's is dropped."""

    generation: int
    event: Event


class _Heartbeats(msgspec.Struct):
    """Answer to a heartbeat; a coordinator may leave the epoch out."""

    epoch: int = 0


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
        random_source: random.Random | None = None,
    ) -> None:
        self._identity = identity
        self._clock = clock
        self._deliver = deliver
        self._metrics = metrics
        self._http = CoordinatorHttp(address, identity.job_id, identity.slot)
        self._session = Session(identity, random_source or random.Random())
        self._inbox: queue.SimpleQueue[Event | _FromStream | None] = queue.SimpleQueue()
        self._generation = 0
        self._stream: urllib3.BaseHTTPResponse | None = None
        self._stream_lock = threading.Lock()
        self._stopping = False
        self.rejection: HoldfastError | None = None
        """Why the coordinator does not take this worker at all; set before the worker is told to leave."""
        self._thread = threading.Thread(target=self._run, name="holdfast-control", daemon=True)

    def start(self) -> None:
        self._thread.start()

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
        """End the threads without waiting for answers. Idempotent."""
        self._stopping = True
        self._inbox.put(None)
        self._end_stream()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(CONNECT_TIMEOUT_S + READ_TIMEOUT_S)
        self._http.close()

    # -------------------------------------------------------------------------------------------------- control thread

    def _run(self) -> None:
        self._handle(DeadlineReached())
        while not self._stopping:
            event = self._next_event()
            if event is None:
                break
            if isinstance(event, _FromStream):
                if event.generation != self._generation:
                    continue
                event = event.event
            self._handle(event)
        self._end_stream()

    def _next_event(self) -> Event | _FromStream | None:
        due_ms = self._session.next_deadline_ms()
        timeout_s = None if due_ms is None else max(0.0, (due_ms - self._clock.monotonic_ms()) / 1000)
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
                return self._ask("register", lambda: RegistrationAnswered(self._post("/register", body, Registered)))
            case PostAcks(body=acks):
                return self._ask("acks", lambda: AcksAnswered(self._post(f"/{slot}/acks", acks, AckAnswers)))
            case PostStates(body=states):
                return self._ask("states", lambda: self._send(f"/{slot}/states", states))
            case PostHeartbeat(session=session, attempt=attempt):
                beat = Heartbeat(slot, session, attempt, self._metrics(attempt))
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

    def _ask(self, request: str, ask: Callable[[], Event]) -> Event:
        try:
            return ask()
        except _RefusedError as error:
            return RequestRefused(request, error.message, superseded=request == "register" and error.fenced)
        except HoldfastError as error:
            if isinstance(error, _RejectedError) and request == "register":
                self.rejection = error.error
                return RequestRefused(request, error.message, rejected=True)
            self._http.look_up()
            return RequestFailed(request)

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
        except _RefusedError as error:
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
