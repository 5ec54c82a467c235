"""Checksums of snapshot files: `xxh3_128:<32 hex>`, over bytes as they pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import xxhash

from statebackends.storage.operations import Buffer

_PREFIX = "xxh3_128:"


class Checked:
    """Chunks on their way to a file or through a check, with the length and checksum of those that have passed."""

    def __init__(self, chunks: Iterable[Buffer]) -> None:
        self._chunks = chunks
        self._digest = xxhash.xxh3_128()
        self.length = 0
        """Bytes."""

    def __iter__(self) -> Iterator[Buffer]:
        for chunk in self._chunks:
            self._digest.update(chunk)
            self.length += memoryview(chunk).nbytes
            yield chunk

    @property
    def checksum(self) -> str:
        return _PREFIX + self._digest.hexdigest()


def checksum_of(*chunks: Buffer) -> str:
    """Checksum of the concatenation."""
    checked = Checked(chunks)
    for _ in checked:
        pass
    return checked.checksum
