"""Durable folders below a storage root: made when needed, and synced into their parents before anything relies on them."""

from __future__ import annotations

import contextlib
import posixpath
import threading
from collections.abc import Callable
from typing import TypeVar

from holdfast.statebackends.storage.filesystem import FileSystem

T = TypeVar("T")


class DurableFolders:
    """Remembers which folders this process has synced; thread-safe."""

    def __init__(self, file_system: FileSystem, root: str) -> None:
        self._fs, self._root = file_system, root
        self._lock = threading.Lock()
        self._known: set[str] = set()

    def within(self, folder: str, action: Callable[[], T]) -> T:
        """Run an action in a durable folder; make the folder again if somebody removed it meanwhile."""
        self.ensure(folder)
        try:
            return action()
        except FileNotFoundError:
            self.forget("")
            self.ensure(folder)
            return action()

    def ensure(self, folder: str) -> None:
        """Make a folder and its ancestors, each synced into its parent.

        Also if it exists: another process may have made it and may not have synced it yet."""
        with self._lock:
            if folder in self._known:
                return
        parent = posixpath.dirname(folder)
        if folder != self._root and folder.startswith(self._root):
            self.ensure(parent)
        try:
            self._fs.mkdir(folder)
        except FileExistsError:
            pass  # a file in its place fails the next step, with its own error
        except FileNotFoundError:
            self.forget("")
            self.ensure(parent)
            with contextlib.suppress(FileExistsError):
                self._fs.mkdir(folder)
        self._sync(parent)
        with self._lock:
            self._known.add(folder)

    def _sync(self, parent: str) -> None:
        try:
            self._fs.fsync_folder(parent)
        except PermissionError:
            if parent.startswith(self._root):
                raise  # above the root, a folder that we may not read is not ours to sync

    def forget(self, folder: str) -> None:
        """A folder was deleted: it and those below must be made again. Empty: all of them."""
        with self._lock:
            self._known = {known for known in self._known if folder and known != folder and not known.startswith(folder + "/")}
