"""GETs that are answered from views: how old they are, and 304 for an answer that the caller has."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from holdfast.api.routes import jobs, viewed, workers
from holdfast.api.routes.dialect import jobs as flink
from holdfast.coordinator.views import Moment
from tests.api.fakes import JOB, TRIGGER, FakeCoordinator, Served

AS_OF_MS = 1_700_000_000_000


VIEWED_PATHS = [
    "/v1/overview",
    "/v1/jobs",
    "/v1/jobs/overview",
    "/v1/totals",
    f"/v1/jobs/{JOB}",
    f"/jobs/{JOB}",
    f"/v1/jobs/{JOB}/status",
    f"/v1/jobs/{JOB}/plan",
    f"/v1/jobs/{JOB}/exceptions",
    f"/v1/jobs/{JOB}/settings",
    f"/v1/jobs/{JOB}/series?metric=busy_ratio",
    f"/v1/jobs/{JOB}/workers",
    f"/v1/jobs/{JOB}/checkpoints",
    f"/v1/jobs/{JOB}/checkpoints/config",
    "/v1/jobs/metrics",
    f"/v1/jobs/{JOB}/metrics",
    "/v1/taskmanagers",
    "/v1/taskmanagers/metrics",
    f"/v1/taskmanagers/{JOB}_slot-0",
    f"/v1/taskmanagers/{JOB}_slot-0/metrics",
    "/v1/applications/overview",
    f"/v1/applications/{JOB}",
    f"/v1/applications/{JOB}/exceptions",
]

EXPLANATIONS = [f"/v1/jobs/{JOB}/checkpoints/details/1/explain", f"/v1/jobs/{JOB}/checkpoints/explain"]


@pytest.mark.parametrize("path", VIEWED_PATHS)
def test_answer_says_how_old_it_is_and_is_not_sent_twice(path: str, served: Served, coordinator: FakeCoordinator) -> None:
    first = served.request("GET", path)
    assert (first.status, first.headers[viewed.AS_OF_HEADER]) == (200, str(AS_OF_MS))
    coordinator.moments = Moment(AS_OF_MS + 10, "a-tag")
    again = served.request("GET", path, headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status, again.data) == (304, b"")
    assert again.headers["ETag"] == first.headers["ETag"]
    assert again.headers[viewed.AS_OF_HEADER] == str(AS_OF_MS + 10)
    coordinator.moments = Moment(AS_OF_MS + 20, "another")
    newer = served.request("GET", path, headers={"If-None-Match": first.headers["ETag"]})
    assert newer.status == 200
    assert newer.headers["ETag"] != first.headers["ETag"]


@pytest.mark.parametrize("path", EXPLANATIONS)
def test_an_explanation_is_known_by_what_it_says_not_by_its_view(
    path: str, served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has parts of the history and of what workers said: they may change while the view does not."""
    first = served.request("GET", path)
    assert (first.status, first.headers[viewed.AS_OF_HEADER]) == (200, str(AS_OF_MS))
    known = {"If-None-Match": first.headers["ETag"]}
    coordinator.moments = Moment(AS_OF_MS + 10, "another")
    again = served.request("GET", path, headers=known)
    assert (again.status, again.data) == (304, b"")
    assert (again.headers["ETag"], again.headers[viewed.AS_OF_HEADER]) == (first.headers["ETag"], str(AS_OF_MS + 10))
    said = coordinator.explain(JOB, 1)
    changed = replace(said, summary="it was found in the history")
    monkeypatch.setattr(coordinator, "explain", lambda *_: changed)
    newer = served.request("GET", path, headers=known)
    assert (newer.status, newer.json()["summary"]) == (200, changed.summary)
    assert newer.headers["ETag"] != first.headers["ETag"]


@pytest.mark.parametrize(
    ("condition", "status"),
    [
        ("*", 304),
        ('"nothing", {tag}', 304),
        ("{strong}", 304),
        ('"nothing"', 200),
        ("", 200),
        ("W/", 200),
        (", ".join(['"x"'] * 1_000), 200),
    ],
)
def test_condition_is_compared_weakly(condition: str, status: int, served: Served) -> None:
    tag = served.request("GET", f"/v1/jobs/{JOB}").headers["ETag"]
    sent = condition.format(tag=tag, strong=tag.removeprefix("W/"))
    assert served.request("GET", f"/v1/jobs/{JOB}", headers={"If-None-Match": sent}).status == status


def test_own_bodies_say_until_when_they_are_known_to_hold(served: Served) -> None:
    assert "as_of_ms" in served.json("GET", f"/v1/jobs/{JOB}/settings")
    assert "as_of_ms" in served.json("GET", f"/v1/jobs/{JOB}/workers")
    assert all("as_of_ms" in job for job in served.json("GET", "/v1/totals")["jobs"])


@pytest.mark.parametrize("what", ["labels", "drills"])
def test_what_is_read_from_storage_is_as_of_the_begin_of_the_read(
    what: str, served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, began_ms = getattr(coordinator, what), list[int]()

    def watched(job_id: str) -> object:
        began_ms.append(time.time_ns() // 1_000_000)
        return read(job_id)

    monkeypatch.setattr(coordinator, what, watched)
    before_ms = time.time_ns() // 1_000_000
    as_of_ms = served.json("GET", f"/v1/jobs/{JOB}/{what}")["as_of_ms"]
    assert before_ms <= as_of_ms <= began_ms[0]


def test_metrics_say_how_old_they_are(served: Served) -> None:
    assert served.request("GET", "/metrics").headers[viewed.AS_OF_HEADER] == str(AS_OF_MS)


@pytest.mark.parametrize("path", [f"/v1/jobs/{JOB}/checkpoints/{TRIGGER}", "/v1/config", "/healthz"])
def test_trigger_polls_and_what_no_view_shows_have_no_tag(path: str, served: Served) -> None:
    answer = served.request("GET", path, headers={"If-None-Match": "*"})
    assert answer.status == 200
    assert "ETag" not in answer.headers


def test_unknown_job_and_error_have_no_tag(served: Served) -> None:
    answer = served.request("GET", f"/v1/jobs/{'f' * 32}")
    assert answer.status == 404
    assert "ETag" not in answer.headers


def test_only_gets_are_answered_from_views() -> None:
    """A request that changes something must never be withheld."""
    routes = [route for router in (flink.router, jobs.router, workers.router) for route in router.routes]
    for route in routes:
        dependencies = [each.dependency for each in getattr(route, "dependencies", ())]
        if viewed.from_views in dependencies:
            assert getattr(route, "methods", set()) == {"GET"}, route
