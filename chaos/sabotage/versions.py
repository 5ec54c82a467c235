"""Mistakes of temporal joins."""

from __future__ import annotations

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
)
