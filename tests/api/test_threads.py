"""Which threads requests take: viewers hold up no operator, and a storage that hangs takes a few readers for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread

from holdfast.api.routes import threads
from holdfast.statebackends.errors import StorageUnavailableError
from tests.api.fakes import JOB, FakeCoordinator, Served, serving

TRIGGER = "ab" * 16
VIEWERS = 60
"""More than the 40 threads that all requests share."""
COMMANDS: list[tuple[str, str, Any, int]] = [
    ("PATCH", f"/v1/jobs/{JOB}", None, 202),
    ("GET", f"/v1/jobs/{JOB}/yarn-cancel", None, 202),
    ("POST", f"/v1/applications/{JOB}/cancel", None, 202),
    ("POST", f"/v1/jobs/{JOB}/checkpoints", {}, 202),
    ("POST", f"/v1/jobs/{JOB}/savepoints", {"target-directory": "/savepoints"}, 202),
    ("POST", f"/v1/jobs/{JOB}/stop", {"targetDirectory": "/savepoints"}, 202),
    ("PUT", f"/v1/jobs/{JOB}/labels/safe", {"checkpoint": 7}, 200),
    ("DELETE", f"/v1/jobs/{JOB}/labels/safe", None, 200),
    ("GET", f"/v1/jobs/{JOB}/preflight", None, 200),
]
READS = [
    ("GET", f"/v1/jobs/{JOB}/history"),
    ("GET", f"/v1/jobs/{JOB}/cost"),
    ("GET", f"/v1/jobs/{JOB}/labels"),
    ("GET", f"/v1/jobs/{JOB}/drills"),
    ("POST", f"/v1/jobs/{JOB}/drills"),
]


@pytest.fixture
def coordinator() -> FakeCoordinator:
    return FakeCoordinator()


@pytest.fixture
def served(coordinator: FakeCoordinator, tmp_path: Path) -> Iterator[Served]:
    with serving(coordinator, tmp_path) as running:
        yield running


class Held:
    """A method of the coordinator that comes back when it is let go."""

    def __init__(self, answer: Any) -> None:
        self.entered, self.released = threading.Semaphore(0), threading.Event()
        self._answer = answer

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.entered.release()
        assert self.released.wait(60)
        return self._answer


def test_viewers_who_wait_hold_up_no_command(served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(coordinator.trigger)
    monkeypatch.setattr(coordinator, "trigger_status", held)
    with ThreadPoolExecutor(VIEWERS) as viewers:
        polls = [viewers.submit(served.request, "GET", f"/v1/jobs/{JOB}/checkpoints/{TRIGGER}", timeout=60) for _ in range(VIEWERS)]
        try:
            assert all(held.entered.acquire(timeout=10) for _ in range(40))
            answers = [served.request(method, path, body, timeout=5).status for method, path, body, _ in COMMANDS]
        finally:
            held.released.set()
        assert answers == [status for *_, status in COMMANDS]
        assert {poll.result().status for poll in polls} == {200}


def test_savepoints_that_hang_hold_up_no_cancellation(
    served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A savepoint looks at its target first, which is storage's to answer."""
    held = Held(TRIGGER)
    monkeypatch.setattr(coordinator, "request_savepoint", held)
    count = threads.COMMAND_THREADS + 4
    asked = ("POST", f"/v1/jobs/{JOB}/savepoints", {"target-directory": "/savepoints"})
    with ThreadPoolExecutor(count) as callers:
        savepoints = [callers.submit(served.request, *asked, timeout=60) for _ in range(count)]
        try:
            assert all(held.entered.acquire(timeout=10) for _ in range(threads.COMMAND_THREADS))
            assert served.request("PATCH", f"/v1/jobs/{JOB}", timeout=5).status == 202
        finally:
            held.released.set()
        assert {each.result().status for each in savepoints} == {202}


@pytest.mark.parametrize(("method", "path"), READS)
def test_a_read_that_storage_holds_is_given_up(
    served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    monkeypatch.setattr(threads, "READ_TIMEOUT_S", 0.1)
    held = Held(None)
    for name in ("history", "cost", "labels", "drills", "drill"):
        monkeypatch.setattr(coordinator, name, held)
    try:
        for _ in range(threads.READERS_MAX + 1):  # both readers hang, and the next one reads all the same
            answer = served.request(method, path, {} if method == "POST" else None, timeout=10)
            assert answer.status == 503
            assert answer.headers["X-Holdfast-Error"] == StorageUnavailableError.__name__
            assert "storage has not answered for 0.1 s" in answer.json()["errors"][0]
            assert held.entered.acquire(timeout=10)
    finally:
        held.released.set()


def test_reads_that_hang_are_bounded(served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "READ_TIMEOUT_S", 0.1)
    monkeypatch.setattr(threads, "HUNG_READS_MAX", 3)
    held = Held(coordinator.costs)
    monkeypatch.setattr(coordinator, "cost", held)
    try:
        texts = [served.request("GET", f"/v1/jobs/{JOB}/cost", timeout=10).json()["errors"][0] for _ in range(4)]
    finally:
        held.released.set()
    assert ["holds 3 reads" in text for text in texts] == [False, False, False, True]
    monkeypatch.setattr(threads, "READ_TIMEOUT_S", 20.0)
    while served.request("GET", f"/v1/jobs/{JOB}/cost", timeout=10).status != 200:  # those that hung have come back
        pass
    assert sum(held.entered.acquire(blocking=False) for _ in range(10)) == 4


def test_a_read_that_is_given_up_before_it_begins_takes_no_place() -> None:
    """Its time is over in the moment in which it gets its place: no thread ever begins it."""

    async def given_up_at_once() -> None:
        checkpoint = to_thread.run_sync

        async def late(*arguments: Any, **named: Any) -> Any:
            scope.cancel()  # the next checkpoint, which is in front of the thread, raises
            return await checkpoint(*arguments, **named)

        with pytest.MonkeyPatch.context() as patch, anyio.CancelScope() as scope:
            patch.setattr(to_thread, "run_sync", late)
            await readers.run(called.append, 1)

    async def run() -> None:
        for _ in range(threads.HUNG_READS_MAX + 1):
            await given_up_at_once()
        assert await readers.run(len, "abc") == 3

    called: list[int] = []
    readers = threads.StorageReaders()
    anyio.run(run)
    assert called == []
