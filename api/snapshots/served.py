"""Snapshots that the service shows, and may dispose of: those below its state directory and the configured directories, and those
that jobs have elsewhere. No others.

Any caller with a token may send a path. It is resolved first, symbolic links followed, and then compared with the directories."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from holdfast.coordinator.views import SavepointPlaces
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.layout import METADATA_NAME, metadata_path
from holdfast.statebackends.state_processor.contents import absolute_location
from holdfast.statebackends.storage import is_absolute_folder, is_s3
from holdfast.statebackends.storage.s3 import location_of, parse_location

if TYPE_CHECKING:
    from holdfast.api.snapshots.snapshot import Snapshot

PATH_CHARACTERS_MAX = 4_096

DIRECTORIES_NAMED_MAX = 10
"""Directories named by the message that refuses a path, at most."""


class SnapshotDirectories:
    """Directories below which snapshots may be read, and where jobs have savepoints besides."""

    def __init__(
        self, directories: Iterable[str], *, folders: Iterable[str] = (), places: Callable[[], SavepointPlaces] = SavepointPlaces
    ) -> None:
        """The first directory is the state directory; relative paths are below it. `folders`: of single snapshots, resolved.
        `places`: where jobs have savepoints; called if no directory contains a path."""
        self._directories = [_resolved(directory) for directory in directories]
        self._folders = frozenset(folders)
        self._places = places

    def with_savepoints(self) -> SnapshotDirectories:
        """These directories, and where jobs have savepoints: the directories that they name, except the root, and single
        folders."""
        places = self._places()
        named = sorted(place for place in map(_resolved_place, places.directories) if place not in ("", "/"))
        directories = dict.fromkeys([*self._directories, *named])
        return SnapshotDirectories(directories, folders=frozenset(map(_resolved_place, places.folders)) - {""})

    def open(self, path: str) -> Snapshot:
        """Open a snapshot. Raises InvalidConfigError for a path that leads outside, also through a savepoint's pointer, or as
        `confine_savepoint` and `Snapshot`."""
        from holdfast.api.snapshots.snapshot import (
            Snapshot,  # imports pyarrow: a third of a second that a coordinator's start saves
        )

        snapshot = Snapshot(self.confine_savepoint(path))
        self.confine_savepoint(snapshot.location)  # that of a savepoint's pointer is another one
        return snapshot

    def confine_savepoint(self, path: str) -> str:
        """Resolved folder of a snapshot. Raises InvalidConfigError unless it lies where snapshots are shown or jobs have
        savepoints, RecoveringError if that is not known yet."""
        try:
            return self._folder(path)
        except InvalidConfigError:
            return self.with_savepoints()._folder(path)

    def _folder(self, path: str) -> str:
        """Folder of a snapshot, or of its `_metadata`. The result has to be confined again, as a directory itself is no
        snapshot."""
        return self._confined(self._confined(path).removesuffix(f"/{METADATA_NAME}"))

    def _confined(self, path: str) -> str:
        """As `confine`, for the snapshot's folder and the file in it, which may be a link, too."""
        folder = self.confine(path)
        if not is_s3(folder) and os.path.basename(folder) != METADATA_NAME:
            self.confine(metadata_path(folder))
        return folder

    def confine(self, path: str) -> str:
        """Resolve a path. Raises InvalidConfigError unless it lies below one of the directories."""
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
                f"{path!r} lies in none of the directories whose snapshots are shown, and no job has a savepoint there: "
                f"{named}{more} (HOLDFAST_SNAPSHOT_DIRS)",
                path=path,
            )
        return resolved


def _resolved_place(location: str) -> str:
    """As `_resolved`, for a place that a job names; empty for one that is not absolute and has no savepoints."""
    path = location.partition("://")[2] or location
    if not is_absolute_folder(location) or any(name in (".", "..") for name in path.split("/")):
        return ""
    try:
        return _resolved(location)
    except InvalidConfigError:
        return ""


def _resolved(location: str) -> str:
    """Path without '..' and symbolic links; a URL must be literal. Raises InvalidConfigError."""
    if is_s3(location):
        return location_of(*parse_location(location))
    text = absolute_location(location)
    if "://" in text:
        raise InvalidConfigError(f"{location!r} is neither a path nor an s3:// URL", path=location)
    return os.path.realpath(text)
