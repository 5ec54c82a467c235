"""CORE: what is known of a drill, and when the next one is due. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.views import DrillMark

PROBLEMS_MAX = 20
"""Problems of one drill that are told one by one; all are counted."""
PROBLEMS_RECORDED_MAX = 5
PROBLEM_CHARS_MAX = 1_000
RETRY_MS = 60_000
"""Pause behind a drill that found nothing out; doubled with each further one, up to the interval of scheduled drills."""


class DrillState(StrEnum):
    RUNNING = "running"
    PASSED = "passed"
    """Every row of every state was read, and as many as are told."""
    FAILED = "failed"
    """Problems were found: it can't be restored as it is, or not all of it."""
    ERROR = "error"
    """Nothing is known: storage failed, a limit was reached, the process died, or the snapshot was deleted meanwhile."""


class DrillReport(msgspec.Struct, frozen=True):
    """What the process of a drill found."""

    operators: int = -1
    states: int = -1
    """States that were read, in-flight records of an edge among them."""
    rows: int = -1
    size: int = -1
    """Bytes of state and of in-flight records, as `_metadata` says."""
    problem_count: int = 0
    problems: tuple[str, ...] = ()
    """The first ones."""
    error: str = ""
    """Why nothing is known; empty: it was read."""


class DrillView(msgspec.Struct, frozen=True):
    """One drill of one snapshot."""

    drill_id: str
    checkpoint_id: int
    kind: CheckpointKind
    location: str
    state: DrillState
    by: str
    """`user` or `schedule`."""
    started_ms: int
    duration_ms: int = -1
    operators: int = -1
    states: int = -1
    rows: int = -1
    size: int = -1
    problem_count: int = 0
    problems: tuple[str, ...] = ()
    error: str = ""

    def ended(self, report: DrillReport, now_ms: int) -> DrillView:
        state = DrillState.ERROR if report.error else DrillState.FAILED if report.problem_count else DrillState.PASSED
        return msgspec.structs.replace(
            self,
            state=state,
            duration_ms=max(0, now_ms - self.started_ms),
            operators=report.operators,
            states=report.states,
            rows=report.rows,
            size=report.size,
            problem_count=report.problem_count,
            problems=tuple(problem[:PROBLEM_CHARS_MAX] for problem in report.problems[:PROBLEMS_MAX]),
            error=report.error[:PROBLEM_CHARS_MAX],
        )

    def facts(self) -> dict[str, Any]:
        """For the job's history, and its own file."""
        facts: dict[str, Any] = msgspec.to_builtins(self)
        return {**facts, "problems": facts["problems"][:PROBLEMS_RECORDED_MAX]}


class Verification(msgspec.Struct, frozen=True):
    """All files of a snapshot were read and checked, by their lengths and checksums; no row was decoded."""

    checkpoint_id: int
    began_ms: int
    problem_count: int = 0
    first_problem: str = ""


def verified_ms(drills: Sequence[DrillView], verifications: Sequence[Verification]) -> int:
    """When the newest one began that found every file as it was written: a drill reads all of them by their checksums; -1: none."""
    sound = (each.began_ms for each in verifications if not each.problem_count)
    return max(drilled_ms(drills), max(sound, default=-1))


def drilled_ms(drills: Sequence[DrillView]) -> int:
    """When the newest drill that passed began; -1: none has."""
    return max((drill.started_ms for drill in drills if drill.state is DrillState.PASSED), default=-1)


def mark_of(drills: Sequence[DrillView], overdue_ms: int) -> DrillMark:
    """Of the newest drill that found something out, whichever began last."""
    last = _last_told(drills)
    if last is None:
        return DrillMark(overdue_ms=overdue_ms)
    return DrillMark(last.started_ms, last.state is DrillState.FAILED, overdue_ms)


def _last_told(drills: Sequence[DrillView]) -> DrillView | None:
    told = (drill for drill in drills if drill.state in (DrillState.PASSED, DrillState.FAILED))
    return max(told, key=lambda drill: drill.started_ms, default=None)


def told_due_ms(interval_ms: int, newest_id: int, drills: Sequence[DrillView], started_ms: int) -> int | None:
    """When a drill on schedule should have found something out about the newest checkpoint, whatever ended in an error since; None
    if one has, or there is none. Arguments are those of `is_due`."""
    last = _last_told(drills)
    if newest_id < 0 or (last is not None and last.checkpoint_id == newest_id):
        return None
    return (last.started_ms if last is not None else started_ms) + interval_ms


def is_due(interval_ms: int | None, newest_id: int, drills: Sequence[DrillView], started_ms: int, now_ms: int) -> bool:
    """Whether the newest checkpoint is to be drilled now.

    `newest_id`: of the newest completed one, -1: none. `started_ms`: when the job began, before which no drill can have been
    due. The same checkpoint is drilled again only if nothing was found out about it. Drills of a time to come, by a clock that
    was ahead, say no more than that. Behind an error the pause is `retry_pause_ms`: storage that failed for a minute would leave a
    daily drill out for a day."""
    if interval_ms is None or newest_id < 0 or any(drill.state is DrillState.RUNNING for drill in drills):
        return False
    past = [drill for drill in drills if drill.started_ms <= now_ms]
    last = max(past, key=lambda drill: drill.started_ms, default=None)
    newest = [drill for drill in drills if drill.started_ms > now_ms] + ([last] if last is not None else [])
    if any(drill.checkpoint_id == newest_id and drill.state is not DrillState.ERROR for drill in newest):
        return False
    since_ms = last.started_ms if last is not None else started_ms
    return now_ms - since_ms >= retry_pause_ms(interval_ms, past)


def retry_pause_ms(interval_ms: int, drills: Sequence[DrillView]) -> int:
    """From the beginning of the newest drill to that of the next one on schedule: RETRY_MS doubled with each further error in a
    row, at most the interval; the interval if the newest one found something out."""
    errors = 0
    for drill in sorted(drills, key=lambda each: each.started_ms, reverse=True):
        if drill.state is not DrillState.ERROR:
            break
        errors += 1
    return min(interval_ms, RETRY_MS << (errors - 1)) if errors else interval_ms
