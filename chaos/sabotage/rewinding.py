"""Mistakes when a user goes back to an older snapshot: output is repeated without permission, or the abandoned line continues."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import holdfast.coordinator.restore.plan as plan_module
import holdfast.operators.sinks.files.log as log_module
from holdfast.chaos.sabotage.base import Mutant, Sabotage
from holdfast.coordinator.ha.records import RestorePoint
from holdfast.coordinator.jobmaster.lifecycle import Lifecycle
from holdfast.statebackends.storage.port import Flow


def _finds_none(original: Any) -> Any:
    def find_rewind(*arguments: Any, **named: Any) -> Flow[None]:
        yield from ()

    return find_rewind


def _claims_for_whoever_allows(original: Any) -> Any:
    def must_claim(*arguments: Any) -> Any:
        *others, claimant = arguments
        return original(*others, replace(claimant, allow_output_repeat=True))

    return must_claim


def _is_the_newest_of_all(original: Any) -> Any:
    def restore_point(self: Lifecycle) -> RestorePoint | None:
        newest = self._coordinator.newest
        if newest is None:
            return self._setup.base
        return RestorePoint(newest.checkpoint_id, newest.folder, newest.timestamp_ms, newest.kind)

    return property(restore_point)


SABOTAGES = (
    Sabotage(
        "unasked_rewind",
        "a job goes back behind its output without its user's permission to repeat it",
        ("I22",),
        (
            Mutant(plan_module, "find_rewind", _finds_none),
            Mutant(log_module, "_must_claim", _claims_for_whoever_allows),
        ),
        kinds=("rewind",),
        seeds_max=60,
    ),
    Sabotage(
        "resumed_line",
        "a job that its user took back starts from the newest checkpoint of the abandoned line",
        ("I16",),
        (Mutant(Lifecycle, "restore_point", _is_the_newest_of_all),),
        kinds=("rewind",),
    ),
)
