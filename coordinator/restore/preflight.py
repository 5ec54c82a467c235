"""The preflight report on a snapshot and a job: findings, refusals and notes. Plain records, the same in REST, CLI and Python.

A refused restore raises what its report lists, so that the two can't disagree. `compatibility.py` compares metadata and graph,
`plan.py` adds what it finds in storage; this module decides which refusal comes first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from holdfast.statebackends import errors
from holdfast.statebackends.errors import HoldfastError, RestoreError
from holdfast.statebackends.serialization.schema_changes import SchemaChange
from holdfast.statebackends.snapshot.parts import SnapshotProblem

REASONS_SHOWN_MAX = 8
"""Further reasons in the message of a refused restore."""


class Presence(StrEnum):
    """Whether an operator is in the snapshot, in the job, or in both."""

    MATCHED = "matched"
    ADDED = "added"
    """In the job alone: it starts empty."""
    REMOVED = "removed"
    """In the snapshot alone."""


class SchemaVerdict(StrEnum):
    """Result of the comparison of one state with its declaration."""

    AS_IS = "as is"
    MIGRATION = "after migration"
    INCOMPATIBLE = "incompatible"
    ADDED = "added"
    """Declared and not stored: it starts empty."""
    REMOVED = "removed"
    """Stored, and not declared by the job."""


class StateFinding(msgspec.Struct, frozen=True):
    """One state of one operator."""

    name: str
    verdict: SchemaVerdict
    stored: str | None
    """Kind, type and key type as stored; None if it is not."""
    declared: str | None
    pickled: bool = False
    """Stored or declared as pickle: only the job's own classes can read it."""
    size: int | None = None
    """Bytes of it in the snapshot; None if it is not stored, or in native files, which hold all states of their operator."""
    changes: tuple[SchemaChange, ...] = ()
    """Fields that the declaration drops, adds, widens, or changes in a way that is refused."""


class OperatorFinding(msgspec.Struct, frozen=True):
    """One operator of the snapshot, of the job, or of both."""

    uid: str
    presence: Presence
    states: tuple[StateFinding, ...] = ()
    size: int = 0
    """Bytes of state in the snapshot."""
    stored_parallelism: int | None = None
    parallelism: int | None = None
    stored_max_parallelism: int | None = None
    max_parallelism: int | None = None
    """Max parallelism that the job would run with: the stored one if the job left it open."""
    renamed_to: str | None = None
    """For a removed operator with state: the added operator that it most likely is."""
    uid_generated: bool = False
    """The job gave it no uid: a change of the graph loses its state."""


class FileFinding(msgspec.Struct, frozen=True):
    """A file that a restore would fail on."""

    path: str
    problem: str
    """missing | length | checksum | path | format | unreadable."""
    detail: str
    operator: str | None
    subtask: int | None


class SkippedFinding(msgspec.Struct, frozen=True):
    """A newer checkpoint that a restore of the newest readable one passes over."""

    checkpoint_id: int
    location: str
    reason: str


class SinkFinding(msgspec.Struct, frozen=True):
    """A sink of the job."""

    sink_id: str
    operator: str
    may_repeat: bool
    """Checkpoints newer than the snapshot may have committed output, which would be written again."""
    path: str | None = None
    """Path that it writes to; None: not known."""
    is_moved: bool = False
    """The snapshot has it at another path, or under another sink id."""
    stored_path: str | None = None
    """Path in the snapshot, if it is moved and the path is known."""
    stored_id: str | None = None
    """Sink id in the snapshot, likewise."""
    is_muted: bool = False
    """It writes nothing in this branch, and its state in the snapshot is left to the job that stored it."""


class SnapshotFinding(msgspec.Struct, frozen=True):
    """The snapshot that would be restored."""

    location: str
    """As the plan names it: an absolute folder, or one in the state directory."""
    job_id: str
    job_name: str
    checkpoint_id: int
    kind: str
    size: int
    timestamp_ms: int
    owner: str | None = None
    """Id of the job that claimed it."""


class Refusal(msgspec.Struct, frozen=True):
    """An error that has not been raised yet."""

    kind: str
    """Its class in holdfast.statebackends.errors."""
    message: str
    fields: dict[str, Any] = {}

    @staticmethod
    def of(error: HoldfastError) -> Refusal:
        return Refusal(type(error).__name__, error.message, error.fields)

    def error(self) -> HoldfastError:
        """The error, of the class that `kind` names; a RestoreError if this version has no such class."""
        return errors.ERROR_CLASSES.get(self.kind, RestoreError).of(self.message, self.fields)


_GRAVEST = (
    errors.CorruptStateError,
    errors.SnapshotClaimedError,
    errors.IncompatibleStateError,
    errors.BackendMismatchError,
    errors.MaxParallelismError,
    errors.UnclaimedStateError,
    errors.InFlightStateError,
    errors.MasterHookError,
    errors.SinkMovedError,
    errors.CommittablesLeftError,
    errors.OutputMayRepeatError,
)
"""In this order: only another snapshot helps; only another job helps; an option of the user lets it pass."""


def gravest_first(refusals: Iterable[Refusal]) -> tuple[Refusal, ...]:
    """Refusals in the order of their gravity; the first one is raised. A user is not asked for an option if the snapshot is of no
    use anyway."""

    def grade(refusal: Refusal) -> int:
        error = refusal.error()
        known = (number for number, kind in enumerate(_GRAVEST) if isinstance(error, kind))
        # Any other error is about this snapshot, and no option lets it pass.
        return next(known, 1)

    return tuple(sorted(refusals, key=grade))


class PreflightReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a start of the job from the snapshot, without starting it."""

    job_id: str
    job_name: str
    snapshot: SnapshotFinding | None = None
    """None: the job would start empty, or nothing could be read."""
    operators: tuple[OperatorFinding, ...] = ()
    files: tuple[FileFinding, ...] = ()
    """All damaged and missing files."""
    unchecked: tuple[str, ...] = ()
    """Files outside the snapshot that could not be checked, since their state directory is not known."""
    skipped: tuple[SkippedFinding, ...] = ()
    """Newer checkpoints that can't be read, newest first."""
    sinks: tuple[SinkFinding, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    """Why the job is refused, the gravest first; empty: it can start."""
    notes: tuple[str, ...] = ()
    """Accepted consequences: dropped state, rewritten values, output that may repeat."""

    @property
    def fits(self) -> bool:
        return not self.refusals

    def check(self) -> None:
        """Raise the first refusal. Its message has up to REASONS_SHOWN_MAX others; its field `others` has the messages of all."""
        if self.refusals:
            first, *others = self.refusals
            raise Refusal(
                first.kind,
                first.message + _also(others),
                {**first.fields, "others": [other.message for other in others]} if others else first.fields,
            ).error()


def _also(others: Sequence[Refusal]) -> str:
    if not others:
        return ""
    shown = "; ".join(f"({number}) {other.message} [{other.kind}]" for number, other in enumerate(others[:REASONS_SHOWN_MAX], 2))
    more = f"; {len(others) - REASONS_SHOWN_MAX} more, which a preflight lists" if len(others) > REASONS_SHOWN_MAX else ""
    return f". {len(others)} more reason{'s' if len(others) > 1 else ''}: {shown}{more}"


def file_finding(problem: SnapshotProblem) -> FileFinding:
    return FileFinding(
        path=problem.path,
        problem=problem.kind.value,
        detail=problem.detail,
        operator=problem.operator or None,
        subtask=problem.subtask if problem.subtask >= 0 else None,
    )
