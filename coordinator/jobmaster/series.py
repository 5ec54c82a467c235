"""CORE, part of the job master: rates, watermark lag and ratios of each subtask over the last 15 minutes, for users. They decide
nothing.

Each subtask has one point a bucket of `resolution_ms`, made of its first heartbeat in it: rates and ratios since its point before.
Memory is fixed once the rings are full, and bounded by SERIES_BYTES_MAX a job: a larger job has longer buckets, never fewer
subtasks. A row of the ring does not change once the next one is begun, so that captures share it."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.messages import SubtaskMetrics
from holdfast.coordinator.views import SeriesView

METRICS: Final = (
    "records_in_per_second",
    "records_out_per_second",
    "bytes_in_per_second",
    "bytes_out_per_second",
    "watermark_lag_ms",
    "busy_ratio",
    "idle_ratio",
    "backpressured_ratio",
)
"""Names of the series. The three ratios of a point sum to 1."""

SPAN_MS = 900_000
"""Time that the rings cover."""

SERIES_BYTES_MAX = 32 << 20
"""Bytes of the rings of one job."""

RESOLUTIONS_MS = (5_000, 10_000, 15_000, 30_000, 60_000, 180_000)

_POINT_BYTES = 4 * len(METRICS)
_COUNTERS = 9
"""Numbers that are kept of a subtask's newest point: bucket, time, and seven counters."""


def choose_resolution(subtasks: int) -> int:
    """Length of a bucket in ms: the shortest of RESOLUTIONS_MS with which the rings of so many subtasks keep within their bound."""
    fitting = (each for each in RESOLUTIONS_MS if subtasks * _POINT_BYTES * (SPAN_MS // each) <= SERIES_BYTES_MAX)
    return next(fitting, RESOLUTIONS_MS[-1])


@dataclass(frozen=True, slots=True)
class _Row:
    """One bucket of one vertex: the values of each metric, subtask by subtask; NaN: not known."""

    bucket: int
    begin_ms: int
    """Wall clock."""
    values: array[float]


class CapturedSeries:
    """The rings at one moment, for any thread."""

    def __init__(self, resolution_ms: int, rows: Mapping[str, tuple[_Row, ...]], parallelism: Mapping[str, int]) -> None:
        self.resolution_ms = resolution_ms
        self._rows = rows
        self._parallelism = parallelism

    @property
    def vertices(self) -> Sequence[str]:
        return tuple(self._rows)

    def parallelism(self, vertex: str) -> int:
        return self._parallelism[vertex]

    def view(self, vertex: str, metric: str, subtasks: Iterable[int], as_of_ms: int) -> SeriesView:
        """One metric of one vertex, over all subtasks, and of `subtasks` each. O(points x parallelism)."""
        count, place = self._parallelism[vertex], METRICS.index(metric)
        rows = [row for row in self._rows[vertex] if row.begin_ms > as_of_ms - SPAN_MS - self.resolution_ms]
        if not rows:
            shown = {number: () for number in subtasks if number < count}
            return SeriesView(vertex, metric, self.resolution_ms, count, subtasks=shown)
        table = np.full((len(rows), count), np.nan, dtype=np.float32)
        for number, row in enumerate(rows):
            table[number] = np.frombuffer(row.values, dtype=np.float32)[place * count : (place + 1) * count]
        known = ~np.isnan(table)
        told = known.sum(axis=1)
        sums = np.where(known, table, 0).sum(axis=1, dtype=np.float64)
        lowest = np.where(known, table, np.inf).min(axis=1)
        highest = np.where(known, table, -np.inf).max(axis=1)
        return SeriesView(
            vertex=vertex,
            metric=metric,
            resolution_ms=self.resolution_ms,
            parallelism=count,
            times_ms=tuple(row.begin_ms for row in rows),
            sum=_shown(sums, told),
            avg=_shown(sums / np.maximum(told, 1), told),
            min=_shown(lowest, told),
            max=_shown(highest, told),
            subtasks={number: _shown(table[:, number], known[:, number]) for number in subtasks if number < count},
        )


def _shown(values: np.ndarray, told: np.ndarray) -> tuple[float | None, ...]:
    return tuple(round(float(value), 3) if known else None for value, known in zip(values, told, strict=True))


class _VertexSeries:
    """The ring of one vertex."""

    __slots__ = ("_blank", "_captured", "_open", "_rows", "newest", "parallelism")

    def __init__(self, parallelism: int, points: int) -> None:
        self.parallelism = parallelism
        self._blank = array("f", [math.nan]) * (parallelism * len(METRICS))
        self._rows: deque[_Row] = deque(maxlen=points - 1)
        """Those that don't change any more, oldest first."""
        self._open: _Row | None = None
        self._captured: tuple[_Row, ...] | None = ()
        self.newest = array("d")
        self.forget()

    def forget(self) -> None:
        """The counters begin again."""
        self.newest = array("d", [math.nan]) * (self.parallelism * _COUNTERS)

    def row(self, bucket: int, begin_ms: int) -> array[float]:
        if self._open is None or self._open.bucket != bucket:
            if self._open is not None:
                self._rows.append(self._open)
                self._captured = None
            self._open = _Row(bucket, begin_ms, self._blank[:])
        return self._open.values

    def capture(self) -> tuple[_Row, ...]:
        if self._captured is None:
            self._captured = tuple(self._rows)
        if self._open is None:
            return self._captured
        return (*self._captured, _Row(self._open.bucket, self._open.begin_ms, self._open.values[:]))


class SubtaskSeries:
    """The rings of one job under one leader; they go on over restarts."""

    def __init__(self, graph: JobGraph) -> None:
        self.resolution_ms = choose_resolution(sum(vertex.parallelism for vertex in graph.vertices))
        points = SPAN_MS // self.resolution_ms
        self._vertices = {vertex.vertex_id: _VertexSeries(vertex.parallelism, points) for vertex in graph.vertices}
        self._attempt = 0

    def sample(self, attempt: int, metrics: Iterable[SubtaskMetrics], now_ms: int, wall_ms: int) -> None:
        """Take the counters of a heartbeat. `now_ms`: monotonic."""
        if attempt != self._attempt:
            self._attempt = attempt
            for vertex in self._vertices.values():
                vertex.forget()
        bucket = now_ms // self.resolution_ms
        begin_ms = wall_ms - (now_ms - bucket * self.resolution_ms)
        for entry in metrics:
            vertex = self._vertices.get(entry.vertex)  # type: ignore[assignment]
            if vertex is not None and 0 <= entry.subtask < vertex.parallelism:
                newest, at = vertex.newest, entry.subtask * _COUNTERS
                if newest[at] == bucket:
                    continue
                before = newest[at + 1 : at + _COUNTERS]
                newest[at : at + _COUNTERS] = _counted(bucket, now_ms, entry)
                if not math.isnan(before[0]):
                    _point(vertex.row(bucket, begin_ms), entry.subtask, vertex.parallelism, before, now_ms, entry)

    def capture(self) -> CapturedSeries:
        rows = {name: vertex.capture() for name, vertex in self._vertices.items()}
        return CapturedSeries(self.resolution_ms, rows, {name: vertex.parallelism for name, vertex in self._vertices.items()})


def _counted(bucket: int, now_ms: int, metrics: SubtaskMetrics) -> array[float]:
    times = (metrics.busy_ms, metrics.idle_ms, metrics.backpressured_ms)
    return array(
        "d", (bucket, now_ms, metrics.records_in, metrics.records_out, metrics.bytes_in, metrics.bytes_out, *times)
    )


def _point(
    values: array[float], subtask: int, parallelism: int, before: array[float], now_ms: int, metrics: SubtaskMetrics
) -> None:
    """Write what a subtask did since its newest point; a counter that fell tells nothing."""
    seconds = (now_ms - before[0]) / 1_000
    counts = (metrics.records_in, metrics.records_out, metrics.bytes_in, metrics.bytes_out)
    for number, (count, known) in enumerate(zip(counts, before[1:5], strict=True)):
        if count >= known:
            values[number * parallelism + subtask] = (count - known) / seconds
    lag = metrics.watermark_lag_ms
    if lag is not msgspec.UNSET:
        values[4 * parallelism + subtask] = lag
    times = (metrics.busy_ms - before[5], metrics.idle_ms - before[6], metrics.backpressured_ms - before[7])
    total = sum(times)
    if total > 0 and min(times) >= 0:
        for number, spent in enumerate(times, 5):
            values[number * parallelism + subtask] = spent / total
