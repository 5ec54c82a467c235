"""The parts of one operator's snapshot on their way to storage: inline, pieces of a file that several share, or files.

Small tables are packed: on an object store each file costs a request and its wait, whatever its size. Files of a database
never are: they come and go one by one, and this host's copies of them are links.

A part is named and gets its handle later, when what was collected has been stored. Nothing is ever written under a name twice,
and what a snapshot that fails has written is left to the coordinator."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.errors import InvariantError
from holdfast.statebackends.handles import FileHandle, InlineHandle, SegmentHandle, StateHandle
from holdfast.statebackends.layout import shared_path
from holdfast.statebackends.snapshot.parts import file_name, part_path
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.port import Buffer, Flow, InParallel, UploadFile, WriteFile

HELD_BYTES_MAX = 16 << 20
"""Encoded parts wait in memory for each other up to this sum, and for the one that exceeds it."""
PACK_BYTES_MAX = 8 << 20
"""Of one file with several parts: one request on S3."""


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


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A part to be stored."""

    part: WrittenPart
    name: str
    is_shared: bool
    packs: bool
    length: int
    data: Buffer | None
    local_path: str = ""


class PartsWriter:
    """Of one operator of one subtask at one barrier. Names are unique among its parts, and are escaped.

    Only one writer of a target may pack."""

    def __init__(self, target: SnapshotTarget) -> None:
        self._target = target
        self._waiting: list[_Waiting] = []
        self._held_bytes = 0
        self._packs = 0

    def add(
        self, data: Buffer, name: str, *, is_shared: bool = False, packs: bool = True, inline_threshold: int | None = None
    ) -> WrittenPart:
        """A part of bytes: inline below the threshold (the target's unless given), else a file, one that is shared if asked for.

        It may be a piece of one unless `packs` is false."""
        length = memoryview(data).nbytes
        if length < (self._target.inline_threshold if inline_threshold is None else inline_threshold):
            return WrittenPart(InlineHandle(bytes(data)))
        self._held_bytes += length
        packs = packs and length < self._target.pack_threshold
        self._waiting.append(_Waiting(WrittenPart(), name, is_shared, packs, length, data))
        return self._waiting[-1].part

    def add_file(self, local_path: str, name: str, *, is_shared: bool = False) -> WrittenPart:
        """As `add`, of a local file that nobody changes until it is stored, and that becomes a file. Raises OSError."""
        length = os.path.getsize(local_path)
        if length < self._target.inline_threshold:
            with open(local_path, "rb") as file:
                return WrittenPart(InlineHandle(file.read()))
        self._waiting.append(_Waiting(WrittenPart(), name, is_shared, False, length, None, local_path))
        return self._waiting[-1].part

    @property
    def is_full(self) -> bool:
        """What waits should be stored before more is encoded."""
        return self._held_bytes > HELD_BYTES_MAX

    def store(self) -> Flow[None]:
        """Make all parts added so far durable; they have handles then."""
        waiting, self._waiting, self._held_bytes = self._waiting, [], 0
        if not waiting:
            return
        files = list(_files(waiting))
        flows = [self._flow(file) for file in files]
        stored = yield InParallel(flows, [sum(each.length for each in file) for file in files])
        for file, handles in zip(files, stored, strict=True):
            for each, handle in zip(file, handles, strict=True):
                each.part._handle = handle

    def _flow(self, file: list[_Waiting]) -> Flow[list[FileHandle]]:
        first = file[0]
        if len(file) == 1:
            path = self._path(first.name, is_shared=first.is_shared)
            return _upload(first.local_path, path, self._target) if first.data is None else _write(first.data, path, self._target)
        self._packs += 1
        path = self._path(f"pack-{self._packs}", is_shared=first.is_shared)
        return _write_pack([each.data for each in file if each.data is not None], path, self._target)

    def _path(self, name: str, *, is_shared: bool) -> str:
        target = self._target
        return shared_path(f"{target.shared_prefix}-{file_name(name)}") if is_shared else f"{target.file_prefix}-{file_name(name)}"


def _files(waiting: Iterable[_Waiting]) -> Iterator[list[_Waiting]]:
    """What goes into one file: those that pack, shared ones and others apart, and each of the rest alone."""
    packs: dict[bool, list[_Waiting]] = {}
    for each in waiting:
        if not each.packs:
            yield [each]
            continue
        pack = packs.setdefault(each.is_shared, [])
        if pack and sum(other.length for other in pack) + each.length > PACK_BYTES_MAX:
            yield pack
            pack = packs[each.is_shared] = []
        pack.append(each)
    yield from packs.values()


def _write(data: Buffer, path: str, target: SnapshotTarget) -> Flow[list[FileHandle]]:
    yield WriteFile(part_path(target.folder, path), [data])
    return [FileHandle(path, memoryview(data).nbytes, checksum_of(data))]


def _upload(local_path: str, path: str, target: SnapshotTarget) -> Flow[list[FileHandle]]:
    length, checksum = yield UploadFile(local_path, part_path(target.folder, path))
    return [FileHandle(path, length, checksum)]


def _write_pack(pieces: list[Buffer], path: str, target: SnapshotTarget) -> Flow[list[FileHandle]]:
    yield WriteFile(part_path(target.folder, path), pieces)
    lengths = [memoryview(piece).nbytes for piece in pieces]
    handles: list[FileHandle] = []
    offset = 0
    for piece, length in zip(pieces, lengths, strict=True):
        handles.append(SegmentHandle(path, length, checksum_of(piece), offset, sum(lengths)))
        offset += length
    return handles
