"""Storage of a location as users write it: the only module that knows all kinds of storage."""

from __future__ import annotations

from holdfast.statebackends.storage import is_s3
from holdfast.statebackends.storage.directory import LocalStorage, folder_of
from holdfast.statebackends.storage.port import Storage


def open_storage(location: str) -> Storage:
    """Storage of a path, a `file:///` or an `s3://bucket/prefix` URL. Its `at` reaches locations of every kind.

    Sends and creates nothing. Raises InvalidConfigError for another scheme, or with the package to install."""
    if is_s3(location):
        from holdfast.statebackends.storage.s3 import open_s3

        return open_s3(location, elsewhere=open_storage)
    return LocalStorage(folder_of(location), elsewhere=open_storage)


def open_output(location: str, beside: Storage | None = None) -> Storage:
    """Storage of a sink's output, which other programs read. `beside`: a storage whose access it shares (`at`)."""
    storage = open_storage(location) if beside is None else beside.at(location)
    return storage.for_output() if isinstance(storage, LocalStorage) else storage
