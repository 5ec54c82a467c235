"""Requests that only look are answered a few at a time, and what else is asked waits for none of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from holdfast.api.http import turns
from tests.api.fakes import JOB, FakeCoordinator, Served, serving

POLL = f"/v1/jobs/{JOB}/checkpoints/{'ab' * 16}"


@pytest.fixture
def coordinator() -> FakeCoordinator:
    return FakeCoordinator()


@pytest.fixture
def served(coordinator: FakeCoordinator, tmp_path: Path) -> Iterator[Served]:
    with serving(coordinator, tmp_path) as running:
        yield running


class Counting:
    """A method of the coordinator that knows how many are in it, and may hold them."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.entered, self.leave = threading.Semaphore(0), threading.Event()
        self.most = self._now = 0
        self._lock = threading.Lock()

    def __call__(self, *_: Any) -> Any:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self.entered.release()
        self.leave.wait(60)
        with self._lock:
            self._now -= 1
        return self.answer


def test_a_few_look_at_one_time(served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "WAIT_S", 60.0)
    counting = Counting(coordinator.trigger)
    monkeypatch.setattr(coordinator, "trigger_status", counting)
    with ThreadPoolExecutor(20) as viewers:
        polls = [viewers.submit(served.request, "GET", POLL, timeout=60) for _ in range(20)]
        try:
            assert all(counting.entered.acquire(timeout=10) for _ in range(turns.LOOKS_MAX))
            assert served.request("POST", f"/v1/jobs/{JOB}/stop", {"targetDirectory": "/s"}, timeout=10).status == 202
            assert served.request("GET", f"/v1/jobs/{JOB}/yarn-cancel", timeout=10).status == 202
            assert served.request("GET", "/healthz", timeout=10).status == 200
            assert served.request("POST", f"/v1/jobs/{JOB}/workers/0/heartbeat", b"[", timeout=10).status == 400
            assert not counting.entered.acquire(blocking=False)
        finally:
            counting.leave.set()
        assert {poll.result().status for poll in polls} == {200}
    assert counting.most == turns.LOOKS_MAX
    assert served.request("GET", POLL, timeout=10).status == 200, "every turn was given back"


def test_those_who_wait_for_storage_hold_up_the_others_for_a_moment(
    served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting(coordinator.trigger)
    monkeypatch.setattr(coordinator, "trigger_status", counting)
    with ThreadPoolExecutor(turns.LOOKS_MAX) as viewers:
        polls = [viewers.submit(served.request, "GET", POLL, timeout=60) for _ in range(turns.LOOKS_MAX)]
        try:
            assert all(counting.entered.acquire(timeout=10) for _ in range(turns.LOOKS_MAX))
            assert served.request("GET", f"/v1/jobs/{JOB}", timeout=10).status == 200
        finally:
            counting.leave.set()
        assert {poll.result().status for poll in polls} == {200}


def test_an_answer_in_parts_keeps_no_turn() -> None:
    """Whoever reads slowly, or never, holds nobody up."""
    asyncio.run(_read_never())


async def _read_never() -> None:
    never = asyncio.Event()

    async def parts(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        raise AssertionError

    async def stuck(message: Message) -> None:
        if message.get("more_body"):
            entered.release()
            await never.wait()

    in_turn = turns.LookInTurn(parts)
    entered = asyncio.Semaphore(0)
    scope = {"type": "http", "method": "GET", "path": "/v1/jobs"}
    readers = [asyncio.create_task(in_turn(scope, _nothing, stuck)) for _ in range(turns.LOOKS_MAX)]
    try:
        for _ in readers:
            await asyncio.wait_for(entered.acquire(), 10)
        assert in_turn._turns._value == turns.LOOKS_MAX
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    assert in_turn._turns._value == turns.LOOKS_MAX  # given back once


def test_answers_that_wait_for_nothing_leave_room_for_what_comes_meanwhile() -> None:
    asyncio.run(_look_at_once())


async def _look_at_once() -> None:
    answered = 0

    async def at_once(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal answered
        answered += 1

    async def drop(message: Message) -> None:
        raise AssertionError

    in_turn = turns.LookInTurn(at_once)
    scope = {"type": "http", "method": "GET", "path": "/v1/jobs"}
    looks = [asyncio.create_task(in_turn(scope, _nothing, drop)) for _ in range(20)]
    most = 0
    while not all(look.done() for look in looks):
        before = answered
        await asyncio.sleep(0)
        most = max(most, answered - before)
    assert (answered, most) == (20, turns.LOOKS_MAX)
    assert in_turn._turns._value == turns.LOOKS_MAX


async def _nothing() -> Message:
    raise AssertionError
