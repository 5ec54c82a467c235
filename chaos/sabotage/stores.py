"""Mistakes of the store on a directory: durability, and create-if-absent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chaos.sabotage.base import Mutant, Sabotage
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


SABOTAGES = (
    Sabotage(
        "unsynced_write",
        "a file is given its name before its bytes are durable",
        ("I11", "I16", "I19"),
        (Mutant(LocalStorage, "_make", _does_not_sync),),
        kinds=("power_loss",),
    ),
    Sabotage(
        "overwriting_put",
        "put-if-absent overwrites what stands",
        ("I13", "I12"),
        (Mutant(LocalStorage, "_put_if_absent", _overwrites),),
    ),
)
