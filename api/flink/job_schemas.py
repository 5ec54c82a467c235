"""Flink's monitoring dialect, field by field: a job's configuration, accumulators, result and parallelism, and applications."""

from __future__ import annotations

from pydantic import Field, RootModel

from holdfast.api.flink.checkpoint_schemas import FailureCause, OperationStatus
from holdfast.api.flink.schemas import DashedRecord, HexId, JobOverview, Record
from holdfast.api.flink.vertex_schemas import UserAccumulator


class ExecutionConfig(DashedRecord):
    restart_strategy: str
    job_parallelism: int
    object_reuse_mode: bool = True
    """Chained operators hand the same batches on."""
    user_config: dict[str, str]
    """The job's settings by their names."""


class JobConfiguration(DashedRecord):
    jid: HexId
    name: str
    execution_config: ExecutionConfig


class JobAccumulators(DashedRecord):
    job_accumulators: list[UserAccumulator] = Field(default_factory=list)
    """Flink's own, which were never used."""
    user_task_accumulators: list[UserAccumulator]
    serialized_user_task_accumulators: dict[str, str] = Field(default_factory=dict)
    """Java objects: there are none."""


class JobResult(DashedRecord):
    id: HexId
    name: str
    application_status: str
    accumulator_results: dict[str, str] = Field(default_factory=dict)
    net_runtime: int
    failure_cause: FailureCause | None = None
    application_id: HexId
    start_time: int
    end_time: int


class ExecutionResult(DashedRecord):
    """The result is left out while the job runs."""

    status: OperationStatus
    job_execution_result: JobResult | None = None


class ParallelismBounds(Record):
    lowerBound: int
    upperBound: int


class VertexRequirements(Record):
    parallelism: ParallelismBounds


class ResourceRequirements(RootModel[dict[str, VertexRequirements]]):
    """By vertex."""


# ------------------------------------------------------------------------------------------------------- applications


class ApplicationOverview(DashedRecord):
    id: HexId
    name: str
    start_time: int
    end_time: int
    duration: int
    status: str
    jobs: dict[str, int]
    """State -> how many jobs are in it."""


class ApplicationsOverview(Record):
    applications: list[ApplicationOverview]


class ApplicationDetails(DashedRecord):
    id: HexId
    name: str
    status: str
    start_time: int
    end_time: int
    duration: int
    timestamps: dict[str, int]
    """State -> when it was entered; 0: never."""
    jobs: list[JobOverview]


class ApplicationException(Record):
    exceptionName: str
    stacktrace: str
    timestamp: int
    jobId: HexId


class ApplicationExceptionHistory(Record):
    entries: list[ApplicationException]


class ApplicationExceptions(Record):
    exceptionHistory: ApplicationExceptionHistory
