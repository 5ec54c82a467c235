"""The gateway over real HTTP, against a small coordinator that says what a test wants."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.barriers import codec
from holdfast.barriers.codec import ERROR_HEADER, FIELDS_HEADER, UNREACHABLE_HEADER
from holdfast.barriers.messages import (
    AckAnswers,
    AckBatch,
    AcknowledgeCheckpoint,
    AckStatus,
    CheckpointKind,
    DeclineCheckpoint,
    FailureReason,
    NotifyCheckpointComplete,
    NumberedCommand,
    Registered,
    RegisterWorker,
    ShutdownWorker,
    StatusBatch,
    SubtaskMetrics,
    SubtaskStatus,
    TaskState,
    TriggerCheckpoint,
    WorkerAnswer,
    WorkerCommand,
    WorkerQuestion,
)
from holdfast.barriers.run_record import RunRecord, write_run_record
from holdfast.barriers.transport.socketfolder import SocketFolder, make_socket_folder
from holdfast.operators.task.pool import SystemClock, ThreadPool
from holdfast.operators.worker import main as worker_main
from holdfast.operators.worker.answers import QUESTIONS, Answering
from holdfast.operators.worker.gateway import (
    BLOCK_BYTES,
    CONNECT_TIMEOUT_S,
    READ_TIMEOUT_S,
    ROUND_PAUSE_MAX_MS,
    CoordinatorAddress,
    CoordinatorHttp,
    Gateway,
    SilentError,
    UnreachableError,
)
from holdfast.operators.worker.kept_log import KeptLog
from holdfast.operators.worker.kept_output import KeptOutput
from holdfast.operators.worker.leader_retrieval import SILENT_ROUNDS
from holdfast.operators.worker.main import WorkerSpec, run_worker
from holdfast.operators.worker.session import REGISTER_BYTES_MAX
from holdfast.operators.worker.session_events import OpenStream, WorkerIdentity
from holdfast.operators.worker.stacks import StackSampler
from holdfast.statebackends.errors import (
    AuthenticationError,
    HoldfastError,
    InvalidConfigError,
    NotLeaderError,
    StateDirectoryNotSharedError,
    StorageUnavailableError,
)
from holdfast.statebackends.handles import InlineHandle, KeyedStateHandle, KeyGroupRange, OperatorSubtaskState
from holdfast.statebackends.layout import DIRECTORY_FILE, RUN_FILE

IDENTITY = WorkerIdentity("job", 0, 1, 1, "nonce", 1, "host", "tcp://h:1", "dir")
DEADLINE_S = 10.0


def eventually(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.005)


class FakeCoordinator:
    """Answers the worker protocol on a free port; `commands` are sent to every open stream, numbered."""

    def __init__(self, epoch: int = 1) -> None:
        self.epoch = epoch
        self.session = f"s{epoch}"
        self.requests: list[tuple[str, Any]] = []
        self.tokens: list[str | None] = []
        self.commands: list[WorkerCommand] = []
        self.questions: list[WorkerQuestion] = []
        """For the one open stream."""
        self.refuse: dict[str, tuple[int, str]] = {}
        self.refused: list[str] = []
        self.fields: dict[str, Any] = {}
        """Of the errors with which it refuses."""
        self.held = threading.Event()
        """Bodies of acknowledgements are read on while it is set."""
        self.held.set()
        self.holding = False
        self.leader: tuple[str, int] | None = None
        """URL and epoch of who leads the job, if it is not led from here."""
        self.unreachable: list[str | None] = []
        self.attempt = 0
        self.heartbeat_interval_ms = 50
        self.members: tuple[str, ...] = ()
        """Named in answers to heartbeats."""
        self.takes_msgpack = False
        """As an older version, it says nothing of msgpack and refuses it, unless set."""
        self.says_msgpack: bool | None = None
        """What it says of it; None: what is so."""
        self.ack_types: list[str] = []
        """Content types of requests with acknowledgements, refused ones, too."""
        self.cut_streams: list[tuple[str, str, bytes]] = []
        """(header that says how long it is, its value, what there is of it) of refusals of streams that break off."""
        self.closing = threading.Event()
        handler = self._handler()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def of(self, path: str) -> list[Any]:
        return [body for name, body in self.requests if name == path]

    def close(self) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(5)

    def answer(self, path: str, body: bytes) -> Any:
        match path:
            case "register":
                self.requests.append((path, codec.decode(body, RegisterWorker)))
                said = self.takes_msgpack if self.says_msgpack is None else self.says_msgpack
                answer = Registered(self.epoch, self.session, self.attempt, None, 0, (), self.heartbeat_interval_ms, 50_000)
                return msgspec.structs.replace(answer, msgpack=said)
            case "acks":
                is_packed = self.ack_types[-1] == codec.MSGPACK_TYPE
                batch = (codec.decode_packed if is_packed else codec.decode)(body, AckBatch)
                self.requests.append((path, batch))
                return AckAnswers(self.epoch, (AckStatus.SUCCESS,) * len(batch.items))
            case "answers":
                self.requests.append((path, codec.decode(body, WorkerAnswer)))
                return {}
            case "states":
                self.requests.append((path, codec.decode(body, StatusBatch)))
                return {}
            case _:
                self.requests.append((path, json.loads(body)))
                return {"epoch": self.epoch, "members": self.members}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None: ...

            def do_POST(self) -> None:
                if fake.closing.is_set():
                    self.close_connection = True
                    return
                fake.tokens.append(self.headers["Authorization"])
                fake.unreachable.append(self.headers[UNREACHABLE_HEADER])
                name = self.path.rpartition("/")[2]
                if name == "acks" and not fake.held.is_set():
                    fake.holding = True
                    fake.held.wait(DEADLINE_S)
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, kind = fake.refuse.get(name, (200, "")) if fake.leader is None else (503, "NotLeaderError")
                if name == "acks":
                    fake.ack_types.append(self.headers["Content-Type"])
                    if status == 200 and fake.ack_types[-1] == codec.MSGPACK_TYPE and not fake.takes_msgpack:
                        status, kind = 400, "ProtocolError"
                if status != 200:
                    fake.refused.append(name)
                data = codec.encode(fake.answer(name, body)) if status == 200 else b'{"errors": ["refused"]}'
                self.send_response(status)
                if kind:
                    self.send_header(ERROR_HEADER, kind)
                if status != 200 and fake.fields:
                    self.send_header(FIELDS_HEADER, json.dumps(fake.fields))
                if fake.leader is not None:
                    url, epoch = fake.leader
                    self.send_header(FIELDS_HEADER, json.dumps({"job": "job", "epoch": epoch, "url": url}))
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _refuse_and_cut(self, header: str, value: str, body: bytes) -> None:
                self.send_response(503)
                self.send_header(header, value)
                self.end_headers()
                self.wfile.write(body)
                self.close_connection = True

            def do_GET(self) -> None:
                after = int(self.path.rpartition("after=")[2])
                fake.requests.append(("commands", after))
                if fake.cut_streams:
                    self._refuse_and_cut(*fake.cut_streams.pop())
                    return
                self.send_response(200)
                self.end_headers()
                sent = after
                while not fake.closing.wait(0.01):
                    while fake.questions:
                        line = NumberedCommand(fake.epoch, fake.session, sent, None, fake.questions.pop(0))
                        self.wfile.write(codec.encode(line) + b"\n")
                    while sent < len(fake.commands):
                        sent += 1
                        line = NumberedCommand(fake.epoch, fake.session, sent, fake.commands[sent - 1])
                        self.wfile.write(codec.encode(line) + b"\n")
                    self.wfile.flush()
                self.close_connection = True

        return Handler


@pytest.fixture
def fake() -> Iterator[FakeCoordinator]:
    coordinator = FakeCoordinator()
    yield coordinator
    coordinator.close()


class Client:
    """A gateway and what it delivered."""

    def __init__(self, url: str, state_directory: str | None = None) -> None:
        self.delivered: list[WorkerCommand] = []
        address = CoordinatorAddress(url, "secret", state_directory)
        self.metrics: tuple[SubtaskMetrics, ...] = ()
        self.measured = 0
        self.gateway = Gateway(IDENTITY, address, SystemClock(), deliver=self.delivered.append, metrics=self._measure)
        self.gateway.start()

    def _measure(self, attempt: int) -> tuple[SubtaskMetrics, ...]:
        self.measured += bool(self.metrics)
        return self.metrics


@pytest.fixture
def client(fake: FakeCoordinator) -> Iterator[Client]:
    client = Client(fake.url)
    yield client
    client.gateway.close()


def test_registers_with_its_token_and_beats(fake: FakeCoordinator, client: Client) -> None:
    eventually(lambda: len(fake.of("heartbeat")) >= 2, "two heartbeats")
    assert len(fake.of("register")) == 1
    assert set(fake.tokens) == {"Bearer secret"}
    assert client.gateway.unreachable_since_ms is None


def test_commands_arrive_once_and_in_order(fake: FakeCoordinator, client: Client) -> None:
    shutdown = ShutdownWorker("done")
    fake.commands += [shutdown]
    eventually(lambda: client.delivered == [shutdown], "the command")


def test_acks_and_states_are_answered(fake: FakeCoordinator, client: Client) -> None:
    ack = AcknowledgeCheckpoint(0, 1, "v", 0)
    client.gateway.report(ack)
    client.gateway.report(SubtaskStatus(0, "v", 0, TaskState.RUNNING))
    eventually(lambda: [batch.items for batch in fake.of("acks")] == [(ack,)], "the ack")
    eventually(lambda: [len(batch.subtasks) for batch in fake.of("states")] == [1], "the state")


def test_acks_are_packed_where_the_coordinator_says_that_it_takes_it(fake: FakeCoordinator) -> None:
    fake.takes_msgpack = True
    client = Client(fake.url)
    ack = AcknowledgeCheckpoint(0, 1, "v", 0)
    client.gateway.report(ack)
    eventually(lambda: [batch.items for batch in fake.of("acks")] == [(ack,)], "the ack")
    assert fake.ack_types == [codec.MSGPACK_TYPE]
    client.gateway.close()


def test_acks_are_json_for_a_coordinator_that_says_nothing_of_msgpack(fake: FakeCoordinator) -> None:
    client = Client(fake.url)
    ack = AcknowledgeCheckpoint(0, 1, "v", 0)
    client.gateway.report(ack)
    eventually(lambda: [batch.items for batch in fake.of("acks")] == [(ack,)], "the ack")
    assert fake.ack_types == [codec.JSON_TYPE]
    client.gateway.close()


@pytest.mark.parametrize("size", [1, BLOCK_BYTES + 1])
def test_an_older_coordinator_in_the_place_of_a_newer_one_loses_no_ack(fake: FakeCoordinator, size: int) -> None:
    """It is asked once, by the control thread or the sender, gets the same as JSON, and after that nothing but JSON."""
    fake.says_msgpack = True
    client = Client(fake.url)
    for checkpoint_id in (1, 2):
        ack = large_ack(checkpoint_id, size)
        client.gateway.report(ack)
        eventually(lambda ack=ack: [each.items for each in fake.of("acks")][-1:] == [(ack,)], "the ack")  # type: ignore[misc]
    assert fake.ack_types == [codec.MSGPACK_TYPE, codec.JSON_TYPE, codec.JSON_TYPE]
    client.gateway.close()


def test_acks_that_are_too_large_to_be_packed_are_json(fake: FakeCoordinator) -> None:
    fake.takes_msgpack = True
    client = Client(fake.url)
    client.gateway.report(large_ack(1, codec.MSGPACK_BYTES_MAX))
    eventually(lambda: fake.of("acks"), "the ack")
    assert fake.ack_types == [codec.JSON_TYPE]
    client.gateway.close()


class Answers(Answering):
    """Of a process whose loop is this test's thread; `broken`: it can't be looked at."""

    def __init__(self) -> None:
        self.log = KeptLog()
        super().__init__(0, StackSampler(threading.get_ident(), lambda: None), self.log, KeptOutput())
        self.broken, self.failures = False, 0

    def sample(self, question: WorkerQuestion) -> None:
        if self.broken:
            self.failures += 1
            raise RuntimeError("no stacks")
        super().sample(question)


@pytest.fixture
def answers(fake: FakeCoordinator) -> Iterator[Answers]:
    found = Answers()
    address = CoordinatorAddress(fake.url, "secret")
    identity = msgspec.structs.replace(IDENTITY, questions=QUESTIONS)
    delivered: list[WorkerCommand] = []
    gateway = Gateway(identity, address, SystemClock(), deliver=delivered.append, metrics=lambda _: (), answering=found)
    gateway.start()
    yield found
    gateway.close()


def test_questions_are_answered_while_the_loop_does_nothing(fake: FakeCoordinator, answers: Answers) -> None:
    fake.questions += [WorkerQuestion("q1", "stacks", 0, 2, 10), WorkerQuestion("q2", "log", 0), WorkerQuestion("q3", "heap", 0)]
    eventually(lambda: fake.of("answers")[-1:] and fake.of("answers")[-1].question == "q3", "the newest answer")
    assert fake.of("register")[0].questions == ("stacks", "log", "stdout")
    fake.questions.append(WorkerQuestion("q4", "stacks", 0, 2, 10))
    eventually(lambda: fake.of("answers")[-1].question == "q4", "the last answer")
    assert {answer.question: answer.known for answer in fake.of("answers")}["q3"] is False
    answer = fake.of("answers")[-1]
    assert (answer.session, answer.samples) == ("s1", 2)
    assert "test_questions_are_answered_while_the_loop_does_nothing" in {line.function for line in answer.code}


def test_an_answer_that_is_refused_or_can_not_be_made_stops_nothing(fake: FakeCoordinator, answers: Answers) -> None:
    for number, (status, kind) in enumerate([(409, "FencedError"), (404, "NotFoundError"), (413, ""), (500, "")]):
        fake.refuse["answers"] = status, kind
        fake.questions.append(WorkerQuestion(f"q{number}", "log", 0))
        eventually(lambda count=number + 1: fake.refused.count("answers") == count, "the refusal")  # type: ignore[misc]
    fake.refuse.clear()
    answers.broken = True
    fake.questions.append(WorkerQuestion("broken", "stacks", 0, 1, 10))
    eventually(lambda: answers.failures == 1, "the failure")
    answers.broken = False
    fake.questions.append(WorkerQuestion("after", "log", 0))
    eventually(lambda: any(answer.question == "after" for answer in fake.of("answers")), "the answer behind them")
    beats = len(fake.of("heartbeat"))
    eventually(lambda: len(fake.of("heartbeat")) > beats + 1, "further heartbeats")
    assert len(fake.of("register")) == 1, "a refused answer says nothing of the session"


def test_acks_that_wait_for_an_answer_are_one_request(fake: FakeCoordinator, client: Client) -> None:
    acks = [AcknowledgeCheckpoint(0, 1, "v", subtask) for subtask in range(50)]
    fake.held.clear()
    client.gateway.report(acks[0])
    eventually(lambda: fake.holding, "the first request")
    for ack in acks[1:]:
        client.gateway.report(ack)
    client.gateway.report(SubtaskStatus(0, "v", 0, TaskState.RUNNING))
    fake.held.set()
    eventually(lambda: fake.of("states"), "the state behind them")
    assert [batch.items for batch in fake.of("acks")] == [tuple(acks[:1]), tuple(acks[1:])]


def test_refused_registration_ends_the_worker(fake: FakeCoordinator) -> None:
    fake.refuse["register"] = (409, "FencedError")
    client = Client(fake.url)
    eventually(lambda: client.delivered == [ShutdownWorker("displaced: refused", respawn=True)], "the end")
    client.gateway.close()


def test_a_worker_that_leaves_waits_for_one_request_and_not_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_s = 0.0

    class Asking:
        """A thread whose request is not answered in time."""

        def is_alive(self) -> bool:
            return True

        def join(self, timeout_s: float) -> None:
            nonlocal waited_s
            waited_s += timeout_s

    monkeypatch.setattr("holdfast.operators.worker.gateway.time", SimpleNamespace(monotonic=lambda: waited_s), raising=False)
    address = CoordinatorAddress("http://127.0.0.1:9", None)
    gateway = Gateway(IDENTITY, address, SystemClock(), deliver=lambda _: None, metrics=lambda attempt: ())
    monkeypatch.setattr(gateway, "_thread", Asking())
    monkeypatch.setattr(gateway, "_sender", Asking())
    gateway.close()
    assert waited_s == CONNECT_TIMEOUT_S + READ_TIMEOUT_S


def test_broken_answer_is_retried(fake: FakeCoordinator, client: Client) -> None:
    eventually(lambda: fake.of("register"), "registration")
    fake.refuse["acks"] = (503, "StorageUnavailableError")
    ack = AcknowledgeCheckpoint(0, 1, "v", 0)
    client.gateway.report(ack)
    eventually(lambda: fake.refuse.pop("acks", None) is not None, "the fault")
    eventually(lambda: [batch.items for batch in fake.of("acks")] == [(ack,)], "the ack")
    assert len(fake.of("register")) == 1, "an answer that may be better later is no reason to register"


@pytest.mark.parametrize("status", [400, 413, 422])
def test_an_ack_that_is_never_taken_keeps_no_other_back(fake: FakeCoordinator, client: Client, status: int) -> None:
    eventually(lambda: fake.of("heartbeat"), "registration")
    fake.refuse["acks"] = (status, "")
    client.gateway.report(AcknowledgeCheckpoint(0, 1, "v", 0))
    eventually(lambda: client.gateway._session.unanswered_count == 1, "the ack")
    eventually(lambda: fake.refused.count("acks") == 2, "it, and its decline")
    del fake.refuse["acks"]
    ack = AcknowledgeCheckpoint(0, 2, "v", 0)
    client.gateway.report(ack)
    eventually(lambda: [batch.items for batch in fake.of("acks")] == [(ack,)], "the next ack")
    assert len(fake.of("register")) == 1


def large_ack(checkpoint_id: int, size: int = BLOCK_BYTES + 1) -> AcknowledgeCheckpoint:
    handle = KeyedStateHandle(KeyGroupRange(0, 128), "arrow", (), (InlineHandle(bytes(size)),))
    return AcknowledgeCheckpoint(0, checkpoint_id, "v", 0, {"v": OperatorSubtaskState(keyed=(handle,))})


def test_a_worker_beats_while_a_large_ack_travels(fake: FakeCoordinator, client: Client) -> None:
    """It may take longer than a worker may be silent, which then was killed in its best health."""
    fake.held.clear()
    client.gateway.report(large_ack(1))
    eventually(lambda: fake.holding, "the ack on its way")
    beats = len(fake.of("heartbeat"))
    eventually(lambda: len(fake.of("heartbeat")) >= beats + 3, "heartbeats beside it")
    client.gateway.report(SubtaskStatus(0, "v", 0, TaskState.RUNNING))
    eventually(lambda: fake.of("states"), "a state beside it")
    assert fake.of("acks") == []
    fake.held.set()
    eventually(lambda: [batch.items for batch in fake.of("acks")] == [(large_ack(1),)], "the ack")
    eventually(lambda: client.gateway._session.unanswered_count == 0, "its answer")


def test_a_large_ack_is_flushed_like_any_other(fake: FakeCoordinator, client: Client) -> None:
    eventually(lambda: fake.of("heartbeat"), "registration")
    fake.held.clear()
    client.gateway.report(large_ack(1))
    client.gateway.report(large_ack(2))
    flushing = threading.Thread(target=client.gateway.flush, args=(DEADLINE_S,))
    flushing.start()
    eventually(lambda: fake.holding, "the first on its way")
    fake.held.set()
    flushing.join(DEADLINE_S)
    assert [item.checkpoint_id for batch in fake.of("acks") for item in batch.items] == [1, 2]


def test_a_large_ack_is_posted_anew_after_a_registration_beside_it(fake: FakeCoordinator, client: Client) -> None:
    fake.held.clear()
    ack = large_ack(1, REGISTER_BYTES_MAX + 1)
    client.gateway.report(ack)
    eventually(lambda: fake.holding, "the ack on its way")
    fake.epoch, fake.session = 2, "s2"
    eventually(lambda: len(fake.of("register")) == 2, "the registration with the next leader")
    assert fake.of("register")[1].unanswered == ()
    fake.held.set()
    eventually(lambda: client.gateway._session.unanswered_count == 0, "its answer")
    assert [(batch.epoch, batch.items) for batch in fake.of("acks")] == [(1, (ack,)), (2, (ack,))]


def test_a_large_ack_that_is_never_taken_is_declined(fake: FakeCoordinator, client: Client) -> None:
    eventually(lambda: fake.of("heartbeat"), "registration")
    fake.refuse["acks"] = (413, "")
    client.gateway.report(large_ack(1))
    eventually(lambda: fake.refused.count("acks") == 2, "it, and its decline")
    assert len(fake.of("register")) == 1


def test_what_was_asked_before_the_target_changed_says_nothing_about_the_new_one() -> None:
    """A late failure must not make a leader that lives be told of as gone."""
    http = CoordinatorHttp(CoordinatorAddress("http://127.0.0.1:1", None), "job", 0)
    before = http.target
    http.failed(NotLeaderError("elsewhere", job="job", epoch=4, url="http://127.0.0.1:2"))
    leader = http.target
    assert leader.url == "http://127.0.0.1:2"
    http.failed(UnreachableError("late"), before)
    assert http.target is leader
    http.failed(UnreachableError("now"), leader)
    assert http.target.unreachable_epoch == 4
    http.close()


def test_an_ack_that_can_not_be_encoded_is_declined(fake: FakeCoordinator, client: Client) -> None:
    ack = AcknowledgeCheckpoint(0, 1, "v", 0, {"caf\udce9": OperatorSubtaskState()})
    client.gateway.report(ack)
    eventually(lambda: fake.of("acks"), "what is said instead")
    ((decline,),) = (batch.items for batch in fake.of("acks"))
    assert isinstance(decline, DeclineCheckpoint)
    assert (decline.checkpoint_id, decline.reason) == (1, FailureReason.DECLINED)
    assert "can't be encoded" in decline.message


def test_a_heartbeat_that_can_not_be_encoded_goes_without_its_counters(fake: FakeCoordinator, client: Client) -> None:
    """It was tried again for ever, and nobody heard that the worker lives."""
    client.metrics = (SubtaskMetrics("caf\udce9", 0, records_in=7),)
    eventually(lambda: client.measured, "counters that are in no JSON")
    beats = len(fake.of("heartbeat"))
    eventually(lambda: len(fake.of("heartbeat")) >= beats + 3, "heartbeats without them")
    assert all(beat["metrics"] == [] for beat in fake.of("heartbeat"))
    assert client.measured == 1
    assert len(fake.of("register")) == 1


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_heartbeat_that_is_never_taken_goes_without_its_counters(fake: FakeCoordinator, client: Client, status: int) -> None:
    eventually(lambda: fake.of("heartbeat"), "registration")
    fake.refuse["heartbeat"] = (status, "")
    client.metrics = (SubtaskMetrics("v", 0, records_in=7),)
    eventually(lambda: client.gateway._session.unreachable_since_ms is not None, "one without counters that is refused as well")
    del fake.refuse["heartbeat"]
    beats = len(fake.of("heartbeat"))
    eventually(lambda: len(fake.of("heartbeat")) > beats, "a heartbeat")
    assert fake.of("heartbeat")[-1]["metrics"] == []
    assert len(fake.of("register")) == 1


def test_coordinator_that_restarts_elsewhere_is_found(tmp_path: Path) -> None:
    first = FakeCoordinator()
    client = Client(first.url, str(tmp_path))
    eventually(lambda: first.of("heartbeat"), "the first coordinator")
    first.close()
    second = FakeCoordinator(epoch=2)
    write_run_record(tmp_path, RunRecord(second.url, 1, "host", 1))
    ack = AcknowledgeCheckpoint(0, 1, "v", 0)
    client.gateway.report(ack)
    eventually(lambda: second.of("register"), "the second coordinator")
    assert second.of("register")[0].unanswered == (ack,)
    eventually(lambda: client.gateway.unreachable_since_ms is None, "contact")
    client.gateway.close()
    second.close()


CHUNKED = ("Transfer-Encoding", "chunked")
CUT = [("Content-Length", "100", b'{"err'), (*CHUNKED, b'20\r\n{"err'), (*CHUNKED, b"x\r\n")]


@pytest.mark.parametrize("cut", CUT, ids=["content length", "chunk", "no chunk"])
def test_a_stream_whose_refusal_breaks_off_is_asked_for_again(fake: FakeCoordinator, cut: tuple[str, str, bytes]) -> None:
    fake.cut_streams.append(cut)
    client = Client(fake.url)
    fake.commands.append(ShutdownWorker("done"))
    eventually(lambda: client.delivered == fake.commands, "the command, over the next stream")
    assert len(fake.of("commands")) == 2
    client.gateway.close()


def test_a_refusal_without_end_is_not_read_to_its_end(fake: FakeCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.operators.worker.gateway.REFUSAL_BYTES_MAX", 8)
    fake.cut_streams.append(("Content-Length", str(1 << 40), b'{"errors'))
    http = CoordinatorHttp(CoordinatorAddress(fake.url, "secret"), "job", 0)
    with pytest.raises(StorageUnavailableError, match=r'503 : \{"errors'):
        http.stream(OpenStream(1, "s1", 0))
    http.close()


def test_a_reader_that_fails_for_any_reason_is_followed_by_another(
    fake: FakeCoordinator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left, opened = [RuntimeError("a defect"), RuntimeError("another")], CoordinatorHttp.stream

    def open_stream(http: CoordinatorHttp, action: OpenStream) -> Any:
        if left:
            raise left.pop()
        return opened(http, action)

    monkeypatch.setattr(CoordinatorHttp, "stream", open_stream)
    client = Client(fake.url)
    fake.commands.append(ShutdownWorker("done"))
    eventually(lambda: client.delivered == fake.commands, "the command, over the third stream")
    client.gateway.close()
    assert "the command stream failed" in caplog.text


def test_a_reader_that_can_not_be_started_is_started_later(fake: FakeCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the process's limit of threads: without its control thread the worker would be taken for dead."""
    left = [RuntimeError("can't start new thread")]

    class Thread(threading.Thread):
        def start(self) -> None:
            if left and self.name.startswith("holdfast-commands"):
                raise left.pop()
            super().start()

    monkeypatch.setattr("holdfast.operators.worker.gateway.threading", SimpleNamespace(**{**vars(threading), "Thread": Thread}))
    client = Client(fake.url)
    fake.commands.append(ShutdownWorker("done"))
    eventually(lambda: client.delivered == fake.commands, "the command")
    client.gateway.close()


def test_one_of_several_coordinators_is_left_when_its_stream_can_not_be_opened_again() -> None:
    """The next heartbeat may be seconds off, and another coordinator leads the job by then."""
    first, second = FakeCoordinator(), FakeCoordinator(epoch=2)
    first.heartbeat_interval_ms = second.heartbeat_interval_ms = 600_000
    client = Client(f"{first.url},{second.url}")
    eventually(lambda: first.of("commands"), "the first coordinator")
    assert second.requests == []
    first.close()
    eventually(lambda: second.of("commands"), "the second coordinator")
    client.gateway.close()
    second.close()


def test_members_that_joined_are_known_from_the_answers_to_heartbeats() -> None:
    first, second = FakeCoordinator(), FakeCoordinator(epoch=2)
    client = Client(first.url)
    eventually(lambda: first.of("heartbeat"), "the first coordinator")
    first.members = (first.url, second.url)
    beats = len(first.of("heartbeat"))
    eventually(lambda: len(first.of("heartbeat")) > beats + 1, "an answer with the members")
    first.close()
    eventually(lambda: second.requests, "the second coordinator")
    client.gateway.close()
    second.close()


def test_heartbeat_waits_for_less_where_another_coordinator_may_have_taken_over() -> None:
    alone = CoordinatorHttp(CoordinatorAddress("http://10.0.0.1:1", None), "job", 0)
    several = CoordinatorHttp(CoordinatorAddress("http://10.0.0.1:1,http://10.0.0.2:1", None), "job", 0)
    assert alone.report_timeout_s == READ_TIMEOUT_S > several.report_timeout_s


def test_members_that_are_gone_hold_no_worker_up_on_its_way_to_the_one_that_took_over() -> None:
    """Each of them cost a pause that grew: eight dead ones kept a job without its workers for several seconds."""
    gone = [f"http://127.0.0.1:{port}" for port in range(1, 9)]
    first, second = FakeCoordinator(), FakeCoordinator(epoch=2)
    first.members = (first.url, *gone, second.url)
    client = Client(",".join([first.url, *gone]))
    eventually(lambda: first.of("heartbeat"), "the first coordinator")
    first.close()
    began_s = time.monotonic()
    eventually(lambda: second.of("register"), "the second coordinator")
    assert time.monotonic() - began_s < 1.5
    client.gateway.close()
    second.close()


def test_one_that_stands_still_is_probed_before_a_registration_waits_for_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        http = CoordinatorHttp(CoordinatorAddress(f"{url},http://127.0.0.1:1", "secret"), "job", 0)
        http.check_silent()  # it may be asked as yet
        http.failed(SilentError("no answer in time"))
        assert http.target.url != url
        assert http.pause_max_ms == 0
        for _ in range(3 * SILENT_ROUNDS):
            if http.target.url == url:
                break
            http.failed(UnreachableError("refused"))
            assert http.pause_max_ms in (0, ROUND_PAUSE_MAX_MS)
        assert http.target.url == url, "it is asked again"
        with pytest.raises(SilentError):
            http.check_silent()
        connection, _ = silent.accept()
        assert b"secret" not in connection.recv(4096)
        connection.close()
        http.close()


@pytest.mark.parametrize(
    ("url", "used"),
    [
        ("https://10.0.0.1:1/", "https://10.0.0.1:1"),
        ("http://127.0.0.1:9", None),
        ("http://10.0.0.1:1", None),
        ("", None),
        ("https://[", None),
    ],
)
def test_address_that_a_token_must_not_go_to_is_not_used(tmp_path: Path, url: str, used: str | None) -> None:
    """A loopback address in a shared directory is that of another machine; an unencrypted one tells the token to the network."""
    write_run_record(tmp_path, RunRecord(url, 1, "host", 1))
    assert CoordinatorAddress("https://10.0.0.2:1", "secret", str(tmp_path)).recorded_url() == used


def test_what_is_no_record_of_a_coordinator_keeps_no_worker_from_the_address_that_it_was_given(
    fake: FakeCoordinator, tmp_path: Path
) -> None:
    with open(tmp_path / RUN_FILE, "wb") as file:
        file.truncate(1 << 40)
    client = Client(fake.url, str(tmp_path))
    eventually(lambda: fake.of("heartbeat"), "the coordinator")
    client.gateway.close()


def test_the_leader_that_the_address_names_is_registered_with(fake: FakeCoordinator, tmp_path: Path) -> None:
    """Whose address is in the state directory need not be who leads the job."""
    leader = FakeCoordinator(epoch=4)
    fake.leader = (leader.url, 4)
    write_run_record(tmp_path, RunRecord(fake.url, 1, "host", 1))
    client = Client("http://127.0.0.1:9", str(tmp_path))
    eventually(lambda: len(leader.of("heartbeat")) >= 2, "two heartbeats at the leader")
    assert set(leader.tokens) == {"Bearer secret"}
    assert set(leader.unreachable) == {None}
    assert len(fake.tokens) == 1, "who leads is remembered"
    client.gateway.close()
    leader.close()


def test_a_leader_that_is_gone_is_told_to_who_named_it(fake: FakeCoordinator, tmp_path: Path) -> None:
    """It is there that the job is led next, or at whatever address is in the state directory by then."""
    leader = FakeCoordinator(epoch=4)
    fake.leader = (leader.url, 4)
    write_run_record(tmp_path, RunRecord(fake.url, 1, "host", 1))
    client = Client(fake.url, str(tmp_path))
    eventually(lambda: leader.of("heartbeat"), "the leader")
    leader.close()
    eventually(lambda: "4" in fake.unreachable, "the epoch that leads no more")
    assert fake.of("register") == []
    fake.epoch, fake.session, fake.leader = 5, "s5", None
    eventually(lambda: fake.of("register"), "the registration where the job is led again")
    eventually(lambda: client.gateway.unreachable_since_ms is None, "contact")
    client.gateway.close()


def test_a_leader_of_an_older_submission_is_not_asked_again(fake: FakeCoordinator) -> None:
    """It slept; where the address leads meanwhile, our submission is known."""
    asleep = FakeCoordinator(epoch=4)
    asleep.refuse["register"], asleep.fields = (409, "FencedError"), {"held": IDENTITY.submission, "newer": IDENTITY.submission - 1}
    fake.leader = (asleep.url, 4)
    client = Client(fake.url)
    eventually(lambda: asleep.refused, "the answer of who slept")
    fake.leader = None
    eventually(lambda: fake.of("register"), "the registration")
    assert client.delivered == []
    client.gateway.close()
    asleep.close()


def test_two_that_name_each_other_are_asked_no_faster_than_one_that_is_away(fake: FakeCoordinator) -> None:
    other = FakeCoordinator()
    fake.leader, other.leader = (other.url, 4), (fake.url, 4)
    client = Client(fake.url)
    eventually(lambda: len(fake.tokens) + len(other.tokens) >= 6, "some tries")
    assert client.gateway.unreachable_since_ms is not None
    assert client.gateway._session._failures >= 5, "each of them counts for the backoff"
    client.gateway.close()
    other.close()


def test_trigger_and_notice_are_delivered_over_one_stream(fake: FakeCoordinator, client: Client) -> None:
    fake.commands += [TriggerCheckpoint(0, 1, 0, CheckpointKind.CHECKPOINT, "f"), NotifyCheckpointComplete(0, 1, 0)]
    eventually(lambda: len(client.delivered) == 2, "both")
    assert len(fake.of("commands")) == 1


@pytest.mark.parametrize(
    ("status", "named", "kind"),
    [
        (400, "StateDirectoryNotSharedError", StateDirectoryNotSharedError),
        (401, "AuthenticationError", AuthenticationError),
        (403, "", AuthenticationError),
        (400, "no_such_kind", InvalidConfigError),
    ],
)
def test_registration_that_can_never_succeed_ends_the_worker_with_its_error(
    fake: FakeCoordinator, status: int, named: str, kind: type[HoldfastError]
) -> None:
    fake.refuse["register"] = (status, named)
    client = Client(fake.url)
    eventually(lambda: client.delivered == [ShutdownWorker("rejected: refused")], "the end")
    assert type(client.gateway.rejection) is kind
    client.gateway.close()
    assert len(fake.tokens) == 1, "it is not asked again"


def test_worker_raises_what_it_was_rejected_for(fake: FakeCoordinator, tmp_path: Path) -> None:
    fake.refuse["register"] = (400, "StateDirectoryNotSharedError")
    spec = WorkerSpec("job", 0, 1, 1, fake.url, "secret", str(tmp_path), b"", str(tmp_path / "local"), watch_parent=False)
    with pytest.raises(StateDirectoryNotSharedError, match="refused"):
        run_worker(spec)
    assert not list((tmp_path / "local").iterdir())


@pytest.mark.parametrize(
    "fails", ["open_storage", "route_address", "ZmqTransport", "warm_imports", "LocalRecovery", "Gateway", "Watch"]
)
def test_a_worker_that_fails_while_it_starts_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Spark may give its process to another task; a folder that it still held no sweep would take."""
    sockets: list[SocketFolder] = []

    def make(parent: str) -> SocketFolder:
        folder = make_socket_folder(parent)
        assert folder is not None
        sockets.append(folder)
        return folder

    class Refused(Exception):
        pass

    def refuse(*_: object, **__: object) -> None:
        raise Refused

    monkeypatch.setattr(worker_main, "make_socket_folder", make)
    if fails == "warm_imports":
        monkeypatch.setattr(ThreadPool, "run", refuse)
    else:
        monkeypatch.setattr(worker_main, fails, refuse)
    local, state = tmp_path / "local", tmp_path / "state"
    threads = set(threading.enumerate())
    spec = WorkerSpec("job", 0, 1, 1, "http://127.0.0.1:1", "secret", str(state), b"", str(local), watch_parent=False)
    with pytest.raises(Refused):
        run_worker(spec)
    assert not list(local.iterdir())
    assert not [folder for folder in sockets if Path(folder.path).exists()]
    held = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [path for path in held if path.startswith((str(local), *(folder.path for folder in sockets)))]
    eventually(lambda: set(threading.enumerate()) <= threads, "the end of its threads")


@pytest.mark.parametrize("nonce", ["ours", "theirs"])
def test_coordinator_of_another_directory_of_that_name_gets_no_token(fake: FakeCoordinator, tmp_path: Path, nonce: str) -> None:
    """The driver's directory need not be shared: what is under its path on the worker's machine may be another deployment's."""
    (tmp_path / DIRECTORY_FILE).write_text(nonce)
    other = FakeCoordinator()
    write_run_record(tmp_path, RunRecord(other.url, 1, "host", 1))
    for each in (fake, other):
        each.refuse["register"] = (409, "FencedError")
    spec = WorkerSpec(
        "job", 0, 1, 0, fake.url, "secret", str(tmp_path), b"", str(tmp_path / "local"), watch_parent=False, directory_nonce="ours"
    )
    assert run_worker(spec).reason == "displaced: refused"
    assert (fake.tokens, other.tokens) == (([], ["Bearer secret"]) if nonce == "ours" else (["Bearer secret"], []))
    other.close()
