"""A sink of a user's own by the low-level interface, in a whole job: what each answer of its committer does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import holdfast as hf

COLUMNS = {"i": int}


class Folder(hf.Sink):
    """Stages rows as JSON, and commits by a rename: repeated without harm."""

    name = "folder"

    def __init__(self, path: Path) -> None:
        self.path = path

    def create_writer(self, schema: pa.Schema | None) -> hf.SinkWriter:
        return Writer(self.path)

    def create_committer(self) -> hf.Committer:
        return Renames(self.path)


class Writer(hf.SinkWriter):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[int] = []
        self.staged: list[tuple[str, list[int]]] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self.rows += batch.column("i").to_pylist()

    def prepare_commit(self) -> Sequence[bytes]:
        if not self.rows:
            return ()
        name = f"{self.rows[0]:06d}"
        self.staged.append((name, self.rows))
        self.rows = []
        return (name.encode(),)

    def flush(self, *, end_of_input: bool) -> None:
        for name, rows in self.staged:
            (self.path / f"{name}.staged").write_text(json.dumps(rows))
        self.staged.clear()


class Renames(hf.Committer):
    answers: dict[str, list[Any]] = {}  # noqa: RUF012 - of a test, in this process
    """Name of a committable -> what is answered to it, one after the other, before it is committed."""
    seen: list[tuple[int, str, int]] = []  # noqa: RUF012

    def __init__(self, path: Path) -> None:
        self.path = path

    def commit(self, requests: Sequence[hf.CommitRequest]) -> None:
        for request in requests:
            name = request.committable.decode()
            self.seen.append((request.checkpoint_id, name, request.tries))
            left = self.answers.get(name, [])
            if left:
                answer = left.pop(0)
                if isinstance(answer, Exception):
                    raise answer
                answer(request)
            elif (self.path / f"{name}.staged").exists():
                (self.path / f"{name}.staged").rename(self.path / name)
            else:
                request.already_committed()


@pytest.fixture(autouse=True)
def answers() -> dict[str, list[Any]]:
    Renames.answers = {}
    Renames.seen = []
    return Renames.answers


def visible(path: Path) -> list[int]:
    return [row for file in sorted(path.iterdir()) if file.suffix == "" for row in json.loads(file.read_text())]


def job_of(path: Path) -> tuple[hf.testing.Job, hf.testing.Feed]:
    job = hf.testing.Job()
    feed = job.input("rows", COLUMNS)
    feed.stream.sink_to(Folder(path), uid="folder")
    job.start()
    return job, feed


def give(feed: hf.testing.Feed, *rows: int) -> None:
    feed.add([{"i": row} for row in rows])


@pytest.mark.parametrize("given", [None, b"one", [b"one", "two"], {"one": b"two"}])
def test_a_writer_that_gives_no_list_of_committables_is_told_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Any
) -> None:
    """One that forgets its `return` must not lose rows."""
    monkeypatch.setattr(Writer, "prepare_commit", lambda writer: given)
    job, feed = job_of(tmp_path)
    with job:
        give(feed, 1, 2)
        with pytest.raises(hf.InvalidConfigError, match=rf"sink folder: prepare_commit.*; it gave a {type(given).__name__}$"):
            job.checkpoint()


def test_rows_are_visible_when_their_checkpoint_is_complete(tmp_path: Path) -> None:
    job, feed = job_of(tmp_path)
    with job:
        give(feed, 1, 2)
        assert visible(tmp_path) == []
        job.savepoint()
        assert visible(tmp_path) == []
        job.checkpoint()
        assert visible(tmp_path) == [1, 2]
        give(feed, 3)
        job.restart()
        assert visible(tmp_path) == [1, 2]
        job.checkpoint()
        assert visible(tmp_path) == [1, 2, 3]


def test_what_is_to_be_tried_later_waits_for_the_next_checkpoint(tmp_path: Path, answers: dict[str, list[Any]]) -> None:
    answers["000001"] = [hf.CommitRequest.retry_later]
    job, feed = job_of(tmp_path)
    with job:
        give(feed, 1)
        job.checkpoint()
        assert visible(tmp_path) == []
        job.restart()
        assert visible(tmp_path) == [1], "it was kept in state"
        assert [tries for _, _, tries in Renames.seen] == [0, 0]


def test_what_failed_for_a_known_reason_is_left_and_counted(tmp_path: Path, answers: dict[str, list[Any]]) -> None:
    answers["000001"] = [lambda request: request.failed(ValueError("no such topic"), known=True)]
    job, feed = job_of(tmp_path)
    with job:
        give(feed, 1)
        job.checkpoint()
        give(feed, 2)
        job.checkpoint()
        assert visible(tmp_path) == [2]


@pytest.mark.parametrize("raised", [True, False])
def test_what_failed_for_an_unknown_reason_fails_the_job_and_is_asked_again(
    raised: bool, tmp_path: Path, answers: dict[str, list[Any]]
) -> None:
    error = OSError("no route")
    answers["000001"] = [error if raised else lambda request: request.failed(error, known=False)]
    job, feed = job_of(tmp_path)
    with job:
        give(feed, 1)
        with pytest.raises(hf.HoldfastError, match="no route"):
            job.checkpoint()
        job.restart()
        assert visible(tmp_path) == [1]


def test_what_was_put_off_is_committed_when_the_job_ends(tmp_path: Path, answers: dict[str, list[Any]]) -> None:
    answers["000001"] = [hf.CommitRequest.retry_later]
    job, feed = job_of(tmp_path)
    with job:
        give(feed, 1)
        feed.end()
        assert job.status == "FINISHED"
        assert visible(tmp_path) == [1]
