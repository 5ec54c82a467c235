"""Actions of the checkpoint coordinator, in the imperative: frozen records without behaviour.

The job master performs the actions of one event in their order, which is part of the contract. The outcome of an action on storage
comes back as an event (events.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from holdfast.barriers.messages import AckStatus, CheckpointKind, FailureReason, SubtaskKey
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest, CompletedCheckpoint
from holdfast.coordinator.totals import Totals
from holdfast.statebackends.handles import ChannelState, OperatorSubtaskState
from holdfast.statebackends.snapshot.metadata import HookState


class WriteClaim(msgspec.Struct, frozen=True):
    """Store `_claim`; outcome ClaimWritten, ClaimTaken or ClaimFailed. A savepoint's folder is probed first: it must take files."""

    checkpoint_id: int
    request: CheckpointRequest
    folder: str
    attempt: int
    erased_below: int = 0
    """Checkpoints below this id may hold a key that a completed one erased; 0: none has."""


class TriggerHook(msgspec.Struct, frozen=True):
    """Have a master hook take part in a checkpoint, before any task is triggered; outcome HookAnswered or HookFailed."""

    checkpoint_id: int
    name: str
    timestamp_ms: int
    timeout_ms: int
    """Its process is killed behind this time."""


class SendTriggers(msgspec.Struct, frozen=True):
    """Send the trigger to the sources. The claim is stored."""

    checkpoint_id: int
    attempt: int
    request: CheckpointRequest
    folder: str
    timestamp_ms: int
    base: int | None = None
    """The only checkpoint that an increment may build on; it stays until this id is decided."""
    unaligned: bool = False
    """Its barriers may overtake."""
    aligned_timeout_ms: int | None = None
    """As of TriggerCheckpoint."""


class WriteMetadata(msgspec.Struct, frozen=True):
    """Store COMPLETED; outcome MetadataWritten, MetadataLost, MetadataAmbiguous or MetadataFailed."""

    checkpoint_id: int
    kind: CheckpointKind
    attempt: int
    folder: str
    timestamp_ms: int
    states: Mapping[SubtaskKey, Mapping[str, OperatorSubtaskState]]
    """Acknowledged state by task and operator uid, with the base's files in place of placeholders."""
    finished: tuple[SubtaskKey, ...] = ()
    """Tasks that had come to the end of their input at the cut."""
    native: bool = False
    totals: Totals = {}
    """Counts of the submission's operators at the cut."""
    channels: tuple[ChannelState, ...] = ()
    """In-flight data of its tasks."""
    hooks: tuple[HookState, ...] = ()
    """States of master hooks, by name."""


class WriteAborted(msgspec.Struct, frozen=True):
    """Store ABORTED; outcome AbortWritten, AbortLost or AbortFailed."""

    checkpoint_id: int
    reason: FailureReason
    message: str


class NotifyComplete(msgspec.Struct, frozen=True):
    checkpoint_id: int
    attempt: int
    timestamp_ms: int
    finished: tuple[SubtaskKey, ...] = ()
    """As of WriteMetadata: what they emitted at their end is committed."""


class NotifyAborted(msgspec.Struct, frozen=True):
    checkpoint_id: int
    attempt: int
    newest_completed: int


class DiscardState(msgspec.Struct, frozen=True):
    """Delete state of an aborted id: all of it, or only the files of a late acknowledgement."""

    checkpoint_id: int
    folder: str
    files: tuple[str, ...] | None = None
    """Paths relative to `folder`; None: all."""


class DropCheckpoint(msgspec.Struct, frozen=True):
    """Delete a checkpoint that is no longer retained; outcome CheckpointDropped or DropFailed. Nothing waits for it."""

    checkpoint_id: int
    folder: str
    """Empty for an aborted id: its shared files are in no registry, and are found by the id in their names."""
    shared: tuple[str, ...] = ()
    """Names of shared files that only `checkpoint_id` and `after` refer to."""
    after: tuple[int, ...] = ()
    """Further ids that are being deleted: their claims are deleted before the shared files."""


class FailJob(msgspec.Struct, frozen=True):
    """Fail over: more checkpoints failed in a row than are tolerated, or a stop-with-savepoint did."""

    checkpoint_id: int
    reason: FailureReason
    message: str


class CompleteRequest(msgspec.Struct, frozen=True):
    """Answer a request that is not periodic; exactly one answer a request."""

    request: CheckpointRequest
    checkpoint_id: int | None
    completed: CompletedCheckpoint | None = None
    failure: FailureReason | None = None
    message: str = ""
    tries: int = 1
    """Checkpoints that were begun for it."""


class AnswerAcks(msgspec.Struct, frozen=True):
    ticket: int
    answers: tuple[AckStatus, ...]


class LoseLeadership(msgspec.Struct, frozen=True):
    """Stop and change nothing more: a record of another leader was found."""

    message: str
    epoch: int
    """Epoch of the other leader, 0 if unknown."""


Action: TypeAlias = (
    WriteClaim
    | TriggerHook
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
