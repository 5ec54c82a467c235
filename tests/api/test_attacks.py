"""What callers with little or no right try: each is a request that once went through, or a service that once fell over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.api.access.audit_log import read_audit
from holdfast.api.access.roles import classify
from holdfast.statebackends.errors import NotLeaderError
from tests.api.fakes import JOB, FakeCoordinator, Served, serving
from tests.api.test_access import issue, status
from tests.api.test_web_interface import make_jar


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
