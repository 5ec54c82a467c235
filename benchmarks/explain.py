"""Time of explanations and of a job's health, for a job of 10,000 subtasks: the aim is 50 ms each, on one core.

    python -m benchmarks.explain [--quick]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from holdfast.barriers.jobgraph import JobConfig, JobEdge, JobGraph, JobVertex, OperatorDescription, Partitioning
from holdfast.barriers.messages import CheckpointKind, SubtaskMetrics, TaskState
from holdfast.coordinator.explain.explanation import choose_checkpoint, explain
from holdfast.coordinator.explain.health import derive_health
from holdfast.coordinator.explain.records import CutView, Situation
from holdfast.coordinator.views import (
    CheckpointCounts,
    CheckpointPhases,
    CheckpointStatsView,
    CheckpointView,
    JobOverviewView,
    JobView,
    ScheduleView,
    SubtaskCheckpointView,
    SubtaskView,
    VertexCheckpointView,
    VertexView,
    WorkerView,
)

VERTICES, PARALLELISM = 10, 1_000
AIM_MS = 50
NOW = 1_700_000_000_000
TRIGGER = NOW - 60_000
MIB = 1024 * 1024

Ack = Callable[[int, int], SubtaskCheckpointView]
"""Of a vertex and a subtask."""


def acked(subtask: int, *, align_ms: int = 20, store_ms: int = 200) -> SubtaskCheckpointView:
    took_ms = 30 + align_ms + store_ms + 20
    return SubtaskCheckpointView(
        subtask, TRIGGER + took_ms, took_ms, MIB, 8 * MIB, 10, store_ms + 20, align_ms, 0, 20, store_ms=store_ms, new_files=2
    )


def missing(subtask: int) -> SubtaskCheckpointView:
    return SubtaskCheckpointView(subtask, -1, -1, 0, 0, 0, 0, 0, 0, 0)


def make_graph() -> JobGraph:
    kinds = ["source", *["process"] * (VERTICES - 2), "sink_writer"]
    made = [
        JobVertex(f"{index:032x}", f"step {index}", PARALLELISM, 32_768, (OperatorDescription(f"u{index}", "", f"u{index}", kind),))
        for index, kind in enumerate(kinds)
    ]
    edges = [
        JobEdge(index, a.vertex_id, a.operators[0].uid, b.vertex_id, 0, Partitioning.HASH, ("k",), overtakable=True)
        for index, (a, b) in enumerate(itertools.pairwise(made))
    ]
    return JobGraph("bench", tuple(made), tuple(edges), JobConfig(state_backend="rocksdb"))


def make_checkpoint(graph: JobGraph, status: str, ack: Ack) -> CheckpointView:
    vertices, count, latest_ms = {}, 0, -1
    for index, vertex in enumerate(graph.vertices):
        subtasks = tuple(ack(index, subtask) for subtask in range(PARALLELISM))
        done = sum(each.acknowledged for each in subtasks)
        latest_ms, count = max(latest_ms, *(each.ack_ms for each in subtasks)), count + done
        key = vertex.vertex_id
        vertices[key] = VertexCheckpointView(key, status, latest_ms, 0, 0, 0, 0, PARALLELISM, done, subtasks)
    size = count * MIB
    return CheckpointView(
        checkpoint_id=41,
        kind=CheckpointKind.CHECKPOINT,
        status=status,
        trigger_ms=TRIGGER,
        latest_ack_ms=latest_ms,
        checkpointed_size=size,
        state_size=8 * size,
        end_to_end_ms=latest_ms - TRIGGER,
        processed_bytes=0,
        persisted_bytes=0,
        num_subtasks=VERTICES * PARALLELISM,
        num_acknowledged_subtasks=count,
        vertices=vertices,
        failure_ms=NOW if status == "FAILED" else -1,
        failure_reason="expired" if status == "FAILED" else None,
        decide_ms=10 if status == "COMPLETED" else -1,
    )


def make_job(graph: JobGraph) -> JobView:
    """The seventh vertex is busy, those in front of it wait for it."""

    def subtask(index: int, number: int) -> SubtaskView:
        busy, held = (100, 900) if index < 7 else (980, 0) if index == 7 else (200, 0)
        metrics = SubtaskMetrics(
            graph.vertices[index].vertex_id, number, 10_000, busy_ms_per_second=busy, backpressured_ms_per_second=held
        )
        host = f"host-{number % 250}"
        return SubtaskView(metrics.vertex, number, TaskState.RUNNING, 1, host, NOW - 900_000, -1, {}, False, metrics)

    views = tuple(
        VertexView(
            vertex.vertex_id,
            vertex.name,
            PARALLELISM,
            32_768,
            TaskState.RUNNING,
            NOW - 900_000,
            -1,
            {},
            tuple(subtask(index, number) for number in range(PARALLELISM)),
        )
        for index, vertex in enumerate(graph.vertices)
    )
    workers = tuple(
        WorkerView(slot, True, True, slot, f"host-{slot % 250}", "tcp://h:1", "n", 1, "s", NOW - 100) for slot in range(PARALLELISM)
    )
    overview = JobOverviewView("0" * 32, "bench", "RUNNING", NOW - 900_000, -1, NOW, {}, PARALLELISM, PARALLELISM)
    return JobView(overview, NOW, {}, graph, views, workers, (), 1, 1, 0, 1, None)


def make_situation(graph: JobGraph) -> Situation:
    size = VERTICES * PARALLELISM * MIB
    recent = tuple(
        CheckpointPhases(number, 300, 20, 20, 10, 20, 200, 20, 10, 10, size, 8 * size, 5 * MIB, 20_000) for number in range(21, 41)
    )
    stats = CheckpointStatsView(CheckpointCounts(0, 41, 0, 41, 0), {}, (), None, None, None, None, recent)
    cut = CutView(40, CheckpointKind.CHECKPOINT, "/state/j/chk-40", NOW - 5_000, {"u0": 1})
    return Situation(make_job(graph), graph.config, stats, None, ScheduleView(10_000, 100), cut, {"u0": 5_000})


def situations() -> dict[str, Situation]:
    graph = make_graph()
    base = make_situation(graph)

    def with_checkpoint(status: str, ack: Ack) -> Situation:
        return replace(base, checkpoint=make_checkpoint(graph, status, ack))

    return {
        "healthy": with_checkpoint("COMPLETED", lambda vertex, subtask: acked(subtask)),
        "held up": with_checkpoint("COMPLETED", lambda vertex, subtask: acked(subtask, align_ms=20_000 if vertex >= 7 else 20)),
        "slow storage": with_checkpoint("COMPLETED", lambda vertex, subtask: acked(subtask, store_ms=9_000)),
        "pending": with_checkpoint("IN_PROGRESS", lambda vertex, subtask: missing(subtask) if vertex >= 7 else acked(subtask)),
        "pending, all missing": with_checkpoint("IN_PROGRESS", lambda vertex, subtask: missing(subtask)),
        "expired": with_checkpoint("FAILED", lambda vertex, subtask: missing(subtask) if subtask % 2 else acked(subtask)),
        "missing": base,
    }


def measure(*, quick: bool = False) -> list[dict[str, Any]]:
    """A line for each situation, and one for the health of the job; ms of CPU, median and longest of several."""
    rows, repeats = [], 5 if quick else 25
    for name, situation in situations().items():
        kind = explain(situation).first_cause.kind.value
        rows.append(_line(f"explain: {name}", kind, functools.partial(explain, situation), repeats))
    base = situations()["missing"]
    rows.append(_line("choose", "", functools.partial(choose_checkpoint, base), repeats))
    rows.append(_line("health", derive_health(base).verdict.value, functools.partial(derive_health, base), repeats))
    return rows


def _line(workload: str, found: str, call: Callable[[], object], repeats: int) -> dict[str, Any]:
    times = []
    for _ in range(repeats):
        began = time.thread_time()
        call()
        times.append((time.thread_time() - began) * 1000)
    subtasks = VERTICES * PARALLELISM
    row = {"workload": workload, "found": found, "subtasks": subtasks, "ms": round(statistics.median(times), 1)}
    return {**row, "ms_max": round(max(times), 1), "aim_ms": AIM_MS}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    for row in measure(quick=parser.parse_args().quick):
        print(json.dumps(row))
