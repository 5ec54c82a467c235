"""Failures of a job, each with the restart behind it and the first record after that: a pure function of records of its history.

REST, the command line and pages show these, so that one number stands in all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from holdfast.coordinator.history.records import HistoryEntry, Position, RecordKind

FAILURE_KINDS = frozenset({RecordKind.FAILURE, RecordKind.RESTART, RecordKind.FIRST_RECORD})
"""Records that failures are made of."""


class RestartView(msgspec.Struct, frozen=True):
    """The attempt behind a failure."""

    at_ms: int
    attempt: int
    checkpoint_id: int
    """Snapshot that it was restored from; 0: none, it began empty."""
    savepoint: bool
    replayed: int | None
    """Records that sources read again; null: not known."""
    first_record_ms: int = -1
    """When workers first told records of it; -1: they have not."""
    gap_ms: int = -1
    """From the failure to then, by the clock of the leader that saw both; -1: not known."""
    heartbeat_ms: int = -1
    """The first record may be so much earlier than it was told."""


class FailureView(msgspec.Struct, frozen=True):
    """One failure that a job restarted for, or ended with."""

    position: str
    at_ms: int
    attempt: int
    error: str
    restarts: int
    restart_in_ms: int | None
    """Pause before the next attempt; null: no restart was left."""
    vertex: str = ""
    subtask: int = -1
    slot: int = -1
    restart: RestartView | None = None
    """null: no attempt has followed, as far as the records go."""


def derive_failures(entries: Iterable[HistoryEntry]) -> tuple[FailureView, ...]:
    """Newest first. `entries`: oldest first; what does not belong to a failure among them is passed over, and so are records that
    lack a fact."""
    found: list[FailureView] = []
    for entry in entries:
        try:
            _take(found, entry)
        except (LookupError, TypeError, ValueError, msgspec.MsgspecError):
            continue  # of a version that writes it otherwise
    return tuple(reversed(found))


def _take(found: list[FailureView], entry: HistoryEntry) -> None:
    facts, newest = entry.facts, found[-1] if found else None
    restart = None if newest is None else newest.restart
    match entry.kind:
        case RecordKind.FAILURE:
            found.append(_failure(entry, facts))
        case RecordKind.RESTART if newest is not None and restart is None:
            told = {name: facts[name] for name in ("attempt", "checkpoint_id", "savepoint", "replayed")}
            found[-1] = replace(newest, restart=msgspec.convert({"at_ms": entry.at_ms, **told}, RestartView))
        case RecordKind.FIRST_RECORD if newest is not None and restart is not None and restart.attempt == facts["attempt"]:
            told = {"gap_ms": int(facts["since_failure_ms"]), "heartbeat_ms": int(facts["heartbeat_ms"])}
            found[-1] = replace(newest, restart=replace(restart, first_record_ms=entry.at_ms, **told))
        case _:
            pass


def _failure(entry: HistoryEntry, facts: Mapping[str, Any]) -> FailureView:
    names = ("attempt", "error", "restarts", "restart_in_ms", "vertex", "subtask", "slot")
    told = {name: facts[name] for name in names if name in facts}
    position = str(Position(entry.epoch, entry.number))
    return msgspec.convert({"position": position, "at_ms": entry.at_ms, **told}, FailureView)


class FailurePage(msgspec.Struct, frozen=True):
    """Failures of a job, newest first."""

    failures: tuple[FailureView, ...]
    since: str
    """`before` of the page of older ones; empty: there are none. In a long history with few failures that page may be empty."""
    as_of_ms: int


def page_of(found: tuple[FailureView, ...], limit: int, since: str, as_of_ms: int) -> FailurePage:
    """The newest of some failures. `since`: that of the page of records; the next page begins in front of the oldest failure shown,
    so that what belongs to an older one is in it."""
    shown = found[:limit]
    is_cut = bool(since) or len(found) > limit
    return FailurePage(shown, shown[-1].position if shown and is_cut else since, as_of_ms)
