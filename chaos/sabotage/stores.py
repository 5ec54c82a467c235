"""Mistakes of the store on a directory: durability, and create-if-absent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chaos.faults import Fault
from chaos.sabotage.base import Mutant, Sabotage, throughout
from statebackends.storage.local import LocalStorage


def _does_not_sync(original: Any) -> Any:
    def make(self: LocalStorage, path: str, fill: Callable[[int], None]) -> None:
        descriptor = self._fs.create(path)
        try:
            fill(descriptor)
        finally:
            self._fs.close(descriptor)

    return make


def _overwrites(original: Any) -> Any:
    def put_if_absent(self: LocalStorage, target: str, data: bytes) -> bool:
        self._unlink(target)
        created: bool = original(self, target, data)
        return created

    return put_if_absent


def _believes_its_eyes(original: Any) -> Any:
    def put_if_absent(self: LocalStorage, target: str, data: bytes) -> bool:
        if self._stat(target) is not None:
            return False
        created: bool = original(self, target, data)
        return created

    return put_if_absent


SABOTAGES = (
    Sabotage(
        "unsynced_write",
        "a file is given its name before its bytes are durable",
        ("I11", "I16", "I19"),
        (Mutant(LocalStorage, "_make", _does_not_sync),),
        kinds=("power_loss",),
    ),
    Sabotage(
        "unsynced_found",
        "a name that is found counts as durable, though its writer may not have got so far",
        ("I14", "I11", "I12", "I13", "I15", "I16", "I19"),
        (Mutant(LocalStorage, "_put_if_absent", _believes_its_eyes),),
        workloads=("counter", "windows", "ends", "fanout"),
        plan=(
            throughout("store_unsynced", "coordinator:PutIfAbsent", probability=0.5),
            Fault("power_loss", on="coordinator.send.complete", nth=7, amount=1),
        ),
        seeds_max=60,
    ),
    Sabotage(
        "overwriting_put",
        "put-if-absent overwrites what stands",
        ("I13", "I12"),
        (Mutant(LocalStorage, "_put_if_absent", _overwrites),),
    ),
)
