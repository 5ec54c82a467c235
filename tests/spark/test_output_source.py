"""`format("holdfast")` on a real session: a batch, and a query that limits, ends and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

import holdfast as hf
from tests.operators.sinks.files.written import Written

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

SCHEMA = pa.schema([("i", pa.int64()), ("s", pa.string()), ("t", pa.timestamp("us", "UTC"))])


def values(*numbers: int) -> dict[str, list[Any]]:
    return {"i": list(numbers), "s": [f"s{number}" for number in numbers], "t": [number * 1_000_000 for number in numbers]}


@pytest.fixture(scope="module")
def registered(spark: SparkSession) -> SparkSession:
    hf.register_formats(spark)
    hf.register_formats(spark)
    return spark


def test_a_batch_and_a_stream_that_goes_on_give_each_committed_row_once(registered: SparkSession, tmp_path: Path) -> None:
    spark, out = registered, str(tmp_path / "out")
    job = Written(tmp_path / "out", SCHEMA)
    for first in range(0, 8, 2):
        job.commit(values(first, first + 1))
    job.stage(values(99))
    frame = spark.read.format("holdfast").load(out)
    assert frame.columns == ["i", "s", "t"]
    assert sorted(row.i for row in frame.where("s <> 's3'").collect()) == [0, 1, 2, 4, 5, 6, 7]
    assert frame.selectExpr("sum(unix_micros(t))").first()[0] == 28_000_000
    seen: list[list[int]] = []

    def run() -> None:
        stream = spark.readStream.format("holdfast").option("maxFilesPerTrigger", 3).load(out)
        query = (
            stream.writeStream.foreachBatch(lambda batch, number: seen.append(sorted(row.i for row in batch.collect())))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(120)

    run()
    assert seen == [[0, 1, 2, 3, 4, 5], [6, 7]]
    seen.clear()
    Written(tmp_path / "out", SCHEMA).commit(values(8))
    run()
    assert [batch for batch in seen if batch] == [[8]]


def test_what_is_wrong_is_named(registered: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(PySparkException, match=r"NotFoundError.*no sink has written"):
        registered.read.format("holdfast").load(str(tmp_path))
    with pytest.raises(PySparkException, match="'colums' is unknown"):
        registered.read.format("holdfast").option("colums", "i").load(str(tmp_path))
