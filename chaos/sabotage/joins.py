"""Mistakes of joins of event time."""

from __future__ import annotations

from typing import Any

from holdfast.chaos.sabotage.base import Mutant, Sabotage
from holdfast.operators.functions.joins.buffers import SideBuffer
from holdfast.operators.functions.joins.interval import IntervalJoinOperator


def _one_millisecond_early(original: Any) -> Any:
    def due_until(self: SideBuffer, watermark_ms: int) -> int:
        return int(original(self, watermark_ms + 1))

    return due_until


def _made_by_both(original: Any) -> Any:
    def make_pairs(self: IntervalJoinOperator) -> None:
        """Of two rows of one time either makes the pair."""
        arrival = self._arrivals[0]
        original(self)
        found = self.buffers[1 - arrival.side].rows.probe(arrival.keys, (arrival.times, arrival.times)).next(1 << 15)
        if found is not None and len(found):
            self._emit_pairs(arrival, found)

    return make_pairs


def _forgets_partners(original: Any) -> Any:
    def found(self: SideBuffer, rows: Any) -> None:
        """Rows that have found a partner still wait for one."""

    return found


def _keeps_rows(original: Any) -> Any:
    def clean(self: SideBuffer, watermark_ms: int) -> None:
        """Nothing goes."""

    return clean


SABOTAGES = (
    Sabotage(
        "hasty_buffer",
        "a row goes from the buffer of a join 1 ms before its last partner may come",
        ("I1", "I2", "I7"),
        (Mutant(SideBuffer, "due_until", _one_millisecond_early),),
        workloads=("joins",),
    ),
    Sabotage(
        "partner_forgotten",
        "a row that has found a partner comes out without one, too",
        ("I2", "I7"),
        (Mutant(SideBuffer, "found", _forgets_partners),),
        workloads=("joins",),
    ),
    Sabotage(
        "pair_made_twice",
        "a pair of two rows of one time is made by each of them",
        ("I2", "I7"),
        (Mutant(IntervalJoinOperator, "_make_pairs", _made_by_both),),
        workloads=("joins",),
    ),
    Sabotage(
        "uncleaned_buffer",
        "rows stay in the buffer of a join for which no partner can follow",
        ("I35",),
        (Mutant(SideBuffer, "clean", _keeps_rows), Mutant(SideBuffer, "clean_exactly", _keeps_rows)),
        workloads=("joins",),
    ),
)
