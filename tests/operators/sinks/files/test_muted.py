"""Muted sinks of a branch, in whole jobs: they take and count rows, and neither commit nor lose what the parent has staged."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.barriers.jobgraph import SinkMode
from holdfast.operators.sinks.files.parquet import read_committed
from tests.operators.sinks.targets.test_staged_rows import Lines
from tests.operators.sinks.test_connector import Folder, Renames, visible

COLUMNS = {"i": int, "text": str}


class Loud(hf.Sink):
    """Fails whoever makes a writer or a committer of it."""

    def create_writer(self, schema: pa.Schema | None) -> Any:
        raise AssertionError("a muted sink was asked for a writer")

    def create_committer(self) -> Any:
        raise AssertionError("a muted sink was asked for a committer")


class BranchJob(hf.testing.Job):
    """The branch `trial` of the job of the same program."""

    mute: Any = True
    files: Path | None = None

    def _plan(self, *, allow_output_repeat: bool) -> Any:
        return self.environment._branch_plan("trial", self.files, self.mute)

    def _submit(self, workers: Any, **how: Any) -> None:
        if how.get("restore") is not None and how["sinks"] is SinkMode.KEEP:
            how["sinks"] = SinkMode.FORK
        super()._submit(workers, **how, branch="trial")


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    Lines.stored, Lines.rows = None, []
    Renames.answers, Renames.seen = {}, []
    yield
    Lines.stored, Lines.rows = None, []


def program(job: hf.testing.Job, path: Path, *, loud: bool = False) -> hf.testing.Feed:
    """A sink of each kind: by a committer, by a target, of files, and of simple rows."""
    feed = job.input("rows", COLUMNS)
    feed.stream.sink_to(Loud() if loud else Folder(path / "folder"), uid="folder")
    feed.stream.sink_to(Loud() if loud else hf.StagedSink(Lines()), uid="target")
    feed.stream.sink_to(hf.ParquetSink(path / "files"), uid="files")
    feed.stream.sink_to(hf.CollectSink("muted test"), uid="collect")
    return feed


def give(feed: hf.testing.Feed, *rows: int) -> None:
    feed.add([{"i": row, "text": "x"} for row in rows])


def output(path: Path) -> tuple[Any, ...]:
    """All that the parent's world sees."""
    files = sorted(str(each) for each in path.rglob("*"))
    return visible(path / "folder"), list(Lines.rows), Lines.stored, files, list(Renames.seen), hf.CollectSink.rows("muted test")


def staged_parent(tmp_path: Path) -> tuple[hf.testing.Job, hf.testing.Feed, str]:
    """A parent that has committed row 1, and whose savepoint holds staged rows 2 and 3."""
    hf.CollectSink.clear("muted test")
    (tmp_path / "folder").mkdir()
    parent = hf.testing.Job()
    feed = program(parent, tmp_path)
    parent.start()
    give(feed, 1)
    parent.checkpoint()
    give(feed, 2, 3)
    return parent, feed, parent.savepoint()


def read(path: Path) -> list[int]:
    return sorted(read_committed(path, "files").column("i").to_pylist())


def branch_of(tmp_path: Path, branch: hf.testing.Job, saved: str, *, loud: bool = True) -> hf.testing.Feed:
    feed = program(branch, tmp_path, loud=loud)
    branch.start(from_=saved)
    return feed


UIDS = ("folder", "target", "files", "collect")


@pytest.mark.parametrize("parent_goes_on_first", [False, True])
def test_a_muted_branch_writes_nothing_and_the_parent_commits_all_that_it_staged(
    tmp_path: Path, *, parent_goes_on_first: bool
) -> None:
    parent, feed, saved = staged_parent(tmp_path)
    with parent, BranchJob() as branch:
        if parent_goes_on_first:  # its staged files are gone then
            parent.checkpoint()
        before = output(tmp_path)
        rows = branch_of(tmp_path, branch, saved)
        give(rows, 7, 8)
        branch.checkpoint()
        assert counted(branch) == dict.fromkeys(UIDS, (2, 2))
        give(rows, 9)
        branch.restart()  # from its own checkpoint: row 9 is read again, and rows 7 and 8 are not
        assert counted(branch) == dict.fromkeys(UIDS, (1, 1))
        give(rows, 10)
        branch.checkpoint()
        branch.fail()
        assert counted(branch) == dict.fromkeys(UIDS, (2, 2))
        branch.stop()
        assert output(tmp_path) == before
        give(feed, 4)
        parent.restart()
        parent.checkpoint()
        assert visible(tmp_path / "folder") == [1, 2, 3, 4]
        assert Lines.rows == ["1=x", "2=x", "3=x", "4=x"]
        assert read(tmp_path / "files") == [1, 2, 3, 4]


def counted(branch: hf.testing.Job) -> dict[str, tuple[int, int]]:
    """Rows that each sink took, by the job's totals and by its own counter."""
    found = {uid: branch.progress(uid) for uid in UIDS}
    return {uid: (each.records_in, each.counters.get("muted", 0)) for uid, each in found.items()}


def test_some_sinks_are_muted_and_files_redirected(tmp_path: Path) -> None:
    parent, _, saved = staged_parent(tmp_path)
    branch = BranchJob()
    with parent, branch:
        branch.mute, branch.files = ("folder", "target", "collect"), tmp_path.parent / f"{tmp_path.name}-trial"
        parent.checkpoint()  # to the branch's own state directory here, its parent is a stranger, which may never commit
        before = output(tmp_path)
        rows = branch_of(tmp_path, branch, saved)
        give(rows, 7)
        branch.checkpoint()
        assert output(tmp_path) == before
        assert read(branch.files / "files") == [7]
        branch.mute, branch.files = True, None  # it has a log of its own by now
        with pytest.raises(hf.SinkMovedError, match=r"sink 'files' .* is muted, and this branch has written with it"):
            branch.restart()
        branch.restart(sinks="abandon")
        give(rows, 8)
        branch.checkpoint()
        assert branch.progress("files").counters["muted"] == 1
        assert read(tmp_path.parent / f"{tmp_path.name}-trial" / "files") == [7]
        assert output(tmp_path) == before


def test_a_muted_branch_needs_nothing_of_what_its_parent_has_staged(tmp_path: Path) -> None:
    parent, _, _ = staged_parent(tmp_path)
    saved = parent.savepoint(tmp_path / "saved")
    parent.close()  # its state directory is gone, with the staged rows of the target
    shutil.rmtree(tmp_path / "files")
    with BranchJob() as branch:
        rows = branch_of(tmp_path, branch, saved)
        give(rows, 7)
        branch.checkpoint()
        branch.restart()
        assert counted(branch) == dict.fromkeys(UIDS, (0, 0))
