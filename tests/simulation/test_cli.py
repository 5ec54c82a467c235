"""The simulator's command line: what it prints and refuses, its exit codes. Runs come to what their workload is named after."""

from __future__ import annotations

import json
import random
import re
from html import unescape
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import holdfast
from holdfast.chaos import cli, page, report, sabotage
from holdfast.chaos.campaign import coverage
from holdfast.chaos.campaign import user_runs as userruns
from holdfast.chaos.campaign.campaign import Finding
from holdfast.chaos.campaign.proof import Verdict
from holdfast.chaos.campaign.summary import CoverageReport, Failure, Tally
from holdfast.chaos.checkers.sometimes import SOMETIMES
from holdfast.chaos.cluster import world
from holdfast.chaos.faults.faults import FAMILIES, KINDS, Fault, decode_plan, encode_plan
from holdfast.chaos.faults.plan import draw_plan
from holdfast.chaos.sabotage import SABOTAGES
from holdfast.chaos.workloads import ON_DEMAND, WORKLOADS
from holdfast.chaos.workloads.scenario import Scenario, Workload
from tests.simulation import fakes

runner = CliRunner()
SABOTAGE = "unblocked_channel"


@pytest.fixture(autouse=True)
def fake_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake runs under the names of real workloads, and beside them."""

    def make(_: Any) -> Any:
        pytest.fail("a fake run makes no scenario")

    for name in ("good", "broken", "always", "raising", "printing", *fakes.DEPENDENCES):
        monkeypatch.setitem(WORKLOADS, name, Workload(name, f"comes to what it is named after: {name}", make))
    monkeypatch.setattr(cli, "ENTRY", fakes.ENTRY)
    monkeypatch.setattr(world, "RunRequest", fakes.FakeRequest)
    monkeypatch.setattr(userruns, "run_seed", fakes.run_seed)


def call(*arguments: str, code: int = 0) -> str:
    result = runner.invoke(holdfast.command_line(), ["chaos", *arguments])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result.stdout


def refused(*arguments: str) -> str:
    """One line on stderr, nothing on stdout, exit code 2."""
    result = runner.invoke(holdfast.command_line(), ["chaos", *arguments])
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr


def sim(*arguments: str, code: int = 0) -> str:
    return call("sim", "--jobs", "2", "--no-coverage", *arguments, code=code)


def paragraphs(output: str) -> dict[str, str]:
    """Label -> text of the summary."""
    found: dict[str, str] = {}
    label = ""
    for line in output.splitlines():
        if line[:13].strip() and line[13:14].strip() and line[12] == " ":
            label = line[:13].strip()
            found[label] = line[13:]
        elif label and line.startswith(" " * 13):
            found[label] += " " + line.strip()
    return found


# ----------------------------------------------------------------------------------------------------------------- sim


def test_a_campaign_without_violations() -> None:
    output = sim("--seeds", "20", "--workload", "good", "--workload", "printing")
    assert output.startswith("20 seeds from 0 over 2 workloads in ")
    lines = paragraphs(output)
    assert lines["violations"] == "0"
    assert lines["faults"] == "120 planned, 48 hit, of 1 kind"
    assert lines["crashes"] == "48 at 3 distinct points"
    assert lines["checkpoints"] == "200 completed"
    assert lines["no fault hit"] == "in 4 runs: seeds 0, 5, 10, 15"
    assert lines["visited"] == f"1 of {len(SOMETIMES)} dangerous states"
    assert "minute and core" in lines["runs"]
    assert "coverage" not in lines


def test_many_runs_say_what_they_never_did() -> None:
    lines = paragraphs(sim("--seeds", "100", "--workload", "good", "--faults", "kill_worker"))
    assert lines["visited"].startswith(f"1 of {len(SOMETIMES)} dangerous states; never: aborted_while_collecting, ")


DEPENDS = (
    "the output of sink 'out' depends on the order of arrival, or on time: in two runs without any fault operator 'sum' gave other "
    "rows for key=1, {'key': 1, 'n': 2} in one and {'key': 1, 'n': 3} in the other. "
)


def test_what_was_not_judged_is_said_and_has_an_exit_code_of_its_own() -> None:
    lines = paragraphs(sim("--seeds", "4", "--workload", "unjudged", code=3))
    assert lines["violations"] == "0"
    assert lines["NOT JUDGED"] == (
        f"{DEPENDS}Nothing of it was compared: say with hf.chaos.expect(...) what must hold all the same"
    )
    lines = paragraphs(sim("--seeds", "4", "--workload", "unjudged_once", code=3))
    assert "in two runs without any fault (at parallelism 4) operator 'sum'" in lines["NOT JUDGED"]
    assert "It was not compared in seed 2: say with" in lines["NOT JUDGED"]


def test_what_is_judged_by_what_its_user_says_passes() -> None:
    lines = paragraphs(sim("--seeds", "4", "--workload", "judged"))
    assert lines["depends"] == f"{DEPENDS}It is judged by what expect() says"
    found = msgspec.json.decode(sim("--seeds", "4", "--workload", "judged", "--json"))
    assert found["summary"]["dependences"]["judged"][0]["difference"]["key"] == "key=1"


def test_a_violation_counts_before_what_was_not_judged() -> None:
    sim("--seeds", "8", "--workload", "unjudged", "--workload", "always", code=1)


def test_a_replay_says_what_depends() -> None:
    assert f"depends      {DEPENDS[:40]}" in call("replay", "2", "--workload", "judged")


def test_a_failure_ends_with_the_command_that_replays_it() -> None:
    output = sim("--seeds", "9", "--workload", "broken", code=1)
    lines = output.splitlines()
    assert lines[0] == "seed 3 of broken broke I5 at 420 ms: after 2 faults"
    assert lines[1].startswith("  I5: ")
    assert lines[2].startswith("  it takes 2 of its 6 faults (")
    assert lines[3:5] == ["     1  kill_worker worker-1 at 100 ms", "     4  kill_worker worker-4 at 400 ms"]
    again = next(line for line in lines if line.startswith("  again: "))
    assert again == "  again: holdfast chaos replay 3 --workload broken --only 1,4 --trace 3.trace"
    events = [line for line in lines if "event" in line and "nobody" in line]
    assert len(events) == 3
    assert len({line.index("nobody") for line in events}) == 1
    assert paragraphs(output)["violations"] == "1 (I5 in 1 run)"


def test_the_command_that_replays_fails_in_the_same_way(tmp_path: Path) -> None:
    trace = tmp_path / "3.trace"
    output = call("replay", "3", "--workload", "broken", "--only", "1,4", "--trace", str(trace), code=1)
    assert output.splitlines()[-1] == "broke I5 at 420 ms: after 2 faults"
    assert len(trace.read_text().splitlines()) == 3


def test_a_failure_is_told_at_once_on_stderr_and_in_full_at_the_end() -> None:
    arguments = ["chaos", "sim", "--jobs", "1", "--no-coverage", "--no-minimise", "--seeds", "4", "--workload", "broken"]
    result = runner.invoke(holdfast.command_line(), arguments)
    assert result.stderr == (
        "seed 3 of broken broke I5: after 6 faults; again: holdfast chaos replay 3 --workload broken --trace 3.trace\n"
    )
    assert result.stdout.startswith("seed 3 of broken broke I5 at 420 ms: after 6 faults\n  I5: ")
    assert runner.invoke(holdfast.command_line(), [*arguments, "--json"]).stderr == ""


def test_the_line_of_a_failure_names_the_error_of_a_traceback() -> None:
    assert report._in_brief("Traceback (most recent call last):\n  File ...\nKeyError: 'x'\n") == "KeyError: 'x'"
    assert report._in_brief("worker-1: KeyError: 'x'\nTraceback ...") == "worker-1: KeyError: 'x'"
    assert len(report._in_brief("word " * 100)) <= 160
    assert report._in_brief("") == ""


def test_a_campaign_as_json() -> None:
    found = json.loads(sim("--seeds", "9", "--workload", "broken", "--json", code=1))
    assert found["summary"]["violations"] == 1
    (failure,) = found["failures"]
    assert failure["seed"] == 3
    assert failure["faults"]["4"]["target"] == "worker-4"
    assert found["coverage"] is None


def test_a_campaign_as_a_page_that_needs_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    text = sim("--seeds", "9", "--workload", "broken", "--html", str(file), code=1)
    html = file.read_text()
    shown = unescape(html)
    for label, told in paragraphs(text[text.rindex("violations ") :]).items():
        assert f"<th scope=\"row\">{label}</th><td>{told}</td>" in shown, label
    assert "1 of 9 runs broke an invariant" in shown
    assert "holdfast chaos replay 3 --workload broken" in shown
    assert "worker-4" in shown
    assert not re.search(r"<script|https?://|\b(?:src|href)=", html)
    assert "default-src 'none'" in html


def test_the_page_runs_nothing_of_what_it_tells() -> None:
    markup = "<img src=x onerror=alert(1)>"
    failure = Failure(3, markup, markup, markup, markup, 1, {4: Fault(markup, markup)}, 6, True, 2, (markup,), False, markup)
    summary = msgspec.structs.replace(Tally(()).summary(start=0, seconds=1.0, cores=1), violations=1, workloads={markup: 1})
    told = {"command": markup, "made": markup, "version": "1"}
    for html in (
        page.render_finding(Finding(summary, (failure,)), None, {markup: markup}, **told),
        page.render_verdicts([Verdict(markup, 0, 3, markup, (markup,), markup)], **told),
    ):
        assert "<img" not in html
        assert "&lt;img src=x" in html


def test_a_page_that_can_t_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    assert "--html" in refused("sim", "--seeds", "1", "--workload", "good", "--html", str(tmp_path / "none" / "x.html"))


def test_every_sabotage_as_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sabotage, "SABOTAGES", {SABOTAGE: SABOTAGES[SABOTAGE]})
    found = tmp_path / "proof.html"
    for workload, outcome, code in (("always", "1 of 1 sabotages caught", 0), ("good", "0 of 1 sabotages caught", 1)):
        sim("--seeds", "1", "--workload", workload, "--sabotage", "all", "--html", str(found), code=code)
        assert outcome in found.read_text()


def test_coverage_is_part_of_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def measure(requests: list[Any], **_: Any) -> CoverageReport:
        asked.extend(request.seed for request in requests)
        return CoverageReport(len(requests), 71.5, {"barriers": 80.0}, ("holdfast.barriers.transport.port",))

    monkeypatch.setattr(coverage, "measure", measure)
    output = call("sim", "--seeds", "20", "--start", "10", "--workload", "good", "--jobs", "1")
    assert asked == [10, 11]
    assert paragraphs(output)["coverage"] == "71.5 % of branches in 2 runs (barriers 80.0 %)"
    assert paragraphs(output)["never ran"] == "holdfast.barriers.transport.port"


def test_an_interruption_while_measuring_coverage_leaves_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(requests: list[Any], **_: Any) -> CoverageReport:
        raise KeyboardInterrupt

    monkeypatch.setattr(coverage, "measure", measure)
    assert "\ncoverage" not in call("sim", "--seeds", "3", "--workload", "good", "--jobs", "1")


def test_a_sabotage_that_is_caught_is_a_failure() -> None:
    output = sim("--seeds", "50", "--workload", "broken", "--sabotage", SABOTAGE, "--no-minimise", code=1)
    assert paragraphs(output)["sabotage"] == f"{SABOTAGE}: caught after 4 seeds"
    assert f"--sabotage {SABOTAGE}" in output


def test_a_sabotage_that_is_not_caught_says_so() -> None:
    output = sim("--seeds", "5", "--workload", "good", "--sabotage", SABOTAGE)
    assert paragraphs(output)["sabotage"] == f"{SABOTAGE}: NOT caught"


def test_all_sabotages_must_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    some = dict(sorted(SABOTAGES.items())[:3])
    monkeypatch.setattr(sabotage, "SABOTAGES", some)
    output = sim("--seeds", "2", "--workload", "always", "--sabotage", "all")
    assert output.splitlines()[-1] == "3 of 3 sabotages caught"
    output = sim("--seeds", "1", "--workload", "good", "--sabotage", "all", code=1)
    assert output.splitlines()[-1] == "0 of 3 sabotages caught"
    verdicts = json.loads(sim("--seeds", "1", "--workload", "always", "--sabotage", "all", "--json"))
    assert [verdict["sabotage"] for verdict in verdicts] == list(some)


def test_it_stops_after_a_few_failures() -> None:
    output = sim("--seeds", "500", "--workload", "always", "--no-minimise", code=1)
    assert f"\n{cli.STOP_AFTER} seeds from 0" in output
    assert "\n8 seeds from 0" in sim("--seeds", "8", "--workload", "always", "--stop-after", "0", "--no-minimise", code=1)


def test_determinism_is_checked_on_request() -> None:
    assert paragraphs(sim("--seeds", "2", "--workload", "good", "--check-determinism"))["violations"] == "0"


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--workload", "nothing"), ("there is no workload 'nothing'", "counter")),
        (("--faults", "nothing"), ("there is no fault 'nothing'", "crashes", "kill_worker")),
        (("--faults", ","), ("no fault is named", "crashes")),
        (("--faults", "@missing.json"), ("missing.json", "can't be read")),
        (("--sabotage", "nothing"), ("there is no sabotage 'nothing'", SABOTAGE)),
        (("--backend", "nothing"), ("there is no state backend 'nothing'", "rocksdb")),
        (("--seeds", "0"), ("--seeds must be at least 1, got 0",)),
        (("--start", "-1"), ("--start must be at least 0, got -1",)),
        (("--jobs", "0"), ("--jobs must be at least 1",)),
        (("--stop-after", "-1"), ("--stop-after must be at least 0",)),
        (("--seed-timeout", "0"), ("--seed-timeout must be 0.001 to 86400 seconds, got 0",)),
        (("--seed-timeout", "nan"), ("--seed-timeout must be", "got nan")),
        (("--seed-timeout", "inf"), ("--seed-timeout must be", "got inf")),
    ],
)
def test_bad_input_is_one_line_that_names_the_choices(arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    error = refused("sim", *arguments)
    assert all(part in error for part in parts)
    assert error.endswith("[InvalidConfigError]\n")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("[", "is not a plan of faults"),
        ('[{"kind": "kill_worker", "when": 3}]', "unknown field `when`"),
        ('[{"kind": "nothing", "at_ms": 3}]', "there is no fault 'nothing'; choose from kill_worker"),
        ('[{"kind": "kill_worker"}]', "fault 0 (kill_worker) needs at_ms or on"),
        ('[{"kind": "kill_worker", "on": "nowhere.snapshot."}]', "fault 0 (kill_worker): no point begins with 'nowhere.snapshot.'"),
        ('[{"kind": "kill_worker", "at_ms": 3, "target": "moon"}]', "has the target worker-<slot>, or workers, not 'moon'"),
        ('[{"kind": "drop", "at_ms": 3, "duration_ms": 9, "target": "akcs"}]', "register, acks, states"),
        ('[{"kind": "cut_link", "at_ms": 3, "target": "0-"}]', "has the target <slot>-<slot>, not '0-'"),
        ('[{"kind": "store_lies", "at_ms": 3, "duration_ms": 9, "target": "Put"}]', "not 'Put'"),
        ('[{"kind": "clock_jump", "at_ms": 3, "target": "host"}]', "coordinator, driver, worker-<slot>, or workers, not 'host'"),
        ('[{"kind": "rescale", "at_ms": 3}]', "fault 0 (rescale) needs an amount of at least 1: new parallelism"),
        ('[{"kind": "delay", "at_ms": 3, "duration_ms": 9, "amount": -4}]', "an amount of at least 0: ms"),
    ],
)
def test_a_malformed_plan_is_refused(tmp_path: Path, content: str, part: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    for arguments in (("sim", "--faults", f"@{path}"), ("replay", "1", "--plan", str(path))):
        assert part in refused(*arguments, "--workload", "good")


def test_whatever_a_seed_draws_is_a_plan_that_a_file_can_hold() -> None:
    scenario = Scenario(plan=lambda _: pytest.fail("not built"), records=1, sinks=(), operators=("mine",))
    for seed in range(300):
        plan = draw_plan(random.Random(seed), tuple(KINDS), scenario, slots=3)
        assert decode_plan(encode_plan(plan), "plan") == plan


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("-3",), "No such option"),
        (("--", "-3"), "SEED must be at least 0"),
        (("3", "--only", "6"), "the plan has 6 faults, counted from 0"),
        (("3", "--only", "one"), "--only takes numbers of faults"),
        (("3", "--plan", "a", "--faults", "b"), "give --plan or --faults, not both"),
        (("3", "--events", "-1"), "--events must be at least 0"),
        (("3", "--sabotage", "all"), "--sabotage all is for sim"),
        (("3", "--trace", "missing/3.trace"), "--trace missing/3.trace can't be written: No such file"),
        (("3", "--save-plan", "missing/plan.json"), "--save-plan missing/plan.json can't be written: No such file"),
    ],
)
def test_a_replay_that_makes_no_sense_is_refused(arguments: tuple[str, ...], part: str) -> None:
    result = runner.invoke(holdfast.command_line(), ["chaos", "replay", "--workload", "good", *arguments])
    assert result.exit_code == 2
    assert part in result.stderr


# -------------------------------------------------------------------------------------------------------------- replay


def test_a_replay_shows_the_run_and_which_faults_hit() -> None:
    lines = call("replay", "4", "--workload", "good", "--events", "2").splitlines()
    assert [line.split()[-2] for line in lines[:2]] == ["400", "500"]
    assert "   0  hit     kill_worker worker-0 at 0 ms" in lines
    assert "   1  no hit  kill_worker worker-1 at 100 ms" in lines
    assert lines[-1] == "no violation"


def test_a_replay_without_a_fault_that_hit_says_so() -> None:
    assert call("replay", "5", "--workload", "good").splitlines()[-1] == "no violation, and no fault hit"


def test_a_replay_as_json() -> None:
    found = json.loads(call("replay", "3", "--workload", "broken", "--events", "1", "--json", code=1))
    assert found["result"]["violations"][0]["invariant"] == "I5"
    assert len(found["events"]) == 1


def test_a_plan_can_be_saved_and_given_again(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    call("replay", "3", "--workload", "broken", "--only", "1,4", "--save-plan", str(path), code=1)
    assert decode_plan(path.read_bytes(), "plan") == (fakes.PLAN[1], fakes.PLAN[4])
    call("replay", "3", "--workload", "broken", "--plan", str(path), code=1)
    path.write_bytes(encode_plan(()))
    call("replay", "3", "--workload", "broken", "--faults", f"@{path}")
    call("replay", "3", "--workload", "broken", "--only", "none")


# ---------------------------------------------------------------------------------------------------------------- list


def test_lists_have_a_name_a_line() -> None:
    lines = call("list", "faults").splitlines()
    assert [line.split()[0] for line in lines] == [*FAMILIES, *KINDS]
    assert all(len(line.split()) > 2 for line in lines)
    assert [line.split()[0] for line in call("list", "workloads").splitlines()] == [*WORKLOADS, *ON_DEMAND]
    assert [line.split()[0] for line in call("list", "sabotages").splitlines()] == list(SABOTAGES)
    assert [line.split()[0] for line in call("list", "sometimes").splitlines()] == list(SOMETIMES)
    assert {"I1", "I5", "determinism"} <= {line.split()[0] for line in call("list", "invariants").splitlines()}


def test_a_list_as_json() -> None:
    found = json.loads(call("list", "faults", "--json"))
    assert {"name", "meaning"} == set(found[0])


def test_an_unknown_list_names_the_choices() -> None:
    assert "choose from workloads, faults, sabotages, invariants, sometimes" in refused("list", "nothing")
