"""Checkpoints as their job's history has them, as views again: what `records.describe_checkpoint` wrote. Pure.

A record has the slowest subtasks alone, and of each vertex the longest time of each phase. Records are files, which anybody may
have written: what is not of their shape is no checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec.structs import replace

from holdfast.barriers.messages import CheckpointKind, SubtaskKey
from holdfast.coordinator.history.records import HistoryEntry, RecordKind
from holdfast.coordinator.views import (
    CheckpointPhases,
    CheckpointView,
    ExceptionView,
    HookFailureView,
    RecordedCheckpointView,
    SubtaskCheckpointView,
    VertexCheckpointView,
)
from holdfast.statebackends.decoding import UNDECODABLE, decode_json

T = TypeVar("T")

_Number = Annotated[int, msgspec.Meta(ge=-1, le=2**53)]
_SPLIT = ("start_delay", "alignment", "sync", "store", "acknowledge")
"""Phases whose longest times are on record for each vertex."""


class _Subtask(msgspec.Struct, frozen=True):
    vertex: str
    subtask: _Number
    host: str = ""
    duration_ms: _Number = -1
    start_delay_ms: _Number = -1
    alignment_ms: _Number = -1
    sync_ms: _Number = -1
    async_ms: _Number = -1
    store_ms: _Number = -1
    new_files: _Number = -1
    checkpointed_size: _Number = 0
    unaligned: bool = False


class _Vertex(msgspec.Struct, frozen=True):
    vertex: str
    subtasks: _Number = 0
    acknowledged: _Number = 0
    duration_ms: _Number = -1
    start_delay_ms: _Number = -1
    alignment_ms: _Number = -1
    sync_ms: _Number = -1
    store_ms: _Number = -1
    acknowledge_ms: _Number = -1
    checkpointed_size: _Number = 0
    state_size: _Number = 0


class _Notified(msgspec.Struct, frozen=True):
    id: _Number
    notify_ms: _Number


class _Checkpoint(msgspec.Struct, frozen=True):
    id: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    checkpoint_kind: CheckpointKind
    status: str
    triggered_ms: _Number = -1
    duration_ms: _Number = -1
    decide_ms: _Number = -1
    checkpointed_size: _Number = 0
    state_size: _Number = 0
    processed_bytes: _Number = 0
    persisted_bytes: _Number = 0
    subtasks: _Number = 0
    acknowledged: _Number = 0
    unaligned: bool = False
    location: str = ""
    reason: str = ""
    message: str = ""
    vertices: tuple[_Vertex, ...] = ()
    slowest: tuple[_Subtask, ...] = ()
    missing: tuple[_Subtask, ...] = ()
    missing_count: _Number = 0
    notified: tuple[_Notified, ...] = ()
    """Of earlier checkpoints."""
    hook_failure: HookFailureView | None = None


class _Failure(msgspec.Struct, frozen=True):
    error: str
    attempt: _Number = 0
    vertex: str = ""
    subtask: _Number = -1
    slot: _Number = -1
    frames: str = ""


def recall_checkpoints(entries: Iterable[HistoryEntry]) -> list[RecordedCheckpointView]:
    """The checkpoints among records, in their order."""
    checkpoints = (entry for entry in entries if entry.kind == RecordKind.CHECKPOINT)
    told = [(entry, facts) for entry in checkpoints if (facts := _told(entry, _Checkpoint)) is not None]
    notify_ms = {each.id: each.notify_ms for _, facts in told for each in facts.notified}
    found = (_recall(entry, facts, notify_ms.get(facts.id, -1)) for entry, facts in told)
    return [each for each in found if each is not None]


def recall_failures(entries: Iterable[HistoryEntry]) -> tuple[ExceptionView, ...]:
    """Failures of the job among records, newest first."""
    found = []
    for entry in entries:
        if entry.kind != RecordKind.FAILURE:
            continue
        told = _told(entry, _Failure)
        if told is None:
            continue
        worker = f"slot-{told.slot}" if told.slot >= 0 else ""
        found.append(ExceptionView(told.error, told.frames, entry.at_ms, told.vertex, told.subtask, worker, told.attempt))
    return tuple(reversed(found))


def comparable_phases(
    recorded: Sequence[RecordedCheckpointView], vertices: Iterable[str], count_max: int
) -> tuple[CheckpointPhases, ...]:
    """The newest completed checkpoints of the same tasks, oldest first: without savepoints, and without those of vertices that are
    not named, as those of an older graph may be."""
    named = set(vertices)
    completed = {
        each.checkpoint.checkpoint_id: each.phases
        for each in recorded
        if each.checkpoint.status == "COMPLETED" and not each.checkpoint.is_savepoint and named.issuperset(each.checkpoint.vertices)
    }
    return tuple(completed[number] for number in sorted(completed)[-count_max:])


def _told(entry: HistoryEntry, kind: type[T]) -> T | None:
    """The facts of a record; None if they are not of that shape."""
    try:
        return decode_json(msgspec.json.encode(entry.facts), kind)
    except UNDECODABLE:
        return None


def _recall(entry: HistoryEntry, told: _Checkpoint, notify_ms: int) -> RecordedCheckpointView | None:
    if told.status not in ("COMPLETED", "FAILED"):
        return None
    trigger_ms = told.triggered_ms if told.triggered_ms >= 0 else entry.at_ms
    checkpoint = replace(_view(told, trigger_ms, entry.at_ms), notify_ms=notify_ms)
    longest = {phase: _longest(told.vertices, f"{phase}_ms") for phase in _SPLIT}
    hosts = {SubtaskKey(each.vertex, each.subtask): each.host for each in (*told.slowest, *told.missing)}
    known = {phase: found for phase, found in longest.items() if found[0] >= 0}
    missing = max(told.missing_count, len(told.missing))
    return RecordedCheckpointView(checkpoint, _phases(checkpoint, longest), known, hosts, missing)


def _longest(vertices: Sequence[_Vertex], name: str) -> tuple[int, str]:
    return max(((getattr(vertex, name), vertex.vertex) for vertex in vertices), default=(-1, ""))


def _view(told: _Checkpoint, trigger_ms: int, at_ms: int) -> CheckpointView:
    subtasks: dict[str, list[SubtaskCheckpointView]] = {vertex.vertex: [] for vertex in told.vertices}
    for each in told.slowest:
        subtasks.setdefault(each.vertex, []).append(_subtask(each, trigger_ms))
    for each in told.missing:
        subtasks.setdefault(each.vertex, []).append(SubtaskCheckpointView(each.subtask, -1, -1, 0, 0, 0, 0, 0, 0, 0))
    vertices = {vertex.vertex: vertex for vertex in told.vertices}
    is_failed = told.status == "FAILED"
    return CheckpointView(
        checkpoint_id=told.id,
        kind=told.checkpoint_kind,
        status=told.status,
        trigger_ms=trigger_ms,
        latest_ack_ms=max((each.ack_ms for found in subtasks.values() for each in found), default=-1),
        checkpointed_size=told.checkpointed_size,
        state_size=told.state_size,
        end_to_end_ms=told.duration_ms,
        processed_bytes=told.processed_bytes,
        persisted_bytes=told.persisted_bytes,
        num_subtasks=told.subtasks,
        num_acknowledged_subtasks=told.acknowledged,
        vertices={
            vertex: _vertex(vertices.get(vertex) or _Vertex(vertex), told.status, found) for vertex, found in subtasks.items()
        },
        unaligned=told.unaligned,
        location=told.location or None,
        failure_ms=at_ms if is_failed else -1,
        failure_reason=told.reason or None,
        failure_message=told.message or told.reason or None,
        decide_ms=told.decide_ms,
        hook_failure=told.hook_failure,
    )


def _vertex(told: _Vertex, status: str, subtasks: Sequence[SubtaskCheckpointView]) -> VertexCheckpointView:
    return VertexCheckpointView(
        vertex=told.vertex,
        status=status,
        latest_ack_ms=max((each.ack_ms for each in subtasks), default=-1),
        checkpointed_size=told.checkpointed_size,
        state_size=told.state_size,
        end_to_end_ms=told.duration_ms,
        processed_bytes=0,
        num_subtasks=told.subtasks,
        num_acknowledged_subtasks=told.acknowledged,
        subtasks=tuple(subtasks),
    )


def _subtask(told: _Subtask, trigger_ms: int) -> SubtaskCheckpointView:
    return SubtaskCheckpointView(
        subtask=told.subtask,
        ack_ms=trigger_ms + max(0, told.duration_ms),
        end_to_end_ms=told.duration_ms,
        checkpointed_size=told.checkpointed_size,
        state_size=0,
        sync_ms=told.sync_ms,
        async_ms=told.async_ms,
        alignment_ms=told.alignment_ms,
        alignment_processed=0,
        start_delay_ms=told.start_delay_ms,
        unaligned=told.unaligned,
        store_ms=told.store_ms,
        new_files=told.new_files,
    )


def _phases(view: CheckpointView, longest: dict[str, tuple[int, str]]) -> CheckpointPhases:
    """As `checkpoints.stats.derive_phases` of all subtasks, but for what only they tell: speed and files. The longest encoding is
    that of the slowest subtasks."""
    subtasks = [each for vertex in view.vertices.values() for each in vertex.subtasks if each.acknowledged]
    return CheckpointPhases(
        checkpoint_id=view.checkpoint_id,
        end_to_end_ms=view.end_to_end_ms,
        start_delay_ms=longest["start_delay"][0],
        alignment_ms=longest["alignment"][0],
        sync_ms=longest["sync"][0],
        encode_ms=max((each.encode_ms for each in subtasks), default=-1),
        store_ms=longest["store"][0],
        acknowledge_ms=longest["acknowledge"][0],
        decide_ms=view.decide_ms,
        notify_ms=view.notify_ms,
        checkpointed_size=view.checkpointed_size,
        state_size=view.state_size,
        store_rate=-1,
        new_files=-1,
    )
