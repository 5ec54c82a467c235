"""What happens to the checkpoint coordinator (events, past tense) and what it wants done (actions, imperative).

Frozen records without behaviour. The job master or a test performs the actions and feeds their outcomes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from holdfast.barriers.messages import AckStatus, Answerable, CheckpointKind, FailureReason, SubtaskKey, TaskState
from holdfast.coordinator.ha.recorded_job import Decision
from holdfast.coordinator.ha.records import ClaimRecord
from holdfast.coordinator.totals import Totals
from holdfast.statebackends.handles import FileHandle, OperatorSubtaskState

# ------------------------------------------------------------------------------------------------------------- values


class CheckpointRequest(msgspec.Struct, frozen=True):
    """A wish for one checkpoint. Periodic ones come from the coordinator itself, all others from outside."""

    kind: CheckpointKind = CheckpointKind.CHECKPOINT
    trigger_id: str = ""
    periodic: bool = False
    folder: str | None = None
    """Absolute location of a savepoint's own folder; None for a checkpoint."""
    drain: bool = False
    native: bool = False
    """A savepoint in the state backend's own files."""

    @property
    def is_savepoint(self) -> bool:
        return self.kind.is_savepoint

    @property
    def ends_job(self) -> bool:
        return self.kind in (CheckpointKind.STOP_SAVEPOINT, CheckpointKind.FINAL)

    @property
    def is_forced(self) -> bool:
        """Not held back by the number of pending checkpoints."""
        return self.kind is not CheckpointKind.CHECKPOINT


class CompletedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint whose COMPLETED is stored."""

    checkpoint_id: int
    kind: CheckpointKind
    folder: str
    timestamp_ms: int
    size: int = 0
    """Bytes, full."""
    shared: tuple[FileHandle, ...] | None = ()
    """Files that it shares with other checkpoints, or may yet; None: its `_metadata` can't be read."""
    totals: Totals = {}
    """What the submission's operators had counted at its cut."""

    @property
    def is_savepoint(self) -> bool:
        return self.kind.is_savepoint


# ------------------------------------------------------------------------------------------------------------- events


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

# ------------------------------------------------------------------------------------------------------------ actions


class WriteClaim(msgspec.Struct, frozen=True):
    """Store `_claim`; outcome ClaimWritten, ClaimTaken or ClaimFailed. A savepoint's folder is probed before."""

    checkpoint_id: int
    request: CheckpointRequest
    folder: str
    attempt: int


class SendTriggers(msgspec.Struct, frozen=True):
    """Tell the sources; only after the claim is stored."""

    checkpoint_id: int
    attempt: int
    request: CheckpointRequest
    folder: str
    timestamp_ms: int
    base: int | None = None
    """The only checkpoint that an increment may build on; it stays until this id is decided."""


class WriteMetadata(msgspec.Struct, frozen=True):
    """Store COMPLETED; outcome MetadataWritten, MetadataLost, MetadataAmbiguous or MetadataFailed."""

    checkpoint_id: int
    kind: CheckpointKind
    attempt: int
    folder: str
    timestamp_ms: int
    states: Mapping[SubtaskKey, Mapping[str, OperatorSubtaskState]]
    """What each task acknowledged, placeholders resolved: operator uid -> state."""
    finished: tuple[SubtaskKey, ...] = ()
    """Tasks that had finished before the trigger."""
    native: bool = False
    totals: Totals = {}
    """What the submission's operators had counted at the cut."""


class WriteAborted(msgspec.Struct, frozen=True):
    """Store ABORTED; outcome AbortWritten, AbortLost or AbortFailed."""

    checkpoint_id: int
    reason: FailureReason
    message: str


class NotifyComplete(msgspec.Struct, frozen=True):
    checkpoint_id: int
    attempt: int
    timestamp_ms: int


class NotifyAborted(msgspec.Struct, frozen=True):
    checkpoint_id: int
    attempt: int
    newest_completed: int


class DiscardState(msgspec.Struct, frozen=True):
    """Delete an aborted id's state: everything of that id, or only these files of a late acknowledgement."""

    checkpoint_id: int
    folder: str
    files: tuple[str, ...] | None = None
    """Paths relative to `folder`; None: all."""


class DropCheckpoint(msgspec.Struct, frozen=True):
    """Delete a checkpoint that retention lets go; outcome CheckpointDropped or DropFailed. Nothing waits for it."""

    checkpoint_id: int
    folder: str
    """Empty for an aborted id: what it wrote for others to share was registered nowhere, and is deleted by its id."""
    shared: tuple[str, ...] = ()
    """Names of shared files to which nothing else refers."""
    after: tuple[int, ...] = ()
    """Ids that are being deleted, too, and refer to these files: their claims go before the files do."""


class FailJob(msgspec.Struct, frozen=True):
    """Too many checkpoints failed, or one that may not fail did: fail over."""

    checkpoint_id: int
    reason: FailureReason
    message: str


class CompleteRequest(msgspec.Struct, frozen=True):
    """A request from outside is answered, once."""

    request: CheckpointRequest
    checkpoint_id: int | None
    completed: CompletedCheckpoint | None = None
    failure: FailureReason | None = None
    message: str = ""
    tries: int = 1
    """Checkpoints that it took."""


class AnswerAcks(msgspec.Struct, frozen=True):
    ticket: int
    answers: tuple[AckStatus, ...]


class LoseLeadership(msgspec.Struct, frozen=True):
    """The storage says that another leader writes here: stop, change nothing more."""

    message: str
    epoch: int
    """Of the other leader, 0 if unknown."""


Action: TypeAlias = (
    WriteClaim
    | SendTriggers
    | WriteMetadata
    | WriteAborted
    | NotifyComplete
    | NotifyAborted
    | DiscardState
    | DropCheckpoint
    | FailJob
    | CompleteRequest
    | AnswerAcks
    | LoseLeadership
)
