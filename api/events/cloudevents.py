"""Records of histories as CloudEvents 1.0, structured JSON. `tests/golden/cloudevents_v1.json` holds their shapes.

An event is small: lists of a record that may be long (vertices, subtasks and phases of a checkpoint) stay in the history, to which
`dataref` leads. `source` and `id` together name an event for good: what is told twice has the same."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from holdfast.api.events.follower import Told
from holdfast.barriers.messages import clip
from holdfast.coordinator.history.records import HistoryEntry, RecordKind

MEDIA_TYPE = "application/cloudevents+json"
TEXT_BYTES_MAX = 2_048
"""Bytes of one text in an event."""

KINDS = (*RecordKind, "gap")
"""Of records, and so of events."""

_STAY_IN_HISTORY = frozenset({"vertices", "slowest", "missing", "phases"})
_TIME_MS_MAX = 253_402_300_799_999
"""End of the year 9999."""


def kind_of(told: Told) -> str:
    return told.what.kind if isinstance(told.what, HistoryEntry) else "gap"


def type_of(kind: str) -> str:
    """`type` of the events of a kind of record."""
    return f"io.holdfast.{kind}.v1"


def event_id(told: Told) -> str:
    what = told.what
    return f"{what.epoch}-{what.number}" if isinstance(what, HistoryEntry) else f"{what.epoch}-{what.after}-gap"


def cloud_event(told: Told) -> dict[str, Any]:
    """The event of a record, or of records that are lost."""
    source, what = f"/v1/jobs/{told.job_id}", told.what
    event: dict[str, Any] = {"specversion": "1.0", "id": event_id(told), "source": source}
    about = {"job_id": told.job_id, "job_name": told.job_name}
    if not isinstance(what, HistoryEntry):
        gap = {"epoch": what.epoch, "after": what.after, "before": what.before, "missing": what.missing}
        return {**event, "type": type_of("gap"), "datacontenttype": "application/json", "data": {**about, **gap}}
    facts = {name: _clipped(value) for name, value in what.facts.items() if name not in _STAY_IN_HISTORY}
    event |= {"type": type_of(what.kind), "time": time_text(what.at_ms), "datacontenttype": "application/json"}
    if subject := _subject(what.facts):
        event["subject"] = subject
    event["dataref"] = f"{source}/history?after={what.epoch}-{what.number - 1}&limit=1"
    event["data"] = {**about, "epoch": what.epoch, "number": what.number, **facts}
    return event


def _clipped(value: Any) -> Any:
    return clip(value, TEXT_BYTES_MAX) if isinstance(value, str) else value


def _subject(facts: Mapping[str, Any]) -> str:
    """What within the job it is about."""
    for name, word in (("id", "checkpoint"), ("trigger_id", "request"), ("attempt", "attempt")):
        if name in facts:
            return f"{word}/{facts[name]}"
    return ""


def time_text(at_ms: int) -> str:
    """RFC 3339, UTC, with milliseconds."""
    moment = datetime.fromtimestamp(min(max(at_ms, 0), _TIME_MS_MAX) / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def encode_event(told: Told) -> bytes:
    """The event as one line of JSON."""
    return msgspec.json.encode(cloud_event(told))
