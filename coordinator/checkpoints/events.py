"""Events of the checkpoint coordinator, in the past tense: frozen records without behaviour.

The job master, or a test, performs the coordinator's actions (actions.py) and reports their outcomes as events."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from holdfast.barriers.jobgraph import JobConfig
from holdfast.barriers.messages import Answerable, FailureReason, SubtaskKey, TaskState
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest
from holdfast.coordinator.ha.recorded_job import Decision
from holdfast.coordinator.ha.records import ClaimRecord
from holdfast.coordinator.totals import Totals
from holdfast.statebackends.snapshot.metadata import HookState


class AttemptStarted(msgspec.Struct, frozen=True):
    """A new attempt was deployed. Its tasks acknowledge checkpoints from now on; no task runs yet."""

    attempt: int
    tasks: frozenset[SubtaskKey]
    base: Totals = {}
    """Counts of the submission's operators at the cut that the attempt begins with."""
    finishing: bool = False
    """The job's last checkpoint is complete: the tasks only commit and finish, and no checkpoint is triggered any more."""


class TaskStatesChanged(msgspec.Struct, frozen=True):
    attempt: int
    states: tuple[tuple[SubtaskKey, TaskState], ...]
    backlog: bool = False
    """A source processes a backlog."""


class SchedulerStarted(msgspec.Struct, frozen=True):
    """Periodic checkpoints begin, if the job has an interval."""


class SchedulerStopped(msgspec.Struct, frozen=True):
    """Periodic checkpoints end; pending checkpoints are aborted as SUSPENDED."""


class CheckpointRequested(msgspec.Struct, frozen=True):
    request: CheckpointRequest


class ClaimWritten(msgspec.Struct, frozen=True):
    checkpoint_id: int


class ClaimTaken(msgspec.Struct, frozen=True):
    """Another leader's claim exists under the id."""

    checkpoint_id: int
    existing: ClaimRecord


class ClaimFailed(msgspec.Struct, frozen=True):
    checkpoint_id: int
    message: str
    ambiguous: bool
    """The claim may exist all the same: the id counts as taken."""


class HookAnswered(msgspec.Struct, frozen=True):
    """A master hook has taken part in a checkpoint. An answer that comes when none is awaited changes nothing."""

    checkpoint_id: int
    name: str
    state: HookState | None
    """None: it has none."""


class HookFailed(msgspec.Struct, frozen=True):
    """A master hook can't take part: it raised, died, or gave no answer in time."""

    checkpoint_id: int
    name: str
    message: str
    timed_out: bool = False
    """It gave no answer in time."""


class AcksReceived(msgspec.Struct, frozen=True):
    """Acknowledgements and declines in the order of arrival; one AnswerAcks answers them all."""

    items: tuple[Answerable, ...]
    slot: int
    """Slot of the worker that sent them: subtask i of every vertex runs in slot i."""
    ticket: int = 0


class MetadataWritten(msgspec.Struct, frozen=True):
    checkpoint_id: int


class MetadataLost(msgspec.Struct, frozen=True):
    """The id was decided before, by another write."""

    checkpoint_id: int
    existing: Decision


class MetadataAmbiguous(msgspec.Struct, frozen=True):
    """COMPLETED may or may not be stored."""

    checkpoint_id: int
    message: str


class MetadataFailed(msgspec.Struct, frozen=True):
    """COMPLETED is certainly not stored."""

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
    """ABORTED is not stored, or may not be: the write is repeated."""

    checkpoint_id: int
    message: str


class CheckpointDropped(msgspec.Struct, frozen=True):
    checkpoint_id: int


class CheckpointKept(msgspec.Struct, frozen=True):
    """Nothing of it was deleted: it has a label."""

    checkpoint_id: int


class LabelsChanged(msgspec.Struct, frozen=True):
    """A user changed labels of a checkpoint; what the register beside it says counts when it is deleted."""

    checkpoint_id: int
    labelled: bool


class DropFailed(msgspec.Struct, frozen=True):
    checkpoint_id: int
    message: str


class JobFailing(msgspec.Struct, frozen=True):
    """The attempt is fenced. Pending checkpoints are aborted; `CheckpointCoordinator.is_quiet` tells when all are decided."""

    message: str = ""


class ShutDown(msgspec.Struct, frozen=True):
    """The job ends: no checkpoint is triggered any more, and pending ones are aborted."""

    reason: FailureReason = FailureReason.COORDINATOR_SHUTDOWN


class JobTerminated(msgspec.Struct, frozen=True):
    """The terminal record is stored; retention decides which checkpoints stay."""

    state: str
    """FINISHED, CANCELED or FAILED."""


class SettingsChanged(msgspec.Struct, frozen=True):
    """Settings that hold from now on: for what is triggered next, not for what is pending."""

    config: JobConfig


class DeadlineReached(msgspec.Struct, frozen=True):
    """The time of `CheckpointCoordinator.next_deadline_ms` has come."""


Event: TypeAlias = (
    AttemptStarted
    | TaskStatesChanged
    | SchedulerStarted
    | SchedulerStopped
    | CheckpointRequested
    | ClaimWritten
    | ClaimTaken
    | ClaimFailed
    | HookAnswered
    | HookFailed
    | AcksReceived
    | MetadataWritten
    | MetadataLost
    | MetadataAmbiguous
    | MetadataFailed
    | AbortWritten
    | AbortLost
    | AbortFailed
    | CheckpointDropped
    | CheckpointKept
    | LabelsChanged
    | DropFailed
    | JobFailing
    | ShutDown
    | JobTerminated
    | SettingsChanged
    | DeadlineReached
)
