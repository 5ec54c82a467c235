"""The functions of the job that integration tests run. Each worker process imports this module, so it imports little."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.operators.base import Poll
from holdfast.operators.functions.process import ProcessFunction
from holdfast.operators.sources.generator import GeneratorReader, GeneratorSource
from holdfast.statebackends.state import MapStateDescriptor, ValueStateDescriptor

KEYS = 13
NEVER_MS = 1 << 50
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("key", pa.int64(), nullable=False)])
COUNTS = pa.schema([pa.field("key", pa.int64(), nullable=False), pa.field("count", pa.int64(), nullable=False)])
NUMBERED = pa.schema([SCHEMA.field("id"), *COUNTS])


def make_batch(indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(indices.tolist(), pa.int64()), pa.array((indices % KEYS).tolist())], schema=SCHEMA)


OTHER_IDS = 1_000_000


def make_other_batch(indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """As `make_batch`, with ids from OTHER_IDS on."""
    ids = pa.array((indices + OTHER_IDS).tolist(), pa.int64())
    return pa.RecordBatch.from_arrays([ids, pa.array((indices % KEYS).tolist())], schema=SCHEMA)


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


NAMED = pa.schema([pa.field("name", pa.string(), nullable=False)])
GUEST, GUEST_ROWS = "guest-5d1c90", 200
"""A name that comes among the first rows alone."""


def make_named_batch(indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
    names = [GUEST if index < GUEST_ROWS and index % 10 == 0 else f"name-{index % KEYS}" for index in indices.tolist()]
    return pa.RecordBatch.from_arrays([pa.array(names)], schema=NAMED)


class CountPerName(ProcessFunction):
    """With what is said of each name in a map, and a timer."""

    count = ValueStateDescriptor("count", int)
    said = MapStateDescriptor("said", str, str)
    states = (count, said)
    returns = pa.schema([*NAMED, COUNTS.field("count")])

    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        count = ctx.state(self.count).value(0) + 1
        ctx.state(self.count).update(count)
        ctx.state(self.said).put(f"{count % 3}", f"{ctx.key} {'.' * 100}")
        ctx.timers.register_event_time_timer(NEVER_MS)
        out({"name": ctx.key, "count": count})

    def on_timer(self, timestamp_ms: int, ctx: Any, out: Any) -> None:
        """At the end of the input."""


class NumberedCountPerKey(CountPerKey):
    """Each row with its place among those of its key: one that comes in another place, too, shows in the output."""

    returns = NUMBERED

    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        super().process_element(value, ctx, lambda row: out({"id": value["id"], **row}))


class HeldUp:
    """Passes rows on, slowly as long as a file exists: `seconds` a row."""

    def __init__(self, file: Path, seconds: float = 0.005) -> None:
        self.file = file
        self.seconds = seconds

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        if self.file.exists():
            time.sleep(self.seconds)
        return row


class WaitingReader(GeneratorReader):
    """Looks every few milliseconds whether it may begin."""

    file: Path

    def poll(self, rows_max: int, now_ms: int) -> Poll:
        return super().poll(rows_max, now_ms) if self.file.exists() else Poll(ready_at_ms=now_ms + 10)


@dataclass
class WaitingSource(GeneratorSource):
    """Has nothing to read before a file exists."""

    file: Path = Path()

    def create_reader(self, subtask: int, parallelism: int, max_parallelism: int) -> WaitingReader:
        reader = WaitingReader(self, subtask, parallelism, max_parallelism)
        reader.file = self.file
        return reader


class HangingCountPerKey(CountPerKey):
    """The subtask of one key waits while a file exists. Its name and the rows are what nobody may see who asks where it is."""

    def __init__(self, file: str) -> None:
        self.file = file

    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        if value["key"] == 0:
            if os.path.exists(self.file):
                sys.stdout.write("waits for the end of a file\n")
            wait_for_the_end_of(self.file, f"a-row-of-customer-{value['id']}")
        super().process_element(value, ctx, out)


def wait_for_the_end_of(file: str, secret_value: str) -> None:
    while os.path.exists(file):
        time.sleep(0.01)
