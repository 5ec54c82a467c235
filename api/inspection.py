"""What is in a snapshot: its operators, states and sizes, without a coordinator and without user code.

Nothing is unpickled and nothing is changed. The rows of one state are for staterows.py."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from api import console, staterows
from coordinator.publication import decode_decision
from coordinator.records import AbortRecord, SavepointRecord
from statebackends.errors import CorruptStateError, NotFoundError, ObjectMissingError
from statebackends.handles import OperatorState
from statebackends.metadata import SnapshotMetadata, decode_metadata
from statebackends.snapshot import METADATA_NAME, SnapshotProblem, verify_snapshot
from statebackends.storage.local import LocalStorage, storage_from_url
from statebackends.storage.operations import ReadFile, run_flow

PROBLEMS_MAX = 5
"""Damaged files that one message names."""


@dataclass(frozen=True, slots=True)
class OpenSnapshot:
    """A snapshot and where its files are."""

    metadata: SnapshotMetadata
    storage: LocalStorage
    folder: str
    """Relative to the storage's root, which is high enough for the files that incremental checkpoints share."""

    @property
    def location(self) -> str:
        return f"{self.storage.root}/{self.folder}"


def open_snapshot(path: Path, *, follow: bool = True) -> OpenSnapshot:
    """The snapshot in a folder, or whose `_metadata` file `path` is; a savepoint's pointer in its job is followed.

    Raises NotFoundError, CorruptStateError, UnsupportedVersionError."""
    place = Path(os.path.expanduser(path)).absolute()  # Path.expanduser raises for a user that is not known
    folder = place.parent if place.name == METADATA_NAME and not place.is_dir() else place
    root = folder.parent.parent if folder.name.startswith("chk-") else folder.parent
    storage = LocalStorage(root)
    relative = folder.relative_to(root).as_posix()
    name = f"{relative}/{METADATA_NAME}"
    try:
        content: bytes = storage.execute(ReadFile(name))
    except ObjectMissingError as error:
        raise NotFoundError(f"{folder} holds no snapshot: there is no {METADATA_NAME} file", path=str(folder)) from error
    match decode_decision(content, name):
        case AbortRecord(checkpoint_id=number, reason=reason, message=message):
            text = f"checkpoint {number} was aborted ({reason}){': ' + message if message else ''}: it has no state"
            raise NotFoundError(text, path=str(folder), checkpoint=number)
        case SavepointRecord(folder=location) if follow:
            return _follow(location, storage)
        case _:
            return OpenSnapshot(decode_metadata(content, str(folder / METADATA_NAME)), storage, relative)


def _follow(location: str, storage: LocalStorage) -> OpenSnapshot:
    if "://" in location:
        return open_snapshot(Path(storage_from_url(location).root), follow=False)
    return open_snapshot(Path(location if location.startswith("/") else f"{storage.root}/{location}"), follow=False)


def verify(snapshot: OpenSnapshot) -> None:
    """Check every file of the snapshot's own. Raises CorruptStateError naming the first damaged ones."""
    problems: list[SnapshotProblem] = run_flow(verify_snapshot(_own_files(snapshot), snapshot.folder), snapshot.storage)
    if problems:
        shown = "; ".join(str(problem) for problem in problems[:PROBLEMS_MAX])
        more = f" (and {len(problems) - PROBLEMS_MAX} more)" if len(problems) > PROBLEMS_MAX else ""
        raise CorruptStateError(f"{snapshot.location}: {shown}{more}", path=problems[0].path, operator=problems[0].operator)


def _own_files(snapshot: OpenSnapshot) -> SnapshotMetadata:
    """A savepoint may have been moved: what it needs outside its folder lies relative to a state directory unknown here."""
    is_checkpoint = snapshot.folder.rpartition("/")[2].startswith("chk-")
    return snapshot.metadata if is_checkpoint else msgspec.structs.replace(snapshot.metadata, external=())


# ------------------------------------------------------------------------------------------------------------- summary


def summarise(snapshot: OpenSnapshot) -> dict[str, Any]:
    """The snapshot as JSON-ready data."""
    metadata = snapshot.metadata
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
        "operators": [_summarise_operator(operator) for operator in metadata.operators],
    }


def _summarise_operator(operator: OperatorState) -> dict[str, Any]:
    return {
        "uid": operator.uid,
        "operator_id": operator.operator_id,
        "name": operator.name,
        "parallelism": operator.parallelism,
        "max_parallelism": operator.max_parallelism,
        "size": operator.size,
        "states": _summarise_states(operator),
    }


def _summarise_states(operator: OperatorState) -> list[dict[str, Any]]:
    """One entry per state; native files hold all states of an operator, so that a state's own size is unknown (-1)."""
    states: dict[str, dict[str, Any]] = {}
    for subtask in operator.subtasks:
        for keyed in subtask.keyed:
            for index, meta in enumerate(keyed.states):
                entry = states.setdefault(
                    meta.name,
                    {
                        "name": meta.name,
                        "kind": meta.kind,
                        "value_type": meta.value_type,
                        "key_type": meta.key_type,
                        "format": keyed.format,
                        "size": 0,
                        "entries": -1,
                    },
                )
                if keyed.format == staterows.NATIVE:
                    entry["size"] = -1
                else:
                    entry["size"] += keyed.parts[index].length
        for listed in subtask.operator:
            entry = states.setdefault(
                listed.state.name,
                {
                    "name": listed.state.name,
                    "kind": listed.state.kind,
                    "value_type": listed.state.value_type,
                    "key_type": None,
                    "format": "list",
                    "size": 0,
                    "entries": 0,
                },
            )
            entry["size"] += listed.size
            entry["entries"] += listed.count
    return [states[name] for name in sorted(states)]


def show_summary(snapshot: OpenSnapshot, *, verified: bool, as_json: bool) -> None:
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


def show_rows(snapshot: OpenSnapshot, uid: str, name: str, *, limit: int, as_json: bool) -> None:
    """Print rows of one state. Raises NotFoundError naming what there is."""
    operators = {operator.uid: operator for operator in snapshot.metadata.operators}
    operator = operators.get(uid)
    if operator is None:
        known = ", ".join(sorted(operators)) or "none"
        raise NotFoundError(f"the snapshot has no operator {uid!r}; it has: {known}", operator=uid)
    known_states = [state["name"] for state in _summarise_states(operator)]
    if name not in known_states:
        raise NotFoundError(
            f"operator {uid!r} has no state {name!r}; it has: {', '.join(known_states) or 'none'}", operator=uid, state=name
        )
    rows = staterows.read_rows(operator, name, snapshot.storage, snapshot.folder, limit=limit + 1)
    shown = rows[:limit]
    columns = list(dict.fromkeys(column for row in shown for column in row))
    if as_json:
        document = {"operator": uid, "state": name, "columns": columns, "rows": shown, "truncated": len(rows) > limit}
        console.show_json(document)
        return
    console.show_table([column.upper() for column in columns], [[row.get(c) for c in columns] for row in shown], empty="no rows")
    if len(rows) > limit:
        console.show_line(f"the first {limit} rows; --limit shows more")
