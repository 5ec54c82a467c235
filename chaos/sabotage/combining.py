"""Mistakes of combiners, which hold records back on their way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from holdfast.barriers.elements import Batch, CheckpointBarrier, Element, ElementEvent, Watermark
from holdfast.barriers.exchange.channels import OutputGate
from holdfast.chaos.sabotage.base import Mutant, Sabotage, constant
from holdfast.operators.functions.combining import ColumnarCombiner


def _overtaken_by(kind: type[ElementEvent]) -> Any:
    """An event of this kind does not wait for what is held."""

    def make(original: Any) -> Any:
        def event(self: ColumnarCombiner, event: ElementEvent) -> Sequence[Element]:
            return (event,) if isinstance(event, kind) else original(self, event)

        return event

    return make


def _never_empties(original: Any) -> Any:
    def combined(self: ColumnarCombiner) -> Batch:
        """What has gone is still there, and goes with the next records once more."""
        kept = [(accumulator, [column.copy() for column in accumulator.columns]) for accumulator in self._accumulators]
        batch: Batch = original(self)
        for accumulator, columns in kept:
            for column, before in zip(accumulator.columns, columns, strict=True):
                np.copyto(column, before)
        return batch

    return combined


WAITING = Mutant(OutputGate, "flush_all", constant(None))
"""What is held waits for its time, though its worker has nothing else to do: no mistake by itself, but one shows more often."""

SABOTAGES = (
    Sabotage(
        "overtaken_by_barrier",
        "records that are being combined are held over a barrier: the state in front of it lacks them",
        ("I1", "I7"),
        (Mutant(ColumnarCombiner, "event", _overtaken_by(CheckpointBarrier)), WAITING),
        workloads=("windows", "aggregate"),
    ),
    Sabotage(
        "overtaken_by_watermark",
        "a watermark overtakes the records that are being combined in front of it, which are late then",
        ("I1", "I4", "I7"),
        (Mutant(ColumnarCombiner, "event", _overtaken_by(Watermark)), WAITING),
        workloads=("windows",),
    ),
    Sabotage(
        "combined_twice",
        "what was combined and has gone is added to the next combined rows once more",
        ("I1", "I7"),
        (Mutant(ColumnarCombiner, "_combined", _never_empties),),
        workloads=("windows", "aggregate"),
    ),
)
