"""Faults of the disk shared by the workers of a host: local copies of state truncated, changed, mixed up or deleted, and no space
left.

A copy of a table may be another name of a file that a database has open, so no file is changed in place: a damaged copy takes the
name of the good one."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import holdfast.statebackends.local_recovery.copies as copies_module
import holdfast.statebackends.local_recovery.storage as local_storage_module
import holdfast.statebackends.rocksdb.database as database_module
from holdfast.statebackends.local_recovery.copies import LOCK_NAME, RECOVERY_FOLDER

SPARED_SHARE = 0.2
"""Share of copies that stay unchanged."""


def damage_copies(local_directory: str, rng: random.Random) -> int:
    """Damage most copies of all jobs and workers of this host; returns how many."""
    root = Path(local_directory, RECOVERY_FOLDER)
    copies = sorted(path for path in root.glob("*/*/*") if path.name != LOCK_NAME)
    chosen = [path for path in copies if rng.random() >= SPARED_SHARE]
    contents = [path.read_bytes() for path in chosen]
    for path, content in zip(chosen, contents, strict=True):
        damaged = _damaged(content, contents, rng)
        if damaged is None:
            path.unlink()
        else:
            beside = path.with_name(f"{path.name}.damaged")
            beside.write_bytes(damaged)
            os.replace(beside, path)
    return len(chosen)


def _damaged(content: bytes, others: list[bytes], rng: random.Random) -> bytes | None:
    """Content of a damaged copy; None: it is deleted."""
    match rng.randrange(5):
        case 0:
            return None
        case 1:
            return content[: rng.randrange(len(content) + 1)]
        case 2:
            return rng.choice(others)
        case 3:
            return bytes(len(content))
        case _:
            at = rng.randrange(max(1, len(content)))
            return content[:at] + bytes(byte ^ 0x20 for byte in content[at : at + 1]) + content[at + 1 :]


@contextmanager
def limited_disk(is_full: Callable[[], bool], root: str) -> Iterator[None]:
    """Within the block RocksDB opens no database below `root` and no copy is kept or used while the disk is full; each raises its
    own error. It is process-wide, as a host's disk is for all workers of a run; who reads a snapshot from outside has another."""
    words = os.strerror(errno.ENOSPC)

    def database(original: Callable[..., Any]) -> Callable[..., Any]:
        def open_if_room(folder: str, *arguments: Any, **options: Any) -> Any:
            if folder.startswith(root) and is_full():  # plain Exception, as rocksdict raises it
                raise Exception(f"IO error: {words}: While appending to file: {folder}/MANIFEST-000005: {words}")
            return original(folder, *arguments, **options)

        return open_if_room

    def copy(original: Callable[..., Any]) -> Callable[..., Any]:
        def write_if_room(*arguments: Any, **options: Any) -> Any:
            if is_full():
                raise OSError(errno.ENOSPC, words)
            return original(*arguments, **options)

        return write_if_room

    places: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (database_module, "Rdict", database),
        (copies_module, "bring", copy),
        (copies_module, "_write", copy),
        (local_storage_module, "bring", copy),
    )
    with ExitStack() as undone:
        for module, name, limited in places:
            original = getattr(module, name)
            undone.callback(setattr, module, name, original)
            setattr(module, name, limited(original))
        yield
