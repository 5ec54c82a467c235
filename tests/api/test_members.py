"""Members over HTTP, in one process: what one that stands by answers itself, passes on, and refuses; and the lock of a host."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import fcntl
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import urllib3
from msgspec.structs import replace

from holdfast.api.access.roles import Caller, Role
from holdfast.api.errors import BusyError
from holdfast.api.http.auth import CALLER
from holdfast.api.members import membership
from holdfast.api.members.lock import HostLock, LocksUnusableError
from holdfast.api.members.membership import Membership, open_lock
from holdfast.api.members.peers import MEMBER_HEADER, Peers
from holdfast.api.routes import forwarded
from holdfast.api.routes.forwarded import HOP_HEADER, ForwardToActive
from holdfast.api.routes.viewed import KeptAnswers
from holdfast.api.server.member import standing_by
from holdfast.api.server.server import RestServer
from holdfast.api.settings import ServerSettings, server_settings
from holdfast.coordinator.standby.records import ActiveRecord, SignOfLife
from holdfast.coordinator.standby.store import claim, give_sign
from holdfast.statebackends.errors import InvalidConfigError, NotLeaderError, StorageUnavailableError
from holdfast.statebackends.layout import GUARD_FILE, MEMBERS_FOLDER, parse_sign_name
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import Operation, Storage, run_flow
from tests.api.fakes import JOB, TOKEN, FakeCoordinator, Served

DEADLINE_S = 20.0


def eventually(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class Member(Served):
    """A member in a thread of this process; its coordinator has canned answers."""

    def __init__(self, state: Path, **changes: Any) -> None:
        import urllib3

        self.coordinator = FakeCoordinator()
        settings = ServerSettings(
            state, **{"token": TOKEN, "port": 0, "ha": True, "takeover_after_ms": 600, "stop_timeout_ms": 2_000, **changes}
        )
        self._undo = contextlib.ExitStack()
        standing = self._undo.enter_context(standing_by(settings, lambda settings, url: self.coordinator))
        self.membership = standing.membership
        started = threading.Event()

        def begin() -> None:
            standing.service.lead()
            started.set()

        self._server = RestServer(standing.service, settings, on_started=begin, membership=standing.membership)
        self._thread = threading.Thread(target=self._server.run, args=([standing.listener],), daemon=True)
        self._thread.start()
        assert started.wait(10)
        super().__init__(standing.url, settings.token, urllib3.PoolManager(retries=False, timeout=10))

    def status(self, path: str) -> int:
        return int(self.http.request("GET", self.url + path).status)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(15)
        assert not self._thread.is_alive()
        self._undo.close()
        self.http.clear()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Member, Member]]:
    """The active member, and one that stands by."""
    active = Member(tmp_path)
    eventually(lambda: active.status("/leader") == 200, "it leads")
    standby = Member(tmp_path)
    try:
        eventually(lambda: standby.membership.active() is not None, "it knows who leads")
        yield active, standby
    finally:
        standby.stop()
        active.stop()


def test_load_balancers_are_told_one_bit_without_a_token(pair: tuple[Member, Member]) -> None:
    active, standby = pair
    assert [(each.status("/leader"), each.status("/standby"), each.status("/readyz")) for each in pair] == [
        (200, 503, 200),
        (503, 200, 200),
    ]
    for each in pair:
        answer = each.http.request("GET", f"{each.url}/leader")
        assert answer.headers[MEMBER_HEADER] == each.membership.member
        assert TOKEN not in str(answer.headers) + answer.data.decode()
        assert JOB not in answer.data.decode()
        assert active.url not in answer.data.decode()
    assert standby.status("/v1/members") == 401


def test_members_are_told_to_people(pair: tuple[Member, Member]) -> None:
    active, standby = pair
    eventually(lambda: len(active.json("GET", "/v1/members")["members"]) == 2, "both are known")
    eventually(lambda: active.json("GET", "/v1/members")["members"][0]["holds_lock"], "its lock is told")
    found = active.json("GET", "/v1/members")["members"]
    assert [(each["url"], each["role"], each["this"], each["holds_lock"]) for each in found] == [
        (active.url, "active", True, True),
        (standby.url, "standby", False, False),
    ]
    assert [each["this"] for each in standby.json("GET", "/v1/members")["members"]] == [False, True]


def test_one_that_is_started_again_and_again_hides_no_member_and_is_forgotten(
    pair: tuple[Member, Member], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start leaves a member that gave a sign or two. They took the places of those that live, and of more than were read in
    ten minutes the signs stayed for ever, to be listed three times a second."""
    active, standby = pair
    folder, storage = tmp_path / MEMBERS_FOLDER, open_storage(str(tmp_path))

    def beat() -> int:
        """Of the standby; 0: between two of its signs."""
        signs = (parse_sign_name(each.name) for each in folder.iterdir())
        return max((number for member, number in signs if member == standby.membership.member), default=0)

    eventually(lambda: beat() > 1, "it has lived for some time")
    for number in range(membership.FORGOTTEN_MAX + 50):
        run_flow(give_sign(SignOfLife(f"{number:032x}", 1, "http://127.0.0.1:1")), storage)
    shown = list[str]()

    def told() -> list[str]:
        shown[:] = [each["url"] for each in active.json("GET", "/v1/members")["members"]]
        return shown

    eventually(lambda: "http://127.0.0.1:1" in told(), "it has looked since")
    assert standby.url in shown
    monkeypatch.setattr(membership, "FORGET_AFTER_MS", 1_000)
    eventually(lambda: len(list(folder.iterdir())) <= 4, "they are forgotten")
    eventually(lambda: len(active.json("GET", "/v1/members")["members"]) == 2, "both are known")


def test_of_a_member_that_is_gone_only_what_is_known_is_told(tmp_path: Path) -> None:
    """Its last sign says that it holds the lock of its host; who began since does not know how old that sign is."""
    dead = SignOfLife("d" * 32, 7, "http://127.0.0.1:1", epoch=1, holds_lock=True, host="a", pid=7)
    run_flow(claim(ActiveRecord(1, dead.member, dead.url)), storage := open_storage(str(tmp_path)))
    run_flow(give_sign(dead), storage)
    member = Member(tmp_path, takeover_after_ms=300)

    def told() -> dict[str, Any]:
        return next(each for each in member.json("GET", "/v1/members")["members"] if each["id"] == dead.member)

    try:
        eventually(lambda: member.status("/leader") == 200, "it takes over")
        eventually(lambda: told()["role"] == "gone", "the other is known to be gone")
        assert (told()["holds_lock"], told()["seen_ms_ago"]) == (None, None)
        run_flow(give_sign(replace(dead, beat=8, epoch=0)), storage)
        eventually(lambda: told()["seen_ms_ago"] is not None, "it lives after all")
        eventually(lambda: told()["role"] == "gone", "it is gone again")
        assert (told()["holds_lock"], told()["seen_ms_ago"] > 300) == (None, True)
    finally:
        member.stop()


def test_what_people_ask_is_passed_on_with_their_own_token(pair: tuple[Member, Member]) -> None:
    active, standby = pair
    assert standby.json("GET", "/v1/jobs") == active.json("GET", "/v1/jobs") != {"jobs": []}
    viewer = standby.json("POST", "/v1/tokens", {"name": "v", "role": "viewer"}, status=201)["token"]
    assert standby.request("GET", "/v1/jobs/overview", token=viewer).status == 200
    refused = standby.request("PATCH", f"/v1/jobs/{JOB}?mode=cancel", token=viewer)
    assert refused.status == 403
    assert standby.request("PATCH", f"/v1/jobs/{JOB}?mode=cancel").status == 202
    assert ("cancel", JOB) in active.coordinator.calls
    assert standby.coordinator.calls == []
    assert standby.request("GET", "/v1/jobs/overview", token="a-token-nobody-issued").status == 401


def test_answers_come_as_they_are(pair: tuple[Member, Member]) -> None:
    active, standby = pair
    unknown = [each.request("GET", f"/v1/jobs/{'f' * 32}") for each in pair]
    assert unknown[0].status == unknown[1].status == 404
    assert unknown[0].data == unknown[1].data
    first = standby.request("GET", f"/v1/jobs/{JOB}")
    assert standby.request("GET", f"/v1/jobs/{JOB}", headers={"If-None-Match": first.headers["etag"]}).status == 304
    assert active.request("HEAD", f"/v1/jobs/{JOB}").status == standby.request("HEAD", f"/v1/jobs/{JOB}").status


def test_a_member_that_stands_by_keeps_no_answer(pair: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the active one's, which are given again as FastAPI gives them."""
    active, standby = pair

    def answers() -> list[tuple[int, dict[str, str], bytes]]:
        found = [each.request("GET", f"/v1/jobs/{JOB}", headers=headers) for each in pair for headers in asked]
        return [(each.status, {**each.headers, "x-request-id": "", "date": ""}, each.data) for each in found]

    tag = standby.request("GET", f"/v1/jobs/{JOB}").headers["etag"]
    asked: list[dict[str, str]] = [{}, {"If-None-Match": tag}, {"If-None-Match": "*"}]
    kept = answers()
    assert [status for status, *_ in kept] == [200, 304, 304] * 2
    active.coordinator.state = "FAILED"
    assert standby.json("GET", f"/v1/jobs/{JOB}")["state"] == "FAILED"
    active.coordinator.state = "RUNNING"

    async def by_fastapi(each: KeptAnswers, scope: Any, receive: Any, send: Any) -> None:
        await each._app(scope, receive, send)

    monkeypatch.setattr(KeptAnswers, "__call__", by_fastapi)
    assert kept == answers()
    assert standby.coordinator.calls == []


def test_worker_is_told_who_is_active(pair: tuple[Member, Member]) -> None:
    active, standby = pair
    body = {"slot": 0, "session": "s", "attempt": 1}
    answer = standby.request("POST", f"/v1/jobs/{JOB}/workers/0/heartbeat", {**body, "metrics": []})
    assert answer.status == 503
    assert answer.headers["x-holdfast-error"] == NotLeaderError.__name__
    assert active.url in answer.headers["x-holdfast-fields"]
    assert "service_epoch" in answer.headers["x-holdfast-fields"]


def test_browser_logs_in_at_the_active_member_and_is_told_which_that_is(pair: tuple[Member, Member]) -> None:
    """A session is one member's (docs/ha.md, Load balancers): it is begun nowhere else, and its cookie is passed to nobody."""
    active, standby = pair

    def asked(member: Member, method: str, path: str, **headers: str) -> urllib3.BaseHTTPResponse:
        body = json.dumps({"token": TOKEN}).encode() if method == "POST" else None
        headers = {"Content-Type": "application/json", "Sec-Fetch-Site": "same-origin", **headers}
        return member.http.request(method, member.url + path, body=body, headers=headers)

    assert asked(standby, "GET", "/ui/").status == 200, "pages are the same everywhere"
    refused = asked(standby, "POST", "/ui/login")
    assert (refused.status, active.url in refused.data.decode()) == (503, True)
    begun = asked(active, "POST", "/ui/login")
    assert begun.status == 200
    cookie = begun.headers["Set-Cookie"].partition(";")[0]
    assert asked(active, "GET", "/v1/jobs/overview", Cookie=cookie).status == 200
    assert asked(standby, "GET", "/v1/jobs/overview", Cookie=cookie).status == 401, "it knows no such session"


def test_request_that_was_passed_on_is_not_passed_on_again(pair: tuple[Member, Member]) -> None:
    _, standby = pair
    answer = standby.request("GET", "/v1/jobs/overview", headers={HOP_HEADER: "whoever"})
    assert answer.status == 503
    assert answer.headers["x-holdfast-error"] == NotLeaderError.__name__


def test_cancel_by_get_is_judged_where_the_page_asked(pair: tuple[Member, Member]) -> None:
    active, standby = pair
    path = f"/v1/jobs/{JOB}/yarn-cancel"
    password = {"Authorization": "Basic " + base64.b64encode(f"x:{TOKEN}".encode()).decode()}
    foreign = standby.http.request("GET", standby.url + path, headers={**password, "Referer": "http://elsewhere/page"})
    assert foreign.status == 403
    assert ("cancel", JOB) not in active.coordinator.calls
    own = standby.http.request("GET", standby.url + path, headers={**password, "Sec-Fetch-Site": "same-origin"})
    assert own.status == 202
    assert ("cancel", JOB) in active.coordinator.calls


def test_member_that_stands_by_counts_no_job_in_its_metrics(pair: tuple[Member, Member]) -> None:
    active, standby = pair
    assert b'holdfast_jobs{state="RUNNING"}' in active.request("GET", "/metrics").data
    assert b'holdfast_jobs{state="RUNNING"}' not in standby.request("GET", "/metrics").data


def test_members_tell_who_is_active_and_how_often_that_changed(pair: tuple[Member, Member]) -> None:
    told = [set(member.request("GET", "/metrics").data.decode().splitlines()) for member in pair]
    assert [f"holdfast_member_active {value}" in lines for value, lines in zip(("1.0", "0.0"), told, strict=True)] == [True, True]
    epochs = [line for lines in told for line in lines if line.startswith("holdfast_member_epoch ")]
    assert epochs == ["holdfast_member_epoch 1.0"] * 2


def test_hand_over_changes_who_answers_and_the_dead_are_shown_as_gone(tmp_path: Path) -> None:
    first = Member(tmp_path, takeover_after_ms=3_000)
    eventually(lambda: first.status("/leader") == 200, "the first leads")
    second = Member(tmp_path, takeover_after_ms=3_000)
    try:
        eventually(lambda: second.membership.active() is not None, "the second knows")
        first.stop()
        assert not first.coordinator.ready, "its jobs are closed before it leaves"
        eventually(lambda: second.status("/leader") == 200, "the second leads")
        eventually(lambda: second.request("GET", "/v1/overview").status == 200, "and answers")

        def told() -> list[tuple[str, bool, bool]]:
            found = second.json("GET", "/v1/members")["members"]
            return [(each["role"], each["this"], each["leaving"]) for each in found]

        eventually(lambda: told() == [("active", True, False), ("gone", False, True)], "it says that it left")
    finally:
        second.stop()


class AwayStorage:
    """Takes nothing, and says nothing, until it is back."""

    def __init__(self, inner: Storage, *, hangs: bool) -> None:
        self._inner, self._hangs = inner, hangs
        self.root = inner.root
        self.back = threading.Event()

    def at(self, location: str) -> Storage:
        return self._inner.at(location)

    def execute(self, operation: Operation) -> Any:
        if self._hangs:
            assert self.back.wait(DEADLINE_S)
        elif not self.back.is_set():
            raise StorageUnavailableError("away")
        return self._inner.execute(operation)


@pytest.mark.parametrize("hangs", [False, True], ids=["storage fails", "storage hangs"])
def test_active_one_that_is_cut_off_from_storage_gives_up_and_another_takes_over(tmp_path: Path, hangs: bool) -> None:
    """It answers probes all the while: nobody took over, and no checkpoint was completed."""
    cut_off, other = Member(tmp_path, takeover_after_ms=300), None
    try:
        eventually(lambda: cut_off.status("/leader") == 200, "it leads")
        other = Member(tmp_path, takeover_after_ms=300)
        eventually(lambda: other.membership.active() is not None, "the other knows who leads")
        away = AwayStorage(cut_off.membership._storage, hangs=hangs)
        cut_off.membership._storage = away
        eventually(lambda: other.status("/leader") == 200, "another leads")
        assert cut_off.status("/leader") == 503
        eventually(lambda: not cut_off.coordinator.ready, "its jobs are closed")
        assert cut_off.coordinator.closed_for == "this member could not store a sign of life for long"
        away.back.set()
        eventually(lambda: cut_off.membership.active() == other.membership.active(), "it knows who leads")
        assert cut_off.json("GET", "/v1/jobs") == other.json("GET", "/v1/jobs"), "it passes on"
        assert other.status("/leader") == 200
    finally:
        for each in (other, cut_off):
            if each is not None:
                each.stop()


def test_jobs_are_told_why_a_member_leads_them_no_more(tmp_path: Path) -> None:
    """Their histories have it: one that was stopped and wakes does not stop."""
    folders = tmp_path / "woken", tmp_path / "leaving"
    for folder in folders:
        folder.mkdir()
    woken, leaving = map(Member, folders)
    try:
        eventually(lambda: (woken.status("/leader"), leaving.status("/leader")) == (200, 200), "they lead")
        led = woken.membership.active()
        assert led is not None
        run_flow(claim(ActiveRecord(led.epoch + 1, "f" * 32, "http://127.0.0.1:1")), woken.membership._storage)
        eventually(lambda: not woken.coordinator.ready, "its jobs are closed")
        assert woken.coordinator.closed_for == "another member leads"
    finally:
        leaving.stop()
        woken.stop()
    assert leaving.coordinator.closed_for == "the coordinator stops"


def test_only_member_leads_again_when_storage_is_back(tmp_path: Path) -> None:
    only = Member(tmp_path, takeover_after_ms=300)
    try:
        eventually(lambda: only.status("/leader") == 200, "it leads")
        away = AwayStorage(only.membership._storage, hangs=False)
        only.membership._storage = away
        eventually(lambda: only.status("/leader") == 503, "it has given up")
        assert only.status("/readyz") == 503
        away.back.set()
        eventually(lambda: only.status("/leader") == 200, "it leads again")
        assert only.membership.active() is not None
        eventually(lambda: only.request("GET", "/v1/overview").status == 200, "and answers")
    finally:
        only.stop()


# ------------------------------------------------------------------------------------------------------------- the lock


def test_lock_of_a_host_is_one_members_until_it_is_released(tmp_path: Path) -> None:
    first, second = HostLock(tmp_path), HostLock(tmp_path)
    assert first.identity == second.identity
    assert first.take()
    assert not first.take(), "it is no news"
    assert not second.take()
    first.release()
    assert second.take()
    second.close()
    assert first.take()
    first.close()
    assert [path.name for path in tmp_path.iterdir()] == [GUARD_FILE]


def test_lock_on_a_file_that_was_deleted_excludes_nobody_and_is_not_taken(tmp_path: Path) -> None:
    lock = HostLock(tmp_path)
    (tmp_path / GUARD_FILE).unlink()
    assert not lock.take()
    other = HostLock(tmp_path)
    assert other.identity != lock.identity
    assert other.take()
    assert not lock.take()
    lock.close()
    other.close()


@pytest.mark.parametrize("lies", [False, True], ids=["refuses", "gives one lock twice"])
def test_locks_that_do_not_work_are_typed_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lies: bool
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        if not lies:
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(LocksUnusableError, match=str(tmp_path)):
        HostLock(tmp_path)
    assert not list(tmp_path.iterdir())
    lock, problem = open_lock(tmp_path)
    assert lock is None
    assert str(tmp_path) in problem
    assert problem in caplog.text


# ------------------------------------------------------------------------------------------------- what is passed on, in detail


class Upstream(BaseHTTPRequestHandler):
    """Stands for an active member: notes what it is sent; `/v1/events` tells something now and then, without end."""

    asked: list[tuple[str, str, dict[str, str], bytes]]
    hold: threading.Event
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        if self.path.startswith("/v1/events"):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(b"data: first\n\n")
            self.wfile.flush()
            type(self).hold.wait(DEADLINE_S)
            return
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        type(self).asked.append((self.command, self.path, {name.lower(): value for name, value in self.headers.items()}, body))
        self.send_response(207)
        self.send_header("Content-Length", "2")
        self.send_header("Set-Cookie", "session=secret")
        self.send_header("X-Kept", "yes")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: Any) -> None:
        pass


class StandingBy:
    """A membership as the middleware sees it: another one is active, at a URL."""

    def __init__(self, url: str, own: str = "http://127.0.0.1:1") -> None:
        self.member, self.is_active = "a" * 32, False
        self.peers = Peers(own)
        self._active = ActiveRecord(4, "b" * 32, url)

    def active(self) -> ActiveRecord:
        return self._active

    led = Membership.led


@pytest.fixture
def upstream() -> Iterator[tuple[str, type[Upstream]]]:
    class Handler(Upstream):
        asked: list[tuple[str, str, dict[str, str], bytes]] = []  # noqa: RUF012  # of this class alone
        hold = threading.Event()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", Handler
    Handler.hold.set()
    server.shutdown()
    server.server_close()
    thread.join()


class Asked:
    """One request through the middleware."""

    def __init__(self, middleware: ForwardToActive, state: Any) -> None:
        self._middleware = middleware
        self._state = state
        self.messages: list[Any] = []
        self.left = asyncio.Event()
        self.answered = asyncio.Event()

    async def run(
        self, path: str = "/v1/jobs", method: str = "GET", body: bytes = b"", headers: dict[str, str] | None = None
    ) -> int:
        told = False

        async def receive() -> Any:
            nonlocal told
            if told:
                await self.left.wait()
                return {"type": "http.disconnect"}
            told = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            self.messages.append(message)
            if message["type"] == "http.response.body":
                self.answered.set()

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"a=%2F&b",
            "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
            "app": self._state,
            CALLER: Caller(Role.ADMIN),
        }
        await self._middleware(scope, receive, send)
        return int(self.messages[0]["status"])


class _Bodies:
    def take(self, number: int, size: int, caller: Any) -> bool:
        return True

    def give_back(self, number: int) -> None:
        pass


class _App:
    class state:
        settings = ServerSettings(Path("/nowhere"))
        bodies = _Bodies()


def middleware_of(membership: Any) -> ForwardToActive:
    async def routes(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("answered by the member itself")

    return ForwardToActive(routes, membership=membership)


def test_headers_of_one_connection_and_cookies_stay_here(upstream: tuple[str, type[Upstream]]) -> None:
    url, active = upstream
    asked = Asked(middleware_of(StandingBy(url)), _App)
    sent = {
        "Authorization": "Bearer of-the-caller",
        "Cookie": "session=secret",
        "Host": "standby",
        "Connection": "close, X-Private",
        "X-Private": "1",
        "Transfer-Encoding": "chunked",
        "Origin": "http://standby",
        "Sec-Fetch-Site": "same-origin",
        "X-Forwarded-For": "1.2.3.4",
        "If-None-Match": '"tag"',
    }
    assert asyncio.run(asked.run(method="POST", body=b"a body", headers=sent)) == 207
    (method, path, headers, body), *others = active.asked
    assert (method, path, body, others) == ("POST", "/v1/jobs?a=%2F&b", b"a body", [])
    assert headers["authorization"] == "Bearer of-the-caller"
    assert headers["if-none-match"] == '"tag"'
    assert headers[HOP_HEADER.lower()] == "a" * 32
    assert headers["host"] == url.removeprefix("http://")
    assert not headers.keys() & {"cookie", "x-private", "transfer-encoding", "origin", "sec-fetch-site", "x-forwarded-for"}
    answered = dict(asked.messages[0]["headers"])
    assert answered[b"x-kept"] == b"yes"
    assert b"set-cookie" not in answered
    assert b"".join(each.get("body", b"") for each in asked.messages[1:]) == b"ok"


def test_streams_have_places_of_their_own_and_give_them_back(
    upstream: tuple[str, type[Upstream]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = upstream
    monkeypatch.setattr(forwarded, "STREAMS_MAX", 2)

    async def drill() -> None:
        middleware = middleware_of(StandingBy(url))
        streams = [Asked(middleware, _App) for _ in range(2)]
        running = [asyncio.create_task(each.run("/v1/events")) for each in streams]
        async with asyncio.timeout(DEADLINE_S):
            for each in streams:
                await each.answered.wait()
            refused = Asked(middleware, _App)
            assert await refused.run("/v1/events") == 503
            assert (b"x-holdfast-error", BusyError.__name__.encode()) in refused.messages[0]["headers"]
            assert await Asked(middleware, _App).run() == 207, "requests go on beside them"
            streams[0].left.set()
            await running[0]
            again = Asked(middleware, _App)
            last = asyncio.create_task(again.run("/v1/events"))
            await again.answered.wait()
            assert again.messages[0]["status"] == 200
            for each in (streams[1], again):
                each.left.set()
            await asyncio.gather(running[1], last)

    asyncio.run(drill())


def test_active_member_that_does_not_answer_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        asked = Asked(middleware_of(StandingBy(url)), _App)
        assert asyncio.run(asked.run()) == 503
    assert (b"x-holdfast-error", b"ConnectionLostError") in asked.messages[0]["headers"]
    assert url.encode() in asked.messages[1]["body"]


@pytest.mark.parametrize("target", ["@{victim}/overview", "x@{victim}/jobs/../vertices/../secret", "x/overview", "*"])
def test_request_target_that_is_no_path_leads_to_no_other_host(
    upstream: tuple[str, type[Upstream]], pair: tuple[Member, Member], target: str
) -> None:
    """`@host/overview` behind the active member's URL would be a URL of that host, with the active member for a user's name."""
    _, standby = pair
    url, victim = upstream
    viewer = standby.json("POST", "/v1/tokens", {"name": "v", "role": "viewer"}, status=201)["token"]
    sent = f"GET {target.format(victim=url.removeprefix('http://'))} HTTP/1.1\r\nHost: s\r\nAuthorization: Bearer {viewer}\r\n\r\n"
    host, _, port = standby.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), DEADLINE_S) as caller:
        caller.sendall(sent.encode())
        status = int(caller.recv(4096).split()[1])
    assert victim.asked == []
    assert status == 404


@pytest.mark.parametrize("path", ["@{victim}/overview", "//{victim}/overview", "http://{victim}/overview"])
def test_peer_asks_the_member_alone(upstream: tuple[str, type[Upstream]], path: str) -> None:
    """Whatever the path is: the member that is asked is that of the URL."""
    url, victim = upstream
    with socket.socket() as member:
        member.bind(("127.0.0.1", 0))
        asked = Asked(middleware_of(StandingBy(f"http://127.0.0.1:{member.getsockname()[1]}")), _App)
        assert asyncio.run(asked.run(path.format(victim=url.removeprefix("http://")))) == 503
    assert victim.asked == []


@pytest.mark.parametrize("own", ["https://10.0.0.1:1", "http://10.0.0.1:1"], ids=["to plain HTTP", "to another machine's loopback"])
def test_token_goes_to_no_less_safe_a_place(upstream: tuple[str, type[Upstream]], own: str) -> None:
    url, active = upstream
    asked = Asked(middleware_of(StandingBy(url, own)), _App)
    assert asyncio.run(asked.run(headers={"Authorization": "Bearer of-the-caller"})) == 503
    assert b"no token is sent" in asked.messages[1]["body"]
    assert active.asked == []


def test_probe_believes_the_member_itself_alone(upstream: tuple[str, type[Upstream]], pair: tuple[Member, Member]) -> None:
    active, standby = pair
    peers = Peers(standby.url)
    assert peers.is_active(active.url, active.membership.member, 5.0)
    assert not peers.is_active(active.url, standby.membership.member, 5.0), "another process at its port"
    assert not peers.is_active(standby.url, standby.membership.member, 5.0), "it stands by"
    assert not peers.is_active(upstream[0], active.membership.member, 5.0)
    assert not peers.is_active("http://127.0.0.1:1", active.membership.member, 5.0)
    assert not peers.is_active("no url", active.membership.member, 5.0)
    peers.close()


# ------------------------------------------------------------------------------------------------------------- settings


@contextlib.contextmanager
def stranger(head: bytes, then: bytes, pause_s: float) -> Iterator[str]:
    """Listens where a member did: tells a head, and then something again and again, until the caller leaves or 20 s are over."""
    stop = threading.Event()

    def tell(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            caller, _ = server.accept()
            with caller:
                caller.sendall(head)
                until = time.monotonic() + DEADLINE_S
                while time.monotonic() < until and not stop.wait(pause_s):
                    caller.sendall(then)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=tell, args=(server,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize(
    ("head", "then", "pause_s"),
    [
        (b"", b"H", 0.05),
        (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n", 0.3),
        (b"HTTP/1.1 200 OK\r\nX: ", b"x", 0.05),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", b"x", 0.3),
    ],
    ids=["no status", "headers", "one header", "body"],
)
def test_probe_of_whoever_dribbles_ends_in_time(head: bytes, then: bytes, pause_s: float) -> None:
    """While a probe has no answer nobody takes over."""
    began = time.monotonic()
    with stranger(head, then, pause_s) as url:
        assert not Peers(url).is_active(url, "b" * 32, 0.5)
        assert time.monotonic() - began < 4


def test_probe_reads_no_body() -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n{MEMBER_HEADER}: {'b' * 32}\r\n\r\n".encode()
    with stranger(head, bytes(1 << 16), 0) as url:
        assert Peers(url).is_active(url, "b" * 32, 5.0)


def test_time_to_a_takeover_is_longer_on_s3_and_bounded(tmp_path: Path) -> None:
    environment = {"HOLDFAST_LOCAL_DIR": str(tmp_path)}
    assert server_settings(environment, state_dir=tmp_path / "s", ha=True).election.takeover_after_ms == 3_000
    assert server_settings(environment, state_dir="s3://bucket/p", ha=True).election.takeover_after_ms == 10_000
    chosen = {**environment, "HOLDFAST_TAKEOVER_AFTER_MS": "5000"}
    assert server_settings(chosen, state_dir="s3://bucket/p", ha=True).election.takeover_after_ms == 5_000
    with pytest.raises(InvalidConfigError, match="takeover_after_ms"):
        server_settings({**environment, "HOLDFAST_TAKEOVER_AFTER_MS": "10"}, state_dir=tmp_path / "s", ha=True)
