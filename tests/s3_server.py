"""A server that speaks S3 (moto's) on a free port of this machine, with a place for faults between it and its clients."""

from __future__ import annotations

import io
import itertools
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from holdfast.statebackends.storage.s3 import S3Storage
from holdfast.statebackends.storage.s3_connection import S3Connection, S3Settings

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test-key",
    "AWS_SECRET_ACCESS_KEY": "test-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}


_BUCKETS = itertools.count()
"""All servers of a process hold the same buckets."""


@dataclass(frozen=True)
class Request:
    """One request, as the server saw it."""

    method: str
    path: str
    query: str
    headers: dict[str, str]

    @property
    def name(self) -> str:
        """What it asks for, in short."""
        marks = ("uploads", "partNumber", "uploadId", "list-type", "delete")
        mark = next((mark for mark in marks if mark in self.query), "")
        return f"{self.method} {mark}".strip()


Start = Callable[..., Any]
App = Callable[[dict[str, Any], Start], Iterable[bytes]]
Fault = Callable[[dict[str, Any], Start, App], Iterable[bytes]]
"""Answers in the server's place; may ask the server first."""


@dataclass
class _Planned:
    when: Callable[[Request], bool]
    fault: Fault
    times: int


@dataclass
class S3Server:
    """`requests`: all of them so far. Requests are served one at a time: moto does not check conditions atomically. `host`, `port`:
    where it listens; 0 is a free one."""

    requests: list[Request] = field(default_factory=list)
    host: str = "127.0.0.1"
    port: int = 0
    _planned: list[_Planned] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._app: App = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(self.host, self.port, self._serve, threaded=True)
        self._server.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
        self.url = f"http://{self.host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)  # s until it ends
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def new_bucket(self, connection: S3Connection) -> str:
        name = f"bucket-{next(_BUCKETS)}"
        connection.call("create_bucket", Bucket=name)
        return name

    def fail(self, fault: Fault, *, on: str = "", key: str = "", times: int = 1) -> None:
        """The next so many requests of a name (`Request.name`) on keys that end so meet a fault; -1: all of them."""
        self._planned.append(_Planned(lambda request: (not on or request.name == on) and request.path.endswith(key), fault, times))

    def heal(self) -> None:
        self._planned.clear()

    def names(self) -> list[str]:
        """Names of all requests since the last call."""
        found = [request.name for request in self.requests]
        self.requests.clear()
        return found

    def _serve(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        headers = {name[5:].replace("_", "-").lower(): str(value) for name, value in environ.items() if name.startswith("HTTP_")}
        request = Request(environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"], headers)
        with self._lock:
            self.requests.append(request)
            planned = next((each for each in self._planned if each.times and each.when(request)), None)
            if planned is not None:
                planned.times -= 1
        return self._locked_app(environ, start) if planned is None else planned.fault(environ, start, self._locked_app)

    def _locked_app(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        with self._lock:
            return list(self._app(environ, start))


# ------------------------------------------------------------------------------------------------------------- faults


def read_body(environ: dict[str, Any]) -> bytes:
    return bytes(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))


def answer(status: int, code: str) -> Fault:
    """The server refuses; nothing is done."""

    def fault(environ: dict[str, Any], start: Start, app: App) -> Iterable[bytes]:
        read_body(environ)
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>told by the test</Message></Error>".encode()
        start(f"{status} {code}", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    return fault


def after(instead: Fault) -> Fault:
    """The server does what it is asked, and another answer comes."""

    def fault(environ: dict[str, Any], start: Start, app: App) -> Iterable[bytes]:
        list(app(environ, lambda *args, **kwargs: None))
        return instead({**environ, "CONTENT_LENGTH": "0"}, start, app)  # it was read

    return fault


def reset(environ: dict[str, Any], start: Start, app: App) -> Iterable[bytes]:
    """The connection breaks before an answer."""
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    start("200 OK", [])
    return []


def truncate(environ: dict[str, Any], start: Start, app: App) -> Iterable[bytes]:
    """The answer's head is right, and its body ends early."""
    body = b"".join(app(environ, start))

    def half() -> Iterator[bytes]:
        yield body[: len(body) // 2]
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)

    return half()


@dataclass
class Silence:
    """No answer until it is released; then the request is served, if `serves`."""

    serves: bool = True
    released: threading.Event = field(default_factory=threading.Event)
    served: threading.Event = field(default_factory=threading.Event)

    def __call__(self, environ: dict[str, Any], start: Start, app: App) -> Iterable[bytes]:
        data = read_body(environ)
        assert self.released.wait(30)
        if self.serves:
            list(app({**environ, "wsgi.input": io.BytesIO(data)}, lambda *args, **kwargs: None))
        self.served.set()
        return reset(environ, start, app)


# ------------------------------------------------------------------------------------------------------------ clients


class SimClock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


def connect(server: S3Server, clock: SimClock | None = None, *, like: S3Connection | None = None, **settings: Any) -> S3Connection:
    """`like`: share its client, whose making takes half a second; its own settings of endpoint and request timeouts hold."""
    clock = clock if clock is not None else SimClock()
    connection = S3Connection(S3Settings(endpoint_url=server.url, **settings), clock=clock, sleep=clock.sleep)
    if like is not None:
        connection._client = like._connected()
    return connection


def storage_on(server: S3Server, connection: S3Connection) -> S3Storage:
    """An empty storage."""
    return S3Storage(f"s3://{server.new_bucket(connection)}/state", connection)


# ------------------------------------------------------------------------------- fixtures of tests that reach it by the environment


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Where this process, and those that it starts, find S3."""
    server = S3Server()
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL_S3": server.url}.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()


@pytest.fixture
def connection(server: S3Server) -> Iterator[S3Connection]:
    connection = connect(server)
    yield connection
    connection.close()


@pytest.fixture
def bucket(server: S3Server, connection: S3Connection) -> str:
    """The location of a new one."""
    return f"s3://{server.new_bucket(connection)}"
