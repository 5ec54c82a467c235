"""What callers with little or no right try: each is a request that once went through, or a service that once fell over."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.api.access import authenticator as authenticators
from holdfast.api.access import issued
from holdfast.api.access.authenticator import Authenticator
from holdfast.api.access.roles import classify
from holdfast.api.flink import aggregates
from holdfast.api.routes.dialect import vertices
from holdfast.statebackends.errors import AuthenticationError, NotLeaderError, StorageUnavailableError
from holdfast.statebackends.layout import TOKENS_FOLDER, WORKER_KEY_FILE
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import DescribeFiles, run_flow
from tests.api.fakes import JOB, NAME, TOKEN, FakeCoordinator, Served, make_graph, serving
from tests.api.test_access import issue, status
from tests.api.test_web_interface import make_jar
from tests.api.test_workers import REGISTER


@pytest.fixture
def fake() -> FakeCoordinator:
    return FakeCoordinator()


@pytest.fixture
def service(tmp_path: Path, fake: FakeCoordinator) -> Iterator[Served]:
    with serving(fake, tmp_path, flink_ui=make_jar(tmp_path)) as running:
        yield running


@pytest.mark.parametrize(
    "path", [f"/flink/jobs/{JOB}/yarn-cancel", f"/v1/jobs/{JOB}/yarn-cancel", "/flink/jobmanager/log", "/flink/taskmanagers/x/log"]
)
@pytest.mark.parametrize("end", ["%0A", "%0a", "%0D", "%00", "/", "%2F", "%20"])
def test_no_end_of_a_path_makes_it_another_one(service: Served, fake: FakeCoordinator, path: str, end: str) -> None:
    """Routes are regular expressions, whose `$` matches in front of a line break, too."""
    viewer = issue(service, "viewer")["token"]
    assert status(service, "GET", path + end, viewer) in (403, 404)
    assert status(service, "GET", path + end, str(service.token)) == 404 or end in ("/", "%2F")
    assert not any(call[0] == "cancel" for call in fake.calls)


def test_a_path_with_a_line_break_is_of_no_kind() -> None:
    for path in (f"/flink/jobs/{JOB}/yarn-cancel\n", "/flink/\x00", "/flink\n", f"/v1/jobs/{JOB}\n"):
        assert classify("GET", path) is None


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/docs", "/openapi.json"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_strangers_who_change_open_paths_are_answered_and_fill_no_log(
    service: Served, method: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = service.http.request(method, service.url + path)
    assert answer.status == 405
    assert caplog.text == ""


def test_a_viewer_takes_no_job_from_its_leader(service: Served, fake: FakeCoordinator) -> None:
    fake.error = NotLeaderError("elsewhere", job=JOB, epoch=4)
    for role, told in (("viewer", 0), ("operator", 1)):
        token = issue(service, role)["token"]
        answer = service.request("GET", f"/v1/jobs/{JOB}", token=token, headers={"X-Holdfast-Unreachable": "4"})
        assert answer.status == 503
        assert len([call for call in fake.calls if call[0] == "leader_unreachable"]) == told


# ------------------------------------------------------------------------------------------------------ the state directory


def bearer(token: str) -> bytes:
    return f"Bearer {token}".encode()


def test_a_slow_reading_brings_no_revoked_token_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Authenticator(str(tmp_path), TOKEN)
    token, record = known.issue("viewer", name="")
    read, is_first = issued.read_tokens, [True]

    def slow(*arguments: Any) -> Any:
        found = yield from read(*arguments)
        if is_first:
            is_first.clear()
            known.revoke(record.token_id)  # while this reading is under way, which has seen it
        return found

    monkeypatch.setattr(issued, "read_tokens", slow)
    known.tokens()
    with pytest.raises(AuthenticationError):
        asyncio.run(known.caller_of(bearer(token)))


def test_made_up_tokens_wait_together_for_a_storage_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authenticators, "READ_TIMEOUT_S", 0.3)
    known = Authenticator(str(tmp_path), TOKEN)
    released = threading.Event()
    monkeypatch.setattr(known, "_run", lambda flow: released.wait(20))

    async def flood() -> float:
        began = time.monotonic()
        asked = (known.caller_of(bearer(f"hft_{number}_x")) for number in range(50))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        took_s = time.monotonic() - began
        released.set()
        assert all(isinstance(answer, StorageUnavailableError) for answer in answers)
        return took_s

    assert asyncio.run(flood()) < 5, "one after the other takes 15 s"


def test_what_storage_says_is_not_for_strangers_and_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Authenticator(str(tmp_path), TOKEN, monotonic_s=lambda: 7.0)
    asked = []

    def fail(flow: Any) -> Any:
        asked.append(flow)
        raise StorageUnavailableError("s3://secret-bucket does not answer", path="/secret")

    monkeypatch.setattr(known, "_run", fail)
    for token in ("hft_1_x", "hft_2_x", "hft_3_x"):
        with pytest.raises(StorageUnavailableError) as refused:
            asyncio.run(known.caller_of(bearer(token)))
        assert "secret" not in f"{refused.value} {refused.value.fields}"
    assert len(asked) == 1


def test_a_record_is_read_once(tmp_path: Path) -> None:
    known = Authenticator(str(tmp_path), TOKEN)
    for _ in range(3):
        known.issue("viewer", name="")
    records, _ = run_flow(issued.read_tokens({}), open_storage(str(tmp_path)))
    (tmp_path / TOKENS_FOLDER / f"{'a' * 16}.json").mkdir()
    flow = issued.read_tokens(records)
    assert isinstance(next(flow), DescribeFiles)
    with pytest.raises(StopIteration) as ended:
        flow.send(list(records))
    assert ended.value.value == (records, ())
    assert len(known.tokens()) == 3, "a folder in the place of a record stops nobody"


def test_a_submission_without_a_key_for_its_workers_begins_no_job(service: Served, fake: FakeCoordinator, tmp_path: Path) -> None:
    (tmp_path / WORKER_KEY_FILE).parent.mkdir(exist_ok=True)
    (tmp_path / WORKER_KEY_FILE).write_text("junk")
    body = msgspec.json.encode({"graph": msgspec.to_builtins(make_graph(NAME))})
    assert service.request("POST", "/v1/jobs", body).status == 400
    assert fake.calls == []


# --------------------------------------------------------------------------------------------------------- old workers


def test_a_worker_of_an_old_submission_registers_for_no_newer_one(service: Served, fake: FakeCoordinator, tmp_path: Path) -> None:
    old = Authenticator(str(tmp_path), TOKEN).worker_token(JOB, 1)
    for submission, wanted in ((1, 200), (2, 403), (2**62, 403)):
        body = msgspec.json.encode(msgspec.structs.replace(REGISTER, submission=submission))
        assert service.request("POST", f"/v1/jobs/{JOB}/workers/register", body, token=old).status == wanted
    assert [call[0] for call in fake.calls] == ["register"]


# ----------------------------------------------------------------------------------------------------------- long lists


def test_ranges_of_subtasks_that_overlap_are_taken_once() -> None:
    assert vertices._chosen("5,0-2,1-3,9-8,0") == {0, 1, 2, 3, 5}
    began = time.process_time()
    assert len(vertices._chosen(",".join(["0-99999"] * 2_000))) == 100_000
    assert time.process_time() - began < 5, "one by one they take minutes"


def test_names_that_nothing_has_told_are_looked_for_once() -> None:
    class Counting(dict[str, str]):
        asked = 0

        def __contains__(self, key: object) -> bool:
            Counting.asked += 1
            return super().__contains__(key)

    things = [Counting(a="1") for _ in range(100)]
    found = aggregates.aggregate(things, [*map(str, range(1_000)), "a"], ["sum"])
    assert [(each.id, each.sum) for each in found] == [("a", 100.0)]
    assert Counting.asked == len(things)
