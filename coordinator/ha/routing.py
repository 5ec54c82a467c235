"""SHELL: one storage port over the state directory and all other locations, by path.

One flow can decide an id in the job's directory and write into a savepoint's folder anywhere. The storages behind it perform the
operations."""

from __future__ import annotations

import threading
from typing import Any

from msgspec.structs import replace

from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.storage import is_absolute_folder, resolve_folder
from holdfast.statebackends.storage.port import (
    DeleteFolder,
    DescribeFiles,
    LinkFile,
    ListFiles,
    ListFolder,
    Operation,
    Storage,
    copies_links,
    transfers_of,
)
from holdfast.statebackends.storage.transfers import TransferPool

STORAGES_MAX = 64
"""Storages of other locations that are kept; the oldest is forgotten first."""


class RoutedStorage:
    """Implements `storage/port.py`, Storage. A relative path is in the default storage, an absolute one in a storage of its own."""

    def __init__(self, default: Storage) -> None:
        self._default = default
        self._storages: dict[str, Storage] = {}
        self._lock = threading.Lock()

    @property
    def root(self) -> str:
        return self._default.root

    @property
    def copies_links(self) -> bool:
        """Of the default storage, where alone files are linked."""
        return copies_links(self._default)

    @property
    def transfers(self) -> TransferPool:
        """Of the default storage: other locations have few files."""
        return transfers_of(self._default)

    def resolve(self, folder: str) -> tuple[Storage, str]:
        """Storage and relative folder of a snapshot; the same storage object for the same root."""
        storage, relative = resolve_folder(folder, self._default)
        return storage if storage is self._default else self._known(storage), relative

    def at(self, location: str) -> Storage:
        """The same storage object for the same root."""
        return self._known(self._default.at(location))

    def _known(self, storage: Storage) -> Storage:
        with self._lock:
            known = self._storages.setdefault(storage.root, storage)
            while len(self._storages) > STORAGES_MAX:
                del self._storages[next(iter(self._storages))]
        return known

    def execute(self, operation: Operation) -> Any:
        """Perform one operation on the storage of its path; listed paths are absolute if the given one is."""
        if isinstance(operation, LinkFile):
            return self._default.execute(operation)
        if isinstance(operation, ListFiles | DescribeFiles | ListFolder | DeleteFolder):
            return self._on_folder(operation)
        if not is_absolute_folder(operation.path):
            return self._default.execute(operation)
        _check_inside(operation.path)
        folder, _, name = operation.path.rpartition("/")
        storage, relative = self.resolve(folder)
        return storage.execute(replace(operation, path=f"{relative}/{name}"))

    def _on_folder(self, operation: ListFiles | DescribeFiles | ListFolder | DeleteFolder) -> Any:
        if not is_absolute_folder(operation.prefix):
            return self._default.execute(operation)
        _check_inside(operation.prefix)
        storage, relative = self.resolve(operation.prefix)
        result = storage.execute(replace(operation, prefix=relative))
        if isinstance(operation, ListFiles):
            return [operation.prefix + path.removeprefix(relative) for path in result]
        if isinstance(operation, DescribeFiles):
            return [fact._replace(path=operation.prefix + fact.path.removeprefix(relative)) for fact in result]
        return result


def _check_inside(path: str) -> None:
    """Raise InvalidConfigError for `.` or `..` in an absolute path: names of files come from acknowledgements and snapshots, and
    must not lead out of the folder that they are joined to. The storage itself checks relative paths."""
    if any(part in (".", "..") for part in path.split("/")):
        raise InvalidConfigError(f"{path!r} must not contain '.' or '..'", path=path)
