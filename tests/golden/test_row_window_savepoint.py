"""The golden savepoint of windows of row functions opens with the present operators, on any backend and at any parallelism: what
fired stays fired, what was late stays late, and what was open goes on, with the state and the timers of its trigger."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

import pytest

import holdfast as hf
from tests.golden.row_window_savepoint import FOLDER, feed, pipeline


def taken(out: Any) -> list[tuple[Any, ...]]:
    return sorted((row["user"], row["start"], row["end"], row["ats"], time) for row, time in out.take())


@pytest.mark.parametrize(("parallelism", "backend"), [(1, "memory"), (3, "rocksdb"), (2, "filesystem")])
def test_windows_go_on(parallelism: int, backend: Literal["memory", "filesystem", "rocksdb"], tmp_path: Path) -> None:
    (golden,) = FOLDER.glob("savepoint-*")
    folder = shutil.copytree(golden, tmp_path / golden.name)
    with hf.testing.Job(parallelism=parallelism, max_parallelism=16, state_backend=backend) as job:
        clicks, out = pipeline(job)
        job.start(from_=folder, sinks="fork")
        assert [each.take() for each in out.values()] == [[]] * len(out)
        feed(clicks, ("eve", 1), ("bob", 33), ("ann", 60))
        assert out["aside"].take() == [({"user": "eve", "at": 1}, 1)]
        assert taken(out["late"]) == [("bob", 25, 43, [25, 31, 33], 42)]
        assert out["counted"].take() == [({"n": 4, "total": 52 + 36 + 44 + 60}, 69)]
        clicks.end()
        ann = ("ann", 36, 70, [36, 52, 44, 60], 69)
        joe = [("joe", 70, 82, [70, 72], 81), ("joe", 95, 105, [95], 104)]
        assert taken(out["late"]) == [ann, *joe]
        assert taken(out["continuous"]) == [ann, ann, joe[0], joe[0], joe[1], joe[1]]
        assert out["counted"].take() == []
        assert sorted((row["user"], row["at"], time) for row, time in out["plain"].take()) == [
            ("ann", 60, 69), ("joe", 72, 81), ("joe", 95, 104)
        ]  # fmt: skip
        assert taken(out["sliding"]) == [
            ("ann", 20, 60, [36, 44], 59), ("ann", 40, 80, [44, 60], 79), ("ann", 60, 100, [60], 99),
            ("bob", 20, 60, [31, 33], 59),
            ("joe", 40, 80, [70, 72], 79), ("joe", 60, 100, [95, 72], 99), ("joe", 80, 120, [95], 119),
        ]  # fmt: skip
