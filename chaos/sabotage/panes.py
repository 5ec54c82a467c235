"""Mistakes of windows that are merged from panes."""

from __future__ import annotations

from typing import Any

from holdfast.chaos.sabotage.base import Mutant, Sabotage
from holdfast.operators.functions.windows.columnar import ColumnarWindowOperator
from holdfast.operators.functions.windows.sliding import SlidingWindowOperator
from holdfast.statebackends.columnar.panes import WindowPanes
from holdfast.statebackends.columnar.parts import AccumulatorColumns, Slots


def _without_the_last_pane(original: Any) -> Any:
    def there(self: WindowPanes, start: int, stop: int) -> list[int]:
        return [pane for pane in original(self, start, stop) if (self._number(pane) + 1) % self._panes]

    return there


def _without_the_first_row(original: Any) -> Any:
    def saved(self: AccumulatorColumns, slots: Slots) -> Any:
        """What is put back of the first row is the initial value."""
        found = original(self, slots)
        for column, part in zip(found, self.parts, strict=False):
            column[:1] = part.initial
        return found

    return saved


def _knows_no_firings(original: Any) -> Any:
    def restore_fired(self: ColumnarWindowOperator) -> list[tuple[int, int, int]]:
        return []

    return restore_fired


def _cleans_a_window_early(original: Any) -> Any:
    def clean(self: SlidingWindowOperator, start: int) -> None:
        original(self, start + self.windows.slide_ms)

    return clean


SABOTAGES = (
    Sabotage(
        "left_out_pane",
        "the last pane of a block is not merged into its windows",
        ("I1", "I2"),
        (Mutant(WindowPanes, "_there", _without_the_last_pane),),
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
    Sabotage(
        "forgotten_firings",
        "behind a restore it is not known up to where windows have fired",
        ("I1", "I2"),
        (Mutant(ColumnarWindowOperator, "_restore_fired", _knows_no_firings),),
        workloads=("sliding",),
    ),
)
