"""What a target makes of rows before they are staged, in a whole job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from msgspec import UNSET

import holdfast as hf

COLUMNS = {"i": int, "text": str | None}
STAGED = pa.schema([("line", pa.string())])


class Lines(hf.CommitTarget):
    """Keeps lines in this process."""

    stored: hf.CommitPosition | None = None
    rows: list[Any] = []  # noqa: RUF012 - of a test, in this process

    def staged_schema(self, schema: pa.Schema) -> pa.Schema:
        return STAGED

    def stage(self, columns: pa.RecordBatch) -> pa.RecordBatch:
        if columns.column("text").null_count:
            raise hf.InvalidRowError("lines: text is null", column="text", reason="null")
        line = pc.binary_join_element_wise(columns.column("i").cast(pa.string()), columns.column("text"), "=")
        return pa.RecordBatch.from_arrays([line], schema=STAGED)

    def open(self, owner: hf.CommitOwner) -> hf.CommitPosition:
        Lines.stored = owner.take(Lines.stored)
        return Lines.stored

    def apply(self, batches: Iterator[pa.RecordBatch], expected: hf.CommitPosition, position: hf.CommitPosition) -> None:
        if Lines.stored != expected:
            raise hf.FencedError("another owner")
        Lines.rows += [row["line"] for batch in batches for row in batch.to_pylist()]
        Lines.stored = position


class Halves(Lines):
    def stage(self, columns: pa.RecordBatch) -> pa.RecordBatch:
        return super().stage(columns).slice(0, 1)


@pytest.fixture(autouse=True)
def _empty() -> None:
    Lines.stored, Lines.rows = None, []


def started(target: hf.CommitTarget) -> tuple[hf.testing.Job, hf.testing.Feed]:
    job = hf.testing.Job()
    feed = job.input("rows", COLUMNS)
    feed.stream.sink_to(hf.StagedSink(target), uid="out")
    job.start()
    return job, feed


def test_the_target_gets_what_it_made() -> None:
    job, feed = started(Lines())
    with job:
        feed.add([{"i": 1, "text": "a"}, {"i": 2, "text": "b"}])
        job.checkpoint()
        feed.add({"i": 3, "text": "c"})
        job.restart()
        assert Lines.rows == ["1=a", "2=b"]
        job.checkpoint()
        assert Lines.rows == ["1=a", "2=b", "3=c"]


def test_a_row_that_it_refuses_is_in_no_checkpoint() -> None:
    job, feed = started(Lines())
    with job:
        with pytest.raises(hf.InvalidRowError) as raised:
            feed.add({"i": 1, "text": None})
        assert (raised.value.operator, raised.value.column) == ("out", "text")
        assert Lines.rows == []


def test_rows_that_get_lost_on_the_way_are_a_mistake_of_the_target() -> None:
    job, feed = started(Halves())
    with job, pytest.raises(hf.InvalidConfigError, match="made 1 rows of 2"):
        feed.add([{"i": 1, "text": "a"}, {"i": 2, "text": "b"}])


def test_how_far_commits_are_behind_the_job_is_told() -> None:
    with hf.testing.Job() as job:
        feed = job.input("rows", COLUMNS)
        feed.stream.sink_to(hf.StagedSink(Lines(), commit_interval_ms=10_000), uid="out")
        job.start()
        told = [told_of(job)]
        for number, rows in enumerate((1, 2, 3)):
            feed.add([{"i": row, "text": str(number)} for row in range(rows)])
            job.checkpoint()
            told.append(told_of(job))
            job.advance(by_ms=2_000)
        told.append(told_of(job))
        assert len(Lines.rows) == 1
        job.advance(by_ms=10_000)
        assert len(Lines.rows) == 6
        told.append(told_of(job))
    #                      checkpoints, committables, rows, ms
    assert told == [(0, 0, 0, 0), (0, 0, 0, 0), (1, 1, 2, 0), (2, 2, 5, 2_000), (2, 2, 5, 4_000), (0, 0, 0, 0)]


def told_of(job: hf.testing.Job) -> tuple[Any, ...]:
    """By the one subtask that commits."""
    assert job._run is not None
    metrics = [each.subtask.metrics() for each in job._run.workers._deployed()]
    (found,) = [each for each in metrics if each.commit_lag_ms is not UNSET]
    return found.uncommitted_checkpoints, found.pending_committables, found.uncommitted_rows, found.commit_lag_ms
