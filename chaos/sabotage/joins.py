"""Mistakes of joins of event time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.chaos.sabotage.base import Mutant, Sabotage
from holdfast.operators.functions.joins.buffers import Arrival, SideBuffer
from holdfast.statebackends.row_tables.table import SortedRowTable
from holdfast.statebackends.state import NO_ORDER


def _one_millisecond_early(original: Any) -> Any:
    def due_until(self: SideBuffer, watermark_ms: int) -> int:
        return int(original(self, watermark_ms + 1))

    return due_until


def _loses_deletions(original: Any) -> Any:
    def note_deleted(self: SortedRowTable, run: Any, positions: Any) -> None:
        """What the next increment says of rows that older ones have."""

    return note_deleted


def _forgets_how_far(original: Any) -> Any:
    def restored_pending(self: SideBuffer, side: int) -> Iterator[Arrival]:
        """Rows that were cut off make all of their pairs again."""
        for arrival in original(self, side):
            arrival.after[:] = NO_ORDER
            yield arrival

    return restored_pending


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
        ("I1", "I2"),
        (Mutant(SideBuffer, "due_until", _one_millisecond_early),),
        workloads=("joins",),
    ),
    Sabotage(
        "lost_deletions",
        "an increment of a row table does not say which older rows were deleted",
        ("I1", "I2", "I7", "I11", "I35"),
        (Mutant(SortedRowTable, "_note_deleted", _loses_deletions),),
        workloads=("joins",),
    ),
    Sabotage(
        "partner_forgotten",
        "a row that has found a partner comes out without one, too",
        ("I2",),
        (Mutant(SideBuffer, "found", _forgets_partners),),
        workloads=("joins",),
    ),
    Sabotage(
        "pair_made_twice",
        "a row that a barrier cut off between two of its pairs makes those in front of it again",
        ("I2", "I7"),
        (Mutant(SideBuffer, "restored_pending", _forgets_how_far),),
        workloads=("joins",),
    ),
    Sabotage(
        "uncleaned_buffer",
        "rows stay in the buffer of a join for which no partner can follow",
        ("I35",),
        (Mutant(SideBuffer, "clean_exactly", _keeps_rows),),
        workloads=("joins",),
    ),
)
