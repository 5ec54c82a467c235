"""Savepoints of groups without Spark: each query is held, the idle ones, too, and its copy is of the row that the savepoint has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.operators.datastream.query_group import QueryGroup
from holdfast.operators.sources.stream_input import BatchManifest
from holdfast.operators.sources.stream_query import StreamQuery
from holdfast.operators.sources.stream_savepoint import GroupRecord
from holdfast.statebackends.errors import HoldfastError
from tests.operators.sources.test_stream import FOLDER, source


class Busy:
    """A job whose readers follow at once, and whose queries have a batch more whenever they may."""

    is_running = True

    def __init__(self, root: Path) -> None:
        self.inputs = [self._query(root, name) for name in ("idle", "busy")]
        self.rows: dict[str, int] = {}
        """In the savepoint, by source."""

    def _query(self, root: Path, name: str) -> StreamQuery:
        of = source()
        of.__dict__ |= {"_dataframe": object(), "checkpoint": None}
        query = StreamQuery(of, str(root / "state"), "job-a", name, self)
        query._folder = f"{FOLDER}-{name}"
        return query

    def rows_read(self, uid: str) -> int:
        return sum(query._next_row for query in self.inputs if query.uid == uid)

    def give_up(self, error: str) -> None:
        raise AssertionError(error)

    def begin_batch(self, query: StreamQuery) -> threading.Thread:
        """Returns when the batch has begun, or waits to."""

        def batch() -> None:
            query._enter_batch()
            row = query._next_row
            query._last = BatchManifest(1, "", 4, (), "w", query._next_id, row, "q")
            query._leave_batch()

        thread = threading.Thread(target=batch, daemon=True)
        thread.start()
        if not query._holds:
            thread.join(10)
        return thread

    def savepoint(self, target: Path) -> str:
        """Batches want to begin before its barriers, and behind them."""
        threads = [self.begin_batch(query) for query in self.inputs]
        self.rows = {query.uid: query._next_row for query in self.inputs}
        threads += [self.begin_batch(query) for query in self.inputs]
        self.waiting = threads
        return str(target)


def savepoint_of_a_group(root: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Rows in a savepoint, and those behind which the copies of the checkpoints go on."""
    job: Any = Busy(root)
    job.begin_batch(job.inputs[1]).join()
    group = QueryGroup(SimpleNamespace())  # type: ignore[arg-type]
    group._job = job
    place = Path(group.savepoint(root / "savepoint"))
    for thread in job.waiting:
        thread.join(10)
        assert not thread.is_alive(), "the queries go on"
    record = msgspec.json.decode((place / "queries/group.json").read_bytes(), type=GroupRecord)
    return job.rows, {uid: base.rows for uid, base in record.queries.items()}


def test_all_queries_are_held_from_before_the_barriers_until_they_are_copied(tmp_path: Path) -> None:
    rows, copies = savepoint_of_a_group(tmp_path)
    assert rows == copies == {"idle": 0, "busy": 4}


def test_a_group_that_skips_idle_queries_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = StreamQuery.held

    @contextmanager
    def skipping(query: StreamQuery, timeout_s: float) -> Iterator[None]:
        if query._last is None:
            yield
        else:
            with held(query, timeout_s):
                yield

    monkeypatch.setattr(StreamQuery, "held", skipping)
    rows, copies = savepoint_of_a_group(tmp_path)
    assert rows != copies


def test_a_savepoint_without_copies_is_named(tmp_path: Path) -> None:
    job: Any = Busy(tmp_path)
    group = QueryGroup(SimpleNamespace())  # type: ignore[arg-type]
    group._job = job
    (tmp_path / "savepoint").mkdir()
    (tmp_path / "savepoint/queries").write_text("no folder")
    with pytest.raises(HoldfastError) as failed:
        group.savepoint(tmp_path / "savepoint")
    assert f"the savepoint is at {tmp_path}/savepoint, without the checkpoints of the queries" in failed.value.__notes__
    for thread in job.waiting:
        thread.join(10)
        assert not thread.is_alive(), "the queries go on"
