"""Bytes from one open file to another, in pieces that suit the kernel and leave the interpreter to a busy task loop.

Which files these are, and when they are durable, is the caller's business."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from mmap import mmap

from holdfast.statebackends.storage.checksums import Digest
from holdfast.statebackends.storage.failures import unavailable
from holdfast.statebackends.storage.filesystem import FileSystem
from holdfast.statebackends.storage.port import Buffer

COPY_BYTES = 1 << 20
UPLOAD_BYTES = 4 << 20
"""Read at once of a large file that is uploaded. Between two steps a busy task loop keeps the interpreter for 5 ms, and loses time
of its own when it gives it away: so the steps are few."""


def write_all(files: FileSystem, descriptor: int, chunks: Iterable[Buffer]) -> None:
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        while rest:  # in pieces: for a large one the kernel looks for large pages, which takes it ten times as long
            rest = rest[files.write(descriptor, rest[:COPY_BYTES]) :]


def copy_file(files: FileSystem, source: int, target: int, digest: Digest) -> None:
    """Append a file to one that is being written. Nobody changes a file that is uploaded: what is copied is what was read."""
    while piece := files.read(source, COPY_BYTES, digest.length):
        digest.add(piece)
        write_all(files, target, [piece])
        if len(piece) == COPY_BYTES:
            return _copy_rest(files, source, target, digest)


def _copy_rest(files: FileSystem, source: int, target: int, digest: Digest) -> None:
    """What follows the first `digest.length` bytes, in few steps, each of which leaves the interpreter to others."""
    buffer = memoryview(mmap(-1, UPLOAD_BYTES))  # a page of it is made when it is filled
    while size := files.read_into(source, buffer, digest.length):
        piece, left = buffer[:size], size
        digest.add(piece)
        while left and (copied := files.copy(source, target, left, digest.length - left)):
            left -= copied
        write_all(files, target, [piece[size - left :]])


@contextlib.contextmanager
def about_local(local_path: str) -> Iterator[None]:
    """An error of a local file is not the storage's: it is its disk that is full."""
    try:
        yield
    except OSError as error:
        raise unavailable(error, local_path, path=local_path) from error
