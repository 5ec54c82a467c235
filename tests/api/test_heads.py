"""Heads of requests over real sockets: their bound, however they come, and what is answered to a request that is none."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.api.errors import decode_error
from holdfast.api.http.protocol import HEAD_BYTES_MAX
from holdfast.api.server.main import EmbeddedCoordinator
from holdfast.api.settings import server_settings
from holdfast.barriers.codec import ERROR_HEADER
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.layout import CA_FILE
from tests.api.fakes import TOKEN, FakeCoordinator, Served, serving
from tests.api.test_flood import DEADLINE_S, connect, guarded, head

REFUSED = (431, "HeadTooLargeError")
TAKEN = (200, "")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(FakeCoordinator(), tmp_path, guard=guarded()) as running:
        yield running


def asked(size: int, *, each: int = 100_000, path: str = "/v1/config", end: str = "") -> bytes:
    """The head of a request with so many bytes in all, in headers of `each` bytes at most."""
    first = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n{end}".encode()
    left, lines = size - len(first) - 2, []
    while left:
        length = min(left, each) if left - min(left, each) not in range(1, 6) else left
        lines.append(b"X: " + b"y" * (length - 5) + b"\r\n")
        left -= length
    found = first + b"".join(lines) + b"\r\n"
    assert len(found) == size
    return found


Answer = tuple[int, dict[str, str], bytes]


def answers(opened: socket.socket, pieces: list[bytes], count: int = 1) -> list[Answer]:
    """Send the pieces, and read answers until there are `count`, or the other side has nothing more to say."""
    for piece in pieces:
        opened.sendall(piece)
    stream, found = opened.makefile("rb"), list[Answer]()
    while len(found) < count and (line := stream.readline()):
        headers = {}
        while (text := stream.readline().strip()) != b"":
            name, _, value = text.decode().partition(": ")
            headers[name.title()] = value
        found.append((int(line.split(b" ")[1]), headers, stream.read(int(headers["Content-Length"]))))
    return found


def outcomes(opened: socket.socket, pieces: list[bytes], count: int = 1) -> list[tuple[int, str]]:
    return [(status, headers.get(ERROR_HEADER, "")) for status, headers, _ in answers(opened, pieces, count)]


def in_pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


SIZES = (
    (1_000, TAKEN), (HEAD_BYTES_MAX - 1, TAKEN), (HEAD_BYTES_MAX, TAKEN), (HEAD_BYTES_MAX + 1, REFUSED), (20_000, REFUSED),
    (40_000, REFUSED), (70_000, REFUSED), (140_000, REFUSED), (1_000_000, REFUSED),
)  # fmt: skip


@pytest.mark.parametrize("each", [100_000, 18], ids=["one header", "small headers"])
@pytest.mark.parametrize(("size", "outcome"), SIZES)
def test_a_head_has_its_bound_in_one_piece_and_in_several(served: Served, size: int, outcome: tuple[int, str], each: int) -> None:
    whole = asked(size, each=each)
    for pieces in ([whole], in_pieces(whole, 5_000), [whole[:-1], whole[-1:]]):
        with connect(served) as opened:
            assert outcomes(opened, pieces) == [outcome], len(pieces)


def test_a_long_line_of_a_request_has_the_same_bound(served: Served) -> None:
    for size, outcome in ((HEAD_BYTES_MAX - 200, TAKEN), (40_000, REFUSED)):
        with connect(served) as opened:
            assert outcomes(opened, [asked(size + 200, path="/v1/config?" + "x" * (size - 200))]) == [outcome]


def test_a_head_byte_by_byte_is_taken_and_one_without_end_refused(served: Served) -> None:
    with connect(served) as opened:
        assert outcomes(opened, in_pieces(asked(700), 1)) == [TAKEN]
    with connect(served) as opened:
        assert outcomes(opened, [asked(200)[:-2] + b"X: " + b"y" * HEAD_BYTES_MAX]) == [REFUSED]


def test_requests_that_come_together_are_bounded_one_by_one(served: Served) -> None:
    """Many that fit are no large one, and a large one behind others is no part of them."""
    small, body = asked(2_000), b'{"path": "x"}'
    posted = head("/v1/snapshots/verify", len(body)) + body
    with connect(served) as opened:
        assert outcomes(opened, [small * 20], 20) == [TAKEN] * 20
        assert outcomes(opened, [small]) == [TAKEN], "the connection stays"
    for data in (posted + asked(HEAD_BYTES_MAX) + asked(HEAD_BYTES_MAX + 1), posted + asked(HEAD_BYTES_MAX) + asked(150_000)):
        for pieces in ([data], in_pieces(data, 9_000)):
            with connect(served) as opened:
                assert outcomes(opened, pieces, 4) == [(404, "NotFoundError"), TAKEN, REFUSED]


def test_a_large_body_behind_its_head_is_no_head(served: Served) -> None:
    body = b'{"path": "' + b"x" * 50_000 + b'"}'
    for pieces in ([head("/v1/snapshots/verify", len(body)) + body], [head("/v1/snapshots/verify", len(body)), body]):
        with connect(served) as opened:
            assert outcomes(opened, pieces) == [(400, "InvalidConfigError")]
            assert outcomes(opened, [asked(1_000)]) == [TAKEN]


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01 hello\r\n\r\n",
        b"no request\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nbad header\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX\0: y\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: many\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n",
    ],
)
def test_what_is_no_request_has_the_error_of_the_service(served: Served, request_: bytes, pieces: int) -> None:
    with connect(served) as opened:
        ((status, headers, body),) = answers(opened, in_pieces(request_, -(-len(request_) // pieces)), 2)
        assert (status, headers[ERROR_HEADER], headers["Content-Type"]) == (400, "ProtocolError", "application/json")
        assert (headers["Connection"], headers["X-Content-Type-Options"]) == ("close", "nosniff")
        assert headers["X-Request-Id"]
        (text,) = json.loads(body)["errors"]
        assert "no request of HTTP" in text
        assert opened.recv(1) == b"", "it is closed behind the answer"


def test_too_large_a_head_says_the_bound_and_is_an_error_of_the_caller(served: Served) -> None:
    with connect(served) as opened:
        ((status, headers, body),) = answers(opened, [asked(40_000)])
    error = decode_error(status, body, headers)
    assert isinstance(error, InvalidConfigError)
    assert (type(error).__name__, error.fields) == ("HeadTooLargeError", {"size_max": HEAD_BYTES_MAX})
    assert f"{HEAD_BYTES_MAX} bytes" in error.message


def test_an_answer_is_not_lost_to_what_is_still_sent(served: Served) -> None:
    """Bytes that nobody reads reset a connection that is closed, and take the answer with them."""
    with connect(served) as opened:
        opened.sendall(asked(40_000))
        for _ in range(20):
            opened.sendall(b"z" * 100_000)
        assert outcomes(opened, [], 2) == [REFUSED]


def test_the_bound_holds_over_tls(tmp_path: Path) -> None:
    settings = server_settings({}, state_dir=tmp_path, tls="auto", port=0)
    with EmbeddedCoordinator(settings, open_service=lambda _s, _u: FakeCoordinator()) as running:
        context = ssl.create_default_context(cafile=str(tmp_path / CA_FILE))
        host, _, port = running.url.removeprefix("https://").partition(":")
        for size, outcome in ((HEAD_BYTES_MAX, TAKEN), (HEAD_BYTES_MAX + 1, REFUSED), (70_000, REFUSED)):
            plain = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
            with plain, context.wrap_socket(plain, server_hostname=host) as opened:
                assert outcomes(opened, [asked(size, path="/healthz")]) == [outcome]
