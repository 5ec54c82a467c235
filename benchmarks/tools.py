"""Snapshot tools on one large state: seconds, processor time and peak memory of `verify`, `inspect`, of a read of every row, of a
drill; of a copy, and of the forgetting of a key of an ended job.

Each tool is a process of its own, and `over_start` is its peak above that of one that only imports the tools. `megabytes` are the
snapshot's own bytes: a tool that reads states as a stream stays far below them.

    python -m benchmarks.tools [--quick] [--keys 1000000,5000000]"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from holdfast.barriers.jobgraph import JobConfig, JobGraph, JobVertex, OperatorDescription, Submission
from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.ha.leadership import open_directory
from holdfast.coordinator.ha.records import ClaimRecord, LeaderRecord, ResultRecord, SubmissionRecord, encode_record
from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.handles import KeyedStateHandle, KeyGroupRange, OperatorState, OperatorSubtaskState
from holdfast.statebackends.layout import METADATA_NAME, JobPaths
from holdfast.statebackends.rocksdb.database import WRITE_ROWS, RocksStore
from holdfast.statebackends.rocksdb.row_keys import row_keys
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.serialization.state_serializer import StateSerializer
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from holdfast.statebackends.snapshot.parts import write_part
from holdfast.statebackends.snapshot.rows import ROWS_PER_BATCH, KeyedRows
from holdfast.statebackends.snapshot.tables import TableFormat, encode_keyed_table
from holdfast.statebackends.state import ValueStateDescriptor
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import PutIfAbsent, run_flow

Row = dict[str, Any]
Format = Literal["arrow", "parquet", "rocksdb"]

VALUE_BYTES = 100
MAX_PARALLELISM = 128
PARTS = 4
"""Subtasks that wrote the snapshot."""
KEY = KeyType.of(int)
CODEC = StateSerializer.of(ValueStateDescriptor("value", bytes), KEY)
ROWS = KeyedRows(KEY, MAX_PARALLELISM, "op")
FORMATS: tuple[Format, ...] = ("arrow", "parquet", "rocksdb")
_READ_ALL = """
import sys
from holdfast.api.snapshots.snapshot import Snapshot
rows = sum(batch.num_rows for batch in Snapshot(sys.argv[1]).table("op", "value"))
assert rows == int(sys.argv[2]), rows
"""
_DRILL = """
import sys
from holdfast.coordinator.drills.reading import drill_snapshot
report = drill_snapshot(sys.argv[1])
assert (report.rows, report.problems) == (int(sys.argv[2]), ()), report
"""
DRILL_OF_VERIFY_MAX = 2.0
"""Aim: a drill takes so many times the processor time of `verify` of the same snapshot, at most."""


FORGET_OF_COPY_MAX = 3.0
"""Aim: forgetting a key takes so many times the processor time of `copy` of the job's only snapshot, at most."""
JOB_ID = "0" * 32


def make_ended_job(folder: Path) -> Path:
    """A state directory whose one job has ended, with the checkpoint that `make` wrote into `folder`. Returns the directory."""
    directory = folder / "state"
    storage, paths = LocalStorage(directory), JobPaths(JOB_ID)
    run_flow(open_directory("directory"), storage)
    operator = OperatorDescription(uid="op", operator_id="a" * 32, name="op", kind="process")
    graph = JobGraph("tools", (JobVertex("a" * 32, "op", PARTS, MAX_PARALLELISM, (operator,)),), (), JobConfig())
    checkpoint = paths.checkpoint(1)
    records: dict[str, Any] = {
        paths.leader(1): LeaderRecord(1, "n", "", 1),
        paths.submission(1): SubmissionRecord(1, 1, Submission(graph, job_id=JOB_ID), None, 1, "n"),
        paths.claim(1): ClaimRecord(1, 1, 1, 1, CheckpointKind.CHECKPOINT, checkpoint, "n"),
        paths.result(1): ResultRecord(1, "FAILED", 1, "n", 1, 1),
    }
    for path, record in records.items():
        storage.execute(PutIfAbsent(path, encode_record(record)))
    shutil.copytree(folder / "job/chk-1", directory / checkpoint, dirs_exist_ok=True)
    return directory


def make(folder: Path, keys: int, table_format: Format) -> None:
    """A checkpoint of one operator with one state."""
    storage = LocalStorage(folder)
    states = []
    for part in range(PARTS):
        groups = KeyGroupRange(part * MAX_PARALLELISM // PARTS, (part + 1) * MAX_PARALLELISM // PARTS)
        target = SnapshotTarget(1, "job/chk-1", f"op-{part}-1", False, 0)
        if table_format == "rocksdb":
            handle = _native(folder, storage, target, groups, keys)
        else:
            handle = _table(storage, target, groups, keys, table_format)
        states.append(OperatorSubtaskState((handle,)))
    metadata = SnapshotMetadata(
        job_id=JOB_ID,
        job_name="tools",
        checkpoint_id=1,
        kind="checkpoint",
        attempt=1,
        epoch=1,
        trigger_timestamp_ms=0,
        completion_timestamp_ms=1,
        operators=(OperatorState("op", "a" * 32, "op", PARTS, MAX_PARALLELISM, tuple(states)),),
    )
    (folder / "job/chk-1" / METADATA_NAME).write_bytes(encode_metadata(metadata))


def _chunks(groups: KeyGroupRange, keys: int, rows: int) -> Iterator[tuple[bytes, list[bytes], list[bytes]]]:
    """The keys of some key groups, with random values."""
    noise = np.random.default_rng(groups.start)
    for first in range(0, keys, ROWS_PER_BATCH):
        encoded = [KEY.encode(key) for key in range(first, min(first + ROWS_PER_BATCH, keys))]
        owned = ROWS.groups_of(encoded)
        own = [encoded[index] for index in np.flatnonzero((owned >= groups.start) & (owned < groups.stop)).tolist()]
        for start in range(0, len(own), rows):
            some = own[start : start + rows]
            values = noise.bytes(VALUE_BYTES * len(some))
            yield b"", some, [values[at : at + VALUE_BYTES] for at in range(0, len(values), VALUE_BYTES)]


def _table(
    storage: LocalStorage, target: SnapshotTarget, groups: KeyGroupRange, keys: int, table_format: TableFormat
) -> KeyedStateHandle:
    data = encode_keyed_table(ROWS.stream(CODEC, _chunks(groups, keys, ROWS_PER_BATCH)), table_format)
    part = run_flow(write_part(memoryview(data), f"value.{table_format}", target), storage)
    return KeyedStateHandle(groups, table_format, (CODEC.meta,), (part,))


def _native(folder: Path, storage: LocalStorage, target: SnapshotTarget, groups: KeyGroupRange, keys: int) -> KeyedStateHandle:
    database, copy = folder / f"db-{groups.start}", folder / f"copy-{groups.start}"
    store = RocksStore(str(database), write_buffer_bytes=32 << 20, block_cache_bytes=32 << 20)
    state_id = store.state_id("value")
    for _, some, values in _chunks(groups, keys, WRITE_ROWS):
        store.write_batch(row_keys(ROWS.groups_of(some), state_id, some, b""), CODEC.encode_all(values))
    names = store.link_copy(str(copy))
    store.close()
    parts = tuple(run_flow(write_part((copy / name).read_bytes(), name, target), storage) for name in names)
    shutil.rmtree(database)
    shutil.rmtree(copy)
    return KeyedStateHandle(groups, "rocksdb", (CODEC.meta,), parts, tuple(names))


class Used(NamedTuple):
    """What a tool took."""

    seconds: float
    cpu_s: float
    peak_mb: float
    """Of the resident memory."""


def run_tool(arguments: list[str]) -> Used:
    """Raises RuntimeError if the tool fails."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{arguments} ended with {process.returncode}")
    return Used(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000)


def measure_format(table_format: Format, keys: int) -> Iterator[Row]:
    """Every tool on one snapshot, made by another process: a child's peak is at least its parent's."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    try:
        run_tool(["-m", "benchmarks.tools", "--make", str(folder), "--keys", str(keys), "--format", table_format])
        path = str(folder / "job/chk-1")
        size = sum(file.stat().st_size for file in Path(path).iterdir())
        directory = make_ended_job(folder)
        command = ["-m", "holdfast", "snapshot"]
        forgotten = ["--state", "op", "value", "--key", str(keys // 2)]
        tools = {
            "verify": [*command, "verify", path],
            "inspect": [*command, "inspect", path],
            "inspect --state": [*command, "inspect", path, "--state", "op", "value", "--limit", "20"],
            "every row": ["-c", _READ_ALL, path, str(keys)],
            "drill": ["-c", _DRILL, path, str(keys)],
            "copy": [*command, "copy", path, str(folder / "copy")],
            "forget": ["-m", "holdfast", "forget", JOB_ID, *forgotten, "--to", str(folder), "--state-dir", str(directory)],
        }
        start_mb = run_tool(["-c", "from holdfast.api.snapshots import inspection, snapshot"]).peak_mb
        verified_s = copied_s = 0.0
        for tool, arguments in tools.items():
            used = run_tool(arguments)
            verified_s = used.cpu_s if tool == "verify" else verified_s
            copied_s = used.cpu_s if tool == "copy" else copied_s
            row: Row = {
                "tool": tool,
                "format": table_format,
                "keys": keys,
                "megabytes": round(size / 1e6),
                "seconds": round(used.seconds, 2),
                "cpu_s": round(used.cpu_s, 2),
                "peak_mb": round(used.peak_mb),
                "over_start_mb": round(used.peak_mb - start_mb),
                "load_average": round(os.getloadavg()[0], 1),
            }
            if tool == "drill":
                row |= {"of": "verify", "times": round(used.cpu_s / verified_s, 2), "aim_at_most": DRILL_OF_VERIFY_MAX}
            if tool == "forget":
                row |= {"of": "copy", "times": round(used.cpu_s / copied_s, 2), "aim_at_most": FORGET_OF_COPY_MAX}
            yield row
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(*, quick: bool = False) -> list[Row]:
    """1 M and 5 M keys; with --quick 100 k."""
    return [
        row for kind in FORMATS for keys in ((100_000,) if quick else (1_000_000, 5_000_000)) for row in measure_format(kind, keys)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="100,000 keys")
    parser.add_argument("--keys", default="1000000,5000000", help="comma-separated")
    parser.add_argument("--format", default=",".join(FORMATS), help="comma-separated")
    parser.add_argument("--make", metavar="FOLDER", help="only make the snapshot")
    arguments = parser.parse_args()
    counts = [100_000] if arguments.quick else [int(text) for text in arguments.keys.split(",")]
    for kind in arguments.format.split(","):
        for keys in counts:
            if arguments.make is not None:
                make(Path(arguments.make), keys, kind)
                continue
            for row in measure_format(kind, keys):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
