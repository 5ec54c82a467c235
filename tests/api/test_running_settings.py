"""Settings of a running job over REST, in the client and at the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.api.cli.main import app
from holdfast.api.client import RestClient
from holdfast.barriers.messages import TaskState
from holdfast.barriers.tunable import TUNABLE, CheckpointMode
from holdfast.coordinator.config import ServiceConfig
from holdfast.operators.datastream.environment import Environment
from holdfast.statebackends.errors import CheckpointFailedError, FencedError, InvalidConfigError, NotFoundError
from tests.api.fakes import JOB, NAME, FakeCoordinator, Served, serving
from tests.coordinator.doubles import Crew, leading, submission, word_count

CONFIG = f"/v1/jobs/{JOB}/checkpoints/config"


@pytest.fixture
def client(served: Served) -> Iterator[RestClient]:
    made = RestClient(served.url, served.token, reconnect_timeout_s=0)
    yield made
    made.close()


def test_a_change_is_answered_with_what_holds(served: Served, coordinator: FakeCoordinator) -> None:
    answer = served.json("PATCH", CONFIG, {"checkpoint_interval_ms": None, "tolerable_failed_checkpoints": 4})
    assert set(answer) == {"settings", "processing_backlog", "as_of_ms"}
    assert tuple(answer["settings"]) == TUNABLE
    assert (answer["settings"]["checkpoint_interval_ms"], answer["settings"]["tolerable_failed_checkpoints"]) == (None, 4)
    assert ("change_settings", JOB, {"checkpoint_interval_ms": None, "tolerable_failed_checkpoints": 4}) in coordinator.calls
    assert served.json("GET", f"/v1/jobs/{JOB}/settings")["settings"]["checkpoint_interval_ms"] == 1_000


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"checkpoint_intervall_ms": 5}, "checkpoint_intervall_ms"),
        ({"checkpoint_interval_ms": {"every": 5}}, "checkpoint_interval_ms"),
        ({"checkpoint_interval_ms": 1e300}, "checkpoint_interval_ms"),
        ({"min_pause_ms": -1}, "min_pause_ms"),
        (b'{"min_pause_ms": %d}' % 2**70, "min_pause_ms"),
        ({"unaligned_checkpoints": "yes"}, "unaligned_checkpoints"),
        ({"aligned_checkpoint_timeout_ms": -1}, "aligned_checkpoint_timeout_ms"),
        ({"unaligned_checkpoints": 1}, "unaligned_checkpoints"),
        ({"min_pause_ms": True}, "min_pause_ms"),
        ({"min_pause_ms": "5"}, "min_pause_ms"),
        ({"min_pause_ms": None}, "min_pause_ms"),
        ({"checkpoint_timeout_ms": 0}, "checkpoint_timeout_ms"),
        ({"checkpoint_interval_ms": -5}, "checkpoint_interval_ms"),
        ({"checkpoint_interval_during_backlog_ms": -1}, "checkpoint_interval_during_backlog_ms"),
        ({"max_concurrent_checkpoints": 2}, "max_concurrent_checkpoints is fixed while a job runs"),
        ({"": 1}, "'' is no setting"),
        ({"x" * 30_000: 1}, "x...' is no setting: checkpoint_interval_ms, "),
        ({"\x1b[31m": 1}, r"'\x1b[31m' is no setting"),
        (b'{"min_pause_ms": NaN}', "min_pause_ms"),
        (b'{"min_pause_ms": -Infinity}', "min_pause_ms"),
        (b'{"min_pause_ms": 1e999}', "min_pause_ms"),
        (b'{"min_pause_ms": 9223372036854775808}', "min_pause_ms must be a whole number below 2^63, got 9223372036854775808"),
        (b'{"min_pause_ms": %s}' % (b"9" * 4_000), "got one of more than 40 digits"),
        (b'{"min_pause_ms": 1, "min_pause_ms": 2}', "'min_pause_ms' more than once"),
        (b"null", "SettingsChange"),
        (b"[1]", "SettingsChange"),
        (b"{", "SettingsChange"),
    ],
)
def test_bad_changes_are_refused_by_name(served: Served, body: object, named: str) -> None:
    before = served.json("GET", f"/v1/jobs/{JOB}/settings")
    response = served.request("PATCH", CONFIG, body)
    assert response.status == 400
    (said,) = response.json()["errors"]
    assert named in said
    assert len(said) < 400
    assert served.json("GET", f"/v1/jobs/{JOB}/settings") == before


@pytest.mark.parametrize("name", ["aligned_checkpoint_timeout_ms", "inflight_bytes_max", "checkpoint_timeout_ms", "step_budget_ms"])
def test_a_job_has_no_setting_that_no_message_can_carry(name: str) -> None:
    """Barriers carry 64 bits: with more, each checkpoint of the job would fail it."""

    def made(number: int) -> Environment:
        settings: dict[str, Any] = {name: number}
        return Environment("job", **settings)

    for number in (2**63, -(2**63), 10**4_000):
        with pytest.raises(InvalidConfigError, match=f"{name} must be a whole number below 2\\^63, got") as caught:
            made(number)
        assert caught.value.fields["setting"] == name
    made(2**63 - 1)


def test_an_unknown_and_an_ended_job(served: Served, coordinator: FakeCoordinator) -> None:
    assert served.request("PATCH", CONFIG.replace(JOB, "d" * 32), {"min_pause_ms": 1}).status == 404
    coordinator.error = FencedError(f"job {JOB} is FINISHED", job=JOB, state="FINISHED")
    assert served.request("PATCH", CONFIG, {"min_pause_ms": 1}).status == 409
    assert served.http.request("PATCH", served.url + CONFIG, body=b"{}").status == 401


def test_the_settings_are_described(served: Served) -> None:
    described = served.json("GET", "/openapi.json")["paths"]["/v1/jobs/{jobid}/checkpoints/config"]["patch"]
    (content,) = described["requestBody"]["content"].values()
    assert set(content["schema"]["properties"]) == set(TUNABLE)


def test_the_client(client: RestClient) -> None:
    assert client.change_settings(JOB, {"min_pause_ms": 7})["settings"]["min_pause_ms"] == 7
    assert client.settings(JOB)["settings"]["min_pause_ms"] == 0
    with pytest.raises(InvalidConfigError) as caught:
        client.change_settings(JOB, {"min_pause": 7})
    assert caught.value.fields["setting"] == "min_pause"


def test_the_command_line(served: Served, coordinator: FakeCoordinator) -> None:
    def run(*arguments: str, code: int = 0) -> str:
        result = CliRunner(env={"HOLDFAST_TOKEN": str(served.token)}).invoke(
            app, ["checkpoints", NAME, *arguments, "--url", served.url]
        )
        assert result.exit_code == code, (result.output, result.exception)
        return result.stdout if code == 0 else result.stderr

    lines = [line.split() for line in run("--set", "checkpoint_interval_ms=none", "--set", "min_pause_ms=2_000").splitlines()]
    assert lines[0] == ["SETTING", "VALUE"]
    assert ["checkpoint_interval_ms", "none"] in lines
    assert ["min_pause_ms", "2000"] in lines
    assert ["unaligned_checkpoints", "true"] in [line.split() for line in run("--set", "unaligned_checkpoints=true").splitlines()]
    answer = json.loads(run("--set", "checkpoint_interval_during_backlog_ms=0", "--json"))
    assert answer["settings"]["checkpoint_interval_during_backlog_ms"] == 0
    asked = len(coordinator.calls)
    for wrong in (["--set", "min_pause_ms"], ["--set", "min_pause_ms=5s"], ["--set", "min_pause_ms=1", "--set", "min_pause_ms=2"]):
        assert "min_pause_ms" in run(*wrong, code=2)
    for text in ("", "=5", " =5", "min_pause_ms=", "min_pause_ms=nan", "min_pause_ms=1e3", "min_pause_ms=9223372036854775808"):
        assert ("min_pause_ms" if "min" in text else "is not NAME=VALUE") in run("--set", text, code=2)
    assert len(run("--set", "min_pause_ms=" + "9" * 5_000, code=2)) < 200
    assert "--offline" in run("--set", "min_pause_ms=1", "--offline", code=2)
    assert not any(call[0] == "change_settings" for call in coordinator.calls[asked:])
    assert "'min_pause' is no setting" in run("--set", "min_pause=5", code=2)
    assert "min_pause_ms: Expected `int`, got `bool`" in run("--set", "min_pause_ms=true", code=2)


def test_settings_outlive_the_coordinator_process_and_not_the_job(tmp_path: Path) -> None:
    service = leading(ServiceConfig(str(tmp_path / "state"), seed=1))
    job_id = service.submit(submission(word_count(checkpoint_interval_ms=None))).job_id
    changed = service.change_settings(job_id, {"checkpoint_interval_ms": 20}).config
    service.close()
    service = leading(ServiceConfig(str(tmp_path / "state"), seed=2))
    with serving(service, tmp_path) as served:
        client = RestClient(served.url, served.token)
        assert service.checkpoint_config(job_id).config == changed
        assert client.checkpoint_config(job_id)["interval"] == 20
        crew = Crew(service, job_id, 2)
        crew.register()
        crew.until(lambda: service.job(job_id).vertices[0].state is TaskState.RUNNING, what="running tasks")
        crew.until_completed(2)
        client.cancel(job_id)
        crew.until_state("CANCELED")
        with pytest.raises(FencedError):
            client.change_settings(job_id, {"checkpoint_interval_ms": 30})
        with pytest.raises(NotFoundError):
            client.change_settings("e" * 32, {"checkpoint_interval_ms": 30})
        with pytest.raises(CheckpointFailedError, match="it takes no more snapshots"):
            client.trigger_checkpoint(job_id, unaligned=True, timeout_s=5)
        with pytest.raises(NotFoundError):
            client.trigger_checkpoint("e" * 32, unaligned=True, timeout_s=5)
        assert client.settings(job_id)["settings"]["checkpoint_interval_ms"] == 20
    service.close()
    service = leading(ServiceConfig(str(tmp_path / "state"), seed=3))
    assert service.checkpoint_config(job_id).config.checkpoint_interval_ms == 20, "from its records"
    with pytest.raises(FencedError):
        service.change_settings(job_id, {"checkpoint_interval_ms": 30})
    with pytest.raises(FencedError):
        service.request_checkpoint(job_id, mode=CheckpointMode(unaligned=True))
    service.close()
