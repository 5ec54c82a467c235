"""What explanations are made of, and explanations: frozen records, which REST sends as they are and the command line prints.

Times are ms, -1 where unknown; sizes are bytes. Texts are one line each, and of bounded length."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from holdfast.barriers.jobgraph import JobConfig
from holdfast.barriers.messages import CheckpointKind, SubtaskKey, WorkerAnswer
from holdfast.barriers.tunable import SettingValue
from holdfast.coordinator.drills.records import DrillView, Verification
from holdfast.coordinator.explain.positions import SnapshotPositions
from holdfast.coordinator.views import CheckpointStatsView, CheckpointView, JobView, RecordedCheckpointView, ScheduleView

# ---------------------------------------------------------------------------------------------------------- records in


class CutView(msgspec.Struct, frozen=True):
    """The snapshot that a failure now would go back to; of a job that has ended, the newest that it keeps."""

    checkpoint_id: int
    kind: CheckpointKind
    location: str
    """As `restore=` takes it."""
    timestamp_ms: int
    """Of its trigger: where its cut is."""
    source_records: Mapping[str, int] | None = None
    """Source's uid -> records that it had read at the cut, since the submission began; None: not known."""


class Situation(msgspec.Struct, frozen=True):
    """One job at one moment, and the checkpoint that is asked for."""

    job: JobView
    config: JobConfig
    """Settings that hold."""
    stats: CheckpointStatsView
    checkpoint: CheckpointView | None = None
    """With its subtasks; None: why is there none?"""
    schedule: ScheduleView | None = None
    """None: nobody schedules any; the job has ended, or another coordinator may lead it."""
    cut: CutView | None = None
    source_records: Mapping[str, int] | None = None
    """As in CutView, now."""
    is_processing_backlog: bool = False
    looks: tuple[tuple[SubtaskKey, WorkerAnswer], ...] = ()
    """What workers of missing acknowledgements saw of their own stacks, in the order in which they were asked."""
    drills: tuple[DrillView, ...] = ()
    """Of the job's snapshots, newest first."""
    are_drills_known: bool = True
    """False: those on record have not been read yet."""
    verifications: tuple[Verification, ...] = ()
    """Of the job's snapshots, newest first."""
    positions: SnapshotPositions | None = None
    """Of the newest snapshot that was read for it; None: none was yet."""
    record: RecordedCheckpointView | None = None
    """What the job's history has of the checkpoint, if that is all that is known of it: its subtasks are then those on record,
    `job` shows nothing of the present, and no judgement is over all subtasks."""
    kept: Explanation | None = None
    """Of the checkpoint, from when it ended: nothing is judged anew then."""


# --------------------------------------------------------------------------------------------------------- records out


class Place(msgspec.Struct, frozen=True):
    """A vertex, or one subtask of it."""

    vertex: str
    """Its name, clipped."""
    uid: str
    """Of its first operator, clipped."""
    subtask: int = -1
    host: str = ""

    def __str__(self) -> str:
        subtask = f" subtask {self.subtask}" if self.subtask >= 0 else ""
        host = f" on {self.host}" if self.host else ""
        uid = f" (uid {self.uid})" if self.uid != self.vertex else ""
        return f"{self.vertex}{uid}{subtask}{host}"


class Phase(StrEnum):
    """Phases of a checkpoint, in order."""

    START_DELAY = "start_delay"
    """Of a subtask: trigger to first barrier."""
    ALIGNMENT = "alignment"
    """First barrier to last."""
    SYNC = "sync"
    ENCODE = "encode"
    """Of the asynchronous part: all but storage."""
    STORE = "store"
    """Of the asynchronous part: storage."""
    ACKNOWLEDGE = "acknowledge"
    """End of the asynchronous part to the coordinator."""
    DECIDE = "decide"
    """Last acknowledgement until `_metadata` is stored."""
    NOTIFY = "notify"
    """From then until the last subtask knows."""


class PhaseView(msgspec.Struct, frozen=True):
    """The longest time of one phase in a checkpoint, and what is usual."""

    phase: Phase
    longest_ms: int
    median_ms: int
    """Of the longest times in the newest 20 completed checkpoints, at most; -1 with fewer than 3."""
    is_unusual: bool
    place: Place | None = None
    """Whose it is; None: of the whole checkpoint."""


class CauseKind(StrEnum):
    """Kinds of causes, for programs."""

    USUAL = "usual"
    NOT_KNOWN = "not_known"
    # slow, or pending
    SLOW = "slow"
    MISSING_ACKS = "missing_acks"
    LATE_BARRIER = "late_barrier"
    BACKPRESSURE = "backpressure"
    BUSY_VERTEX = "busy_vertex"
    BUSY_SUBTASK = "busy_subtask"
    SKEW = "skew"
    OUTSIDE = "waits_for_outside"
    LONG_CALL = "long_call"
    NO_LONGER_SEEN = "no_longer_seen"
    SLOW_SYNC = "slow_sync"
    SLOW_ENCODE = "slow_encode"
    SLOW_STORAGE = "slow_storage"
    SLOW_HOST = "slow_host"
    SLOW_STORE = "slow_store_of_one"
    SMALL_FILES = "small_files"
    BASE_REWRITE = "base_rewrite"
    STORE_STALLED = "rocksdb_stalled"
    MORE_STATE = "more_state"
    STATE_SKEW = "state_skew"
    SLOW_ACKNOWLEDGE = "slow_acknowledge"
    SLOW_DECIDE = "slow_decide"
    DECIDING = "deciding"
    LOST_WORKER = "lost_worker"
    HUNG_WORKER = "hung_worker"
    TASK_NOT_RUNNING = "task_not_running"
    IN_FUNCTION = "in_function"
    SLOW_MASTER_HOOK = "slow_master_hook"
    # failed
    EXPIRED = "expired"
    DECLINED = "declined"
    TASK_NOT_READY = "task_not_ready"
    STATE_TOO_LARGE = "state_too_large"
    STORAGE_FULL = "storage_full"
    STORAGE_FAILED = "storage_failed"
    IN_FLIGHT_LIMIT = "in_flight_limit"
    MASTER_HOOK_FAILED = "master_hook_failed"
    MASTER_HOOK_TIMEOUT = "master_hook_timeout"
    TASK_FAILED = "task_failed"
    JOB_FAILED_OVER = "job_failed_over"
    LEADER_CHANGED = "leader_changed"
    SUBSUMED = "subsumed"
    END_OF_INPUT = "end_of_input"
    NEW_SUBMISSION = "new_submission"
    # missing
    PAUSED = "paused"
    BACKLOG = "backlog"
    MINIMUM_PAUSE = "minimum_pause"
    SAVEPOINT_PENDING = "savepoint_pending"
    CHECKPOINT_PENDING = "checkpoint_pending"
    DELETIONS = "deletions"
    NOT_ALL_RUNNING = "not_all_tasks_running"
    RESTARTING = "restarting"
    RECONCILING = "reconciling"
    WAITS_FOR_WORKERS = "waits_for_workers"
    WAITS_FOR_MASTER_HOOK = "waits_for_master_hook"
    ENDING = "ending"
    STOPPED = "stopped"
    CLAIMING = "claiming"


class Cause(msgspec.Struct, frozen=True):
    """One link of a chain of causes."""

    kind: CauseKind
    text: str
    """One line for people."""
    place: Place | None = None


class SettingChange(msgspec.Struct, frozen=True):
    """The one setting to change."""

    name: str
    old: SettingValue
    new: SettingValue
    why: str
    command: str = ""
    """Changes it while the job runs; empty: it holds from the job's next submission on."""


class Explanation(msgspec.Struct, frozen=True):
    """Why a checkpoint was slow, failed, is pending or is missing; or that there is nothing to explain."""

    job_id: str
    job_name: str
    checkpoint_id: int
    """-1: of a checkpoint that was not triggered."""
    subject: str
    """completed, failed, pending or missing."""
    is_usual: bool
    """Nothing is wrong with it."""
    summary: str
    phases: tuple[PhaseView, ...] = ()
    causes: tuple[Cause, ...] = ()
    """What was seen, then why, to the first cause, which is the last one here; never empty."""
    setting: SettingChange | None = None
    """None: nothing is wrong, or no setting is known to help."""
    compared: int = 0
    """Completed checkpoints that the medians are of."""
    explained_ms: int = -1
    """When it was worked out, wall clock, of one that was kept: it says what was seen then; -1: now."""

    @property
    def first_cause(self) -> Cause:
        return self.causes[-1]


class Verdict(StrEnum):
    OK = "ok"
    AT_RISK = "at_risk"
    BAD = "bad"

    @property
    def rank(self) -> int:
        """0 ok, 1 at risk, 2 bad: exit code of `holdfast status`."""
        return list(Verdict).index(self)


class SafeView(msgspec.Struct, frozen=True):
    """How much a failure now would cost."""

    verdict: Verdict
    why: str
    """One line."""
    checkpoint_id: int = -1
    """Newest completed checkpoint that a failure goes back to, or that a job that has ended keeps; -1: none."""
    age_ms: int = -1
    """Since its trigger."""
    interval_ms: int | None = None
    verified_ms: int = -1
    """When all of its files were read and checked; -1: never."""
    drilled_ms: int = -1
    """When it was restored for a trial; -1: never."""
    are_drills_known: bool = True
    """False: what is on record of drills has not been read yet, as for a moment behind a change of the leader."""
    replay_ms: int = -1
    """Time whose records a failure replays."""
    replay_records: int = -1
    """Those that the sources have read since, as of the last heartbeats."""


class VertexShares(msgspec.Struct, frozen=True):
    """How the last second of a vertex was spent: the highest share of any of its subtasks."""

    vertex: str
    """Its id."""
    busy: float
    backpressured: float


class SlowView(msgspec.Struct, frozen=True):
    """What bounds the job's speed."""

    verdict: Verdict
    why: str
    bottleneck: Place | None = None
    cause: CauseKind | None = None
    busy: float = -1.0
    """Share of its last second that the bottleneck worked; -1: not known."""
    backpressured: float = -1.0
    """Highest share of any subtask; -1: not known."""
    watermark_lag_ms: int = -1
    """Highest of any subtask; -1: not known."""
    vertices: tuple[VertexShares, ...] = ()
    """Of those that run and have told it, VERTICES_SHOWN_MAX at most: of the second that the verdict is of."""


class SourceCut(msgspec.Struct, frozen=True):
    """How far a source had read at a cut."""

    uid: str
    records: int
    """That it had read; -1: not known."""
    positions: tuple[str, ...] = ()
    """Where it goes on, split by split, as its state in snapshot `ResumeView.positions_of` says: offset, row, byte, sequence, LSN.
    At most POSITIONS_SHOWN_MAX; empty: not read, or its state does not tell."""
    splits: int = 0
    """How many there are in all; those that are finished, or that no reader has yet, are none."""


class ResumeView(msgspec.Struct, frozen=True):
    """Where a failure now would go on, or what a job that has ended keeps."""

    verdict: Verdict
    why: str
    checkpoint_id: int = -1
    location: str = ""
    sources: tuple[SourceCut, ...] = ()
    """At most SOURCES_SHOWN_MAX."""
    positions_of: int = -1
    """Checkpoint whose snapshot the positions were read from: `checkpoint_id`, or an earlier one while that is being read; -1: none
    has been read yet."""
    may_repeat: tuple[Place, ...] = ()
    """Vertices that may process records again, whose output may repeat; at most PLACES_SHOWN_MAX."""


SOURCES_SHOWN_MAX = 100
PLACES_SHOWN_MAX = 100
VERTICES_SHOWN_MAX = 1_000


class HealthView(msgspec.Struct, frozen=True):
    """Whether a job is safe, why it is slow, where it will resume."""

    job_id: str
    job_name: str
    state: str
    as_of_ms: int
    verdict: Verdict
    """The worst of the three."""
    safe: SafeView
    slow: SlowView
    resume: ResumeView
