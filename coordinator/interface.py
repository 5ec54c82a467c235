"""The interface of the coordinator to `api`: a protocol, so that routes depend on these signatures and not on threads.

Every method may be called from any thread. Those that change something or wait for the job's thread return when
it has answered (well under the timeouts of an HTTP request); those named `*_async` return a Future for an event loop to
await, which also has their errors. Errors are the classes of statebackends/errors.py. Every call on a job raises NotFoundError
(job=...) for an unknown one, NotLeaderError if another coordinator leads it, with the leader if it is known, and RecoveringError
until this process has recovered it after a start."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from holdfast.barriers.erasure import Erasure
from holdfast.barriers.jobgraph import Submission, SubmissionAccepted
from holdfast.barriers.messages import (
    AckAnswers,
    AckBatch,
    Heartbeat,
    NumberedCommand,
    Registered,
    RegisterWorker,
    StandBy,
    StandbyOrder,
    StatusBatch,
    WorkerAnswer,
)
from holdfast.barriers.tunable import AS_CONFIGURED, CheckpointMode, SettingValue
from holdfast.coordinator.dispatcher.published import MomentNow
from holdfast.coordinator.dispatcher.reading.questions import Question
from holdfast.coordinator.drills.records import DrillView, Verification
from holdfast.coordinator.explain.records import Explanation, HealthView
from holdfast.coordinator.history.feed import HistoryFeed
from holdfast.coordinator.history.records import HistoryPage
from holdfast.coordinator.history.store import HistoryQuery
from holdfast.coordinator.notes import THE_COORDINATOR_STOPS
from holdfast.coordinator.ownership.cost import Cost
from holdfast.coordinator.ownership.labels import LabelList, LabelView
from holdfast.coordinator.restore.preflight import PreflightReport
from holdfast.coordinator.views import (
    AnswerView,
    CheckpointConfigView,
    CheckpointStatsView,
    CheckpointView,
    ClusterView,
    JobNumbersView,
    JobOverviewView,
    JobView,
    Moment,
    SavepointPlaces,
    SeriesView,
    TriggerView,
    WholeJobView,
)


class CommandSubscription(Protocol):
    """One open command stream. Single consumer; the thread of the job feeds it, bounded."""

    def take(self) -> list[NumberedCommand]:
        """All waiting commands, in order; never blocks."""

    def get(self, timeout_s: float | None) -> NumberedCommand | None:
        """The next command; None after `timeout_s`, or if the stream is closed and empty (see `closed`)."""

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each new command and at closing, from the feeding thread; it must not block.

        It is called at once if commands wait already or the stream is closed."""

    @property
    def closed(self) -> bool:
        """No further command comes: the worker must register again. `take` may still return the last ones."""

    @property
    def last_number(self) -> int:
        """Number of the last command that `take` or `get` returned, for keep-alives."""

    @property
    def epoch(self) -> int: ...

    def close(self) -> None:
        """The consumer is gone (its connection closed): the job starts the worker's grace period. Idempotent."""


class Coordinator(Protocol):
    """The jobs of one state directory. `CoordinatorService` implements it.

    A call for a job that has no room for it, since it takes no turns, gets TooManyRequestsError at once."""

    def lead(self) -> None:
        """Start to recover the jobs of the state directory; called once requests are answered. Idempotent; returns at once.

        Calls on a job that is not recovered yet raise RecoveringError, but a registration waits for its job."""

    @property
    def ready(self) -> bool:
        """Every job of the state directory is recovered, or its error is known."""

    @property
    def is_leading(self) -> bool:
        """This process leads a job that has not ended, or may in a moment."""

    @property
    def is_referring(self) -> bool:
        """This process knows of a job that another coordinator leads."""

    @property
    def directory(self) -> str:
        """Printable root of the state directory."""

    @property
    def directory_nonce(self) -> str: ...

    @property
    def feed(self) -> HistoryFeed:
        """Records of the jobs that are led here, as they are made."""

    # -- driver

    def submit(self, submission: Submission) -> SubmissionAccepted:
        """Start a job, or supersede the running submission of its name; idempotent by `driver_nonce`.

        Raises InvalidConfigError, JobExistsError, RestoreError and its subclasses, CorruptStateError,
        StorageUnavailableError; nothing is changed then."""

    def preflight(self, submission: Submission) -> PreflightReport:
        """Check a submission and change nothing; refusals are in the report, not raised.

        Raises InvalidConfigError, JobExistsError, NotFoundError, StorageUnavailableError."""

    def leader_unreachable(self, job_id: str, epoch: int) -> None:
        """A client that was referred to the leader of a job's epoch could not reach it. Never blocks or raises."""

    # -- worker protocol

    def register_async(self, message: RegisterWorker) -> Future[Registered]:
        """Raises NotFoundError (job, slot), FencedError (older process or submission, terminal job),
        StateDirectoryNotSharedError."""

    def stand_by_async(self, message: StandBy) -> Future[StandbyOrder]:
        """Answered as soon as there is a slot for the worker, and within a few seconds. Raises NotFoundError (job, seat),
        FencedError (older worker or submission, terminal job), AuthenticationError."""

    def commands(self, job_id: str, slot: int, session: str, after: int) -> CommandSubscription:
        """Open the command stream of a session, resuming after command number `after`; it replaces an older stream.

        Raises FencedError for a session that is not the slot's current one, or that lost commands: register again."""

    def acks_async(self, job_id: str, batch: AckBatch) -> Future[AckAnswers]:
        """Acknowledgements and declines, answered item by item, in order. Raises FencedError for a stale epoch or session, or when
        every item is of a stale attempt (their state is discarded here all the same)."""

    def states_async(self, job_id: str, batch: StatusBatch) -> Future[None]:
        """Task states of a worker. Raises FencedError like `acks_async`; statuses of stale attempts in it are ignored."""

    def heartbeat_async(self, job_id: str, message: Heartbeat) -> Future[int]:
        """The epoch of the leader. Raises FencedError for a session that is not the slot's current one: register again."""

    def answer_async(self, job_id: str, answer: WorkerAnswer) -> Future[None]:
        """A worker's answer to a question. Raises FencedError for one that nobody waits for any more."""

    # -- requests of users

    def request_checkpoint(self, job_id: str, trigger_id: str | None = None, *, mode: CheckpointMode = AS_CONFIGURED) -> str:
        """Request one checkpoint now; returns the trigger id, new or given. Its outcome is in `trigger_status`.

        `mode`: in place of the job's settings; a repetition of a request keeps that of the first one. Raises InvalidConfigError for
        one that the job can't have."""

    def erase_key(self, job_id: str, erasure: Erasure) -> str:
        """Request one checkpoint at whose cut a key leaves keyed state of the running job; returns the trigger id, whose outcome is
        in `trigger_status`. Once it is complete, older checkpoints are dropped. One that fails has changed nothing that a restore
        finds: request another one."""

    def request_savepoint(
        self,
        job_id: str,
        target: str | None = None,
        *,
        format_type: str = "CANONICAL",
        cancel: bool = False,
        trigger_id: str | None = None,
    ) -> str:
        """Request a savepoint below directory or URL `target` (None: the job's setting); with `cancel`, cancel the job after it.

        `format_type`: CANONICAL, which every state backend reads, or NATIVE, the backend's own files. Raises InvalidConfigError."""

    def stop(
        self,
        job_id: str,
        target: str | None = None,
        *,
        drain: bool = False,
        format_type: str = "CANONICAL",
        trigger_id: str | None = None,
    ) -> str:
        """Stop with a savepoint; returns the trigger id."""

    def change_settings(self, job_id: str, settings: Mapping[str, SettingValue]) -> CheckpointConfigView:
        """Change settings of a running job; returns what holds, once the change is stored. It holds for the checkpoints that are
        triggered next, under later leaders and attempts, too, until the next submission.

        Raises InvalidConfigError for a setting that is unknown, fixed, of a wrong type or out of bounds, FencedError for a job that
        has ended or ends, StorageUnavailableError; nothing is changed then, unless the job did not answer in time."""

    def add_label(self, job_id: str, checkpoint_id: int, label: str) -> LabelView:
        """Give a completed checkpoint or savepoint a label: it is not deleted until its labels are removed. Idempotent; also of a
        job that has ended.

        Raises InvalidConfigError for a name that is no label, and beyond the bounds, NotFoundError (checkpoint=...) for an id
        without a snapshot, SnapshotLabelledError if its deletion has begun, or another id has the label."""

    def remove_label(self, job_id: str, label: str, checkpoint_id: int | None = None) -> tuple[LabelView, ...]:
        """Remove a label, of one id or of whichever has it; returns what was removed. What the job keeps no longer is deleted.

        Raises NotFoundError if no snapshot has it."""

    def cancel(self, job_id: str) -> None:
        """Begin to cancel; a job in a terminal state is left as it is."""

    def leave(self, job_id: str, submission: int) -> None:
        """The driver of a submission takes its workers away: the job waits for another submission, and no restart is counted.

        A job in a terminal state stays as it is. Raises FencedError if another submission runs."""

    def trigger_status(self, job_id: str, trigger_id: str) -> TriggerView:
        """Outcome of a request. Raises NotFoundError for an unknown trigger id."""

    # -- read models: each job publishes a view every 500 ms at most, and none takes a turn of it. What a caller was told by an
    # answer to a request of its own, and a job's newest state, are in every view that is read after it.

    def moment(self, job_id: str | None = None, *, diagnosed: bool = False) -> Moment:
        """How old the view of a job, or of all of them, is, and which one it is. Views that are read afterwards are that one or a
        newer one. `diagnosed`: of what `health` tells of the job."""

    def moment_now(self, job_id: str | None = None, *, diagnosed: bool = False) -> MomentNow:
        """As `moment`, for an event loop: it never waits."""

    def jobs(self) -> tuple[JobOverviewView, ...]:
        """All jobs, by start time."""

    def numbers(self) -> tuple[JobNumbersView, ...]:
        """Numbers of all jobs, for metrics; the cost does not depend on the number of tasks."""

    def broken_jobs(self) -> Mapping[str, str]:
        """Jobs of the state directory that can't be led, as their records can't be read: id -> why. No list of jobs has them."""

    def job(self, job_id: str) -> JobView: ...

    def whole_job(self, job_id: str) -> WholeJobView:
        """A job and its checkpoints of one view."""

    def whole_jobs(self, job_ids: Collection[str] | None = None, *, live_only: bool = False) -> tuple[WholeJobView, ...]:
        """All jobs, or some, that began last first; each is of one view. A job that can't be shown is left out."""

    def checkpoints(self, job_id: str) -> CheckpointStatsView: ...

    def checkpoint(self, job_id: str, checkpoint_id: int) -> CheckpointView: ...

    def checkpoint_config(self, job_id: str) -> CheckpointConfigView: ...

    def series(
        self, job_id: str, vertex: str | None, metric: str, subtasks: Sequence[int] = ()
    ) -> tuple[SeriesView, ...]:
        """One metric (`jobmaster.series.METRICS`) of a vertex over the last 15 minutes, with `subtasks` one by one, or, if none is
        named, all of a vertex of 100 at most. Without a vertex: of every one, over all of its subtasks.

        Raises InvalidConfigError for an unknown metric, NotFoundError for an unknown vertex."""

    def history(self, job_id: str, query: HistoryQuery) -> HistoryPage:
        """What happened to a job, from its directory: of any job there, whoever leads it."""

    def drill(self, job_id: str, checkpoint_id: int | None = None) -> DrillView:
        """Begin to read a snapshot as a restore would, in a process of its own; returns at once. If none is named: the newest that
        a failure would go back to, or that an ended job keeps.

        Raises NotFoundError (checkpoint=...), StorageUnavailableError while another drill is under way."""

    def drills(self, job_id: str) -> tuple[DrillView, ...]:
        """Drills of a job's snapshots, newest first."""

    def note_verified(self, job_id: str, location: str, found: Verification) -> None:
        """Remember that the files of a snapshot were checked, until this process ends; nothing if it is none of the job's. It reads
        the snapshot's record. Raises HoldfastError as storage does."""

    def cost(self, job_id: str) -> Cost:
        """What the files of a job take, without money, from its directory: of any job there, whoever leads it."""

    def labels(self, job_id: str) -> LabelList:
        """Labels of a job's snapshots, from its directory."""

    def health(self, job_id: str) -> HealthView:
        """Whether a job is safe, why it is slow, and where it will resume."""

    def ask_async(self, question: Question) -> Future[AnswerView]:
        """What a worker says about itself: sampled stacks, or its log. It changes nothing. An answer of the last 5 s counts.

        Raises NotFoundError (job, slot), QuestionNotKnownError for a worker of an older version, WorkerSilentError if it does not
        answer within some seconds, WorkerBusyError, FencedError for a job that has ended."""

    def explain(self, job_id: str, checkpoint_id: int | None = None) -> Explanation:
        """Why a checkpoint was slow, failed or is pending; without an id, of the one that is worth it, or why there is none.
        A worker of a missing acknowledgement is asked where it is, for two seconds at most.

        Raises NotFoundError (checkpoint=...) for an id that the job does not show."""

    def savepoint_places(self) -> SavepointPlaces:
        """Places of savepoints, of every job that this process leads or has on record, by the newest 1,000 requests of each.

        Raises RecoveringError while any job is not recovered yet."""

    def published_savepoint_places(self) -> SavepointPlaces:
        """As `savepoint_places`, as jobs publish them: what may be read, never what may be deleted. A job that can't be shown is
        left out. It takes no turn of a job."""

    def cluster(self) -> ClusterView: ...

    # -- life

    def wait(self, job_id: str, timeout_s: float | None = None) -> str:
        """Block until the job is in a terminal state (or SUSPENDED), or `timeout_s` is over; returns the state."""

    def close(self, reason: str = THE_COORDINATOR_STOPS) -> None:
        """Stop leading without ending any job: streams close, threads end, checkpoints stay. `reason`: for the jobs' histories.
        Idempotent."""
