"""What is in a snapshot: its operators, states and sizes, and rows of one state; for people and as JSON.

Without a coordinator and without user code: nothing is unpickled and nothing is changed."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from typing import Any

from holdfast.api import console
from holdfast.api.snapshots.snapshot import Snapshot, SnapshotOperator
from holdfast.statebackends.errors import CorruptStateError

PROBLEMS_MAX = 5
"""Damaged files that one message names."""


def verify(snapshot: Snapshot) -> None:
    """Check every file of the snapshot's own. Raises CorruptStateError naming the first damaged ones."""
    problems = snapshot.verify().problems
    if problems:
        shown = "; ".join(str(problem) for problem in problems[:PROBLEMS_MAX])
        more = f" (and {len(problems) - PROBLEMS_MAX} more)" if len(problems) > PROBLEMS_MAX else ""
        raise CorruptStateError(f"{snapshot.location}: {shown}{more}", path=problems[0].path, operator=problems[0].operator)


def summarise(snapshot: Snapshot) -> dict[str, Any]:
    """The snapshot as JSON-ready data."""
    metadata = snapshot.metadata
    ids = {operator.uid: operator.operator_id for operator in metadata.operators}
    return {
        "location": snapshot.location,
        "job_id": metadata.job_id,
        "job_name": metadata.job_name,
        "checkpoint_id": metadata.checkpoint_id,
        "kind": metadata.kind,
        "version": metadata.version,
        "attempt": metadata.attempt,
        "trigger_timestamp": metadata.trigger_timestamp_ms,
        "completion_timestamp": metadata.completion_timestamp_ms,
        "size": metadata.size,
        "external": list(metadata.external),
        "operators": [_summarise_operator(operator, ids[operator.uid]) for operator in snapshot.operators.values()],
    }


def _summarise_operator(operator: SnapshotOperator, operator_id: str) -> dict[str, Any]:
    return {
        "uid": operator.uid,
        "operator_id": operator_id,
        "name": operator.name,
        "parallelism": operator.parallelism,
        "max_parallelism": operator.max_parallelism,
        "size": operator.size,
        "states": [asdict(state) for state in operator.states.values()],
    }


def show_summary(snapshot: Snapshot, *, verified: bool, as_json: bool) -> None:
    """Print what is in a snapshot."""
    summary = summarise(snapshot)
    if as_json:
        console.show_json({**summary, "verified": verified})
        return
    console.show_line(
        f"{summary['kind']} {summary['checkpoint_id']} of {summary['job_name']} ({summary['job_id']}), "
        f"{console.time_text(summary['trigger_timestamp'])}, {console.size_text(summary['size'])}"
        f"{', every file verified' if verified else ''}"
    )
    rows = [row for operator in summary["operators"] for row in _rows_of(operator)]
    columns = ("OPERATOR", "PARALLELISM", "OPERATOR SIZE", "STATE", "KIND", "KEY", "TYPE", "FORMAT", "SIZE")
    console.show_table(columns, rows, empty="no operators")
    if summary["external"]:
        console.show_line(f"needs {len(summary['external'])} files outside its folder, the first: {summary['external'][0]}")


def _rows_of(operator: dict[str, Any]) -> list[tuple[Any, ...]]:
    head = (
        operator["uid"],
        f"{operator['parallelism']} of {operator['max_parallelism']}",
        console.size_text(operator["size"]),
    )
    return [
        (
            *head,
            state["name"],
            state["kind"],
            state["key_type"],
            state["value_type"],
            state["format"],
            console.size_text(state["size"]),
        )
        for state in operator["states"]
    ] or [(*head, "", "", "", "", "", "")]


def show_rows(snapshot: Snapshot, uid: str, name: str, *, limit: int, as_json: bool) -> None:
    """Print rows of one state. Raises NotFoundError naming what there is."""
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
