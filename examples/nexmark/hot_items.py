"""Nexmark's query 5 as a job of one's own: which auction had most bids in ten seconds, every two seconds?

Two workers count, and commit to Parquet with each checkpoint; one of them is killed on the way. In the end the committed rows are
compared with plain Spark SQL over the same bids.

    python examples/nexmark/hot_items.py --events 3000000

All queries, each compared with DuckDB: `holdfast bench nexmark` (docs/nexmark.md). They stand in api/nexmark/."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

import holdfast as hf
from holdfast.api.nexmark.events import count_of, source
from holdfast.operators.sinks.files.parquet import read_committed

COLUMNS = ("auction", "dateTime")
ANSWER = """
    WITH bid AS (SELECT auction, floor(unix_millis(dateTime) / 2000) * 2000 AS slide FROM bids),
    counts AS (
        SELECT auction, slide + shift AS window_end, count(*) AS num
        FROM bid LATERAL VIEW explode(array(2000, 4000, 6000, 8000, 10000)) AS shift GROUP BY ALL
    )
    SELECT CAST(timestamp_millis(window_end) AS timestamp_ntz) AS ends, auction, num
    FROM (SELECT *, row_number() OVER (PARTITION BY window_end ORDER BY num DESC, auction) AS place FROM counts) WHERE place = 1
"""


def hot_items(bids: hf.Stream) -> hf.Stream:
    """Of each window of ten seconds the auction with most bids; of equals the lesser number."""
    counts = bids.key_by("auction").window(hf.Sliding(seconds=10, slide=2_000)).aggregate(num=hf.count()).uid("counts")
    ends = counts.select("auction", "num", ends="window_end").uid("ends")
    first = ends.key_by("ends").window(hf.Tumbling(seconds=2)).top(1, by=["num", "auction"], descending=[True, False])
    return first.uid("first").select("ends", "auction", "num").uid("columns")


def run(events: int, rows_per_second: float, folder: str) -> None:
    """The job, with a worker that dies in the middle."""
    env = hf.Environment("hot-items", parallelism=2, checkpoint_interval_ms=500, state_dir=f"{folder}/state")
    bids = source("bid", events, columns=COLUMNS, rows_per_second=rows_per_second)
    timed = env.from_source(bids).uid("bids").assign_timestamps("dateTime", 0).uid("times")
    hot_items(timed).sink_to(hf.ParquetSink(f"{folder}/hot"), uid="hot")
    handle = env.execute()
    try:
        while not handle.client.checkpoints(handle.job_id)["counts"]["completed"]:
            time.sleep(0.1)
        victim = handle.client.workers(handle.job_id)["workers"][0]["pid"]
        os.kill(victim, signal.SIGKILL)
        print(f"killed worker {victim}")
        handle.wait()
    finally:
        handle.close()


def expected(spark: SparkSession, events: int, folder: str) -> list[tuple[object, ...]]:
    """The same by Spark SQL, which knows nothing of the job."""
    reader = source("bid", events, columns=COLUMNS)
    bids = reader.make_batch(np.arange(count_of("bid", events)))
    pq.write_table(pa.Table.from_batches([bids]), f"{folder}/bids.parquet")
    spark.read.parquet(f"{folder}/bids.parquet").createOrReplaceTempView("bids")
    return sorted(map(tuple, spark.sql(ANSWER).collect()))


def main() -> int:
    parser = argparse.ArgumentParser(description="Hot items of an auction house, exactly once.")
    parser.add_argument("--events", type=int, default=3_000_000, help="of all kinds; 46 of 50 are bids")
    parser.add_argument("--rate", type=float, default=400_000, help="bids a second, so that there is time for a failure")
    arguments = parser.parse_args()
    spark = (
        SparkSession.builder.master("local[3]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")  # a killed worker is a page of Java
    with tempfile.TemporaryDirectory() as folder:
        run(arguments.events, arguments.rate, folder)
        hot = read_committed(f"{folder}/hot")
        rows = sorted((row["ends"].replace(tzinfo=None), row["auction"], row["num"]) for row in hot.to_pylist())
        exact = rows == expected(spark, arguments.events, folder)
    spark.stop()
    for ends, auction, num in rows[-3:]:
        print(f"{ends}  auction {auction:>8}  {num:>6} bids")
    print(f"HOT ITEMS {'OK' if exact else 'DIFFER'} windows={len(rows)} exact={str(exact).lower()}")
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
