"""Output of the snapshot commands and of `holdfast preflight`: lines and tables for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

import msgspec

from holdfast.api.cli import console
from holdfast.api.snapshots.inspection import describe_diff, describe_verified, summarise
from holdfast.api.snapshots.snapshot import Snapshot
from holdfast.coordinator.figures import size_text
from holdfast.coordinator.restore.preflight import OperatorFinding, PreflightReport
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.handles import StateMeta
from holdfast.statebackends.snapshot.in_flight import describe_edge
from holdfast.statebackends.state_processor.diff import SnapshotDiff, StateDiff
from holdfast.statebackends.state_processor.export import ExportReport
from holdfast.statebackends.state_processor.verify import VerifyReport


def show_verified(snapshot: Snapshot, report: VerifyReport, *, as_json: bool) -> None:
    """Print one line for each problem, then what was checked."""
    if as_json:
        console.show_json(describe_verified(snapshot, report))
        return
    for problem in report.problems:
        console.show_line(str(problem))
    checked = f"{report.files} files, {size_text(report.size)} of state"
    console.show_line(f"{checked}: " + (f"{len(report.problems)} problems" if report.problems else "sound"))
    if report.unchecked:
        console.show_line(f"not checked: {len(report.unchecked)} files outside its folder, the first: {report.unchecked[0]}")


def show_damaged_metadata(path: str, error: CorruptStateError, *, as_json: bool) -> None:
    """Print a snapshot whose `_metadata` is damaged, so that nothing else can be checked."""
    if as_json:
        named = {"kind": "metadata", "path": error.path, "operator": error.operator, "subtask": None}
        problem = {**named, "detail": error.message}
        console.show_json({"location": path, "sound": False, "files": 1, "size": 0, "problems": [problem], "unchecked": []})
        return
    console.show_line(error.message)
    console.show_line("1 files, 0 B of state: 1 problems")


def show_diff(before: Snapshot, after: Snapshot, found: SnapshotDiff, *, as_json: bool) -> None:
    """Print one row for each state, then the requested differing keys."""
    if as_json:
        console.show_json(describe_diff(before, after, found))
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
    if found.in_flight:
        flights = [(describe_edge(each.edge), each.added, each.removed, each.same) for each in found.in_flight]
        console.show_table(("IN FLIGHT", "ADDED", "REMOVED", "SAME"), flights, empty="")
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


def show_exported(report: ExportReport, *, as_json: bool) -> None:
    """Print one row for each dataset."""
    if as_json:
        flights = {"in_flight": [asdict(flight) for flight in report.in_flight]} if report.in_flight else {}
        console.show_json({"location": report.location, "states": [asdict(state) for state in report.states], **flights})
        return
    rows = [(s.operator, s.state, s.kind, s.rows, len(s.files), size_text(s.size), s.folder) for s in report.states]
    console.show_table(("OPERATOR", "STATE", "KIND", "ROWS", "FILES", "SIZE", "FOLDER"), rows, empty="no states")
    if report.in_flight:
        datasets = [
            (f"{each.source} -> {each.target}", each.rows, len(each.files), size_text(each.size), each.folder)
            for each in report.in_flight
        ]
        console.show_table(("IN FLIGHT", "ROWS", "FILES", "SIZE", "FOLDER"), datasets, empty="")
    console.show_line(report.location)


def show_summary(snapshot: Snapshot, *, verified: bool, as_json: bool) -> None:
    """Print the content of a snapshot."""
    summary = summarise(snapshot)
    if as_json:
        console.show_json({**summary, "verified": verified})
        return
    console.show_line(
        f"{summary['kind']} {summary['checkpoint_id']} of {summary['job_name']} ({summary['job_id']}), "
        f"{console.time_text(summary['trigger_timestamp'])}, {size_text(summary['size'])}"
        f"{', every file verified' if verified else ''}"
    )
    rows = [row for operator in summary["operators"] for row in _rows_of(operator)]
    columns = ("OPERATOR", "PARALLELISM", "OPERATOR SIZE", "STATE", "KIND", "KEY", "TYPE", "FORMAT", "SIZE")
    console.show_table(columns, rows, empty="no operators")
    if "in_flight" in summary:
        flights = [(each["edge"], each["rows"], size_text(each["size"])) for each in summary["in_flight"]]
        console.show_table(("IN FLIGHT", "ROWS", "SIZE"), flights, empty="")
    if summary["external"]:
        console.show_line(f"needs {len(summary['external'])} files outside its folder, the first: {summary['external'][0]}")


def _rows_of(operator: dict[str, Any]) -> list[tuple[Any, ...]]:
    head = (
        operator["uid"],
        f"{operator['parallelism']} of {operator['max_parallelism']}",
        size_text(operator["size"]),
    )
    return [
        (
            *head,
            state["name"],
            state["kind"],
            state["key_type"],
            state["value_type"],
            state["format"],
            size_text(state["size"]),
        )
        for state in operator["states"]
    ] or [(*head, "", "", "", "", "", "")]


def show_rows(snapshot: Snapshot, uid: str, name: str, *, limit: int, as_json: bool) -> None:
    """Print rows of one state. Raises NotFoundError naming the states that exist."""
    rows = list(islice(snapshot.rows(uid, name), limit + 1))
    shown = rows[:limit]
    columns = list(dict.fromkeys(column for row in shown for column in row))
    if as_json:
        document = {"operator": uid, "state": name, "columns": columns, "rows": shown, "truncated": len(rows) > limit}
        console.show_json(document)
        return
    console.show_table([column.upper() for column in columns], [[row.get(c) for c in columns] for row in shown], empty="no rows")
    if len(rows) > limit:
        console.show_line(f"the first {limit} rows; --limit shows more")


TYPE_CHARACTERS_MAX = 32
"""Characters of a state's type in the table, at most."""


def show_report(report: PreflightReport, *, as_json: bool) -> None:
    """Print operators and states, then the problems, then the result."""
    if as_json:
        console.show_json({"fits": report.fits, **msgspec.to_builtins(report)})
        return
    found = report.snapshot
    if found is not None:
        when = console.time_text(found.timestamp_ms)
        what = f"{found.kind} {found.checkpoint_id} of {found.job_name} ({found.job_id}), {when}, {size_text(found.size)}"
        console.show_line(f"{what}, for job {report.job_name} ({report.job_id})")
        if found.owner is not None:
            console.show_line(f"owned by job {found.owner}")
    columns = ("OPERATOR", "IN BOTH?", "SIZE", "PARALLELISM", "STATE", "STATE SIZE", "VERDICT", "STORED", "DECLARED")
    console.show_table(columns, (row for operator in report.operators for row in _rows(operator)), empty="no operators")
    for operator in report.operators:
        for state in operator.states:
            for change in state.changes:
                console.show_line(f"{change.kind}: operator {operator.uid!r}, state {state.name!r}: {change.text}")
    for file in report.files:
        owner = f"operator {file.operator!r} subtask {file.subtask}: " if file.operator else ""
        console.show_line(f"damaged: {owner}{file.path}: {file.detail}")
    if report.unchecked:
        count = len(report.unchecked)
        console.show_line(f"not checked: {count} files outside its folder, the first: {report.unchecked[0]} (give --state-dir)")
    for skipped in report.skipped:
        console.show_line(f"skipped: checkpoint {skipped.checkpoint_id}: {skipped.reason}")
    for sink in report.sinks:
        if sink.may_repeat:
            console.show_line(f"may repeat: output of sink {sink.sink_id!r} (operator {sink.operator!r})")
        if sink.is_muted:
            console.show_line(f"muted: sink {sink.sink_id!r} (operator {sink.operator!r}) writes nothing")
        if sink.is_moved:
            before = sink.stored_path or "where it was"
            if sink.stored_id not in (None, sink.sink_id):
                before += f" as sink {sink.stored_id!r}"
            places = f"writes to {sink.path}, no longer to {before}"
            console.show_line(f"elsewhere: sink {sink.sink_id!r} (operator {sink.operator!r}) {places}")
    for note in report.notes:
        console.show_line(f"note: {note}")
    for refusal in report.refusals:
        console.show_line(f"refused: {refusal.message} [{refusal.kind}]")
    console.show_line("fits" if report.fits else f"does not fit: {len(report.refusals)} reasons")


def _rows(operator: OperatorFinding) -> Iterator[tuple[Any, ...]]:
    renamed = f", renamed to {operator.renamed_to}?" if operator.renamed_to else ""
    head = (operator.uid, f"{operator.presence}{renamed}", size_text(operator.size), _parallelism(operator))
    for state in operator.states:
        pickled = " (pickled)" if state.pickled else ""
        size = "" if state.size is None else size_text(state.size)
        yield (*head, state.name, size, f"{state.verdict}{pickled}", _cut(state.stored), _cut(state.declared))
    if not operator.states:
        yield (*head, "", "", "", "", "")


def _cut(text: str | None) -> str | None:
    """Shorten a type for the table: a record's type fills a screen. Notes, refusals and JSON have the full text."""
    return text if text is None or len(text) <= TYPE_CHARACTERS_MAX else f"{text[: TYPE_CHARACTERS_MAX - 1]}…"


def _parallelism(operator: OperatorFinding) -> str:
    """`2 of 128 -> 3 of 128`."""
    sides = [
        f"{parallelism} of {maximum}"
        for parallelism, maximum in (
            (operator.stored_parallelism, operator.stored_max_parallelism),
            (operator.parallelism, operator.max_parallelism),
        )
        if parallelism is not None
    ]
    return " -> ".join(dict.fromkeys(sides))
