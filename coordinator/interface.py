"""What the coordinator offers to `api`: a protocol, so that routes depend on these signatures and not on threads.

Every method may be called from any thread. Those that change something or wait for the job's thread return when
it has answered (well under the timeouts of an HTTP request); those named `*_async` return a Future for an event loop to
await, and what they raise is in it. Errors are the typed kinds of statebackends.errors; JobNotFound is NotFoundError(job=...).
All that concerns a job raises NotLeaderError when it is led elsewhere, which names its leader where that is known, and
RecoveringError while this process has not come to it since its start."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from holdfast.barriers.jobgraph import Submission, SubmissionAccepted
from holdfast.barriers.messages import AckAnswers, AckBatch, Heartbeat, NumberedCommand, Registered, RegisterWorker, StatusBatch
from holdfast.coordinator.restore.preflight import PreflightReport
from holdfast.coordinator.views import (
    CheckpointConfigView,
    CheckpointStatsView,
    CheckpointView,
    ClusterView,
    JobNumbersView,
    JobOverviewView,
    JobView,
    SavepointPlaces,
    TriggerView,
    VertexCheckpointView,
)


class CommandSubscription(Protocol):
    """One open command stream. Single consumer; the thread of the job feeds it, bounded."""

    def take(self) -> list[NumberedCommand]:
        """Every command that waits, in order; never blocks."""

    def get(self, timeout_s: float | None) -> NumberedCommand | None:
        """The next command; None when time ran out or the stream is closed and empty (see `closed`)."""

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each new command and at closing, from the feeding thread; it must not block.

        It is called once at once if commands wait already or the stream is closed."""

    @property
    def closed(self) -> bool:
        """No further command will come: the worker must register again. `take` may still return the last ones."""

    @property
    def last_number(self) -> int:
        """Number of the last command that `take` or `get` handed out, for keep-alives."""

    @property
    def epoch(self) -> int: ...

    def close(self) -> None:
        """The consumer is gone (its connection closed). Idempotent; the job is told, which starts the grace period."""


class Coordinator(Protocol):
    """Many jobs. `CoordinatorService` implements it."""

    def lead(self) -> None:
        """Requests are answered from now on: begin to lead the live jobs of the state directory on. Idempotent; returns at once.

        What concerns a job that it has not come to yet raises RecoveringError, and a registration waits for its job."""

    @property
    def ready(self) -> bool:
        """Every job of the state directory is led on, or why it can't be is known."""

    @property
    def is_leading(self) -> bool:
        """A job that has not ended is led from here, or may be in a moment."""

    @property
    def is_referring(self) -> bool:
        """It is known of a job that another coordinator leads it."""

    @property
    def directory(self) -> str:
        """Printable root of the state directory."""

    @property
    def directory_nonce(self) -> str: ...

    # -- driver

    def submit(self, submission: Submission) -> SubmissionAccepted:
        """Start a job, or supersede the running submission of its name; a repeat with the same driver_nonce is answered alike.

        Raises InvalidConfigError, JobExistsError, RestoreError and its subclasses, CorruptStateError,
        StorageUnavailableError; nothing is changed then."""

    def preflight(self, submission: Submission) -> PreflightReport:
        """Judge a submission and change nothing; what would refuse it is in the report, not raised.

        Raises InvalidConfigError, JobExistsError, NotFoundError, StorageUnavailableError."""

    def leader_unreachable(self, job_id: str, epoch: int) -> None:
        """A client that was sent to the leader of a job's epoch found nobody there who leads it. Never blocks or raises."""

    # -- worker protocol

    def register_async(self, message: RegisterWorker) -> Future[Registered]:
        """Raises NotFoundError (job, slot), FencedError (older process or submission, terminal job),
        StateDirectoryNotSharedError."""

    def commands(self, job_id: str, slot: int, session: str, after: int) -> CommandSubscription:
        """Open the command stream of a session, resuming behind command number `after`; the newest stream wins.

        Raises FencedError for a session that is not the slot's current one, or that lost commands: register again."""

    def acks_async(self, job_id: str, batch: AckBatch) -> Future[AckAnswers]:
        """Acknowledgements and declines, answered item by item, in order. Raises FencedError for a stale epoch or session, or when
        every item is of a stale attempt (their state is discarded here all the same)."""

    def states_async(self, job_id: str, batch: StatusBatch) -> Future[None]:
        """Task states of a worker. Raises FencedError like `acks_async`; statuses of stale attempts in it are ignored."""

    def heartbeat_async(self, job_id: str, message: Heartbeat) -> Future[int]:
        """The epoch of the leader. Raises FencedError for a session that is not the slot's current one: register again."""

    # -- requests of users

    def request_checkpoint(self, job_id: str, trigger_id: str | None = None) -> str:
        """Ask for one checkpoint now; returns the trigger id, new or given. Its outcome is in `trigger_status`."""

    def request_savepoint(
        self,
        job_id: str,
        target: str | None = None,
        *,
        format_type: str = "CANONICAL",
        cancel: bool = False,
        trigger_id: str | None = None,
    ) -> str:
        """Ask for a savepoint below directory or URL `target` (None: the job's setting), and then to cancel, if `cancel`.

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

    def cancel(self, job_id: str) -> None:
        """Begin to cancel; a job in a terminal state is left as it is."""

    def trigger_status(self, job_id: str, trigger_id: str) -> TriggerView:
        """Raises NotFoundError for an unknown trigger id."""

    # -- read models

    def jobs(self) -> tuple[JobOverviewView, ...]:
        """By start time."""

    def numbers(self) -> tuple[JobNumbersView, ...]:
        """Of all jobs, for metrics: as cheap for a job of thousands of tasks as for a small one."""

    def job(self, job_id: str) -> JobView: ...

    def checkpoints(self, job_id: str) -> CheckpointStatsView: ...

    def checkpoint(self, job_id: str, checkpoint_id: int) -> CheckpointView: ...

    def checkpoint_vertex(self, job_id: str, checkpoint_id: int, vertex: str) -> VertexCheckpointView: ...

    def checkpoint_config(self, job_id: str) -> CheckpointConfigView: ...

    def savepoint_places(self) -> SavepointPlaces:
        """Of every job that is led from here or on record here; of the newest 1,000 requests of each.

        Raises RecoveringError while any job is still to be led on."""

    def cluster(self) -> ClusterView: ...

    # -- life

    def wait(self, job_id: str, timeout_s: float | None = None) -> str:
        """Block until the job is in a terminal state (or SUSPENDED); the state, also when time ran out first."""

    def close(self) -> None:
        """Stop leading without ending any job: streams close, threads end, checkpoints stay. Idempotent."""
