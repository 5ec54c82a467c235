"""Mistakes of windows with late records: which are dropped, what is counted, what a restore remembers of event time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from barriers.elements import MIN_WATERMARK, Batch
from chaos.sabotage.base import Mutant, Sabotage, constant
from operators.functions.window import TumblingWindowOperator

Stamps = npt.NDArray[np.int64]


def _takes_every_record(original: Any) -> Any:
    def windows_of(self: TumblingWindowOperator, batch: Batch, stamps: Stamps) -> Any:
        watermark_ms, self._watermark = self._watermark, MIN_WATERMARK
        try:
            return original(self, batch, stamps)
        finally:
            self._watermark = watermark_ms

    return windows_of


def _drops_behind_the_watermark(original: Any) -> Any:
    def windows_of(self: TumblingWindowOperator, batch: Batch, stamps: Stamps) -> Any:
        in_time = stamps > self._watermark
        self.context.counters.late_dropped += len(stamps) - int(np.count_nonzero(in_time))
        batch = batch.filter(in_time)
        return original(self, batch, stamps[in_time]) if batch.num_rows else (0, batch)

    return windows_of


def _drops_in_silence(original: Any) -> Any:
    def windows_of(self: TumblingWindowOperator, batch: Batch, stamps: Stamps) -> Any:
        counted = self.context.counters.late_dropped
        found = original(self, batch, stamps)
        self.context.counters.late_dropped = counted
        return found

    return windows_of


SABOTAGES = (
    Sabotage(
        "revived_window",
        "a late record opens its window again, which fires a second time",
        ("I2", "I7", "I4"),
        (Mutant(TumblingWindowOperator, "_windows_of", _takes_every_record),),
        workloads=("late",),
    ),
    Sabotage(
        "forgotten_watermark",
        "event time of a window begins anew after a restore: what is late is taken for a while",
        ("I2", "I7", "I4"),
        (Mutant(TumblingWindowOperator, "initialize_state", constant(None)),),
        workloads=("late",),
        kinds=("crashes", "user_error"),
    ),
    Sabotage(
        "hasty_lateness",
        "a record behind the watermark is dropped although its window is open",
        ("I1", "I7", "I4"),
        (Mutant(TumblingWindowOperator, "_windows_of", _drops_behind_the_watermark),),
        workloads=("late",),
    ),
    Sabotage(
        "uncounted_late",
        "late records are dropped without being counted",
        ("I4",),
        (Mutant(TumblingWindowOperator, "_windows_of", _drops_in_silence),),
        workloads=("late",),
    ),
)
