"""The command line against a coordinator with canned answers: what it prints, how it fails."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.main import get_command
from typer.testing import CliRunner

from holdfast.api.cli import console
from holdfast.api.cli import main as cli
from holdfast.api.cli.main import app
from holdfast.api.client import RestClient
from holdfast.barriers.jobgraph import RestartStrategy
from holdfast.barriers.messages import CheckpointKind
from holdfast.barriers.tunable import CheckpointMode
from holdfast.coordinator.views import TriggerView
from holdfast.statebackends.errors import FencedError, NotFoundError, NotLeaderError
from tests.api.fakes import JOB, NAME, TRIGGER, FakeCoordinator, Served, make_overview, make_stats, serving

runner = CliRunner()


@pytest.fixture
def flags(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name in ("URL", "TOKEN", "TOKEN_FILE", "STATE_DIR"):
        monkeypatch.delenv(f"HOLDFAST_{name}", raising=False)
    monkeypatch.setenv("HOLDFAST_TOKEN", str(served.token))
    return ["--url", served.url]


def run(*arguments: str, code: int = 0) -> str:
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result.stdout


def fails(*arguments: str, code: int = 1) -> str:
    """One line on stderr, nothing on stdout."""
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == code, (result.output, result.exception)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    return result.stderr.strip()


# ------------------------------------------------------------------------------------------------------------- reading


def test_jobs(flags: list[str]) -> None:
    lines = run("jobs", *flags).splitlines()
    assert " ".join(lines[0].split()) == "JOB NAME STATE RUNNING STARTED DURATION IN OUT LATE SKIPPED PRESSURE"
    assert lines[1].split()[:4] == [JOB, NAME, "RUNNING", "2/2"]
    assert lines[1].split()[-5:] == ["1,200", "0", "3", "5", "high"], "of the worst subtask"


def test_jobs_as_json(flags: list[str]) -> None:
    (job,) = json.loads(run("jobs", "--json", *flags))
    assert (job["jid"], job["state"]) == (JOB, "RUNNING")
    counted = {"records_in": 1_200, "records_out": 0, "late_dropped": 3, "rows_skipped": 5}
    restarts = {"restarts": 1, "restart_strategy": RestartStrategy().describe(), "restarts_at": -1}
    assert job["totals"] == {"jid": JOB, **counted, **restarts, "backpressure": "high", "as_of_ms": -1, "branch_of": ""}


def test_a_job_in_a_pause_shows_when_and_how_it_restarts(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(self: RestClient, path: str) -> dict[str, Any]:
        answer = original(self, path)
        if path == "/v1/totals":
            strategy = RestartStrategy("failure_rate", failures_per_interval_max=3)
            answer["jobs"][0] |= {"restarts": 2, "restarts_at": 1_700_000_000_000, "restart_strategy": strategy.describe()}
        if path == "/v1/jobs/overview":
            answer["jobs"][0]["state"] = "RESTARTING"
        return answer

    original = RestClient._get
    monkeypatch.setattr(RestClient, "_get", failed)
    (line,) = [line for line in run("jobs", *flags).splitlines() if line.startswith(f"{JOB}: restart 2 at 2023-11-")]
    assert line.endswith("; failure_rate: pause 1 s; a failure after 3 within 60 s ends the job")


def test_jobs_of_a_coordinator_that_has_no_totals(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(self: RestClient, path: str) -> dict[str, Any]:
        if path == "/v1/totals":
            raise NotFoundError("no such thing")
        return original(self, path)

    original = RestClient._get
    monkeypatch.setattr(RestClient, "_get", not_found)
    assert run("jobs", *flags).splitlines()[1].split()[-5:] == ["-"] * 5


def test_no_jobs(flags: list[str], coordinator: FakeCoordinator) -> None:
    coordinator.overviews = ()
    assert run("jobs", *flags) == "no jobs\n"
    assert json.loads(run("jobs", "--json", *flags)) == []


def test_checkpoints(flags: list[str]) -> None:
    output = run("checkpoints", NAME, *flags)
    assert "COMPLETED" in output
    assert "/state/chk-1" in output
    assert "expired: took too long" in output
    assert output.splitlines()[-1] == "2 completed, 1 failed, 1 in progress, 1 restored"
    assert json.loads(run("checkpoints", NAME, "--json", *flags))["counts"]["completed"] == 2


def test_only_so_many_checkpoints(flags: list[str]) -> None:
    every = json.loads(run("checkpoints", NAME, "--json", *flags))["history"]
    newest = json.loads(run("checkpoints", NAME, "--json", "--limit", "2", *flags))["history"]
    assert newest == every[:2]
    assert len(every) > 2
    lines = run("checkpoints", NAME, "--limit", "2", *flags).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == [str(each["id"]) for each in newest]
    assert lines[3] == "2 completed, 1 failed, 1 in progress, 1 restored", "all of them are counted"
    run("checkpoints", NAME, "--limit", "0", *flags, code=2)


def test_a_checkpoint_that_was_discarded_is_not_shown_as_completed(
    flags: list[str], coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = make_stats()
    gone = tuple(replace(each, discarded=each.status == "COMPLETED") for each in stats.history)
    monkeypatch.setattr(coordinator, "checkpoints", lambda job_id: replace(stats, history=gone))
    output = run("checkpoints", NAME, *flags)
    assert "COMPLETED" not in output
    assert "/state/chk-1" not in output, "there is nothing there any more"
    assert "DISCARDED" in output


@pytest.mark.parametrize("job", [JOB, JOB[:1], JOB[:31], NAME])
def test_a_job_is_named_by_id_beginning_or_name(flags: list[str], coordinator: FakeCoordinator, job: str) -> None:
    run("cancel", "--no-wait", job, *flags)
    assert ("cancel", JOB) in coordinator.calls


def test_a_name_means_the_live_job(flags: list[str], coordinator: FakeCoordinator) -> None:
    coordinator.overviews = (make_overview("FINISHED", job_id="1" * 32, start_ms=9), make_overview())
    run("cancel", "--no-wait", NAME, *flags)
    assert ("cancel", JOB) in coordinator.calls


def test_a_job_that_can_not_be_read_is_listed_with_the_reason(
    flags: list[str], coordinator: FakeCoordinator, served: Served
) -> None:
    """It is in no list of the coordinator's: who looked there would take it for gone."""
    lost = "ab" * 16
    reason = f"{lost}/submissions/1.json can't be decoded"
    coordinator.broken = {lost: reason}
    output = run("jobs", *flags)
    assert [line for line in output.splitlines() if line.startswith(f"{lost} ") and "UNREADABLE" in line]
    assert f"{lost}: UNREADABLE after 0 restarts: {reason}" in output
    assert served.json("GET", "/v1/totals")["unreadable"] == [{"jid": lost, "reason": reason}]
    assert "holdfast_jobs_unreadable 1.0" in served.request("GET", "/metrics").data.decode().splitlines()
    assert json.loads(run("jobs", "--json", *flags))[-1]["state"] == "UNREADABLE"


def test_an_ambiguous_job_is_refused(flags: list[str], coordinator: FakeCoordinator) -> None:
    coordinator.overviews = (make_overview(job_id="a1" + "0" * 30), make_overview(job_id="a2" + "0" * 30, name="other"))
    assert "stands for 2 jobs" in fails("cancel", "a", *flags, code=2)
    assert coordinator.calls == []


def test_a_job_that_another_coordinator_leads_is_found_by_its_id(
    flags: list[str], coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    """It is not in the list of the one that is asked."""
    leader = FakeCoordinator()
    with serving(leader, tmp_path) as running:
        coordinator.overviews = ()
        coordinator.error = NotLeaderError("led elsewhere", job=JOB, epoch=2, url=running.url)
        run("cancel", "--no-wait", JOB, *flags)
        assert ("cancel", JOB) in leader.calls
        assert fails("cancel", NAME, *flags) == f"holdfast: no job '{NAME}': `holdfast jobs` lists them [NotFoundError]"


def test_an_unknown_job_is_an_error(flags: list[str]) -> None:
    assert fails("checkpoints", "nothing", *flags) == "holdfast: no job 'nothing': `holdfast jobs` lists them [NotFoundError]"


# ------------------------------------------------------------------------------------------------------------- acting


def test_savepoint_waits_and_prints_the_location(flags: list[str], coordinator: FakeCoordinator, tmp_path: Path) -> None:
    coordinator.trigger = TriggerView(TRIGGER, CheckpointKind.SAVEPOINT, False, checkpoint_id=7, location="/sp/savepoint-7")
    assert run("savepoint", NAME, "--target", "s3://bucket/sp", *flags) == "/sp/savepoint-7\n"
    assert coordinator.calls[0][:5] == ("request_savepoint", JOB, "s3://bucket/sp", "CANONICAL", False)
    assert json.loads(run("savepoint", NAME, "--json", *flags)) == {"job": JOB, "location": "/sp/savepoint-7"}


def test_a_relative_target_means_the_callers_directory(
    flags: list[str], coordinator: FakeCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    coordinator.trigger = TriggerView(TRIGGER, CheckpointKind.STOP_SAVEPOINT, False, location="/x")
    run("stop", NAME, "--drain", "--target", "sp", *flags)
    assert coordinator.calls[0][:4] == ("stop", JOB, str(tmp_path / "sp"), True)


def test_a_failed_savepoint_is_an_error(flags: list[str], coordinator: FakeCoordinator) -> None:
    coordinator.trigger = TriggerView(
        TRIGGER,
        CheckpointKind.SAVEPOINT,
        False,
        failure="no savepoint directory:\nname one",
        failure_reason="no_savepoint_directory",
    )
    assert fails("savepoint", NAME, *flags) == "holdfast: no savepoint directory: name one [CheckpointFailedError]"


def test_a_savepoint_that_takes_too_long_is_an_error(flags: list[str]) -> None:
    assert "no outcome within 0.0 s" in fails("savepoint", NAME, "--timeout", "0", *flags)


def test_cancel_waits_for_the_end(flags: list[str], coordinator: FakeCoordinator) -> None:
    coordinator.state = "CANCELED"
    assert run("cancel", NAME, *flags) == "CANCELED\n"
    coordinator.state = "CANCELLING"
    assert "still CANCELLING" in fails("cancel", NAME, "--timeout", "0.01", *flags)
    assert json.loads(run("cancel", NAME, "--no-wait", "--json", *flags)) == {"job": JOB, "state": "CANCELLING"}


# ------------------------------------------------------------------------------------------------------------- failing


def test_a_typed_error_is_one_line(flags: list[str], coordinator: FakeCoordinator) -> None:
    coordinator.error = FencedError("a newer leader\nexists")
    assert fails("checkpoints", JOB, *flags) == "holdfast: a newer leader exists [FencedError]"


def test_a_wrong_token_is_one_line(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "not-the-token-at-all")
    assert fails("jobs", *flags) == "holdfast: missing or wrong bearer token [AuthenticationError]"


def test_nobody_there_is_one_line(flags: list[str]) -> None:
    assert "can't reach the coordinator at http://127.0.0.1:9" in fails("jobs", "--url", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["inspect", "~no-such-user/snapshot"], 2),
        (["jobs", "--state-dir", "~no-such-user/state"], 2),
        (["jobs", "--url", "http://127.0.0.1:9", "--token-file", "~no-such-user/token"], 2),
    ],
)
def test_home_of_nobody_is_one_line(arguments: list[str], code: int) -> None:
    assert "~no-such-user" in fails(*arguments, code=code)


def test_token_file_may_lie_in_the_callers_home(
    served: Served, flags: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "token").write_text(str(served.token))
    (tmp_path / "token").chmod(0o600)
    assert JOB in run("jobs", *flags, "--token-file", "~/token")


def test_which_coordinator_must_be_said(flags: list[str], tmp_path: Path) -> None:
    assert "--url or --state-dir" in fails("jobs", code=2)
    assert "holdfast serve" in fails("jobs", "--state-dir", str(tmp_path), code=2)


@pytest.mark.parametrize("arguments", [["jobs", "--nonsense"], ["nonsense"], ["cancel"], ["serve", "--port", "x"]])
def test_wrong_usage_exits_2(arguments: list[str]) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr


def test_checkpoint_waits_and_prints_the_id(flags: list[str], coordinator: FakeCoordinator) -> None:
    coordinator.trigger = TriggerView(TRIGGER, CheckpointKind.CHECKPOINT, False, checkpoint_id=7)
    assert run("checkpoint", NAME, *flags) == "7\n"
    assert json.loads(run("checkpoint", NAME, "--unaligned", "--aligned-timeout", "250", "--json", *flags)) == {
        "job": JOB,
        "checkpoint": 7,
    }
    run("checkpoint", NAME, "--aligned", *flags)
    asked = [call[3:] for call in coordinator.calls if call[0] == "request_checkpoint"]
    assert asked == [(), (CheckpointMode(unaligned=True, aligned_timeout_ms=250),), (CheckpointMode(unaligned=False),)]
    said = fails("checkpoint", NAME, "--aligned", "--aligned-timeout", "5", *flags, code=2)
    assert "--aligned-timeout says from when on barriers overtake, and with --aligned none does" in said
    said = fails("checkpoint", NAME, "--aligned-timeout", "5", *flags, code=2)
    assert "--aligned-timeout needs a checkpoint that may overtake: give --unaligned, too" in said, "no field of REST"


@pytest.mark.parametrize("command", ["savepoint", "stop"])
@pytest.mark.parametrize("target", ["", " "])
def test_an_empty_target_is_refused_before_anybody_is_asked(command: str, target: str) -> None:
    said = fails(command, NAME, "--target", target, "--url", "http://127.0.0.1:9", code=2)
    assert "the target directory is empty: leave --target out, or name one" in said


def test_the_list_of_drills_takes_no_id() -> None:
    assert "leave the id out" in fails("drill", NAME, "9999", "--list", "--url", "http://127.0.0.1:9", code=2)


@pytest.mark.parametrize(
    "arguments", [("token", "create", "--role", "viewer", "--expires", "-1d"), ("snapshot", "fsck", "/", "--safety-age", "-1d")]
)
def test_what_is_no_duration_names_its_option(arguments: tuple[str, ...]) -> None:
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == 2
    assert f"Invalid value for {arguments[-2]}: '-1d' is no duration" in " ".join(result.stderr.split())


@pytest.mark.parametrize("command", ["serve", "jobs", "checkpoint", "checkpoints", "savepoint", "stop", "cancel", "inspect"])
def test_every_command_has_help_and_json(command: str) -> None:
    output = run(command, "--help")
    assert "--json" in output


def test_version() -> None:
    assert run("--version").startswith("holdfast ")


# --------------------------------------------------------------------------------------------------------------- bench


def test_bench_runs_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "benchmarks"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "run.py").write_text("import sys; sys.exit(3 if sys.argv[1:] == ['--only', 'W0'] else 4)")
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "api" / "cli.py"))
    run("bench", "--only", "W0", code=3)


def test_bench_without_a_checkout_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "api" / "cli.py"))
    assert "source checkout" in fails("bench", code=2)


# --------------------------------------------------------------------------------------------------------------- words


def test_times() -> None:
    assert console.time_text(0) == "1970-01-01 00:00:00Z"
    assert console.time_text(-1) == "-"


def test_json_of_what_columns_hold(capsys: pytest.CaptureFixture[str]) -> None:
    value: dict[str, Any] = {"bytes": b"\x01\xff", "path": Path("/x")}
    console.show_json(value)
    assert json.loads(capsys.readouterr().out) == {"bytes": "01ff", "path": "/x"}


# --------------------------------------------------------------------------------------------------------------- tokens


def test_a_token_is_printed_once_and_listed_without_its_text(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    result = runner.invoke(app, ["token", "create", "--role", "viewer", "--name", "grafana", "--expires", "30d", *flags])
    assert result.exit_code == 0, result.output
    token = result.stdout.strip()
    assert token.startswith("hft_")
    assert "viewer of all jobs until 20" in result.stderr
    assert token not in result.stderr
    listing = run("token", "list", *flags)
    assert listing.splitlines()[1].split()[1:4] == ["grafana", "viewer", "all"]
    assert token.split("_", 2)[2] not in listing
    monkeypatch.setenv("HOLDFAST_TOKEN", token)
    assert run("jobs", *flags).splitlines()[1].startswith(JOB)
    assert "a token of role viewer may not operate" in fails("stop", JOB, *flags)


def test_a_revocation_is_told_as_json_too(flags: list[str]) -> None:
    issued = json.loads(run("token", "create", "--role", "viewer", "--json", *flags))
    told = json.loads(run("token", "revoke", issued["id"], "--json", *flags))
    assert told == {"id": issued["id"], "revoked": True}


def test_a_revoked_token_is_out(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    issued = json.loads(run("token", "create", "--role", "operator", "--json", *flags))
    assert run("token", "revoke", issued["id"], *flags) == f"{issued['id']} is revoked\n"
    assert "there is no token" in fails("token", "revoke", issued["id"], *flags)
    assert issued["id"] not in run("token", "list", *flags)
    monkeypatch.setenv("HOLDFAST_TOKEN", issued["token"])
    assert f"token {issued['id']} is not known here: it was revoked" in fails("jobs", *flags)
    assert issued["token"].split("_", 2)[2] not in fails("jobs", *flags)
    monkeypatch.setenv("HOLDFAST_TOKEN", "hft_no-id_at-all_x")
    assert "wrong bearer token" in fails("jobs", *flags)


def test_what_is_no_id_of_a_token_is_named_and_not_sent(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    issued = json.loads(run("token", "create", "--role", "viewer", "--json", *flags))

    def sent(*given: object, **named: object) -> None:
        raise AssertionError(f"a request was sent: {given}")

    monkeypatch.setattr(RestClient, "_call", sent)
    wrong = fails("token", "revoke", "NOT-AN-ID", *flags, code=2)
    assert "'NOT-AN-ID' is none" in wrong
    assert "as `holdfast token list` shows it" in wrong
    itself = fails("token", "revoke", issued["token"], *flags, code=2)
    assert issued["id"] in itself
    assert issued["token"].split("_", 2)[2] not in itself


def test_a_token_of_one_job_finds_it_by_name_by_id_and_by_a_beginning(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    issued = json.loads(run("token", "create", "--role", "operator", "--job", JOB, "--json", *flags))
    monkeypatch.setenv("HOLDFAST_TOKEN", issued["token"])
    for text in (JOB, JOB[:6]):
        assert "completed" in run("checkpoints", text, *flags)
    assert f"the token is for job {JOB} alone" in fails("checkpoints", "another", *flags)
    assert f"the token is for job {JOB} alone" in fails("jobs", *flags)


def test_durations_and_roles_that_are_none(flags: list[str]) -> None:
    assert "there is no role 'root'" in fails("token", "create", "--role", "root", *flags, code=2)
    result = runner.invoke(app, ["token", "create", "--role", "viewer", "--expires", "soon", *flags])
    assert result.exit_code == 2
    assert "is no duration" in result.stderr
    assert "expires" in fails("token", "create", "--role", "viewer", "--expires", "0s", *flags, code=2)


def test_a_piped_table_has_every_column_whole(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    error = "UserFunctionError: " + "no such carrier; " * 40
    rows = [("2026-11-29 16:00:00Z", 3, error, "chk-41"), ("2026-11-29 16:00:05Z", 12, "漢字", None)]
    console.show_table(("AT", "ATTEMPT", "ERROR", "RESTORED"), rows, empty="none")
    head, first, second = capsys.readouterr().out.splitlines()
    assert first == f"2026-11-29 16:00:00Z        3  {error}  chk-41"
    assert head.split() == ["AT", "ATTEMPT", "ERROR", "RESTORED"]
    assert second == f"2026-11-29 16:00:05Z       12  漢字{' ' * (len(error) - 4)}  -"


def test_a_piped_table_ends_no_line_in_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    console.show_table(("ID", "WHERE OR WHY"), [(1, "/data/" + "x" * 300), (2, "late")], empty="none")
    assert capsys.readouterr().out.splitlines() == ["ID  WHERE OR WHY", " 1  /data/" + "x" * 300, " 2  late"]


# ------------------------------------------------------------------------------------------------------------- documents

DOCS = Path(__file__).resolve().parents[2] / "docs" / "cli.md"


def test_the_documents_list_every_command() -> None:
    listed = re.findall(r"^holdfast (\w+)", DOCS.read_text(encoding="utf-8").partition("```\n\n")[0], re.MULTILINE)
    assert set(listed) >= set(get_command(app).commands)  # type: ignore[attr-defined]


def test_the_documents_have_every_option_of_serve() -> None:
    section = DOCS.read_text(encoding="utf-8").partition("\n## serve\n")[2].partition("\n## ")[0]
    options = {name for each in get_command(app).commands["serve"].params for name in each.opts}  # type: ignore[attr-defined]
    assert {name for name in options if f"`{name}`" not in section} <= {"--json"}
