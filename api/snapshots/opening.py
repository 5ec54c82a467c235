"""Where a snapshot is: a path or URL to a storage and a folder in it; a savepoint's pointer in its job is followed.

Nothing is unpickled and nothing is changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from coordinator.publication import decode_decision
from coordinator.records import AbortRecord, SavepointRecord
from statebackends.errors import InvalidConfigError, NotFoundError, ObjectMissingError
from statebackends.metadata import decode_metadata
from statebackends.snapshot import METADATA_NAME
from statebackends.snapshots.contents import StoredSnapshot, check_contents
from statebackends.storage.locations import open_storage
from statebackends.storage.operations import ListFolder, ReadFile, Storage

Location = str | os.PathLike[str]
"""A path, or a URL that `open_storage` knows."""


class Place(NamedTuple):
    """A folder in a storage."""

    storage: Storage
    folder: str
    """Relative to the storage's root, never empty."""

    @property
    def location(self) -> str:
        return f"{self.storage.root.rstrip('/')}/{self.folder}"


def place_of(location: Location, *, levels: int = 1) -> Place:
    """The folder at a path or URL, in a storage whose root is `levels` above it. Raises InvalidConfigError."""
    text = absolute_location(location)
    scheme, mark, path = text.rpartition("://")
    segments = [segment for segment in path.split("/") if segment]
    if mark:  # the first segment of a URL is its host or bucket
        bucket, *segments = segments or [""]
        root = f"{scheme}://{bucket}"
    else:
        root = ""
    if not segments or ".." in segments:
        raise InvalidConfigError(f"{os.fspath(location)!r} is not the folder of a snapshot", path=os.fspath(location))
    above = segments[:-levels]
    return Place(open_storage("/".join([root, *above]) or "/"), "/".join(segments[len(above) :]))


def absolute_location(location: Location) -> str:
    """A path from the root, or a URL other than file://, which is a path."""
    text = os.fspath(location)
    if not text or "\0" in text:
        raise InvalidConfigError("the location of the snapshot is empty", path=text)
    if text.startswith("file:"):
        text = str(open_storage(text).root)
    if "://" in text:
        return text
    return os.path.normpath(Path(os.path.expanduser(text)).absolute())  # Path.expanduser raises for a user that is not known


def open_snapshot(location: Location, *, follow: bool = True) -> StoredSnapshot:
    """The snapshot in a folder, or whose `_metadata` file `location` is; a savepoint's pointer in its job is followed.

    Raises NotFoundError, CorruptStateError, UnsupportedVersionError, StorageUnavailableError."""
    text = absolute_location(location).rstrip("/") or "/"
    if text.rpartition("/")[2] == METADATA_NAME:
        text = text.rpartition("/")[0] or "/"
    levels = 2 if text.rpartition("/")[2].startswith("chk-") else 1
    place = place_of(text, levels=levels)
    try:
        content: bytes = place.storage.execute(ReadFile(f"{place.folder}/{METADATA_NAME}"))
    except ObjectMissingError as error:
        raise _no_snapshot(place) from error
    path = f"{place.location}/{METADATA_NAME}"
    match decode_decision(content, path):
        case AbortRecord(checkpoint_id=number, reason=reason, message=message):
            said = f"checkpoint {number} was aborted ({reason}){': ' + message if message else ''}: it has no state"
            raise NotFoundError(said, path=place.location, checkpoint=number)
        case SavepointRecord(folder=pointed) if follow:
            is_whole = "://" in pointed or pointed.startswith("/")
            return open_snapshot(pointed if is_whole else f"{place.storage.root}/{pointed}", follow=False)
        case _:
            snapshot = StoredSnapshot(decode_metadata(content, path), place.storage, place.folder)
            check_contents(snapshot)
            return snapshot


def _no_snapshot(place: Place) -> NotFoundError:
    names = place.storage.execute(ListFolder(place.folder))
    found = f"; it holds {len(names)} other files, as a snapshot that was never completed does" if names else ""
    return NotFoundError(f"{place.location} holds no snapshot: there is no {METADATA_NAME} file{found}", path=place.location)
