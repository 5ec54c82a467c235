"""Checksums of snapshot files: `xxh3_128:<32 hex>`, computed while bytes are read or written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import xxhash

from holdfast.statebackends.storage.port import Buffer


class Digest:
    """Length and checksum of the bytes added so far."""

    __slots__ = ("_digest", "length")

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self.length = 0
        """Bytes."""

    def add(self, chunk: Buffer) -> None:
        self._digest.update(chunk)
        self.length += memoryview(chunk).nbytes

    @property
    def checksum(self) -> str:
        return f"xxh3_128:{self._digest.hexdigest()}"

    def passing(self, chunks: Iterable[Buffer]) -> Iterator[Buffer]:
        """The chunks, each added as it is taken."""
        for chunk in chunks:
            self.add(chunk)
            yield chunk


def checksum_of(*chunks: Buffer) -> str:
    """Checksum of the chunks, concatenated."""
    digest = Digest()
    for chunk in chunks:
        digest.add(chunk)
    return digest.checksum
