"""Start and stop of a coordinator, embedded and as a process: guard, run record, token file."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import urllib3

from holdfast.api.client import RestClient
from holdfast.api.directory_guard import CoordinatorRunningError, DirectoryGuard
from holdfast.api.server.main import EmbeddedCoordinator
from holdfast.api.settings import ServerSettings, client_settings, server_settings
from holdfast.barriers.jobgraph import Submission
from holdfast.barriers.run_record import RunRecord, read_run_record, write_run_record
from holdfast.statebackends.errors import InvalidConfigError, InvariantError, StorageUnavailableError
from holdfast.statebackends.layout import TOKEN_FILE
from tests.api.fakes import JOB, FakeCoordinator, make_graph
from tests.coordinator.doubles import wait_until


def embedded(state_dir: Path, service: FakeCoordinator | None = None, **flags: object) -> EmbeddedCoordinator:
    settings = server_settings({}, state_dir=state_dir, **flags)  # type: ignore[arg-type]
    return EmbeddedCoordinator(settings, open_service=lambda _settings, _url: service or FakeCoordinator())


def test_embedded_serves_and_leaves_its_address(tmp_path: Path) -> None:
    service = FakeCoordinator()
    with embedded(tmp_path, service) as coordinator:
        record = read_run_record(tmp_path)
        assert record is not None
        assert (record.url, record.pid) == (coordinator.url, os.getpid())
        found = client_settings({}, state_dir=tmp_path)
        assert (found.url, found.token) == (coordinator.url, coordinator.token)
        client = RestClient(found.url, found.token)
        assert client.job_state(JOB) == "RUNNING"
        client.close()
    assert service.ready is False
    assert stat.S_IMODE((tmp_path / TOKEN_FILE).stat().st_mode) == 0o600


def test_port_and_token_survive_a_restart(tmp_path: Path) -> None:
    with embedded(tmp_path) as first:
        url, token = first.url, first.token
    with embedded(tmp_path) as second:
        assert (second.url, second.token) == (url, token)


def test_a_second_coordinator_is_refused_and_named(tmp_path: Path) -> None:
    with embedded(tmp_path) as first:
        with pytest.raises(CoordinatorRunningError) as caught:
            embedded(tmp_path).start()
        assert (caught.value.pid, caught.value.url) == (os.getpid(), first.url)
        assert "--takeover" in str(caught.value)
        with embedded(tmp_path, takeover=True) as second:
            assert second.url != first.url
            record = read_run_record(tmp_path)
            assert record is not None
            assert record.url == second.url
    with embedded(tmp_path):
        pass


def test_stop_is_idempotent_and_a_coordinator_starts_once(tmp_path: Path) -> None:
    coordinator = embedded(tmp_path)
    coordinator.stop()
    with pytest.raises(InvariantError):
        _ = coordinator.url
    coordinator.start()
    with pytest.raises(InvariantError):
        coordinator.start()
    coordinator.stop()
    coordinator.stop()


def test_a_service_that_does_not_start_leaves_nothing_locked(tmp_path: Path) -> None:
    def broken(_settings: ServerSettings, _url: str) -> FakeCoordinator:
        raise StorageUnavailableError("the disk is gone", path="x")

    settings = server_settings({}, state_dir=tmp_path, port=0)
    with pytest.raises(StorageUnavailableError, match="the disk is gone"):
        EmbeddedCoordinator(settings, open_service=broken).start()
    with embedded(tmp_path):
        pass


def test_guard_names_an_unwritable_directory(tmp_path: Path) -> None:
    with pytest.raises(StorageUnavailableError), DirectoryGuard(tmp_path / "missing", takeover=False):
        pass


def test_settings_are_checked_before_anything_starts(tmp_path: Path) -> None:
    coordinator = EmbeddedCoordinator(ServerSettings(tmp_path, host="0.0.0.0"), open_service=lambda _s, _u: FakeCoordinator())
    with pytest.raises(InvalidConfigError, match="without a token"):
        coordinator.start()
    assert list(tmp_path.iterdir()) == []


def test_ready_only_when_recovered(tmp_path: Path) -> None:
    service = FakeCoordinator(ready=False)
    with embedded(tmp_path, service) as coordinator:
        http = urllib3.PoolManager(retries=False)
        assert http.request("GET", f"{coordinator.url}/healthz").status == 200
        answer = http.request("GET", f"{coordinator.url}/readyz")
        assert (answer.status, set(answer.json())) == (503, {"errors"})
        service.ready = True
        assert http.request("GET", f"{coordinator.url}/readyz").status == 200
        http.clear()


def test_openapi_and_metrics(tmp_path: Path) -> None:
    with embedded(tmp_path) as coordinator:
        http = urllib3.PoolManager(retries=False, headers={"Authorization": f"Bearer {coordinator.token}"})
        document = json.loads(http.request("GET", f"{coordinator.url}/openapi.json").data)
        assert {"/v1/jobs", "/v1/overview", "/v1/jobs/{jobid}/workers/register", "/healthz", "/metrics"} <= set(document["paths"])
        schemas = document["components"]["schemas"]
        assert {"AckBatch", "Submission", "NumberedCommand", "JobDetails"} <= set(schemas)
        references = set(_references(document))
        assert references <= {f"#/components/schemas/{name}" for name in schemas}
        http.request("GET", f"{coordinator.url}/v1/jobs/{JOB}")
        metrics = http.request("GET", f"{coordinator.url}/metrics").data.decode()
        assert f'holdfast_job_state{{job_id="{JOB}",job_name="flights",state="RUNNING"}} 1.0' in metrics
        assert 'holdfast_checkpoints_total{job_id="' in metrics
        assert 'holdfast_http_requests_total{method="GET",route="/jobs/{jobid}",status="200"} 1.0' in metrics
        http.clear()


def _references(value: object) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [found for inner in value.values() for found in _references(inner)]
    return [found for inner in value for found in _references(inner)] if isinstance(value, list) else []


def test_a_fenced_coordinator_lets_go_of_the_lock_and_its_successor_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a start after the successor's end was refused for the sake of one that leads nothing, until somebody killed that."""
    monkeypatch.setattr("holdfast.api.directory_guard.GUARD_ROUND_S", 0.01)
    monkeypatch.setattr("holdfast.coordinator.service.RECOVERY_RETRY_S", 0.01)
    fenced = EmbeddedCoordinator(server_settings({}, state_dir=tmp_path, port=0))
    with fenced:
        client = RestClient(fenced.url, fenced.token)
        job_id = client.submit(Submission(make_graph())).job_id
        client.close()
        with EmbeddedCoordinator(server_settings({}, state_dir=tmp_path, port=0, takeover=True)) as successor:
            wait_until(lambda: successor.holds_lock, lambda: None, what="the lock of the successor")
            with pytest.raises(CoordinatorRunningError):
                EmbeddedCoordinator(server_settings({}, state_dir=tmp_path, port=0)).start()
        with EmbeddedCoordinator(server_settings({}, state_dir=tmp_path, port=0)) as third:
            client = RestClient(third.url, third.token)
            assert [job["jid"] for job in client.jobs()] == [job_id]
            client.close()


def test_a_fenced_coordinator_that_led_no_job_sees_who_was_announced_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.api.directory_guard.GUARD_ROUND_S", 0.01)
    service = FakeCoordinator(is_leading=False)
    with embedded(tmp_path, service) as first:
        assert first.holds_lock
        with embedded(tmp_path, takeover=True) as second:
            wait_until(lambda: second.holds_lock, lambda: None, what="the lock of the second")
            assert not first.holds_lock
        with embedded(tmp_path):
            pass


def test_a_coordinator_that_leads_keeps_its_lock_whoever_announces_himself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.api.directory_guard.GUARD_ROUND_S", 0.001)
    service = FakeCoordinator(is_leading=True, is_referring=True)
    with DirectoryGuard(tmp_path, takeover=False) as guard, guard.kept_for(service):
        guard.announced = RunRecord("http://127.0.0.1:1", 1, "here", 1)
        write_run_record(tmp_path, RunRecord("http://127.0.0.1:2", 2, "there", 2))
        guard._check(service)
        assert guard.is_held
        service.is_leading = False
        wait_until(lambda: not guard.is_held, lambda: None, what="letting go")
        service.is_leading = True
        wait_until(lambda: guard.is_held, lambda: None, what="taking it back")


def test_all_of_a_state_directory_is_private_unless_a_group_shares_it(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2770)
    before = os.umask(0o022)
    try:
        for directory, folder, file in ((tmp_path / "private", 0o700, 0o600), (shared, 0o2770, 0o660)):
            with EmbeddedCoordinator(server_settings({}, state_dir=directory)) as coordinator:
                client = RestClient(coordinator.url, coordinator.token)
                client.submit(Submission(make_graph()))
                client.close()
            found = {path: stat.S_IMODE(path.stat().st_mode) for path in [directory, *directory.rglob("*")]}
            assert found.pop(directory / TOKEN_FILE) == 0o600
            assert {mode for path, mode in found.items() if path.is_dir()} == {folder}
            assert {mode for path, mode in found.items() if path.is_file()} == {file}
    finally:
        os.umask(before)
