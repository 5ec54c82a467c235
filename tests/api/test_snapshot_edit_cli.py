"""`holdfast snapshot edit | bootstrap`: what they print and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import holdfast as hf
from tests.api.test_snapshots import fails, run
from tests.statebackends.snapshot_harness import SOME, UID, write


@pytest.fixture
def savepoint(tmp_path: Path) -> Path:
    return Path(write(tmp_path, "savepoint-7", SOME, parallelism=2, canonical=True).location)


def test_edit_prints_where_the_savepoint_is(savepoint: Path, tmp_path: Path) -> None:
    (tmp_path / "change.py").write_text("def lowered(batch):\n    return batch.to_pandas().assign(value=0)\n")
    function = f"{tmp_path / 'change.py'}:lowered"
    arguments = ("--uid", UID, "--state", "count", "--function", function)
    assert run("edit", savepoint, tmp_path / "edited", *arguments) == f"{tmp_path / 'edited'}\n"
    assert [row["value"] for row in hf.Snapshot(tmp_path / "edited").rows(UID, "count")] == [0, 0, 0]
    assert json.loads(run("edit", savepoint, tmp_path / "b", *arguments, "--json"))["location"] == str(tmp_path / "b")
    assert "nothing is overwritten" in fails("edit", savepoint, tmp_path / "edited", *arguments)
    assert "has no function 'other'" in fails("edit", savepoint, tmp_path / "c", *arguments[:-1], f"{tmp_path / 'change.py'}:other")
    (tmp_path / "none.py").write_text("def change():\n    pass\n")
    named = f"{tmp_path / 'none.py'}:change"
    assert "must take one argument, a RecordBatch" in fails("edit", savepoint, tmp_path / "c", *arguments[:-1], named)
    bootstrap = ("bootstrap", tmp_path / "c", "--max-parallelism", "8", "--function", named)
    assert "must take one argument, the Savepoint" in fails(*bootstrap)
    (tmp_path / "change.py").write_text("def lowered(batch):\n    return batch.select(['key'])\n")
    assert "operator 'totals', state 'count': no column 'value'" in fails("edit", savepoint, tmp_path / "c", *arguments)
    assert not (tmp_path / "c").exists()


def test_bootstrap_prints_where_the_savepoint_is(tmp_path: Path) -> None:
    (tmp_path / "history.py").write_text(
        """
import holdfast as hf
import pyarrow as pa

def history(savepoint):
    return savepoint.with_state("totals", hf.ValueStateDescriptor("count", int), pa.table({"key": ["AA"], "value": [5]}))

def nothing(savepoint):
    pass

def wrong(savepoint):
    return 1 / 0
"""
    )
    arguments = ("--max-parallelism", 8, "--parallelism", 2, "--function")
    assert run("bootstrap", tmp_path / "a", *arguments, f"{tmp_path / 'history.py'}:history") == f"{tmp_path / 'a'}\n"
    made = hf.Snapshot(tmp_path / "a")
    assert [row["value"] for row in made.rows("totals", "count")] == [5]
    assert (made.operators["totals"].parallelism, made.operators["totals"].max_parallelism) == (2, 8)
    for name, said in (
        ("history", "nothing is overwritten"),
        ("nothing", "must return the Savepoint"),
        ("wrong", "ZeroDivisionError"),
    ):
        assert said in fails("bootstrap", tmp_path / "a", *arguments, f"{tmp_path / 'history.py'}:{name}")
    assert "parallelism" in fails(
        "bootstrap", tmp_path / "b", "--max-parallelism", 1, *arguments[2:], f"{tmp_path / 'history.py'}:history"
    )


def test_edit_removes_renames_and_changes_max_parallelism(savepoint: Path, tmp_path: Path) -> None:
    arguments = ("--remove-state", f"{UID}/tags", "--rename-state", f"{UID}/count=n", "--rename-operator", f"{UID}=sums")
    assert run("edit", savepoint, tmp_path / "edited", *arguments, "--max-parallelism", 64) == f"{tmp_path / 'edited'}\n"
    sums = hf.Snapshot(tmp_path / "edited").operators["sums"]
    assert (sums.max_parallelism, sorted(sums.states)) == (64, ["_timers", "labels", "n", "positions", "rules", "seen", "windows"])
    assert json.loads(run("edit", savepoint, tmp_path / "b", "--remove-operator", UID, "--json"))["location"] == str(tmp_path / "b")
    assert hf.Snapshot(tmp_path / "b").operators == {}
    assert "has no state 'x' from the snapshot" in fails("edit", savepoint, tmp_path / "c", "--remove-state", f"{UID}/x")
    assert "less than 2" in fails("edit", savepoint, tmp_path / "c", "--max-parallelism", 1)
    assert not (tmp_path / "c").exists()


def test_bootstrap_adds_to_a_snapshot(savepoint: Path, tmp_path: Path) -> None:
    (tmp_path / "more.py").write_text(
        "import holdfast as hf\nimport pyarrow as pa\n\ndef more(savepoint):\n"
        "    limits = pa.table({'key': ['AA'], 'value': [1.5]})\n"
        f"    return savepoint.with_state('{UID}', hf.ValueStateDescriptor('limits', float), limits)\n"
    )
    function = f"{tmp_path / 'more.py'}:more"
    assert run("bootstrap", tmp_path / "a", "--from", savepoint, "--function", function) == f"{tmp_path / 'a'}\n"
    assert [row["value"] for row in hf.Snapshot(tmp_path / "a").rows(UID, "limits")] == [1.5]
    assert [row["value"] for row in hf.Snapshot(tmp_path / "a").rows(UID, "count")]
