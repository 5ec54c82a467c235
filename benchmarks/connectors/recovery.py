"""A committer that is killed in a commit, until the next commit; and the log of a sink with 100,000 commits, opened."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

import holdfast as hf
from benchmarks.connectors import postgres
from benchmarks.connectors.measuring import Row, seconds_line
from benchmarks.harness import Bench, wait_until
from benchmarks.jobs import environment
from holdfast.barriers.sinks.log import CommitEntry, LogEntry, OwnerEntry, SinkPaths, StagedFile
from holdfast.operators.sinks.files.log import Claimant, open_log_flow
from holdfast.operators.sinks.files.summaries import summarise_flow
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import run_flow

KILLS = 5
ROWS_PER_SECOND = 100_000
INTERVAL_MS = 500
WAIT_S = 60.0
RECOVERY_SECONDS_MAX = 1.5

COMMITS = 100_000
OPENS = 5
OPEN_SECONDS_MAX = 1.0


def measure(bench: Bench, scale: float) -> list[Row]:
    """Both."""
    kills = max(1, round(KILLS * min(1.0, scale * 4)))
    seconds = _kills(bench, kills)
    how = f"median; PostgreSQL, {ROWS_PER_SECOND:,} rows/s, a checkpoint each {INTERVAL_MS} ms; kill -9 while COPY runs"
    commits = max(2_000, int(COMMITS * scale))
    opens = _opens(bench.folder, commits)
    middle, opened = statistics.median(seconds), statistics.median(opens)
    return [
        seconds_line("committer killed in a commit -> next commit", seconds, middle, RECOVERY_SECONDS_MAX, how),
        seconds_line(f"log of {commits:,} commits opened", opens, opened, OPEN_SECONDS_MAX, "median; local disk"),
    ]


# ------------------------------------------------------------------------------------------------------------------------- kills


def _kills(bench: Bench, count: int) -> list[float]:
    with postgres.started(bench) as server:
        postgres.make_table(server, "kept_rows")
        env = environment("killed", 1, "filesystem", INTERVAL_MS)
        source = hf.GeneratorSource(postgres.Orders(), ROWS_PER_SECOND * 600, postgres.SCHEMA, rows_per_second=ROWS_PER_SECOND)
        env.from_source(source).uid("orders").sink_to(postgres.sink_of(server, "kept_rows")).uid("out")
        with bench.launched(env) as handle, postgres.cursor_of(server) as cursor:
            found = [_killed(handle, cursor) for _ in range(count)]
        rows = server.execute("SELECT count(*), count(DISTINCT id), max(id) + 1 FROM kept_rows")[0]
        assert rows[0] == rows[1] == rows[2], f"rows, different ones, of: {rows}"
    return found


def _killed(handle: Any, cursor: Any) -> float:
    """Seconds from the kill to the next commit of rows."""
    start = _committed(cursor)
    wait_until("two commits", lambda: _committed(cursor) > start + 1, WAIT_S, every_s=0.05)
    pid = handle.client.workers(handle.job_id)["workers"][0]["pid"]
    wait_until("a commit that copies rows", lambda: _is_copying(cursor), WAIT_S, every_s=0)
    os.kill(pid, 9)
    at = time.monotonic()
    before = _committed(cursor)
    wait_until("the next commit", lambda: _committed(cursor) > before, WAIT_S, every_s=0.002)
    return time.monotonic() - at


def _is_copying(cursor: Any) -> bool:
    cursor.execute(
        "SELECT 1 FROM pg_stat_activity WHERE application_name LIKE 'holdfast %' AND state = 'active' AND query ILIKE 'copy%'"
    )
    return bool(cursor.fetchall())


def _committed(cursor: Any) -> int:
    """Id of the checkpoint whose rows are committed; 0: none."""
    position = postgres.committed(cursor)
    return 0 if position is None else position.checkpoint_id


# --------------------------------------------------------------------------------------------------------------------------- log


def _opens(folder: Path, commits: int) -> list[float]:
    """A committer without any position of its own opens the log: it reads all of it."""
    root = folder / "log"
    storage, paths = LocalStorage(str(root)), SinkPaths("out")
    schema = pa.schema([("id", pa.int64())]).serialize().to_pybytes().hex()
    claimant = Claimant("job", 2, "nonce-2", commits, True, schema, 0)
    (root / paths.log(0)).parent.mkdir(parents=True)
    for number in range(commits + 1):
        (root / paths.log(number)).write_bytes(msgspec.json.encode(_entry(number, schema)))
    done: frozenset[int] | None = None
    for _ in range(commits // 1_000 + 1):
        done = run_flow(summarise_flow(paths, commits + 1, done), storage)
    found = []
    for turn in range(OPENS):
        began = time.perf_counter()
        opened = run_flow(open_log_flow(paths, None, (), claimant), LocalStorage(str(root)))
        found.append(time.perf_counter() - began)
        assert opened.position.next_sequence == commits + 2 + turn, opened.position
    shutil.rmtree(root)
    return found


def _entry(number: int, schema: str) -> LogEntry:
    if number == 0:
        return OwnerEntry(1, 0, 1, "nonce-1", "job", 1, 0, schema, 0)
    file = StagedFile(f"part-{number:020d}-0-job-1-0123456789abcdef.parquet", 10_000)
    return CommitEntry(1, number, 1, "nonce-1", "job", 1, number, 10_000, (file,), "nonce-1", 0)
