"""Orders from Kafka, summed up by shop and minute, into PostgreSQL and a Delta table, exactly once, while the job is killed.

A feeder writes orders to a topic as the job runs: out of order, some far too late, some that can't be read. The job sums them up
in event-time windows, and appends these to a table of PostgreSQL and to a Delta table; late orders, and records that can't be
read, go to tables of their own. Meanwhile this program kills, as `--seed` says: the process that commits, in front of the rows of
a commit, between two of them, between two commits of one checkpoint, and behind a commit whose success nobody has heard of yet; a
worker; an executor with its workers; the coordinator. In the end DuckDB computes from the records in Kafka, read by another
client, what each table must have.

    make orders                                     # or: python examples/orders.py --seed 1
    python examples/orders.py --seeds 10            # ten seeds, one after another
    python examples/orders.py --without-spark       # workers in plain processes
    python examples/orders.py --kafka host:9092 --postgres postgresql://...   # servers of your own, instead of those of the tests
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import deltalake
import psycopg2
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parent))

import flights_chaos as chaos
import orders_check as check
from orders_feed import DISORDER_MS, Feeder, unread
from orders_kills import POINTS, DeathWarrants, MortalTarget
from orders_run import DSN_VARIABLE, InProcesses, OnSpark, Place, RunningJob, Servers, servers

import holdfast as hf

ORDER = pa.schema([
    pa.field("id", pa.int64(), nullable=False),
    pa.field("shop", pa.string(), nullable=False),
    pa.field("cents", pa.int64(), nullable=False),
    pa.field("ordered_at", pa.timestamp("ms", "UTC"), nullable=False),
])  # fmt: skip
TABLES = """
    CREATE SCHEMA {schema};
    CREATE TABLE {schema}.spending (shop text, window_start timestamptz, window_end timestamptz, orders bigint, cents bigint);
    CREATE TABLE {schema}.late_orders (id bigint, shop text, cents bigint, ordered_at timestamptz);
    CREATE TABLE {schema}.dead_letters (split text, position bigint[], error text, raw bytea);
"""
ROWS_PER_COMMIT = 40
"""Few, so that a checkpoint takes several commits."""


# ----------------------------------------------------------------------------------------------------------- the job


@dataclass(frozen=True)
class Outside:
    """What the job of one run reads and writes: a topic, a schema of PostgreSQL, and a folder."""

    servers: Servers
    name: str
    folder: Path

    @property
    def delta(self) -> str:
        return str(self.folder / "spending")

    @property
    def warrants(self) -> DeathWarrants:
        return DeathWarrants(str(self.folder / "warrants"))


def build(outside: Outside, url: str) -> hf.Environment:
    """The whole job: one topic in, four exactly-once sinks out."""
    env = hf.Environment(
        outside.name,
        parallelism=2,
        coordinator=url,
        token=(outside.folder / "state" / "_token").read_text().strip(),
        checkpoint_interval_ms=500,
        tolerable_failed_checkpoints=100,
        savepoint_directory=str(outside.folder / "savepoints"),
    )
    strategy = hf.WatermarkStrategy.for_bounded_out_of_orderness(DISORDER_MS).with_timestamp_assigner("ordered_at")
    source = hf.KafkaSource(outside.servers.bootstrap, outside.name, schema=ORDER, group=outside.name)
    orders = env.from_source(source, watermark_strategy=strategy).uid("orders")
    orders.side_output(hf.DEAD_LETTERS).sink_to(table_of(outside, "dead_letters")).uid("dead-letters")
    spending = (
        orders.key_by("shop").window(hf.Tumbling(minutes=1)).side_output_late("late")
        .aggregate(orders=hf.count(), cents=hf.sum("cents")).uid("spending")
    )  # fmt: skip
    spending.side_output("late").sink_to(table_of(outside, "late_orders")).uid("late")
    to_postgres, to_delta = table_of(outside, "spending"), hf.DeltaSink(outside.delta, "delta", rows_per_commit=ROWS_PER_COMMIT)
    for name, sink in (("postgres", to_postgres), ("delta", to_delta)):
        spending.sink_to(mortal(sink, name, outside.warrants)).uid(name)
    return env


def table_of(outside: Outside, name: str) -> hf.PostgresSink:
    return hf.PostgresSink(hf.Secret(DSN_VARIABLE), f"{outside.name}.{name}", sink_id=name, rows_per_commit=ROWS_PER_COMMIT)


def mortal(sink: hf.StagedSink, name: str, warrants: DeathWarrants) -> hf.StagedSink:
    """The same sink, in whose commits the process may be told to die."""
    return sink.watched(lambda target: MortalTarget(target, name, warrants))


# ---------------------------------------------------------------------------------------------------------- the drill


class Drill:
    """Kills parts of a running job, and waits for the next checkpoint behind each kill."""

    def __init__(self, job: RunningJob, place: Place, outside: Outside, coordinator: chaos.Coordinator, moments: random.Random):
        self._job = job
        self._place = place
        self._warrants = outside.warrants
        self._coordinator = coordinator
        self._moments = moments
        self.kills = self.kills_in_commits = 0

    def wait_for_start(self) -> None:
        """Until the job's first checkpoint is complete."""
        self._wait_for_checkpoint(0)

    def run(self) -> None:
        """All kills, in the order that the seed says: of each sink the process that commits, at two points."""
        points = self._moments.sample(list(POINTS), len(POINTS))
        steps: list[Callable[[], None]] = [self._kill_worker, self._kill_executor, self._kill_coordinator]
        for number, point in enumerate(points):
            steps.append(lambda sink=("postgres", "delta")[number % 2], point=point: self._kill_in_commit(sink, point))  # type: ignore[misc]
        self._moments.shuffle(steps)
        for step in steps:
            chaos.pause(self._moments.uniform(0.1, 0.6))
            step()

    def _kill_in_commit(self, sink: str, point: str) -> None:
        workers = self._pids()
        self._warrants.write(sink, point)
        victim = chaos.wait_for(f"a commit of {sink}, to die {POINTS[point]}", lambda: self._warrants.victim(sink), chaos.WAIT_S)
        if victim not in workers:
            raise chaos.DemoError(f"process {victim} has committed, and is none of the workers {workers}")
        self.kills_in_commits += 1
        self._recover(f"kill -9 of who commits to {sink}, {POINTS[point]}", [victim])

    def _kill_worker(self) -> None:
        victim = self._moments.choice(self._pids())
        os.kill(victim, signal.SIGKILL)
        self._recover("kill -9 worker", [victim])

    def _kill_executor(self) -> None:
        workers = self._pids()
        executor = self._place.executor_of(self._moments.choice(workers), workers)
        for victim in executor.kill:
            os.kill(victim, signal.SIGKILL)
        self._recover("kill -9 executor", executor.lost)

    def _kill_coordinator(self) -> None:
        newest, workers = self._newest(), self._pids()
        self._coordinator.kill()
        chaos.pause(self._moments.uniform(0.1, 1.0))
        self._coordinator.start()
        self.kills += 1
        self._wait_for_checkpoint(newest)
        if self._pids() != workers:
            raise chaos.DemoError(f"the coordinator's death disturbed the workers: {workers} became {self._pids()}")
        say("kill -9 coordinator: the workers run on")

    def _recover(self, what: str, victims: list[int]) -> None:
        """Wait for the death, for successors, and for a checkpoint of theirs."""
        began = time.monotonic()
        self.kills += 1
        chaos.wait_for("the death of who was killed", lambda: not any(map(chaos.is_alive, victims)), chaos.WAIT_S)
        newest = self._newest()
        chaos.wait_for("all workers", lambda: self._is_whole(victims), chaos.WAIT_S)
        self._wait_for_checkpoint(newest)
        say(f"{what} (pid {', '.join(map(str, victims))}): next checkpoint after {time.monotonic() - began:.1f} s")

    def _is_whole(self, victims: list[int]) -> bool:
        described = self._job.client.workers(self._job.job_id)
        pids = [worker["pid"] for worker in described["workers"] if worker["registered"]]
        return len(pids) == 2 and not set(pids) & set(victims) and all(map(chaos.is_alive, pids))

    def _pids(self) -> list[int]:
        return sorted(worker["pid"] for worker in self._job.client.workers(self._job.job_id)["workers"])

    def _newest(self) -> int:
        """Id of the newest completed checkpoint; 0: none."""
        latest = self._job.client.checkpoints(self._job.job_id)["latest"]["completed"]
        return 0 if latest is None else int(latest["id"])

    def _wait_for_checkpoint(self, behind: int) -> None:
        def is_there() -> bool:
            state = self._job.client.job_state(self._job.job_id)
            if state == "FAILED":
                raise chaos.DemoError(self._job.client.exceptions(self._job.job_id)["root-exception"])
            return self._newest() > behind

        chaos.wait_for(f"a checkpoint behind {behind}", is_there, chaos.WAIT_S)


def run(seed: int, outside: Outside, place: Place) -> tuple[int, str]:
    """One run: the number of kills, and what it had. Raises DemoError when anything is not as promised."""
    began = time.monotonic()
    state = outside.folder / "state"
    state.mkdir(parents=True)
    feeder = Feeder(outside.servers.bootstrap, outside.name, seed)
    feeder.create_topic()
    in_postgres(outside, TABLES.format(schema=outside.name))
    coordinator = chaos.Coordinator(state)
    try:
        coordinator.start()
        job = place.launch(build(outside, coordinator.url))
        try:
            drill = Drill(job, place, outside, coordinator, random.Random(seed))
            drill.wait_for_start()
            with feeder:
                drill.run()
                records = feeder.end()
            say(f"the feeder has written {records:,} records; the job reads the rest, and stops with all windows fired")
            chaos.wait_for("the end of the topic", lambda: not left_in(outside), chaos.WAIT_S, every_s=0.2)
            job.stop(drain=True)
        finally:
            job.close()
        say("comparing with what DuckDB computes from the topic ...")
        topic = check.read_topic(outside.servers.bootstrap, outside.name)
        delta = deltalake.DeltaTable(outside.delta).to_pyarrow_table()
        found = check.problems(topic, check.read_outputs(outside.servers.dsn, outside.name, delta))
        if topic.records != records:
            found.append(f"the feeder wrote {records} records, and {topic.records} are in the topic")
        if found:
            raise chaos.DemoError("\n".join(found))
    finally:
        coordinator.stop()
        in_postgres(outside, f"DROP SCHEMA {outside.name} CASCADE")
        feeder.delete_topic()
    counts = f"records={records} windows={delta.num_rows} dead_letters={len(topic.unreadable)}"
    seconds = time.monotonic() - began
    return drill.kills, f"{counts} kills={drill.kills} in_commits={drill.kills_in_commits} seconds={seconds:.0f} exact=true"


def left_in(outside: Outside) -> int:
    """Records that no completed checkpoint of the job has."""
    return unread(outside.servers.bootstrap, outside.name, group=outside.name)


def in_postgres(outside: Outside, statements: str) -> None:
    connection = psycopg2.connect(outside.servers.dsn)
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute(statements)
    finally:
        connection.close()


# ------------------------------------------------------------------------------------------------------- the program


def say(text: str) -> None:
    """One event, with the time."""
    print(f"[{chaos.clock()}] {text}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, help="what is killed when; drawn, and printed, when not given")
    parser.add_argument("--seeds", type=int, default=1, help="so many runs, from --seed (1) on, one after another")
    parser.add_argument("--without-spark", action="store_true", help="workers in plain processes")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="a broker of your own: each run has a topic, which it deletes")
    parser.add_argument("--postgres", metavar="DSN", help="a server of your own: each run has a schema, which it drops")
    parser.add_argument("--keep", metavar="FOLDER", help="keep state, the Delta table and logs here")
    return parser.parse_args()


def main() -> int:
    """Run the seeds; 0 when all are exact."""
    args = arguments()
    first = args.seed if args.seed is not None else 1 if args.seeds > 1 else random.SystemRandom().randrange(10_000)
    folder = Path(args.keep or tempfile.mkdtemp(prefix="holdfast-orders-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    seed, kills = first, 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # servers, workers and the coordinator end with this program
    try:
        with servers(args.kafka, args.postgres) as given:
            os.environ[DSN_VARIABLE] = given.dsn
            place: Place = InProcesses(folder) if args.without_spark else OnSpark(folder)
            say(f"{place.name}; Kafka at {given.bootstrap}")
            try:
                for seed in range(first, first + args.seeds):
                    name = f"orders_{seed}_{os.urandom(3).hex()}"
                    killed, line = run(seed, Outside(given, name, folder / name), place)
                    kills += killed
                    print(f"seed {seed}: {line}", flush=True)
            finally:
                place.close()
        print(f"ORDERS OK kills={kills} exact=true", flush=True)
        return 0
    except (chaos.DemoError, hf.HoldfastError) as error:
        print(f"ORDERS FAILED seed={seed}: {error}", flush=True)
        return 1
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
