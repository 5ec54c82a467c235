"""Rates, watermark lag and ratios of a job's subtasks over the last 15 minutes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from holdfast.api.flink import schemas
from holdfast.api.routes.common import ERRORS, JobId, Service
from holdfast.api.routes.viewed import VIEWED
from holdfast.coordinator.views import SeriesView
from holdfast.statebackends.errors import InvalidConfigError

router = APIRouter(prefix="/v1", tags=["jobs"], responses=ERRORS)

SUBTASKS_MAX = 100
"""Subtasks that one request may name."""
METRIC_CHARS_MAX = 256
"""Of the names of metrics in one request: all eight of them, with room."""

Values = list[float | None]


class VertexSeries(schemas.Record):
    """One metric of one vertex; null: no subtask had told it."""

    vertex: str
    metric: str
    resolution_ms: int
    """Length of the time that a point is about."""
    parallelism: int
    times_ms: list[int]
    """When the time of each point began, oldest first; the newest one is not over."""
    sum: Values
    avg: Values
    min: Values
    max: Values
    subtasks: dict[int, Values]


class Series(schemas.Record):
    series: list[VertexSeries]
    as_of_ms: int


def _rendered(view: SeriesView) -> VertexSeries:
    return VertexSeries(
        vertex=view.vertex,
        metric=view.metric,
        resolution_ms=view.resolution_ms,
        parallelism=view.parallelism,
        times_ms=list(view.times_ms),
        sum=list(view.sum),
        avg=list(view.avg),
        min=list(view.min),
        max=list(view.max),
        subtasks={number: list(values) for number, values in view.subtasks.items()},
    )


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if len(parts) > SUBTASKS_MAX or any(not (part.isascii() and part.isdecimal() and len(part) <= 6) for part in parts):
        raise InvalidConfigError(f"subtasks are at most {SUBTASKS_MAX} numbers, separated by commas", setting="subtasks")
    return tuple(dict.fromkeys(int(part) for part in parts))


@router.get("/jobs/{jobid}/series", **VIEWED)
def series(
    service: Service,
    job_id: JobId,
    metric: Annotated[str, Query(max_length=METRIC_CHARS_MAX, description="A name, or several with commas")],
    vertex: Annotated[str, Query(pattern=f"^$|{schemas.ID_PATTERN}", description="All vertices if empty")] = "",
    subtasks: Annotated[str, Query(max_length=1_024, description="Shown one by one; all of a vertex of 100 if empty")] = "",
) -> Series:
    """One metric or several of a vertex, or of all, over the last 15 minutes; metric by metric, as they are named."""
    as_of_ms = service.moment(job_id).as_of_ms
    names, chosen = dict.fromkeys(part.strip() for part in metric.split(",")), _numbers(subtasks)
    found = [view for name in names for view in service.series(job_id, vertex or None, name, chosen)]
    return Series(series=[_rendered(each) for each in found], as_of_ms=as_of_ms)
