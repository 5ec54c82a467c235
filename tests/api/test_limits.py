"""What callers with a token may ask for: how often, how deep, and never in the way of workers."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import urllib3
from hypothesis import given
from hypothesis import strategies as st

from holdfast.api.access import request_budget
from holdfast.api.access.authenticator import Authenticator
from holdfast.api.access.request_budget import BURST_S, RequestBudget
from holdfast.api.client import RestClient
from holdfast.api.http.auth import SHARED_FACTOR
from holdfast.api.server.app import SUBMIT_THREADS
from holdfast.coordinator.views import JobView
from holdfast.statebackends.errors import AuthenticationError, TooManyRequestsError
from tests.api.fakes import JOB, TOKEN, FakeCoordinator, Served, serving

WAIT_S = 20.0


# ------------------------------------------------------------------------------------------------------------- budgets


def test_a_burst_is_taken_and_then_so_many_a_second() -> None:
    budget = RequestBudget()
    taken = [budget.take("a", per_s=10, now_ms=0) for _ in range(10 * BURST_S + 3)]
    assert taken == [0] * 10 * BURST_S + [100] * 3
    assert budget.refused == 3
    assert budget.take("b", per_s=10, now_ms=0) == 0, "another one's"
    assert budget.take("a", per_s=10, now_ms=99) == 1
    assert budget.take("a", per_s=10, now_ms=100) == 0


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 50)), max_size=300))
def test_no_caller_gets_more_than_its_rate(asked: list[tuple[str, int]]) -> None:
    budget, now_ms, taken = RequestBudget(), 0, {"a": 0, "b": 0}
    for key, pause_ms in asked:
        now_ms += pause_ms
        wait_ms = budget.take(key, per_s=20, now_ms=now_ms)
        taken[key] += wait_ms == 0
        assert wait_ms <= 50
        assert taken[key] <= 20 * BURST_S + 20 * now_ms / 1000 + 1e-6


def test_callers_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_budget, "KEYS_MAX", 3)
    budget = RequestBudget()
    for key in "abcda":
        budget.take(key, per_s=1, now_ms=0)
    assert len(budget) == 3


def test_a_clock_that_goes_back_gives_nothing() -> None:
    budget = RequestBudget()
    for _ in range(BURST_S):
        budget.take("a", per_s=1, now_ms=1_000)
    assert budget.take("a", per_s=1, now_ms=0) > 0


def test_what_is_given_back_may_be_taken_again() -> None:
    budget = RequestBudget()
    for _ in range(3):
        assert budget.take("a", per_s=1, now_ms=0, count=BURST_S) == 0
        budget.give_back("a", BURST_S)
    budget.give_back("a", 100)
    assert [budget.take("a", per_s=1, now_ms=0) for _ in range(BURST_S + 1)][-1] > 0, "never more than a burst"
    budget.give_back("unknown", 1)
    assert len(budget) == 1


# ----------------------------------------------------------------------------------------------------------- over HTTP


def _ask_often(served: Served, token: str, count: int, path: str = "/v1/jobs") -> list[urllib3.BaseHTTPResponse]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda _: served.request("GET", path, token=token), range(count)))


def test_who_asks_too_often_is_told_when_to_come_back_and_others_are_not(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path, requests_per_s_max=5) as served:
        viewer, other = (served.json("POST", "/v1/tokens", {"role": "viewer"}, status=201)["token"] for _ in range(2))
        answers = _ask_often(served, viewer, 20)
        refused = [answer for answer in answers if answer.status == 429]
        assert refused
        assert {answer.status for answer in answers} == {200, 429}
        assert refused[0].headers["Retry-After"] == "1"
        assert refused[0].headers["X-Holdfast-Error"] == "TooManyRequestsError"
        assert served.request("GET", "/v1/jobs", token=other).status == 200
        assert served.request("GET", f"/v1/jobs/{JOB}").status == 200, "nor is the service's own token"


def test_all_viewers_together_leave_room_for_who_acts(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path, requests_per_s_max=2) as served:
        tokens = [served.json("POST", "/v1/tokens", {"role": "viewer"}, status=201)["token"] for _ in range(8)]
        operator = served.json("POST", "/v1/tokens", {"role": "operator"}, status=201)["token"]
        with ThreadPoolExecutor(len(tokens)) as pool:
            statuses = [answer.status for found in pool.map(lambda token: _ask_often(served, token, 4), tokens) for answer in found]
        assert statuses.count(200) <= 2 * SHARED_FACTOR * (BURST_S + WAIT_S)
        assert 429 in statuses
        assert served.request("POST", f"/v1/jobs/{JOB}/stop", {}, token=operator).status == 202


def test_workers_have_no_such_bound(tmp_path: Path) -> None:
    worker = Authenticator(str(tmp_path), TOKEN).worker_token(JOB, 1)
    with serving(FakeCoordinator(), tmp_path, requests_per_s_max=1) as served:
        heartbeat = {"slot": 0, "session": "s", "attempt": 1, "metrics": [], "frames_refused": 0}
        answers = [served.request("POST", f"/v1/jobs/{JOB}/workers/0/heartbeat", heartbeat, token=worker) for _ in range(30)]
        assert 429 not in {answer.status for answer in answers}


def test_a_client_waits_and_comes_back(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path, requests_per_s_max=1) as served:
        viewer = served.json("POST", "/v1/tokens", {"role": "viewer"}, status=201)["token"]
        patient, hasty = RestClient(served.url, viewer), RestClient(served.url, viewer, reconnect_timeout_s=0)
        for _ in range(BURST_S):
            hasty.overview()
        with pytest.raises(TooManyRequestsError) as refused:
            hasty.overview()
        assert refused.value.retry_after_ms > 0
        for _ in range(2):
            patient.overview()


class SlowCoordinator(FakeCoordinator):
    """Whatever shows a job waits until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()
        self.waiting = threading.Semaphore(0)

    def job(self, job_id: str) -> JobView:
        self.waiting.release()
        assert self.may_go_on.wait(WAIT_S)
        return super().job(job_id)


def test_viewers_that_wait_keep_no_worker_from_its_commands_and_nobody_from_submitting(tmp_path: Path) -> None:
    service = SlowCoordinator()
    with serving(service, tmp_path) as served, ThreadPoolExecutor(64) as pool:
        http = urllib3.PoolManager(retries=False, timeout=WAIT_S, maxsize=64, headers={"Authorization": f"Bearer {TOKEN}"})
        viewers = [pool.submit(http.request, "GET", f"{served.url}/v1/jobs/{JOB}/status") for _ in range(60)]
        for _ in range(40):
            assert service.waiting.acquire(timeout=WAIT_S), "all threads of viewers wait"
        path = f"/v1/jobs/{JOB}/workers/0/commands?epoch=1&session=s&after=0"
        stream = http.request("GET", served.url + path, preload_content=False)
        assert stream.status == 200
        stream.close()
        assert served.request("POST", f"/v1/jobs/{JOB}/leave", {"submission": 1}).status == 200
        assert SUBMIT_THREADS > 0
        service.may_go_on.set()
        assert {viewer.result().status for viewer in viewers} == {200}
        http.clear()


# -------------------------------------------------------------------------------------------------------- depth of JSON


@pytest.mark.parametrize("deep", ["[" * 30_000, '{"a":' * 5_000, "[" * 30_000 + "]" * 30_000, '{"token":' + "[" * 900 + "]" * 900])
@pytest.mark.parametrize(
    "path", ["/ui/login", "/v1/tokens", f"/v1/jobs/{JOB}/stop", "/v1/jobs", "/v1/preflight", f"/v1/jobs/{JOB}/workers/0/acks"]
)
def test_json_that_is_nested_deep_is_malformed(served: Served, path: str, deep: str) -> None:
    answer = served.request("POST", path, deep.encode())
    assert answer.status in (400, 413), answer.data
    assert "errors" in json.loads(answer.data)


@pytest.mark.parametrize("deep", [2_000, 200_000, 600_000])
def test_an_unknown_field_that_is_nested_deep_is_malformed(served: Served, deep: int) -> None:
    body = b'{"unknown": ' + b"[" * deep + b"]" * deep + b', "submission": 1}'
    answer = served.request("POST", f"/v1/jobs/{JOB}/leave", body)
    assert answer.status == 400, answer.data


# --------------------------------------------------------------------------------------------------------------- clocks


class Clocks:
    def __init__(self) -> None:
        self.monotonic_s, self.wall_ms = 1_000.0, 10**12

    def pass_ms(self, ms: int) -> None:
        self.monotonic_s += ms / 1000
        self.wall_ms += ms


def _authenticator(path: Path, clocks: Clocks) -> Authenticator:
    return Authenticator(str(path), TOKEN, monotonic_s=lambda: clocks.monotonic_s, wall_ms=lambda: clocks.wall_ms)


def _role(known: Authenticator, token: str) -> Any:
    return asyncio.run(known.caller_of(f"Bearer {token}".encode())).role


def test_a_clock_that_is_set_back_revives_no_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clocks = Clocks()
    known = _authenticator(tmp_path, clocks)
    token, _ = known.issue("viewer", name="night", life_ms=60_000)
    assert _role(known, token) == "viewer"
    clocks.pass_ms(60_000)
    clocks.wall_ms -= 86_400_000
    with pytest.raises(AuthenticationError, match="expired"):
        _role(known, token)
    assert "was set by -86400 s" in caplog.text
    clocks.wall_ms += 86_400_000
    with pytest.raises(AuthenticationError, match="expired"):
        _role(known, token)


def test_a_clock_that_is_set_forward_ends_tokens(tmp_path: Path) -> None:
    clocks = Clocks()
    known = _authenticator(tmp_path, clocks)
    token, _ = known.issue("viewer", name="night", life_ms=60_000)
    clocks.wall_ms += 60_000
    with pytest.raises(AuthenticationError, match="expired"):
        _role(known, token)


def test_a_clock_that_is_a_day_behind_that_of_another_machine_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ahead, behind = Clocks(), Clocks()
    ahead.wall_ms += 86_400_000
    token, record = _authenticator(tmp_path, ahead).issue("viewer", name="")
    assert caplog.text == ""
    assert _role(_authenticator(tmp_path, behind), token) == "viewer"
    assert f"token {record.token_id} was created 86400 s from now" in caplog.text


def test_times_of_this_test_are_real() -> None:
    """What the clock is by default."""
    known = Authenticator("/nowhere", TOKEN)
    assert abs(known.now_ms() - time.time() * 1000) < 5_000
