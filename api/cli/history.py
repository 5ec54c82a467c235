"""Prints a job's history, a line a record; gaps and what can't be read are named beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.api.cli import console
from holdfast.barriers.messages import FailureReason
from holdfast.coordinator.figures import duration_text, size_text

_Facts = Mapping[str, Any]


def show_history(found: Mapping[str, Any]) -> None:
    """`found`: the answer of GET /v1/jobs/:jobid/history."""
    rows = [
        (f"{each['epoch']}-{each['number']}", console.time_text(each["at_ms"]), each["kind"], describe(each["kind"], each["facts"]))
        for each in found["records"]
    ]
    console.show_table(("RECORD", "AT", "KIND", "WHAT"), rows, empty="no records")
    for gap in found["gaps"]:
        console.show_note(describe_gap(gap))
    for damage in found["damage"]:
        console.show_note(f"can't be read, and is left out: {describe_damage(damage)}")
    if found.get("since"):
        console.show_note(f"there is more in front: --before {found['since']}")
    if found["more"]:
        console.show_note(f"there is more: --after {found['next']}")


def show_failures(found: Mapping[str, Any]) -> None:
    """`found`: the answer of GET /v1/jobs/:jobid/failures."""
    rows = [(console.time_text(each["at_ms"]), str(each["attempt"]), *_behind(each), each["error"]) for each in found["failures"]]
    console.show_table(("AT", "ATTEMPT", "RESTORED", "AGAIN", "GAP", "ERROR"), rows, empty="no failures")
    if found["since"]:
        console.show_note(f"for older ones: --before {found['since']}")


def _behind(failure: Mapping[str, Any]) -> tuple[str, str, str]:
    restart = failure["restart"]
    if restart is None:
        return "-", "-", "-"
    kind = "savepoint " if restart["savepoint"] else ""
    again = restart["replayed"]
    gap_ms = restart["gap_ms"]
    return (
        f"{kind}{restart['checkpoint_id']}" if restart["checkpoint_id"] else "nothing",
        "-" if again is None else f"{again:,}",
        "-" if gap_ms < 0 else duration_text(gap_ms),
    )


def describe_damage(damage: Mapping[str, Any]) -> str:
    """What can't be read: the file, its line if it is one, and why."""
    where = f"{damage['path']}, line {damage['line']}" if damage["line"] else damage["path"]
    return f"{where}: {damage['reason']}"


def describe_gap(gap: Mapping[str, Any]) -> str:
    """Which records are not there."""
    epoch, after, before, missing = gap["epoch"], gap["after"], gap["before"], gap["missing"]
    if before is None:
        return f"the leader of epoch {epoch} was cut off behind record {after}: its last records may be lost"
    return f"{missing:,} records of epoch {epoch} are not there: those between {after} and {before}"


def describe(kind: str, facts: _Facts) -> str:
    """A record in words. One that this version does not know, or that lacks a fact, is shown as its facts are."""
    words = _WORDS.get(kind)
    try:
        return words(facts) if words is not None else _plain(facts)
    except (LookupError, TypeError, ValueError, AttributeError):
        return _plain(facts)


def _plain(facts: _Facts) -> str:
    return ", ".join(f"{name}={value}" for name, value in facts.items())


def _leader(facts: _Facts) -> str:
    how = "taken over" if facts["took_over"] else "begun"
    newest = facts["newest_checkpoint"]
    return f"submission {facts['submission']}, {how}; newest checkpoint {newest or 'none'}"


def _state(facts: _Facts) -> str:
    why = f": {facts['reason']}" if facts.get("reason") else ""
    before = f", was {facts['previous']}" if facts["previous"] else ""
    return f"{facts['state']}{before}{why}"


def _failure(facts: _Facts) -> str:
    where = f" in subtask {facts['subtask']} of {facts['vertex']}" if facts.get("vertex") else ""
    delay = facts["restart_in_ms"]
    then = "no restart is left" if delay is None else f"restart {facts['restarts']} in {delay} ms"
    return f"attempt {facts['attempt']} failed{where}; {then}: {facts['error']}"


def _restart(facts: _Facts) -> str:
    kind = "savepoint" if facts["savepoint"] else "checkpoint"
    source = f"from {kind} {facts['checkpoint_id']}" if facts["checkpoint_id"] else "with empty state"
    again = f"; {facts['replayed']:,} records are read again" if facts.get("replayed") else ""
    return f"attempt {facts['attempt']} starts {source}{again}"


def _first_record(facts: _Facts) -> str:
    since_ms = facts["since_failure_ms"]
    gap = f", {duration_text(since_ms)} after the failure" if since_ms >= 0 else ""
    return f"attempt {facts['attempt']} processes records{gap}"


def _checkpoint(facts: _Facts) -> str:
    name = f"{facts['checkpoint_kind'].replace('_', '-')} {facts['id']}"
    if facts["status"] != "COMPLETED":
        reason = _reason(facts)
        missing = f", {facts['missing_count']} subtasks did not acknowledge" if facts.get("missing_count") else ""
        message = facts.get("message")
        why = f": {message}" if message and message != facts["reason"] else ""
        return f"{name} failed, {reason}{missing}{why}"
    slowest = facts["slowest"][0] if facts.get("slowest") else None
    last = f"; slowest: subtask {slowest['subtask']} of {slowest['vertex']}" if slowest else ""
    took, size = duration_text(facts["duration_ms"]), size_text(facts["checkpointed_size"])
    return f"{name} in {took}, {size}{last}"


def _explanation(facts: _Facts) -> str:
    return f"{facts['summary']}: {facts['causes'][-1]['text']}"


def _request(facts: _Facts) -> str:
    name = facts["request_kind"].replace("_", "-")
    if facts["reason"] is None:
        return f"{name} is complete: id {facts['checkpoint_id']}{' at ' + facts['location'] if facts['location'] else ''}"
    message = facts["message"]
    why = f": {message}" if message and message != facts["reason"] else ""
    return f"{name} failed, {_reason(facts)}{why}"


def _reason(facts: _Facts) -> str:
    """The reason as it is recorded, but for one whose name misleads: no coordinator shut down."""
    reason = str(facts["reason"])
    return "the job was cancelled or has failed" if reason == FailureReason.COORDINATOR_SHUTDOWN else reason


def _label(facts: _Facts) -> str:
    return f"checkpoint {facts['id']} {'has no longer' if facts['removed'] else 'has'} the label {facts['label']}"


def _drill(facts: _Facts) -> str:
    why = facts["error"] or "; ".join(facts["problems"]) or f"{facts['rows']:,} rows of {facts['states']} states"
    name = str(facts.get("kind", "checkpoint")).replace("_", "-")
    return f"drill of {name} {facts['checkpoint_id']} {facts['state']}: {why}"


_WORDS: Mapping[str, Callable[[_Facts], str]] = {
    "leader": _leader,
    "state": _state,
    "failure": _failure,
    "restart": _restart,
    "initialized": lambda facts: f"all tasks of attempt {facts['attempt']} run",
    "first_record": _first_record,
    "checkpoint": _checkpoint,
    "explanation": _explanation,
    "request": _request,
    "label": _label,
    "drill": _drill,
}
