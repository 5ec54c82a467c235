"""SHELL: the worker's session with the coordinator over HTTP: its requests, and the threads that make them.

One control thread owns the session core; one reader thread reads the command stream, and one sender posts acknowledgements with
large state, which may travel for longer than a worker may be silent. Heartbeats are sent from the control thread, however busy the
loop is. The gateway decides nothing: requests are the core's actions, answers are its events, and `leader_retrieval.py` chooses the
next coordinator.

Protocol: `/v1/jobs/{job}/workers`, records of holdfast.barriers.messages as JSON (codec.py), bearer token; acknowledgements as
msgpack where the coordinator says that it takes it. One POST has one answer or one typed error."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar, assert_never

import msgspec
import urllib3

from holdfast.barriers import codec
from holdfast.barriers.codec import ERROR_HEADER, FIELDS_HEADER, UNREACHABLE_HEADER, decode_fields
from holdfast.barriers.messages import (
    AckAnswers,
    AckBatch,
    Answerable,
    Heartbeat,
    NumberedCommand,
    Registered,
    RegisterWorker,
    SubtaskMetrics,
    SubtaskStatus,
    WorkerCommand,
)
from holdfast.barriers.run_record import read_run_record
from holdfast.operators.task.context import Clock
from holdfast.operators.worker.answers import Answering
from holdfast.operators.worker.leader_retrieval import MemberAddresses, Target, is_safe_step, next_target, split_urls
from holdfast.operators.worker.session import ACK_COLLECT_MS, Session
from holdfast.operators.worker.session_events import (
    BACKOFF_MAX_MS,
    AcksAnswered,
    Action,
    AnswerQuestion,
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
    ReportsReady,
    RequestFailed,
    RequestRefused,
    SendRegister,
    StatesAnswered,
    StatusChanged,
    TakeSample,
    WorkerIdentity,
    inline_bytes,
    refuse_post,
    refuse_registration,
)
from holdfast.operators.worker.trust import authorities_of, client_context, transport_failure
from holdfast.statebackends.errors import (
    ERROR_CLASSES,
    AuthenticationError,
    HoldfastError,
    InvalidConfigError,
    NotLeaderError,
    ProtocolError,
    StorageUnavailableError,
)

log = logging.getLogger("holdfast.worker")

T = TypeVar("T")

CONNECT_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 10.0
REPORT_TIMEOUT_S = 4.0
"""Of an answer to a heartbeat, a state or a small acknowledgement, where there are several coordinators."""
PROBE_TIMEOUT_S = 1.0
"""Of the question whether one of several coordinators that did not answer in time answers again."""
ROUND_PAUSE_MAX_MS = 300
"""Longest pause between two rounds through several coordinators, of which one is about to take over."""
STREAM_TIMEOUT_S = 10.0
"""Silence on the command stream, which carries a keep-alive every 2 s, after which it counts as broken."""

BLOCK_BYTES = 256 * 1024
"""Bytes of a body sent at a time. Each part has the time of a connect; sent whole, the body had it as a whole, and state of
megabytes never arrived over a slow link."""

REFUSAL_BYTES_MAX = 64 * 1024
"""Bytes that are read of the refusal of a stream."""

REJECTED_STATUS = frozenset({400, 401, 403, 413, 415, 422})
"""Statuses that the same request will get again."""
CONTENT_STATUS = frozenset({400, 413, 415, 422})
"""Statuses of these that depend on the content of the request, not on its sender."""
LINE_BYTES_MAX = 256 * 1024 * 1024
"""A deployment with inline state can be large; a longer line does not come from a coordinator."""


class RefusedError(HoldfastError):
    """404 or 409."""

    fenced: bool
    """409."""
    named: dict[str, Any]
    """Fields of the coordinator's error."""


class RejectedError(HoldfastError):
    """The coordinator will refuse every repetition."""

    error: HoldfastError
    """Error with which the worker leaves."""
    content: bool
    """Whether the content of the request is the reason."""


class UnreachableError(HoldfastError):
    """The request got no answer."""


class SilentError(UnreachableError):
    """No answer came in time: whoever listens there may hang, or be a machine that is gone."""


class UntrustedError(UnreachableError):
    """The request was not sent: TLS is missing on one side, or the certificate is not trusted."""


@dataclass(frozen=True, slots=True)
class CoordinatorAddress:
    """Address and token of the coordinator."""

    url: str
    """One URL, or those of several members with commas between."""
    token: str | None
    state_directory: str | None = None
    """Directory in which a coordinator that restarted elsewhere writes its URL; None: it never moves, or this machine can't see the
    directory."""
    authorities: str | None = None
    """Certificates to trust, PEM; None: those that the coordinator published in its directory, or the system's."""

    def __repr__(self) -> str:
        return f"CoordinatorAddress({self.url!r})"

    @property
    def urls(self) -> tuple[str, ...]:
        return split_urls(self.url) or (self.url,)

    def recorded_url(self) -> str | None:
        """URL in the state directory's file; None without one, or where our token may not be sent."""
        record = read_run_record(self.state_directory) if self.state_directory is not None else None
        url = record.url.rstrip("/") if record is not None else ""
        return url if is_safe_step(self.urls[0], url) else None


class CoordinatorHttp:
    """Requests of one worker. Thread-safe: the control thread and the sender post, the reader streams. Only the control thread
    calls `failed`."""

    def __init__(self, address: CoordinatorAddress, job_id: str, slot: int) -> None:
        self._address = address
        self._addresses = MemberAddresses(address.urls)
        self._base = f"/v1/jobs/{job_id}/workers"
        self._slot = slot
        self._target = Target(self._next_address())
        headers = {"Content-Type": "application/json"}
        if address.token:
            headers["Authorization"] = f"Bearer {address.token}"
        self._headers = headers
        self._authorities = address.authorities
        self._pool = self._new_pool()
        self._said = ""
        """What was last logged of TLS."""
        self._packs_at = ""
        """URL of the coordinator that takes msgpack; empty: none is known to."""
        self.pause_max_ms = BACKOFF_MAX_MS
        """Longest pause before a request that failed is repeated; 0: the next coordinator was not asked yet."""

    def _new_pool(self) -> urllib3.PoolManager:
        context = client_context(self._authorities or authorities_of(self._address.state_directory))
        return urllib3.PoolManager(num_pools=4, maxsize=4, headers=self._headers, retries=False, ssl_context=context)

    @property
    def target(self) -> Target:
        """Coordinator that gets the next request."""
        return self._target

    def failed(self, error: HoldfastError, asked: Target | None = None) -> None:
        """Note that a request got no answer, or a useless one: the next ones may go elsewhere. `asked`: its target, None for the
        present one. If the target has changed since, the request says nothing about the new one."""
        if asked is not None and asked is not self._target:
            return
        answered = None if isinstance(error, UnreachableError) else error
        # One of several that answers, and only not yet, is the right one: another may be dead, and each costs a pause.
        is_late = isinstance(answered, StorageUnavailableError) and not isinstance(answered, NotLeaderError)
        stays = is_late and self._addresses.are_several
        target = self._target
        if isinstance(error, SilentError):
            self._addresses.was_silent(target.url)
        self.pause_max_ms = 0 if self._addresses.are_several else BACKOFF_MAX_MS
        self._target = next_target(target, answered, lambda: self._stay(target.url) if stays else self._next_address(target.url))
        if isinstance(error, UntrustedError) and self._authorities is None:
            before, self._pool = self._pool, self._new_pool()  # one that has TLS since its restart published what to trust
            before.clear()

    def _unreachable(self, error: Exception, url: str) -> UnreachableError:
        insecure = transport_failure(error, url)
        if insecure is None:
            is_late = isinstance(error, urllib3.exceptions.TimeoutError)
            return (SilentError if is_late else UnreachableError)(str(error))
        if insecure.message != self._said:
            log.warning("%s", insecure)
            self._said = insecure.message
        return UntrustedError(insecure.message)

    def stream_unopened(self, error: HoldfastError, asked: Target) -> None:
        """A command stream could not be opened. One of several coordinators is left for that at once: the next heartbeat, by which
        an only one is known to be away, may be seconds off."""
        if self._addresses.are_several and isinstance(error, UnreachableError | NotLeaderError):
            self.failed(error, asked)

    def learn(self, members: Sequence[str]) -> None:
        """Take over what a coordinator says about its members; on the control thread, as `failed`."""
        self._addresses.reached()
        if members:
            self._addresses.learn(members)

    def _next_address(self, failed: str = "") -> str:
        found = self._addresses.next(self._address.recorded_url(), failed)
        self.pause_max_ms = self._round_pause_max_ms if self._addresses.begins_round else 0
        return found

    def _stay(self, url: str) -> str:
        self.pause_max_ms = self._round_pause_max_ms
        return url

    @property
    def _round_pause_max_ms(self) -> int:
        return ROUND_PAUSE_MAX_MS if self._addresses.are_several else BACKOFF_MAX_MS

    def check_silent(self) -> None:
        """Raise SilentError if the target is one of several that did not answer in time, and still does not: a request there would
        wait for long, while another one may be the active one by now."""
        url = self._target.url
        if not self._addresses.are_several or not self._addresses.is_silent(url):
            return
        timeout = urllib3.Timeout(total=PROBE_TIMEOUT_S)
        try:
            self._pool.request("GET", f"{url}/healthz", timeout=timeout, headers={})
        except urllib3.exceptions.HTTPError as error:
            raise self._unreachable(error, url) from error

    @property
    def report_timeout_s(self) -> float:
        """How long the answer to a report may take: less where another coordinator may have taken over from one that hangs."""
        return REPORT_TIMEOUT_S if self._addresses.are_several else READ_TIMEOUT_S

    def post(self, path: str, message: Any, kind: type[T] | None, timeout_s: float | None = None) -> T | None:
        """Post a message. Raises RefusedError, RejectedError, UnreachableError, or an error that may pass. `kind`: type of the
        answer's body; None ignores it."""
        try:
            body = codec.encode(message)
        except ProtocolError as error:
            raise RejectedError(error.message, error=error, content=True) from error
        answer = self._send(path, body, {}, timeout_s)
        return None if kind is None else codec.decode(answer.data, kind)

    def learn_msgpack(self, *, is_taken: bool) -> None:
        """Take over what a registration was told; on the control thread, as `failed`."""
        self._packs_at = self._target.url if is_taken else ""

    def post_acks(self, path: str, acks: AckBatch, timeout_s: float | None = None) -> AckAnswers:
        """As `post`, of acknowledgements: msgpack where the coordinator takes it, and they are not too many for that.

        One that refuses the content may be an older one, started anew in the place of the other: it gets the same as JSON."""
        packed = codec.encode_msgpack(acks) if self._packs_at == self._target.url else None
        if packed is not None:
            try:
                return codec.decode(self._send(path, packed, {"Content-Type": codec.MSGPACK_TYPE}, timeout_s).data, AckAnswers)
            except RejectedError as error:
                if not error.content:
                    raise
                self._packs_at = ""
        answers = self.post(path, acks, AckAnswers, timeout_s)
        assert answers is not None
        return answers

    def _send(self, path: str, body: bytes, beside: Mapping[str, str], timeout_s: float | None) -> urllib3.BaseHTTPResponse:
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S if timeout_s is None else timeout_s)
        target, headers = self._target, {**self._headers, **beside}
        if target.unreachable_epoch:
            headers = {**headers, UNREACHABLE_HEADER: str(target.unreachable_epoch)}
        if len(body) > BLOCK_BYTES:
            headers = {**headers, "Content-Length": str(len(body))}
        sent = _blocks(body) if len(body) > BLOCK_BYTES else body
        self.check_silent()
        try:
            answer = self._pool.request("POST", f"{target.url}{self._base}{path}", body=sent, headers=headers, timeout=timeout)
        except urllib3.exceptions.HTTPError as error:
            raise self._unreachable(error, target.url) from error
        check_answer(answer.status, answer.headers, answer.data)
        return answer

    def stream(self, action: OpenStream) -> urllib3.BaseHTTPResponse:
        """Open a command stream, to be read by `lines`."""
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=STREAM_TIMEOUT_S)
        fields = {"epoch": str(action.epoch), "session": action.session, "after": str(action.after)}
        try:
            answer = self._pool.request(
                "GET",
                f"{self._target.url}{self._base}/{self._slot}/commands",
                fields=fields,
                timeout=timeout,
                preload_content=False,
            )
            data = b"" if answer.status == 200 else _refusal(answer)
        except urllib3.exceptions.HTTPError as error:
            raise self._unreachable(error, self._target.url) from error
        check_answer(answer.status, answer.headers, data)
        return answer

    def close(self) -> None:
        self._pool.clear()


def _refusal(answer: urllib3.BaseHTTPResponse) -> bytes:
    """Body of a refusal of a stream, or its beginning. Raises what urllib3 does when it breaks off."""
    try:
        return answer.read(REFUSAL_BYTES_MAX)
    finally:
        answer.close()


def _blocks(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), BLOCK_BYTES):
        yield body[start : start + BLOCK_BYTES]


def lines(answer: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """Whole lines of a stream, as they arrive. Raises UnreachableError when it breaks; ends when it ends."""
    rest = bytearray()
    try:
        while chunk := answer.read1(1 << 16):
            rest += chunk
            if b"\n" in chunk:
                *whole, tail = bytes(rest).split(b"\n")
                rest = bytearray(tail)
                yield from (line for line in whole if line.strip())
            if len(rest) > LINE_BYTES_MAX:
                raise UnreachableError(f"a command of more than {LINE_BYTES_MAX} bytes")
    except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
        raise UnreachableError(str(error)) from error
    finally:
        with contextlib.suppress(Exception):
            answer.close()


def check_answer(status: int, headers: Mapping[str, str], data: bytes) -> None:
    """Raises RefusedError, RejectedError, or an error that may pass, for any status but 200. Names in `headers` match in any
    case."""
    if status == 200:
        return
    kind = headers.get(ERROR_HEADER)
    try:
        message = "; ".join(json.loads(data)["errors"])
    except (ValueError, KeyError, TypeError):
        message = data[:200].decode("utf-8", "replace")
    if status in (404, 409):
        raise RefusedError(message, fenced=status == 409, named=decode_fields(headers.get(FIELDS_HEADER)))
    if status in REJECTED_STATUS:
        raise RejectedError(message, error=_typed(kind, status, message), content=status in CONTENT_STATUS)
    if kind == NotLeaderError.__name__:
        raise NotLeaderError.of(message, decode_fields(headers.get(FIELDS_HEADER)))
    raise StorageUnavailableError(f"{status} {kind or ''}: {message}")


def _typed(kind: str | None, status: int, message: str) -> HoldfastError:
    """The error that the coordinator named, so that the driver learns its class."""
    found = ERROR_CLASSES.get(kind or "")
    if found is not None:
        return found(message)
    return AuthenticationError(message) if status in (401, 403) else InvalidConfigError(message)


@dataclass(frozen=True, slots=True)
class _FromStream:
    """Event of the reader of stream number `generation`; dropped if a newer stream was opened."""

    generation: int
    event: Event
    unopened: tuple[HoldfastError, Target] | None = None
    """Why the stream was not opened, and where; None: it was, or was refused."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """Outcome of acknowledgements that the sender posted; dropped if a newer post is under way."""

    number: int
    asked: Target
    outcome: AckAnswers | HoldfastError


_Item: TypeAlias = Event | _FromStream | _Sent | None


class _Heartbeats(msgspec.Struct):
    """Answer to a heartbeat; a coordinator may leave the epoch out."""

    epoch: int = 0
    members: tuple[str, ...] = ()
    """As `Registered.members`: one may have joined since."""


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
        answering: Answering | None = None,
        random_source: random.Random | None = None,
    ) -> None:
        """`answering`: makes the answers to questions; without it the identity must name none."""
        self._identity = identity
        self._clock = clock
        self._deliver = deliver
        self._metrics = metrics
        self._frames_refused = frames_refused
        self._answering = answering
        self._http = CoordinatorHttp(address, identity.job_id, identity.slot)
        self._session = Session(identity, random_source or random.Random(), ack_collect_ms=ACK_COLLECT_MS)
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._large: queue.SimpleQueue[tuple[int, AckBatch] | None] = queue.SimpleQueue()
        """Numbered batches for the sender."""
        self._large_number = 0
        self._is_sending = False
        """The answer to the batch of that number is outstanding."""
        self._is_flushing = False
        self._behind_reports: deque[_Item] = deque()
        """Taken from the inbox behind reports, and next to be handled."""
        self._generation = 0
        self._stream: urllib3.BaseHTTPResponse | None = None
        self._stream_lock = threading.Lock()
        self._stopping = False
        self.rejection: HoldfastError | None = None
        """Why the coordinator does not accept this worker; set before the worker gets the order to leave."""
        self._thread = threading.Thread(target=self._run, name="holdfast-control", daemon=True)
        self._sender = threading.Thread(target=self._send_large, name="holdfast-acknowledgements", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._sender.start()

    def report(self, item: SubtaskStatus | Answerable) -> None:
        """Report a state change, an acknowledgement or a decline of the worker; sent once the coordinator can be reached."""
        self._inbox.put(StatusChanged(item) if isinstance(item, SubtaskStatus) else AnswerReady(item))

    @property
    def unreachable_since_ms(self) -> int | None:
        """Monotonic; None while the coordinator answers."""
        return self._session.unreachable_since_ms

    def flush(self, timeout_s: float) -> None:
        """Wait until all reports are sent, at most `timeout_s`; then end. Used for the last states of a worker that leaves."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    def close(self) -> None:
        """End the threads without waiting for answers, within the time of one request. Idempotent."""
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
                    if not self._stopping and self._session.stop_collecting():
                        self._handle(DeadlineReached())
                case _FromStream(generation=generation, event=seen, unopened=unopened):
                    if generation == self._generation:
                        if unopened is not None:
                            self._http.stream_unopened(*unopened)
                            seen = RequestFailed("stream", self._http.pause_max_ms)
                        self._handle(seen)
                case _Sent():
                    if event.number == self._large_number:
                        self._is_sending = False
                        self._handle(self._ask("acks", partial(_outcome_of, event), event.asked))
                case _:
                    self._handle(event)
        self._end_stream()

    def _next_event(self) -> _Item:
        """The next one; of reports all that wait: each would else be a request of its own, behind the answer to the one before."""
        event = self._behind_reports.popleft() if self._behind_reports else self._wait()
        if not isinstance(event, AnswerReady | StatusChanged):
            return event
        reports = [event]
        for _ in range(self._inbox.qsize()):  # this thread alone takes from it
            following = self._inbox.get()
            if not isinstance(following, AnswerReady | StatusChanged):
                self._behind_reports.append(following)
                break
            reports.append(following)
        return ReportsReady(tuple(reports))

    def _wait(self) -> _Item:
        due_ms = self._session.next_deadline_ms()
        timeout_s = None if due_ms is None else min(threading.TIMEOUT_MAX, max(0.0, (due_ms - self._clock.monotonic_ms()) / 1000))
        try:
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return DeadlineReached()

    def _handle(self, event: Event) -> None:
        """Handle an event, and the answers to the requests that it caused."""
        events: list[Event] = [event]
        while events:
            for action in self._session.handle(events.pop(0), now_ms=self._clock.monotonic_ms()):
                answer = self._perform(action)
                if answer is not None:
                    events.append(answer)

    def _perform(self, action: Action) -> Event | None:
        """Perform one action; returns its answer if there is one at once."""
        slot, timeout_s = self._identity.slot, self._http.report_timeout_s
        match action:
            case Deliver(command=command):
                self._deliver(command)
                return None
            case OpenStream():
                return self._open_stream(action)
            case SendRegister(body=body):
                self.rejection = None
                return self._ask("register", lambda: self._register(body))
            case PostAcks(body=acks):
                if sum(map(inline_bytes, acks.items)) > BLOCK_BYTES:
                    self._large_number, self._is_sending = self._large_number + 1, True
                    self._large.put((self._large_number, acks))
                    return None
                return self._ask("acks", lambda: AcksAnswered(self._http.post_acks(f"/{slot}/acks", acks, timeout_s)))
            case PostStates(body=states):
                return self._ask("states", lambda: self._send(f"/{slot}/states", states))
            case PostHeartbeat(session=session, attempt=attempt, bare=bare):
                beat = Heartbeat(slot, session, attempt, () if bare else self._metrics(attempt), self._frames_refused())
                return self._ask("heartbeat", lambda: self._beat(self._post(f"/{slot}/heartbeat", beat, _Heartbeats, timeout_s)))
            case TakeSample() | AnswerQuestion():
                self._serve_question(action)
                return None
            case _:
                assert_never(action)

    def _serve_question(self, action: TakeSample | AnswerQuestion) -> None:
        """Whatever comes of it: heartbeats must go on."""
        if self._answering is None:
            return
        try:
            if isinstance(action, TakeSample):
                self._answering.sample(action.question)
            else:
                self._http.post(f"/{self._identity.slot}/answers", self._answering.answer(action), None)
        except HoldfastError as error:
            log.debug("the answer to a question of the coordinator was lost: %s", error)
        except Exception:
            log.warning("a question of the coordinator could not be answered", exc_info=True)

    def _register(self, body: RegisterWorker) -> Event:
        registered = self._post("/register", body, Registered)
        self._http.learn(registered.members)
        self._http.learn_msgpack(is_taken=registered.msgpack)
        return RegistrationAnswered(registered)

    def _post(self, path: str, message: Any, kind: type[T], timeout_s: float | None = None) -> T:
        answer = self._http.post(path, message, kind, timeout_s)
        assert answer is not None
        return answer

    def _send(self, path: str, message: Any) -> Event:
        self._http.post(path, message, None, self._http.report_timeout_s)
        return StatesAnswered()

    def _beat(self, answer: _Heartbeats) -> Event:
        self._http.learn(answer.members)
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
                log.warning("the coordinator refused a message of %s, which is not repeated unchanged: %s", request, error)
                return RequestRefused(request, error.message, rejected=True)
            self._http.failed(error, asked)
            return RequestFailed(request, self._http.pause_max_ms)

    # --------------------------------------------------------------------------------------------------------- sender

    def _send_large(self) -> None:
        """Post batches with large state, while the control thread sends heartbeats."""
        while (queued := self._large.get()) is not None:
            number, acks = queued
            if number != self._large_number or self._stopping:
                continue  # the session registered again meanwhile and has posted these items itself
            asked = self._http.target
            try:
                outcome: AckAnswers | HoldfastError = self._http.post_acks(f"/{self._identity.slot}/acks", acks)
            except HoldfastError as error:
                outcome = error
            except Exception as error:  # without a sender nothing would be acknowledged any more, while heartbeats went on
                outcome = RejectedError(f"{type(error).__name__}: {error}", error=ProtocolError(str(error)), content=True)
            self._inbox.put(_Sent(number, asked, outcome))

    # --------------------------------------------------------------------------------------------------- reader thread

    def _open_stream(self, action: OpenStream) -> Event | None:
        """Read a new stream on its own thread; the one before is closed, and its late events are dropped. An event: it can't be."""
        self._end_stream()
        reader = threading.Thread(
            target=self._read, args=(action, self._generation), name=f"holdfast-commands-{self._generation}", daemon=True
        )
        try:
            reader.start()
        except RuntimeError as error:  # the system has no more threads: heartbeats must go on
            log.warning("the command stream can't be read yet: %s", error)
            return RequestFailed("stream")
        return None

    def _read(self, action: OpenStream, generation: int) -> None:
        try:
            self._read_stream(action, generation)
        except Exception:  # without word of its end no other stream would be opened: the worker would be deaf, and go on beating
            log.warning("the command stream failed, and is opened again", exc_info=True)
            self._inbox.put(_FromStream(generation, RequestFailed("stream")))

    def _read_stream(self, action: OpenStream, generation: int) -> None:
        def post(event: Event) -> None:
            self._inbox.put(_FromStream(generation, event))

        asked = self._http.target
        try:
            answer = self._http.stream(action)
        except RefusedError as error:
            post(RequestRefused("stream", error.message))
            return
        except HoldfastError as error:
            self._inbox.put(_FromStream(generation, RequestFailed("stream"), (error, asked)))
            return
        try:
            if not self._adopt(answer, generation):
                answer.close()
                return
            for line in lines(answer):
                post(CommandReceived(codec.decode(line, NumberedCommand)))
            post(RequestFailed("stream"))
        except HoldfastError:
            post(RequestFailed("stream"))

    def _adopt(self, answer: urllib3.BaseHTTPResponse, generation: int) -> bool:
        """Keep an opened stream, unless a newer one was requested meanwhile."""
        with self._stream_lock:
            if generation != self._generation:
                return False
            self._stream = answer
            return True

    def _end_stream(self) -> None:
        """Shut the socket down, which wakes the reader, and the reader closes it. Its late events are dropped."""
        with self._stream_lock:
            self._generation += 1
            stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(Exception):
                stream.shutdown()
