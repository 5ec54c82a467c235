"""Mistakes of windows that are merged from panes."""

from __future__ import annotations

from typing import Any

from holdfast.chaos.sabotage.base import Mutant, Sabotage
from holdfast.operators.functions.windows.sliding import SlidingWindowOperator
from holdfast.statebackends.columnar.panes import WindowPanes
from holdfast.statebackends.columnar.parts import AccumulatorColumns, Slots


def _without_the_last_pane(original: Any) -> Any:
    def add_until(self: WindowPanes, first: int, start: int, there: dict[int, int]) -> None:
        original(self, first, start, {number: pane for number, pane in there.items() if number != first + self._panes - 1})

    return add_until


def _without_the_first_row(original: Any) -> Any:
    def saved(self: AccumulatorColumns, slots: Slots) -> Any:
        """What is put back of the first row is the initial value."""
        found = original(self, slots)
        for column, part in zip(found, self.parts, strict=False):
            column[:1] = part.initial
        return found

    return saved


def _cleans_a_window_early(original: Any) -> Any:
    def clean(self: SlidingWindowOperator, start: int) -> None:
        original(self, start + self.windows.slide_ms)

    return clean


SABOTAGES = (
    Sabotage(
        "left_out_pane",
        "the last pane of a sliding window is not merged",
        ("I1", "I2"),
        (Mutant(WindowPanes, "_add_until", _without_the_last_pane),),
        workloads=("sliding",),
    ),
    Sabotage(
        "forgetful_merge",
        "a row of a pane that is taken back loses what the other panes of its window hold",
        ("I1", "I2"),
        (Mutant(AccumulatorColumns, "saved", _without_the_first_row),),
        workloads=("sliding",),
    ),
    Sabotage(
        "hasty_cleaning",
        "panes go while a window that has them is still open",
        ("I1", "I2", "I7"),
        (Mutant(SlidingWindowOperator, "_clean", _cleans_a_window_early),),
        workloads=("sliding",),
    ),
)
