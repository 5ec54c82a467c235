"""System calls of directory storage, as a port: tests stop it between any two calls, and the simulator replaces it.

Paths are absolute. Methods raise OSError as the system does; nothing is retried or interpreted. `write_all` and `copy_file` move
bytes in steps that suit the kernel, and leave the interpreter to a busy task loop. Which files these are, and when they are
durable, is for directory.py."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from mmap import mmap
from typing import Protocol

import msgspec

from holdfast.statebackends.storage.checksums import Digest
from holdfast.statebackends.storage.failures import unavailable
from holdfast.statebackends.storage.permissions import PRIVATE, Permissions
from holdfast.statebackends.storage.port import Buffer

COPY_BYTES = 1 << 20
UPLOAD_BYTES = 4 << 20
"""Bytes of one step of a large upload. Between two steps a busy task loop keeps the interpreter for 5 ms, and each switch costs it
time too, so steps are large and few."""


def write_all(files: FileSystem, descriptor: int, chunks: Iterable[Buffer]) -> None:
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        while rest:  # for one large write the kernel looks for large pages, which takes ten times as long
            rest = rest[files.write(descriptor, rest[:COPY_BYTES]) :]


def copy_file(files: FileSystem, source: int, target: int, digest: Digest) -> None:
    """Append an open file to one that is being written, adding its bytes to `digest`. The source must not change meanwhile."""
    while block := files.read(source, COPY_BYTES, digest.length):
        digest.add(block)
        write_all(files, target, [block])
        if len(block) == COPY_BYTES:
            return _copy_rest(files, source, target, digest)


def _copy_rest(files: FileSystem, source: int, target: int, digest: Digest) -> None:
    """Append the bytes behind the first `digest.length`, in large steps that release the interpreter lock."""
    buffer = memoryview(mmap(-1, UPLOAD_BYTES))  # its pages are allocated when they are filled
    while size := files.read_into(source, buffer, digest.length):
        block, left = buffer[:size], size
        digest.add(block)
        while left and (copied := files.copy(source, target, left, digest.length - left)):
            left -= copied
        write_all(files, target, [block[size - left :]])


@contextlib.contextmanager
def about_local(local_path: str) -> Iterator[None]:
    """Report OSErrors within as those of a local file, not of the storage: it is the local disk that is full, say."""
    try:
        yield
    except OSError as error:
        raise unavailable(error, local_path, path=local_path) from error


_COPYING_SINCE = (5, 3)
"""Linux version from which copy_file_range is used; older ones don't always copy the right bytes."""


class FileStat(msgspec.Struct, frozen=True):
    """Attributes of one file or folder."""

    size: int
    """Bytes."""
    inode: tuple[int, int]
    """(device, inode): equal for two names of one file."""
    is_folder: bool
    modified_ms: int
    """Wall clock of the file system, ms since the epoch."""


class FileSystem(Protocol):
    """A file system, one system call a method. Thread-safe."""

    def create(self, path: str) -> int:
        """Open a new file for writing. Raises FileExistsError."""

    def open(self, path: str) -> int:
        """Open an existing regular file for reading, without waiting (for the writer of a pipe, say)."""

    def write(self, descriptor: int, data: Buffer) -> int:
        """Bytes written; may be fewer than given."""

    def read(self, descriptor: int, size: int, offset: int) -> bytes:
        """Up to `size` bytes at `offset`; empty at the end of the file."""

    def read_into(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        """As `read`, into a buffer. Returns the number of bytes read."""

    def copy(self, source: int, target: int, size: int, offset: int) -> int:
        """Append up to `size` bytes at `offset` of a file to one that is being written; returns the number of bytes copied.

        0 may come before the end: the caller then reads and writes the rest."""

    def fsync(self, descriptor: int) -> None: ...

    def close(self, descriptor: int) -> None: ...

    def fsync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""

    def link(self, source: str, target: str) -> None:
        """Make a second name of a file. Raises FileExistsError."""

    def unlink(self, path: str) -> None: ...

    def mkdir(self, path: str) -> None:
        """Raises FileExistsError."""

    def rmdir(self, path: str) -> None: ...

    def stat(self, path: str) -> FileStat: ...

    def is_link(self, path: str) -> bool:
        """Whether a path is a symbolic link; False for a missing one."""

    def list_folder(self, path: str) -> Sequence[tuple[str, bool]]:
        """(name, is a folder) of each entry, in no particular order."""


@functools.cache
def _copies() -> bool:
    if sys.platform != "linux":
        return False
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return release is not None and (int(release[1]), int(release[2])) >= _COPYING_SINCE


class OsFileSystem:
    """Implements `FileSystem` on the operating system."""

    permissions = PRIVATE

    def __init__(self, permissions: Permissions = PRIVATE) -> None:
        self.permissions = permissions

    def create(self, path: str) -> int:
        return self.permissions.create_file(path)

    def open(self, path: str) -> int:
        # Opening a pipe would wait for its writer, and a device may have no end: only regular files are read.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            if not stat.S_ISREG(mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def write(self, descriptor: int, data: Buffer) -> int:
        return os.write(descriptor, data)

    def read(self, descriptor: int, size: int, offset: int) -> bytes:
        return os.pread(descriptor, size, offset)

    def read_into(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [buffer], offset)

    def copy(self, source: int, target: int, size: int, offset: int) -> int:
        if not _copies():
            return 0
        try:
            return os.copy_file_range(source, target, size, offset)
        except OSError:  # file systems differ in their errors; the write that follows reports a full or broken disk
            return 0

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def fsync_folder(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems whose folders need no fsync
                raise
        finally:
            os.close(descriptor)

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        self.permissions.make_folder(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def stat(self, path: str) -> FileStat:
        found = os.stat(path)
        inode = (found.st_dev, found.st_ino)
        return FileStat(found.st_size, inode, stat.S_ISDIR(found.st_mode), found.st_mtime_ns // 1_000_000)

    def is_link(self, path: str) -> bool:
        return os.path.islink(path)

    def list_folder(self, path: str) -> Sequence[tuple[str, bool]]:
        with os.scandir(path) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
