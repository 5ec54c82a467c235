"""Content of a snapshot: operators, states and sizes, and rows of one state; for people and as JSON.

It needs no coordinator and no user code: nothing is unpickled and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from holdfast.api.snapshots.snapshot import Snapshot, SnapshotOperator
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.handles import StateMeta
from holdfast.statebackends.snapshot.in_flight import describe_edge
from holdfast.statebackends.snapshot.in_flight import summarise as in_flight
from holdfast.statebackends.snapshot.metadata import HookState
from holdfast.statebackends.snapshot.parts import SnapshotProblem
from holdfast.statebackends.state_processor.diff import FlightDiff, SnapshotDiff, StateDiff
from holdfast.statebackends.state_processor.verify import VerifyReport

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
    flights = [{"edge": describe_edge(each.name), "rows": each.rows, "size": each.size} for each in in_flight(metadata.in_flight)]
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
        **({"in_flight": flights} if flights else {}),
        **({"master_hooks": [_summarise_hook(hook) for hook in metadata.hooks]} if metadata.hooks else {}),
    }


def _summarise_hook(hook: HookState) -> dict[str, Any]:
    return {"name": hook.name, "version": hook.version, "size": len(hook.state)}


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


def describe_verified(snapshot: Snapshot, report: VerifyReport) -> dict[str, Any]:
    """Result of a verification as JSON-ready data."""
    return {
        "location": snapshot.location,
        "sound": report.is_sound,
        "files": report.files,
        "size": report.size,
        "problems": [_problem(problem) for problem in report.problems],
        "unchecked": [{"path": each.path, "reason": each.reason} for each in report.unchecked],
    }


def _problem(problem: SnapshotProblem) -> dict[str, Any]:
    return {
        "kind": problem.kind.value,
        "path": problem.path,
        "operator": problem.operator or None,
        "subtask": problem.subtask if problem.subtask >= 0 else None,
        "detail": problem.detail,
    }


def describe_diff(
    before: Snapshot, after: Snapshot, found: SnapshotDiff, *, shown: Callable[[Any], Any] = lambda value: value
) -> dict[str, Any]:
    """Difference of two snapshots as JSON-ready data; `shown`: form of keys and values, which are of any type."""
    return {
        "before": before.location,
        "after": after.location,
        "same": found.is_same,
        "operators_added": list(found.operators_added),
        "operators_removed": list(found.operators_removed),
        "states": [_state_diff(state, shown) for state in found.states],
        **({"in_flight": [_flight_diff(each) for each in found.in_flight]} if found.in_flight else {}),
    }


def _state_diff(state: StateDiff, shown: Callable[[Any], Any]) -> dict[str, Any]:
    values = ("key", "namespace", "entry", "before", "after")
    return {
        "operator": state.operator,
        "state": state.state,
        "before": _described(state.before),
        "after": _described(state.after),
        "added": state.added,
        "removed": state.removed,
        "changed": state.changed,
        "same": state.same,
        "keys": [{"change": key.change, **{name: shown(getattr(key, name)) for name in values}} for key in state.keys],
    }


def _described(meta: StateMeta | None) -> dict[str, Any] | None:
    return None if meta is None else {"kind": meta.kind, "key_type": meta.key_type, "value_type": meta.value_type}


def _flight_diff(found: FlightDiff) -> dict[str, Any]:
    return {"edge": describe_edge(found.edge), "added": found.added, "removed": found.removed, "same": found.same}
