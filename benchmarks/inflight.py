"""Restore of 64 MiB in flight, at the same parallelism and at another: records of a shuffle by key, as a snapshot has them.

All subtasks in this process, one after the other: `slowest_s` is the wait of a job whose subtasks each have a core, `total_s` their
sum, from the records that the coordinator sends to the elements that stand in front of the channels. State is not in it. Beside
them the raw write of as many bytes, in the same folder.

    python -m benchmarks.inflight [--quick]"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import holdfast as hf
from benchmarks.harness import raw_write_ms
from benchmarks.workloads import RECORD_BYTES, SCHEMA, Bids
from holdfast.barriers.elements import Batch, Element
from holdfast.barriers.exchange.partition import KeySelector
from holdfast.barriers.exchange.wiring import derive_inputs
from holdfast.barriers.jobgraph import JobEdge, JobGraph, Partitioning
from holdfast.barriers.messages import Deployment, InFlightRestore, SubtaskDeployment, SubtaskKey
from holdfast.coordinator.restore.in_flight import assign_in_flight
from holdfast.operators.task.inflight import InFlight, SubtaskEdges
from holdfast.operators.task.restored_channels import ChannelLoader
from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.handles import ChannelState
from holdfast.statebackends.local_recovery.storage import RestoredBytes
from holdfast.statebackends.serialization.key_group_columns import subtasks_of_key_groups
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import run_flow

Row = dict[str, Any]

BYTES = 64 << 20
BATCH_ROWS = 2_048
OLD = 2
AIMS_S = {2: 0.3, 3: 1.0}
"""New parallelism -> most that the restore may take."""
FOLDER = "job/chk-1"


class _Job:
    """Records that are shuffled by bidder and counted, at some parallelism."""

    def __init__(self, parallelism: int) -> None:
        env = hf.Environment("flight", parallelism=parallelism)
        bids = env.from_source(hf.GeneratorSource(Bids(10_000), 1, SCHEMA)).uid("bids").key_by("bidder")
        bids.aggregate(emit="none", bids=hf.count()).uid("count").sink_to(hf.Blackhole()).uid("out")
        plan = env.build()
        self.graph: JobGraph = plan.graph
        self.edge: JobEdge = next(edge for edge in self.graph.edges if edge.partitioning is Partitioning.HASH)
        self.vertex = self.graph.vertex(self.edge.target)
        head = self.vertex.operators[0].uid
        self.selectors: dict[int, KeySelector] = {index: each for (uid, index), each in plan.selectors.items() if uid == head}


def store(storage: LocalStorage, job: _Job, size: int) -> tuple[tuple[ChannelState, ...], int]:
    """`size` bytes in flight, as much on each channel: what the snapshot has of them, and the number of rows."""
    selector = job.selectors[job.edge.input_index]
    maximum, parallelism = job.vertex.max_parallelism, job.vertex.parallelism
    channels: list[list[list[Element]]] = [[[] for _ in range(parallelism)] for _ in range(parallelism)]
    rows = 0
    for number in range(size // RECORD_BYTES // BATCH_ROWS):
        batch = Batch(columns=Bids(10_000)(np.arange(BATCH_ROWS) + number * BATCH_ROWS))
        keys = selector.keys(batch, max_parallelism=maximum, operator="bids", subtask=0)
        owners = subtasks_of_key_groups(keys.key_groups, maximum, parallelism)
        for consumer in range(parallelism):
            channels[consumer][number % parallelism].append(batch.filter(owners == consumer))
        rows += BATCH_ROWS
    found: tuple[ChannelState, ...] = ()
    for consumer, producers in enumerate(channels):
        key = SubtaskKey(job.vertex.vertex_id, consumer)
        flight = InFlight(SubtaskEdges(job.graph, key), ())
        indexes = {each.channel.producer: index for index, each in enumerate(derive_inputs(job.graph, key.vertex, consumer))}
        flight.take_inputs((indexes[producer], tuple(elements)) for producer, elements in enumerate(producers))
        target = SnapshotTarget(1, FOLDER, f"count-{consumer}-1-n", False, 20_480, f"1-1-count-{consumer}-n")
        found += run_flow(flight.flow(target), storage)
    return found, rows


def restore(storage: LocalStorage, job: _Job, restores: dict[SubtaskKey, InFlightRestore]) -> tuple[list[float], int]:
    """(seconds of each subtask, rows in front of all channels)."""
    seconds, rows = [], 0
    for subtask in range(job.vertex.parallelism):
        key = SubtaskKey(job.vertex.vertex_id, subtask)
        wanted = SubtaskDeployment(key.vertex, subtask, in_flight=restores[key])
        deployment = Deployment(2, job.graph, (wanted,), {}, restored_checkpoint_id=1, restored_folder=FOLDER)
        began = time.perf_counter()
        found = ChannelLoader(wanted, deployment, job.selectors).load(storage, RestoredBytes(), None, None)
        seconds.append(time.perf_counter() - began)
        rows += sum(each.num_rows for _, elements in found for each in elements if isinstance(each, Batch))
    return seconds, rows


def measure(*, quick: bool = False) -> list[Row]:
    """A line for each new parallelism: medians. Raises RuntimeError if rows are missing, or too many."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    try:
        storage, old = LocalStorage(folder), _Job(OLD)
        channels, rows = store(storage, old, BYTES)
        return [_row(storage, old, _Job(new), channels, rows, 3 if quick else 10) for new in AIMS_S]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _row(storage: LocalStorage, old: _Job, new: _Job, channels: tuple[ChannelState, ...], rows: int, repeats: int) -> Row:
    restores = assign_in_flight(channels, msgspec.to_builtins(old.graph), new.graph)
    restore(storage, new, restores)  # imports and caches
    runs = []
    for _ in range(repeats):
        seconds, found = restore(storage, new, restores)
        if found != rows:
            raise RuntimeError(f"{found} rows were restored, and {rows} were in flight")
        runs.append(seconds)
    slowest, aim_s = statistics.median(max(run) for run in runs), AIMS_S[new.vertex.parallelism]
    return {
        "workload": "64 MiB in flight restored",
        "parallelism": f"{old.vertex.parallelism} -> {new.vertex.parallelism}",
        "rows": rows,
        "slowest_s": round(slowest, 3),
        "total_s": round(statistics.median(sum(run) for run in runs), 3),
        "raw_write_s": round(raw_write_ms(Path(storage.root), BYTES) / 1000, 3),
        "aim_s": aim_s,
        "met": "yes" if slowest <= aim_s else "no",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    for row in measure(quick=parser.parse_args().quick):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
