"""Answers from views that are still the newest are encoded once, and given again as FastAPI gave them, behind the same checks."""

from __future__ import annotations

import asyncio
import base64
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.types import Message, Receive, Scope, Send

from holdfast.api.access.audit_log import read_audit
from holdfast.api.access.authenticator import Authenticator
from holdfast.api.access.roles import Access, classify
from holdfast.api.http.turns import LookInTurn
from holdfast.api.routes import diagnosis, jobs, series, viewed, workers
from holdfast.api.routes.dialect import applications, execution, task_managers, vertices
from holdfast.api.routes.dialect import jobs as flink
from holdfast.api.routes.viewed import KeptAnswers, Shown, moment_of
from holdfast.coordinator.dispatcher.published import MomentNow
from holdfast.coordinator.views import Moment
from holdfast.statebackends.errors import FencedError, NotFoundError, NotLeaderError, RecoveringError
from tests.api.fakes import JOB, SOURCE, TOKEN, FakeCoordinator, Served, serving

AT = f"/v1/jobs/{JOB}"
OTHER = "d" * 32


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"me:{password}".encode()).decode()


class Asked(NamedTuple):
    """One request; its path is below that of the job, or whole."""

    path: str = ""
    token: str | None = TOKEN
    headers: dict[str, str] = {}  # noqa: RUF012
    error: BaseException | None = None
    method: str = "GET"


class Tokens(NamedTuple):
    viewer: str = "a"
    operator: str = "b"
    admin: str = "c"
    confined: str = "d"
    foreign: str = "e"
    worker: str = "f"
    expired: str = "g"
    revoked: str = "h"


def conditions(tag: str) -> dict[str, Asked]:
    """Odd and plain `If-None-Match`."""
    strong = tag.removeprefix("W/")
    values = {
        "weak": tag, "strong": strong, "any": "*", "any, spaced": "  * ", "none": "", "of another": '"nothing"', "half": tag[:-1],
        "list": f'"x", {tag}', "list without spaces": f'"x",{tag},"y"', "list of commas": ",,,,", "any in a list": "*, *",
        "one too many": ", ".join(['"x"'] * 64 + [tag]), "last that counts": ", ".join(['"x"'] * 63 + [tag]),
        "unquoted": strong[1:-1], "lower": tag.lower(), "latin": '"\xe9"', "twice weak": f"W/{tag}",
    }  # fmt: skip
    return {f"condition: {name}": Asked(headers={"If-None-Match": value}) for name, value in values.items()}


def requests(tokens: Tokens, tag: str) -> dict[str, Asked]:
    """By what is peculiar about each."""
    known = {"If-None-Match": tag}
    return {
        "plain": Asked(),
        **conditions(tag),
        **{f"role: {name}": Asked(token=token) for name, token in tokens._asdict().items()},
        **{f"role, known: {name}": Asked(token=token, headers=known) for name, token in tokens._asdict().items()},
        "all jobs, confined": Asked("/v1/jobs/overview", token=tokens.confined),
        "its own id": Asked(headers={"X-Request-Id": "mine-1"}),
        "no token": Asked(token=None),
        "a wrong token": Asked(token="x"),
        "a wrong token, known": Asked(token="x", headers=known),
        "a forged token": Asked(token=tokens.viewer[:-1] + ("0" if tokens.viewer[-1:] != "0" else "1")),
        "a password": Asked(token=None, headers={"Authorization": basic(TOKEN)}),
        "a wrong password": Asked(token=None, headers={"Authorization": basic("x")}),
        "from elsewhere": Asked(headers={"Origin": "http://evil.example", "Host": "evil.example"}),
        "a cookie": Asked(token=None, headers={"Cookie": "holdfast-1=x", "Origin": "http://evil.example"}),
        "HEAD": Asked(method="HEAD"),
        "HEAD, known": Asked(method="HEAD", headers=known),
        **{f"{method}, known": Asked(method=method, headers=known) for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE")},
        "of Flink": Asked(f"/jobs/{JOB}"),
        "below a UI that is not there": Asked(f"/flink/jobs/{JOB}"),
        "checkpoints": Asked("/checkpoints"),
        "health": Asked("/health"),
        "a series": Asked("/series?metric=busy_ratio"),
        "a series without its metric": Asked("/series"),
        "a bad query, known": Asked("/series", headers=known),
        "a query": Asked("?x=1"),
        "a long query": Asked(f"?x={'y' * 5_000}"),
        "a vertex": Asked(f"/vertices/{SOURCE}"),
        "no vertex": Asked(f"/vertices/{OTHER}"),
        "a checkpoint": Asked("/checkpoints/details/1"),
        "no checkpoint": Asked("/checkpoints/details/999"),
        "another job": Asked(f"/v1/jobs/{OTHER}"),
        "no job": Asked("/v1/jobs/x"),
        "all jobs": Asked("/v1/jobs/overview"),
        "workers": Asked("/v1/taskmanagers"),
        "a slash more": Asked("/"),
        "a line break": Asked("%0A"),
        "encoded": Asked(f"/v1/jobs/%30{JOB[1:]}"),
        "a page": Asked("/ui/"),
        "no view": Asked("/v1/config"),
        "a trigger": Asked(f"/checkpoints/{'c' * 32}", headers=known),
        "fenced": Asked(error=FencedError("attempt 1 is over", attempt=1)),
        "recovering": Asked(error=RecoveringError("not yet", job=JOB)),
        "led elsewhere": Asked(error=NotLeaderError("elsewhere", job=JOB, epoch=3), headers={"X-Holdfast-Unreachable": "3"}),
        "a bug": Asked(error=ZeroDivisionError("no")),
    }


CASES = tuple(requests(Tokens(), 'W/"0"'))


def issue(served: Served, role: str, **more: Any) -> dict[str, Any]:
    issued: dict[str, Any] = served.json("POST", "/v1/tokens", {"role": role, **more}, status=201)
    return issued


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeCoordinator, Served, dict[str, Asked]]]:
    folder, coordinator = tmp_path_factory.mktemp("kept"), FakeCoordinator()
    with serving(coordinator, folder, requests_per_s_max=10_000) as served:
        earlier = Authenticator(str(folder), TOKEN, wall_ms=lambda: time.time_ns() // 1_000_000 - 3_600_000)
        revoked = issue(served, "viewer")
        tokens = Tokens(
            viewer=issue(served, "viewer")["token"],
            operator=issue(served, "operator")["token"],
            admin=issue(served, "admin")["token"],
            confined=issue(served, "viewer", job=JOB)["token"],
            foreign=issue(served, "viewer", job=OTHER)["token"],
            worker=earlier.worker_token(JOB, 1),
            expired=earlier.issue("viewer", name="old", life_ms=1_000)[0],
            revoked=revoked["token"],
        )
        assert served.request("DELETE", f"/v1/tokens/{revoked['id']}").status == 200
        yield coordinator, served, requests(tokens, served.request("GET", AT).headers["ETag"])


def ask(served: Served, asked: Asked) -> tuple[int, dict[str, str], bytes]:
    path = asked.path if asked.path.startswith(("/v1/", "/jobs", "/flink", "/ui")) else AT + asked.path
    headers = {**asked.headers, **({"Authorization": f"Bearer {asked.token}"} if asked.token else {})}
    answer = served.http.request(asked.method, served.url + path, headers=headers, timeout=10)
    told = {name.lower(): value for name, value in answer.headers.items() if name.lower() != "date"}
    named = told.pop("x-request-id")
    assert named == asked.headers.get("X-Request-Id", named)
    return answer.status, told, re.sub(rb'"duration":[0-9]+', b'"duration":0', answer.data)


async def by_fastapi(kept: KeptAnswers, scope: Scope, receive: Receive, send: Send) -> None:
    """In place of what answers again."""
    await kept._app(scope, receive, send)


@pytest.mark.parametrize("case", CASES)
def test_an_answer_is_given_again_as_fastapi_gives_it(
    several: tuple[FakeCoordinator, Served, dict[str, Asked]], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Status, headers and body, whether the path was asked for before or not."""
    coordinator, served, cases = several
    coordinator.reset()
    asked = cases[case]
    monkeypatch.setattr(viewed, "KEPT_S", 60.0)
    for _ in range(2):  # so that it is known and kept, where it can be
        ask(served, asked._replace(token=TOKEN, method="GET", headers={}, error=None))
    coordinator.error = asked.error
    kept = [ask(served, asked) for _ in range(2)]
    monkeypatch.setattr(KeptAnswers, "__call__", by_fastapi)
    directly = ask(served, asked)
    assert kept == [directly, directly]


STATUSES = {
    "plain": 200, "condition: weak": 304, "condition: one too many": 200, "role: viewer": 200, "role, known: viewer": 304,
    "role: confined": 200, "role: foreign": 403, "role, known: foreign": 403, "role: worker": 403, "role, known: worker": 403,
    "role: expired": 401, "role, known: expired": 401, "role, known: revoked": 401, "all jobs, confined": 403, "no token": 401,
    "a wrong token, known": 401, "a password": 200, "HEAD, known": 405, "a trigger": 200, "another job": 404, "fenced": 409,
    "a bug": 500,
}  # fmt: skip


def test_the_table_has_what_it_says(several: tuple[FakeCoordinator, Served, dict[str, Asked]]) -> None:
    """Else both sides might refuse everything."""
    coordinator, served, cases = several
    found = {}
    for case in STATUSES:
        coordinator.reset()
        coordinator.error = cases[case].error
        found[case] = ask(served, cases[case])[0]
    coordinator.reset()
    assert found == STATUSES


@pytest.mark.parametrize(
    "error", [NotLeaderError("elsewhere", job=JOB, epoch=3), RecoveringError("not yet", job=JOB), NotFoundError("gone")]
)
def test_a_job_that_is_not_led_here_any_more_is_refused_as_ever(
    served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    tag = served.request("GET", AT).headers["ETag"]

    def refuse(job_id: str | None = None, *, diagnosed: bool = False) -> Any:
        raise error

    monkeypatch.setattr(coordinator, "moment", refuse)
    monkeypatch.setattr(coordinator, "moment_now", refuse)
    asked = Asked(headers={"If-None-Match": tag})
    kept = ask(served, asked)
    monkeypatch.setattr(KeptAnswers, "__call__", by_fastapi)
    assert kept == ask(served, asked)
    assert kept[0] in (404, 421, 503)


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Routes of the requests that FastAPI handles from now on."""
    routes = list[str]()
    fastapi_handles = APIRoute.handle

    async def handle(route: APIRoute, *arguments: Any) -> None:
        routes.append(route.path)
        await fastapi_handles(route, *arguments)

    monkeypatch.setattr(APIRoute, "handle", handle)
    monkeypatch.setattr(viewed, "KEPT_S", 60.0)
    return routes


def test_what_is_known_and_kept_does_not_pass_through_fastapi(served: Served, passed: list[str]) -> None:
    """The other side of the comparison: without it both sides could be FastAPI's."""
    below = ("", "/checkpoints", "/health", "/series?metric=busy_ratio", f"/vertices/{SOURCE}")
    paths = ["/v1/jobs/overview", *(AT + each for each in below)]
    tags = [served.request("GET", path).headers["ETag"] for path in paths]
    passed.clear()
    for path, tag in zip(paths, tags, strict=True):
        assert served.request("GET", path, headers={"If-None-Match": tag}).status == 304
        assert served.request("GET", path).status == 200
    assert passed == []


def test_a_newer_view_is_encoded_once_for_all(
    served: Served, coordinator: FakeCoordinator, passed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who ask while it is encoded wait for it, however many they are."""
    served.request("GET", AT)
    passed.clear()
    entered, leave, job = threading.Event(), threading.Event(), coordinator.job
    moments = Moment(9_000, "another")
    monkeypatch.setattr(coordinator, "moment_now", lambda job_id=None, *, diagnosed=False: MomentNow(moments))

    def slow(job_id: str) -> Any:
        entered.set()
        assert leave.wait(30)
        return job(job_id)

    monkeypatch.setattr(coordinator, "job", slow)
    with ThreadPoolExecutor(12) as viewers:
        asked = [viewers.submit(served.request, "GET", AT, timeout=60) for _ in range(12)]
        assert entered.wait(10)
        leave.set()
        answers = [each.result() for each in asked]
    assert {answer.status for answer in answers} == {200}
    assert len({answer.data for answer in answers}) == 1
    assert passed.count("/jobs/{jobid}") == len(passed) == 1


def test_durations_do_not_stand_still(served: Served, passed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    served.request("GET", AT)
    monkeypatch.setattr(viewed, "KEPT_S", 0.0)
    passed.clear()
    assert [served.request("GET", AT).status for _ in range(2)] == [200, 200]
    assert len(passed) == 2


def test_it_takes_turns_and_budget_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, wait = list[str](), LookInTurn._wait

    async def counted(looking: LookInTurn) -> bool:
        turns.append("taken")
        return await wait(looking)

    with serving(FakeCoordinator(), tmp_path, requests_per_s_max=1) as served:
        viewer = issue(served, "viewer")["token"]
        served.request("GET", AT)
        monkeypatch.setattr(LookInTurn, "_wait", counted)
        assert [served.request("GET", AT, token=viewer).status for _ in range(3)] == [200, 200, 429]
        assert turns == ["taken", "taken"]
        assert served.request("GET", AT, token="x").status == 401
        metrics = served.request("GET", "/metrics").data.decode()
    assert 'method="GET",route="/jobs/{jobid}",status="200"} 3.0' in metrics.replace("/v1/jobs", "/jobs")
    assert [line.request for line in read_audit(str(tmp_path)) if line.kind == "refused"] == [f"GET {AT}"]


# ---------------------------------------------------------------------------------------------------------------- routes


def viewed_routes() -> list[APIRoute]:
    parts = (applications, diagnosis, execution, flink, jobs, series, task_managers, vertices, workers)
    routes = [route for part in parts for route in part.router.routes if isinstance(route, APIRoute)]
    return [route for route in routes if {each.dependency for each in route.dependencies} & SHOWING]


SHOWING = {viewed.from_views, viewed.from_diagnosis}


def parts_of(dependant: Dependant) -> Iterator[Dependant]:
    yield dependant
    for each in dependant.dependencies:
        if each.call not in SHOWING and getattr(each.call, "__name__", "") != "service_of":
            yield from parts_of(each)


def test_what_is_kept_depends_on_path_query_and_views_alone() -> None:
    """It is given to other callers, who may look, too: so such a route may not ask who asks, nor for any header."""
    routes = viewed_routes()
    assert len(routes) > 35
    for route in routes:
        assert route.methods == {"GET"}, route.path
        for part in parts_of(route.dependant):
            assert [*part.header_params, *part.cookie_params, *part.body_params] == [], route.path
            assert {part.request_param_name, part.http_connection_param_name, part.security_scopes_param_name} == {None}, route.path
        path = route.path.removeprefix("/v1").replace("{jobid}", JOB)
        classified = classify("GET", f"/v1{path}")
        assert classified is not None
        assert classified.access is Access.VIEW, route.path


# ------------------------------------------------------------------------------------------------------------- by itself


class Routes:
    """The application behind: answers with what a test says, from a view."""

    def __init__(self) -> None:
        self.asked = 0
        self.status, self.parts = 200, [b"body"]
        self.shown: Shown | None = Shown(JOB, False, Moment(1, "t"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked += 1
        scope["route"] = "a route"
        if self.shown is not None:
            scope.setdefault("holdfast.shown", self.shown)
        await send({"type": "http.response.start", "status": self.status, "headers": [(b"x-holdfast-as-of", b"1")]})
        for number, part in enumerate(self.parts, 1):
            await send({"type": "http.response.body", "body": part, "more_body": number < len(self.parts)})


class Views:
    """As much of a coordinator as is asked for moments."""

    def __init__(self) -> None:
        self.now = MomentNow(Moment(1, "t"))

    def moment_now(self, job_id: str | None = None, *, diagnosed: bool = False) -> MomentNow:
        return self.now

    def moment(self, job_id: str | None = None, *, diagnosed: bool = False) -> Moment:
        return Moment(2, "found by a thread")


async def get(kept: KeptAnswers, path: str = "/a", query: bytes = b"", **more: Any) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append({**message, "headers": list(message.get("headers", ()))})
        message.setdefault("headers", []).append((b"x-added", b"further out"))

    async def receive() -> Message:
        raise AssertionError

    await kept({"type": "http", "method": "GET", "path": path, "query_string": query, "headers": [], **more}, receive, send)
    return sent


def run(test: Callable[[KeptAnswers, Routes, Views], Any]) -> None:
    routes, views = Routes(), Views()
    asyncio.run(test(KeptAnswers(routes, service=views), routes, views))  # type: ignore[arg-type]


def test_headers_that_were_added_further_out_are_not_kept() -> None:
    async def ask(kept: KeptAnswers, routes: Routes, views: Views) -> None:
        first = await get(kept)
        views.now = MomentNow(Moment(7, "t"))
        again = await get(kept)
        assert routes.asked == 1
        assert first[0]["headers"] == [(b"x-holdfast-as-of", b"1")]
        assert again[0]["headers"] == [(b"x-holdfast-as-of", b"7")]
        assert first[1]["body"] == again[1]["body"]

    run(ask)


@pytest.mark.parametrize("peculiar", ["an error", "in parts", "no view", "too large", "a long query", "a POST"])
def test_what_is_not_kept(peculiar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewed, "KEPT_BODY_BYTES_MAX", 100)

    async def ask(kept: KeptAnswers, routes: Routes, views: Views) -> None:
        routes.status = 503 if peculiar == "an error" else 200
        routes.shown = None if peculiar == "no view" else routes.shown
        routes.parts = {"in parts": [b"a", b"b"], "too large": [b"x" * 101]}.get(peculiar, routes.parts)
        more = {"method": "POST"} if peculiar == "a POST" else {}
        for number in range(3):
            sent = await get(kept, query=b"x" * 5_000 if peculiar == "a long query" else b"", **more)
            assert (routes.asked, sent[0]["status"]) == (number + 1, routes.status)
            assert b"".join(message.get("body", b"") for message in sent) == b"".join(routes.parts)
        assert kept._bytes == 0

    run(ask)


def test_an_error_takes_the_place_of_what_was_kept() -> None:
    async def ask(kept: KeptAnswers, routes: Routes, views: Views) -> None:
        await get(kept)
        views.now, routes.status = MomentNow(Moment(2, "u")), 404
        assert (await get(kept))[0]["status"] == 404
        assert (kept._bytes, len(kept._kept)) == (0, 0)

    run(ask)


def test_the_oldest_answers_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewed, "KEPT_BYTES_MAX", 10)
    monkeypatch.setattr(viewed, "KEPT_PATHS_MAX", 4)

    async def ask(kept: KeptAnswers, routes: Routes, views: Views) -> None:
        for path in ("/a", "/b", "/a", "/c"):  # four bytes each: two have room
            await get(kept, path)
        assert ([path for path, _ in kept._kept], kept._bytes) == (["/a", "/c"], 8)
        routes.parts = [b""]
        for number in range(10):
            await get(kept, f"/{number}")
        assert ([path for path, _ in kept._kept], kept._bytes) == (["/6", "/7", "/8", "/9"], 0)

    run(ask)


def test_whoever_waits_for_an_encoding_that_fails_has_its_own() -> None:
    async def ask(kept: KeptAnswers, routes: Routes, views: Views) -> None:
        await get(kept)
        views.now = MomentNow(Moment(2, "u"))
        entered, leave = asyncio.Event(), asyncio.Event()

        async def failing(scope: Scope, receive: Receive, send: Send) -> None:
            entered.set()
            await leave.wait()
            raise ZeroDivisionError

        behind, kept._app = kept._app, failing
        first = asyncio.create_task(get(kept))
        await entered.wait()
        kept._app = behind
        second = asyncio.create_task(get(kept))
        await asyncio.sleep(0)
        assert not second.done()
        leave.set()
        with pytest.raises(ZeroDivisionError):
            await first
        assert (await second)[0]["status"] == 200
        assert kept._encoding == {}

    run(ask)


@pytest.mark.parametrize("message", ["http.response.start", "http.response.body"])
def test_a_slow_reader_holds_up_nobody_who_waits_for_the_same_answer(message: str) -> None:
    at = message

    async def ask(kept: KeptAnswers, routes: Routes, views: Views) -> None:
        await get(kept)
        views.now = MomentNow(Moment(2, "u"))
        entered, never = asyncio.Event(), asyncio.Event()

        async def stuck(message: Message) -> None:
            if message["type"] == at:
                entered.set()
                await never.wait()

        scope = {"type": "http", "method": "GET", "path": "/a", "query_string": b"", "headers": []}
        reader = asyncio.create_task(kept(scope, _nothing, stuck))
        await entered.wait()
        assert (await get(kept))[1]["body"] == b"body"
        assert routes.asked == 2
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)

    run(ask)


async def _nothing() -> Message:
    raise AssertionError


# --------------------------------------------------------------------------------------------------------------- moments


def test_a_newer_view_is_waited_for_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewed, "VIEW_WAIT_MS", 60_000)

    async def look() -> None:
        views, coming = Views(), Future[Any]()
        views.now = MomentNow(Moment(1, "old"), (coming,))
        asked = asyncio.create_task(moment_of(views, JOB))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert not asked.done()
        views.now = MomentNow(Moment(2, "new"), (Future(),))  # due again already: whoever asked before has no need of it
        coming.set_result(None)
        assert await asked == Moment(2, "new")

    asyncio.run(look())


@pytest.mark.parametrize("failed", [False, True], ids=["never", "failed"])
def test_a_view_that_does_not_come_leaves_the_older_one(failed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewed, "VIEW_WAIT_MS", 20)

    async def look() -> None:
        views, coming = Views(), Future[Any]()
        views.now = MomentNow(Moment(1, "old"), (coming,))
        if failed:
            coming.set_exception(ZeroDivisionError())
        assert await moment_of(views, JOB) == Moment(1, "old")  # type: ignore[arg-type]
        views.now = MomentNow(None, (coming,))
        assert await moment_of(views, JOB) == Moment(2, "found by a thread")  # type: ignore[arg-type]

    asyncio.run(look())
