"""From a location, as people write it, to a storage: the one place that knows all kinds."""

from __future__ import annotations

from holdfast.statebackends.storage.directory import LocalStorage, folder_of
from holdfast.statebackends.storage.port import Storage
from holdfast.statebackends.storage.s3 import is_s3, open_s3


def open_storage(location: str) -> Storage:
    """Storage of a path, a `file:///` or an `s3://bucket/prefix` URL; it reaches (`at`) every other one, too.

    Raises InvalidConfigError naming any other scheme, or saying what to install. Nothing is sent or created yet."""
    if is_s3(location):
        return open_s3(location, elsewhere=open_storage)
    return LocalStorage(folder_of(location), elsewhere=open_storage)


def open_output(location: str, beside: Storage | None = None) -> Storage:
    """Storage of what a sink writes for other programs. `beside`: the storage whose reach it shares."""
    storage = open_storage(location) if beside is None else beside.at(location)
    return storage.for_output() if isinstance(storage, LocalStorage) else storage
