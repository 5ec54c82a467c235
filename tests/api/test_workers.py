"""The worker protocol over HTTP, against a coordinator with canned answers: bodies, bounds, streams."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import urllib3

from holdfast.barriers import codec
from holdfast.barriers.messages import (
    AckAnswers,
    AckBatch,
    AcknowledgeCheckpoint,
    AckStatus,
    CancelTasks,
    DeclineCheckpoint,
    FailureReason,
    Heartbeat,
    NumberedCommand,
    Registered,
    RegisterWorker,
    ShutdownWorker,
    StandBy,
    StandbyOrder,
    StatusBatch,
    SubtaskMetrics,
    SubtaskStatus,
    TaskState,
)
from holdfast.statebackends.errors import FencedError
from holdfast.statebackends.handles import InlineHandle, KeyedStateHandle, KeyGroupRange, OperatorSubtaskState
from tests.api.fakes import JOB, SOURCE, FakeCoordinator, Served, serving

WORKERS = f"/v1/jobs/{JOB}/workers"
REGISTER = RegisterWorker(JOB, 0, 1, 3, "nonce", 4242, "here", "tcp://127.0.0.1:9", "dir")


def make_ack(data: bytes = b"\x00\xff") -> AcknowledgeCheckpoint:
    handle = KeyedStateHandle(KeyGroupRange(0, 128), "arrow", (), (InlineHandle(data),))
    return AcknowledgeCheckpoint(1, 5, SOURCE, 0, {"in": OperatorSubtaskState(keyed=(handle,))})


def test_register(served: Served, coordinator: FakeCoordinator) -> None:
    response = served.request("POST", f"{WORKERS}/register", codec.encode(REGISTER))
    assert response.status == 200
    assert codec.decode(response.data, Registered).session == "s1"
    assert coordinator.calls == [("register", JOB, REGISTER)]


def test_register_for_another_job_is_400(served: Served, coordinator: FakeCoordinator) -> None:
    served.json("POST", f"/v1/jobs/{'d' * 32}/workers/register", codec.encode(REGISTER), status=400)
    assert coordinator.calls == []


def test_a_superseded_worker_gets_409(served: Served, coordinator: FakeCoordinator) -> None:
    coordinator.error = FencedError("slot 0 has a newer process", slot=0)
    response = served.request("POST", f"{WORKERS}/register", codec.encode(REGISTER))
    assert (response.status, response.headers["X-Holdfast-Error"]) == (409, "FencedError")
    assert json.loads(response.headers["X-Holdfast-Fields"]) == {"slot": 0}


def test_acks_are_answered_item_by_item(served: Served, coordinator: FakeCoordinator) -> None:
    batch = AckBatch(1, 0, "s1", (make_ack(), DeclineCheckpoint(1, 6, SOURCE, 0, FailureReason.DECLINED, "no")))
    response = served.request("POST", f"{WORKERS}/0/acks", codec.encode(batch))
    assert codec.decode(response.data, AckAnswers).answers == (AckStatus.SUCCESS, AckStatus.SUCCESS)
    assert coordinator.calls == [("acks", JOB, batch)]
    assert b'holdfast_acknowledgements_total{answer="SUCCESS"} 2.0' in served.request("GET", "/metrics").data


def test_states_and_heartbeats(served: Served, coordinator: FakeCoordinator) -> None:
    states = StatusBatch(1, 0, "s1", (SubtaskStatus(1, SOURCE, 0, TaskState.RUNNING),))
    assert served.json("POST", f"{WORKERS}/0/states", codec.encode(states)) == {}
    beat = Heartbeat(0, "s1", 1, (SubtaskMetrics(SOURCE, 0, records_in=3),))
    assert served.json("POST", f"{WORKERS}/0/heartbeat", codec.encode(beat)) == {"epoch": 1, "members": []}
    assert coordinator.calls == [("states", JOB, states), ("heartbeat", JOB, beat)]


def test_a_stale_attempt_gets_409(served: Served, coordinator: FakeCoordinator) -> None:
    coordinator.error = FencedError("attempt 1 is over, 2 runs", attempt=1, newer=2)
    served.json("POST", f"{WORKERS}/0/acks", codec.encode(AckBatch(1, 0, "s1", (make_ack(),))), status=409)


@pytest.mark.parametrize("path", ["register", "0/acks", "0/states", "0/heartbeat"])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"{}", b"\xff\xff", b'{"slot": "0"}', b"[" * 100_000, b'{"epoch": 1e400}']
)
def test_malformed_bodies_are_400(served: Served, coordinator: FakeCoordinator, path: str, body: bytes) -> None:
    assert set(served.json("POST", f"{WORKERS}/{path}", body, status=400)) == {"errors"}
    assert coordinator.calls == []


@pytest.mark.parametrize(
    "item",
    [
        {"type": "nonsense"},
        {"type": "ack", "attempt": 1, "checkpoint_id": 1, "vertex": "v"},
        {"type": "ack", "attempt": True, "checkpoint_id": 1, "vertex": "v", "subtask": 0},
        {"type": "ack", "attempt": 1, "checkpoint_id": 1.5, "vertex": "v", "subtask": 0},
        {"type": "decline", "attempt": 1, "checkpoint_id": 1, "vertex": "v", "subtask": 0, "reason": "tired"},
    ],
)
def test_a_malformed_item_spoils_the_batch(served: Served, coordinator: FakeCoordinator, item: dict[str, Any]) -> None:
    body = {"epoch": 1, "slot": 0, "session": "s1", "items": [json.loads(codec.encode(make_ack())), item]}
    answer = served.json("POST", f"{WORKERS}/0/acks", body, status=400)
    assert "items" in answer["errors"][0]
    assert coordinator.calls == []


@pytest.mark.parametrize("slot", ["-1", "x", "99999999999"])
def test_a_malformed_slot_is_400(served: Served, slot: str) -> None:
    served.json("POST", f"{WORKERS}/{slot}/heartbeat", codec.encode(Heartbeat(0, "s1", 1)), status=400)


def test_a_slot_that_differs_from_the_body_is_400(served: Served, coordinator: FakeCoordinator) -> None:
    answer = served.json("POST", f"{WORKERS}/1/heartbeat", codec.encode(Heartbeat(0, "s1", 1)), status=400)
    assert answer["errors"] == ["slot is 0 in the body and 1 in the path"]


def test_unknown_fields_are_ignored(served: Served) -> None:
    served.json(
        "POST", f"{WORKERS}/0/heartbeat", {"slot": 0, "session": "s1", "attempt": 1, "since": "tomorrow", "type": "heartbeat"}
    )


def test_a_body_beyond_the_bound_is_413(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    with serving(coordinator, tmp_path, body_bytes_max=10_000) as served:
        fits = codec.encode(AckBatch(1, 0, "s1", (make_ack(b"x" * 6_000),)))
        assert served.request("POST", f"{WORKERS}/0/acks", fits).status == 200
        large = codec.encode(AckBatch(1, 0, "s1", (make_ack(b"x" * 60_000),)))
        assert served.request("POST", f"{WORKERS}/0/acks", large).status == 413
        chunks = served.http.request(
            "POST",
            f"{served.url}{WORKERS}/0/acks",
            body=iter([large[:30_000], large[30_000:]]),
            headers={"Authorization": f"Bearer {served.token}"},
            chunked=True,
        )
        assert chunks.status == 413
        assert len(coordinator.calls) == 1


STAND_BY = StandBy(JOB, 2, 1, 3, "nonce", 4242, "here", 1, "proof")


def test_a_worker_that_stands_by_gets_its_order(served: Served, coordinator: FakeCoordinator) -> None:
    answer = served.request("POST", f"{WORKERS}/standby", codec.encode(STAND_BY))
    assert codec.decode(answer.data, StandbyOrder) == StandbyOrder(1, 0, 2, 3, "proof")
    assert coordinator.calls[-1] == ("stand_by", JOB, STAND_BY)


def test_what_stands_by_for_another_job_is_refused(served: Served) -> None:
    served.json("POST", f"/v1/jobs/{'d' * 32}/workers/standby", codec.encode(STAND_BY), status=400)
    served.json("POST", f"{WORKERS}/standby", b"{}", status=400)


def test_workers_are_listed(served: Served) -> None:
    body = served.json("GET", WORKERS)
    known = {"attempt", "submission", "state", "epoch", "restarts", "failure", "last_failure", "late_dropped", "workers"}
    known |= {"restart_strategy", "restarts_at", "rows_skipped", "restored_local_bytes", "restored_remote_bytes", "operators"}
    known |= {"as_of_ms", "standbys", "silent"}
    assert set(body) == known
    assert (body["late_dropped"], body["rows_skipped"]) == (3, 5)
    source, late = body["operators"]
    assert (source["uid"], source["kind"], source["records_out"], source["counters"]) == ("in", "source", 1_200, {})
    assert late == {
        "uid": "out",
        "name": "out",
        "kind": "process",
        "records_in": 1_200,
        "records_out": 0,
        "late_dropped": 3,
        "late_ms_max": 4_500,
        "counters": {"refunds": 2},
        "rows_skipped": 5,
        "first_skipped": "no number",
    }
    assert (body["submission"], body["state"]) == (1, "RUNNING")
    assert body["workers"] == [
        {
            "slot": 0,
            "registered": True,
            "connected": True,
            "pid": 4242,
            "host": "here",
            "nonce": "nnnnnnnn",
            "data_address": "tcp://127.0.0.1:1",
            "task_attempt": 3,
            "last_seen": 5_000,
            "spawn": 0,
            "timed_out": False,
            "fingerprint": "",
            "frames_refused": 0,
            "seat": -1,
            "seat_spawn": 0,
        }
    ]
    assert body["standbys"] == body["silent"] == []


# ------------------------------------------------------------------------------------------------------ command stream


class Stream:
    """A command stream read line by line."""

    def __init__(self, served: Served, query: str) -> None:
        self.response = served.request("GET", f"{WORKERS}/0/commands?{query}", preload_content=False)
        assert self.response.status == 200
        assert self.response.headers["Content-Type"].startswith("application/x-ndjson")
        self._lines = self._split()

    def _split(self) -> Iterator[bytes]:
        rest = b""
        for chunk in self.response.stream(65_536):
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines

    def next(self) -> NumberedCommand:
        return codec.decode(next(self._lines), NumberedCommand)

    def ended(self) -> bool:
        return next(self._lines, None) is None

    def close(self) -> None:
        self.response.close()


@pytest.fixture
def streams() -> Iterator[ExitStack]:
    """Closes the streams that are entered into it."""
    with ExitStack() as cleanup:
        yield cleanup


def open_stream(streams: ExitStack, served: Served, query: str = "session=s1&after=0") -> Stream:
    return streams.enter_context(contextlib.closing(Stream(served, query)))


def command(number: int) -> NumberedCommand:
    return NumberedCommand(1, "s1", number, CancelTasks(number))


def test_commands_arrive_in_order_and_the_end_ends_the_response(
    streams: ExitStack, served: Served, coordinator: FakeCoordinator
) -> None:
    stream = open_stream(streams, served)
    assert coordinator.calls == [("commands", JOB, 0, "s1", 0)]
    (subscription,) = coordinator.subscriptions
    for number in (1, 2, 3):
        subscription.feed(command(number))
    assert [stream.next() for _ in range(3)] == [command(1), command(2), command(3)]
    last = NumberedCommand(1, "s1", 4, ShutdownWorker("over"))
    subscription.feed(last)
    subscription.end()
    assert stream.next() == last
    assert stream.ended()
    assert subscription.consumer_gone.wait(5)


def test_a_resumed_stream_names_the_last_command(streams: ExitStack, served: Served, coordinator: FakeCoordinator) -> None:
    open_stream(streams, served, "session=s1&after=17")
    assert coordinator.calls == [("commands", JOB, 0, "s1", 17)]


@pytest.mark.parametrize("query", ["", "session=s1&after=-1", "session=s1&after=x", "session=" + "s" * 300])
def test_a_malformed_stream_is_400(served: Served, coordinator: FakeCoordinator, query: str) -> None:
    served.json("GET", f"{WORKERS}/0/commands?{query}", status=400)
    assert coordinator.calls == []


def test_a_session_that_is_over_is_409(served: Served, coordinator: FakeCoordinator) -> None:
    coordinator.error = FencedError("session s1 is over", session="s1")
    served.json("GET", f"{WORKERS}/0/commands?session=s1", status=409)


def test_silence_is_filled_with_keep_alives(streams: ExitStack, coordinator: FakeCoordinator, tmp_path: Path) -> None:
    with serving(coordinator, tmp_path, keep_alive_interval_ms=20) as served:
        stream = open_stream(streams, served)
        assert stream.next() == NumberedCommand(1, "s1", 0, None)
        coordinator.subscriptions[0].feed(command(1))
        following = [stream.next() for _ in range(5)]
        assert command(1) in following
        assert following[-1] == NumberedCommand(1, "s1", 1, None)
        coordinator.subscriptions[0].end()


def test_a_worker_that_leaves_is_noticed_at_once(streams: ExitStack, served: Served, coordinator: FakeCoordinator) -> None:
    stream = open_stream(streams, served)
    coordinator.subscriptions[0].feed(command(1))
    stream.next()
    stream.response.close()
    assert coordinator.subscriptions[0].consumer_gone.wait(1)


def test_a_worker_that_is_killed_is_noticed_at_once(served: Served, coordinator: FakeCoordinator) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        request = f"GET {WORKERS}/0/commands?session=s1 HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {served.token}\r\n\r\n"
        connection.sendall(request.encode())
        assert connection.recv(4_096).startswith(b"HTTP/1.1 200")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    assert coordinator.subscriptions[0].consumer_gone.wait(1)


def test_stopping_the_service_ends_streams(streams: ExitStack, coordinator: FakeCoordinator, tmp_path: Path) -> None:
    with serving(coordinator, tmp_path) as served:
        stream = open_stream(streams, served)
    try:
        assert stream.ended()
    except urllib3.exceptions.HTTPError:
        pytest.fail("the stream was cut instead of ended")
