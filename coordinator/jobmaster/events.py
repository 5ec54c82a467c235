"""What happens to the job master, in the past tense. Frozen records without behaviour.

A call from outside carries a ticket; exactly one Answer or Refuse (actions.py) bears the same ticket. The outcomes of the
checkpoint coordinator's storage actions are events here, too: the job master hands them on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from holdfast.barriers.messages import (
    AckBatch,
    CheckpointKind,
    Heartbeat,
    RegisterWorker,
    StatusBatch,
    SubtaskKey,
)
from holdfast.coordinator.checkpoints import events
from holdfast.coordinator.ha.records import ResultRecord
from holdfast.coordinator.jobmaster.releases import Release
from holdfast.statebackends.errors import HoldfastError
from holdfast.statebackends.handles import OperatorSubtaskState


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
    events.ClaimWritten
    | events.ClaimTaken
    | events.ClaimFailed
    | events.MetadataWritten
    | events.MetadataLost
    | events.MetadataAmbiguous
    | events.MetadataFailed
    | events.AbortWritten
    | events.AbortLost
    | events.AbortFailed
    | events.CheckpointDropped
    | events.DropFailed
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
    | events.DeadlineReached
    | StorageOutcome
)
