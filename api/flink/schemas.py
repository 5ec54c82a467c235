"""Flink's monitoring dialect, field by field, with its mixed spelling: cluster and jobs.

Response models live at the edge only; routes build them from the service's records. Times are ms since 1970, sizes bytes, and an
unknown number is -1. Source: Flink's rest_api_v1 snapshot."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

UNKNOWN = -1

ID_PATTERN = "^[0-9a-f]{32}$"

HexId = Annotated[str, Field(pattern=ID_PATTERN)]

JOB_TYPE = "STREAMING"
SCHEDULER_TYPE = "Default"
"""Flink's name for the scheduler that deploys a job at its configured parallelism."""


def _dashed(name: str) -> str:
    return name.replace("_", "-")


class Record(BaseModel):
    """Record whose fields keep their spelling."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class DashedRecord(BaseModel):
    """Record whose fields have dashes for underscores."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, alias_generator=_dashed)


class RequestBody(BaseModel):
    """A request body: unknown fields are refused, as in Flink; null in an optional field is its default."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, strict=True)


class VerifySnapshot(RequestBody):
    """Names the snapshot to verify."""

    path: Annotated[str, Field(min_length=1)]


class Errors(Record):
    """Body of every error response."""

    errors: list[str]


class Empty(Record):
    """`{}`."""


# ------------------------------------------------------------------------------------------------------------ cluster


class Overview(DashedRecord):
    taskmanagers: int
    taskmanagers_blocked: int = 0
    slots_total: int
    slots_available: int
    slots_free_and_blocked: int = 0
    jobs_running: int
    jobs_finished: int
    jobs_cancelled: int
    jobs_failed: int
    flink_version: str
    flink_commit: str


class Features(DashedRecord):
    web_submit: bool = False
    web_cancel: bool = False
    web_rescale: bool = False
    web_history: bool = False


class DashboardConfig(DashedRecord):
    refresh_interval: int
    timezone_name: str
    timezone_offset: int
    flink_version: str
    flink_revision: str
    features: Features


# --------------------------------------------------------------------------------------------------------------- jobs


class JobIdWithStatus(Record):
    id: HexId
    status: str


class Jobs(Record):
    jobs: list[JobIdWithStatus]


class JobOverview(DashedRecord):
    jid: HexId
    name: str
    jobType: str = JOB_TYPE
    schedulerType: str = SCHEDULER_TYPE
    start_time: int
    end_time: int
    duration: int
    state: str
    last_modification: int
    tasks: dict[str, int]
    pending_operators: int = 0
    """For batch jobs: operators that are no tasks yet. Flink's clients refuse an answer without it."""


class JobsOverview(Record):
    jobs: list[JobOverview]


class VertexMetrics(DashedRecord):
    read_bytes: int
    read_bytes_complete: bool
    write_bytes: int
    write_bytes_complete: bool
    read_records: int
    read_records_complete: bool
    write_records: int
    write_records_complete: bool
    accumulated_backpressured_time: int
    accumulated_idle_time: int
    accumulated_busy_time: float


class JobVertexDetails(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    id: HexId
    slotSharingGroupId: HexId
    name: str
    maxParallelism: int
    parallelism: int
    status: str
    start_time: Annotated[int, Field(alias="start-time")]
    end_time: Annotated[int, Field(alias="end-time")]
    duration: int
    tasks: dict[str, int]
    metrics: VertexMetrics


class PlanInput(Record):
    num: int
    id: HexId
    ship_strategy: str
    exchange: str


class PlanNode(Record):
    id: HexId
    parallelism: int
    operator: str = ""
    operator_strategy: str = ""
    description: str
    inputs: list[PlanInput] = []
    optimizer_properties: dict[str, Any] = {}


class Plan(Record):
    jid: HexId
    name: str
    type: str = "STREAMING"
    nodes: list[PlanNode]


class JobPlan(Record):
    plan: Plan


class Metric(Record):
    """One number of one subtask, as text."""

    id: str
    value: str


class MetricName(Record):
    """A number that can be asked for."""

    id: str


class SubtaskBackPressure(Record):
    """Where one subtask's time goes: three shares of its last second, which sum to 1."""

    subtask: int
    attempt_number: Annotated[int, Field(alias="attempt-number")]
    backpressureLevel: Literal["ok", "low", "high"]
    level: Annotated[Literal["ok", "low", "high"], Field(alias="backpressure-level")]
    """The same, as Flink called it before, and still does."""
    ratio: float
    idleRatio: float
    busyRatio: float


class VertexBackPressure(Record):
    """Of the subtasks that run. `deprecated`, Flink's word: none has told anything, and the rest is left out."""

    status: Literal["ok", "deprecated"]
    backpressureLevel: Literal["ok", "low", "high"] | None
    level: Annotated[Literal["ok", "low", "high"] | None, Field(alias="backpressure-level")]
    end_timestamp: Annotated[int | None, Field(alias="end-timestamp")]
    subtasks: list[SubtaskBackPressure] | None


class JobDetails(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    jid: HexId
    application_id: Annotated[HexId, Field(alias="application-id")]
    """The job's own: each is an application of its own."""
    name: str
    isStoppable: bool
    state: str
    job_type: Annotated[str, Field(alias="job-type")] = JOB_TYPE
    schedulerType: str = SCHEDULER_TYPE
    start_time: Annotated[int, Field(alias="start-time")]
    end_time: Annotated[int, Field(alias="end-time")]
    duration: int
    maxParallelism: int
    now: int
    timestamps: dict[str, int]
    vertices: list[JobVertexDetails]
    status_counts: Annotated[dict[str, int], Field(alias="status-counts")]
    plan: Plan
    pending_operators: Annotated[int, Field(alias="pending-operators")] = 0


class JobStatus(Record):
    status: str


class ExceptionEntry(Record):
    exceptionName: str
    stacktrace: str
    timestamp: int
    taskName: str | None = None
    location: str | None = None
    endpoint: str | None = None
    taskManagerId: str | None = None
    failureLabels: dict[str, str] = {}
    concurrentExceptions: list[ExceptionEntry] = []


class ExceptionHistory(Record):
    entries: list[ExceptionEntry]
    truncated: bool


class TaskException(Record):
    exception: str
    task: str | None
    location: str | None
    timestamp: int


class JobExceptions(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    root_exception: Annotated[str | None, Field(alias="root-exception")]
    timestamp: int | None
    all_exceptions: Annotated[list[TaskException], Field(alias="all-exceptions")]
    truncated: bool
    exceptionHistory: ExceptionHistory
