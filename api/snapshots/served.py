"""Which snapshots the service shows: those below its state directory and the directories that it was given, no others.

A path comes from whoever has a token. It is brought into its one form first, symbolic links followed, and is judged then."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from holdfast.coordinator.views import SavepointPlaces
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.layout import METADATA_NAME, metadata_path
from holdfast.statebackends.state_processor.contents import absolute_location
from holdfast.statebackends.storage import is_absolute_folder
from holdfast.statebackends.storage.s3 import is_s3, location_of, parse_location

if TYPE_CHECKING:
    from holdfast.api.snapshots.snapshot import Snapshot

PATH_CHARACTERS_MAX = 4_096

DIRECTORIES_NAMED_MAX = 10
"""In the message that refuses a path."""


class SnapshotDirectories:
    """The directories below which snapshots may be looked at."""

    def __init__(self, directories: Iterable[str], *, folders: Iterable[str] = ()) -> None:
        """The first directory is the state directory; relative paths are below it. `folders`: of single snapshots, resolved."""
        self._directories = [_resolved(directory) for directory in directories]
        self._folders = frozenset(folders)

    def with_savepoints(self, places: SavepointPlaces) -> SnapshotDirectories:
        """These, and where jobs have savepoints: below the directories that they name, but for the root, and single folders."""
        named = sorted(place for place in map(_resolved_place, places.directories) if place not in ("", "/"))
        directories = dict.fromkeys([*self._directories, *named])
        return SnapshotDirectories(directories, folders=frozenset(map(_resolved_place, places.folders)) - {""})

    def open(self, path: str) -> Snapshot:
        """Raises InvalidConfigError for a path that leads out, also through a savepoint's pointer, or as `Snapshot` does."""
        from holdfast.api.snapshots.snapshot import (
            Snapshot,  # pyarrow: a third of a second that a coordinator's start need not wait for
        )

        snapshot = Snapshot(self._confined(path))
        self._confined(snapshot.location)
        return snapshot

    def confine_savepoint(self, path: str, places: Callable[[], SavepointPlaces]) -> str:
        """The folder of a savepoint in its one form. `places`: asked where no directory that is shown holds it.

        Raises InvalidConfigError unless it lies where snapshots are shown or jobs have savepoints."""
        try:
            return self._folder(path)
        except InvalidConfigError:
            return self.with_savepoints(places())._folder(path)

    def _folder(self, path: str) -> str:
        """Of a snapshot, or the one that its `_metadata` is in. That has to be confined in its turn: a directory is no snapshot."""
        return self._confined(self._confined(path).removesuffix(f"/{METADATA_NAME}"))

    def _confined(self, path: str) -> str:
        """As `confine`, of the snapshot's folder and of the file in it: that may be a link, too."""
        folder = self.confine(path)
        if not is_s3(folder) and os.path.basename(folder) != METADATA_NAME:
            self.confine(metadata_path(folder))
        return folder

    def confine(self, path: str) -> str:
        """The path in its one form. Raises InvalidConfigError unless it lies below one of the directories."""
        if not path or len(path) > PATH_CHARACTERS_MAX or "\0" in path or path.startswith("~"):
            raise InvalidConfigError("path is no path of a snapshot", setting="path")
        if "://" not in path and not path.startswith(("/", "file:")):
            path = f"{self._directories[0]}/{path}"
        resolved = _resolved(path)
        inside = any(resolved.startswith(f"{directory.rstrip('/')}/") for directory in self._directories)
        if not inside and resolved.removesuffix(f"/{METADATA_NAME}") not in self._folders:
            named = ", ".join(self._directories[:DIRECTORIES_NAMED_MAX])
            more = ", ..." if len(self._directories) > DIRECTORIES_NAMED_MAX else ""
            raise InvalidConfigError(
                f"{path!r} lies in none of the directories whose snapshots are shown: {named}{more} (HOLDFAST_SNAPSHOT_DIRS)",
                path=path,
            )
        return resolved


def _resolved_place(location: str) -> str:
    """As `_resolved`, of what a job names; empty for what is no absolute place, where no savepoint is."""
    path = location.partition("://")[2] or location
    if not is_absolute_folder(location) or any(name in (".", "..") for name in path.split("/")):
        return ""
    try:
        return _resolved(location)
    except InvalidConfigError:
        return ""


def _resolved(location: str) -> str:
    """Without '..' and symbolic links; of an URL, without anything that is not literal. Raises InvalidConfigError."""
    if is_s3(location):
        return location_of(*parse_location(location))
    text = absolute_location(location)
    if "://" in text:
        raise InvalidConfigError(f"{location!r} is neither a path nor an s3:// URL", path=location)
    return os.path.realpath(text)
