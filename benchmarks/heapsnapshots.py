"""Snapshots of state in memory: 1 M keys of 100 bytes, full and with 1 % of the keys changed, and their cost to the loop.

Run `python -m benchmarks.heapsnapshots [--keys N]`. Durations are of the asynchronous part; `raw` is a write with fsync of the same
bytes in the same run, and `load` the machine's meanwhile."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec

from benchmarks.harness import raw_write_ms, spread
from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.backends.keyed import KeyedBackendBase
from holdfast.statebackends.factory import BackendKind, create_keyed_backend
from holdfast.statebackends.handles import FileHandle, KeyedStateHandle, KeyGroupRange, PlaceholderHandle
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.settings import StateBackendSettings
from holdfast.statebackends.state import ValueStateDescriptor
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import run_flow

VALUE_BYTES = 100
INCREMENTS = 20
FULL_AGAIN = 4
MAX_PARALLELISM = 128
W2_SHARE = 100
"""One of so many keys is updated each second."""
W5_PER_SECOND = 50_000
PACE_S = 0.001
PACED_TOGETHER = 256
"""Updates between two reads of the clock: a small batch."""
STATE = ValueStateDescriptor("value", bytes)
KEY = KeyType.of(int)
KINDS: tuple[BackendKind, ...] = ("filesystem", "memory", "rocksdb")
"""Increments of RocksDB are in incremental.py."""
Row = dict[str, Any]


class Rig:
    """One backend with its keys, and checkpoints that complete at once."""

    def __init__(self, kind: BackendKind, key_count: int, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.storage = LocalStorage(folder / "state")
        self.rng = random.Random(42)
        self.keys = [(KEY.encode(key), KEY.key_group(key, MAX_PARALLELISM)) for key in range(key_count)]
        self.files: dict[str, FileHandle] = {}
        self.number = 0
        self.handles: tuple[KeyedStateHandle, ...] = ()
        self._backends = 0
        self.backend = self.new_backend()
        self.state = self.backend.get_state(STATE)

    def new_backend(self) -> KeyedBackendBase:
        self._backends += 1
        return create_keyed_backend(
            self.kind,
            descriptors=[STATE],
            key_type=KEY,
            key_groups=KeyGroupRange(0, MAX_PARALLELISM),
            max_parallelism=MAX_PARALLELISM,
            operator="op",
            subtask=0,
            local_dir=str(self.folder / f"local-{self._backends}"),
            settings=StateBackendSettings(memory_snapshot_bytes_max=2 << 30),
        )

    def change(self, keys: Sequence[tuple[bytes, int]]) -> None:
        for key, group in keys:
            self.backend.set_current_key(key, group)
            self.state.update(self.rng.randbytes(VALUE_BYTES))

    def checkpoint(self) -> Row:
        self.number += 1
        started = time.perf_counter()
        pending = self.backend.snapshot(self.number)
        frozen = time.perf_counter()
        self._store(pending)
        stored = time.perf_counter()
        pending.release()
        released = time.perf_counter()
        size = sum(handle.new_size for handle in self.acked)
        return {
            "sync_ms": (frozen - started) * 1000 + (released - stored) * 1000,
            "async_ms": (stored - frozen) * 1000,
            "bytes": size,
            "raw_ms": raw_write_ms(self.folder, size),
        }

    def _store(self, pending: Any, *, full: bool = False) -> None:
        base = self.number - 1 if self.number > 1 and not full else None
        folder, prefix = f"job/chk-{self.number}", "op-0-1-n"
        target = SnapshotTarget(self.number, folder, prefix, False, 20_480, f"{self.number}-1-op-0-n", base)
        self.acked = run_flow(pending.flow(target), self.storage)
        self.files |= {part.path: part for handle in self.acked for part in handle.parts if isinstance(part, FileHandle)}
        self.handles = tuple(
            msgspec.structs.replace(
                handle,
                parts=tuple(self.files[part.path] if isinstance(part, PlaceholderHandle) else part for part in handle.parts),
            )
            for handle in self.acked
        )

    def restore_s(self) -> float:
        backend = self.new_backend()
        started = time.perf_counter()
        backend.restore(self.handles, self.storage, f"job/chk-{self.number}", checkpoint_id=self.number)
        duration = time.perf_counter() - started
        if sum(1 for _ in backend.keys("value")) != len(self.keys):
            raise AssertionError("keys are missing")
        backend.dispose()
        return duration

    def rollback_s(self) -> float | None:
        """As `restore_s`, of what is in memory. None: the backend keeps nothing."""
        pending = self.backend.snapshot(self.number + 1)
        kept = self.backend.keep()
        pending.release()
        if kept is None:
            return None
        backend = self.new_backend()
        started = time.perf_counter()
        taken = backend.take_over(kept, kept.names)
        duration = time.perf_counter() - started
        if not taken or sum(1 for _ in backend.keys("value")) != len(self.keys):
            raise AssertionError("keys are missing")
        kept.release()
        backend.dispose()
        return duration

    def loop_rates(self, seconds: float) -> tuple[float, float]:
        """Updates per second of the keyed loop with a checkpoint every `seconds`, and without any: whole rounds of both."""
        values = [self.rng.randbytes(VALUE_BYTES) for _ in range(1_000)]
        some = self.rng.choices(self.keys, k=200_000)
        rates = {True: 0.0, False: 0.0}
        for _ in range(3):
            for with_checkpoint in rates:
                rates[with_checkpoint] += self._loop(some, values, seconds, with_checkpoint=with_checkpoint) / 3
        return rates[True], rates[False]

    def full_rates(self, rounds: int = 5) -> Row:
        """Updates per second while a full checkpoint is written, beside those just before and just after: the machine's speed
        drifts by a fifth from one second to the next."""
        values = [self.rng.randbytes(VALUE_BYTES) for _ in range(1_000)]
        some = self.rng.choices(self.keys, k=200_000)
        self._loop(some, values, 2.0, with_checkpoint=False)
        during: list[float] = []
        shares: list[float] = []
        lasted: list[float] = []
        before = self._loop(some, values, 1.0, with_checkpoint=False)
        for _ in range(rounds):
            started = time.perf_counter()
            during.append(self._loop(some, values, 0.0, with_checkpoint=True, full=True))
            lasted.append(time.perf_counter() - started)
            after = self._loop(some, values, 1.0, with_checkpoint=False)
            shares.append(2 * during[-1] / (before + after))
            before = after
        return {"per_second": mean(during), "of_without": spread(shares), "async_ms": mean(lasted) * 1000}

    def paced_rates(self, per_second: int, rounds: int = 3) -> Row:
        """Random updates at a fixed rate, as from the sources of W2 (1 % of the keys a second) and W5 (50,000): the share of due
        updates made while a full checkpoint is written, and the delay of the latest of them."""
        values = [self.rng.randbytes(VALUE_BYTES) for _ in range(1_000)]
        some = self.rng.choices(self.keys, k=200_000)
        self._paced(some, values, per_second, 1.0)
        during: list[float] = []
        latest: dict[bool, list[float]] = {True: [], False: []}
        lasted: list[float] = []
        for _ in range(rounds):
            latest[False].append(self._paced(some, values, per_second, 1.0)[1])
            self.number += 1
            pending = self.backend.snapshot(self.number)
            thread = threading.Thread(target=self._store, args=(pending,), kwargs={"full": True})
            started = time.perf_counter()
            thread.start()
            made, late_ms = self._paced(some, values, per_second, 0.0, thread)
            lasted.append(time.perf_counter() - started)
            pending.release()
            during.append(made)
            latest[True].append(late_ms)
        return {
            "of_due": spread(during),
            "latest_ms": spread(latest[True]),
            "latest_ms_without": spread(latest[False]),
            "async_ms": mean(lasted) * 1000,
        }

    def _paced(
        self,
        keys: Sequence[tuple[bytes, int]],
        values: list[bytes],
        per_second: int,
        seconds: float,
        thread: threading.Thread | None = None,
    ) -> tuple[float, float]:
        """For some seconds, or until a thread has ended: (updates made of those due by then, ms by which the latest was late)."""
        backend, state = self.backend, self.state
        started = time.perf_counter()
        made, late_s = 0, 0.0
        while True:
            passed = time.perf_counter() - started
            if passed >= seconds and (thread is None or not thread.is_alive()):
                return made / max(1.0, passed * per_second), late_s * 1000
            due = int(passed * per_second)
            if made < due:
                late_s = max(late_s, passed - made / per_second)
            else:
                time.sleep(PACE_S)
            for number in range(made, min(due, made + PACED_TOGETHER)):
                key, group = keys[number % len(keys)]
                backend.set_current_key(key, group)
                if state.value() is not None:
                    state.update(values[number % len(values)])
            made = min(due, made + PACED_TOGETHER)

    def _loop(
        self, keys: Sequence[tuple[bytes, int]], values: list[bytes], seconds: float, *, with_checkpoint: bool, full: bool = False
    ) -> float:
        """For some seconds, or for as long as a full checkpoint is written."""
        backend, state = self.backend, self.state
        started = time.perf_counter()
        thread: threading.Thread | None = None
        pending: Any = None
        if with_checkpoint:
            self.number += 1
            pending = backend.snapshot(self.number)
            thread = threading.Thread(target=self._store, args=(pending,), kwargs={"full": full})
            thread.start()
        count = 0
        hot = keys[: max(1, len(self.keys) // 100)]  # 1 % of the keys change
        while time.perf_counter() - started < seconds or (full and thread is not None):
            for number in range(1_000):
                key, group = hot[(count + number) % len(hot)]
                backend.set_current_key(key, group)
                if state.value() is not None:
                    state.update(values[number])
            count += 1_000
            if thread is not None and not thread.is_alive():
                pending.release()
                thread = None
        if thread is not None:
            thread.join()
            pending.release()
        return count / (time.perf_counter() - started)


def _warm_up(kind: BackendKind) -> None:
    """Import what a process imports once, as a worker has long before its first checkpoint."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        rig = Rig(kind, 1_000, Path(name))
        rig.change(rig.keys)
        rig.checkpoint()
        rig.restore_s()
        rig.backend.dispose()


def measure(kind: BackendKind, key_count: int) -> list[Row]:
    """Rows of one backend."""
    rows: list[Row] = []
    _warm_up(kind)
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        rig = Rig(kind, key_count, Path(name))
        rig.change(rig.keys)
        rows.append({"what": "full", **rig.checkpoint()})
        if kind == "memory":  # which writes whole tables each time; the first one also finds memory that the kernel has to clear
            again = [rig.checkpoint() for _ in range(FULL_AGAIN)]
            rows.append({"what": "full again, median", **{field: median(each[field] for each in again) for field in again[0]}})
        if kind == "filesystem":
            increments = []
            for _ in range(INCREMENTS):
                rig.change(rig.rng.sample(rig.keys, len(rig.keys) // 100))
                increments.append(rig.checkpoint())
            rows.append({"what": "second, 1 % changed", **increments[0]})
            means = {field: mean(each[field] for each in increments) for field in increments[0]}
            rows.append({"what": f"mean of {INCREMENTS} increments", **means})
        rows.append({"what": "restore", "async_ms": rig.restore_s() * 1000})
        if (in_place_s := rig.rollback_s()) is not None:
            rows.append({"what": "rollback in place", "async_ms": in_place_s * 1000})
        for workload, per_second in (("W2", key_count // W2_SHARE), ("W5", W5_PER_SECOND)):
            what = f"updates of {workload}, {per_second:,} a second, while a full checkpoint is written"
            rows.append({"what": what, **rig.paced_rates(per_second)})
        rows.append({"what": "saturated keyed loop while a full checkpoint is written", **rig.full_rates()})
        if kind == "filesystem":
            with_it, without = rig.loop_rates(2.0)
            rows.append({"what": "keyed loop, a checkpoint every 2 s", "per_second": with_it, "of_without": with_it / without})
        rig.backend.dispose()
    return [{"backend": kind, "keys": key_count, **row, "load": round(os.getloadavg()[0], 1)} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    key_count = parser.parse_args().keys
    for kind in KINDS:
        for row in measure(kind, key_count):
            shown = {name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()}
            sys.stdout.write(f"{shown}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
