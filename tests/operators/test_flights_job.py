"""The shape of the demo on real workers in one process: out-of-order input, windows and timers, two sinks, crashes."""

from __future__ import annotations

import math
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from holdfast.barriers.messages import CheckpointKind
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.functions.aggregates import count, max, mean
from holdfast.operators.functions.process import Collector, ProcessContext, ProcessFunction
from holdfast.operators.functions.windows.assigners import Tumbling
from holdfast.operators.sinks.files.parquet import ParquetSink, read_committed
from holdfast.operators.sources.generator import GeneratorSource
from holdfast.statebackends.state import MapStateDescriptor, ValueStateDescriptor
from holdfast.statebackends.storage.port import Storage
from tests.examples import examples
from tests.harness.mini import MiniCluster
from tests.operators.ports import DictStorage

ROWS, DAY, DISORDER = 600, 100, 60
CARRIERS = ["AA", "B6", "UA", "WN", "DL"]
SCHEMA = pa.schema(
    [("carrier", pa.string()), ("number", pa.int64()), ("scheduled", pa.timestamp("ms", tz="UTC")), ("dep_delay", pa.int64())]
)
OUTPUTS: dict[str, DictStorage] = {}


@dataclass
class Flight:
    carrier: str
    number: int
    at: int
    delay: float


def open_output(path: str) -> Storage:
    return OUTPUTS.setdefault(path, DictStorage(root=path))


def make_batch(indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
    mixed = (indices * 2654435761) & 0xFFFF
    delays = pa.array((mixed % 97 + indices // 10) % 101, mask=mixed % 11 == 0)
    times = pa.array(indices + mixed % DISORDER).cast(pa.timestamp("ms", tz="UTC"))
    carriers = pa.array(CARRIERS).take(pa.array(mixed % 5))
    return pa.RecordBatch.from_arrays([carriers, pa.array(indices), times, delays], schema=SCHEMA)


def to_flight(row: dict[str, Any]) -> Flight:
    return Flight(row["carrier"], row["number"], round(row["scheduled"].timestamp() * 1000), float(row["dep_delay"]))


class DelayRecords(ProcessFunction):
    """Each carrier's flights in event-time order; emits those that break the carrier's delay record."""

    waiting = MapStateDescriptor("waiting", int, list[Flight])
    best = ValueStateDescriptor("best", float)
    states = (waiting, best)
    returns = Flight

    def process_element(self, value: Flight, ctx: ProcessContext, out: Collector) -> None:
        waiting = ctx.state(self.waiting)
        waiting.put(value.at, [*(waiting.get(value.at) or ()), value])
        ctx.timers.register_event_time_timer(value.at)

    def on_timer(self, timestamp_ms: int, ctx: ProcessContext, out: Collector) -> None:
        waiting, best = ctx.state(self.waiting), ctx.state(self.best)
        for flight in sorted(waiting.get(timestamp_ms) or (), key=lambda flight: flight.number):
            if flight.delay > best.value(-math.inf):
                best.update(flight.delay)
                out(flight)
        waiting.remove(timestamp_ms)


def job(**settings: Any) -> JobPlan:
    OUTPUTS.clear()
    env = Environment("flights", channel_credit_batches=2, step_budget_ms=1, **settings)
    flights = (
        env.from_source(GeneratorSource(make_batch, ROWS, SCHEMA, batch_rows=20)).uid("flights")
        .filter(lambda row: row["dep_delay"] is not None).uid("departed")
        .map(to_flight).uid("parse")
        .assign_timestamps("at", DISORDER).uid("time")
        .key_by("carrier")
    )  # fmt: skip
    windows = flights.window(Tumbling(DAY)).aggregate(flights=count(), mean_delay=mean("delay"), max_delay=max("delay")).uid("days")
    windows.sink_to(ParquetSink("mem://days", open_storage=open_output)).uid("days-out")
    records = flights.process(DelayRecords()).uid("records")
    records.sink_to(ParquetSink("mem://records", open_storage=open_output)).uid("records-out")
    return env.build()


def expected() -> tuple[Counter[Any], Counter[Any]]:
    rows = [to_flight(row) for row in make_batch(np.arange(ROWS)).to_pylist() if row["dep_delay"] is not None]
    days: dict[Any, list[float]] = defaultdict(list)
    best: dict[str, float] = {}
    records: Counter[Any] = Counter()
    for flight in sorted(rows, key=lambda flight: (flight.at, flight.number)):
        days[flight.carrier, flight.at // DAY * DAY].append(flight.delay)
        if flight.carrier not in best or flight.delay > best[flight.carrier]:
            best[flight.carrier] = flight.delay
            records[flight.carrier, flight.number] += 1
    totals = ((carrier, day, len(delays), float(np.mean(delays)), np.max(delays)) for (carrier, day), delays in days.items())
    return Counter(totals), records


def committed() -> tuple[Counter[Any], Counter[Any]]:
    days = read_committed("mem://days", "days-out", open_storage=open_output).to_pylist()
    records = read_committed("mem://records", "records-out", open_storage=open_output).to_pylist()
    return (
        Counter(
            (row["carrier"], round(row["window_start"].timestamp() * 1000), row["flights"], row["mean_delay"], row["max_delay"])
            for row in days
        ),
        Counter((row["carrier"], row["number"]) for row in records),
    )


@example(seed=3, crashes=[200, 50], parallelism=1, backend="memory")
@settings(max_examples=examples(6), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    crashes=st.lists(st.integers(20, 600), max_size=3),
    parallelism=st.integers(1, 3),
    backend=st.sampled_from(["memory", "filesystem", "rocksdb"]),
)
def test_both_outputs_are_exact_after_crashes(
    tmp_path: Path, seed: int, crashes: list[int], parallelism: int, backend: str
) -> None:
    plan = job(parallelism=parallelism, state_backend=backend)
    own = tempfile.mkdtemp(dir=tmp_path)  # each example is a cluster of its own
    cluster = MiniCluster(plan, DictStorage(), local_directory=own, seed=seed, tick_s=0.0002)
    for steps in [*crashes, None]:
        cluster.deploy()
        cluster.run_until(lambda: cluster.coordinator.all_running)
        for step in range(10**6 if steps is None else steps):
            assert not cluster.coordinator.failure, cluster.coordinator.failure
            if cluster.coordinator.all_drained:
                break
            if step % 40 == 0 and cluster.coordinator.pending is None:
                cluster.coordinator.trigger(CheckpointKind.CHECKPOINT, cluster.clock.now_ms)
            if not cluster.step() and not cluster.settle_once():
                cluster._pass_time()
        if steps is None:
            cluster.run_to_end()
        else:
            cluster.crash()
    assert committed() == expected()
