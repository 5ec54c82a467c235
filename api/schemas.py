"""Flink's monitoring dialect, field by field, mixed spelling and all: what REST clients and dashboards read.

Response models live at the edge only; routes build them from the service's records. Times are ms since 1970, sizes
bytes, and what is unknown is -1. Source: Flink's rest_api_v1 snapshot."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

UNKNOWN = -1

ID_PATTERN = "^[0-9a-f]{32}$"

HexId = Annotated[str, Field(pattern=ID_PATTERN)]


def _dashed(name: str) -> str:
    return name.replace("_", "-")


class Record(BaseModel):
    """Fields as spelled."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class DashedRecord(BaseModel):
    """Fields with dashes for underscores."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, alias_generator=_dashed)


class Errors(Record):
    """Body of every answer that is an error."""

    errors: list[str]


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
    start_time: int
    end_time: int
    duration: int
    state: str
    last_modification: int
    tasks: dict[str, int]


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


class JobDetails(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    jid: HexId
    name: str
    isStoppable: bool
    state: str
    start_time: Annotated[int, Field(alias="start-time")]
    end_time: Annotated[int, Field(alias="end-time")]
    duration: int
    maxParallelism: int
    now: int
    timestamps: dict[str, int]
    vertices: list[JobVertexDetails]
    status_counts: Annotated[dict[str, int], Field(alias="status-counts")]
    plan: Plan


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


# -------------------------------------------------------------------------------------------------------- checkpoints


class CheckpointSizes(Record):
    checkpointed_size: int
    state_size: int
    end_to_end_duration: int
    alignment_buffered: int = 0
    processed_data: int
    persisted_data: int


class TaskCheckpoint(CheckpointSizes):
    """One vertex's part of a checkpoint."""

    id: int
    status: str
    latest_ack_timestamp: int
    num_subtasks: int
    num_acknowledged_subtasks: int


class _Checkpoint(CheckpointSizes):
    id: int
    status: str
    is_savepoint: bool
    savepointFormat: str | None = None
    trigger_timestamp: int
    latest_ack_timestamp: int
    num_subtasks: int
    num_acknowledged_subtasks: int
    checkpoint_type: str
    tasks: dict[str, TaskCheckpoint]


class PendingCheckpoint(_Checkpoint):
    className: Literal["in_progress"] = "in_progress"


class CompletedCheckpoint(_Checkpoint):
    className: Literal["completed"] = "completed"
    external_path: str | None
    discarded: bool


class FailedCheckpoint(_Checkpoint):
    className: Literal["failed"] = "failed"
    failure_timestamp: int
    failure_message: str | None


Checkpoint = Annotated[PendingCheckpoint | CompletedCheckpoint | FailedCheckpoint, Field(discriminator="className")]


class RestoredCheckpoint(Record):
    id: int
    restore_timestamp: int
    is_savepoint: bool
    external_path: str | None


class CheckpointCounts(Record):
    restored: int
    total: int
    in_progress: int
    completed: int
    failed: int


class MinMaxAvg(Record):
    """Statistics of one number; -1 and NaN-free: all 0 without samples."""

    min: int = 0
    max: int = 0
    avg: int = 0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    p999: float = 0.0


class CheckpointSummary(Record):
    checkpointed_size: MinMaxAvg
    state_size: MinMaxAvg
    end_to_end_duration: MinMaxAvg
    alignment_buffered: MinMaxAvg
    processed_data: MinMaxAvg
    persisted_data: MinMaxAvg


class LatestCheckpoints(Record):
    completed: CompletedCheckpoint | None
    savepoint: CompletedCheckpoint | None
    failed: FailedCheckpoint | None
    restored: RestoredCheckpoint | None


class Checkpoints(Record):
    counts: CheckpointCounts
    summary: CheckpointSummary
    latest: LatestCheckpoints
    history: list[Checkpoint]


class Externalization(Record):
    enabled: bool
    delete_on_cancellation: bool


class CheckpointConfig(Record):
    mode: str
    interval: int
    timeout: int
    min_pause: int
    max_concurrent: int
    externalization: Externalization
    state_backend: str
    checkpoint_storage: str
    unaligned_checkpoints: bool
    tolerable_failed_checkpoints: int
    aligned_checkpoint_timeout: int
    checkpoints_after_tasks_finish: bool
    state_changelog_enabled: bool
    changelog_periodic_materialization_interval: int
    changelog_storage: str | None


class DurationSummary(Record):
    sync: MinMaxAvg
    async_: Annotated[MinMaxAvg, Field(alias="async")]


class AlignmentSummary(Record):
    buffered: MinMaxAvg
    processed: MinMaxAvg
    persisted: MinMaxAvg
    duration: MinMaxAvg


class SubtaskSummary(Record):
    checkpointed_size: MinMaxAvg
    state_size: MinMaxAvg
    end_to_end_duration: MinMaxAvg
    checkpoint_duration: DurationSummary
    alignment: AlignmentSummary
    start_delay: MinMaxAvg


class SubtaskDurations(Record):
    sync: int
    async_: Annotated[int, Field(alias="async")]


class SubtaskAlignment(Record):
    buffered: int = 0
    processed: int
    persisted: int
    duration: int


class CompletedSubtask(Record):
    className: Literal["completed"] = "completed"
    index: int
    status: str
    ack_timestamp: int
    end_to_end_duration: int
    checkpointed_size: int
    state_size: int
    checkpoint: SubtaskDurations
    alignment: SubtaskAlignment
    start_delay: int
    unaligned_checkpoint: bool = False
    aborted: bool


class PendingSubtask(Record):
    className: Literal["pending"] = "pending"
    index: int
    status: str


SubtaskCheckpoint = Annotated[CompletedSubtask | PendingSubtask, Field(discriminator="className")]


class TaskCheckpointDetails(TaskCheckpoint):
    summary: SubtaskSummary
    subtasks: list[SubtaskCheckpoint]


# -------------------------------------------------------------------------------------------------------- asynchronous


class TriggerAccepted(DashedRecord):
    request_id: HexId


class OperationStatus(Record):
    id: Literal["IN_PROGRESS", "COMPLETED"]


class FailureCause(Record):
    """Flink serialises a Java exception; clients read `class` and `stack-trace`."""

    class_: Annotated[str, Field(alias="class")]
    stack_trace: Annotated[str, Field(alias="stack-trace")]


class CheckpointOperation(BaseModel):
    """Result of a triggered checkpoint: an id or a cause."""

    model_config = ConfigDict(extra="forbid")

    checkpointId: int | None = None
    failureCause: FailureCause | None = None


class CheckpointTriggerStatus(Record):
    status: OperationStatus
    operation: CheckpointOperation | None


class SavepointOperation(BaseModel):
    """Result of a savepoint or a stop: a location or a cause."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    location: str | None = None
    failure_cause: Annotated[FailureCause | None, Field(alias="failure-cause")] = None


class SavepointTriggerStatus(Record):
    status: OperationStatus
    operation: SavepointOperation | None


class _Request(BaseModel):
    """A request body: unknown fields are refused, as Flink does."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, strict=True)


class CheckpointTriggerRequest(_Request):
    checkpointType: Literal["CONFIGURED", "FULL", "INCREMENTAL"] = "CONFIGURED"
    triggerId: HexId | None = None


class SavepointTriggerRequest(_Request):
    target_directory: Annotated[str | None, Field(alias="target-directory")] = None
    cancel_job: Annotated[bool, Field(alias="cancel-job")] = False
    formatType: Literal["CANONICAL", "NATIVE"] | None = None
    triggerId: HexId | None = None


class StopRequest(_Request):
    targetDirectory: str | None = None
    drain: bool | None = False
    formatType: Literal["CANONICAL", "NATIVE"] | None = None
    triggerId: HexId | None = None


class Empty(Record):
    """`{}`."""
