"""Events of jobs: their shapes, and streams of them that are bounded, resumed, and ended when the credential is."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3

from holdfast.api.events import stream
from holdfast.api.events.cloudevents import cloud_event
from holdfast.api.events.follower import Follower, ReadHistory, Told, decode_fed
from holdfast.coordinator.history.feed import FedRecord, HistoryFeed
from holdfast.coordinator.history.records import HistoryEntry, HistoryGap, HistoryPage, Position, encode_line
from holdfast.coordinator.history.store import HistoryQuery
from holdfast.statebackends.errors import AuthenticationError
from tests.api.fakes import JOB, FakeCoordinator, Served, serving
from tests.api.test_protocol import eventually

GOLDEN = Path(__file__).parents[1] / "golden" / "cloudevents_v1.json"
AT_MS = 1_790_000_000_123
RECORDS: list[tuple[str, dict[str, Any]]] = [
    ("leader", {"submission": 1, "attempt": 2, "newest_checkpoint": 41, "took_over": True}),
    ("state", {"state": "RUNNING", "previous": "RESTARTING", "reason": ""}),
    ("failure", {"attempt": 2, "error": "ValueError: 'x'", "restarts": 1, "restart_in_ms": 250, "subtask": 1}),
    ("restart", {"attempt": 3, "checkpoint_id": 41, "folder": "/state/chk-41", "savepoint": False, "replayed": 12}),
    ("initialized", {"attempt": 3}),
    ("checkpoint", {"id": 42, "status": "COMPLETED", "duration_ms": 74, "vertices": [{}], "slowest": [{"subtask": 3}]}),
    ("request", {"request_kind": "savepoint", "trigger_id": "ab", "checkpoint_id": 43, "location": "/savepoints/1"}),
    ("explanation", {"id": 44, "summary": "it failed", "causes": [{"kind": "expired", "text": "late"}], "phases": [{}]}),
]


def told(number: int, kind: str, facts: dict[str, Any]) -> Told:
    record = FedRecord(JOB, "flights", 7, number, encode_line(number, AT_MS + number, kind, facts))
    return Told(JOB, "flights", decode_fed(record), number)


def publish(service: FakeCoordinator, number: int, *, epoch: int = 7, kind: str = "state", job_id: str = JOB, **facts: Any) -> None:
    service.feed.publish(FedRecord(job_id, "flights", epoch, number, encode_line(number, AT_MS + number, kind, facts)))


def test_shapes_of_events_are_those_of_the_golden_file() -> None:
    """A change here changes what receivers get: it needs a new version in `type`."""
    gap = Told(JOB, "flights", HistoryGap(7, 6, 9, 2))
    shown = [cloud_event(told(number, kind, facts)) for number, (kind, facts) in enumerate(RECORDS, 1)] + [cloud_event(gap)]
    assert shown == json.loads(GOLDEN.read_text())


def test_events_have_what_cloudevents_requires() -> None:
    for event in json.loads(GOLDEN.read_text()):
        assert event["specversion"] == "1.0"
        assert all(isinstance(event[name], str) and event[name] for name in ("id", "source", "type", "datacontenttype"))
        assert all(name.isalnum() and name.islower() and len(name) <= 20 for name in event)
        assert len(json.dumps(event)) < 64 * 1024


def test_long_texts_and_lists_stay_in_the_history() -> None:
    facts = {"id": 1, "message": "x" * 100_000, "vertices": [{}] * 10_000}
    event = cloud_event(told(1, "checkpoint", facts))
    assert len(json.dumps(event)) < 4_096
    assert event["dataref"] == f"/v1/jobs/{JOB}/history?after=7-0&limit=1"


# ---------------------------------------------------------------------------------------------------------------- streams


class Reader:
    """A client of an event stream."""

    def __init__(self, response: urllib3.BaseHTTPResponse) -> None:
        self.response = response
        self._blocks = self._split()

    def _split(self) -> Iterator[str]:
        text = b""
        for chunk in self.response.stream(1, decode_content=False):
            text += chunk
            if text.endswith(b"\n\n"):
                yield text.decode()
                text = b""

    def event(self) -> tuple[str, dict[str, Any]]:
        """Id and data of the next event."""
        for block in self._blocks:
            lines = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
            if "data" in lines:
                return lines.get("id", ""), json.loads(lines["data"])
        raise EOFError("the stream has ended")

    def numbers(self, count: int) -> list[str]:
        return [self.event()[1]["id"] for _ in range(count)]


@contextlib.contextmanager
def reading(served: Served, path: str, **headers: str) -> Iterator[Reader]:
    response = served.request("GET", path, headers=headers, preload_content=False)
    try:
        assert response.status == 200, response.read()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        reader = Reader(response)
        next(reader._blocks)  # `retry`: it follows from here on
        yield reader
    finally:
        response.close()


def test_a_stream_tells_what_happens_from_now_on(served: Served, coordinator: FakeCoordinator) -> None:
    publish(coordinator, 1)
    with reading(served, "/v1/events") as everything, reading(served, f"/v1/jobs/{JOB}/events") as one:
        publish(coordinator, 1, job_id="c" * 32)
        publish(coordinator, 2, state="RUNNING")
        assert everything.event()[1]["source"] == f"/v1/jobs/{'c' * 32}"
        name, event = one.event()
        assert (name, event["id"], event["data"]["state"]) == ("7-2", "7-2", "RUNNING")
        assert everything.event()[1] == event


def test_a_stream_of_some_kinds_tells_no_others_and_goes_on_behind_them(served: Served, coordinator: FakeCoordinator) -> None:
    for path in ("/v1/events", f"/v1/jobs/{JOB}/events"):
        with reading(served, f"{path}?kinds=failure,%20drill") as some:
            publish(coordinator, 1)
            publish(coordinator, 2, kind="failure", error="x")
            publish(coordinator, 3)
            publish(coordinator, 4, kind="drill")
            assert some.numbers(2) == ["7-2", "7-4"], path


@pytest.mark.parametrize("path", ["/v1/events", f"/v1/jobs/{JOB}/events"])
def test_who_was_told_nothing_yet_has_a_place_to_go_on_from(
    served: Served, coordinator: FakeCoordinator, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream of failures alone that was cut off before the first one went on from what was the newest event then: the failure
    that had come meanwhile was never told."""
    monkeypatch.setattr(stream, "KEEP_ALIVE_S", 0.0)
    with reading(served, f"{path}?kinds=failure") as some:
        publish(coordinator, 1)
        place = next(block for block in some._blocks if block.startswith("id: ")).removeprefix("id: ").strip()
    publish(coordinator, 2, kind="failure", error="x")
    with reading(served, f"{path}?kinds=failure", **{"Last-Event-ID": place}) as some:
        assert some.numbers(1) == ["7-2"]


@pytest.mark.parametrize("path", ["/v1/events", f"/v1/jobs/{JOB}/events"])
def test_a_kind_that_there_is_not_is_refused_with_those_that_there_are(served: Served, path: str) -> None:
    answer = served.request("GET", f"{path}?kinds=failure,nope")
    assert (answer.status, answer.headers["X-Holdfast-Error"]) == (400, "InvalidConfigError")
    assert "'nope'" in answer.data.decode()
    assert "first_record" in answer.data.decode()


def history_of(entries: list[HistoryEntry]) -> Callable[[str, HistoryQuery], HistoryPage]:
    """A history in pages of two."""

    def history(job_id: str, query: HistoryQuery) -> HistoryPage:
        kept = [each for each in entries if query.after is None or Position(each.epoch, each.number) > query.after]
        shown = kept if query.newest else kept[:2]
        where = f"{shown[-1].epoch}-{shown[-1].number}" if shown else str(query.after)
        return HistoryPage(tuple(shown), next=where, more=len(shown) < len(kept))

    return history


def test_a_stream_of_a_job_resumes_from_its_history(
    served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [HistoryEntry(7, number, AT_MS, "state", {}) for number in range(1, 6)]
    monkeypatch.setattr(coordinator, "history", history_of(entries))
    publish(coordinator, 5)
    publish(coordinator, 6)
    with reading(served, f"/v1/jobs/{JOB}/events", **{"Last-Event-ID": "7-2"}) as reader:
        assert reader.numbers(4) == ["7-3", "7-4", "7-5", "7-6"]
    with reading(served, f"/v1/jobs/{JOB}/events?after=0-0") as reader:
        assert reader.numbers(6) == [f"7-{number}" for number in range(1, 7)]


def test_a_stream_of_all_jobs_resumes_behind_the_event_that_came_last(served: Served, coordinator: FakeCoordinator) -> None:
    with reading(served, "/v1/events") as reader:
        for number in (1, 2, 3):
            publish(coordinator, number)
        last = [reader.event()[0] for _ in range(2)][-1]
    with reading(served, "/v1/events", **{"Last-Event-ID": last}) as reader:
        assert reader.numbers(1) == ["7-3"]


def test_of_another_process_it_goes_back_to_the_time_of_the_event(
    served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [HistoryEntry(6, number, AT_MS - 30_000 + 10_000 * number, "state", {}) for number in range(1, 5)]
    monkeypatch.setattr(coordinator, "history", history_of(entries))
    publish(coordinator, 1)
    with reading(served, "/v1/events", **{"Last-Event-ID": f"0badc0de-17-{AT_MS}"}) as reader:
        assert reader.numbers(4) == ["6-2", "6-3", "6-4", "7-1"]


@pytest.mark.parametrize(
    ("path", "last"),
    [("/v1/events", "7-2"), ("/v1/events", "a-b-c"), ("/v1/events", "x" * 60), (f"/v1/jobs/{JOB}/events", "a-b-c")],
)
def test_an_id_of_no_event_is_refused_by_name(served: Served, path: str, last: str) -> None:
    answer = served.request("GET", path, headers={"Last-Event-ID": last})
    assert (answer.status, answer.headers["X-Holdfast-Error"]) == (400, "InvalidConfigError")


def test_streams_are_bounded_and_a_place_that_is_left_is_free(
    served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "STREAMS_OF_ONE_MAX", 2)
    monkeypatch.setattr(stream, "RECHECK_S", 0.1)
    with reading(served, "/v1/events"), reading(served, "/v1/events"):
        answer = served.request("GET", "/v1/events")
        assert (answer.status, answer.headers["X-Holdfast-Error"]) == (503, "BusyError")
        assert "holdfast_event_streams 2.0" in served.request("GET", "/metrics").data.decode()

    def is_free() -> bool:
        return "holdfast_event_streams 0.0" in served.request("GET", "/metrics").data.decode()

    eventually("the streams have ended", is_free)
    with reading(served, "/v1/events"):
        pass


def test_a_stream_ends_when_its_token_is_revoked(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "RECHECK_S", 0.1)
    issued = served.json("POST", "/v1/tokens", {"role": "viewer"}, status=201)
    viewer = Served(served.url, issued["token"], served.http)
    with reading(viewer, f"/v1/jobs/{JOB}/events") as reader:
        served.json("DELETE", f"/v1/tokens/{issued['id']}")
        with pytest.raises(EOFError):
            reader.event()
    assert 'holdfast_event_streams_closed_total{reason="access"} 1.0' in served.request("GET", "/metrics").data.decode()


def test_a_slow_reader_is_told_no_more_of_a_batch_once_its_token_is_revoked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each event may take SEND_TIMEOUT_S: of a hundred of them, most of an hour."""
    monkeypatch.setattr(stream, "RECHECK_S", 0.0)
    feed, checks, blocks = HistoryFeed(), itertools.count(1), list[bytes]()
    follower = Follower(feed)
    for number in range(1, 51):
        feed.publish(FedRecord(JOB, "job", 7, number, encode_line(number, AT_MS + number, "state", {})))

    async def recheck() -> None:
        if next(checks) > 3:
            raise AuthenticationError("revoked")

    async def read(_wanted: ReadHistory) -> None:
        return None

    async def send(message: Any) -> None:
        blocks.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.sleep(60)

    streams = stream.EventStreams()
    answer = stream.EventStream(streams, "token", feed, follower, stream.job_id_of, read, recheck)
    asyncio.run(answer({}, receive, send))
    assert sum(block.startswith(b"id: ") for block in blocks) == 2
    assert streams.closed == {"access": 1}


def test_streams_of_two_tokens_of_one_name_are_counted_by_token(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "STREAMS_OF_ONE_MAX", 1)
    issued = [served.json("POST", "/v1/tokens", {"role": "viewer", "name": "ci"}, status=201)["token"] for _ in range(2)]
    one, other = (Served(served.url, token, served.http) for token in issued)
    with reading(one, "/v1/events"), reading(other, "/v1/events"):
        assert one.request("GET", "/v1/events").status == 503


def test_a_reader_that_does_not_read_is_cut_off(
    served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "SEND_TIMEOUT_S", 0.2)
    text = "x" * 2_000

    def is_cut_off() -> bool:
        for number in itertools.islice(numbers, 200):
            publish(coordinator, number, reason=text, state=text, previous=text)
        return 'reason="slow"' in served.request("GET", "/metrics").data.decode()

    numbers = itertools.count(1)
    with reading(served, "/v1/events"):
        eventually("the stream has ended", is_cut_off)


def test_streams_end_with_the_service(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        with serving(coordinator, tmp_path) as fresh:
            reader = stack.enter_context(reading(fresh, "/v1/events"))
        with pytest.raises((EOFError, urllib3.exceptions.HTTPError)):
            reader.event()


def test_a_stream_ends_when_another_leadership_begins(
    served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "RECHECK_S", 0.1)
    with reading(served, "/v1/events") as reader:
        coordinator.feed = HistoryFeed()
        with pytest.raises(EOFError):
            reader.event()
    assert 'holdfast_event_streams_closed_total{reason="leader"} 1.0' in served.request("GET", "/metrics").data.decode()
