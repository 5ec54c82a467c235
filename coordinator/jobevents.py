"""What happens to the job master (events) and what it wants done (actions). Frozen records without behaviour.

Calls from outside carry a ticket; each is answered by exactly one Answer or Refuse with that ticket. Outcomes of storage
actions of the checkpoint coordinator (coordinator.events) are events here too, and are passed on to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from barriers.jobgraph import JobGraph
from barriers.messages import (
    AckBatch,
    CheckpointKind,
    Heartbeat,
    NumberedCommand,
    RegisterWorker,
    StatusBatch,
    SubtaskKey,
    SubtaskMetrics,
)
from coordinator import events as on
from coordinator.events import CompletedCheckpoint
from coordinator.records import RestorePoint, ResultRecord
from coordinator.releasing import Release as Release
from coordinator.views import TriggerView
from statebackends.errors import HoldfastError
from statebackends.handles import OperatorSubtaskState


class JobState(StrEnum):
    CREATED = "CREATED"
    """Waiting for its workers."""
    RUNNING = "RUNNING"
    RESTARTING = "RESTARTING"
    """The attempt is fenced; the next one is deployed when every slot is held by a live process."""
    RECONCILING = "RECONCILING"
    """This leader is new; workers run on and come back to it."""
    FAILING = "FAILING"
    FAILED = "FAILED"
    CANCELLING = "CANCELLING"
    CANCELED = "CANCELED"
    FINISHED = "FINISHED"
    SUSPENDED = "SUSPENDED"
    """Not led from here any more; the job itself has not ended."""

    @property
    def is_terminal(self) -> bool:
        return self in (JobState.FAILED, JobState.CANCELED, JobState.FINISHED)


@dataclass(frozen=True, slots=True)
class JobSetup:
    """Everything a job master starts from; derived from the job's directory, never from an older master's memory."""

    job_id: str
    epoch: int
    submission: int
    graph: JobGraph
    directory_nonce: str
    base: RestorePoint | None = None
    """Where the submission starts while it has no completed checkpoint of its own."""
    first_checkpoint_id: int = 1
    """Ids from here on are of this submission."""
    next_checkpoint_id: int = 1
    attempt: int = 0
    """Highest attempt on record, 0 for none."""
    restarts: int = 0
    completed: tuple[CompletedCheckpoint, ...] = ()
    aborted: tuple[int, ...] = ()
    reconcile: bool = False
    """Workers may be running `attempt`: wait for them instead of deploying anew."""
    fail_over: bool = False
    """The attempt on record must not run on: a stop-with-savepoint was cut off."""
    finishing: int = 0
    """Id of the completed checkpoint that ends the submission; its tasks only commit and finish."""
    triggers: tuple[TriggerView, ...] = ()
    started_ms: int = 0
    """When the submission was made, wall clock."""
    notes: tuple[str, ...] = ()
    """What its restore accepted: see SubmissionAccepted."""
    subsumed: tuple[RestorePoint, ...] = ()
    """Snapshots that this job claimed and that nothing needs any more."""


# ------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class JobStarted:
    """The first event."""


@dataclass(frozen=True, slots=True)
class RegistrationReceived:
    ticket: int
    message: RegisterWorker


@dataclass(frozen=True, slots=True)
class AckBatchReceived:
    ticket: int
    batch: AckBatch


@dataclass(frozen=True, slots=True)
class StatesReceived:
    ticket: int
    batch: StatusBatch


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    ticket: int
    message: Heartbeat


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """Answered with the commands that wait behind `after`; later ones come by Deliver."""

    ticket: int
    slot: int
    session: str
    after: int


@dataclass(frozen=True, slots=True)
class StreamClosed:
    slot: int
    session: str
    stream: int
    """Ticket that the stream was opened with: one that was replaced in the same session closes late, and closes nothing."""


@dataclass(frozen=True, slots=True)
class SnapshotRequested:
    """A user asks for a checkpoint, a savepoint or a stop; answered with the trigger id."""

    ticket: int
    kind: CheckpointKind
    trigger_id: str
    target: str | None = None
    """Directory or URL that the savepoint's folder is made in."""
    drain: bool = False
    cancel: bool = False
    native: bool = False


@dataclass(frozen=True, slots=True)
class CancelRequested:
    ticket: int


@dataclass(frozen=True, slots=True)
class SuspendRequested:
    """Another submission takes over; answered once every id is decided."""

    ticket: int
    reason: str


@dataclass(frozen=True, slots=True)
class LeadershipEnded:
    """The process stops, or was fenced: nothing is written any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class AttemptPrepared:
    """The attempt's record is stored, its snapshot was verified and dealt out."""

    attempt: int
    states: Mapping[SubtaskKey, Mapping[str, OperatorSubtaskState]]


@dataclass(frozen=True, slots=True)
class AttemptTaken:
    """The number is on record already, of an older leader: take the next one."""

    attempt: int


@dataclass(frozen=True, slots=True)
class AttemptDelayed:
    """Storage failed in a way that may pass."""

    attempt: int
    message: str


@dataclass(frozen=True, slots=True)
class AttemptImpossible:
    """The snapshot is damaged or does not fit: no further try helps."""

    attempt: int
    error: HoldfastError


@dataclass(frozen=True, slots=True)
class ResultWritten:
    standing: ResultRecord
    """What stands: ours, or that of another leader, which is then obeyed."""


@dataclass(frozen=True, slots=True)
class ResultFailed:
    message: str


StorageOutcome: TypeAlias = (
    on.ClaimWritten
    | on.ClaimTaken
    | on.ClaimFailed
    | on.MetadataWritten
    | on.MetadataLost
    | on.MetadataAmbiguous
    | on.MetadataFailed
    | on.AbortWritten
    | on.AbortLost
    | on.AbortFailed
    | on.CheckpointDropped
    | on.DropFailed
)

@dataclass(frozen=True, slots=True)
class ReleaseEnded:
    """The deletion of a claimed snapshot ended; `failure` is empty if it is gone."""

    release: Release
    failure: str = ""


Event: TypeAlias = (
    JobStarted
    | RegistrationReceived
    | AckBatchReceived
    | StatesReceived
    | HeartbeatReceived
    | StreamOpened
    | StreamClosed
    | SnapshotRequested
    | CancelRequested
    | SuspendRequested
    | LeadershipEnded
    | AttemptPrepared
    | AttemptTaken
    | AttemptDelayed
    | AttemptImpossible
    | ResultWritten
    | ResultFailed
    | ReleaseEnded
    | on.DeadlineReached
    | StorageOutcome
)

# ------------------------------------------------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True)
class PrepareAttempt:
    """Store the attempt's record, read and verify the snapshot, deal its state out.

    Outcome AttemptPrepared, AttemptTaken, AttemptDelayed, AttemptImpossible or LeadershipEnded."""

    attempt: int
    restore: RestorePoint | None
    restarts: int


@dataclass(frozen=True, slots=True)
class WriteResult:
    """Store the terminal record; outcome ResultWritten, ResultFailed or LeadershipEnded."""

    state: JobState
    cause: str
    last_checkpoint_id: int
    newest_completed: int
    metrics: tuple[SubtaskMetrics, ...] = ()


@dataclass(frozen=True, slots=True)
class Deliver:
    """Commands for the open stream of a session."""

    slot: int
    session: str
    commands: tuple[NumberedCommand, ...]


@dataclass(frozen=True, slots=True)
class CloseStream:
    slot: int
    session: str


@dataclass(frozen=True, slots=True)
class Answer:
    ticket: int
    value: Any


@dataclass(frozen=True, slots=True)
class Refuse:
    ticket: int
    error: HoldfastError


@dataclass(frozen=True, slots=True)
class JobEnded:
    """A terminal state, or SUSPENDED, was reached."""

    state: JobState
    reason: str


LATER = object()
"""What a handler returns when it has answered, or will answer, by itself."""

Handler: TypeAlias = Callable[[], Any]
"""One call from outside; its value, or its HoldfastError, is the answer."""

Action: TypeAlias = (
    on.WriteClaim
    | on.WriteMetadata
    | on.WriteAborted
    | on.DiscardState
    | on.DropCheckpoint
    | PrepareAttempt
    | WriteResult
    | Release
    | Deliver
    | CloseStream
    | Answer
    | Refuse
    | JobEnded
)
