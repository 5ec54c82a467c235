"""Mistakes of tables: a threshold that comes too early, a deletion that a checkpoint forgets, a row that should not be kept."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.chaos.sabotage.base import Mutant, Sabotage, constant
from holdfast.operators.functions.tables import top
from holdfast.statebackends.columnar import state as columnar_state
from holdfast.statebackends.row_tables.table import SortedRowTable


def _of_keys_with_free_ranks(original: Any) -> Any:
    def last_rows(self: Any) -> Any:
        """The last row of every key, whether it has the last rank or not."""
        places = self._starts + np.minimum(self._counts, self._limit) - 1
        return self.owners[places], self.order[places]

    return last_rows


def _unnoted(original: Any) -> Any:
    def note_deleted(self: SortedRowTable, run: Any, positions: Any) -> None:
        """The rows are dead here, and alive in the checkpoint before."""

    return note_deleted


def _always_better(original: Any) -> Any:
    def comes_before(count: int, *arguments: Any, **options: Any) -> Any:
        return np.ones(count, np.bool_)

    return comes_before


SABOTAGES = (
    Sabotage(
        "hasty_threshold",
        "a key of a top-N has a threshold before all its ranks are taken",
        ("I1", "I2", "I7"),
        (Mutant(top.Ranked, "last_rows", _of_keys_with_free_ranks),),
        workloads=("topn",),
    ),
    Sabotage(
        "lost_deletions",
        "an increment of a row table lacks the deletions since its base",
        ("I7",),
        (Mutant(SortedRowTable, "_note_deleted", _unnoted),),
        workloads=("topn",),
    ),
    Sabotage(
        "newest_by_arrival",
        "of two rows of a key the one that came last is kept, whatever they are compared by",
        ("I1", "I2", "I5", "I7"),
        (Mutant(columnar_state, "comes_before", _always_better),),
        workloads=("topn",),
    ),
    Sabotage(
        "fired_top_kept",
        "the rows of a window whose top has fired stay in state",
        ("I35", "I2", "I7"),
        (Mutant(SortedRowTable, "drop", constant(None)),),
        workloads=("window_top",),
    ),
)
