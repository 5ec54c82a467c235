"""Spark reads committed output, and feeds jobs: each beside what Spark, or Holdfast, does without streams and without the log."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import holdfast as hf
from benchmarks.connectors.measuring import Row, Timed, alternating, compared
from benchmarks.harness import Bench
from benchmarks.jobs import environment
from benchmarks.workloads import SCHEMA, Bids

OUTPUT_ROWS = 12_000_000
INPUT_ROWS = 6_000_000
RATIO_MIN = 0.7


def measure(bench: Bench, scale: float) -> list[Row]:
    """The format beside Spark's Parquet reader; from_stream beside from_dataframe."""
    output = max(100_000, int(OUTPUT_ROWS * scale))
    folder = bench.folder / "output"
    _write(bench, folder, output)
    return [_format(bench, folder, output), _input(bench, folder, min(output, max(100_000, int(INPUT_ROWS * scale))))]


def _write(bench: Bench, folder: Path, rows: int) -> None:
    """The committed output of a job: four columns of bids."""
    env = environment("bids", 1, "memory", 1_000)
    source = hf.GeneratorSource(Bids(10_000), rows, SCHEMA)
    env.from_source(source).uid("bids").sink_to(hf.ParquetSink(str(folder))).uid("out")
    bench.run(env, rows)


def _format(bench: Bench, folder: Path, rows: int) -> Row:
    hf.register_formats(bench.spark)
    files = [str(path) for path in sorted(folder.glob("part-*"))]
    ways = {
        "raw": lambda turn: _summed(bench.spark.read.parquet(*files), rows),
        "format": lambda turn: _summed(bench.spark.read.format("holdfast").load(str(folder)), rows),
    }
    alternating(ways, 1)  # executors, Python workers and the page cache are warm then
    found = alternating(ways)
    how = f"{len(files)} files, 4 columns, local[3]; sum of each column"
    return _without_cpu(
        compared('format("holdfast")', found["format"], found["raw"], ratio_min=RATIO_MIN, beside="spark.read.parquet", how=how)
    )


def _summed(frame: Any, rows: int) -> Timed:
    from pyspark.sql import functions as F

    began = time.perf_counter()
    row = frame.agg(F.count("*"), *(F.sum(name) for name in SCHEMA.names)).collect()[0]
    seconds = time.perf_counter() - began
    assert row[0] == rows, row
    return Timed(rows, seconds, 0.0)


def _input(bench: Bench, folder: Path, rows: int) -> Row:
    """From the start of the query, or of the write, to the end of the job."""
    source = bench.folder / "input"
    files = sorted(folder.glob("part-*"))
    bench.spark.read.parquet(*map(str, files)).limit(rows).repartition(8).write.parquet(str(source))
    schema = bench.spark.read.parquet(str(source)).schema

    def frame(turn: int) -> Timed:
        env = environment("from-dataframe", 1, "memory", 1_000)
        return _job(bench, env, env.from_dataframe(bench.spark.read.schema(schema).parquet(str(source))), rows)

    def stream(turn: int) -> Timed:
        env = environment("from-stream", 1, "memory", 1_000)
        stream = bench.spark.readStream.schema(schema).parquet(str(source))
        return _job(bench, env, env.from_stream(stream, available_now=True), rows)

    found = alternating({"frame": frame, "stream": stream})
    how = "8 files of Parquet, 4 columns; execute() to FINISHED"
    return _without_cpu(
        compared("from_stream", found["stream"], found["frame"], ratio_min=RATIO_MIN, beside="from_dataframe", how=how)
    )


def _job(bench: Bench, env: hf.Environment, stream: Any, rows: int) -> Timed:
    stream.uid("in").sink_to(hf.Blackhole()).uid("out")
    began = time.perf_counter()
    with bench.launched(env) as handle:
        state = handle.wait(300)
        seconds = time.perf_counter() - began
        assert state == "FINISHED", state
    return Timed(rows, seconds, 0.0)


def _without_cpu(line: Row) -> Row:
    """Spark's processes are not measured."""
    return {**line, "cpu_us": "", "beside_cpu_us": ""}
