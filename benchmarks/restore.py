"""W5's restore: keyed state of 1 M keys x 100 bytes, at the same parallelism and at others, from storage and from local copies.

All subtasks' backends in this process, one after the other: `slowest_s` is the wait of a job whose subtasks each have a core,
`total_s` their sum. `read_s` of it is reading and checking files; the rest is RocksDB's opening, cutting and ingesting, or the
decoding of tables. `cp` copies the snapshot's files in the same folder right after each row.

    python -m benchmarks.restore [--quick] [--keys 1000000] [--backend rocksdb,filesystem]"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.backends.keyed import KeyedBackendBase
from holdfast.statebackends.factory import BackendKind, create_keyed_backend
from holdfast.statebackends.handles import KeyedStateHandle, OperatorSubtaskState
from holdfast.statebackends.keygroups import assign_key_groups
from holdfast.statebackends.local_recovery.copies import LocalCopies, LocalRecovery
from holdfast.statebackends.local_recovery.storage import KeepingStorage, RecoveringStorage, RestoredBytes, held_paths, stored_files
from holdfast.statebackends.serialization.key_group_columns import subtasks_of_key_groups
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.state import ValueStateDescriptor
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import Operation, Storage, run_flow, transfers_of
from holdfast.statebackends.storage.transfers import TransferPool

Row = dict[str, Any]

VALUE_BYTES = 100
MAX_PARALLELISM = 128
PARALLELISMS = ((1, 1), (1, 2), (2, 2), (2, 3))
REPEATS = 3
PROBES = 500
"""Keys looked up after each restore."""
KEY = KeyType.of(int)
VALUE = ValueStateDescriptor("value", bytes)
FOLDER = "job/chk-1"


class TimedStorage:
    """A state directory that is not on this host's own disk, and the seconds spent in its operations."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._asking = 0
        self._began = 0.0
        self.seconds = 0.0

    @property
    def root(self) -> str:
        return self._storage.root

    def at(self, location: str) -> Storage:
        return self._storage.at(location)

    def execute(self, operation: Operation) -> Any:
        with self._lock:
            if not self._asking:
                self._began = time.perf_counter()
            self._asking += 1
        try:
            return self._storage.execute(operation)
        finally:
            with self._lock:
                self._asking -= 1
                if not self._asking:
                    self.seconds += time.perf_counter() - self._began

    @property
    def transfers(self) -> TransferPool:
        return transfers_of(self._storage)


class Snapshot:
    """A checkpoint of one operator at one parallelism, with its copies on this host."""

    def __init__(self, folder: Path, kind: BackendKind, keys: int, parallelism: int) -> None:
        self._folder = folder
        self._kind = kind
        self._keys = keys
        self._made = 0
        self.storage = TimedStorage(LocalStorage(folder / "state"))
        self.handles: list[KeyedStateHandle] = []
        self._recovery = LocalRecovery(str(folder / "workers"), job_id="job", state_directory="state", storage=self.storage)
        self._groups = KEY.column([pa.array(range(keys), pa.int64())], max_parallelism=MAX_PARALLELISM).key_groups.tolist()
        self._take(parallelism)

    def _take(self, parallelism: int) -> None:
        backends = [self.backend(parallelism, subtask) for subtask in range(parallelism)]
        states = [backend.get_state(VALUE) for backend in backends]
        owners = subtasks_of_key_groups(self._column(), MAX_PARALLELISM, parallelism).tolist()
        values = random.Random(7)
        for key, (group, owner) in enumerate(zip(self._groups, owners, strict=True)):
            backends[owner].set_current_key(KEY.encode(key), group)
            states[owner].update(values.randbytes(VALUE_BYTES))
        for subtask, backend in enumerate(backends):
            copies = self.copies(subtask, 1)
            prefix = f"op-{subtask}-1-n"
            target = SnapshotTarget(1, FOLDER, prefix, False, 20_480, f"1-1-op-{subtask}-n")
            pending = backend.snapshot(1)
            taken = run_flow(pending.flow(target), KeepingStorage(self.storage, copies, 1))
            pending.release()
            copies.took(1, held_paths([OperatorSubtaskState(keyed=taken)], FOLDER))
            copies.close()
            backend.dispose()
            self.handles += taken

    def _column(self) -> Any:
        return KEY.column([pa.array(range(self._keys), pa.int64())], max_parallelism=MAX_PARALLELISM).key_groups

    def backend(self, parallelism: int, subtask: int) -> KeyedBackendBase:
        self._made += 1
        return create_keyed_backend(
            self._kind,
            descriptors=(VALUE,),
            key_type=KEY,
            key_groups=assign_key_groups(MAX_PARALLELISM, parallelism, subtask),
            max_parallelism=MAX_PARALLELISM,
            operator="op",
            subtask=subtask,
            local_dir=str(self._folder / f"local-{self._made}"),
        )

    def copies(self, subtask: int, attempt: int) -> LocalCopies:
        copies = self._recovery.copies("v", subtask, attempt, f"n{self._made}")
        copies.open()
        return copies

    def restore(self, parallelism: int, subtask: int, *, locally: bool) -> tuple[float, float]:
        """(seconds, seconds of reading) of one subtask. Raises RuntimeError for missing keys, or reads from the wrong place."""
        backend = self.backend(parallelism, subtask)
        ours = tuple(handle for handle in self.handles if len(handle.key_groups.intersection(backend.key_groups)))
        wanted = stored_files(OperatorSubtaskState(keyed=ours), FOLDER, "op")
        restored = RestoredBytes()
        began = time.perf_counter()
        copies = self.copies(subtask, 2) if locally else None
        storage = TimedStorage(RecoveringStorage(self.storage, wanted, restored, copies, keep_for=1))
        backend.restore(ours, storage, FOLDER, checkpoint_id=1)
        seconds = time.perf_counter() - began
        if copies is not None:
            copies.close()
        self._probe(backend)
        backend.dispose()
        if bool(restored.remote) == locally:
            raise RuntimeError(f"{restored.remote} bytes were read from storage, locally={locally}")
        return seconds, storage.seconds

    def _probe(self, backend: KeyedBackendBase) -> None:
        state = backend.get_state(VALUE)
        for key in random.Random(1).sample(range(self._keys), min(PROBES, self._keys)):
            if self._groups[key] in backend.key_groups:
                backend.set_current_key(KEY.encode(key), self._groups[key])
                if len(state.value() or b"") != VALUE_BYTES:
                    raise RuntimeError(f"key {key} is not what it was")

    def cp_s(self) -> float:
        """Seconds of `cp` of the snapshot's files."""
        target = self._folder / "cp"
        began = time.perf_counter()
        subprocess.run(["cp", "-r", str(self._folder / "state" / "job"), str(target)], check=True)
        seconds = time.perf_counter() - began
        shutil.rmtree(target)
        return seconds


def measure_backend(kind: BackendKind, keys: int) -> Iterator[Row]:
    """Each pair of parallelisms, from storage and from copies: medians."""
    for old in sorted({old for old, _ in PARALLELISMS}):
        folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        try:
            snapshot = Snapshot(folder, kind, keys, old)
            for new in (new for first, new in PARALLELISMS if first == old):
                for locally in (False, True):
                    yield _row(snapshot, kind, keys, old, new, locally=locally)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _row(snapshot: Snapshot, kind: str, keys: int, old: int, new: int, *, locally: bool) -> Row:
    snapshot.restore(new, 0, locally=locally)  # imports and caches
    runs = [[snapshot.restore(new, subtask, locally=locally) for subtask in range(new)] for _ in range(REPEATS)]
    slowest = [max(run) for run in runs]
    return {
        "workload": "W5 restore",
        "backend": kind,
        "keys": keys,
        "parallelism": f"{old} -> {new}",
        "from": "copies" if locally else "storage",
        "slowest_s": round(statistics.median(seconds for seconds, _ in slowest), 3),
        "read_s": round(statistics.median(read for _, read in slowest), 3),
        "total_s": round(statistics.median(sum(seconds for seconds, _ in run) for run in runs), 3),
        "megabytes": round(sum(handle.size for handle in snapshot.handles) / 1e6, 1),
        "cp_s": round(statistics.median(snapshot.cp_s() for _ in range(REPEATS)), 3),
        "load_average": round(os.getloadavg()[0], 1),
    }


def measure(*, quick: bool = False) -> list[Row]:
    """1 M keys; with --quick 100 k."""
    kinds: tuple[BackendKind, ...] = ("rocksdb", "filesystem")
    return [row for kind in kinds for row in measure_backend(kind, 100_000 if quick else 1_000_000)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="100,000 keys")
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--backend", default="rocksdb,filesystem")
    arguments = parser.parse_args()
    for kind in arguments.backend.split(","):
        for row in measure_backend(kind, 100_000 if arguments.quick else arguments.keys):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
