"""Several answers from views in one request: each as if its path had been asked for by itself, behind the same checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
import pytest

from holdfast.api.access.audit_log import read_audit
from holdfast.api.access.roles import Access, classify
from holdfast.api.routes import together, viewed
from holdfast.api.routes.together import AnswerTogether
from holdfast.coordinator.dispatcher.published import MomentNow
from holdfast.coordinator.views import Moment
from holdfast.statebackends.errors import FencedError, RecoveringError
from tests.api.fakes import JOB, SOURCE, FakeCoordinator, Served, serving
from tests.api.test_access import all_requests, filled, issue
from tests.api.test_kept_answers import viewed_routes

AT = f"/v1/jobs/{JOB}"
OTHER = "d" * 32
OF_A_JOB = (AT, f"{AT}/checkpoints", f"{AT}/health", f"{AT}/series?metric=busy_ratio,idle_ratio", f"{AT}/vertices/{SOURCE}")


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: Any


def ask(served: Served, *paths: str, token: str | None = None, **headers: str) -> Answer:
    query = "&".join(f"path={quote(each, safe='')}" for each in paths)
    answer = served.request("GET", f"{together.PATH}?{query}", token=token, headers=headers)
    told = {name.lower(): value for name, value in answer.headers.items() if name.lower() not in ("date", "x-request-id")}
    return Answer(answer.status, told, answer.json() if answer.data else None)


def alone(served: Served, path: str) -> dict[str, Any]:
    """What a path's part has to be."""
    answer = served.request("GET", path)
    shown = int(answer.headers.get(viewed.AS_OF_HEADER, "0"))
    return {"status": answer.status, "error": answer.headers.get("X-Holdfast-Error", ""), "as_of_ms": shown, "body": answer.json()}


def still(found: Any) -> Any:
    """Without times that only say how long ago something was."""
    if isinstance(found, dict):
        return {name: 0 if name == "duration" else still(value) for name, value in found.items()}
    return [still(each) for each in found] if isinstance(found, list) else found


@pytest.mark.parametrize("error", [None, FencedError("attempt 1 is over", attempt=1), RecoveringError("not yet", job=JOB)])
def test_each_part_is_what_its_path_answers(served: Served, coordinator: FakeCoordinator, error: Exception | None) -> None:
    """The first time, when FastAPI answers, and from then on."""
    coordinator.error = error
    lists = [
        OF_A_JOB,
        ("/v1/jobs/overview", "/v1/totals", "/v1/overview"),
        ("/v1/applications/overview", f"/v1/applications/{JOB}", f"/applications/{JOB}/exceptions"),
        (AT, f"/v1/jobs/{OTHER}", f"{AT}/vertices/{OTHER}", f"{AT}/series", "/v1/jobs/x"),
        (f"/jobs/{JOB}", f"/v1/jobs/%30{JOB[1:]}", f"{AT}?x=1&y=%26"),
    ]
    for paths in lists:
        wanted = [still(alone(served, each)) for each in paths]
        found = [ask(served, *paths) for _ in range(2)]
        assert [each.status for each in found] == [200, 200]
        assert [still(each.body) for each in found] == [{"answers": wanted}] * 2
        assert found[0].headers == found[1].headers or error is not None


def test_an_answer_that_the_caller_has_is_not_sent_again(
    served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ask(served, *OF_A_JOB)
    tag = first.headers["etag"]
    assert first.headers["x-holdfast-as-of"] == str(min(each["as_of_ms"] for each in first.body["answers"]))
    assert first.headers["cache-control"] == "no-cache"
    for condition in (tag, tag.removeprefix("W/"), "*", f'"x", {tag}'):
        again = ask(served, *OF_A_JOB, **{"If-None-Match": condition})
        assert again.status == 304
        assert again.body is None
        assert [again.headers[name] for name in ("etag", "x-holdfast-as-of")] == [tag, first.headers["x-holdfast-as-of"]]
    assert ask(served, *OF_A_JOB, **{"If-None-Match": '"x"'}).status == 200
    assert ask(served, *OF_A_JOB[:-1], **{"If-None-Match": tag}).status == 200, "other paths"
    assert ask(served, *reversed(OF_A_JOB), **{"If-None-Match": tag}).status == 200, "another order"
    monkeypatch.setattr(coordinator, "moment_now", lambda job_id=None, *, diagnosed=False: MomentNow(Moment(9_000, "another")))
    newer = ask(served, *OF_A_JOB, **{"If-None-Match": tag})
    assert newer.status == 200
    assert newer.headers["etag"] != tag


def test_an_error_among_them_has_no_tag(served: Served) -> None:
    paths = (AT, f"/v1/jobs/{OTHER}")
    for _ in range(2):
        found = ask(served, *paths, **{"If-None-Match": "*"})
        assert found.status == 200
        assert [each["status"] for each in found.body["answers"]] == [200, 404]
        assert "etag" not in found.headers


def test_what_is_not_answered_from_views_is_not_asked(served: Served, coordinator: FakeCoordinator) -> None:
    """Nothing is done for its sake: it may change something, wait, or never end."""
    shown = [path for path in (filled(each) for method, each in all_requests() if method == "GET") if path not in SHOWN]
    assert len(shown) > 40
    for path in shown:
        coordinator.reset()
        (part,) = ask(served, path).body["answers"]
        refused = "is not answered from what jobs publish"
        assert part["status"] in (400, 404), path
        assert part["status"] == 404 or refused in part["body"]["errors"][0], path
        assert coordinator.calls == [], path


def shown_paths() -> Iterator[str]:
    for route in viewed_routes():
        for prefix in ("", "/v1", "/flink"):
            yield filled(f"{prefix}{route.path.removeprefix('/v1')}")


SHOWN = frozenset(shown_paths())


def test_all_that_is_answered_from_views_is_json(served: Served) -> None:
    for path in SHOWN:
        answer = served.request("GET", path)
        assert answer.status in (400, 404) or answer.headers["Content-Type"] == "application/json", path


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("", "path: Field required"),
        ("path=", "path"),
        ("&".join(f"path=/v1/jobs/{number}" for number in range(together.PATHS_MAX + 1)), "path"),
        (f"path={AT}&path={AT}", "a path is named more than once"),
        (f"path=/{'x' * viewed.KEPT_PATH_CHARS_MAX}", "path"),
    ],
)
def test_bad_queries_are_named(served: Served, query: str, named: str) -> None:
    for _ in range(2):
        answer = served.request("GET", f"{together.PATH}?{query}")
        assert answer.status == 400
        assert named in answer.json()["errors"][0]


@pytest.mark.parametrize("path", ["v1/overview", "x", "%0A", "/v1/over%0Aview", "*", "http://elsewhere/v1/overview"])
def test_what_is_no_path_is_refused_as_ever(served: Served, path: str) -> None:
    for _ in range(2):
        answer = served.request("GET", f"{together.PATH}?path={path}")
        assert answer.status == 404
        assert "begins with a slash" in answer.json()["errors"][0]


def test_each_path_is_judged_as_by_itself(tmp_path: Path) -> None:
    """Also of a query that somebody else was answered."""
    with serving(FakeCoordinator(), tmp_path) as served:
        confined = issue(served, "viewer", job=JOB)["token"]
        foreign = issue(served, "viewer", job=OTHER)["token"]
        viewer = issue(served, "viewer")["token"]
        assert ask(served, *OF_A_JOB).status == 200
        assert ask(served, *OF_A_JOB, token=viewer).status == 200
        assert ask(served, *OF_A_JOB, token=confined).status == 200
        for paths, token in ((OF_A_JOB, foreign), ((AT, "/v1/jobs/overview"), confined), ((AT, f"{AT}/yarn-cancel"), viewer)):
            for _ in range(2):
                found = ask(served, *paths, token=token, **{"If-None-Match": "*"})
                assert found.status == 403, paths
                assert found.headers["x-holdfast-error"] == "AccessDeniedError"
        assert ask(served, AT, token="x").status == 401
    noted = [line.request for line in read_audit(str(tmp_path)) if line.kind == "refused"]
    assert noted == [f"GET {each}" for each in (AT, AT, "/v1/jobs/overview", "/v1/jobs/overview")] + [
        f"GET {AT}/yarn-cancel", f"GET {AT}/yarn-cancel", f"GET {together.PATH}"
    ]  # fmt: skip


def test_each_path_counts_as_a_request(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path, requests_per_s_max=4) as served:
        viewer = issue(served, "viewer")["token"]
        assert [ask(served, *OF_A_JOB[:4], token=viewer).status for _ in range(2)] == [200, 200]
        refused = ask(served, *OF_A_JOB[:4], token=viewer)
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) >= 1


def test_who_waits_as_told_is_answered(tmp_path: Path) -> None:
    """Also with more paths than requests that may come at once."""
    paths = [f"{AT}?x={number}" for number in range(together.PATHS_MAX)]
    with serving(FakeCoordinator(), tmp_path, requests_per_s_max=4) as served:
        viewer = issue(served, "viewer")["token"]
        told = ""
        while "each path counts" not in told:
            found = ask(served, *paths, token=viewer)
            told = "" if found.status == 200 else found.body["errors"][0]
            if told:
                assert found.status == 429
                fields = msgspec.json.decode(found.headers["x-holdfast-fields"])
                assert not Event().wait(fields["retry_after_ms"] / 1000)
        assert ask(served, *paths, token=viewer).status == 200


def test_a_path_with_a_slash_too_many_is_none(served: Served) -> None:
    for _ in range(2):
        (part,) = ask(served, "/v1/jobs/overview/").body["answers"]
        assert part["status"] == 404


def test_jobs_that_do_not_answer_are_waited_for_at_one_time(
    served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that is known once: what comes is not asked for again."""
    assert ask(served, *OF_A_JOB).status == 200
    asked = list[str]()
    now = coordinator.moment_now

    def late(job_id: str | None = None, *, diagnosed: bool = False) -> MomentNow:
        asked.append("known" if len(asked) % 2 else "waits")
        found = now(job_id, diagnosed=diagnosed)
        return found

    monkeypatch.setattr(coordinator, "moment_now", late)
    assert ask(served, *OF_A_JOB).status == 200
    assert len(asked) == len(OF_A_JOB)


def test_a_bug_names_its_path(served: Served, coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture) -> None:
    assert ask(served, *OF_A_JOB).status == 200
    coordinator.error = ZeroDivisionError("no")
    found = ask(served, f"{AT}?bug=1")
    assert found.status == 500
    assert found.body["errors"] == ["internal error: ZeroDivisionError"]
    assert f"it was to answer {AT}" in caplog.text


def test_it_is_one_request_of_its_route(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path) as served:
        for _ in range(3):
            assert ask(served, *OF_A_JOB).status == 200
        metrics = served.request("GET", "/metrics").data.decode()
    assert f'method="GET",route="{together.PATH}",status="200"}} 3.0' in metrics


def test_few_queries_are_known(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were asked for longest ago are forgotten; a long one is none of them. All are answered alike."""
    monkeypatch.setattr(together, "QUERIES_MAX", 2)
    learnt = list[int]()
    learn = AnswerTogether.learn

    async def counted(answers: AnswerTogether, scope: Any, paths: tuple[str, ...]) -> Any:
        response = await learn(answers, scope, paths)
        learnt.append(len(answers._known))
        return response

    monkeypatch.setattr(AnswerTogether, "learn", counted)
    for number in range(300):
        assert ask(served, f"{AT}?x={number}").status == 200
    for _ in range(2):
        assert ask(served, *(f"{AT}?x={'y' * 900}{number}" for number in range(6))).status == 200
    assert len(learnt) == 302
    assert max(learnt[together.QUERIES_MAX :]) <= 256


def test_no_rule_confines_it_as_a_whole() -> None:
    assert classify("GET", together.PATH) == (Access.VIEW, "", True)
