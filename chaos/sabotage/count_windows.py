"""Mistakes of windows of so many records."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.chaos.sabotage.base import Mutant, Sabotage
from holdfast.operators.functions.windows.columnar_counts import CountWindowOperator
from holdfast.statebackends.columnar.counted import CountedPanes
from holdfast.statebackends.columnar.state import NumpyColumnarState


def _counts_without_contents(original: Any) -> Any:
    def open_(self: CountWindowOperator) -> None:
        """Behind a restore it is known how many records came, and not what they were."""
        original(self)
        state: Any = self._state
        for namespace in state.namespaces():
            state.reset(namespace, np.arange(state.row_count(namespace)), 1)

    return open_


def _one_record_more(original: Any) -> Any:
    def move(self: CountedPanes, places: Any, positions: Any) -> None:
        """Of keys that have a window which is not full."""
        original(self, places, positions + (positions % self._slide == self._slide - 2))

    return move


def _not_anew(original: Any) -> Any:
    def reset(self: NumpyColumnarState, namespace: int, slots: Any, first: int) -> None:
        original(self, namespace, slots[1:], first)

    return reset


SABOTAGES = (
    Sabotage(
        "counted_without_contents",
        "behind a restore a count window knows how many records it has, and no more what they were",
        ("I1", "I2", "I7"),
        (Mutant(CountWindowOperator, "open", _counts_without_contents),),
        workloads=("count_windows",),
    ),
    Sabotage(
        "one_record_short",
        "a count window that lacks two records takes one, and is full",
        ("I1", "I2", "I7"),
        (Mutant(CountedPanes, "_move", _one_record_more),),
        workloads=("count_windows",),
    ),
    Sabotage(
        "full_window_kept",
        "records of a count window that was full stay in the next one",
        ("I1", "I2", "I7"),
        (Mutant(NumpyColumnarState, "reset", _not_anew),),
        workloads=("count_windows",),
    ),
)
