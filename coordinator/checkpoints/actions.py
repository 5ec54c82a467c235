"""What the checkpoint coordinator wants done, in the imperative. Frozen records without behaviour.

The actions of one event are performed in their order, which is part of the contract. The outcome of an action on storage comes
back as an event (events.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from holdfast.barriers.messages import AckStatus, CheckpointKind, FailureReason, SubtaskKey
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest, CompletedCheckpoint
from holdfast.coordinator.totals import Totals
from holdfast.statebackends.handles import OperatorSubtaskState


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
