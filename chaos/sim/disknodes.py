"""What a simulated disk holds: content and names, each as it is now and as it would be after a loss of power."""

from __future__ import annotations

import random
from typing import TypeAlias

from holdfast.statebackends.storage.filesystem import FileStat
from holdfast.statebackends.storage.port import Buffer

_ZEROS_SHARE = 0.25
"""Of torn files: how many keep their length, with zeros for what is missing, as delayed allocation leaves them."""


class File:
    """Content that one or more names lead to."""

    __slots__ = ("_chunks", "modified_ms", "number", "size", "stat", "synced")

    def __init__(self, number: int, modified_ms: int) -> None:
        self.number = number
        self.modified_ms = modified_ms
        self.size = 0
        self.synced = 0
        """Bytes from the start that survive a loss of power."""
        self.stat: FileStat | None = None
        """As long as nothing changes."""
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

    def tear(self, rng: random.Random) -> None:
        """The power went: a part of what was not synced is gone."""
        if self.synced < self.size:
            kept = self.content[: rng.randint(self.synced, self.size)]
            zeros = bytes(self.size - len(kept)) if rng.random() < _ZEROS_SHARE else b""
            self._chunks = [kept + zeros]
            self.size = self.synced = len(self._chunks[0])
            self.stat = None


class Folder:
    """Names. `unsynced`: what the disk itself still says of each name that changed since the last fsync; None: no such name."""

    __slots__ = ("entries", "stat", "unsynced")

    def __init__(self, number: int, modified_ms: int) -> None:
        self.entries: dict[str, Node] = {}
        self.unsynced: dict[str, Node | None] = {}
        self.stat = FileStat(0, (0, number), True, modified_ms)


Node: TypeAlias = File | Folder


def survive(folder: Folder, rng: random.Random, seen: set[int]) -> None:
    """What a loss of power leaves of a folder and all below it."""
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
