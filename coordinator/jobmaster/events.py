"""What happens to the job master (events) and what it wants done (actions). Frozen records without behaviour.

Calls from outside carry a ticket; each is answered by exactly one Answer or Refuse with that ticket. Outcomes of storage
actions of the checkpoint coordinator (holdfast.coordinator.checkpoints.events) are events here too, and are passed on to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.messages import (
    AckBatch,
    CheckpointKind,
    Heartbeat,
    NumberedCommand,
    RegisterWorker,
    StatusBatch,
    SubtaskKey,
    SubtaskMetrics,
)
from holdfast.coordinator.checkpoints import events as on
from holdfast.coordinator.checkpoints.events import CompletedCheckpoint
from holdfast.coordinator.ha.records import RestorePoint, ResultRecord
from holdfast.coordinator.jobmaster.releases import Release as Release
from holdfast.coordinator.jobmaster.stopping import StopIntent
from holdfast.coordinator.totals import Totals
from holdfast.coordinator.views import TriggerView
from holdfast.statebackends.errors import HoldfastError
from holdfast.statebackends.handles import OperatorSubtaskState


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


_ENDS = frozenset({JobState.FINISHED, JobState.CANCELED, JobState.FAILED})
_INTERRUPTIONS = frozenset({JobState.FAILING, JobState.CANCELLING, JobState.SUSPENDED})

TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.CREATED: _INTERRUPTIONS | {JobState.RUNNING, JobState.RECONCILING},
    JobState.RUNNING: _INTERRUPTIONS | _ENDS | {JobState.RESTARTING},
    JobState.RESTARTING: _INTERRUPTIONS | {JobState.RUNNING},
    JobState.RECONCILING: _INTERRUPTIONS | {JobState.RUNNING, JobState.RESTARTING},
    JobState.FAILING: _ENDS | {JobState.SUSPENDED},
    JobState.FAILED: frozenset(),
    JobState.CANCELLING: _ENDS | {JobState.SUSPENDED},
    JobState.CANCELED: frozenset(),
    JobState.FINISHED: frozenset(),
    JobState.SUSPENDED: frozenset(),
}
"""State -> what may follow; any other step is an InvariantError.

The terminal state is that of the stored record, which another leader may have written: a job that is FAILING here may have been
CANCELED there."""


class JobSetup(msgspec.Struct, frozen=True):
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
    begins: bool = False
    """The submission was made under this epoch: no leader led it before."""
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
    launch_key: str = ""
    """Of the submission's launcher: see barriers/launches.py."""
    stops: tuple[StopIntent, ...] = ()
    """Stops with a savepoint that were cut off, and that are to be tried again."""
    totals: Totals = {}
    """What the submission's operators had counted at the cut that `attempt` began with."""


# ------------------------------------------------------------------------------------------------------------- events


class JobStarted(msgspec.Struct, frozen=True):
    """The first event."""


class RegistrationReceived(msgspec.Struct, frozen=True):
    ticket: int
    message: RegisterWorker


class AckBatchReceived(msgspec.Struct, frozen=True):
    ticket: int
    batch: AckBatch


class StatesReceived(msgspec.Struct, frozen=True):
    ticket: int
    batch: StatusBatch


class HeartbeatReceived(msgspec.Struct, frozen=True):
    ticket: int
    message: Heartbeat


class StreamOpened(msgspec.Struct, frozen=True):
    """Answered with the commands that wait behind `after`; later ones come by Deliver."""

    ticket: int
    slot: int
    session: str
    after: int


class StreamClosed(msgspec.Struct, frozen=True):
    slot: int
    session: str
    stream: int
    """Ticket that the stream was opened with: one that was replaced in the same session closes late, and closes nothing."""


class SnapshotRequested(msgspec.Struct, frozen=True):
    """A user asks for a checkpoint, a savepoint or a stop; answered with the trigger id."""

    ticket: int
    kind: CheckpointKind
    trigger_id: str
    target: str | None = None
    """Directory or URL that the savepoint's folder is made in."""
    drain: bool = False
    cancel: bool = False
    native: bool = False


class CancelRequested(msgspec.Struct, frozen=True):
    ticket: int


class SuspendRequested(msgspec.Struct, frozen=True):
    """Another submission takes over; answered once every id is decided."""

    ticket: int
    reason: str


class LeadershipEnded(msgspec.Struct, frozen=True):
    """The process stops, or was fenced: nothing is written any more."""

    reason: str


class AttemptPrepared(msgspec.Struct, frozen=True):
    """The attempt's record is stored, its snapshot was verified and dealt out."""

    attempt: int
    states: Mapping[SubtaskKey, Mapping[str, OperatorSubtaskState]]


class AttemptTaken(msgspec.Struct, frozen=True):
    """The number is on record already, of an older leader: take the next one."""

    attempt: int


class AttemptDelayed(msgspec.Struct, frozen=True):
    """Storage failed in a way that may pass."""

    attempt: int
    message: str


class AttemptImpossible(msgspec.Struct, frozen=True):
    """The snapshot is damaged or does not fit: no further try helps."""

    attempt: int
    error: HoldfastError


class ResultWritten(msgspec.Struct, frozen=True):
    existing: ResultRecord
    """What stands: ours, or that of another leader, which is then obeyed."""


class ResultFailed(msgspec.Struct, frozen=True):
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


class ReleaseEnded(msgspec.Struct, frozen=True):
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


class PrepareAttempt(msgspec.Struct, frozen=True):
    """Store the attempt's record, read and verify the snapshot, deal its state out.

    Outcome AttemptPrepared, AttemptTaken, AttemptDelayed, AttemptImpossible or LeadershipEnded."""

    attempt: int
    restore: RestorePoint | None
    restarts: int
    totals: Totals = {}
    """What the submission's operators had counted there."""


class WriteResult(msgspec.Struct, frozen=True):
    """Store the terminal record; outcome ResultWritten, ResultFailed or LeadershipEnded."""

    state: JobState
    cause: str
    last_checkpoint_id: int
    newest_completed: int
    metrics: tuple[SubtaskMetrics, ...] = ()
    totals: Totals = {}


class Deliver(msgspec.Struct, frozen=True):
    """Commands for the open stream of a session."""

    slot: int
    session: str
    commands: tuple[NumberedCommand, ...]


class CloseStream(msgspec.Struct, frozen=True):
    slot: int
    session: str


class Answer(msgspec.Struct, frozen=True):
    ticket: int
    value: Any


class Refuse(msgspec.Struct, frozen=True):
    ticket: int
    error: HoldfastError


class JobEnded(msgspec.Struct, frozen=True):
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
