"""Checkpoint storage: the port (`port.py`), its implementations, and where a snapshot's folder lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.statebackends.layout import is_checkpoint_folder

if TYPE_CHECKING:
    from holdfast.statebackends.storage.port import Storage

__all__ = ["is_absolute_folder", "resolve_folder", "split_folder"]


def is_absolute_folder(folder: str) -> bool:
    """True for a location of its own (`/path`, `file:///path`), False for a folder below the state directory."""
    return "://" in folder or folder.startswith("/")


def resolve_folder(folder: str, default: Storage) -> tuple[Storage, str]:
    """Where a snapshot's folder lies: (storage, folder relative to its root).

    A storage-relative folder (`<job>/chk-42`) is in `default`; an absolute location is below a storage of its own (`split_folder`),
    which is reached as `default` is. Raises InvalidConfigError for a location that it does not reach."""
    if not is_absolute_folder(folder):
        return default, folder
    parent, relative = split_folder(folder)
    if parent.endswith((":/", ":")):
        parent = f"{parent.rstrip('/')}///"
    return default.at(parent or "/"), relative


def split_folder(location: str) -> tuple[str, str]:
    """(location of a storage, folder relative to it) of a snapshot at an absolute location.

    The storage is as high as what the snapshot may name: a checkpoint shares files with others in its job's directory."""
    parent, _, name = location.rstrip("/").rpartition("/")
    if is_checkpoint_folder(name):
        above, _, job = parent.rpartition("/")
        if job and not above.endswith((":", ":/", "/")):
            return above, f"{job}/{name}"
    return parent, name
