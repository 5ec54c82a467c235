"""What happens to the checkpoint coordinator, in the past tense. Frozen records without behaviour.

The job master, or a test, performs the coordinator's actions (actions.py) and hands their outcomes in as events."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from holdfast.barriers.messages import Answerable, FailureReason, SubtaskKey, TaskState
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest
from holdfast.coordinator.ha.recorded_job import Decision
from holdfast.coordinator.ha.records import ClaimRecord
from holdfast.coordinator.totals import Totals


class AttemptStarted(msgspec.Struct, frozen=True):
    """A new attempt was deployed: these tasks must acknowledge; none of them runs yet."""

    attempt: int
    tasks: frozenset[SubtaskKey]
    base: Totals = {}
    """What the submission's operators had counted at the cut that it begins with."""
    finishing: bool = False
    """The job's last checkpoint is complete: these tasks only commit and finish, nothing is triggered any more."""


class TaskStatesChanged(msgspec.Struct, frozen=True):
    attempt: int
    states: tuple[tuple[SubtaskKey, TaskState], ...]


class SchedulerStarted(msgspec.Struct, frozen=True):
    """Periodic checkpoints begin, if the job has an interval."""


class SchedulerStopped(msgspec.Struct, frozen=True):
    """Periodic checkpoints end; what is pending is aborted as suspended."""


class CheckpointRequested(msgspec.Struct, frozen=True):
    request: CheckpointRequest


class ClaimWritten(msgspec.Struct, frozen=True):
    checkpoint_id: int


class ClaimTaken(msgspec.Struct, frozen=True):
    """Somebody else's claim stands under the id."""

    checkpoint_id: int
    existing: ClaimRecord


class ClaimFailed(msgspec.Struct, frozen=True):
    checkpoint_id: int
    message: str
    ambiguous: bool
    """The claim may stand all the same: the id counts as taken."""


class AcksReceived(msgspec.Struct, frozen=True):
    """Acknowledgements and declines in the order of arrival; answered by one AnswerAcks."""

    items: tuple[Answerable, ...]
    slot: int
    """Whose worker sends them: subtask i of every vertex runs in slot i."""
    ticket: int = 0


class MetadataWritten(msgspec.Struct, frozen=True):
    checkpoint_id: int


class MetadataLost(msgspec.Struct, frozen=True):
    """The id was decided already, and not by this write."""

    checkpoint_id: int
    existing: Decision


class MetadataAmbiguous(msgspec.Struct, frozen=True):
    """Nobody can tell whether COMPLETED stands."""

    checkpoint_id: int
    message: str


class MetadataFailed(msgspec.Struct, frozen=True):
    """COMPLETED was surely not written."""

    checkpoint_id: int
    reason: FailureReason
    """IO_EXCEPTION or FINALIZE_FAILURE."""
    message: str


class AbortWritten(msgspec.Struct, frozen=True):
    checkpoint_id: int


class AbortLost(msgspec.Struct, frozen=True):
    checkpoint_id: int
    existing: Decision


class AbortFailed(msgspec.Struct, frozen=True):
    """ABORTED could not be written, or nobody can tell: it is tried again."""

    checkpoint_id: int
    message: str


class CheckpointDropped(msgspec.Struct, frozen=True):
    checkpoint_id: int


class DropFailed(msgspec.Struct, frozen=True):
    checkpoint_id: int
    message: str


class JobFailing(msgspec.Struct, frozen=True):
    """The attempt is fenced. What is pending is aborted; `is_quiet` says when all of it is decided."""

    message: str = ""


class ShutDown(msgspec.Struct, frozen=True):
    """The job ends: nothing is triggered any more; what is pending is aborted."""

    reason: FailureReason = FailureReason.COORDINATOR_SHUTDOWN


class JobTerminated(msgspec.Struct, frozen=True):
    """The terminal record is stored: retention decides what stays."""

    state: str
    """FINISHED, CANCELED or FAILED."""


class DeadlineReached(msgspec.Struct, frozen=True):
    """Time passed."""


Event: TypeAlias = (
    AttemptStarted
    | TaskStatesChanged
    | SchedulerStarted
    | SchedulerStopped
    | CheckpointRequested
    | ClaimWritten
    | ClaimTaken
    | ClaimFailed
    | AcksReceived
    | MetadataWritten
    | MetadataLost
    | MetadataAmbiguous
    | MetadataFailed
    | AbortWritten
    | AbortLost
    | AbortFailed
    | CheckpointDropped
    | DropFailed
    | JobFailing
    | ShutDown
    | JobTerminated
    | DeadlineReached
)
