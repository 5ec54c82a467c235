"""Situations by hand: a healthy job of four vertices, and what a test changes of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from holdfast.barriers.jobgraph import JobConfig, JobEdge, JobGraph, JobVertex, OperatorDescription, Partitioning
from holdfast.barriers.messages import CheckpointKind, SubtaskMetrics, TaskState
from holdfast.coordinator.explain.records import CutView, Situation
from holdfast.coordinator.views import (
    CheckpointCounts,
    CheckpointPhases,
    CheckpointStatsView,
    CheckpointView,
    ExceptionView,
    HookFailureView,
    HookWaitView,
    JobOverviewView,
    JobView,
    ScheduleView,
    SubtaskCheckpointView,
    SubtaskView,
    VertexCheckpointView,
    VertexView,
    WorkerView,
)

JOB = "0123456789abcdef0123456789abcdef"
NOW = 1_700_000_000_000
NUMBER = 41
MIB = 1024 * 1024
SOURCE, WINDOW, SINK, COMMITTER = "a" * 32, "b" * 32, "c" * 32, "d" * 32
_VERTICES = (
    (SOURCE, "orders", "orders", "source", 4),
    (WINDOW, "count per carrier", "counts", "window", 4),
    (SINK, "table", "table", "sink_writer", 4),
    (COMMITTER, "table committer", "table-committer", "sink_committer", 1),
)
_SHARES = {SOURCE: (300, 0), WINDOW: (400, 0), SINK: (200, 0), COMMITTER: (10, 0)}
"""ms of the last second: busy, backpressured."""

Ack = dict[str, int]
HEALTHY: Ack = {
    "start": 20,
    "align": 30,
    "sync": 10,
    "encode": 40,
    "store": 200,
    "ack": 20,
    "size": 4 * MIB,
    "state": 40 * MIB,
    "files": 4,
    "stalled": 0,
}
"""Of each subtask, ms and bytes."""
STORED = 13 * HEALTHY["size"]


def graph_of(
    config: JobConfig, vertices: Iterable[tuple[str, str, str, str, int]] = _VERTICES, *, overtakable: bool = True
) -> JobGraph:
    """A chain of vertices, keyed between each two."""
    made = [
        JobVertex(vertex, name, parallelism, 128, (OperatorDescription(uid, vertex, name, kind, sink_id=_sink(kind)),))
        for vertex, name, uid, kind, parallelism in vertices
    ]
    edges = [
        JobEdge(
            index, before.vertex_id, before.operators[0].uid, after.vertex_id, 0, Partitioning.HASH, ("k",), overtakable=overtakable
        )
        for index, (before, after) in enumerate(itertools.pairwise(made))
    ]
    return JobGraph("flights", tuple(made), tuple(edges), config)


def _sink(kind: str) -> str | None:
    return "table" if kind.startswith("sink") else None


@dataclass
class Built:
    """A situation that can be changed; `made` is what it comes to."""

    config: JobConfig = field(
        default_factory=lambda: JobConfig(state_backend="rocksdb", checkpoint_interval_ms=10_000, checkpoint_timeout_ms=120_000)
    )
    state: str = "RUNNING"
    status: str | None = "COMPLETED"
    """None: there is no checkpoint to explain."""
    kind: CheckpointKind = CheckpointKind.CHECKPOINT
    age_ms: int = 5_000
    """Since the trigger."""
    reason: str | None = None
    message: str = ""
    failed_after_ms: int = 0
    decide_ms: int = 15
    notify_ms: int = 20
    hooks: HookWaitView | None = None
    hook_failure: HookFailureView | None = None
    has_id: bool = True
    """False: it failed before its id was its own, and nothing is known of its tasks."""
    acks: dict[tuple[str, int], Ack | None] = field(default_factory=dict)
    """Where not healthy; None: missing."""
    shares: dict[tuple[str, int], tuple[int, int] | None] = field(default_factory=dict)
    records: dict[tuple[str, int], int] = field(default_factory=dict)
    metrics: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    states: dict[tuple[str, int], TaskState] = field(default_factory=dict)
    hosts: tuple[str, ...] = ("h0", "h1", "h2", "h3")
    workers: dict[int, dict[str, Any]] = field(default_factory=dict)
    exceptions: tuple[ExceptionView, ...] = ()
    schedule: ScheduleView | None = field(default_factory=lambda: ScheduleView(10_000, 5_000))
    recent: tuple[CheckpointPhases, ...] | None = None
    usual: dict[str, int] = field(default_factory=dict)
    """Fields of the phases of those before it, where not healthy."""
    compared: int = 20
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of the JobView."""
    cut: CutView | None = field(
        default_factory=lambda: CutView(40, CheckpointKind.CHECKPOINT, "/state/j/chk-40", NOW - 5_000, {"orders": 1_000})
    )
    source_records: dict[str, int] | None = field(default_factory=lambda: {"orders": 1_500})
    backlog: bool = False
    overtakable: bool = True

    def tune(self, **settings: Any) -> None:
        self.config = replace(self.config, **settings)

    def ack(self, vertex: str, subtasks: Iterable[int] = range(4), **fields: int) -> None:
        for subtask in subtasks:
            self.acks[vertex, subtask] = {**HEALTHY, **fields}

    def all_acks(self, **fields: int) -> None:
        for vertex, _, _, _, parallelism in _VERTICES:
            self.ack(vertex, range(parallelism), **fields)

    def missing(self, vertex: str, *subtasks: int) -> None:
        for subtask in subtasks:
            self.acks[vertex, subtask] = None

    def pressed(self, *vertices: str, share: int = 900) -> None:
        """These vertices wait at their outputs."""
        for vertex in vertices:
            for subtask in range(4):
                self.shares[vertex, subtask] = (1_000 - share, share)

    def busy(self, vertex: str, subtasks: Iterable[int] = range(4), share: int = 980) -> None:
        for subtask in subtasks:
            self.shares[vertex, subtask] = (share, 0)

    # ------------------------------------------------------------------------------------------------------ made

    @property
    def trigger_ms(self) -> int:
        return NOW - self.age_ms

    def made(self) -> Situation:
        checkpoint = self._checkpoint() if self.status is not None else None
        history = (replace(checkpoint, vertices={}),) if checkpoint is not None else ()
        return Situation(
            job=self._job(),
            config=self.config,
            stats=CheckpointStatsView(
                counts=CheckpointCounts(0, 41, 0, 40, 0),
                summary={},
                history=history,
                latest_completed=None,
                latest_savepoint=None,
                latest_failed=None,
                latest_restored=None,
                recent=self.recent if self.recent is not None else self._recent(),
            ),
            checkpoint=checkpoint,
            schedule=self.schedule,
            cut=self.cut,
            source_records=self.source_records,
            is_processing_backlog=self.backlog,
        )

    def _recent(self) -> tuple[CheckpointPhases, ...]:
        fields = {
            "end_to_end_ms": 335,
            "start_delay_ms": 20,
            "alignment_ms": 30,
            "sync_ms": 10,
            "encode_ms": 40,
            "store_ms": 200,
            "acknowledge_ms": 20,
            "decide_ms": 15,
            "notify_ms": 20,
            "checkpointed_size": STORED,
            "state_size": 13 * HEALTHY["state"],
            "store_rate": HEALTHY["size"] * 1000 // HEALTHY["store"],
            "new_files": 52,
            **self.usual,
        }
        numbers = range(NUMBER - self.compared, NUMBER)
        return tuple(CheckpointPhases(checkpoint_id=number, **fields) for number in numbers)

    def _subtask(self, vertex: str, subtask: int) -> SubtaskCheckpointView:
        ack = self.acks.get((vertex, subtask), HEALTHY)
        if ack is None:
            return SubtaskCheckpointView(subtask, -1, -1, 0, 0, 0, 0, 0, 0, 0)
        asynchronous = ack["encode"] + max(0, ack["store"])
        took = ack["start"] + ack["align"] + ack["sync"] + asynchronous + ack["ack"]
        told = ack["store"] >= 0
        return SubtaskCheckpointView(
            subtask=subtask,
            ack_ms=self.trigger_ms + took,
            end_to_end_ms=took,
            checkpointed_size=ack["size"],
            state_size=ack["state"],
            sync_ms=ack["sync"],
            async_ms=asynchronous,
            alignment_ms=ack["align"],
            alignment_processed=0,
            start_delay_ms=ack["start"],
            store_ms=ack["store"] if told else -1,
            new_files=ack["files"] if told else -1,
            stalled_ms=ack["stalled"],
        )

    def _checkpoint(self) -> CheckpointView:
        assert self.status is not None
        vertices = {}
        for vertex, _, _, _, parallelism in _VERTICES:
            subtasks = tuple(self._subtask(vertex, subtask) for subtask in range(parallelism))
            acked = [each for each in subtasks if each.acknowledged]
            vertices[vertex] = VertexCheckpointView(
                vertex, self.status, max((each.ack_ms for each in acked), default=-1), 0, 0, 0, 0, parallelism, len(acked), subtasks
            )
        acked = [each for view in vertices.values() for each in view.subtasks if each.acknowledged]
        latest_ms = max((each.ack_ms for each in acked), default=-1)
        is_completed = self.status == "COMPLETED"
        took_ms = max(0, latest_ms - self.trigger_ms) + (self.decide_ms if is_completed else 0)
        return CheckpointView(
            checkpoint_id=NUMBER,
            kind=self.kind,
            status=self.status,
            trigger_ms=self.trigger_ms,
            latest_ack_ms=latest_ms,
            checkpointed_size=sum(each.checkpointed_size for each in acked),
            state_size=sum(each.state_size for each in acked),
            end_to_end_ms=took_ms if acked else -1,
            processed_bytes=0,
            persisted_bytes=0,
            num_subtasks=13 if self.has_id else 0,
            num_acknowledged_subtasks=len(acked),
            vertices=vertices if self.has_id else {},
            failure_ms=self.trigger_ms + self.failed_after_ms if self.status == "FAILED" else -1,
            failure_reason=self.reason,
            failure_message=self.message or self.reason,
            decide_ms=self.decide_ms if is_completed else -1,
            notify_ms=self.notify_ms if is_completed else -1,
            hooks=self.hooks,
            hook_failure=self.hook_failure,
        )

    def _job(self) -> JobView:
        views = tuple(self._vertex(vertex, name, parallelism) for vertex, name, _, _, parallelism in _VERTICES)
        fields: dict[str, Any] = {
            "overview": JobOverviewView(JOB, "flights", self.state, NOW - 3_600_000, -1, NOW, {}, 4, 4),
            "now_ms": NOW,
            "timestamps": {},
            "graph": graph_of(self.config, overtakable=self.overtakable),
            "vertices": views,
            "workers": tuple(self._worker(slot) for slot in range(4)),
            "exceptions": self.exceptions,
            "submission": 1,
            "attempt": 1,
            "restarts": 0,
            "epoch": 1,
            "failure": None,
        }
        return msgspec.structs.replace(JobView(**fields), **self.changes)

    def _worker(self, slot: int) -> WorkerView:
        view = WorkerView(slot, True, True, 100 + slot, self.hosts[slot], "tcp://h:1", "n", 1, "s", NOW - 500)
        return replace(view, **self.workers.get(slot, {}))

    def _vertex(self, vertex: str, name: str, parallelism: int) -> VertexView:
        subtasks = []
        for subtask in range(parallelism):
            told = self.shares.get((vertex, subtask), _SHARES[vertex])
            busy: dict[str, Any] = {} if told is None else {"busy_ms_per_second": told[0], "backpressured_ms_per_second": told[1]}
            records = self.records.get((vertex, subtask), 10_000)
            metrics = SubtaskMetrics(vertex, subtask, records_in=records, **busy, **self.metrics.get((vertex, subtask), {}))
            state = self.states.get((vertex, subtask), TaskState.RUNNING)
            subtasks.append(SubtaskView(vertex, subtask, state, 1, self.hosts[subtask], NOW - 3_000_000, -1, {}, False, metrics))
        return VertexView(vertex, name, parallelism, 128, TaskState.RUNNING, NOW - 3_000_000, -1, {}, tuple(subtasks))
