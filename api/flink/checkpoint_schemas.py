"""Flink's monitoring dialect, field by field, with its mixed spelling: checkpoints, savepoints and their triggers.

`target-directory` and `targetDirectory`, `failure-cause` and `failureCause` both occur in Flink's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from holdfast.api.flink.schemas import UNKNOWN, DashedRecord, HexId, Record, RequestBody


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
    """Statistics of one number; all -1 without values."""

    min: int = UNKNOWN
    max: int = UNKNOWN
    avg: int = UNKNOWN
    p50: float = UNKNOWN
    p90: float = UNKNOWN
    p95: float = UNKNOWN
    p99: float = UNKNOWN
    p999: float = UNKNOWN


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
    unaligned_checkpoint: bool
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
    """`class` and `stack-trace` as text, and both as a Java object in base64, the only form that Flink's clients read."""

    class_: Annotated[str, Field(alias="class")]
    stack_trace: Annotated[str, Field(alias="stack-trace")]
    serialized_throwable: Annotated[str, Field(alias="serialized-throwable")]


class _Operation(BaseModel):
    """A result or a cause; the other one is omitted."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    @model_serializer(mode="wrap")
    def _leave_out_none(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in serialize(self).items() if value is not None}


class CheckpointOperation(_Operation):
    """Result of a triggered checkpoint: an id or a cause."""

    checkpointId: int | None = None
    failureCause: FailureCause | None = None


class CheckpointTriggerStatus(Record):
    status: OperationStatus
    operation: CheckpointOperation | None


class SavepointOperation(_Operation):
    """Result of a savepoint or a stop: a location or a cause."""

    location: str | None = None
    failure_cause: Annotated[FailureCause | None, Field(alias="failure-cause")] = None


class SavepointTriggerStatus(Record):
    status: OperationStatus
    operation: SavepointOperation | None


class CheckpointTriggerRequest(RequestBody):
    checkpointType: Literal["CONFIGURED", "FULL", "INCREMENTAL"] | None = None
    triggerId: HexId | None = None
    unaligned: bool | None = None
    """Whether its barriers may overtake; by default as the job's settings say."""
    alignedCheckpointTimeout: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Age, ms, from which on they do; by default as the job's settings say."""


class SavepointTriggerRequest(RequestBody):
    target_directory: Annotated[str | None, Field(alias="target-directory")] = None
    cancel_job: Annotated[bool | None, Field(alias="cancel-job")] = None
    formatType: Literal["CANONICAL", "NATIVE"] | None = None
    triggerId: HexId | None = None


class DisposalOperation(_Operation):
    """Result of a completed disposal: empty, or a cause."""

    failure_cause: Annotated[FailureCause | None, Field(alias="failure-cause")] = None


class DisposalStatus(Record):
    status: OperationStatus
    operation: DisposalOperation | None


class SavepointDisposalRequest(RequestBody):
    savepoint_path: Annotated[str, Field(alias="savepoint-path", min_length=1)]
    triggerId: HexId | None = None


class StopRequest(RequestBody):
    targetDirectory: str | None = None
    drain: bool | None = None
    formatType: Literal["CANONICAL", "NATIVE"] | None = None
    triggerId: HexId | None = None
