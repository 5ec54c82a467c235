"""A storage that reads the world's stores and keeps its own writes, so that a checker can try out a recovery or a repair at any
moment without changing the run."""

from __future__ import annotations

from typing import Any

from holdfast.chaos.checkers.observations import WorldView
from holdfast.statebackends.errors import ObjectMissingError
from holdfast.statebackends.storage import is_absolute_folder
from holdfast.statebackends.storage.port import (
    DeleteFile,
    DeleteFolder,
    DescribeFiles,
    FileFacts,
    ListFiles,
    ListFolder,
    Operation,
    PutIfAbsent,
    ReadFile,
    StatFile,
    SyncFile,
)


class OverlayStorage:
    """The state directory, and other roots by absolute path. Supports the operations of a coordinator.

    Raises NotImplementedError for all others, which ends the run: a checker would report any other error as the product's."""

    def __init__(self, world: WorldView) -> None:
        self._world = world
        self._state = world.state
        self._shown = f"{world.state.root.rstrip('/')}/"
        self._written: dict[str, bytes] = {}
        self._deleted: set[str] = set()

    @property
    def root(self) -> str:
        return self._state.root

    def at(self, location: str) -> OverlayStorage:
        raise NotImplementedError(f"{location} from a tried recovery")

    def execute(self, operation: Operation) -> Any:
        match operation:
            case PutIfAbsent(path=path, data=data):
                if self._content(path) is not None:
                    return False
                self._written[self._location(path)] = bytes(data)
                self._deleted.discard(self._location(path))
                return True
            case SyncFile(path=path):
                return self._content(path) is not None
            case ReadFile(path=path, offset=offset, length=length):
                content = self._content(path)
                if content is None:
                    raise ObjectMissingError(f"{path} is missing", path=path)
                return content[offset:] if length is None else content[offset : offset + length]
            case StatFile(path=path):
                content = self._content(path)
                return None if content is None else len(content)
            case ListFiles(prefix=prefix):
                return self.paths(prefix)
            case DescribeFiles(prefix=prefix):
                return [FileFacts(path, len(self._content(path) or b""), 0) for path in self.paths(prefix)]
            case ListFolder(prefix=prefix):
                start = f"{prefix.rstrip('/')}/" if prefix else ""
                rests = (path[len(start) :] for path in self.paths(prefix))
                return sorted({rest.partition("/")[0] + "/" * ("/" in rest) for rest in rests})
            case DeleteFile(path=path):
                return self._delete(path)
            case DeleteFolder(prefix=prefix):
                return sum([self._delete(path) for path in self.paths(prefix)])
        raise NotImplementedError(f"{type(operation).__name__} in a tried recovery")

    def paths(self, prefix: str) -> list[str]:
        """Every file below a folder, with the folder's own spelling in front."""
        absolute = is_absolute_folder(prefix)
        if absolute:
            found = [f"{prefix.rstrip('/')}/{path}" for path in self._world.store(prefix).paths()]
        else:
            found = self._state.paths(prefix)
        if self._written:
            below = f"{self._location(prefix)}/"
            shown = "" if absolute else self._shown
            found = [*{*found, *(location.removeprefix(shown) for location in self._written if location.startswith(below))}]
        if self._deleted:
            found = [path for path in found if self._location(path) not in self._deleted]
        return sorted(found)

    def _location(self, path: str) -> str:
        return path.rstrip("/") if is_absolute_folder(path) else f"{self._shown}{path}".rstrip("/")

    def _content(self, path: str) -> bytes | None:
        location = self._location(path)
        if location in self._written:
            return self._written[location]
        if location in self._deleted:
            return None
        if not is_absolute_folder(path):
            return self._state.peek(path)
        folder, _, name = path.rpartition("/")
        return self._world.store(folder or "/").peek(name)

    def _delete(self, path: str) -> bool:
        existed = self._content(path) is not None
        location = self._location(path)
        self._written.pop(location, None)
        self._deleted.add(location)
        return existed
