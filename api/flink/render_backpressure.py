"""Backpressure in Flink's dialect: pure functions from the coordinator's views to response records.

It decides what counts as much: levels have Flink's bounds, and a vertex has that of its worst subtask."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, TypeAlias

from msgspec import UNSET

from holdfast.api.flink import schemas
from holdfast.api.flink.render_jobs import vertex_of
from holdfast.barriers.messages import SubtaskMetrics, TaskState
from holdfast.coordinator.views import JobView, SubtaskView

LOW_ABOVE = 0.1
HIGH_ABOVE = 0.5
"""Shares of time, above which backpressure is low, and high."""

Level: TypeAlias = Literal["ok", "low", "high"]


def level(ratio: float) -> Level:
    """Of a subtask that waits so much of its time at full outputs."""
    if ratio <= LOW_ABOVE:
        return "ok"
    return "low" if ratio <= HIGH_ABOVE else "high"


def backpressure_of(metrics: SubtaskMetrics) -> float | None:
    """Share of its last second that it waited at full outputs; None if it has not told."""
    told_ms = metrics.backpressured_ms_per_second
    return None if told_ms is UNSET else told_ms / 1000


def worst_level(subtasks: Iterable[SubtaskMetrics]) -> Level | None:
    """Of the subtask that is backpressured most; None if none has told."""
    told = [ratio for each in subtasks if (ratio := backpressure_of(each)) is not None]
    return level(max(told)) if told else None


def vertex_backpressure(view: JobView, vertex_id: str) -> schemas.VertexBackPressure:
    """Of each subtask that runs and has told it. Raises NotFoundError for a vertex that the job doesn't have."""
    subtasks = list(_subtasks(sorted(vertex_of(view, vertex_id).subtasks, key=lambda each: each.subtask)))
    worst = max((each.ratio for each in subtasks), default=0.0)
    return schemas.VertexBackPressure(
        status="ok" if subtasks else "deprecated",
        backpressureLevel=level(worst) if subtasks else None,
        level=level(worst) if subtasks else None,
        end_timestamp=view.now_ms if subtasks else None,
        subtasks=subtasks or None,
    )


def _subtasks(views: list[SubtaskView]) -> Iterator[schemas.SubtaskBackPressure]:
    for each in views:
        metrics, ratio = each.metrics, backpressure_of(each.metrics)
        if each.state is TaskState.RUNNING and ratio is not None:
            yield schemas.SubtaskBackPressure(
                subtask=each.subtask,
                attempt_number=each.attempt,
                backpressureLevel=level(ratio),
                level=level(ratio),
                ratio=ratio,
                idleRatio=(metrics.idle_ms_per_second or 0) / 1000,
                busyRatio=(metrics.busy_ms_per_second or 0) / 1000,
            )
