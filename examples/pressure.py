"""A job that falls behind, killed with thousands of records in flight, and restored from checkpoints that overtook them.

Orders of a Spark DataFrame are numbered and summed up by account; behind a second shuffle a step takes about a millisecond an
order, so that every queue in front of it is full. The program takes a checkpoint in line with the records, and some whose
barriers overtake them and which store them. It kills a worker, later all of them, restores the job at parallelism 2, then at 3,
and kills a worker there; `--seed` says when, and which. In the end every order, with its number and its account's sum so far, is
compared with plain Spark SQL.

    python examples/pressure.py --seed 7
    python examples/pressure.py --seeds 10        # ten seeds, one after another, from --seed (1) on
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import flights_chaos as chaos
import flights_check as check
import pyarrow as pa

import holdfast as hf

ROWS = 120_000
ROWS_PER_SECOND = 6_000
"""Some three times as many as the slow step can take at parallelism 2."""
ROW_COST_S = 0.0009
STRIPES = 128
"""Max parallelism: row i of a DataFrame is read with the rows i mod so many. Each account's orders are of one such stripe, which
one subtask reads at a time, so that their order is that of their ids; whatever is killed or restored must not change it."""

NUMBERED = pa.schema([(name, pa.int64()) for name in ("id", "account", "cents", "nth", "total")])
ORDERS = """
    SELECT id, id % {stripes} + {stripes} * IF(pmod(hash(id, {seed}), 10) < 7, 0, pmod(xxhash64(id, {seed}), 4)) AS account,
           1 + pmod(xxhash64({seed}, id), 10000) AS cents
    FROM range({rows})
"""
EXPECTED = """
    SELECT id, account, cents, row_number() OVER up_to AS nth, SUM(cents) OVER up_to AS total
    FROM orders WINDOW up_to AS (PARTITION BY account ORDER BY id ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
"""


# ----------------------------------------------------------------------------------------------------------- the job


def number(row: dict[str, int], before: tuple[int, int] | None) -> tuple[dict[str, int], tuple[int, int]]:
    """How many orders of the account there are up to this one, and their sum."""
    nth, total = before or (0, 0)
    nth, total = nth + 1, total + row["cents"]
    return {**row, "nth": nth, "total": total}, (nth, total)


class Slow:
    """Takes a millisecond or so an order, until the file is there."""

    def __init__(self, until: str) -> None:
        self._until = until
        self._is_slow = True

    def __call__(self, row: dict[str, int]) -> dict[str, int]:
        if self._is_slow:
            time.sleep(ROW_COST_S)
            self._is_slow = not os.path.exists(self._until)
        return row


def build(orders: Any, folder: Path, url: str, parallelism: int) -> hf.Environment:
    """Checkpoints are taken by hand, so that it is known what is restored; all else that is not said is as by default."""
    env = hf.Environment(
        "pressure",
        parallelism=parallelism,
        max_parallelism=STRIPES,
        coordinator=url,
        token=(folder / "state" / "_token").read_text().strip(),
        state_backend="rocksdb",
        checkpoint_interval_ms=None,
        unaligned_checkpoints=True,
        retention_on_cancel="retain",
    )
    by_account = env.from_dataframe(orders, rows_per_second=ROWS_PER_SECOND).uid("orders").key_by("account")
    numbered = by_account.map_with_state(number, tuple[int, int], returns=NUMBERED).uid("number")
    slow = numbered.rebalance().map(Slow(str(folder / "hurry")), returns=NUMBERED).uid("slow")
    slow.sink_to(hf.ParquetSink(str(folder / "out"))).uid("out")
    return env


# ---------------------------------------------------------------------------------------------------------- the drill


@dataclass
class Findings:
    """What a run has to show."""

    aligned_ms: int = 0
    unaligned_ms: list[int] = field(default_factory=list)
    inflight_rows: int = 0
    """In flight in the checkpoints that were restored, over all restores."""
    kills: int = 0


@dataclass(frozen=True)
class Taken:
    """A completed checkpoint."""

    number: int
    duration_ms: int
    inflight_rows: int


class Drill:
    """Takes checkpoints of a running job, kills its workers, and sees what it is restored from."""

    def __init__(self, handle: Any, moments: random.Random, found: Findings) -> None:
        self._handle = handle
        self._moments = moments
        self._found = found

    def wait_for_pressure(self) -> None:
        """Until the slow step processes records, and a second or two more: the queues in front of it are full then."""
        before = 0

        def grows() -> bool:
            vertices = self._handle.client.job(self._handle.job_id)["vertices"]
            nonlocal before
            records = sum(vertex["metrics"]["read-records"] for vertex in vertices)
            before, is_more = records, 0 < before < records
            return is_more and all(vertex["status"] == "RUNNING" for vertex in vertices)

        chaos.wait_for("records of running tasks", grows, chaos.WAIT_S, every_s=0.1)
        chaos.pause(self._moments.uniform(1.0, 2.0))

    def take(self, *, unaligned: bool) -> Taken:
        """A checkpoint by hand. Raises DemoError for one that is not as it should be under pressure."""
        client, job_id = self._handle.client, self._handle.job_id
        taken = client.trigger_checkpoint(job_id, unaligned=unaligned, timeout_s=chaos.WAIT_S)
        told = client.checkpoint(job_id, taken)
        rows = inflight_rows(told["external_path"])
        if (rows > 0) != unaligned:
            raise chaos.DemoError(f"checkpoint {taken}, unaligned={unaligned}, has {rows} rows in flight")
        duration_ms = int(told["end_to_end_duration"])
        kind = f"overtakes {rows:,} rows ({told['persisted_data']:,} bytes)" if unaligned else "waits in line"
        say(f"checkpoint {taken} {kind}: {duration_ms} ms")
        if unaligned:
            self._found.unaligned_ms.append(duration_ms)
        else:
            self._found.aligned_ms = duration_ms
        return Taken(taken, duration_ms, rows)

    def kill(self, slots: Sequence[int]) -> None:
        """kill -9 the workers in these slots, some time behind the last checkpoint."""
        chaos.pause(self._moments.uniform(0.1, 1.0))
        pids = self._pids()
        for slot in slots:
            os.kill(pids[slot], signal.SIGKILL)
            self._found.kills += 1
        say(f"kill -9 of the workers in slots {', '.join(map(str, slots))}")
        chaos.wait_for("their death", lambda: not any(chaos.is_alive(pids[slot]) for slot in slots), chaos.WAIT_S)

    def see_restored(self, taken: Taken, before: dict[str, Any] | None = None) -> None:
        """Wait until the job runs on from that checkpoint; `before` is the restore that there was before."""
        chaos.wait_for("a restore", lambda: self._restored() not in (None, before), chaos.WAIT_S)
        number = int((self._restored() or {"id": 0})["id"])
        if number != taken.number:
            raise chaos.DemoError(f"restored from checkpoint {number} instead of {taken.number}")
        chaos.wait_for("the job to run", lambda: self._handle.state() == "RUNNING", chaos.WAIT_S)
        self._found.inflight_rows += taken.inflight_rows
        say(f"    {self._slots()} workers run on from checkpoint {number}, with {taken.inflight_rows:,} rows in flight")

    def kill_and_see_restored(self, slot: int, taken: Taken) -> None:
        """As the two; the restore is one that was not there before."""
        before = self._restored()
        self.kill([slot])
        self.see_restored(taken, before)

    def _restored(self) -> dict[str, Any] | None:
        """The last restore from a checkpoint: its id, and when it was."""
        restored: dict[str, Any] | None = self._handle.client.checkpoints(self._handle.job_id)["latest"]["restored"]
        return None if restored is None or restored["id"] <= 0 else restored

    def _workers(self) -> dict[str, Any]:
        described: dict[str, Any] = self._handle.client.workers(self._handle.job_id)
        return described

    def _slots(self) -> int:
        return len(self._workers()["workers"])

    def _pids(self) -> dict[int, int]:
        return {worker["slot"]: worker["pid"] for worker in self._workers()["workers"] if worker["registered"]}


def inflight_rows(checkpoint: str) -> int:
    """Rows in flight that the checkpoint has stored, as `holdfast inspect` tells."""
    command = [sys.executable, "-m", "holdfast", "inspect", checkpoint, "--json"]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return sum(edge["rows"] for edge in told.get("in_flight", ()))


def at_two(orders: Any, folder: Path, url: str, moments: random.Random, found: Findings) -> Taken:
    """Parallelism 2: an aligned checkpoint, unaligned ones, a worker killed and restored, all workers killed. The newest one."""
    with build(orders, folder, url, parallelism=2).execute(progress=False) as handle:
        drill = Drill(handle, moments, found)
        drill.wait_for_pressure()
        drill.take(unaligned=False)
        drill.take(unaligned=True)
        drill.kill_and_see_restored(moments.randrange(2), drill.take(unaligned=True))
        drill.wait_for_pressure()
        newest = drill.take(unaligned=True)
        drill.kill([0, 1])
        handle.cancel()
        return newest


def at_three(orders: Any, folder: Path, url: str, moments: random.Random, found: Findings, newest: Taken) -> Any:
    """Parallelism 3, from what is left: another worker is killed; then the slow step hurries, to the end. The sink."""
    env = build(orders, folder, url, parallelism=3)
    with env.execute(restore="latest", progress=False) as handle:
        drill = Drill(handle, moments, found)
        drill.see_restored(newest)
        drill.wait_for_pressure()
        drill.kill_and_see_restored(moments.randrange(3), drill.take(unaligned=True))
        (folder / "hurry").touch()
        state = handle.wait(timeout_s=chaos.WAIT_S)
        if state != "FINISHED":
            raise chaos.DemoError(f"the job ended {state}")
    return env.sinks[0]


def run(seed: int, folder: Path, spark: Any) -> Findings:
    """One run below `folder`. Raises DemoError when anything is not as promised."""
    moments, found = random.Random(seed), Findings()
    (folder / "state").mkdir(parents=True)
    coordinator = chaos.Coordinator(folder / "state")
    try:
        coordinator.start()
        orders = spark.sql(ORDERS.format(seed=seed, stripes=STRIPES, rows=ROWS))
        orders.createOrReplaceTempView("orders")
        newest = at_two(orders, folder, coordinator.url, moments, found)
        sink = at_three(orders, folder, coordinator.url, moments, found, newest)
        say("comparing with plain Spark SQL ...")
        problem = check.difference(spark, sink.dataframe(spark), EXPECTED)
    finally:
        coordinator.stop()
    if problem:
        raise chaos.DemoError(problem)
    return found


def told(runs: Sequence[Findings]) -> str:
    """Medians of the times, sums of the rest."""
    aligned_ms = round(statistics.median(each.aligned_ms for each in runs))
    unaligned_ms = round(statistics.median(ms for each in runs for ms in each.unaligned_ms))
    rows, kills = sum(each.inflight_rows for each in runs), sum(each.kills for each in runs)
    return f"aligned_ms={aligned_ms} unaligned_ms={unaligned_ms} inflight_rows={rows} kills={kills} exact=true"


# ------------------------------------------------------------------------------------------------------- the program


def make_session(folder: Path) -> Any:
    """Spark on this machine: room for three workers, and for those that just left."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings = {
        "spark.sql.shuffle.partitions": "4",
        "spark.driver.memory": "1g",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    builder = SparkSession.builder.master("local[6]").appName("pressure")
    for setting, value in settings.items():
        builder = builder.config(setting, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def say(text: str) -> None:
    """One event, with the time."""
    print(f"[{chaos.clock()}] {text}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, help="the orders, and what is killed when; drawn, and printed, when not given")
    parser.add_argument("--seeds", type=int, default=1, help="so many runs, from --seed (1) on, one after another")
    parser.add_argument("--keep", metavar="FOLDER", help="keep state, output and logs here")
    return parser.parse_args()


def main() -> int:
    """Run the seeds; 0 when all are exact."""
    args = arguments()
    first = args.seed if args.seed is not None else 1 if args.seeds > 1 else random.SystemRandom().randrange(10_000)
    folder = Path(args.keep or tempfile.mkdtemp(prefix="holdfast-pressure-")).resolve()
    seed, runs = first, []
    try:
        spark = make_session(folder)
        try:
            for seed in range(first, first + args.seeds):
                say(f"seed {seed}")
                runs.append(run(seed, folder / f"seed-{seed}", spark))
                if args.seeds > 1:
                    say(f"seed {seed}: {told(runs[-1:])}")
        finally:
            spark.stop()
        print(f"PRESSURE OK {told(runs)}", flush=True)
        return 0
    except (chaos.DemoError, hf.HoldfastError, TimeoutError) as error:
        print(f"PRESSURE FAILED seed={seed}: {error}", flush=True)
        return 1
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
