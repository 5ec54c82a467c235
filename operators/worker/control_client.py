"""SHELL: a worker's requests to the coordinator over HTTP, and where they go. One POST is one answer or one typed error.

It decides neither what is sent nor whom to ask next (`leader_retrieval.py`). Bearer token, JSON records of barriers.messages."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import urllib3

from holdfast.barriers import codec
from holdfast.barriers.headers import ERROR_HEADER, FIELDS_HEADER, UNREACHABLE_HEADER, decode_fields
from holdfast.operators.worker.leader_retrieval import Target, is_safe_step, next_target
from holdfast.operators.worker.session_events import OpenStream
from holdfast.statebackends import errors
from holdfast.statebackends.errors import (
    AuthenticationError,
    HoldfastError,
    InvalidConfigError,
    NotLeaderError,
    ProtocolError,
    StorageUnavailableError,
)

T = TypeVar("T")

ADDRESS_FILE = "_coordinator.json"
"""In the state directory: {"url": ...} of the coordinator that began last."""

CONNECT_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 10.0
STREAM_TIMEOUT_S = 10.0
"""Silence on the command stream, which carries a keep-alive every 2 s, after which it counts as broken."""

PIECE_BYTES = 256 * 1024
"""Of a body, sent at a time: each has the time of a connect. In one piece the whole body had it, and state of megabytes over a slow
link never arrived."""

REJECTED_STATUS = frozenset({400, 401, 403, 413, 422})
"""Answers that the same request will get again."""
CONTENT_STATUS = frozenset({400, 413, 422})
"""Those of them that are for what the request says, not for who sends it."""
LINE_BYTES_MAX = 256 * 1024 * 1024
"""A deployment with inline state can be large; a line beyond this is not from a coordinator."""


class RefusedError(HoldfastError):
    """404 or 409. Fields: fenced, named (those of the coordinator's error)."""


class RejectedError(HoldfastError):
    """Asking again won't help. Fields: error, what a worker is to leave with; content: it is for what the request says."""


class UnreachableError(HoldfastError):
    """No answer."""


@dataclass(frozen=True, slots=True)
class CoordinatorAddress:
    """Where the coordinator is, and what it asks for."""

    url: str
    token: str | None
    state_directory: str | None = None
    """Where a coordinator that restarted elsewhere leaves its URL; None: it never moves, or this machine does not see where."""

    def current_url(self) -> str:
        """The URL in the state directory's file, if there is one that our token may go to, else the one we were started with."""
        if self.state_directory is not None:
            path = os.path.join(self.state_directory, ADDRESS_FILE)
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(path, "rb") as file:
                url = str(json.load(file)["url"]).rstrip("/")
                return url if is_safe_step(self.url, url) else self.url
        return self.url


class CoordinatorHttp:
    """Requests of one worker. Thread-safe: the control thread and the sender post, the reader streams. Only the control thread says
    what failed."""

    def __init__(self, address: CoordinatorAddress, job_id: str, slot: int) -> None:
        self._address = address
        self._base = f"/v1/jobs/{job_id}/workers"
        self._slot = slot
        self._target = Target(address.current_url())
        headers = {"Content-Type": "application/json"}
        if address.token:
            headers["Authorization"] = f"Bearer {address.token}"
        self._headers = headers
        self._pool = urllib3.PoolManager(num_pools=4, maxsize=4, headers=headers, retries=False)

    @property
    def target(self) -> Target:
        """Whom the next request asks."""
        return self._target

    def failed(self, error: HoldfastError, asked: Target | None = None) -> None:
        """A request got no answer, or none that helps: the next ones may go elsewhere. One that began before another failed says
        nothing about whom that one led to: `asked` is whom it asked, None the present target."""
        if asked is not None and asked is not self._target:
            return
        answered = None if isinstance(error, UnreachableError) else error
        self._target = next_target(self._target, answered, self._address.current_url)

    def post(self, path: str, message: Any, kind: type[T] | None) -> T | None:
        """Raises RefusedError, RejectedError, UnreachableError, or an error that may pass. `kind` None: no body matters."""
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S)
        target, headers = self._target, self._headers
        if target.unreachable_epoch:
            headers = {**headers, UNREACHABLE_HEADER: str(target.unreachable_epoch)}
        try:
            body = codec.encode(message)
        except ProtocolError as error:
            raise RejectedError(error.message, error=error, content=True) from error
        if len(body) > PIECE_BYTES:
            headers = {**headers, "Content-Length": str(len(body))}
        sent = _pieces(body) if len(body) > PIECE_BYTES else body
        try:
            answer = self._pool.request("POST", f"{target.url}{self._base}{path}", body=sent, headers=headers, timeout=timeout)
        except urllib3.exceptions.HTTPError as error:
            raise UnreachableError(str(error)) from error
        check_answer(answer.status, answer.headers, answer.data)
        return None if kind is None else codec.decode(answer.data, kind)

    def stream(self, action: OpenStream) -> urllib3.BaseHTTPResponse:
        """An open command stream, to be read by `lines`."""
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
        except urllib3.exceptions.HTTPError as error:
            raise UnreachableError(str(error)) from error
        if answer.status != 200:
            data = answer.read()
            answer.release_conn()
            check_answer(answer.status, answer.headers, data)
        return answer

    def close(self) -> None:
        self._pool.clear()


def _pieces(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), PIECE_BYTES):
        yield body[start : start + PIECE_BYTES]


def lines(answer: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """Whole lines of a stream, as they come. Raises UnreachableError when it breaks; ends when it ends."""
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
    """Raises RefusedError, RejectedError, or an error that may pass, for any answer but 200. Names in `headers` fit in any case."""
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
        raise NotLeaderError(message, **decode_fields(headers.get(FIELDS_HEADER)))
    raise StorageUnavailableError(f"{status} {kind or ''}: {message}")


def _typed(kind: str | None, status: int, message: str) -> HoldfastError:
    """The error that the coordinator named, so that a driver reads which it was."""
    found = getattr(errors, kind or "", None)
    if isinstance(found, type) and issubclass(found, HoldfastError):
        return found(message)
    return AuthenticationError(message) if status in (401, 403) else InvalidConfigError(message)
