"""The demo: New York's 336,776 flights of 2013 through a stateful job that is killed, again and again, while it runs.

Spark SQL reads, cleans and orders the flights by *actual* departure, so that event time (scheduled departure) is out of
order by up to a day. The job counts flights and delays per carrier and day, and finds every flight that breaks its
carrier's delay record. Meanwhile this program kills a worker, kills and restarts the coordinator, stops the job with a
savepoint, restores it at parallelism 3 and kills another worker; `--seed` says when. In the end both outputs are
compared, row for row, with plain Spark SQL over the same file.

    make demo                          # or: python examples/flights.py --seed 7
    make demo ARGS=--each-worker       # kills, and stops for good, each worker in turn
    make demo ARGS=--ha                # two members: kills the active one, and another one takes over
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import flights_chaos as chaos
import flights_check as check

import holdfast as hf

ROWS = 336_776
RUN_SECONDS = 30
EACH_WORKER_SECONDS = 60
HUNG_AFTER_MS = 4_000
"""After so long without a sign of life a worker counts as hung, when each is stopped; 50 s unless a job says otherwise."""
DAY_MS = 86_400_000


# ----------------------------------------------------------------------------------------------------------- the job


@dataclass
class Flight:
    """One flight as the job sees it. Times are ms since the epoch, UTC; delays are minutes."""

    carrier: str
    flight: int
    origin: str
    dest: str
    scheduled: int
    delay: float


def has_departed(row: dict[str, Any]) -> bool:
    """A cancelled flight has no departure delay."""
    return row["dep_delay"] is not None


def to_flight(row: dict[str, Any]) -> Flight:
    """A row of the DataFrame as a record."""
    return Flight(row["carrier"], row["flight"], row["origin"], row["dest"], row["scheduled"], float(row["dep_delay"]))


class DelayRecords(hf.ProcessFunction):
    """Takes each carrier's flights in event-time order and emits those that break the carrier's delay record.

    Flights wait in map state under their scheduled time until the watermark says that no earlier one can come."""

    waiting = hf.MapStateDescriptor("waiting", int, list[Flight])
    record = hf.ValueStateDescriptor("record", float)
    states = (waiting, record)

    def __init__(self, trace: str) -> None:
        self.trace = chaos.Trace(trace)

    def process_element(self, flight: Flight, ctx: hf.ProcessContext, out: hf.Collector) -> None:
        self.trace.record()
        waiting = ctx.state(self.waiting)
        waiting.put(flight.scheduled, [*(waiting.get(flight.scheduled) or ()), flight])
        ctx.timers.register_event_time_timer(flight.scheduled)

    def on_timer(self, timestamp_ms: int, ctx: hf.ProcessContext, out: hf.Collector) -> None:
        waiting, record = ctx.state(self.waiting), ctx.state(self.record)
        flights = waiting.get(timestamp_ms) or []
        waiting.remove(timestamp_ms)
        for flight in sorted(flights, key=lambda f: (f.flight, f.origin)):
            best = record.value()
            if best is None or flight.delay > best:
                record.update(flight.delay)
                out(flight)


def build(flights: Any, folder: Path, url: str, parallelism: int, *, each_worker: bool = False) -> hf.Environment:
    """The whole job: one DataFrame in, two exactly-once Parquet sinks out."""
    patience: dict[str, Any] = {"heartbeat_interval_ms": 500, "heartbeat_timeout_ms": HUNG_AFTER_MS} if each_worker else {}
    seconds = EACH_WORKER_SECONDS if each_worker else RUN_SECONDS
    env = hf.Environment(
        "flights",
        parallelism=parallelism,
        coordinator=url,
        token=(folder / "state" / "_token").read_text().strip(),
        state_backend="rocksdb",
        checkpoint_interval_ms=1_000,
        retained_checkpoints=2,
        savepoint_directory=str(folder / "savepoints"),
        **patience,
    )
    departed = (
        env.from_dataframe(flights, rows_per_second=ROWS / seconds).uid("flights")
        .filter(has_departed).uid("departed")
        .map(to_flight, returns=Flight).uid("parse")
        .assign_timestamps("scheduled", max_out_of_orderness_ms=DAY_MS).uid("event-time")
    )
    by_carrier = departed.key_by("carrier")
    (
        by_carrier.window(hf.Tumbling(days=1))
        .aggregate(flights=hf.count(), mean_delay=hf.mean("delay"), max_delay=hf.max("delay")).uid("days")
        .sink_to(hf.ParquetSink(str(folder / "out" / "days"))).uid("days-out")
    )
    (
        by_carrier.process(DelayRecords(str(folder / "trace")), returns=Flight).uid("records")
        .sink_to(hf.ParquetSink(str(folder / "out" / "records"))).uid("records-out")
    )
    return env


# ---------------------------------------------------------------------------------------------------------- the drill


def run(seed: int, folder: Path, *, each_worker: bool = False, ha: bool = False) -> str:
    """The whole demo below `folder`; the final line. Raises DemoError when anything is not as promised."""
    moments = random.Random(seed)
    spark = make_session(folder)
    if ha:
        return run_members(moments, spark, folder)
    coordinator = chaos.Coordinator(folder / "state")
    (folder / "state").mkdir()
    try:
        coordinator.start()
        flights = check.register(spark, check.csv_path(folder))
        say(f"coordinator at {coordinator.url} (REST; OpenAPI at /docs)")
        if each_worker:
            drill, outputs = one_by_one(flights, folder, coordinator)
            return verdict(spark, outputs, [drill])
        first, savepoint = first_half(moments, flights, folder, coordinator)
        second, outputs = second_half(moments, flights, folder, coordinator, savepoint)
        return verdict(spark, outputs, [first, second])
    finally:
        coordinator.stop()
        spark.stop()


def run_members(moments: random.Random, spark: Any, folder: Path) -> str:
    """The demo with two members; the final line."""
    members = chaos.Members(folder / "state")
    (folder / "state").mkdir()
    try:
        members.start()
        flights = check.register(spark, check.csv_path(folder))
        say(f"two members, {members.url.replace(',', ' and ')}")
        drill, outputs = with_members(moments, flights, folder, members)
        line = verdict(spark, outputs, [drill])
        check_status(folder / "state")
        return line
    finally:
        members.stop()
        spark.stop()


def with_members(
    moments: random.Random, flights: Any, folder: Path, members: chaos.Members
) -> tuple[chaos.Drill, dict[str, Any]]:
    """Parallelism 2: lose the active member and a worker, then run to the end of the data."""
    env = build(flights, folder, members.url, parallelism=2)
    with env.execute() as handle:
        drill = chaos.Drill(handle, folder / "trace", say)
        chaos.wait_for("the first checkpoint", lambda: drill.checkpoints()["counts"]["completed"] > 0, chaos.WAIT_S)
        say("the job runs at parallelism 2")
        chaos.pause(moments.uniform(0.5, 3))
        drill.lose_active(members)
        say(f"another member stands by at {members.start_one()}")
        chaos.pause(moments.uniform(0.5, 2))
        drill.kill_worker(moments.randrange(2), checkpoint_pending=True)
        state = handle.wait(timeout_s=400)
        if state != "FINISHED":
            raise chaos.DemoError(f"the job ended {state}")
        drill.check_nothing_late()
    return drill, {sink.sink_id: sink for sink in env.sinks}


def check_status(state: Path) -> None:
    """`holdfast status flights` says that all is well; DemoError unless it ends with 0."""
    command = [sys.executable, "-m", "holdfast", "status", "flights", "--state-dir", str(state)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    say("holdfast status flights")
    for line in ended.stdout.strip().splitlines():
        say(f"    {line}")
    if ended.returncode != 0:
        raise chaos.DemoError(f"holdfast status ended with {ended.returncode}: {ended.stderr.strip()}")


def first_half(
    moments: random.Random, flights: Any, folder: Path, coordinator: chaos.Coordinator
) -> tuple[chaos.Drill, str]:
    """Parallelism 2: lose a worker, lose the coordinator, then stop with a savepoint."""
    env = build(flights, folder, coordinator.url, parallelism=2)
    with env.execute() as handle:
        drill = chaos.Drill(handle, folder / "trace", say)
        chaos.wait_for("the first checkpoint", lambda: drill.checkpoints()["counts"]["completed"] > 0, chaos.WAIT_S)
        say("the job runs at parallelism 2")
        chaos.pause(moments.uniform(0.5, 3))
        drill.kill_worker(moments.randrange(2), checkpoint_pending=True)
        chaos.pause(moments.uniform(1, 3))
        drill.restart_coordinator(coordinator, dead_for_s=moments.uniform(0.3, 1.5))
        chaos.pause(moments.uniform(0.5, 2))
        drill.check_nothing_late()
        savepoint = handle.stop()
        say(f"stopped with a savepoint: {Path(savepoint).name}")
    return drill, savepoint


def second_half(
    moments: random.Random, flights: Any, folder: Path, coordinator: chaos.Coordinator, savepoint: str
) -> tuple[chaos.Drill, dict[str, Any]]:
    """Parallelism 3, from the savepoint: lose another worker, then run to the end of the data."""
    env = build(flights, folder, coordinator.url, parallelism=3)
    with env.execute(restore=savepoint) as handle:
        drill = chaos.Drill(handle, folder / "trace", say)
        chaos.wait_for("a checkpoint", lambda: drill.checkpoints()["counts"]["completed"] > 0, chaos.WAIT_S)
        drill.note_restore()
        say(f"restored at parallelism 3 from checkpoint {drill.restored_ids[0]}")
        chaos.pause(moments.uniform(0.5, 3))
        drill.kill_worker(moments.randrange(3), checkpoint_pending=True)
        state = handle.wait(timeout_s=400)
        if state != "FINISHED":
            raise chaos.DemoError(f"the job ended {state}")
        drill.check_nothing_late()
    return drill, {sink.sink_id: sink for sink in env.sinks}


def one_by_one(flights: Any, folder: Path, coordinator: chaos.Coordinator) -> tuple[chaos.Drill, dict[str, Any]]:
    """Parallelism 3: kill each worker, then stop each for good, and run to the end of the data."""
    env = build(flights, folder, coordinator.url, parallelism=3, each_worker=True)
    with env.execute() as handle:
        drill = chaos.Drill(handle, folder / "trace", say)
        chaos.wait_for("the first checkpoint", lambda: drill.checkpoints()["counts"]["completed"] > 0, chaos.WAIT_S)
        say("the job runs at parallelism 3")
        for slot in range(3):
            drill.kill_worker(slot, checkpoint_pending=True)
        for slot in range(3):
            drill.stop_worker(slot)
        state = handle.wait(timeout_s=400)
        if state != "FINISHED":
            raise chaos.DemoError(f"the job ended {state}")
        drill.check_nothing_late()
    return drill, {sink.sink_id: sink for sink in env.sinks}


def verdict(spark: Any, sinks: dict[str, Any], drills: list[chaos.Drill]) -> str:
    """Compare both outputs with plain Spark SQL and check that the demo tested something."""
    say("comparing with plain Spark SQL ...")
    days = sinks["days-out"].dataframe(spark).withColumnRenamed("window_start", "day")
    records = sinks["records-out"].dataframe(spark)
    for name, got, query in (("days", days, check.DAYS), ("records", records, check.RECORDS)):
        problem = check.difference(spark, got, query)
        if problem:
            raise chaos.DemoError(f"{name}: {problem}")
    if not sum(drill.kills_with_checkpoint_pending for drill in drills):
        raise chaos.DemoError("no kill fell while a checkpoint was pending")
    rows = spark.table("flights").count()
    if rows != ROWS:
        raise chaos.DemoError(f"the file has {rows} flights, not {ROWS}")
    kills = sum(drill.kills for drill in drills)
    worst = max(second for drill in drills for second in drill.recoveries)
    replaced = [second for drill in drills for second in drill.replacements]
    hung = f"replaced_s={max(replaced):.2f} " if replaced else ""
    takeovers = [second for drill in drills for second in drill.takeovers]
    led = f" takeover_s={max(takeovers):.2f}" if takeovers else ""
    return (
        f"DEMO OK rows={rows} windows={days.count()} records={records.count()} kills={kills} "
        f"recovery_s={worst:.2f} {hung}exact=true{led}"
    )


def make_session(folder: Path) -> Any:
    """Spark on this machine: room for four workers and for Spark SQL beside them."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    spark = (
        SparkSession.builder.master("local[6]")
        .appName("flights")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.driver.memory", "2g")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    return spark


def say(text: str) -> None:
    """One event, with the time."""
    print(f"[{chaos.clock()}] {text}", flush=True)


def main() -> int:
    """Run the demo; 0 when it is exact."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, help="when things break; drawn, and printed, when not given")
    parser.add_argument("--keep", metavar="FOLDER", help="keep state, output and logs here")
    parser.add_argument("--each-worker", action="store_true", help="kill, and stop for good, each worker in turn instead")
    parser.add_argument("--ha", action="store_true", help="two members, and the active one is killed")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10_000) if args.seed is None else args.seed
    folder = Path(args.keep or tempfile.mkdtemp(prefix="holdfast-demo-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    say(f"seed {seed} (again with: make demo ARGS='--seed {seed}')")
    if args.keep:
        say(f"state, output and logs stay in {folder}")
    try:
        print(run(seed, folder, each_worker=args.each_worker, ha=args.ha), flush=True)
        return 0
    except (chaos.DemoError, hf.HoldfastError) as error:
        print(f"DEMO FAILED seed={seed}: {error}", flush=True)
        return 1
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
