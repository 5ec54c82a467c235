"""Metrics by name: docs/metrics.md lists what the code exports, and alert rules and dashboard ask for nothing else."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from types import ModuleType
from typing import Any

import promql_parser
import pytest
import typer
import yaml

from holdfast.api.cli.main import app
from holdfast.api.routes.service import metrics
from tests.api.fakes import FakeCoordinator, Served, make_overview
from tests.api.test_document_links import anchors
from tests.harness.installed import ROOT
from tests.harness.promtool import run_promtool
from tests.harness.scripts import load_script

RULES = ROOT / "deploy" / "prometheus" / "holdfast.rules.yml"
DOCS_URL = "https://docs.example.org/holdfast"
DASHBOARD = ROOT / "deploy" / "grafana" / "holdfast.json"
ADDED_BY_PROMETHEUS = {"job", "instance", "le"}
OF_THE_PROCESS = {"process_resident_memory_bytes", "process_open_fds", "process_max_fds", "up"}


@cache
def generator() -> ModuleType:
    return load_script("metrics_page")


def exported() -> dict[str, set[str]]:
    """Name of a sample -> its labels."""
    return {name: set(row.labels) for row in generator().rows() for name in row.samples}


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def expressions() -> list[tuple[str, str]]:
    """Where from, and the query."""
    asked = [(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]
    return [(rule["alert"], rule["expr"]) for rule in rules()] + asked


def unknown(expression: str) -> list[str]:
    """Metrics that nobody exports, and labels of metrics that they do not have."""
    known = exported()
    wrong = []
    for name, matchers in re.findall(r"\b((?:holdfast|process)_\w+|up)\b(?:\{([^}]*)\})?", expression):
        if name not in known and name not in OF_THE_PROCESS:
            wrong.append(name)
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) - ADDED_BY_PROMETHEUS
        wrong += [f"{name}{{{label}}}" for label in sorted(labels - known.get(name, set()))]
    every = {label for labels in known.values() for label in labels} | ADDED_BY_PROMETHEUS
    grouped = re.findall(r"\b(?:by|on|without)\s*\(([^)]*)\)", expression)
    return wrong + [label for each in grouped for label in re.findall(r"\w+", each) if label not in every]


def test_the_page_lists_what_the_code_exports() -> None:
    page = generator()
    assert page.PAGE.read_text() == page.page(), "run .venv/bin/python scripts/metrics_page.py"


def test_a_scrape_shows_nothing_that_the_page_does_not_list(served: Served) -> None:
    served.request("GET", "/v1/jobs/overview")
    text = served.request("GET", "/metrics").data.decode()
    shown = set(re.findall(r"^(\w+)[{ ]", text, re.MULTILINE))
    created = {name for name in shown if name.endswith("_created")}  # of the client library: when a counter began
    assert {name for name in shown - created if not name.startswith("process_")} <= set(exported())
    assert {f"holdfast_{name}" for name in ("ready", "build_info", "last_checkpoint_timestamp_seconds", "job_state")} <= shown


def test_prometheus_finds_nothing_wrong_with_a_scrape(served: Served) -> None:
    """But one name: that of what users count themselves, by a label, could not be told otherwise."""
    served.request("GET", "/v1/jobs/overview")
    text = served.request("GET", "/metrics").data.decode()
    named = "holdfast_user_counter_total metric name should not include type 'counter'"
    assert set(run_promtool("check", "metrics", text=text)[1].split("\n")) <= {named, ""}
    assert "holdfast_ready" in run_promtool("check", "metrics", text=text.replace("# HELP holdfast_ready", "# holdfast_ready"))[1]


@pytest.mark.parametrize(("origin", "expression"), expressions())
def test_queries_ask_for_metrics_and_labels_that_exist(origin: str, expression: str) -> None:
    assert unknown(expression) == [], origin


@pytest.mark.parametrize(("origin", "expression"), expressions())
def test_queries_are_promql(origin: str, expression: str) -> None:
    promql_parser.parse(expression.replace("$__rate_interval", "5m").replace("$job", "flights"))


def test_a_metric_or_label_that_is_gone_is_seen() -> None:
    asked = 'sum by (team) (rate(holdfast_gone_total[5m])) + holdfast_job_state{flavour="x", state="FAILED"} + up'
    assert unknown(asked) == ["holdfast_gone_total", "holdfast_job_state{flavour}", "team"]


def test_each_alert_says_how_urgent_it_is_and_where_its_runbook_is() -> None:
    headings = anchors(ROOT / "docs" / "runbook.md")
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) >= 15
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (page, anchor in headings) == (f"{DOCS_URL}/runbook.md", True), rule["alert"]


def test_the_place_of_the_runbook_is_named_once_for_all_alerts() -> None:
    """What a pager opens has to be a URL, and where users keep the page they alone know: a command puts it in."""
    for page in (RULES, ROOT / "docs" / "observability.md"):
        assert f"sed -i 's|{DOCS_URL}|https://" in page.read_text(), page


def test_each_command_of_the_runbook_exists() -> None:
    """The command and its options; what they print is tested elsewhere."""
    text = (ROOT / "docs" / "runbook.md").read_text()
    named = re.findall(r"^holdfast [^#\n]*|(?<=`)holdfast [^`]*(?=`)", text, re.MULTILINE)
    assert len(named) >= 15
    wrong = [line for line in named if not has_command(line.split()[1:])]
    assert wrong == []
    assert not has_command(["fsck", "DIR"])
    assert not has_command(["status", "JOB", "--whatever"])


TEXTS = re.compile(r"(?<=`)holdfast [a-z][^`\n]*(?=`)")
"""Commands that a page, or a text of the program, names."""
OTHERS = ("holdfast chaos", "holdfast bench")
"""Commands with parsers of their own."""


def test_each_command_that_docs_and_texts_of_the_program_name_exists() -> None:
    pages = {path: path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]}
    packages = ("api", "barriers", "chaos", "coordinator", "operators", "statebackends")
    modules = {path: _literals(path.read_text()) for package in packages for path in (ROOT / package).rglob("*.py")}
    found = [(path.name, line) for path, text in {**pages, **modules}.items() for line in TEXTS.findall(text)]
    assert len(found) >= 100
    assert [(name, line) for name, line in found if not line.startswith(OTHERS) and not has_command(line.split()[1:])] == []


def _literals(source: str) -> str:
    """Texts of a module, of which parts that follow each other are one."""
    if "`holdfast" not in source:
        return ""
    nodes = ast.walk(ast.parse(source))
    return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def has_command(words: list[str]) -> bool:
    command: Any = typer.main.get_command(app)
    while words and hasattr(command, "commands"):
        command = command.commands.get(words.pop(0))
    options = {option for parameter in getattr(command, "params", ()) for option in parameter.opts}
    return command is not None and {word for word in words if word.startswith("--")} <= options


def test_panels_of_the_dashboard_have_places_of_their_own() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels()]
    assert len(places) == len(set(places)) >= 12
    assert len({panel["id"] for panel in panels()}) == len(places)
    assert {panel["datasource"]["uid"] for panel in panels()} == {"${datasource}"}


def left_out(service: FakeCoordinator) -> dict[str, float]:
    families = {family.name: family for family in metrics.CoordinatorCollector(service).collect()}
    return {sample.labels["kind"]: sample.value for sample in families["holdfast_metrics_left_out"].samples}


def test_what_the_bounds_leave_out_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = tuple(make_overview(job_id=f"{number:032x}", start_ms=number) for number in range(5))
    assert set(left_out(FakeCoordinator(overviews=jobs)).values()) == {0}
    monkeypatch.setattr(metrics, "JOBS_MAX", 4)
    monkeypatch.setattr(metrics, "SUBTASKS_MAX", 3)
    monkeypatch.setattr(metrics, "OPERATORS_MAX", 0)
    monkeypatch.setattr(metrics, "USER_COUNTERS_MAX", 0)
    counted = left_out(FakeCoordinator(overviews=jobs))
    assert (counted["jobs"], counted["subtasks"]) == (1, 5)
    assert counted["operators"] > 0
