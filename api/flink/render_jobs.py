"""Jobs, tasks and failures in Flink's dialect: pure functions from the coordinator's views to response records.

This module and schemas.py decide spelling, letter case and the place of each key; neither asks the service."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

from msgspec import UNSET

from holdfast.api.flink import schemas
from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.latency import LatencyHistogram
from holdfast.barriers.messages import SubtaskMetrics, TaskState
from holdfast.coordinator.views import ExceptionView, JobOverviewView, JobView, VertexView
from holdfast.statebackends.errors import NotFoundError

JOB_STATES = (
    "INITIALIZING",
    "CREATED",
    "RUNNING",
    "FAILING",
    "FAILED",
    "CANCELLING",
    "CANCELED",
    "FINISHED",
    "RESTARTING",
    "SUSPENDED",
    "RECONCILING",
)

TASK_STATES = (*TaskState, "RECONCILING")


def duration(start_ms: int, end_ms: int, now_ms: int) -> int:
    """In ms, up to now for what has not ended; unknown for what has not begun."""
    if start_ms < 0:
        return schemas.UNKNOWN
    return max(0, (end_ms if end_ms >= 0 else now_ms) - start_ms)


def count_tasks(counts: Mapping[TaskState, int]) -> dict[str, int]:
    """Count of each state in upper case, 0 for those without tasks."""
    known = {str(state): count for state, count in counts.items()}
    return {str(state): known.get(str(state), 0) for state in TASK_STATES}


# --------------------------------------------------------------------------------------------------------------- jobs


def job_overview(view: JobOverviewView, *, now_ms: int) -> schemas.JobOverview:
    counts = count_tasks(view.task_counts)
    return schemas.JobOverview(
        jid=view.job_id,
        name=view.name,
        start_time=view.start_ms,
        end_time=view.end_ms,
        duration=duration(view.start_ms, view.end_ms, now_ms),
        state=view.state,
        last_modification=view.last_modification_ms,
        tasks={"total": sum(counts.values()), **{state.lower(): count for state, count in counts.items()}},
    )


def job_details(view: JobView) -> schemas.JobDetails:
    overview = view.overview
    vertex_states = [vertex.state for vertex in view.vertices]
    return schemas.JobDetails(
        jid=overview.job_id,
        application_id=overview.job_id,
        name=overview.name,
        isStoppable=not overview.is_terminal,
        state=overview.state,
        start_time=overview.start_ms,
        end_time=overview.end_ms,
        duration=duration(overview.start_ms, overview.end_ms, view.now_ms),
        maxParallelism=max((vertex.max_parallelism for vertex in view.vertices), default=schemas.UNKNOWN),
        now=view.now_ms,
        timestamps={state: view.timestamps.get(state, schemas.UNKNOWN) for state in JOB_STATES},
        vertices=[_vertex(overview.job_id, vertex, view.now_ms) for vertex in view.vertices],
        status_counts=count_tasks({state: vertex_states.count(state) for state in set(vertex_states)}),
        plan=_plan(overview.job_id, _SameGraph(view.graph)),
    )


def _vertex(job_id: str, view: VertexView, now_ms: int) -> schemas.JobVertexDetails:
    return schemas.JobVertexDetails(
        id=view.vertex_id,
        slotSharingGroupId=job_id,  # a slot holds a subtask of each vertex, so there is one group, and it needs an id
        name=view.name,
        maxParallelism=view.max_parallelism,
        parallelism=view.parallelism,
        status=view.state,
        start_time=view.start_ms,
        end_time=view.end_ms,
        duration=duration(view.start_ms, view.end_ms, now_ms),
        tasks=count_tasks(view.task_counts),
        metrics=sum_metrics([subtask.metrics for subtask in view.subtasks]),
    )


def sum_metrics(metrics: Sequence[SubtaskMetrics]) -> schemas.VertexMetrics:
    """Over subtasks."""
    return schemas.VertexMetrics(
        read_bytes=sum(each.bytes_in for each in metrics),
        read_bytes_complete=True,
        write_bytes=sum(each.bytes_out for each in metrics),
        write_bytes_complete=True,
        read_records=sum(each.records_in for each in metrics),
        read_records_complete=True,
        write_records=sum(each.records_out for each in metrics),
        write_records_complete=True,
        accumulated_backpressured_time=sum(each.backpressured_ms for each in metrics),
        accumulated_idle_time=sum(each.idle_ms for each in metrics),
        accumulated_busy_time=float(sum(each.busy_ms for each in metrics)),
    )


def job_plan(view: JobView) -> schemas.JobPlan:
    return schemas.JobPlan(plan=_plan(view.overview.job_id, _SameGraph(view.graph)))


def vertex_watermarks(view: JobView, vertex_id: str) -> list[schemas.Metric]:
    """Of each subtask that has told one, in order. Raises NotFoundError for a vertex that the job doesn't have."""
    vertex = vertex_of(view, vertex_id)
    told = ((each.subtask, each.metrics.watermark_ms) for each in vertex.subtasks)
    return [
        schemas.Metric(id=f"{subtask}.currentInputWatermark", value=str(watermark_ms))
        for subtask, watermark_ms in sorted(told)
        if watermark_ms is not None
    ]


def vertex_of(view: JobView, vertex_id: str) -> VertexView:
    """One vertex of a job. Raises NotFoundError if the job doesn't have it."""
    vertex = next((each for each in view.vertices if each.vertex_id == vertex_id), None)
    if vertex is None:
        raise NotFoundError(f"job {view.overview.job_id} has no vertex {vertex_id!r}", job=view.overview.job_id, vertex=vertex_id)
    return vertex


_ALWAYS = {
    "records_in": "numRecordsIn",
    "records_out": "numRecordsOut",
    "bytes_in": "numBytesIn",
    "bytes_out": "numBytesOut",
    "busy_ms": "accumulateBusyTimeMs",
    "idle_ms": "accumulateIdleTimeMs",
    "backpressured_ms": "accumulateBackPressuredTimeMs",
}
_IF_TOLD = {
    "watermark_ms": "currentInputWatermark",
    "output_watermark_ms": "currentOutputWatermark",
    "watermark_lag_ms": "watermarkLag",
    "emit_lag_ms": "currentEmitEventTimeLag",
    "source_idle_ms": "sourceIdleTime",
    "idle": "isIdle",
    "splits": "assignedSplits",
    "pending_records": "pendingRecords",
    "uncommitted_checkpoints": "uncommittedCheckpoints",
    "uncommitted_rows": "uncommittedRows",
    "pending_committables": "pendingCommittables",
    "commit_lag_ms": "commitLag",
    "busy_ms_per_second": "busyTimeMsPerSecond",
    "idle_ms_per_second": "idleTimeMsPerSecond",
    "backpressured_ms_per_second": "backPressuredTimeMsPerSecond",
    "queued_in_bytes": "inputQueueSize",
    "queued_out_bytes": "outputQueueSize",
    "time_to_consume_ms": "estimatedTimeToConsumeBuffersMs",
    "allocated_in_bytes": "inputAllocation",
    "overshoot_in_bytes": "inputOvershoot",
}
"""Field of SubtaskMetrics -> Flink's name (ours: `isIdle`, `isDrained`, `commitLag`, `inputAllocation`, `inputOvershoot` and what
begins with `uncommitted`)."""
_OF_SPLITS = {
    "watermark_ms": "watermark.currentWatermark",
    "watermark_lag_ms": "watermarkLag",
    "idle": "isIdle",
    "pending_records": "pendingRecords",
}
"""Field of SplitMetrics -> name behind `split.<id>`."""
_OF_OPERATORS = {"records_in": "numRecordsIn", "records_out": "numRecordsOut", "late_dropped": "numLateRecordsDropped"}
_QUANTILES = {"median": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p98": 0.98, "p99": 0.99, "p999": 0.999}


def vertex_metrics(view: JobView, vertex_id: str) -> dict[str, str]:
    """The numbers of each subtask of a vertex by their names; a number that a subtask has not told is left out.

    Raises NotFoundError for a vertex that the job doesn't have."""
    vertex = vertex_of(view, vertex_id)
    head = view.graph.vertex(vertex_id).operators[0].operator_id
    found: dict[str, str] = {}
    for subtask in sorted(vertex.subtasks, key=lambda each: each.subtask):
        metrics, number = subtask.metrics, subtask.subtask
        for field, name in _ALWAYS.items():
            found[f"{number}.{name}"] = str(getattr(metrics, field))
        for field, name in _IF_TOLD.items():
            value = getattr(metrics, field)
            if value is not None and value is not UNSET:
                found[f"{number}.{name}"] = str(int(value))
        for split in () if metrics.slowest_splits is UNSET else metrics.slowest_splits:
            for field, name in _OF_SPLITS.items():
                value = getattr(split, field)
                if value is not None and value is not UNSET:
                    found[f"{number}.split.{split.split}.{name}"] = str(int(value))
        if subtask.drained:
            found[f"{number}.isDrained"] = "1"
        for operator in metrics.operators:
            for field, name in _OF_OPERATORS.items():
                found[f"{number}.{operator.operator}.{name}"] = str(getattr(operator, field))
        for latency in metrics.latencies or ():
            place = f"latency.source_id.{latency.source}.operator_id.{head}.operator_subtask_index.{number}.latency"
            found |= {f"{number}.{place}_{name}": text for name, text in _latency(latency)}
    return found


def _latency(histogram: LatencyHistogram) -> Iterator[tuple[str, str]]:
    """Numbers of a histogram in ms, under the names that Flink gives them."""
    yield "count", str(histogram.count)
    yield "max", str(histogram.max_ms)
    yield "mean", f"{histogram.sum_ms / max(1, histogram.count):.3f}"
    for name, share in _QUANTILES.items():
        yield name, f"{histogram.quantile(share):.3f}"


class _SameGraph:
    """A graph as a key: views of a job have the same object, and to hash one takes as long as to show it."""

    __slots__ = ("graph",)

    def __init__(self, graph: JobGraph) -> None:
        self.graph = graph

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameGraph) and self.graph is other.graph

    def __hash__(self) -> int:
        return id(self.graph)


@functools.lru_cache(maxsize=16)  # each holds its graph
def _plan(job_id: str, same: _SameGraph) -> schemas.Plan:
    graph = same.graph
    nodes = [
        schemas.PlanNode(
            id=vertex.vertex_id,
            parallelism=vertex.parallelism,
            description=vertex.name,
            inputs=[
                schemas.PlanInput(num=number, id=edge.source, ship_strategy=edge.partitioning.upper(), exchange="pipelined_bounded")
                for number, edge in enumerate(graph.inputs(vertex.vertex_id))
            ],
        )
        for vertex in reversed(graph.vertices)
    ]
    return schemas.Plan(jid=job_id, name=graph.name, nodes=nodes)


def job_exceptions(view: JobView, exceptions_max: int) -> schemas.JobExceptions:
    names = {vertex.vertex_id: vertex.name for vertex in view.vertices}
    parallelism = {vertex.vertex_id: vertex.parallelism for vertex in view.vertices}
    known = view.exceptions or _on_record(view)
    shown = known[:exceptions_max]
    job_id = view.overview.job_id
    entries = [_exception(each, _task_name(each, names, parallelism), job_id) for each in shown]
    newest = entries[0] if entries else None
    truncated = len(known) > len(shown)
    return schemas.JobExceptions(
        root_exception=newest.stacktrace if newest else None,
        timestamp=newest.timestamp if newest else None,
        all_exceptions=[
            schemas.TaskException(exception=each.stacktrace, task=each.taskName, location=each.location, timestamp=each.timestamp)
            for each in entries
            if each.taskName is not None
        ],
        truncated=truncated,
        exceptionHistory=schemas.ExceptionHistory(entries=entries, truncated=truncated),
    )


def _on_record(view: JobView) -> tuple[ExceptionView, ...]:
    """The failure that ended a job, of which this coordinator has seen none: its records tell that one, without task and trace."""
    if view.overview.state != "FAILED" or not view.failure:
        return ()
    failure = ExceptionView(
        view.failure, traceback="", timestamp_ms=view.overview.end_ms, vertex="", subtask=-1, worker="", attempt=view.attempt
    )
    return (failure,)


def _task_name(view: ExceptionView, names: Mapping[str, str], parallelism: Mapping[str, int]) -> str | None:
    if not view.vertex:
        return None
    return f"{names.get(view.vertex, view.vertex)} ({view.subtask + 1}/{parallelism.get(view.vertex, '?')})"


def _exception(view: ExceptionView, task: str | None, job_id: str) -> schemas.ExceptionEntry:
    return schemas.ExceptionEntry(
        exceptionName=view.error.partition(":")[0],
        stacktrace=view.traceback or view.error,
        timestamp=view.timestamp_ms,
        taskName=task,
        location=view.worker or None,
        endpoint=view.worker or None,
        taskManagerId=f"{job_id}_{view.worker}" if view.worker else None,
    )
