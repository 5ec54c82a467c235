"""Drills and costs over REST, by the client and on the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from holdfast.api.cli.main import app
from holdfast.api.cli.snapshot_life import show_cost
from holdfast.api.client import RestClient
from holdfast.api.settings import server_settings
from holdfast.coordinator.drills.records import DrillReport
from holdfast.coordinator.ownership.cost import (
    DELETES_BESIDE_FILES,
    GETS,
    LISTS,
    PUTS_BESIDE_FILES,
    CheckpointCost,
    Cost,
    Requests,
    decode_prices,
    priced,
)
from holdfast.statebackends.errors import InvalidConfigError
from tests.api.fakes import JOB, NAME, TOKEN, FakeCoordinator, Served, make_drill, serving

ROOT = Path(__file__).resolve().parents[2]
DRILLS = f"/v1/jobs/{JOB}/drills"
PRICES = 'name = "test"\ncurrency = "EUR"\nstorage_gib_month = 1.0\nputs_per_1000 = 1.0\n'


@pytest.fixture
def coordinator() -> FakeCoordinator:
    return FakeCoordinator()


@pytest.fixture
def served(coordinator: FakeCoordinator, tmp_path: Path) -> Iterator[Served]:
    with serving(coordinator, tmp_path) as running:
        yield running


@pytest.fixture
def run(served: Served, tmp_path: Path) -> Any:
    token = tmp_path / "a-token"
    token.write_text(TOKEN)
    token.chmod(0o600)

    def invoke(command: str, *arguments: str) -> Any:
        options = ["--url", served.url, "--token-file", str(token)]
        return CliRunner().invoke(app, [command, NAME, *arguments, *options])

    return invoke


def test_a_drill_is_begun_and_listed(served: Served, coordinator: FakeCoordinator) -> None:
    begun = served.json("POST", DRILLS, {}, status=202)
    assert (begun["state"], begun["checkpoint_id"], begun["duration_ms"], begun["problems"]) == ("running", 7, -1, [])
    assert served.json("POST", DRILLS, {"checkpoint": 9}, status=202)["checkpoint_id"] == 9
    assert [each["checkpoint_id"] for each in served.json("GET", DRILLS)["drills"]] == [9, 7]
    for body in ({"checkpoint": 0}, {"checkpoint": "7"}, {"other": 1}, b"["):
        assert served.request("POST", DRILLS, body).status == 400
    assert RestClient(served.url, TOKEN, reconnect_timeout_s=0).drill(JOB)["state"] == "running"


@pytest.mark.parametrize(
    ("report", "code", "text"),
    [
        (DrillReport(2, 3, 4_000, 500), 0, "checkpoint 7 passed: 4,000 rows of 3 states, 500 B"),
        (DrillReport(2, 3, 40, 500, 21, ("a is damaged",)), 1, "a is damaged\nand 20 more problems"),
        (DrillReport(error="storage is away"), 3, "nothing was found out: storage is away"),
    ],
)
def test_the_outcome_of_a_drill_is_the_exit_code(
    run: Any, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch, report: DrillReport, code: int, text: str
) -> None:
    monkeypatch.setattr(coordinator, "drills", lambda job_id: (make_drill(7).ended(report, 9_000),))
    found = run("drill")
    assert found.exit_code == code, found.output
    assert text in found.output
    listed = run("drill", "--list")
    assert listed.exit_code == 0
    assert "user" in listed.output


def test_a_drill_need_not_be_waited_for(run: Any) -> None:
    assert "has begun" in run("drill", "7", "--no-wait").output
    late = run("drill", "--timeout", "0")
    assert (late.exit_code, "no outcome within 0.0 s" in late.output) == (3, True), "1 would say that problems were found"


def test_cost_is_one_number_everywhere(run: Any, served: Served, tmp_path: Path) -> None:
    found = served.json("GET", f"/v1/jobs/{JOB}/cost")
    assert (found["total_size"], found["files"], found["small_files"], found["money"]) == (4 << 30, 12, 6, None)
    assert found["checkpoints"] == [
        {
            "checkpoint_id": 7,
            "kind": "checkpoint",
            "labels": ["x"],
            "exclusive_size": 2 << 30,
            "shared_size": 1 << 30,
            "files": 10,
            "small_files": 4,
        }
    ]
    assert json.loads(run("cost", "--json").output) == found
    shown = run("cost").output
    assert "4.0 GiB in 12 files, 6 small: exclusive 2.0 GiB, shared 1.0 GiB, savepoint 0 B, other 1.0 GiB" in shown
    assert "about 600 puts, 180 gets, 60 lists, 500 deletes an hour, of 60 checkpoints" in shown
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES)
    assert "442.00 EUR a month: storage 4.00, requests 438.00 (prices: test)" in run("cost", "--prices", str(prices)).output


def test_prices_of_the_service(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES)
    settings = server_settings({"HOLDFAST_PRICES": str(prices)}, state_dir=tmp_path / "state", no_token=True)
    assert settings.prices is not None
    with serving(coordinator, tmp_path, prices=settings.prices) as served:
        money = served.json("GET", f"/v1/jobs/{JOB}/cost")["money"]
    assert (money["total_per_month"], money["currency"], money["prices"]) == (442.0, "EUR", "test")
    prices.write_text("currency = 5")
    for path in (prices, tmp_path / "none"):
        with pytest.raises(InvalidConfigError, match=str(path)):
            server_settings({}, state_dir=tmp_path / "state", no_token=True, prices=path)


def test_the_example_of_the_page_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "snapshot-life.md").read_text()
    (shown,) = re.findall(r"```\n\$ holdfast cost flights --prices prices.toml\n(.*?)```", page, re.DOTALL)
    (prices,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    own, shared, other, small = 1_258_291, 87_031_808, 14_336, 98_304
    written, rate = 12, 360.0
    cost = Cost(
        JOB, 1, own + shared + other, own, shared, 0, other, 31, 16, small,
        (CheckpointCost(41, "checkpoint", ("before-upgrade",), own, shared, 24, 9),),
        Requests(rate, rate * (written + PUTS_BESIDE_FILES), rate * GETS, rate * LISTS, rate * (written + DELETES_BESIDE_FILES)),
    )  # fmt: skip
    show_cost(msgspec.to_builtins(priced(cost, decode_prices(prices.encode(), "page"))), as_json=False)
    assert capsys.readouterr().out == shown
