"""Flink's monitoring dialect, field by field: vertices, their subtasks, and aggregated metrics.

Flink writes `start-time` and `start_time` of an attempt, for clients of before."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from holdfast.api.flink.schemas import DashedRecord, HexId, Record, VertexMetrics

NOWHERE = "(unassigned)"
"""Flink's word for the place of a subtask that no worker has."""


class SubtaskAttempt(DashedRecord):
    """One subtask of the current attempt."""

    subtask: int
    status: str
    attempt: int
    endpoint: str
    started: Annotated[int, Field(alias="start-time")]
    end_time: int
    duration: int
    metrics: VertexMetrics
    taskmanager_id: str
    status_duration: dict[str, int]
    """State -> how long it was, or is, in it; -1: it was not, or that is not known. Flink's clients need each of them."""
    started_again: Annotated[int, Field(alias="start_time")]


class Statistics(Record):
    """Of one number over subtasks, as whole numbers."""

    min: int
    max: int
    avg: int
    sum: int
    median: int
    p25: int
    p75: int
    p95: int


class Aggregated(DashedRecord):
    metrics: dict[str, Statistics]
    status_duration: dict[str, Statistics]


class VertexDetails(Record):
    id: HexId
    name: str
    parallelism: int
    maxParallelism: int
    now: int
    subtasks: list[SubtaskAttempt]
    aggregated: Aggregated


class SubtaskTimes(Record):
    subtask: int
    endpoint: str
    duration: int
    timestamps: dict[str, int]
    """State -> when it was entered; 0: never."""


class VertexTimes(Record):
    id: HexId
    name: str
    now: int
    subtasks: list[SubtaskTimes]


class VertexWorker(DashedRecord):
    """The subtasks of a vertex that one worker has."""

    endpoint: str
    status: str
    start_time: int
    end_time: int
    duration: int
    metrics: VertexMetrics
    status_counts: dict[str, int]
    taskmanager_id: str
    aggregated: Aggregated


class VertexWorkers(Record):
    id: HexId
    name: str
    now: int
    taskmanagers: list[VertexWorker]


class UserAccumulator(Record):
    """A counter of the user's functions."""

    name: str
    type: str = "LongCounter"
    value: str


class VertexAccumulators(DashedRecord):
    id: HexId
    user_accumulators: list[UserAccumulator]


class SubtaskAccumulators(DashedRecord):
    subtask: int
    attempt: int
    endpoint: str
    user_accumulators: list[UserAccumulator]


class SubtasksAccumulators(Record):
    id: HexId
    parallelism: int
    subtasks: list[SubtaskAccumulators]


class AttemptAccumulators(DashedRecord):
    subtask: int
    attempt: int
    id: str
    """Of the execution, in Flink's form: job, vertex, subtask, attempt."""
    user_accumulators: list[UserAccumulator]


class FlameGraphNode(Record):
    """One line of code, and what it called."""

    name: str
    """`function (file:line)`."""
    value: int
    """Samples in which it was on the stack."""
    children: list[FlameGraphNode]


class VertexFlameGraph(Record):
    """Stacks of a vertex's subtasks, merged from the outermost function on."""

    endTimestamp: int
    """Of the newest samples; -1: no subtask runs."""
    data: FlameGraphNode | None


class AggregatedMetric(Record):
    """One number over several things; what was not asked for is left out, and all of it where names alone were."""

    id: str
    min: float | None = None
    max: float | None = None
    avg: float | None = None
    sum: float | None = None
    skew: float | None = None
    """Mean distance from the average, in percent of it."""
