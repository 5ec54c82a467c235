"""A coordinator whose one job has everything that the dashboard shows: a graph, rates, checkpoints, a failure, real snapshots. The
name of a second one is markup."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from holdfast.barriers.jobgraph import JobConfig, JobEdge, JobGraph, JobVertex, OperatorDescription, Partitioning
from holdfast.barriers.messages import CheckpointKind, SubtaskMetrics, TaskState
from holdfast.coordinator.explain.records import CutView, Situation
from holdfast.coordinator.history.records import HistoryEntry, HistoryGap, HistoryPage
from holdfast.coordinator.history.store import HistoryQuery
from holdfast.coordinator.views import (
    CheckpointCounts,
    CheckpointStatsView,
    CheckpointView,
    JobOverviewView,
    JobView,
    Moment,
    Quantiles,
    RestoredView,
    ScheduleView,
    SeriesView,
    SubtaskCheckpointView,
    SubtaskView,
    TriggerView,
    VertexCheckpointView,
    VertexView,
)
from holdfast.statebackends.errors import NotFoundError
from holdfast.statebackends.storage.directory import LocalStorage
from tests.api.fakes import JOB, FakeCoordinator, make_job, make_overview
from tests.statebackends.snapshot_harness import Contents, write

MARKUP = "<img src=x onerror=document.title='owned'>"
UNREADABLE_JOB = "d" * 32
MARKUP_JOB = "f" * 32
NAMES = ("kafka: orders", "parse", "totals per customer", "join with rates", "postgres: totals", "delta: " + MARKUP)
VERTICES = tuple(f"{number:x}" * 32 for number in range(10, 16))
EDGES = ((0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (3, 5))
PARALLELISM = 4
POINTS = 180
CHECKPOINTS = 20


def make_graph(name: str) -> JobGraph:
    def vertex(number: int) -> JobVertex:
        operator = OperatorDescription(uid=f"op-{number}", operator_id=VERTICES[number], name=NAMES[number], kind="process")
        return JobVertex(VERTICES[number], NAMES[number], PARALLELISM, 128, (operator,))

    edges = tuple(
        JobEdge(index, VERTICES[a], f"op-{a}", VERTICES[b], index, Partitioning.HASH, ("k",), "utf8")
        for index, (a, b) in enumerate(EDGES)
    )
    return JobGraph(name, tuple(map(vertex, range(len(NAMES)))), edges, JobConfig())


def write_snapshots(state_dir: Path, savepoints: Path) -> tuple[Path, Path]:
    """A checkpoint, and a savepoint in a directory of its own, with rows."""
    storage = LocalStorage(state_dir)
    old = Contents(count={f"customer-{number}": number for number in range(120)}, tags={"AA": {"t": 1, MARKUP: 2}})
    new = Contents(count={f"customer-{number}": number + number % 3 for number in range(1, 125)}, tags={"AA": {"t": 1}})
    checkpoint = write(state_dir, f"{JOB}/chk-19", old, kind="filesystem", storage=storage)
    savepoint = write(savepoints, "savepoint-20", new, canonical=True, storage=LocalStorage(savepoints))
    return Path(checkpoint.location), Path(savepoint.location)


@dataclass
class StagedCoordinator(FakeCoordinator):
    """Its times are those of now."""

    checkpoint_path: str = ""
    savepoint_path: str = ""
    is_stale: bool = False
    begun_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000 - 15 * 60_000)
    broken: dict[str, str] = field(default_factory=lambda: {UNREADABLE_JOB: f"record claims/7 is damaged: {MARKUP}"})

    @property
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def moment(self, job_id: str | None = None, *, diagnosed: bool = False) -> Moment:
        now_ms = self.now_ms - (60_000 if self.is_stale else 0)
        return Moment(now_ms, str(now_ms // 500))

    def jobs(self) -> tuple[JobOverviewView, ...]:
        first = make_overview("RUNNING", name="orders", start_ms=self.begun_ms)
        second = make_overview("FAILED", job_id=MARKUP_JOB, name=MARKUP, start_ms=self.begun_ms - 86_400_000)
        return first, msgspec.structs.replace(second, end_ms=self.begun_ms)

    def job(self, job_id: str) -> JobView:
        self._called("job", job_id)
        view = make_job("RUNNING")
        name = MARKUP if job_id == MARKUP_JOB else "orders"
        exceptions = tuple(
            msgspec.structs.replace(each, timestamp_ms=self.begun_ms + 300_000, error=f"ValueError: {MARKUP}", vertex="")
            for each in view.exceptions
        )
        return msgspec.structs.replace(
            view,
            overview=msgspec.structs.replace(self.jobs()[0], job_id=job_id, name=name),
            now_ms=self.now_ms,
            graph=make_graph(name),
            vertices=tuple(self._vertex(number) for number in range(len(NAMES))),
            exceptions=exceptions,
        )

    def _vertex(self, number: int) -> VertexView:
        def subtask(index: int) -> SubtaskView:
            metrics = SubtaskMetrics(
                VERTICES[number],
                index,
                records_in=81_234 + index,
                records_out=79_120,
                bytes_in=9_000_000,
                bytes_out=8_000_000,
                watermark_ms=self.now_ms - 4_000,
                watermark_lag_ms=4_000 + 100 * index,
                busy_ms_per_second=950 if number == 2 and index == 1 else 300,
                idle_ms_per_second=50 if number == 2 and index == 1 else 300,
                backpressured_ms_per_second=400 if number < 2 else 0,
            )
            entered = {TaskState.RUNNING: self.begun_ms}
            return SubtaskView(
                VERTICES[number], index, TaskState.RUNNING, 2, f"host-{index}", self.begun_ms, -1, entered, False, metrics
            )

        subtasks = tuple(map(subtask, range(PARALLELISM)))
        counts = {TaskState.RUNNING: PARALLELISM}
        return VertexView(VERTICES[number], NAMES[number], PARALLELISM, 128, TaskState.RUNNING, self.begun_ms, -1, counts, subtasks)

    def _checkpoint(self, number: int) -> CheckpointView:
        """20 is a savepoint, 17 failed, 21 is pending."""
        trigger_ms = self.begun_ms + 30_000 * number
        failed, pending = number == 17, number == 21
        status = "FAILED" if failed else "IN_PROGRESS" if pending else "COMPLETED"
        slow = number == 18
        vertices = {}
        for index, vertex in enumerate(VERTICES):
            subtasks = tuple(
                SubtaskCheckpointView(each, -1, -1, -1, -1, -1, -1, -1, -1, -1)
                if (failed or pending) and index == 2 and each == 1
                else SubtaskCheckpointView(
                    each, trigger_ms + 90, 400 if slow else 90 + index, 1_000_000, 5_000_000, 12, 60, 300 if slow else 8, 4, 5
                )
                for each in range(PARALLELISM)
            )
            told = sum(each.acknowledged for each in subtasks)
            vertices[vertex] = VertexCheckpointView(
                vertex, status, trigger_ms + 90, 4_000_000, 20_000_000, 100, 4, PARALLELISM, told, subtasks
            )
        kind = CheckpointKind.SAVEPOINT if number == 20 else CheckpointKind.CHECKPOINT
        real = {19: self.checkpoint_path, 20: self.savepoint_path}
        location = real.get(number, f"{self.directory}/{JOB}/chk-{number}")
        return CheckpointView(
            checkpoint_id=number,
            kind=kind,
            status=status,
            trigger_ms=trigger_ms,
            latest_ack_ms=trigger_ms + 100,
            checkpointed_size=24_000_000,
            state_size=120_000_000,
            end_to_end_ms=60_000 if failed else 2_400 if slow else 100 + 3 * number,
            processed_bytes=4,
            persisted_bytes=0,
            num_subtasks=PARALLELISM * len(VERTICES),
            num_acknowledged_subtasks=sum(each.num_acknowledged_subtasks for each in vertices.values()),
            vertices=vertices,
            location=location if status == "COMPLETED" else None,
            failure_ms=trigger_ms + 60_000 if failed else -1,
            failure_reason="expired" if failed else None,
            failure_message=f"took too long {MARKUP}" if failed else None,
        )

    def checkpoints(self, job_id: str) -> CheckpointStatsView:
        self._called("checkpoints", job_id)
        history = tuple(self._checkpoint(number) for number in range(21, 1, -1))
        quantiles = Quantiles(100, 2_400, 250.0, 160, 300, 900, 2_400, 2_400)
        return CheckpointStatsView(
            counts=CheckpointCounts(1, 21, 1, 19, 1),
            summary={"end_to_end_duration": quantiles, "state_size": Quantiles(*([120_000_000] * 8))},
            history=history,
            latest_completed=self._checkpoint(19),
            latest_savepoint=self._checkpoint(20),
            latest_failed=self._checkpoint(17),
            latest_restored=RestoredView(16, self.begun_ms + 500_000, False, "/state/chk-16"),
        )

    def checkpoint(self, job_id: str, checkpoint_id: int) -> CheckpointView:
        self._called("checkpoint", job_id, checkpoint_id)
        if not 2 <= checkpoint_id <= 21:
            raise NotFoundError(f"no checkpoint {checkpoint_id}", job=job_id, checkpoint=checkpoint_id)
        return self._checkpoint(checkpoint_id)

    def series(self, job_id: str, vertex: str | None, metric: str, subtasks: Sequence[int] = ()) -> tuple[SeriesView, ...]:
        wanted = VERTICES if vertex is None else (vertex,)
        begin_ms = self.now_ms // 5_000 * 5_000 - 5_000 * (POINTS - 1)
        return tuple(self._series(each, VERTICES.index(each), metric, begin_ms, each == vertex) for each in wanted)

    def _series(self, vertex: str, number: int, metric: str, begin_ms: int, whole: bool) -> SeriesView:
        base = {"records_in_per_second": 4_000.0 / (1 + number), "records_out_per_second": 3_900.0 / (1 + number)}
        base |= {"bytes_in_per_second": 1e6, "bytes_out_per_second": 1e6, "watermark_lag_ms": 4_000.0 + 700 * number}
        base |= {"busy_ratio": 0.95 if number == 2 else 0.3, "idle_ratio": 0.2, "backpressured_ratio": 0.45 if number < 2 else 0.0}
        wave = [base[metric] * (1 + 0.05 * math.sin(point / 7 + number)) for point in range(POINTS)]
        gone = range(90, 96)  # a failure: nothing was told
        values: tuple[float | None, ...] = tuple(None if point in gone else value for point, value in enumerate(wave))
        times = tuple(begin_ms + 5_000 * point for point in range(POINTS))
        each = dict.fromkeys(range(PARALLELISM), values) if whole else {}
        return SeriesView(vertex, metric, 5_000, PARALLELISM, times, values, values, values, values, each)

    def history(self, job_id: str, query: HistoryQuery) -> HistoryPage:
        self._called("history", job_id, query)
        at = self.now_ms - 89 * 5_000

        def entry(number: int, offset_ms: int, kind: str, **facts: Any) -> HistoryEntry:
            return HistoryEntry(1, number, at + offset_ms, kind, facts)

        failure = {"attempt": 1, "error": f"ValueError: {MARKUP}", "restarts": 1, "restart_in_ms": 1_000}
        failure |= {"vertex": VERTICES[2], "subtask": 1}
        entries = (
            entry(1, -400_000, "request", request_kind="savepoint", checkpoint_id=4, location="/state/savepoint-4"),
            entry(2, -300_000, "leader", submission=1, attempt=1, newest_checkpoint=7, took_over=True),
            entry(3, 0, "failure", slot=1, frames='File "orders.py", line 12, in total', **failure),
            entry(4, 1_100, "restart", attempt=2, checkpoint_id=16, folder=self.checkpoint_path, savepoint=False, replayed=1_234),
            entry(5, 1_400, "first_record", attempt=2, since_failure_ms=1_400, heartbeat_ms=500),
        )
        chosen = tuple(each for each in entries if query.kinds is None or each.kind in query.kinds)
        gaps = (HistoryGap(1, 5, 9, 3),) if query.kinds is None or "failure" in query.kinds else ()
        return HistoryPage(chosen, gaps, next="1-5", as_of_ms=self.now_ms)

    def trigger_status(self, job_id: str, trigger_id: str) -> TriggerView:
        self._called("trigger_status", job_id, trigger_id)
        return msgspec.structs.replace(self.trigger, in_progress=False, checkpoint_id=22, location=self.savepoint_path)

    def _situation(self) -> Situation:
        cut = CutView(19, CheckpointKind.CHECKPOINT, self.checkpoint_path, self.now_ms - 9_000, {"op-0": 1_000_000})
        stats = self.checkpoints(JOB)
        return Situation(self.job(JOB), self.config, stats, None, ScheduleView(30_000, 500), cut, {"op-0": 1_036_000})
