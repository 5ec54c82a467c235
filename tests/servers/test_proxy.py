"""The proxy against a server that answers each line: what is cut, what had arrived before, and what each side sees."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator

import pytest

from tests.servers.process import HOST, wait_until
from tests.servers.proxy import Break, Cut, Direction, Proxy


class Lines(socketserver.ThreadingTCPServer):
    """Answers each line with itself, in capitals. `seen`: all lines; `ends`: how its connections ended."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.ends: list[str] = []
        super().__init__((HOST, 0), LineHandler)


class LineHandler(socketserver.StreamRequestHandler):
    server: Lines

    def handle(self) -> None:
        try:
            for line in self.rfile:
                self.server.seen.append(line)
                self.wfile.write(line.upper())
            self.server.ends.append("end")
        except ConnectionError:
            self.server.ends.append("reset")


@pytest.fixture
def server() -> Iterator[Lines]:
    with Lines() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(server: Lines) -> Iterator[Proxy]:
    with Proxy(server.server_address[1]) as proxy:
        yield proxy


class Caller:
    """One connection; each call is two chunks."""

    def __init__(self, proxy: Proxy) -> None:
        self._socket = socket.create_connection((HOST, proxy.port), timeout=10)

    def call(self, line: bytes) -> bytes:
        """b"" if the connection ends, "reset" if it is reset, "silence" without an answer."""
        try:
            self._socket.sendall(line + b"\n")
            return self._socket.recv(100).strip()
        except ConnectionError:
            return b"reset"
        except TimeoutError:
            return b"silence"

    def patience(self, seconds: float) -> None:
        self._socket.settimeout(seconds)

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def test_chunks_are_counted_each_way(proxy: Proxy) -> None:
    with Caller(proxy) as caller:
        assert [caller.call(line) for line in (b"a", b"b", b"c")] == [b"A", b"B", b"C"]
        assert [proxy.chunks(each) for each in Direction] == [3, 3, 6]
        proxy.cut(None)
        assert proxy.chunks() == 0


SEEN = {Break.RESET: b"reset", Break.SHUTDOWN: b"", Break.SWALLOW: b"silence"}


@pytest.mark.parametrize("how", list(Break))
@pytest.mark.parametrize("delivered", [False, True])
def test_a_request_is_cut(server: Lines, proxy: Proxy, how: Break, delivered: bool) -> None:
    proxy.cut(Cut(2, Direction.TO_SERVER, how, delivered))
    with Caller(proxy) as caller, Caller(proxy) as other:
        assert caller.call(b"a") == b"A"
        caller.patience(0.2 if how is Break.SWALLOW else 10)
        assert caller.call(b"b") == SEEN[how]
        assert proxy.was_cut
        assert other.call(b"c") == b"C"  # only this connection is, and it only once
    expected = [b"a\n", b"b\n", b"c\n"] if delivered and how is not Break.RESET else [b"a\n", b"c\n"]
    if not (delivered and how is Break.RESET):  # a reset may overtake what it follows
        wait_until(lambda: sorted(server.seen) == expected, what="the server sees what was delivered", timeout_s=10)


@pytest.mark.parametrize("how", list(Break))
def test_an_answer_is_cut_and_what_was_asked_is_done(server: Lines, proxy: Proxy, how: Break) -> None:
    proxy.cut(Cut(1, Direction.TO_CLIENT, how))
    with Caller(proxy) as caller:
        caller.patience(0.2 if how is Break.SWALLOW else 10)
        assert caller.call(b"a") == SEEN[how]
        assert server.seen == [b"a\n"]
        if how is Break.SWALLOW:
            assert caller.call(b"b") == b"silence"
            assert server.seen == [b"a\n"]  # neither direction goes on
            proxy.heal()
            assert caller.call(b"c") in (b"reset", b"")
    wait_until(lambda: len(server.ends) == 1, what="the server's side ends too", timeout_s=10)


def test_every_chunk_can_be_cut(proxy: Proxy) -> None:
    answers = []
    for chunk in range(1, 6):
        with Caller(proxy) as caller:
            proxy.cut(Cut(chunk, how=Break.SHUTDOWN))
            answers.append([caller.call(b"a") == b"A", proxy.was_cut or caller.call(b"b") == b"B", proxy.was_cut])
    assert answers == [
        [False, True, True],
        [False, True, True],
        [True, False, True],
        [True, False, True],
        [True, True, False],
    ]


def test_a_side_that_ends_ends_the_other(server: Lines, proxy: Proxy) -> None:
    with Caller(proxy) as caller:
        caller.call(b"a")
    wait_until(lambda: server.ends == ["end"] and proxy.connections() == 0, what="both are closed", timeout_s=10)


def test_what_is_held_comes_later_and_all_can_be_broken(server: Lines, proxy: Proxy) -> None:
    with Caller(proxy) as caller:
        proxy.hold()
        caller.patience(0.1)
        assert caller.call(b"a") == b"silence"
        assert server.seen == []
        proxy.release()
        caller.patience(10)
        assert caller.call(b"b") in (b"A", b"A\nB")
        proxy.break_all()
        assert caller.call(b"c") in (b"reset", b"B")


def is_refused(proxy: Proxy) -> bool:
    """A reset may come while the kernel still connects."""
    try:
        with Caller(proxy) as caller:
            return caller.call(b"a") in (b"reset", b"")
    except ConnectionError:
        return True


def test_connections_are_refused(server: Lines, proxy: Proxy) -> None:
    proxy.refuse()
    assert is_refused(proxy)
    proxy.heal()
    with Caller(proxy) as caller:
        assert caller.call(b"a") == b"A"
    server.shutdown()
    server.server_close()
    assert is_refused(proxy)
