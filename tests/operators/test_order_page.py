"""What docs/order.md promises, on real workers in one process: a key's rows in the order of a source of one subtask, crashes
included, and everything that is registered fires at the end of input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.functions.process import Collector, ProcessContext, ProcessFunction
from holdfast.operators.sinks.files.parquet import ParquetSink, read_committed
from holdfast.operators.sources.generator import GeneratorSource
from holdfast.statebackends.state import ValueStateDescriptor
from tests.operators.test_cookbook import OUTPUTS, open_output, run

ROWS, KEYS = 600, 7
SCHEMA = pa.schema([("n", pa.int64()), ("key", pa.int64())])


def make_batch(numbers: npt.NDArray[np.int64]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(numbers), pa.array(numbers % KEYS)], schema=SCHEMA)


class Before(ProcessFunction):
    """Each row with the one of its key that came before it."""

    last = ValueStateDescriptor("last", int)
    states = (last,)

    def process_element(self, row: dict[str, Any], ctx: ProcessContext, out: Collector) -> None:
        last = ctx.state(self.last)
        out({"n": row["n"], "before": last.value(-1)})
        last.update(row["n"])


class Far(ProcessFunction):
    """Waits for a moment that no row reaches, and then for a later one."""

    def process_element(self, row: dict[str, Any], ctx: ProcessContext, out: Collector) -> None:
        ctx.timers.register_event_time_timer(10**9)

    def on_timer(self, timestamp_ms: int, ctx: ProcessContext, out: Collector) -> None:
        out({"key": ctx.key, "at": timestamp_ms})
        if timestamp_ms == 10**9:
            ctx.timers.register_event_time_timer(2 * 10**9)


def plan(function: ProcessFunction, returns: dict[str, type], source_parallelism: int) -> JobPlan:
    OUTPUTS.clear()
    env = Environment("order", parallelism=3, channel_credit_batches=2, step_budget_ms=1)
    rows = env.from_source(GeneratorSource(make_batch, ROWS, SCHEMA, batch_rows=20)).uid("rows")
    rows.set_parallelism(source_parallelism)
    timed = rows.assign_timestamps("n", max_out_of_orderness_ms=0).uid("time").set_parallelism(source_parallelism)
    output = timed.key_by("key").process(function, returns=returns).uid("function")
    output.sink_to(ParquetSink("mem://out", open_storage=open_output)).uid("out")
    return env.build()


def committed() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_committed("mem://out", "out", open_storage=open_output).to_pylist()
    return rows


@pytest.mark.parametrize("seed", range(3))
def test_a_keys_rows_come_in_the_order_of_a_source_of_one_subtask(seed: int, tmp_path: Path) -> None:
    assert run(plan(Before(), {"n": int, "before": int}, 1), tmp_path, seed) >= 1
    wanted = {(n, n - KEYS if n >= KEYS else -1) for n in range(ROWS)}
    found = committed()
    assert len(found) == ROWS
    assert {(row["n"], row["before"]) for row in found} == wanted


def test_timers_behind_all_rows_fire_at_the_end_of_input_also_those_of_timers(tmp_path: Path) -> None:
    assert run(plan(Far(), {"key": int, "at": int}, 3), tmp_path, seed=1) >= 1
    found = sorted((row["key"], row["at"]) for row in committed())
    assert found == [(key, at) for key in range(KEYS) for at in (10**9, 2 * 10**9)]
