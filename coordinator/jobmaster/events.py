"""Events of the job master, in the past tense: frozen records without behaviour.

A call from outside carries a ticket; exactly one Answer or Refuse (actions.py) has the same ticket. The outcomes of the
checkpoint coordinator's storage actions are events here, too: the job master passes them on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from holdfast.barriers.erasure import Erasure
from holdfast.barriers.messages import (
    AckBatch,
    CheckpointKind,
    Heartbeat,
    InFlightRestore,
    QuestionKind,
    RegisterWorker,
    StandBy,
    StatusBatch,
    SubtaskKey,
    WorkerAnswer,
)
from holdfast.barriers.tunable import AS_CONFIGURED, CheckpointMode, SettingValue
from holdfast.coordinator.checkpoints import events
from holdfast.coordinator.drills.records import DrillView
from holdfast.coordinator.ha.records import ResultRecord
from holdfast.coordinator.jobmaster.releases import Release
from holdfast.statebackends.errors import HoldfastError
from holdfast.statebackends.handles import OperatorSubtaskState
from holdfast.statebackends.snapshot.metadata import HookState


class JobStarted(msgspec.Struct, frozen=True):
    """The first event."""


class RegistrationReceived(msgspec.Struct, frozen=True):
    ticket: int
    message: RegisterWorker
    is_near: bool = False
    """The coordinator sees the process: it runs on the same host, in the same namespace."""


class StandbyReceived(msgspec.Struct, frozen=True):
    """A worker waits for a slot; answered with a StandbyOrder, which may take a while."""

    ticket: int
    message: StandBy


class ProcessEnded(msgspec.Struct, frozen=True):
    """Outcome of LookForProcess: the process of the session was seen from here, or from a worker that stands by, and has ended."""

    slot: int
    session: str


class AckBatchReceived(msgspec.Struct, frozen=True):
    ticket: int
    batch: AckBatch


class StatesReceived(msgspec.Struct, frozen=True):
    ticket: int
    batch: StatusBatch


class HeartbeatReceived(msgspec.Struct, frozen=True):
    ticket: int
    message: Heartbeat


class QuestionAsked(msgspec.Struct, frozen=True):
    """Somebody asks a worker about itself; answered with its WorkerAnswer."""

    ticket: int
    slot: int
    kind: QuestionKind
    samples: int = 1
    interval_ms: int = 0
    """Of stacks, as in WorkerQuestion."""


class AnswerReceived(msgspec.Struct, frozen=True):
    """A worker answers a question."""

    ticket: int
    answer: WorkerAnswer


class StreamOpened(msgspec.Struct, frozen=True):
    """A worker opened its command stream. The answer has the commands after number `after`; later ones follow by Deliver."""

    ticket: int
    slot: int
    session: str
    after: int


class StreamClosed(msgspec.Struct, frozen=True):
    slot: int
    session: str
    stream: int
    """Ticket that opened the stream: a stream that was replaced in the same session closes late, which changes nothing."""


class SnapshotRequested(msgspec.Struct, frozen=True):
    """A user requested a checkpoint, a savepoint or a stop; answered with the trigger id."""

    ticket: int
    kind: CheckpointKind
    trigger_id: str
    target: str | None = None
    """Directory or URL in which the savepoint's folder is made."""
    drain: bool = False
    cancel: bool = False
    native: bool = False
    mode: CheckpointMode = AS_CONFIGURED
    """Of a checkpoint."""
    erasure: Erasure | None = None
    """Of a checkpoint: a key that leaves keyed state at its cut."""


class SettingsRequested(msgspec.Struct, frozen=True):
    """A user changes settings of the running job; answered with the JobConfig that holds, once the change is stored."""

    ticket: int
    settings: Mapping[str, SettingValue]
    """Name of a setting -> its new value; not checked yet."""


class LabelNoted(msgspec.Struct, frozen=True):
    """A user gave a snapshot of the job a label, or removed one: it is stored."""

    checkpoint_id: int
    label: str
    removed: bool
    labelled: bool
    """Whether the snapshot has a label now."""


class DrillNoted(msgspec.Struct, frozen=True):
    """A drill of a snapshot of the job has ended."""

    drill: DrillView


class CancelRequested(msgspec.Struct, frozen=True):
    ticket: int


class DriverLeft(msgspec.Struct, frozen=True):
    """The driver of a submission takes its workers away; answered at once."""

    ticket: int
    submission: int


class SuspendRequested(msgspec.Struct, frozen=True):
    """Another submission takes over; answered once every checkpoint id is decided."""

    ticket: int
    reason: str


class LeadershipEnded(msgspec.Struct, frozen=True):
    """The process stops, or was fenced: the job master writes nothing more."""

    reason: str


class AttemptPrepared(msgspec.Struct, frozen=True):
    """The attempt's record is stored, its snapshot verified and its state assigned to subtasks."""

    attempt: int
    states: Mapping[SubtaskKey, Mapping[str, OperatorSubtaskState]]
    finished: frozenset[str] = frozenset()
    """Vertices that begin as finished."""
    in_flight: Mapping[SubtaskKey, InFlightRestore] = {}
    """Of those subtasks that restore records in flight."""
    hooks: tuple[HookState, ...] = ()
    """States of master hooks in its snapshot."""


class HookRestored(msgspec.Struct, frozen=True):
    """A master hook is back at the checkpoint that the attempt starts from."""

    attempt: int
    try_number: int
    """As RestoreHook has it: an outcome of another try tells nothing of this one."""
    name: str


class HookNotRestored(msgspec.Struct, frozen=True):
    attempt: int
    try_number: int
    name: str
    message: str
    error: HoldfastError | None = None
    """Why no try can succeed; None: another one may."""


class AttemptTaken(msgspec.Struct, frozen=True):
    """An older leader has recorded the number: the next one is taken."""

    attempt: int
    restarts: int = 0
    """Failovers of the same submission that the record counts."""


class AttemptDelayed(msgspec.Struct, frozen=True):
    """Storage failed; a retry may succeed."""

    attempt: int
    message: str


class AttemptImpossible(msgspec.Struct, frozen=True):
    """The snapshot is damaged or does not fit: a retry can't succeed."""

    attempt: int
    error: HoldfastError


class ResultWritten(msgspec.Struct, frozen=True):
    existing: ResultRecord
    """The stored record: ours, or another leader's, which then holds."""


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
    | events.CheckpointKept
    | events.DropFailed
)
CheckpointOutcome: TypeAlias = StorageOutcome | events.HookAnswered | events.HookFailed
"""Of an action of the checkpoint coordinator, for which it is."""


class ConfigWritten(msgspec.Struct, frozen=True):
    """The changed settings are stored under their number."""

    number: int


class ConfigTaken(msgspec.Struct, frozen=True):
    """The number has a record of an older leader."""

    number: int


class ConfigFailed(msgspec.Struct, frozen=True):
    """Storage failed; `ambiguous`: the record may be stored, or may yet be."""

    number: int
    message: str
    ambiguous: bool


class ReleaseEnded(msgspec.Struct, frozen=True):
    """The deletion of a claimed snapshot ended; `failure` is empty if it succeeded."""

    release: Release
    failure: str = ""


Call: TypeAlias = (
    AckBatchReceived
    | RegistrationReceived
    | StandbyReceived
    | StatesReceived
    | HeartbeatReceived
    | QuestionAsked
    | AnswerReceived
    | StreamOpened
    | SnapshotRequested
    | SettingsRequested
    | CancelRequested
    | DriverLeft
)
"""What is answered with its ticket."""

LifecycleEvent: TypeAlias = (
    JobStarted
    | LeadershipEnded
    | AttemptPrepared
    | AttemptTaken
    | AttemptDelayed
    | AttemptImpossible
    | HookRestored
    | HookNotRestored
    | ResultWritten
    | ResultFailed
)
"""Of the submission and its attempts."""

Noted: TypeAlias = (
    ProcessEnded
    | StreamClosed
    | LabelNoted
    | DrillNoted
    | ConfigWritten
    | ConfigTaken
    | ConfigFailed
    | SuspendRequested
    | ReleaseEnded
    | events.DeadlineReached
)
"""Happened around the job, and nobody waits for an answer; a suspension answers its ticket when it is done."""

Event: TypeAlias = Call | LifecycleEvent | CheckpointOutcome | Noted
