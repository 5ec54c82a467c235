"""An object store in memory with the documented semantics of S3: whole objects, conditional creates, reads and listings that see
every acknowledged write.

It has no folders, renames or second names: a link is a conditional copy. Acknowledged objects are durable. Roots are prefixes of
keys (`/bucket/prefix`, `s3://bucket/prefix`) of one store."""

from __future__ import annotations

import bisect
import os
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, assert_never
from urllib.parse import unquote, urlsplit

from holdfast.chaos.sim.disk import CallHook
from holdfast.statebackends.errors import InvalidConfigError, InvariantError, ObjectMissingError, StorageUnavailableError
from holdfast.statebackends.storage import port as ops
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.directory import TEMPORARY_FOLDER


class _Object(NamedTuple):
    content: bytes
    modified_ms: int
    maker: str = ""
    """Id of the create that made it, where creates carry one."""


class SimObjectStore:
    """All buckets of a world; for one thread."""

    def __init__(self, now_ms: Callable[[], int] = lambda: 0, before_call: CallHook | None = None) -> None:
        self.before_call = before_call
        """Called before every request: put, get, head, list, copy, delete."""
        self.power_losses = 0
        self.calls_of_change = 1
        self._now_ms = now_ms
        self._objects: dict[str, _Object] = {}
        self._keys: list[str] = []
        """Sorted."""

    def storage(self, location: str) -> ops.Storage:
        """A storage on a root. Raises InvalidConfigError for a location without a name."""
        return ObjectStorage(_root_of(location), self)

    def view(self, location: str) -> ObjectView:
        """View of a root, which may be empty."""
        return ObjectView(_root_of(location), self)

    def fork(self, now_ms: Callable[[], int]) -> SimObjectStore:
        """Another store with what is in this one now, for another world; without a wire in front of it."""
        made = SimObjectStore(now_ms)
        made._objects, made._keys = dict(self._objects), list(self._keys)
        return made

    def power_loss(self, rng: random.Random) -> None:
        """No effect: the store is on another machine, and durable before it answers."""

    # ---------------------------------------------------------------------------------------------------------- requests

    def put(self, key: str, content: bytes, maker: str = "") -> bool:
        """Create an object unless it exists (If-None-Match: *); True if this request created it."""
        self._request("put", key, len(content))
        return self._create(key, content, maker)

    def copy(self, source: str, target: str) -> bool:
        """Create an object with the content of another, unless it exists. Raises KeyError when there is no source."""
        self._request("copy", target, 0)
        return self._create(target, self._objects[source].content)

    def _create(self, key: str, content: bytes, maker: str = "") -> bool:
        if key in self._objects:
            return False
        self._objects[key] = _Object(content, self._now_ms(), maker)
        bisect.insort(self._keys, key)
        return True

    def get(self, key: str) -> bytes | None:
        """Content; None if there is no such object."""
        self._request("get", key, 0)
        return self.peek(key)

    def head(self, key: str) -> int | None:
        """Size; None if there is no such object."""
        self._request("head", key, 0)
        found = self._objects.get(key)
        return None if found is None else len(found.content)

    def delete(self, key: str) -> bool:
        """Whether the object was there, which S3 itself would not say."""
        self._request("delete", key, 0)
        if self._objects.pop(key, None) is None:
            return False
        del self._keys[bisect.bisect_left(self._keys, key)]
        return True

    def keys(self, prefix: str) -> list[str]:
        """Keys with this prefix, sorted."""
        self._request("list", prefix, 0)
        return list(self.look(prefix))

    def facts(self, prefix: str) -> list[ops.FileFacts]:
        """Keys with this prefix, with their facts in a listing."""
        found = ((key, self._objects[key]) for key in self.keys(prefix))
        return [ops.FileFacts(key, len(each.content), each.modified_ms) for key, each in found]

    def names(self, prefix: str) -> list[str]:
        """Distinct names after the prefix, up to and with the next `/`, sorted."""
        self._request("list", prefix, 0)
        found, position = [], bisect.bisect_left(self._keys, prefix)
        while position < len(self._keys) and self._keys[position].startswith(prefix):
            name, slash, _ = self._keys[position][len(prefix) :].partition("/")
            found.append(name + slash)
            # "0" follows "/": the first key that is not below this name
            position = bisect.bisect_left(self._keys, f"{prefix}{name}0", position) if slash else position + 1
        return found

    def _request(self, name: str, key: str, size: int) -> None:
        if self.before_call is not None:
            self.before_call(name, key, size)

    # ------------------------------------------------------------------------------------------------- seen from outside

    def peek(self, key: str) -> bytes | None:
        """As get, without a request."""
        found = self._objects.get(key)
        return None if found is None else found.content

    def maker(self, key: str) -> str:
        """Id of the create that made the object; empty if it had none."""
        found = self._objects.get(key)
        return "" if found is None else found.maker

    def look(self, prefix: str) -> Iterator[str]:
        """As keys, without a request."""
        position = bisect.bisect_left(self._keys, prefix)
        while position < len(self._keys) and self._keys[position].startswith(prefix):
            yield self._keys[position]
            position += 1


class ObjectStorage:
    """Implements `operations.Storage` on one root."""

    def __init__(self, root: str, store: SimObjectStore) -> None:
        self._root = root
        self._store = store
        self._prefix = f"{root.rstrip('/')}/"

    @property
    def root(self) -> str:
        return self._root

    def at(self, location: str) -> ops.Storage:
        return self._store.storage(location)

    def execute(self, operation: ops.Operation) -> Any:
        try:
            return self._perform(operation)
        except OSError as error:
            path = ops.path_of(operation)
            reason = error.strerror or str(error)
            message = f"{type(operation).__name__} {path} in {self._root}: {reason}"
            raise StorageUnavailableError(message, path=path, errno=error.errno) from error

    def _perform(self, operation: ops.Operation) -> Any:
        match operation:
            case ops.PutIfAbsent():
                return self._store.put(self._key(operation.path), bytes(operation.data))
            case ops.SyncFile():  # an object that is there is durable
                return self._store.head(self._key(operation.path)) is not None
            case ops.WriteFile():
                return self._write(operation.path, b"".join(operation.chunks))
            case ops.UploadFile():
                return self._upload(operation)
            case ops.DownloadFile():
                return self._download(operation)
            case ops.ReadFile():
                end = None if operation.length is None else operation.offset + operation.length
                return self._get(operation.path)[operation.offset : end]
            case ops.StatFile():
                return self._store.head(self._key(operation.path))
            case ops.ListFiles():
                return [key[len(self._prefix) :] for key in self._store.keys(self._folder(operation.prefix))]
            case ops.DescribeFiles():
                return [
                    fact._replace(path=fact.path[len(self._prefix) :]) for fact in self._store.facts(self._folder(operation.prefix))
                ]
            case ops.ListFolder():
                return self._store.names(self._folder(operation.prefix))
            case ops.LinkFile():
                return self._link(operation.source, operation.target)
            case ops.DeleteFile():
                return self._store.delete(self._key(operation.path))
            case ops.DeleteFolder():
                self._key(operation.prefix.rstrip("/"))  # never the whole root
                return sum([self._store.delete(key) for key in self._store.keys(self._folder(operation.prefix))])
            case _:
                assert_never(operation)

    def _key(self, path: str) -> str:
        """Key of a path. Raises InvalidConfigError for a path that a directory would refuse: what works here has to work there."""
        parts = path.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts) or parts[0] == TEMPORARY_FOLDER:
            raise InvalidConfigError(f"{path!r} is not a path below the storage root", path=path)
        return self._prefix + path

    def _folder(self, prefix: str) -> str:
        prefix = prefix.rstrip("/")
        return f"{self._key(prefix)}/" if prefix else self._prefix

    def _write(self, path: str, content: bytes) -> int:
        key = self._key(path)
        if not self._store.put(key, content) and self._store.get(key) != content:
            raise InvariantError(f"{key} exists with other content: its name was used twice", path=key)
        return len(content)

    def _get(self, path: str) -> bytes:
        key = self._key(path)
        content = self._store.get(key)
        if content is None:
            raise ObjectMissingError(f"{key} does not exist", path=key)
        return content

    def _link(self, source: str, target: str) -> bool:
        origin, key = self._key(source), self._key(target)
        existing = self._store.get(key)
        if existing is None:
            try:
                if self._store.copy(origin, key):
                    return True
            except KeyError as error:
                raise ObjectMissingError(f"{origin} does not exist", path=origin) from error
            existing = self._store.get(key)
        content = self._store.get(origin)
        if content is not None and content != existing:
            raise InvariantError(f"{key} exists with other content than {origin}", path=key)
        return False

    def _upload(self, operation: ops.UploadFile) -> tuple[int, str]:
        self._key(operation.path)
        content = read_local(operation.local_path)
        return self._write(operation.path, content), checksum_of(content)

    def _download(self, operation: ops.DownloadFile) -> tuple[int, str]:
        content = self._get(operation.path)
        if os.path.lexists(operation.local_path):
            os.unlink(operation.local_path)  # it may share its content with a file of an open database
        with open(operation.local_path, "xb") as file:
            file.write(content)
        return len(content), checksum_of(content)


class ObjectView:
    """Implements `observations.StoreView`."""

    def __init__(self, root: str, store: SimObjectStore) -> None:
        self.root = root
        self._store = store
        self._prefix = f"{root.rstrip('/')}/"

    def peek(self, path: str) -> bytes | None:
        return self._store.peek(self._prefix + path)

    def size(self, path: str) -> int | None:
        content = self.peek(path)
        return None if content is None else len(content)

    def paths(self, prefix: str = "") -> list[str]:
        prefix = prefix.rstrip("/")
        below = f"{self._prefix}{prefix}/" if prefix else self._prefix
        hidden = f"{self._prefix}{TEMPORARY_FOLDER}/"
        return [key[len(self._prefix) :] for key in self._store.look(below) if not key.startswith(hidden)]


def read_local(path: str) -> bytes:
    """Content of a real file. Raises ObjectMissingError."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ObjectMissingError(f"{path} does not exist", path=path) from error


def _root_of(location: str) -> str:
    parts = urlsplit(location)
    if not location or "\0" in location:
        raise InvalidConfigError("the storage location is empty", url=location)
    root = unquote(parts.path) if parts.scheme == "file" else location
    return root.rstrip("/") or "/"
