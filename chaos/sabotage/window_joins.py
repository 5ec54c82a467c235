"""Mistakes of window joins and cogroups."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from holdfast.chaos.sabotage.base import Mutant, Sabotage
from holdfast.operators.functions.joins import windowed
from holdfast.operators.functions.joins.windowed import WindowedOperator, WindowJoinOperator
from holdfast.operators.functions.windows.firing import FiringOperator

_EARLY_MS = 5


def _forgets_what_has_begun(original: Any) -> Any:
    def snapshot_state(self: WindowJoinOperator, checkpoint_id: int) -> None:
        """Which partners of a row were emitted is not stored."""
        self._begun = None
        original(self, checkpoint_id)

    return snapshot_state


def _in_a_hurry(original: Any) -> Any:
    def ended_sessions(self: WindowedOperator, keys: Any, times: tuple[int, int], gap_ms: int) -> Any:
        return original(self, keys, (times[0], times[1] + _EARLY_MS), gap_ms - _EARLY_MS if gap_ms > _EARLY_MS else gap_ms)

    return ended_sessions


def _of_the_left_alone(original: Any) -> Any:
    def put_aside(late: Any, tag: str, operator: Any, reached: Any) -> None:
        """Late rows that go to the second side output are lost."""
        if tag != operator.late_tags[1]:
            original(late, tag, operator, reached)

    return put_aside


def _keeps_the_right(original: Any) -> Any:
    def fire_window(self: WindowJoinOperator, end: int) -> Iterator[None]:
        right: Any = self._right
        right.drop = lambda namespace: None
        try:
            yield from original(self, end)
        finally:
            del right.drop

    return fire_window


def _loses_what_was_due(original: Any) -> Any:
    def fire(self: Any) -> Iterator[None]:
        """What the barrier found due leaves the state, and goes nowhere."""
        if not self._is_behind:
            yield from original(self)
            return
        output, self.output = self.output, SimpleNamespace(collect=lambda batch: None)
        try:
            yield from original(self)
        finally:
            self.output = output

    return fire


def _stores_what_was_emitted(original: Any) -> Any:
    def snapshot_state(self: WindowedOperator, checkpoint_id: int) -> None:
        """Rows that are emitted leave the state with their window alone."""
        emitted, self._emitted = self._emitted, []
        original(self, checkpoint_id)
        self._emitted = emitted

    return snapshot_state


SABOTAGES = (
    Sabotage(
        "begun_row_forgotten",
        "which partners of a row have been emitted at a barrier is not in the snapshot",
        ("I2", "I7"),
        (Mutant(WindowJoinOperator, "snapshot_state", _forgets_what_has_begun),),
        workloads=("window_joins",),
        seeds_max=60,
    ),
    Sabotage(
        "hasty_session_join",
        "sessions of a join have a shorter gap than declared, and end before their last record may come",
        ("I1", "I2", "I7"),
        (Mutant(WindowedOperator, "_ended_sessions", _in_a_hurry),),
        workloads=("window_joins",),
        seeds_max=60,
    ),
    Sabotage(
        "late_side_lost",
        "late rows of a join's right side are neither counted nor in the late output",
        ("I32",),
        (Mutant(windowed, "put_aside", _of_the_left_alone),),
        workloads=("window_joins",),
        seeds_max=60,
    ),
    Sabotage(
        "fired_window_kept",
        "the right rows of a window of a join stay when it has fired",
        ("I35", "I2", "I7"),
        (Mutant(WindowJoinOperator, "_fire_window", _keeps_the_right),),
        workloads=("window_joins",),
        seeds_max=60,
    ),
    Sabotage(
        "due_rows_lost",
        "what a join had due at a barrier, and had not emitted, is lost behind a restore",
        ("I1", "I2", "I7", "I32"),
        (Mutant(FiringOperator, "_fire", _loses_what_was_due),),
        workloads=("window_joins", "versions"),
        seeds_max=60,
    ),
    Sabotage(
        "emitted_rows_stored",
        "rows that a window join has emitted are in the snapshot of a barrier that cuts their window",
        ("I2", "I7"),
        (Mutant(WindowedOperator, "snapshot_state", _stores_what_was_emitted),),
        workloads=("window_joins",),
        seeds_max=60,
    ),
)
