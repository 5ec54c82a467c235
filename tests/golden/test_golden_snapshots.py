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
from holdfast.api.cli.main import app
from holdfast.statebackends.errors import BackendMismatchError
from holdfast.statebackends.factory import BackendKind
from tests.examples import crossed
from tests.golden.contents_ttl_v1 import DURATION_MS
from tests.golden.contents_v1 import JOB
from tests.golden.goldens import NAMES, described, folder_of, job_of, recipe_of
from tests.golden.independent_reader import rows_of_table
from tests.golden.make_snapshots import GOLDEN, RECIPES, make
from tests.golden.plainjson import in_order, unexpired
from tests.golden.restoring import Restored, keyed_contents

SEALED = {
    "v1-filesystem": "def98517ea29bc631fbadb57e6025561",
    "v1-filesystem-deltas": "72b37360dfdbd28f5d3909f9f0e7594f",
    "v1-filesystem-deltas-base": "711c5e132d2402301103280fbe6109c2",
    "v1-filesystem-incremental": "2d04d876d375ca42ca0222a897a042fb",
    "v1-filesystem-incremental-base": "d69a29ecd197fcc2aa1a3c410c135d44",
    "v1-filesystem-packed": "a5b6e15758dd2697cfd6b7548a22c915",
    "v1-filesystem-packed-base": "630cc719fb9ea58eb0a8c3972cc8bc7b",
    "v1-memory": "b0b4b1e706607ebfc33385cc0a964ac0",
    "v1-native-savepoint": "d9911b55f5f41215ef98f16199831a10",
    "v1-rocksdb": "cc574eab25d89ada4622b9fe6150a1e3",
    "v1-rocksdb-incremental": "5c8c93d759297bace9e05d0345ba1a79",
    "v1-rocksdb-incremental-base": "6899e1bf4e2dc5fd499f5d5c9a663440",
    "v1-rows-deltas": "0d61eef6e457648440f52aa9351697cc",
    "v1-rows-deltas-base": "f156de308321c4597999f7015bc2adec",
    "v1-rows-savepoint": "b9e954c9d94fa936a09456358059c504",
    "v1-savepoint": "a3bde1965b426a88a9dca8549ea3803e",
    "v1-ttl-rocksdb": "d8c11fef545e3d6fa2652455f7a872e3",
    "v1-ttl-savepoint": "2f4f6b1779c82731c1c6bad319c96e11",
    "v1-window-savepoint": "e06135dbc0aa96cc239517e09be3ec96",
}
"""Checksum in the header of each `_metadata`, which holds those of all its files: nobody makes them anew."""

BACKENDS: tuple[BackendKind, ...] = ("memory", "filesystem", "rocksdb")
runner = CliRunner()


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def moved(name: str, tmp_path: Path) -> Path:
    """The snapshot's folder at another place, with what it shares."""
    shutil.copytree(GOLDEN / folder_of(name).relative_to(GOLDEN).parts[0], tmp_path / "moved")
    return tmp_path / "moved" / str(described(name)["snapshot"])


def test_no_golden_snapshot_was_changed_or_forgotten() -> None:
    found = {}
    for name in NAMES:
        header = (folder_of(name) / "_metadata").read_bytes()[:200]
        found[name] = re.findall(rb'"checksum":"xxh3_128:([0-9a-f]+)"', header)[0].decode()
    assert found == SEALED
    assert set(NAMES) >= set(RECIPES)


def test_none_is_ever_written_over() -> None:
    for name in RECIPES:
        with pytest.raises(FileExistsError):
            make(name)


@pytest.mark.parametrize("made", list(RECIPES))
def test_present_code_would_put_the_same_contents_into_a_new_one(made: str, tmp_path: Path) -> None:
    make(made, tmp_path)
    for name in (name for name in NAMES if recipe_of(name) is RECIPES[made]):
        old = folder_of(name)
        assert hf.Snapshot(old).diff(hf.Snapshot(tmp_path / old.relative_to(GOLDEN))).is_same
    for path in (GOLDEN / made).glob("*.json"):
        assert json.loads((tmp_path / made / path.name).read_text("utf-8")) == json.loads(path.read_text("utf-8"))


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
    if job_of(name) is not JOB:
        return
    folders = {(state["operator"], state["state"]): state["folder"] for state in listed["states"]}
    pattern = tmp_path / "export" / folders["flüge/1", "count"] / "*.parquet"
    with duckdb.connect() as database:
        found = database.execute("SELECT key, value FROM read_parquet(?) WHERE namespace = ''", [str(pattern)]).fetchall()
    assert sorted(found) == [("", 0), ("AA", 1), ("UA", -(2**63)), ("键", 2**63 - 1)]


# ----------------------------------------------------------------------------------------------------------------- restores


def seen_by_operators(state: Any, now_ms: int | None) -> list[Any]:
    """What state objects give back of what is expected: of columnar state the results, of state with a TTL what is alive."""
    if state["value_type"].startswith("ttl<") or ",ttl<" in state["value_type"]:
        assert now_ms is not None
        return unexpired(state["rows"], state["kind"], now_ms - DURATION_MS)
    return in_order([{name: value for name, value in row.items() if name != "parts"} for row in state["rows"]])


@pytest.mark.parametrize(("backend", "rescaled"), crossed(BACKENDS, ["same", "one more", "one"]))
def test_it_is_restored(name: str, moved: Path, tmp_path: Path, backend: BackendKind, rescaled: str) -> None:
    wanted = described(name)["operators"]
    change = {"same": lambda old: old, "one more": lambda old: old + 1, "one": lambda old: 1}[rescaled]
    parallelism = {uid: change(operator["parallelism"]) for uid, operator in wanted.items()}
    job = job_of(name)
    if backend != "rocksdb" and recipe_of(name).backend == "rocksdb" and not recipe_of(name).canonical:
        with pytest.raises(BackendMismatchError):
            Restored(moved, backend, parallelism, tmp_path / "local", job)
        return
    restored = Restored(moved, backend, parallelism, tmp_path / "local", job)
    for contents in job:
        states = wanted[contents.uid]["states"]
        later = [] if contents.now_ms is None else [contents.now_ms + DURATION_MS // 2]
        for now_ms in [contents.now_ms, *later] if contents.key_type is not None else []:
            subtasks = [keyed_contents(subtask, contents) for subtask in restored.keyed(contents, now_ms)]
            assert len(subtasks) == parallelism[contents.uid]
            for state in subtasks[0]:
                rows = list(itertools.chain.from_iterable(subtask[state] for subtask in subtasks))
                assert in_order(rows) == seen_by_operators(states[state], now_ms), (contents.uid, state, now_ms)
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
