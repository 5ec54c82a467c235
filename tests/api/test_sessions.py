"""Sessions of browsers: who logs in, what a page elsewhere can't do, and how a session ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Iterator
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import pytest
import urllib3

from holdfast.api.access import sessions as stored
from holdfast.api.access.audit_log import read_audit
from holdfast.api.access.authenticator import LOGINS_PER_S, Authenticator
from holdfast.api.access.sessions import LIFE_MS, OWN_TOKEN, SESSIONS_PER_TOKEN_MAX, Sessions
from holdfast.api.server.main import EmbeddedCoordinator
from holdfast.api.settings import server_settings
from holdfast.statebackends.errors import AuthenticationError, TooManyRequestsError
from tests.api.fakes import JOB, TOKEN, FakeCoordinator, Served, serving

SAME = {"Sec-Fetch-Site": "same-origin"}
ELSEWHERE: tuple[dict[str, str], ...] = (
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Origin": "https://evil.example"},
    {},
)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Served]:
    with serving(FakeCoordinator(), tmp_path) as running:
        yield running


class Browser:
    """Keeps cookies, has no other credential, and says which page asks."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.cookies: dict[str, str] = {}
        self.set_cookie = ""

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] = SAME) -> urllib3.BaseHTTPResponse:
        sent = {**headers, "Cookie": "; ".join(f"{name}={value}" for name, value in self.cookies.items())}
        raw = None if body is None else json.dumps(body).encode()
        answer = self._served.http.request(method, self._served.url + path, body=raw, headers=sent)
        self.set_cookie = answer.headers.get("Set-Cookie", "")
        for name, morsel in SimpleCookie(self.set_cookie).items():
            self.cookies[name] = morsel.value
        return answer

    def log_in(self, token: str) -> urllib3.BaseHTTPResponse:
        return self.ask("POST", "/ui/login", {"token": token})


def issue(served: Served, role: str, **more: Any) -> dict[str, Any]:
    return dict(served.json("POST", "/v1/tokens", {"role": role, **more}, status=201))


def test_a_session_from_login_to_logout(service: Served) -> None:
    browser = Browser(service)
    assert browser.ask("GET", "/ui/session").status == 401
    token = issue(service, "viewer", name="ada", expires_in_ms=60_000)
    answer = browser.log_in(token["token"])
    assert answer.json() == {"role": "viewer", "job": "", "name": "token ada", "expires_at_ms": token["expires"]}
    assert token["token"] not in browser.set_cookie
    found = browser.ask("GET", "/ui/session").json()
    assert found == {"role": "viewer", "job": "", "name": "session of token ada", "expires_at_ms": token["expires"]}
    assert browser.ask("GET", "/v1/jobs/overview").status == 200
    assert browser.ask("POST", f"/v1/jobs/{JOB}/stop", {}).status == 403, "a session may what its token may"
    kept = dict(browser.cookies)
    assert browser.ask("POST", "/ui/logout").json() == {}
    assert "Max-Age=0" in browser.set_cookie
    browser.cookies = kept
    assert browser.ask("GET", "/ui/session").status == 401, "it ended at the service, too"


def test_a_page_asks_whether_somebody_is_signed_in_and_is_refused_nothing(service: Served) -> None:
    """A refusal of the first visit is an error in the browser's console."""
    browser = Browser(service)
    nobody = {"signed_in": False, "session": None}
    first = browser.ask("GET", "/ui/visitor")
    assert (first.status, first.json(), first.headers["Cache-Control"]) == (200, nobody, "no-store")
    browser.log_in(TOKEN)
    session = browser.ask("GET", "/ui/session").json()
    assert browser.ask("GET", "/ui/visitor").json() == {"signed_in": True, "session": session}
    kept = dict(browser.cookies)
    browser.ask("POST", "/ui/logout")
    browser.cookies = kept
    over = browser.ask("GET", "/ui/visitor")
    assert (over.status, over.json()) == (200, nobody)
    assert browser.ask("GET", "/ui/session").status == 401, "whoever relied on that still may"


def test_a_token_is_no_better_tried_there_than_elsewhere(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path) as service:
        browser = Browser(service)
        browser.ask("GET", "/ui/visitor")
        for header in ("Bearer wrong-wrong-wrong-wrong", "Basic eDp5", "x"):
            answer = browser.ask("GET", "/ui/visitor", headers={"Authorization": header})
            assert (answer.status, answer.headers["X-Holdfast-Error"]) == (401, "AuthenticationError"), header
        found = browser.ask("GET", "/ui/visitor", headers={"Authorization": f"Bearer {TOKEN}"}).json()
        assert (found["signed_in"], found["session"]["role"]) == (True, "admin")
        browser.cookies = {f"holdfast-{service.url.rpartition(':')[2]}": "forged"}
        assert browser.ask("GET", "/ui/visitor").json()["signed_in"] is False
    refused = [(line.request, line.status) for line in read_audit(str(tmp_path)) if line.kind == "refused"]
    assert refused == [("GET /ui/visitor", 401)] * 4, "three tokens and a cookie, and not who brought nothing"


def test_without_tokens_a_page_of_another_name_is_nobodys(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path, token=None) as service:
        browser = Browser(service)
        assert browser.ask("GET", "/ui/visitor").json()["session"]["role"] == "admin"
        assert browser.ask("GET", "/ui/visitor", headers={"Host": "evil.example"}).json() == {"signed_in": False, "session": None}


def test_the_cookie_is_for_no_script_and_no_other_site(service: Served) -> None:
    browser = Browser(service)
    browser.log_in(TOKEN)
    parts = {part.strip() for part in browser.set_cookie.split(";")}
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= parts
    assert parts & {f"Max-Age={LIFE_MS // 1000 - lag}" for lag in (0, 1)}
    port = service.url.rpartition(":")[2]
    assert list(browser.cookies) == [f"holdfast-{port}"], "cookies know no ports"


def test_over_tls_the_cookie_is_secure(tmp_path: Path) -> None:
    settings = server_settings({}, state_dir=tmp_path, tls="auto", port=0)
    with EmbeddedCoordinator(settings, open_service=lambda _s, _u: FakeCoordinator()) as coordinator:
        context = ssl.create_default_context(cadata=coordinator.authorities)
        http = urllib3.PoolManager(retries=False, ssl_context=context)
        browser = Browser(Served(coordinator.url, coordinator.token, http))
        assert browser.log_in(str(coordinator.token)).status == 200
        assert "Secure" in browser.set_cookie
        assert all(name.startswith("__Host-") for name in browser.cookies)
        assert browser.ask("GET", "/ui/session").json()["role"] == "admin"
        http.clear()


def test_nobody_says_from_where_it_asks(service: Served) -> None:
    """Else each login would be the first one of its address, and the audit log would have what the caller likes."""
    browser = Browser(service)
    browser.ask("POST", "/ui/login", {"token": TOKEN}, {**SAME, "X-Forwarded-Proto": "https"})
    assert browser.set_cookie
    assert "Secure" not in browser.set_cookie
    statuses = [
        service.http.request(
            "POST",
            f"{service.url}/ui/login",
            body=json.dumps({"token": "wrong"}).encode(),
            headers={"X-Forwarded-For": f"10.0.0.{number}", "X-Forwarded-Proto": "https"},
        ).status
        for number in range(3 * LOGINS_PER_S)
    ]
    assert 429 in statuses


@pytest.mark.parametrize("headers", ELSEWHERE)
def test_a_page_elsewhere_changes_nothing(service: Served, headers: dict[str, str]) -> None:
    browser = Browser(service)
    browser.log_in(TOKEN)
    for method, path in (("POST", f"/v1/jobs/{JOB}/stop"), ("PATCH", f"/jobs/{JOB}"), ("DELETE", "/v1/tokens/" + "a" * 16)):
        refused = browser.ask(method, path, {}, headers)
        assert (refused.status, refused.headers["X-Holdfast-Error"]) == (403, "ForeignOriginError"), path
    cancel = browser.ask("GET", f"/jobs/{JOB}/yarn-cancel", headers=headers)
    assert (cancel.status, cancel.headers["X-Holdfast-Error"]) == (403, "ForeignOriginError")
    assert browser.ask("GET", f"/jobs/{JOB}/yarn-cancel").status == 202, "a page of this service may"


def test_a_page_elsewhere_logs_nobody_in(service: Served) -> None:
    browser = Browser(service)
    refused = browser.ask("POST", "/ui/login", {"token": TOKEN}, {"Origin": "https://evil.example"})
    assert refused.status == 403
    assert browser.cookies == {}


@pytest.mark.parametrize("token", ["wrong" * 8, "hft_" + "0" * 16 + "_x", "hfw_x", "\ud83d\ude00", "x" * 4_000])
def test_a_wrong_token_begins_no_session(service: Served, token: str) -> None:
    browser = Browser(service)
    answer = browser.log_in(token)
    assert answer.status == 401
    assert browser.cookies == {}
    assert token.encode("utf-8", "surrogatepass") not in answer.data


@pytest.mark.parametrize("body", [{}, {"token": ""}, {"token": None}, {"token": 7}, {"token": "x" * 5_000}, [], "x"])
def test_bad_logins_are_malformed(service: Served, body: Any) -> None:
    assert Browser(service).ask("POST", "/ui/login", body).status == 400


def test_a_login_has_a_small_body(service: Served) -> None:
    assert Browser(service).ask("POST", "/ui/login", {"token": "x" * 9_000}).status == 413


def test_a_workers_token_begins_no_session(tmp_path: Path) -> None:
    known = Authenticator(str(tmp_path), TOKEN)
    token = known.worker_token(JOB, 1)
    with serving(FakeCoordinator(), tmp_path) as service:
        refused = Browser(service).log_in(token)
    assert (refused.status, refused.headers["X-Holdfast-Error"]) == (403, "AccessDeniedError")


def test_a_session_ends_with_its_token(service: Served) -> None:
    browser = Browser(service)
    token = issue(service, "operator")
    browser.log_in(token["token"])
    assert browser.ask("GET", "/ui/session").status == 200
    service.json("DELETE", f"/v1/tokens/{token['id']}")
    assert browser.ask("GET", "/ui/session").status == 401
    assert browser.ask("GET", "/v1/jobs/overview").status == 401


def test_a_session_ends_within_five_seconds_when_its_token_is_revoked_elsewhere(tmp_path: Path) -> None:
    now_s = [100.0]
    here, there = Authenticator(str(tmp_path), TOKEN, monotonic_s=lambda: now_s[0]), Authenticator(str(tmp_path), TOKEN)
    token, record = there.issue("viewer", name="")

    async def outcome() -> None:
        login = await here.log_in(token, "peer")
        assert (await here.caller_of_session(login.text)).account == record.token_id
        there.revoke(record.token_id)
        now_s[0] += 4.9
        with pytest.raises(AuthenticationError, match="revoked"):
            await here.caller_of_session(login.text)

    asyncio.run(outcome())


def test_logins_are_bounded_by_the_network_of_a_machine(tmp_path: Path) -> None:
    here = Authenticator(str(tmp_path), TOKEN, monotonic_s=lambda: 100.0)

    async def refused(peers: list[str]) -> int:
        count = 0
        for peer in peers:
            with contextlib.suppress(AuthenticationError):
                try:
                    await here.log_in("guessed", peer)
                except TooManyRequestsError:
                    count += 1
        return count

    assert asyncio.run(refused([f"2001:db8::{number:x}" for number in range(40)])) == 30
    assert asyncio.run(refused([f"2001:db8:0:{number:x}::1" for number in range(1, 41)])) == 0


def test_a_session_of_one_job_sees_that_job_alone(service: Served) -> None:
    browser = Browser(service)
    browser.log_in(issue(service, "viewer", job=JOB)["token"])
    assert browser.ask("GET", "/ui/session").json()["job"] == JOB
    assert browser.ask("GET", f"/v1/jobs/{JOB}").status == 200
    for path in ("/v1/jobs/overview", f"/v1/jobs/{'e' * 32}/exceptions", "/v1/taskmanagers", "/metrics"):
        assert browser.ask("GET", path).status == 403, path


def test_a_token_in_the_header_counts_before_a_cookie(service: Served) -> None:
    browser = Browser(service)
    browser.log_in(TOKEN)
    viewer = issue(service, "viewer", name="v")["token"]
    found = browser.ask("GET", "/ui/session", headers={"Authorization": f"Bearer {viewer}"}).json()
    assert (found["role"], found["name"]) == ("viewer", "token v")


def test_without_tokens_everybody_here_is_an_administrator(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path, token=None) as service:
        browser = Browser(service)
        assert browser.ask("GET", "/ui/session").json()["role"] == "admin"
        assert browser.log_in("anything").json()["expires_at_ms"] == -1
        assert browser.set_cookie == ""


def test_logins_are_recorded_and_their_tokens_are_not(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path) as service:
        browser = Browser(service)
        browser.log_in("wrong" * 8)
        browser.log_in(TOKEN)
        browser.ask("POST", f"/v1/jobs/{JOB}/stop", {})
    lines = read_audit(str(tmp_path))
    assert [(line.request, line.credential, line.status) for line in lines if line.kind != "started"] == [
        ("POST /ui/login", "", 401),
        ("log in", "token", 200),
        ("stop", "session of token", 202),
    ]


def test_logins_of_one_address_are_bounded(service: Served) -> None:
    browser = Browser(service)
    statuses = [browser.log_in("wrong" * 8).status for _ in range(4 * LOGINS_PER_S)]
    refused = statuses.count(429)
    assert refused > 0
    assert set(statuses) == {401, 429}
    assert browser.log_in(TOKEN).status in (200, 429)


def test_pages_have_headers_that_keep_others_out(service: Served) -> None:
    for path in ("/ui/session", "/ui/nothing", "/ui"):
        headers = service.request("GET", path).headers
        assert "default-src 'self'" in headers["Content-Security-Policy"]
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "same-origin"
    assert service.request("GET", "/ui/session").headers["Cache-Control"] == "no-store"
    plain = service.request("GET", "/v1/jobs").headers
    assert plain["X-Content-Type-Options"] == "nosniff"
    assert "Content-Security-Policy" not in plain
    assert service.request("GET", "/v1/nothing").headers["X-Content-Type-Options"] == "nosniff"


# ---------------------------------------------------------------------------------------------------------------- core


def opened(sessions: Sessions, token_id: str = "t", now_ms: int = 0, **more: Any) -> str:
    return sessions.open(token_id, "hash", now_ms=now_ms, wall_ms=now_ms + 1_000, **more)[0]


def test_the_store_is_bounded_and_one_token_takes_no_place_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "SESSIONS_MAX", 60)
    sessions = Sessions()
    first = opened(sessions, OWN_TOKEN)
    mine = [opened(sessions, "mine") for _ in range(SESSIONS_PER_TOKEN_MAX + 20)]
    assert sessions.find(first, now_ms=1) is not None
    assert sessions.find(mine[0], now_ms=1) is None
    assert sessions.find(mine[-1], now_ms=1) is not None
    assert len(sessions) == SESSIONS_PER_TOKEN_MAX + 1
    for number in range(100):
        opened(sessions, f"t{number}")
    assert len(sessions) == 60


def test_a_session_ends_in_time() -> None:
    sessions = Sessions()
    long, short = opened(sessions), opened(sessions, token_expires_ms=1_500)
    assert sessions.find(short, now_ms=499) is not None
    assert sessions.find(short, now_ms=500) is None
    assert sessions.find(long, now_ms=LIFE_MS - 1) is not None
    assert sessions.find(long, now_ms=LIFE_MS) is None
    assert sessions.find("", now_ms=0) is None
    assert sessions.find("x" * 10**6, now_ms=0) is None
    opened(sessions, now_ms=LIFE_MS)
    assert len(sessions) == 1, "ended ones make room"
