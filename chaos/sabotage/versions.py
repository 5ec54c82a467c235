"""Mistakes of temporal joins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.chaos.sabotage.base import Mutant, Sabotage
from holdfast.operators.functions.joins import temporal
from holdfast.operators.functions.joins.temporal import TemporalJoinOperator

_EARLY_MS = 40


def _looks_ahead(original: Any) -> Any:
    def drop_superseded(self: TemporalJoinOperator, keys: Any, passed: int) -> None:
        original(self, keys, passed + _EARLY_MS)

    return drop_superseded


def _before_the_last(original: Any) -> Any:
    def valid_at(keys: Any, times: Any, versions: Any) -> Any:
        """A version holds from the millisecond behind its time."""
        return original(keys, times - 1, versions)

    return valid_at


def _deletes_too_late(original: Any) -> Any:
    def fire_due(self: TemporalJoinOperator) -> Iterator[None]:
        """A slice of rows leaves the state with the next one."""
        while len(rows := self._waiting.until(self._reached.current, self.rows_per_slice_max)):
            self._emit(rows)
            yield
            self._waiting.delete(rows)
        yield from original(self)

    return fire_due


SABOTAGES = (
    Sabotage(
        "needed_version_dropped",
        "a version goes when the next one of its key is near, while records that need it wait",
        ("I1", "I2", "I7"),
        (Mutant(TemporalJoinOperator, "_drop_superseded", _looks_ahead),),
        workloads=("versions",),
    ),
    Sabotage(
        "stale_version",
        "a record takes the version that was valid a millisecond before its time",
        ("I1", "I2", "I7"),
        (Mutant(temporal, "valid_at", _before_the_last),),
        workloads=("versions",),
    ),
    Sabotage(
        "asked_again",
        "a record that a barrier finds emitted by a temporal join is in the snapshot, and comes out again",
        ("I2", "I7"),
        (Mutant(TemporalJoinOperator, "_fire_due", _deletes_too_late),),
        workloads=("versions",),
        seeds_max=60,
    ),
)
