"""Flink's monitoring dialect: vertices of a job, their subtasks, and metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from starlette.concurrency import run_in_threadpool

from holdfast.api.flink import aggregates, render_jobs, render_stacks, render_vertices, schemas
from holdfast.api.flink import vertex_schemas as shapes
from holdfast.api.routes.common import ERRORS, JobId, Service, VertexId
from holdfast.api.routes.questions import ask_workers
from holdfast.api.routes.viewed import VIEWED
from holdfast.barriers.messages import QuestionKind
from holdfast.coordinator.dispatcher.reading.questions import Question
from holdfast.coordinator.dispatcher.reading.situations import LOOK_INTERVAL_MS, LOOKS
from holdfast.statebackends.errors import InvalidConfigError

router = APIRouter(tags=["flink"], responses=ERRORS)

METRIC_NAMES_CHARS_MAX = 16_384
"""Of the names in one request, and of the things that they are asked of."""

SubtaskIndex = Annotated[int, Path(alias="subtaskindex", ge=0, lt=32_768)]
AttemptNumber = Annotated[int, Path(alias="attempt", ge=0, lt=2**31)]
MetricNames = Annotated[str | None, Query(alias="get", max_length=METRIC_NAMES_CHARS_MAX, description="Names, with commas")]
Things = Annotated[str | None, Query(max_length=METRIC_NAMES_CHARS_MAX)]


async def _wanted(
    agg: Annotated[str | None, Query(max_length=100, description="Of min, max, avg, sum, skew, with commas; else all")] = None,
) -> tuple[aggregates.Aggregation, ...]:
    """Raises InvalidConfigError for another."""
    if not agg:
        return aggregates.AGGREGATIONS
    names = agg.lower().split(",")
    unknown = [name for name in names if name not in aggregates.AGGREGATIONS]
    if unknown:
        text = f"agg: there is no {unknown[0]!r}, only {', '.join(aggregates.AGGREGATIONS)}"
        raise InvalidConfigError(text, setting="agg")
    return tuple(name for name in aggregates.AGGREGATIONS if name in names)


async def _flame_graph_type(
    kind: Annotated[str, Query(alias="type", max_length=100, description="full, on_cpu or off_cpu")] = "full",
) -> render_stacks.FlameGraphType:
    """Raises InvalidConfigError for another."""
    try:
        return render_stacks.FlameGraphType(kind.lower())
    except ValueError:
        text = f"type: there is no flame graph {kind[:40]!r}, only {', '.join(render_stacks.FlameGraphType)}"
        raise InvalidConfigError(text, setting="type") from None


Wanted = Annotated[tuple[aggregates.Aggregation, ...], Depends(_wanted)]


def listed(found: Mapping[str, str], get: str | None) -> list[schemas.Metric] | list[schemas.MetricName]:
    """Names alone, or the values of those that are asked for; a name without a number is left out."""
    if get is None:
        return [schemas.MetricName(id=name) for name in found]
    return [schemas.Metric(id=name, value=found[name]) for name in dict.fromkeys(get.split(",")) if name in found]


def aggregated(
    found: Iterable[Mapping[str, str]], get: str | None, wanted: tuple[aggregates.Aggregation, ...]
) -> list[shapes.AggregatedMetric]:
    """As `listed`, over several things."""
    things = list(found)
    if get is None:
        return [shapes.AggregatedMetric(id=name) for name in dict.fromkeys(name for each in things for name in each)]
    return aggregates.aggregate(things, get.split(","), wanted)


_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


def _chosen(text: str) -> frozenset[int]:
    """Flink's way to name subtasks: `0,2-5`. Raises InvalidConfigError. Thousands of ranges that overlap cost what one does."""
    found: set[int] = set()
    end = 0
    for first, last in sorted(_ranges(text)):
        found.update(range(max(first, end), last + 1))
        end = max(end, last + 1)
    return frozenset(found)


def _ranges(text: str) -> Iterator[tuple[int, int]]:
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            raise InvalidConfigError(f"subtasks: {part[:40]!r} is neither a number nor a range such as 2-5", setting="subtasks")
        yield int(found[1]), int(found[2] or found[1])


@router.get("/jobs/{jobid}/vertices/{vertexid}", **VIEWED)
def vertex(service: Service, job_id: JobId, vertex_id: VertexId) -> shapes.VertexDetails:
    """One vertex with the subtasks of the current attempt, and statistics over them."""
    return render_vertices.vertex_details(service.job(job_id), vertex_id)


@router.get("/jobs/{jobid}/vertices/{vertexid}/subtasktimes", **VIEWED)
def subtask_times(service: Service, job_id: JobId, vertex_id: VertexId) -> shapes.VertexTimes:
    """When each subtask of a vertex entered which state."""
    return render_vertices.subtask_times(service.job(job_id), vertex_id)


@router.get("/jobs/{jobid}/vertices/{vertexid}/taskmanagers", **VIEWED)
def vertex_workers(service: Service, job_id: JobId, vertex_id: VertexId) -> shapes.VertexWorkers:
    """The subtasks of a vertex by the worker that has them."""
    return render_vertices.vertex_workers(service.job(job_id), vertex_id)


@router.get("/jobs/{jobid}/vertices/{vertexid}/accumulators", **VIEWED)
def vertex_accumulators(service: Service, job_id: JobId, vertex_id: VertexId) -> shapes.VertexAccumulators:
    """Counters of the user's functions in a vertex, since its attempt began."""
    return render_vertices.vertex_accumulators(service.job(job_id), vertex_id)


@router.get("/jobs/{jobid}/vertices/{vertexid}/jm-operator-metrics", **VIEWED)
def coordinator_metrics(service: Service, job_id: JobId, vertex_id: VertexId) -> list[schemas.Metric]:
    """Numbers that the coordinator itself counts for a vertex: there are none."""
    render_jobs.vertex_of(service.job(job_id), vertex_id)
    return []


@router.get("/jobs/{jobid}/vertices/{vertexid}/flamegraph")
async def flame_graph(
    service: Service,
    job_id: JobId,
    vertex_id: VertexId,
    kind: Annotated[render_stacks.FlameGraphType, Depends(_flame_graph_type)],
    index: Annotated[int | None, Query(alias="subtaskindex", ge=0, lt=32_768)] = None,
) -> shapes.VertexFlameGraph:
    """Where the subtasks of a vertex are: their workers look at their stacks for a second. Of many subtasks, eight of them."""
    view = await run_in_threadpool(service.job, job_id)
    subtasks = render_stacks.subtasks_to_ask(view, vertex_id, index)
    asked = [Question(job_id, each, QuestionKind.STACKS, LOOKS, LOOK_INTERVAL_MS) for each in subtasks]
    return render_stacks.flame_graph(await ask_workers(service, asked), vertex_id, kind)


@router.get("/jobs/{jobid}/vertices/{vertexid}/subtasks/accumulators", **VIEWED)
def subtasks_accumulators(service: Service, job_id: JobId, vertex_id: VertexId) -> shapes.SubtasksAccumulators:
    """Counters of the user's functions by subtask, since its attempt began."""
    return render_vertices.subtasks_accumulators(service.job(job_id), vertex_id)


@router.get("/jobs/{jobid}/vertices/{vertexid}/subtasks/metrics", response_model_exclude_none=True, **VIEWED)
def subtasks_metrics(
    service: Service, job_id: JobId, vertex_id: VertexId, wanted: Wanted, get: MetricNames = None, subtasks: Things = None
) -> list[shapes.AggregatedMetric]:
    """Numbers of a vertex over its subtasks, or over some (`subtasks=0,2-5`): their names, or with `get` the values."""
    found = render_vertices.metrics_by_subtask(service.job(job_id), vertex_id)
    if subtasks:
        chosen = _chosen(subtasks)
        found = {subtask: each for subtask, each in found.items() if subtask in chosen}
    return aggregated(found.values(), get, wanted)


@router.get("/jobs/{jobid}/vertices/{vertexid}/subtasks/{subtaskindex}", **VIEWED)
def subtask(service: Service, job_id: JobId, vertex_id: VertexId, index: SubtaskIndex) -> shapes.SubtaskAttempt:
    """One subtask of the current attempt."""
    view = service.job(job_id)
    return render_vertices.subtask_attempt(view, render_vertices.subtask_of(view, vertex_id, index))


@router.get("/jobs/{jobid}/vertices/{vertexid}/subtasks/{subtaskindex}/metrics", **VIEWED)
def subtask_metrics(
    service: Service, job_id: JobId, vertex_id: VertexId, index: SubtaskIndex, get: MetricNames = None
) -> list[schemas.Metric] | list[schemas.MetricName]:
    """Numbers of one subtask: their names, or with `get` the values."""
    view = service.job(job_id)
    render_vertices.subtask_of(view, vertex_id, index)
    return listed(render_vertices.metrics_by_subtask(view, vertex_id)[index], get)


@router.get("/jobs/{jobid}/vertices/{vertexid}/subtasks/{subtaskindex}/attempts/{attempt}", **VIEWED)
def subtask_attempt(
    service: Service, job_id: JobId, vertex_id: VertexId, index: SubtaskIndex, attempt: AttemptNumber
) -> shapes.SubtaskAttempt:
    """One attempt of a subtask. Only the current one is known: what earlier ones did is in the job's exceptions."""
    view = service.job(job_id)
    return render_vertices.subtask_attempt(view, render_vertices.subtask_of(view, vertex_id, index, attempt))


@router.get("/jobs/{jobid}/vertices/{vertexid}/subtasks/{subtaskindex}/attempts/{attempt}/accumulators", **VIEWED)
def attempt_accumulators(
    service: Service, job_id: JobId, vertex_id: VertexId, index: SubtaskIndex, attempt: AttemptNumber
) -> shapes.AttemptAccumulators:
    """Counters of the user's functions in one subtask, since the current attempt began."""
    view = service.job(job_id)
    return render_vertices.attempt_accumulators(view, render_vertices.subtask_of(view, vertex_id, index, attempt))
