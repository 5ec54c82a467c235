"""Calls of `async_map` a second: one subtask, a coroutine that yields once, real event loop and mailbox; aim: 20,000.

    python -m benchmarks.run --only async
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pyarrow as pa

import holdfast as hf
from benchmarks.harness import Bench

SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False)])


def numbers(indices: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(np.asarray(indices))], schema=SCHEMA)


async def answer(row: dict[str, int]) -> dict[str, int]:
    await asyncio.sleep(0)
    return row


def job(rows: int, *, ordered: bool) -> hf.Environment:
    environment = hf.Environment("async", parallelism=1, checkpoint_interval_ms=1_000, state_backend="filesystem")
    source = environment.from_source(hf.GeneratorSource(numbers, rows, SCHEMA, batch_rows=1_000)).uid("in")
    answers = source.async_map(answer, ordered=ordered, capacity=1_000, returns=SCHEMA).uid("calls")
    answers.sink_to(hf.Blackhole(), uid="out")
    return environment


def measure(bench: Bench, quick: bool) -> list[dict[str, Any]]:
    """A line for each order of results."""
    rows, table = 60_000 if quick else 200_000, []
    for ordered in (True, False):
        measured = bench.run(job(rows, ordered=ordered), rows)
        table.append(
            {
                "workload": "async_map",
                "ordered": ordered,
                "records_per_second": round(measured.records_per_second),
                "checkpoints": f"{measured.checkpoints}/{measured.checkpoints_expected}",
            }
        )
    return table
