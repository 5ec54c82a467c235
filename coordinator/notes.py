"""A core's turn: the actions of one event, and notes for the log.

Notes are frozen records of what happened; no decision depends on them. `dispatcher/job_log.py` turns them into log lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from holdfast.barriers.messages import CheckpointKind, FailureReason

THE_COORDINATOR_STOPS = "the coordinator stops"
"""Reason of a SUSPENDED job whose process ends."""


class StateChanged(msgspec.Struct, frozen=True):
    """The job entered a state. `reason` may hold a user's text; empty for a state that needs none."""

    state: str
    previous: str
    """Empty: another leader led the job, and its state then is not on record."""
    reason: str = ""


class AttemptFailed(msgspec.Struct, frozen=True):
    """An attempt was fenced. `error` may hold a user's text."""

    attempt: int
    error: str
    restarts: int
    """Failovers of the submission so far, this one included."""
    restart_in_ms: int | None
    """None: the job fails, no further attempt follows."""
    vertex: str = ""
    subtask: int = -1
    slot: int = -1
    frames: str = ""
    """Frames of the user's code where it raised, one a line."""


class AttemptDeployed(msgspec.Struct, frozen=True):
    """An attempt was sent to its workers."""

    attempt: int
    checkpoint_id: int
    """Snapshot that it is restored from; 0: it begins empty."""
    folder: str = ""
    savepoint: bool = False
    replayed: int | None = None
    """Records that sources had read behind the restored cut, as far as workers had reported: they are read again. None: it is not
    known."""


class AttemptInitialized(msgspec.Struct, frozen=True):
    """All tasks of an attempt run: their state is restored. Also said when a new leader finds them so."""

    attempt: int


class FirstRecords(msgspec.Struct, frozen=True):
    """Workers have told the first records of an attempt."""

    attempt: int
    since_deployed_ms: int
    since_failure_ms: int
    """Since the attempt before it was fenced; -1: none was, under this leader."""
    heartbeat_ms: int
    """Workers tell once in this time: the first record may be so much earlier."""


class CheckpointFailed(msgspec.Struct, frozen=True):
    """ABORTED is stored. `message` may hold a user's text."""

    checkpoint_id: int
    kind: CheckpointKind
    reason: FailureReason
    message: str = ""


class RequestEnded(msgspec.Struct, frozen=True):
    """A user's request ended. `location`: of a savepoint."""

    kind: CheckpointKind
    trigger_id: str
    checkpoint_id: int | None
    location: str = ""
    reason: FailureReason | None = None
    message: str = ""
    tries: int = 1
    """Checkpoints that were begun for it."""


class LabelChanged(msgspec.Struct, frozen=True):
    """A user gave a snapshot a label, or removed one."""

    checkpoint_id: int
    label: str
    removed: bool


class DrillEnded(msgspec.Struct, frozen=True):
    """A snapshot was read as a restore would read it."""

    facts: dict[str, Any]
    """As DrillView."""


Note: TypeAlias = (
    StateChanged
    | AttemptFailed
    | AttemptDeployed
    | AttemptInitialized
    | FirstRecords
    | CheckpointFailed
    | RequestEnded
    | LabelChanged
    | DrillEnded
)

Action = TypeVar("Action")


@dataclass(slots=True)
class Turn(Generic[Action]):
    """The event that is handled: its times, the actions so far and the notes. Shared by the parts of one core."""

    now_ms: int = 0
    wall_ms: int = 0
    out: list[Action] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
