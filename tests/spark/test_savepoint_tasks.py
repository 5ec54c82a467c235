"""`hf.Savepoint` of Spark DataFrames, written by Spark's tasks, against DuckDB over the files and Spark SQL over the rows."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.operators.sources.dataframe_write import map_in_arrow
from holdfast.statebackends.errors import InvalidConfigError, InvalidKeyError, StorageUnavailableError
from tests.statebackends.snapshot_harness import files_below

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

LAST = hf.ValueStateDescriptor("last", dict[str, float])
SEEN = hf.ListStateDescriptor("seen", str)
COUNT = hf.ValueStateDescriptor("n", int)
ROWS = 20_000


def test_tasks_write_the_savepoint_and_the_driver_its_metadata(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.range(ROWS, numPartitions=2).selectExpr(
        "id % 5000 as `user.id`", "timestamp_millis(id * 1000) as at", "map('x', cast(id as double)) as value", "id as n"
    )
    newest = frame.where("n >= 15000")
    texts = frame.selectExpr("`user.id`", "cast(n as string) as text", "cast(n div 5000 as int) as place")
    seen = texts.where("`user.id` < 100")
    made = (
        hf.Savepoint.create(max_parallelism=128, parallelism=3)
        .with_state("last", LAST, newest, key=["user.id", "at"])
        .with_state("seen", SEEN, seen, key="user.id", value="text", position="place")
        .write(tmp_path / "savepoint")
    )
    assert made.verify().is_sound
    assert made.states("last")["last"].key_type == "tuple<int64,timestamp[us, UTC]>"
    assert len(files_below(tmp_path / "savepoint")) == 2 * 3 + 1, "a file for each state and subtask, and _metadata"

    def duck(query: str, state: str) -> list[Any]:
        return duckdb.sql(query.format(f"'{tmp_path}/savepoint/*-{state}.parquet'")).fetchall()

    wanted = newest.selectExpr("`user.id` as k", "unix_millis(at)", "value['x']").orderBy("k").collect()
    assert duck("select key_0, epoch_ms(key_1), value['x'] from {} order by 1", "last") == [tuple(row) for row in wanted]
    assert len(wanted) == 5_000
    elements = seen.selectExpr("`user.id` as k", "text", "place").orderBy("k", "place").collect()
    assert duck("select key, value, position from {} order by 1, 3", "seen") == [tuple(row) for row in elements]
    assert duck("select count(distinct key_group), min(key_group), max(key_group) from {}", "last") == [(128, 0, 127)]


def test_a_frame_without_the_columns_is_refused_before_any_task_runs(spark: SparkSession, tmp_path: Path) -> None:
    twice = spark.sql("select 1 as key, 2 as value, 3 as value")
    for frame, options, said in ((twice, {}, "'value' in the frame, or twice"), (twice, {"key": "user"}, "no column 'user'")):
        with pytest.raises(InvalidConfigError, match=said):
            hf.Savepoint.create(max_parallelism=8).with_state("op", COUNT, frame, **options).write(tmp_path / "savepoint")
    assert files_below(tmp_path) == {}


@pytest.mark.endurance
def test_wrong_rows_and_killed_tasks_end_in_a_typed_error_and_leave_nothing(spark: SparkSession, tmp_path: Path) -> None:
    empty = hf.Savepoint.create(max_parallelism=8, parallelism=2)
    twice = spark.sql("select id % 3 as key, id as value from range(4)")
    with pytest.raises(InvalidKeyError, match=r"state 'n': two rows have \{'key': 0"):
        empty.with_state("op", COUNT, twice).write(tmp_path / "savepoint")

    def dying(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        os.kill(os.getpid(), signal.SIGKILL)

    killed = map_in_arrow(twice.where("value < 3"), dying, twice.schema)
    with pytest.raises(StorageUnavailableError, match="operator 'op', state 'n': Spark could not write it"):
        empty.with_state("op", COUNT, killed).write(tmp_path / "savepoint")
    assert files_below(tmp_path) == {}
