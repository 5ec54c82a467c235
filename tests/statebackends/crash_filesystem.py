"""A file system in memory that can lose power: only what was synced is sure to survive, the rest does or doesn't."""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from statebackends.storage.filesystem import FileStat
from statebackends.storage.operations import Buffer


class PowerCut(BaseException):
    """The machine is off; no later call does anything."""


@dataclass(eq=False)
class File:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    number: int = 0


@dataclass(eq=False)
class Folder:
    entries: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)
    number: int = 0


class CrashFileSystem:
    """Implements FileSystem. `calls_left`: calls until the power fails; `fail`: errors by call name, raised each time."""

    def __init__(self, calls_left: int | None = None, write_max: int = 5) -> None:
        self.calls_left = calls_left
        self.fail: dict[str, int] = {}
        self.calls: list[str] = []
        self._write_max = write_max
        self._numbers = itertools.count(1)
        self._root = Folder()
        self._open: dict[int, File] = {}

    def power_loss(self, seed: int) -> None:
        """Switch off and on again: what was not synced survives in part, by the seed."""
        self._root = _survive(self._root, random.Random(seed))
        self._open.clear()
        self.calls_left = None

    def _call(self, name: str) -> None:
        if self.calls_left is not None:
            if self.calls_left <= 0:
                raise PowerCut
            self.calls_left -= 1
        self.calls.append(name)
        if name in self.fail:
            raise OSError(self.fail[name], os.strerror(self.fail[name]))

    def _find(self, path: str) -> File | Folder:
        node: File | Folder = self._root
        for part in path.strip("/").split("/"):
            if not part:
                continue
            if isinstance(node, File):
                raise _error(errno.ENOTDIR, path)
            if part not in node.entries:
                raise _error(errno.ENOENT, path)
            node = node.entries[part]
        return node

    def _parent(self, path: str) -> tuple[Folder, str]:
        folder, _, name = path.rstrip("/").rpartition("/")
        node = self._find(folder)
        if isinstance(node, File):
            raise _error(errno.ENOTDIR, path)
        return node, name

    def _add(self, path: str, node: File | Folder) -> None:
        parent, name = self._parent(path)
        if name in parent.entries:
            raise _error(errno.EEXIST, path)
        parent.entries[name] = node

    def create(self, path: str) -> int:
        self._call("create")
        file = File(number=next(self._numbers))
        self._add(path, file)
        return self._descriptor(file)

    def _descriptor(self, file: File) -> int:
        descriptor = next(self._numbers)
        self._open[descriptor] = file
        return descriptor

    def open(self, path: str) -> int:
        self._call("open")
        node = self._find(path)
        if isinstance(node, Folder):
            raise _error(errno.EISDIR, path)
        return self._descriptor(node)

    def write(self, descriptor: int, data: Buffer) -> int:
        self._call("write")
        part = bytes(data)[: self._write_max]
        self._open[descriptor].data += part
        return len(part)

    def read(self, descriptor: int, size: int, offset: int) -> bytes:
        self._call("read")
        return bytes(self._open[descriptor].data[offset : offset + size])

    def fsync(self, descriptor: int) -> None:
        self._call("fsync")
        self._open[descriptor].synced = bytes(self._open[descriptor].data)

    def close(self, descriptor: int) -> None:
        if descriptor in self._open:
            del self._open[descriptor]

    def fsync_folder(self, path: str) -> None:
        self._call("fsync_folder")
        node = self._find(path)
        if isinstance(node, File):
            raise _error(errno.ENOTDIR, path)
        node.synced = dict(node.entries)

    def link(self, source: str, target: str) -> None:
        self._call("link")
        self._add(target, self._find(source))

    def unlink(self, path: str) -> None:
        self._call("unlink")
        parent, name = self._parent(path)
        if isinstance(self._find(path), Folder):
            raise _error(errno.EISDIR, path)
        del parent.entries[name]

    def mkdir(self, path: str) -> None:
        self._call("mkdir")
        self._add(path, Folder(number=next(self._numbers)))

    def rmdir(self, path: str) -> None:
        self._call("rmdir")
        parent, name = self._parent(path)
        node = self._find(path)
        if isinstance(node, File):
            raise _error(errno.ENOTDIR, path)
        if node.entries:
            raise _error(errno.ENOTEMPTY, path)
        del parent.entries[name]

    def stat(self, path: str) -> FileStat:
        self._call("stat")
        node = self._find(path)
        size = len(node.data) if isinstance(node, File) else 0
        return FileStat(size, (0, node.number), isinstance(node, Folder), 0)

    def list_folder(self, path: str) -> Sequence[tuple[str, bool]]:
        self._call("list_folder")
        node = self._find(path)
        if isinstance(node, File):
            raise _error(errno.ENOTDIR, path)
        return [(name, isinstance(entry, Folder)) for name, entry in node.entries.items()]


def _error(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)


def _survive(folder: Folder, rng: random.Random) -> Folder:
    survived = Folder(number=folder.number)
    for name in sorted({*folder.entries, *folder.synced}):
        now, synced = folder.entries.get(name), folder.synced.get(name)
        node = now if now is synced or rng.random() < 0.5 else synced
        if isinstance(node, Folder):
            survived.entries[name] = _survive(node, rng)
        elif node is not None:
            unsynced = bytes(node.data[len(node.synced) :])
            node.data = bytearray(node.synced + unsynced[: rng.randint(0, len(unsynced))])
            node.synced = bytes(node.data)
            survived.entries[name] = node
    survived.synced = dict(survived.entries)
    return survived
