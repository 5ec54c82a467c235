from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.barriers.elements import Batch
from holdfast.operators.sinks.files.parquet import ParquetSink, read_committed
from holdfast.statebackends.errors import NotFoundError
from holdfast.statebackends.storage import port as ops
from holdfast.statebackends.storage.directory import LocalStorage
from tests.operators.ports import Collected, ManualContext

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

SCHEMA = pa.schema(
    [("t", pa.timestamp("us", "UTC")), ("d", pa.date32()), ("x", pa.decimal128(10, 2)), ("s", pa.string()), ("n", pa.int32())]
)


def rows(*numbers: int) -> Batch:
    values: list[dict[str, Any]] = [
        {"t": dt.datetime(2013, 1, 1, 5, tzinfo=dt.UTC), "d": dt.date(2013, 1, 1), "x": Decimal("1.25"), "s": "é", "n": number}
        for number in numbers
    ]
    return Batch(rows=values, schema=SCHEMA)


def test_only_committed_rows_are_seen_also_while_the_job_runs(spark: SparkSession, tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path, "out")
    with pytest.raises(NotFoundError):
        sink.dataframe(spark)
    writer, committer = sink.create_writer(SCHEMA), sink.create_committer()
    assert sink.dataframe(spark).collect() == []
    out, context = Collected(), ManualContext()
    writer.setup(context, out)
    committer.setup(context, Collected())
    committer.initialize_state()
    committer.open()
    for number in (1, 2):
        writer.process_batch(rows(number, number + 10), 0)
        writer.prepare_snapshot(number)
        committer.process_batch(out.batches.pop(), 0)
        work = writer.snapshot_work(number)
        assert work is not None
        ops.run_flow(work, LocalStorage(tmp_path))
    context.run_pool()
    committer.notify_checkpoint_complete(1)
    context.run_pool()
    frame = ParquetSink(tmp_path, "out").dataframe(spark)
    assert [row.n for row in frame.orderBy("n").collect()] == [1, 11]
    assert ParquetSink(tmp_path).dataframe(spark).count() == 2  # as another program finds it
    row = frame.selectExpr("*", "unix_micros(t) micros").first()
    assert row is not None
    assert (row.micros, row.d, row.x, row.s) == (1357016400000000, dt.date(2013, 1, 1), Decimal("1.25"), "é")
    assert spark.read.parquet(str(tmp_path)).count() == 2, "plain readers see the same"
    committer.notify_checkpoint_complete(2)
    context.run_pool()
    assert sink.dataframe(spark).count() == 4
    assert read_committed(tmp_path).num_rows == 4


@pytest.mark.parametrize("format", ["parquet", "json", "csv"])
def test_rows_of_every_format_and_partition_are_those_that_went_in(spark: SparkSession, tmp_path: Path, format: str) -> None:
    schema = pa.schema([("i", pa.int64()), ("text", pa.string()), ("at", pa.timestamp("us", "UTC")), ("day", pa.date32())])
    rows = [
        {"i": i, "text": text, "at": dt.datetime(2026, 7, 1, 2, 3, 4, 5, dt.UTC), "day": dt.date(2026, 1, 1 + i % 2)}
        for i, text in enumerate(['say "x",\ny\\', "NA", None, "a/b", "é", " "])
    ]
    path = tmp_path / "out"
    with hf.testing.Job() as job:
        feed = job.input("rows", schema)
        feed.stream.sink_to(hf.FileSink(path, format, "out", partition_by=["day", "text"]), uid="files")
        job.start()
        feed.add(rows)
        job.checkpoint()
    found = hf.FileSink(path, format).dataframe(spark)
    assert found.columns == schema.names
    assert sorted(found.toArrow().cast(schema).to_pylist(), key=lambda row: row["i"]) == rows
