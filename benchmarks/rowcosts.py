"""What a row of a Python function costs in process, CPU ns: rows made of columns, keys made current, state read and written.

    python -m benchmarks.run --only rowcosts

The batches are those of W1b by row, 4,096 records each; the state is that of its function, in the backend `memory`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

import holdfast as hf
from benchmarks.jobs import RunningByRow
from benchmarks.workloads import SCHEMA, Bids
from holdfast.barriers.elements import Batch
from holdfast.operators.base import OperatorCounters
from holdfast.operators.functions.process import ProcessOperator
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import key_selector
from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.factory import create_keyed_backend
from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.settings import StateBackendSettings
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import run_flow

ROWS, BATCHES, ROUNDS = 4_096, 60, 5
KEYS = (10_000, 1_000_000)
FILLED_BY = 3
"""Records of a key, on the average, before anything is measured."""
GROUPS = 128


class CallsNothing(RunningByRow):
    """The loop and the call alone."""

    def process_element(self, bid: dict[str, int], ctx: hf.ProcessContext, out: hf.Collector) -> None:
        pass


class ReadsRow(RunningByRow):
    """One column is read."""

    def process_element(self, bid: dict[str, int], ctx: hf.ProcessContext, out: hf.Collector) -> None:
        bid["price"]


class ReadsWholeRow(RunningByRow):
    """The row is given to another function."""

    def process_element(self, bid: dict[str, int], ctx: hf.ProcessContext, out: hf.Collector) -> None:
        len(bid)


class ReadsState(RunningByRow):
    """State is read."""

    def process_element(self, bid: dict[str, int], ctx: hf.ProcessContext, out: hf.Collector) -> None:
        self.state.value()


FUNCTIONS: dict[str, Callable[[], Any]] = {
    "call": CallsNothing,
    "row, one column": ReadsRow,
    "row, all columns": ReadsWholeRow,
    "state read": ReadsState,
    "W1b by row": RunningByRow,
}


class Rig:
    """One operator over one backend."""

    def __init__(self, function: Any, keys: int) -> None:
        rows = RowType(SCHEMA)
        self.keys = keys
        self.operator = ProcessOperator(function, key_selector("bidder", None, rows, "op"), rows, rows)
        self.backend = create_keyed_backend(
            "memory",
            descriptors=self.operator.declared_states(),
            key_type=KeyType.of(int),
            key_groups=KeyGroupRange(0, GROUPS),
            max_parallelism=GROUPS,
            operator="op",
            subtask=0,
            local_dir="",
            settings=StateBackendSettings(memory_snapshot_bytes_max=2 << 30),
        )
        context: Any = SimpleNamespace(
            uid="op", subtask=0, max_parallelism=GROUPS, keyed_state=self.backend, counters=OperatorCounters()
        )
        output: Any = SimpleNamespace(collect=lambda batch: None, has_readers=lambda tag: False)
        self.operator.setup(context, output)
        self.operator.open()

    def batches(self, first: int, count: int, rows: int = ROWS) -> Iterator[Batch]:
        make = Bids(self.keys)
        for number in range(first, first + count):
            yield Batch(columns=make(np.arange(number * rows, (number + 1) * rows)))

    def fill(self) -> None:
        for batch in self.batches(0, FILLED_BY * self.keys // (1 << 16) + 1, 1 << 16):
            self.operator.process_batch(batch, 0)

    def cost_ns(self) -> float:
        """CPU of a row, the best of some rounds."""
        best = float("inf")
        for number in range(ROUNDS):
            batches = list(self.batches(number * BATCHES, BATCHES))
            began = time.process_time()
            for batch in batches:
                self.operator.process_batch(batch, 0)
            best = min(best, time.process_time() - began)
        return best / (BATCHES * ROWS) * 1e9

    def barrier_ms(self) -> dict[str, float]:
        """Of a checkpoint of all keys, with a write to each while it is under way: what the loop waits for, and the pool's CPU."""
        began = time.perf_counter()
        pending = self.backend.snapshot(1)
        frozen = time.perf_counter()
        used = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            run_flow(pending.flow(SnapshotTarget(1, "job/chk-1", "op-0-1-n", False, 0)), LocalStorage(folder))
        used = time.process_time() - used
        self.fill()
        ended = time.perf_counter()
        pending.release()
        return {
            "barrier_ms": round((frozen - began) * 1000, 2),
            "convert_cpu_ms": round(used * 1000),
            "release_ms": round((time.perf_counter() - ended) * 1000, 2),
        }


def measure(*, quick: bool) -> list[dict[str, Any]]:
    """A row for each function and number of keys, and one for each checkpoint."""
    table: list[dict[str, Any]] = []
    for keys in KEYS[: 1 if quick else 2]:
        for name, make in FUNCTIONS.items():
            rig = Rig(make(), keys)
            if name in ("state read", "W1b by row"):
                rig.fill()
            table.append({"keys": keys, "what": name, "cpu_ns": round(rig.cost_ns())})
            if make is RunningByRow:
                table.append({"keys": keys, "what": "a checkpoint of all keys", **rig.barrier_ms()})
    return table
