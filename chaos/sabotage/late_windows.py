"""Mistakes of windows that fire again for late records."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.barriers.elements import Batch
from holdfast.chaos.sabotage.base import Mutant, Sabotage
from holdfast.operators.functions.windows.columnar import ColumnarWindowOperator
from holdfast.operators.functions.windows.sliding import SlidingWindowOperator


def _without_the_last_record(original: Any) -> Any:
    def fire_again(self: SlidingWindowOperator, keys: Any, panes: npt.NDArray[np.int64]) -> None:
        """The window has the record; that it fires again is forgotten."""
        rows = np.arange(len(panes) - 1)
        if len(rows):
            original(self, keys.take(rows), panes[:-1])

    return fire_again


def _cleans_what_has_fired(original: Any) -> Any:
    def clean(self: SlidingWindowOperator, start: int) -> None:
        original(self, max(start, self._passed(self._reached.current)))

    return clean


def _counts_alone(original: Any) -> Any:
    def take_late(self: ColumnarWindowOperator, batch: Batch, is_late: npt.NDArray[np.bool_]) -> None:
        self._count_late(batch.filter(is_late))

    return take_late


SABOTAGES = (
    Sabotage(
        "forgotten_refire",
        "the last late record of a batch does not fire its windows again",
        ("I1",),
        (Mutant(SlidingWindowOperator, "_fire_again", _without_the_last_record),),
        workloads=("late_windows",),
    ),
    Sabotage(
        "hasty_forgetting",
        "the state of a window goes when it fires, in spite of its lateness",
        ("I1", "I2", "I7"),
        (Mutant(SlidingWindowOperator, "_clean", _cleans_what_has_fired),),
        workloads=("late_windows",),
    ),
    Sabotage(
        "lost_late_records",
        "late records are counted, and do not reach the late output",
        ("I1", "I4"),
        (Mutant(ColumnarWindowOperator, "_take_late", _counts_alone),),
        workloads=("late_windows",),
    ),
)
