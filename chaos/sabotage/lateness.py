"""Mistakes of windows with late records: which are dropped, what is counted, what a restore remembers of event time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.barriers.elements import MIN_WATERMARK, Batch
from holdfast.chaos.sabotage.base import Mutant, Sabotage, constant, throughout
from holdfast.coordinator.jobmaster.lifecycle import Lifecycle
from holdfast.coordinator.totals import Totals
from holdfast.operators.functions.windows.columnar import TumblingWindowOperator
from holdfast.operators.task.input import TaskInput
from holdfast.operators.task.snapshots import SubtaskCheckpointCoordinator

Stamps = npt.NDArray[np.int64]


def _takes_every_record(original: Any) -> Any:
    def windows_of(self: TumblingWindowOperator, batch: Batch, stamps: Stamps) -> Any:
        watermark_ms, self._reached.current = self._reached.current, MIN_WATERMARK
        try:
            return original(self, batch, stamps)
        finally:
            self._reached.current = watermark_ms

    return windows_of


def _drops_behind_the_watermark(original: Any) -> Any:
    def windows_of(self: TumblingWindowOperator, batch: Batch, stamps: Stamps) -> Any:
        in_time = stamps > self._reached.current
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


def _goes_on_from_the_last_count(original: Any) -> Any:
    def totals_restored(self: Lifecycle) -> Totals:
        return {} if self.execution is None else self.execution.totals()

    return totals_restored


def _counts_when_stored(original: Any) -> Any:
    """Counters of a cut are those of the moment at which its state is durable."""

    def ended(self: SubtaskCheckpointCoordinator, running: Any, states: Any, error: BaseException | None) -> None:
        running.counted = self._chain.metrics()
        original(self, running, states, error)

    return ended


def _empties_at_once(original: Any) -> Any:
    """All rows of a window leave the state when it begins to fire, and are emitted in slices."""

    def fire(self: TumblingWindowOperator, start: int) -> Iterator[None]:
        rows = self._state.read(start, 0, self._state.row_count(start))
        self._state.remove(start)
        for offset in range(0, rows.num_rows, self.rows_per_slice_max):
            self.output.collect(self._result(start, rows.slice(offset, self.rows_per_slice_max)))
            yield

    return fire


def _drains_each_source(original: Any) -> Any:
    def end_of_data(self: TaskInput, *, drain: bool, stopped: bool) -> Any:
        return original(self, drain=drain, stopped=False)

    return end_of_data


SABOTAGES = (
    Sabotage(
        "revived_window",
        "a late record opens its window again, which fires a second time",
        ("I2", "I7", "I4", "I35"),
        (Mutant(TumblingWindowOperator, "_windows_of", _takes_every_record),),
        workloads=("late",),
    ),
    Sabotage(
        "forgotten_watermark",
        "event time of a window starts again after a restore: late records are taken for a while",
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
    Sabotage(
        "counted_again",
        "a restarted attempt continues the last counters, and counts what it reads again a second time",
        ("I4",),
        (Mutant(Lifecycle, "_totals_restored", _goes_on_from_the_last_count),),
        workloads=("late",),
        kinds=("crashes", "user_error"),
    ),
    Sabotage(
        "forgotten_counts",
        "the counters of a job start again with each attempt",
        ("I4",),
        (Mutant(Lifecycle, "_totals_restored", constant({})),),
        workloads=("late",),
        kinds=("crashes", "user_error"),
    ),
    Sabotage(
        "counted_behind_the_cut",
        "an acknowledgement has the counters of the moment at which it is sent, and not those of its cut",
        ("I4",),
        (Mutant(SubtaskCheckpointCoordinator, "_ended", _counts_when_stored),),
        workloads=("late",),
    ),
    Sabotage(
        "emptied_window",
        "a window that begins to fire has left the state, though a barrier may come before its last rows",
        ("I7", "I1"),
        (Mutant(TumblingWindowOperator, "_fire_window", _empties_at_once),),
        workloads=("windows",),
        plan=(throughout("slow_operator", "window/firing", amount=40),),
        seeds_max=40,
    ),
    Sabotage(
        "drained_apart",
        "a drain that was ordered ends event time source by source: what is read behind it is late where the others were ahead",
        ("I1", "I7"),
        (Mutant(TaskInput, "_end_of_data", _drains_each_source),),
        workloads=("windows", "timers"),
        kinds=("drain",),
        seeds_max=60,
    ),
)
