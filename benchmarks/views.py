"""CPU time that it costs a job's thread to publish a view, and a reader to show it: 10,000 subtasks, 250 workers.

    python -m benchmarks.views [--quick]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import psutil

from benchmarks.acks import make_graph
from holdfast.barriers.jobgraph import JobGraph, Submission
from holdfast.barriers.launches import draw_secret
from holdfast.barriers.messages import (
    Deploy,
    Heartbeat,
    OperatorMetrics,
    RegisterWorker,
    StatusBatch,
    SubtaskMetrics,
    SubtaskStatus,
    TaskState,
)
from holdfast.coordinator.dispatcher.published import capture
from holdfast.coordinator.dispatcher.storage_effects import Identity, StorageEffects
from holdfast.coordinator.dispatcher.submit import Starter, start_submission
from holdfast.coordinator.ha.records import derive_job_id
from holdfast.coordinator.jobmaster import actions as job_actions
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.jobmaster import JobMaster
from holdfast.coordinator.jobmaster.series import METRICS, SPAN_MS, SubtaskSeries
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import run_flow

Row = dict[str, Any]

WORKERS, VERTICES = 250, 40


class RunningJob:
    """A job master all of whose tasks run, with its storage flows run at once."""

    def __init__(self, graph: JobGraph, location: str) -> None:
        self._graph = graph
        self._storage = open_storage(location)
        job_id = derive_job_id(graph.name)
        self._setup = run_flow(start_submission(job_id, Submission(graph), Starter("n", "", "d", 0)), self._storage)
        self.master = JobMaster(self._setup, rng=random.Random(1), draw_secret=draw_secret)
        identity = Identity(job_id, self._setup.epoch, "n", self._setup.submission, graph)
        self._effects = StorageEffects(identity, lambda: 0)
        self._now_ms = 0
        self._sessions: dict[int, str] = {}
        self._deployed = False
        self._feed(job_events.JobStarted())
        for slot in range(WORKERS):
            message = RegisterWorker(job_id, slot, 1, 1, f"n{slot}", 1, f"host-{slot}", f"tcp://h:{9_000 + slot}", "d")
            self._feed(job_events.RegistrationReceived(slot, message))
            self._feed(job_events.StreamOpened(10_000 + slot, slot, self._sessions[slot], 0))
        assert self._deployed, "the job is not deployed"
        for slot in range(WORKERS):
            statuses = tuple(SubtaskStatus(1, vertex.vertex_id, slot, TaskState.RUNNING) for vertex in graph.vertices)
            batch = StatusBatch(self._setup.epoch, slot, self._sessions[slot], statuses)
            self._feed(job_events.StatesReceived(1, batch))
        assert self.master.lifecycle.is_up, "the job does not run"

    def _feed(self, event: job_events.Event) -> None:
        waiting = [event]
        while waiting:
            for action in self.master.handle(waiting.pop(0), now_ms=self._now_ms, wall_ms=self._now_ms):
                match action:
                    case job_actions.PrepareAttempt():
                        outcome = run_flow(self._effects.flow(action), self._storage)
                        assert outcome is not None
                        waiting.append(outcome)
                    case job_actions.Answer() if hasattr(action.value, "session"):
                        self._sessions[action.ticket] = action.value.session
                    case job_actions.Deliver():
                        self._deployed = self._deployed or any(isinstance(each.command, Deploy) for each in action.commands)

    def heartbeat(self, slot: int, count: int) -> Heartbeat:
        metrics = tuple(_metrics(vertex.vertex_id, slot, count) for vertex in self._graph.vertices)
        return Heartbeat(slot, self._sessions[slot], 1, metrics)

    def beat(self, message: Heartbeat) -> None:
        self._now_ms += 8
        self._feed(job_events.HeartbeatReceived(1, message))


def _metrics(vertex: str, slot: int, count: int) -> SubtaskMetrics:
    operators = (OperatorMetrics(f"v{int(vertex, 16)}", count, count),)
    return SubtaskMetrics(
        vertex,
        slot,
        records_in=count,
        records_out=count,
        operators=operators,
        busy_ms_per_second=500,
        idle_ms_per_second=400,
        backpressured_ms_per_second=100,
    )


def measure(*, quick: bool = False) -> list[Row]:
    rounds = 5 if quick else 20
    with tempfile.TemporaryDirectory() as folder:
        job = RunningJob(make_graph(WORKERS, VERTICES), folder)
        rows = [
            _row("heartbeat of 40 subtasks", _beats(job, rounds)),
            _row("view, nothing changed", _captures(job, rounds, 0)),
            _row("view, 1 heartbeat", _captures(job, rounds, 1)),
            _row("view, 500 ms of heartbeats", _captures(job, rounds, WORKERS // 4)),
            _row("view, all changed", _captures(job, rounds, WORKERS)),
            _row("shown, 500 ms of heartbeats", _captures(job, rounds, WORKERS // 4, shown=True)),
        ]
    return [*rows, *_series(quick=quick)]


def _series(*, quick: bool) -> list[Row]:
    """Fifteen minutes of series: a heartbeat of 40 subtasks with and without points, and the memory of full rings."""
    graph = make_graph(WORKERS, VERTICES)
    series = SubtaskSeries(graph)
    beats = [[_metrics(vertex.vertex_id, slot, 0) for vertex in graph.vertices] for slot in range(WORKERS)]
    before = psutil.Process().memory_info().rss
    points, between = [], []
    for bucket in range(SPAN_MS // series.resolution_ms // (10 if quick else 1)):
        now_ms = bucket * series.resolution_ms
        points += [_timed(lambda beat=beat: series.sample(1, beat, now_ms, now_ms)) for beat in beats]  # type: ignore[misc]  # noqa: B023
        between += [_timed(lambda: series.sample(1, beats[0], now_ms + 1, now_ms + 1))]  # noqa: B023
    grown = psutil.Process().memory_info().rss - before
    rows = [_row("series: heartbeat with points", points), _row("series: heartbeat between points", between)]
    vertex = graph.vertices[0].vertex_id
    rows.append(_row("series shown: a metric of a vertex", [_timed(lambda: series.capture().view(vertex, METRICS[0], (), 0))]))
    return [*rows, {"step": "series: full rings", "resolution_ms": series.resolution_ms, "grown_mib": round(grown / 2**20, 1)}]


def _row(name: str, times_ms: list[float]) -> Row:
    median, longest = statistics.median(times_ms), max(times_ms)
    return {"step": name, "subtasks": WORKERS * VERTICES, "ms": round(median, 3), "max_ms": round(longest, 3)}


def _beats(job: RunningJob, rounds: int) -> list[float]:
    times = []
    for count in range(rounds):
        for message in [job.heartbeat(slot, count) for slot in range(WORKERS)]:
            times.append(_timed(lambda message=message: job.beat(message)))  # type: ignore[misc]
    return times


def _captures(job: RunningJob, rounds: int, beats: int, *, shown: bool = False) -> list[float]:
    times = []
    capture(job.master, 0, 0, monotonic_ms=0).job()
    for count in range(rounds):
        for slot in range(beats):
            job.beat(job.heartbeat(slot, 1_000 + count))
        if shown:
            view = capture(job.master, 0, 0, monotonic_ms=0)
            times.append(_timed(view.job))
        else:
            times.append(_timed(lambda: capture(job.master, 0, 0, monotonic_ms=0)))
    return times


def _timed(step: Callable[[], object]) -> float:
    began = time.thread_time()
    step()
    return (time.thread_time() - began) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    for row in measure(quick=parser.parse_args().quick):
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
