"""The local ends of uploads and downloads. Raises OSError as the system does."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator

from holdfast.statebackends.errors import ObjectMissingError
from holdfast.statebackends.storage.checksums import Digest
from holdfast.statebackends.storage.port import Buffer


def blocks_of_file(path: str, block_bytes: Callable[[int], int]) -> Iterator[Buffer]:
    """A file in blocks of the length chosen for its size, the last one shorter. Raises ObjectMissingError at the first."""
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed below
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ObjectMissingError(f"{path} does not exist", path=path) from error
    with file:
        length = block_bytes(os.fstat(file.fileno()).st_size)
        while block := _read_block(file.fileno(), length):
            yield block


def _read_block(descriptor: int, length: int) -> bytes:
    """So many bytes, fewer only at the end of the file."""
    block = os.read(descriptor, length)
    if not block or len(block) == length:
        return block
    pieces, missing = [block], length - len(block)
    while missing and (piece := os.read(descriptor, missing)):
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def replace_file(path: str, chunks: Iterable[Buffer]) -> tuple[int, str]:
    """Write a new file in place of an old one; (length, checksum). The old one stays if the first chunk can't be had."""
    digest = Digest()
    passing = digest.passing(chunks)
    first = next(passing, b"")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # it may share its content with a file of a live database
    with open(path, "xb", buffering=0) as file:
        for chunk in itertools.chain([first], passing):
            view = memoryview(chunk).cast("B")
            while view:
                view = view[file.write(view) :]
    return digest.length, digest.checksum
