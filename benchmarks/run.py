"""`make bench`: runs the workloads, prints a table for each, and saves all figures as JSON in benchmarks/results/.

A suite that fails is named at the end; the others run all the same.

python -m benchmarks.run [--only w1,w3] [--quick] [--scale 0.1]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import jobs
from benchmarks.acks import measure as measure_acks
from benchmarks.async_calls import measure as measure_async
from benchmarks.connectors import measure as measure_connectors
from benchmarks.connectors.measuring import FAILED
from benchmarks.explain import measure as measure_explain
from benchmarks.flood import PHASES as FLOOD_PHASES
from benchmarks.flood import measure as measure_flood
from benchmarks.harness import Bench, Measured, raw_write_ms, spread, wait_until
from benchmarks.heapsnapshots import KINDS
from benchmarks.heapsnapshots import measure as measure_heap
from benchmarks.imports import measure as measure_imports
from benchmarks.incremental import measure as measure_incremental
from benchmarks.inflight import measure as measure_inflight
from benchmarks.joins import measure as measure_joins
from benchmarks.pressure import measure_modes, measure_w4, measure_w6, measure_w7
from benchmarks.restarts import measure as measure_restarts
from benchmarks.restore import measure as measure_restore
from benchmarks.row_windows import measure as measure_row_windows
from benchmarks.row_windows import measure_timers
from benchmarks.rowcosts import measure as measure_row_costs
from benchmarks.rowtable import measure as measure_row_table
from benchmarks.service import measure as measure_service
from benchmarks.simulation import measure as measure_simulation
from benchmarks.tables import measure as measure_tables
from benchmarks.takeover import measure as measure_takeover
from benchmarks.takeover import summary as summary_of_takeovers
from benchmarks.tools import measure as measure_tools
from benchmarks.transfers import measure as measure_transfers
from benchmarks.views import measure as measure_views
from holdfast.api.nexmark.queries import QUERIES
from holdfast.api.nexmark.speed import EVENTS as NEXMARK_EVENTS
from holdfast.api.nexmark.speed import FLINK
from holdfast.api.nexmark.speed import environment as nexmark_job

Row = dict[str, Any]

COLUMNAR_ROWS = {10_000: 240_000_000, 1_000_000: 80_000_000}
"""Records by number of keys: about eight seconds on one core, for several checkpoints of 1 s in a run."""


def throughput_row(workload: str, measured: Measured, **setting: Any) -> Row:
    """One line of a throughput table."""
    return {
        "workload": workload,
        **setting,
        "records_per_second": round(measured.records_per_second),
        "cpu_s_per_million": round(measured.cpu_per_million, 3),
        "checkpoints": f"{measured.checkpoints}/{measured.checkpoints_expected}",
        "counts": measured.counts,
    }


def w0(bench: Bench, quick: bool) -> list[Row]:
    """Generator to blackhole."""
    rows = 20_000_000 if quick else 100_000_000
    return [throughput_row("W0", bench.run(jobs.w0(rows, workers), rows), workers=workers) for workers in (1, 2)]


def _columnar(name: str, make: Callable[..., Any], bench: Bench, quick: bool) -> list[Row]:
    table = []
    for keys, rows in COLUMNAR_ROWS.items():
        for workers in (1, 2):
            for backend in ("memory", "rocksdb"):
                for interval_ms in (None, 1000):
                    if quick and (workers, backend) != (1, "memory"):
                        continue
                    measured = bench.run(make(rows, keys, workers, backend, interval_ms), rows)
                    row = throughput_row(
                        name, measured, keys=keys, workers=workers, backend=backend, checkpoint_ms=interval_ms or "off"
                    )
                    table.append(row)
    return table


def w1(bench: Bench, quick: bool) -> list[Row]:
    """Keyed windows, columnar."""
    return _columnar("W1", jobs.w1, bench, quick)


SLIDING_COST_MAX = 1.5
"""CPU of sliding windows of 60 s by 1 s, as a multiple of that of tumbling ones."""


def sliding(bench: Bench, quick: bool) -> list[Row]:
    """Sliding windows beside tumbling ones of the same length: the same records, sixty times as many windows."""
    table = []
    rows = 4_000_000 if quick else 20_000_000
    for interval_ms in (None, 1000):
        tumbling_cpu = 0.0
        for name, make in (("tumbling", jobs.tumbling), ("sliding", jobs.sliding)):
            measured = bench.run(make(rows, 10_000, 1, "filesystem", interval_ms), rows)
            tumbling_cpu = measured.cpu_per_million if name == "tumbling" else tumbling_cpu
            setting = {"keys": 10_000, "workers": 1, "backend": "filesystem", "checkpoint_ms": interval_ms or "off"}
            times = round(measured.cpu_per_million / tumbling_cpu, 2) if tumbling_cpu else None  # a short run may count none
            cost = {"times_tumbling": times, "aim_at_most": SLIDING_COST_MAX}
            table.append({**throughput_row(name, measured, **setting), **cost})
    return table


def row_windows(bench: Bench, quick: bool) -> list[Row]:
    """Windows of row functions."""
    return [throughput_row(name, measured) for name, measured in measure_row_windows(bench, quick)]


def timers(bench: Bench, quick: bool) -> list[Row]:
    """Timers set and fired, with many pending."""
    return measure_timers(quick)


def w1b(bench: Bench, quick: bool) -> list[Row]:
    """Keyed running aggregates, columnar."""
    return _columnar("W1b", jobs.w1b, bench, quick)


def rows(bench: Bench, quick: bool) -> list[Row]:
    """W1b, a Python function for every record."""
    table = []
    for keys, backend in ((10_000, "memory"), (1_000_000, "memory"), (10_000, "rocksdb")):
        count = 1_000_000 if quick else 4_000_000
        for interval_ms in (None, 1000):
            measured = bench.run(jobs.rows_by_function(count, keys, 1, backend, interval_ms), count)
            setting = {"keys": keys, "workers": 1, "backend": backend, "checkpoint_ms": interval_ms or "off"}
            table.append(throughput_row("W1b by row", measured, **setting))
    return table


def rowcosts(bench: Bench, quick: bool) -> list[Row]:
    """What a row of a Python function costs in process, piece by piece, and a checkpoint of its state."""
    return [{"keys": row["keys"], "what": row["what"], "figures": json.dumps(row)} for row in measure_row_costs(quick=quick)]


def w2(bench: Bench, quick: bool) -> list[Row]:
    """Checkpoint duration against state size, and the raw cost of the same bytes."""
    table = []
    for keys in (100_000, 1_000_000):
        for backend in ("memory", "filesystem", "rocksdb"):
            env = jobs.keyed_updates(keys, keys, keys / 100, 1, backend, None)
            with bench.launched(env) as handle:
                _await_records(handle, keys)
                durations, sizes, raw = [], [], []
                for _ in range(3 if quick else 8):
                    handle.client.trigger_checkpoint(handle.job_id, timeout_s=60)
                    latest = handle.client.checkpoints(handle.job_id)["latest"]["completed"]
                    durations.append(float(latest["end_to_end_duration"]))
                    sizes.append(float(latest["checkpointed_size"]))
                    raw.append(raw_write_ms(bench.folder, int(sizes[-1])))
                    time.sleep(1)
            table.append(
                {
                    "workload": "W2",
                    "keys": keys,
                    "backend": backend,
                    "checkpoint_ms": spread(durations),
                    "megabytes": round(sizes[-1] / 1e6, 1),
                    "raw_write_ms": spread(raw),
                }
            )
    return table


def _await_records(handle: Any, records: int) -> None:
    def processed() -> bool:
        return bool(handle.progress().records_in >= records)

    wait_until(f"{records} records", processed, 180, every_s=0.1)


def w3(bench: Bench, quick: bool) -> list[Row]:
    """Seconds from kill -9 of a worker, and from an exception, to the first record processed again."""
    table = []
    for keys in (10_000, 1_000_000):
        for backend in ("memory", "rocksdb"):
            for event in ("exception", "kill -9"):
                trace = bench.folder / f"trace-{time.monotonic_ns()}"
                trace.mkdir()
                env = jobs.keyed_updates(keys, 20_000_000, 50_000, 1, backend, 1000, str(trace))
                with bench.launched(env) as handle:
                    _await_records(handle, keys)
                    seconds = [_recovery(handle, trace, event) for _ in range(2 if quick else 5)]
                table.append({"workload": "W3", "event": event, "keys": keys, "backend": backend, "seconds": spread(seconds)})
    return table + _standbys(bench, quick)


STANDBYS = (("one stands by", 1, False), ("none stands by", 0, False), ("no free slot", 1, True))
"""What a killed worker is replaced by: what the row says, standby_workers_per_host, and whether another job has the slot."""


def _standbys(bench: Bench, quick: bool) -> list[Row]:
    """As W3, kill -9 with 10,000 keys, with a worker that stands by and without."""
    table = []
    for said, standbys, is_full in STANDBYS:
        trace = bench.folder / f"trace-{time.monotonic_ns()}"
        trace.mkdir()
        env = jobs.keyed_updates(
            10_000, 20_000_000, 50_000, 1, "rocksdb", 1000, str(trace), standby_workers_per_host=standbys
        )
        idle = jobs.keyed_updates(10, 1_000_000, 100, 1, "memory", None, name="occupies", standby_workers_per_host=0)
        with contextlib.ExitStack() as running:
            if is_full:
                running.enter_context(bench.launched(idle))
            handle = running.enter_context(bench.launched(env))
            _await_records(handle, 10_000)
            expected = 0 if is_full else standbys
            seconds = []
            for _ in range(3 if quick else 9):
                wait_until("who stands by", lambda h=handle, n=expected: _standing(h) == n, 60, every_s=0.1)
                seconds.append(_recovery(handle, trace, "kill -9"))
        row = {"workload": "W3", "event": f"kill -9, {said}", "keys": 10_000, "backend": "rocksdb"}
        table.append({**row, "seconds": spread(seconds)})
    return table


def _standing(handle: Any) -> int:
    return len(handle.client.workers(handle.job_id)["standbys"])


def _recovery(handle: Any, trace: Path, event: str) -> float:
    """One failure; seconds until the stateful operator processes a record of the new attempt."""
    time.sleep(2)
    worker = handle.client.workers(handle.job_id)
    attempt, pid = worker["attempt"], worker["workers"][0]["pid"]
    if event == "kill -9":
        os.kill(pid, 9)
        at = time.time()
    else:
        (trace / "raise").touch()
        wait_until("the exception", lambda: not (trace / "raise").exists(), 20)
        at = _lines(trace)[-1]
    # the record says itself when it was processed: who looks often only takes the processor from the worker
    wait_until("the next attempt", lambda: handle.client.workers(handle.job_id)["attempt"] > attempt, 60, every_s=0.1)
    first = wait_until("a record", lambda: next((line for line in _lines(trace) if line > at), None), 60, every_s=0.1)
    return float(first - at)


def _lines(trace: Path) -> list[float]:
    found = [float(line) for path in trace.iterdir() if path.name.isdigit() for line in path.read_text().split("\n")[:-1]]
    return sorted(found)


def w4(bench: Bench, quick: bool) -> list[Row]:
    """Checkpoints while every queue is full: the last step takes 0.9 ms a record. In flight, restored; and the cost for W1."""
    return measure_w4(bench, quick) + measure_inflight(quick=quick) + measure_modes(bench, quick)


def w6(bench: Bench, quick: bool) -> list[Row]:
    """Latency of 10,000 records a second over two shuffles, with a checkpoint each second."""
    return measure_w6(bench, quick)


def w7(bench: Bench, quick: bool) -> list[Row]:
    """Checkpoints of many subtasks in one worker, and of one."""
    return measure_w7(bench, quick)


def tables(bench: Bench, quick: bool) -> list[Row]:
    """Top-N and deduplication, one worker; the aim is 1 M events/s."""
    return measure_tables(bench, quick)


def joins(bench: Bench, quick: bool) -> list[Row]:
    """Joins of two streams, and of a stream and a table, one worker, beside Arrow's hash join of whole tables."""
    return measure_joins(bench, quick)


def async_calls(bench: Bench, quick: bool) -> list[Row]:
    """Calls of async_map a second, one worker; the aim is 20,000."""
    return measure_async(bench, quick)


def acks(bench: Bench, quick: bool) -> list[Row]:
    """Acknowledgements per second over HTTP."""
    return measure_acks(quick=quick)


def flood(bench: Bench, quick: bool) -> list[Row]:
    """A job that checkpoints ten times a second while its coordinator is flooded, in clear text and with TLS."""
    slow = tuple(phase for phase in FLOOD_PHASES if phase.name in ("peace", "slow", "viewers", "slow and viewers"))
    rows = []
    for row in itertools.chain(measure_flood(quick=quick), measure_flood(quick=quick, phases=slow, tls=True)):
        rows.append(row)
        told = f"checkpoints {row['checkpoints']}, acknowledgements p99 {row['ack_ms_p99']} ms, leases lost {row['leases_lost']}"
        print(f"flood: {row['phase']}{', TLS' if row['tls'] else ''}: {told}", flush=True)
    return [{"phase": row["phase"], "tls": row["tls"], "figures": json.dumps(row)} for row in rows]


def incremental(bench: Bench, quick: bool) -> list[Row]:
    """Full checkpoints and increments of the RocksDB backend, beside the raw write of the same bytes."""
    return [{"kind": row["workload"], "figures": json.dumps(row)} for row in measure_incremental(quick=quick)]


def heap(bench: Bench, quick: bool) -> list[Row]:
    """Checkpoints of state in memory, full and as delta runs, beside the raw write of the same bytes."""
    table = [row for kind in KINDS for row in measure_heap(kind, 100_000 if quick else 1_000_000)]
    return [{"backend": row["backend"], "what": row["what"], "figures": json.dumps(row)} for row in table]


def rowtable(bench: Bench, quick: bool) -> list[Row]:
    """A row table: append, probe, scan, delete; full and incremental checkpoints; the index of keys of several columns."""
    table = measure_row_table(100_000 if quick else 1_000_000)
    return [{"rows": row["rows"], "what": row["what"], "figures": json.dumps(row)} for row in table]


def restore(bench: Bench, quick: bool) -> list[Row]:
    """Keyed state restored at the same and at another parallelism, from storage and from copies, beside `cp`."""
    return measure_restore(quick=quick)


def imports(bench: Bench, quick: bool) -> list[Row]:
    """CPU of what workers, their daemon, drivers and the command line import."""
    return measure_imports(2 if quick else 10)


def restarts(bench: Bench, quick: bool) -> list[Row]:
    """kill -9 of the sidecar under many live jobs, and its start."""
    return measure_restarts(20, 2) if quick else measure_restarts(200, 20)


def transfers(bench: Bench, quick: bool) -> list[Row]:
    """64 files of 1 MiB up and down, one at a time and several, on a directory and on S3 (moto's server)."""
    rows = measure_transfers(quick=quick)
    return [{"storage": row["storage"], "at_one_time": row["at_one_time"], "figures": json.dumps(row)} for row in rows]


def tools(bench: Bench, quick: bool) -> list[Row]:
    """verify, inspect and a read of every row: seconds and peak memory."""
    return measure_tools(quick=quick)


NEXMARK_AIMS = {
    "q0": 4_000, "q4": 600, "q5": 3_000, "q7": 2_500, "q8": 3_000, "q9": 500, "q11": 1_500, "q12": 3_000, "q16": 600,
    "q17": 2_000, "q18": 1_000, "q19": 1_000, "q20": 400,
}  # fmt: skip
"""Thousand events a second."""


def nexmark(bench: Bench, quick: bool) -> list[Row]:
    """Nexmark's queries on one worker: thousand events a second, beside the aim and Flink's as published, a core."""
    table = []
    for name, flink in FLINK.items():
        events = 1_000_000 if quick else NEXMARK_EVENTS
        measured = bench.run(nexmark_job(QUERIES[name], events), events)
        row = throughput_row(name, measured)
        found = {"k_events_per_second": round(measured.records_per_second / 1_000), "aim": NEXMARK_AIMS[name], "flink": flink}
        table.append({**row, **found})
    return table


def simulation(bench: Bench, quick: bool) -> list[Row]:
    """Simulated jobs per minute, with faults and without."""
    return measure_simulation(quick=quick)


def explain(bench: Bench, quick: bool) -> list[Row]:
    """Explanations and health of a job of 10,000 subtasks; the aim is 50 ms each."""
    return measure_explain(quick=quick)


def service(bench: Bench, quick: bool) -> list[Row]:
    """A sidecar on one core: 10,000 subtasks of one job, 200 jobs, and what 20 dashboards cost."""
    return measure_service(quick=quick)


def takeover(bench: Bench, quick: bool) -> list[Row]:
    """kill -9 and SIGSTOP of the active one of two members: seconds until another leads the job, and the gap between records."""
    return summary_of_takeovers(measure_takeover(2 if quick else 20))


QUICK_SCALE = 0.05


def views(bench: Bench, quick: bool) -> list[Row]:
    """What publishing the view of a job costs, and showing it."""
    return measure_views(quick=quick)


def connectors(bench: Bench, quick: bool) -> list[Row]:
    """Kafka, PostgreSQL, NATS, files and tables, and Spark, beside the raw clients on the same rows."""
    return measure_connectors(bench, min(bench.scale, QUICK_SCALE) if quick else bench.scale)


SUITES: dict[str, Callable[[Bench, bool], list[Row]]] = {
    "w0": w0, "w1": w1, "w1b": w1b, "sliding": sliding, "rows": rows, "rowcosts": rowcosts, "w2": w2, "incremental": incremental,
    "heap": heap,
    "rowtable": rowtable, "w3": w3, "w4": w4, "w6": w6, "w7": w7, "acks": acks, "async": async_calls, "tables": tables,
    "joins": joins, "restarts": restarts, "flood": flood, "restore": restore, "transfers": transfers, "nexmark": nexmark,
    "simulation": simulation, "tools": tools, "row_windows": row_windows, "timers": timers, "connectors": connectors,
    "views": views, "imports": imports,
    "explain": explain, "takeover": takeover, "service": service,
}  # fmt: skip


def show(console: Console, name: str, table_rows: list[Row]) -> None:
    """A table of figures; rows with other columns are in one of their own."""
    for columns, rows in itertools.groupby(table_rows, key=tuple):
        table = Table(title=name)
        for column in columns:
            table.add_column(column)
        for row in rows:
            table.add_row(*(f"{value:,}" if isinstance(value, int | float) else str(value) for value in row.values()))
        console.print(table)


def main() -> int:
    """Run the chosen suites."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", help=f"comma-separated: {', '.join(SUITES)}", default=",".join(SUITES))
    parser.add_argument("--quick", action="store_true", help="fewer records and settings")
    parser.add_argument("--scale", type=float, default=1.0, help="of connectors: rows, and what is done with them; 0.01 is a try")
    args = parser.parse_args()
    names = args.only.split(",")
    unknown = set(names) - set(SUITES)
    if unknown:
        parser.error(f"unknown suites {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    console = Console(width=150)
    results: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()},
        "at": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    bench = Bench(scale=args.scale)
    try:
        failed = [name for name in names if not _ran(name, bench, args.quick, results, console, path)]
    finally:
        bench.close()
    console.print(f"saved {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    if failed:
        console.print(f"failed: {', '.join(failed)}")
    return 1 if failed or any(row.get("met") == FAILED for row in results.get("connectors", ())) else 0


def _ran(name: str, bench: Bench, quick: bool, results: dict[str, Any], console: Console, path: Path) -> bool:
    """Run one suite, and save what there is: one that fails, or takes for ever, costs no figure of those before it."""
    try:
        results[name] = SUITES[name](bench, quick)
        show(console, f"{name}: {SUITES[name].__doc__}", results[name])
    except Exception as error:
        traceback.print_exc()
        results[name] = [{"failed": f"{type(error).__name__}: {error}"}]
        return False
    finally:
        path.write_text(json.dumps(results, indent=1))
    return True


if __name__ == "__main__":
    sys.exit(main())
