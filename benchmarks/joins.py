"""Joins of orders with their payments, or with what is known of them: one worker, blackhole, `filesystem`, checkpoints of 1 s.

    python -m benchmarks.run --only joins

Both streams have 100,000 records of 32 bytes for each second of event time, and each payment is for an order of the 600 ms before
it. `raw` is Arrow's own hash join of the same rows as whole tables, on one thread, with nothing kept, sent or snapshotted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import holdfast as hf
from benchmarks.harness import Bench
from benchmarks.workloads import splitmix64

Join = Callable[[hf.Stream, hf.Stream], hf.Stream]
Numbers = npt.NDArray[np.int64]

PER_MS = 100
LAG_ROWS = 60_000
"""A payment comes up to so many records behind its order."""
LAG_MS = LAG_ROWS // PER_MS
USERS, CURRENCIES = 10_000, 1_000
RECORD_BYTES = 32
ORDERS = pa.schema([("id", pa.int64()), ("user", pa.int64()), ("currency", pa.int64()), ("at", pa.int64())])
PAYMENTS = pa.schema([("id", pa.int64()), ("paid", pa.int64()), ("by", pa.int64()), ("paid_at", pa.int64())])
RATES = pa.schema([("currency", pa.int64()), ("rate", pa.int64()), ("source", pa.int64()), ("since", pa.int64())])


def orders(index: Numbers) -> pa.RecordBatch:
    h = splitmix64(index)
    columns = [_id(index), (h % np.uint64(USERS)).view(np.int64), (h >> np.uint64(20)) % np.uint64(CURRENCIES), index // PER_MS]
    return _batch(columns, ORDERS)


def payments(index: Numbers) -> pa.RecordBatch:
    h = splitmix64(index + (1 << 40))
    order = np.maximum(index - (h % np.uint64(LAG_ROWS)).view(np.int64), 0)
    return _batch([_id(order), h & np.uint64(0xFFFF), h >> np.uint64(50), index // PER_MS], PAYMENTS)


def rates(index: Numbers) -> pa.RecordBatch:
    """A tenth as many as orders."""
    h = splitmix64(index + (1 << 41))
    return _batch([h % np.uint64(CURRENCIES), h & np.uint64(0xFFFF), h >> np.uint64(50), index * 10 // PER_MS], RATES)


def _id(index: Numbers) -> npt.NDArray[np.uint64]:
    """Neighbours are far apart; below 2**62."""
    found: npt.NDArray[np.uint64] = splitmix64(index) >> np.uint64(2)
    return found


def _batch(columns: list[Any], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(column.astype(np.int64)) for column in columns], schema=schema)


@dataclass(frozen=True)
class Case:
    """A join, and the stream or the table that orders are joined with."""

    join: Join
    other: Callable[[Numbers], pa.RecordBatch] = payments
    key: str = "id"
    share: int = 1
    """One of so many rows of the other side for each order."""


def _looked_up(left: hf.Stream, right: hf.Stream) -> hf.Stream:
    users = np.arange(USERS)
    return left.lookup_join(pa.table({"user": users, "name": users * 7, "since": users % 100}), on="user")


CASES = {
    "interval": Case(lambda a, b: a.interval_join(b, on="id", lower=0, upper=LAG_MS)),
    "interval, left": Case(lambda a, b: a.interval_join(b, on="id", lower=0, upper=LAG_MS, how="left")),
    "regular, full": Case(lambda a, b: a.join(b, on="id", retain=LAG_MS, how="full")),
    "window, tumbling 1 s": Case(lambda a, b: a.window_join(b, on="id", window=hf.Tumbling(seconds=1))),
    "window, session 100 ms": Case(lambda a, b: a.window_join(b, on="id", window=hf.Session(100))),
    "temporal": Case(lambda a, b: a.temporal_join(b, on="currency"), rates, "currency", 10),
    "lookup, table": Case(_looked_up, rates, "currency", 0),
}


def job(case: Case, count: int) -> tuple[hf.Environment, int]:
    """`count` orders, and how many records both sides have."""
    environment = hf.Environment("joins", parallelism=1, checkpoint_interval_ms=1_000, state_backend="filesystem")
    left = environment.from_source(hf.GeneratorSource(orders, count, ORDERS)).uid("orders")
    left = left.assign_timestamps("at", max_out_of_orderness_ms=0).uid("order-times")
    if not case.share:
        case.join(left, left).uid("joined").sink_to(hf.Blackhole(), uid="out")
        return environment, count
    others = count // case.share
    schema = case.other(np.arange(1)).schema
    right = environment.from_source(hf.GeneratorSource(case.other, others, schema)).uid("others")
    right = right.assign_timestamps(schema.names[-1], max_out_of_orderness_ms=0).uid("other-times")
    case.join(left, right).uid("joined").sink_to(hf.Blackhole(), uid="out")
    return environment, count + others


def raw_rows_per_second(case: Case, count: int) -> float:
    """Of Arrow's hash join of both sides as whole tables; the input's rows."""
    threads = pa.cpu_count()
    pa.set_cpu_count(1)
    left = pa.Table.from_batches([orders(np.arange(count))])
    if case.share:
        right = pa.Table.from_batches([case.other(np.arange(count // case.share))])
    else:
        right = pa.table({case.key: np.arange(CURRENCIES), "name": np.arange(CURRENCIES)})
    if case.other is rates and case.share:
        right = right.slice(0, CURRENCIES)  # one version each: a hash join knows no times
    began = time.process_time()
    left.join(right, case.key, join_type="inner", use_threads=False)
    seconds = time.process_time() - began
    pa.set_cpu_count(threads)
    return (len(left) + len(right)) / seconds


def measure(bench: Bench, quick: bool) -> list[dict[str, Any]]:
    """A line for each kind of join."""
    count, found = 1_000_000 if quick else 10_000_000, []
    for name, case in CASES.items():
        environment, records = job(case, count)
        measured = bench.run(environment, records)
        found.append(
            {
                "join": name,
                "rows_per_second": round(measured.records_per_second),
                "mb_per_second": round(measured.records_per_second * RECORD_BYTES / 1e6, 1),
                "cpu_s_per_million": round(measured.cpu_per_million, 3),
                "raw_rows_per_second": round(raw_rows_per_second(case, 1_000_000)),
                "checkpoints": f"{measured.checkpoints}/{measured.checkpoints_expected}",
            }
        )
    return found
