"""Records of a job's history, one a line of a file, and what a reader finds.

A line is `{"number": 7, "at_ms": ..., "kind": "state", "facts": {...}}`. Numbers are consecutive within an epoch, and a file is
named by its epoch and the number of its first line, so that what is lost shows as a gap. Readers take kinds and facts that they
don't know: what this version writes is below, and later ones may add to it. Texts of users are clipped, and JSON escapes what would
break a line."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from operator import attrgetter
from typing import Any

import msgspec

from holdfast.barriers.messages import clip
from holdfast.coordinator.views import CheckpointView, SubtaskCheckpointView, VertexCheckpointView
from holdfast.statebackends.errors import InvalidConfigError

HISTORY_TEXT_BYTES_MAX = 4_096
"""Bytes of one text in a record."""

SLOWEST_MAX = 10
"""Subtasks of a checkpoint that are recorded one by one: the slowest, and as many of those that did not acknowledge."""

VERTICES_MAX = 200
"""Vertices of a checkpoint that are recorded one by one: the slowest."""

LINE_BYTES_MAX = 256 << 10
"""Bytes of one record; a larger one is replaced by one that says so."""


class RecordKind(StrEnum):
    """What this version records."""

    LEADER = "leader"
    STATE = "state"
    FAILURE = "failure"
    RESTART = "restart"
    INITIALIZED = "initialized"
    FIRST_RECORD = "first_record"
    CHECKPOINT = "checkpoint"
    EXPLANATION = "explanation"
    REQUEST = "request"
    LABEL = "label"
    DRILL = "drill"


_KIND_BYTES_SHOWN_MAX = 64


def parse_kinds(text: str, known: Sequence[str] = tuple(RecordKind)) -> frozenset[str]:
    """Kinds with commas between; none if the text is empty. Raises InvalidConfigError, which names those that there are, for
    another: it would read as one of which nothing has happened."""
    kinds = frozenset(kind.strip() for kind in text.split(",") if kind.strip())
    unknown = sorted(kinds.difference(known))
    if unknown:
        message = f"kinds: there is no {clip(unknown[0], _KIND_BYTES_SHOWN_MAX)!r}, only {', '.join(known)}"
        raise InvalidConfigError(message, setting="kinds")
    return kinds


class Line(msgspec.Struct, frozen=True):
    """One record, as it is stored."""

    number: int
    """From 1, consecutive within the epoch."""
    at_ms: int
    """Wall clock of the leader."""
    kind: str
    """A RecordKind; others may follow."""
    facts: dict[str, Any]


def encode_line(number: int, at_ms: int, kind: str, facts: Mapping[str, Any]) -> bytes:
    """The record as a line; its texts are clipped."""
    told = {name: clip(value, HISTORY_TEXT_BYTES_MAX) if isinstance(value, str) else value for name, value in facts.items()}
    content = msgspec.json.encode(Line(number, at_ms, kind, told)) + b"\n"
    if len(content) <= LINE_BYTES_MAX:
        return content
    return msgspec.json.encode(Line(number, at_ms, kind, {"left_out_bytes": len(content)})) + b"\n"


def describe_checkpoint(
    view: CheckpointView, hosts: Mapping[int, str], notified: Mapping[int, int] | None = None
) -> dict[str, Any]:
    """Facts of a checkpoint that has ended. `hosts`: of the slots. `notified`: earlier checkpoints -> how long it took until all
    subtasks knew that they were complete, ms; they say so with their next acknowledgements, when the record of that one is
    written."""
    by_duration = sorted(view.vertices.values(), key=lambda vertex: (vertex.end_to_end_ms, vertex.vertex), reverse=True)
    vertices, slowest = by_duration[:VERTICES_MAX], _slowest(view.vertices.values())
    missing = [
        {"vertex": vertex.vertex, "subtask": subtask.subtask, "host": hosts.get(subtask.subtask, "")}
        for vertex in view.vertices.values()
        if vertex.num_acknowledged_subtasks < vertex.num_subtasks
        for subtask in vertex.subtasks
        if not subtask.acknowledged
    ]
    facts: dict[str, Any] = {
        "id": view.checkpoint_id,
        "checkpoint_kind": view.kind.value,
        "status": view.status,
        "triggered_ms": view.trigger_ms,
        "duration_ms": view.end_to_end_ms,
        "decide_ms": view.decide_ms,
        "checkpointed_size": view.checkpointed_size,
        "state_size": view.state_size,
        "processed_bytes": view.processed_bytes,
        "persisted_bytes": view.persisted_bytes,
        "subtasks": view.num_subtasks,
        "acknowledged": view.num_acknowledged_subtasks,
        "unaligned": view.unaligned,
        "location": view.location or "",
        "reason": view.failure_reason or "",
        "message": view.failure_message or "",
        "vertices": [_vertex(vertex) for vertex in vertices],
        "slowest": [{"vertex": vertex, "host": hosts.get(each.subtask, ""), **_subtask(each)} for vertex, each in slowest],
    }
    if notified:
        facts["notified"] = [{"id": number, "notify_ms": notify_ms} for number, notify_ms in notified.items()]
    if view.hook_failure is not None:
        facts["hook_failure"] = {"names": view.hook_failure.names, "timed_out": view.hook_failure.timed_out}
    if missing:
        facts |= {"missing": missing[:SLOWEST_MAX], "missing_count": len(missing)}
    return facts


def _slowest(vertices: Collection[VertexCheckpointView]) -> list[tuple[str, SubtaskCheckpointView]]:
    """The SLOWEST_MAX slowest subtasks with their vertices, the slowest first, and of equal ones the first.

    Their times are sorted before anything else: of thousands of subtasks few have a record to be made of."""
    times_ms = sorted([each.end_to_end_ms for vertex in vertices for each in vertex.subtasks if each.ack_ms >= 0], reverse=True)
    if not times_ms:
        return []
    least_ms = times_ms[:SLOWEST_MAX][-1]
    slower: list[tuple[str, SubtaskCheckpointView]] = []
    equal: list[tuple[str, SubtaskCheckpointView]] = []
    for vertex in vertices:
        for each in vertex.subtasks:
            if each.ack_ms >= 0 and each.end_to_end_ms >= least_ms:
                (slower if each.end_to_end_ms > least_ms else equal).append((vertex.vertex, each))
    slower.sort(key=lambda entry: entry[1].end_to_end_ms, reverse=True)
    return [*slower, *equal][:SLOWEST_MAX]


def _subtask(view: SubtaskCheckpointView) -> dict[str, Any]:
    return {
        "subtask": view.subtask,
        "duration_ms": view.end_to_end_ms,
        "start_delay_ms": view.start_delay_ms,
        "alignment_ms": view.alignment_ms,
        "sync_ms": view.sync_ms,
        "async_ms": view.async_ms,
        "store_ms": view.store_ms,
        "acknowledge_ms": view.acknowledge_ms,
        "new_files": view.new_files,
        "checkpointed_size": view.checkpointed_size,
        "unaligned": view.unaligned,
    }


def _vertex(view: VertexCheckpointView) -> dict[str, Any]:
    """Sums, the longest of each phase over its subtasks, and the slowest subtask: the first of equal ones."""
    longest = view.longest
    acked = [each for each in view.subtasks if each.ack_ms >= 0]
    slowest = max(acked, key=attrgetter("end_to_end_ms")).subtask if acked else -1
    return {
        "vertex": view.vertex,
        "subtasks": view.num_subtasks,
        "acknowledged": view.num_acknowledged_subtasks,
        "duration_ms": view.end_to_end_ms,
        "start_delay_ms": longest.start_delay_ms,
        "alignment_ms": longest.alignment_ms,
        "sync_ms": longest.sync_ms,
        "async_ms": longest.async_ms,
        "store_ms": longest.store_ms,
        "acknowledge_ms": longest.acknowledge_ms,
        "checkpointed_size": view.checkpointed_size,
        "state_size": view.state_size,
        "slowest": slowest,
    }


# ------------------------------------------------------------------------------------------------------- what a reader finds


class Position(msgspec.Struct, frozen=True, order=True):
    """Place of a record among all of its job."""

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.number}"


class HistoryEntry(msgspec.Struct, frozen=True):
    """One record of a job's history."""

    epoch: int
    number: int
    at_ms: int
    kind: str
    facts: dict[str, Any]


class HistoryGap(msgspec.Struct, frozen=True):
    """Records that are not there."""

    epoch: int
    after: int
    """Number of the record before the gap; 0: none is."""
    before: int | None
    """Number of the one behind it; None: the epoch has none."""
    missing: int | None
    """None: not known, and perhaps none: the leader did not come to say that it had ended."""


class HistoryDamage(msgspec.Struct, frozen=True):
    """A file, or a line of one, that can't be read; it is left out."""

    path: str
    line: int
    """From 1; 0: the whole file."""
    reason: str


class HistoryPage(msgspec.Struct, frozen=True):
    """Records of a job's history, oldest first."""

    entries: tuple[HistoryEntry, ...]
    gaps: tuple[HistoryGap, ...] = ()
    damage: tuple[HistoryDamage, ...] = ()
    next: str = ""
    """`after` of the next page; empty while there is no record at all."""
    more: bool = False
    """There are further records now."""
    as_of_ms: int = -1
    since: str = ""
    """Of the newest records: `before` of the page in front of this one. What is there was not looked at, whatever kinds were asked
    for; empty: nothing is in front."""
