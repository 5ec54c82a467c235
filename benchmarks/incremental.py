"""W2 of the RocksDB backend: a full checkpoint after the load, then increments with 1 % of the keys changed between two.

One subtask's backend in this process, as a worker drives it: `sync` blocks the loop, `async` is the pool's part until the
acknowledgement.
Changes come at once; then the loop is idle, writes behind (`idle`), and waits for the next checkpoint. The full one is also
measured right behind the load, without that (`saturated`).
Placeholders are resolved and dropped checkpoints deleted as by the coordinator. Compaction runs meanwhile, and its output is stored
again, now and then all of it, so the first 20 increments, the last 20 and the worst 20 in a row are separate rows. The raw write
(write and fsync of as many random bytes into the same directory) comes right after each.

    python -m benchmarks.incremental [--quick] [--keys 1000000,5000000] [--increments 60] [--pause 1.0]"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import raw_write_ms, spread
from holdfast.barriers.messages import SubtaskKey
from holdfast.coordinator.ha.shared_state import SharedStateRegistry, shared_handles
from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.backends.keyed import KeyedBackendBase
from holdfast.statebackends.factory import create_keyed_backend
from holdfast.statebackends.handles import KeyGroupRange, OperatorSubtaskState
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.state import ValueStateDescriptor
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import DeleteFile, DeleteFolder, run_flow

Row = dict[str, Any]

VALUE_BYTES = 100
MAX_PARALLELISM = 128
CHANGED = 100
"""One key in so many is changed between two checkpoints."""
INCREMENTS = 60
WINDOW = 20
"""Consecutive increments over which the mean is taken."""
KEY = KeyType.of(int)
VALUE = ValueStateDescriptor("value", bytes)
TASK = SubtaskKey("w2", 0)


@dataclass(frozen=True, slots=True)
class Taken:
    """One checkpoint."""

    sync_ms: float
    async_ms: float
    new_bytes: int
    state_bytes: int
    raw_ms: float


class Job:
    """One operator with keyed state, its storage, and the part of a coordinator that it needs."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._storage = LocalStorage(folder / "state")
        self._shared = SharedStateRegistry()
        self._newest: int | None = None
        self._random = random.Random(7)
        self.backend: KeyedBackendBase = create_keyed_backend(
            "rocksdb",
            descriptors=(VALUE,),
            key_type=KEY,
            key_groups=KeyGroupRange(0, MAX_PARALLELISM),
            max_parallelism=MAX_PARALLELISM,
            operator="w2",
            subtask=0,
            local_dir=str(folder / "local"),
        )

    def update(self, keys: Iterable[int]) -> None:
        backend, state = self.backend, self.backend.get_state(VALUE)
        for key in keys:
            backend.set_current_key(KEY.encode(key), KEY.key_group(key, MAX_PARALLELISM))
            state.update(self._random.randbytes(VALUE_BYTES))

    def changes(self, keys: int) -> list[int]:
        return self._random.sample(range(keys), keys // CHANGED)

    def idle(self, seconds: float) -> float:
        """Idle time: what a worker does until it has nothing to do, in milliseconds."""
        began = time.perf_counter()
        while self.backend.write_behind():
            pass
        done = time.perf_counter()
        time.sleep(max(0.0, seconds - (done - began)))
        return (done - began) * 1000

    def checkpoint(self, number: int) -> Taken:
        """Store a checkpoint that builds on the previous one, which is deleted then."""
        prefix = f"w2-0-1-{number}"
        target = SnapshotTarget(number, f"job/chk-{number}", prefix, False, 20_480, f"{number}-1-w2-0-n", self._newest)
        began = time.perf_counter()
        pending = self.backend.snapshot(number)
        frozen = time.perf_counter()
        state = OperatorSubtaskState(keyed=run_flow(pending.flow(target), self._storage))
        stored = time.perf_counter()
        pending.release()
        resolved = self._shared.resolve(number, self._newest, {TASK: {"w2": state}})
        self._shared.register(number, shared_handles(resolved[TASK].values()))
        self._drop(self._newest)
        self._newest = number
        raw_ms = raw_write_ms(self._folder, state.new_size)
        return Taken((frozen - began) * 1000, (stored - frozen) * 1000, state.new_size, state.size, raw_ms)

    def _drop(self, number: int | None) -> None:
        if number is None:
            return
        self._storage.execute(DeleteFolder(f"job/chk-{number}"))
        for name in self._shared.release(number).names:
            self._storage.execute(DeleteFile(f"job/shared/{name}"))
        self._shared.forget(number)


def measure_full(keys: int, folder: Path, pause_s: float) -> tuple[Row, Job, Taken]:
    """Load, and take the first checkpoint; at once without a pause."""
    job = Job(folder)
    began = time.perf_counter()
    job.update(range(keys))
    loaded = time.perf_counter()
    idle_ms = job.idle(pause_s) if pause_s else 0.0
    full = job.checkpoint(1)
    row = {
        "workload": "W2 full" if pause_s else "W2 full, saturated",
        "keys": keys,
        "load_s": round(loaded - began, 1),
        "idle_ms": round(idle_ms, 1),
        "sync_ms": round(full.sync_ms, 2),
        "async_ms": round(full.async_ms, 1),
        "megabytes": round(full.new_bytes / 1e6, 1),
        "raw_write_ms": round(full.raw_ms, 1),
        "times_raw": round((full.sync_ms + full.async_ms) / full.raw_ms, 2),
        "load_average": round(os.getloadavg()[0], 1),
    }
    return row, job, full


def measure_keys(keys: int, increments: int, pause_s: float) -> Iterator[Row]:
    """Full checkpoints after the load, then increments."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    try:
        row, job, full = measure_full(keys, folder / "saturated", 0.0)
        yield row
        job.backend.dispose()
        row, job, full = measure_full(keys, folder / "idle", pause_s)
        yield row
        taken: list[Taken] = []
        for number in range(2, 2 + increments):
            job.update(job.changes(keys))
            job.idle(pause_s)
            taken.append(job.checkpoint(number))
        yield increments_row(keys, full, taken)
        job.backend.dispose()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def increments_row(keys: int, full: Taken, taken: list[Taken]) -> Row:
    shares = [100 * each.new_bytes / full.new_bytes for each in taken]
    windows = [statistics.mean(shares[first : first + WINDOW]) for first in range(max(1, len(shares) - WINDOW + 1))]
    return {
        "workload": "W2 increments of 1 %",
        "keys": keys,
        "count": len(taken),
        "percent_of_full": round(statistics.mean(shares), 2),
        "percent_first_20": round(windows[0], 2),
        "percent_last_20": round(windows[-1], 2),
        "percent_worst_20": round(max(windows), 2),
        "percent_max": round(max(shares), 1),
        "megabytes": round(statistics.mean(each.new_bytes for each in taken) / 1e6, 2),
        "state_megabytes": round(max(each.state_bytes for each in taken) / 1e6, 1),
        "sync_ms": spread([each.sync_ms for each in taken]),
        "async_ms": spread([each.async_ms for each in taken]),
        "raw_write_ms": spread([each.raw_ms for each in taken]),
        "load_average": round(os.getloadavg()[0], 1),
    }


def measure(*, quick: bool = False) -> list[Row]:
    """1 M and 5 M keys; with --quick 100 k."""
    return [row for keys in ((100_000,) if quick else (1_000_000, 5_000_000)) for row in measure_keys(keys, INCREMENTS, 1.0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="100,000 keys")
    parser.add_argument("--keys", default="1000000,5000000")
    parser.add_argument("--increments", type=int, default=INCREMENTS)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds in which nothing arrives, before each checkpoint")
    arguments = parser.parse_args()
    counts = [100_000] if arguments.quick else [int(text) for text in arguments.keys.split(",")]
    for keys in counts:
        for row in measure_keys(keys, arguments.increments, arguments.pause):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
