"""Checkpoint storage: the port (`operations.py`), its implementations, and where a snapshot's folder lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from statebackends.storage.operations import Storage

__all__ = ["is_absolute_folder", "resolve_folder"]


def is_absolute_folder(folder: str) -> bool:
    """True for a location of its own (`/path`, `file:///path`), False for a folder below the state directory."""
    return "://" in folder or folder.startswith("/")


def resolve_folder(folder: str, default: Storage) -> tuple[Storage, str]:
    """Where a snapshot's folder lies: (storage, folder relative to its root).

    A storage-relative folder (`<job>/chk-42`) is in `default`; an absolute location is the last name below a storage of its own,
    which is reached as `default` is. Raises InvalidConfigError for a location that it does not reach."""
    if not is_absolute_folder(folder):
        return default, folder
    parent, _, name = folder.rstrip("/").rpartition("/")
    if parent.endswith((":/", ":")):
        parent = f"{parent.rstrip('/')}///"
    return default.at(parent or "/"), name
