"""What the runs of a campaign did not touch is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.chaos.campaign import coverage
from holdfast.chaos.campaign.coverage import MISSING, has_functions, measure, report, sample
from tests.simulation.fakes import ENTRY, make_request

GROUPS = "tests.simulation.fakes:run_keygroups"


@pytest.mark.parametrize(
    ("source", "runs"),
    [
        ("X = 1\nclass Record:\n    x: int\n", False),
        (
            "class Port:\n    def send(self) -> None:\n        '''Send.'''\n    def at(self) -> int: ...\n",
            False,
        ),
        ("def f():\n    return 1\n", True),
        ("class A:\n    async def f(self):\n        await self\n", True),
    ],
)
def test_a_module_without_functions_has_nothing_to_run(source: str, runs: bool) -> None:
    assert has_functions(source) is runs


def test_a_sample_holds_every_kind_of_run_and_is_bounded() -> None:
    assert sample(range(5, 105), (5, 60)) == [5, 60, *range(6, 14)]
    assert sample(range(5, 105), tuple(range(5, 25))) == list(range(5, 25))
    assert len(sample(range(100_000), tuple(range(50)))) == coverage.RUNS_MAX
    assert sample(range(5, 8), (5, 7)) == [5, 7]


def test_modules_that_never_ran_are_listed(tmp_path: Path) -> None:
    ran, idle, records = (tmp_path / name for name in ("ran.py", "idle.py", "records.py"))
    for path in (ran, idle):
        path.write_text("def f(x):\n    return 1 if x else 2\n")
    records.write_text("X = 1\n")
    modules = {"holdfast.barriers.ran": ran, "holdfast.barriers.idle": idle, "holdfast.operators.records": records}
    figures: dict[str, dict[str, Any]] = {
        str(ran): {"summary": {"covered_branches": 3, "num_branches": 4}, "executed_lines": [2]},
        str(idle): {"summary": {"covered_branches": 0, "num_branches": 2}, "executed_lines": []},
    }
    found = report(modules, figures, 7)
    assert found.never_ran == ("holdfast.barriers.idle",)
    assert (found.runs, found.branches_percent) == (7, 50.0)
    assert found.packages["barriers"] == 50.0


def test_only_what_runs_after_the_imports_counts() -> None:
    found = measure([make_request(seed) for seed in range(3)], limit_s=60, entry=GROUPS, packages=("statebackends", "barriers"))
    assert found.unavailable == ""
    assert found.runs == 3
    assert "holdfast.statebackends.keygroups" not in found.never_ran
    idle = {
        "holdfast.barriers.alignment.aligner",
        "holdfast.statebackends.snapshot.parts",
    }
    assert idle <= set(found.never_ran)
    assert 0 < found.packages["statebackends"] < 50
    assert found.packages["barriers"] == 0


def test_a_run_that_does_not_end_is_told() -> None:
    found = measure([make_request(1), make_request(3, "hanging")], limit_s=0.2, entry=ENTRY, packages=("barriers",))
    assert found.unavailable == "a run under coverage did not end"


def test_what_goes_wrong_is_said_in_the_report() -> None:
    found = measure([make_request(1)], limit_s=60, entry="tests.simulation.fakes:nothing")
    assert found.unavailable.startswith("its process ended with code 1: AttributeError")


def test_without_the_library_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "find_spec", lambda name: None)
    assert measure([make_request(1)], limit_s=60).unavailable == MISSING
