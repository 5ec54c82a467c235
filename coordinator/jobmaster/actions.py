"""Actions of the job master, in the imperative: frozen records without behaviour.

The checkpoint coordinator's actions on storage are actions here, too. The outcome of an action comes back as an event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from holdfast.barriers.messages import (
    NumberedCommand,
    SubtaskMetrics,
)
from holdfast.barriers.tunable import SettingValue
from holdfast.coordinator.checkpoints import actions
from holdfast.coordinator.ha.records import BackoffRecord, RestorePoint
from holdfast.coordinator.jobmaster.job import JobState
from holdfast.coordinator.jobmaster.releases import Release
from holdfast.coordinator.totals import Totals
from holdfast.statebackends.errors import HoldfastError
from holdfast.statebackends.snapshot.metadata import HookState


class PrepareAttempt(msgspec.Struct, frozen=True):
    """Store the attempt's record, read and verify the snapshot, assign its state to subtasks.

    Outcome AttemptPrepared, AttemptTaken, AttemptDelayed, AttemptImpossible or LeadershipEnded."""

    attempt: int
    restore: RestorePoint | None
    restarts: int
    totals: Totals = {}
    """Counts of the submission's operators at the cut of `restore`."""
    backoff: BackoffRecord | None = None


class RestoreHook(msgspec.Struct, frozen=True):
    """Take a master hook back to the checkpoint that an attempt starts from; outcome HookRestored or HookNotRestored."""

    attempt: int
    try_number: int
    """Of the attempt's calls, from 1: all hooks are called anew when one has failed, also those that are still at work."""
    name: str
    checkpoint_id: int
    """0: the job starts empty, and the hook is reset."""
    timestamp_ms: int
    """Of the checkpoint's trigger; 0 without one."""
    state: HookState | None
    timeout_ms: int
    """Its process is killed behind this time."""


class WriteResult(msgspec.Struct, frozen=True):
    """Store the terminal record; outcome ResultWritten, ResultFailed or LeadershipEnded."""

    state: JobState
    cause: str
    last_checkpoint_id: int
    newest_completed: int
    metrics: tuple[SubtaskMetrics, ...] = ()
    totals: Totals = {}


class WriteConfig(msgspec.Struct, frozen=True):
    """Store changed settings; outcome ConfigWritten, ConfigTaken, ConfigFailed or LeadershipEnded."""

    number: int
    settings: Mapping[str, SettingValue]
    """All that differ from the submitted ones."""


class Deliver(msgspec.Struct, frozen=True):
    """Commands for the open stream of a session."""

    slot: int
    session: str
    commands: tuple[NumberedCommand, ...]


class CloseStream(msgspec.Struct, frozen=True):
    slot: int
    session: str


class LookForProcess(msgspec.Struct, frozen=True):
    """Look whether the process of a session still runs on this host; outcome ProcessEnded, or none."""

    slot: int
    session: str
    pid: int
    fingerprint: str


class Answer(msgspec.Struct, frozen=True):
    ticket: int
    value: Any


class Refuse(msgspec.Struct, frozen=True):
    ticket: int
    error: HoldfastError


class JobEnded(msgspec.Struct, frozen=True):
    """The job reached a terminal state or SUSPENDED: its runner can go."""

    state: JobState
    reason: str


Action: TypeAlias = (
    actions.WriteClaim
    | actions.TriggerHook
    | actions.WriteMetadata
    | actions.WriteAborted
    | actions.DiscardState
    | actions.DropCheckpoint
    | PrepareAttempt
    | RestoreHook
    | WriteResult
    | WriteConfig
    | Release
    | Deliver
    | CloseStream
    | LookForProcess
    | Answer
    | Refuse
    | JobEnded
)
