"""A connection to NATS for code that blocks: nats-py runs on an event loop in a thread of its own, which also answers the server's
pings between two calls."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import ssl
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from holdfast.operators.connectors.extras import import_extra
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.secrets import Secret, resolve

T = TypeVar("T")

VERSION_MIN = (2, 12)
"""Of the server: the first with atomic batches of messages."""

CONNECT_TIMEOUT_S = 10.0

REQUEST_TIMEOUT_S = 10.0

LONG_AGO = datetime.datetime.min.replace(tzinfo=datetime.UTC)

JETSTREAM_NOT_FOUND = 404
"""Of an error of JetStream: no such stream, or no such message."""


@dataclass(frozen=True, slots=True)
class NatsLogin:
    """Where the servers are, and who connects, checked; pickled into the job. What is secret is `hf.Secret`."""

    servers: tuple[str | Secret, ...]
    """URLs: `nats://host:4222`, `tls://host:4222`; with a login in it a secret."""
    user: str | Secret = ""
    password: Secret | None = None
    token: Secret | None = None
    credentials: str = ""
    """Path of a `.creds` file on the machines of the workers."""
    ca_file: str = ""
    """Path of the certificates that a server's is checked with; empty: the system's."""

    def __post_init__(self) -> None:
        """Raises InvalidConfigError, which shows no value."""
        for setting, value in (("password", self.password), ("token", self.token)):
            if value is not None and not isinstance(value, Secret):
                raise InvalidConfigError(
                    f'NATS: give {setting} as hf.Secret("VARIABLE"): it must be in no job graph and no log', setting=setting
                )
        for server in self.servers:
            if not isinstance(server, str | Secret):
                raise InvalidConfigError(f"NATS: a server is a URL or hf.Secret, not a {type(server).__name__}", setting="servers")
            if isinstance(server, str) and _without_login(server) != server:
                raise InvalidConfigError(
                    "NATS: a server's URL has a login, which would be kept in the job's graph: give the whole URL as "
                    'hf.Secret("VARIABLE"), or user=, and password= or token= as hf.Secret',
                    setting="servers",
                )

    def __repr__(self) -> str:
        return f"NatsLogin({self.place!r})"

    @property
    def place(self) -> str:
        """Without users and passwords."""
        return ",".join("***" if isinstance(each, Secret) else _without_login(each) for each in self.servers)

    @property
    def is_known_here(self) -> bool:
        """Whether this process has all secrets: a driver need not."""
        given = (*self.servers, self.user, self.password, self.token)
        return all(each.variable in os.environ for each in given if isinstance(each, Secret))


def _without_login(url: str) -> str:
    scheme, found, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if found else url.rpartition("@")[2]


class JetStreamError(Exception):
    """JetStream has refused a request, and says why."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(f"{description} ({err_code})")
        self.code = code
        self.err_code = err_code


@dataclass(slots=True)
class StreamInfo:
    """A stream as its server describes it."""

    name: str
    created: str
    config: dict[str, Any]
    state: dict[str, Any]
    subjects: list[str] = field(default_factory=list)
    complete_until: datetime.datetime = LONG_AGO
    """Server's time in front of which no further message will be: each has the time at which the leader stored it. Of a mirror,
    whose messages have the time of their origin: when it last heard of that, if it has all that it heard of."""

    @property
    def first(self) -> int:
        return int(self.state.get("first_seq", 0))

    @property
    def last(self) -> int:
        return int(self.state.get("last_seq", 0))


class NatsConnection:
    """Calls block, one at a time, and raise what nats-py raises, or JetStreamError."""

    def __init__(self, login: NatsLogin, connector: str) -> None:
        self._login = login
        self._connector = connector
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.client: Any = None

    def open(self) -> None:
        """Connect. Raises InvalidConfigError for a wrong login, and for a server that is too old."""
        self.client = import_extra("nats.aio.client", "nats", self._connector).Client()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"nats-{self._connector}", daemon=True)
        self._thread.start()
        try:
            self.run(self._connect(self.client), CONNECT_TIMEOUT_S + REQUEST_TIMEOUT_S)
        except BaseException as error:
            self.close()
            if "authorization" in str(error).lower():
                raise InvalidConfigError(
                    f"{self._connector} at {self._login.place}: the server refuses the login", url=self._login.place
                ) from None
            raise
        version = self.client.connected_server_version
        if (version.major, version.minor) < VERSION_MIN:
            needed = ".".join(map(str, VERSION_MIN))
            self.close()
            raise InvalidConfigError(
                f"{self._connector} at {self._login.place}: the server is NATS {version.major}.{version.minor}, {needed} or newer "
                "is needed",
                url=self._login.place,
            )

    async def _connect(self, client: Any) -> None:
        login = self._login
        tls = None
        if login.ca_file:
            tls = ssl.create_default_context(cafile=login.ca_file)
        given: Mapping[str, Any] = {
            "user": resolve(login.user) or None,
            "password": None if login.password is None else login.password.resolve(),
            "token": None if login.token is None else login.token.resolve(),
            "user_credentials": login.credentials or None,
            "tls": tls,
        }
        await client.connect(
            servers=[resolve(each) for each in login.servers],
            name=f"holdfast {self._connector}",
            connect_timeout=CONNECT_TIMEOUT_S,
            allow_reconnect=False,  # what was under way is then unknown: the caller opens a connection anew, and asks
            max_reconnect_attempts=0,
            error_cb=_quiet,
            **{name: value for name, value in given.items() if value is not None},
        )

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = REQUEST_TIMEOUT_S) -> T:
        """The result of a coroutine on the connection's loop. Raises TimeoutError."""
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def request(self, subject: str, content: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A request to JetStream's API. Raises JetStreamError."""
        payload = b"" if content is None else json.dumps(content).encode()
        reply = self.run(self.client.request(f"$JS.API.{subject}", payload, timeout=REQUEST_TIMEOUT_S), REQUEST_TIMEOUT_S + 1)
        return answer_of(reply.data)

    def stream_info(self, stream: str) -> StreamInfo:
        """Raises InvalidConfigError when there is no such stream."""
        try:
            found = self.request(f"STREAM.INFO.{stream}")
        except JetStreamError as error:
            if error.code != JETSTREAM_NOT_FOUND:
                raise
            where = f"{self._connector} at {self._login.place}"
            raise InvalidConfigError(f"{where}: there is no stream {stream}", field="stream") from None
        config = found["config"]
        subjects = list(config.get("subjects") or ())
        return StreamInfo(stream, found.get("created", ""), config, found["state"], subjects, _complete_until(found))

    def close(self) -> None:
        """Waits a second for the server, at most."""
        loop, thread, client = self._loop, self._thread, self.client
        self._loop = self._thread = self.client = None
        if loop is None or thread is None:
            return
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(_shut_down(client), loop).result(1.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(1.0)
        if not thread.is_alive():
            loop.close()


def _complete_until(info: Mapping[str, Any]) -> datetime.datetime:
    """Of a stream, by the answer that describes it."""
    if "ts" not in info:
        return LONG_AGO
    now, mirror = datetime.datetime.fromisoformat(info["ts"]), info.get("mirror")
    if mirror is None:
        return now
    heard_ns = mirror.get("active", -1)
    return LONG_AGO if heard_ns < 0 or mirror.get("lag", 0) else now - datetime.timedelta(microseconds=heard_ns / 1_000)


async def _shut_down(client: Any) -> None:
    with contextlib.suppress(Exception):
        await client.close()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(0)  # closed sockets are released by the loop's next turn


async def _quiet(error: Exception) -> None:
    """Of the background: whoever waits for an answer gets the error."""


def answer_of(data: bytes) -> dict[str, Any]:
    """Raises JetStreamError."""
    answer: dict[str, Any] = json.loads(data)
    if (error := answer.get("error")) is not None:
        raise JetStreamError(int(error.get("code", 0)), int(error.get("err_code", 0)), str(error.get("description", "")))
    return answer


def covers(pattern: str, subject: str) -> bool:
    """Whether a stream's subject, with wildcards, takes messages of a subject."""
    ours, theirs = subject.split("."), pattern.split(".")
    for index, token in enumerate(theirs):
        if token == ">":
            return len(ours) > index
        if index >= len(ours) or token not in ("*", ours[index]):
            return False
    return len(ours) == len(theirs)


def overlaps(first: str, second: str) -> bool:
    """Whether there is a subject that both take; with wildcards."""
    ours, theirs = first.split("."), second.split(".")
    for one, other in zip(ours, theirs, strict=False):
        if ">" in (one, other):
            return True
        if one != other and "*" not in (one, other):
            return False
    return len(ours) == len(theirs)
