"""Where a snapshot is, as people write it: a path or URL to a storage and a folder in it; its bytes are read elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.snapshot.parts import METADATA_NAME
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.paths import folder_of
from holdfast.statebackends.storage.port import Storage

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
    if "://" in text and not text.startswith("file://"):
        return text
    text = folder_of(text)
    return os.path.normpath(Path(os.path.expanduser(text)).absolute())  # Path.expanduser raises for a user that is not known


def place_of_snapshot(location: Location) -> Place:
    """The folder of a snapshot, or the one that its `_metadata` file is in. Raises InvalidConfigError.

    The storage's root is high enough for what a checkpoint shares with others."""
    text = absolute_location(location)
    text = text if text.endswith("://") else text.rstrip("/") or "/"
    if text.rpartition("/")[2] == METADATA_NAME:
        text = text.rpartition("/")[0] or "/"
    return place_of(text, levels=2 if text.rpartition("/")[2].startswith("chk-") else 1)
