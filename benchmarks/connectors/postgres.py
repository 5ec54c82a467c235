"""PostgreSQL as a sink beside its raw client: the same rows into the same table.

The raw client is `adbc_ingest` of all rows in commits of `ROWS_PER_COMMIT`; the committer alone reads staged Parquet files, copies
them in, and moves the position; the job has a checkpoint each second. Its line has all from RUNNING to FINISHED; one more has what
it does between its first commit and its last, by the server's own times of commits: without its start and the second in front of
its first checkpoint."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

import holdfast as hf
from benchmarks.connectors.measuring import REPEATS, Row, Timed, alternating, compared, timed, timed_job
from benchmarks.harness import Bench
from benchmarks.jobs import environment
from holdfast.barriers.sinks.log import StagedFile
from holdfast.barriers.sinks.staged import CommitPosition, StagedCheckpoint
from holdfast.operators.connectors.postgres.login import ingest_client
from holdfast.operators.sinks.files.formats import encode
from holdfast.operators.sinks.targets.committer import TargetFlows
from holdfast.operators.sinks.targets.port import TargetPort
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import run_flow

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("at", pa.timestamp("us", "UTC"), nullable=False),
        pa.field("price", pa.float64(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
    ]
)
TABLE = "CREATE TABLE {} (id int8, at timestamptz, price float8, text text)"
ROWS = 8_000_000
"""Some seconds: what a job pays once, and the second in front of its first checkpoint, is in its figure."""
ROWS_PER_COMMIT = 400_000
BATCH_ROWS = 65_536
PASSWORD = "HOLDFAST_BENCH_PG_PASSWORD"
SETTINGS = {"fsync": "on", "max_wal_size": "4GB", "shared_buffers": "256MB", "autovacuum": "on", "track_commit_timestamp": "on"}
HOW = "server: PostgreSQL 18, fsync on, rows of 60 B"


TEXTS = pa.array([f"an order of some length {number}" for number in range(1000)])


class Orders:
    """Rows of about 60 bytes, by their number."""

    def __call__(self, ids: np.ndarray) -> pa.RecordBatch:
        texts = TEXTS.take(pa.array(ids % 1000))
        stamps = pa.array(ids * 1_000 + 1_700_000_000_000_000).cast(SCHEMA.field("at").type)
        return pa.RecordBatch.from_arrays([pa.array(ids), stamps, pa.array(ids * 0.25), texts], schema=SCHEMA)


def measure(bench: Bench, scale: float) -> list[Row]:
    """The committer alone, and a whole job."""
    rows = max(10_000, int(ROWS * scale))
    steady: list[Timed] = []
    with started(bench) as server:
        batches = [Orders()(np.arange(start, min(start + BATCH_ROWS, rows))) for start in range(0, rows, BATCH_ROWS)]
        ways = {
            "raw": lambda turn: _raw(server, batches, rows),
            "apply": lambda turn: _apply(server, rows // 4),
            "job": lambda turn: _job(bench, server, rows, steady),
        }
        found = alternating(ways)
    beside = "adbc_ingest"
    aims: Any = {"ratio_min": 0.8, "speed_min": 250_000, "beside": beside, "how": HOW}
    return [
        compared("PostgreSQL append", found["job"], found["raw"], **aims),
        *([compared("PostgreSQL append, first to last commit", steady, found["raw"], **aims)] if len(steady) == REPEATS else []),
        compared("PostgreSQL append, committer alone", found["apply"], found["raw"], **aims),
    ]


def started(bench: Bench) -> Any:
    """A server, to be entered, whose password the workers know."""
    from tests.servers.postgres import PASSWORD as SERVERS
    from tests.servers.postgres import PostgresServer

    os.environ[PASSWORD] = SERVERS
    bench.spark.sparkContext.environment[PASSWORD] = SERVERS  # Spark's Python processes have the JVM's, which is older
    return PostgresServer(settings=SETTINGS)


@contextmanager
def cursor_of(server: Any) -> Iterator[Any]:
    """Each statement is committed."""
    import psycopg2

    connection = psycopg2.connect(server.dsn)
    connection.autocommit = True
    try:
        with connection.cursor() as cursor:
            yield cursor
    finally:
        connection.close()


def committed(cursor: Any) -> CommitPosition | None:
    """Position of the only sink."""
    cursor.execute("SELECT to_regclass('holdfast_positions') IS NOT NULL")
    if not cursor.fetchall()[0][0]:
        return None
    cursor.execute("SELECT position FROM holdfast_positions")
    found = cursor.fetchall()
    return CommitPosition.decode(found[0][0]) if found else None


def sink_of(server: Any, name: str) -> hf.PostgresSink:
    """A sink that appends to a table."""
    return hf.PostgresSink(f"postgresql://postgres@127.0.0.1:{server.port}/postgres", name, password=hf.Secret(PASSWORD))


def make_table(server: Any, name: str) -> None:
    """An empty one, and no positions."""
    server.execute(f"DROP TABLE IF EXISTS {name}")
    server.execute("DROP TABLE IF EXISTS holdfast_positions")
    server.execute(TABLE.format(name))
    server.execute("CHECKPOINT")


def _counted(server: Any, name: str, rows: int) -> None:
    """AssertionError unless each row is there once."""
    assert server.execute(f"SELECT count(*), count(DISTINCT id), sum(id) FROM {name}") == [(rows, rows, rows * (rows - 1) // 2)]


def _raw(server: Any, batches: list[pa.RecordBatch], rows: int) -> Timed:
    make_table(server, "raw_rows")
    step = max(1, ROWS_PER_COMMIT // BATCH_ROWS)
    connection = ingest_client().connect(server.dsn, autocommit=False)
    with connection, connection.cursor() as cursor:

        def ingest() -> None:
            for first in range(0, len(batches), step):
                some = pa.RecordBatchReader.from_batches(SCHEMA, batches[first : first + step])
                cursor.adbc_ingest("raw_rows", some, mode="append")
                connection.commit()

        found = timed(rows, ingest)
    _counted(server, "raw_rows", rows)
    return found


def _apply(server: Any, rows: int) -> Timed:
    make_table(server, "applied_rows")
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

        def commit() -> None:
            nonlocal position
            for checkpoint in checkpoints:
                position = run_flow(flows.commit(position, [checkpoint], None), port)

        found = timed(rows, commit)
        target.close()
    finally:
        shutil.rmtree(folder)
    _counted(server, "applied_rows", rows)
    return found


def _staged(target: hf.CommitTarget, folder: str, start: int, count: int) -> StagedCheckpoint:
    """One checkpoint's file, as a writer stages it."""
    number = 1 + start // ROWS_PER_COMMIT
    rows = pa.Table.from_batches([target.stage(Orders()(np.arange(start, start + count)))])
    with open(f"{folder}/{number}", "wb") as file:
        file.writelines(encode("parquet", rows.to_batches(), rows.schema, is_output=False))
    return StagedCheckpoint(number, folder, (StagedFile(str(number), count),))


def _job(bench: Bench, server: Any, rows: int, steady: list[Timed]) -> Timed:
    """The whole job; what it did between its commits is added to `steady`."""
    make_table(server, "job_rows")
    env = environment("postgres", 1, "memory", 1_000)
    env.from_source(hf.GeneratorSource(Orders(), rows, SCHEMA)).uid("orders").sink_to(sink_of(server, "job_rows")).uid("out")
    found = timed_job(bench, env, rows)
    _counted(server, "job_rows", rows)
    commits = server.execute(_COMMITS.format("job_rows"))
    if len(commits) > 1:
        count = rows - commits[0][1]
        steady.append(Timed(count, commits[-1][0] - commits[0][0], found.cpu_seconds * count / rows))
    return found


_COMMITS = """
SELECT extract(epoch FROM pg_xact_commit_timestamp(writer))::float8, count
FROM (SELECT xmin AS writer, count(*) AS count FROM {} GROUP BY xmin) AS written ORDER BY 1
"""
"""When rows were committed, and how many."""
