"""Mistakes of windows of row functions: of sessions that are merged, of what a restore brings back, of when state goes."""

from __future__ import annotations

from typing import Any

from holdfast.chaos.sabotage.base import Mutant, Sabotage, constant
from holdfast.operators.functions.windows.merging import Joined, KeySessions
from holdfast.operators.functions.windows.row_functions import WindowOperator
from holdfast.operators.functions.windows.triggers import EventTimeTrigger


def _judged_alone(original: Any) -> Any:
    def add(self: WindowOperator, row: Any, stamp: int) -> bool:
        if stamp + self._gap(row) - 1 + self.settings.lateness_ms <= self._reached.current:
            return False
        taken: bool = original(self, row, stamp)
        return taken

    return add


def _joins_alone(original: Any) -> Any:
    def join(self: KeySessions, start: int, end: int, watermark_ms: int) -> Joined | None:
        return None if end - 1 <= watermark_ms else original(self, start, end, watermark_ms)

    return join


def _forgets_grown(original: Any) -> Any:
    def on_session_timer(self: WindowOperator, timestamp_ms: int, namespace: bytes) -> None:
        stored = self._session_lists.value(())
        if not stored or timestamp_ms >= stored[1] - 1:
            original(self, timestamp_ms, namespace)

    return on_session_timer


def _a_ms_early(original: Any) -> Any:
    def cleanup_time(self: WindowOperator, window: Any) -> int:
        found: int = original(self, window)
        return found - 1

    return cleanup_time


def _joins_a_ms_early(original: Any) -> Any:
    def join(self: KeySessions, start: int, end: int, watermark_ms: int) -> Joined | None:
        joined: Joined | None = original(self, start, end, watermark_ms + 1)
        return joined

    return join


SABOTAGES = (
    Sabotage(
        "merge_without_timer",
        "a session that has grown, or was merged, has no timer at its new end, and never fires",
        ("I1", "I7", "I35"),
        (
            Mutant(WindowOperator, "_set_timers", constant(None)),
            Mutant(WindowOperator, "_on_session_timer", _forgets_grown),
            Mutant(EventTimeTrigger, "on_merge", constant(None)),
        ),
        workloads=("sessions",),
    ),
    Sabotage(
        "revived_session",
        "event time of a session window starts again after a restore: late records open sessions that have fired once more",
        ("I1", "I2", "I7"),
        (Mutant(WindowOperator, "initialize_state", constant(None)),),
        workloads=("sessions",),
        kinds=("crashes", "user_error"),
    ),
    Sabotage(
        "lateness_of_its_own",
        "a record is late by its own window, though the session that it would be merged into is open",
        ("I1", "I2", "I7"),
        (
            Mutant(WindowOperator, "_add_to_session", _judged_alone),
            Mutant(KeySessions, "join", _joins_alone),
            Mutant(WindowOperator, "_grow", constant(0)),
        ),
        workloads=("sessions",),
    ),
    Sabotage(
        "early_cleaning",
        "the contents of a session are gone, and its records late, 1 ms early",
        ("I1", "I2", "I7"),
        (
            Mutant(WindowOperator, "_cleanup_time", _a_ms_early),
            Mutant(KeySessions, "join", _joins_a_ms_early),
            Mutant(WindowOperator, "_grow", constant(0)),
        ),
        workloads=("sessions",),
    ),
)
