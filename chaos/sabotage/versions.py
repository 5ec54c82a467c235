"""Mistakes of temporal joins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.chaos.sabotage.base import Mutant, Sabotage, constant
from holdfast.operators.functions.joins import temporal
from holdfast.operators.functions.joins.temporal import TemporalJoinOperator

_EARLY_MS = 40


def _looks_ahead(original: Any) -> Any:
    def drop_superseded(self: TemporalJoinOperator, keys: Any, passed: int) -> Iterator[None]:
        yield from original(self, keys, passed + _EARLY_MS)

    return drop_superseded


def _before_the_last(original: Any) -> Any:
    def valid_at(keys: Any, times: Any, versions: Any) -> Any:
        """A version holds from the millisecond behind its time."""
        return original(keys, times - 1, versions)

    return valid_at


def _deletes_too_late(original: Any) -> Any:
    def emit(self: TemporalJoinOperator, due: Any) -> Iterator[None]:
        """A slice of rows leaves the state with the next one."""
        waiting: Any = self._waiting
        waiting.delete = lambda rows: 0
        try:
            yield from original(self, due)
        finally:
            del waiting.delete
        yield
        waiting.delete(due)

    return emit


SABOTAGES = (
    Sabotage(
        "superseded_version_kept",
        "versions stay in the state of a temporal join when no record can need them any more",
        ("I35",),
        (Mutant(TemporalJoinOperator, "_drop_superseded", constant(())),),
        workloads=("versions",),
    ),
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
        (Mutant(TemporalJoinOperator, "_emit", _deletes_too_late),),
        workloads=("versions",),
        seeds_max=60,
    ),
)
