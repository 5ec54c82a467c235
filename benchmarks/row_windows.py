"""Windows of row functions and timers, one worker, no exchange between workers; aims: 150,000 records and 500,000 timers a second.

    python -m benchmarks.run --only row_windows,timers
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import holdfast as hf
from benchmarks.harness import Bench, Measured
from benchmarks.workloads import SCHEMA, Bids
from holdfast.operators.task.timers import InternalTimerService

KEYS = 10_000
PENDING, FIRED_AT_A_TIME = 1_000_000, 50_000


def bids(index: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """The bids of W1 at 100 k/s of event time."""
    return Bids(KEYS)(index).set_column(3, "ts", pa.array(index // 100))


def added(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {**other, "price": one["price"] + other["price"]}


class Volume(hf.ProcessWindowFunction):
    """Number and volume of the bids of a window."""

    returns = {"bidder": int, "start": int, "n": int, "volume": int}  # noqa: RUF012 - the contract's class attribute

    def process(self, key: int, ctx: hf.WindowContext, elements: list[Any], out: hf.Collector) -> None:
        out({"bidder": key, "start": ctx.window.start, "n": len(elements), "volume": sum(bid["price"] for bid in elements)})


WINDOWS: dict[str, Callable[[Any], Any]] = {
    "tumbling 10 s, reduce": lambda keyed: keyed.window(hf.Tumbling(seconds=10)).reduce(added),
    "tumbling 10 s, process": lambda keyed: keyed.window(hf.Tumbling(seconds=10)).process(Volume()),
    "sliding 60 s by 20 s, reduce": lambda keyed: keyed.window(hf.Sliding(seconds=60, slide=20_000)).reduce(added),
    "session 200 ms, reduce": lambda keyed: keyed.window(hf.Session(milliseconds=200)).reduce(added),
}


def job(windowed: Callable[[Any], Any], rows: int) -> hf.Environment:
    environment = hf.Environment("row_windows", parallelism=1, checkpoint_interval_ms=1_000, state_backend="filesystem")
    source = environment.from_source(hf.GeneratorSource(bids, rows, SCHEMA)).uid("bids").assign_timestamps("ts", 0).uid("times")
    windowed(source.key_by("bidder")).uid("windows").sink_to(hf.Blackhole(), uid="out")
    return environment


def measure(bench: Bench, quick: bool) -> Iterator[tuple[str, Measured]]:
    """(window, figures)."""
    rows = 500_000 if quick else 2_000_000
    for name, windowed in WINDOWS.items():
        yield name, bench.run(job(windowed, rows), rows)


class _Keys:
    """Whose key is current."""

    current_key = (b"", 0)

    def set_current_key(self, encoded_key: bytes, key_group: int) -> None:
        self.current_key = encoded_key, key_group


def measure_timers(quick: bool) -> list[dict[str, Any]]:
    """Timers set and fired, for each key one at a time, while so many others wait."""
    keyed, pending = _Keys(), PENDING // 10 if quick else PENDING
    service = InternalTimerService(keyed, lambda: 0)
    keys = [number.to_bytes(8, "big") for number in range(pending)]
    began = time.process_time()
    for number, key in enumerate(keys):
        keyed.set_current_key(key, number & 127)
        service.register_event_time_timer(1_000_000 + number)
    filled = time.process_time() - began
    fired, rounds = 0, 4

    def on_timer(timestamp_ms: int, namespace: bytes) -> None:
        nonlocal fired
        fired += 1

    began = time.process_time()
    for turn in range(rounds):
        for number in range(FIRED_AT_A_TIME):
            keyed.set_current_key(keys[number], number & 127)
            service.register_event_time_timer(turn * FIRED_AT_A_TIME + (number * 7919) % FIRED_AT_A_TIME)
        for _ in service.advance_watermark((turn + 1) * FIRED_AT_A_TIME, on_timer):
            pass
    seconds = time.process_time() - began
    assert fired == rounds * FIRED_AT_A_TIME
    return [
        {"what": f"set, up to {pending:,} pending", "timers_per_second": round(pending / filled)},
        {"what": f"set and fired, {pending:,} pending", "timers_per_second": round(fired / seconds)},
    ]
