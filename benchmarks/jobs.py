"""The benchmark jobs, built with the public DSL from the streams of workloads.py."""

from __future__ import annotations

import os
import time
from typing import Any

import holdfast as hf
from benchmarks.workloads import KEYED_SCHEMA, SCHEMA, Bids, KeyedUpdates

SIZES_MAX = 2**31
"""Snapshots of the `memory` backend travel to the coordinator, and these are large on purpose."""


def environment(name: str, workers: int, backend: str, interval_ms: int | None, **settings: Any) -> hf.Environment:
    """Settings that all benchmark jobs share."""
    shared = {"state_backend": backend, "checkpoint_interval_ms": interval_ms, "memory_snapshot_bytes_max": SIZES_MAX}
    return hf.Environment(name, parallelism=workers, **{**shared, **settings})


def w0(rows: int, workers: int) -> hf.Environment:
    """Generator to blackhole, no shuffle."""
    env = environment("w0", workers, "memory", None)
    env.from_source(hf.GeneratorSource(Bids(10_000), rows, SCHEMA)).uid("bids").sink_to(hf.Blackhole()).uid("out")
    return env


def w1(rows: int, keys: int, workers: int, backend: str, interval_ms: int | None, **settings: Any) -> hf.Environment:
    """Shuffle by bidder; 10 s tumbling windows; count, max and sum of the price; blackhole."""
    env = environment("w1", workers, backend, interval_ms, **settings)
    bids = env.from_source(hf.GeneratorSource(Bids(keys), rows, SCHEMA)).uid("bids").assign_timestamps("ts", 0).uid("time")
    windows = bids.key_by("bidder").window(hf.Tumbling(seconds=10))
    windows.aggregate(bids=hf.count(), highest=hf.max("price"), volume=hf.sum("price")).uid("w").sink_to(hf.Blackhole()).uid("out")
    return env


def tumbling(rows: int, keys: int, workers: int, backend: str, interval_ms: int | None) -> hf.Environment:
    """W1 with windows of 60 s, and 100,000 records in a second of event time."""
    return _minutes("tumbling", hf.Tumbling(seconds=60), rows, keys, workers, backend, interval_ms)


def sliding(rows: int, keys: int, workers: int, backend: str, interval_ms: int | None) -> hf.Environment:
    """As `tumbling`, with windows of 60 s that slide by 1 s."""
    return _minutes("sliding", hf.Sliding(seconds=60, slide=1_000), rows, keys, workers, backend, interval_ms)


def _minutes(
    name: str, windows: hf.Tumbling | hf.Sliding, rows: int, keys: int, workers: int, backend: str, interval_ms: int | None
) -> hf.Environment:
    env = environment(name, workers, backend, interval_ms)
    source = hf.GeneratorSource(Bids(keys, per_ms=100), rows, SCHEMA)
    bids = env.from_source(source).uid("bids").assign_timestamps("ts", 0).uid("time")
    found = bids.key_by("bidder").window(windows)
    found.aggregate(bids=hf.count(), highest=hf.max("price"), volume=hf.sum("price")).uid("w").sink_to(hf.Blackhole()).uid("out")
    return env


def w1b(rows: int, keys: int, workers: int, backend: str, interval_ms: int | None) -> hf.Environment:
    """Running count, sum and max per key; emits nothing."""
    env = environment("w1b", workers, backend, interval_ms)
    bids = env.from_source(hf.GeneratorSource(Bids(keys), rows, SCHEMA)).uid("bids")
    running = bids.key_by("bidder").aggregate(emit="none", bids=hf.count(), volume=hf.sum("price"), highest=hf.max("price"))
    running.uid("running").sink_to(hf.Blackhole()).uid("out")
    return env


class RunningByRow(hf.ProcessFunction):
    """W1b in a user's own words, record by record."""

    totals = hf.ValueStateDescriptor("totals", tuple[int, int, int])
    states = (totals,)

    def open(self, ctx: hf.ProcessContext) -> None:
        self.state = ctx.state(self.totals)

    def process_element(self, bid: dict[str, int], ctx: hf.ProcessContext, out: hf.Collector) -> None:
        price = bid["price"]
        totals = self.state.value()
        if totals is None:
            self.state.update((1, price, price))
        else:
            count, volume, highest = totals
            self.state.update((count + 1, volume + price, price if price > highest else highest))


def rows_by_function(rows: int, keys: int, workers: int, backend: str, interval_ms: int | None) -> hf.Environment:
    """The same running totals in a Python function per record."""
    env = environment("rows", workers, backend, interval_ms)
    bids = env.from_source(hf.GeneratorSource(Bids(keys), rows, SCHEMA)).uid("bids")
    bids.key_by("bidder").process(RunningByRow(), returns=SCHEMA).uid("running").sink_to(hf.Blackhole()).uid("out")
    return env


class KeepLast(hf.ProcessFunction):
    """W2 and W3: the last value of each key. Writes to a side file when the first record of a process was handled, and raises once
    on command: the moments that delimit recovery."""

    last = hf.ValueStateDescriptor("last", bytes)
    states = (last,)

    def __init__(self, trace: str | None = None) -> None:
        self.trace = trace
        self.next_trace = 0.0

    def open(self, ctx: hf.ProcessContext) -> None:
        self.state = ctx.state(self.last)
        self.next_trace = 0.0

    def process_element(self, record: dict[str, Any], ctx: hf.ProcessContext, out: hf.Collector) -> None:
        self.state.update(record["value"])
        if self.trace is not None:
            now = time.time()
            if now >= self.next_trace:
                self._traced(now)

    def _traced(self, now: float) -> None:
        assert self.trace is not None
        self.next_trace = now + 0.005
        with open(f"{self.trace}/{os.getpid()}", "a") as file:
            file.write(f"{now:.6f}\n")
        try:
            os.unlink(f"{self.trace}/raise")
        except FileNotFoundError:
            return
        raise RuntimeError("raised by the benchmark, once")


def keyed_updates(
    keys: int,
    updates: int,
    rate: float,
    workers: int,
    backend: str,
    interval_ms: int | None,
    trace: str | None = None,
    *,
    name: str = "updates",
    **settings: Any,
) -> hf.Environment:
    """Load `keys` values of 100 bytes at full speed, then `updates` random ones at `rate` a second."""
    env = environment(name, workers, backend, interval_ms, **settings)
    source = hf.GeneratorSource(KeyedUpdates(keys), keys + updates, KEYED_SCHEMA, rows_per_second=rate, unpaced_rows=keys)
    stream = env.from_source(source).uid("updates").key_by("key")
    stream.process(KeepLast(trace), returns=KEYED_SCHEMA).uid("last").sink_to(hf.Blackhole()).uid("out")
    return env
