"""A disk in memory with the durability of a real one: content and names, each as it is now and as a loss of power leaves it.

Unsynced data survives the death of a process and may be lost with the power: content without fsync is torn, a name in a folder
without fsync comes or goes. The disk knows nothing of checkpoints and injects no fault: a hook sees every call before it takes
effect, and may fail it or cut it short."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from holdfast.statebackends.storage import port as ops
from holdfast.statebackends.storage.directory import TEMPORARY_FOLDER, LocalStorage, storage_from_url
from holdfast.statebackends.storage.filesystem import FileStat, OsFileSystem
from holdfast.statebackends.storage.port import Buffer

_ZEROS_SHARE = 0.25
"""Share of torn files that keep their length, with zeros for what is missing, as delayed allocation leaves them."""


class File:
    """Content under one or more names."""

    __slots__ = ("_chunks", "modified_ms", "number", "size", "stat", "synced")

    def __init__(self, number: int, modified_ms: int) -> None:
        self.number = number
        self.modified_ms = modified_ms
        self.size = 0
        self.synced = 0
        """Length of the prefix that survives a loss of power, bytes."""
        self.stat: FileStat | None = None
        """Memoised until the file changes."""
        self._chunks: list[bytes] = []

    def append(self, data: Buffer, modified_ms: int) -> None:
        self._chunks.append(bytes(data))
        self.size += len(self._chunks[-1])
        self.modified_ms = modified_ms
        self.stat = None

    @property
    def content(self) -> bytes:
        if len(self._chunks) != 1:
            self._chunks = [b"".join(self._chunks)]
        return self._chunks[0]

    def fork(self) -> File:
        """The same content in another file."""
        made = File(self.number, self.modified_ms)
        made.size, made.synced, made._chunks = self.size, self.synced, list(self._chunks)
        return made

    def tear(self, rng: random.Random) -> None:
        """Lose a part of what was not synced."""
        if self.synced < self.size:
            kept = self.content[: rng.randint(self.synced, self.size)]
            zeros = bytes(self.size - len(kept)) if rng.random() < _ZEROS_SHARE else b""
            self._chunks = [kept + zeros]
            self.size = self.synced = len(self._chunks[0])
            self.stat = None


class Folder:
    """Names. `unsynced`: name -> durable entry, for each name changed since the last fsync; None: no such name."""

    __slots__ = ("entries", "stat", "unsynced")

    def __init__(self, number: int, modified_ms: int) -> None:
        self.entries: dict[str, Node] = {}
        self.unsynced: dict[str, Node | None] = {}
        self.stat = FileStat(0, (0, number), True, modified_ms)

    def fork(self, forked: dict[int, File]) -> Folder:
        """The same names, now durable, of other files. `forked`: those made so far, by number, since a file has several names."""
        made = Folder(0, 0)
        made.stat = self.stat
        for name, node in self.entries.items():
            if isinstance(node, Folder):
                made.entries[name] = node.fork(forked)
                continue
            if node.number not in forked:
                forked[node.number] = node.fork()
            made.entries[name] = forked[node.number]
        return made


Node: TypeAlias = File | Folder


def survive(folder: Folder, rng: random.Random, seen: set[int]) -> None:
    """Apply a loss of power to a folder and all below it."""
    for name in sorted(folder.unsynced):
        durable = folder.unsynced[name]
        if rng.random() < 0.5:
            continue
        if durable is None:
            folder.entries.pop(name, None)
        else:
            folder.entries[name] = durable
    folder.unsynced.clear()
    for name in sorted(folder.entries):
        node = folder.entries[name]
        if isinstance(node, Folder):
            survive(node, rng, seen)
        elif node.number not in seen:
            seen.add(node.number)
            node.tear(rng)


_FIRST_DESCRIPTOR = 1 << 30
"""Lower descriptors are the real system's."""


class CallHook(Protocol):
    """Sees each call before it takes effect."""

    def __call__(self, name: str, path: str, size: int) -> int:
        """`name`: a method of FileSystem, or a request of an object store; with its path and the size of a write.

        Returns how many bytes may be written, 1..size (used by writes alone). An OSError is the call's own failure; any other
        exception is the end of the caller, and must be raised by every later call."""


class SimDisk:
    """Implements `filesystem.FileSystem`; for one thread. Paths are absolute and normal (no `.`, `..`, `//`)."""

    def __init__(self, now_ms: Callable[[], int] = lambda: 0, before_call: CallHook | None = None) -> None:
        self.before_call = before_call
        self.power_losses = 0
        self.calls_of_change = 8
        """Calls that LocalStorage makes for a new file: stat, create, write, fsync, link, fsync of the folder, unlink; more in a
        new folder."""
        self.real: set[str] = set()
        """Paths of real files: the local ends of uploads and downloads under way."""
        self._now_ms = now_ms
        self._os = OsFileSystem()
        self._numbers = 0
        self._nonces = 0
        self._descriptors = _FIRST_DESCRIPTOR
        self._open: dict[int, tuple[File, str]] = {}
        self._root = Folder(0, now_ms())
        self._nodes: dict[str, Node] = {}
        self._index("", self._root)

    def storage(self, location: str) -> LocalStorage:
        """The product's own directory storage on this disk, with names for temporary files that no other storage uses.

        Raises InvalidConfigError as storage_from_url."""
        return _DiskStorage(storage_from_url(location).root, self)

    def new_nonce(self) -> str:
        """A different text on each call."""
        self._nonces += 1
        return f"{self._nonces:08x}"

    def view(self, location: str) -> DiskView:
        """The files below a folder, which need not exist."""
        return DiskView(storage_from_url(location).root, self._nodes)

    def fork(self, now_ms: Callable[[], int]) -> SimDisk:
        """Another disk with what is on this one now, for another world."""
        made = SimDisk(now_ms)
        made._numbers, made._nonces = self._numbers, self._nonces
        made._root = self._root.fork({})
        made._index("", made._root)
        return made

    def power_loss(self, rng: random.Random) -> None:
        """Power off and on: synced data is there, the rest may or may not be. Open files are closed."""
        self.power_losses += 1
        self._open.clear()
        survive(self._root, rng, set())
        self._nodes.clear()  # views keep a reference to it
        self._index("", self._root)

    def _index(self, path: str, node: Node) -> None:
        self._nodes[path or "/"] = node
        if isinstance(node, Folder):
            for name, entry in node.entries.items():
                self._index(f"{path}/{name}", entry)

    # ----------------------------------------------------------------------------------------------------------- content

    def create(self, path: str) -> int:
        if path in self.real:
            return self._os.create(path)
        if self.before_call is not None:
            self.before_call("create", path, 0)
        self._numbers += 1
        file = File(self._numbers, self._now_ms())
        self._add(path, file)
        return self._descriptor(file, path)

    def open(self, path: str) -> int:
        if path in self.real:
            return self._os.open(path)
        if self.before_call is not None:
            self.before_call("open", path, 0)
        node = self._nodes.get(path)
        if not isinstance(node, File):
            raise self._error(errno.EISDIR, path) if node is not None else self._missing(path)
        return self._descriptor(node, path)

    def _descriptor(self, file: File, path: str) -> int:
        self._descriptors += 1
        self._open[self._descriptors] = (file, path)
        return self._descriptors

    def write(self, descriptor: int, data: Buffer) -> int:
        if descriptor < _FIRST_DESCRIPTOR:
            return self._os.write(descriptor, data)
        file, path = self._opened(descriptor)
        if self.before_call is not None:
            size = memoryview(data).nbytes
            data = memoryview(data).cast("B")[: self.before_call("write", path, size)]
        before = file.size
        file.append(data, self._now_ms())
        return file.size - before

    def read(self, descriptor: int, size: int, offset: int) -> bytes:
        if descriptor < _FIRST_DESCRIPTOR:
            return self._os.read(descriptor, size, offset)
        file, path = self._opened(descriptor)
        if self.before_call is not None:
            self.before_call("read", path, 0)
        return file.content[offset : offset + size]

    def read_into(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        content = self.read(descriptor, len(buffer), offset)
        buffer[: len(content)] = content
        return len(content)

    def copy(self, source: int, target: int, size: int, offset: int) -> int:
        content = self.read(source, size, offset)
        return self.write(target, content) if content else 0

    def fsync(self, descriptor: int) -> None:
        if descriptor < _FIRST_DESCRIPTOR:
            return self._os.fsync(descriptor)
        file, path = self._opened(descriptor)
        if self.before_call is not None:
            self.before_call("fsync", path, 0)
        file.synced = file.size

    def close(self, descriptor: int) -> None:
        if descriptor < _FIRST_DESCRIPTOR:
            self._os.close(descriptor)
        else:
            self._open.pop(descriptor, None)  # descriptors do not survive a loss of power

    def _opened(self, descriptor: int) -> tuple[File, str]:
        found = self._open.get(descriptor)
        if found is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return found

    # ------------------------------------------------------------------------------------------------------------- names

    def link(self, source: str, target: str) -> None:
        if self.before_call is not None:
            self.before_call("link", target, 0)
        node = self._nodes.get(source)
        if node is None:
            raise self._missing(source)
        if isinstance(node, Folder):
            parent, name = self._parent(target)
            raise self._error(errno.EEXIST if name in parent.entries else errno.EPERM, source)
        self._add(target, node)

    def _add(self, path: str, node: Node) -> None:
        parent, name = self._parent(path)
        if name in parent.entries:
            raise self._error(errno.EEXIST, path)
        parent.unsynced.setdefault(name, None)
        parent.entries[name] = self._nodes[path] = node

    def _parent(self, path: str) -> tuple[Folder, str]:
        folder, _, name = path.rpartition("/")
        parent = self._nodes.get(folder or "/")
        if not isinstance(parent, Folder):
            raise self._missing(path)
        return parent, name

    def unlink(self, path: str) -> None:
        if path in self.real:
            return self._os.unlink(path)
        if self.before_call is not None:
            self.before_call("unlink", path, 0)
        if not isinstance(self._nodes.get(path), File):
            raise self._error(errno.EISDIR, path) if path in self._nodes else self._missing(path)
        self._remove(path)

    def _remove(self, path: str) -> None:
        parent, name = self._parent(path)
        parent.unsynced.setdefault(name, parent.entries[name])
        del parent.entries[name], self._nodes[path]

    def mkdir(self, path: str) -> None:
        if self.before_call is not None:
            self.before_call("mkdir", path, 0)
        self._numbers += 1
        self._add(path, Folder(self._numbers, self._now_ms()))

    def rmdir(self, path: str) -> None:
        if self.before_call is not None:
            self.before_call("rmdir", path, 0)
        if self._folder(path).entries:
            raise self._error(errno.ENOTEMPTY, path)
        self._remove(path)

    def fsync_folder(self, path: str) -> None:
        if self.before_call is not None:
            self.before_call("fsync_folder", path, 0)
        self._folder(path).unsynced.clear()

    def stat(self, path: str) -> FileStat:
        if self.before_call is not None:
            self.before_call("stat", path, 0)
        node = self._nodes.get(path)
        if node is None:
            raise self._missing(path)
        if node.stat is None:
            node.stat = FileStat(node.size, (0, node.number), False, node.modified_ms)
        return node.stat

    def is_link(self, path: str) -> bool:
        return False  # no caller makes any

    def list_folder(self, path: str) -> Sequence[tuple[str, bool]]:
        if self.before_call is not None:
            self.before_call("list_folder", path, 0)
        return [(name, isinstance(node, Folder)) for name, node in self._folder(path).entries.items()]

    def _folder(self, path: str) -> Folder:
        node = self._nodes.get(path)
        if not isinstance(node, Folder):
            raise self._error(errno.ENOTDIR, path) if node is not None else self._missing(path)
        return node

    def _missing(self, path: str) -> OSError:
        """Why a path leads to nothing: no such name, or a file in the place of a folder."""
        above = path.rpartition("/")[0]
        while above and (node := self._nodes.get(above)) is None:
            above = above.rpartition("/")[0]
        return self._error(errno.ENOTDIR if above and isinstance(node, File) else errno.ENOENT, path)

    @staticmethod
    def _error(code: int, path: str) -> OSError:
        return OSError(code, os.strerror(code), path)


_LOCAL = (ops.UploadFile, ops.DownloadFile)


class _DiskStorage(LocalStorage):
    """LocalStorage on a SimDisk; local ends of uploads and downloads are real files, as RocksDB's are."""

    def __init__(self, root: str, disk: SimDisk) -> None:
        super().__init__(root, file_system=disk, new_nonce=disk.new_nonce)
        self._disk = disk

    def at(self, location: str) -> LocalStorage:
        return self._disk.storage(location)

    def execute(self, operation: ops.Operation) -> Any:
        if not isinstance(operation, _LOCAL):
            return super().execute(operation)
        self._disk.real.add(operation.local_path)
        try:
            return super().execute(operation)
        finally:
            self._disk.real.discard(operation.local_path)


class DiskView:
    """Implements `observations.StoreView`: what a process would read now."""

    def __init__(self, root: str, nodes: dict[str, Node]) -> None:
        self.root = root
        self._prefix = "" if root == "/" else root
        self._nodes = nodes

    def peek(self, path: str) -> bytes | None:
        node = self._nodes.get(f"{self._prefix}/{path}")
        return node.content if isinstance(node, File) else None

    def size(self, path: str) -> int | None:
        node = self._nodes.get(f"{self._prefix}/{path}")
        return node.size if isinstance(node, File) else None

    def paths(self, prefix: str = "") -> list[str]:
        prefix = prefix.rstrip("/")
        node = self._nodes.get(f"{self._prefix}/{prefix}" if prefix else self.root)
        found: list[str] = []
        if isinstance(node, Folder):
            self._walk(node, f"{prefix}/" if prefix else "", found)
        return sorted(found)

    def _walk(self, folder: Folder, prefix: str, found: list[str]) -> None:
        for name, node in folder.entries.items():
            if isinstance(node, File):
                found.append(prefix + name)
            elif prefix or name != TEMPORARY_FOLDER:
                self._walk(node, f"{prefix}{name}/", found)
