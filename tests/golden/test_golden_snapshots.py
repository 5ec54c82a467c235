"""Golden snapshots are read by the present code, whatever wrote them: by its tools, and into every backend that may read them.

What is in them stands beside each, made from what was put in and never from what a reader found."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import duckdb
import pytest
from typer.testing import CliRunner

import holdfast as hf
from api.cli import app
from statebackends.errors import BackendMismatchError
from statebackends.factory import BackendKind
from tests.golden.contents_v1 import JOB
from tests.golden.independent_reader import rows_of_table
from tests.golden.make_snapshots import GOLDEN, RECIPES, make
from tests.golden.plainjson import in_order
from tests.golden.restoring import Restored, keyed_contents

SEALED = {
    "v1-filesystem": "def98517ea29bc631fbadb57e6025561",
    "v1-memory": "b0b4b1e706607ebfc33385cc0a964ac0",
    "v1-rocksdb": "cc574eab25d89ada4622b9fe6150a1e3",
    "v1-savepoint": "a3bde1965b426a88a9dca8549ea3803e",
}
"""Checksum in the header of each `_metadata`, which holds those of all its files: nobody makes them anew."""

NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.json"))
BACKENDS: tuple[BackendKind, ...] = ("memory", "filesystem", "rocksdb")
runner = CliRunner()


def described(name: str) -> Any:
    return json.loads((GOLDEN / name / "expected.json").read_text("utf-8"))


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def moved(name: str, tmp_path: Path) -> Path:
    """The snapshot's folder at another place."""
    shutil.copytree(GOLDEN / name, tmp_path / "moved")
    return tmp_path / "moved" / str(described(name)["snapshot"])


def test_no_golden_snapshot_was_changed_or_forgotten() -> None:
    found = {}
    for name in NAMES:
        header = (GOLDEN / name / described(name)["snapshot"] / "_metadata").read_bytes()[:200]
        found[name] = re.findall(rb'"checksum":"xxh3_128:([0-9a-f]+)"', header)[0].decode()
    assert found == SEALED
    assert set(NAMES) >= set(RECIPES)


def test_none_is_ever_written_over() -> None:
    for name in RECIPES:
        with pytest.raises(FileExistsError):
            make(name)


def test_present_code_would_put_the_same_contents_into_a_new_one(tmp_path: Path) -> None:
    for name in RECIPES:
        folder = make(name, tmp_path)
        assert json.loads((folder / "expected.json").read_text("utf-8")) == described(name)
        snapshot = described(name)["snapshot"]
        assert hf.Snapshot(GOLDEN / name / snapshot).diff(hf.Snapshot(folder / snapshot)).is_same


# ------------------------------------------------------------------------------------------------------------------- tools


def test_verify_finds_it_whole(moved: Path) -> None:
    done = runner.invoke(app, ["snapshot", "verify", str(moved)])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[0].endswith(": sound")


def test_tools_read_what_was_put_in(name: str, moved: Path) -> None:
    snapshot = hf.Snapshot(moved)
    wanted = described(name)["operators"]
    assert set(snapshot.operators) == set(wanted)
    for uid, operator in wanted.items():
        assert set(snapshot.operators[uid].states) == set(operator["states"])
        for state, contents in operator["states"].items():
            found = snapshot.operators[uid].states[state]
            assert (found.kind, found.value_type) == (contents["kind"], contents["value_type"])
            table = snapshot.table(uid, state).read_all()
            if "subtasks" in contents:
                entries = [[row["value"].hex() for row in table.to_pylist() if row["subtask"] == index]
                           for index in range(operator["parallelism"])]  # fmt: skip
                assert entries == contents["subtasks"]
            else:
                meta = {"kind": found.kind, "value_type": found.value_type, "key_type": operator["key_type"]}
                assert in_order(rows_of_table(table, meta, operator["max_parallelism"])) == contents["rows"], (uid, state)


def test_exports_are_read_by_duckdb(name: str, moved: Path, tmp_path: Path) -> None:
    hf.Snapshot(moved).export(tmp_path / "export")
    listed = json.loads((tmp_path / "export/_export.json").read_text())
    rows = {(state["operator"], state["state"]): state["rows"] for state in listed["states"]}
    for uid, operator in described(name)["operators"].items():
        for state, contents in operator["states"].items():
            if "subtasks" in contents:
                count = sum(map(len, contents["subtasks"]))
            elif contents["kind"] in ("list", "map"):
                count = sum(len(row["value"]) for row in contents["rows"])
            else:
                count = len(contents["rows"])
            assert rows[uid, state] == count
    folders = {(state["operator"], state["state"]): state["folder"] for state in listed["states"]}
    pattern = tmp_path / "export" / folders["flüge/1", "count"] / "*.parquet"
    with duckdb.connect() as database:
        found = database.execute("SELECT key, value FROM read_parquet(?) WHERE namespace = ''", [str(pattern)]).fetchall()
    assert sorted(found) == [("", 0), ("AA", 1), ("UA", -(2**63)), ("键", 2**63 - 1)]


# ----------------------------------------------------------------------------------------------------------------- restores


def without_parts(rows: list[Any]) -> list[Any]:
    """Of columnar state only the results are seen by operators."""
    return in_order([{name: value for name, value in row.items() if name != "parts"} for row in rows])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rescaled", ["same", "one more", "one"])
def test_it_is_restored(name: str, moved: Path, tmp_path: Path, backend: BackendKind, rescaled: str) -> None:
    wanted = described(name)["operators"]
    change = {"same": lambda old: old, "one more": lambda old: old + 1, "one": lambda old: 1}[rescaled]
    parallelism = {uid: change(operator["parallelism"]) for uid, operator in wanted.items()}
    if backend != "rocksdb" and "rocksdb" in RECIPES[name].backend:
        with pytest.raises(BackendMismatchError):
            Restored(moved, backend, parallelism, tmp_path / "local")
        return
    restored = Restored(moved, backend, parallelism, tmp_path / "local")
    for contents in JOB:
        states = wanted[contents.uid]["states"]
        if contents.key_type is not None:
            subtasks = [keyed_contents(subtask, contents) for subtask in restored.keyed(contents)]
            assert len(subtasks) == parallelism[contents.uid]
            for state in subtasks[0]:
                rows = list(itertools.chain.from_iterable(subtask[state] for subtask in subtasks))
                assert in_order(rows) == without_parts(states[state]["rows"]), (contents.uid, state)
        for state, found in restored.entries(contents).items():
            check_entries(states[state]["kind"], states[state]["subtasks"], found)


def check_entries(kind: str, old: list[list[str]], new: list[list[str]]) -> None:
    """Scenarios P: a share each, all for each, or a copy for each."""
    everything = list(itertools.chain.from_iterable(old))
    if kind == "operator_union":
        assert new == [everything] * len(new)
    elif kind == "operator_broadcast":
        assert new == [old[0]] * len(new)
    elif len(new) == len(old):
        assert new == old
    else:
        assert sorted(itertools.chain.from_iterable(new)) == sorted(everything)
        assert max(map(len, new)) - min(map(len, new)) <= 1
