"""The golden savepoint of sessions opens with the present operator, on any backend and at any parallelism: what fired stays fired,
what was late stays late, and what was open goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import pytest

import holdfast as hf
from tests.golden.session_savepoint import FOLDER, click, pipeline


@pytest.mark.parametrize(("parallelism", "backend"), [(1, "memory"), (3, "rocksdb")])
def test_sessions_go_on(parallelism: int, backend: Literal["memory", "rocksdb"], tmp_path: Path) -> None:
    (golden,) = FOLDER.glob("savepoint-*")
    folder = shutil.copytree(golden, tmp_path / golden.name)
    with hf.testing.Job(parallelism=parallelism, max_parallelism=16, state_backend=backend) as job:
        clicks, rows, late = pipeline(job)
        job.start(from_=folder, sinks="fork")
        clicks.add([click("eve", "late"), click("bob", "again", 4.0), click("ann", "cart", 2.0)], at=[1, 33, 30])
        assert [row["user"] for row in late.rows()] == ["eve"]
        ((bob, _),) = rows.take()
        assert (bob["user"], bob["n"], bob["pages"], bob["last"], bob["paid"]) == ("bob", 3, 2, "again", 6.0)
        clicks.end()
        ((ann, at),) = rows.take()
        assert (ann["user"], ann["n"], ann["pages"], ann["last"], at) == ("ann", 13, 5, "page 1", 67)
        assert ann["paid"] == 0.5 + 2.0 + sum(at / 2 for at in range(8, 60, 5))
