"""A worker's requests to a coordinator that reads slowly: what moves arrives, however long all of it takes."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest

from holdfast.barriers import codec
from holdfast.barriers.messages import AckBatch, AcknowledgeCheckpoint
from holdfast.operators.worker import gateway as control_client
from holdfast.operators.worker.gateway import CoordinatorAddress, CoordinatorHttp, UnreachableError
from holdfast.statebackends.handles import InlineHandle, KeyedStateHandle, KeyGroupRange, OperatorSubtaskState

TIMEOUT_S = 0.4
"""Of one piece in these tests."""

SIZE = 12 << 20


def large_batch() -> AckBatch:
    keyed = KeyedStateHandle(KeyGroupRange(0, 128), "arrow", (), (InlineHandle(b"x" * (SIZE * 3 // 4)),))
    return AckBatch(1, 0, "s", (AcknowledgeCheckpoint(1, 1, "v", 0, {"u": OperatorSubtaskState((keyed,))}),))


class SlowReader:
    """Takes one request, `pause_s` after each megabyte; then answers, or reads no more after `stops_after` bytes."""

    def __init__(self, pause_s: float, stops_after: int | None = None) -> None:
        self._pause_s, self._stops_after = pause_s, stops_after
        self.read = bytearray()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def _run(self) -> None:
        opened, _ = self.listener.accept()
        with opened:
            while not self._whole():
                if self._stops_after is not None and len(self.read) >= self._stops_after:
                    self.over.wait(10)
                    return
                megabytes = len(self.read) >> 20
                self.read += opened.recv(1 << 16)
                if len(self.read) >> 20 > megabytes:
                    time.sleep(self._pause_s)
            opened.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    def _whole(self) -> bool:
        head, found, _ = bytes(self.read[:2_048]).partition(b"\r\n\r\n")
        if not found:
            return False
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        return len(self.read) >= len(head) + 4 + length

    def close(self) -> None:
        self.over.set()
        self.thread.join(10)
        self.listener.close()


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_client, "CONNECT_TIMEOUT_S", TIMEOUT_S)


def test_a_large_acknowledgement_has_as_long_as_it_moves() -> None:
    server = SlowReader(pause_s=TIMEOUT_S / 4)  # three times as long for all of it as one piece may take
    http = CoordinatorHttp(CoordinatorAddress(server.url, None), "job", 0)
    http.post("/0/acks", large_batch(), None)
    head, _, body = bytes(server.read).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert codec.decode(body, AckBatch) == large_batch()
    http.close()
    server.close()


def test_one_that_does_not_move_is_given_up() -> None:
    server = SlowReader(pause_s=0, stops_after=1 << 20)
    http = CoordinatorHttp(CoordinatorAddress(server.url, None), "job", 0)
    with pytest.raises(UnreachableError):
        http.post("/0/acks", large_batch(), None)
    http.close()
    server.close()


def test_a_small_one_is_sent_whole() -> None:
    server = SlowReader(pause_s=0)
    http = CoordinatorHttp(CoordinatorAddress(server.url, None), "job", 0)
    http.post("/0/acks", AckBatch(1, 0, "s", ()), None)
    assert json.loads(bytes(server.read).partition(b"\r\n\r\n")[2])["session"] == "s"
    http.close()
    server.close()
