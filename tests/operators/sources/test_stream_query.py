"""A streaming input's query without Spark: who holds it, and what a savepoint has of its checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.operators.sources import stream_savepoint
from holdfast.operators.sources.stream_input import StreamBase, read_stream_flow
from holdfast.operators.sources.stream_query import StreamQuery, _StopQuery
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.layout import StreamPaths
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import run_flow
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


def test_an_input_that_a_dead_driver_did_not_make_is_made_by_the_next_start(query: StreamQuery, tmp_path: Path) -> None:
    """The next start names no savepoint: the coordinator says which one an earlier submission named."""
    place, state = str(tmp_path / "savepoint"), tmp_path / "other"
    query._query_id = "old"
    stream_savepoint.save_queries(place, [query])
    made: list[str] = []
    for submission, restore in ((2, None), (3, None), (4, place), (5, None)):
        of = source()
        of.__dict__ |= {"checkpoint": None}
        stream_savepoint.begin_stream(
            of, str(state), "job-b", "src", submission, fresh=False, restore=restore, goes_on_from=place
        )
        record = run_flow(read_stream_flow(of.folder), LocalStorage(state))
        assert record.base is not None
        assert of.base == record.base == StreamBase(FOLDER, -1, 0, record.base.query_id)
        metadata = (state / StreamPaths(of.folder).query / "metadata").read_bytes()
        assert msgspec.json.decode(metadata)["id"] == record.base.query_id != "old"
        made.append(of.folder[-6:])
    assert made == ["000002", "000002", "000004", "000004"], "one that was made is gone on with, but where a restore is asked for"


def test_a_job_that_goes_on_from_its_own_savepoint_keeps_its_input(query: StreamQuery, tmp_path: Path) -> None:
    place, state = str(tmp_path / "savepoint"), tmp_path / "state"
    of = source()
    of.__dict__ |= {"checkpoint": None}
    stream_savepoint.begin_stream(of, str(state), "job-a", "src", 1, fresh=False)
    assert of.folder == FOLDER
    stream_savepoint.save_queries(place, [query])
    stream_savepoint.begin_stream(of, str(state), "job-a", "src", 2, fresh=False, goes_on_from=place)
    assert (of.folder, of.base) == (FOLDER, None)


def test_a_query_that_somebody_stopped_is_named(query: StreamQuery) -> None:
    stopped: Any = SimpleNamespace(id="7a3c", name="orders")
    query._source.available_now = False
    error = query._stopped(stopped)
    assert error is not None
    assert (error.operator, error.query) == ("src", "7a3c")
    assert "query 7a3c (orders) was stopped by a call of stop()" in error.message
    query._source.available_now = True
    assert query._stopped(stopped) is None, "it took all that was there"
    query._enter_batch()
    assert query._stopped(stopped) is not None, "within a batch"


def test_a_damaged_id_of_a_checkpoint_is_named(query: StreamQuery, checkpoint: Path) -> None:
    with pytest.raises(CorruptStateError, match="holds no id") as caught:
        query._check_metadata()
    assert caught.value.path == str(checkpoint / "metadata")
    (checkpoint / "metadata").write_text('{"id":"7a3c"}')
    query._check_metadata()
    (checkpoint / "metadata").unlink()
    query._check_metadata()
