"""A streaming input's query without Spark: who holds it, and what a savepoint has of its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.operators.sources import stream_savepoint
from holdfast.operators.sources.stream_input import StreamBase
from holdfast.operators.sources.stream_query import StreamQuery, _StopQuery
from holdfast.statebackends.storage.directory import LocalStorage
from tests.operators.sources.test_stream import FOLDER, source


class Job:
    """Implements JobView."""

    is_running = True

    def rows_read(self, uid: str) -> int:
        return 0

    def give_up(self, error: str) -> None:
        raise AssertionError(error)


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.fixture
def query(tmp_path: Path, job: Job) -> StreamQuery:
    """Of a driver whose Spark is not asked."""
    of = source()
    of.__dict__ |= {"_dataframe": object(), "checkpoint": None}
    found = StreamQuery(of, str(tmp_path / "state"), "job-a", "src", job)
    found._folder = FOLDER
    return found


def test_a_query_is_held_until_all_savepoints_let_it_go(query: StreamQuery, job: Job) -> None:
    job.is_running = False  # a batch that has to wait ends
    with query.held(1.0):
        with query.held(1.0), pytest.raises(_StopQuery):
            query._enter_batch()
        with pytest.raises(_StopQuery):
            query._enter_batch()
    query._enter_batch()
    with pytest.raises(TimeoutError), query.held(0.0):
        raise AssertionError
    query._leave_batch()
    query._enter_batch()


@pytest.fixture
def checkpoint(query: StreamQuery) -> Path:
    found = Path(query.checkpoint or "")
    for name in ("metadata", "offsets/0", "offsets/7", "state/0/0/1.delta"):
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).write_text(name)
    return found


def test_files_that_spark_clears_away_are_not_missed(
    query: StreamQuery, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = stream_savepoint._files

    def then_cleared(local: str) -> Any:
        found = list(listed(local))
        (checkpoint / "offsets/0").unlink()
        (checkpoint / "state/0/0/1.delta").unlink()
        return iter(found)

    monkeypatch.setattr(stream_savepoint, "_files", then_cleared)
    place = tmp_path / "savepoint"
    stream_savepoint.save_queries(str(place), [query])
    copy = place / "queries" / "src"
    assert sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()) == ["metadata", "offsets/7"]
    assert (place / "queries" / "group.json").is_file()


def test_a_query_that_had_not_begun_is_saved_and_begins(query: StreamQuery, tmp_path: Path) -> None:
    place = str(tmp_path / "savepoint")
    stream_savepoint.save_queries(place, [query])
    storage = LocalStorage(tmp_path / "other")
    of = source()
    of.__dict__ |= {"checkpoint": None}
    assert stream_savepoint.saved_query(of, "src", place, storage) == StreamBase(FOLDER, -1, 0, "")
    stream_savepoint._restore_query("src", place, storage, FOLDER, "new-id")
    assert (tmp_path / "other" / FOLDER / "query" / "metadata").read_text() == '{"id": "new-id"}'
