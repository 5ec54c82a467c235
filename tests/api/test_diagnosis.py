"""`holdfast status` and `holdfast explain`, and the paths of REST behind them: one record, one number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from holdfast.api.cli import diagnosis
from holdfast.api.cli.main import app
from holdfast.api.client import RestClient
from holdfast.coordinator.explain.explanation import explain
from holdfast.coordinator.explain.health import derive_health
from holdfast.coordinator.explain.kept import describe_explanation, recall_explanation
from holdfast.coordinator.explain.positions import SnapshotPositions, SourcePlaces
from holdfast.coordinator.explain.records import CauseKind, Explanation, HealthView, Verdict
from holdfast.statebackends.errors import NotFoundError, NotLeaderError, RecoveringError
from tests.api.fakes import JOB, NAME, TOKEN, FakeCoordinator, Served
from tests.coordinator.explain.building import SINK, SOURCE, WINDOW, Built

HEALTH, EXPLAIN = f"/v1/jobs/{JOB}/health", f"/v1/jobs/{JOB}/checkpoints/explain"
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def client(served: Served) -> Iterator[RestClient]:
    made = RestClient(served.url, served.token, reconnect_timeout_s=0)
    yield made
    made.close()


@pytest.fixture
def built(coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch) -> Built:
    """What the coordinator answers from."""
    it = Built()
    monkeypatch.setattr(diagnosis, "POSITIONS_WAIT_S", 0.0)  # nobody reads a snapshot here
    monkeypatch.setattr(coordinator, "health", lambda job_id: derive_health(it.made()), raising=False)
    monkeypatch.setattr(coordinator, "explain", lambda job_id, number=None: explain(it.made()), raising=False)
    return it


def holdfast(served: Served, *arguments: str, code: int = 0) -> Any:
    result = CliRunner(env={"HOLDFAST_TOKEN": str(served.token)}).invoke(app, [*arguments, "--url", served.url])
    assert result.exit_code == code, (result.output, result.exception)
    return result


# --------------------------------------------------------------------------------------------------------------- REST


def test_health_and_explanations_are_records(served: Served, coordinator: FakeCoordinator) -> None:
    health = msgspec.convert(served.json("GET", HEALTH), HealthView)
    assert (health.job_id, health.state, health.resume.location) == (JOB, "RUNNING", "/state/chk-1")
    assert health.safe.replay_records == 200
    assert served.json("GET", f"/v1/jobs/{JOB}/checkpoints/details/1/explain")["subject"] == "completed"
    assert served.json("GET", f"/v1/jobs/{JOB}/checkpoints/details/3/explain")["causes"][0]["kind"] == "expired"
    assert served.json("GET", EXPLAIN)["job_id"] == JOB
    assert [call[0] for call in coordinator.calls].count("explain") == 3


def test_unknown_jobs_and_checkpoints_are_404(served: Served) -> None:
    for path in (
        HEALTH.replace(JOB, "d" * 32),
        EXPLAIN.replace(JOB, "d" * 32),
        f"/v1/jobs/{JOB}/checkpoints/details/77/explain",
    ):
        response = served.request("GET", path)
        assert response.status == 404, path
        assert response.json()["errors"]
    assert served.request("GET", "/v1/jobs/nonsense/health").status == 400
    assert served.http.request("GET", served.url + HEALTH).status == 401


def test_a_trigger_s_id_is_still_one(served: Served) -> None:
    assert served.request("GET", f"/v1/jobs/{JOB}/checkpoints/{'c' * 32}").status == 200
    assert served.request("GET", f"/v1/jobs/{JOB}/checkpoints/explains").status == 400


def test_the_records_are_described(served: Served) -> None:
    document = served.json("GET", "/openapi.json")
    for path, record in ((HEALTH, "HealthView"), (EXPLAIN, "Explanation")):
        answer = document["paths"][path.replace(JOB, "{jobid}")]["get"]["responses"]["200"]
        (content,) = answer["content"].values()
        assert content["schema"]["$ref"].endswith(f"/{record}")
        assert record in document["components"]["schemas"]


def test_the_client(client: RestClient, built: Built) -> None:
    built.ack(WINDOW, [0], store=7_000)
    assert client.health(JOB) == derive_health(built.made())
    assert client.explain(JOB, 41) == explain(built.made())
    assert client.explain(JOB).first_cause.kind is CauseKind.SLOW_STORE


def test_answers_of_a_later_version_are_understood() -> None:
    health = msgspec.to_builtins(derive_health(Built(status=None).made()))
    later = {**health, "added": 1, "safe": {**health["safe"], "added": {"a": 1}}}
    assert msgspec.json.decode(json.dumps(later), type=HealthView) == derive_health(Built(status=None).made())


# ------------------------------------------------------------------------------------------------------------- status


def test_three_lines_with_verdicts(served: Served, built: Built) -> None:
    lines = holdfast(served, "status", NAME).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["SAFE", "SLOW", "RESUME"]
    assert lines[0] == (
        "SAFE    ok       the newest completed checkpoint began 5.0 s ago, the interval is 10.0 s; a failure replays 5.0 s, "
        "at least 500 records; verified never, drilled never"
    )
    assert lines[2] == "RESUME  ok       from checkpoint 40; no output repeats; /state/j/chk-40; sources: orders at record 1,000"


def test_positions_of_sources_are_told_as_their_state_has_them() -> None:
    made = Built(status=None).made()
    places = SourcePlaces(30, tuple(f"t[{number}] at offset {number}" for number in range(20)))
    said = {}
    for number in (40, 39):
        view = derive_health(msgspec.structs.replace(made, positions=SnapshotPositions(number, {"orders": places})))
        said[number] = diagnosis._resume(view).partition("sources: ")[2]
    assert said[40] == "orders (t[0] at offset 0, t[1] at offset 1, t[2] at offset 2, t[3] at offset 3 and 26 more)"
    assert said[39] == f"{said[40]} (positions of checkpoint 39; those of 40 are being read)"


def test_status_waits_a_moment_for_positions_that_are_read_because_it_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Built(status=None).made()
    places = SnapshotPositions(40, {"orders": SourcePlaces(1, ("row 5",))})
    answers = [derive_health(made), derive_health(made), derive_health(msgspec.structs.replace(made, positions=places))]
    asked = iter(answers)
    assert diagnosis.ask_health(lambda: next(asked)) == answers[-1]
    monkeypatch.setattr(diagnosis, "POSITIONS_WAIT_S", 0.0)
    assert diagnosis.ask_health(lambda: answers[0]) == answers[0], "it does not insist"


def test_status_waits_for_the_positions_of_the_newest_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that a command that is given once a night shows positions of the evening."""
    made = Built(status=None).made()

    def read(number: int) -> HealthView:
        places = SnapshotPositions(number, {"orders": SourcePlaces(1, (f"row {number}",))})
        return derive_health(msgspec.structs.replace(made, positions=places))

    def later(view: HealthView, number: int) -> HealthView:
        return msgspec.structs.replace(view, resume=msgspec.structs.replace(view.resume, checkpoint_id=number))

    asked = iter([read(12), read(12), read(40)])
    assert diagnosis.ask_health(lambda: next(asked)).resume.positions_of == 40
    asked = iter([read(12), later(read(40), 41)])
    assert diagnosis.ask_health(lambda: next(asked)).resume.positions_of == 40, "the next one may be complete before one is read"
    monkeypatch.setattr(diagnosis, "POSITIONS_WAIT_S", 0.0)
    assert diagnosis.ask_health(lambda: read(12)).resume.positions_of == 12, "it does not insist"


def test_the_exit_code_is_the_worst_verdict(served: Served, built: Built) -> None:
    assert built.cut is not None
    for age_ms, code, word in ((5_000, 0, "ok"), (60_000, 1, "at risk"), (3_600_000, 2, "bad")):
        built.cut = msgspec.structs.replace(built.cut, timestamp_ms=built.made().job.now_ms - age_ms)
        assert word in holdfast(served, "status", JOB, code=code).stdout.splitlines()[0]
        assert json.loads(holdfast(served, "status", JOB, "--json", code=code).stdout)["verdict"] == word.replace(" ", "_")


def test_the_command_line_and_rest_show_one_number(served: Served, built: Built) -> None:
    built.pressed(SOURCE)
    built.busy(WINDOW, [2])
    built.records[WINDOW, 2] = 90_000
    said = json.loads(holdfast(served, "status", JOB, "--json", code=1).stdout)
    assert said == served.json("GET", HEALTH)
    shown = json.loads(holdfast(served, "explain", JOB, "41", "--json").stdout)
    assert shown == served.json("GET", f"/v1/jobs/{JOB}/checkpoints/details/41/explain")


def test_one_that_was_explained_when_it_ended_says_so(
    served: Served, coordinator: FakeCoordinator, client: RestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Built(status="FAILED", reason="expired", failed_after_ms=120_000, age_ms=125_000)
    it.missing(WINDOW, 2)
    kept = recall_explanation(describe_explanation(msgspec.structs.replace(explain(it.made()), explained_ms=1_700_000_000_000)))
    it.state = "RESTARTING"
    situation = msgspec.structs.replace(it.made(), kept=kept)
    monkeypatch.setattr(coordinator, "explain", lambda job_id, number=None: explain(situation), raising=False)
    lines = holdfast(served, "explain", JOB, "41").stdout.splitlines()
    assert lines[0] == "flights: checkpoint 41 failed after 2 min 00 s: expired"
    assert lines[1] == "seen    2023-11-14 22:13:20Z; it was explained when it ended"
    body = served.json("GET", f"/v1/jobs/{JOB}/checkpoints/details/41/explain")
    assert body["explained_ms"] == 1_700_000_000_000
    assert msgspec.json.decode(json.dumps(body), type=Explanation) == client.explain(JOB, 41) == explain(situation)
    why = [line[8:] for line in lines if line.startswith(("why ", "because "))]
    assert why == [cause["text"] for cause in body["causes"]], "one text in all places"


def test_an_ended_job_and_one_that_failed(served: Served, built: Built) -> None:
    built.schedule, built.cut = None, None
    built.state = "FINISHED"
    assert "the job has ended: FINISHED" in holdfast(served, "status", JOB).stdout
    built.state, built.changes = "FAILED", {"failure": "ValueError: no such carrier"}
    assert "FAILED: ValueError: no such carrier" in holdfast(served, "status", JOB, code=2).stdout


@pytest.mark.parametrize(
    "error", [RecoveringError("recovering"), NotLeaderError("another coordinator leads", job=JOB), NotFoundError("no job", job=JOB)]
)
def test_without_an_answer_the_exit_code_is_another_one(served: Served, coordinator: FakeCoordinator, error: Exception) -> None:
    coordinator.error = error
    assert type(error).__name__ in holdfast(served, "status", JOB, code=3).stderr


def test_an_unknown_job_and_no_coordinator(served: Served, tmp_path: Path) -> None:
    assert "no job 'flight'" in holdfast(served, "status", "flight", code=3).stderr
    assert "no job 'flight'" in holdfast(served, "explain", "flight", code=1).stderr
    runner = CliRunner(env={"HOLDFAST_TOKEN": TOKEN})
    for command, code in (("status", 3), ("explain", 1)):
        result = runner.invoke(app, [command, JOB, "--url", NOBODY])
        assert result.exit_code == code
        assert f"can't reach the coordinator at {NOBODY}" in result.stderr
        assert f"`holdfast checkpoints {JOB} --offline --state-dir DIR` shows what is on record" in result.stderr
    assert runner.invoke(app, ["status", JOB, "--state-dir", str(tmp_path / "nothing")]).exit_code == 3


# ------------------------------------------------------------------------------------------------------------ explain


def test_phases_causes_and_the_setting_are_printed(served: Served, built: Built) -> None:
    built.age_ms = 25_000
    built.ack(WINDOW, align=20_000)
    built.ack(SINK, start=20_000)
    built.pressed(SOURCE)
    built.busy(WINDOW)
    lines = holdfast(served, "explain", JOB, "41").stdout.splitlines()
    assert lines[0].startswith("flights: checkpoint 41 completed in 20.3 s; usually it takes 335 ms")
    assert lines[1].split() == ["PHASE", "LONGEST", "USUALLY", "NOTE", "WHERE"]
    assert [line.split("  ")[0].strip() for line in lines[2:10]] == [
        "start delay",
        "alignment",
        "sync",
        "encode",
        "store",
        "acknowledge",
        "decide",
        "notify",
    ]
    assert lines[10].startswith("why     ")
    assert all(line.startswith("because ") for line in lines[11:-2])
    assert "count per carrier (uid counts) is the bottleneck" in lines[-3]
    assert lines[-2].startswith("change  unaligned_checkpoints false -> true: ")
    assert lines[-1] == f"        holdfast checkpoints {JOB} --set unaligned_checkpoints=true"


def test_a_healthy_checkpoint_raises_no_alarm(served: Served, built: Built) -> None:
    lines = holdfast(served, "explain", JOB).stdout.splitlines()
    assert lines[-1] == "why     within its usual range, beside 20 others that completed"
    assert not any("above" in line for line in lines)


def test_where_no_setting_helps_that_is_said(served: Served, built: Built) -> None:
    built.ack(WINDOW, [0], store=7_000)
    assert holdfast(served, "explain", JOB).stdout.splitlines()[-1] == "change  not known"


def test_a_setting_that_needs_a_submission_has_no_command(served: Served, built: Built) -> None:
    built.tune(incremental_checkpoints=False)
    built.all_acks(store=2_500)
    line = holdfast(served, "explain", JOB).stdout.splitlines()[-1]
    assert line.startswith("change  incremental_checkpoints false -> true (with the next submission): ")


def test_an_id_that_is_no_number_is_refused(served: Served) -> None:
    holdfast(served, "explain", JOB, "newest", code=2)
    holdfast(served, "explain", JOB, "77", code=1)


def test_verdicts_are_ranked() -> None:
    assert [Verdict.OK.rank, Verdict.AT_RISK.rank, Verdict.BAD.rank] == [0, 1, 2]
