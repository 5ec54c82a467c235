"""Groups of stock queries on real Spark: committed together, saved with their checkpoints, gone on with in new folders."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import holdfast as hf
from tests.spark.test_from_stream import Files, completed, files, wait_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(280)]
__all__ = ["files"]


def group(spark: SparkSession, files: Files, folder: Path, name: str, **of: Any) -> tuple[hf.QueryGroup, dict[str, hf.ParquetSink]]:
    """Rows as they are, and a stateful query: how many rows each n has had, in `update` mode."""
    env = hf.Environment(name, checkpoint_interval_ms=200, state_dir=str(folder / "state"), retain_on_finish=True)
    made = hf.QueryGroup(env)
    sinks = {each: hf.ParquetSink(folder / name / each) for each in ("rows", "counts")}
    stream = files.stream(spark)
    made.add(stream, sinks["rows"], name="rows", **of)
    made.add(stream.groupBy("n").count(), sinks["counts"], name="counts", output_mode="update", **of)
    return made, sinks


def rows(spark: SparkSession, sink: hf.ParquetSink) -> list[tuple[int, ...]]:
    return sorted(tuple(row) for row in sink.dataframe(spark).collect())


def counts(batches: range) -> list[tuple[int, ...]]:
    return sorted((n, batch + 1) for n in range(10) for batch in batches)


def test_queries_are_saved_together_and_go_on_in_new_folders(spark: SparkSession, files: Files, tmp_path: Path) -> None:
    made, sinks = group(spark, files, tmp_path, "first")
    with made.start(progress=False) as job:
        wait_for(lambda: job.progress().records_in == 60)
        worker = job.client.workers(job.job_id)["workers"][0]
        seen = completed(job)
        wait_for(lambda: completed(job) > seen)
        os.kill(worker["pid"], signal.SIGKILL)
        files.add()
        wait_for(lambda: job.progress().records_in == 80)
        seen = completed(job)
        wait_for(lambda: completed(job) > seen + 1)  # nothing is staged that the fork would commit once more
        savepoint = made.savepoint(tmp_path / "savepoints")
        files.add()
        wait_for(lambda: job.progress().records_in == 100)
        job.stop(tmp_path / "end")
    assert rows(spark, sinks["rows"]) == files.rows
    assert rows(spark, sinks["counts"]) == counts(range(5))
    assert (Path(savepoint.removeprefix("file://")) / "queries/group.json").exists()

    spark.conf.set("spark.sql.shuffle.partitions", "3")
    try:
        with pytest.raises(hf.InvalidConfigError, match=r"spark.sql.shuffle.partitions=2 since its first batch"):
            group(spark, files, tmp_path, "second", available_now=True)[0].start(progress=False, restore=savepoint)
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", "2")
    files.add()
    made, sinks = group(spark, files, tmp_path, "second", available_now=True)
    with made.start(progress=False, restore=savepoint, sinks="fork") as job:
        assert job.wait(120) == "FINISHED"
    assert rows(spark, sinks["rows"]) == [row for row in files.rows if row[0] >= 4]
    assert rows(spark, sinks["counts"]) == counts(range(4, 6)), "with the state of the batches before"


def test_groups_are_checked(spark: SparkSession, files: Files, tmp_path: Path) -> None:
    made = hf.QueryGroup(hf.Environment("empty", state_dir=str(tmp_path)))
    with pytest.raises(hf.GraphError, match="no query"):
        made.start()
    with pytest.raises(hf.InvalidConfigError, match="not started"):
        made.savepoint()
    made.add(files.stream(spark), hf.Blackhole(), name="a")
    with pytest.raises(hf.GraphError, match="'a'"):
        made.add(files.stream(spark), hf.Blackhole(), name="a")
