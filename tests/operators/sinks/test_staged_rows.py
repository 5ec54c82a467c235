"""What a target makes of rows before they are staged, in a whole job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

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
