"""What the snapshot commands print: lines and tables for people, JSON for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from api import console
from api.snapshots.snapshot import Snapshot
from statebackends.errors import CorruptStateError
from statebackends.handles import StateMeta
from statebackends.snapshot import SnapshotProblem
from statebackends.snapshots.diffing import SnapshotDiff, StateDiff
from statebackends.snapshots.exporting import ExportReport
from statebackends.snapshots.verifying import VerifyReport


def show_verified(snapshot: Snapshot, report: VerifyReport, *, as_json: bool) -> None:
    """A line a problem, then what was checked."""
    if as_json:
        console.show_json(describe_verified(snapshot, report))
        return
    for problem in report.problems:
        console.show_line(str(problem))
    checked = f"{report.files} files, {console.size_text(report.size)} of state"
    console.show_line(f"{checked}: " + (f"{len(report.problems)} problems" if report.problems else "sound"))
    if report.unchecked:
        console.show_line(f"not checked: {len(report.unchecked)} files outside its folder, the first: {report.unchecked[0]}")


def describe_verified(snapshot: Snapshot, report: VerifyReport) -> dict[str, Any]:
    """JSON-ready."""
    return {
        "location": snapshot.location,
        "sound": report.is_sound,
        "files": report.files,
        "size": report.size,
        "problems": [_problem(problem) for problem in report.problems],
        "unchecked": [{"path": each.path, "reason": each.reason} for each in report.unchecked],
    }


def show_damaged_metadata(path: str, error: CorruptStateError, *, as_json: bool) -> None:
    """A snapshot whose `_metadata` can't be believed: nothing else can be checked."""
    if as_json:
        named = {"kind": "metadata", "path": error.fields.get("path"), "operator": error.fields.get("operator"), "subtask": None}
        problem = {**named, "detail": error.message}
        console.show_json({"location": path, "sound": False, "files": 1, "size": 0, "problems": [problem], "unchecked": []})
        return
    console.show_line(error.message)
    console.show_line("1 files, 0 B of state: 1 problems")


def _problem(problem: SnapshotProblem) -> dict[str, Any]:
    return {
        "kind": problem.kind.value,
        "path": problem.path,
        "operator": problem.operator or None,
        "subtask": problem.subtask if problem.subtask >= 0 else None,
        "detail": problem.detail,
    }


def show_diff(before: Snapshot, after: Snapshot, found: SnapshotDiff, *, as_json: bool) -> None:
    """A row a state, then the differing keys that were asked for."""
    if as_json:
        console.show_json(
            {
                "before": before.location,
                "after": after.location,
                "same": found.is_same,
                "operators_added": list(found.operators_added),
                "operators_removed": list(found.operators_removed),
                "states": [_state_diff(state) for state in found.states],
            }
        )
        return
    columns = ("OPERATOR", "STATE", "KIND", "ADDED", "REMOVED", "CHANGED", "SAME", "NOTE")
    rows: list[tuple[Any, ...]] = [
        (s.operator, s.state, _meta(s).kind, s.added, s.removed, s.changed, s.same, _note(s)) for s in found.states
    ]
    listed = {state.operator for state in found.states}
    rows += [(uid, "", "", "", "", "", "", "only after") for uid in found.operators_added if uid not in listed]
    rows += [(uid, "", "", "", "", "", "", "only before") for uid in found.operators_removed if uid not in listed]
    console.show_table(columns, rows, empty="no states")
    keys = [(s.operator, s.state, k.change, k.key, k.namespace, k.entry, k.before, k.after) for s in found.states for k in s.keys]
    if keys:
        console.show_table(("OPERATOR", "STATE", "CHANGE", "KEY", "NAMESPACE", "ENTRY", "BEFORE", "AFTER"), keys, empty="")
    console.show_line("same" if found.is_same else "different")


def _meta(state: StateDiff) -> StateMeta:
    meta = state.before or state.after
    assert meta is not None
    return meta


def _note(state: StateDiff) -> str:
    if state.before is None or state.after is None:
        return "only after" if state.before is None else "only before"
    pairs = [
        (word, getattr(state.before, field), getattr(state.after, field))
        for word, field in (("kind", "kind"), ("type", "value_type"), ("key", "key_type"))
    ]
    return ", ".join(f"{word} {old} -> {new}" for word, old, new in pairs if old != new)


def _state_diff(state: StateDiff) -> dict[str, Any]:
    return {
        "operator": state.operator,
        "state": state.state,
        "before": _described(state.before),
        "after": _described(state.after),
        "added": state.added,
        "removed": state.removed,
        "changed": state.changed,
        "same": state.same,
        "keys": [asdict(key) for key in state.keys],
    }


def _described(meta: StateMeta | None) -> dict[str, Any] | None:
    return None if meta is None else {"kind": meta.kind, "key_type": meta.key_type, "value_type": meta.value_type}


def show_exported(report: ExportReport, *, as_json: bool) -> None:
    """A row a dataset."""
    if as_json:
        console.show_json({"location": report.location, "states": [asdict(state) for state in report.states]})
        return
    rows = [(s.operator, s.state, s.kind, s.rows, len(s.files), console.size_text(s.size), s.folder) for s in report.states]
    console.show_table(("OPERATOR", "STATE", "KIND", "ROWS", "FILES", "SIZE", "FOLDER"), rows, empty="no states")
    console.show_line(report.location)
