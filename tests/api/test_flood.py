"""Callers that send nothing, too little, too much or too late, over real sockets: they are closed, and nobody waits for them."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import urllib3

from holdfast.api.errors import BodyTooLargeError, BusyError
from holdfast.api.http.connection_budget import BodyBudget, CallerKind, ConnectionLimits
from holdfast.api.http.protocol import ConnectionGuard
from holdfast.api.server import server
from holdfast.api.settings import ServerSettings
from holdfast.barriers import codec
from holdfast.barriers.messages import AckBatch, AcknowledgeCheckpoint, Heartbeat
from holdfast.statebackends.handles import InlineHandle, KeyedStateHandle, KeyGroupRange, OperatorSubtaskState
from tests.api import fakes
from tests.api.fakes import JOB, SOURCE, TOKEN, FakeCoordinator, Served, serving

DEADLINE_S = 10.0
SHORT_MS = 150
BODY_MAX = 4 << 20
HEARTBEAT = codec.encode(Heartbeat(0, "s1", 1))
ACKS = f"/v1/jobs/{JOB}/workers/0/acks"


def guarded(*, bodies_max: int = 2 * BODY_MAX, **limits: int) -> ConnectionGuard:
    chosen = ConnectionLimits(**{"connections_max": 64, "unknown_max": 16, "unknown_per_address_max": 8, **limits})
    return ConnectionGuard(chosen, BodyBudget(bodies_max, kept_for_workers=bodies_max // 2))


@pytest.fixture
def guard() -> ConnectionGuard:
    """Long times: what a test closes, it closes by something else."""
    return guarded()


@pytest.fixture
def hasty() -> ConnectionGuard:
    return guarded(head_timeout_ms=SHORT_MS, body_timeout_ms=SHORT_MS, drain_timeout_ms=SHORT_MS, send_timeout_ms=SHORT_MS)


@pytest.fixture
def fake() -> FakeCoordinator:
    return FakeCoordinator()


@pytest.fixture
def served(fake: FakeCoordinator, guard: ConnectionGuard, tmp_path: Path) -> Iterator[Served]:
    with serving(fake, tmp_path, guard=guard, body_bytes_max=BODY_MAX) as running:
        yield running


@pytest.fixture
def hurried(fake: FakeCoordinator, hasty: ConnectionGuard, tmp_path: Path) -> Iterator[Served]:
    with serving(fake, tmp_path, guard=hasty, body_bytes_max=BODY_MAX) as running:
        yield running


def connect(served: Served) -> socket.socket:
    host, _, port = served.url.removeprefix("http://").partition(":")
    opened = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return opened


def head(path: str, length: int | str, *, method: str = "POST", token: str | None = TOKEN) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1"]
    lines.append(f"Content-Length: {length}" if isinstance(length, int) else length)
    if token:
        lines.append(f"Authorization: Bearer {token}")
    return "\r\n".join([*lines, "", ""]).encode()


def ended(opened: socket.socket) -> bool:
    """The other side closed it, without a byte."""
    try:
        return opened.recv(1) == b""
    except ConnectionResetError:
        return True


def eventually(what: str, look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not look():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.01)


def status(opened: socket.socket) -> int:
    answer = b""
    while b"\r\n" not in answer:
        chunk = opened.recv(1 << 16)
        assert chunk, "closed without an answer"
        answer += chunk
    return int(answer.split(b" ", 2)[1])


# ------------------------------------------------------------------------------------------------------------ deadlines


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"], ids=["silent", "half a head"])
def test_who_does_not_ask_is_closed(hurried: Served, sent: bytes) -> None:
    with connect(hurried) as opened:
        opened.sendall(sent)
        assert ended(opened)
    assert 'holdfast_connections_closed_total{reason="head_deadline"} 1.0' in hurried.request("GET", "/metrics").data.decode()


def test_a_head_that_trickles_is_closed(hurried: Served) -> None:
    with connect(hurried) as opened, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        opened.sendall(b"GET /healthz HTTP/1.1\r\n")
        for number in range(1_000):
            opened.sendall(f"X-{number}: y\r\n".encode())
            time.sleep(0.01)
        pytest.fail("a head may take for ever")


def test_a_body_that_stops_is_closed_and_nobody_is_told(
    hurried: Served, fake: FakeCoordinator, hasty: ConnectionGuard, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), connect(hurried) as opened:
        opened.sendall(head(ACKS, BODY_MAX) + b"{")
        assert ended(opened)
        eventually("the body's bytes given back", lambda: hasty.bodies.held == 0)
    assert fake.calls == []
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


def test_an_idle_connection_between_two_requests_stays(hurried: Served) -> None:
    with connect(hurried) as opened:
        for _ in range(2):
            opened.sendall(head("/v1/jobs", "X: y", method="GET"))
            assert status(opened) == 200
            time.sleep(4 * SHORT_MS / 1000)  # longer than any deadline of this server but that of idle connections


def test_an_idle_connection_is_closed_in_the_end(
    fake: FakeCoordinator, guard: ConnectionGuard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.KEEP_ALIVE_S == 75
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 1)
    with serving(fake, tmp_path, guard=guard) as running, connect(running) as opened:
        opened.sendall(head("/healthz", "X: y", method="GET"))
        answer = b""
        while chunk := opened.recv(1 << 16):
            answer += chunk
        assert answer.startswith(b"HTTP/1.1 200")
        eventually("it is forgotten", lambda: len(guard.budget) == 0)


def test_who_does_not_read_the_answer_is_closed(hurried: Served, hasty: ConnectionGuard) -> None:
    with connect(hurried) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        opened.sendall(head("/openapi.json", "X: y", method="GET") * 200)
        eventually("the connection closed", lambda: len(hasty.budget) == 0)


def test_who_reads_slowly_is_not(hurried: Served) -> None:
    with connect(hurried) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        opened.sendall(head("/docs/swagger-ui-bundle.js", "Connection: close", method="GET"))
        whole = bytearray()
        while chunk := opened.recv(1 << 16):
            whole += chunk
            time.sleep(0.05)  # 1.7 MB at about one a second: ten times the time that a reader has who does not read
    headers, _, body = bytes(whole).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in headers.lower()


def test_a_stream_that_is_silent_lives(hurried: Served, fake: FakeCoordinator) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    path = f"/v1/jobs/{JOB}/workers/0/commands?session=s1"
    stream = hurried.http.request("GET", hurried.url + path, headers=headers, preload_content=False)
    time.sleep(4 * SHORT_MS / 1000)
    assert not fake.subscriptions[0].closed
    fake.subscriptions[0].end()
    assert stream.read() == b""


# --------------------------------------------------------------------------------------------------------------- flood


def test_a_flood_of_silent_connections_keeps_nobody_out(served: Served, fake: FakeCoordinator, guard: ConnectionGuard) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    path = f"{served.url}/v1/jobs/{JOB}/workers/0"
    worker = urllib3.PoolManager(retries=False, timeout=DEADLINE_S)
    stream = worker.request("GET", f"{path}/commands?session=s1", headers=headers, preload_content=False)
    assert worker.request("POST", f"{path}/heartbeat", body=HEARTBEAT, headers=headers).status == 200
    eventually("the worker is known", lambda: guard.budget.count(CallerKind.WORKER) == 2)
    with contextlib.ExitStack() as flood:
        for _ in range(300):
            flood.enter_context(connect(served))
        assert worker.request("POST", f"{path}/heartbeat", body=HEARTBEAT, headers=headers).status == 200
        assert served.request("GET", "/healthz").status == 200
        newcomer = urllib3.PoolManager(retries=False, timeout=DEADLINE_S)
        assert newcomer.request("POST", f"{path}/heartbeat", body=HEARTBEAT, headers=headers).status == 200
        eventually("the flood is bounded", lambda: len(guard.budget) <= 8 + 4)
        newcomer.clear()
    assert not fake.subscriptions[0].closed
    assert guard.budget.count(CallerKind.WORKER) >= 2
    fake.subscriptions[0].end()
    assert stream.read() == b""
    worker.clear()


@pytest.mark.parametrize("more", ["X: y", "Content-Length: 9"], ids=["asked", "and its body is held back"])
def test_strangers_that_read_a_little_now_and_then_keep_nobody_out(
    fake: FakeCoordinator, guard: ConnectionGuard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    def bind(settings: ServerSettings) -> socket.socket:
        """As over a network: over loopback the system would take the whole file at once."""
        listener = server.bind(settings)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        return listener

    monkeypatch.setattr(fakes, "bind", bind)
    with serving(fake, tmp_path, guard=guard) as served, contextlib.ExitStack() as flood:
        readers = [flood.enter_context(slow_reader(served, more)) for _ in range(8)]
        eventually("each has begun to read", lambda: all(len(reader.recv(1_024)) > 0 for reader in readers))
        eventually("and left the rest", lambda: len(guard._unsent) == 8)
        for _ in range(16):
            newcomer = flood.enter_context(connect(served))
            newcomer.sendall(head("/v1/jobs", "X: y", method="GET"))
            assert status(newcomer) == 200


def slow_reader(served: Served, more: str) -> socket.socket:
    """Without a token; of a file that every stranger may have."""
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    opened.settimeout(DEADLINE_S)
    host, _, port = served.url.removeprefix("http://").partition(":")
    opened.connect((host, int(port)))
    opened.sendall(head("/docs/swagger-ui-bundle.js", more, method="GET", token=None))
    return opened


@pytest.mark.parametrize(("connections_max", "callers"), [(500, 300), (100, 80), (16, 8)])
def test_a_burst_of_callers_with_the_token_is_heard(
    fake: FakeCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connections_max: int, callers: int
) -> None:
    """All of them have connected and asked before the first is accepted."""
    with contextlib.ExitStack() as burst:
        opened: list[socket.socket] = []

        def bind(settings: ServerSettings) -> socket.socket:
            listener = server.bind(settings)
            listener.listen(callers)
            for _ in range(callers):
                opened.append(burst.enter_context(socket.create_connection(listener.getsockname(), timeout=DEADLINE_S)))
                opened[-1].sendall(head("/v1/jobs", "X: y", method="GET"))
            return listener

        monkeypatch.setattr(fakes, "bind", bind)
        with serving(fake, tmp_path, connections_max=connections_max):
            assert [status(each) for each in opened] == [200] * callers


def test_the_bound_on_what_is_accepted_at_once_does_not_depend_on_what_is_installed(
    fake: FakeCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only asyncio's own loop keeps it; uvicorn would take another one that it finds."""
    monkeypatch.setitem(sys.modules, "uvloop", ModuleType("uvloop"))
    with serving(fake, tmp_path) as served:
        assert served.request("GET", "/healthz").status == 200


# -------------------------------------------------------------------------------------------------------------- bodies


def test_who_has_no_token_sends_no_body(served: Served, fake: FakeCoordinator, guard: ConnectionGuard) -> None:
    with connect(served) as opened:
        opened.sendall(head(ACKS, BODY_MAX, token=None).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"))
        assert status(opened) == 401
        assert guard.bodies.held == 0
    assert fake.calls == []


def test_the_answer_to_a_refused_body_is_read_by_who_sends_on(served: Served) -> None:
    with connect(served) as opened:
        opened.sendall(head(ACKS, BODY_MAX, token="wrong-token-0123456789") + b"x" * (1 << 20))
        opened.sendall(b"x" * (BODY_MAX - (1 << 20)))
        assert status(opened) == 401


@pytest.mark.parametrize(
    ("path", "size"), [(f"/v1/jobs/{JOB}/savepoints", 65_537), ("/v1/jobs", BODY_MAX + 1), (ACKS, BODY_MAX + 1)]
)
def test_each_kind_of_request_has_its_own_bound(served: Served, path: str, size: int) -> None:
    with connect(served) as opened:  # judged by what it announces
        opened.sendall(head(path, size))
        assert status(opened) == 413
    with connect(served) as opened:  # and by what it sends
        opened.sendall(head(path, "Transfer-Encoding: chunked"))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(size // (1 << 16) + 1):
                opened.sendall(b"10000\r\n" + b" " * (1 << 16) + b"\r\n")
        assert status(opened) == 413


def test_bodies_that_are_never_complete_leave_room_for_workers(
    served: Served, fake: FakeCoordinator, guard: ConnectionGuard
) -> None:
    with connect(served) as first, connect(served) as second:
        first.sendall(head(ACKS, BODY_MAX) + b"{")
        eventually("the first is held", lambda: guard.bodies.held == BODY_MAX)
        second.sendall(head(ACKS, BODY_MAX) + b"{")
        assert status(second) == 503
        answer = served.request("POST", ACKS, b"{" + b" " * 100_000)
        assert (answer.status, answer.headers["X-Holdfast-Error"]) == (503, BusyError.__name__)
        assert (
            served.request("POST", ACKS, acknowledgement(100)).status == 200
        )  # a small one is always taken; and now it is a worker
        assert served.request("POST", ACKS, acknowledgement(100_000)).status == 200
    eventually("the first is given back", lambda: guard.bodies.held == 0)


def acknowledgement(size: int) -> bytes:
    """With so many bytes of inline state."""
    keyed = KeyedStateHandle(KeyGroupRange(0, 128), "arrow", (), (InlineHandle(b"x" * size),))
    states = {"in": OperatorSubtaskState((keyed,))}
    return codec.encode(AckBatch(1, 0, "s1", (AcknowledgeCheckpoint(1, 1, SOURCE, 0, states),)))


def test_a_large_body_is_decoded_off_the_event_loop(served: Served, fake: FakeCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    decode = codec.decode_large

    def watched(*arguments: object) -> object:
        threads.append(threading.current_thread().name)
        return decode(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(codec, "decode_large", watched)
    for size, expected in ((500_000, []), (2_000_000, ["holdfast-decoding_0"])):
        assert served.request("POST", ACKS, acknowledgement(size)).status == 200
        assert threads == expected
        assert fake.calls[-1][2] == codec.decode(acknowledgement(size), AckBatch)


def test_who_hangs_up_leaves_no_traceback(
    served: Served, fake: FakeCoordinator, guard: ConnectionGuard, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        with connect(served) as opened:
            opened.sendall(head(ACKS, BODY_MAX) + b"{")
            eventually("the body is held", lambda: guard.bodies.held > 0)
        with connect(served) as opened:
            opened.sendall(head(f"/v1/jobs/{JOB}/checkpoints", "X: y", method="GET"))
        eventually("the bytes are given back", lambda: guard.bodies.held == 0)
        assert served.request("GET", "/healthz").status == 200
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.WARNING]


def test_who_leaves_before_the_answer_was_answered_nothing(
    served: Served, guard: ConnectionGuard, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="holdfast.requests")
    with connect(served) as opened:
        opened.sendall(head("/v1/jobs", BODY_MAX) + b"{")
        eventually("the body is held", lambda: guard.bodies.held > 0)
    eventually("it is told", lambda: len(caplog.records) > 0)
    (record,) = caplog.records
    assert (record.levelno, record.__dict__["fields"]["status"]) == (logging.INFO, None)
    assert record.getMessage().endswith("(token): left before it was answered")


def test_what_is_no_http_is_counted_and_not_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with connect(served) as opened:
        opened.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert status(opened) == 400
    assert "holdfast_requests_malformed_total 1.0" in served.request("GET", "/metrics").data.decode()
    assert caplog.records == []


@pytest.mark.parametrize(("at_once", "told"), [(True, 400), (False, 401)], ids=["before its answer", "after its answer"])
def test_a_body_that_is_no_http_has_one_answer_and_no_line_in_the_log(
    served: Served, guard: ConnectionGuard, caplog: pytest.LogCaptureFixture, at_once: bool, told: int
) -> None:
    asked, broken = head("/v1/jobs", "Transfer-Encoding: chunked", token=None), b"zz\r\n"
    with connect(served) as opened:
        opened.sendall(asked + broken if at_once else asked)
        assert status(opened) == told
        opened.sendall(b"" if at_once else broken)
        eventually("the connection closed", lambda: len(guard.budget) == 0)
    assert (guard.malformed, caplog.records) == (1, [])


def test_too_large_says_the_bound(served: Served) -> None:
    answer = served.request("POST", f"/v1/jobs/{JOB}/savepoints", b" " * 100_000)
    assert (answer.status, answer.headers["X-Holdfast-Error"]) == (413, BodyTooLargeError.__name__)
    assert "65536 bytes" in answer.json()["errors"][0]
