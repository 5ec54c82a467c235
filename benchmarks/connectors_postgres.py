"""PostgreSQL as a sink beside its raw client: the same rows into the same table, in the same run.

`raw` is `adbc_ingest` of all rows in commits of `ROWS_PER_COMMIT`; `apply` the committer alone: staged Parquet files are read and
copied in, and the position is moved; `job` a whole job on Spark, exactly once, a checkpoint each second.

    python -m benchmarks.connectors_postgres [--quick]"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

import holdfast as hf
from holdfast.barriers.sinklog import StagedFile
from holdfast.operators.connectors.postgres.login import ingest_client
from holdfast.operators.sinks.staging import StagedCheckpoint
from holdfast.operators.sinks.target_committer import TargetFlows
from holdfast.operators.sinks.target_port import TargetPort
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import run_flow

Row = dict[str, Any]

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("at", pa.timestamp("us", "UTC"), nullable=False),
        pa.field("price", pa.float64(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
    ]
)
TABLE = "CREATE TABLE {} (id int8, at timestamptz, price float8, text text)"
ROWS_PER_COMMIT = 400_000
REPEATS = 3
PASSWORD = "HOLDFAST_BENCH_PG_PASSWORD"


class Orders:
    """Rows of about 60 bytes, by their number."""

    def __call__(self, ids: np.ndarray) -> pa.RecordBatch:
        texts = pa.array(np.char.add("an order of some length ", (ids % 1000).astype(str)))
        stamps = pa.array(ids * 1_000 + 1_700_000_000_000_000).cast(SCHEMA.field("at").type)
        return pa.RecordBatch.from_arrays([pa.array(ids), stamps, pa.array(ids * 0.25), texts], schema=SCHEMA)


def measure(rows: int, *, whole_job: bool = True) -> list[Row]:
    """Rows per second of each, and of the raw client's share."""
    from tests.servers.postgres import PASSWORD as SERVERS
    from tests.servers.postgres import PostgresServer

    os.environ[PASSWORD] = SERVERS
    with PostgresServer(settings={"fsync": "on", "max_wal_size": "4GB", "shared_buffers": "256MB", "autovacuum": "on"}) as server:
        ways: dict[str, Callable[[Any, int], float]] = {"raw": _raw, "apply": _apply}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(REPEATS):
            for name, way in ways.items():
                found[name].append(rows / way(server, rows))
        if whole_job:
            found["job"] = [rows / _job(server, rows)]
    raw = statistics.median(found["raw"])
    return [
        {"way": name, "rows_per_second": round(statistics.median(speeds)), "of_raw": round(statistics.median(speeds) / raw, 2)}
        for name, speeds in found.items()
    ]


def _batches(rows: int) -> list[pa.RecordBatch]:
    return [Orders()(np.arange(start, min(start + 65_536, rows))) for start in range(0, rows, 65_536)]


def _fresh(server: Any, name: str) -> None:
    server.execute(f"DROP TABLE IF EXISTS {name}")
    server.execute("DROP TABLE IF EXISTS holdfast_positions")
    server.execute(TABLE.format(name))
    server.execute("CHECKPOINT")


def _counted(server: Any, name: str, rows: int) -> None:
    """AssertionError unless each row is there once."""
    assert server.execute(f"SELECT count(*), count(DISTINCT id), sum(id) FROM {name}") == [(rows, rows, rows * (rows - 1) // 2)]


def _raw(server: Any, rows: int) -> float:
    _fresh(server, "raw_rows")
    batches = _batches(rows)
    step = max(1, ROWS_PER_COMMIT // 65_536)
    connection = ingest_client().connect(server.dsn, autocommit=False)
    with connection, connection.cursor() as cursor:
        began = time.monotonic()
        for first in range(0, len(batches), step):
            cursor.adbc_ingest("raw_rows", pa.RecordBatchReader.from_batches(SCHEMA, batches[first : first + step]), mode="append")
            connection.commit()
        seconds = time.monotonic() - began
    _counted(server, "raw_rows", rows)
    return seconds


def sink_of(server: Any, name: str) -> hf.PostgresSink:
    return hf.PostgresSink(f"postgresql://postgres@127.0.0.1:{server.port}/postgres", name, password=hf.Secret(PASSWORD))


def _apply(server: Any, rows: int) -> float:
    _fresh(server, "applied_rows")
    target = sink_of(server, "applied_rows").target
    target.check(SCHEMA)
    folder = tempfile.mkdtemp(prefix="holdfast-bench-")
    try:
        storage = LocalStorage(folder)
        starts = range(0, rows, ROWS_PER_COMMIT)
        checkpoints = [_staged(target, folder, start, min(ROWS_PER_COMMIT, rows - start)) for start in starts]
        flows = TargetFlows("target", hf.CommitOwner("orders", "job", 1, "nonce", None, (), 0))
        port: Any = TargetPort(target, storage)
        position = run_flow(flows.open(None), port)
        began = time.monotonic()
        for checkpoint in checkpoints:
            position = run_flow(flows.commit(position, [checkpoint], None), port)
        seconds = time.monotonic() - began
        target.close()
    finally:
        shutil.rmtree(folder)
    _counted(server, "applied_rows", rows)
    return seconds


def _staged(target: hf.CommitTarget, folder: str, start: int, count: int) -> StagedCheckpoint:
    """One checkpoint's file, as a writer stages it."""
    import pyarrow.parquet as pq

    number = 1 + start // ROWS_PER_COMMIT
    rows = pa.Table.from_batches([target.stage(Orders()(np.arange(start, start + count)))])
    pq.write_table(rows, f"{folder}/{number}", compression="zstd", write_page_checksum=True, row_group_size=count)
    return StagedCheckpoint(number, folder, (StagedFile(str(number), count),))


def _job(server: Any, rows: int) -> float:
    from benchmarks.harness import Bench
    from benchmarks.jobs import environment

    _fresh(server, "job_rows")
    bench = Bench()
    try:
        env = environment("postgres", 1, "memory", 1000)
        env.from_source(hf.GeneratorSource(Orders(), rows, SCHEMA)).uid("orders").sink_to(sink_of(server, "job_rows")).uid("out")
        seconds = bench.run(env, rows).seconds
    finally:
        bench.spark.stop()
    _counted(server, "job_rows", rows)
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rows, and no Spark")
    quick = parser.parse_args().quick
    for row in measure(800_000 if quick else 6_000_000, whole_job=not quick):
        print(json.dumps(row))
