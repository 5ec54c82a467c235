"""Two whole jobs on one target, each in a state directory of its own: no row is lost, and one is refused by name."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast import testing
from tests.api.testing.test_check_sink import SqliteTarget


def read(path: Path) -> list[int]:
    with sqlite3.connect(path) as db:
        return [row for (row,) in db.execute("SELECT id FROM rows ORDER BY rowid")]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    path = tmp_path / "out.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE rows (id INTEGER, text TEXT)")
    return path


def fed(job: testing.Job, output: Path, **options: Any) -> testing.Feed:
    feed = job.input("rows", testing.CHECKED_COLUMNS)
    feed.stream.sink_to(hf.StagedSink(SqliteTarget(output, "rows"), **options), uid="checked")
    return feed


def add(feed: testing.Feed, *ids: int) -> None:
    feed.add([{"id": number, "text": None} for number in ids])


def test_a_job_begins_with_the_savepoint_of_another_one_which_had_staged_rows(output: Path) -> None:
    with testing.Job("check") as job, testing.Job("heir") as heir:
        feed, more = fed(job, output), fed(heir, output)
        job.start()
        add(feed, 0, 1)
        job.checkpoint()
        add(feed, 2, 3, 4)
        location = job.savepoint()
        assert read(output) == [0, 1]
        heir.start(from_=location)
        assert read(output) == [0, 1, 2, 3, 4], "what is staged in the savepoint that it begins with is committed"
        add(more, 5, 6)
        heir.checkpoint()
        with pytest.raises(hf.FencedError, match="job"):
            job.checkpoint()
        assert read(output) == [0, 1, 2, 3, 4, 5, 6]


def test_two_state_directories_with_one_name_lose_no_row(output: Path) -> None:
    with testing.Job("check") as one, testing.Job("check") as other:
        feed, more = fed(one, output), fed(other, output)
        one.start()
        with pytest.raises(hf.FencedError, match="a job of this name in another state directory"):
            other.start()
        add(feed, 0, 1)
        one.checkpoint()
        with pytest.raises(hf.FencedError, match="a job of this name in another state directory"):
            other.restart()
        other.restart(allow_output_repeat=True)
        add(more, 10)
        other.checkpoint()
        add(feed, 2)
        with pytest.raises(hf.FencedError, match="taken over meanwhile"):
            one.checkpoint()
        assert read(output) == [0, 1, 10]


def test_a_job_goes_on_in_a_new_state_directory(output: Path) -> None:
    with testing.Job("check") as one, testing.Job("check") as other:
        feed, more = fed(one, output), fed(other, output)
        one.start()
        add(feed, 0)
        one.checkpoint()
        one.restart()
        one.restart()
        add(feed, 1)
        location = one.stop()
        other.start(from_=location)
        add(more, 2)
        other.checkpoint()
        assert read(output) == [0, 1, 2]


def test_a_target_elsewhere_is_refused_unless_it_begins_anew(output: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.db"
    with sqlite3.connect(new) as db:
        db.execute("CREATE TABLE rows (id INTEGER, text TEXT)")
    with testing.Job("check") as one, testing.Job("check") as other:
        feed, more = fed(one, output), fed(other, new)
        one.start()
        add(feed, 0, 1)
        one.checkpoint()
        location = one.stop()
        with pytest.raises(hf.SinkMovedError, match="begin anew where it is"):
            other.start(from_=location)
        other.start(from_=location, sinks="fork")
        add(more, 2)
        other.checkpoint()
        other.restart()
        assert (read(output), read(new)) == ([0, 1], [2])
