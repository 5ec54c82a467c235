"""Checkpoint storage: the port (port.py), its implementations, and the storage of a snapshot's folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.statebackends.layout import is_checkpoint_folder

if TYPE_CHECKING:
    from holdfast.statebackends.storage.port import Storage

__all__ = ["S3_SCHEME", "is_absolute_folder", "is_s3", "resolve_folder", "split_folder"]

S3_SCHEME = "s3://"


def is_s3(location: str) -> bool:
    """Whether a location is in a bucket: that can be told without s3.py, which few processes need."""
    return location.startswith(S3_SCHEME)


def is_absolute_folder(folder: str) -> bool:
    """Whether a folder is an absolute location (`/path`, `file:///path`), and not one below the state directory."""
    return "://" in folder or folder.startswith("/")


def resolve_folder(folder: str, default: Storage) -> tuple[Storage, str]:
    """(storage, folder relative to its root) of a snapshot's folder.

    A relative folder (`<job>/chk-42`) is in `default`; an absolute location is in another storage (`split_folder`), reached by
    `default.at`. Raises InvalidConfigError for a location that `default` does not reach."""
    if not is_absolute_folder(folder):
        return default, folder
    parent, relative = split_folder(folder)
    if parent.endswith((":/", ":")):
        parent = f"{parent.rstrip('/')}///"
    return default.at(parent or "/"), relative


def split_folder(location: str) -> tuple[str, str]:
    """(location of a storage, folder relative to it) of a snapshot at an absolute location.

    For a checkpoint the storage is its state directory, since it shares files with others of its job; else the parent folder."""
    parent, _, name = location.rstrip("/").rpartition("/")
    if is_checkpoint_folder(name):
        above, _, job = parent.rpartition("/")
        if job and not above.endswith((":", ":/", "/")):
            return above, f"{job}/{name}"
    return parent, name
