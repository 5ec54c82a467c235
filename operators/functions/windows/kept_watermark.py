"""The event time of an operator as its snapshots keep it, so that what fired stays fired, and what was late stays late."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK
from holdfast.operators.base import OperatorContext
from holdfast.operators.functions.windows.kept_entries import kept_entries
from holdfast.statebackends.backend import OperatorListState
from holdfast.statebackends.state import OperatorListStateDescriptor, Redistribution

WATERMARKS = OperatorListStateDescriptor("watermarks", Redistribution.UNION, of_event_time=True)
"""One entry a subtask: its watermark, ms, 8 bytes."""
LATE_UNTIL = OperatorListStateDescriptor("late_until", Redistribution.UNION, of_event_time=True)
"""One entry a subtask: up to where windows were late, ms, 8 bytes. What was late stays late if the lateness grows."""
_MOMENT_BYTES = 8


def kept_moments(context: OperatorContext, state: OperatorListStateDescriptor) -> list[int]:
    """Of each subtask that stored one, ms. Raises CorruptStateError."""
    return kept_entries(context, state.name, "event time", _moment, lambda moment_ms: True)


def _moment(entry: bytes) -> int:
    if len(entry) != _MOMENT_BYTES:
        raise msgspec.ValidationError(f"{len(entry)} bytes, and not {_MOMENT_BYTES}")
    return int.from_bytes(entry, "big", signed=True)


def restored_moment(context: OperatorContext, state: OperatorListStateDescriptor) -> int | None:
    """Where an operator goes on; None: no subtask stored a moment.

    The highest of all subtasks: at an aligned cut they have heard the same watermarks, but an input that returned from idleness may
    have let one go further than another. What it has fired stays fired; what the others have not is in their state, and is due.
    With records in flight they have not heard the same: the runtime gives a subtask its own moment alone, and at another
    parallelism the lowest makes no record late that waits in front of it."""
    kept = kept_moments(context, state)
    if not kept:
        return None
    return min(kept) if context.restores_in_flight else max(kept)


def keep_moment(state: OperatorListState, moment_ms: int) -> None:
    """As the entry of this subtask."""
    state.update([moment_ms.to_bytes(_MOMENT_BYTES, "big", signed=True)])


class KeptWatermark:
    """Event time of one subtask. The maximum of a drain is not kept, for a resumed job has a future."""

    __slots__ = ("current", "kept")

    def __init__(self) -> None:
        self.current = MIN_WATERMARK
        self.kept = MIN_WATERMARK

    def restore(self, context: OperatorContext) -> None:
        moment_ms = restored_moment(context, WATERMARKS)
        self.current = self.kept = MIN_WATERMARK if moment_ms is None else moment_ms

    def store(self, state: OperatorListState) -> None:
        keep_moment(state, self.kept)

    def advance(self, watermark_ms: int) -> None:
        self.current = max(self.current, watermark_ms)
        if watermark_ms < MAX_WATERMARK:
            self.kept = max(self.kept, watermark_ms)  # `current` is the maximum in a drain that a restore goes on with

    def end_drain(self) -> None:
        """All that was there is out; what comes goes on from where the drain began."""
        self.current = self.kept

    def count_late(self, context: OperatorContext, stamps: npt.NDArray[np.int64]) -> None:
        """Count late records by their times; at least one."""
        counters = context.counters
        counters.late_dropped += len(stamps)
        counters.late_ms_max = max(counters.late_ms_max, self.behind(int(stamps.min())))

    def behind(self, timestamp_ms: int) -> int:
        """ms by which a record is behind the watermark; the maximum of a drain is no moment."""
        return self.kept - timestamp_ms
