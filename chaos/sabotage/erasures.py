"""Mistakes of erasures: where the key stays though there is a certificate."""

from __future__ import annotations

from typing import Any

import holdfast.coordinator.ownership.erasures as erasures_module
import holdfast.operators.task.snapshots as snapshots_module
from holdfast.barriers.erasure import Erasure
from holdfast.chaos.sabotage.base import Mutant, Sabotage, constant
from holdfast.coordinator.checkpoints.completed import CompletedCheckpointStore
from holdfast.operators.task.snapshots import SubtaskCheckpointCoordinator
from holdfast.statebackends.backend import KeyedStateBackend
from holdfast.statebackends.rocksdb.database import RocksStore


def _erases_behind_the_cut(original: Any) -> Any:
    """Each state is frozen with the key, which goes from the live one right behind."""

    def freeze(self: SubtaskCheckpointCoordinator, node: Any, barrier: Any) -> Any:
        waiting: list[tuple[str, KeyedStateBackend, Erasure]] = []
        kept, snapshots_module._erase = snapshots_module._erase, lambda *what: waiting.append(what)
        try:
            part = original(self, node, barrier)
        finally:
            snapshots_module._erase = kept
        for what in waiting:
            kept(*what)
        return part

    return freeze


def _erases_in_the_first_subtask(original: Any) -> Any:
    def erase(uid: str, backend: KeyedStateBackend, erasure: Erasure) -> None:
        if backend.key_groups.start == 0:
            original(uid, backend, erasure)

    return erase


SABOTAGES = (
    Sabotage(
        "older_ones_kept",
        "checkpoints before an erasure stay as long as retention keeps them, and nobody looks before there is a certificate",
        ("I46",),
        (Mutant(CompletedCheckpointStore, "erased", constant(None)), Mutant(erasures_module, "derive_older", constant({}))),
        workloads=("forgetting",),
    ),
    Sabotage(
        "erased_behind_the_cut",
        "a key is erased behind the freeze of the state, so that the checkpoint of its erasure has it",
        ("I46",),
        (Mutant(SubtaskCheckpointCoordinator, "_freeze", _erases_behind_the_cut),),
        workloads=("forgetting",),
    ),
    Sabotage(
        "erased_in_one_subtask",
        "a key is erased by the first subtask alone, whoever owns its key group",
        ("I46",),
        (Mutant(snapshots_module, "_erase", _erases_in_the_first_subtask),),
        workloads=("forgetting",),
    ),
    Sabotage(
        "unpurged_tables",
        "of RocksDB a tombstone counts as an erasure: later checkpoints store the tables below it",
        ("I46",),
        (Mutant(RocksStore, "purge", constant(None)),),
        workloads=("forgetting",),
        backend="rocksdb",
    ),
)
