"""The parts of one operator's snapshot on their way to storage: inline, or files that are written several at one time.

A part is named and gets its handle later, when what was collected has been stored. Nothing is ever written under a name twice,
and what a snapshot that fails has written is left to the coordinator."""

from __future__ import annotations

import os
from dataclasses import dataclass

from statebackends.backend import SnapshotTarget
from statebackends.errors import InvariantError
from statebackends.handles import FileHandle, InlineHandle, StateHandle
from statebackends.sharedpaths import shared_path
from statebackends.snapshot import file_name, part_path
from statebackends.storage.checksums import checksum_of
from statebackends.storage.operations import Buffer, Flow, InParallel, UploadFile, WriteFile

HELD_BYTES_MAX = 16 << 20
"""Encoded parts wait in memory for each other up to this sum, and for the one that exceeds it."""


@dataclass(eq=False, slots=True)
class WrittenPart:
    """One part that was added."""

    _handle: StateHandle | None = None

    @property
    def is_inline(self) -> bool:
        return isinstance(self._handle, InlineHandle)

    @property
    def handle(self) -> StateHandle:
        """Once it is stored."""
        if self._handle is None:
            raise InvariantError("a part of a snapshot was not stored")
        return self._handle


class PartsWriter:
    """Of one operator of one subtask at one barrier. Names are unique among its parts, and are escaped."""

    def __init__(self, target: SnapshotTarget) -> None:
        self._target = target
        self._waiting: list[tuple[WrittenPart, Flow[FileHandle], int]] = []
        self._held_bytes = 0

    def add(self, data: Buffer, name: str, *, is_shared: bool = False, inline_threshold: int | None = None) -> WrittenPart:
        """A part of bytes: inline below the threshold (the target's unless given), else a file, one that is shared if asked for."""
        length = memoryview(data).nbytes
        if length < (self._target.inline_threshold if inline_threshold is None else inline_threshold):
            return WrittenPart(InlineHandle(bytes(data)))
        self._held_bytes += length
        return self._wait(_write(data, self._path(name, is_shared=is_shared), self._target), length)

    def add_file(self, local_path: str, name: str, *, is_shared: bool = False) -> WrittenPart:
        """As `add`, of a local file that nobody changes until it is stored. Raises OSError."""
        length = os.path.getsize(local_path)
        if length < self._target.inline_threshold:
            with open(local_path, "rb") as file:
                return WrittenPart(InlineHandle(file.read()))
        return self._wait(_upload(local_path, self._path(name, is_shared=is_shared), self._target), length)

    @property
    def is_full(self) -> bool:
        """What waits should be stored before more is encoded."""
        return self._held_bytes > HELD_BYTES_MAX

    def store(self) -> Flow[None]:
        """Make all parts added so far durable; they have handles then."""
        waiting, self._waiting, self._held_bytes = self._waiting, [], 0
        if not waiting:
            return
        handles = yield InParallel([flow for _, flow, _ in waiting], [length for *_, length in waiting])
        for (part, _, _), handle in zip(waiting, handles, strict=True):
            part._handle = handle

    def _wait(self, flow: Flow[FileHandle], length: int) -> WrittenPart:
        part = WrittenPart()
        self._waiting.append((part, flow, length))
        return part

    def _path(self, name: str, *, is_shared: bool) -> str:
        target = self._target
        return shared_path(f"{target.shared_prefix}-{file_name(name)}") if is_shared else f"{target.file_prefix}-{file_name(name)}"


def _write(data: Buffer, path: str, target: SnapshotTarget) -> Flow[FileHandle]:
    yield WriteFile(part_path(target.folder, path), [data])
    return FileHandle(path, memoryview(data).nbytes, checksum_of(data))


def _upload(local_path: str, path: str, target: SnapshotTarget) -> Flow[FileHandle]:
    length, checksum = yield UploadFile(local_path, part_path(target.folder, path))
    return FileHandle(path, length, checksum)
