"""Read models of jobs, tasks and checkpoints: frozen records that the coordinator shows.

Times are ms since the epoch, -1 when unknown; sizes are bytes. `api` renders them in Flink's dialect; nothing here
knows of field spellings, JSON or HTTP. A view is a copy: it never changes after it was handed out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from holdfast.barriers.jobgraph import JobConfig, JobGraph
from holdfast.barriers.messages import CheckpointKind, SubtaskKey, SubtaskMetrics, TaskState, WorkerAnswer
from holdfast.coordinator.totals import Totals


class Moment(msgspec.Struct, frozen=True):
    """How old views are, and which ones they are."""

    as_of_ms: int
    """Until when what they show is known to have been so."""
    tag: str
    """Differs whenever anything differs that they show, but for times that only say how long ago something was."""


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
    """State -> when it last entered it, ms since the epoch."""
    drained: bool
    metrics: SubtaskMetrics
    """Counts since the attempt began, as of the last heartbeat."""


class VertexView(msgspec.Struct, frozen=True):
    vertex_id: str
    name: str
    parallelism: int
    max_parallelism: int
    state: TaskState
    """The least advanced state of its subtasks; FAILED if one is."""
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
    """ms since the epoch; -1: never."""
    spawn: int = 0
    """Number of the process among those that the launcher started for the slot; 0: not known."""
    timed_out: bool = False
    """The lease of the process ran out although its connection was open: it hangs, or its host does."""
    fingerprint: str = ""
    """Identifies the process of `pid` to a launcher on the same host."""
    frames_refused: int = 0
    """Frames that the slot's data ports dropped, since no sender of the job had a reason to send them."""
    seat: int = -1
    """Where its launcher started it, of one that stood by before it got the slot; -1: in the slot."""
    seat_spawn: int = 0
    """As `spawn`, of the seat."""


class StandbyView(msgspec.Struct, frozen=True):
    """A worker without a slot: it stands by, or fell silent and lost its slot to one that did."""

    seat: int
    spawn: int
    pid: int
    host: str
    fingerprint: str


class ExceptionView(msgspec.Struct, frozen=True):
    """One failure that made the job fail over or fail."""

    error: str
    """`ErrorClass: message`."""
    traceback: str
    timestamp_ms: int
    vertex: str
    """Empty if the failure is no task's."""
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
    """One job, without its checkpoints."""

    overview: JobOverviewView
    now_ms: int
    """Until when this is known to have been so."""
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
    """Cause of FAILED, or of the current failover."""
    totals: Totals = {}
    """Counts of the submission's operators; records that are read again after a restart count once."""
    restarts_at_ms: int = -1
    """End of the pause before the next attempt, wall clock; -1 unless the job is RESTARTING."""
    standbys: tuple[StandbyView, ...] = ()
    silent: tuple[StandbyView, ...] = ()
    """Workers that fell silent, and whose slots others have that stood by."""
    hook_restore: HookRestoreView | None = None
    """Master hooks that the next attempt waits for; None: it waits for none now."""


class WholeJobView(msgspec.Struct, frozen=True):
    """One job and its checkpoints, as they were at one moment."""

    job: JobView
    checkpoints: CheckpointStatsView


class SubtaskCheckpointView(msgspec.Struct, frozen=True, gc=False):
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
    persisted: int = 0
    """Bytes of in-flight data."""
    unaligned: bool = False
    store_ms: int = -1
    """Of `async_ms`: in operations of storage; -1 if its worker does not tell."""
    new_files: int = -1
    """Files with the new bytes; -1 if its worker does not tell."""
    stalled_ms: int = 0
    """Of `async_ms`: RocksDB had no room for what was to be written."""

    @property
    def acknowledged(self) -> bool:
        return self.ack_ms >= 0

    @property
    def encode_ms(self) -> int:
        """The rest of `async_ms`; -1 if that is not known."""
        return max(0, self.async_ms - self.store_ms) if self.store_ms >= 0 else -1

    @property
    def acknowledge_ms(self) -> int:
        """From the end of the asynchronous part to the coordinator: what the phases before leave of `end_to_end_ms`. A worker's
        clock that is ahead or behind moves time between this and `start_delay_ms`."""
        work = self.sync_ms + self.async_ms
        before = max(self.alignment_ms, work) if self.unaligned else self.alignment_ms + work
        left = self.end_to_end_ms - self.start_delay_ms - before
        return left if left > 0 else 0


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


class LongestPhases(msgspec.Struct, frozen=True):
    """The longest time of each phase among some subtasks, ms; -1: none acknowledged, or none tells it."""

    start_delay_ms: int
    alignment_ms: int
    sync_ms: int
    async_ms: int
    encode_ms: int
    store_ms: int
    acknowledge_ms: int


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
    def persisted_bytes(self) -> int:
        return sum(subtask.persisted for subtask in self.subtasks)

    @property
    def longest(self) -> LongestPhases:
        """Over the subtasks that acknowledged; computed on access."""
        delay_ms = alignment_ms = sync_ms = async_ms = encode_ms = store_ms = acknowledge_ms = -1
        for subtask in self.subtasks:
            if subtask.ack_ms < 0:
                continue
            delay_ms = max(delay_ms, subtask.start_delay_ms)
            alignment_ms = max(alignment_ms, subtask.alignment_ms)
            sync_ms = max(sync_ms, subtask.sync_ms)
            async_ms = max(async_ms, subtask.async_ms)
            encode_ms = max(encode_ms, subtask.encode_ms)
            store_ms = max(store_ms, subtask.store_ms)
            acknowledge_ms = max(acknowledge_ms, subtask.acknowledge_ms)
        return LongestPhases(delay_ms, alignment_ms, sync_ms, async_ms, encode_ms, store_ms, acknowledge_ms)

    @property
    def summary(self) -> Mapping[str, Quantiles]:
        """Quantiles over the subtasks that acknowledged; computed on access, not on the job's thread at every checkpoint."""
        acked = [subtask for subtask in self.subtasks if subtask.acknowledged]
        return {
            "checkpointed_size": summarise(subtask.checkpointed_size for subtask in acked),
            "state_size": summarise(subtask.state_size for subtask in acked),
            "end_to_end": summarise(subtask.end_to_end_ms for subtask in acked),
            "sync": summarise(subtask.sync_ms for subtask in acked),
            "async": summarise(subtask.async_ms for subtask in acked),
            "alignment": summarise(subtask.alignment_ms for subtask in acked),
            "alignment_processed": summarise(subtask.alignment_processed for subtask in acked),
            "alignment_persisted": summarise(subtask.persisted for subtask in acked),
            "start_delay": summarise(subtask.start_delay_ms for subtask in acked),
        }


class CheckpointPhases(msgspec.Struct, frozen=True):
    """How long one completed checkpoint took: of each phase of subtasks the longest, ms; -1: not known."""

    checkpoint_id: int
    end_to_end_ms: int
    start_delay_ms: int
    alignment_ms: int
    sync_ms: int
    encode_ms: int
    store_ms: int
    acknowledge_ms: int
    decide_ms: int
    """From the last acknowledgement until its `_metadata` is stored."""
    notify_ms: int
    """From then until the last subtask that has told knows of it; they tell with their next acknowledgement."""
    checkpointed_size: int
    state_size: int
    store_rate: int
    """Bytes that the subtasks wrote, by the sum of their times in storage: bytes/s of one writer."""
    new_files: int


class HookWaitView(msgspec.Struct, frozen=True):
    """How one checkpoint has waited for the job's master hooks, before any of its tasks was triggered."""

    missing: tuple[str, ...]
    """Those that have not answered, by name; empty: the tasks were triggered."""
    last: str = ""
    """The one that answered last."""
    took_ms: int = -1
    """From the checkpoint's trigger to that answer; -1: none has come."""


class HookRestoreView(msgspec.Struct, frozen=True):
    """Master hooks that an attempt waits for: none of its tasks is deployed before each is back at the checkpoint."""

    missing: tuple[str, ...]
    """By name; those that are not back, or those that failed or were late while another try waits."""
    since_ms: int
    """When the first call for the attempt was made, wall clock."""
    failed_tries: int = 0
    """After how many failures of hooks for this attempt."""


class HookFailureView(msgspec.Struct, frozen=True):
    """Master hooks that a checkpoint failed for, before any of its tasks was triggered."""

    names: tuple[str, ...]
    """At least one."""
    timed_out: bool
    """No answer came in time; False: it raised, died, or is not installed."""


NO_ANSWER = "no answer in time"


def silent_hooks_text(names: Iterable[str]) -> str:
    """On record of a checkpoint whose time for master hooks is over. For people, as `failed_hook_text`."""
    return f"{NO_ANSWER} from master hook {', '.join(repr(name) for name in sorted(names))}"


def failed_hook_text(name: str, message: str) -> str:
    """On record of a checkpoint whose master hook has failed. For people: HookFailureView is what programs read."""
    return f"master hook {name!r}: {message}"


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
    unaligned: bool = False
    """The barrier has overtaken records at any subtask."""
    location: str | None = None
    """Location of the snapshot, if COMPLETED."""
    savepoint_format: str | None = None
    """CANONICAL or NATIVE; None for a checkpoint, or if it is not known any more."""
    discarded: bool = False
    failure_ms: int = -1
    failure_reason: str | None = None
    """A FailureReason value."""
    failure_message: str | None = None
    decide_ms: int = -1
    """As in CheckpointPhases; of one that is completed."""
    notify_ms: int = -1
    """As in CheckpointPhases."""
    hooks: HookWaitView | None = None
    """None: the job has no master hooks, or it is not known any more."""
    hook_failure: HookFailureView | None = None
    """None: it did not fail for master hooks, or what is on record of it does not say so."""

    @property
    def is_savepoint(self) -> bool:
        return self.kind.is_savepoint


class RecordedCheckpointView(msgspec.Struct, frozen=True):
    """A checkpoint that has ended, as the history of its job has it: not all of its subtasks."""

    checkpoint: CheckpointView
    """Its vertices have the subtasks that are on record: the slowest ones, and some that did not acknowledge."""
    phases: CheckpointPhases
    longest: Mapping[str, tuple[int, str]]
    """Phase -> its longest time over all subtasks, ms, and the vertex that it is of."""
    hosts: Mapping[SubtaskKey, str]
    """Of the subtasks that are on record, then."""
    missing: int = 0
    """Subtasks that did not acknowledge."""


class CheckpointCounts(msgspec.Struct, frozen=True):
    restored: int
    """-1: not known, of a job that is only on record; the others count what is still there then."""
    total: int
    in_progress: int
    completed: int
    failed: int


class CheckpointStatsView(msgspec.Struct, frozen=True):
    """Counts since this coordinator leads the job; summaries of the newest checkpoints that it has completed."""

    counts: CheckpointCounts
    summary: Mapping[str, Quantiles]
    """checkpointed_size, state_size, end_to_end_duration, alignment_buffered, processed_data, persisted_data."""
    history: tuple[CheckpointView, ...]
    """Newest first, bounded; includes those in progress, and of those that earlier leaders completed the ones that are kept: what
    no record tells of these is -1."""
    latest_completed: CheckpointView | None
    latest_savepoint: CheckpointView | None
    latest_failed: CheckpointView | None
    latest_restored: RestoredView | None
    recent: tuple[CheckpointPhases, ...] = ()
    """Of the newest completed checkpoints, oldest first, bounded; no savepoints."""


SUBTASKS_SHOWN_MAX = 1_000
"""Subtasks of one job whose own numbers a scrape of metrics shows."""


class DrillMark(msgspec.Struct, frozen=True):
    """What metrics tell of a job's drills, as far as they are known in memory."""

    last_ms: int = -1
    """When the newest one that found something out began; -1: none, or it has not been read yet."""
    has_failed: bool = False
    """It found problems."""
    overdue_ms: int = -1
    """Since a scheduled drill should have found something out; 0: it still has time; -1: the job has no schedule."""


class JobNumbersView(msgspec.Struct, frozen=True):
    """Numbers of one job for metrics, updated with each event: the cost of reading them has a bound, whatever the tasks are."""

    overview: JobOverviewView
    attempt: int
    restarts: int
    counts: CheckpointCounts
    latest_completed: CheckpointView | None
    frames_refused: int
    """Frames that the data ports of its workers dropped since this coordinator leads it."""
    graph: JobGraph
    totals: Totals = {}
    """Counts of the submission's operators, as of the last heartbeats; a restart takes them back to the restored cut."""
    reached: Totals = {}
    """As `totals`, but never falling while this coordinator leads the job: after a restart they stay until the job has counted as
    much again."""
    restarts_at_ms: int = -1
    """As in JobView."""
    subtasks: tuple[SubtaskMetrics, ...] = ()
    """Of running subtasks, as of their last heartbeats; SUBTASKS_SHOWN_MAX at most."""
    as_of_ms: int = -1
    """Until when this is known to have been so."""
    subtasks_beyond: int = 0
    """Subtasks that told such numbers, beyond SUBTASKS_SHOWN_MAX."""
    drill: DrillMark = DrillMark()
    branch_of: str = ""
    """Name of the job that it is a branch of; empty: it is none."""


class SeriesView(msgspec.Struct, frozen=True):
    """One metric of one vertex over the last 15 minutes. None: no subtask had told it."""

    vertex: str
    metric: str
    """One of `jobmaster.series.METRICS`."""
    resolution_ms: int
    """Length of the time that one point is about; longer for a job of very many subtasks."""
    parallelism: int
    times_ms: tuple[int, ...] = ()
    """When the time of each point began, oldest first; the newest may be incomplete."""
    sum: tuple[float | None, ...] = ()
    """Over the subtasks that told it."""
    avg: tuple[float | None, ...] = ()
    min: tuple[float | None, ...] = ()
    max: tuple[float | None, ...] = ()
    subtasks: Mapping[int, tuple[float | None, ...]] = {}
    """Of those that were asked for."""


class CheckpointConfigView(msgspec.Struct, frozen=True):
    config: JobConfig
    """Settings that hold, those included that were changed since the submission."""
    storage: str
    """Printable root of the checkpoint storage."""
    is_processing_backlog: bool = False
    """A source of the running attempt processes a backlog."""
    as_of_ms: int = -1
    """Until when this is known to have been so."""


class ScheduleView(msgspec.Struct, frozen=True):
    """When the next periodic checkpoint of a job is due, and what holds it up."""

    interval_ms: int | None
    """The interval that holds now; None: no periodic checkpoints."""
    next_in_ms: int | None = None
    """Until the next one is due, negative if it is overdue; None: none is."""
    pause_left_ms: int = 0
    """Rest of the pause after the last completed one."""
    is_preparing: bool = False
    """The claim of the next id is being written."""
    pending: int = 0
    """Ids that are claimed and undecided."""
    savepoints: int = 0
    """Savepoints among them, one that is being claimed included."""
    deleting: int = 0
    """Dropped checkpoints that are still being deleted."""
    is_ending: bool = False
    """The checkpoint that ends the job has begun, or is complete."""
    tasks_refuse: bool = False
    """Not all tasks of the attempt run."""
    failures: int = 0
    """Counted failures of checkpoints in a row."""


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
    """Checkpoints that were begun for it: several for a stop that a failover cut off."""


class SavepointPlaces(msgspec.Struct, frozen=True):
    """Places of savepoints, as jobs' settings and records name them; whether they exist is not checked."""

    directories: frozenset[str] = frozenset()
    """`savepoint_directory` of jobs."""
    folders: frozenset[str] = frozenset()
    """Folders of single savepoints."""


class AnswerView(msgspec.Struct, frozen=True):
    """What a worker said about itself."""

    answer: WorkerAnswer
    as_of_ms: int
    """When it arrived, wall clock."""


class ClusterView(msgspec.Struct, frozen=True):
    """Numbers over all jobs."""

    slots_total: int
    slots_available: int
    """Registered slots of jobs without a running attempt."""
    jobs_running: int
    """Jobs that are not in a terminal state."""
    jobs_finished: int
    jobs_canceled: int
    jobs_failed: int
    workers: int
    """Processes that hold a slot."""
