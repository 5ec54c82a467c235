"""Mistakes of the stores: durability and create-if-absent on a directory, requests without an answer on S3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from holdfast.chaos.faults.faults import Fault
from holdfast.chaos.sabotage.base import Mutant, Sabotage, throughout
from holdfast.statebackends.storage.directory import TEMPORARY_FOLDER, LocalStorage
from holdfast.statebackends.storage.s3_connection import FailureKind, RequestFailure
from holdfast.statebackends.storage.s3_transfer import Found, Transfers


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


def _believes_silence(original: Any) -> Any:
    def decide(self: Transfers, key: str, nonce: str, create: Callable[[], Any]) -> bool:
        def believing() -> Any:
            try:
                return create()
            except RequestFailure as failure:
                if failure.kind is not FailureKind.UNCLEAR:
                    raise
                return {}

        decided: bool = original(self, key, nonce, believing)
        return decided

    return decide


def _claims_all(original: Any) -> Any:
    def head_once(self: Transfers, key: str) -> Found | None:
        found: Found | None = original(self, key)
        if found is None or TEMPORARY_FOLDER in key.split("/"):  # the shell would detect and refuse a store that does this
            return found
        return replace(found, nonce=_OWN)

    return head_once


class _Own(str):
    """Equal to anything that it is compared with."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True


_OWN = _Own()


def _believes_its_eyes(original: Any) -> Any:
    def put_if_absent(self: LocalStorage, target: str, data: bytes) -> bool:
        if self._stat(target) is not None:
            return False
        created: bool = original(self, target, data)
        return created

    return put_if_absent


def _looks_only(original: Any) -> Any:
    return lambda self, target: self._stat(target) is not None


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
        (Mutant(LocalStorage, "_put_if_absent", _believes_its_eyes), Mutant(LocalStorage, "_make_durable", _looks_only)),
        workloads=("counter", "windows", "ends", "fanout"),
        plan=(
            throughout("store_unsynced", "coordinator:PutIfAbsent", probability=0.5),
            Fault("power_loss", on="coordinator.send.complete", nth=7, amount=1),
        ),
        seeds_max=60,
    ),
    Sabotage(
        "overwriting_put",
        "put-if-absent overwrites an existing file",
        ("I13", "I12"),
        (Mutant(LocalStorage, "_put_if_absent", _overwrites),),
    ),
    Sabotage(
        "believed_silence",
        "a create that S3 did not answer counts as done",
        ("I11", "I12", "I13", "I14", "I16", "I30"),
        (Mutant(Transfers, "_decide", _believes_silence),),
        plan=(throughout("store_fails", "PutIfAbsent", probability=0.3),),
        seeds_max=60,
    ),
    Sabotage(
        "claimed_name",
        "a create that finds its name taken on S3 counts as done",
        ("I12", "I13", "I30"),
        (Mutant(Transfers, "_head_once", _claims_all),),
        seeds_max=60,
    ),
)
