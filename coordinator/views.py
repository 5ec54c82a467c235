"""Read models: what the coordinator shows of jobs, tasks and checkpoints, as frozen records with no behaviour.

Times are ms since the epoch, -1 when unknown; sizes are bytes. `api` renders them in Flink's dialect; nothing here
knows of field spellings, JSON or HTTP. A view is a copy: it never changes after it was handed out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from holdfast.barriers.jobgraph import JobConfig, JobGraph
from holdfast.barriers.messages import CheckpointKind, SubtaskMetrics, TaskState
from holdfast.coordinator.totals import Totals


class JobOverviewView(msgspec.Struct, frozen=True):
    """One line of a list of jobs."""

    job_id: str
    name: str
    state: str
    """A JobState value: CREATED, RUNNING, RESTARTING, RECONCILING, FAILING, FAILED, CANCELLING, CANCELED, FINISHED, SUSPENDED."""
    start_ms: int
    end_ms: int
    last_modification_ms: int
    task_counts: Mapping[TaskState, int]
    slots_required: int
    slots_registered: int

    @property
    def is_terminal(self) -> bool:
        return self.state in ("FINISHED", "CANCELED", "FAILED")


class SubtaskView(msgspec.Struct, frozen=True):
    """One subtask of the current attempt."""

    vertex: str
    subtask: int
    state: TaskState
    attempt: int
    host: str
    start_ms: int
    end_ms: int
    timestamps: Mapping[TaskState, int]
    """When it last entered each state."""
    drained: bool
    metrics: SubtaskMetrics
    """Since the attempt began, as of the last heartbeat."""


class VertexView(msgspec.Struct, frozen=True):
    vertex_id: str
    name: str
    parallelism: int
    max_parallelism: int
    state: TaskState
    """The least advanced state of its subtasks; FAILED as soon as one is."""
    start_ms: int
    end_ms: int
    task_counts: Mapping[TaskState, int]
    subtasks: tuple[SubtaskView, ...]


class WorkerView(msgspec.Struct, frozen=True):
    """One slot and the process in it."""

    slot: int
    registered: bool
    """A process holds the slot and its lease has not run out."""
    connected: bool
    """Its command stream is open."""
    pid: int
    host: str
    data_address: str
    nonce: str
    task_attempt: int
    session: str
    last_seen_ms: int
    """Wall clock."""
    spawn: int = 0
    """Which worker of the slot its launcher started the process as; 0: not known."""
    timed_out: bool = False
    """The process was given up because nothing was heard from it, although its connection was never closed: it hangs, or its host
    does."""
    fingerprint: str = ""
    """Which process `pid` is, to a launcher on the same host."""
    frames_refused: int = 0
    """Frames that the slot's data ports dropped, which nobody of the job had a reason to send."""


class ExceptionView(msgspec.Struct, frozen=True):
    """One failure that made the job fail over or fail."""

    error: str
    """`ErrorClass: message`."""
    traceback: str
    timestamp_ms: int
    vertex: str
    """Empty when no task is to blame."""
    subtask: int
    worker: str
    """`slot-<n>`, or empty."""
    attempt: int


class RestoredView(msgspec.Struct, frozen=True):
    checkpoint_id: int
    restore_ms: int
    is_savepoint: bool
    location: str


class JobView(msgspec.Struct, frozen=True):
    """Everything about one job except its checkpoints."""

    overview: JobOverviewView
    now_ms: int
    timestamps: Mapping[str, int]
    """JobState value -> when the job last entered it."""
    graph: JobGraph
    vertices: tuple[VertexView, ...]
    workers: tuple[WorkerView, ...]
    exceptions: tuple[ExceptionView, ...]
    """Newest first, bounded."""
    submission: int
    attempt: int
    restarts: int
    epoch: int
    failure: str | None
    """Cause of FAILED, or of the failover that is under way."""
    totals: Totals = {}
    """What the submission's operators counted: what was read again after a restart counts once."""


class SubtaskCheckpointView(msgspec.Struct, frozen=True):
    """One subtask's part of one checkpoint; `ack_ms` is -1 while it is missing."""

    subtask: int
    ack_ms: int
    end_to_end_ms: int
    checkpointed_size: int
    state_size: int
    sync_ms: int
    async_ms: int
    alignment_ms: int
    alignment_processed: int
    start_delay_ms: int

    @property
    def acknowledged(self) -> bool:
        return self.ack_ms >= 0


class Quantiles(msgspec.Struct, frozen=True):
    """Summary of one number; all -1 when nothing was counted."""

    min: float = -1
    max: float = -1
    avg: float = -1
    p50: float = -1
    p90: float = -1
    p95: float = -1
    p99: float = -1
    p999: float = -1


_QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("p999", 0.999))


def summarise(values: Iterable[float]) -> Quantiles:
    """Quantiles by nearest rank; all -1 for no values."""
    ordered = sorted(values)
    if not ordered:
        return Quantiles()
    ranks = {name: ordered[min(len(ordered) - 1, int(quantile * len(ordered)))] for name, quantile in _QUANTILES}
    return Quantiles(min=ordered[0], max=ordered[-1], avg=sum(ordered) / len(ordered), **ranks)


class VertexCheckpointView(msgspec.Struct, frozen=True):
    """One vertex's part of one checkpoint."""

    vertex: str
    status: str
    """IN_PROGRESS, COMPLETED or FAILED."""
    latest_ack_ms: int
    checkpointed_size: int
    state_size: int
    end_to_end_ms: int
    processed_bytes: int
    num_subtasks: int
    num_acknowledged_subtasks: int
    subtasks: tuple[SubtaskCheckpointView, ...]

    @property
    def summary(self) -> Mapping[str, Quantiles]:
        """Of the subtasks that acknowledged; sorted when somebody looks, not on the job's own thread at every checkpoint."""
        acked = [subtask for subtask in self.subtasks if subtask.acknowledged]
        return {
            "checkpointed_size": summarise(subtask.checkpointed_size for subtask in acked),
            "state_size": summarise(subtask.state_size for subtask in acked),
            "end_to_end": summarise(subtask.end_to_end_ms for subtask in acked),
            "sync": summarise(subtask.sync_ms for subtask in acked),
            "async": summarise(subtask.async_ms for subtask in acked),
            "alignment": summarise(subtask.alignment_ms for subtask in acked),
            "alignment_processed": summarise(subtask.alignment_processed for subtask in acked),
            "start_delay": summarise(subtask.start_delay_ms for subtask in acked),
        }


class CheckpointView(msgspec.Struct, frozen=True):
    """One checkpoint or savepoint, in any state."""

    checkpoint_id: int
    kind: CheckpointKind
    status: str
    """IN_PROGRESS, COMPLETED or FAILED."""
    trigger_ms: int
    latest_ack_ms: int
    checkpointed_size: int
    state_size: int
    end_to_end_ms: int
    processed_bytes: int
    persisted_bytes: int
    num_subtasks: int
    num_acknowledged_subtasks: int
    vertices: Mapping[str, VertexCheckpointView]
    location: str | None = None
    """Where the snapshot is, when COMPLETED."""
    savepoint_format: str | None = None
    """CANONICAL or NATIVE; None for a checkpoint, and where it is not known any more."""
    discarded: bool = False
    failure_ms: int = -1
    failure_reason: str | None = None
    """A FailureReason value."""
    failure_message: str | None = None

    @property
    def is_savepoint(self) -> bool:
        return self.kind.is_savepoint


class CheckpointCounts(msgspec.Struct, frozen=True):
    restored: int
    total: int
    in_progress: int
    completed: int
    failed: int


class CheckpointStatsView(msgspec.Struct, frozen=True):
    """Counts since this coordinator leads the job, summaries over the completed ones in the bounded history."""

    counts: CheckpointCounts
    summary: Mapping[str, Quantiles]
    """checkpointed_size, state_size, end_to_end_duration, alignment_buffered, processed_data, persisted_data."""
    history: tuple[CheckpointView, ...]
    """Newest first, bounded; includes those in progress."""
    latest_completed: CheckpointView | None
    latest_savepoint: CheckpointView | None
    latest_failed: CheckpointView | None
    latest_restored: RestoredView | None


class JobNumbersView(msgspec.Struct, frozen=True):
    """What metrics show of a job: numbers that are kept as things happen, so that reading them costs the same for any job."""

    overview: JobOverviewView
    attempt: int
    restarts: int
    counts: CheckpointCounts
    latest_completed: CheckpointView | None
    frames_refused: int
    """By the data ports of all of its workers, since this coordinator leads it."""
    graph: JobGraph
    totals: Totals = {}
    """What the submission's operators counted, as of the last heartbeats: after a restart, back at the cut that was restored."""
    reached: Totals = {}
    """The same, but never falling while this coordinator leads the job: after a restart it stands still until it is surpassed."""


class CheckpointConfigView(msgspec.Struct, frozen=True):
    config: JobConfig
    storage: str
    """Printable root of the checkpoint storage."""


class TriggerView(msgspec.Struct, frozen=True):
    """An asynchronous request: a checkpoint, savepoint or stop."""

    trigger_id: str
    kind: CheckpointKind
    in_progress: bool
    checkpoint_id: int | None = None
    location: str | None = None
    failure: str | None = None
    failure_reason: str | None = None
    """A FailureReason value."""
    tries: int = 1
    """Checkpoints that it took: a stop that a failover cuts off takes several."""


class SavepointPlaces(msgspec.Struct, frozen=True):
    """Where savepoints of jobs lie, as the jobs' settings and records name it: nobody has looked whether they are there."""

    directories: frozenset[str] = frozenset()
    """`savepoint_directory` of jobs."""
    folders: frozenset[str] = frozenset()
    """Of single savepoints, wherever they were asked for."""


class ClusterView(msgspec.Struct, frozen=True):
    """Numbers over all jobs."""

    slots_total: int
    slots_available: int
    """Registered slots of jobs that run nothing."""
    jobs_running: int
    """Every job that is not in a terminal state."""
    jobs_finished: int
    jobs_canceled: int
    jobs_failed: int
    workers: int
    """Processes that hold a slot."""
