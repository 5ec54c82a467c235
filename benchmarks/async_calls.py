"""Calls of `async_map` a second: one subtask, a coroutine that yields once, real event loop and mailbox; aim: 20,000.

Beside it the same coroutine without Holdfast: `asyncio.gather` of as many calls at one time, one such group after another.

    python -m benchmarks.run --only async
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pyarrow as pa

import holdfast as hf
from benchmarks.harness import Bench

CAPACITY = 1_000
SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False)])


def numbers(indices: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(np.asarray(indices))], schema=SCHEMA)


async def answer(row: dict[str, int]) -> dict[str, int]:
    await asyncio.sleep(0)
    return row


def job(rows: int, *, ordered: bool) -> hf.Environment:
    environment = hf.Environment("async", parallelism=1, checkpoint_interval_ms=1_000, state_backend="filesystem")
    source = environment.from_source(hf.GeneratorSource(numbers, rows, SCHEMA, batch_rows=1_000)).uid("in")
    answers = source.async_map(answer, ordered=ordered, capacity=CAPACITY, returns=SCHEMA).uid("calls")
    answers.sink_to(hf.Blackhole(), uid="out")
    return environment


async def gathered(rows: int) -> None:
    """All calls, without a job."""
    for start in range(0, rows, CAPACITY):
        await asyncio.gather(*(answer({"n": number}) for number in range(start, min(rows, start + CAPACITY))))


def bare(rows: int) -> float:
    """Calls a second of the coroutine alone."""
    began = time.perf_counter()
    asyncio.run(gathered(rows))
    return rows / (time.perf_counter() - began)


def measure(bench: Bench, quick: bool) -> list[dict[str, Any]]:
    """A line for each order of results, and one for the calls alone."""
    rows, table = 60_000 if quick else 400_000, []
    for ordered in (True, False):
        measured = bench.run(job(rows, ordered=ordered), rows)
        table.append(_line("async_map", ordered, measured.records_per_second, f"{measured.cpu_per_million:.1f}"))
        table[-1]["checkpoints"] = f"{measured.checkpoints}/{measured.checkpoints_expected}"
    return [*table, {**_line("asyncio.gather", "", bare(rows), ""), "checkpoints": ""}]


def _line(workload: str, ordered: bool | str, calls_per_second: float, cpu: str) -> dict[str, Any]:
    return {"workload": workload, "ordered": ordered, "calls_per_second": round(calls_per_second), "cpu_us_per_call": cpu}
