"""The functions of the job that integration tests run. Each worker process imports this module, so it imports little."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.operators.functions.process import ProcessFunction
from holdfast.statebackends.state import ValueStateDescriptor

KEYS = 13
NEVER_MS = 1 << 50
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("key", pa.int64(), nullable=False)])
COUNTS = pa.schema([pa.field("key", pa.int64(), nullable=False), pa.field("count", pa.int64(), nullable=False)])


def make_batch(indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(indices.tolist(), pa.int64()), pa.array((indices % KEYS).tolist())], schema=SCHEMA)


class CountPerKey(ProcessFunction):
    """Emits the running count of each key: a loss or a repetition anywhere shows in the output."""

    count = ValueStateDescriptor("count", int)
    states = (count,)
    returns = COUNTS

    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        state = ctx.state(self.count)
        count = state.value(0) + 1
        state.update(count)
        out({"key": value["key"], "count": count})


class PaddedCountPerKey(CountPerKey):
    """With so much state that it is stored in files, not within messages."""

    pad = ValueStateDescriptor("pad", bytes)
    states = (CountPerKey.count, pad)  # type: ignore[assignment]

    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        state = ctx.state(self.pad)
        if state.value() is None:
            state.update(os.urandom(20_000))
        super().process_element(value, ctx, out)


class TimedCountPerKey(CountPerKey):
    """With two timers for each key, set when it comes for the first time: their tables are small, and packed into one file."""

    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        if ctx.state(self.count).value() is None:
            ctx.timers.register_event_time_timer(NEVER_MS)
            ctx.timers.register_processing_time_timer(NEVER_MS)
        super().process_element(value, ctx, out)

    def on_timer(self, timestamp_ms: int, ctx: Any, out: Any) -> None:
        """At the end of the input."""


class HeldUp:
    """Passes rows on, slowly as long as a file exists."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        if self.file.exists():
            time.sleep(0.005)
        return row
