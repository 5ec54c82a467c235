"""`holdfast snapshot edit`: what it prints and refuses."""

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
    (tmp_path / "change.py").write_text("def lowered(batch):\n    return batch.select(['key'])\n")
    assert "operator 'totals', state 'count': no column 'value'" in fails("edit", savepoint, tmp_path / "c", *arguments)
    assert not (tmp_path / "c").exists()
